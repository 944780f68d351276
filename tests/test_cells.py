"""Whether a session of the graphs experiment records pairs, checks and their failures; real sessions on tiny models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stepping
import torch
from factory import record

from decodegap import arms, cells, decode, graphs, plan, records
from decodegap.arms import Setup, Step
from decodegap.cells import Pairing
from decodegap.plan import Task
from decodegap.session import Findings

PAIR = Pairing("eager-pinned", "graph", same_work=True)


def tasks(**given: object) -> list[Task]:
    return plan.graphs(plan.request(gpu="cpu", models="tiny-qwen2", contexts=str(stepping.CTX), **given), "cpu")


def single(arm: str) -> Task:
    return replace(tasks()[0], cell=tasks()[0].cell.model_copy(update={"arm": arm}))


def measured(task: Task, store: Path, setup: Setup | None = None) -> Findings:
    found = Findings()
    with torch.inference_mode():
        cells.measure(task, setup or stepping.setup(), None, store, found)
    return found


def test_a_single_arm_is_timed_and_proven(tmp_path: Path) -> None:
    found = measured(single("eager-pinned"), tmp_path)
    assert found.outcome == "ok"
    assert [series.arm for series in found.series] == ["eager-pinned"]
    assert found.ran is not None
    assert found.ran.sdpa == "flash"
    assert found.flags == ["not checked against the reference: there is no record of a check"]


def test_an_arm_that_cannot_run_here_is_unsupported(tmp_path: Path) -> None:
    found = measured(single("graph"), tmp_path)
    assert found.outcome == "unsupported"
    assert found.series == []
    assert len(found.reasons) == 1
    assert "NVIDIA" in found.reasons[0]


def test_an_arm_is_not_blamed_for_a_device_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = stepping.setup()

    def lost(_device: str) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(decode, "synchronize", lost)
    with pytest.raises(RuntimeError, match="device-side assert triggered"):
        measured(single("graph"), tmp_path, setup)


def pinned(setup: Setup) -> Step:
    return graphs.launched(setup, graphs.pinned(setup))


def then(step: Step, more: Callable[[], object]) -> Step:
    """`step`, and after each run `more`."""

    def run() -> None:
        step.run()
        more()

    return replace(step, run=run)


def extra_operator(setup: Setup) -> Step:
    step = pinned(setup)
    return then(step, lambda: torch.erf(torch.ones(2)))


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (extra_operator, "aten::erf 0 against 1"),
        (lambda setup: replace(pinned(setup), run=lambda: None), "empty or stale"),
    ],
    ids=["another operator", "an empty step"],
)
def test_a_pair_that_did_not_do_the_same_work_is_void_and_keeps_no_times(
    fault: object, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(arms.ARMS, "graph", fault)
    found = Findings()
    with torch.inference_mode():
        cells.measure_pair(single("ab"), PAIR, stepping.setup(), None, found)
    assert found.outcome == "void"
    assert any(named in reason for reason in found.reasons)
    assert found.series == []
    assert found.pair is None


def test_a_pair_that_did_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arms.ARMS, "graph", pinned)
    found = Findings()
    with torch.inference_mode():
        cells.measure_pair(single("ab"), PAIR, stepping.setup(), None, found)
    assert found.outcome == "ok"
    assert found.pair is not None
    assert [series.arm for series in found.series] == ["eager-pinned", "graph"]
    assert found.flags == []


def test_a_stale_single_arm_is_void(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(arms.ARMS, "graph", lambda setup: replace(pinned(setup), set_token=lambda _value: None))
    found = measured(single("graph"), tmp_path)
    assert found.outcome == "void"
    assert "stale" in found.reasons[0]


def test_an_arm_whose_check_failed_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def shifted(setup: Setup) -> Step:
        step = pinned(setup)
        return then(step, lambda: step.logits().add_(0.1))

    monkeypatch.setitem(cells.CHECKED, "cpu", ("eager", "graph"))
    monkeypatch.setitem(arms.ARMS, "graph", shifted)
    check = measured(plan.check_task(single("graph")), tmp_path)
    assert check.outcome == "ok"
    assert [(result.arm, result.passed) for result in check.checks] == [("eager", True), ("graph", False)]
    assert any("graph failed its check" in flag for flag in check.flags)

    store_checks(tmp_path, check)
    found = measured(single("graph"), tmp_path)
    assert found.outcome == "unsupported"
    assert found.series == []
    assert "relative error" in found.reasons[0]
    assert measured(single("eager"), tmp_path).outcome == "ok"


def store_checks(store: Path, found: Findings) -> None:
    """The record of a check session with `found`'s checks, beside which the other arms are measured."""
    task = plan.check_task(single("graph"))
    made = record().model_copy(
        update={
            "cell": task.cell,
            "session": 1,
            "protocol": task.protocol,
            "protocol_hash": task.protocol.digest(),
            "checks": found.checks,
        }
    )
    records.write(made, store)


def test_a_check_under_another_protocol_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(cells.CHECKED, "cpu", ("eager",))
    store_checks(tmp_path, measured(plan.check_task(single("eager")), tmp_path))
    task = single("eager")
    assert measured(task, tmp_path).flags == []
    other = replace(task, protocol=task.protocol.model_copy(update={"seed": 5}))
    assert any("another protocol" in flag for flag in measured(other, tmp_path).flags)
