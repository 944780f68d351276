"""Whether records become rows that neither pool nor mix what must stay apart."""

import random

import pytest
from factory import grid, record

from decodegap import frame, plan, rows
from decodegap.errors import BadRecordError


def only(**changes: object) -> frame.CellRow:
    rows = frame.cells(frame.sessions([record(**changes)], "yours"))  # type: ignore[arg-type]
    assert len(rows) == 1
    return rows[0]


def test_a_grid_has_one_row_a_cell_with_every_session_in_it() -> None:
    found = frame.build(grid(sessions=3))
    assert len(found) == 12
    assert set(found["sessions"]) == {3}
    assert set(found["spread"]) == {"range"}
    assert list(found["model"].unique()) == ["qwen2.5-7b", "llama-3.1-8b", "mistral-7b-v0.3"]


def test_floors_are_the_check_values() -> None:
    row = only(gpu="h200", model="qwen2.5-7b", ctx=2048, step_ms=6.4)
    assert row.floor_published_ms == pytest.approx(3.198, abs=0.001)
    assert row.fraction_published == pytest.approx(3.198 / 6.4, abs=2e-4)
    assert row.fraction_streamed is not None
    assert row.fraction_published is not None
    assert row.fraction_streamed < row.fraction_published


def test_the_step_is_the_median_of_the_raw_samples() -> None:
    assert only(step_ms=17.5).step_ms == pytest.approx(17.5)


def test_a_record_whose_median_is_not_that_of_its_samples_is_refused() -> None:
    good = record()
    bad = good.model_copy(update={"series": [good.series[0].model_copy(update={"step_ms": 9.0})]})
    with pytest.raises(BadRecordError, match="not the median of its samples"):
        frame.build([bad])
    with pytest.raises(BadRecordError, match="no samples"):
        frame.build([good.model_copy(update={"series": []})])


def test_the_order_of_the_records_does_not_matter() -> None:
    records = grid(sessions=7)
    shuffled = list(records)
    random.Random(3).shuffle(shuffled)
    one, other = frame.build(records), frame.build(shuffled)
    assert one.equals(other)
    assert frame.records_hash(one) == frame.records_hash(other)
    assert frame.records_hash(one) != frame.records_hash(frame.build(records[1:]))


def test_hosts_are_never_pooled() -> None:
    here, there = grid(sessions=2, host="aa"), grid(sessions=2, host="bb", factor=2.0)
    found = frame.build([*here, *there])
    assert len(found) == 24
    assert set(found["hosts"]) == {("aa", "bb")}
    assert set(found["sessions"]) == {2}
    assert all(high < 1.5 * low for low, high in zip(found["low_ms"], found["high_ms"], strict=True))


def test_hosts_that_measured_different_cells_are_told_apart_too() -> None:
    found = frame.build([record(ctx=2048, host="aa"), record(ctx=4096, host="bb")])
    assert list(found["hosts"]) == [("aa", "bb"), ("aa", "bb")]


def test_stores_are_never_pooled() -> None:
    found = frame.build(grid(sessions=2), grid(sessions=3))
    assert sorted(found.groupby("store")["sessions"].max().items()) == [("shipped", 2), ("yours", 3)]


@pytest.mark.parametrize("outcome", ["oom", "unsupported", "void"])
def test_only_ok_counts_and_the_rest_is_kept_with_its_reason(outcome: str) -> None:
    found = frame.build([record(session=1), record(session=2, outcome=outcome, reasons=["asked for 3 GB"])])
    assert list(found["outcome"]) == sorted(["ok", outcome], key=str)
    lost = found[found["outcome"] == outcome].iloc[0]
    assert lost["reason"] == "asked for 3 GB"
    assert lost["step_ms"] != lost["step_ms"]
    assert found[found["outcome"] == "ok"].iloc[0]["sessions"] == 1


def test_two_protocols_in_one_table_are_refused_in_one_line_that_names_both() -> None:
    hub = plan.protocol("h200", "hub", "abc")
    with pytest.raises(BadRecordError) as caught:
        frame.build([record(session=1), record(session=2, protocol=hub)])
    line = str(caught.value)
    assert frame.protocol_family(hub) in line
    assert frame.protocol_family(record().protocol) in line
    assert "\n" not in line


def test_a_model_has_one_revision_of_its_weights_but_models_may_differ() -> None:
    one, other = plan.protocol("h200", "hub", "abc"), plan.protocol("h200", "hub", "def")
    frame.build([record(protocol=one), record(model="llama-3.1-8b", protocol=other)])
    with pytest.raises(BadRecordError, match="weights revision"):
        frame.build([record(protocol=one), record(session=2, protocol=other)])


def test_shipped_records_of_another_protocol_do_not_stand_beside_yours() -> None:
    shipped = grid(sessions=1)
    hub = [record(protocol=plan.protocol("h200", "hub", "abc"))]
    assert frame.comparable(shipped, grid(sessions=1)) == shipped
    assert frame.comparable(shipped, hub) == []
    frame.build(frame.comparable(shipped, hub), hub)


def test_arms_of_one_session_are_rows_of_their_own() -> None:
    both = [
        record(experiment="graphs", arm="graph", session=k, arms={"eager-pinned": 15.0 + k / 10, "graph": 12.0})
        for k in (1, 2)
    ]
    found = frame.build(both)
    assert list(found["arm"]) == ["eager-pinned", "graph"]
    assert set(found["cell_arm"]) == {"graph"}
    by_session = [(row.session, row.arm, row.step_ms) for row in frame.sessions(both, "yours")]
    assert by_session[0][:2] == (1, "eager-pinned")
    assert by_session[2] == (2, "eager-pinned", pytest.approx(15.2))


def test_rows_come_back_from_a_frame_as_they_went_in() -> None:
    rows = frame.cells(frame.sessions([*grid("cpu"), record(gpu="cpu", model="tiny-llama", outcome="oom")], "yours"))
    assert frame.from_frame(frame.to_frame(rows)) == rows
    assert frame.from_frame(frame.build([])) == []


def test_counts_agree_with_what_they_count() -> None:
    assert [rows.counted(n, "host") for n in (0, 1, 2)] == ["0 hosts", "1 host", "2 hosts"]
    assert [rows.counted(n, "anatomy", "anatomies") for n in (1, 2)] == ["1 anatomy", "2 anatomies"]
