"""Run a plan: skip what is measured, start sessions, survive their deaths, say how far it is."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from decodegap import fitness, gate, gpus, locks, progress, records, steadiness
from decodegap.errors import BadInputError, BadRecordError, NotMeasuredError, StoreError
from decodegap.paths import HERE
from decodegap.plan import Task, task_to_json
from decodegap.rows import sessions
from decodegap.schema import Record

DEADLINE_S = 900.0  # a session takes seconds; one that hangs this long will not come back
FIRST_WORD_S = 30.0  # a session that takes longer is not silent: most take less, and their end is said anyway
ATTEMPTS = 3  # a session that dies or is void is measured again this often in all
ASIDE = "aside"
SESSION = "decodegap.session"
SAID = "decode-gap: "  # how a session's own last line begins


@dataclass
class Report:
    """What a run did, for the summary."""

    measured: list[Path] = field(default_factory=list)
    cached: list[Path] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    unfit: str = ""  # what about this machine voided a session in every attempt, which ends the run


@dataclass(frozen=True)
class Attempt:
    """What one session is started with."""

    task: Task
    store: Path
    device: gpus.Device | None
    deadline_s: float
    module: str
    waiting: Callable[[float], None]  # told now and then how many seconds the session runs already


def run(
    tasks: Sequence[Task],
    store: Path,
    *,
    say: Callable[[str], None] = print,
    deadline_s: float = DEADLINE_S,
    attempts: int = ATTEMPTS,
    module: str = SESSION,
) -> Report:
    """Measure every task that has no valid record in `store`, one fresh process each, never two at once.

    A record that is damaged or of another protocol is set aside with its reason and measured again. A cell that one
    session found unsupported here is not tried again. `module` is what each process runs. Raises `StoreError` when
    another run holds the store or this machine, `UnsupportedError` when the machine would void every session,
    `BadInputError` when a session says that no repetition would help, and `NotMeasuredError` at the end for sessions
    that kept dying, or at once where the machine voids one every time.
    """
    report = Report()
    with locks.hold(store):
        sweep(store)
        missing = [task for task in tasks if not _is_done(task, store, report, say) and not refused(task, store)]
        if report.cached:
            say(f"measured already: {len(report.cached)} of {sessions(len(tasks))}")
        device = _admitted(missing, store) if missing else None
        began, done = time.monotonic(), 0
        while missing and not report.unfit:
            task, *others = missing

            def waiting(seconds: float, task: Task = task, done: int = done, total: int = done + len(missing)) -> None:
                say(progress.line(done, total, f"{name(task)}: {progress.duration(seconds)} so far"))

            text = _measure(Attempt(task, store, device, deadline_s, module, waiting), report, attempts)
            missing, done = [other for other in others if not refused(other, store)], done + 1
            left = (time.monotonic() - began) / done * len(missing)
            rest = f"; about {progress.duration(left)} left" if left >= 1 else ""
            say(progress.line(done, done + len(missing), f"{name(task)}: {text}{rest}"))
    if report.unfit:
        raise NotMeasuredError(
            f"stopped at {report.failed[-1]}: this machine voids what is measured ({report.unfit}); what was measured "
            "is kept, and the same command goes on from here"
        )
    if report.failed:
        raise NotMeasuredError(
            f"{len(report.failed)} of {sessions(len(tasks))} could not be measured, first {report.failed[0]}; "
            "what was measured is kept, and the same command goes on from here"
        )
    return report


def _admitted(tasks: Sequence[Task], store: Path) -> gpus.Device | None:
    """The device to measure `tasks` on; raises where it is not here, or would void every session."""
    gpu, device = gpus.require(tasks[0].cell.gpu, gpus.detect())
    gate.check(tasks, gpu, device, store)
    return device


def name(task: Task) -> str:
    """A task in words: model, context, arm and session."""
    cell = task.cell
    return f"{cell.model} ctx {cell.ctx} {cell.arm} session {task.session}"


def valid_record(task: Task, store: Path) -> Record | None:
    """The task's record if it is there, whole, of this protocol and not void; raise `BadRecordError` if it is bad."""
    path = records.path_of(store, task.cell, task.session)
    if not path.exists():
        return None
    record = records.load(path)
    if record.cell != task.cell or record.session != task.session:
        raise BadRecordError(f"{path}: holds another cell: {record.cell.file_name(record.session)}")
    if record.protocol_hash != task.protocol.digest():
        raise BadRecordError(f"{path}: measured under protocol {record.protocol_hash}, not {task.protocol.digest()}")
    if record.outcome == "void":
        raise BadRecordError(f"{path}: void: {'; '.join(record.reasons)}")
    return record


def refused(task: Task, store: Path) -> bool:
    """Whether an earlier session of this cell found that this machine cannot run it, so that no other would."""
    for session in range(1, task.session):
        with contextlib.suppress(BadRecordError):
            record = valid_record(replace(task, session=session), store)
            if record is not None and record.outcome == "unsupported":
                return True
    return False


def _is_done(task: Task, store: Path, report: Report, say: Callable[[str], None]) -> bool:
    path = records.path_of(store, task.cell, task.session)
    try:
        if valid_record(task, store) is None:
            return False
    except BadRecordError as error:
        reason = str(error).removeprefix(f"{path}: ")
        set_aside(path, store)
        report.set_aside.append(f"{path.name}: {reason}")
        say(f"set aside {path.name}: {reason}; measuring it again")
        return False
    report.cached.append(path)
    return True


def set_aside(path: Path, store: Path) -> Path:
    """Move a record out of the measuring cache, keeping it under `aside/`; return where it went."""
    base = store / ASIDE / path.relative_to(store)
    target, copy = base, 1
    while target.exists():
        copy += 1
        target = base.with_name(f"{base.stem}.{copy}{base.suffix}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)
    except OSError as error:
        raise StoreError(f"{path}: cannot be set aside: {error.strerror}") from None
    return target


def sweep(store: Path) -> None:
    """Remove what a killed writer left: unfinished temporary files, never a record."""
    for leftover in store.rglob(".*.partial"):
        leftover.unlink(missing_ok=True)


def _measure(attempt: Attempt, report: Report, attempts: int) -> str:
    """Measure one task, again if it dies or is void; note it in `report` and say in words how it went."""
    task = attempt.task
    path = records.path_of(attempt.store, task.cell, task.session)
    reason, unfit = "", ""
    for _ in range(attempts):
        if path.exists():
            set_aside(path, attempt.store)  # the void record of the attempt before
        reason = _session(attempt)
        if not path.exists():  # a session that dies once its record is written has done its work
            reason = reason or "it ended without a record"
            continue
        record = records.load(path)
        if record.outcome == "void":
            reason = "void: " + "; ".join(record.reasons)
            unfit = _unfit(record, attempt.device)
            continue
        report.measured.append(path)
        return _result(record)
    report.failed.append(f"{name(task)} ({reason})")
    report.unfit = unfit
    return f"not measured after {attempts} attempts: {reason}"


def _unfit(record: Record, device: gpus.Device | None) -> str:
    """What about the machine voided this session; empty where it was something of the cell's own."""
    gpu = gpus.identify(device) if device else gpus.CPU
    if record.machine is None:
        return ""
    found = [*gate.voids(record.machine, gpu), fitness.held_by_others(record.machine, gpu)]
    return next((each for each in found if each in record.reasons or each.split("; ")[0] in record.reasons), "")


def _result(record: Record) -> str:
    if record.outcome != "ok":
        return f"{record.outcome}: {'; '.join(record.reasons)}"
    if record.checks and not record.series:
        passed = sum(check.passed for check in record.checks)
        return f"{passed} of {len(record.checks)} arms agree with the reference"
    doubts = steadiness.doubts(record)
    unstable = f", unstable: {doubts[0]}" if doubts else ""
    if len(record.series) > 2:
        return ", ".join(f"{series.arm} {series.step_ms:.2f}" for series in record.series) + f" ms{unstable}"
    ratio = f", {record.pair.ratio:.3f}x" if record.pair else ""
    return f"{record.step_ms:.2f} ms{ratio}{unstable}"


def _session(attempt: Attempt) -> str:
    """Run one session to its end; empty when its record is written, else why not. Raises for a user's mistake."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", attempt.module, "--store", str(attempt.store)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(attempt.device, online=attempt.task.protocol.weights == "hub"),
            start_new_session=True,
        )
        try:
            if process.stdin:
                with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(task_to_json(attempt.task))  # far less than a pipe holds, so nothing waits here
            _wait(process, attempt)
        except subprocess.TimeoutExpired:
            return f"no result within {progress.duration(attempt.deadline_s)}, so it was ended"
        finally:
            _end(process)
        tail = _tail(output)
    if process.returncode == 0:
        return ""
    why = tail.removeprefix(SAID)
    if process.returncode == BadInputError.exit_code and why != tail:
        raise BadInputError(why)
    if process.returncode < 0:
        ended = f"ended by {signal.Signals(-process.returncode).name}"
        return f"{ended} after {why}" if why != tail else ended + _perhaps_memory(process.returncode)
    return f"exit code {process.returncode}: {why}"


def _wait(process: "subprocess.Popen[str]", attempt: Attempt) -> None:
    """Wait for the session's end, saying now and then that it goes on. Raises `TimeoutExpired` at its deadline."""
    began, pause = time.monotonic(), FIRST_WORD_S
    while (left := began + attempt.deadline_s - time.monotonic()) > pause:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=pause)
            return
        attempt.waiting(time.monotonic() - began)
        pause *= 2
    process.wait(timeout=max(left, 0))


def _perhaps_memory(returncode: int) -> str:
    return " (out of host memory?)" if returncode == -signal.SIGKILL else ""


def _end(process: "subprocess.Popen[str]") -> None:
    """End a session's whole process group, however this process leaves it (deadline, Ctrl-C, error)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(output: IO[str]) -> str:
    """The session's own last line, else its last one: with the device lost, libraries warn on after the session's."""
    output.seek(0)
    lines = [text.strip() for text in output.read()[-20_000:].splitlines() if text.strip()]
    own = [text for text in lines if text.startswith(SAID)]
    return (own or lines or ["no message"])[-1][:500]


def environment(device: gpus.Device | None, *, online: bool = False) -> dict[str, str]:
    """The environment of a session: this one, seeing only `device`, and offline unless weights are to be fetched."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.root / "artifact"), env.get("PYTHONPATH")]))
    if not online:
        env["HF_HUB_OFFLINE"] = "1"
    env.update(HF_HUB_DISABLE_TELEMETRY="1", DO_NOT_TRACK="1", TOKENIZERS_PARALLELISM="false")
    env["CUDA_VISIBLE_DEVICES"] = device.uuid if device else ""
    return env
