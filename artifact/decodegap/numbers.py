"""Which numbers the text may quote: one LaTeX macro each, so that none is typed by hand.

A name is the quantity and then the cell, `<Quantity><Gpu><Model><Context>`, letters only: digits are spelt out, a
model is its first word, a context one of `CONTEXT_WORDS`, and every part starts with a capital, as `letters` makes it:
StepHTwoZeroZeroQwenTwoK. A quantity over all cells of a GPU ends with the GPU; one over everything has no cell.

Measured quantities exist for the GPUs in `TEXT_GPUS` alone, `Published...` and `Implied...` for what the study gives,
`Prediction...` for the step-time model. A name never depends on which records there are: what is not measured says so.
`numbers_paper` holds what the text says beyond the grid.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from decodegap import gpus, models, predict
from decodegap.grid import Entry, entries
from decodegap.plan import PAPER_CONTEXTS
from decodegap.published import Published, Quantity
from decodegap.render import latex_escape
from decodegap.stats import median

if TYPE_CHECKING:
    import pandas as pd

NOT_MEASURED = "n/m"
DIGITS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
CONTEXT_WORDS = {2048: "TwoK", 4096: "FourK", 8192: "EightK", 16384: "SixteenK"}
TEXT_GPUS = ("h200",)  # those whose measurements the text speaks of, whether or not there are records


def macros(frame: "pd.DataFrame", published: Published) -> dict[str, str]:
    """Name (letters only) -> text of every number: measured ones, `n/m` where nothing is measured, and published ones.

    Only shipped records speak in the paper. A cell measured on several hosts has no single number and gives the
    range of the hosts' means.
    """
    found = [e for e in entries(frame, published) if e.row is None or e.row.store == "shipped"]
    measured = [e for e in found if e.kind == "measured"]
    study = [gpu.slug for gpu in gpus.catalogue().values() if gpu.paper]
    out: dict[str, str] = {}
    for gpu in dict.fromkeys((*study, *TEXT_GPUS)):
        for model in models.with_role("paper"):
            for ctx in PAPER_CONTEXTS:
                cell = letters(gpu, re.split(r"[^a-z]", model.slug)[0], CONTEXT_WORDS[ctx])
                here = [e for e in measured if (e.gpu, e.model, e.ctx) == (gpu, model.slug, ctx)]
                if gpu in TEXT_GPUS:
                    out[f"Step{cell}"] = span([e.step_ms.value for e in here], 2)
                    out[f"Fraction{cell}"] = span([e.fractions["published"].value for e in here], 3)
                    out[f"Floor{cell}"] = span([e.floors_ms["published"] for e in here], 2)
                quoted = published.fraction(gpu, model.slug, ctx)
                if quoted is not None:
                    out[f"PublishedFraction{cell}"] = f"{quoted:.3f}"
                    out[f"ImpliedStep{cell}"] = f"{published.implied_step_ms(gpu, model.slug, ctx):.2f}"
        out |= _over_gpu(gpu, [e for e in measured if e.gpu == gpu], published)
    return out


def predictions(fitted: predict.Model | None, published: Published) -> dict[str, str]:
    """Name -> text of what the step-time model says of the published cells: how often and how closely it is right."""
    rows = predict.table(fitted, published) if fitted else []
    fractions = [row for row in rows if row.quantity == "floor_fraction"]
    host = [abs(row.error or 0.0) for row in fractions if row.host_bound]
    device = [abs(row.error or 0.0) for row in fractions if not row.host_bound]
    ratio = {row.gpu: row for row in rows if row.quantity == "graph_speedup"}
    return {
        "PredictionCells": str(len(fractions)) if fitted else NOT_MEASURED,
        "PredictionsInRange": str(sum(bool(row.holds) for row in fractions)) if fitted else NOT_MEASURED,
        "PredictionErrorHost": f"{median(host):.0%}" if host else NOT_MEASURED,
        "PredictionErrorDevice": f"{median(device):.0%}" if device else NOT_MEASURED,
        "PredictionErrorWorst": f"{max([*host, *device]):.0%}" if fractions else NOT_MEASURED,
        **{
            f"PredictionRatio{letters(gpu)}": f"{ratio[gpu].mid:.2f}" if gpu in ratio else NOT_MEASURED
            for gpu in ("h100", "l4")
        },
    }


def latex(numbers: dict[str, str], records: str) -> str:
    """`numbers` as LaTeX macro definitions; `newcommand` refuses a name that already means something."""
    numbers = numbers | {"RecordsHash": records}  # the PDF carries it, so that it can be traced
    lines = [f"\\newcommand{{\\{name}}}{{{latex_escape(text)}}}" for name, text in sorted(numbers.items())]
    return "\n".join([f"% records {records}", *lines, ""])


def letters(*parts: str) -> str:
    """`parts` as one name that TeX accepts: digits spelt out, capitals at the seams. h200, qwen -> HTwoZeroZeroQwen."""
    words = ("".join(DIGITS[int(c)] if c in "0123456789" else c for c in part) for part in parts)
    kept = ("".join(c for c in word if c.isascii() and c.isalpha()) for word in words)
    return "".join(word[:1].upper() + word[1:] for word in kept)


def _over_gpu(gpu: str, measured: list[Entry], published: Published) -> dict[str, str]:
    fractions = [value for e in measured if (value := e.fractions["published"].value) is not None]
    name = letters(gpu)
    out = (
        {}
        if gpu not in TEXT_GPUS
        else {
            f"Cells{name}": str(len({(e.model, e.ctx) for e in measured})) if measured else NOT_MEASURED,
            f"FractionMin{name}": f"{min(fractions):.3f}" if fractions else NOT_MEASURED,
            f"FractionMax{name}": f"{max(fractions):.3f}" if fractions else NOT_MEASURED,
            f"FractionMedian{name}": f"{median(fractions):.3f}" if fractions else NOT_MEASURED,
        }
    )
    quantities: tuple[Quantity, ...] = ("floor_fraction_min", "floor_fraction_max", "floor_fraction_median")
    for quantity in quantities:
        quoted = published.find(quantity, gpu=gpu, ctx="all")
        if quoted and quoted.value is not None:
            out[f"PublishedFraction{quantity.rsplit('_', 1)[1].capitalize()}{name}"] = f"{quoted.value:.3f}"
    return out


def span(values: Iterable[float | None], decimals: int) -> str:
    """The range of these values, one number where all round to it, `n/m` where none is known."""
    texts = [f"{value:.{decimals}f}" for value in sorted(v for v in values if v is not None)]
    if not texts:
        return NOT_MEASURED
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}–{texts[-1]}"
