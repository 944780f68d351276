"""Which GPUs there are: the ones known by name, the ones in this machine, and whether those are the same."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from decodegap import datafile
from decodegap.errors import BadInputError, WrongGpuError
from decodegap.paths import DATA

PeakSource = Literal["datasheet", "derived", "measured"]

CATALOGUE = "gpus.toml"
SLUG = re.compile(r"[a-z0-9][a-z0-9.-]{0,63}")
MEMORY_TOLERANCE = 0.08  # ECC on or off and driver reservations move what NVML reports by a few per cent
BF16_CAPABILITY = (8, 0)  # bf16 tensor paths exist from sm_80 on
# Cores per SM, to turn NVML's core count into SMs. Source: CUDA C++ programming guide, arithmetic throughput table.
CORES_PER_SM = {(7, 0): 64, (7, 5): 64, (8, 0): 64}
DEFAULT_CORES_PER_SM = 128


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: what the tables call it and which peak bandwidth its floors use."""

    slug: str
    label: str
    peak_gb_s: float | None
    peak_source: PeakSource
    paper: bool
    names: tuple[str, ...] = ()
    memory_mib: int | None = None
    sm_count: int | None = None


@dataclass(frozen=True)
class Device:
    """A GPU found in this machine, as NVML describes it. `uuid` stays in memory and is never recorded."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    sm_count: int
    capability: tuple[int, int]
    bus_width_bits: int
    memory_clock_mhz: int
    mig: bool

    def describe(self) -> str:
        """One phrase for messages: name, memory and SMs."""
        slice_note = ", MIG mode on" if self.mig else ""
        return f"{self.name} ({self.memory_mib} MiB, {self.sm_count} SMs{slice_note})"


CPU = Gpu(slug="cpu", label="CPU (stand-ins)", peak_gb_s=None, peak_source="measured", paper=False)


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: str
    names: tuple[str, ...]
    peak_gb_s: float = Field(gt=0, allow_inf_nan=False)
    memory_mib: PositiveInt
    sm_count: PositiveInt
    paper: bool
    source: str


@cache
def catalogue() -> dict[str, Gpu]:
    """The GPUs of `data/gpus.toml` by slug; raise `BadInputError` naming what of it is broken."""
    rows = datafile.load(DATA / CATALOGUE, dict[str, _Row])
    return {
        slug: Gpu(slug, peak_source="datasheet", **row.model_dump(exclude={"source"})) for slug, row in rows.items()
    }


def known(slug: str) -> Gpu:
    """The GPU of the catalogue that data here is about; raise `BadInputError` if it is not there."""
    if slug not in catalogue():
        raise BadInputError(f"{CATALOGUE}: {slug!r} is not in it; git has the one that came with it")
    return catalogue()[slug]


def check_slug(slug: str, where: str = "GPU") -> str:
    """Return `slug` if it is a plain lower-case name; raise `BadInputError` otherwise (no paths, no spaces)."""
    if not SLUG.fullmatch(slug) or ".." in slug:
        raise BadInputError(
            f"{where}: {slug[:80]!r} is not a name; use lower-case letters, digits, '.' and '-', "
            f"for example {where}={'h100' if where == 'GPU' else 'qwen2.5-7b'}"
        )
    return slug


def identify(device: Device) -> Gpu:
    """The kind of GPU that `device` is.

    A device whose name is in the catalogue but whose memory or SM count differs is not that card; like any
    unknown card it gets a slug of its own and a peak derived as 2 x memory clock x bus width / 8.
    """
    for gpu in catalogue().values():
        if device.name in gpu.names and not mismatch(device, gpu):
            return gpu
    return _derived(device)


def mismatch(device: Device, gpu: Gpu) -> str | None:
    """Why `device` is not the card `gpu`, or None if it is."""
    if device.mig:
        return "MIG mode is on, so what runs is a slice of the card"
    if gpu.names and device.name not in gpu.names:
        return f"its name is not {' or '.join(gpu.names)}"
    if gpu.sm_count is not None and device.sm_count != gpu.sm_count:
        return f"it has {device.sm_count} SMs, the {gpu.label} has {gpu.sm_count}"
    if gpu.memory_mib is not None and abs(device.memory_mib / gpu.memory_mib - 1) > MEMORY_TOLERANCE:
        return f"it has {device.memory_mib} MiB, the {gpu.label} has {gpu.memory_mib}"
    return None


def _derived(device: Device) -> Gpu:
    slug = re.sub(r"[^a-z0-9]+", "-", device.name.lower().removeprefix("nvidia ")).strip("-")[:40].strip("-") or "gpu"
    if slug in ("cpu", "auto", *catalogue()) or any(device.name in gpu.names for gpu in catalogue().values()):
        slug += f"-{device.sm_count}sm-{device.memory_mib // 1024}gb"
    # GDDR and HBM move two words a memory-clock cycle as NVML counts it: 2 x 3201 MHz x 6016 bit / 8 = 4.81 TB/s
    # on an H200, whose datasheet says 4.8.
    peak = 2 * device.memory_clock_mhz * 1e6 * device.bus_width_bits / 8 / 1e9
    return Gpu(
        slug=slug,
        label=device.name.removeprefix("NVIDIA "),
        peak_gb_s=round(peak, 1) or None,
        peak_source="derived",
        paper=False,
        names=(device.name,),
        memory_mib=device.memory_mib,
        sm_count=device.sm_count,
    )


def detect() -> list[Device]:
    """The NVIDIA devices this process may use, first the one CUDA would use first; empty without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        found = [_device(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    devices = [device for device in found if device]
    return _visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _visible(devices: list[Device], visible: str | None) -> list[Device]:
    if visible is None:
        return devices
    chosen = []
    for token in (part.strip() for part in visible.split(",")):
        match = [d for d in devices if token in (str(d.index), d.uuid) or (token and d.uuid.startswith(token))]
        if not match:
            break  # CUDA ignores everything from the first invalid entry on
        chosen.append(match[0])
    return chosen


def choose(slug: str, devices: Sequence[Device], extra: Sequence[str] = ()) -> tuple[Gpu, Device | None]:
    """The GPU kind meant by `slug`, and the device here that is one (None if there is none).

    `auto` means the first device, else the CPU; `extra` are slugs that only shipped records know. Raises
    `BadInputError` for a slug that is none of these, nor in the catalogue, nor a device here.
    """
    check_slug(slug)
    if slug == "cpu":
        return CPU, None
    if slug == "auto":
        return (identify(devices[0]), devices[0]) if devices else (CPU, None)
    for device in devices:
        gpu = identify(device)
        if gpu.slug == slug and not mismatch(device, gpu):
            return gpu, device
    if slug in catalogue():
        return catalogue()[slug], None
    if slug in extra:
        return Gpu(slug=slug, label=slug, peak_gb_s=None, peak_source="derived", paper=False), None
    known = ", ".join(["auto", *catalogue(), "cpu"])
    raise BadInputError(f"GPU: no GPU is called {slug!r} here or in the catalogue; known are {known}")


def require(slug: str, devices: Sequence[Device]) -> tuple[Gpu, Device | None]:
    """Like `choose`, but raise `WrongGpuError` unless what was asked for is really here and able to run bf16."""
    gpu, device = choose(slug, devices)
    if gpu.slug == "cpu":
        return gpu, None
    if device is None:
        raise WrongGpuError(f"GPU={slug} cannot be measured here: {absence(gpu, devices)}")
    if device.mig:
        raise WrongGpuError(f"{device.describe()}: a MIG slice is not the card; switch to a whole GPU to measure")
    if device.capability < BF16_CAPABILITY:
        raise WrongGpuError(f"{device.describe()} is sm_{device.capability[0]}{device.capability[1]}; bf16 needs sm_80")
    return gpu, device


def absence(gpu: Gpu, devices: Sequence[Device]) -> str:
    """Why there is no `gpu` among `devices`, in one phrase."""
    if not devices:
        return "no NVIDIA GPU was found (no driver, or none visible)"
    named = [d for d in devices if d.name in gpu.names]
    return "; ".join(f"{d.describe()} is not the {gpu.label}: {mismatch(d, gpu)}" for d in (named or devices))


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised, or None where there is no driver. NVML works without torch."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _device(nvml: Any, index: int) -> Device | None:
    """What NVML says of the device, 0 for a number it does not report; None if the device has fallen off the bus."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid, name = str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle))
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    except nvml.NVMLError:
        return None

    def ask(function: str, *args: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *args)
        except nvml.NVMLError:
            return None  # the card does not report it

    cores = ask("nvmlDeviceGetNumGpuCores") or 0
    mig = ask("nvmlDeviceGetMigMode")
    memory = ask("nvmlDeviceGetMemoryInfo")  # cards that share the host's memory have none of their own to report
    return Device(
        index=index,
        uuid=uuid,
        name=name,
        memory_mib=int(memory.total) // 2**20 if memory else 0,
        sm_count=cores // CORES_PER_SM.get(capability, DEFAULT_CORES_PER_SM),
        capability=(int(capability[0]), int(capability[1])),
        bus_width_bits=int(ask("nvmlDeviceGetMemoryBusWidth") or 0),
        memory_clock_mhz=int(ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM) or 0),
        mig=bool(mig and mig[0]),
    )
