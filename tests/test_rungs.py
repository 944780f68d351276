"""Whether a ladder's session checks each rung before it times it, and says which it could not; real steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stepping
import torch

from decodegap import arms, cells, decode, fused, models, plan, plan_ladder, rungs, timing
from decodegap.arms import Setup, Step
from decodegap.errors import BadInputError, UnsupportedError
from decodegap.fused import layout
from decodegap.plan import Task
from decodegap.probes import ReadProbe
from decodegap.schema import Ran
from decodegap.session import Findings

STILL = Step(run=lambda: None, reset=lambda: None, logits=lambda: torch.zeros(1))
NAMES = ("eager", "eager-pinned", *plan_ladder.OWN)  # without the rung that takes seconds to compile


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_ladder.CPU_GROUPS, "rungs", NAMES)


def task(session: int = 1, **changes: object) -> Task:
    req = plan.request(gpu="cpu", models="tiny-qwen2", contexts=str(stepping.CTX))
    (found,) = plan_ladder.ladder(req, "cpu")
    return replace(found, session=session, protocol=found.protocol.model_copy(update=changes))


def measured(of: Task, setup: Setup | None = None) -> Findings:
    found = Findings()
    with torch.inference_mode():
        cells.measure(of, setup or stepping.setup(), None, Path("a store that a ladder never reads"), found)
    return found


def test_every_rung_is_checked_timed_proven_and_in_order() -> None:
    found = measured(task(session=2))  # which starts with another rung than the first
    assert found.outcome == "ok"
    assert [series.arm for series in found.series] == ["eager", "eager-pinned"]
    assert [(check.arm, check.passed) for check in found.checks] == [("eager", True), ("eager-pinned", True)]
    for series in found.series:
        assert series.ran is not None
        assert series.ran.sdpa == "flash"
        assert series.ran.kernels
        assert len(series.wall_ms) == 30
        assert series.sustained is None  # a CPU's protocol has no such loop


@pytest.mark.parametrize("bits", [16, 4])
def test_the_network_that_stock_eager_is_judged_on_keeps_its_frequencies(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotary frequencies in bf16 turn a late token by another angle: eager's own error then hides every other one."""
    setup = stepping.prefilled(stepping.build(stepping.wide(), torch.bfloat16))
    judged, round_off = [setup.net], layout.as_rounded
    monkeypatch.setattr(layout, "as_rounded", lambda net: judged.append(round_off(net)) or judged[-1])
    wanted = {name: buffer.clone() for name, buffer in setup.net.named_buffers()}
    with torch.inference_mode():
        rungs._judge(setup, bits)
    assert len(judged) == {16: 1, 4: 2}[bits]
    for net in judged:
        assert net.dtype == torch.bfloat16
        for name, buffer in net.named_buffers():
            torch.testing.assert_close(buffer, wanted[name], rtol=0, atol=0)


def test_what_cannot_run_here_is_named_and_the_rest_is_measured() -> None:
    found = measured(task())
    assert set(found.refused) == set(plan_ladder.OWN)
    assert all("NVIDIA" in reason or "CUDA" in reason for reason in found.refused.values())


def test_every_step_attends_to_ctx_tokens_whatever_ran_before() -> None:
    """Stock eager and the pinned step give the same logits bit for bit, in either order."""
    for session in (1, 2):
        checks = {check.arm: check.error for check in measured(task(session)).checks}
        assert checks["eager"] == checks["eager-pinned"] < 1e-6


def test_a_rung_that_fails_its_check_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(setup: Setup) -> Step:
        step = arms.eager(replace(setup, ctx=setup.ctx - 1))
        return replace(step, logits=lambda: step.logits() * 1.01)

    arms.prepare("eager", stepping.setup())  # loads the modules that register arms
    monkeypatch.setitem(arms.ARMS, "eager-pinned", wrong)
    found = measured(task())
    assert [series.arm for series in found.series] == ["eager"]
    assert "check failed: relative error" in found.refused["eager-pinned"]
    assert found.outcome == "ok"


def out_of_resources() -> Exception:
    return pytest.importorskip("triton.runtime.errors").OutOfResources(300000, 232448, "shared memory")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (lambda: BadInputError("tiles: o: rows is 3"), "tiles: o: rows is 3"),
        (lambda: torch.OutOfMemoryError("Tried to allocate 2.00 GiB"), "did not fit into the device's memory"),
        (out_of_resources, "OutOfResources: out of resource: shared memory, Required: 300000"),
    ],
)
def test_a_rung_that_cannot_be_prepared_leaves_the_others_alone(
    error: Callable[[], Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = error()

    def broken(_: Setup) -> Step:
        raise raised

    arms.prepare("eager", stepping.setup())
    monkeypatch.setitem(arms.ARMS, "eager-pinned", broken)
    found = measured(task(session=2))  # which starts with that rung
    assert said in found.refused["eager-pinned"]
    assert "\n" not in found.refused["eager-pinned"]
    assert found.outcome == "ok"
    assert [series.arm for series in found.series] == ["eager"]
    monkeypatch.setattr(decode, "is_lost", lambda _: True)
    with pytest.raises(type(raised)):
        measured(task(session=2))


def test_weights_that_do_not_fit_are_taken_once_and_refused_for_each_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    asked = []

    def full(*_: object, bits: int) -> None:
        asked.append(bits)
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(fused, "load", full)
    monkeypatch.setattr(fused, "can_overlap", lambda _: True)
    for make in rungs._fused(list(plan_ladder.FUSED), stepping.setup()).values():
        with pytest.raises(UnsupportedError, match="did not fit"):
            make()
    assert asked == [16]


def test_a_stale_rung_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(setup: Setup) -> Step:
        step = arms.prepare("eager", replace(setup, ctx=setup.ctx - 1))
        step.run()
        logits = step.logits().clone()
        step.reset()
        return replace(step, logits=lambda: logits)

    arms.prepare("eager", stepping.setup())
    monkeypatch.setitem(arms.ARMS, "eager-pinned", stale)
    found = measured(task())
    assert "empty or stale" in found.refused["eager-pinned"]
    assert [series.arm for series in found.series] == ["eager"]


def test_a_group_of_which_nothing_runs_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_ladder.CPU_GROUPS, "rungs", plan_ladder.OWN)
    found = measured(task())
    assert found.outcome == "unsupported"
    assert "fused-plain: " in found.reasons[0]


def test_only_the_first_session_is_dissected() -> None:
    for session, expected in ((1, ["eager", "eager-pinned"]), (2, [])):
        found = Findings(read=ReadProbe(10.0, "test", 1))
        with torch.inference_mode():
            rungs.measure(task(session), stepping.setup(), None, found)
        assert [each.arm for each in found.anatomy] == expected


def test_the_sustained_loop_lasts_its_seconds_and_stays_near_its_context() -> None:
    setup = stepping.setup()
    lengths = []

    def counting(inner: Step) -> Step:
        def run() -> None:
            inner.run()
            lengths.append(setup.cache.get_seq_length())

        return replace(inner, run=run)

    with torch.inference_mode():
        step = counting(arms.eager(replace(setup, ctx=stepping.CTX)))
        protocol = task(energy_seconds=0.3).protocol
        series = timing.measure_sustained("eager", step, "cpu", protocol, energy_mj=lambda: None, state=lambda: None)
    assert series.sustained is not None
    assert series.energy_j_per_step is None
    assert max(lengths) <= stepping.CTX + timing.SUSTAINED_RESET_STEPS
    assert series.sustained.steps * series.sustained.step_ms >= 300


def test_a_loop_that_was_too_short_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def faster(_step: Step, _device: str, steps: int, _state: object) -> tuple[float, None]:
        asked.append(steps)
        return 0.5 * steps, None  # ms: half of what a step takes alone

    single = timing.measure("eager", STILL, "cpu", task().protocol, lambda: None).model_copy(
        update={"free_total_ms": 10.0, "free_steps": 10}
    )
    monkeypatch.setattr(timing, "measure", lambda *_: single)
    monkeypatch.setattr(timing, "sustained", faster)
    series = timing.measure_sustained(
        "eager", STILL, "cpu", task(energy_seconds=2.0).protocol, energy_mj=lambda: None, state=lambda: None
    )
    assert series.sustained is not None
    assert asked == [2101, 4201]
    assert series.sustained.steps * series.sustained.step_ms >= 2000


def test_without_a_fused_step_nothing_is_built_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise UnsupportedError("built again")

    monkeypatch.setattr(arms, "built", never)
    assert measured(task()).outcome == "ok"


def test_a_fused_rung_that_runs_other_kernels_than_its_own_is_told() -> None:
    of = task()
    layers = models.lookup(of.cell.model).config["num_hidden_layers"]
    own = {"embed": 1, "qkv": layers, "attention": layers, "project": 2 * layers, "gate_up": layers, "lm_head": 1}

    def told(**changes: int) -> str:
        ran = Ran(sdpa="none", evidence="", kernels={name: n for name, n in (own | changes).items() if n})
        return rungs._other_work("fused", ran, of)

    assert told() == told(combine=layers) == ""
    assert "combine" in told(combine=1)
    assert "qkv" in told(qkv=0)
    assert "gemv" in told(gemv=7)
    eager = Ran(sdpa="math", evidence="aten::x", kernels={"aten::x": 1})
    pinned = replace(of, cell=of.cell.model_copy(update={"sdpa": "flash"}))
    assert "pinned to flash but math ran" in rungs._other_work("eager", eager, pinned)
