"""How the parts of a figure are drawn: points, curves, error bars, axes and legends that fit."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from decodegap import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from decodegap.rows import CellRow

GREY, PALE = "#777777", "#cfcfcf"
FLOOR_DASH = (0, (1, 1.5))


def numbers(values: Iterable[float | None]) -> list[float]:
    """`values` with NaN for None, which is a gap in a curve."""
    return [math.nan if value is None else value for value in values]


def curve(axes: "Axes", x: Sequence[float], y: Sequence[float], index: int, *, hollow: bool = False) -> None:
    """A line with the colour, marker and dash of system `index`; hollow markers for what was not measured."""
    colour, marker, dash = style.look(index)
    axes.plot(
        x, y, color=colour, marker=marker, linestyle=dash, zorder=3, markerfacecolor="white" if hollow else colour
    )


def dots(axes: "Axes", x: Sequence[float], y: Sequence[float], index: int, *, hollow: bool, edge: bool) -> None:
    """Markers of system `index`; a black edge marks the reader's own."""
    colour, marker, _ = style.look(index)
    axes.plot(
        x, y, linestyle="none", marker=marker, color=colour, zorder=3, markersize=3.2, markeredgewidth=0.9,
        markerfacecolor="white" if hollow else colour, markeredgecolor="black" if edge else colour,
    )  # fmt: skip


def floor_line(axes: "Axes", x: Sequence[float], y: Sequence[float], index: int) -> None:
    """A floor: thin and dotted in the colour of its system, whose marker it carries small."""
    colour, marker, _ = style.look(index)
    axes.plot(x, y, color=colour, linewidth=0.7, linestyle=FLOOR_DASH, marker=marker, markersize=1.5)


def spreads(axes: "Axes", rows: "Sequence[CellRow]", index: int, *, shift: float = 1.0) -> None:
    """The interval or range of each row as a bar at its context times `shift`; nothing for a degenerate spread."""
    for row in rows:
        if row.spread != "degenerate" and row.low_ms is not None and row.high_ms is not None:
            bar = [row.low_ms, row.high_ms]
            axes.plot([row.ctx * shift] * 2, bar, color=style.look(index)[0], linewidth=0.9, marker="_", markersize=4)


def context_axis(axes: "Axes", contexts: Sequence[int]) -> None:
    """A log-2 axis with a tick at each context and nowhere else."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(contexts)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(ctx) for ctx in contexts])
    axes.set_xlabel("Context (tokens)")


def bandwidth_axis(axes: "Axes", names: dict[float, str]) -> None:
    """A log axis with a tick at each peak bandwidth (GB/s), labelled with the GPUs that have it.

    Peaks less than a tenth apart share a label, so that labels never overlap.
    """
    ticks: dict[float, str] = {}
    for peak in sorted(names):
        near = next((other for other in ticks if peak / other < 1.22), None)
        if near is None:
            ticks[peak] = f"{names[peak]}\n{peak:g}"
        elif names[peak] not in ticks[near]:
            ticks[near] = f"{names[peak]}, {ticks[near]}"
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(list(ticks.values()))
    axes.set_xlim(min(names, default=300) / 1.25, max(names, default=4800) * 1.25)
    axes.set_xlabel("Peak bandwidth (GB/s, log scale)")


def plain_log_ticks(axes: "Axes") -> None:
    """A log axis whose ticks are 1, 2, 5 times powers of ten in plain digits. Call once everything is drawn."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [m * 10.0**e for e in range(-4, 7) for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_yticklabels([f"{tick:g}" for tick in ticks])


def key(label: str, index: int, *, line: bool = True) -> Line2D:
    """The legend entry of system `index`."""
    colour, marker, dash = style.look(index)
    return Line2D([], [], color=colour, marker=marker, linestyle=dash if line else "none", label=label)


def marker_key(label: str, *, hollow: bool = False, edge: bool = False) -> Line2D:
    """The legend entry of what a marker's face or edge means, in grey."""
    return Line2D(
        [], [], color=GREY, marker="o", linestyle="none", label=label,
        markerfacecolor="white" if hollow else GREY, markeredgecolor="black" if edge else GREY,
    )  # fmt: skip


def floor_key(label: str) -> Line2D:
    """The legend entry of a floor."""
    return Line2D([], [], color=GREY, linewidth=0.7, linestyle=FLOOR_DASH, label=label)


def range_key(label: str) -> Line2D:
    """The legend entry of a pale range bar."""
    return Line2D([], [], color=PALE, linewidth=5, label=label)


def legend(figure: "Figure", handles: Sequence[Any]) -> None:
    """A legend above the axes, in as many columns as the figure is wide enough for; none without handles."""
    canvas = figure.canvas
    if not handles or not isinstance(canvas, FigureCanvasAgg):
        return
    for columns in range(len(handles), 0, -1):
        made = figure.legend(handles=list(handles), loc="outside upper center", ncols=columns)
        width = made.get_window_extent(canvas.get_renderer()).width  # type: ignore[no-untyped-call]
        if columns == 1 or width <= figure.bbox.width:
            return
        made.remove()
