"""Whether figures say what is measured and what is published, stay the same bytes, and need no heavy package."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from exhibiting import GOLDEN, STUDY, golden_figure, on_cpu, saved, shipped, texts, yours
from factory import grid, record
from matplotlib.figure import Figure

from decodegap import figures, frame, style
from decodegap.errors import BadInputError
from decodegap.paths import HERE, Places

logging.getLogger("fontTools").setLevel(logging.WARNING)  # one line a table of a font otherwise

MAKERS: dict[str, Callable[[], Figure]] = {
    "fraction": lambda: figures.fraction(frame.build(shipped()), STUDY),
    "fraction_yours": lambda: figures.fraction(frame.build(shipped(), yours()), STUDY),
    "context": lambda: figures.context(frame.build(shipped()), STUDY),
    "heatmap": lambda: figures.heatmap(frame.build(shipped()), STUDY),
    "cpu": lambda: figures.cpu(frame.build([], on_cpu())),
}


@pytest.fixture(scope="module")
def made() -> dict[str, Figure]:
    return {name: make() for name, make in MAKERS.items()}


@pytest.mark.parametrize("name", ["fraction", "context", "heatmap", "cpu"])
def test_figures_have_the_golden_bytes(made: dict[str, Figure], name: str) -> None:
    golden_figure(name, made[name])


@pytest.mark.parametrize("text", [None, b"\xff\xfe\x00"])
def test_without_the_style_sheet_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes | None
) -> None:
    monkeypatch.setattr(style, "HERE", Places(tmp_path))
    if text is not None:
        (tmp_path / "figures").mkdir()
        (tmp_path / "figures" / "paper.mplstyle").write_bytes(text)
    with pytest.raises(BadInputError, match=r"^figures/paper\.mplstyle: cannot be read: .*restore it with git$"):
        figures.cpu(frame.build([], on_cpu()))


def test_goldens_are_all_used() -> None:
    launched = ("ab", "ab-sessions", "arms", "anatomy", "ledger", "predictions", "cpu-ab", "cpu-anatomy")
    launched = (*launched, *(f"{pre}{name}" for pre in ("", "cpu-") for name in ("quantised", "projections", "why")))
    launched = (*launched, "ladder", "cpu-ladder")
    tables = {f"{name}.{kind}" for name in ("grid", "grid_yours", "cpu", *launched) for kind in ("md", "csv", "tex")}
    drawn = (
        "fraction",
        "context",
        "heatmap",
        "cpu",
        "anatomy",
        "ratios",
        "dispatch",
        "cpu-ab",
        "cpu-anatomy",
        "quantised",
        "cpu-quantised",
        "ladder",
        "cpu-ladder",
    )
    assert {path.name for path in GOLDEN.iterdir()} == tables | {f"{name}.svg" for name in drawn} | {"numbers.tex"}


@pytest.mark.parametrize("fmt", style.FORMATS)
def test_another_process_in_another_time_zone_saves_the_same_bytes(made: dict[str, Figure], fmt: style.Format) -> None:
    code = (
        "import sys, test_figures as t; sys.stdout.buffer.write("
        f"t.saved(t.MAKERS['fraction'](), {fmt!r}))"
    )  # fmt: skip
    env = os.environ | {"TZ": "Asia/Seoul", "PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "5", "LC_ALL": "C"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.root / "artifact"), str(HERE.root / "tests")])
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True, timeout=60)
    assert done.stdout == saved(made["fraction"], fmt)
    assert saved(made["fraction"], fmt) == saved(made["fraction"], fmt)


def test_metadata_is_the_records_and_nothing_else(made: dict[str, Figure]) -> None:
    for fmt in style.FORMATS:
        content = saved(made["fraction"], fmt)
        assert b"records sha256:" + b"0" * 64 in content
        assert version("matplotlib").encode() not in content
    pdf = saved(made["fraction"], "pdf")
    assert b"D:20260528" in pdf
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf


def test_a_users_own_settings_change_nothing_and_are_left_alone(made: dict[str, Figure]) -> None:
    with mpl.rc_context({"font.size": 30, "pdf.fonttype": 3, "xtick.direction": "in", "xtick.major.pad": 20}):
        before = dict(os.environ), dict(mpl.rcParams)
        assert saved(MAKERS["fraction"](), "pdf") == saved(made["fraction"], "pdf")
        assert (dict(os.environ), dict(mpl.rcParams)) == before


def test_sizes_are_print_sizes(made: dict[str, Figure]) -> None:
    widths = {name: figure.get_size_inches()[0] for name, figure in made.items()}
    assert widths == pytest.approx(
        {"fraction": 3.34, "fraction_yours": 3.34, "context": 7.0, "heatmap": 7.0, "cpu": 3.34}
    )


@pytest.mark.parametrize("name", MAKERS)
def test_everything_lies_inside_and_no_tick_labels_overlap(made: dict[str, Figure], name: str) -> None:
    figure = made[name]
    figure.draw_without_rendering()
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    assert figure.bbox.padded(1).containsx(figure.get_tightbbox(renderer).x0 * figure.dpi)
    for legend in figure.legends:
        box = legend.get_window_extent(renderer)
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1 + 0.5
        assert legend.get_texts()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [t.get_window_extent(renderer) for t in axis.get_ticklabels() if t.get_text() and t.get_visible()]
            assert not [1 for a in boxes for b in boxes if a is not b and a.overlaps(b)]


def faces(figure: Figure) -> Iterator[tuple[str, str]]:
    for line in figure.axes[0].lines:
        if line.get_marker() in ("o", "s", "^") and line.get_linestyle() == "None" and len(line.get_xdata()):  # type: ignore[arg-type]
            yield ("hollow" if line.get_markerfacecolor() == "white" else "filled"), str(line.get_markeredgecolor())


def test_published_points_are_hollow_measured_ones_filled_and_yours_edged(made: dict[str, Figure]) -> None:
    alone = figures.fraction(frame.build([]), STUDY)
    assert {face for face, _ in faces(alone)} == {"hollow"}
    assert {face for face, _ in faces(made["fraction"])} == {"hollow", "filled"}
    assert ("filled", "black") in set(faces(made["fraction_yours"]))
    assert ("filled", "black") not in set(faces(made["fraction"]))
    assert "measured" not in texts(alone)


def test_heatmap_shows_the_published_digits_and_what_is_missing(made: dict[str, Figure]) -> None:
    found = texts(made["heatmap"])
    assert ".270" in found
    assert "OOM" in found
    assert "L4 †" in found
    hatched = [patch for patch in made["heatmap"].axes[0].patches if patch.get_hatch()]
    assert len(hatched) == 4 * 12 - 17


def test_the_same_gpu_has_one_floor_however_often_it_was_measured() -> None:
    figure = figures.context(frame.build(shipped(), yours()), STUDY)
    labels = [str(line.get_label()) for line in figure.axes[0].lines]
    assert labels.count("_floor h200") == 1
    assert {"H200 SXM", "H200 SXM #1 (yours)", "H200 SXM #2 (yours)"} <= set(texts(figure))


def test_no_floor_is_drawn_where_the_cache_may_serve_the_weights(made: dict[str, Figure]) -> None:
    dotted = [line for line in made["cpu"].axes[0].lines if line.get_linewidth() == 0.7]
    assert len(dotted) == 1


def test_gpus_of_nearly_equal_bandwidth_share_a_label() -> None:
    figure = figures.fraction(frame.build([], [record(gpu="h100-nvl"), record(gpu="h100-pcie"), *grid("h200")]), STUDY)
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = [label.get_window_extent(renderer) for label in figure.axes[0].get_xticklabels()]
    assert not [1 for a in boxes for b in boxes if a is not b and a.overlaps(b)]


def test_more_systems_than_colours_still_look_different() -> None:
    looks = [style.look(index) for index in range(3 * len(style.LOOKS))]
    assert len({repr(look) for look in looks}) == len(looks)


def test_importing_figures_is_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import decodegap.figures; took = time.process_time() - start;"
        "heavy = {'torch', 'seaborn', 'scipy.stats', 'matplotlib.pyplot', 'pandas'} & set(sys.modules);"
        "assert not heavy, heavy; assert took < 2.5, took"
    )
    env = os.environ | {"PYTHONPATH": str(HERE.root / "artifact")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_svg_ids_are_unique(made: dict[str, Figure]) -> None:
    ids = re.findall(rb'\sid="([^"]+)"', saved(made["context"], "svg"))
    assert len(ids) == len(set(ids))
