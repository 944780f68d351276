"""Whether medians and intervals are right, held against independent computations and simulated truth."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

from decodegap import stats

RATIOS = [1.251, 1.262, 1.243, 1.267, 1.258, 1.249, 1.271, 1.255, 1.260, 1.302]
values = st.lists(st.floats(0.5, 200, allow_nan=False), min_size=1, max_size=15)


def direct_bca(sample: list[float], resamples: int = 200_000, seed: int = 1) -> tuple[float, float]:
    """Efron's BCa interval of the mean, written down from its definition."""
    data = np.asarray(sample)
    n = len(data)
    means = data[np.random.default_rng(seed).integers(0, n, (resamples, n))].mean(axis=1)
    z0 = ndtri((means < data.mean()).mean())
    left_out = (data.sum() - data) / (n - 1)
    u = left_out.mean() - left_out
    a = (u**3).sum() / (6 * (u**2).sum() ** 1.5)
    z = ndtri(np.array([0.025, 0.975]))
    low, high = np.quantile(means, ndtr(z0 + (z0 + z) / (1 - a * (z0 + z))))
    return float(low), float(high)


@given(values)
def test_median_is_the_standard_librarys(sample: list[float]) -> None:
    assert stats.median(sample) == pytest.approx(statistics.median(sample), rel=1e-12)


def test_bca_agrees_with_a_direct_implementation() -> None:
    width = max(RATIOS) - min(RATIOS)
    assert stats.summarise(RATIOS).intervals["bca"] == pytest.approx(direct_bca(RATIOS), abs=0.02 * width)


def test_bca_leans_to_the_long_tail_and_percentile_agrees_with_a_direct_one() -> None:
    found = stats.summarise(RATIOS)
    data = np.asarray(RATIOS)
    means = data[np.random.default_rng(7).integers(0, len(data), (200_000, len(data)))].mean(axis=1)
    assert found.intervals["percentile"] == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.001)
    assert found.intervals["bca"][1] > found.intervals["percentile"][1]


def test_t_interval_is_the_textbooks() -> None:
    low, high = stats.summarise(RATIOS).intervals["t"]
    half = 2.262157 * statistics.stdev(RATIOS) / math.sqrt(10)  # Student's t, 9 degrees of freedom, 0.975
    assert (low, high) == pytest.approx((statistics.mean(RATIOS) - half, statistics.mean(RATIOS) + half), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(values, st.randoms(use_true_random=False))
def test_summary_holds_the_mean_and_ignores_the_order(sample: list[float], random: object) -> None:
    shuffled = list(sample)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = stats.summarise(sample), stats.summarise(shuffled)
    assert (one.mean, one.low, one.high, one.spread) == (other.mean, other.low, other.high, other.spread)
    assert one.low <= one.mean <= one.high
    assert min(sample) <= one.low
    assert one.high <= max(sample)


def test_fewer_than_six_sessions_give_a_range_and_never_an_interval() -> None:
    found = stats.summarise([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.spread, found.low, found.high, found.intervals) == ("range", 1.0, 5.0, {})
    assert stats.summarise([3.0, 1.0, 2.0, 5.0, 4.0, 6.0]).spread == "interval"


@pytest.mark.parametrize("sample", [[4.2], [4.2] * 3, [4.2] * 10])
def test_no_spread_is_degenerate(sample: list[float]) -> None:
    found = stats.summarise(sample)
    assert (found.spread, found.low, found.mean, found.high) == ("degenerate", 4.2, 4.2, 4.2)


def test_a_bca_interval_that_does_not_exist_is_degenerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "_interval", lambda _values, _method: (math.nan, math.nan))
    found = stats.summarise(RATIOS)
    assert (found.spread, found.low, found.high) == ("degenerate", found.mean, found.mean)


def test_values_that_differ_in_the_last_bit_neither_warn_nor_break() -> None:
    found = stats.summarise([1.0] * 9 + [math.nextafter(1.0, 2.0)])
    assert math.isfinite(found.low)
    assert math.isfinite(found.high)


@pytest.mark.parametrize("sample", [[], [1.0, math.nan], [math.inf] * 7])
def test_what_cannot_be_summarised_is_refused(sample: list[float]) -> None:
    with pytest.raises(ValueError, match="finite"):
        stats.summarise(sample)


def test_every_interval_covers_the_truth_often_enough_at_ten_sessions() -> None:
    held = stats.coverage(10)
    assert set(held) == {"bca", "percentile", "t"}
    assert min(held.values()) >= 0.85
    assert held["t"] == pytest.approx(0.95, abs=0.025)


def test_a_common_drift_cancels_in_the_ratio() -> None:
    assert stats.coverage(10, drift=0.0) == pytest.approx(stats.coverage(10, drift=0.5), abs=0.02)
