"""Which numbers the text quotes of the ladder: each rung of the text's own cell, and the fused step in every cell.

A rung that was measured on several hosts has no single step: its numbers are the range of the hosts' means.
"""

import re
from collections.abc import Sequence

from decodegap import frame, ladder, plan_ladder, selection, steadiness
from decodegap.ladder import Ladder
from decodegap.launch import Kept
from decodegap.numbers import CONTEXT_WORDS, NOT_MEASURED, letters, span
from decodegap.numbers_paper import GPU, MODEL, SHORT
from decodegap.rows import CellRow
from decodegap.schema import Record

FUSED = plan_ladder.FUSED[-1]


def macros(shipped: Sequence[Record]) -> dict[str, str]:
    """Name -> text of each; `n/m` where nothing is measured, and the same names whatever records there are."""
    mine = [r for r in shipped if (r.cell.gpu, r.cell.experiment) == (GPU, plan_ladder.EXPERIMENT)]
    rows = [row for row in frame.cells(frame.sessions(mine, "shipped")) if row.outcome == "ok"]
    found = ladder.ladders(frame.build(mine), [Kept("shipped", record) for record in mine])
    out: dict[str, str] = {}
    for model, contexts in plan_ladder.CONTEXTS.items():
        for ctx in contexts:
            cell = letters(re.split(r"[^a-z]", model)[0], CONTEXT_WORDS[ctx])
            here = [row for row in rows if (row.model, row.ctx) == (model, ctx)]
            limits = [each.limit_ms for each in found if (each.where.model, each.where.ctx) == (model, ctx)]
            out[f"LadderLimit{cell}"] = span(limits, 2)
            for arm in plan_ladder.RUNGS if (model, ctx) == (MODEL, SHORT) else plan_ladder.FUSED:
                out |= _rung([row for row in here if row.arm == arm], letters(*arm.split("-")) + cell)
    return out | _int4(mine, rows) | _changes(found)


def _changes(found: Sequence[Ladder]) -> dict[str, str]:
    """By how much (ms) parts of the fused step are smaller than the plain one's, in the text's own cell."""
    parts = {"LadderGoneBubbles": "bubbles", "LadderGoneInefficiency": "kernel inefficiency"}
    for each in found:
        below, changes = each.below(FUSED), each.changes(FUSED)
        at_text = (each.where.model, each.where.ctx) == (MODEL, SHORT)
        if at_text and changes and below and below.arm == plan_ladder.FUSED[0]:
            return {name: f"{-changes[part]:.2f}" for name, part in parts.items()}
    return dict.fromkeys(parts, NOT_MEASURED)


def _rung(rows: Sequence[CellRow], name: str) -> dict[str, str]:
    sustained = [row.floor_published_ms / row.sustained_ms for row in rows if row.floor_published_ms and
                 row.sustained_ms]  # fmt: skip
    shaky = steadiness.MARK * any(row.unstable for row in rows)
    return {
        f"LadderStep{name}": span((row.step_ms for row in rows), 2) + shaky,
        f"LadderFloor{name}": span((row.floor_published_ms for row in rows), 2),
        f"LadderFraction{name}": span((row.fraction_published for row in rows), 3),  # a goal may be missed by less
        f"LadderAchieved{name}": span((row.fraction_achievable for row in rows), 2),
        f"LadderSustained{name}": span((row.sustained_ms for row in rows), 2),
        f"LadderSustainedFraction{name}": span(sustained, 3),
        f"LadderClock{name}": span((row.sustained_clock_mhz for row in rows), 0),
        f"LadderPower{name}": span((row.sustained_power_w for row in rows), 0),
        f"LadderSessions{name}": str(sum(row.sessions for row in rows)) if rows else NOT_MEASURED,
        f"LadderHosts{name}": str(len(rows)) if rows else NOT_MEASURED,
    }


def _int4(mine: Sequence[Record], rows: Sequence[CellRow]) -> dict[str, str]:
    """What four bits give in the text's own cell, and what their bytes promise, by the ratio of two floors."""
    slow, fast = (selection.step_ms(mine, plan_ladder.EXPERIMENT, MODEL, SHORT, a) for a in (FUSED, plan_ladder.INT4))
    here = [row for row in rows if (row.model, row.ctx) == (MODEL, SHORT)]
    sixteen, four = (next((row for row in here if row.arm == arm), None) for arm in (FUSED, plan_ladder.INT4))
    published = [(row.floor_published_ms if row else None) for row in (sixteen, four)]
    streamed = [(row.floor_streamed_ms if row else None) for row in (sixteen, four)]
    whole, read = published[1], streamed[1]
    return {
        "LadderGainInt": _ratio(slow, fast),
        "LadderPromiseInt": _ratio(*published),
        "LadderPromiseReadInt": _ratio(*streamed),
        "LadderUnreadInt": f"{whole - read:.2f}" if whole is not None and read is not None else NOT_MEASURED,
    }


def _ratio(over: float | None, under: float | None) -> str:
    return f"{over / under:.2f}" if over and under else NOT_MEASURED
