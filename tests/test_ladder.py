"""Whether the ladder's table, figure, numbers and claims say what its records hold, and what is missing."""

from itertools import pairwise

import pytest
from exhibiting import fits_its_column, golden_figure, golden_table, has_a_text_for_each_header, lines, texts, view
from factory import rehashed
from factory_ladder import LONG, SHARED, gpu_records, rungs

from decodegap import anatomy, draw, exhibits, ladder, numbers_ladder, plan_ladder, render, steadiness, tables_ladder
from decodegap.exhibits import View
from decodegap.schema import Record


def cpu_records() -> list[Record]:
    found = rungs("rungs", {"eager": 20.0, "eager-pinned": 19.0, "compiled": 15.0}, gpu="cpu", model="qwen2-standin",
                  ctx=128, read_gb_s=12.0)  # fmt: skip
    return [rehashed(found, refused=dict.fromkeys(plan_ladder.OWN, "the fused step needs an NVIDIA GPU"))]


@pytest.fixture(scope="module")
def paper() -> View:
    return view(gpu_records())


@pytest.fixture(scope="module")
def cpu() -> View:
    return view(cpu_records(), cpu=True)


@pytest.mark.parametrize("name", ["ladder", "cpu-ladder"])
def test_the_table_has_the_golden_bytes_and_a_text_for_each_header(paper: View, cpu: View, name: str) -> None:
    table = exhibits.table(cpu if name == "cpu-ladder" else paper, name)
    has_a_text_for_each_header(table)
    assert len(table.rows) == len(table.data)
    golden_table(name, table)


@pytest.mark.parametrize("name", ["ladder", "cpu-ladder"])
def test_the_figure_has_the_golden_bytes_and_fits_its_column(paper: View, cpu: View, name: str) -> None:
    figure = exhibits.figure(cpu if name == "cpu-ladder" else paper, name)
    fits_its_column(figure)
    golden_figure(name, figure)


def test_each_rung_says_what_it_aims_at_and_what_shrank_most(paper: View) -> None:
    found = {line["rung"]: line for line in lines(exhibits.table(paper, "ladder"), ctx=2048, model="qwen2.5-7b")}
    assert tuple(found) == plan_ladder.RUNGS
    keys = {part.replace(" ", "_"): part for part in anatomy.PARTS}
    for lower, upper in pairwise(plan_ladder.RUNGS[:-1]):
        changes = {
            part: float(found[upper][f"{key}_ms"]) - float(found[lower][f"{key}_ms"]) for key, part in keys.items()
        }
        assert found[upper]["below"] == lower
        assert float(found[upper]["aimed_change_ms"]) == pytest.approx(changes[found[upper]["aims_at"]])
        assert found[upper]["shrank_most"] == min(changes, key=lambda part: changes[part])
        assert float(found[upper]["shrank_most_ms"]) == pytest.approx(min(changes.values()))
    assert found["eager"]["aims_at"] == found["eager"]["shrank_most"] == ""
    assert set(ladder.AIMS) == set(plan_ladder.RUNGS) - {"eager"}


def test_a_part_that_shrank_more_than_the_one_aimed_at_is_named() -> None:
    found = rungs("rungs", {"fused-plain": 3.8, "fused": 3.5})
    parts = [
        {"floor": 3.1, "extra traffic": 0.0, "kernel inefficiency": 0.6, "bubbles": 0.04, "exposed host": 0.0},
        {"floor": 3.1, "extra traffic": 0.0, "kernel inefficiency": 0.4, "bubbles": 0.0, "exposed host": 0.0},
    ]
    dissected = [a.model_copy(update={"parts_ms": p}) for a, p in zip(found.anatomy, parts, strict=True)]
    table = exhibits.table(view([rehashed(found, anatomy=dissected)]), "ladder")
    row = next(dict(zip(table.headers, row, strict=True)) for row in table.rows if row[3] == "fused")
    assert (row["Aims at"], row["Shrank most"]) == ("Bubbles -0.04", "Ineff. -0.20")
    numbers = numbers_ladder.macros([rehashed(found, anatomy=dissected)])
    assert (numbers["LadderGoneBubbles"], numbers["LadderGoneInefficiency"]) == ("0.04", "0.20")


def test_no_header_stands_twice_and_every_rung_is_explained(paper: View) -> None:
    table = exhibits.table(paper, "ladder")
    assert len(set(table.headers)) == len(table.headers)
    assert set(ladder.MEANS) == set(plan_ladder.RUNGS)
    assert all(f"{rung}: " in table.notes[0] for rung in plan_ladder.RUNGS)


def test_the_floor_of_the_parts_is_that_of_their_own_session() -> None:
    found = view([rungs("rungs", SHARED, read_gb_s=4000.0), rungs("compiled", {"compiled": 5.3}, read_gb_s=4400.0)])
    rows = {line["rung"]: line for line in lines(exhibits.table(found, "ladder"), ctx=2048, model="qwen2.5-7b")}
    for rung, read_gb_s in (("graph-static", 4000.0), ("compiled", 4400.0)):
        assert float(rows[rung]["dissected_read_gb_s"]) == pytest.approx(read_gb_s)
        assert float(rows[rung]["floor_ms"]) == pytest.approx(float(rows[rung]["floor_achievable_ms"]))


def test_the_power_cap_is_marked_at_the_loop_that_met_it() -> None:
    found = rungs("rungs", SHARED, flags=[steadiness.POWER_CAP])
    loops = {each.arm: each.sustained for each in found.series if each.sustained and each.sustained.during}
    hot = loops["fused"].during.model_copy(update={"throttle_reasons": [steadiness.POWER_CAP]})  # type: ignore[union-attr]
    series = [
        each.model_copy(update={"sustained": loops["fused"].model_copy(update={"during": hot})})
        if each.arm == "fused"
        else each
        for each in found.series
    ]
    table = exhibits.table(view([rehashed(found, series=series)]), "ladder")
    marked = [row[3] for row in table.rows if any(steadiness.CAP_MARK in text for text in row)]
    assert marked == ["fused"]
    assert steadiness.CAP_NOTE in table.notes
    assert f"Flag {steadiness.POWER_CAP}: every measured cell." in table.notes


def test_the_error_shown_is_the_largest_of_all_sessions() -> None:
    worse = rungs("rungs", SHARED)
    worse = rehashed(worse, checks=[check.model_copy(update={"error": 0.06}) for check in worse.checks])
    for order in ([worse, rungs("rungs", SHARED, session=2)], [rungs("rungs", SHARED, session=2), worse]):
        table = exhibits.table(view(order), "ladder")
        assert {
            row[table.headers.index("Error")] for row in table.rows if row[1:4] == ("Qwen2.5-7B", "2048", "graph")
        } == {"1.20x"}


def test_a_check_whose_reference_eager_is_far_from_is_no_proof() -> None:
    void = rungs("rungs", SHARED)
    void = rehashed(void, checks=[c.model_copy(update={"error": 0.1, "eager_error": 1.3}) for c in void.checks])
    table = exhibits.table(view([void, rungs("rungs", SHARED, session=2)]), "ladder")
    errors = {dict(zip(table.headers, row, strict=True))["Error"] for row in table.rows if row[3] in SHARED}
    assert errors - {"—"} == {tables_ladder.NO_PROOF}
    assert tables_ladder.NO_PROOF_NOTE in table.notes


def test_the_parts_add_up_to_the_dissected_step(paper: View) -> None:
    parts = ("floor", "extra_traffic", "kernel_inefficiency", "bubbles", "exposed_host", "residual")
    dissected = [line for line in lines(exhibits.table(paper, "ladder")) if line["floor_ms"]]
    assert len(dissected) == 7 + 5
    for line in dissected:
        assert sum(float(line[f"{part}_ms"]) for part in parts) == pytest.approx(float(line["dissected_step_ms"]))


def test_fractions_are_of_the_published_floor_single_and_sustained(paper: View) -> None:
    row = next(r for r in exhibits.table(paper, "ladder").rows if r[1:4] == ("Qwen2.5-7B", "2048", "fused"))
    floor_ms = (15_231_233_024 + 2048 * 57_344) / 4.8e9
    shown = dict(zip(exhibits.table(paper, "ladder").headers, row, strict=True))
    assert shown["Step (ms)"] == "3.500 (range 3.465–3.535)"
    assert shown["a/step"] == f"{floor_ms / 3.5:.3f}"
    assert shown["Sust."] == "3.570"
    assert shown["a/sust."] == f"{floor_ms / 3.57:.3f}"
    assert (shown["MHz"], shown["W"], shown["Floor a"]) == ("1830", "699", f"{floor_ms:.3f}")
    assert (shown["Sessions"], shown["Parts of"]) == ("3", "s1: 3.500")


def test_both_floors_of_a_cell_stand_in_a_note(paper: View) -> None:
    table = exhibits.table(paper, "ladder")
    (note,) = (each for each in table.notes if each.startswith("Floors of the unquantised rungs"))
    fused = {line["ctx"]: line for line in lines(table) if line["rung"] == "fused"}
    shown = [
        f"{float(fused[ctx]['floor_published_ms']):.3f} and {float(fused[ctx]['limit_ms']):.3f}"
        for ctx in ("2048", "16384")
    ]
    assert note.endswith(f"2k {shown[0]}; H200, Qwen2.5-7B, 16k {shown[1]}.")


def test_what_is_absent_says_why(paper: View) -> None:
    table = exhibits.table(paper, "ladder")
    long = {row[3]: row[-1] for row in table.rows if row[1:3] == ("Qwen2.5-7B", "16384")}
    assert long["compiled"] == "missing: not measured"
    assert long["fused"] == "measured, shipped"  # the other session measured it
    (int4,) = lines(table, model="qwen2.5-7b", ctx=2048, rung="fused-int4")
    assert (int4["kind"], int4["step_ms"], int4["reason"]) == ("missing", "", "not measured")
    unmeasured = [row[1:4] for row in table.rows if row[3] == "all"]
    assert unmeasured == [("Llama-3.1-8B", "2048", "all"), ("Llama-3.1-8B", "16384", "all"),
                          ("Mistral-7B-v0.3", "2048", "all")]  # fmt: skip


def test_a_rung_that_failed_everywhere_gives_its_reason() -> None:
    lost = rungs("rungs", {"eager": 20.0})
    lost = rehashed(lost, refused={"fused": "not timed, because its check failed: it is wrong"})
    row = next(row for row in exhibits.table(view([lost]), "ladder").rows if row[3] == "fused")
    assert row[-1] == "missing: unsupported: not timed, because its check failed: it is wrong"


def test_hosts_are_never_pooled() -> None:
    found = view([rungs("rungs", SHARED), rungs("rungs", LONG, session=2, host="bb11")])
    ladders = ladder.ladders(found.frame, found.kept)
    assert [each.host for each in ladders] == ["a1b2c3d4e5f60718", "bb11"]
    assert all("host" in each.name for each in ladders)
    assert {rung.row.sessions for each in ladders for rung in each.rungs if rung.arm == "fused" and rung.row} == {1}


def test_a_rung_that_only_another_host_measured_is_not_missing_on_the_first() -> None:
    found = [rungs("rungs", SHARED), rungs("compiled", {"compiled": 5.3}, host="bb11")]
    first = {row[3]: row[-1] for row in exhibits.table(view(found), "ladder").rows if "bb11" not in row[-1]}
    assert [arm for arm in SHARED if first[arm] != "measured, shipped, host a1b2"] == []
    assert "compiled" not in first
    assert first["fused-int4"] == "missing: not measured"  # nobody has it
    one, other = ladder.ladders(view(found).frame, view(found).kept)
    assert [rung.arm for rung in other.rungs] == ["compiled", "fused-int4"]
    assert (one.rung("compiled"), one.changes("compiled")) == (None, {})
    assert set(one.changes("fused-plain")) == set(anatomy.PARTS)


def test_a_cpu_has_three_rungs_and_says_why_not_more(cpu: View) -> None:
    rows = {row[3]: row[-1] for row in exhibits.table(cpu, "cpu-ladder").rows}
    assert {name for name, source in rows.items() if source == "measured, yours"} == {
        "eager",
        "eager-pinned",
        "compiled",
    }
    assert rows["fused"] == "missing: unsupported: the fused step needs an NVIDIA GPU"
    assert [table.name for table in exhibits.tables_of(cpu)] == ["cpu-ladder"]
    assert exhibits.name_for(cpu, "ladder") == "cpu-ladder"


def test_the_figure_marks_the_limit_and_what_was_not_measured(paper: View) -> None:
    figure = exhibits.figure(paper, "ladder")
    shown = texts(figure)
    assert {"achievable floor", "not measured", "kernel inefficiency", "3.50"} <= set(shown)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [*plan_ladder.RUNGS, *plan_ladder.RUNGS[:-1]]  # int4 is planned at one context only


def test_the_limit_ends_above_the_rung_with_fewer_bytes() -> None:
    figure = exhibits.figure(view([rungs("rungs", SHARED), rungs("int4", {"fused-int4": 1.4})]), "ladder")
    axes = figure.axes[0]
    rows = {label.get_text(): y for label, y in zip(axes.get_yticklabels(), axes.get_yticks(), strict=True)}
    (limit,) = (line for line in axes.lines if line.get_color() == "#000000")
    assert rows["fused"] < max(limit.get_ydata()) < rows["fused-int4"]  # type: ignore[arg-type]


def test_a_change_beside_an_unstable_session_is_marked() -> None:
    found = rungs("rungs", SHARED)
    noisy = {"wall_ms": [20.0] * 10 + [14.0, 26.0] * 10}
    series = [each.model_copy(update=noisy) if each.arm == "eager" else each for each in found.series]
    table = exhibits.table(view([rehashed(found, series=series)]), "ladder")
    aims = {row[3]: row[table.headers.index("Aims at")] for row in table.rows if row[2] == "2048" and row[1][0] == "Q"}
    assert {rung for rung, text in aims.items() if steadiness.MARK in text} == {"eager-pinned"}


def test_a_page_says_nothing_of_columns_that_it_lacks(paper: View) -> None:
    table = exhibits.table(paper, "ladder")
    printed = render.latex(table)
    for said in ("clock and power", "Parts of:", "Error:", "a/sust.:"):
        assert said in render.markdown(table)
        assert said not in printed
    assert "c/step &" in printed


def test_a_bar_that_is_cut_says_so_dissected_or_not() -> None:
    """Two strokes a cut bar: white where its parts are known (session 1), grey on a bar that is empty."""
    for session, colour in ((1, "white"), (2, draw.GREY)):
        figure = exhibits.figure(view([rungs("rungs", SHARED, session=session)]), "ladder")
        strokes = [line for line in figure.axes[0].lines if line.get_color() == colour]
        assert len(strokes) == 2 * len(("eager", "eager-pinned"))
        assert ("not dissected" in texts(figure)) == (session == 2)


def test_without_records_there_is_a_table_and_an_empty_figure() -> None:
    empty = view([])
    assert exhibits.table(empty, "ladder").rows == ()
    assert exhibits.figure(empty, "ladder").axes
