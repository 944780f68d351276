"""Which of a GPU's records a claim is about, and what they say in one number: what all measures share."""

import statistics
from collections.abc import Iterable

from decodegap import frame
from decodegap.claims import Claim
from decodegap.rows import CellRow
from decodegap.schema import Record


def rows(records: Iterable[Record], experiment: str, arm: str | None) -> list[CellRow]:
    """The sound rows of one arm of an experiment, one a cell and host."""
    found = frame.cells(frame.sessions((r for r in records if r.cell.experiment == experiment), "shipped"))
    return [row for row in found if row.outcome == "ok" and row.arm == arm]


def of_cell(claim: Claim, found: Iterable[CellRow]) -> list[CellRow]:
    """Those rows that are of the claim's model and context."""
    return [row for row in found if (row.model, row.ctx) == (claim.model, claim.ctx)]


def sessions(records: Iterable[Record], experiment: str, model: str | None, ctx: int | None, arm: str) -> list[Record]:
    """The sound sessions of a cell's arm; of every model and context if `model` is None."""
    wanted = [r for r in records if r.outcome == "ok" and (r.cell.experiment, r.cell.arm) == (experiment, arm)]
    return [r for r in wanted if model is None or (r.cell.model, r.cell.ctx) == (model, ctx)]


def step_ms(records: Iterable[Record], experiment: str, model: str | None, ctx: int | None, arm: str) -> float | None:
    """The mean over hosts of an arm's mean step (ms); None without one."""
    found = [row for row in rows(records, experiment, arm) if (row.model, row.ctx) == (model, ctx)]
    steps = [row.step_ms for row in found if row.step_ms is not None]
    return statistics.fmean(steps) if steps else None


def fractions(found: Iterable[CellRow]) -> list[float]:
    """The published fraction of each session."""
    return [row.floor_published_ms / step for row in found if row.floor_published_ms for step in row.values_ms]
