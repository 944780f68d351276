"""Which tables there are: one pure function a table, from a frame to rows of text and of unrounded values."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from decodegap import steadiness
from decodegap.frame import records_hash
from decodegap.grid import (
    CACHE_FACTOR,
    FLOORS,
    LEGEND,
    MARKS,
    Entry,
    Fact,
    baseline,
    entries,
    floor_applies,
    model_label,
)
from decodegap.published import Published
from decodegap.render import Table
from decodegap.rows import CellRow
from decodegap.stats import MIN_FOR_INTERVAL

if TYPE_CHECKING:
    import pandas as pd

    from decodegap.predict import Model

DASH = MARKS["missing"]
NUMBER = re.compile(r"\d+(\.\d+)?")
ABOVE_ONE = (
    "A fraction of the published floor may be above 1: that floor counts the input embedding too, of which a step "
    "reads one row. Of the streamed floor none can be."
)
LEAST_OF_TENTHS_MS = 99.995


def grid(frame: "pd.DataFrame", published: Published, fitted: "Model | None" = None) -> Table:
    """The baseline grid: GPU x model x context with step, three floors, three fractions and where each line is from."""
    found = entries(frame, published, fitted)
    used = {e.kind for e in found} | {f.kind for e in found for f in (e.step_ms, *e.fractions.values())}
    return Table(
        name="grid",
        caption=(
            "Batch-1 decode, arm eager, bf16: the step and three lower bounds. Floors: (a) as published, all weights "
            "and the KV cache at peak bandwidth; (b) streamed, without the input embedding that a step does not read; "
            "(c) achievable, streamed bytes at the read bandwidth measured on that device. A fraction is floor / step."
        ),
        headers=(
            "GPU", "Model", "Context", "Step (ms)", "Floor a (ms)", "b", "c", "Fraction of a", "of b", "of c",
            "Sessions", "Source",
        ),
        rows=tuple(_grid_row(entry) for entry in found),
        groups=tuple(entry.gpu for entry in found),
        numeric=(False, False, *[True] * 9, False),
        notes=(
            *[f"{text}." for kind, text in LEGEND.items() if kind in used],
            *above_one([value for e in found for value in _published_fractions(e)]),
            *_spread_notes([e.row for e in found if e.row]),
            *_host_notes([e.row for e in found if e.row]),
            *flag_notes([e.row for e in found if e.row]),
            *_quoted_steps(published),
        ),
        data=tuple(_grid_data(entry) for entry in found),
        records=records_hash(frame),
    )  # fmt: skip


def cpu(frame: "pd.DataFrame") -> Table:
    """The CPU stand-ins: step and fraction of the floor at the read bandwidth measured there, and where it applies."""
    rows = [row for row in baseline(frame) if row.gpu == "cpu"]
    return Table(
        name="cpu",
        caption=(
            "Batch-1 decode of small stand-in models on this machine's CPU, eager, fp32. Not the study's models and "
            "not its floor: a CPU has no datasheet peak, so the floor is the streamed bytes at the read bandwidth "
            "measured here."
        ),
        headers=(
            "Model",
            "Context",
            "Step (ms)",
            "Read (GB/s)",
            "Floor (ms)",
            "Fraction",
            "Sessions",
            "Source",
            "Floor",
        ),
        rows=tuple(_cpu_row(row) for row in rows),
        groups=tuple(row.model for row in rows),
        numeric=(False, *[True] * 6, False, False),
        notes=(*_spread_notes(rows), *_host_notes(rows), *flag_notes(rows)),
        data=tuple(_cpu_data(row) for row in rows),
        records=records_hash(frame),
    )


def number(value: float | None, digits: int = 3) -> str:
    """`value` with so many significant digits, plain notation; a dash if there is none."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def share(fact: Fact) -> str:
    """A fraction with three decimals and the mark of its kind; a predicted one with its range."""
    if fact.value is None:
        return DASH
    spread = f" ({fact.between[0]:.2f}–{fact.between[1]:.2f})" if fact.between else ""
    return f"{fact.value:.3f}{MARKS[fact.kind]}{spread}"


def ms(value: float) -> str:
    """Milliseconds to the hundredth, and to the tenth where that is still four digits."""
    decimals = 2 if abs(value) < LEAST_OF_TENTHS_MS else 1
    return f"{round(value, decimals) + 0.0:.{decimals}f}"  # the sum turns a rounded -0.0 into 0.0


def above_one(fractions: Iterable[float | None]) -> list[str]:
    """A note on how a fraction of the published floor can be above 1, if one is."""
    return [ABOVE_ONE] if any(value is not None and value > 1 for value in fractions) else []


def step(row: CellRow) -> str:
    """Mean step, with the marks of sessions that did not hold still, and of the power cap if there was no loop."""
    capped = row.capped and row.sustained_ms is None  # a loop has a place of its own, and the mark belongs there
    return number(row.step_ms, 4) + (steadiness.MARK if row.unstable else "") + (steadiness.CAP_MARK if capped else "")


def step_text(row: CellRow) -> str:
    """Mean step and its spread: an interval in brackets, a range with `range`, nothing for a degenerate one."""
    shown = step(row)
    if row.spread == "degenerate" or row.low_ms is None or row.high_ms is None:
        return shown
    spread = f"{number(row.low_ms, 4)}–{number(row.high_ms, 4)}"
    return f"{shown} [{spread}]" if row.spread == "interval" else f"{shown} (range {spread})"


def _grid_row(entry: Entry) -> tuple[str, ...]:
    row = entry.row if entry.kind == "measured" else None
    return (
        entry.gpu_label,
        entry.model_label,
        str(entry.ctx),
        step_text(row) if row else _unmeasured_step(entry.step_ms),
        *[number(entry.floors_ms[name]) for name in FLOORS],
        *[share(entry.fractions[name]) for name in FLOORS],
        str(row.sessions) if row else DASH,
        entry.source,
    )


def _published_fractions(entry: Entry) -> tuple[float | None, ...]:
    """The fraction of the published floor, and the ends of its range where it is predicted."""
    fact = entry.fractions["published"]
    return (fact.value, *(fact.between or ()))


def _unmeasured_step(fact: Fact) -> str:
    if fact.between:
        return f"{number(fact.value)}{MARKS[fact.kind]} ({number(fact.between[0])}–{number(fact.between[1])})"
    return number(fact.value, 4) + ("" if fact.value is None else MARKS[fact.kind])


def _grid_data(entry: Entry) -> dict[str, Any]:
    row = entry.row
    low, high = entry.step_ms.between or (None, None)
    data: dict[str, Any] = {
        "gpu": entry.gpu,
        "model": entry.model,
        "ctx": entry.ctx,
        "kind": entry.kind,
        "store": row.store if row else "",
        "reason": entry.reason,
        "step_ms": entry.step_ms.value,
        "step_kind": entry.step_ms.kind,
        "step_low_ms": row.low_ms if row else low,
        "step_high_ms": row.high_ms if row else high,
        "step_spread": row.spread if row else "predicted" if entry.step_ms.between else "",
        "step_values_ms": " ".join(repr(value) for value in row.values_ms) if row else "",
    }
    for name in FLOORS:
        data[f"floor_{name}_ms"] = entry.floors_ms[name]
    for name in FLOORS:
        data[f"fraction_{name}"] = entry.fractions[name].value
        data[f"fraction_{name}_kind"] = entry.fractions[name].kind
    return data | {"peak_gb_s": entry.peak_gb_s} | _provenance(row)


def _provenance(row: CellRow | None) -> dict[str, Any]:
    names = ("peak_source", "read_gb_s", "dispatch_us", "protocol", "weights", "host")
    return {name: getattr(row, name) if row else None for name in names} | {
        "hosts": len(row.hosts) if row else None,
        "sessions": row.sessions if row and row.outcome == "ok" else 0,
        "flags": "; ".join(row.flags) if row else "",
        "unstable_sessions": row.unstable if row else 0,
        "records": " ".join(row.records) if row else "",
    }


def _cpu_row(row: CellRow) -> tuple[str, ...]:
    ok = row.outcome == "ok"
    host = f", host {row.hosts.index(row.host) + 1} of {len(row.hosts)}" if ok and len(row.hosts) > 1 else ""
    return (
        model_label(row.model),
        str(row.ctx),
        step_text(row) if ok else DASH,
        number(row.read_gb_s),
        number(row.floor_achievable_ms),
        share(Fact("measured", row.fraction_achievable)),
        str(row.sessions) if ok else DASH,
        f"measured, {row.store}{host}" if ok else f"missing: {row.outcome} {row.reason}".strip(),
        _applies(row),
    )


def _applies(row: CellRow) -> str:
    applies = floor_applies(row)
    if applies is None or row.cache_mib is None:
        return "size of the cache unknown"
    caches = f"weights are {row.weights_bytes / row.cache_mib / 2**20:.2g}x the last-level cache"
    return f"applies: {caches}" if applies else f"does not apply: {caches}, under {CACHE_FACTOR}x"


def _cpu_data(row: CellRow) -> dict[str, Any]:
    names = (
        "model", "ctx", "store", "outcome", "reason", "step_ms", "low_ms", "high_ms", "spread", "floor_achievable_ms",
        "fraction_achievable", "weights_bytes", "streamed_bytes", "kv_bytes", "cache_mib",
    )  # fmt: skip
    return {name: getattr(row, name) for name in names} | {"floor_applies": floor_applies(row)} | _provenance(row)


def _spread_notes(rows: Sequence[CellRow]) -> list[str]:
    texts = {
        "interval": f"Brackets: 95% BCa interval of the mean over sessions ({MIN_FOR_INTERVAL} or more).",
        "range": f"Range: smallest and largest of fewer than {MIN_FOR_INTERVAL} sessions; not an interval.",
        "degenerate": "A step without spread: one session, or sessions that are all equal.",
    }
    return [text for spread, text in texts.items() if any(row.spread == spread for row in rows)]


def _host_notes(rows: Sequence[CellRow]) -> list[str]:
    several = sorted({(row.gpu, row.hosts) for row in rows if len(row.hosts) > 1})
    return [
        f"{gpu}: sessions on {len(hosts)} hosts ({', '.join(hosts)}), each shown by itself and never pooled."
        for gpu, hosts in several
    ]


def flag_notes(rows: Sequence[CellRow]) -> list[str]:
    """One note for each kind of flag; flags that differ in their numbers only are of one kind."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for row in rows:
        for flag in row.flags:
            kinds.setdefault(NUMBER.sub("…", flag), []).append((flag, f"{row.gpu} {row.model} {row.ctx}"))
    notes = []
    for kind, found in sorted(kinds.items()):
        texts, cells = {text for text, _ in found}, list(dict.fromkeys(cell for _, cell in found))
        everywhere = len(cells) == len({(row.gpu, row.model, row.ctx) for row in rows})
        where = "every measured cell" if everywhere else ", ".join(cells)
        notes.append(f"Flag {texts.pop() if len(texts) == 1 else kind}: {where}.")
    return notes


def _quoted_steps(published: Published) -> list[str]:
    """The study's own step times, where its fraction for the same cell implies another one."""
    notes = []
    for value in published.values:  # noqa: PD011 (not a DataFrame)
        usual = value.quantity == "step_ms" and value.arm in ("eager", "bf16")
        if usual and value.gpu and value.model and isinstance(value.ctx, int):
            implied = published.implied_step_ms(value.gpu, value.model, value.ctx)
            notes.append(
                f"{value.gpu} {value.model} {value.ctx}: the study also quotes a step of {number(value.value, 4)}† ms; "
                f"its fraction implies {number(implied, 4)}§ ms."
            )
    return notes
