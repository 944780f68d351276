"""What this machine is and what state it is in, asked of NVML and the system; nothing here names the host.

Every question may go unanswered (a card that does not report it, a container that hides it) and is then None.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from decodegap import host
from decodegap.gpus import Device
from decodegap.schema import DeviceState

# A CUDA context alone takes some hundreds of MiB, an idle card's own bookkeeping far less. More than this, listed
# for nobody, is a process that the container hides.
HIDDEN_PROCESS_MIB = 200
# Bits of nvmlDeviceGetCurrentClocksEventReasons. Source: nvml.h, nvmlClocksEventReason*.
REASONS = {
    0x001: "idle",
    0x002: "application clocks setting",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}
UNREPORTED = "not reported"


def describe(device: Device | None, store: Path) -> dict[str, Any]:
    """Every fixed field of `schema.Machine`, by name; `device` None means that the CPU is measured.

    `store` keeps the salt of the host tag. Raises `StoreError` if the salt can be neither read nor made there.
    """
    return {
        **(_card(device) if device else _no_card()),
        **host.facts(),
        "host_tag": host.tag(device.uuid if device else "", store),
    }


def state(device: Device | None) -> DeviceState | None:
    """What moves on the device, as it is now (a few ms); None on a CPU."""
    handle = _handle(device)
    if handle is None:
        return None
    nvml = _library()
    used_mib = _used_mib(handle)
    utilisation = _ask(handle, "nvmlDeviceGetUtilizationRates")
    return DeviceState(
        sm_clock_mhz=_ask(handle, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=_ask(handle, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        temperature_c=_ask(handle, "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=_watts(_ask(handle, "nvmlDeviceGetPowerUsage")),
        throttle_reasons=_reasons(handle),
        memory_used_mib=used_mib,
        utilisation_percent=None if utilisation is None else int(utilisation.gpu),
        other_processes=_other_processes(handle, used_mib),
        ecc_uncorrected=_ask(
            handle,
            "nvmlDeviceGetTotalEccErrors",
            nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            nvml.NVML_VOLATILE_ECC,
        ),
    )


def energy_mj(device: Device | None) -> int | None:
    """The card's energy counter in millijoules since the driver was loaded; None where there is none."""
    answer = _ask(_handle(device), "nvmlDeviceGetTotalEnergyConsumption")
    return None if answer is None else int(answer)


def _card(device: Device) -> dict[str, Any]:
    handle = _handle(device)
    ecc, persistence = _ask(handle, "nvmlDeviceGetEccMode"), _ask(handle, "nvmlDeviceGetPersistenceMode")
    cuda = _ask_system("nvmlSystemGetCudaDriverVersion_v2") or _ask_system("nvmlSystemGetCudaDriverVersion")
    return {
        "device_name": device.name,
        "memory_mib": device.memory_mib,
        "sm_count": device.sm_count or None,
        "capability": f"{device.capability[0]}.{device.capability[1]}",
        "bus_width_bits": device.bus_width_bits or None,
        "max_memory_clock_mhz": device.memory_clock_mhz or None,
        "driver": _ask_system("nvmlSystemGetDriverVersion"),
        "cuda": None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        "ecc": None if ecc is None else bool(ecc[0]),
        "mig": device.mig,
        "persistence": None if persistence is None else bool(persistence),
        "power_cap_w": _watts(_ask(handle, "nvmlDeviceGetEnforcedPowerLimit")),
        "power_cap_default_w": _watts(_ask(handle, "nvmlDeviceGetPowerManagementDefaultLimit")),
    }


def _no_card() -> dict[str, Any]:
    unknown = ("sm_count", "capability", "bus_width_bits", "max_memory_clock_mhz", "driver", "cuda", "ecc", "mig")
    return {
        "device_name": host.cpu_model(),
        "memory_mib": psutil.virtual_memory().total // 2**20,
        **dict.fromkeys((*unknown, "persistence", "power_cap_w", "power_cap_default_w")),
    }


@cache
def _library() -> Any:
    """NVML, initialised once a process, or None where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handle(device: Device | None) -> Any:
    return None if device is None else _handle_of(device.uuid)


@cache
def _handle_of(uuid: str) -> Any:
    nvml = _library()
    try:
        return None if nvml is None else nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError:
        return None


def _ask(handle: Any, function: str, *args: Any) -> Any:
    """The answer of an NVML function about a card, or None if the card, driver or binding does not give it."""
    return None if handle is None else _ask_system(function, handle, *args)


def _ask_system(function: str, *args: Any) -> Any:
    nvml = _library()
    if nvml is None or not hasattr(nvml, function):
        return None
    try:
        return getattr(nvml, function)(*args)
    except nvml.NVMLError:
        return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _reasons(handle: Any) -> list[str]:
    bits = _ask(handle, "nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:  # drivers before 535 know it by its old name
        bits = _ask(handle, "nvmlDeviceGetCurrentClocksThrottleReasons")
    if bits is None:
        return [UNREPORTED]
    return [REASONS.get(bit, f"unknown reason {bit:#x}") for bit in (1 << n for n in range(64)) if bits & bit]


def _used_mib(handle: Any) -> int | None:
    """Memory in use, without what the driver keeps for itself where the driver can tell the two apart."""
    memory = _ask(handle, "nvmlDeviceGetMemoryInfo", _library().nvmlMemory_v2)
    if memory is None:
        memory = _ask(handle, "nvmlDeviceGetMemoryInfo")
    return None if memory is None else int(memory.used) // 2**20


def _other_processes(handle: Any, used_mib: int | None) -> int | None:
    """How many compute processes on the card are neither this one nor its ancestors or descendants.

    A container hides the processes outside it. As long as this process holds no memory of its own there, they are
    told by theirs: what is used and listed for nobody counts as one process more.
    """
    listed = _ask(handle, "nvmlDeviceGetComputeRunningProcesses")
    ours = _holds_cuda()
    if listed is None:
        return 1 if not ours and (used_mib or 0) > HIDDEN_PROCESS_MIB else None
    others: list[int] = [process.pid for process in listed if not _related(process.pid)]
    if ours:
        # We may be listed under the PID of another namespace: one entry of no process here can be ourselves.
        foreign = os.getpid() not in {process.pid for process in listed} and not all(map(psutil.pid_exists, others))
        return len(others) - int(foreign)
    sizes = [process.usedGpuMemory for process in listed]
    if used_mib is None or None in sizes:
        return len(others)
    return len(others) + int(used_mib - sum(sizes) // 2**20 > HIDDEN_PROCESS_MIB)


def _related(pid: int) -> bool:
    me = os.getpid()
    return pid == me or pid in _ancestors(me) or me in _ancestors(pid)


def _ancestors(pid: int) -> list[int]:
    try:
        return [parent.pid for parent in psutil.Process(pid).parents()]
    except psutil.Error:
        return []


def _holds_cuda() -> bool:
    """Whether this process has a CUDA context: CUDA opens the unified-memory device, NVML alone does not."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if str(entry.readlink()) == "/dev/nvidia-uvm":
                return True
        except OSError:
            continue  # closed since it was listed
    return False
