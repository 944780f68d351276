"""The ladder as a table: each rung's step, alone and sustained, its share of the floor, and the term it removes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decodegap import anatomy, ladder
from decodegap.frame import records_hash
from decodegap.grid import FLOORS, LEGEND, NOT_MEASURED, model_label
from decodegap.ladder import Ladder, Rung
from decodegap.launch import Kept, Where
from decodegap.render import Table
from decodegap.stats import MIN_FOR_INTERVAL
from decodegap.tables import DASH, number, step_text

if TYPE_CHECKING:
    import pandas as pd

HEADERS = (
    "GPU", "Model", "Context", "Rung", "Removes (ms)", "Step (ms)", "Of a", "Sustained", "Of a", "MHz", "W", "Floor",
    "Extra", "Ineff.", "Bubbles", "Host", "Resid.", "Launches", "Error", "Sessions", "Source",
)  # fmt: skip
COLUMNS = dict(zip(anatomy.PARTS, ("Floor", "Extra", "Ineff.", "Bubbles", "Host"), strict=True))
PARTS_NOTE = (
    "Floor a: as published. The parts are those of one session, the middle one of those that were dissected; the step "
    "is the mean over all. Error: of the logits against an fp32 reference, over stock eager's own."
)
COUNTED = len(HEADERS) - 5  # columns between the rung and its source


def rungs(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """Every rung of every cell, from stock eager to the fused step."""
    found = [each for each in ladder.ladders(frame, kept) if each.where.gpu != "cpu"]
    return _table(found, ladder.missing(found, kept), records_hash(frame))


def cpu_rungs(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """The rungs that there are on a CPU."""
    found = [each for each in ladder.ladders(frame, kept) if each.where.gpu == "cpu"]
    made = _table(found, [], records_hash(frame))
    own = "On a CPU there is no graph, so compiling takes its place, and the fused step needs an NVIDIA GPU."
    return replace(made, name="cpu-ladder", caption=f"The ladder on this machine's CPU, stand-in models, fp32. {own}")


def _table(found: Sequence[Ladder], missing: Sequence[Where], records: str) -> Table:
    lines = [(each, rung) for each in found for rung in each.rungs]
    return Table(
        name="ladder",
        caption=(
            "The ladder, batch 1: each rung runs the same step and is there to remove one part of it. Removes: that "
            "part on the rung below and on this one. Step: synchronised after each; sustained: a loop of at least 2 s, "
            "with the clock and power near its end. Of a: the published floor over either. The parts are those of the "
            "anatomy, ms: what is left of each term."
        ),
        headers=HEADERS,
        rows=(*(_row(*line) for line in lines), *map(_missing_row, missing)),
        groups=(*(each.name for each, _ in lines), *(where.short for where in missing)),
        numeric=(False, False, True, False, False, *[True] * (COUNTED - 2), True, False),
        notes=_notes(found, missing),
        data=(*(_data(*line) for line in lines), *map(_missing_data, missing)),
        records=records,
        unprinted=("MHz", "W", "Resid.", "Error"),
    )


def _head(where: Where, rung: str) -> tuple[str, ...]:
    return where.system, model_label(where.model), str(where.ctx), rung


def _row(each: Ladder, rung: Rung) -> tuple[str, ...]:
    row = rung.row
    if row is None:
        return (*_head(each.where, rung.arm), *[DASH] * COUNTED, f"missing: {rung.reason}")
    wanted = ladder.planned(each.where.gpu).get((each.where.model, each.where.ctx, rung.arm), 0)
    parts = [DASH] * (len(anatomy.PARTS) + 2)
    if rung.parts:
        parts = [*(_ms(rung.parts.parts_ms[name]) for name in anatomy.PARTS), _ms(rung.parts.residual_ms)]
        parts.append(f"{rung.parts.launches:.0f}")
    host = f", host {each.host[:4]}" if each.hosts > 1 else ""
    return (
        *_head(each.where, rung.arm),
        _removed_text(each, rung),
        step_text(row),
        number(row.fraction_published),
        number(row.sustained_ms, 4),
        number(_of_floor(rung)),
        number(row.sustained_clock_mhz, 4),
        number(row.sustained_power_w),
        *parts,
        _check_text(rung),
        f"{row.sessions} of {wanted}" if row.sessions < wanted else str(row.sessions),
        f"measured, {each.where.store}{host}",
    )


def _of_floor(rung: Rung) -> float | None:
    """The published floor over the sustained step."""
    row = rung.row
    if row is None or row.sustained_ms is None or row.floor_published_ms is None:
        return None
    return row.floor_published_ms / row.sustained_ms


def _removed(each: Ladder, rung: Rung) -> tuple[float, float] | None:
    """The part that the rung is there to remove, on the rung below and on this one (ms)."""
    if not rung.removes or rung.parts is None:
        return None
    below = each.below(rung.arm)
    if below is None or below.parts is None:
        return None
    return below.parts.parts_ms[rung.removes], rung.parts.parts_ms[rung.removes]


def _removed_text(each: Ladder, rung: Rung) -> str:
    span = _removed(each, rung)
    part = COLUMNS.get(rung.removes, rung.removes)
    return f"{part}: {_ms(span[0])} to {_ms(span[1])}" if span else part or DASH


def _check_text(rung: Rung) -> str:
    check = rung.check
    return f"{check.error / check.eager_error:.2f}x" if check and check.eager_error else DASH


def _data(each: Ladder, rung: Rung) -> dict[str, Any]:
    row, parts, check, span = rung.row, rung.parts, rung.check, _removed(each, rung)
    names = (
        "step_ms", "low_ms", "high_ms", "spread", "event_ms", "free_ms", "sustained_ms", "sustained_clock_mhz",
        "sustained_power_w", "energy_j_per_step", *[f"floor_{name}_ms" for name in FLOORS],
        *[f"fraction_{name}" for name in FLOORS], "sessions",
    )  # fmt: skip
    return (
        {"gpu": each.where.gpu, "model": each.where.model, "ctx": each.where.ctx, "store": each.where.store}
        | {"host": each.host, "rung": rung.arm, "kind": "measured" if row else "missing"}
        | {"reason": "" if row else rung.reason, "limit_ms": each.limit_ms, "removes": rung.removes}
        | {"removed_from_ms": span[0] if span else None, "removed_to_ms": span[1] if span else None}
        | {name: getattr(row, name) if row else None for name in names}
        | {f"{name.replace(' ', '_')}_ms": parts.parts_ms[name] if parts else None for name in anatomy.PARTS}
        | {"residual_ms": parts.residual_ms if parts else None, "launches": parts.launches if parts else None}
        | {"dissected_step_ms": parts.step_ms if parts else None, "flags": "; ".join(parts.flags) if parts else ""}
        | {"check_error": check.error if check else None, "check_eager_error": check.eager_error if check else None}
        | {"records": " ".join(row.records) if row else ""}
    )


def _missing_row(where: Where) -> tuple[str, ...]:
    return (*_head(where, "all"), *[DASH] * COUNTED, f"missing: {NOT_MEASURED}")


def _missing_data(where: Where) -> dict[str, Any]:
    empty = _data(Ladder(where, "", 1, (), None), Rung("all", None, NOT_MEASURED, None, None))
    return empty | {"store": ""}


def _notes(found: Sequence[Ladder], missing: Sequence[Where]) -> tuple[str, ...]:
    rows = [rung.row for each in found for rung in each.rungs if rung.row]
    flags = [f"{e.name}, {r.arm}: {flag}." for e in found for r in e.rungs if r.parts for flag in r.parts.flags]
    return (
        PARTS_NOTE,
        *(f"{e.name}: achievable limit {number(e.limit_ms, 4)} ms." for e in found if e.limit_ms),
        *([f"Range: smallest and largest of fewer than {MIN_FOR_INTERVAL} sessions; not an interval."]
          if any(row.spread == "range" for row in rows) else []),
        *([f"{LEGEND['missing']}."] if missing or any(r.row is None for e in found for r in e.rungs) else []),
        *flags,
    )  # fmt: skip


def _ms(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 99.995 else f"{value:.1f}"
