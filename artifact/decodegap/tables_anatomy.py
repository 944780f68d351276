"""Where each arm's step goes, in milliseconds and in bytes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from decodegap import anatomy, launch, ledger
from decodegap.frame import records_hash
from decodegap.grid import LEGEND, NOT_MEASURED, model_label
from decodegap.launch import Dissected, Kept
from decodegap.models import lookup
from decodegap.render import Table
from decodegap.tables import DASH, number

if TYPE_CHECKING:
    import pandas as pd

ITEMS = (*ledger.FLOOR_ITEMS, *ledger.EXTRA_ITEMS)
PLANS = "eager-auto less eager"
HEADERS = (
    "GPU", "Model", "Context", "Arm", "Launches", "Step", "Floor", "Extra", "Ineff.", "Bubbles", "Host", "Resid.", "%",
    "Busy", "Idle", "Enq.", "Profiled",
)  # fmt: skip


def parts(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """The parts of every arm's step (ms), its launches and times, and what profiling did to it."""
    found = [each for each in launch.dissected(kept) if each.where.gpu != "cpu"]
    costs = launch.plan_costs(found)
    lines: list[tuple[str, tuple[str, ...], dict[str, Any]]] = []
    for index, each in enumerate(found):
        lines.append((each.where.short, _row(each), _data(each)))
        is_last = index + 1 == len(found) or found[index + 1].where != each.where
        if is_last and each.where in costs:
            lines.append((each.where.short, *_plan_line(each, costs[each.where])))
    return Table(
        name="anatomy",
        caption=(
            "Where each arm's step goes, ms. Floor: streamed weights and KV cache at the read bandwidth measured in "
            "that session; extra traffic: the other bytes of the arm's ledger at the same rate; kernel inefficiency: "
            "busy time beyond both; bubbles: launches times the gap in a graph of empty kernels; exposed host: "
            "enqueueing that the device waits for. The residual is what these leave of the synchronised step."
        ),
        headers=HEADERS,
        rows=tuple(row for _, row, _ in lines),
        groups=tuple(group for group, _, _ in lines),
        numeric=(False, False, True, False, *[True] * 13),
        notes=(
            *_notes(found),
            *(
                f"{where.short}: eager-auto spends {number(ms)} ms a step more on enqueueing than eager, "
                f"{number(ms / _layers(where.model))} ms a layer: the library builds a plan for each new KV length."
                for where, ms in costs.items()
            ),
            *_missing(found),
        ),
        data=tuple(data for _, _, data in lines),
        records=records_hash(frame),
    )


def cpu_parts(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """The same of the CPU stand-ins, whose operators stand in for kernels."""
    found = [each for each in launch.dissected(kept) if each.where.gpu == "cpu"]
    own = "On a CPU there are no launches apart from the work: operators are counted, and there is no exposed host."
    made = parts(frame, kept)
    return replace(
        made,
        name="cpu-anatomy",
        caption="Where each arm's step of a stand-in model goes on this machine's CPU, ms. " + own,
        rows=tuple(map(_row, found)),
        groups=tuple(each.where.short for each in found),
        notes=_notes(found),
        data=tuple(map(_data, found)),
    )


def byte_ledger(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """The bytes that every arm's step moves, by item, and the time they take at the measured read bandwidth."""
    found = [each for each in launch.dissected(kept) if each.where.gpu != "cpu"]
    items = [item for item in ITEMS if any(each.anatomy.ledger_bytes[item] for each in found)]
    return Table(
        name="ledger",
        caption=(
            "The byte ledger: what each arm's step must move by its definition, MB, and in parentheses the ms that "
            "takes at the read bandwidth measured in that session."
        ),
        headers=("GPU", "Model", "Context", "Arm", *(item[:1].upper() + item[1:] for item in items), "Sum", "GB/s"),
        rows=tuple(_ledger_row(each, items) for each in found),
        groups=tuple(each.where.short for each in found),
        numeric=(False, False, True, False, *[True] * (len(items) + 2)),
        notes=(
            "An item that no arm has is left out here; the CSV file has all.",
            *_missing(found),
        ),
        data=tuple(_ledger_data(each) for each in found),
        records=records_hash(frame),
    )


def _head(each: Dissected) -> tuple[str, ...]:
    return each.where.system, model_label(each.where.model), str(each.where.ctx), each.arm


def _row(each: Dissected) -> tuple[str, ...]:
    seen = each.anatomy
    return (
        *_head(each),
        f"{seen.launches:.0f}",
        _ms(seen.step_ms),
        *[_ms(seen.parts_ms[name]) for name in anatomy.PARTS],
        _ms(seen.residual_ms),
        f"{seen.residual_ms / seen.step_ms:.1%}".rstrip("%"),
        _ms(seen.busy_ms),
        _ms(seen.idle_ms),
        _ms(seen.enqueue_ms),
        f"{number(seen.profiled_step_ms)} ({seen.profiled_step_ms / seen.step_ms:.1f}x)",
    )


def _plan_line(each: Dissected, ms: float) -> tuple[tuple[str, ...], dict[str, Any]]:
    row = (*_head(each)[:3], PLANS, *[""] * 11, _ms(ms), "")
    data = dict.fromkeys(_data(each)) | {
        "gpu": each.where.gpu, "model": each.where.model, "ctx": each.where.ctx, "store": each.where.store,
        "arm": PLANS, "enqueue_ms": ms,
    }  # fmt: skip
    return row, data


def _data(each: Dissected) -> dict[str, Any]:
    seen = each.anatomy
    return (
        {"gpu": each.where.gpu, "model": each.where.model, "ctx": each.where.ctx, "store": each.where.store}
        | {"arm": each.arm, "launches": seen.launches, "step_ms": seen.step_ms}
        | {f"{name.replace(' ', '_')}_ms": seen.parts_ms[name] for name in anatomy.PARTS}
        | {"residual_ms": seen.residual_ms, "residual_share": seen.residual_ms / seen.step_ms}
        | {name: getattr(seen, name) for name in ("busy_ms", "kernel_ms", "idle_ms", "enqueue_ms", "profiled_step_ms")}
        | {"gap_us": seen.gap_us, "attributed": seen.attributed, "flags": "; ".join(seen.flags)}
        | {"session": each.kept.record.session, "sessions": each.sessions, "host": each.kept.host}
        | {"record": each.kept.record.content_hash}
    )


def _ledger_row(each: Dissected, items: Sequence[str]) -> tuple[str, ...]:
    seen, machine = each.anatomy, each.kept.record.machine
    total = f"{sum(seen.ledger_bytes.values()) / 1e6:.0f} ({sum(seen.ledger_ms.values()):.3f})"
    texts = [
        f"{seen.ledger_bytes[item] / 1e6:.0f} ({seen.ledger_ms[item]:.3f})" if seen.ledger_bytes[item] else "0"
        for item in items
    ]
    return (*_head(each), *texts, total, f"{machine.read_gb_s:.0f}" if machine and machine.read_gb_s else DASH)


def _ledger_data(each: Dissected) -> dict[str, Any]:
    seen, machine = each.anatomy, each.kept.record.machine
    data: dict[str, Any] = {
        "gpu": each.where.gpu,
        "model": each.where.model,
        "ctx": each.where.ctx,
        "store": each.where.store,
        "arm": each.arm,
        "read_gb_s": machine.read_gb_s if machine else None,
    }
    for item in ITEMS:
        name = item.lower().replace(" ", "_")
        data |= {f"{name}_bytes": seen.ledger_bytes[item], f"{name}_ms": seen.ledger_ms[item]}
    return data | {"record": each.kept.record.content_hash}


def _notes(found: Sequence[Dissected]) -> tuple[str, ...]:
    """How to read the lines, the largest residual of a graph-launched arm, and what contradicts an arm's definition."""
    shares = [abs(e.anatomy.residual_ms) / e.anatomy.step_ms for e in found if e.arm in launch.GRAPH_LAUNCHED]
    flags = [f"{each.where.short}, {each.arm}: {flag}." for each in found for flag in each.anatomy.flags]
    how = (
        "Each line is the session whose step is the middle one of that arm's sessions. Busy: union of the kernels' "
        "times; idle: between them while profiled; enqueue: until the last launch returned, unprofiled; profiled: the "
        "step under the profiler, and how many times the unprofiled one."
    )
    notes = [how]
    if shares and found[0].anatomy.source == "device":
        notes.append(f"Residual of the graph-launched arms: at most {max(shares):.1%} of the step.")
    return (*notes, *flags)


def _missing(found: Sequence[Dissected]) -> list[str]:
    """One note with the arms that the experiment plans on these GPUs and that have no anatomy."""
    have = {(each.where.gpu, each.where.model, each.where.ctx, each.arm) for each in found}
    absent = []
    for gpu in dict.fromkeys(each.where.gpu for each in found):
        for model, ctx, arm in launch.planned(gpu):
            timed = ("eager-pinned", "graph") if arm == launch.SAME_WORK else (arm,) if arm != "check" else ()
            absent += [f"{gpu} {model} {ctx} {a}" for a in timed if (gpu, model, ctx, a) not in have]
    return [f"{LEGEND['missing']}. Missing, {NOT_MEASURED}: {', '.join(absent)}."] if absent else []


def _layers(model: str) -> int:
    return int(lookup(model).config["num_hidden_layers"])


def _ms(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 99.995 else f"{value:.1f}"
