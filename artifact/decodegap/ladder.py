"""What the ladder's records say: for each cell its rungs from the lowest to the highest, and the term each removes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodegap import launch, plan, plan_ladder, stats
from decodegap.frame import from_frame
from decodegap.grid import NOT_MEASURED
from decodegap.launch import Kept, Where
from decodegap.plan_ladder import EXPERIMENT, RUNGS
from decodegap.rows import CellRow
from decodegap.schema import Anatomy, Check

if TYPE_CHECKING:
    import pandas as pd

# The part of the step (`anatomy.PARTS`) that a rung is there to remove, beside the rung below it.
REMOVES = {
    "eager-pinned": "exposed host",  # the host's work around the launches: masks, positions, the cache's bookkeeping
    "graph": "exposed host",  # the launches themselves
    "graph-static": "extra traffic",  # the concatenation of the whole cache for one token
    "compiled": "kernel inefficiency",  # the kernels that move activations only
    "fused-plain": "kernel inefficiency",  # products that stream their weights more slowly than memory can
    "fused": "bubbles",  # the pauses between kernels
    "fused-int4": "floor",  # the bytes themselves
}


@dataclass(frozen=True)
class Rung:
    """One rung of one ladder. `row` is None where it was not measured, for `reason`; `parts` where not profiled."""

    arm: str
    row: CellRow | None
    reason: str
    parts: Anatomy | None
    check: Check | None

    @property
    def removes(self) -> str:
        """The part of the step that it is there to remove; empty for the lowest."""
        return REMOVES.get(self.arm, "")


@dataclass(frozen=True)
class Ladder:
    """All rungs of a cell on one host. `limit_ms` is the achievable floor of its 16-bit rungs, median over sessions."""

    where: Where
    host: str
    hosts: int
    rungs: tuple[Rung, ...]
    limit_ms: float | None

    def rung(self, arm: str) -> Rung:
        """The rung that this arm is."""
        return next(rung for rung in self.rungs if rung.arm == arm)

    def below(self, arm: str) -> Rung | None:
        """The next lower rung that was dissected."""
        lower = [rung for rung in self.rungs if rung.parts and RUNGS.index(rung.arm) < RUNGS.index(arm)]
        return lower[-1] if lower else None

    @property
    def name(self) -> str:
        """The cell in few letters, with its host where there are several."""
        return self.where.short + (f", host {self.host[:4]}" if self.hosts > 1 else "")


def ladders(frame: "pd.DataFrame", kept: Sequence[Kept]) -> list[Ladder]:
    """A ladder for every cell, store and host with a rung that was measured, in the order of cells."""
    rows = from_frame(frame[frame["experiment"] == EXPERIMENT])
    records = [each for each in kept if each.record.cell.experiment == EXPERIMENT]
    places = {(launch.where(each), each.host) for each in records if each.record.outcome == "ok"}
    found = [_ladder(where, host, rows, records) for where, host in places]
    return sorted(found, key=lambda ladder: (*launch.order(ladder.where), ladder.host))


def planned(gpu: str) -> dict[tuple[str, int, str], int]:
    """How many sessions are planned on `gpu` for each model, context and rung."""
    wanted: dict[tuple[str, int, str], int] = {}
    for task in plan_ladder.ladder(plan.request(gpu=gpu), gpu):
        for arm in plan_ladder.groups(gpu)[task.cell.arm]:
            at = (task.cell.model, task.cell.ctx, arm)
            wanted[at] = wanted.get(at, 0) + 1
    return wanted


def missing(found: Iterable[Ladder], kept: Iterable[Kept]) -> list[Where]:
    """The cells that the ladder plans on the GPUs of these records (no CPU), and that have no rung at all."""
    have = {(each.where.gpu, each.where.model, each.where.ctx) for each in found}
    labels = {each.record.cell.gpu: launch.where(each).gpu_label for each in kept if each.record.cell.gpu != "cpu"}
    return [
        Where("shipped", gpu, label, model, ctx)
        for gpu, label in labels.items()
        for model, ctx in dict.fromkeys((model, ctx) for model, ctx, _ in planned(gpu))
        if (gpu, model, ctx) not in have
    ]


def _ladder(where: Where, host: str, rows: Sequence[CellRow], records: Sequence[Kept]) -> Ladder:
    here = [each for each in records if launch.where(each) == where and each.host == host]
    cells = [row for row in rows if (row.store, row.gpu, row.model, row.ctx) == _at(where) and row.host == host]
    parts = {each.arm: each.anatomy for each in launch.dissected(here, EXPERIMENT)}
    checks = {check.arm: check for each in here for check in each.record.checks}
    measured = {row.arm: row for row in cells if row.outcome == "ok"}
    asked = {arm for model, ctx, arm in planned(where.gpu) if (model, ctx) == (where.model, where.ctx)}
    said = {arm for each in here for arm in each.record.refused}
    wanted = (asked or {arm for arms in plan_ladder.groups(where.gpu).values() for arm in arms}) | set(measured) | said
    rungs = tuple(
        Rung(arm, measured.get(arm), _why(arm, cells, here), parts.get(arm), checks.get(arm))
        for arm in RUNGS
        if arm in wanted
    )
    limits = [r.row.floor_achievable_ms for r in rungs if r.row and r.arm != plan_ladder.INT4]
    known = [limit for limit in limits if limit is not None]
    hosts = len({host for row in rows if (row.store, row.gpu) == (where.store, where.gpu) for host in row.hosts})
    return Ladder(where, host, max(1, hosts), rungs, stats.median(known) if known else None)


def _at(where: Where) -> tuple[str, str, str, int]:
    return where.store, where.gpu, where.model, where.ctx


def _why(arm: str, cells: Sequence[CellRow], records: Sequence[Kept]) -> str:
    """Why a rung is not there: what its session said of it, or of itself."""
    said = [each.record.refused[arm] for each in records if arm in each.record.refused]
    if said:
        return f"unsupported: {said[0]}"
    failed = [row for row in cells if row.outcome != "ok" and arm in plan_ladder.groups(row.gpu).get(row.cell_arm, ())]
    return f"{failed[0].outcome}: {failed[0].reason}" if failed else NOT_MEASURED
