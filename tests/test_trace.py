"""Intervals: what plain ones say together, and what is read from a profiler's trace."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodegap import trace
from decodegap.trace import Interval, Trace

intervals = st.lists(
    st.builds(
        lambda start, length, name: Interval(float(start), float(start + length), name, name),
        st.integers(0, 1000),
        st.integers(0, 200),
        st.sampled_from("abc"),
    ),
    max_size=30,
)


def shifted(these: list[Interval], by: float) -> list[Interval]:
    return [Interval(each.start_us + by, each.end_us + by, each.name, each.operator) for each in these]


@given(intervals)
def test_busy_is_at_most_the_sum_and_the_span(these: list[Interval]) -> None:
    busy = trace.busy_us(these)
    assert 0 <= busy <= trace.total_us(these)
    if these:
        span = max(each.end_us for each in these) - min(each.start_us for each in these)
        assert busy <= span
        assert busy + sum(trace.gaps_us(these)) == span


@given(intervals, intervals)
def test_busy_adds_up_over_apart_intervals(first: list[Interval], second: list[Interval]) -> None:
    later = shifted(second, 2000.0)
    assert trace.busy_us(first + later) == trace.busy_us(first) + trace.busy_us(later)


@given(intervals, st.randoms())
def test_order_plays_no_part(these: list[Interval], random: Any) -> None:
    mixed = list(these)
    random.shuffle(mixed)
    assert trace.busy_us(mixed) == trace.busy_us(these)
    assert trace.gaps_us(mixed) == trace.gaps_us(these)
    assert trace.overlaps(mixed) == trace.overlaps(these)


@given(intervals)
def test_operators_add_up_to_the_busy_time(these: list[Interval]) -> None:
    found = trace.by_operator(Trace(tuple(these), steps=1, step_ms=1.0, source="device"))
    assert sum(each.ms for each in found.values()) == pytest.approx(trace.busy_us(these) / 1e3)
    assert sum(each.launches for each in found.values()) == len(these)


def test_an_overlapping_kernel_counts_only_once_its_predecessor_has_ended() -> None:
    two = (Interval(0, 10, "a", "first"), Interval(4, 12, "b", "second"))  # the second waits from 4 to 10
    found = trace.by_operator(Trace(two, steps=1, step_ms=1.0, source="device"))
    assert {name: each.ms for name, each in found.items()} == {"first": 0.010, "second": 0.002}
    assert trace.overlaps(two) == 1
    assert trace.overlaps([Interval(0, 10, "a"), Interval(10, 12, "b")]) == 0


def op(name: str, ts: float, dur: float, dims: Any = None) -> dict[str, Any]:
    args = {} if dims is None else {"Input Dims": dims}
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def call(name: str, ts: float, correlation: int, cat: str = "cuda_runtime") -> dict[str, Any]:
    return op(name, ts, 1.0) | {"cat": cat, "args": {"correlation": correlation}}


def kernel(name: str, ts: float, dur: float, correlation: int, cat: str = "kernel") -> dict[str, Any]:
    args = {"correlation": correlation, "stream": 7}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args}


def mark(ts: float, dur: float) -> dict[str, Any]:
    return op(trace.STEP_MARK, ts, dur) | {"cat": "user_annotation"}


def chrome(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": list(events), "host_name": "secret", "traceName": "/srv/someone/trace.json"}


CAT = [[[1, 2, 63, 16], [1, 2, 1, 16]], []]
EAGER = chrome(
    mark(0, 100),
    op("aten::linear", 1, 10),
    op("aten::addmm", 2, 8),
    call("cuLaunchKernelEx", 4, 1, "cuda_driver"),
    kernel("gemv", 20, 30, 1),
    op("aten::cat", 12, 5, CAT),
    call("cudaLaunchKernel", 13, 2),
    kernel("CatArrayBatchedCopy", 55, 5, 2),
    op("aten::cat", 18, 5, [[[1, 4, 1, 8], [1, 4, 1, 8]], []]),
    call("cudaLaunchKernel", 19, 3),
    kernel("CatArrayBatchedCopy", 61, 2, 3),
    call("cudaMemsetAsync", 30, 4),
    kernel("Memset (Device)", 64, 1, 4, "gpu_memset"),
    kernel("annotation", 20, 50, 1, "gpu_user_annotation"),
)
GRAPH = chrome(
    mark(0, 100),
    op("some::replay", 0, 10),
    call("cudaGraphLaunch", 1, 9),
    kernel("gemv", 20, 30, 9),
    kernel("CatArrayBatchedCopy", 51, 5, 9),
    kernel("CatArrayBatchedCopy", 57, 2, 9),
    mark(200, 100),
    call("cudaGraphLaunch", 201, 10),
    kernel("gemv", 220, 30, 10),
    kernel("CatArrayBatchedCopy", 251, 5, 10),
    kernel("CatArrayBatchedCopy", 257, 2, 10),
)


def test_a_kernel_belongs_to_the_outermost_operator_around_its_launch() -> None:
    found = trace.attribute(trace.from_chrome(EAGER, "device"), None, kv_elements=2 * 63 * 16)
    assert [each.operator for each in found.intervals] == [
        "aten::linear",
        "aten::cat (KV)",
        "aten::cat",
        "memory copy or set (by name)",
    ]
    assert found.attributed == "name"  # the memset was launched by no operator
    assert found.step_ms == 0.1


def test_a_replayed_graph_takes_its_operators_from_the_eager_twin() -> None:
    twin = trace.from_chrome(EAGER, "device")
    found = trace.attribute(trace.from_chrome(GRAPH, "device"), twin, kv_elements=2 * 63 * 16)
    assert found.attributed == "twin"
    assert [each.operator for each in found.intervals] == ["aten::linear", "aten::cat (KV)", "aten::cat"] * 2
    assert trace.by_operator(found)["aten::cat (KV)"].launches == 1


def test_a_graph_without_a_twin_is_told_apart_by_name_and_says_so() -> None:
    found = trace.attribute(trace.from_chrome(GRAPH, "device"), None, kv_elements=1)
    assert found.attributed == "name"
    assert {each.operator for each in found.intervals} == {"matrix product (by name)", "cat (by name)"}


def test_a_kernel_that_the_twin_lacks_is_told_by_name() -> None:
    extra = {"traceEvents": [*GRAPH["traceEvents"], kernel("vectorized_elementwise", 260, 2, 10)]}
    found = trace.attribute(
        trace.from_chrome(extra, "device"), trace.from_chrome(EAGER, "device"), kv_elements=2 * 63 * 16
    )
    assert found.attributed == "name"
    assert found.intervals[-1].operator == "elementwise (by name)"


def test_idle_time_between_steps_is_no_gap() -> None:
    steps = trace.steps_of(trace.from_chrome(GRAPH, "device"))
    assert [trace.gaps_us(step) for step in steps] == [[1.0, 1.0], [1.0, 1.0]]


def test_a_disturbed_step_is_not_the_typical_one() -> None:
    lengths = [10.0, 90.0, 12.0]
    three = tuple(Interval(100.0 * i, 100.0 * i + n, "a", step=i) for i, n in enumerate(lengths))
    found = trace.typical(Trace(three, steps=3, step_ms=1.0, source="device"))
    assert found.steps == 1
    assert [each.end_us - each.start_us for each in found.intervals] == [12.0]
    assert found.intervals[0].step == 0


def test_on_a_cpu_top_level_operators_and_generated_code_are_the_intervals() -> None:
    data = chrome(
        mark(0, 100),
        op("aten::linear", 1, 10),
        op("aten::addmm", 2, 8),
        op("## Call CompiledFxGraph x", 20, 30),
        op("aten::mm", 30, 5),
        op("aten::mul", 60, 5),
    )
    found = trace.from_chrome(data, "host")
    assert [(each.operator, each.start_us, each.end_us) for each in found.intervals] == [
        ("aten::linear", 1, 11),
        ("compiled code", 20, 30),
        ("aten::mm", 30, 35),
        ("compiled code", 35, 50),
        ("aten::mul", 60, 65),
    ]


@pytest.mark.parametrize(
    ("data", "reason"),
    [(chrome(kernel("k", 1, 1, 1)), "no step is marked"), (chrome(mark(0, 9), op("aten::mm", 1, 1)), "nothing ran")],
)
def test_a_trace_without_steps_or_kernels_is_refused(data: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        trace.from_chrome(data, "device")


def test_a_kept_trace_names_no_machine_and_no_path() -> None:
    event = kernel("/srv/someone/kernels/fused.py:12 attention", 5, 1, 1)
    event["args"]["kernel_file"] = "/srv/someone/kernels/fused.py"
    meta = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "/usr/bin/python3 x"}}
    kept = trace.anonymous(chrome(mark(1000, 5), event, meta))
    text = json.dumps(kept)
    assert "secret" not in text
    assert "/srv" not in text
    assert "/usr" not in text
    assert "attention" in text
    assert min(each["ts"] for each in kept["traceEvents"] if "ts" in each) == 0
