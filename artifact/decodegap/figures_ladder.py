"""How the ladder looks: one bar a rung, stacked from what is left of each term, and the limit that memory sets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from decodegap import draw, ladder, plan_ladder, style
from decodegap.figures_anatomy import FOOT_IN, INDENT, LINE_IN, PART_LOOKS, TOP_IN, cut, patch, stack, values
from decodegap.ladder import Ladder, Rung
from decodegap.launch import Kept

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HOST_BOUND = ("eager", "eager-pinned")  # so slow on a fast card that their bars are cut, or no other could be read
LIMIT_COLOUR, SMALL = "#000000", 6.5
EMPTY: dict[str, Any] = {"facecolor": "white", "edgecolor": draw.GREY, "linewidth": 0.6}


def rungs(frame: "pd.DataFrame", kept: Sequence[Kept]) -> "Figure":
    """The ladders of the first model that has any, one below the other. The number at a bar's end is its step (ms)."""
    found = [each for each in ladder.ladders(frame, kept) if each.where.gpu != "cpu"]
    return draw_ladders([each for each in found if each.where.model == found[0].where.model])


def cpu_rungs(frame: "pd.DataFrame", kept: Sequence[Kept]) -> "Figure":
    """The same of a CPU's stand-ins."""
    return draw_ladders([each for each in ladder.ladders(frame, kept) if each.where.gpu == "cpu"])


def draw_ladders(found: Sequence[Ladder]) -> "Figure":
    """One group of bars a ladder, from the lowest rung to the highest, its achievable limit a dotted line through them.

    The line ends above the rung in four bits, which has fewer bytes to read than that.

    A bar and the number at its end are of the session that was dissected, which need not be the mean of the table; a
    rung that was timed and not dissected has an empty bar, and one that was not measured says so.
    """
    measured = [rung for each in found for rung in each.rungs if rung.row]
    lines = sum(1 + len(each.rungs) for each in found)
    with style.paper():
        figure = style.canvas(style.COLUMN_IN, TOP_IN + FOOT_IN + LINE_IN * max(lines, 4))
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        quick = [_step_ms(rung) for rung in measured if rung.arm not in HOST_BOUND]
        longest = max(quick or [_step_ms(rung) for rung in measured], default=1.0)
        at, ticks = 0.0, []
        for each in found:
            axes.text(longest * INDENT, at, each.name, va="center", ha="left", fontweight="bold", fontsize=SMALL)
            first = at + 1
            for rung in each.rungs:
                at += 1
                ticks.append((at, rung.arm))
                _bar(axes, at, rung, longest)
            if each.limit_ms is not None:
                last = at - sum(rung.arm == plan_ladder.INT4 for rung in each.rungs)
                axes.plot(
                    [each.limit_ms] * 2, [first - 0.5, last + 0.5], color=LIMIT_COLOUR, linewidth=1.0,
                    linestyle=draw.FLOOR_DASH,
                )  # fmt: skip
            at += 1.15
        axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(max(at, 1.0) - 0.55, -0.6)
        axes.set_xlim(min(0.0, *(_left(rung) for rung in measured), 0.0) * 1.03, longest * 1.3)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set_xlabel("Step (ms)")
        draw.legend(figure, _keys(found, measured))
    return figure


def _step_ms(rung: Rung) -> float:
    """The step that a bar shows: the dissected session's, or the mean of those that were not."""
    if rung.parts:
        return rung.parts.step_ms
    return (rung.row.step_ms if rung.row else None) or 0.0


def _left(rung: Rung) -> float:
    return min(0.0, *values(rung.parts).values()) if rung.parts else 0.0


def _bar(axes: "Axes", at: float, rung: Rung, longest: float) -> None:
    if rung.row is None:
        axes.text(longest * 0.01, at, "not measured", va="center", ha="left", fontsize=SMALL, fontstyle="italic")
        return
    step_ms, most = _step_ms(rung), longest * 1.12
    end = min(step_ms, most)
    if rung.parts:
        _, right = stack(axes, at, rung.parts, most)
        end = min(right, most)
    else:
        axes.barh(at, end, height=0.72, **EMPTY)
        if step_ms > most:
            cut(axes, at, most, draw.GREY)
    axes.text(end + longest * 0.015, at, f"{step_ms:.2f}", va="center", ha="left", fontsize=SMALL)


def _keys(found: Sequence[Ladder], measured: Sequence[Rung]) -> list[Any]:
    parts = [rung.parts for rung in measured if rung.parts]
    keys: list[Any] = [patch(name) for name in PART_LOOKS if any(values(each)[name] for each in parts)]
    if any(rung.parts is None for rung in measured):
        keys.append(Patch(label="not dissected", **EMPTY))
    if any(each.limit_ms for each in found):
        keys.append(
            Line2D([], [], color=LIMIT_COLOUR, linewidth=1.0, linestyle=draw.FLOOR_DASH, label="achievable floor")
        )
    return keys
