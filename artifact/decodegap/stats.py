"""How sure we are: medians, intervals over sessions, and how often such intervals hold the truth.

A session is the statistical unit. From six sessions on a summary is the mean with 95% intervals; below that it is the
range, which is never called an interval.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Spread = Literal["interval", "range", "degenerate"]
Method = Literal["bca", "percentile", "t"]

METHODS: tuple[Method, ...] = ("bca", "percentile", "t")
MIN_FOR_INTERVAL = 6
CONFIDENCE = 0.95
RESAMPLES = 9999
SEED = 20260528
BATCH = 250  # resamples held in memory at once while simulating: 1,000 x 250 x 10 doubles are 20 MB


@dataclass(frozen=True)
class Summary:
    """The mean of the session values, what is said about its spread, and the values themselves.

    `low` and `high` are the BCa bounds of an `interval`, the extremes of a `range`, or twice the mean where the
    spread is `degenerate` (one session, identical values, or a BCa interval that does not exist).
    """

    values: tuple[float, ...]
    mean: float
    low: float
    high: float
    spread: Spread
    intervals: dict[Method, tuple[float, float]] = field(default_factory=dict)


def median(values: Sequence[float]) -> float:
    """The median of `values` (of an even number: the mean of the middle two). Raises `ValueError` if empty."""
    if not values:
        raise ValueError("no values to take a median of")
    return float(np.median(np.asarray(values, dtype=float)))


def summarise(values: Sequence[float]) -> Summary:
    """Summarise one value a session; the order of the sessions does not matter.

    Raises `ValueError` if there are none or one is not finite.
    """
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError("a summary needs at least one session and only finite values")
    ordered = tuple(sorted(float(value) for value in values))  # so that the resampling cannot see the order
    mean = math.fsum(ordered) / len(ordered)
    if ordered[0] == ordered[-1]:
        return Summary(tuple(values), ordered[0], ordered[0], ordered[0], "degenerate")
    if len(ordered) < MIN_FOR_INTERVAL:
        return Summary(tuple(values), mean, ordered[0], ordered[-1], "range")
    intervals = {method: _interval(ordered, method) for method in METHODS}
    low, high = intervals["bca"]
    if math.isnan(low) or math.isnan(high):
        return Summary(tuple(values), mean, mean, mean, "degenerate")
    return Summary(tuple(values), mean, low, high, "interval", intervals)


def coverage(
    sessions: int = 10,
    *,
    ratio: float = 1.25,
    drift: float = 0.2,
    noise: float = 0.01,
    simulations: int = 1000,
    resamples: int = 1999,
    seed: int = SEED,
) -> dict[Method, float]:
    """How often each 95% interval holds the true ratio, over simulated experiments of so many paired sessions.

    Each session draws one drift (log-normal, relative width `drift`) that slows both of its arms alike, as a busy or
    cooler host would, and each arm draws its own log-normal `noise`; a session's value is the ratio of its two arms.
    The truth is that ratio's expectation, `ratio * exp(noise ** 2)`.
    """
    rng = np.random.default_rng(seed)
    shape = (simulations, sessions)
    common = np.exp(rng.normal(0.0, drift, shape))
    slow = ratio * common * np.exp(rng.normal(0.0, noise, shape))
    fast = common * np.exp(rng.normal(0.0, noise, shape))
    truth = ratio * math.exp(noise**2)
    held: dict[Method, float] = {}
    for method in METHODS:
        low, high = _bounds(slow / fast, method, resamples=resamples, batch=BATCH)
        held[method] = float(np.mean((low <= truth) & (truth <= high)))
    return held


def _interval(values: Sequence[float], method: Method) -> tuple[float, float]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # scipy warns of a BCa interval that does not exist; its NaN says the same
        low, high = _bounds(np.asarray(values, dtype=float), method, resamples=RESAMPLES, batch=None)
    return float(low), float(high)


def _bounds(
    values: "NDArray[np.float64]", method: Method, *, resamples: int, batch: int | None
) -> "tuple[NDArray[np.float64], NDArray[np.float64]]":
    """The 95% bounds of the mean over the last axis of `values`, whose other axes are separate experiments."""
    from scipy import stats as scipy_stats  # half a second of import that a table without intervals does not need

    n = values.shape[-1]
    if method == "t":
        half = scipy_stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * values.std(axis=-1, ddof=1) / math.sqrt(n)
        centre = values.mean(axis=-1)
        return np.asarray(centre - half), np.asarray(centre + half)
    found = scipy_stats.bootstrap(
        (values,),
        np.mean,
        axis=-1,
        vectorized=True,
        n_resamples=resamples,
        batch=batch,
        confidence_level=CONFIDENCE,
        method="BCa" if method == "bca" else "percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return np.asarray(found.low), np.asarray(found.high)
