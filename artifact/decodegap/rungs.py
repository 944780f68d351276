"""How the rungs of a ladder are measured in one session: each is checked, then timed, and only then any is profiled.

In this order because a profiler, once it was attached, may go on costing every launch something. The fused rungs take
the weights out of the network, so the others are prepared again, on a network built anew, before they are profiled.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from decodegap import (
    anatomy,
    anatomy_cli,
    arms,
    attest,
    cells,
    decode,
    floor,
    gpus,
    ledger,
    machine,
    models,
    plan_ladder,
    reference,
    timing,
)
from decodegap.arms import Setup, Step
from decodegap.errors import BadInputError, UnsupportedError
from decodegap.fused.shape import GROUP
from decodegap.plan import Task
from decodegap.schema import Check, Quantised, Ran

if TYPE_CHECKING:
    from decodegap.fused import Loaded
    from decodegap.session import Findings

FULL_BITS = 16
DISSECTED_SESSION = 1  # its profiles say where the step goes; in the other sessions each rung's kernels are enough
Makers = Mapping[str, Callable[[], Step]]


@dataclass(frozen=True)
class Bench:
    """What every rung of a session is measured with. `judge` holds a rung's logits `[1, vocab]` against the truth."""

    task: Task
    device: gpus.Device | None
    target: str
    found: "Findings"
    judge: Callable[[str, torch.Tensor], Check]


def measure(task: Task, setup: Setup, device: gpus.Device | None, found: "Findings") -> None:
    """Measure every rung of the task's group, in the order that its session has.

    Every step attends to `ctx` tokens, its own among them. A rung that this machine cannot run, or that fails its
    check, is noted with the reason and not timed; if none is left, `UnsupportedError` is raised with the reasons.
    """
    names = plan_ladder.order(plan_ladder.groups(task.cell.gpu)[task.cell.arm], task.session)
    shared = [name for name in names if name not in plan_ladder.OWN]
    own = _possible([name for name in names if name in plan_ladder.OWN], setup.device, found)
    bits = FULL_BITS if shared or not own else ledger.own_bits(own[0])  # a session is all in 4 bits, or in none
    with found.timed("reference"):
        bench = Bench(task, device, setup.device, found, _judge(setup, bits))
    _release()
    found.before = machine.state(device)
    steps = _timed(bench, _makers(shared, setup))
    timed = list(steps)
    if own:
        steps.clear()
        _release()
        fused = _timed(bench, _fused(own, setup))
        found.after = machine.state(device)
        _prove(bench, fused)
        fused.clear()
        _release()
        with found.timed("prepare again"):
            anew = replace(setup, net=arms.built(task, setup.device)) if timed else setup
            steps = {name: make() for name, make in _makers(timed, anew).items()}
    else:
        found.after = machine.state(device)
    _prove(bench, steps)
    _conclude(task, names, found)


def _possible(own: list[str], device: str, found: "Findings") -> list[str]:
    """Those of our own rungs that can run here; the others are noted with the reason."""
    from decodegap import fused

    try:
        fused.require(device)
    except UnsupportedError as error:
        found.refused.update(dict.fromkeys(own, str(error)))
        return []
    return own


def _judge(setup: Setup, bits: int = 16) -> Callable[[str, torch.Tensor], Check]:
    """What holds a rung's logits against the reference of the same step, beside the error of stock eager.

    In 4 `bits` the reference has the weights that the codes stand for, in a copy of the network, and eager has them
    rounded to its dtype; both over the same K and V.
    """
    past, net = _past(setup), setup.net
    if bits != FULL_BITS:
        from decodegap.fused.layout import as_rounded

        net = as_rounded(net)
    truth = reference.reference_logits(net, setup.cache, setup.token, setup.ctx)
    eager = cells.logits_of(arms.prepare("eager", replace(past, net=decode.cast_weights(net, setup.net.dtype))))
    return lambda name, logits: reference.check(name, logits, eager, truth)


def _past(setup: Setup) -> Setup:
    """`setup` for the stock step, whose cache must not hold the token that it decodes."""
    decode.crop(setup.cache, setup.ctx - 1)
    return replace(setup, ctx=setup.ctx - 1)


def _makers(names: list[str], setup: Setup) -> Makers:
    def make(name: str) -> Step:
        return arms.prepare(name, _past(setup) if name == "eager" else setup)

    return {name: partial(make, name) for name in names}


def _fused(names: list[str], setup: Setup) -> Makers:
    """The fused rungs, all from one load of the weights, which empties `setup.net`."""
    from decodegap import fused

    @cache
    def loaded(bits: int) -> "Loaded | str":
        """The weights, or why they are not there: what a load that failed has taken is gone, so there is one only."""
        try:
            return fused.load(setup, bits=bits)
        except torch.OutOfMemoryError:
            return "its weights and cache did not fit into the device's memory"

    def make(name: str) -> Step:
        from decodegap.fused.step import capture  # which needs Triton

        bits, can_overlap = ledger.own_bits(name), fused.can_overlap(setup.device)
        if name == plan_ladder.FUSED[-1] and not can_overlap:
            raise UnsupportedError("this card has no programmatic launch; its fused step is the rung fused-plain")
        overlapping = can_overlap and name != plan_ladder.FUSED[0]
        if isinstance(taken := loaded(bits), str):
            raise UnsupportedError(taken)
        return capture(taken, fused.tiles_for(setup, bits), pdl=overlapping)

    return {name: partial(make, name) for name in names}


def _timed(bench: Bench, makers: Makers) -> dict[str, Step]:
    """Prepare, check and time each rung; those that came through, in the order of the ladder."""
    steps = {}
    for name, make in makers.items():
        if (step := _prepared(bench, name, make)) is None:
            _release()
            continue
        with bench.found.timed(f"measure {name}"):
            series = timing.measure_sustained(
                name,
                step,
                bench.target,
                bench.task.protocol,
                energy_mj=cells.energy_counter(bench.device),
                state=lambda: machine.state(bench.device),
            )
        bench.found.series.append(series)
        steps[name] = step
    return {name: steps[name] for name in plan_ladder.RUNGS if name in steps}


def _prepared(bench: Bench, name: str, make: Callable[[], Step]) -> Step | None:
    """The rung's step, checked; None, with the reason noted, if it cannot be timed though the device still answers."""
    try:
        with bench.found.timed(f"prepare {name}"):
            step = make()
        _check(bench, name, step)
    except _refusals() as error:
        if decode.is_lost(bench.target):
            raise
        bench.found.refused[name] = _why(error)
        return None
    return step


def _refusals() -> tuple[type[Exception], ...]:
    """What stops one rung and no other; Triton's own, of a kernel that it cannot build or load, only if it is here."""
    ours = (UnsupportedError, BadInputError, torch.OutOfMemoryError)
    if "triton" not in sys.modules:
        return ours
    from triton.errors import TritonError

    return (*ours, TritonError)


def _why(error: Exception) -> str:
    """Why a rung was not timed, in one line."""
    if isinstance(error, torch.OutOfMemoryError):
        return "not timed, because it did not fit into the device's memory"
    if isinstance(error, UnsupportedError | BadInputError):
        return str(error)
    return f"not timed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _check(bench: Bench, name: str, step: Step) -> None:
    """Raise `UnsupportedError` if the rung's logits are wrong, or not those of the token that it was given."""
    result = bench.judge(name, cells.logits_of(step))
    bench.found.checks.append(result)
    if not result.passed:
        raise UnsupportedError(f"not timed, because its check failed: {reference.failure(result)}")
    if reason := attest.not_fresh(name, step, bench.target):
        raise UnsupportedError(f"not timed: {reason}")


def _prove(bench: Bench, steps: Mapping[str, Step]) -> None:
    """Note with each rung's series which kernels ran, and in one session where its step goes."""
    task, found = bench.task, bench.found
    if not steps:
        return
    with found.timed(f"attest {' '.join(steps)}"):
        for name, step in steps.items():
            ran = attest.ran(step, bench.target)
            index = next(index for index, series in enumerate(found.series) if series.arm == name)
            found.series[index] = found.series[index].model_copy(update={"ran": ran})
            if reason := _other_work(name, ran, task):
                found.void(f"{name}: {reason}")
    if task.session != DISSECTED_SESSION or found.read is None or found.outcome != "ok":
        return
    series = {each.arm: each for each in found.series}
    with found.timed(f"anatomy {' '.join(steps)}"):
        found.anatomy += anatomy.measure(
            [(series[name], step) for name, step in steps.items()],
            task.cell,
            models.lookup(task.cell.model),
            bench.target,
            found.read.gb_s,
            trace_dir=anatomy_cli.trace_dir(),
        )


def _other_work(name: str, ran: Ran, task: Task) -> str:
    """What ran in a rung's step that should not have, or did not and should have; "" if nothing."""
    if name not in plan_ladder.OWN:
        pinned = task.cell.sdpa in ("auto", ran.sdpa)
        return "" if pinned else f"SDPA was pinned to {task.cell.sdpa} but {ran.sdpa} ran ({ran.evidence})"
    expected = ledger.own_launches(models.lookup(task.cell.model).config)
    if "combine" not in ran.kernels:
        del expected["combine"]
    differing = attest.differences(Counter(expected), Counter(ran.kernels))
    told = attest.describe({kernel: list(launches) for kernel, launches in differing.items()})
    return f"it ran other kernels than its own (expected against seen): {told}" if differing else ""


def _held(name: str, task: Task) -> Quantised:
    """The bytes that a rung in 4 bits really holds, of which its record's floors are made."""
    model, dtype = models.lookup(task.cell.model), task.cell.dtype
    streamed = ledger.own_weights(model.config, name)
    dense = floor.projection_count(model.config) * floor.ELEMENT_BYTES[dtype]
    kept = model.streamed_bytes(dtype) - dense
    table = model.weight_bytes(dtype) - model.streamed_bytes(dtype)
    return Quantised(path=name, group=GROUP, packed=streamed - kept, kept=kept, table=table, dense=dense)


def _conclude(task: Task, names: tuple[str, ...], found: "Findings") -> None:
    """Put everything into the ladder's order; raise `UnsupportedError` if no rung was timed."""
    place = {name: index for index, name in enumerate(plan_ladder.RUNGS)}
    found.series.sort(key=lambda series: place[series.arm])
    found.checks.sort(key=lambda check: place[check.arm])
    found.anatomy.sort(key=lambda each: place[each.arm])
    if not found.series:
        raise UnsupportedError("; ".join(f"{name}: {found.refused[name]}" for name in names))
    found.ran = found.series[0].ran
    if (name := found.series[0].arm) == plan_ladder.INT4:
        found.quantised = _held(name, task)


def _release() -> None:
    """Give back what dropped steps held: a graph keeps memory of its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
