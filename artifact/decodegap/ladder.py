"""What the ladder's records say: for each cell its rungs from the lowest to the highest, and what each changes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodegap import anatomy, launch, plan, plan_ladder, stats
from decodegap.frame import from_frame
from decodegap.grid import NOT_MEASURED
from decodegap.launch import Kept, Where
from decodegap.plan_ladder import EXPERIMENT, RUNGS
from decodegap.rows import CellRow
from decodegap.schema import Anatomy, Check

if TYPE_CHECKING:
    import pandas as pd

# The part of the step (`anatomy.PARTS`) that a rung aims at, beside the rung below it. What it does is measured.
AIMS = {
    "eager-pinned": "exposed host",  # the host's work around the launches: masks, positions, the cache's bookkeeping
    "graph": "exposed host",  # the launches themselves
    "graph-static": "extra traffic",  # the concatenation of the whole cache for one token
    "compiled": "kernel inefficiency",  # the kernels that move activations only
    "fused-plain": "kernel inefficiency",  # products that stream their weights more slowly than memory can
    "fused": "bubbles",  # the pauses between kernels
    "fused-int4": "floor",  # the bytes themselves
}
MEANS = {
    "eager": "the library's own step, launched kernel by kernel, its attention pinned to one kernel",
    "eager-pinned": "the step that graph captures, still launched kernel by kernel: token and position stay in place, "
    "and the library makes no mask and keeps no books of its cache",
    "graph": "that step replayed from one CUDA graph",
    "graph-static": "the same with a cache of fixed size, which is not copied when a token is added",
    "compiled": "graph-static through torch.compile",
    "fused-plain": "this project's own kernels in one graph, each begun when the one before it has ended, as on a card "
    "without programmatic launch",
    "fused": "those kernels, each begun before the one before it has ended (programmatic launch)",
    "fused-int4": "fused, its projections in 4 bits",
}
LEAST_MS = 0.005  # a part that changes by less is shown as 0.00


@dataclass(frozen=True)
class Rung:
    """One rung of one ladder. `row` is None where it was not measured, for `reason`.

    `parts` are those of the session with the number `dissected`, None where none was profiled; `check` is the worst of
    all sessions.
    """

    arm: str
    row: CellRow | None
    reason: str
    parts: Anatomy | None
    check: Check | None
    dissected: int | None = None

    @property
    def aims_at(self) -> str:
        """The part of the step that it is there to shrink; empty for the lowest."""
        return AIMS.get(self.arm, "")

    @property
    def read_gb_s(self) -> float | None:
        """The read bandwidth of the dissected session (GB/s), by which its floor and extra traffic are timed."""
        if self.parts is None:
            return None
        ms = sum(self.parts.ledger_ms.values())
        return sum(self.parts.ledger_bytes.values()) / ms / 1e6 if ms else None


@dataclass(frozen=True)
class Ladder:
    """All rungs of a cell on one host, but for those that only other hosts have measured.

    `limit_ms` is the achievable floor of its 16-bit rungs, the median over them.
    """

    where: Where
    host: str
    hosts: int
    rungs: tuple[Rung, ...]
    limit_ms: float | None

    def rung(self, arm: str) -> Rung | None:
        """The rung that this arm is, None where another host measured it."""
        return next((rung for rung in self.rungs if rung.arm == arm), None)

    def below(self, arm: str) -> Rung | None:
        """The next lower rung that was dissected."""
        lower = [rung for rung in self.rungs if rung.parts and RUNGS.index(rung.arm) < RUNGS.index(arm)]
        return lower[-1] if lower else None

    def changes(self, arm: str) -> dict[str, float]:
        """By how much (ms) each part is larger on this rung than on the one below; empty where either is unknown."""
        mine, below = self.rung(arm), self.below(arm)
        if mine is None or mine.parts is None or below is None or below.parts is None:
            return {}
        return {name: mine.parts.parts_ms[name] - below.parts.parts_ms[name] for name in anatomy.PARTS}

    def shrank_most(self, arm: str) -> str:
        """The part that shrank most from the rung below to this one; empty if none did, or it is not known."""
        found = self.changes(arm)
        most = min(found, key=lambda name: found[name], default="")
        return most if most and found[most] <= -LEAST_MS else ""

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
    same = [row for row in rows if (row.store, row.gpu, row.model, row.ctx) == _at(where)]
    cells = [row for row in same if row.host == host]
    parts = {each.arm: each for each in launch.dissected(here, EXPERIMENT)}
    checks = [check for each in here for check in each.record.checks]
    measured = {row.arm: row for row in cells if row.outcome == "ok"}
    asked = {arm for model, ctx, arm in planned(where.gpu) if (model, ctx) == (where.model, where.ctx)}
    said = {arm for each in here for arm in each.record.refused}
    planned_here = asked or {arm for arms in plan_ladder.groups(where.gpu).values() for arm in arms}
    elsewhere = {row.arm for row in same if row.host != host and row.outcome == "ok"}
    wanted = (planned_here - elsewhere) | set(measured) | said
    rungs = tuple(
        Rung(
            arm=arm,
            row=measured.get(arm),
            reason=_why(arm, cells, here),
            parts=parts[arm].anatomy if arm in parts else None,
            check=max((check for check in checks if check.arm == arm), key=_beside_eager, default=None),
            dissected=parts[arm].kept.record.session if arm in parts else None,
        )
        for arm in RUNGS
        if arm in wanted
    )
    limits = [r.row.floor_achievable_ms for r in rungs if r.row and r.arm != plan_ladder.INT4]
    known = [limit for limit in limits if limit is not None]
    hosts = len({host for row in rows if (row.store, row.gpu) == (where.store, where.gpu) for host in row.hosts})
    return Ladder(where, host, max(1, hosts), rungs, stats.median(known) if known else None)


def _beside_eager(check: Check) -> tuple[bool, float]:
    """What checks of a rung are sorted by: that it proves nothing, then its error as a multiple of stock eager's."""
    return not check.proves, check.error / check.eager_error if check.eager_error else check.error


def _at(where: Where) -> tuple[str, str, str, int]:
    return where.store, where.gpu, where.model, where.ctx


def _why(arm: str, cells: Sequence[CellRow], records: Sequence[Kept]) -> str:
    """Why a rung is not there: what its session said of it, or of itself."""
    said = [each.record.refused[arm] for each in records if arm in each.record.refused]
    if said:
        return f"unsupported: {said[0]}"
    failed = [row for row in cells if row.outcome != "ok" and arm in plan_ladder.groups(row.gpu).get(row.cell_arm, ())]
    return f"{failed[0].outcome}: {failed[0].reason}" if failed else NOT_MEASURED
