"""How long a step takes: the timed loops, and every raw sample they give."""

import statistics
from collections.abc import Callable
from time import perf_counter_ns

import torch

from decodegap.arms import Step
from decodegap.decode import synchronize
from decodegap.schema import Protocol, Series

MAX_ENERGY_STEPS = 4096  # bounds the cache's growth in the energy loop of a very fast step


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
    after = energy_mj()
    if before is None or after is None or after <= before:
        return steps, None
    return steps, (after - before) / 1e3 / steps
