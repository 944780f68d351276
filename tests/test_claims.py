"""Whether each claim's verdict comes from records alone, flips with them, and rubbish is refused in one line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from factory import grid, record, rehashed, rungs, write

from decodegap import (
    claims,
    cli,
    frame,
    measures,
    predict,
    published,
    records,
    review,
    tables_review,
    tensions,
    verdicts,
)
from decodegap.claims import Claim
from decodegap.errors import BadInputError
from decodegap.paths import HERE, Places
from decodegap.schema import Attestation, Record
from decodegap.verdicts import Verdict

STUDY = published.load(HERE.published)
CLAIMS = claims.load(HERE.claims, STUDY)


@pytest.fixture
def at(tmp_path: Path) -> Places:
    """A checkout with the study's numbers, the claims, and a copy of the shipped records."""
    here = Places(tmp_path / "checkout")
    shutil.copytree(HERE.results, here.results, ignore=shutil.ignore_patterns("local"))
    shutil.copytree(HERE.published.parent, here.published.parent)
    shutil.copyfile(HERE.claims, here.claims)
    return here


def by_id(found: list[Verdict]) -> dict[str, Verdict]:
    return {verdict.claim.id: verdict for verdict in found}


def judge(*found: Record) -> dict[str, Verdict]:
    return by_id(verdicts.judge(CLAIMS, STUDY, found))


def edit(at: Places, file: str, change: Callable[[Record], Record]) -> None:
    """Change one shipped record as if it had been measured so, its own hash and the manifest included."""
    path = at.results / "h200" / file
    records.write(change(records.load(path)), at.results)
    text = records.manifest_text(at.results, "h200")
    records.write_atomically(at.results / "h200" / records.MANIFEST, text.encode())


def test_every_claim_has_a_verdict_on_the_shipped_records() -> None:
    found = review.judged()
    assert {verdict.claim.id for verdict in found} == {claim.id for claim in CLAIMS}
    assert all(verdict.word in verdicts.WORDS and verdict.detail for verdict in found)
    study = {v.claim.id for v in found if v.claim.gpu in ("h100", "a100", "l40s", "l4")}
    assert not study & {v.claim.id for v in found if v.word == "reproduced"}, "no card of the study was measured"


def test_what_is_not_reproduced_is_said_where_it_is_read() -> None:
    """A missed must is shipped as what it is: in the paper, beside the table of claims, at the end of `make verify`."""
    assert r"\input{generated/missed}" in (HERE.paper / "main.tex").read_text(encoding="utf-8")
    found = review.judged()
    missed = sorted(v.claim.id for v in found if v.word == "not reproduced")
    files = {
        "missed.tex": (HERE.generated / "missed.tex").read_text(encoding="utf-8"),
        "claims.md": section((HERE.generated / "claims.md").read_text(encoding="utf-8"), "## Not reproduced"),
    }
    for name, text in files.items():
        assert [claim.id for claim in CLAIMS if f"({claim.id}): " in text] == [
            claim.id for claim in CLAIMS if claim.id in missed
        ], name
    (last,) = [line for line in review.lines(found, []) if line.startswith("Not reproduced: ")]
    assert sorted(last.removeprefix("Not reproduced: ").split(", ")) == (missed or ["none"])


def section(text: str, heading: str) -> str:
    """What stands under a heading of a Markdown file."""
    return text.partition(f"{heading}\n")[2].partition("\n## ")[0]


def test_a_missed_must_is_listed_before_goals_with_what_holds_the_step_back(tmp_path: Path) -> None:
    steps = {"fused-plain": 4.4, "fused": 4.2}
    found = verdicts.judge(CLAIMS, STUDY, [rungs("rungs", steps)])
    missed = review.missed_claims(found)
    assert [v.claim.id for v in missed] == ["fused-qwen-2048", "fused-qwen-2048-goal"]
    assert missed[0].detail.startswith("1 session; of a dissected step of 4.20 ms: floor 3.30, kernel inefficiency ")
    files = {path.name: content.decode() for path, content in review.files(tmp_path, found, [], "0" * 64)}
    for name in ("missed.tex", "claims.md"):
        assert files[name].index("(fused-qwen-2048)") < files[name].index("(fused-qwen-2048-goal)")
    none = {path.name: content.decode() for path, content in review.files(tmp_path, [], [], "0" * 64)}
    assert r"\item None." in none["missed.tex"]


def test_verify_says_the_verdicts_about_the_gpu_of_the_run_first() -> None:
    found = verdicts.judge(CLAIMS, STUDY, [*grid("h200"), *grid("l4")])
    said = list(review.lines(found, [], "l4"))
    heads = [said.index(text) for text in ("About l4:", "About other GPUs, the study's together, and arithmetic:")]
    first = said[heads[0] + 1 : heads[1]]
    about = [v for v in found if v.gpu == "l4"]
    assert heads[0] == 0
    assert len(first) == 2 * len(about) > 0
    assert said[-1].startswith("of these, about l4: ")
    assert sorted(said[1 : heads[1]] + said[heads[1] + 1 : -2]) == sorted(list(review.lines(found, []))[:-1])
    assert "About h100:" not in list(review.lines(found, [], "h100")) or any(v.gpu == "h100" for v in found)


@pytest.mark.parametrize(
    ("low", "mid", "high", "said", "unsaid"),
    [
        (0.30, 0.31, 0.90, "the expected 0.27 is outside that range, and its middle 0.31", ""),
        (0.10, 0.60, 0.90, "its middle 0.6 is not what is allowed, at least ", "outside"),
        (0.271, 0.275, 0.28, "the expected 0.27 is outside that range", "middle"),
    ],
)
def test_a_prediction_that_does_not_agree_says_in_which_way(
    low: float, mid: float, high: float, said: str, unsaid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = next(c for c in CLAIMS if c.id == "h100-qwen25-2048").model_copy(update={"allowed": 0.1})
    guess = predict.Prediction(
        "h100", "qwen2.5-7b", 2048, "floor_fraction", low, mid, high, None, None, host_bound=False
    )
    monkeypatch.setattr(verdicts, "_predictions", lambda *_: {("h100", "qwen2.5-7b", 2048, "floor_fraction"): guess})
    (verdict,) = verdicts.judge([claim], STUDY, [])
    assert verdict.word == "not measured here"
    assert f"which does not agree: {said}" in verdict.detail
    assert not unsaid or unsaid not in verdict.detail.partition("; needs")[0]


def test_checks_against_a_reference_of_another_step_do_not_count() -> None:
    good = rungs("rungs", {"fused": 3.4})
    void = rehashed(good, checks=[c.model_copy(update={"error": 1.3, "eager_error": 1.3}) for c in good.checks])
    known = {v.claim.id: v for v in verdicts.judge(CLAIMS, STUDY, [good])}
    assert (known["ladder-logits"].word, known["ladder-logits"].detail) == ("reproduced", "1 checks")
    with_eager = rungs("rungs", {"eager": 20.0, "fused": 3.4})
    assert {check.arm for check in with_eager.checks} == {"eager", "fused"}
    known = {v.claim.id: v for v in verdicts.judge(CLAIMS, STUDY, [with_eager])}
    assert known["ladder-logits"].detail == "1 checks"  # stock eager against itself is none
    known = {v.claim.id: v for v in verdicts.judge(CLAIMS, STUDY, [void])}
    assert known["ladder-logits"].word == "not reproduced"
    assert "1 of them against a reference that stock eager itself is far from" in known["ladder-logits"].detail
    assert known["fused-qwen-2048"].detail.endswith("the check of its logits proves nothing in 1 of 1 session")


def test_every_published_fraction_ratio_and_quantised_step_is_claimed() -> None:
    claimed = {
        (c.published_gpu or c.gpu, c.model, c.ctx, c.published, c.expected) for c in CLAIMS if c.source == "study"
    }
    for value in STUDY.values:
        wanted = value.quantity in ("floor_fraction", "graph_speedup") or (
            value.quantity == "step_ms" and value.gpu == "l4"
        )
        if wanted:
            assert (value.gpu, value.model, value.ctx, value.quantity, value.value) in claimed
    for gpu in ("h100", "a100", "l40s", "l4"):
        assert {f"{gpu}-min", f"{gpu}-median", f"{gpu}-max"} <= {claim.id for claim in CLAIMS}


def test_a_changed_record_flips_its_verdict_and_no_other(at: Places) -> None:
    before = by_id(review.judged(at))

    def broken(found: Record) -> Record:
        failed = [a.model_copy(update={"kernels_equal": False}) for a in found.attestations]
        return found.model_copy(update={"attestations": failed})

    edit(at, "graphs/qwen2.5-7b_2048_ab_s3.json", broken)
    after = by_id(review.judged(at))
    assert (before["launch-only"].word, after["launch-only"].word) == ("reproduced", "not reproduced")
    assert {k: v.word for k, v in after.items() if k != "launch-only"} == {
        k: v.word for k, v in before.items() if k != "launch-only"
    }


def test_residual_read_bandwidth_and_checks_flip_too(at: Places) -> None:
    def worse(found: Record) -> Record:
        anatomy = [a.model_copy(update={"residual_ms": -0.2 * a.step_ms}) for a in found.anatomy]
        machine = found.machine and found.machine.model_copy(update={"read_gb_s": 4900.0})
        return found.model_copy(update={"anatomy": anatomy, "machine": machine})

    edit(at, "graphs/qwen2.5-7b_2048_ab_s3.json", worse)
    edit(
        at,
        "graphs/qwen2.5-7b_2048_check_s1.json",
        lambda r: r.model_copy(update={"checks": [c.model_copy(update={"passed": False}) for c in r.checks]}),
    )
    after = by_id(review.judged(at))
    assert {name: after[name].word for name in ("residual", "read-bandwidth", "logits")} == dict.fromkeys(
        ("residual", "read-bandwidth", "logits"), "not reproduced"
    )


@pytest.mark.parametrize(("step_ms", "word"), [(17.0, "reproduced"), (9.0, "not reproduced")])
def test_a_claim_about_a_gpu_is_judged_by_that_gpus_records_alone(step_ms: float, word: str) -> None:
    mine = [record(gpu="h100", step_ms=step_ms, session=k) for k in (1, 2, 3)]
    found = judge(*mine, *grid("h200"))
    assert found["h100-qwen25-2048"].word == word
    assert found["h100-qwen25-4096"].word == "not measured here"
    assert found["l4-qwen25-2048"].word == "not measured here"
    assert judge(*grid("h200"))["h100-qwen25-2048"].word == "not measured here"


def test_yours_stand_in_for_the_shipped_of_that_gpu_and_are_called_so() -> None:
    shipped = [record(gpu="l4", step_ms=90.0)]
    found = by_id(verdicts.judge(CLAIMS, STUDY, shipped, [record(gpu="l4", step_ms=63.0)]))
    assert (found["l4-qwen25-2048"].word, found["l4-qwen25-2048"].basis) == ("reproduced", "yours")
    assert judge(*shipped)["l4-qwen25-2048"].word == "not reproduced"


def test_ordering_and_counting_over_the_studys_gpus() -> None:
    fast = {"h100": 17.0, "a100": 24.0, "l40s": 24.6, "l4": 63.0}
    every = [r for gpu, step in fast.items() for r in grid(gpu, sessions=2, factor=step / 21.0)]
    found = judge(*every)
    assert found["falling"].word == "reproduced", found["falling"].detail
    assert (found["cells"].value, found["cells"].word) == (48, "reproduced")
    lost = [
        record(gpu="l4", model=r.cell.model, ctx=r.cell.ctx, session=r.session, outcome="oom", reasons=["3 GB"])
        if r.cell.gpu == "l4" and r.cell.ctx == 16384
        else r
        for r in every
    ]
    found = judge(*lost)
    assert (found["cells"].value, found["cells"].word) == (45, "reproduced")
    assert found["l4-min"].detail == "9 cells, 3 lost to out-of-memory"
    assert found["l4-oom"].word == "not reproduced"
    assert judged_order(h100=(5.0, 5.1)).word == "not reproduced"


def judged_order(**steps_ms: tuple[float, ...]) -> Verdict:
    """The verdict on the fraction's fall, for sessions with these steps on the study's GPUs."""
    fast = {"h100": (17.0, 17.2), "a100": (24.0, 24.2), "l40s": (24.6, 24.8), "l4": (63.0, 63.2)} | steps_ms
    every = [record(gpu=gpu, step_ms=ms, session=k) for gpu, each in fast.items() for k, ms in enumerate(each, 1)]
    return judge(*every)["falling"]


def test_an_order_is_settled_only_where_the_sessions_of_neighbours_do_not_overlap() -> None:
    assert judged_order().word == "reproduced"
    blurred = judged_order(a100=(20.0, 29.0), h100=(15.0, 18.0))  # 0.26 to 0.38 and 0.25 to 0.31
    assert (blurred.word, blurred.value) == ("not measured here", 1.0)
    assert blurred.detail.startswith("the sessions of a100 and h100 overlap, so their order is not settled: l4 0.811 (")
    assert "SESSIONS=10" in blurred.detail
    risen = judged_order(a100=(20.0, 29.0), h100=(13.0, 15.0))
    assert (risen.word, risen.value) == ("not measured here", 0.0)
    single = judged_order(l4=(63.0,))
    assert (single.word, single.value) == ("not measured here", 1.0)
    assert single.detail.startswith("too few sessions of l4 to tell")


def test_a_predicted_order_needs_ranges_that_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_id(review.judged())["falling"]
    assert (found.word, found.basis) == ("not measured here", "predicted")
    assert "the middles fall, and the ranges of " in found.detail
    assert "overlap or rise, so the model settles no order" in found.detail
    narrow = {
        (gpu, "qwen2.5-7b", 2048, "floor_fraction"): predict.Prediction(
            gpu, "qwen2.5-7b", 2048, "floor_fraction", mid - 0.02, mid, mid + 0.02, None, None, host_bound=False
        )
        for gpu, mid in {"h100": 0.27, "a100": 0.32, "l40s": 0.72, "l4": 0.81}.items()
    }
    monkeypatch.setattr(verdicts, "_predictions", lambda *_: narrow)
    assert judge()["falling"].word == "consistent with prediction"


def test_what_is_not_measured_names_the_command_and_the_minutes() -> None:
    found = judge(*grid("h200"), record(experiment="graphs", arm="ab", arms={"eager-pinned": 20.0, "graph": 7.0}))
    for verdict in found.values():
        if verdict.word == "not measured here" and verdict.claim.experiment in ("baseline", "graphs"):
            assert re.search(
                r"`make reproduce GPU=\S+ EXPERIMENTS=\w+.*`.*, about \d+ min \(\d+ sessions", verdict.detail
            )
    one = found["a100-qwen25-16384"].detail
    assert "`make reproduce GPU=a100 EXPERIMENTS=baseline MODELS=qwen2.5-7b CONTEXTS=16384`, about 1 min (3 " in one
    every = found["l4-median"].detail
    assert "`make reproduce GPU=l4 EXPERIMENTS=baseline`, about 4 min (36 sessions of 6 s, as on h200)" in every
    assert "minutes unknown" in judge()["l4-median"].detail


def test_energy_is_judged_by_the_worst_session() -> None:
    def pair(session: int, joules: float) -> Record:
        arms = {"eager-pinned": 20.0, "graph": 7.0}
        made = record(experiment="graphs", arm="ab", arms=arms, session=session)
        series = [
            each.model_copy(update={"energy_j_per_step": joules if each.arm == "graph" else 4.0})
            for each in made.series
        ]
        return made.model_copy(update={"series": series})

    assert judge(pair(1, 2.0), pair(2, 3.0))["graph-energy"].word == "reproduced"
    worse = judge(pair(1, 2.0), pair(2, 4.1))["graph-energy"]
    assert (worse.word, worse.value) == ("not reproduced", pytest.approx(4.1 / 4.0))


def test_void_ab_sessions_count_against_the_attestation() -> None:
    good = Attestation(
        reference="eager-pinned", arm="graph", outputs_equal=True, max_abs_difference=0.0, reference_spread=0.0,
        outputs_changed=True, kernels_equal=True, kernels_differing={},
    )  # fmt: skip
    arms = {"eager-pinned": 20.0, "graph": 7.0}
    ok = record(experiment="graphs", arm="ab", arms=arms, attestations=[good])
    void = record(experiment="graphs", arm="ab", session=2, outcome="void", reasons=["kernels differ"])
    assert judge(ok)["launch-only"].value == 1.0
    assert judge(ok, void)["launch-only"].value == 0.5


def test_stand_ins_and_cpus_prove_nothing() -> None:
    found = judge(*grid("cpu", sessions=1))
    assert {verdict.basis for verdict in found.values()} == {"arithmetic", ""}


RUBBISH = {  # what is in the file (None: a claim with one change), and what is said of it
    "not-toml": ("[[claim]\n", "not TOML"),
    "empty": ("", "something else than [[claim]] tables"),
    "other-key": ("[paper]\nx = 1\n", "something else than [[claim]] tables"),
    "unknown-field": (None, "verdict: Extra inputs are not permitted"),
    "wrong-type": (None, "ctx: Input should be a valid integer"),
    "unknown-gpu": (None, "no GPU of the catalogue is called 'h101'"),
    "unknown-measure": (None, "measure: Input should be 'fraction'"),
    "unknown-model": (None, "no model is called 'gpt'"),
    "no-limits": (None, "give either allowed, or both low and high"),
    "twice": (None, "'one' is there twice"),
    "not-the-studys": (None, "expects 0.28, but the study's floor_fraction there is 0.27"),
    "nan": (None, "expected: Input should be a finite number"),
}
ONE = """[[claim]]
id = "one"
source = "study"
experiment = "baseline"
shown = "table grid"
text = "a fraction"
kind = "ratio"
gpu = "h100"
measure = "fraction"
model = "qwen2.5-7b"
ctx = 2048
arm = "eager"
published = "floor_fraction"
expected = 0.27
allowed = 0.1
why = "hosts differ"
"""
CHANGES = {
    "wrong-type": ("ctx = 2048", 'ctx = "2048"'),
    "unknown-gpu": ('gpu = "h100"', 'gpu = "h101"'),
    "unknown-measure": ('measure = "fraction"', 'measure = "guess"'),
    "unknown-model": ('model = "qwen2.5-7b"', 'model = "gpt"'),
    "no-limits": ("allowed = 0.1\n", ""),
    "twice": ("[[claim]]", ONE + "[[claim]]"),
    "not-the-studys": ("expected = 0.27", "expected = 0.28"),
    "nan": ('published = "floor_fraction"\nexpected = 0.27', "expected = nan"),
    "unknown-field": ("ctx = 2048", 'ctx = 2048\nverdict = "reproduced"'),
}


@pytest.mark.parametrize("case", RUBBISH)
def test_rubbish_in_claims_is_one_line(tmp_path: Path, case: str) -> None:
    text, told = RUBBISH[case]
    text = ONE.replace(*CHANGES[case]) if text is None else text
    path = tmp_path / "claims.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError) as caught:
        claims.load(path, STUDY)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


def test_the_unchanged_claim_loads(tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(ONE, encoding="utf-8")
    assert [claim.id for claim in claims.load(tmp_path / "claims.toml", STUDY)] == ["one"]


@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [("within", (0.9, 1.1, 1.0), (0.89, 1.11)), ("at-least", (0.9, 50.0), (0.89,)), ("at-most", (1.1, -3.0), (1.11,))],
)
def test_limits(bound: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    base = CLAIMS[0].model_dump() | {"expected": 1.0, "allowed": 0.1, "bound": bound}
    claim = Claim.model_validate(base)
    assert all(claim.holds(value) for value in inside)
    assert not any(claim.holds(value) for value in outside)


def test_measures_are_all_there() -> None:
    known = set(measures.OF_ONE_GPU) | set(measures.TOGETHER) | set(measures.ARITHMETIC)
    assert known == set(claims.MEASURES)


def test_tensions_are_recomputed_from_the_published_numbers(tmp_path: Path) -> None:
    found = {each.id: each for each in tensions.findings(STUDY)}
    assert found["h100-headline"].numbers["implied_ms"] == pytest.approx(16.97, abs=0.005)
    assert found["h100-headline"].numbers["fraction_from_quoted"] == pytest.approx(0.309, abs=0.0005)
    assert found["counted-bytes"].numbers["everything_gb"] == pytest.approx(15.35, abs=0.005)
    assert found["counted-bytes"].numbers["blocks_gb"] == pytest.approx(13.16, abs=0.02)
    assert (
        10 < found["what-graphs-leave"].numbers["gap_ms"] < found["what-graphs-leave"].numbers["implied_gap_ms"] < 12.5
    )
    assert found["l4-baseline"].numbers["implied_ms"] == pytest.approx(63.16, abs=0.005)
    data = json.loads(HERE.published.read_text(encoding="utf-8"))
    for value in data["values"]:
        if (value["gpu"], value["ctx"], value["quantity"]) == ("h100", 2048, "floor_fraction"):
            value["value"] = 0.309
    path = tmp_path / "published.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    changed = {each.id: each for each in tensions.findings(published.load(path))}
    assert changed["h100-headline"].numbers["implied_ms"] == pytest.approx(14.83, abs=0.02)


def test_verify_prints_writes_and_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write([record(gpu="l4", step_ms=90.0)], tmp_path)
    for name in ("MODELS", "CONTEXTS", "SESSIONS", "EXPERIMENTS", "WEIGHTS", "REQUIRE", "STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPU", "l4")
    monkeypatch.setenv("RESULTS", str(tmp_path))
    assert cli.main(["verify"]) == 0
    shown = capsys.readouterr().out
    assert "Headline: L4, Qwen2.5-7B, ctx 2048: fraction of the floor: not reproduced" in shown
    missed = 1 + sum(verdict.word == "not reproduced" for verdict in review.judged())  # the L4's, and shipped goals
    assert f"{missed} not reproduced" in shown
    written = {path.name for path in (tmp_path / "l4" / "report").iterdir()}
    assert {"claims.md", "claims.csv", "claims.tex", "claims.json"} <= written
    data = json.loads((tmp_path / "l4" / "report" / "claims.json").read_text(encoding="utf-8"))
    assert data["counts"]["not reproduced"] == missed
    monkeypatch.setenv("STRICT", "1")
    assert cli.main(["verify"]) == 1
    goals = sum(v.word == "not reproduced" and v.claim.id.endswith(review.GOAL) for v in review.judged())
    musts = missed - goals
    said = f"STRICT: {musts} claim{'s' * (musts > 1)} and {goals} goals not reproduced, first "
    assert capsys.readouterr().err.partition(said)[2].startswith("Headline: L4")  # what must hold before the goals


def test_costs_are_sums_of_the_records() -> None:
    table = tables_review.costs([record(session=k) for k in (1, 2)], "0" * 64)
    assert table.data[0]["sessions"] == 2
    assert table.data[0]["minutes"] == pytest.approx(2 * 6.0 / 60)


def test_actions_are_rates_of_the_measured_step() -> None:
    arms = {"eager-pinned": 20.0, "graph": 8.0}
    found = [
        record(experiment="graphs", arm="ab", arms=arms),
        record(step_ms=25.0),
        record(outcome="oom", ctx=4096, reasons=["asked for 9 GB"]),
    ]
    table = tables_review.actions(frame.build(found), STUDY)
    rows = {row["arm"]: row for row in table.data}
    assert set(rows) == {"eager-pinned", "graph", "eager"}
    assert rows["graph"]["tokens_per_s"] == pytest.approx(125.0)
    assert rows["graph"]["actions_8_per_s"] == pytest.approx(125.0 / 8)
    assert rows["eager"]["actions_256_per_s"] == pytest.approx(40.0 / 256)
    assert rows["graph"]["j_per_token"] == 6.5
