"""Whether tables, figure, text and verdicts of the quantised paths say what was measured, promised and published."""

import statistics
from collections import Counter
from pathlib import Path

import pytest
from exhibiting import (
    STUDY,
    fits_its_column,
    golden_figure,
    golden_table,
    has_a_text_for_each_header,
    lines,
    texts,
    view,
)
from factory import checkout, grid, rehashed
from factory_quant import EAGER_MS, GRAPH_MS, checked, experiment, measured

from decodegap import (
    exhibits,
    floor,
    frame,
    models,
    numbers_quant,
    quant_paths,
    quant_results,
    quant_why,
    render,
    standing,
    tables,
)  # fmt: skip
from decodegap.exhibits import View
from decodegap.quant_catalogue import PATHS
from decodegap.schema import Record

TABLES = ("quantised", "projections", "why")
CPU_TABLES = tuple(f"cpu-{name}" for name in TABLES)
REFUSED = {"gptq-exllamav2": "exllamav2 kernels are not built for this card and this torch"}


@pytest.fixture(scope="module")
def paper() -> View:
    return view([*experiment("h200"), *grid("h200", sessions=1, host="bb")])


@pytest.fixture(scope="module")
def cpu() -> View:
    return view(experiment("cpu"), cpu=True)


@pytest.mark.parametrize("name", [*TABLES, *CPU_TABLES])
def test_tables_have_the_golden_bytes_and_a_text_for_each_header(paper: View, cpu: View, name: str) -> None:
    table = exhibits.table(cpu if name in CPU_TABLES else paper, name)
    assert table.name == name
    has_a_text_for_each_header(table)
    golden_table(name, table)


@pytest.mark.parametrize("name", ["quantised", "cpu-quantised"])
def test_the_figure_has_the_golden_bytes_and_fits_its_column(paper: View, cpu: View, name: str) -> None:
    figure = exhibits.figure(cpu if name.startswith("cpu") else paper, name)
    fits_its_column(figure)
    golden_figure(name, figure)


def test_promised_is_a_quotient_of_bytes_and_realised_one_of_steps(paper: View) -> None:
    (line,) = lines(exhibits.table(paper, "quantised"), gpu="h200", path="int4-tinygemm")
    config = models.lookup("qwen2.5-7b").config
    kv = floor.kv_bytes(config, 2048, 2)
    read = floor.quantised_bytes(config, 2, 4.25) + kv
    assert float(line["promised"]) == pytest.approx((floor.streamed_bytes(config, 2) + kv) / read, rel=1e-6)
    assert float(line["gain"]) == pytest.approx(EAGER_MS["bf16"] / EAGER_MS["int4-tinygemm"])
    assert float(line["graph_gain"]) == pytest.approx(GRAPH_MS["bf16"] / GRAPH_MS["int4-tinygemm"])
    assert float(line["floor_streamed_ms"]) == pytest.approx(read / 4800 / 1e6, rel=1e-6)
    (base,) = lines(exhibits.table(paper, "quantised"), gpu="h200", path="bf16")
    assert float(base["promised"]) == float(base["gain"]) == float(base["graph_gain"]) == 1


def test_the_study_s_steps_stand_beside_and_are_marked(paper: View) -> None:
    table = exhibits.table(paper, "quantised")
    rows = {row[3]: row for row in table.rows if row[0] == "L4"}
    assert [row[6] for row in rows.values()] == ["62.32†", "59.36†", "45.24†", "17.36†"]
    assert [row[11] for row in rows.values()] == ["1.00", "1.05§", "1.38§", "3.59§"]
    assert rows["gptq-exllamav2"][10] == "3.10 (a)"
    assert {row[-1] for row in rows.values()} == {"published"}
    assert {line["kind"] for line in lines(table, gpu="l4")} == {"published"}
    assert any(note.startswith("†") for note in table.notes)


def test_a_path_is_held_against_a_baseline_of_its_own_host_alone() -> None:
    found = [measured("bf16", 18.0, 7.0), measured("bnb-nf4", 9.0, 3.5, host="bb", session=2)]
    (line,) = lines(exhibits.table(view(found), "quantised"), gpu="h200", path="bnb-nf4")
    assert (line["gain"], line["graph_gain"], line["promised"]) == ("", "", "")


def test_what_is_missing_or_unsupported_says_why() -> None:
    table = exhibits.table(view(grid("h200", sessions=1)), "quantised")
    missing = lines(table, gpu="h200")
    assert {line["path"] for line in missing} == {slug for slug in PATHS if slug != "fp32"}
    assert {line["reason"] for line in missing} == {"not measured"}
    some = [measured("bf16", 18.0, 7.0), checked(refused=REFUSED),
            measured("gptq-exllamav2", 0, outcome="unsupported", reasons=REFUSED.values())]  # fmt: skip
    shown = {row[3]: row for row in exhibits.table(view(some), "quantised").rows if row[0] != "L4"}
    assert shown["gptq-exllamav2"][-1] == f"missing: unsupported: {REFUSED['gptq-exllamav2']}"
    assert shown["bf16"][-2] == "1 of 3"
    kernels = {row[3]: row for row in exhibits.table(view(some), "projections").rows}
    assert kernels["gptq-exllamav2"][-1] == f"missing: {REFUSED['gptq-exllamav2']}"
    assert kernels["bf16"][-1] == "passed"
    alone = exhibits.table(view([]), "why")
    assert alone.rows[0][-1] == "missing: not measured"


def test_a_path_without_a_graph_is_explained_by_its_launched_step() -> None:
    found = view([measured("bf16", 18.0, 7.0), measured("gptq-exllamav2", 18.2), measured("bnb-nf4", 24.0, 6.6)])
    series = {line["path"]: line["series"] for line in lines(exhibits.table(found, "why"))}
    assert series == {"gptq-exllamav2": "eager", "bnb-nf4": "graph"}
    (line,) = lines(exhibits.table(found, "quantised"), gpu="h200", path="gptq-exllamav2")
    assert (line["graph_ms"], line["graph_gain"]) == ("", "")


def test_the_parts_add_up_to_the_step(paper: View, cpu: View) -> None:
    for shown, share in ((paper, 1 / 4), (cpu, 1 / 8)):
        found = quant_why.why(shown.kept, cpu=shown.is_cpu)
        assert found
        for each in found:
            assert each.share == share
            total = each.share_ms + sum(each.parts_ms.values()) + each.residual_ms
            assert total == pytest.approx(each.step_ms)
    by_path = {each.path.slug: each for each in quant_why.why(paper.kept)}
    assert set(by_path) == {slug for slug, path in PATHS.items() if not path.is_baseline}
    assert by_path["bnb-nf4"].share_ms == pytest.approx(GRAPH_MS["bf16"] / 4)
    assert by_path["bnb-nf4"].parts_ms["added kernels"] == pytest.approx(0.1)
    assert by_path["bnb-nf4"].parts_ms["kernels without weights"] == pytest.approx(0.75 * 1.5)
    step = statistics.median(GRAPH_MS["bnb-nf4"] * (1 + 0.01 * k) for k in (-1, 0, 1))
    assert by_path["bnb-nf4"].step_ms == pytest.approx(step)


def test_the_paragraph_quotes_the_records_and_flips_with_them(paper: View) -> None:
    text = quant_why.of_view(paper)
    assert "a quarter of the bf16 step, replayed from a graph, would be 1.75 ms" in text
    assert "the fastest path, int4-tinygemm" in text
    assert "the slowest path, bnb-nf4-dq" in text
    assert "promise 2.92 to 3.12 times the speed; they realise 0.89 to 1.52" in text
    slower = [measured("int4-tinygemm", 60.0, 30.0) if r.cell.arm == "int4-tinygemm" else r for r in experiment()]
    slower = [record for record in slower if record.cell.arm != "int4-tinygemm" or record.session == 1][: len(slower)]
    kept = list({(r.cell.arm, r.session): r for r in slower}.values())
    assert "the slowest path, int4-tinygemm" in quant_why.of_view(view(kept))
    assert quant_why.of_view(view([])).startswith("No quantised path has been measured here yet")


def test_projections_that_became_slower_are_named_with_what_they_cost(paper: View) -> None:
    assert not any("take longer" in note for note in exhibits.table(paper, "why").notes)
    found = [slower(r, "gptq-marlin", "k/v", 31.7) if r.projections else r for r in experiment("h200")]
    usual = next(p.us for r in found for p in r.projections if (p.path, p.kind) == ("bf16", "k/v"))
    told = f"k/v on gptq-marlin, 31.7 against {usual:.1f} µs a launch, {2 * 28 * (31.7 - usual) / 1e3:.2f} ms a step."
    assert any(note.endswith(f"though they read less: {told}") for note in exhibits.table(view(found), "why").notes)
    assert told in quant_why.of_view(view(found))
    numbers = numbers_quant.macros(found, STUDY)
    assert (numbers["QuantNarrowMaxPath"], numbers["QuantNarrowMax"]) == ("gptq-marlin", "31.7")
    assert numbers["QuantNarrowCost"] == f"{2 * 28 * (31.7 - usual) / 1e3:.2f}"
    assert Counter(quant_paths.PROJECTIONS.values()) == quant_why.PER_LAYER


def slower(found: Record, path: str, kind: str, us: float) -> Record:
    """The same check session, one kind of projection on one path taking `us`."""
    return rehashed(found, projections=[
        p.model_copy(update={"us": us}) if (p.path, p.kind) == (path, kind) else p for p in found.projections
    ])  # fmt: skip


def test_each_realised_speed_up_has_the_range_that_its_sessions_allow(paper: View) -> None:
    found = {line.path.slug: line for line in quant_results.lines(paper.frame, None) if line.kind == "measured"}
    low, high = found["awq-marlin"].gain_range(quant_results.EAGER) or (0.0, 0.0)
    assert low == pytest.approx(0.99 * EAGER_MS["bf16"] / (1.01 * EAGER_MS["awq-marlin"]))
    assert high == pytest.approx(1.01 * EAGER_MS["bf16"] / (0.99 * EAGER_MS["awq-marlin"]))
    (line,) = lines(exhibits.table(paper, "quantised"), gpu="h200", path="awq-marlin")
    assert (float(line["gain_low"]), float(line["gain_high"])) == (pytest.approx(low), pytest.approx(high))
    bars = [tuple(drawn.get_xdata()) for drawn in exhibits.figure(paper, "quantised").axes[0].lines]
    assert (pytest.approx(low), pytest.approx(high)) in bars


def test_no_header_stands_twice_and_a_fraction_above_one_is_explained(paper: View) -> None:
    table = exhibits.table(paper, "quantised")
    assert len(set(table.headers)) == len(table.headers)
    assert tables.ABOVE_ONE in table.notes  # the study's own GPTQ step
    assert tables.above_one([0.99, None]) == []


def test_a_cpu_s_records_get_tables_of_their_own_and_never_enter_the_paper_s(cpu: View) -> None:
    assert [row[3] for row in exhibits.table(cpu, "cpu-quantised").rows] == ["fp32", "bnb-nf4", "int4-tinygemm"]
    assert "of the fp32 step" in quant_why.of_view(cpu)
    for name in TABLES:
        assert "tand-in" not in render.markdown(exhibits.table(view(experiment("cpu")), name))
    assert exhibits.shows(cpu, "cpu-why")
    assert not exhibits.shows(cpu, "cpu-ab")
    assert not exhibits.shows(view(grid("cpu", sessions=1), cpu=True), "cpu-quantised")


def test_the_figure_shows_each_speed_up_once_hollow_where_it_is_published(paper: View) -> None:
    figure = exhibits.figure(paper, "quantised")
    dots = [line for line in figure.axes[0].lines if line.get_linestyle() == "None" and len(line.get_xdata())]  # type: ignore[arg-type]
    hollow = sorted(float(line.get_xdata()[0]) for line in dots if line.get_markerfacecolor() == "white")  # type: ignore[index]
    assert hollow == pytest.approx([62.32 / 59.36, 62.32 / 45.24, 62.32 / 17.36])
    assert len(dots) == 3 + 2 * 6  # a baseline has no row
    shown = texts(figure)
    assert {"L4, published", "H200 SXM", "H200 SXM, by graph", "promised by bytes", "4 bits instead of 16"} <= set(
        shown
    )
    assert "bf16" not in shown


def test_a_store_is_named_and_its_markers_have_an_edge_that_the_legend_explains() -> None:
    found = [measured("bf16", 18.0, 7.0), measured("bnb-nf4", 9.0, 3.5)]
    for store in ("yours", "imported"):
        other = View(frame.build([], found if store == "yours" else [], found if store == "imported" else []), STUDY,
                     None)  # fmt: skip
        rows = [row for row in exhibits.table(other, "quantised").rows if row[-1].startswith("measured")]
        assert {row[0] for row in rows} == {f"H200 SXM ({store})"}
        figure = exhibits.figure(other, "quantised")
        edges = [line.get_markeredgecolor() for line in figure.axes[0].lines if line.get_linestyle() == "None"]
        assert edges.count("black") == 2
        assert store in texts(figure)
    assert "yours" not in texts(exhibits.figure(view(found), "quantised"))


def test_a_check_whose_dense_product_is_exact_has_no_multiple() -> None:
    exact = checked()
    exact = rehashed(exact, checks=[each.model_copy(update={"eager_error": 0.0}) for each in exact.checks])
    assert {row[-2].count("(") for row in exhibits.table(view([exact]), "projections").rows} == {0}


def test_each_cell_of_the_experiment_says_what_stands_there(tmp_path: Path) -> None:
    from decodegap import plan, plan_quantised

    tasks = plan_quantised.quantised(plan.request(gpu="l4"), "l4")
    at = checkout(tmp_path)
    found = {line.cell.arm: line.kind for line in standing.lines("l4", tasks, at.local, at)}
    assert {arm for arm, kind in found.items() if kind == "published"} == {
        "bf16",
        "bnb-nf4",
        "awq-marlin",
        "gptq-exllamav2",
    }
    assert quant_results.promised("qwen2.5-7b", 2048, PATHS["bf16"]) == 1
