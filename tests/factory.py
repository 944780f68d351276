"""Records that no machine measured, valid in every field, for tests only."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from decodegap import anatomy, floor, gpus, ledger, models, plan, records, stats
from decodegap.paths import HERE, Places
from decodegap.schema import (
    Anatomy,
    Attestation,
    ByteCounts,
    Cell,
    Check,
    DeviceState,
    EmptyKernels,
    Floors,
    Machine,
    OperatorTime,
    Pair,
    Protocol,
    Ran,
    Record,
    Series,
)

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


def pair(ratio: float, *, graph_ms: float = 7.0, second: str = "graph", equal: bool = True, **changes: Any) -> Record:
    """One A/B session with this ratio; `equal` is whether it is attested as the same work."""
    steps = {"eager-pinned": ratio * graph_ms, second: graph_ms}
    where = {name: changes[name] for name in ("gpu", "model", "ctx", "read_gb_s") if name in changes}
    seen = Attestation(
        reference="eager-pinned", arm=second, outputs_equal=equal, max_abs_difference=0.0 if equal else 2e-6,
        reference_spread=0.0, outputs_changed=True, kernels_equal=equal,
        kernels_differing={} if equal else {"fused": [0, 3]},
    )  # fmt: skip
    found = record(arm="ab" if second == "graph" else f"ab-{second}", experiment="graphs", arms=steps, **changes)
    return rehashed(
        found,
        pair=Pair(first="eager-pinned", second=second, order="ABBA", ratio=ratio),
        attestations=[seen],
        anatomy=[dissection(name, step_ms, **where) for name, step_ms in steps.items()],
    )


def single(arm: str, step_ms: float, **changes: Any) -> Record:
    """One session of another arm of the launch experiment, with its anatomy."""
    where = {name: changes[name] for name in ("gpu", "model", "ctx", "read_gb_s") if name in changes}
    found = record(arm=arm, step_ms=step_ms, experiment="graphs", **changes)
    return rehashed(found, anatomy=[dissection(arm, step_ms, **where)])


def passed(arm: str) -> Check:
    return Check(
        arm=arm, error=0.03, eager_error=0.05, allowed_multiple=1.5, argmax_equal=True, reference_margin=0.2,
        passed=True,
    )  # fmt: skip


def checked(errors: dict[str, float], **changes: Any) -> Record:
    """The session that holds each arm of `errors` against the reference; eager's own error is 0.05."""
    checks = [
        Check(
            arm=arm, error=error, eager_error=0.05, allowed_multiple=1.5, argmax_equal=True, reference_margin=0.2,
            passed=error <= 0.075,
        )
        for arm, error in errors.items()
    ]  # fmt: skip
    found = record(arm=plan.CHECK, experiment="graphs", **changes)
    return rehashed(found, checks=checks, series=[], step_ms=None, ran=None)


def rehashed(found: Record, **changes: Any) -> Record:
    """`found` with these fields replaced, and its content hash made anew."""
    changed = found.model_copy(update=changes)
    return changed.model_copy(update={"content_hash": records.content_hash(changed.model_dump(mode="json"))})


def dissection(
    arm: str, step_ms: float, *, gpu: str = "h200", model: str = "qwen2.5-7b", ctx: int = 2048, read_gb_s: float = 4320
) -> Anatomy:
    """An anatomy whose parts leave 2% of `step_ms`; an eager arm's host is exposed, any other's is not."""
    known, device = models.lookup(model), gpu != "cpu"
    layers = int(known.config["num_hidden_layers"])
    counts = ledger.ledger(known.config, ctx, arm, 2 if device else 4)
    ledger_ms = {item: floor.floor_ms(n, read_gb_s) for item, n in counts.items()}
    launches = {"aten::linear": 7 * layers, "aten::scaled_dot_product_attention": layers, "aten::mul": 30 * layers}
    eager = arm.startswith("eager") and device
    bubbles_ms = 0.25e-3 * (sum(launches.values()) - 1) if device else 0.0
    busy_ms = 6.0 if eager else 0.98 * step_ms - bubbles_ms
    exposed_ms = 0.98 * step_ms - busy_ms - bubbles_ms if eager else 0.0
    owned = {"aten::linear": ledger.WEIGHTS, "aten::scaled_dot_product_attention": ledger.KV_READ}
    own_ms = {name: 1.2 * ledger_ms[item] for name, item in owned.items()}
    operators = {
        name: OperatorTime(
            launches=n, ms=own_ms.get(name, busy_ms - sum(own_ms.values())), bytes=counts.get(owned.get(name, ""), 0)
        )
        for name, n in launches.items()
    }
    parts = (
        ledger_ms[ledger.WEIGHTS] + ledger_ms[ledger.KV_READ],
        sum(ledger_ms[item] for item in ledger.EXTRA_ITEMS),
        busy_ms - sum(ledger_ms.values()),
        bubbles_ms,
        exposed_ms,
    )
    return Anatomy(
        arm=arm, profiled_steps=3, launches=sum(launches.values()), operators=operators, busy_ms=busy_ms,
        kernel_ms=busy_ms, bubbles_ms=bubbles_ms, gap_us=0.25, enqueue_ms=0.97 * step_ms if eager else 0.02,
        exposed_host_ms=exposed_ms, profiled_step_ms=1.4 * step_ms, ledger_bytes=counts, ledger_ms=ledger_ms,
        parts_ms=dict(zip(anatomy.PARTS, parts, strict=True)), residual_ms=step_ms - sum(parts), step_ms=step_ms,
        source="device" if device else "host", idle_ms=bubbles_ms,
        empty_kernels=EmptyKernels(period_us=1.2, kernel_us=0.9, between_us=0.25) if device else None,
    )  # fmt: skip


def checkout(root: Path, *, shipped: bool = False) -> Places:
    """A checkout at `root` with the study's numbers and the claims, and with the records of this one or with none."""
    at = Places(root)
    if shipped and HERE.results.is_dir():
        shutil.copytree(HERE.results, at.results, ignore=shutil.ignore_patterns("local"))
    shutil.copytree(HERE.published.parent, at.published.parent)
    shutil.copyfile(HERE.claims, at.claims)
    return at


def named(tasks: Iterable[plan.Task]) -> list[tuple[str, int, str, int]]:
    """The model, context, arm and session of each task."""
    return [(task.cell.model, task.cell.ctx, task.cell.arm, task.session) for task in tasks]


def write(found: Iterable[Record], store: Path) -> list[Path]:
    """Write records below `store` as a session would, and vouch for them as `publish` does where they ship."""
    paths = [records.write(item, store) for item in found]
    if store.name == "results":
        for base in {path.parents[1] for path in paths}:
            (base / records.MANIFEST).write_text(records.manifest_text(store, base.name), encoding="utf-8")
    return paths
