"""Where a step's time goes: floor, extra traffic, kernel inefficiency, bubbles, exposed host, and what they leave.

Definitions, all in ms of one step, the profiled one whose busy time is the median; B is the read bandwidth measured in
the same session:

- floor: (streamed weights + K) / B.
- extra traffic: the other bytes of the arm's ledger (KV concatenation, repeat_kv, mask, casts) / B. A cache may serve
  them faster than memory would; then kernel inefficiency is smaller by as much.
- kernel inefficiency: the busy time of each operator's kernels minus the time that its ledger bytes take at B, added
  up over operators. Operators without ledger bytes (norms, rotary embedding, activations) count in full.
- bubbles: (launches - 1 - overlapping launches) x the gap between two kernels in a graph of empty ones.
- exposed host: host time that the device waits for, from stamps in the same unprofiled steps. A step enqueued kernel
  by kernel exposes what its enqueueing takes longer than the device does with its bubbles, max(0, median enqueue -
  busy - bubbles). A replayed graph is one launch, and after a synchronisation nothing runs until it is made, so all of
  its enqueue is exposed (0.5 to 0.8 ms for some 1,300 kernels on one host; a free-running loop hides it).
- residual: the step minus all of these. In a host-bound step it is mainly the work that is still running when the last
  launch returns; in a graph-launched one it is the return of the synchronisation.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from decodegap import floor, ledger, trace
from decodegap.models import Model
from decodegap.schema import Anatomy, Cell, EmptyKernels, OperatorTime, Series
from decodegap.trace import Trace

if TYPE_CHECKING:
    from decodegap.arms import Step

PARTS = ("floor", "extra traffic", "kernel inefficiency", "bubbles", "exposed host")
TWINS = {"graph": "eager-pinned"}  # arms that run the same kernels, launched differently


def measure(
    prepared: Sequence[tuple[Series, "Step"]],
    cell: Cell,
    model: Model,
    device: str,
    read_gb_s: float,
    *,
    trace_dir: Path | None = None,
) -> list[Anatomy]:
    """The anatomy of every timed arm of a session, in order; call it after the timed series.

    `device` is "cuda" or "cpu". With `trace_dir`, each arm's profiled steps are kept there for Perfetto as
    `<model>_<ctx>_<arm>.trace.json.gz`. Raises `UnsupportedError` where the profiler does not work.
    """
    from decodegap import profiling

    traces: dict[str, Trace] = {}
    found = []
    empty = profiling.empty_kernels(device) if device.startswith("cuda") else None
    for series, step in prepared:
        keep = trace_dir / f"{cell.model}_{cell.ctx}_{series.arm}.trace.json.gz" if trace_dir else None
        traces[series.arm] = profiling.profile_step(step, device, keep=keep)
        twin = traces.get(TWINS.get(series.arm, ""))
        found.append(
            of_trace(traces[series.arm], series, cell, model, read_gb_s, empty=empty, twin=twin, replayed=step.replayed)
        )
    return found


def of_trace(
    seen: Trace,
    series: Series,
    cell: Cell,
    model: Model,
    read_gb_s: float,
    *,
    empty: EmptyKernels | None,
    twin: Trace | None = None,
    replayed: bool = False,
    weights: int | None = None,
    casts: int = 0,
) -> Anatomy:
    """The anatomy that a trace, the unprofiled samples and the arm's byte ledger give. Pure.

    `read_gb_s` is in GB/s (1e9 bytes); `empty` is None on a CPU, which has neither bubbles nor a host apart from
    it; `replayed` says that one graph launch starts the whole step; `weights` and `casts` as in `ledger.ledger`.
    """
    element_bytes = floor.ELEMENT_BYTES[cell.dtype]
    own = ledger.OWN_KERNELS if ledger.is_own(series.arm) else None
    weights = ledger.own_weights(model.config, series.arm) if own else weights
    kv_elements = ledger.layer_kv_elements(model.config, max(1, cell.ctx - 1))
    named = trace.typical(trace.attribute(seen, twin, kv_elements, own))
    counts = ledger.ledger(model.config, cell.ctx, series.arm, element_bytes, weights=weights, casts=casts)
    ledger_ms = {item: floor.floor_ms(n, read_gb_s) for item, n in counts.items()}
    operators, flags = _with_bytes(trace.by_operator(named), counts)
    if own:
        moved = ledger.own_bytes(model.config, cell.ctx, series.arm)
        operators, flags = _with_own_bytes(trace.by_operator(named), moved), []
    flags += _contradictions(operators, series.arm, int(model.config["num_hidden_layers"]))
    launches = len(named.intervals)
    overlapping = trace.overlaps(named.intervals)
    busy_ms = trace.busy_us(named.intervals) / 1e3
    gap = gap_us(empty)
    bubbles_ms = max(0.0, launches - 1 - overlapping) * gap / 1e3
    enqueue_ms = statistics.median(series.enqueue_ms)
    on_device = seen.source == "device"
    hidden_ms = 0.0 if replayed else busy_ms + bubbles_ms
    exposed_ms = max(0.0, enqueue_ms - hidden_ms) if on_device else 0.0
    parts = {
        "floor": sum(ledger_ms[item] for item in ledger.FLOOR_ITEMS),
        "extra traffic": sum(ledger_ms[item] for item in ledger.EXTRA_ITEMS),
        "kernel inefficiency": busy_ms - sum(ledger_ms.values()),
        "bubbles": bubbles_ms,
        "exposed host": exposed_ms,
    }
    return Anatomy(
        arm=series.arm,
        profiled_steps=seen.steps,
        launches=launches,
        operators=operators,
        busy_ms=busy_ms,
        kernel_ms=trace.total_us(named.intervals) / 1e3,
        bubbles_ms=bubbles_ms,
        gap_us=gap,
        enqueue_ms=enqueue_ms,
        exposed_host_ms=exposed_ms,
        profiled_step_ms=seen.step_ms,
        ledger_bytes=counts,
        ledger_ms=ledger_ms,
        parts_ms=parts,
        residual_ms=series.step_ms - sum(parts.values()),
        step_ms=series.step_ms,
        source=seen.source,
        attributed=named.attributed,
        overlapping=overlapping,
        idle_ms=sum(trace.gaps_us(named.intervals)) / 1e3,
        empty_kernels=empty,
        flags=flags,
    )


def gap_us(empty: EmptyKernels | None) -> float:
    """The gap between two kernels of a graph (us): what the profiler shows, at most the unprofiled period.

    Kernel durations are on the profiler's clock, so the gap that completes them is, too. But profiling can stretch
    gaps, and none can be longer than the whole unprofiled period of an empty kernel. 0 without a device.
    """
    return max(0.0, min(empty.between_us, empty.period_us)) if empty else 0.0


def inefficiency_ms(found: Anatomy) -> dict[str, float]:
    """Device time of each operator's kernels beyond what its bytes need at the measured bandwidth (ms a step)."""
    total, total_ms = sum(found.ledger_bytes.values()), sum(found.ledger_ms.values())
    per_byte = total_ms / total if total else 0.0
    return {name: each.ms - each.bytes * per_byte for name, each in found.operators.items()}


def plan_cost_ms(auto: Anatomy, pinned: Anatomy) -> float:
    """Host time a step that choosing the SDPA backend freely adds (plans for a new KV length), from the enqueues."""
    return auto.enqueue_ms - pinned.enqueue_ms


def _with_bytes(
    operators: Mapping[str, OperatorTime], counts: Mapping[str, int]
) -> tuple[dict[str, OperatorTime], list[str]]:
    """`operators` with each ledger item's bytes at the one of its operators that takes longest, and what found none."""
    owner: dict[str, str] = {}
    for name in operators:  # longest first
        owner.setdefault(ledger.item_of(name), name)
    owned: dict[str, int] = {}
    for item, n in counts.items():
        if n and item in owner:
            owned[owner[item]] = owned.get(owner[item], 0) + n
    lost = [item for item in (ledger.WEIGHTS, ledger.KV_READ, ledger.KV_CAT) if counts[item] and item not in owner]
    flags = [f"no operator was seen that moves: {', '.join(lost)}"] if lost else []
    return {
        name: OperatorTime(launches=each.launches, ms=each.ms, bytes=owned.get(name, 0))
        for name, each in operators.items()
    }, flags


def _with_own_bytes(operators: Mapping[str, OperatorTime], moved: Mapping[str, int]) -> dict[str, OperatorTime]:
    """`operators` with the bytes of each fused kernel, which are known one by one."""
    return {
        name: OperatorTime(launches=each.launches, ms=each.ms, bytes=moved.get(name, 0))
        for name, each in operators.items()
    }


def _contradictions(operators: Mapping[str, OperatorTime], arm: str, layers: int) -> list[str]:
    """Where the operators seen are not those that the arm's ledger counts bytes for."""
    if arm not in ledger.EXTRA:
        return [f"the byte ledger does not know what arm {arm} moves beyond weights and KV"]
    flags = []
    expected = 2 * layers if ledger.KV_CAT in ledger.EXTRA[arm] else 0
    by_name = operators.get("cat" + ledger.BY_NAME)
    if by_name is not None:
        # A kernel's name does not tell a KV concatenation from the two of the rotary embedding in each layer.
        most = expected + 2 * layers + 1
        if not expected <= by_name.launches <= most:
            flags.append(f"{by_name.launches:g} concatenations a step were seen, {expected} to {most} were expected")
    else:
        whole = operators.get(ledger.CAT_KV_OPERATOR)
        seen = whole.launches if whole else 0.0
        if seen != expected:
            flags.append(f"{seen:g} KV concatenations a step were seen, {expected} were expected (2 a layer)")
    copies = operators.get("copy" + ledger.BY_NAME)
    if ledger.REPEAT_KV in ledger.EXTRA[arm] and copies is not None and copies.launches < 2 * layers:
        flags.append(f"{copies.launches:g} copies a step were seen, at least {2 * layers} were expected (repeat_kv)")
    return flags
