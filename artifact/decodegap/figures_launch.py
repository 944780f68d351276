"""Which figures the launch experiment has: from its records to the anatomy's bars, the ratios and the dispatch plot."""

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from decodegap import figures_anatomy, frame, gpus, launch, models
from decodegap.figures_anatomy import Bar, DispatchPoint, Ratios
from decodegap.launch import Kept
from decodegap.published import Published, Value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EAGER_ARMS = ("eager", "eager-pinned")
HOST_BOUND = 0.8  # an eager step is host-bound if its enqueueing takes at least this share of it


def anatomy(kept: Iterable[Kept]) -> "Figure":
    """The parts of every arm's step, cell by cell."""
    return figures_anatomy.parts([Bar(e.where.short, e.arm, e.anatomy) for e in launch.dissected(kept)])


def ratios(kept: Iterable[Kept], published: Published) -> "Figure":
    """Every session's paired ratio, its mean and interval, beside the study's ratios."""
    quoted = [(_study(value), value) for value in published.values if value.quantity == "graph_speedup"]
    return figures_anatomy.ratios(_strips(kept), quoted, second="graph")


def cpu_ratios(kept: Iterable[Kept]) -> "Figure":
    """The same on a CPU, where the second arm is compiled and the study has nothing to say."""
    return figures_anatomy.ratios(_strips(kept), [], second="compiled")


def dispatch(kept: Iterable[Kept]) -> "Figure":
    """The eager step of every host-bound session against its dispatch cost."""
    return figures_anatomy.dispatch(points(kept))


def points(kept: Iterable[Kept]) -> list[DispatchPoint]:
    """Every host-bound eager session of the study's first model, baseline sessions among them."""
    model = models.with_role("paper")[0].slug
    found = []
    for each in kept:
        record = each.record
        if record.cell.model != model or record.outcome != "ok" or not each.dispatch_us:
            continue
        counted = {seen.arm: seen.launches for seen in record.anatomy}
        for series in record.series:
            launches = counted.get(series.arm) or (sum(record.ran.kernels.values()) if record.ran else 0)
            host_bound = statistics.median(series.enqueue_ms) >= HOST_BOUND * series.step_ms
            if series.arm in EAGER_ARMS and launches and host_bound:
                name = f"{frame.label(record)}, host {each.host[:4]}"
                found.append(DispatchPoint(name, each.dispatch_us, series.step_ms, float(launches)))
    return sorted(found, key=lambda point: (point.host, point.dispatch_us, point.step_ms))


def _strips(kept: Iterable[Kept]) -> Sequence[Ratios]:
    return [Ratios(each.where.short, each.summary) for each in launch.pairs(kept) if each.summary]


def _study(value: Value) -> str:
    gpu = gpus.known(value.gpu).label if value.gpu else ""
    return launch.short(gpu, value.model or "", value.ctx if isinstance(value.ctx, int) else 0)
