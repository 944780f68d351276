"""Records that no machine measured, valid in every field, for tests only."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decodegap import floor, gpus, models, plan, records, stats
from decodegap.records import ByteCounts, Cell, DeviceState, Floors, Machine, Protocol, Ran, Record, Series

HOST = "a1b2c3d4e5f60718"
GIB = 2**30


def record(
    *,
    gpu: str = "h200",
    model: str = "qwen2.5-7b",
    ctx: int = 2048,
    arm: str = "eager",
    session: int = 1,
    step_ms: float = 17.5,
    outcome: str = "ok",
    reasons: Iterable[str] = (),
    flags: Iterable[str] = (),
    host: str = HOST,
    read_gb_s: float | None = None,
    cache_mib: float | None = None,
    protocol: Protocol | None = None,
    experiment: str = "baseline",
    started_at: str = "2026-06-01T12:00:00Z",
    arms: dict[str, float] | None = None,
    **changes: Any,
) -> Record:
    """One valid record. `arms` gives several arms with a step each (an A/B); `changes` replaces whole fields."""
    cpu = gpu == "cpu"
    known = models.lookup(model)
    card = gpus.CPU if cpu else gpus.catalogue().get(gpu)
    dtype = plan.dtype_on(gpu)
    protocol = protocol or plan.protocol(gpu, "synthetic", "normal-0.02-v1")
    read_gb_s = read_gb_s if read_gb_s is not None else (12.0 if cpu else 0.9 * ((card and card.peak_gb_s) or 1000.0))
    peak_gb_s = read_gb_s if cpu else ((card and card.peak_gb_s) or 1000.0)
    counts = ByteCounts(
        weights_all=known.weight_bytes(dtype),
        weights_streamed=known.streamed_bytes(dtype),
        kv=known.kv_bytes(ctx, dtype),
    )
    ok = outcome == "ok"
    steps = arms or {arm: step_ms}
    fields: dict[str, Any] = {
        "cell": Cell(
            gpu=gpu, experiment=experiment, model=model, ctx=ctx, arm=arm, dtype=dtype, sdpa="auto" if cpu else "flash"
        ),
        "session": session,
        "protocol": protocol,
        "protocol_hash": protocol.digest(),
        "outcome": outcome,
        "reasons": list(reasons),
        "flags": list(flags),
        "series": [series(name, value, protocol, device=not cpu) for name, value in steps.items()] if ok else [],
        "ran": Ran(sdpa="flash", evidence="profiler", kernels={"flash_fwd": 28, "gemv": 196}) if ok else None,
        "step_ms": next(iter(steps.values())) if ok else None,
        "bytes": counts,
        "floors_ms": Floors(
            published=floor.floor_ms(counts.weights_all + counts.kv, peak_gb_s),
            streamed=floor.floor_ms(counts.weights_streamed + counts.kv, peak_gb_s),
            achievable=floor.floor_ms(counts.weights_streamed + counts.kv, read_gb_s),
        ),
        "peak_gb_s": peak_gb_s,
        "peak_source": "measured" if cpu else ("datasheet" if card else "derived"),
        "machine": machine(gpu, host=host, read_gb_s=read_gb_s, cache_mib=cache_mib),
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "source_hash": "0" * 16,
        "commit": None,
        "started_at": started_at,
        "durations_s": {"import": 4.0, "measure": 2.0},
        "peak_memory_bytes": 16 * GIB if ok else None,
        "bytes_asked": None,
        "stand_in": known.role == "stand-in",
    }
    found = Record(**(fields | changes))
    return found.model_copy(update={"content_hash": records.content_hash(found.model_dump(mode="json"))})


def series(arm: str, step_ms: float, protocol: Protocol, *, device: bool) -> Series:
    """Samples around `step_ms`, symmetric so that it is their median, with the slow last step that is common."""
    n = protocol.measured_steps
    wall = [step_ms * (1 + 0.01 * (i - (n - 1) / 2) / n) for i in range(n)]
    wall[-1] *= 1.2
    return Series(
        arm=arm,
        wall_ms=wall,
        enqueue_ms=[value * 0.9 for value in wall],
        event_ms=[value * 0.98 for value in wall] if device else None,
        free_steps=protocol.free_steps,
        free_total_ms=step_ms * 0.9 * protocol.free_steps,
        step_ms=stats.median(wall),
        energy_steps=100 if device else None,
        energy_j_per_step=6.5 if device else None,
    )


def machine(gpu: str, *, host: str = HOST, read_gb_s: float | None = 4300.0, cache_mib: float | None = None) -> Machine:
    """A machine with this GPU; `host` is its tag."""
    cpu = gpu == "cpu"
    card = gpus.catalogue().get(gpu)
    state = None if cpu else DeviceState(
        sm_clock_mhz=1965, memory_clock_mhz=3201, temperature_c=45, power_w=300.0, throttle_reasons=[],
        memory_used_mib=16000, utilisation_percent=50, other_processes=0,
    )  # fmt: skip
    return Machine(
        device_name="CPU" if cpu else (card.names[0] if card else "NVIDIA Test Card"),
        memory_mib=16000 if cpu else ((card and card.memory_mib) or 24000),
        sm_count=None if cpu else 132,
        capability=None if cpu else "9.0",
        bus_width_bits=None if cpu else 6016,
        max_memory_clock_mhz=None if cpu else 3201,
        driver=None if cpu else "580.00",
        cuda=None if cpu else "13.0",
        ecc=None if cpu else True,
        mig=None if cpu else False,
        persistence=None if cpu else True,
        power_cap_w=None if cpu else 700.0,
        power_cap_default_w=None if cpu else 700.0,
        cpu_model="Test CPU",
        cores=16,
        host_memory_mib=128000,
        last_level_cache_mib=cache_mib if cache_mib is not None else (32.0 if cpu else None),
        governor=None,
        load_1min=0.1,
        cpu_quota_cores=None,
        container=None,
        host_tag=host,
        before=state,
        after=state,
        read_gb_s=read_gb_s,
        read_kernel="sum",
        read_buffer_mib=1024,
        dispatch_us=1.5 if cpu else 8.0,
        dispatch_us_spread=0.2,
    )


def grid(
    gpu: str = "h200", *, sessions: int = 3, host: str = HOST, factor: float = 1.0, **changes: Any
) -> list[Record]:
    """The whole baseline grid of `gpu`, steps differing a little from session to session; `factor` scales them."""
    tasks = plan.baseline(plan.request(gpu=gpu, sessions=sessions), gpu)
    found = []
    for task in tasks:
        known = models.lookup(task.cell.model)
        gigabytes = (known.weight_bytes(task.cell.dtype) + known.kv_bytes(task.cell.ctx, task.cell.dtype)) / 1e9
        # about 16 ms of host time on a GPU; on a CPU two thirds of the 12 GB/s that `record` says it reads
        step_ms = factor * (125.0 * gigabytes if gpu == "cpu" else 16.0 + 0.3 * gigabytes)
        found.append(
            record(
                gpu=gpu, model=task.cell.model, ctx=task.cell.ctx, session=task.session, host=host,
                step_ms=step_ms * (1 + 0.013 * ((task.session * 7) % 5 - 2)),
                started_at=f"2026-06-01T12:{task.session:02d}:00Z", **changes,
            )
        )  # fmt: skip
    return found


def write(found: Iterable[Record], store: Path) -> list[Path]:
    """Write records below `store` as a session would."""
    return [records.write(item, store) for item in found]
