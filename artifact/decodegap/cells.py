"""How one cell is measured once its model is built and prefilled: a single arm, a pair of arms, or a check of all."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from decodegap import (
    anatomy,
    anatomy_cli,
    arms,
    attest,
    decode,
    gpus,
    machine,
    models,
    pairing,
    plan,
    plan_ladder,
    records,
    reference,
    timing,
)
from decodegap.arms import Setup, Step
from decodegap.errors import BadRecordError, StoreError, UnsupportedError
from decodegap.plan import Task
from decodegap.schema import Record

if TYPE_CHECKING:
    from decodegap.session import Findings


@dataclass(frozen=True)
class Pairing:
    """Two arms of an A/B, and whether they must do the same work kernel for kernel."""

    first: str
    second: str
    same_work: bool


PAIRS = {
    "ab": Pairing("eager-pinned", "graph", same_work=True),
    "ab-compiled": Pairing("eager-pinned", "compiled", same_work=False),  # fuses kernels, and is named for it
}
CHECKED = {
    "cpu": ("eager", "eager-pinned", "compiled"),
    "cuda": ("eager", "eager-auto", "eager-pinned", "graph", "graph-static", "graph-stock", "compiled"),
}


def measure(task: Task, setup: Setup, device: gpus.Device | None, store: Path, found: "Findings") -> None:
    """Measure the task's cell from `setup` on, its cache holding `ctx` tokens; what is learnt is left in `found`.

    An arm that this machine cannot run, or whose check on it has failed, becomes outcome `unsupported` with the
    reason; an attestation that fails makes the session `void`, with the difference named.
    """
    cell = task.cell
    try:
        with decode.backends(arms.SDPA_BACKENDS[cell.sdpa]):
            if cell.experiment == plan_ladder.EXPERIMENT:
                from decodegap import rungs  # which starts from this module

                rungs.measure(task, setup, device, found)
            elif cell.arm == plan.CHECK:
                with found.timed("check"):
                    measure_checks(task, setup, found)
            elif cell.arm in PAIRS:
                pair = PAIRS[cell.arm]
                _refuse_failed(task, (pair.first, pair.second), store, found)
                measure_pair(task, pair, setup, device, found)
            else:
                if cell.experiment == "graphs":
                    _refuse_failed(task, (cell.arm,), store, found)
                measure_single(task, setup, device, found)
    except UnsupportedError as error:
        decode.synchronize(setup.device)  # raises where the device was lost meanwhile: then the arm is not to blame
        found.outcome = "unsupported"
        found.reasons.append(str(error))


def measure_single(task: Task, setup: Setup, device: gpus.Device | None, found: "Findings") -> None:
    """Time one arm, then prove what ran and that its outputs are written anew in every step."""
    with found.timed("prepare"):
        step = arms.prepare(task.cell.arm, setup)
    found.before = machine.state(device)
    with found.timed("measure"):
        found.series.append(timing.measure(task.cell.arm, step, setup.device, task.protocol, energy_counter(device)))
    found.after = machine.state(device)
    with found.timed("attest"):
        found.ran = attest.ran(step, setup.device)
        if reason := attest.not_fresh(task.cell.arm, step, setup.device):
            found.void(reason)
    check_backend(task, found)
    if task.cell.experiment != "baseline":
        _dissect(task, [step], setup.device, found)


def measure_pair(task: Task, pair: Pairing, setup: Setup, device: gpus.Device | None, found: "Findings") -> None:
    """Time a pair interleaved, then attest that both did the same work; a pair that did not keeps no times.

    In this order because a profiler, once it was attached, may go on costing every launch something.
    """
    with found.timed("prepare"):
        first, second = arms.prepare(pair.first, setup), arms.prepare(pair.second, setup)
    found.before = machine.state(device)
    with found.timed("measure"):
        *series, ratio = pairing.measure_pair(
            (pair.first, first), (pair.second, second), setup.device, task.protocol, energy_counter(device)
        )
    found.after = machine.state(device)
    with found.timed("attest"):
        seen = attest.attest(first, second, setup.device, names=(pair.first, pair.second))
        found.attestations.append(seen)
        found.ran = attest.ran(second, setup.device)
    for reason in attest.faults(seen, same_work=pair.same_work):
        found.void(reason)
    check_backend(task, found)
    if found.outcome != "void":
        found.series, found.pair = series, ratio
    _dissect(task, [first, second], setup.device, found)
    if not pair.same_work:
        found.flags.append(f"{pair.second} runs other kernels than {pair.first}: the ratio is not launch cost alone")


def _dissect(task: Task, steps: list[Step], device: str, found: "Findings") -> None:
    """Profile each measured step, apart from its timing, and account for where it goes."""
    if found.outcome != "ok" or found.read is None:
        return
    with found.timed("anatomy"):
        found.anatomy += anatomy.measure(
            list(zip(found.series, steps, strict=True)),
            task.cell,
            models.lookup(task.cell.model),
            device,
            found.read.gb_s,
            trace_dir=anatomy_cli.trace_dir(),
        )


def measure_checks(task: Task, setup: Setup, found: "Findings") -> None:
    """Run every arm once on the same token, against the reference; the context is `ctx` including that token.

    An arm that cannot run here is flagged; one that fails is flagged too, and not timed afterwards. The session
    itself is `ok`: it has done what it is for.
    """
    past = Setup(setup.net, setup.cache, setup.token, setup.ctx - 1, setup.device)
    decode.crop(setup.cache, past.ctx)
    truth = reference.reference_logits(setup.net, setup.cache, setup.token, setup.ctx)
    eager_logits = torch.empty(0)
    for name in CHECKED[setup.device]:
        with decode.backends(arms.SDPA_BACKENDS[plan.sdpa_on(task.cell.gpu, name)]):
            try:
                step = arms.prepare(name, past if arms.ARMS.get(name) is arms.eager else setup)
            except UnsupportedError as error:
                found.flags.append(f"{name} was not checked: {error}")
                continue
            logits = logits_of(step)
        del step  # a graph keeps its own memory, which the next arm may need
        gc.collect()
        if name == "eager":
            eager_logits = logits
        result = reference.check(name, logits, eager_logits, truth)
        found.checks.append(result)
        if not result.passed:
            found.flags.append(f"{name} failed its check: {reference.failure(result)}")


def logits_of(step: Step) -> torch.Tensor:
    """A copy of the logits `[1, vocab]` of one step from its context, written over NaN."""
    step.reset()
    step.poison()
    step.run()
    logits = step.logits().clone()
    step.reset()
    return logits


def _refuse_failed(task: Task, names: tuple[str, ...], store: Path, found: "Findings") -> None:
    """Raise `UnsupportedError` if the check of one of these arms failed; flag that there is no check yet."""
    record = earlier_check(task, store, found, against="the reference")
    if record is None:
        return
    results = {result.arm: result for result in record.checks}
    for name in names:
        if name not in results:
            found.flags.append(f"{name} was not checked against the reference")
        elif not results[name].passed:
            raise UnsupportedError(f"{name} is not timed, because its check failed: {reference.failure(results[name])}")


def earlier_check(task: Task, store: Path, found: "Findings", *, against: str) -> Record | None:
    """The record in `store` of the session that checked the task's arms `against` something.

    None, and a flag that says so, if there is none or it is of another protocol.
    """
    checked = plan.check_task(task)
    try:
        record = records.load(records.path_of(store, checked.cell, checked.session))
    except (StoreError, BadRecordError):
        found.flags.append(f"not checked against {against}: there is no record of a check")
        return None
    if record.protocol_hash != task.protocol.digest():
        found.flags.append(f"not checked against {against}: the check there is is of another protocol")
        return None
    return record


def check_backend(task: Task, found: "Findings") -> None:
    """Void the session if another SDPA backend ran than the one it was pinned to."""
    if found.ran and task.cell.sdpa not in ("auto", found.ran.sdpa):
        found.void(f"SDPA was pinned to {task.cell.sdpa} but {found.ran.sdpa} ran ({found.ran.evidence})")


def energy_counter(device: gpus.Device | None) -> Callable[[], int | None]:
    """What reads the card's energy counter (mJ); it gives None where there is none."""
    return lambda: machine.energy_mj(device)
