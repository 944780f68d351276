"""What the step-time model says about every published cell, and where it is wrong."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decodegap import gpus, predict
from decodegap.frame import from_frame, records_hash
from decodegap.grid import LEGEND, MARKS, model_label
from decodegap.predict import Prediction, Span
from decodegap.published import Published
from decodegap.render import Table
from decodegap.rows import counted
from decodegap.tables import above_one, number

if TYPE_CHECKING:
    import pandas as pd

QUANTITY = {"floor_fraction": "fraction of floor a", "graph_speedup": "eager / graph"}


def predictions(frame: "pd.DataFrame", published: Published, fitted: predict.Model | None) -> Table:
    """Every published fraction and A/B ratio beside its prediction; no line without a model."""
    found = predict.table(fitted, published) if fitted else []
    return Table(
        name="predictions",
        caption=(
            "The step-time model against every published cell: fitted on H200 records alone, one range of host cost "
            "for all GPUs, fixed before it was compared. Error: predicted / published - 1."
        ),
        headers=(
            "GPU", "Model", "Context", "Quantity", "Published", "Predicted", "Range", "Error", "In range", "Bound by",
        ),
        rows=tuple(map(_row, found)),
        groups=tuple(f"{row.quantity} {row.gpu}" for row in found),
        numeric=(False, False, True, False, True, True, True, True, False, False),
        notes=(
            f"{LEGEND['published']}.",
            f"{LEGEND['predicted']}; no published cell is fitted.",
            *above_one(row.high for row in found if row.quantity == "floor_fraction"),
            *(_parameters(fitted) if fitted else ["No step-time model: no H200 record with an anatomy."]),
            *(_where_wrong(fitted, published, found) if fitted else []),
            *(_copies(frame) if fitted else []),
        ),
        data=tuple(map(_data, found)),
        records=records_hash(frame),
    )  # fmt: skip


def _row(row: Prediction) -> tuple[str, ...]:
    mark = MARKS["predicted"]
    return (
        gpus.known(row.gpu).label,
        model_label(row.model),
        str(row.ctx),
        QUANTITY[row.quantity],
        f"{row.published:.3f}{MARKS['published']}",
        f"{row.mid:.3f}{mark}",
        f"{row.low:.3f}–{row.high:.3f}{mark}",
        f"{row.error:+.1%}",
        "yes" if row.holds else "no",
        "host" if row.host_bound else "device",
    )


def _data(row: Prediction) -> dict[str, Any]:
    names = ("gpu", "model", "ctx", "quantity", "published", "low", "mid", "high", "error", "host_bound", "fitted")
    return {name: getattr(row, name) for name in names} | {"holds": row.holds, "kind": row.kind}


def _parameters(fitted: predict.Model) -> list[str]:
    given = predict.assumed()
    shares = ", ".join(f"{kind} {value:.3f}" for kind, value in fitted.efficiency.items())
    launches = ", ".join(f"{model_label(slug)} {n:.0f}" for slug, n in fitted.launches.items())
    of_fit = (
        f"Fitted on {fitted.records} H200 sessions: a small kernel {fitted.small_kernel_us:.2f} µs; share of peak by "
        f"traffic: {shares} (a plain read: {fitted.read_share:.3f}); a, the host's time for an operator over a bare "
        f"launch, {_span(fitted.a)}; measured over modelled device time {_span(fitted.spread)}; launches a step: "
        f"{launches}."
    )
    of_hosts = (
        f"Assumed for every GPU: dispatch of a launch {_span(given.dispatch_us)} µs ({given.dispatch_us.source}); "
        f"a small kernel {_span(given.small_kernel_scale)} times the H200's ({given.small_kernel_scale.source})."
    )
    return [of_fit, of_hosts]


def _where_wrong(fitted: predict.Model, published: Published, found: Sequence[Prediction]) -> list[str]:
    fractions = [row for row in found if row.quantity == "floor_fraction"]
    ratios = [row for row in found if row.quantity == "graph_speedup"]
    return [
        *_summary(fractions),
        *(text for row in ratios for text in _of_ratio(fitted, published, row)),
        *_of_contexts(fitted, published, fractions),
    ]


def _summary(rows: Sequence[Prediction]) -> list[str]:
    if not rows:
        return []
    errors = {row: abs(row.error or 0.0) for row in rows}
    worst = max(rows, key=lambda row: errors[row])
    kinds = [("host", [r for r in rows if r.host_bound]), ("device", [r for r in rows if not r.host_bound])]
    by_kind = "; ".join(
        f"{counted(len(mine), 'cell')} bound by the {kind}: {statistics.median(errors[row] for row in mine):.0%}"
        for kind, mine in kinds
        if mine
    )
    wide = statistics.median(row.high / row.low for row in rows)
    text = (
        f"Of {len(rows)} published fractions {sum(bool(row.holds) for row in rows)} lie in the predicted range, but "
        f"the ranges are wide: the median high end is {wide:.1f} times the low end. The median error of the middle is "
        f"{statistics.median(errors.values()):.0%} ({by_kind}); the largest is {worst.error or 0.0:+.0%} "
        f"({_cell(worst)})."
    )
    return [text]


def _of_ratio(fitted: predict.Model, published: Published, row: Prediction) -> list[str]:
    """Which of the two steps an A/B's error comes from, where the study gives both."""
    quoted = [
        published.find("step_ms", gpu=row.gpu, model=row.model, ctx=row.ctx, arm=a) for a in ("eager", "cuda_graph")
    ]
    eager, graph = (value.value if value else None for value in quoted)
    text = f"{_cell(row)}, eager / graph: predicted {row.mid:.3f}‡, published {row.published or 0.0:.3f}†."
    if not eager or not graph:
        return [text]
    step = predict.step(fitted, row.gpu, row.model, row.ctx)
    off_eager, off_graph = step.eager_ms.mid / eager - 1, step.graph_ms.mid / graph - 1
    larger = "graph's" if abs(math.log1p(off_graph)) > abs(math.log1p(off_eager)) else "eager"
    above = "above" if graph > step.graph_ms.high else "below" if graph < step.graph_ms.low else "within"
    text += (
        f" The eager step is predicted at {number(step.eager_ms.mid)}‡ ms against {number(eager, 4)}† "
        f"({off_eager:+.0%}), the graph's at {number(step.graph_ms.mid)}‡ ms against {number(graph, 4)}† "
        f"({off_graph:+.0%}), so most of the error is in the {larger} step. The published graph step lies {above} the "
        f"predicted range of {number(step.graph_ms.low)}–{number(step.graph_ms.high)}‡ ms: the model's graph runs the "
        "kernels of the H200's graph arm, and which kernels the study's graph ran is not known here."
    )
    return [text]


def _of_contexts(fitted: predict.Model, published: Published, rows: Sequence[Prediction]) -> list[str]:
    """How much the step grows from the shortest to the longest context, predicted and implied by what is published."""
    notes = []
    for gpu, model in dict.fromkeys((row.gpu, row.model) for row in rows):
        contexts = sorted(row.ctx for row in rows if (row.gpu, row.model) == (gpu, model))
        low, high = contexts[0], contexts[-1]
        ends = [published.implied_step_ms(gpu, model, ctx) for ctx in (low, high)]
        if low == high or ends[0] is None or ends[1] is None:
            continue
        steps = [predict.step(fitted, gpu, model, ctx) for ctx in (low, high)]
        eager = steps[1].eager_ms.mid - steps[0].eager_ms.mid
        device = steps[1].device_ms.mid - steps[0].device_ms.mid
        notes.append(
            f"{gpus.known(gpu).label} {model_label(model)} {ends[1] - ends[0]:+.2f}§, predicted {eager:+.2f}‡ "
            f"(its device time {device:+.2f}‡)"
        )
    if not notes:
        return []
    return [
        "Growth of the step (ms) from the shortest to the longest published context: "
        + "; ".join(notes)
        + f". {LEGEND['implied']}. Where the host bounds the predicted step, more context hides behind it; where the "
        "implied step grows by more than even the predicted device time, the study's step did work at long contexts "
        "that the model does not know of."
    ]


def _copies(frame: "pd.DataFrame") -> list[str]:
    """What copying K and V for every query head does to a step as its context grows, measured on the fitted GPU."""
    rows = from_frame(frame[(frame["experiment"] == "graphs") & (frame["gpu"] == predict.assumed().fit_gpu)])
    steps = {(row.model, row.ctx, row.arm): row.step_ms for row in rows if row.store == "shipped" and row.step_ms}
    notes = []
    for model in dict.fromkeys(model for model, _, _ in steps):
        both = [
            ctx for m, ctx, arm in steps if (m, arm) == (model, "graph-stock") and (m, ctx, "graph-static") in steps
        ]
        low, high = min(both, default=0), max(both, default=0)
        if low < high:
            copied, plain = (steps[model, high, a] - steps[model, low, a] for a in ("graph-stock", "graph-static"))
            notes.append(f"{model_label(model)} from {low} to {high} tokens {copied:+.2f} ms against {plain:+.2f} ms")
    if not notes:
        return []
    text = (
        f"For comparison, on the {gpus.known(predict.assumed().fit_gpu).label}, measured: a step that copies K "
        f"and V for every query head (graph-stock) against one that does not (graph-static): {'; '.join(notes)}. "
        "Whether the study's step made such copies is not known here."
    )
    return [text]


def _cell(row: Prediction) -> str:
    return f"{gpus.known(row.gpu).label} {model_label(row.model)} {row.ctx}"


def _span(span: Span) -> str:
    return f"{span.mid:.2f} ({span.low:.2f}–{span.high:.2f})"
