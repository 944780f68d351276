"""Whether the launch experiment's tables and figures say what was measured, attested, predicted, and what is not."""

import dataclasses
from collections.abc import Callable

import pytest
from exhibiting import (
    fits_its_column,
    golden_figure,
    golden_table,
    has_a_text_for_each_header,
    lines,
    saved,
    texts,
    view,
)
from factory import pair, record, rehashed, single
from factory_launch import RATIOS, gpu_records
from matplotlib.figure import Figure

from decodegap import exhibits, figures_launch, launch, stats
from decodegap.exhibits import View
from decodegap.launch import Kept
from decodegap.schema import Record

TABLES = ("ab", "ab-sessions", "arms", "anatomy", "ledger", "predictions")
CPU_TABLES = ("cpu-ab", "cpu-anatomy")
FIGURES = ("anatomy", "ratios", "dispatch")


def cpu_records() -> list[Record]:
    return [
        pair(r, graph_ms=20.0, second="compiled", equal=False, gpu="cpu", model="qwen2-standin", ctx=128, session=k,
             read_gb_s=12.0)
        for k, r in ((1, 1.25), (2, 1.31), (3, 1.28))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def paper() -> View:
    return view(gpu_records())


@pytest.fixture(scope="module")
def cpu() -> View:
    return view(cpu_records(), cpu=True)


@pytest.mark.parametrize("name", [*TABLES, *CPU_TABLES])
def test_tables_have_the_golden_bytes(paper: View, cpu: View, name: str) -> None:
    table = exhibits.table(cpu if name in CPU_TABLES else paper, name)
    assert table.name == name
    golden_table(name, table)


@pytest.mark.parametrize("name", [*FIGURES, *CPU_TABLES])
def test_figures_have_the_golden_bytes_and_fit_their_column(paper: View, cpu: View, name: str) -> None:
    figure = exhibits.figure(cpu if name in CPU_TABLES else paper, name)
    fits_its_column(figure)
    golden_figure(name, figure)


@pytest.mark.parametrize("name", [*TABLES, *CPU_TABLES])
def test_every_row_has_a_text_for_each_header(paper: View, cpu: View, name: str) -> None:
    table = exhibits.table(cpu if name in CPU_TABLES else paper, name)
    has_a_text_for_each_header(table)


def test_the_mean_and_its_intervals_are_those_of_the_sessions(paper: View) -> None:
    (line,) = lines(exhibits.table(paper, "ab"), gpu="h200", model="qwen2.5-7b", ctx=2048)
    found = stats.summarise(RATIOS)
    assert float(line["ratio"]) == pytest.approx(sum(RATIOS) / 10)
    for method in stats.METHODS:
        assert (float(line[f"{method}_low"]), float(line[f"{method}_high"])) == pytest.approx(found.intervals[method])
        assert 0.8 < float(line[f"{method}_coverage"]) <= 1
    assert line["attested"] == "10"
    assert [float(text) for text in line["ratios"].split()] == list(RATIOS)


def test_coverage_is_simulated_with_the_sessions_own_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        stats, "coverage", lambda n, *, noise: asked.append((n, noise)) or dict.fromkeys(stats.METHODS, 1)
    )
    launch._coverage.cache_clear()
    launch.pairs([Kept("shipped", pair(ratio, session=k)) for k, ratio in enumerate((2.0, 2.0, 2.0, 2.2, 2.2, 2.2), 1)])
    launch._coverage.cache_clear()
    # six log ratios, half at log 2.0 and half at log 2.2: standard deviation log(1.1) / 2 x sqrt(6 / 5)
    assert asked == [(6, pytest.approx(0.0953102 / 2 * (6 / 5) ** 0.5 / 2**0.5))]


def test_few_sessions_give_a_range_one_gives_nothing_and_neither_a_coverage() -> None:
    few = view([pair(ratio, session=k) for k, ratio in ((1, 2.0), (2, 2.2))])
    row = exhibits.table(few, "ab").rows[0]
    assert "range 2.000–2.200" in row
    assert "2 of 10" in row
    (one,) = lines(exhibits.table(view([pair(2.0)]), "ab"), gpu="h200", kind="measured")
    assert (one["spread"], one["bca_low"], one["bca_coverage"]) == ("degenerate", "", "")


def test_a_session_that_is_not_attested_says_why(paper: View) -> None:
    table = exhibits.table(paper, "ab-sessions")
    (line,) = lines(table, model="llama-3.1-8b")
    assert line["attested"] == "False"
    assert line["doubts"] == "outputs differ by 2e-06; launches of 1 kernel differ"
    assert all(line["attested"] == "True" for line in lines(table, model="qwen2.5-7b"))
    still = pair(2.0)
    still = rehashed(still, attestations=[still.attestations[0].model_copy(update={"outputs_changed": False})])
    assert "did not change" in lines(exhibits.table(view([still]), "ab-sessions"))[0]["doubts"]
    assert lines(exhibits.table(view([rehashed(still, attestations=[])]), "ab-sessions"))[0]["attested"] == "False"


def test_the_studys_ratios_stand_beside_and_are_marked(paper: View) -> None:
    table = exhibits.table(paper, "ab")
    h100, l4 = [row for row in table.rows if row[-1] == "published"]
    assert {"1.259†", "1.253–1.267†", "14.83†", "11.78†", "3.050†", "10†"} <= set(h100)
    assert "1.028†" in l4
    assert [line["ratio"] for line in lines(table, kind="published")] == ["1.259", "1.028"]
    alone = exhibits.table(view([]), "ab")
    assert {line["kind"] for line in lines(alone)} == {"published"}


def test_what_is_planned_and_not_measured_is_there_as_missing(paper: View) -> None:
    missing = lines(exhibits.table(paper, "arms"), model="llama-3.1-8b", ctx=16384, kind="missing")
    assert [line["arm"] for line in missing] == ["eager", "eager-auto", "graph-static", "graph-stock", "compiled"]
    assert all(line["step_ms"] == "" for line in missing)
    absent = [row for row in exhibits.table(paper, "ab").rows if row[-1] == "missing: not measured"]
    assert [(row[1], row[2], row[3]) for row in absent] == [
        ("Qwen2.5-7B", "16384", "0 of 3"),
        ("Llama-3.1-8B", "2048", "0 of 3"),
    ]
    assert any("h200 llama-3.1-8b 16384 compiled" in note for note in exhibits.table(paper, "anatomy").notes)


def test_an_arm_shows_its_check_and_the_backend_that_ran(paper: View) -> None:
    rows = {row[3]: row for row in exhibits.table(paper, "arms").rows if row[1:3] == ("Qwen2.5-7B", "2048")}
    assert "0.0500 (1.00x)" in rows["eager-pinned"]
    assert "0.200 (4.00x) failed" in rows["compiled"]
    assert "not checked" in rows["graph-stock"]
    assert rows["eager-pinned"][11] == rows["graph"][11] == "flash"
    other = [row for row in exhibits.table(paper, "arms").rows if row[1:3] == ("Llama-3.1-8B", "16384")]
    backends = {row[3]: row[11] for row in other}
    assert (backends["eager-pinned"], backends["graph"]) == ("—", "flash")  # other kernels: only the last was seen


def test_the_parts_and_the_residual_add_up_to_the_step(paper: View) -> None:
    parts = ("floor", "extra_traffic", "kernel_inefficiency", "bubbles", "exposed_host", "residual")
    for line in lines(exhibits.table(paper, "anatomy")):
        if line["step_ms"]:
            assert sum(float(line[f"{part}_ms"]) for part in parts) == pytest.approx(float(line["step_ms"]))
    notes = " ".join(exhibits.table(paper, "anatomy").notes)
    assert "graph-launched arms: at most 2.0% of the step" in notes


def test_the_anatomy_is_that_of_the_middle_session(paper: View) -> None:
    (line,) = lines(exhibits.table(paper, "anatomy"), model="qwen2.5-7b", ctx=2048, arm="eager-pinned")
    ranked = sorted(range(1, 11), key=lambda k: RATIOS[k - 1])
    assert (line["session"], line["sessions"]) == (str(ranked[4]), "10")


def test_what_building_plans_costs_is_a_line_of_its_own(paper: View) -> None:
    (line,) = lines(exhibits.table(paper, "anatomy"), arm="eager-auto less eager")
    assert float(line["enqueue_ms"]) == pytest.approx(0.97 * (60.0 - 18.5))
    layers = 28
    note = f"{0.97 * (60.0 - 18.5) / layers:.2f} ms a layer"
    assert any(note in text for text in exhibits.table(paper, "anatomy").notes)


def test_the_ledger_counts_what_each_arm_moves(paper: View) -> None:
    table = exhibits.table(paper, "ledger")
    (graph,) = lines(table, model="qwen2.5-7b", arm="graph")
    (static,) = lines(table, model="qwen2.5-7b", arm="graph-static")
    assert int(graph["kv_concatenation_bytes"]) == 2 * int(graph["kv_read_bytes"]) == 2 * 2048 * 57344
    assert int(static["kv_concatenation_bytes"]) == 0
    assert "Casts" not in table.headers
    assert "casts_bytes" in static


def test_a_cpus_pair_is_named_for_what_it_is_and_never_in_the_paper(cpu: View) -> None:
    table = exhibits.table(cpu, "cpu-ab")
    assert "changes the kernels" in table.caption
    assert any("0 of 3 sessions attested" in note for note in table.notes)
    assert any("1.250, 1.310, 1.280" in note for note in table.notes)
    paper = view(gpu_records())
    mixed = dataclasses.replace(paper, kept=(*paper.kept, *cpu.kept))
    for name in ("ab", "ab-sessions", "anatomy", "ledger"):
        assert exhibits.table(mixed, name).rows == exhibits.table(paper, name).rows
    assert "compiled step" in " ".join(texts(exhibits.figure(cpu, "cpu-ab")))


def test_a_cpu_without_a_pair_or_an_anatomy_has_no_table_of_them() -> None:
    baseline = view([record(gpu="cpu", model="qwen2-standin", ctx=128)], cpu=True)
    assert [table.name for table in exhibits.tables_of(baseline)] == ["cpu"]
    refused = record(
        gpu="cpu", model="qwen2-standin", ctx=128, arm="ab-compiled", experiment="graphs", outcome="unsupported",
        reasons=["no compiler"],
    )  # fmt: skip
    alone = view([refused], cpu=True)
    assert [table.name for table in exhibits.tables_of(alone)] == ["cpu-ab"]
    assert exhibits.table(alone, "cpu-ab").rows[0][-1] == "missing: unsupported: no compiler"
    assert exhibits.show_table(alone, "arms") is None


def test_yours_stand_beside_the_shipped_and_are_never_pooled() -> None:
    shipped, mine = [pair(2.5, session=k) for k in (1, 2)], [pair(3.5, session=k, host="bb") for k in (1, 2)]
    kept = (*(Kept("shipped", r) for r in shipped), *(Kept("yours", r) for r in mine))
    found = launch.pairs(kept)
    assert [(each.where.store, each.summary and each.summary.mean) for each in found] == [
        ("shipped", 2.5),
        ("yours", 3.5),
    ]
    assert "(yours)" in found[1].where.short


def test_hosts_that_stand_in_one_mean_are_named() -> None:
    both = view([pair(2.5, session=1), pair(2.7, session=2, host="bb")])
    assert any("sessions of 2 hosts" in note for note in exhibits.table(both, "ab").notes)


def test_the_dispatch_plot_holds_host_bound_eager_sessions_of_every_host(paper: View) -> None:
    points = figures_launch.points(paper.kept)
    assert len(points) == 10 + 2 + 4  # the pairs, the eager arm twice, and the baseline's four contexts
    assert {point.host for point in points} == {"H200 SXM, host a1b2", "H200 SXM, host bb"}
    slow = single("eager", 18.0)
    slow = rehashed(slow, series=[slow.series[0].model_copy(update={"enqueue_ms": [9.0] * 30})])
    assert figures_launch.points([Kept("shipped", slow)]) == []


def test_a_very_long_bar_is_cut_and_keeps_its_number(paper: View) -> None:
    figure: Figure = exhibits.figure(paper, "anatomy")
    assert "60.00" in texts(figure)
    assert figure.axes[0].get_xlim()[1] < 30


MAKERS: dict[str, Callable[[], Figure]] = {name: lambda name=name: exhibits.figure(view([]), name) for name in FIGURES}  # type: ignore[misc]


@pytest.mark.parametrize("name", FIGURES)
def test_without_records_the_figures_are_made_all_the_same(name: str) -> None:
    assert saved(MAKERS[name](), "png")
