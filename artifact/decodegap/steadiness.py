"""Did a session's timing hold still? Said aloud where it did not: the record counts, and its step is marked.

A session is unstable if its steps spread or if its host was overloaded, and capped if the card slowed itself to stay
within its power. All are read from the record, so that a rule made later judges old records too.
"""

import statistics
from collections.abc import Sequence

from decodegap.schema import Record, Series

# pyperf calls a benchmark unstable whose standard deviation is above a tenth of its mean. The middle half of the steps
# is looked at instead, because a single late step is common and does not move a median.
MOST_SPREAD = 0.10
MIN_STEPS = 4  # fewer have no middle half
LOAD_FLAG = "load "  # how fitness.py's rule of that name begins what it says
MARK = "¶"
NOTE = (
    f"{MARK}: unstable. In one or more of its sessions the middle half of the steps spans more than "
    f"{MOST_SPREAD:.0%} of their median, or the host was loaded."
)
POWER_CAP = "software power cap"  # NVML's reason, which is a session's flag too
CAP_MARK = "‖"
CAP_NOTE = (
    f"{CAP_MARK}: at the power cap. In one or more of its sessions the card slowed its clock to stay within its power: "
    "near the end of the arm's own loop where it has one, else before or after the measurement."
)


def spread(values: Sequence[float]) -> float:
    """Width of the middle half of `values` over their median; 0 for fewer than `MIN_STEPS`."""
    if len(values) < MIN_STEPS:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def doubts(record: Record, series: Series | None = None) -> list[str]:
    """Why the timing of `record`, or of one `series` of it, did not hold still; empty where it did."""
    found = []
    for each in [series] if series else record.series:
        wide = spread(each.wall_ms)
        if wide > MOST_SPREAD:
            found.append(f"the middle half of the {each.arm} steps spans {wide:.0%} of their median")
    return found + [flag for flag in record.flags if flag.startswith(LOAD_FLAG)]


def capped(record: Record, series: Series | None = None) -> bool:
    """Whether the card met its power cap: in the loop of `series` if it has one, else by the flag of the session."""
    loop = series.sustained if series else None
    if loop is None:
        return POWER_CAP in record.flags
    return any(state is not None and POWER_CAP in state.throttle_reasons for state in (loop.during, loop.after))
