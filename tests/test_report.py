"""Whether the paper is rebuilt from shipped records alone, byte for byte, and everyone else's stay beside it."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest
from exhibiting import GOLDEN_MATPLOTLIB
from factory import checkout, grid, record, write

from decodegap import plan, records, report, standing
from decodegap.errors import BadInputError, BadRecordError
from decodegap.paths import HERE, Places

DRAWN = ("fraction", "context", "heatmap", "anatomy", "ratios", "dispatch", "quantised", "ladder")
MADE = (
    "grid",
    "actions",
    "ab",
    "ab-sessions",
    "arms",
    "anatomy",
    "ledger",
    "ladder",
    "predictions",
    "quantised",
    "projections",
    "why",
)
FIGURES = {f"{name}.{fmt}" for name in DRAWN for fmt in ("pdf", "png", "svg")}
TABLES = {f"{name}.{kind}" for name in MADE for kind in ("md", "csv", "tex")}
REVIEW = {f"{name}.{kind}" for name in ("claims", "costs") for kind in ("md", "csv", "tex")} | {
    "claims.json",
    "findings.tex",
    "missed.tex",
}
PAPER = TABLES | REVIEW | {"numbers.tex"}


@pytest.fixture
def at(tmp_path: Path) -> Places:
    """A checkout with the study's numbers and no record."""
    return checkout(tmp_path / "checkout")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def contents(at: Places) -> dict[str, tuple[bytes, int]]:
    found = [path for folder in (at.figures, at.generated) if folder.is_dir() for path in folder.iterdir()]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def manifest(at: Places, gpu: str) -> None:
    records.write_atomically(at.results / gpu / records.MANIFEST, records.manifest_text(at.results, gpu).encode())


def test_the_paper_is_rebuilt_from_shipped_records_and_a_second_time_touches_nothing(at: Places) -> None:
    write(grid("h200"), at.results)
    manifest(at, "h200")
    written = report.rebuild(at)
    assert names(at.figures) == FIGURES
    assert names(at.generated) == PAPER
    assert {path.name for path in written} == FIGURES | PAPER
    before = contents(at)
    for content, _ in before.values():
        assert str(at.root).encode() not in content
        assert not re.search(rb"/(home|root|tmp|Users)/", content)
    assert report.rebuild(at) == written
    assert contents(at) == before


def test_without_any_record_the_paper_shows_what_is_published(at: Places) -> None:
    report.rebuild(at)
    assert names(at.figures) == FIGURES
    assert "0.810†" in (at.generated / "grid.md").read_text(encoding="utf-8")


def test_tables_and_figures_can_be_had_apart(at: Places) -> None:
    report.rebuild(at, {"tables"})
    assert (names(at.figures), names(at.generated)) == (set(), PAPER)


def test_local_records_get_their_own_report_beside_the_shipped_and_leave_the_paper_alone(at: Places) -> None:
    write(grid("h200", sessions=1), at.results)
    report.rebuild(at, {"tables"})
    before = contents(at)
    write(grid("h200", sessions=2, factor=1.5), at.local)
    report.rebuild(at, {"tables"})
    assert contents(at) == before
    folder = at.local / "h200" / "report"
    assert names(folder) == TABLES
    text = (folder / "grid.md").read_text(encoding="utf-8")
    assert "measured, yours" in text
    assert "measured, shipped" in text


def test_cpu_records_get_a_table_and_a_figure_and_never_enter_the_papers(at: Places) -> None:
    write(grid("cpu"), at.local)
    report.rebuild(at)
    assert names(at.local / "cpu" / "report") == {f"cpu.{kind}" for kind in ("md", "csv", "tex", "pdf", "png", "svg")}
    paper = "".join(path.read_text(encoding="utf-8") for path in at.generated.iterdir())
    assert "stand-in" not in paper.lower()


def test_one_gpu_of_several_can_be_asked_for_and_the_store_may_be_elsewhere(at: Places, tmp_path: Path) -> None:
    store = tmp_path / "elsewhere"
    write([record(gpu="h200"), record(gpu="l4")], store)
    (store / "notes").mkdir()
    report.rebuild(at, {"tables"}, store=store, gpu="l4")
    assert names(store / "l4" / "report") == TABLES
    assert not (store / "h200" / "report").exists()
    report.rebuild(at, {"tables"}, store=store)
    assert names(store / "h200" / "report") == TABLES


@pytest.mark.parametrize("damage", ["truncated", "edited", "unlisted", "gone", "foreign"])
def test_a_bad_shipped_record_stops_everything_in_one_line_and_changes_no_file(at: Places, damage: str) -> None:
    files = write(grid("h200", sessions=1), at.results)
    manifest(at, "h200")
    report.rebuild(at, {"tables"})
    before = contents(at)
    if damage == "truncated":
        files[3].write_bytes(files[3].read_bytes()[:900])
    if damage == "edited":
        files[3].write_text(files[3].read_text().replace('"session": 1', '"session": 2'))
    if damage == "unlisted":
        records.write(record(session=2), at.results)
    if damage == "gone":
        files[3].unlink()
    if damage == "foreign":
        write([record(session=2, protocol=plan.protocol("h200", "hub", "abc"))], at.results)
        manifest(at, "h200")
    with pytest.raises(BadRecordError) as caught:
        report.rebuild(at)
    assert "\n" not in str(caught.value)
    assert contents(at) == before


def test_yours_of_another_protocol_stand_alone_and_say_how_many_were_left_out(at: Places) -> None:
    write(grid("h200", sessions=1), at.results)
    write([record(protocol=plan.protocol("h200", "hub", "abc"))], at.local)
    view = report.local("h200", at.local, at)
    assert view is not None
    assert view.left_out == 12
    assert set(view.frame["store"]) == {"yours"}
    report.rebuild(at, {"tables"})
    text = (at.local / "h200" / "report" / "grid.md").read_text(encoding="utf-8")
    assert "12 shipped or imported records" in text


def lines(gpu: str, at: Places) -> dict[tuple[str, int], standing.Line]:
    tasks = plan.baseline(plan.request(gpu=gpu), gpu)
    return {(line.cell.model, line.cell.ctx): line for line in standing.lines(gpu, tasks, at.local, at)}


def test_each_cell_says_what_stands_there_and_why(at: Places) -> None:
    write([record(gpu="l4", ctx=16384, outcome="oom", reasons=["asked for 2 GB"])], at.local)
    write([record(gpu="l4", model="llama-3.1-8b", session=k) for k in (1, 2, 3)], at.results)
    write([record(gpu="l4", ctx=2048, session=k) for k in (1, 2)], at.local)
    found = lines("l4", at)
    assert len(found) == 12
    said = {cell: (line.kind, line.store, line.reason) for cell, line in found.items()}
    assert said["qwen2.5-7b", 2048] == ("measured", "yours", "2 of 3 sessions, yours")
    assert said["qwen2.5-7b", 4096] == ("published", "", "arXiv 2605.30571")
    assert said["qwen2.5-7b", 8192] == ("missing", "", "out of memory in the study, not measured here")
    assert said["qwen2.5-7b", 16384] == ("missing", "yours", "oom: asked for 2 GB")
    assert said["llama-3.1-8b", 2048] == ("measured", "shipped", "3 sessions, shipped")
    assert said["mistral-7b-v0.3", 2048] == ("missing", "", "not quoted, not measured")
    assert found["qwen2.5-7b", 4096].text() == (
        "l4 baseline qwen2.5-7b 4096 eager: published (arXiv 2605.30571)"
    )  # fmt: skip
    assert {line.kind for line in lines("cpu", at).values()} == {"missing"}


def test_the_epoch_is_the_newest_records_time(at: Places) -> None:
    assert report.epoch_s(report.paper(at)) == 1_779_926_400  # the study's date, 2026-05-28
    times = {2048: "2026-06-01T12:00:00Z", 4096: "2026-06-03T00:00:00Z", 8192: "2026-06-02T00:00:00Z"}
    write([record(ctx=ctx, started_at=started_at) for ctx, started_at in times.items()], at.results)
    assert report.epoch_s(report.paper(at)) == 1_780_444_800


def test_folders_worth_opening_are_those_with_something_in_them(at: Places) -> None:
    write(grid("cpu", sessions=1), at.local)
    assert report.places("cpu", at.local, at) == []
    report.rebuild(at, {"tables"})
    assert report.places("cpu", at.local, at) == [at.local / "cpu" / "report", at.generated]
    assert report.shown(at.figures, at) == "figures"


def test_notebook_parameters_are_strict(at: Places) -> None:
    write(grid("cpu", sessions=1), at.local)
    views = report.from_notebook({"gpu": "cpu", "results": ""}, at)
    assert (views.main.folder, views.cpu is not None) == (None, True)
    for bad in ({"gpu": "h300"}, {"gpu": "../x"}, {"gpu": 7}, {"results": 3}, {"gppu": "h200"}):
        with pytest.raises(BadInputError):
            report.from_notebook(bad, at)
    write([record(gpu="nvidia-test-card")], at.results)
    assert report.from_notebook({"gpu": "nvidia-test-card"}, at).main.folder is None


def test_the_notebook_is_thin_and_has_no_output() -> None:
    notebook = nbformat.read(HERE.notebooks / "05_paper.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "print_figure_kwargs={'bbox_inches': None}" in code[0].source
    assert [cell for cell in code if "parameters" in cell.metadata.get("tags", [])] == [code[1]]
    assert notebook.metadata.kernelspec.name == "python3"
    assert max(len(cell.source.splitlines()) for cell in code) <= 4


@pytest.mark.slow
def test_the_notebook_runs_in_a_checkout_and_shows_every_figure_at_its_print_size(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    for folder in ("artifact/decodegap", "artifact/published"):
        shutil.copytree(HERE.root / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (
        "figures/paper.mplstyle",
        "notebooks/05_paper.ipynb",
        "artifact/claims.toml",
        "requirements/sizes.toml",
    ):
        (root / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(HERE.root / file, root / file)
    write(grid("h200", sessions=1), root / "artifact" / "results")
    write(grid("cpu", sessions=1), root / "artifact" / "results" / "local")
    out = tmp_path / "out.ipynb"
    env = os.environ | {"PYTHONPATH": str(root / "artifact"), "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-m", "papermill", "05_paper.ipynb", str(out), "-p", "gpu", "cpu", "--no-progress-bar"]
    done = subprocess.run(
        command, cwd=root / "notebooks", env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = [cell for cell in json.loads(out.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = [output["data"] for cell in cells for output in cell["outputs"] if "data" in output]
    assert sum("image/png" in data for data in shown) == len(DRAWN) + 1
    assert sum("text/markdown" in data for data in shown) == 15
    assert names(root / "figures") == FIGURES | {"paper.mplstyle"}


def test_rebuilding_needs_no_torch(at: Places) -> None:
    write([record()], at.results)
    code = (
        "import sys; from pathlib import Path\n"
        "from decodegap import paths, report\n"
        f"print(len(report.rebuild(paths.Places(Path({str(at.root)!r})))))\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(HERE.root / "artifact")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{len(FIGURES | PAPER)}\n"), done.stderr


def test_committed_files_are_what_the_shipped_records_give(tmp_path: Path) -> None:
    """The paper's files in this checkout, rebuilt elsewhere from its records, have the same bytes."""
    copy = checkout(tmp_path, shipped=True)
    what = {"tables", "figures"} if version("matplotlib") == GOLDEN_MATPLOTLIB else {"tables"}
    for path in report.rebuild(copy, what):
        committed = HERE.root / path.relative_to(copy.root)
        same = committed.is_file() and committed.read_bytes() == path.read_bytes()
        assert same, f"{report.shown(committed)} is not what the shipped records give: run make figures tables"
