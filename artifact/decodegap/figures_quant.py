"""The quantised paths in a picture: the speed-up that each path's bytes promise, and what comes of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.patches import Patch

from decodegap import draw, quant_catalogue, style
from decodegap.grid import model_label
from decodegap.quant_catalogue import PATHS
from decodegap.quant_results import CODE_BITS, EAGER, GRAPH, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE_IN, TOP_IN, FOOT_IN = 0.19, 0.62, 0.4
HOW = {EAGER: "", GRAPH: ", by graph"}


def quantised(lines: Sequence[Line]) -> "Figure":
    """One row a path and cell: a pale bar to the promised speed-up, a marker with its range at each realised one.

    Each system has a colour, marker and offset for each way of launching; the study's are hollow, and those of
    records that are not shipped have a black edge.
    """
    shown = [line for line in lines if line.kind != "missing" and not line.path.is_baseline and line.best_gain]
    groups = list(dict.fromkeys((line.where.model, line.where.ctx) for line in shown))
    systems = list(dict.fromkeys(key for line in shown for key in _marks(line)))
    rows = [(group, path) for group in groups for path in _paths(shown, group)]
    with style.paper():
        figure = style.canvas(style.COLUMN_IN, TOP_IN + FOOT_IN + LINE_IN * max(2, len(rows) + len(groups)))
        axes = figure.add_subplot()
        axes.grid(visible=False, axis="y")
        at, ticks = 0.0, []
        for group in groups:
            model, ctx = group
            axes.text(0.02, at, f"{model_label(model)}, context {ctx}", va="center", ha="left", fontweight="bold",
                      fontsize=6.5, transform=axes.get_yaxis_transform(),
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
            for path in _paths(shown, group):
                at += 1
                ticks.append((at, path))
                _row(axes, at, [line for line in shown if (*_cell(line), line.path.slug) == (*group, path)], systems)
            at += 1.15
        axes.axvline(1, color="black", linewidth=0.6)
        ideals = {PATHS[quant_catalogue.baseline_on(line.where.gpu)].bits / CODE_BITS for line in shown}
        for ideal in ideals:
            axes.axvline(ideal, color=draw.GREY, linewidth=0.8, linestyle=draw.FLOOR_DASH)
        axes.set_yticks([y for y, _ in ticks], [label for _, label in ticks])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(max(at, 1.0) - 0.55, -0.6)
        axes.set_xlim(left=0)
        axes.margins(x=0.05)
        axes.set_xlabel(f"Speed-up over {_baselines(shown)}")
        keys: list[Any] = [Patch(facecolor=draw.PALE, label="promised by bytes")] if shown else []
        for index, (system, how, kind) in enumerate(systems):
            published = kind == "published"
            key = draw.key(f"{system}{HOW[how]}{', published' if published else ''}", index, line=False)
            if published:
                key.set_markerfacecolor("white")
            keys.append(key)
        if stores := sorted({line.where.store for line in shown} - {"shipped"}, reverse=True):
            keys.append(draw.marker_key(", ".join(stores), edge=True))
        keys += [draw.floor_key(f"{CODE_BITS} bits instead of {ideal * CODE_BITS:g}") for ideal in ideals]
        draw.legend(figure, keys)
    return figure


def _row(axes: "Axes", at: float, mine: Sequence[Line], systems: Sequence[tuple[str, str, str]]) -> None:
    promised = [line.promised for line in mine if line.promised and line.kind == "measured"]
    promised = promised or [line.promised for line in mine if line.promised]
    if promised:
        axes.barh(at, max(promised), height=0.72, color=draw.PALE, zorder=1)
    for line in mine:
        for key, gain in _marks(line).items():
            index = systems.index(key)
            offset = 0.22 * (index - (len(systems) - 1) / 2) if len(systems) > 1 else 0.0
            if span := line.gain_range(key[1]) if line.kind == "measured" else None:
                axes.plot(span, [at + offset] * 2, color=style.look(index)[0], linewidth=0.9, zorder=2)
            draw.dots(axes, [gain], [at + offset], index, hollow=line.kind == "published",
                      edge=line.where.store != "shipped")  # fmt: skip


def _marks(line: Line) -> dict[tuple[str, str, str], float]:
    """The speed-ups of a line that are known, by system, way of launching and kind."""
    gains = {EAGER: line.gain, GRAPH: line.graph_gain}
    return {(line.where.system, how, line.kind): gain for how, gain in gains.items() if gain is not None}


def _paths(shown: Sequence[Line], group: tuple[str, int]) -> list[str]:
    have = {line.path.slug for line in shown if _cell(line) == group}
    return [slug for slug in PATHS if slug in have]


def _cell(line: Line) -> tuple[str, int]:
    return line.where.model, line.where.ctx


def _baselines(shown: Sequence[Line]) -> str:
    return " or ".join(dict.fromkeys(quant_catalogue.baseline_on(line.where.gpu) for line in shown)) or "bf16"
