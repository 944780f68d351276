"""How a session measures one quantised path: prefill unquantised, convert, then launched and replayed, both proven."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodegap import (
    anatomy_cli,
    anatomy_quant,
    arms,
    attest,
    cells,
    decode,
    gpus,
    graphs,
    machine,
    models,
    plan,
    quant_attest,
    quant_check,
    quant_paths,
    timing,
)
from decodegap.arms import Setup, Step
from decodegap.errors import BadInputError, UnsupportedError
from decodegap.plan import Task
from decodegap.quant_catalogue import GRAPH_SUFFIX, PATHS, QuantPath
from decodegap.schema import Quantised

if TYPE_CHECKING:
    from decodegap.session import Findings


def measure(task: Task, setup: Setup, device: gpus.Device | None, store: Path, found: "Findings") -> None:
    """Measure the task's cell from `setup` on, its cache holding `ctx` tokens; what is learnt is left in `found`.

    A path that this machine cannot run, or whose check failed, becomes outcome `unsupported` with the reason; one that
    ran other kernels than its own, or whose replay is stale, makes the session `void`.
    """
    try:
        if task.cell.arm == plan.CHECK:
            with found.timed("check"):
                quant_check.measure(task, setup, found)
        else:
            with decode.backends(arms.SDPA_BACKENDS[task.cell.sdpa]):
                measure_path(task, setup, device, store, found)
    except UnsupportedError as error:
        found.outcome = "unsupported"
        found.reasons.append(str(error))


def measure_path(task: Task, setup: Setup, device: gpus.Device | None, store: Path, found: "Findings") -> None:
    """Convert the net, time its eager step and then its graph's, and only then prove what both ran.

    The energy loop is the graph's alone: it takes seconds, and in an eager step it would measure the host. A profiler,
    once attached, may go on costing every launch something, so proofs and anatomy come last.
    """
    path = path_of(task)
    quant_paths.require(path, setup.device)
    _refuse_failed(task, path, store, found)
    with found.timed("convert"):
        found.quantised = quantised(setup, path)
        decode.synchronize(setup.device)
    with found.timed("prepare"):
        eager = arms.eager(replace(setup, cache=quant_check.sharing(setup.cache)))
    found.before = machine.state(device)
    with found.timed("measure"):
        found.series.append(timing.measure(path.slug, eager, setup.device, task.protocol, lambda: None))
    prepared = [eager]
    with found.timed("capture"):
        twin, graph = _captured(path, setup, found)
    if graph is not None:
        prepared.append(graph)
        with found.timed("measure graph"):
            name, counter = path.slug + GRAPH_SUFFIX, cells.energy_counter(device)
            found.series.append(timing.measure(name, graph, setup.device, task.protocol, counter))
    found.after = machine.state(device)
    with found.timed("attest"):
        prove(task, prepared, twin, setup.device, found)
    if found.outcome == "ok" and found.read is not None:
        with found.timed("anatomy"):
            found.anatomy += anatomy_quant.measure(
                list(zip(found.series, prepared, strict=True)), twin, task.cell, model=models.lookup(task.cell.model),
                path=path, held=found.quantised, device=setup.device, read_gb_s=found.read.gb_s,
                trace_dir=anatomy_cli.trace_dir(),
            )  # fmt: skip


def path_of(task: Task) -> QuantPath:
    """The path that the task's cell names; raise `BadInputError` if there is none of that name."""
    if task.cell.arm not in PATHS:
        raise BadInputError(f"no quantised path is called {task.cell.arm!r}; known are {', '.join(PATHS)}")
    return PATHS[task.cell.arm]


def quantised(setup: Setup, path: QuantPath) -> Quantised:
    """Convert the net of `setup` to `path` in place; the bytes that it holds then. Raises `UnsupportedError`."""
    dense = quant_paths.held(setup.net).packed
    held = quant_paths.convert(setup.net, path, setup.device)
    _, _, _, first = next(quant_paths.projections(setup.net))
    return Quantised(
        path=path.slug,
        group=int(getattr(first, "group", path.group)),  # a checkpoint has its own
        packed=held.packed,
        kept=held.weights_streamed - held.packed,
        table=held.weights_all - held.weights_streamed,
        dense=dense,
    )


def prove(task: Task, prepared: list[Step], twin: Step | None, device: str, found: "Findings") -> None:
    """Void the session unless every series ran the path's own kernels and wrote its outputs anew for a new token.

    A replay is also held against the same step launched kernel by kernel: a product that a capture has missed would
    leave the outputs finite and changing, and wrong.
    """
    path, layers = path_of(task), int(models.lookup(task.cell.model).config["num_hidden_layers"])
    for index, (series, step) in enumerate(zip(found.series, prepared, strict=True)):
        for _ in range(attest.PROFILES):
            ran = attest.ran(step, device)
            faults = quant_paths.faults(path, ran.kernels, layers)
            if not faults:
                break
        found.series[index] = series.model_copy(update={"ran": ran})
        for reason in faults:
            found.void(f"{series.arm}: {reason}")
        if not step.replayed and (stale := attest.not_fresh(series.arm, step, device)):
            found.void(stale)
    found.ran = found.series[0].ran
    cells.check_backend(task, found)
    if twin is not None and len(prepared) > 1:
        name = found.series[-1].arm
        seen = attest.attest(twin, prepared[-1], device, names=(path.slug, name))
        found.attestations.append(seen)
        for reason in quant_attest.replay_faults(path, twin, prepared[-1], device, layers):
            found.void(reason)
        if not seen.kernels_equal:
            found.flags.append(f"{name} ran other kernels beside: {attest.describe(seen.kernels_differing)}")


def _captured(path: QuantPath, setup: Setup, found: "Findings") -> tuple[Step | None, Step | None]:
    """The pinned step of `setup` launched, and captured; neither on a CPU, and neither where it cannot be captured.

    In the latter case the reason is kept.
    """
    try:
        graphs.require_cuda(setup.device)
    except UnsupportedError:
        return None, None
    body = graphs.pinned(setup)
    launched = graphs.launched(setup, body)
    try:
        quant_attest.require_capture(setup.net)
        return launched, graphs.captured(setup, body)
    except torch.OutOfMemoryError:
        raise
    except (UnsupportedError, RuntimeError) as error:  # a kernel that launches on another stream breaks the capture
        found.refused[path.slug + GRAPH_SUFFIX] = " ".join(str(error).split())[:300]
        return None, None


def _refuse_failed(task: Task, path: QuantPath, store: Path, found: "Findings") -> None:
    """Raise `UnsupportedError` if this path's check failed or stopped; flag that it was not checked, if so."""
    record = cells.earlier_check(task, store, found, against="its dequantised weights")
    if record is None:
        return
    if reasons := quant_check.failures(path, record.checks, record.projections):
        raise UnsupportedError(f"{path.slug} is not timed, because its check failed: {reasons[0]}")
    why = record.refused.get(path.slug, "")
    if why.startswith(quant_check.STOPPED):
        raise UnsupportedError(f"{path.slug} is not timed: {why}")
    if path.slug not in {check.arm for check in record.checks}:
        why = why or "the check stopped before it came to this path"
        found.flags.append(f"{path.slug} was not checked against its dequantised weights: {why}")
