"""Does a value fall from one name to the next, and do the sessions settle that it does?"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

MIN_FOR_RANGE = 2  # a single session has no range


def falls(values: Mapping[str, Sequence[float]]) -> tuple[float, str, str] | None:
    """1 if the middles fall from name to name and 0 if not, the values in words, and why the order is not settled.

    Settled (an empty reason) only where each name has several sessions and those of neighbours do not overlap. None if
    a name has no session.
    """
    if not all(values.values()):
        return None
    middles = {name: statistics.fmean(each) for name, each in values.items()}
    text = " > ".join(f"{name} {middles[name]:.3g} ({min(v):.3g} to {max(v):.3g})" for name, v in values.items())
    few = [name for name, each in values.items() if len(each) < MIN_FOR_RANGE]
    blurred = [f"{a} and {b}" for a, b in pairwise(values) if overlap(values[a], values[b])]
    unsettled = f"too few sessions of {', '.join(few)} to tell" if few else ""
    if blurred:
        unsettled = f"the sessions of {', and those of '.join(blurred)} overlap, so their order is not settled"
    return float(all(a > b for a, b in pairwise(middles.values()))), text, unsettled


def overlap(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether the ranges of two sets of sessions have a value in common."""
    return min(one) <= max(other) and min(other) <= max(one)
