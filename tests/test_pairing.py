"""Whether a pair's ratio is that of its arms, whatever both of them share."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodegap import pairing, plan
from decodegap.arms import Step
from decodegap.schema import Pair, Protocol, Series

PROTOCOL = plan.protocol("cpu", "synthetic", "test")


class Clock:
    """Nanoseconds that pass when a simulated step runs, more of them the later it is."""

    def __init__(self, drift_per_s: float = 0.0) -> None:
        self.now = 0.0
        self.drift = drift_per_s
        self.ran = ""
        self.resets = ""

    def __call__(self) -> int:
        return round(self.now)

    def step(self, letter: str, milliseconds: float) -> Step:
        def run() -> None:
            self.ran += letter
            self.now += milliseconds * 1e6 * (1 + self.drift * self.now / 1e9)

        def reset() -> None:
            self.ran += letter.lower()

        return Step(run=run, reset=reset, logits=lambda: torch.empty(0))


def measured(clock: Clock, a_ms: float, b_ms: float, protocol: Protocol = PROTOCOL) -> tuple[Series, Series, Pair]:
    first, second = clock.step("A", a_ms), clock.step("B", b_ms)
    return pairing.measure_pair(("eager-pinned", first), ("graph", second), "cpu", protocol, lambda: None, clock=clock)


@given(a=st.floats(0.5, 200), b=st.floats(0.5, 200), drift=st.floats(-0.002, 0.01))
@settings(deadline=None)
def test_a_drift_that_is_linear_in_time_cancels(a: float, b: float, drift: float) -> None:
    *_, pair = measured(Clock(drift), a, b)
    assert math.isclose(pair.ratio, a / b, rel_tol=1e-3)


def test_measuring_one_arm_after_the_other_would_not_cancel_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairing, "CYCLE", "AABB")
    *_, pair = measured(Clock(0.05), 30.0, 8.0)
    assert not math.isclose(pair.ratio, 30 / 8, rel_tol=1e-3)


@given(steps=st.integers(1, 200))
def test_the_order_is_balanced_and_reads_the_same_backwards(steps: int) -> None:
    order = pairing.block_order(steps)
    assert order.count("A") == order.count("B")
    assert order == order[::-1]
    assert steps <= order.count("A") * pairing.BLOCK_STEPS < steps + 2 * pairing.BLOCK_STEPS
    moments = {letter: [i for i, seen in enumerate(order) if seen == letter] for letter in "AB"}
    assert sum(moments["A"]) == sum(moments["B"])


def test_thirty_steps_of_each_are_measured_from_the_context_on() -> None:
    clock = Clock()
    a, b, pair = measured(clock, 4.0, 1.0)
    assert pair == Pair(first="eager-pinned", second="graph", order="ABBAABBAABBA", ratio=4.0)
    for series, expected in ((a, 4.0), (b, 1.0)):
        assert series.wall_ms == series.enqueue_ms == [expected] * 30
        assert series.step_ms == expected
        assert series.event_ms is None
        assert series.free_total_ms == expected * PROTOCOL.free_steps
    warm = PROTOCOL.warmup_steps
    assert clock.ran.startswith("a" + "A" * warm + "a" + "b" + "B" * warm + "b" + "aAAAAAA" + "bBBBBBB" * 2 + "aAAAAAA")


def test_energy_is_read_for_both_arms_where_there_is_a_counter() -> None:
    clock, watts = Clock(), 300
    protocol = PROTOCOL.model_copy(update={"energy_seconds": 0.1})
    steps = clock.step("A", 4.0), clock.step("B", 1.0)
    a, b, _ = pairing.measure_pair(
        ("x", steps[0]), ("y", steps[1]), "cpu", protocol, lambda: int(clock.now / 1e6 * watts), clock=clock
    )
    assert a.energy_steps == 26
    assert b.energy_steps == 101
    assert a.energy_j_per_step == pytest.approx(1.2)
    assert b.energy_j_per_step == pytest.approx(0.3)
