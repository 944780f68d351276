"""What the launch experiment's records say: paired ratios, and one anatomy for each arm."""

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from decodegap import anatomy, frame, models, plan, stats
from decodegap.grid import model_label
from decodegap.rows import Store, counted, whose
from decodegap.schema import Anatomy, Attestation, Record
from decodegap.stats import Method, Summary

EXPERIMENT = "graphs"
SAME_WORK = "ab"  # the pair that must do the same work, kernel for kernel and bit for bit
GRAPH_LAUNCHED = ("graph", "graph-static", "graph-stock", "compiled", "fused-plain", "fused", "fused-int4")
ARM_ORDER = ("eager", "eager-auto", "eager-pinned", *GRAPH_LAUNCHED)


@dataclass(frozen=True)
class Kept:
    """A record, and the store that it is in."""

    store: Store
    record: Record

    @property
    def host(self) -> str:
        """The tag of the host that it was measured on; empty if it does not say."""
        return self.record.machine.host_tag if self.record.machine else ""

    @property
    def dispatch_us(self) -> float | None:
        """What starting a tiny kernel cost that session's host."""
        return self.record.machine.dispatch_us if self.record.machine else None


@dataclass(frozen=True)
class Where:
    """A cell of the launch experiment in one store, without its arm."""

    store: Store
    gpu: str
    gpu_label: str
    model: str
    ctx: int

    @property
    def system(self) -> str:
        """The GPU for people, with the store where it is not the shipped one."""
        return self.gpu_label + whose(self.store)

    @property
    def short(self) -> str:
        """The cell in as few letters as a figure needs."""
        return short(self.gpu_label, self.model, self.ctx) + whose(self.store)


@dataclass(frozen=True)
class PairedSession:
    """One A/B session. `ratio` is None where it gave none; `doubts` are what keeps it from being attested."""

    kept: Kept
    ratio: float | None
    steps_ms: tuple[float, float] | None
    doubts: tuple[str, ...]


@dataclass(frozen=True)
class Paired:
    """All sessions of one A/B cell, and what those with a ratio say together."""

    where: Where
    arm: str  # of the cell: which pair
    first: str
    second: str
    sessions: tuple[PairedSession, ...]
    summary: Summary | None
    coverage: dict[Method, float]  # of each interval, simulated; empty without an interval

    @property
    def counted(self) -> tuple[PairedSession, ...]:
        """The sessions with a ratio."""
        return tuple(session for session in self.sessions if session.ratio is not None)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the sessions with a ratio."""
        return tuple(dict.fromkeys(session.kept.host for session in self.counted))

    def step_ms(self, index: int) -> float:
        """The mean over sessions of the first (0) or second (1) arm's step."""
        return statistics.fmean(session.steps_ms[index] for session in self.counted if session.steps_ms)


@dataclass(frozen=True)
class Dissected:
    """An arm's anatomy: that of the session whose step is the middle one of the arm's `sessions`."""

    where: Where
    kept: Kept
    anatomy: Anatomy
    sessions: int

    @property
    def arm(self) -> str:
        """Which arm it is."""
        return self.anatomy.arm


def pairs(kept: Iterable[Kept]) -> list[Paired]:
    """The A/B cells among `kept`, in the order of GPUs, models and contexts."""
    groups: dict[tuple[Where, str], list[Kept]] = defaultdict(list)
    for each in kept:
        cell = each.record.cell
        if cell.experiment == EXPERIMENT and cell.arm.startswith("ab"):
            groups[where(each), cell.arm].append(each)
    return [_paired(*key, group) for key, group in sorted(groups.items(), key=lambda item: order(item[0][0]))]


def dissected(kept: Iterable[Kept], experiment: str = EXPERIMENT) -> list[Dissected]:
    """One anatomy for each arm of each cell of the launch experiment, or of another one."""
    groups: dict[tuple[Where, str], list[tuple[float, Kept, Anatomy]]] = defaultdict(list)
    for each in kept:
        if each.record.cell.experiment == experiment and each.record.outcome == "ok":
            for found in each.record.anatomy:
                groups[where(each), found.arm].append((found.step_ms, each, found))
    chosen = []
    for (cell, _), group in groups.items():
        group.sort(key=lambda item: (item[0], item[1].record.session))
        _, middle, found = group[(len(group) - 1) // 2]
        chosen.append(Dissected(cell, middle, found, len(group)))
    return sorted(chosen, key=lambda each: (*order(each.where), arm_index(each.arm)))


def plan_costs(found: Sequence[Dissected]) -> dict[Where, float]:
    """For each cell with both arms: host time (ms a step) that `eager-auto` takes beyond `eager`."""
    arms = {(each.where, each.arm): each.anatomy for each in found}
    both = dict.fromkeys(each.where for each in found)
    return {
        cell: anatomy.plan_cost_ms(arms[cell, "eager-auto"], arms[cell, "eager"])
        for cell in both
        if (cell, "eager-auto") in arms and (cell, "eager") in arms
    }


def planned(gpu: str) -> Counter[tuple[str, int, str]]:
    """How many sessions the launch experiment plans on `gpu` for each model, context and arm of a cell."""
    tasks = plan.graphs(plan.request(gpu=gpu), gpu)
    return Counter((task.cell.model, task.cell.ctx, task.cell.arm) for task in tasks)


def where(kept: Kept) -> Where:
    """The cell of a record, without its arm."""
    cell = kept.record.cell
    return Where(kept.store, cell.gpu, frame.label(kept.record), cell.model, cell.ctx)


def short(gpu_label: str, model: str, ctx: int) -> str:
    """A cell in few letters: H100, Qwen2.5-7B, 2k."""
    tokens = f"{ctx // 1024}k" if ctx % 1024 == 0 else str(ctx)
    return ", ".join([gpu_label.split(" ", maxsplit=1)[0], model_label(model), tokens])


def arm_index(arm: str) -> int:
    """Where an arm stands in a table: stock first, then with less and less launching."""
    return ARM_ORDER.index(arm) if arm in ARM_ORDER else len(ARM_ORDER)


def _paired(cell: Where, arm: str, group: Sequence[Kept]) -> Paired:
    sessions = tuple(_session(each) for each in sorted(group, key=lambda each: (each.record.session, each.host)))
    values = [session.ratio for session in sessions if session.ratio is not None]
    pair = next((each.record.pair for each in group if each.record.pair), None)
    summary = stats.summarise(values) if values else None
    held = _coverage(len(values), _noise(values)) if summary and summary.spread == "interval" else {}
    second = "graph" if arm == SAME_WORK else arm.removeprefix("ab-")
    names = (pair.first, pair.second) if pair else ("eager-pinned", second)
    return Paired(cell, arm, *names, sessions=sessions, summary=summary, coverage=held)


def _session(kept: Kept) -> PairedSession:
    record = kept.record
    steps = {series.arm: series.step_ms for series in record.series}
    if record.outcome != "ok" or record.pair is None:
        why = "; ".join(record.reasons) or "no ratio"
        return PairedSession(kept, None, None, (f"{record.outcome}: {why}",))
    doubts = [text for each in record.attestations for text in _doubts(each)]
    if not record.attestations:
        doubts = ["nothing was compared"]
    return PairedSession(kept, record.pair.ratio, (steps[record.pair.first], steps[record.pair.second]), tuple(doubts))


def _doubts(seen: Attestation) -> list[str]:
    found = []
    if not seen.outputs_equal:
        found.append(f"outputs differ by {seen.max_abs_difference:.1g}")
    if not seen.outputs_changed:
        found.append("outputs did not change with the token")
    if not seen.kernels_equal:
        found.append(f"launches of {counted(len(seen.kernels_differing), 'kernel')} differ")
    return found


def _noise(ratios: Sequence[float]) -> float:
    """The log-normal noise of each arm that gives ratios as wide as these."""
    return statistics.stdev(math.log(ratio) for ratio in ratios) / math.sqrt(2)


@functools.cache
def _coverage(sessions: int, noise: float) -> dict[Method, float]:
    return stats.coverage(sessions, noise=noise)


def order(cell: Where) -> tuple[Any, ...]:
    """What cells are sorted by: GPU, then model as in the catalogue, context and store."""
    known = list(models.catalogue())
    model = known.index(cell.model) if cell.model in known else len(known)
    return cell.gpu, cell.gpu_label, model, cell.model, cell.ctx, cell.store
