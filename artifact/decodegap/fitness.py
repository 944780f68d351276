"""Is this machine fit to measure on? One rule a danger: what was seen, why it matters here, what to do about it.

A `void` finding breaks the sample: it is kept, marked and measured again. A `flag` widens it: it counts, with its flag.
Nothing here asks the machine anything, and nothing ever changes a card's settings.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from decodegap import gpus
from decodegap.gpus import Gpu
from decodegap.machine import UNREPORTED
from decodegap.schema import DeviceState, Machine

# Below this part of the datasheet's bandwidth something is wrong with the card or the probe: plain reads reach 0.90
# on an H200 (4.34 of 4.8 TB/s) and tuned ones 0.93.
READ_FRACTION_LOW = 0.80
# Host microseconds to enqueue a tiny kernel: 7 to 9 on the hosts seen. An eager step of 1,300 kernels pays it for each.
DISPATCH_HIGH_US = 15.0
# Interquartile range over median. Seen: 7.1 to 8.7 us within one run, which is 0.2 from end to end.
DISPATCH_SPREAD = 0.25
# Under its power cap an H200 went from 1980 to 1830 MHz (8%), and the step lost 1.6% by it.
CLOCK_DROP = 0.05
MEMORY_CLOCK_SLACK = 0.02  # memory clocks come in steps far wider than this
POWER_CAP_SLACK = 0.01  # limits are set in whole watts
BUSY_PERCENT = 5  # NVML's utilisation of a card that nobody uses reads 0; leave room for a monitor that polls it
# A session keeps at most every core busy, so the load average of a machine of our own stays at or below the cores.
LOAD_PER_CORE = 1.25
# An idle card's own bookkeeping takes far less; beyond this, running out of memory says nothing about the card.
HELD_MIB = 1024
# Reasons for which the hardware or driver runs a card slower than it should be able to, and does so in bursts.
VOID_REASONS = (
    "hardware slowdown",
    "hardware thermal slowdown",
    "software thermal slowdown",
    "hardware power brake",
)

Level = Literal["void", "flag"]


@dataclass(frozen=True)
class Finding:
    """One danger found: its rule, how bad it is, and what, why and what to do in a phrase each."""

    rule: str
    level: Level
    what: str
    why: str
    do: str

    def line(self) -> str:
        """The finding in one line, for people."""
        return f"{self.level}  {self.rule}: {self.what}. Why it matters: {self.why}. What to do: {self.do}."


@dataclass(frozen=True)
class Needs:
    """What the plan takes, and what disk and interpreter offer. None: not looked at, so no finding.

    `torch_cuda` is the CUDA version torch was built for, empty for a build without CUDA.
    """

    device_memory_mib: int | None = None
    host_memory_mib: int | None = None
    host_free_mib: int | None = None
    disk_mib: int | None = None
    disk_free_mib: int | None = None
    torch_cuda: str | None = None


NO_NEEDS = Needs()


def findings(machine: Machine, gpu: Gpu, needs: Needs = NO_NEEDS) -> list[Finding]:
    """Everything about `machine` that breaks (`void`) or widens (`flag`) a measurement on `gpu`, voids first."""
    found = [
        *_card(machine, gpu),
        *_mig(machine),
        *_bf16(machine),
        *_torch(machine, gpu, needs),
        *_memory(machine, gpu, needs),
        *_disk(needs),
        *_neighbours(machine),
        *_throttle(machine),
        *_clocks(machine),
        *_power_cap(machine),
        *_ecc(machine),
        *_persistence(machine),
        *_bandwidth(machine, gpu),
        *_dispatch(machine),
        *_host(machine),
    ]
    return sorted(found, key=lambda finding: finding.level == "flag")


def held_by_others(machine: Machine, gpu: Gpu) -> str:
    """What to say of a session that ran out of memory while others held much of the card; empty if they did not."""
    held_mib = (machine.idle.memory_used_mib or 0) if machine.idle else 0
    if gpu.slug == "cpu" or held_mib <= HELD_MIB:
        return ""
    return f"out of memory while others held {held_mib} of the card's {machine.memory_mib} MiB"


def _void(rule: str, what: str, why: str, do: str) -> Finding:
    return Finding(rule, "void", what, why, do)


def _flag(rule: str, what: str, why: str, do: str) -> Finding:
    return Finding(rule, "flag", what, why, do)


def _card(machine: Machine, gpu: Gpu) -> Iterator[Finding]:
    seen = gpus.Device(
        index=0,
        uuid="",
        name=machine.device_name,
        memory_mib=machine.memory_mib,
        sm_count=machine.sm_count or 0,
        capability=gpus.BF16_CAPABILITY,
        bus_width_bits=0,
        memory_clock_mhz=0,
        mig=False,  # has a rule of its own
    )
    if reason := gpus.mismatch(seen, gpu):
        what = f"{machine.device_name} is not the {gpu.label}: {reason}"
        yield _void("card", what, "its bandwidth and so its floor are another card's", "use GPU=auto, or another card")


def _mig(machine: Machine) -> Iterator[Finding]:
    if machine.mig:
        why = "a slice has a part of the card's memory bandwidth and shares the rest"
        yield _void("mig", "MIG mode is on", why, "measure on a whole GPU, or ask its owner to switch MIG off")


def _bf16(machine: Machine) -> Iterator[Finding]:
    if machine.capability is None:
        return
    if tuple(int(part) for part in machine.capability.split(".")) < gpus.BF16_CAPABILITY:
        what = f"compute capability {machine.capability}"
        yield _void(
            "bf16",
            what,
            "bf16 arithmetic begins with 8.0, so nothing here would be the study's step",
            "use a newer card",
        )


def _torch(machine: Machine, gpu: Gpu, needs: Needs) -> Iterator[Finding]:
    if gpu.slug == "cpu" or needs.torch_cuda is None:
        return
    if not needs.torch_cuda:
        do = "install a CUDA build of torch (the README's PIP_ARGS says how)"
        yield _void("torch", "torch here is built without CUDA", "nothing would run on the card", do)
    elif machine.cuda and int(needs.torch_cuda.split(".")[0]) > int(machine.cuda.split(".")[0]):
        what = f"torch is built for CUDA {needs.torch_cuda}, driver {machine.driver} goes up to {machine.cuda}"
        yield _void(
            "torch", what, "torch cannot start on this driver", "update the driver, or install torch for its CUDA"
        )


def _memory(machine: Machine, gpu: Gpu, needs: Needs) -> Iterator[Finding]:
    idle = machine.idle or machine.before
    need = needs.device_memory_mib
    if gpu.slug != "cpu" and need is not None:
        free = machine.memory_mib - ((idle.memory_used_mib or 0) if idle else 0)
        if need > machine.memory_mib:
            what = f"the largest cell takes about {need} MiB, the card has {machine.memory_mib}"
            yield _flag(
                "memory", what, "such cells become records of running out of memory", "narrow MODELS= or CONTEXTS="
            )
        elif need > free:
            what = f"the largest cell takes about {need} MiB, {free} of {machine.memory_mib} are free"
            yield _void(
                "memory", what, "others' memory would look like the card's limit", "wait until the card is free"
            )
    wanted, offered = needs.host_memory_mib, needs.host_free_mib
    if wanted is not None and offered is not None and wanted > offered:
        what = f"the plan takes about {wanted} MiB of host memory, {offered} are free"
        yield _void(
            "memory", what, "the system would swap or end the session", "close other programs, or narrow MODELS="
        )


def _disk(needs: Needs) -> Iterator[Finding]:
    wanted, offered = needs.disk_mib, needs.disk_free_mib
    if wanted is not None and offered is not None and wanted > offered:
        what = f"{offered} MiB free where results go, {wanted} wanted"
        yield _void("disk", what, "records could not be written", "free some space")


def _neighbours(machine: Machine) -> Iterator[Finding]:
    idle, before, after = machine.idle, machine.before, machine.after
    counts = [seen.other_processes for seen in (idle, before, after) if seen and seen.other_processes is not None]
    do = "wait, or ask for a card of your own"
    if not counts:
        if idle or before or after:
            what = "the card does not list its processes"
            yield _flag("neighbour", what, "somebody else's work would go unnoticed", "make sure that nobody shares it")
        return
    if counts[0]:
        busy = (idle.utilisation_percent or 0) if idle else 0
        what = f"{counts[0]} other process(es) on the card, which was {busy}% busy before this one began"
        if busy >= BUSY_PERCENT:
            yield _void("neighbour", what, "they take bandwidth and SMs at moments of their own", do)
        else:
            yield _flag("neighbour", what, "they hold memory and may wake at any time", do)
    if max(counts) > counts[0]:
        what = f"{max(counts) - counts[0]} process(es) came onto the card while it was measured"
        yield _void("neighbour", what, "their start and their work fall into the samples", do)


def _throttle(machine: Machine) -> Iterator[Finding]:
    reasons = {reason for seen in _measured(machine) for reason in seen.throttle_reasons} - {"idle"}
    for reason in sorted(reasons):
        if reason in VOID_REASONS:
            why = "the clock falls in bursts, so steps are not of one speed"
            yield _void("throttle", reason, why, "let the card cool, check its fans and power, then measure again")
        elif reason == "software power cap":
            why = "reading alone can draw a card's whole power, and the SM clock then gives way by some per cent"
            yield _flag(
                "throttle", reason, why, "nothing, where the cap is the card's default: it is how the card works"
            )
        elif reason == UNREPORTED:
            what, why = "throttle reasons are not reported", "a slowed card would go unnoticed"
            yield _flag("throttle", what, why, "compare the read bandwidth with the datasheet's")
        else:
            yield _flag("throttle", reason, "the clock is held below what the card can do", "ask whoever set it")


def _clocks(machine: Machine) -> Iterator[Finding]:
    before, after = machine.before, machine.after
    if before and after and before.sm_clock_mhz and after.sm_clock_mhz and "idle" not in after.throttle_reasons:
        drop = 1 - after.sm_clock_mhz / before.sm_clock_mhz
        if drop > CLOCK_DROP:
            what = f"the SM clock fell from {before.sm_clock_mhz} to {after.sm_clock_mhz} MHz ({drop:.0%})"
            yield _flag("clock", what, "early and late steps differ", "look at power and temperature in the record")
    most = machine.max_memory_clock_mhz
    active = [s.memory_clock_mhz for s in _measured(machine) if s.memory_clock_mhz and "idle" not in s.throttle_reasons]
    if most and active and min(active) < most * (1 - MEMORY_CLOCK_SLACK):
        what = f"the memory clock was {min(active)} MHz, the card's most is {most}"
        yield _flag(
            "clock", what, "the peak bandwidth falls with it", "ask whoever set it; some cards do so for all CUDA work"
        )


def _power_cap(machine: Machine) -> Iterator[Finding]:
    cap, default = machine.power_cap_w, machine.power_cap_default_w
    if cap and default and cap < default * (1 - POWER_CAP_SLACK):
        what = f"the power limit is {cap:.0f} W, the card's default {default:.0f} W"
        yield _flag("power cap", what, "steps that draw more are slowed", "ask whoever set it; compare such cards only")


def _ecc(machine: Machine) -> Iterator[Finding]:
    errors = max((s.ecc_uncorrected or 0 for s in (machine.idle, *_measured(machine)) if s), default=0)
    if errors:
        what = f"{errors} uncorrected memory error(s) since the driver was loaded"
        yield _void("ecc", what, "values may be wrong and pages be taken out of use", "have the card checked and reset")


def _persistence(machine: Machine) -> Iterator[Finding]:
    if machine.persistence is False:
        why = "each session loads the driver's state anew and starts on a cold clock"
        yield _flag("persistence", "persistence mode is off", why, "ask an administrator for nvidia-smi -pm 1")


def _bandwidth(machine: Machine, gpu: Gpu) -> Iterator[Finding]:
    if machine.read_gb_s is None or gpu.peak_gb_s is None:
        return
    fraction = machine.read_gb_s / gpu.peak_gb_s
    source = "the datasheet's" if gpu.peak_source == "datasheet" else "the derived"
    what = f"reads run at {machine.read_gb_s:.0f} GB/s, {fraction:.0%} of {source} {gpu.peak_gb_s:.0f}"
    if fraction < READ_FRACTION_LOW:
        yield _flag(
            "bandwidth", what, "no step can be near its floor", "look for throttling, neighbours and other clocks"
        )
    elif fraction > 1:
        yield _flag(
            "bandwidth", what, "no read beats the peak: peak or probe is wrong", "tell the authors, with this line"
        )


def _dispatch(machine: Machine) -> Iterator[Finding]:
    cost, spread = machine.dispatch_us, machine.dispatch_us_spread
    if cost is None:
        return
    why = "an eager step pays it for each of its kernels, so eager times are this host's more than the card's"
    do = "close other programs; on a virtual machine compare several hosts"
    if cost > DISPATCH_HIGH_US:
        yield _flag("dispatch", f"the host takes {cost:.1f} µs to start a tiny kernel", why, do)
    if spread is not None and spread > DISPATCH_SPREAD * cost:
        yield _flag("dispatch", f"starting a tiny kernel takes {cost:.1f} µs, spread {spread:.1f} µs", why, do)


def _host(machine: Machine) -> Iterator[Finding]:
    why = "the thread that starts kernels waits for a core or runs on a slow one"
    if machine.load_1min > LOAD_PER_CORE * machine.cores:
        what = f"load {machine.load_1min:.1f} on {machine.cores} core(s)"
        yield _flag("load", what, why, "close other programs, or wait")
    if machine.governor not in (None, "performance"):
        what = f"the CPU governor is {machine.governor}"
        yield _flag("governor", what, why, "ask an administrator for the performance governor")
    if machine.cpu_quota_cores is not None and machine.cpu_quota_cores < machine.cores:
        what = f"this container may use {machine.cpu_quota_cores:g} of {machine.cores} cores' time"
        yield _flag(
            "quota", what, "once it is used up, everything stops for some ms", "run with a higher CPU limit or none"
        )


def _measured(machine: Machine) -> list[DeviceState]:
    return [seen for seen in (machine.before, machine.after) if seen]
