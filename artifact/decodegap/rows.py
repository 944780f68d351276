"""What a row of the analysis is: one arm of one session, and all sessions of one arm of a cell on one host."""

from dataclasses import dataclass
from typing import Literal

from decodegap.schema import Outcome

Store = Literal["shipped", "yours", "imported"]


def whose(store: str) -> str:
    """What stands after a system's name so that nobody takes one store's values for another's."""
    return "" if store in ("", "shipped") else f" ({store})"


def sessions(number: int) -> str:
    """So many sessions, in words that agree."""
    return counted(number, "session")


def counted(number: int, one: str, many: str = "") -> str:
    """So many of what `one` names; `many` is its plural where an s does not make it."""
    return f"{number} {one if number == 1 else many or one + 's'}"


@dataclass(frozen=True)
class SessionRow:
    """One arm of one session. `step_ms` is recomputed from the raw samples; None stands for what was not measured."""

    store: Store
    gpu: str
    gpu_label: str
    experiment: str
    model: str
    ctx: int
    cell_arm: str  # the arm of the record's cell; differs from `arm` where a session measures several
    arm: str
    dtype: str
    sdpa: str
    protocol: str  # hash of the protocol without the revision of the weights
    weights: str
    weights_revision: str
    host: str
    session: int
    outcome: Outcome
    reason: str
    step_ms: float | None
    event_ms: float | None
    free_ms: float | None
    energy_j_per_step: float | None
    sustained_ms: float | None
    sustained_clock_mhz: float | None
    sustained_power_w: float | None
    floor_published_ms: float | None
    floor_streamed_ms: float | None
    floor_achievable_ms: float | None
    weights_bytes: int
    streamed_bytes: int
    kv_bytes: int
    peak_gb_s: float | None
    peak_source: str
    read_gb_s: float | None
    dispatch_us: float | None
    cache_mib: float | None
    stand_in: bool
    flags: tuple[str, ...]
    unstable: bool  # whether its timing did not hold still (steadiness.py)
    capped: bool  # whether the card met its power cap (steadiness.py)
    started_at: str
    record: str  # content hash


@dataclass(frozen=True)
class CellRow:
    """All sessions of one arm of a cell on one host, with one outcome.

    `step_ms` is the mean over sessions and `low_ms`, `high_ms` its spread, of the kind that `spread` says; floors,
    bandwidths and the rest are medians over sessions; a fraction is its floor divided by `step_ms`.
    """

    store: Store
    gpu: str
    gpu_label: str
    experiment: str
    model: str
    ctx: int
    cell_arm: str
    arm: str
    dtype: str
    sdpa: str
    protocol: str
    weights: str
    host: str
    hosts: tuple[str, ...]  # all that measured this experiment on this GPU, in this store; a row is of one of them
    outcome: Outcome
    reason: str
    sessions: int
    session_ids: tuple[int, ...]
    values_ms: tuple[float, ...]
    step_ms: float | None
    low_ms: float | None
    high_ms: float | None
    spread: str
    event_ms: float | None
    free_ms: float | None
    energy_j_per_step: float | None
    sustained_ms: float | None
    sustained_clock_mhz: float | None
    sustained_power_w: float | None
    floor_published_ms: float | None
    floor_streamed_ms: float | None
    floor_achievable_ms: float | None
    fraction_published: float | None
    fraction_streamed: float | None
    fraction_achievable: float | None
    weights_bytes: int
    streamed_bytes: int
    kv_bytes: int
    peak_gb_s: float | None
    peak_source: str
    read_gb_s: float | None
    dispatch_us: float | None
    cache_mib: float | None
    stand_in: bool
    flags: tuple[str, ...]
    unstable: int  # sessions whose timing did not hold still (steadiness.py)
    capped: int  # sessions in which the card met its power cap (steadiness.py)
    started_at: str  # of the newest session
    records: tuple[str, ...]
