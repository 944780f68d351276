"""One fresh process: run one cell, write one record (`python -m decodegap.session`, the task on standard input)."""

import argparse
import ctypes
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from decodegap import fitness, floor, gpus, host, machine, models, records, sources
from decodegap.errors import DecodeGapError, WrongGpuError
from decodegap.plan import Task, task_from_json
from decodegap.schema import (
    Anatomy,
    Attestation,
    ByteCounts,
    Check,
    DeviceState,
    Floors,
    Machine,
    Outcome,
    Pair,
    Projection,
    Quantised,
    Ran,
    Record,
    Series,
)

if TYPE_CHECKING:
    from decodegap.probes import DispatchProbe, ReadProbe

CACHE_MULTIPLE = 3  # weights below this many last-level caches stay partly cached, so the floor does not bind
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# How drivers, Triton, cuBLAS and cuDNN say it: on a card that is full, not even a context or a handle can be made.
OUT_OF_MEMORY = re.compile(r"out of memory|_STATUS_ALLOC_FAILED")
# What transformers imports if it happens to be installed and a decode never uses. Hidden, a session starts seconds
# sooner, and the same code runs in every environment.
NOT_USED = (
    *("accelerate", "cv2", "flax", "jax", "librosa", "matplotlib", "numba", "onnx", "onnxruntime", "optax", "pandas"),
    *("peft", "PIL", "pyarrow", "scipy", "sentencepiece", "sklearn", "soundfile", "tensorboard", "tensorflow"),
    *("tiktoken", "timm", "torchaudio", "torchvision"),
)


@dataclass
class Findings:
    """What a session learns on its way; whatever is known when it ends goes into the record."""

    durations_s: dict[str, float] = field(default_factory=dict)
    outcome: Outcome = "ok"
    reasons: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    ran: Ran | None = None
    pair: Pair | None = None
    attestations: list[Attestation] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    anatomy: list[Anatomy] = field(default_factory=list)
    quantised: Quantised | None = None
    projections: list[Projection] = field(default_factory=list)
    idle: DeviceState | None = None  # before this process starts CUDA: what is there then is others'
    before: DeviceState | None = None
    after: DeviceState | None = None
    read: "ReadProbe | None" = None
    dispatch: "DispatchProbe | None" = None
    machine: Machine | None = None
    peak_memory_bytes: int | None = None
    bytes_asked: int | None = None

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record how long `phase` takes, in seconds, however it ends."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.durations_s[phase] = round(time.monotonic() - start, 4)

    def void(self, reason: str) -> None:
        """Say that what was measured cannot be believed, and why."""
        self.outcome = "void"
        self.reasons.append(reason)


def run(task: Task, store: Path) -> Record:
    """Measure `task` in this process and return its record (not yet written).

    Out of memory becomes an `oom` record with the bytes asked for. Raises `DecodeGapError` for what no repetition
    would mend: the wrong card, weights that cannot be loaded.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    found = Findings()
    gpu, device = gpus.require(task.cell.gpu, gpus.detect())
    if gpu.slug != task.cell.gpu:
        raise WrongGpuError(f"the task is for {task.cell.gpu}, this process sees {gpu.slug}")
    found.idle = machine.state(device)
    with found.timed("import"):
        from decodegap import decode  # noqa: F401  (torch and transformers' model code load here, once)
    target = "cuda" if device else "cpu"
    try:
        _measure(task, device, target, store, found)
    except (MemoryError, RuntimeError) as error:
        asked = _bytes_asked(str(error))
        if not isinstance(error, MemoryError) and asked is None and not OUT_OF_MEMORY.search(str(error)):
            raise
        found.outcome, found.bytes_asked = "oom", asked
        found.reasons.append(f"out of {'device' if device else 'host'} memory: {_one_line(error)}")
        found.series.clear()
    found.machine = _machine(device, store, found)
    return _record(task, gpu, started_at, found)


def _measure(task: Task, device: gpus.Device | None, target: str, store: Path, found: Findings) -> None:
    """Probe, build and prefill, then measure as the cell's arm says; everything learnt is left in `found`."""
    import torch

    from decodegap import arms, cells, probes, quant_cells

    with found.timed("probe"):
        found.read = probes.read_bandwidth(target, int((host.last_level_cache_mib() or 32) * 2**20))
        found.dispatch = probes.dispatch_cost(target)
    if target == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with torch.inference_mode():
        with found.timed("build"):
            net = arms.built(task, target)
        with found.timed("prefill"):
            setup = arms.prefilled(net, task, target)
        measuring = quant_cells if task.cell.experiment == "quantised" else cells
        measuring.measure(task, setup, device, store, found)
    found.peak_memory_bytes = torch.cuda.max_memory_allocated() if target == "cuda" else host.peak_rss_bytes()


def _machine(device: gpus.Device | None, store: Path, found: Findings) -> Machine:
    return Machine(
        **machine.describe(device, store),
        idle=found.idle,
        before=found.before,
        after=found.after,
        read_gb_s=found.read.gb_s if found.read else None,
        read_kernel=found.read.kernel if found.read else None,
        read_buffer_mib=found.read.buffer_mib if found.read else None,
        dispatch_us=found.dispatch.us if found.dispatch else None,
        dispatch_us_spread=found.dispatch.spread_us if found.dispatch else None,
    )


def _judge(seen: Machine, gpu: gpus.Gpu, counts: ByteCounts, found: Findings) -> None:
    """Turn what the machine was like into flags, or into a void session."""
    if seen.last_level_cache_mib and counts.weights_streamed < CACHE_MULTIPLE * seen.last_level_cache_mib * 2**20:
        found.flags.append(
            f"the floor does not apply: {counts.weights_streamed // 2**20} MiB of weights are less than "
            f"{CACHE_MULTIPLE} x the last-level cache of {seen.last_level_cache_mib:.0f} MiB"
        )
    if found.outcome == "oom" and (others := fitness.held_by_others(seen, gpu)):
        found.void(others)
    for finding in fitness.findings(seen, gpu):
        if finding.level == "void" and found.outcome in ("ok", "oom"):
            found.void(finding.what)
        else:
            found.flags.append(finding.what)


def _record(task: Task, gpu: gpus.Gpu, started_at: str, found: Findings) -> Record:
    cell = task.cell
    model = models.lookup(cell.model)
    read_gb_s = found.read.gb_s if found.read else None
    peak_gb_s = gpu.peak_gb_s or read_gb_s
    counts = _counts(task, found)
    if found.machine is not None:
        _judge(found.machine, gpu, counts, found)
    return Record(
        cell=cell,
        session=task.session,
        protocol=task.protocol,
        protocol_hash=task.protocol.digest(),
        outcome=found.outcome,
        reasons=found.reasons,
        flags=found.flags,
        series=found.series,
        ran=found.ran,
        step_ms=found.series[0].step_ms if found.series else None,
        pair=found.pair,
        attestations=found.attestations,
        checks=found.checks,
        refused=found.refused,
        anatomy=found.anatomy,
        quantised=found.quantised,
        projections=found.projections,
        bytes=counts,
        floors_ms=_floors(counts, peak_gb_s, read_gb_s),
        peak_gb_s=peak_gb_s,
        peak_source=gpu.peak_source,
        machine=found.machine,
        versions=sources.versions(),
        source_hash=sources.source_hash(),
        commit=sources.commit(),
        started_at=started_at,
        durations_s=found.durations_s,
        peak_memory_bytes=found.peak_memory_bytes,
        bytes_asked=found.bytes_asked,
        stand_in=model.role != "paper",
    )


def _counts(task: Task, found: Findings) -> ByteCounts:
    """The bytes that the floors are made of: by the model's config, or as really held on a quantised path."""
    model, cell, held = models.lookup(task.cell.model), task.cell, found.quantised
    streamed = held.packed + held.kept if held else model.streamed_bytes(cell.dtype)
    return ByteCounts(
        weights_all=streamed + held.table if held else model.weight_bytes(cell.dtype),
        weights_streamed=streamed,
        kv=model.kv_bytes(cell.ctx, cell.dtype),
    )


def _floors(counts: ByteCounts, peak_gb_s: float | None, read_gb_s: float | None) -> Floors:
    everything, streamed = counts.weights_all + counts.kv, counts.weights_streamed + counts.kv
    return Floors(
        published=floor.floor_ms(everything, peak_gb_s) if peak_gb_s else None,
        streamed=floor.floor_ms(streamed, peak_gb_s) if peak_gb_s else None,
        achievable=floor.floor_ms(streamed, read_gb_s) if read_gb_s else None,
    )


def _bytes_asked(message: str) -> int | None:
    """Bytes that a failed allocation asked for, from torch's own wording; None if it is another failure."""
    if match := re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message):
        return round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]])
    return None


def _one_line(error: BaseException) -> str:
    text = str(error)
    if text.startswith("CUDA error: "):  # what follows is torch's advice on finding it, a line each
        text = text.partition("\n")[0]
    return " ".join(text.split())[:300]


def _die_with_parent() -> None:
    """End this process when its parent ends, so that no orphan keeps measuring (Linux only)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this session is gone")


def main(measure: Callable[[Task, Path], Record] = run) -> int:
    """Run the task on standard input; 0 when its record is written, 2 with one line for a user's mistake.

    1 for anything else, with a traceback for whoever runs a session by hand, and then one line for the runner.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="folder that local records go to")
    args = parser.parse_args()
    _die_with_parent()
    for package in NOT_USED:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  # None is how Python marks a blocked import
    try:
        records.write(measure(task_from_json(sys.stdin.read()), args.store), args.store)
    except DecodeGapError as error:
        print(f"decode-gap: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # noqa: BLE001  (whatever it is, it ends this process and no other)
        traceback.print_exc()
        print(f"decode-gap: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
