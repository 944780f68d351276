"""The anatomy's figures: each shows its numbers, fits its column, and is the same file for the same data."""

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from decodegap import anatomy, figures_anatomy, ledger, published, stats, style
from decodegap.figures_anatomy import Bar, DispatchPoint, Ratios
from decodegap.paths import HERE
from decodegap.schema import Anatomy

STUDY = published.load(HERE.published)


def made(arm: str, *values: float, residual: float) -> Anatomy:
    parts = dict(zip(anatomy.PARTS, values, strict=True))
    return Anatomy(
        arm=arm, profiled_steps=3, launches=1308, operators={}, busy_ms=6.2, kernel_ms=6.2, bubbles_ms=parts["bubbles"],
        gap_us=0.8, enqueue_ms=20.0, exposed_host_ms=parts["exposed host"], profiled_step_ms=60.0,
        ledger_bytes=dict.fromkeys(ledger.FLOOR_ITEMS, 1), ledger_ms={}, parts_ms=parts, residual_ms=residual,
        step_ms=sum(values) + residual,
    )  # fmt: skip


BARS = [
    Bar("Qwen2.5-7B, ctx 2048", "eager", made("eager", 3.2, 0.05, 2.9, 1.05, 12.9, residual=0.31)),
    Bar("Qwen2.5-7B, ctx 2048", "graph", made("graph", 3.2, 0.05, 2.9, 1.05, 0.0, residual=0.06)),
    Bar("Qwen2.5-7B, ctx 2048", "graph-static", made("graph-static", 3.2, 0.0, 3.0, 1.1, 0.0, residual=-0.2)),
    Bar("Qwen2.5-7B, ctx 2048", "compiled", made("compiled", 3.2, 0.0, 2.1, 0.5, 0.0, residual=0.1)),
    Bar("Qwen2.5-7B, ctx 16384", "eager", made("eager", 3.4, 0.43, 3.3, 1.05, 19.9, residual=0.35)),
    Bar("Qwen2.5-7B, ctx 16384", "graph-stock", made("graph-stock", 3.4, 3.0, 7.0, 1.3, 0.0, residual=0.2)),
]
TEN = [1.31, 1.29, 1.305, 1.3, 1.312, 1.298, 1.301, 1.307, 1.296, 1.303]
POINTS = [DispatchPoint(f"host {h}", us, 1.9 * 1308 * us / 1e3 + 0.4 * k, 1308)
          for h, us in (("1", 7.1), ("2", 9.3), ("3", 6.0)) for k in range(3)]  # fmt: skip


def ratios() -> Figure:
    values = [v for v in STUDY.values if v.quantity == "graph_speedup"]
    return figures_anatomy.ratios(
        [Ratios("H200, 10 sessions", stats.summarise(TEN)), Ratios("H200, yours", stats.summarise(TEN[:3]))],
        [(f"{(v.gpu or '').upper()}", v) for v in values],
    )


FIGURES = {
    "parts": lambda: figures_anatomy.parts(BARS),
    "ratios": ratios,
    "dispatch": lambda: figures_anatomy.dispatch(POINTS),
}
EMPTY = {
    "parts": lambda: figures_anatomy.parts([]),
    "ratios": lambda: figures_anatomy.ratios([], []),
    "dispatch": lambda: figures_anatomy.dispatch([]),
}


def texts(figure: Figure) -> str:
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    found += [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return "\n".join(found)


def test_each_bar_ends_with_its_step_and_every_part_is_in_the_legend() -> None:
    shown = texts(figures_anatomy.parts(BARS))
    for bar in BARS:
        assert f"{bar.anatomy.step_ms:.2f}" in shown
        assert bar.group in shown
    for name in (*anatomy.PARTS, "residual"):
        assert name in shown


def test_the_drawn_parts_add_up_to_the_step_and_a_negative_residual_goes_left() -> None:
    figure = figures_anatomy.parts(BARS[2:3])
    widths = [patch.get_width() for patch in figure.axes[0].patches]  # type: ignore[attr-defined]
    assert sum(widths) == pytest.approx(BARS[2].anatomy.step_ms)
    assert figure.axes[0].get_xlim()[0] < 0


def test_parts_differ_by_hatch_so_that_greyscale_tells_them_apart() -> None:
    hatches = [hatch for _, hatch in figures_anatomy.PART_LOOKS.values()]
    assert len(set(hatches)) == len(hatches)


def test_the_studys_ratios_stand_beside_the_measured_ones_with_the_interval_that_is_known() -> None:
    shown = texts(ratios())
    assert "1.259 [1.253–1.267]" in shown
    assert "1.028, no interval known" in shown
    assert "H200, yours\n1.302, range" in shown
    assert "[1.2" in shown
    ends = [list(line.get_xdata()) for line in ratios().axes[0].lines]
    assert [1.253, 1.267] in ends


def test_every_paired_ratio_is_a_dot() -> None:
    drawn = [x for line in ratios().axes[0].lines for x in line.get_xdata() if line.get_marker() == "o"]
    assert set(TEN) <= set(drawn)


def test_many_hosts_share_one_entry_of_the_legend() -> None:
    many = [DispatchPoint(f"host {k}", 6.0 + k / 4, 15.0 + k, 1308) for k in range(9)]
    assert "9 hosts" in texts(figures_anatomy.dispatch(many))
    assert "host 1" not in texts(figures_anatomy.dispatch(many))
    assert "host 1" in texts(figures_anatomy.dispatch(POINTS))


def test_the_slope_stands_beside_the_launch_count() -> None:
    shown = texts(figures_anatomy.dispatch(POINTS))
    assert "1,308 launches" in shown
    assert "a = " in shown


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_fits_its_column_and_is_the_same_file_twice(name: str) -> None:
    figure = FIGURES[name]()
    assert figure.get_figwidth() == style.COLUMN_IN
    with style.paper():
        canvas = figure.canvas
        assert isinstance(canvas, FigureCanvasAgg)
        canvas.draw()
        box = figure.get_tightbbox(canvas.get_renderer())
    assert box.x0 >= -0.02
    assert box.x1 <= style.COLUMN_IN + 0.02
    assert box.y0 >= -0.02
    assert box.y1 <= figure.get_figheight() + 0.02
    both = [style.to_bytes(FIGURES[name](), "svg", title=name, records="0", epoch_s=0) for _ in range(2)]
    assert both[0] == both[1]


@pytest.mark.parametrize("name", EMPTY)
def test_without_data_a_figure_is_empty_and_no_error(name: str) -> None:
    assert style.to_bytes(EMPTY[name](), "png", title=name, records="0", epoch_s=0)
