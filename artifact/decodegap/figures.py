"""Which figures there are: one pure function a figure, from a frame (and the study's values) to a Figure.

Filled markers are measured, hollow ones the study's; every system has a colour, a marker and a dash.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decodegap import draw, gpus, style
from decodegap.grid import Entry, baseline, entries, floor_applies, model_label
from decodegap.published import Published

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from decodegap.predict import Model

FRACTION_LABEL = "Fraction of the published floor"
DARK_BELOW = 0.55  # cividis is dark enough for white digits below this fraction


def fraction(frame: "pd.DataFrame", published: Published) -> "Figure":
    """Fraction of the published floor against peak bandwidth: the study's cells, its ranges, and what was measured."""
    found = [e for e in entries(frame, published) if e.peak_gb_s and e.fractions["published"].value is not None]
    shown = list(dict.fromkeys(e.model for e in found))
    with style.paper():
        figure = style.canvas(style.COLUMN_IN, 2.75)
        axes = figure.add_subplot()
        _published_ranges(axes, published)
        for index, model in enumerate(shown):
            shift = 1 + 0.07 * (index - (len(shown) - 1) / 2)  # side by side, so that no model hides another
            for kind, yours in (("published", False), ("measured", False), ("measured", True)):
                mine = [e for e in found if (e.model, e.kind, _is_yours(e)) == (model, kind, yours)]
                x = [(e.peak_gb_s or 0.0) * shift for e in mine]
                y = draw.numbers(e.fractions["published"].value for e in mine)
                draw.dots(axes, x, y, index, hollow=kind == "published", edge=yours)
        names: dict[float, str] = {}
        for e in found:
            names.setdefault(e.peak_gb_s or 0.0, e.gpu_label.split(" ")[0])
        draw.bandwidth_axis(axes, names)
        axes.set_ylim(0, 1)
        axes.set_ylabel(FRACTION_LABEL)
        keys = [draw.key(model_label(model), index, line=False) for index, model in enumerate(shown)]
        draw.legend(figure, [*keys, *_kind_keys(found, "published"), draw.range_key("published range, median")])
        return style.settle(figure)


def context(frame: "pd.DataFrame", published: Published) -> "Figure":
    """Step time against context, one panel a model, with each GPU's published floor as a thin line of its colour."""
    found = [e for e in entries(frame, published) if e.step_ms.value is not None]
    systems = list(dict.fromkeys(e.system for e in found))
    shown = list(dict.fromkeys(e.model for e in found))
    with style.paper():
        figure = style.canvas(style.TEXT_IN, 2.6)
        panels = figure.subplots(1, max(1, len(shown)), sharey=True, squeeze=False)[0]
        for axes, model in zip(panels, shown, strict=False):
            for index, system in enumerate(systems):
                for kind in ("published", "measured"):
                    mine = [e for e in found if (e.model, e.system, e.kind) == (model, system, kind)]
                    _context_curve(axes, sorted(mine, key=lambda e: e.ctx), index)
            for index, system in enumerate(systems):
                _floor_curve(axes, [e for e in found if (e.model, e.system) == (model, system)], index)
            draw.context_axis(axes, sorted({e.ctx for e in found if e.model == model}))
            axes.set_title(model_label(model))
        panels[0].set_ylabel("Step (ms)")
        draw.plain_log_ticks(panels[0])
        keys = [draw.key(system, index) for index, system in enumerate(systems)]
        kinds = _kind_keys([e for e in found if not _is_yours(e)], "implied by the published fraction")
        draw.legend(figure, [*keys, *kinds, draw.floor_key("floor as published")])
        return style.settle(figure)


def heatmap(frame: "pd.DataFrame", published: Published, fitted: "Model | None" = None) -> "Figure":
    """Fractions of the published floor, GPU x (model, context); a cell without a value is hatched and says so.

    With a `fitted` model, the study's GPUs have its middle prediction, marked, where nothing is known.
    """
    import numpy as np
    import seaborn as sns  # a second of import that only this figure needs

    found = entries(frame, published, fitted)
    lines = list(dict.fromkeys((e.system, e.kind != "measured") for e in found if e.kind != "missing"))
    columns = list(dict.fromkeys((e.model, e.ctx) for e in found))
    values = np.full((len(lines), len(columns)), np.nan)
    texts = np.full(values.shape, "", dtype=object)
    for e in found:
        fact = e.fractions["published"]
        if fact.value is not None:
            at = lines.index((e.system, e.kind != "measured")), columns.index((e.model, e.ctx))
            values[at] = fact.value
            texts[at] = f"{fact.value:.3f}".removeprefix("0") if fact.kind != "predicted" else f"{fact.value:.2f}‡"[1:]
    with style.paper():
        figure = style.canvas(style.TEXT_IN, 0.95 + 0.25 * len(lines))
        axes = figure.add_subplot()
        axes.grid(visible=False)
        axes.set_facecolor("#f2f2f2")
        sns.heatmap(
            values, ax=axes, annot=texts, fmt="", cmap="cividis", vmin=0, vmax=1, linewidths=1.2, linecolor="white",
            annot_kws={"fontsize": 6.5}, cbar_kws={"label": FRACTION_LABEL, "pad": 0.01, "aspect": 12},
        )  # fmt: skip
        for text, value in zip(axes.texts, values[~np.isnan(values)], strict=True):
            text.set_color("black" if value > DARK_BELOW else "white")
        _hatch_missing(axes, values, [(system, *column) for system, _ in lines for column in columns], found)
        predicted = any(e.kind == "predicted" for e in found)
        names = [f"{system} †" if quoted else system for system, quoted in lines]
        axes.set_yticks([i + 0.5 for i in range(len(lines))], names, rotation=0)
        ticks = [f"{ctx // 1024}k" if ctx % 1024 == 0 else str(ctx) for _, ctx in columns]
        axes.set_xticks([i + 0.5 for i in range(len(columns))], ticks, rotation=0)
        axes.tick_params(length=0)
        _model_titles(axes, columns)
        marks = "† published by the study" + ("      ‡ predicted by the step-time model" if predicted else "")
        axes.set_xlabel(f"Context (tokens)      {marks}      hatched: missing (OOM: out of memory)")
        return style.settle(figure)


def cpu(frame: "pd.DataFrame") -> "Figure":
    """Step of the CPU stand-ins against context, beside the floor at the read bandwidth measured on that machine."""
    rows = [row for row in baseline(frame) if row.gpu == "cpu" and row.outcome == "ok"]
    systems = list(dict.fromkeys((row.model, row.host) for row in rows))
    hosts = sorted({row.host for row in rows})
    with style.paper():
        figure = style.canvas(style.COLUMN_IN, 2.6)
        axes = figure.add_subplot()
        keys: list[Any] = []
        for index, (model, host) in enumerate(systems):
            mine = [row for row in rows if (row.model, row.host) == (model, host)]
            shift = 1 + 0.04 * (index - (len(systems) - 1) / 2)  # side by side, so that ranges do not hide one another
            contexts = [row.ctx * shift for row in mine]
            cached = floor_applies(mine[0]) is False
            draw.spreads(axes, mine, index, shift=shift)
            draw.curve(axes, contexts, draw.numbers(row.step_ms for row in mine), index, hollow=cached)
            if not cached:
                draw.floor_line(axes, contexts, draw.numbers(row.floor_achievable_ms for row in mine), index)
            number = f" #{hosts.index(host) + 1}" if len(hosts) > 1 else ""
            keys.append(draw.key(model_label(model) + number, index))
        draw.context_axis(axes, sorted({row.ctx for row in rows}))
        axes.set_ylabel("Step (ms)")
        draw.plain_log_ticks(axes)
        keys.append(draw.floor_key("floor at the measured read bandwidth"))
        if any(floor_applies(row) is False for row in rows):
            keys.append(draw.marker_key("may be served by the cache: no floor", hollow=True))
        draw.legend(figure, keys)
        return style.settle(figure)


def _is_yours(entry: Entry) -> bool:
    return _store(entry) not in ("", "shipped")


def _store(entry: Entry) -> str:
    return entry.row.store if entry.row else ""


def _context_curve(axes: "Axes", points: Sequence[Entry], index: int) -> None:
    if points:
        contexts = [e.ctx for e in points]
        steps = draw.numbers(e.step_ms.value for e in points)
        draw.curve(axes, contexts, steps, index, hollow=points[0].kind == "published")
        draw.spreads(axes, [e.row for e in points if e.row], index)


def _floor_curve(axes: "Axes", points: Sequence[Entry], index: int) -> None:
    """The GPU's floor at each context, unless a system of the same GPU has drawn it already."""
    floors = {e.ctx: e.floors_ms["published"] for e in points}
    if points and not any(line.get_label() == f"_floor {points[0].gpu}" for line in axes.lines):
        draw.floor_line(axes, sorted(floors), draw.numbers(floors[ctx] for ctx in sorted(floors)), index)
        axes.lines[-1].set_label(f"_floor {points[0].gpu}")


def _published_ranges(axes: "Axes", published: Published) -> None:
    for gpu in gpus.catalogue().values():
        low = published.find("floor_fraction_min", gpu=gpu.slug, ctx="all")
        middle = published.find("floor_fraction_median", gpu=gpu.slug, ctx="all")
        high = published.find("floor_fraction_max", gpu=gpu.slug, ctx="all")
        if low and middle and high and gpu.peak_gb_s:
            ends = draw.numbers([low.value, high.value])
            axes.plot([gpu.peak_gb_s] * 2, ends, color=draw.PALE, linewidth=5, zorder=1, solid_capstyle="butt")
            axes.plot([gpu.peak_gb_s], draw.numbers([middle.value]), color=draw.GREY, marker="_", markersize=8)


def _hatch_missing(axes: "Axes", values: Any, cells: Sequence[tuple[str, str, int]], found: Sequence[Entry]) -> None:
    from matplotlib.patches import Rectangle

    reasons = {(e.system, e.model, e.ctx): e.reason for e in found if e.kind == "missing"}
    lost = {cell for cell, reason in reasons.items() if "out of memory" in reason or reason.startswith("oom")}
    for at, cell in enumerate(cells):
        y, x = divmod(at, values.shape[1])
        if values[y, x] != values[y, x]:  # NaN is not itself
            axes.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="/////", edgecolor="#c4c4c4", linewidth=0))
            if cell in lost:
                axes.text(x + 0.5, y + 0.5, "OOM", ha="center", va="center", fontsize=6.5)


def _model_titles(axes: "Axes", columns: Sequence[tuple[str, int]]) -> None:
    for model in dict.fromkeys(model for model, _ in columns):
        at = [i for i, column in enumerate(columns) if column[0] == model]
        axes.text((at[0] + at[-1] + 1) / 2, -0.18, model_label(model), ha="center", va="bottom", fontsize=7)
        if at[0]:
            axes.axvline(at[0], color="white", linewidth=4)


def _kind_keys(found: Sequence[Entry], published: str) -> list[Any]:
    keys = [draw.marker_key("measured")] if any(e.kind == "measured" for e in found) else []
    if any(e.kind == "published" for e in found):
        keys.append(draw.marker_key(published, hollow=True))
    if stores := sorted({_store(e) for e in found if _is_yours(e)}, reverse=True):
        keys.append(draw.marker_key(", ".join(stores), edge=True))
    return keys
