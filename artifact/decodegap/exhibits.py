"""What a report shows, and which tables and figures show it: the paper's, a GPU's own, or those of a CPU."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodegap import (
    figures,
    figures_ladder,
    figures_launch,
    figures_quant,
    predict,
    quant_results,
    quant_why,
    render,
    steadiness,
    tables,
    tables_ab,
    tables_anatomy,
    tables_arms,
    tables_ladder,
    tables_predictions,
    tables_quant,
    tables_review,
)
from decodegap.errors import NotMeasuredError
from decodegap.launch import Kept
from decodegap.published import Published
from decodegap.render import Table
from decodegap.schema import Record

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class View:
    """Everything that one report shows: the paper's (`folder` None) or that of this machine's records of one GPU."""

    frame: "pd.DataFrame"
    published: Published
    folder: Path | None
    left_out: int = 0  # others' records of another protocol than yours, which cannot stand in one table with them
    kept: tuple[Kept, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether it shows CPU stand-ins, which have tables and figures of their own."""
        return self.folder is not None and self.folder.parent.name == "cpu"

    @cached_property
    def fitted(self) -> predict.Model | None:
        """The step-time model that the shipped records give; None if they are not enough for one."""
        return fit([each.record for each in self.kept if each.store == "shipped"])


Maker = Callable[[View], Table]
Drawer = Callable[[View], "Figure"]

TABLES: dict[str, Maker] = {
    "grid": lambda view: tables.grid(view.frame, view.published, view.fitted),
    "actions": lambda view: tables_review.actions(view.frame, view.published),
    "ab": lambda view: tables_ab.ab(view.frame, view.kept, view.published),
    "ab-sessions": lambda view: tables_ab.sessions(view.frame, view.kept),
    "arms": lambda view: tables_arms.arms(view.frame, view.kept),
    "anatomy": lambda view: tables_anatomy.parts(view.frame, view.kept),
    "ledger": lambda view: tables_anatomy.byte_ledger(view.frame, view.kept),
    "ladder": lambda view: tables_ladder.rungs(view.frame, view.kept),
    "predictions": lambda view: tables_predictions.predictions(view.frame, view.published, view.fitted),
    "quantised": lambda view: tables_quant.quantised(view.frame, view.published),
    "projections": lambda view: tables_quant.projections(view.frame, view.kept),
    "why": lambda view: tables_quant.why(view.frame, view.kept),
}
FIGURES: dict[str, Drawer] = {
    "fraction": lambda view: figures.fraction(view.frame, view.published),
    "context": lambda view: figures.context(view.frame, view.published),
    "heatmap": lambda view: figures.heatmap(view.frame, view.published, view.fitted),
    "anatomy": lambda view: figures_launch.anatomy(view.kept),
    "ratios": lambda view: figures_launch.ratios(view.kept, view.published),
    "dispatch": lambda view: figures_launch.dispatch(view.kept),
    "quantised": lambda view: figures_quant.quantised(quant_results.lines(view.frame, view.published)),
    "ladder": lambda view: figures_ladder.rungs(view.frame, view.kept),
}
CPU_TABLES: dict[str, Maker] = {
    "cpu": lambda view: tables.cpu(view.frame),
    "cpu-ab": lambda view: tables_ab.cpu_ab(view.frame, view.kept),
    "cpu-anatomy": lambda view: tables_anatomy.cpu_parts(view.frame, view.kept),
    "cpu-quantised": lambda view: tables_quant.cpu_quantised(view.frame),
    "cpu-projections": lambda view: tables_quant.projections(view.frame, view.kept, cpu=True),
    "cpu-why": lambda view: tables_quant.why(view.frame, view.kept, cpu=True),
    "cpu-ladder": lambda view: tables_ladder.cpu_rungs(view.frame, view.kept),
}
CPU_FIGURES: dict[str, Drawer] = {
    "cpu": lambda view: figures.cpu(view.frame),
    "cpu-ab": lambda view: figures_launch.cpu_ratios(view.kept),
    "cpu-anatomy": lambda view: figures_launch.anatomy(view.kept),
    "cpu-quantised": lambda view: figures_quant.quantised(quant_results.lines(view.frame, None, cpu=True)),
    "cpu-ladder": lambda view: figures_ladder.cpu_rungs(view.frame, view.kept),
}
# Which experiments' records a figure or table draws from; the step-time model is fitted on those with an anatomy.
FITTED = ("graphs", "ladder")
DRAWN_FROM: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("grid", "heatmap", "dispatch"), ("baseline", *FITTED)),
    **dict.fromkeys(("fraction", "context", "cpu"), ("baseline",)),
    **dict.fromkeys(("ab", "ab-sessions", "arms", "anatomy", "ledger", "ratios"), ("graphs",)),
    **dict.fromkeys(("quantised", "projections", "why"), ("quantised",)),
    "ladder": ("ladder",),
    "predictions": FITTED,
}
OF_EXPERIMENT = {
    "cpu": "baseline",
    **{f"cpu-{name}": "quantised" for name in ("quantised", "projections", "why")},
    "cpu-ladder": "ladder",
}
ON_CPU = {
    "grid": "cpu",
    "context": "cpu",
    "ab": "cpu-ab",
    "ratios": "cpu-ab",
    **{name: f"cpu-{name}" for name in ("anatomy", "quantised", "projections", "why", "ladder")},
}


def name_for(view: View, name: str) -> str | None:
    """What table or figure `name` is called in `view`; None where its records are not there or a CPU has none such."""
    found = ON_CPU.get(name) if view.is_cpu else name
    return found if found and shows(view, found) else None


def table(view: View, name: str) -> Table:
    """Table `name` of `view`; it says what marks unstable steps, and how many records could not stand in it."""
    made = (CPU_TABLES if view.is_cpu else TABLES)[name](view)
    notes = list(made.notes)
    for mark, note in ((steadiness.MARK, steadiness.NOTE), (steadiness.CAP_MARK, steadiness.CAP_NOTE)):
        if any(mark in text for row in made.rows for text in row):
            notes.append(note)
    if view.left_out:
        notes.append(
            f"{view.left_out} shipped or imported records were measured by another protocol and are not shown here."
        )
    return replace(made, notes=tuple(notes))


def figure(view: View, name: str) -> "Figure":
    """Figure `name` of `view`."""
    return (CPU_FIGURES if view.is_cpu else FIGURES)[name](view)


def show_table(view: View | None, name: str) -> Any:
    """Table `name` for a notebook to display; on a CPU its counterpart there; None where there is nothing to show."""
    from IPython.display import Markdown

    found = name_for(view, name) if view else None
    return Markdown(render.markdown(table(view, found))) if view and found else None


def show_figure(view: View | None, name: str) -> "Figure | None":
    """Figure `name` for a notebook to display, as `show_table`."""
    found = name_for(view, name) if view else None
    return figure(view, found) if view and found else None


def show_reasons(view: View | None) -> Any:
    """Why quantised paths are not faster, in a paragraph over what `view` shows, for a notebook to display."""
    from IPython.display import Markdown

    return Markdown(quant_why.of_view(view) if view else quant_why.NOTHING)


def tables_of(view: View) -> Iterator[Table]:
    """Every table of `view`."""
    yield from (table(view, name) for name in (CPU_TABLES if view.is_cpu else TABLES) if shows(view, name))


def figures_of(view: View) -> Iterator[tuple[str, "Figure"]]:
    """Every figure of `view` with its name."""
    names = CPU_FIGURES if view.is_cpu else FIGURES
    yield from ((name, figure(view, name)) for name in names if shows(view, name))


def shows(view: View, name: str) -> bool:
    """Whether `view` has records for table or figure `name`; the paper's are always made, to say what is missing."""
    if not view.is_cpu:
        return True
    here = [each.record for each in view.kept]
    if name in OF_EXPERIMENT:
        return any(record.cell.experiment == OF_EXPERIMENT[name] for record in here)
    here = [record for record in here if record.cell.experiment == "graphs"]
    return any(record.anatomy if name == "cpu-anatomy" else record.cell.arm.startswith("ab") for record in here)


def fit(found: Iterable[Record]) -> predict.Model | None:
    """The step-time model that these records give; None if they are not enough for one."""
    try:
        return predict.fit(found)
    except NotMeasuredError:
        return None
