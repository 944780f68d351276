"""Before the first session of a run: would every session be void here? Then say so once, instead of in each."""

import importlib.util
import runpy
import shutil
from collections.abc import Sequence
from pathlib import Path

import psutil

from decodegap import fitness, machine, models
from decodegap.errors import UnsupportedError
from decodegap.fitness import Needs
from decodegap.gpus import Device, Gpu
from decodegap.plan import Task
from decodegap.schema import Machine

MIB = 2**20
RECORDS_DISK_MIB = 64  # a plan's records, tables and figures take a few MiB
# Beside weights and KV: torch's own context and workspaces, and one layer's KV copied when the cache grows.
SLACK_MIB = 1536


def check(tasks: Sequence[Task], gpu: Gpu, device: Device | None, store: Path) -> None:
    """Raise `UnsupportedError` in one line if something about this machine would void every session of `tasks`.

    Looks, and changes nothing; takes some milliseconds. What comes and goes while a run lasts is found by each session.
    """
    refuse(voids(look(device, store), gpu, needs(tasks, gpu, store)), gpu)


def refuse(found: Sequence[str], gpu: Gpu) -> None:
    """Raise `UnsupportedError` naming the first of `found`, if there is any."""
    if found:
        more = f" ({len(found) - 1} more: make doctor GPU={gpu.slug})" if len(found) > 1 else ""
        raise UnsupportedError(f"not measured, every session would be void: {found[0]}{more}")


def look(device: Device | None, store: Path) -> Machine:
    """This machine as it stands, its speed not probed. Raises `StoreError` if `store` cannot keep the tag's salt."""
    idle = machine.state(device)
    return Machine(
        **machine.describe(device, store),
        idle=idle,
        before=idle,
        after=None,
        read_gb_s=None,
        read_kernel=None,
        read_buffer_mib=None,
        dispatch_us=None,
        dispatch_us_spread=None,
    )


def voids(seen: Machine, gpu: Gpu, wanted: Needs = fitness.NO_NEEDS) -> list[str]:
    """What about the machine breaks a measurement, each with what to do."""
    return [f"{each.what}; {each.do}" for each in fitness.findings(seen, gpu, wanted) if each.level == "void"]


def needs(tasks: Sequence[Task], gpu: Gpu, store: Path) -> Needs:
    """What `tasks` take at their largest, and what disk, memory and the installed torch offer."""
    largest = max(
        models.lookup(task.cell.model).weight_bytes(task.cell.dtype)
        + models.lookup(task.cell.model).kv_bytes(task.cell.ctx, task.cell.dtype)
        for task in tasks
    )
    need_mib = largest // MIB + SLACK_MIB
    on_cpu = gpu.slug == "cpu"
    folder = next(path for path in (store, *store.parents) if path.exists())
    return Needs(
        device_memory_mib=None if on_cpu else need_mib,
        host_memory_mib=need_mib if on_cpu else None,
        host_free_mib=psutil.virtual_memory().available // MIB,
        disk_mib=RECORDS_DISK_MIB,
        disk_free_mib=shutil.disk_usage(folder).free // MIB,
        torch_cuda=None if on_cpu else torch_cuda(),
    )


def torch_cuda() -> str | None:
    """The CUDA version that the installed torch is built for, "" for a build without CUDA, None without torch.

    Read from torch's own version module alone: importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    told = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return told.get("cuda") or ""
