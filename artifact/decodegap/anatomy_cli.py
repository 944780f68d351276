"""What `make anatomy` does: one cell in a fresh process, and where its step's time goes, for people."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from decodegap import anatomy, gpus, ledger, models, plan, records, runner, scratch
from decodegap.errors import BadInputError, NotMeasuredError
from decodegap.plan import Task
from decodegap.schema import Anatomy, Cell, Machine, Record, Series

TRACE_DIR_VARIABLE = "DECODE_GAP_TRACE_DIR"  # tells the session's process where to keep traces
PAIRS = ("ab", "ab-compiled")
WITH_TWIN = {"graph": "ab", "eager-pinned": "ab"}  # measured as a pair, so that the graph's operators are known
SHOWN_OPERATORS = 12


def task(env: Mapping[str, str], gpu: str) -> Task:
    """The session that MODEL, CTX and ARM in `env` ask for on `gpu`; `BadInputError` if these or TRACE make no sense.

    Empty settings mean the first model and the shortest context of the GPU's own grid, and the arm `eager`. An arm
    that is half of an A/B is measured with the other half.
    """
    if env.get("TRACE", "") not in ("", "0", "1"):
        raise BadInputError(f"TRACE: {env['TRACE']!r}; give 1 to keep a trace")
    on_cpu = gpu == "cpu"
    default_model = models.with_role("stand-in" if on_cpu else "paper")[0].slug
    default_ctx = (plan.CPU_CONTEXTS if on_cpu else plan.PAPER_CONTEXTS)[0]
    req = plan.request(
        gpu=gpu,
        models=[env.get("MODEL") or default_model],
        contexts=[env.get("CTX") or default_ctx],
        weights=env.get("WEIGHTS") or "synthetic",
        names=plan.OF_A_CELL,
    )
    arm = env.get("ARM") or "eager"
    if arm not in (known := (*ledger.EXTRA, *PAIRS)):
        raise BadInputError(f"ARM: no arm is called {arm!r}; known are {', '.join(known)}")
    if not on_cpu:
        arm = WITH_TWIN.get(arm, arm)
    model = models.lookup(req.models[0])
    longest = int(model.config["max_position_embeddings"])
    if req.contexts[0] > longest:
        raise BadInputError(f"CTX: {req.contexts[0]} is beyond the {longest} positions of {model.slug}")
    revision, weights_dir = plan.weights_revision(req, model)
    cell = Cell(
        gpu=gpu,
        experiment="graphs",
        model=model.slug,
        ctx=req.contexts[0],
        arm=arm,
        dtype=plan.dtype_on(gpu),
        sdpa=plan.sdpa_on(gpu, arm),
    )
    protocol = plan.protocol(gpu, req.weights, revision).model_copy(update={"energy_seconds": 0.0})
    return Task(cell=cell, session=1, protocol=protocol, weights_dir=weights_dir)


def show(env: Mapping[str, str], gpu: str, store: Path, say: Callable[[str], None] = print) -> None:
    """Run the cell that `env` asks for in a fresh process and say where its step's time goes.

    Nothing is kept, so this can never be mistaken for a measured cell; with TRACE=1 the profiled steps are kept as
    Perfetto traces below `store`. Raises `DecodeGapError` like a run, and `NotMeasuredError` without an anatomy.
    """
    asked = task(env, gpu)
    gpus.require(gpu, gpus.detect())
    traces = (store / gpu / "traces").resolve() if env.get("TRACE") == "1" else None
    before = os.environ.pop(TRACE_DIR_VARIABLE, None)
    if traces:
        os.environ[TRACE_DIR_VARIABLE] = str(traces)
    try:
        with scratch.folder() as folder:
            runner.run([asked], folder, say=lambda _: None, attempts=1)
            record = records.load(records.path_of(folder, asked.cell, asked.session))
    finally:
        os.environ.pop(TRACE_DIR_VARIABLE, None)
        if before is not None:
            os.environ[TRACE_DIR_VARIABLE] = before
    for text in record_lines(record):
        say(text)
    for path in sorted(traces.glob(f"{asked.cell.model}_{asked.cell.ctx}_*.json.gz")) if traces else []:
        say(f"trace for ui.perfetto.dev: {os.path.relpath(path)}")


def trace_dir() -> Path | None:
    """Where this session is to keep its traces; None if it is not."""
    return Path(os.environ[TRACE_DIR_VARIABLE]) if os.environ.get(TRACE_DIR_VARIABLE) else None


def record_lines(record: Record) -> list[str]:
    """Every anatomy in `record` as lines of text; raise `NotMeasuredError` if there is none."""
    if not record.anatomy:
        reasons = "; ".join(record.reasons) or "the session wrote none"
        raise NotMeasuredError(f"{record.cell.model} ctx {record.cell.ctx} {record.cell.arm}: no anatomy: {reasons}")
    series = {each.arm: each for each in record.series}
    lines = []
    for found in record.anatomy:
        lines += [f"{record.cell.model}, ctx {record.cell.ctx}, {record.cell.dtype}, arm {found.arm}"]
        lines += [f"  {text}" for text in report_lines(found, series[found.arm], record.machine)]
    return lines


def report_lines(found: Anatomy, series: Series, machine: Machine | None) -> list[str]:
    """One arm's anatomy for people: the parts of the step, its launches, its bytes and its operators."""
    device = found.source == "device"
    what = "kernels" if device else "top-level operators (self time; a CPU has no kernels, bubbles or separate host)"
    free_ms = series.free_total_ms / series.free_steps
    rate = f", read bandwidth {machine.read_gb_s:.0f} GB/s" if machine and machine.read_gb_s else ""
    lines = [
        f"on {machine.device_name if machine else 'an unknown device'}{rate}",
        f"step {found.step_ms:.3f} ms synchronised, {free_ms:.3f} ms free-running",
        *_parts(found),
        f"{found.launches:.0f} {what}",
        f"busy {found.busy_ms:.3f} ms, idle between them while profiled {found.idle_ms:.3f} ms",
        f"profiling made the step {found.profiled_step_ms:.3f} ms ({found.profiled_step_ms / found.step_ms:.2f}x)",
    ]
    if device:
        lines.append(f"enqueue {found.enqueue_ms:.3f} ms; gap between kernels {found.gap_us:.2f} us{_empty(found)}")
    lines.append(f"{'bytes of a step':34}{'MB':>10}{'ms':>9}  at the measured read bandwidth")
    lines += [
        f"  {item:32}{found.ledger_bytes[item] / 1e6:10.1f}{found.ledger_ms[item]:9.3f}"
        for item in (*ledger.FLOOR_ITEMS, *ledger.EXTRA_ITEMS)
        if found.ledger_bytes[item]
    ]
    return [*lines, *_operators(found), *(f"note: {flag}" for flag in found.flags)]


def _parts(found: Anatomy) -> list[str]:
    # A record keeps its keys in alphabetical order; here the order is the one that the definitions have.
    rows = [*((name, found.parts_ms[name]) for name in anatomy.PARTS), ("residual", found.residual_ms)]
    return [f"  {name:22}{ms:9.3f} ms{ms / found.step_ms:9.1%}" for name, ms in rows]


def _empty(found: Anatomy) -> str:
    if found.empty_kernels is None:
        return ""
    empty = found.empty_kernels
    return (
        f" (empty kernels in a graph: {empty.period_us:.2f} us each unprofiled; profiled {empty.kernel_us:.2f} us "
        f"and {empty.between_us:.2f} us between)"
    )


def _operators(found: Anatomy) -> list[str]:
    how = {"operator": "read from the trace", "twin": "by the eager twin", "name": "partly by kernel name"}
    beyond = anatomy.inefficiency_ms(found)
    lines = [f"{'operator (' + how[found.attributed] + ')':34}{'launches':>10}{'ms':>9}{'beyond its bytes':>18}"]
    longest = sorted(found.operators.items(), key=lambda item: -item[1].ms)
    shown, rest = longest[:SHOWN_OPERATORS], [each for _, each in longest[SHOWN_OPERATORS:]]
    lines += [f"  {name[:32]:32}{each.launches:10.0f}{each.ms:9.3f}{beyond[name]:18.3f}" for name, each in shown]
    if rest:
        lines.append(f"  {f'{len(rest)} more':32}{sum(e.launches for e in rest):10.0f}{sum(e.ms for e in rest):9.3f}")
    return lines
