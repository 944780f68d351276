"""Whether a session that did not hold still is called unstable wherever its step is shown, and counts all the same."""

import pytest
from exhibiting import STUDY, view
from factory import pair, record, rehashed
from factory_quant import measured
from hypothesis import given
from hypothesis import strategies as st

from decodegap import claims, exhibits, frame, review, runner, steadiness, tables, verdicts
from decodegap.paths import HERE
from decodegap.schema import Record

LOADED = "load 4.9 on 2 core(s)"


def shaky(width: float = 0.3, **changes: object) -> Record:
    """A record of the factory whose middle half of steps spans about `width` of their median."""
    found = record(**changes)  # type: ignore[arg-type]
    series = []
    for each in found.series:
        n = len(each.wall_ms)
        wall = [each.step_ms * (1 + 2 * width * (i / (n - 1) - 0.5)) for i in range(n)]
        series.append(each.model_copy(update={"wall_ms": wall}))
    return rehashed(found, series=series)


@given(st.lists(st.floats(1, 1e4), min_size=4, max_size=60), st.floats(0.1, 100))
def test_spread_knows_no_order_and_no_unit(values: list[float], unit: float) -> None:
    found = steadiness.spread(values)
    assert found >= 0
    assert steadiness.spread(sorted(values)) == found
    assert steadiness.spread([value * unit for value in values]) == pytest.approx(found, abs=1e-9)


def test_one_late_step_is_no_unrest_and_a_wide_middle_is() -> None:
    assert steadiness.spread([10.0] * 29 + [100.0]) == 0.0
    assert steadiness.spread([10.0] * 15 + [13.0] * 15) == pytest.approx(3 / 11.5)
    assert steadiness.spread([1.0, 9.0, 1.0]) == 0.0  # too few to have a middle half


@pytest.mark.parametrize(("width", "said"), [(0.09, False), (0.11, True)])
def test_a_tenth_of_the_median_divides_them(width: float, said: bool) -> None:
    assert bool(steadiness.doubts(shaky(width))) is said


def test_a_loaded_host_is_unrest_too_and_another_flag_is_not() -> None:
    assert steadiness.doubts(record(gpu="cpu", model="llama-standin", flags=[LOADED])) == [LOADED]
    assert steadiness.doubts(record(flags=["software power cap"])) == []


def test_only_the_arm_that_moved_is_doubted() -> None:
    steady, other = pair(2.5), shaky(arms={"eager-pinned": 17.5, "graph": 7.0}, arm="ab", experiment="graphs")
    mixed = rehashed(steady, series=[other.series[0], steady.series[1]])
    assert steadiness.doubts(mixed, mixed.series[0])
    assert steadiness.doubts(mixed, mixed.series[1]) == []
    row = exhibits.table(view([mixed]), "ab").rows[0]
    assert row[4].endswith(steadiness.MARK)
    assert not row[5].endswith(steadiness.MARK)


@pytest.mark.parametrize("name", ["grid", "actions"])
def test_the_paper_tables_mark_it_and_say_what_the_mark_means(name: str) -> None:
    calm = exhibits.table(view([record(), record(session=2)]), name)
    assert steadiness.MARK not in "".join(text for row in calm.rows for text in row)
    assert steadiness.NOTE not in calm.notes
    found = exhibits.table(view([record(), shaky(session=2)]), name)
    [row] = [row for row in found.rows if any(steadiness.MARK in text for text in row)]
    assert row[1] == "Qwen2.5-7B"
    assert steadiness.NOTE in found.notes


def test_a_quantised_path_is_marked_in_the_series_that_moved() -> None:
    calm = measured("bnb-nf4", 9.0, 3.5, session=2)
    moved = shaky(arm="bnb-nf4", arms={"bnb-nf4": 9.0, "bnb-nf4-graph": 3.5}, experiment="quantised").series
    for series, places in (((moved[0], calm.series[1]), (1, 0)), ((calm.series[0], moved[1]), (0, 1))):
        found = view([calm, rehashed(measured("bnb-nf4", 9.0, 3.5), series=list(series))])
        table = exhibits.table(found, "quantised")
        (row,) = [row for row in table.rows if row[3] == "bnb-nf4" and row[-1].startswith("measured")]
        assert tuple(int(steadiness.MARK in text) for text in row[6:8]) == places
        assert steadiness.NOTE in table.notes
        (data,) = [each for each in table.data if each["path"] == "bnb-nf4" and each["kind"] == "measured"]
        assert (data["unstable_sessions"], data["graph_unstable_sessions"]) == places


def test_a_loaded_cpu_stays_measured_and_is_marked() -> None:
    loaded = [record(gpu="cpu", model="llama-standin", ctx=128, session=k, flags=[LOADED]) for k in (1, 2)]
    table = tables.cpu(frame.build([], loaded))
    assert f"{steadiness.MARK}" in table.rows[0][2]
    assert table.rows[0][7] == "measured, yours"
    assert table.data[0]["unstable_sessions"] == 2


def test_verify_and_progress_say_so() -> None:
    found = verdicts.judge(
        claims.load(HERE.claims, STUDY),
        STUDY,
        [record(gpu="l4", step_ms=63.0), shaky(gpu="l4", session=2, step_ms=64.0)],
    )
    told = "\n".join(review.lines(found, []))
    assert "2 sessions from 0.799 to 0.812, 1 unstable" in told
    text = runner._result(shaky(step_ms=63.0))
    assert text.startswith("63.00 ms, unstable: the middle half of the eager steps spans ")
    assert "unstable" not in runner._result(record())
