"""Whether each claim's verdict comes from records alone, of the right GPU, and flips with them."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from factory import checkout, grid, record, rehashed
from factory_ladder import rungs

from decodegap import claims, predict, published, records, review, verdicts
from decodegap.paths import HERE, Places
from decodegap.schema import Attestation, Record
from decodegap.verdicts import Verdict

STUDY = published.load(HERE.published)
CLAIMS = claims.load(HERE.claims, STUDY)


@pytest.fixture
def at(tmp_path: Path) -> Places:
    """A checkout with the study's numbers, the claims, and a copy of the shipped records."""
    return checkout(tmp_path / "checkout", shipped=True)


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
    assert (known["ladder-logits"].word, known["ladder-logits"].detail) == ("reproduced", "1 check")
    with_eager = rungs("rungs", {"eager": 20.0, "fused": 3.4})
    assert {check.arm for check in with_eager.checks} == {"eager", "fused"}
    known = {v.claim.id: v for v in verdicts.judge(CLAIMS, STUDY, [with_eager])}
    assert known["ladder-logits"].detail == "1 check"  # stock eager against itself is none
    known = {v.claim.id: v for v in verdicts.judge(CLAIMS, STUDY, [void])}
    assert known["ladder-logits"].word == "not reproduced"
    assert "1 of them against a reference that stock eager itself is far from" in known["ladder-logits"].detail
    assert known["fused-qwen-2048"].detail.endswith("the check of its logits proves nothing in 1 of 1 session")


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
