"""The ladder as a table: each rung's step, alone and sustained, its share of the floor, what is left of each part."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decodegap import anatomy, ladder, plan_ladder, steadiness
from decodegap.frame import records_hash
from decodegap.grid import FLOORS, LEGEND, NOT_MEASURED, model_label
from decodegap.ladder import Ladder, Rung
from decodegap.launch import Kept, Where
from decodegap.render import Table
from decodegap.schema import MOST_EAGER_ERROR
from decodegap.stats import MIN_FOR_INTERVAL
from decodegap.tables import DASH, flag_notes, ms, number, step_text

if TYPE_CHECKING:
    import pandas as pd

PARTS = dict(zip(anatomy.PARTS, ("Floor c", "Extra", "Ineff.", "Bubbles", "Host"), strict=True))
HEADERS = (
    "GPU", "Model", "Context", "Rung", "Aims at", "Shrank most", "Step (ms)", "a/step", "c/step", "Sust.",
    "a/sust.", "MHz", "W", "Floor a", *PARTS.values(), "Resid.", "Parts of", "Launches", "GB/s", "Error", "Sessions",
    "Source",
)  # fmt: skip
COUNTED = HEADERS.index("Source") - HEADERS.index("Rung") - 1  # columns between the rung and its source
TEXTS = ("GPU", "Model", "Rung", "Aims at", "Shrank most", "Source")
UNPRINTED = ("a/sust.", "MHz", "W", "Floor a", "Resid.", "Parts of", "Launches", "GB/s", "Error")
CAPTION = (
    "The ladder, batch 1: each rung runs the same step and aims at one part of it. Aims at: that part, and by how many "
    "ms it changed from the rung below. Shrank most: the part that did, aimed at or not. Step: synchronised after "
    "each; sust.: in a loop of at least 2 s, in ms as well"
)
RATIOS = "a/step: the published floor over it; c/step: the achievable floor over it (both in ms in the notes)"
PARTS_TEXT = "The parts are those of the anatomy, ms: what is left of each."
STEP_NOTE = (
    "Step: the mean over the measured sessions; where fewer than planned are measured, their column says of how many. "
    "The parts are of one session, the middle one of those that were dissected, and a change from rung to rung is "
    f"between such sessions; it is marked {steadiness.MARK} where a session of either rung is unstable."
)
PARTS_NOTE = (
    "Parts of: the session that the parts are of, with its step in ms, which they add up to with the residual (Resid.)."
)
FLOOR_NOTE = (
    "Floor a, the published one (of fused-int4, of the bytes that are really held), counts the whole input embedding, "
    "of which a step reads one row, and flatters most where little else is read. Floor c: achievable, without that "
    "embedding and at the read bandwidth of the session that the parts are of; c/step takes the median floor of all "
    "sessions. The compiled and the int4 rung have sessions of their own, so their floor c differs a little from that "
    "of the other rungs for the same bytes."
)
HOST_NOTE = "Host, four characters: the beginning of an anonymous tag, by which hosts are told apart."
ERROR_NOTE = "Error: of the logits against an fp32 reference, over stock eager's own, the largest of all sessions."

NO_PROOF = "no proof"
NO_PROOF_NOTE = (
    f"{NO_PROOF}: in a session stock eager itself stands more than {MOST_EAGER_ERROR} (relative) from the reference, "
    "so the reference was not one of that step and its check says nothing of the rung's logits."
)


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
        caption=f"{CAPTION}, with the clock and power near its end. {RATIOS}; a/sust.: as a/step. {PARTS_TEXT}",
        printed_caption=f"{CAPTION}. {RATIOS}. {PARTS_TEXT}",
        headers=HEADERS,
        rows=(*(_row(*line) for line in lines), *map(_missing_row, missing)),
        groups=(*(each.name for each, _ in lines), *(where.short for where in missing)),
        numeric=tuple(header not in TEXTS for header in HEADERS),
        notes=_notes(found, missing),
        data=(*(_data(*line) for line in lines), *map(_missing_data, missing)),
        records=records,
        unprinted=UNPRINTED,
        unprinted_notes=(PARTS_NOTE, ERROR_NOTE),
    )


def _head(where: Where, rung: str) -> tuple[str, ...]:
    return where.system, model_label(where.model), str(where.ctx), rung


def _row(each: Ladder, rung: Rung) -> tuple[str, ...]:
    row = rung.row
    if row is None:
        return (*_head(each.where, rung.arm), *[DASH] * COUNTED, f"missing: {rung.reason}")
    wanted = ladder.planned(each.where.gpu).get((each.where.model, each.where.ctx, rung.arm), 0)
    parts = [DASH] * (len(PARTS) + 3)
    if rung.parts:
        parts = [*(ms(rung.parts.parts_ms[name]) for name in PARTS), ms(rung.parts.residual_ms)]
        parts += [f"s{rung.dissected}: {number(rung.parts.step_ms, 4)}", f"{rung.parts.launches:.0f}"]
    host = f", host {each.host[:4]}" if each.hosts > 1 else ""
    return (
        *_head(each.where, rung.arm),
        _change_text(each, rung, rung.aims_at),
        _change_text(each, rung, each.shrank_most(rung.arm)),
        step_text(row),
        number(row.fraction_published),
        number(row.fraction_achievable),
        number(row.sustained_ms, 4) + (steadiness.CAP_MARK if row.capped and row.sustained_ms else ""),
        number(_of_floor(rung)),
        number(row.sustained_clock_mhz, 4),
        number(row.sustained_power_w),
        number(row.floor_published_ms, 4),
        *parts,
        number(rung.read_gb_s, 4),
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


def _change_text(each: Ladder, rung: Rung, part: str) -> str:
    """A part, and by how much (ms) it changed from the rung below; a dash if there is none."""
    if not part:
        return DASH
    change = each.changes(rung.arm).get(part)
    if change is None:
        return PARTS[part]
    below = each.below(rung.arm)
    shaky = any(one.row and one.row.unstable for one in (rung, below) if one)
    return f"{PARTS[part]} {change:+.2f}" + steadiness.MARK * shaky


def _check_text(rung: Rung) -> str:
    check = rung.check
    if check and not check.proves:
        return NO_PROOF
    return f"{check.error / check.eager_error:.2f}x" if check and check.eager_error else DASH


def _data(each: Ladder, rung: Rung) -> dict[str, Any]:
    row, parts, check, changes = rung.row, rung.parts, rung.check, each.changes(rung.arm)
    most, below = each.shrank_most(rung.arm), each.below(rung.arm)
    names = (
        "step_ms", "low_ms", "high_ms", "spread", "event_ms", "free_ms", "sustained_ms", "sustained_clock_mhz",
        "sustained_power_w", "energy_j_per_step", *[f"floor_{name}_ms" for name in FLOORS],
        *[f"fraction_{name}" for name in FLOORS], "sessions",
    )  # fmt: skip
    return (
        {"gpu": each.where.gpu, "model": each.where.model, "ctx": each.where.ctx, "store": each.where.store}
        | {"host": each.host, "rung": rung.arm, "kind": "measured" if row else "missing"}
        | {"reason": "" if row else rung.reason, "limit_ms": each.limit_ms}
        | {"below": below.arm if changes and below else "", "aims_at": rung.aims_at}
        | {"aimed_change_ms": changes.get(rung.aims_at), "shrank_most": most, "shrank_most_ms": changes.get(most)}
        | {name: getattr(row, name) if row else None for name in names}
        | {f"{name.replace(' ', '_')}_ms": parts.parts_ms[name] if parts else None for name in PARTS}
        | {"residual_ms": parts.residual_ms if parts else None, "launches": parts.launches if parts else None}
        | {"dissected_step_ms": parts.step_ms if parts else None, "dissected_session": rung.dissected}
        | {"dissected_read_gb_s": rung.read_gb_s, "capped_sessions": row.capped if row else 0}
        | {"flags": "; ".join([*(row.flags if row else ()), *(parts.flags if parts else ())])}
        | {"check_error": check.error if check else None, "check_eager_error": check.eager_error if check else None}
        | {"records": " ".join(row.records) if row else ""}
    )


def _missing_row(where: Where) -> tuple[str, ...]:
    return (*_head(where, "all"), *[DASH] * COUNTED, f"missing: {NOT_MEASURED}")


def _missing_data(where: Where) -> dict[str, Any]:
    empty = _data(Ladder(where, "", 1, (Rung("all", None, NOT_MEASURED, None, None),), None),
                  Rung("all", None, NOT_MEASURED, None, None))  # fmt: skip
    return empty | {"store": ""}


def _notes(found: Sequence[Ladder], missing: Sequence[Where]) -> tuple[str, ...]:
    rows = [rung.row for each in found for rung in each.rungs if rung.row]
    shown = {rung.arm for each in found for rung in each.rungs}
    means = "; ".join(f"{arm}: {text}" for arm, text in ladder.MEANS.items() if arm in shown)
    flags = [f"{e.name}, {r.arm}: {flag}." for e in found for r in e.rungs if r.parts for flag in r.parts.flags]
    return (
        *([f"{means}."] if means else []),
        STEP_NOTE,
        PARTS_NOTE,
        FLOOR_NOTE,
        *([HOST_NOTE] if any(each.hosts > 1 for each in found) else []),
        ERROR_NOTE,
        *([f"Floors of the unquantised rungs, ms, published and achievable (median of a host's): {floors}."]
          if (floors := _floors(found)) else []),
        *([f"Range: smallest and largest of fewer than {MIN_FOR_INTERVAL} sessions; not an interval."]
          if any(row.spread == "range" for row in rows) else []),
        *([f"{LEGEND['missing']}."] if missing or any(r.row is None for e in found for r in e.rungs) else []),
        *([NO_PROOF_NOTE] if any(r.check and not r.check.proves for e in found for r in e.rungs) else []),
        *flags,
        *flag_notes(rows),
    )  # fmt: skip


def _floors(found: Sequence[Ladder]) -> str:
    return "; ".join(f"{each.name} {number(_published_ms(each), 4)} and {number(each.limit_ms, 4)}" for each in found
                     if each.limit_ms)  # fmt: skip


def _published_ms(each: Ladder) -> float | None:
    """The published floor of the rungs with all bytes, which only the int4 rung has fewer of."""
    held = [rung.row for rung in each.rungs if rung.row and rung.arm != plan_ladder.INT4]
    return next((row.floor_published_ms for row in held if row.floor_published_ms), None)
