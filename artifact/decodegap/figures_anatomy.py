"""How the anatomy looks: the parts of each arm's step, the A/B's paired ratios, and the step against dispatch cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from decodegap import draw, predict, style
from decodegap.published import Value
from decodegap.schema import Anatomy
from decodegap.stats import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour and hatch of each part; the hatch alone tells them apart in greyscale.
PART_LOOKS: dict[str, tuple[str, str]] = {
    "floor": ("#0072B2", ""),
    "extra traffic": ("#56B4E9", "////"),
    "kernel inefficiency": ("#E69F00", "...."),
    "bubbles": ("#CC79A7", "xxxx"),
    "exposed host": ("#D55E00", "\\\\\\\\"),
    "residual": ("#FFFFFF", "||||"),
}
RESIDUAL = "residual"
MEASURED_COLOUR, STUDY_COLOUR = style.LOOKS[0][0], "#000000"
NAMED_HOSTS = 4  # more names would fill the figure
LINE_IN, TOP_IN, FOOT_IN = 0.15, 0.55, 0.4
INDENT = (
    0.015  # of the longest bar: how far a heading stands from the axis, which would strike through its first letter
)
CUT = ("eager-auto",)  # arms so slow that their bars are cut, or no other bar could be read


@dataclass(frozen=True)
class Bar:
    """One bar: what it is called, and its anatomy. Bars with one `group` stand together under its name."""

    group: str
    label: str
    anatomy: Anatomy


@dataclass(frozen=True)
class Ratios:
    """The paired ratios of one system's sessions, summarised."""

    label: str
    summary: Summary


@dataclass(frozen=True)
class DispatchPoint:
    """One session: its host's dispatch cost (us), its eager step (ms), its launches a step, and a name for its host."""

    host: str
    dispatch_us: float
    step_ms: float
    launches: float


def parts(bars: Sequence[Bar]) -> "Figure":
    """One horizontal bar an arm, stacked from the parts of its step; the number at its end is the step (ms).

    A negative residual (the parts exceed the step) is drawn leftwards from zero, so that it can be seen. A bar of an
    arm in `CUT` that is longer than all others is cut, with a gap that shows it.
    """
    groups = list(dict.fromkeys(bar.group for bar in bars))
    lines = len(bars) + len(groups)
    with style.paper():
        figure = style.canvas(style.COLUMN_IN, TOP_IN + FOOT_IN + LINE_IN * lines)
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="y")
        axes.spines["left"].set_visible(False)
        whole = [bar.anatomy.step_ms for bar in bars if bar.label not in CUT] or [bar.anatomy.step_ms for bar in bars]
        longest = max(whole, default=1.0)
        at, ticks, leftmost, rightmost = 0.0, [], 0.0, longest * 1.08
        for group in groups:
            axes.text(longest * INDENT, at, group, va="center", ha="left", fontweight="bold", fontsize=6.5)
            for bar in (b for b in bars if b.group == group):
                at += 1
                ticks.append((at, bar.label))
                most = longest * 1.08 if bar.label in CUT and bar.anatomy.step_ms > longest else math.inf
                left, right = stack(axes, at, bar.anatomy, most)
                leftmost, end = min(leftmost, left), min(right, most)
                rightmost = max(rightmost, end)
                axes.text(end + longest * 0.015, at, f"{bar.anatomy.step_ms:.2f}", va="center", ha="left", fontsize=6.5)
            at += 1.15
        axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(at - 0.55, -0.6)
        axes.set_xlim(leftmost * 1.03, rightmost * 1.15)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set_xlabel("Step (ms)")
        shown = [name for name in PART_LOOKS if any(values(bar.anatomy)[name] for bar in bars)]
        draw.legend(figure, [patch(name) for name in shown])
    return figure


def ratios(measured: Sequence[Ratios], published: Sequence[tuple[str, Value]], *, second: str = "graph") -> "Figure":
    """Every session's paired ratio as a dot over its system's mean and interval, beside the study's values.

    `second` is the arm that eager is held against. `published`
    pairs a label with a value; one without an interval is a point, and its label says so.
    """
    rows = len(measured) + len(published)
    with style.paper():
        figure = style.canvas(style.COLUMN_IN, FOOT_IN + 0.12 + 0.34 * max(rows, 2))
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="y")
        labels = []
        for row, each in enumerate(measured):
            labels.append(f"{each.label}\n{_spread_text(each.summary)}")
            _dots(axes, row, each.summary)
        for row, (label, value) in enumerate(published, start=len(measured)):
            spread = f" [{value.ci95[0]:g}–{value.ci95[1]:g}]" if value.ci95 else ", no interval known"
            labels.append(f"{label} †\n{value.value:g}{spread}")
            if value.ci95 is not None:
                axes.plot(value.ci95, [row] * 2, color=STUDY_COLOUR, linewidth=1.1, marker="|", markersize=8)
            axes.plot(
                [value.value or 0.0], [row], color=STUDY_COLOUR, marker="D", linestyle="none", markersize=2.8,
                markerfacecolor="white",
            )  # fmt: skip
        axes.axvline(1, color=draw.GREY, linewidth=0.8, linestyle=draw.FLOOR_DASH)
        axes.set_yticks(range(rows), labels)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(rows - 0.45, -0.6)
        axes.margins(x=0.08)
        axes.set_xlim(left=min(0.97, axes.get_xlim()[0]))
        axes.set_xlabel(f"Eager / {second} step" + (" († published)" if published else ""))
    return figure


def dispatch(points: Sequence[DispatchPoint]) -> "Figure":
    """The eager step of each session against its host's dispatch cost, with the line through the origin fitted to it.

    The slope is in launches, and its legend says how many there are: their quotient is `a`, what an operator costs
    the host over a bare launch.
    """
    hosts = list(dict.fromkeys(point.host for point in points))
    with style.paper():
        figure = style.canvas(style.COLUMN_IN, 2.5)
        axes = figure.add_subplot()
        keys: list[Any] = []
        for index, host in enumerate(hosts):
            mine = [point for point in points if point.host == host]
            x, y = [point.dispatch_us for point in mine], [point.step_ms for point in mine]
            draw.dots(axes, x, y, index, hollow=False, edge=False)
            if len(hosts) <= NAMED_HOSTS:
                keys.append(draw.key(host, index, line=False))
        if len(hosts) > NAMED_HOSTS:
            keys.append(draw.marker_key(f"a session; {len(hosts)} hosts, a colour and shape each"))
        if points:
            slope, a = predict.dispatch_slope([(p.dispatch_us, p.step_ms, p.launches) for p in points])
            launches = sum(p.launches for p in points) / len(points)
            right = max(point.dispatch_us for point in points) * 1.12
            axes.plot([0, right], [0, slope * right / 1e3], color="black", linewidth=0.9)
            axes.plot([0, right], [0, launches * right / 1e3], color=draw.GREY, linewidth=0.9, linestyle="--")
            keys += [
                Line2D([], [], color="black", linewidth=0.9, label=f"fitted: {slope:,.0f} x dispatch, a = {a:.2f}"),
                Line2D(
                    [], [], color=draw.GREY, linewidth=0.9, linestyle="--", label=f"{launches:,.0f} launches x dispatch"
                ),
            ]
            axes.set_xlim(0, right)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("Dispatch of a tiny kernel (µs)")
        axes.set_ylabel("Eager step (ms)")
        draw.legend(figure, keys)
    return figure


def values(anatomy: Anatomy) -> dict[str, float]:
    """The parts of a step by name (ms), the residual last."""
    return {**{name: anatomy.parts_ms.get(name, 0.0) for name in PART_LOOKS}, RESIDUAL: anatomy.residual_ms}


def stack(axes: "Axes", at: float, anatomy: Anatomy, most: float) -> tuple[float, float]:
    """Draw one bar, cut at `most`; return its ends if it were whole. Negative parts go leftwards from zero."""
    right = left = 0.0
    for name, ms in values(anatomy).items():
        colour, hatch = PART_LOOKS[name]
        start = right if ms >= 0 else left
        width = min(ms, max(0.0, most - start))
        axes.barh(at, width, left=start, height=0.72, color=colour, hatch=hatch, edgecolor="black", linewidth=0.4)
        right, left = (right + ms, left) if ms >= 0 else (right, left + ms)
    if right > most:
        cut(axes, at, most)
    return left, right


def cut(axes: "Axes", at: float, most: float, colour: str = "white") -> None:
    """The two strokes that say that a bar is cut at `most`."""
    for x in (0.93, 0.95):
        axes.plot([most * x, most * (x + 0.02)], [at + 0.5, at - 0.5], color=colour, linewidth=1.6)


def patch(name: str) -> Patch:
    """The legend's entry for a part."""
    colour, hatch = PART_LOOKS[name]
    return Patch(facecolor=colour, hatch=hatch, edgecolor="black", linewidth=0.4, label=name)


def _dots(axes: "Axes", row: int, summary: Summary) -> None:
    values = sorted(summary.values)
    # Fixed offsets in a repeating pattern, so that near-equal ratios do not hide each other.
    heights = [row + (index % 3 - 1) * 0.11 for index in range(len(values))]
    axes.plot(
        values, heights, linestyle="none", marker="o", markersize=2.8, color=MEASURED_COLOUR, markerfacecolor="none",
        markeredgewidth=0.7, zorder=3,
    )  # fmt: skip
    if len(values) == 1:
        return
    below = row + 0.28
    if summary.spread != "degenerate":
        dash = "-" if summary.spread == "interval" else (0, (2, 1))
        axes.plot(
            [summary.low, summary.high], [below] * 2, color="black", linewidth=1.1, linestyle=dash, marker="|",
            markersize=5,
        )  # fmt: skip
    axes.plot([summary.mean], [below], color="black", marker="o", markersize=2.6)


def _spread_text(summary: Summary) -> str:
    if summary.spread == "degenerate":
        return f"{summary.mean:.3f}" + (", one session" if len(summary.values) == 1 else "")
    bounds = f"{summary.low:.3f}–{summary.high:.3f}"
    return f"{summary.mean:.3f} [{bounds}]" if summary.spread == "interval" else f"{summary.mean:.3f}, range {bounds}"
