"""The quantised paths in tables: speed-ups promised and realised, each projection's kernel, and where the rest goes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decodegap import plan, plan_quantised, quant_results, quant_why
from decodegap.frame import records_hash
from decodegap.grid import LEGEND, MARKS, model_label
from decodegap.launch import Kept
from decodegap.published import Published
from decodegap.quant_results import EAGER, GRAPH, Checked, Line
from decodegap.quant_why import PARTS, Why
from decodegap.render import Table
from decodegap.rows import CellRow
from decodegap.stats import MIN_FOR_INTERVAL
from decodegap.tables import DASH, above_one, flag_notes, ms, number, step

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("q/o", "k/v", "gate/up", "down")
ARITHMETIC = " (a)"
NOT_MEASURED = "missing: not measured"
GAIN_NOTE = (
    "Promised: bytes that a step of the baseline reads over those of the path (packed weights, what stays as it is, KV "
    "cache). Gain: the baseline's step over the path's on the same host, both launched kernel by kernel or both by "
    "graph."
)


def quantised(frame: "pd.DataFrame", published: Published) -> Table:
    """Every path: its step, what it holds, its floor, and the speed-up that its bytes promise beside what comes."""
    found = quant_results.lines(frame, published)
    kinds = {line.kind for line in found}
    return _speed_ups(
        frame,
        found,
        name="quantised",
        caption=(
            "Quantised paths, batch 1: the step launched kernel by kernel as published, and by one CUDA graph; the "
            "quantised floor (all weights as really held and the KV cache, at peak bandwidth) over the faster of both, "
            "and the same without the embedding that a step does not read (streamed); and the speed-up over bf16 that "
            "the bytes promise beside the one that comes. Output head and embedding stay in 16 bits in every path."
        ),
        notes=(
            *([f"{LEGEND['published']}; §: follows from published steps by arithmetic."] if "published" in kinds else
              []),
            *([f"{ARITHMETIC.strip()}: from the path's bits a weight, held by nobody here."] if "published" in kinds
              else []),
            *([f"{LEGEND['missing']}."] if "missing" in kinds else []),
        ),
    )  # fmt: skip


def cpu_quantised(frame: "pd.DataFrame") -> Table:
    """The paths that run on a CPU, against fp32 there."""
    return _speed_ups(
        frame,
        quant_results.lines(frame, None, cpu=True),
        name="cpu-quantised",
        caption=(
            "Quantised paths of small stand-in models on this machine's CPU, against fp32 there: real kernels and "
            "packed weights, but not the study's; the floor is at the read bandwidth measured here. There is no graph."
        ),
        notes=("Paths whose kernels need an NVIDIA GPU are not in this table.",),
    )


def projections(frame: "pd.DataFrame", kept: Sequence[Kept], *, cpu: bool = False) -> Table:
    """Each path's kernel on each kind of projection: microseconds, and GB/s of the bytes it reads."""
    found = quant_results.checked(kept, cpu=cpu)
    missing = [] if found or cpu else [(*[DASH] * (2 * len(KINDS) + 5), NOT_MEASURED)]
    heads = [text for kind in KINDS for text in (f"{kind} (µs)", "GB/s")]
    return Table(
        name="cpu-projections" if cpu else "projections",
        caption=(
            "One projection on its own, all layers' in turn so that weights come from memory: time, and GB/s of the "
            "weights as held. Error: the path's whole-model logits against its own dequantised weights in higher "
            "precision, as a multiple of what a dense net with those weights in the path's type shows."
        ),
        headers=("GPU", "Model", "Context", "Path", *heads, "Error", "Check"),
        rows=(*map(_projection_row, found), *missing),
        groups=(*(each.where.short for each in found), *(DASH for _ in missing)),
        numeric=(False, False, True, False, *[True] * (2 * len(KINDS) + 1), False),
        notes=(*("bf16, fp16 and fp32 are the library's own products of unquantised weights.",),),
        data=tuple(data for each in found for data in _projection_data(each)),
        records=records_hash(frame),
    )


def why(frame: "pd.DataFrame", kept: Sequence[Kept], *, cpu: bool = False) -> Table:
    """Where the milliseconds go that a path's step takes beyond a quarter of the baseline's."""
    found = quant_why.why(kept, cpu=cpu)
    missing = [] if found or cpu else [(*[DASH] * 13, NOT_MEASURED)]
    share = "an eighth of the fp32 step" if cpu else "a quarter of the bf16 step"
    return Table(
        name="cpu-why" if cpu else "why",
        caption=(
            f"Why a path's step is not {share}: its own step, that share, and what lies between (ms), by an anatomy of "
            "each of both steps. Bytes: what is not reduced as far (output head, KV cache, scales and zeros) "
            "at the read bandwidth. Products: the projections' kernels beyond the time of their bytes. Added: casts, "
            "biases and other kernels that the baseline has not (below zero: it has more). Without weights: the "
            "baseline's other kernels, which "
            "no quantising makes faster. Launch: bubbles and exposed host."
        ),
        headers=("GPU", "Model", "Context", "Path", "Launched", "Step", "Share", "Bytes", "Products", "Added",
                 "Without weights", "Launch", "Residual", "Largest"),
        rows=(*map(_why_row, found), *missing),
        groups=(*(each.where.short for each in found), *(DASH for _ in missing)),
        numeric=(False, False, True, False, False, *[True] * 8, False),
        notes=(
            "Share and the columns from Bytes to Residual add up to the step.",
            *quant_why.slowed(quant_results.checked(kept, cpu=cpu)),
        ),
        data=tuple(map(_why_data, found)),
        records=records_hash(frame),
    )  # fmt: skip


def _speed_ups(
    frame: "pd.DataFrame", found: Sequence[Line], *, name: str, caption: str, notes: tuple[str, ...]
) -> Table:
    ranges = any(row and row.spread == "range" for line in found for row in (line.eager, line.graph))
    return Table(
        name=name,
        caption=caption,
        headers=("GPU", "Model", "Context", "Path", "Held (GB)", "Floor (ms)", "Step (ms)", "By graph (ms)", "Of floor",
                 "Of streamed", "Promised", "Gain", "Graph gain", "Sessions", "Source"),
        rows=tuple(map(_row, found)),
        groups=tuple(f"{line.where.gpu} {line.where.model} {line.where.ctx}" for line in found),
        numeric=(False, False, True, False, *[True] * 10, False),
        notes=(
            GAIN_NOTE,
            *([f"In parentheses: smallest and largest of fewer than {MIN_FOR_INTERVAL} sessions; not an interval."]
              if ranges else []),
            *above_one(_over(line.floor_ms, line) for line in found),
            *notes,
            *flag_notes([line.eager for line in found if line.eager]),
        ),
        data=tuple(map(_data, found)),
        records=records_hash(frame),
    )  # fmt: skip


def _row(line: Line) -> tuple[str, ...]:
    head = (line.where.system, model_label(line.where.model), str(line.where.ctx), line.path.slug)
    if line.kind == "missing":
        wanted = _wanted(line)
        return (*head, *[DASH] * 9, f"0 of {wanted}" if wanted else DASH, f"missing: {line.reason}")
    implied = MARKS["implied"] if line.kind == "published" else ""
    quoted = MARKS["published"] if line.kind == "published" else ""
    arithmetic = ARITHMETIC if line.kind == "published" else ""
    gain = DASH if line.gain is None else f"{line.gain:.2f}{'' if line.path.is_baseline else implied}"
    return (
        *head,
        number(line.held_gb) + arithmetic,
        number(line.floor_ms) + arithmetic,
        _step(line.eager) if line.eager else number(line.step_ms, 4) + quoted,
        _step(line.graph) if line.graph else DASH,
        _share(line.floor_ms, line) + implied,
        _share(line.streamed_ms, line) + implied,
        DASH if line.promised is None else f"{line.promised:.2f}{arithmetic}",
        gain,
        DASH if line.graph_gain is None else f"{line.graph_gain:.2f}",
        _sessions(line),
        "published" if line.kind == "published" else f"measured, {line.where.store}{_host(line)}",
    )


def _step(row: CellRow) -> str:
    """Mean step and its spread, in as few letters as a wide table needs: a range in parentheses."""
    if row.spread == "degenerate" or row.low_ms is None or row.high_ms is None:
        return step(row)
    spread = f"{number(row.low_ms)}–{number(row.high_ms)}"
    return f"{step(row)} " + (f"[{spread}]" if row.spread == "interval" else f"({spread})")


def _share(floor_ms: float | None, line: Line) -> str:
    share = _over(floor_ms, line)
    return DASH if share is None else f"{share:.3f}"


def _over(floor_ms: float | None, line: Line) -> float | None:
    """A floor over the faster of both ways to launch."""
    steps = [step_ms for step_ms in (line.step_ms, line.graph_ms) if step_ms]
    return floor_ms / min(steps) if floor_ms and steps else None


def _sessions(line: Line) -> str:
    if line.eager is None:
        return DASH
    wanted = _wanted(line)
    return f"{line.eager.sessions} of {wanted}" if line.eager.sessions < wanted else str(line.eager.sessions)


def _wanted(line: Line) -> int:
    """How many sessions a plan without parameters has for this cell."""
    gpu = line.where.gpu
    tasks = plan_quantised.quantised(plan.request(gpu=gpu), gpu)
    here = (line.where.model, line.where.ctx, line.path.slug)
    return sum((task.cell.model, task.cell.ctx, task.cell.arm) == here for task in tasks)


def _host(line: Line) -> str:
    hosts = line.eager.hosts if line.eager else ()
    return f", host {hosts.index(line.host) + 1} of {len(hosts)}" if len(hosts) > 1 else ""


def _data(line: Line) -> dict[str, Any]:
    eager, graph = line.eager, line.graph
    return {
        "gpu": line.where.gpu, "model": line.where.model, "ctx": line.where.ctx, "path": line.path.slug,
        "kind": line.kind, "store": line.where.store if line.kind == "measured" else "", "reason": line.reason,
        "dtype": line.path.dtype_on(line.where.gpu), "bits": line.path.bits, "group": line.path.group,
        "held_bytes": eager.weights_bytes if eager else None, "streamed_bytes": eager.streamed_bytes if eager else None,
        "held_gb": line.held_gb, "floor_ms": line.floor_ms, "floor_streamed_ms": line.streamed_ms,
        "floor_achievable_ms": eager.floor_achievable_ms if eager else None,
        "step_ms": line.step_ms, "step_low_ms": eager.low_ms if eager else None,
        "step_high_ms": eager.high_ms if eager else None, "free_ms": eager.free_ms if eager else None,
        "graph_ms": line.graph_ms, "graph_low_ms": graph.low_ms if graph else None,
        "graph_high_ms": graph.high_ms if graph else None, "graph_free_ms": graph.free_ms if graph else None,
        "graph_j_per_step": graph.energy_j_per_step if graph else None,
        "promised": line.promised, "gain": line.gain, "graph_gain": line.graph_gain,
        **{f"{name}_{end}": (line.gain_range(how) or (None, None))[index]
           for name, how in (("gain", EAGER), ("graph_gain", GRAPH)) for index, end in enumerate(("low", "high"))},
        "sessions": eager.sessions if eager else 0, "unstable_sessions": eager.unstable if eager else 0,
        "graph_unstable_sessions": graph.unstable if graph else 0, "host": line.host,
        "flags": "; ".join(eager.flags) if eager else "", "records": " ".join(eager.records) if eager else "",
    }  # fmt: skip


def _projection_row(each: Checked) -> tuple[str, ...]:
    by = {projection.kind: projection for projection in each.projections}
    texts = [text for kind in KINDS for text in
             ((number(by[kind].us), number(by[kind].gb_s)) if kind in by else (DASH, DASH))]  # fmt: skip
    check = each.check
    times = f" ({check.error / check.eager_error:.2f}x)" if check and check.eager_error else ""
    error = DASH if check is None else f"{check.error:.1e}{times}"
    said = f"missing: {each.reason}" if check is None else "passed" if check.passed else "failed"
    where = each.where
    return (where.system, model_label(where.model), str(where.ctx), each.path.slug, *texts, error, said)


def _projection_data(each: Checked) -> list[dict[str, Any]]:
    check = each.check
    base = {
        "gpu": each.where.gpu, "model": each.where.model, "ctx": each.where.ctx, "store": each.where.store,
        "path": each.path.slug,
    }  # fmt: skip
    told = {
        "check_error": check.error if check else None,
        "check_dense_error": check.eager_error if check else None,
        "check_passed": check.passed if check else None,
        "reason": each.reason,
        "record": each.record,
    }
    names = ("kind", "rows", "columns", "n_bytes", "us", "gb_s", "error", "dense_error")
    if not each.projections:
        return [base | dict.fromkeys(names) | told]
    return [base | {name: getattr(projection, name) for name in names} | told for projection in each.projections]


def _why_row(each: Why) -> tuple[str, ...]:
    where = each.where
    parts = each.parts_ms | {"residual": each.residual_ms}
    largest = max(parts, key=lambda name: parts[name])
    return (
        where.system, model_label(where.model), str(where.ctx), each.path.slug, each.series, ms(each.step_ms),
        ms(each.share_ms), *(ms(parts[name]) for name in (*PARTS, "residual")), largest,
    )  # fmt: skip


def _why_data(each: Why) -> dict[str, Any]:
    return {
        "gpu": each.where.gpu, "model": each.where.model, "ctx": each.where.ctx, "store": each.where.store,
        "path": each.path.slug, "series": each.series, "step_ms": each.step_ms, "share": each.share,
        "share_ms": each.share_ms, **{f"{name.replace(' ', '_')}_ms": each.parts_ms[name] for name in PARTS},
        "residual_ms": each.residual_ms, "record": each.records[0], "baseline_record": each.records[1],
    }  # fmt: skip
