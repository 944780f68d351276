"""`make doctor`: is this the machine to measure on? What was found, one line a danger, and the verdict."""

import importlib.util
import os
from pathlib import Path

from decodegap import fitness, gate, gpus, machine, plan
from decodegap.fitness import Finding
from decodegap.gpus import Device, Gpu
from decodegap.schema import Machine

MIB = 2**20
FIT, UNFIT, WRONG = 0, 1, 2
NO_CUDA = Finding(
    "torch",
    "void",
    "torch cannot start CUDA, although the driver lists the card",
    "nothing would run on the card",
    "see whether driver and torch fit, and whether this container was given the card's device files",
)


def doctor(gpu_slug: str, store: Path) -> tuple[list[str], int]:
    """The lines to print for `make doctor GPU=gpu_slug`, and the exit code: 0 fit, 1 not fit, 2 another card.

    Looks at the machine first and probes its speed (about 3 s) only if nothing speaks against measuring. Changes no
    setting. Raises `BadInputError` for an unknown slug, `StoreError` if `store` cannot be written.
    """
    devices = gpus.detect()
    gpu, device = gpus.choose(gpu_slug, devices)
    if gpu.slug != "cpu" and device is None:
        reason = gpus.absence(gpu, devices)
        return [f"asked for: GPU={gpu_slug}, {gpu.label}", f"not fit: it cannot be measured here: {reason}"], WRONG
    lines = [f"asked for: GPU={gpu_slug}, {gpu.label}{_peak(gpu)}"]
    seen = gate.look(device, store)
    lines += _describe(seen, device)
    needs = gate.needs(plan.baseline(plan.request(gpu=gpu.slug), gpu.slug), gpu, store)
    found = fitness.findings(seen, gpu, needs)
    if any(finding.level == "void" for finding in found):
        lines.append("speed: not probed, because of what follows")
    elif importlib.util.find_spec("torch") is None:
        lines.append("speed: not probed, torch is not installed here (make measure installs it)")
    elif device and not _cuda_starts(device):
        lines.append("speed: not probed, because of what follows")
        found.insert(0, NO_CUDA)
    else:
        seen = _probed(seen, device)
        lines.append(f"speed: reads {seen.read_gb_s:.1f} GB/s with {seen.read_kernel} over {seen.read_buffer_mib} MiB")
        lines.append(f"speed: a tiny kernel takes the host {seen.dispatch_us} µs, spread {seen.dispatch_us_spread} µs")
        found = fitness.findings(seen, gpu, needs)
    return [*lines, *(finding.line() for finding in found), _verdict(found)], _code(found)


def _describe(seen: Machine, device: Device | None) -> list[str]:
    lines = []
    if device:
        software = f"driver {seen.driver or 'unknown'}, CUDA up to {seen.cuda or 'unknown'}"
        lines.append(f"found: {device.describe()}, sm_{device.capability[0]}{device.capability[1]}, {software}")
    quota = f", quota {seen.cpu_quota_cores:g} cores" if seen.cpu_quota_cores else ""
    cache = f", last-level cache {seen.last_level_cache_mib:g} MiB" if seen.last_level_cache_mib else ""
    lines.append(
        f"host: {seen.cpu_model}, {seen.cores} core(s){quota}, {seen.host_memory_mib} MiB{cache}, "
        f"governor {seen.governor or 'not visible'}, container {seen.container or 'none seen'}, tag {seen.host_tag}"
    )
    return lines


def _peak(gpu: Gpu) -> str:
    if gpu.peak_gb_s is None:
        return ", its peak is the read bandwidth measured here"
    return f", peak {gpu.peak_gb_s:g} GB/s ({gpu.peak_source})"


def _cuda_starts(device: Device) -> bool:
    os.environ["CUDA_VISIBLE_DEVICES"] = device.uuid  # CUDA counts devices in another order than NVML
    import torch

    return torch.cuda.is_available()


def _probed(seen: Machine, device: Device | None) -> Machine:
    from decodegap import probes

    target = "cuda" if device else "cpu"
    before = machine.state(device)
    read = probes.read_bandwidth(target, int((seen.last_level_cache_mib or 32) * MIB))
    after = machine.state(device)
    dispatch = probes.dispatch_cost(target)
    return seen.model_copy(
        update={
            "before": before,
            "after": after,
            "read_gb_s": read.gb_s,
            "read_kernel": read.kernel,
            "read_buffer_mib": read.buffer_mib,
            "dispatch_us": dispatch.us,
            "dispatch_us_spread": dispatch.spread_us,
        }
    )


def _verdict(found: list[Finding]) -> str:
    voids = sum(finding.level == "void" for finding in found)
    flags = len(found) - voids
    if voids:
        return f"not fit: {voids} finding(s) would void every session"
    return f"fit to measure, with {flags} flag(s) that go into every record" if flags else "fit to measure"


def _code(found: list[Finding]) -> int:
    return UNFIT if any(finding.level == "void" for finding in found) else FIT
