"""What stands where each cell of a plan is asked for: measured, published, predicted, or missing and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decodegap import frame, gpus, predict, published, records, report
from decodegap.exhibits import fit
from decodegap.grid import EXCLUDED, NOT_QUOTED, Kind
from decodegap.launch import SAME_WORK
from decodegap.paths import HERE, Places, imported
from decodegap.plan import Task
from decodegap.published import Published
from decodegap.rows import CellRow, Store, sessions
from decodegap.schema import Cell, Record


@dataclass(frozen=True)
class Line:
    """What stands for one cell of a plan. `store` is the store of the records, empty if there are none."""

    cell: Cell
    kind: Kind
    reason: str
    store: str = ""

    def text(self) -> str:
        """The line as it is printed."""
        cell = self.cell
        return f"{cell.gpu} {cell.experiment} {cell.model} {cell.ctx} {cell.arm}: {self.kind} ({self.reason})"


def lines(gpu: str, tasks: Sequence[Task], store: Path, at: Places = HERE) -> list[Line]:
    """For each cell of `tasks`: measured (here or shipped), published, predicted, or missing and why.

    `tasks` are one GPU's, `gpu`. Raises as `report.paper`.
    """
    study = published.load(at.published)
    stores: dict[Store, list[Record]] = {"yours": records.load_all(store, gpu)}
    if gpu != "cpu":
        stores["imported"] = records.load_all(imported(store), gpu)
        stores["shipped"] = records.load_shipped(at.results, gpu)
    rows = [row for name, found in stores.items() for row in frame.cells(frame.sessions(found, name))]
    fitted = fit(report.shipped(at))
    wanted: dict[Cell, int] = {}
    for task in tasks:
        wanted[task.cell] = wanted.get(task.cell, 0) + 1
    return [_line(cell, number, rows, study, fitted) for cell, number in wanted.items()]


def _line(cell: Cell, wanted: int, rows: Sequence[CellRow], study: Published, fitted: predict.Model | None) -> Line:
    here = [row for row in rows if _is(row, cell)]
    for store in ("yours", "imported", "shipped"):
        ok = [row for row in here if row.store == store and row.outcome == "ok"]
        if ok:
            number = len({(row.host, session) for row in ok for session in row.session_ids})  # an A/B has two arms
            tags = {row.host for row in ok}
            hosts = f", {len(tags)} hosts" if len(tags) > 1 else ""
            counted = f"{number} of {sessions(wanted)}" if number < wanted else sessions(number)
            shaky = max(row.unstable for row in ok)
            unstable = f", {shaky} unstable" if shaky else ""
            return Line(cell, "measured", f"{counted}, {store}{hosts}{unstable}", store)
    failed = "; ".join(f"{row.outcome}: {row.reason}" for row in here)
    if _is_quoted(cell, study):
        return Line(cell, "published", failed or f"arXiv {study.paper.arxiv}")
    if failed:
        return Line(cell, "missing", failed, here[0].store)
    if study.excluded(cell.gpu, cell.model, cell.ctx):
        return Line(cell, "missing", EXCLUDED + ", not measured here")
    fits = not study.out_of_memory(cell.gpu, cell.model, cell.ctx)
    if fits and cell.experiment == "baseline" and (said := predict.cell(fitted, cell.gpu, cell.model, cell.ctx)):
        text = f"{said.mid:.3f}, {said.low:.3f} to {said.high:.3f} of the published floor"
        return Line(cell, "predicted", f"{NOT_QUOTED}, not measured; {text}")
    known = gpus.catalogue().get(cell.gpu)
    return Line(cell, "missing", f"{NOT_QUOTED}, not measured" if known and known.paper else "not measured")


def _is_quoted(cell: Cell, study: Published) -> bool:
    """Whether the study has this cell: a fraction of the baseline, the ratio of the A/B, a step of a quantised path."""
    if cell.experiment == "graphs" and cell.arm == SAME_WORK:
        return study.find("graph_speedup", gpu=cell.gpu, model=cell.model, ctx=cell.ctx) is not None
    if cell.experiment == "quantised":
        return study.find("step_ms", gpu=cell.gpu, model=cell.model, ctx=cell.ctx, arm=cell.arm) is not None
    return cell.experiment == "baseline" and study.fraction(cell.gpu, cell.model, cell.ctx) is not None


def _is(row: CellRow, cell: Cell) -> bool:
    coordinates = (row.gpu, row.experiment, row.model, row.ctx, row.cell_arm, row.dtype, row.sdpa)
    return coordinates == (cell.gpu, cell.experiment, cell.model, cell.ctx, cell.arm, cell.dtype, cell.sdpa)
