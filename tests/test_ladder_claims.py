"""Whether the ladder's numbers are those of its table, and its claims are judged by its records."""

import pytest
from exhibiting import STUDY, view
from factory_ladder import SHARED, gpu_records, rungs

from decodegap import claims, ladder, numbers_ladder, plan_ladder, verdicts
from decodegap.paths import HERE


def test_numbers_have_the_same_names_with_and_without_records() -> None:
    some, none = numbers_ladder.macros(gpu_records()), numbers_ladder.macros([])
    assert set(some) == set(none)
    assert set(none.values()) == {"n/m"}
    assert some["LadderStepFusedQwenTwoK"] == "3.50"
    assert some["LadderFractionFusedQwenTwoK"] == "0.914"
    assert some["LadderClockFusedQwenTwoK"] == "1830"
    assert some["LadderGainInt"] == "n/m"
    both = numbers_ladder.macros([rungs("rungs", SHARED), rungs("int4", {"fused-int4": 1.4})])
    assert both["LadderGainInt"] == "2.50"
    assert all(name.isalpha() for name in some)


def test_numbers_of_several_hosts_are_the_tables_whatever_their_order() -> None:
    hosts = {"a": (4000.0, 3.4), "b": (4000.0, 3.5), "c": (2000.0, 4.5)}
    found = []
    for host, (read_gb_s, step_ms) in hosts.items():
        for steps in ({"fused": step_ms}, {plan_ladder.INT4: 1.9}):
            one = rungs("rungs" if "fused" in steps else plan_ladder.INT4, steps, read_gb_s=read_gb_s, host=host)
            found.append(one)
    for ordered in (found, found[::-1]):
        said = numbers_ladder.macros(ordered)
        limits = [each.limit_ms or 0.0 for each in ladder.ladders(view(found).frame, view(found).kept)]
        assert said["LadderLimitQwenTwoK"] == f"{min(limits):.2f}–{max(limits):.2f}"  # the lines of the figure
        assert said["LadderStepFusedQwenTwoK"] == "3.40–4.50"  # no mean over hosts, which none of them showed
        assert (said["LadderSessionsFusedQwenTwoK"], said["LadderHostsFusedQwenTwoK"]) == ("3", "3")
        assert said["LadderGainInt"] == "2.00"


@pytest.mark.parametrize(
    ("fused_ms", "words"),
    [(3.7, ("not reproduced", "not reproduced")), (3.5, ("reproduced", "not reproduced")), (3.3, ("reproduced",) * 2)],
)
def test_what_the_fused_step_must_reach_is_judged(fused_ms: float, words: tuple[str, str]) -> None:
    known = claims.load(HERE.claims, STUDY)
    found = {v.claim.id: v for v in verdicts.judge(known, STUDY, [rungs("rungs", SHARED | {"fused": fused_ms})])}
    assert (found["fused-qwen-2048"].word, found["fused-qwen-2048-goal"].word) == words
    assert found["fused-llama-2048"].word == "not measured here"
    assert found["fused-int4"].word == "not measured here"


def test_the_int4_rung_is_held_against_the_fused_one() -> None:
    known = claims.load(HERE.claims, STUDY)
    both = [rungs("rungs", SHARED), rungs("int4", {"fused-int4": 1.4})]
    found = {v.claim.id: v for v in verdicts.judge(known, STUDY, both)}
    assert found["fused-int4"].value == pytest.approx(2.5)
    assert "fused from 1 session on 1 host and fused-int4 from 1 session on 1 host" in found["fused-int4"].detail
    assert (found["fused-int4"].word, found["fused-int4-goal"].word) == ("reproduced", "not reproduced")


def test_a_range_of_steps_has_as_many_digits_at_both_ends() -> None:
    two = [rungs("rungs", SHARED | {"fused": step_ms}, session=k) for k, step_ms in enumerate((3.437, 3.46), 1)]
    found = {v.claim.id: v for v in verdicts.judge(claims.load(HERE.claims, STUDY), STUDY, two)}
    assert found["fused-qwen-2048"].detail.startswith("2 sessions from 3.437 to 3.460 ms; ")
