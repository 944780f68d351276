"""What ran when: the intervals of a profiled step, read from a Chrome trace, and what plain intervals say together.

The profiler's own JSON ties each kernel to the call that launched it (`correlation`) and each call to the operators
that enclose it on its thread, so a kernel's operator is read, not guessed. A replayed graph has one launching call for
all its kernels; its operators come from a twin (the same step launched eagerly) or, marked so, from kernel names.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from decodegap import ledger
from decodegap.schema import OperatorTime

Source = Literal["device", "host"]
Attributed = Literal["operator", "twin", "name"]

Threads = Mapping[tuple[Any, Any], list[dict[str, Any]]]  # operators by process and thread

STEP_MARK = "decode-gap step"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
WRAPPERS = ("Torch-Compiled Region", "## Call CompiledFxGraph", "TorchDynamo", "CompiledFunction", "Pregraph bytecode")
COMPILED_CODE = "compiled code"
NO_OPERATOR = "(no operator)"
KEPT_KEYS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "id", "bp", "s")
KEPT_ARGS = ("External id", "correlation", "stream", "grid", "block", "Input Dims", "name", "labels", "sort_index")
ABSOLUTE_PATH = re.compile(r"(?<![\w.])/(?:[^\s/:;,()'\"]+/)+")


@dataclass(frozen=True)
class Interval:
    """Something that ran from `start_us` to `end_us`: a kernel, copy or memset, or on a CPU a top-level operator.

    `operator` launched it, "" where nothing says so; `elements` is the size of that operator's largest input (0 if
    unknown); `step` is the profiled step it belongs to.
    """

    start_us: float
    end_us: float
    name: str
    operator: str = ""
    elements: int = 0
    step: int = 0


@dataclass(frozen=True)
class Trace:
    """The intervals of `steps` profiled steps in order of their start, and a profiled step's median host time (ms)."""

    intervals: tuple[Interval, ...]
    steps: int
    step_ms: float
    source: Source
    attributed: Attributed = "operator"


def busy_us(intervals: Iterable[Interval]) -> float:
    """Time in which at least one interval runs (their union)."""
    return sum(new for _, new in _newly_covered(intervals))


def total_us(intervals: Iterable[Interval]) -> float:
    """The durations of all intervals added up, overlaps counted twice."""
    return sum(each.end_us - each.start_us for each in intervals)


def gaps_us(intervals: Iterable[Interval]) -> list[float]:
    """The idle times between intervals, in order; empty for one interval or for intervals without a pause."""
    found: list[float] = []
    end = None
    for each in _ordered(intervals):
        if end is not None and each.start_us > end:
            found.append(each.start_us - end)
        end = each.end_us if end is None else max(end, each.end_us)
    return found


def overlaps(intervals: Iterable[Interval]) -> int:
    """How many intervals start before everything that started earlier has ended: no gap precedes them."""
    ordered = _ordered(intervals)
    count, end = 0, float("-inf")
    for each in ordered:
        count += each.start_us < end
        end = max(end, each.end_us)
    return count


def by_operator(trace: Trace) -> dict[str, OperatorTime]:
    """Launches and device time per step under each operator, longest first.

    An interval counts with the time in which nothing that started earlier still runs, so the times add up to the busy
    time even where kernels overlap (with programmatic launch the next kernel starts early, only to wait).
    """
    launches: Counter[str] = Counter()
    time_us: dict[str, float] = defaultdict(float)
    for each, new in _newly_covered(trace.intervals):
        launches[each.operator or NO_OPERATOR] += 1
        time_us[each.operator or NO_OPERATOR] += new
    order = sorted(time_us, key=lambda name: (-time_us[name], name))
    return {
        name: OperatorTime(launches=launches[name] / trace.steps, ms=time_us[name] / 1e3 / trace.steps)
        for name in order
    }


def steps_of(trace: Trace) -> list[list[Interval]]:
    """The intervals step by step (a step without any is an empty list)."""
    found: list[list[Interval]] = [[] for _ in range(trace.steps)]
    for each in trace.intervals:
        found[each.step].append(each)
    return found


def typical(trace: Trace) -> Trace:
    """The one step of `trace` whose busy time is the median (of an even number, the shorter of the middle two).

    One whole step rather than means over all, so that its parts belong together and a step that something else
    disturbed does not count.
    """
    steps = sorted(steps_of(trace), key=busy_us)
    chosen = steps[(len(steps) - 1) // 2]
    return replace(trace, intervals=tuple(replace(each, step=0) for each in chosen), steps=1)


def attribute(trace: Trace, twin: Trace | None, kv_elements: int, own: Mapping[str, str] | None = None) -> Trace:
    """`trace` with an operator for every interval, and said how it was found.

    Concatenations whose input has at least `kv_elements` elements are named apart from the small ones. A kernel
    without an operator takes that of the same occurrence of its name in a step of `twin`; failing that, its class.
    `own` maps names of kernels that are ours to what stands for their operator.
    """
    named = [replace(each, operator=_operator(each, kv_elements)) for each in trace.intervals]
    if all(each.operator for each in named) or trace.source == "host":
        return replace(trace, intervals=tuple(named))
    known: dict[str, list[str]] = defaultdict(list)
    for each in steps_of(twin)[-1] if twin else []:
        known[each.name].append(_operator(each, kv_elements))
    seen: Counter[tuple[int, str]] = Counter()
    found, how = [], "twin"
    for each in named:
        operator = each.operator
        if not operator:
            position = seen[each.step, each.name]
            seen[each.step, each.name] += 1
            there = known[each.name]
            operator = there[position] if position < len(there) else ""
        if not operator:
            operator, how = (own or {}).get(each.name) or ledger.kernel_class(each.name), "name"
        found.append(replace(each, operator=operator))
    return replace(trace, intervals=tuple(found), attributed="twin" if how == "twin" else "name")


def from_chrome(data: Mapping[str, Any], source: Source) -> Trace:
    """The trace in a Chrome JSON of torch's profiler whose steps are marked with `STEP_MARK`.

    Raises `ValueError` if no step is marked or, for a device, nothing ran on it.
    """
    events = [event for event in data["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    marks = sorted(
        (float(e["ts"]), float(e["dur"])) for e in events if e["name"] == STEP_MARK and e["cat"] == "user_annotation"
    )
    if not marks:
        raise ValueError("no step is marked in this trace")
    starts = [start for start, _ in marks]
    threads: defaultdict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["pid"], event["tid"]].append(event)
    found = _host(threads) if source == "host" else _device(events, threads)
    found = [replace(each, step=max(0, bisect_right(starts, each.start_us) - 1)) for each in found]
    if not found:
        raise ValueError(f"nothing ran on the {source} in this trace")
    durations = sorted(duration for _, duration in marks)
    middle = (durations[(len(durations) - 1) // 2] + durations[len(durations) // 2]) / 2
    return Trace(tuple(_ordered(found)), steps=len(marks), step_ms=middle / 1e3, source=source)


def _device(events: Sequence[dict[str, Any]], threads: Threads) -> list[Interval]:
    """Kernels, copies and memsets, each with the top-level operator around the call that launched it."""
    tops = {thread: _top_level(ops) for thread, ops in threads.items()}
    calls = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    found = []
    for event in events:
        if event.get("cat") not in DEVICE_CATEGORIES:
            continue
        call = calls.get(event.get("args", {}).get("correlation"))
        top = None
        if call is not None and "GraphLaunch" not in call["name"]:
            top = _enclosing(tops.get((call["pid"], call["tid"]), []), float(call["ts"]))
        found.append(_interval(event, top["name"] if top else "", _largest_input(top)))
    return found


def _host(threads: Threads) -> list[Interval]:
    """On a CPU: the top-level operators, and what generated code does between those it calls."""
    found = []
    for ops in threads.values():
        tops = _top_level(ops)
        found += [_interval(op, op["name"], _largest_input(op)) for op in tops]
        ends = [(float(op["ts"]), float(op["ts"]) + float(op["dur"])) for op in tops]
        for region in _top_level([op for op in ops if _is_wrapper(op)], wrappers=True):
            at, end = float(region["ts"]), float(region["ts"]) + float(region["dur"])
            for start, stop in [*((s, e) for s, e in ends if at <= s < end), (end, end)]:
                if start > at:
                    found.append(Interval(at, start, COMPILED_CODE, COMPILED_CODE))
                at = max(at, stop)
    return found


def _top_level(ops: Sequence[dict[str, Any]], *, wrappers: bool = False) -> list[dict[str, Any]]:
    """The operators of one thread that no other encloses, in order; compiled regions do not count unless asked for."""
    found: list[dict[str, Any]] = []
    end = float("-inf")
    for op in sorted(ops, key=lambda op: (float(op["ts"]), -float(op["dur"]))):
        if float(op["ts"]) >= end and (wrappers or not _is_wrapper(op)):
            found.append(op)
            end = float(op["ts"]) + float(op["dur"])
    return found


def _is_wrapper(op: Mapping[str, Any]) -> bool:
    return str(op["name"]).startswith(WRAPPERS)


def _enclosing(tops: Sequence[dict[str, Any]], at: float) -> dict[str, Any] | None:
    index = bisect_right(tops, at, key=lambda op: float(op["ts"])) - 1
    if index < 0 or at > float(tops[index]["ts"]) + float(tops[index]["dur"]):
        return None
    return tops[index]


def _interval(event: Mapping[str, Any], operator: str, elements: int) -> Interval:
    start = float(event["ts"])
    return Interval(start, start + float(event["dur"]), str(event["name"]), operator, elements)


def _largest_input(op: Mapping[str, Any] | None) -> int:
    return max(_sizes(op.get("args", {}).get("Input Dims", []) if op else []), default=0)


def _sizes(dims: Any) -> list[int]:
    """Element counts of all shapes in the profiler's nested list of input dimensions."""
    if not isinstance(dims, list) or not dims:
        return []
    if all(isinstance(each, int) for each in dims):
        size = 1
        for each in dims:
            size *= each
        return [size]
    return [size for each in dims for size in _sizes(each)]


def _operator(each: Interval, kv_elements: int) -> str:
    whole = each.operator == "aten::cat" and each.elements >= kv_elements
    return ledger.CAT_KV_OPERATOR if whole else each.operator


def _ordered(intervals: Iterable[Interval]) -> list[Interval]:
    return sorted(intervals, key=lambda each: (each.start_us, each.end_us, each.name))


def _newly_covered(intervals: Iterable[Interval]) -> list[tuple[Interval, float]]:
    found, end = [], float("-inf")
    for each in _ordered(intervals):
        found.append((each, max(0.0, each.end_us - max(each.start_us, end))))
        end = max(end, each.end_us)
    return found


def anonymous(data: Mapping[str, Any]) -> dict[str, Any]:
    """A Chrome trace that Perfetto opens, without what names a machine: times from 0, no host name, no paths."""
    events = [event for event in data["traceEvents"] if isinstance(event.get("tid"), int | str)]
    first = min((float(event["ts"]) for event in events if "dur" in event), default=0.0)
    kept = []
    for event in events:
        if event.get("cat") == "Trace" or event.get("pid") == "Spans":
            continue
        small = {key: event[key] for key in KEPT_KEYS if key in event}
        if "ts" in small:
            small["ts"] = max(0.0, round(float(small["ts"]) - first, 3))
        args = {key: event["args"][key] for key in KEPT_ARGS if key in event.get("args", {})}
        small["name"] = _without_paths(str(event.get("name", "")))
        kept.append(small | {"args": {key: _plain(value) for key, value in args.items()}})
    return {"displayTimeUnit": "ms", "traceEvents": kept}


def _plain(value: Any) -> Any:
    return _without_paths(value) if isinstance(value, str) else value


def _without_paths(text: str) -> str:
    return ABSOLUTE_PATH.sub("", text)
