"""How much faster is one arm than another? Both measured in one session, interleaved so that a common drift cancels."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns

from decodegap import timing
from decodegap.arms import Step
from decodegap.decode import synchronize
from decodegap.schema import Pair, Protocol, Series

CYCLE = "ABBA"  # within it, both arms lie around the same moment
BLOCK_STEPS = 5
BLOCK_WARMUPS = 1  # the first step after the other arm finds its caches, and the allocator, as that arm left them


@dataclass
class _Samples:
    """What one arm has gathered so far, in ms."""

    name: str
    step: Step
    wall: list[float] = field(default_factory=list)
    enqueue: list[float] = field(default_factory=list)
    event: list[float] = field(default_factory=list)
    free_total: float = 0.0
    energy: tuple[int | None, float | None] = (None, None)


def block_order(measured_steps: int) -> str:
    """The order of blocks that gives each arm at least `measured_steps` steps, one letter a block: ABBA repeated.

    It reads the same backwards, so both arms are measured around the same mean moment, and a drift that is linear in
    time moves both alike.
    """
    blocks_per_cycle = CYCLE.count("A")
    return CYCLE * -(-measured_steps // (blocks_per_cycle * BLOCK_STEPS))


def measure_pair(
    first: tuple[str, Step],
    second: tuple[str, Step],
    device: str,
    protocol: Protocol,
    energy_mj: Callable[[], int | None],
    *,
    clock: Callable[[], int] = perf_counter_ns,
) -> tuple[Series, Series, Pair]:
    """Time two prepared arms, each a name and its step; the ratio is the first's median wall time over the second's.

    Every step is timed as a single arm's is, in blocks of a few steps from `ctx` tokens on, `measured_steps` of them
    rounded up to whole ABBA cycles. The free-running loops follow in the same order, then the energy loops.
    """
    arms = {"A": _Samples(*first), "B": _Samples(*second)}
    for arm in arms.values():
        arm.step.reset()
        for _ in range(protocol.warmup_steps):
            arm.step.run()
        arm.step.reset()
    order = block_order(protocol.measured_steps)
    for letter in order:
        _block(arms[letter], device, clock)
    half = protocol.free_steps // 2
    for letter, steps in zip(CYCLE, (half, half, protocol.free_steps - half, protocol.free_steps - half), strict=True):
        arms[letter].step.reset()
        arms[letter].free_total += timing.free_running(arms[letter].step, device, steps, clock)
    for arm in arms.values():
        arm.step.reset()
        if protocol.energy_seconds and energy_mj() is not None:
            arm.energy = timing.energy(arm.step, device, protocol, arm.free_total / protocol.free_steps, energy_mj)
            arm.step.reset()
    a, b = (_series(arm, protocol) for arm in arms.values())
    return a, b, Pair(first=a.arm, second=b.arm, order=order, ratio=a.step_ms / b.step_ms)


def _block(arm: _Samples, device: str, clock: Callable[[], int]) -> None:
    arm.step.reset()
    for _ in range(BLOCK_WARMUPS):
        arm.step.run()
    synchronize(device)
    wall, enqueue, event = timing.synchronised(arm.step, device, BLOCK_STEPS, clock)
    arm.wall += wall
    arm.enqueue += enqueue
    arm.event += event or []


def _series(arm: _Samples, protocol: Protocol) -> Series:
    return Series(
        arm=arm.name,
        wall_ms=arm.wall,
        enqueue_ms=arm.enqueue,
        event_ms=arm.event or None,
        free_steps=protocol.free_steps,
        free_total_ms=arm.free_total,
        step_ms=statistics.median(arm.wall),
        energy_steps=arm.energy[0],
        energy_j_per_step=arm.energy[1],
    )
