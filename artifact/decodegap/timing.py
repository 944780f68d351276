"""How long a step takes: the timed loops, and every raw sample they give."""

import statistics
from collections.abc import Callable
from time import perf_counter_ns

import torch

from decodegap.arms import Step
from decodegap.decode import synchronize
from decodegap.schema import DeviceState, Protocol, Series, Sustained

MAX_ENERGY_STEPS = 4096  # bounds the cache's growth in the energy loop of a very fast step
SUSTAINED_RESET_STEPS = 64  # a growing cache stays within this many tokens of its context
SUSTAINED_MARGIN = 1.05  # the loop lasts its seconds even where its steps are a little faster than those before it


def measure(arm: str, step: Step, device: str, protocol: Protocol, energy_mj: Callable[[], int | None]) -> Series:
    """Warm `step` up and time it as `protocol` says; `energy_mj` reads the card's energy counter (None without one).

    Three loops, each from `ctx` tokens on: single steps with a synchronisation after each, a free-running loop with
    one synchronisation at its end, and, where there is a counter, a free-running loop of `energy_seconds`.
    """
    for _ in range(protocol.warmup_steps):
        step.run()
    synchronize(device)
    wall_ms, enqueue_ms, event_ms = synchronised(step, device, protocol.measured_steps)
    step.reset()
    free_total_ms = free_running(step, device, protocol.free_steps)
    energy_steps, energy_j = None, None
    if protocol.energy_seconds and energy_mj() is not None:
        step.reset()
        energy_steps, energy_j = energy(step, device, protocol, free_total_ms / protocol.free_steps, energy_mj)
    step.reset()
    return Series(
        arm=arm,
        wall_ms=wall_ms,
        enqueue_ms=enqueue_ms,
        event_ms=event_ms,
        free_steps=protocol.free_steps,
        free_total_ms=free_total_ms,
        step_ms=statistics.median(wall_ms),
        energy_steps=energy_steps,
        energy_j_per_step=energy_j,
    )


def synchronised(
    step: Step, device: str, steps: int, clock: Callable[[], int] = perf_counter_ns
) -> tuple[list[float], list[float], list[float] | None]:
    """Time `steps` steps, each from an idle device to an idle device: per-step wall, enqueue and event times in ms.

    `clock` gives nanoseconds. Without a device there are no events.
    """
    wall_ms, enqueue_ms, event_ms = [], [], []
    events = None
    if device.startswith("cuda"):
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(steps):
        if events:
            events[0].record()
        start = clock()
        step.run()
        enqueued = clock()
        if events:
            events[1].record()
        synchronize(device)
        wall_ms.append((clock() - start) / 1e6)
        enqueue_ms.append((enqueued - start) / 1e6)
        if events:
            event_ms.append(events[0].elapsed_time(events[1]))
    return wall_ms, enqueue_ms, event_ms if events else None


def free_running(step: Step, device: str, steps: int, clock: Callable[[], int] = perf_counter_ns) -> float:
    """Milliseconds that `steps` steps take in all, with one synchronisation at the end."""
    synchronize(device)
    start = clock()
    for _ in range(steps):
        step.run()
    synchronize(device)
    return (clock() - start) / 1e6


def energy(
    step: Step, device: str, protocol: Protocol, step_ms: float, energy_mj: Callable[[], int | None]
) -> tuple[int, float | None]:
    """Steps run, and joules a step, over a loop of at least `energy_seconds` (fewer if the cache would grow too far).

    The counter moves some ten times a second, so two seconds bound its quantisation to a few per cent.
    """
    steps = min(MAX_ENERGY_STEPS, max(1, round(protocol.energy_seconds * 1e3 / max(step_ms, 1e-3)) + 1))
    before = energy_mj()
    free_running(step, device, steps)
    return steps, _joules(before, energy_mj(), steps)


def _joules(before_mj: int | None, after_mj: int | None, steps: int) -> float | None:
    """Joules a step between two readings of the counter; None where it did not move, or is not there."""
    if before_mj is None or after_mj is None or after_mj <= before_mj:
        return None
    return (after_mj - before_mj) / 1e3 / steps


def measure_sustained(
    arm: str,
    step: Step,
    device: str,
    protocol: Protocol,
    *,
    energy_mj: Callable[[], int | None],
    state: Callable[[], DeviceState | None],
) -> Series:
    """As `measure`, with the last loop kept: how long a step takes once clock and power have settled.

    `state` reads the device's clocks and power. The energy is that of the same loop; there is no such loop where the
    protocol gives it no seconds.
    """
    single = measure(arm, step, device, protocol.model_copy(update={"energy_seconds": 0.0}), energy_mj)
    if not protocol.energy_seconds:
        return single
    free_ms = max(single.free_total_ms / single.free_steps, 1e-3)
    steps = round(SUSTAINED_MARGIN * protocol.energy_seconds * 1e3 / free_ms) + 1
    while True:
        before, before_mj = state(), energy_mj()
        total_ms, during = sustained(step, device, steps, state)
        after_mj, after = energy_mj(), state()
        if total_ms >= protocol.energy_seconds * 1e3:
            break
        # Faster than it was alone, which a noisy host is now and then: once more, as long as it should be.
        steps = round(SUSTAINED_MARGIN * steps * protocol.energy_seconds * 1e3 / max(total_ms, 1e-3)) + 1
    step.reset()
    return single.model_copy(
        update={
            "energy_steps": None if before_mj is None else steps,
            "energy_j_per_step": _joules(before_mj, after_mj, steps),
            "sustained": Sustained(steps=steps, step_ms=total_ms / steps, before=before, during=during, after=after),
        }
    )


def sustained(
    step: Step,
    device: str,
    steps: int,
    state: Callable[[], DeviceState | None],
    clock: Callable[[], int] = perf_counter_ns,
) -> tuple[float, DeviceState | None]:
    """Milliseconds that `steps` steps take in all, from an idle device, and the device's state near their end.

    The step returns to its start every few steps. On a device the time is that between events, because the state is
    asked for while the last steps still run, which takes the host some milliseconds.
    """
    events = None
    if device.startswith("cuda"):
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    synchronize(device)
    if events:
        events[0].record()
    start = clock()
    for index in range(steps):
        if index % SUSTAINED_RESET_STEPS == 0:
            step.reset()
        step.run()
    if events:
        events[1].record()
    during = state() if events else None
    synchronize(device)
    return events[0].elapsed_time(events[1]) if events else (clock() - start) / 1e6, during
