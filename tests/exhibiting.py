"""What a record shows: views of made-up records, the lines of their tables, the golden bytes they must have."""

import csv
import io
import os
import re
from importlib.metadata import version
from pathlib import Path

import matplotlib as mpl
import pytest
from factory import grid, record
from matplotlib.figure import Figure

from decodegap import frame, published, render, style
from decodegap.exhibits import View
from decodegap.launch import Kept
from decodegap.paths import HERE, Places
from decodegap.schema import Record

STUDY = published.load(HERE.published)
GOLDEN = Path(__file__).parent / "golden"
GOLDEN_MATPLOTLIB = "3.11.2"  # glyph outlines and path rounding are its own
HASH = re.compile(rb"\b[0-9a-f]{64}\b|(?<=Records: )[0-9a-f]{16}\b")


def shipped() -> list[Record]:
    """A grid, and a cell of another card that ran out of memory."""
    return [*grid("h200"), record(gpu="l4", ctx=8192, outcome="oom", reasons=["asked for 1.5 GB"])]


def yours() -> list[Record]:
    """One cell on two hosts, with flags."""
    return [
        record(session=k, host="bb", step_ms=18 + k / 7, flags=["power cap"], started_at=f"2026-06-02T0{k}:00:00Z")
        for k in range(1, 7)
    ] + [record(session=k, host="cc", step_ms=30.0) for k in (7, 8)]


def on_cpu() -> list[Record]:
    """A grid of stand-in models."""
    return grid("cpu", cache_mib=120.0)


def view(found: list[Record], *, cpu: bool = False) -> View:
    """`found` as shipped records, or as one's own on a CPU."""
    folder = Places(Path("checkout")).local / "cpu" / "report" if cpu else None
    kept = tuple(Kept("yours" if cpu else "shipped", each) for each in found)
    return View(frame.build([], found) if cpu else frame.build(found), STUDY, folder, kept=kept)


def lines(table: render.Table, **wanted: object) -> list[dict[str, str]]:
    """The lines of a table's CSV file that have these values."""
    found = csv.DictReader(io.StringIO(render.csv_text(table)))
    return [line for line in found if all(line[key] == str(value) for key, value in wanted.items())]


def saved(figure: Figure, fmt: style.Format) -> bytes:
    """The figure as a file."""
    return style.to_bytes(figure, fmt, title="figure", records="0" * 64, epoch_s=1_780_000_000)


def texts(figure: Figure) -> list[str]:
    """Every text in the figure."""
    figure.draw_without_rendering()
    found = [artist.get_text() for artist in figure.findobj(mpl.text.Text)]  # type: ignore[attr-defined]
    return [text for text in found if text]


def golden(name: str, content: bytes) -> None:
    """Hold `content` against the committed file; `UPDATE_GOLDEN=1` accepts it as the new one.

    Hashes are blanked: those of made-up records change whenever a record gets a field, and prove nothing here.
    """
    path = GOLDEN / name
    content = HASH.sub(lambda found: b"0" * len(found[0]), content)
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    assert content == path.read_bytes(), f"{name} changed; look at it, then accept it with UPDATE_GOLDEN=1"


def golden_table(name: str, table: render.Table) -> None:
    """Hold a table against its three committed files."""
    golden(f"{name}.md", render.markdown(table).encode())
    golden(f"{name}.csv", render.csv_text(table).encode())
    golden(f"{name}.tex", render.latex(table).encode())


def golden_figure(name: str, figure: Figure) -> None:
    """Hold a figure against its committed file."""
    if version("matplotlib") != GOLDEN_MATPLOTLIB:
        pytest.skip(f"golden pictures are of matplotlib {GOLDEN_MATPLOTLIB}")
    golden(f"{name}.svg", saved(figure, "svg"))


def has_a_text_for_each_header(table: render.Table) -> None:
    """Hold every row to the headers, and LaTeX to what a listing can print."""
    assert {len(row) for row in table.rows} == {len(table.headers)} == {len(table.numeric)}
    assert len(table.rows) == len(table.groups)
    assert render.latex(table).isascii()


def fits_its_column(figure: Figure) -> None:
    """Hold a figure to the width of a column, what is drawn included."""
    assert figure.get_figwidth() == style.COLUMN_IN
    figure.draw_without_rendering()
    box = figure.get_tightbbox(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    assert box.x0 >= -0.02
    assert box.x1 <= style.COLUMN_IN + 0.02
