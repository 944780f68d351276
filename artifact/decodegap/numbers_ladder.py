"""Which numbers the text quotes of the ladder: each rung of the text's own cell, and the fused step in every cell."""

import re
import statistics
from collections.abc import Iterable, Sequence

from decodegap import frame, ladder, plan_ladder, stats
from decodegap.launch import Kept
from decodegap.numbers import CONTEXT_WORDS, NOT_MEASURED, letters
from decodegap.numbers_paper import GPU, MODEL, SHORT
from decodegap.rows import CellRow
from decodegap.schema import Record


def macros(shipped: Sequence[Record]) -> dict[str, str]:
    """Name -> text of each; `n/m` where nothing is measured, and the same names whatever records there are."""
    mine = [r for r in shipped if (r.cell.gpu, r.cell.experiment) == (GPU, plan_ladder.EXPERIMENT)]
    rows = [row for row in frame.cells(frame.sessions(mine, "shipped")) if row.outcome == "ok"]
    out: dict[str, str] = {}
    for model, contexts in plan_ladder.CONTEXTS.items():
        for ctx in contexts:
            cell = letters(re.split(r"[^a-z]", model)[0], CONTEXT_WORDS[ctx])
            here = [row for row in rows if (row.model, row.ctx) == (model, ctx)]
            limits = [
                row.floor_achievable_ms for row in here if row.arm != plan_ladder.INT4 and row.floor_achievable_ms
            ]
            out[f"LadderLimit{cell}"] = _text([stats.median(limits)] if limits else [], 2)
            for arm in plan_ladder.RUNGS if (model, ctx) == (MODEL, SHORT) else plan_ladder.FUSED:
                out |= _rung([row for row in here if row.arm == arm], letters(*arm.split("-")) + cell)
    return out | {"LadderGainInt": _gain(rows)} | _changes(mine)


def _changes(records: Sequence[Record]) -> dict[str, str]:
    """By how much (ms) parts of the fused step are smaller than the plain one's, in the text's own cell."""
    parts = {"LadderGoneBubbles": "bubbles", "LadderGoneInefficiency": "kernel inefficiency"}
    plain, fused = plan_ladder.FUSED
    for each in ladder.ladders(frame.build(records), [Kept("shipped", record) for record in records]):
        below, changes = each.below(fused), each.changes(fused)
        if (each.where.model, each.where.ctx) == (MODEL, SHORT) and changes and below and below.arm == plain:
            return {name: f"{-changes[part]:.2f}" for name, part in parts.items()}
    return dict.fromkeys(parts, NOT_MEASURED)


def _rung(rows: Sequence[CellRow], name: str) -> dict[str, str]:
    sustained = [row.floor_published_ms / row.sustained_ms for row in rows if row.floor_published_ms and
                 row.sustained_ms]  # fmt: skip
    return {
        f"LadderStep{name}": _text([row.step_ms for row in rows], 2),
        f"LadderFraction{name}": _text([row.fraction_published for row in rows], 2),
        f"LadderSustained{name}": _text([row.sustained_ms for row in rows], 2),
        f"LadderSustainedFraction{name}": _text(sustained, 2),
        f"LadderClock{name}": _text([row.sustained_clock_mhz for row in rows], 0),
        f"LadderPower{name}": _text([row.sustained_power_w for row in rows], 0),
    }


def _gain(rows: Sequence[CellRow]) -> str:
    here = [row for row in rows if (row.model, row.ctx) == (MODEL, SHORT)]
    slow, fast = (
        _mean(row.step_ms for row in here if row.arm == arm) for arm in (plan_ladder.FUSED[-1], plan_ladder.INT4)
    )
    return f"{slow / fast:.2f}" if slow and fast else NOT_MEASURED


def _text(values: Iterable[float | None], decimals: int) -> str:
    mean = _mean(values)
    return NOT_MEASURED if mean is None else f"{mean:.{decimals}f}"


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean over hosts of what is known."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
