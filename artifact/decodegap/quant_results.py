"""What the records of quantised paths say: speed-ups promised by bytes and realised, and where the rest of a step goes.

Analysis only, without torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decodegap import floor, gpus, launch, models, plan, plan_quantised, quant_catalogue
from decodegap.frame import from_frame
from decodegap.grid import Kind
from decodegap.launch import Kept, Where
from decodegap.published import DTYPE, Published
from decodegap.quant_catalogue import GRAPH_SUFFIX, PATHS, QuantPath
from decodegap.rows import CellRow
from decodegap.schema import Check, Projection

if TYPE_CHECKING:
    import pandas as pd


EXPERIMENT = "quantised"
CODE_BITS = 4  # of a quantised weight without its scale: what "a quarter of the bytes" is about
EAGER, GRAPH = "eager", "graph"


@dataclass(frozen=True)
class Line:
    """One path in one cell, as one store and host measured it, as the study published it, or missing.

    Speed-ups are over the baseline of the same store and host (bf16, on a CPU fp32); `promised` is that of the bytes.
    """

    where: Where
    path: QuantPath
    kind: Kind
    host: str
    reason: str
    eager: CellRow | None
    graph: CellRow | None
    step_ms: float | None  # launched kernel by kernel
    graph_ms: float | None
    held_gb: float | None  # all weights, as held; by arithmetic where nobody measured
    floor_ms: float | None  # the quantised floor: those and the KV cache at peak bandwidth
    streamed_ms: float | None  # the same without the embedding that a step does not read
    promised: float | None
    gain: float | None
    graph_gain: float | None
    base_eager: CellRow | None = None  # the baseline's rows, of the same store and host
    base_graph: CellRow | None = None

    @property
    def best_gain(self) -> float | None:
        """The larger of the two speed-ups."""
        return max((gain for gain in (self.gain, self.graph_gain) if gain is not None), default=None)

    def gain_range(self, how: str) -> tuple[float, float] | None:
        """The smallest and largest speed-up that the sessions allow, launched `how`; None where nothing is measured.

        A path and its baseline have sessions of their own, so it is the extremes of one over those of the other.
        """
        fast, slow = (self.eager, self.base_eager) if how == EAGER else (self.graph, self.base_graph)
        if fast is None or slow is None or not fast.values_ms or not slow.values_ms:
            return None
        return min(slow.values_ms) / max(fast.values_ms), max(slow.values_ms) / min(fast.values_ms)


@dataclass(frozen=True)
class Checked:
    """What a check session says of one path: its whole-model check and its projections, or why there are none."""

    where: Where
    path: QuantPath
    check: Check | None
    projections: tuple[Projection, ...]
    reason: str
    record: str


def lines(frame: "pd.DataFrame", published: Published | None, *, cpu: bool = False) -> list[Line]:
    """Every path of every cell: measured, missing with its reason, and on GPUs what the study published."""
    rows = [row for row in from_frame(frame[frame["experiment"] == EXPERIMENT]) if (row.gpu == "cpu") == cpu]
    rows = [row for row in rows if row.cell_arm != plan.CHECK and row.cell_arm in PATHS]
    found = _measured(rows)
    if not cpu:
        labels = {row.gpu: row.gpu_label for row in from_frame(frame) if row.gpu != "cpu" and row.store == "shipped"}
        found += _missing(labels, found)
        found += _published(published) if published else []
    return sorted(found, key=_order)


def checked(kept: Iterable[Kept], *, cpu: bool = False) -> list[Checked]:
    """What the check sessions found, path by path."""
    found = []
    for each in kept:
        record = each.record
        cell = record.cell
        if (cell.experiment, cell.arm) != (EXPERIMENT, plan.CHECK) or (cell.gpu == "cpu") != cpu:
            continue
        checks = {check.arm: check for check in record.checks}
        for slug, path in PATHS.items():
            projections = tuple(p for p in record.projections if p.path == slug)
            if slug in checks or projections or slug in record.refused:
                reason = record.refused.get(slug, "")
                found.append(
                    Checked(launch.where(each), path, checks.get(slug), projections, reason, record.content_hash)
                )
    return sorted(found, key=lambda each: (launch.order(each.where), list(PATHS).index(each.path.slug)))


def promised(model: str, ctx: int, path: QuantPath) -> float:
    """The speed-up over bf16 that the bytes of `path` promise: bytes read in a step, before and after. Arithmetic."""
    known = models.lookup(model)
    kv = known.kv_bytes(ctx, DTYPE)
    element = floor.ELEMENT_BYTES[DTYPE]
    return (known.streamed_bytes(DTYPE) + kv) / (floor.quantised_bytes(known.config, element, path.bits) + kv)


def _measured(rows: Sequence[CellRow]) -> list[Line]:
    groups = list(dict.fromkeys((row.store, row.gpu, row.model, row.ctx, row.host, row.cell_arm) for row in rows))
    by = {(row.store, row.gpu, row.model, row.ctx, row.host, row.arm): row for row in rows if row.outcome == "ok"}
    found = []
    for key in groups:
        here, slug = key[:-1], key[-1]
        mine = [row for row in rows if (row.store, row.gpu, row.model, row.ctx, row.host, row.cell_arm) == key]
        first = next((row for row in mine if row.outcome == "ok"), mine[0])
        where = Where(first.store, first.gpu, first.gpu_label, first.model, first.ctx)
        eager, graph = by.get((*here, slug)), by.get((*here, slug + GRAPH_SUFFIX))
        if eager is None:
            elsewhere = any(row.outcome == "ok" and row.cell_arm == slug and row.store == first.store
                            and (row.gpu, row.model, row.ctx) == (first.gpu, first.model, first.ctx)
                            for row in rows)  # fmt: skip
            if not elsewhere:
                found.append(_empty(where, PATHS[slug], f"{first.outcome}: {first.reason}", first.host))
            continue
        base_slug = quant_catalogue.baseline_on(first.gpu)
        base, base_graph = by.get((*here, base_slug)), by.get((*here, base_slug + GRAPH_SUFFIX))
        found.append(
            Line(
                where=where, path=PATHS[slug], kind="measured", host=first.host, reason="", eager=eager, graph=graph,
                step_ms=eager.step_ms, graph_ms=graph.step_ms if graph else None,
                held_gb=eager.weights_bytes / 1e9,
                floor_ms=eager.floor_published_ms, streamed_ms=eager.floor_streamed_ms,
                promised=_read(base) / _read(eager) if base else None,
                gain=_over(base, eager), graph_gain=_over(base_graph, graph),
                base_eager=base, base_graph=base_graph,
            )
        )  # fmt: skip
    return found


def _read(row: CellRow) -> int:
    return row.streamed_bytes + row.kv_bytes


def _over(slow: CellRow | None, fast: CellRow | None) -> float | None:
    return slow.step_ms / fast.step_ms if slow and fast and slow.step_ms and fast.step_ms else None


def _empty(where: Where, path: QuantPath, reason: str, host: str = "") -> Line:
    nothing: dict[str, Any] = dict.fromkeys(
        (
            "eager",
            "graph",
            "step_ms",
            "graph_ms",
            "held_gb",
            "floor_ms",
            "streamed_ms",
            "promised",
            "gain",
            "graph_gain",
        )
    )
    return Line(where=where, path=path, kind="missing", host=host, reason=reason, **nothing)


def _missing(labels: dict[str, str], found: Sequence[Line]) -> list[Line]:
    """The planned paths of the GPUs in `labels` that nothing is known of."""
    have = {(line.where.gpu, line.where.model, line.where.ctx, line.path.slug) for line in found}
    made = []
    for gpu, label in labels.items():
        for cell in dict.fromkeys(task.cell for task in plan_quantised.quantised(plan.request(gpu=gpu), gpu)):
            if cell.arm in PATHS and (gpu, cell.model, cell.ctx, cell.arm) not in have:
                where = Where("shipped", gpu, label, cell.model, cell.ctx)
                made.append(_empty(where, PATHS[cell.arm], "not measured"))
    return made


def _published(published: Published) -> list[Line]:
    """The study's steps of the paths that have its names; bytes, floors and promises are arithmetic on their bits."""
    quoted = [v for v in published.values if v.quantity == "step_ms" and v.arm in PATHS and v.gpu and v.model]  # noqa: PD011
    base = {(v.gpu, v.model, v.ctx): v.value for v in quoted if v.arm == quant_catalogue.baseline_on(v.gpu or "")}
    found = []
    for value in quoted:
        gpu, model, ctx = value.gpu or "", value.model or "", value.ctx if isinstance(value.ctx, int) else 0
        known, card, path = models.lookup(model), gpus.known(gpu), PATHS[value.arm or ""]
        table = known.weight_bytes(DTYPE) - known.streamed_bytes(DTYPE)
        held = floor.quantised_bytes(known.config, floor.ELEMENT_BYTES[DTYPE], path.bits) + table
        slow = base.get((value.gpu, value.model, value.ctx))
        found.append(
            Line(
                where=Where("shipped", gpu, card.label, model, ctx), path=path, kind="published", host="", reason="",
                eager=None, graph=None, step_ms=value.value, graph_ms=None, held_gb=held / 1e9,
                floor_ms=floor.floor_ms(held + known.kv_bytes(ctx, DTYPE), card.peak_gb_s or 0.0),
                streamed_ms=floor.floor_ms(held - table + known.kv_bytes(ctx, DTYPE), card.peak_gb_s or 0.0),
                promised=promised(model, ctx, path),
                gain=slow / value.value if slow and value.value else None, graph_gain=None,
            )
        )  # fmt: skip
    return found


def _order(line: Line) -> tuple[Any, ...]:
    card = gpus.catalogue().get(line.where.gpu)
    peak = card.peak_gb_s if card and card.peak_gb_s else 0.0
    place = (launch.order(line.where)[2:5], list(PATHS).index(line.path.slug), line.where.store, line.host, line.kind)
    return (peak, line.where.gpu, *place)
