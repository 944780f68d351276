"""What the quantised records say about claims, in numbers and verdicts."""

import re

from exhibiting import STUDY
from factory import grid, rehashed
from factory_quant import checked, experiment, measured

from decodegap import (
    claims,
    numbers_quant,
    tensions,
    verdicts,
)  # fmt: skip
from decodegap.paths import HERE
from decodegap.schema import Record

MACRO = re.compile(r"^[A-Za-z]+$")


def test_macros_have_the_same_names_with_and_without_records() -> None:
    full, empty = numbers_quant.macros(experiment(), STUDY), numbers_quant.macros([], STUDY)
    assert set(full) == set(empty)
    assert all(MACRO.match(name) for name in full)
    assert {text for name, text in empty.items() if name.startswith("Quant")} == {"n/m"}
    assert "n/m" not in full.values()
    assert (empty["StudyGainGptq"], empty["StudyPromiseMax"]) == ("3.59", "3.10")
    assert (full["QuantFastest"], full["QuantSlowest"], full["QuantPaths"]) == ("int4-tinygemm", "bnb-nf4-dq", "6")
    assert full["QuantShare"] == "1.75"


def judged(found: list[Record]) -> dict[str, str]:
    verdict = verdicts.judge(claims.load(HERE.claims, STUDY), STUDY, found)
    return {each.claim.id: each.word for each in verdict if each.claim.id.startswith("quantised-")}


def test_our_claims_are_judged_by_the_quantised_records_and_flip_with_them() -> None:
    good = experiment("h200", sessions=1)
    ours = ("quantised-promise", "quantised-floor", "quantised-kernels", "quantised-logits")
    assert judged(good) == dict.fromkeys(ours, "reproduced")
    assert judged(grid("h200", sessions=1)) == dict.fromkeys(ours, "not measured here")
    broken = {
        "quantised-promise": measured("gptq-exllamav2", 4.0, 2.0, session=2, host="bb"),
        "quantised-floor": measured("gptq-exllamav2", 9.0, 0.5, session=2, host="bb"),
        "quantised-kernels": measured("bnb-nf4", 9.0, session=2, outcome="void", reasons=["other kernels"]),
        "quantised-logits": checked("awq-marlin"),
    }
    both = [*good, measured("bf16", 18.0, 7.0, session=2, host="bb"), broken["quantised-promise"]]
    assert judged(both)["quantised-promise"] == "not reproduced"
    for name in ours[1:3]:
        assert judged([*good, broken[name]])[name] == "not reproduced", name
    failed = [broken["quantised-logits"] if r.cell.arm == "check" else r for r in good]
    assert judged(failed)["quantised-logits"] == "not reproduced"
    stale = [rehashed(r, attestations=[]) for r in good]
    assert judged(stale)["quantised-kernels"] == "reproduced"


def test_a_baseline_is_no_path_that_comes_near_its_floor() -> None:
    fast = [measured(slug, 6.0, 4.0, session=2, host="bb") for slug in ("bf16", "fp16")]
    found = verdicts.judge(claims.load(HERE.claims, STUDY), STUDY, [*experiment("h200", sessions=1), *fast])
    (said,) = [each for each in found if each.claim.id == "quantised-floor"]
    assert "smallest of 12 series: qwen2.5-7b 2048 int4-tinygemm-graph" in said.detail


def test_the_study_s_floor_for_gptq_is_a_finding() -> None:
    found = {each.id: each.numbers for each in tensions.findings(STUDY)}["quantised-floor"]
    assert found["everything_ms"] > 17.36 > found["streamed_ms"]
    assert found["gain"] > found["promised"]
    assert found["share"] > found["bf16_share"]
