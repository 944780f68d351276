"""Did two arms do the same work? Their outputs on a changed token, written over NaN, and the kernels that ran."""

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from decodegap.arms import Step, sdpa_seen
from decodegap.decode import synchronize
from decodegap.schema import Attestation, Ran

TOKENS = (11, 12)  # before and after the change; any two tokens of the vocabulary would do
PROFILES = 2  # a profiler may lose events, and a difference that is real is there again
MOST_NAMED = 3
NAME_LENGTH = 200  # a kernel's template arguments can fill pages; what tells kernels apart stands first
CPU_OPERATORS = ("aten::", "bitsandbytes::")  # whose operators count as what ran where there are no kernels


def attest(reference: Step, arm: Step, device: str, *, names: tuple[str, str]) -> Attestation:
    """Hold `arm` against `reference` (`names` in that order), both prepared on the same model and context.

    Each runs on one token, then the token is changed and every output overwritten with NaN: a graph that is empty
    leaves NaN, a stale one repeats what it gave before. Both steps are back at their context afterwards.
    """
    before = outputs(arm, TOKENS[0], device)
    expected, again = outputs(reference, TOKENS[1], device), outputs(reference, TOKENS[1], device)
    got = outputs(arm, TOKENS[1], device)
    for _ in range(PROFILES):
        differing = differences(kernels(reference, device), kernels(arm, device))
        if not differing:
            break
    return Attestation(
        reference=names[0],
        arm=names[1],
        outputs_equal=torch.equal(expected, got),
        max_abs_difference=_distance(expected, got),
        reference_spread=_distance(expected, again),
        outputs_changed=bool(torch.isfinite(got).all()) and not torch.equal(before, got),
        kernels_equal=not differing,
        kernels_differing={name: list(launches) for name, launches in differing.items()},
    )


def faults(seen: Attestation, *, same_work: bool = True) -> list[str]:
    """What is wrong with an attested pair, in words; empty if nothing is.

    `same_work` asks for equal kernels and outputs equal bit for bit, or within the reference's own spread where it
    does not repeat itself; without it (arms that change kernels on purpose) the outputs must only be written anew.
    """
    found = []
    if not seen.outputs_changed:
        found.append(f"{seen.arm} did not write new, finite outputs for a new token, so it is empty or stale")
    if not same_work:
        return found
    if not seen.outputs_equal and seen.max_abs_difference > seen.reference_spread:
        found.append(
            f"the logits of {seen.arm} differ from those of {seen.reference} by up to {seen.max_abs_difference:.3g} "
            f"({seen.reference} repeats itself within {seen.reference_spread:.3g})"
        )
    if not seen.kernels_equal:
        found.append(f"{seen.arm} ran other kernels than {seen.reference}: {describe(seen.kernels_differing)}")
    return found


def differences(a: Counter[str], b: Counter[str]) -> dict[str, tuple[int, int]]:
    """Names that `a` and `b` hold a different number of, with both numbers, the largest difference first."""
    unequal = {name: (a[name], b[name]) for name in a.keys() | b.keys() if a[name] != b[name]}
    return dict(sorted(unequal.items(), key=lambda item: (-abs(item[1][0] - item[1][1]), item[0])))


def describe(differing: dict[str, list[int]]) -> str:
    """`differing` in one phrase: the first few names with both counts, and how many more there are."""
    shown = [f"{name[:120]} {a} against {b}" for name, (a, b) in list(differing.items())[:MOST_NAMED]]
    more = len(differing) - MOST_NAMED
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


def outputs(step: Step, token: int, device: str) -> torch.Tensor:
    """A copy of the logits `[1, vocab]` of one step on `token`, from outputs that held NaN before it."""
    step.reset()
    step.set_token(token)
    step.poison()
    step.run()
    logits = step.logits().clone()
    step.reset()
    synchronize(device)
    return logits


def not_fresh(name: str, step: Step, device: str) -> str | None:
    """Why the outputs of one arm do not follow its token, or None if each step writes them anew."""
    first, second = outputs(step, TOKENS[0], device), outputs(step, TOKENS[1], device)
    if bool(torch.isfinite(second).all()) and not torch.equal(first, second):
        return None
    return f"{name} did not write new, finite outputs for a new token, so it is empty or stale"


def kernels(step: Step, device: str) -> Counter[str]:
    """How often each kernel (on a CPU: each operator) runs in one step, by full name.

    Copies are named by their direction alone, and memsets by nothing: what else the profiler says of them differs
    between a launched one and a node of a graph.
    """
    on_gpu = device.startswith("cuda")
    return Counter(filter(None, (_name(event, on_gpu) for event in _profiled(step, device))))


def ran(step: Step, device: str) -> Ran:
    """What one step ran: its kernels (on a CPU: its operators), and the SDPA backend that they prove."""
    on_gpu = device.startswith("cuda")
    events = _profiled(step, device)
    operators = {name for event in events if (name := _name(event, on_gpu=False))}
    launched = Counter(filter(None, (_name(event, on_gpu) for event in events)))
    sdpa, evidence = sdpa_seen(operators, set(launched) if on_gpu else set())
    shown: Counter[str] = Counter()
    for name, n in sorted(launched.items()):
        shown[name[:NAME_LENGTH]] += n
    return Ran(sdpa=sdpa, evidence=evidence, kernels=dict(shown))


def _profiled(step: Step, device: str) -> list[Any]:
    """The profiler's events of one step from its context on, host and device; the step is back there afterwards."""
    step.reset()
    step.run()
    step.reset()
    synchronize(device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.startswith("cuda") else [])
    with profile(activities=activities) as seen:
        step.run()
        synchronize(device)
    step.reset()
    return list(seen.events() or [])


def _name(event: Any, on_gpu: bool) -> str:
    """The name to count `event` under, or nothing if it is no kernel (on a CPU: no operator)."""
    if not on_gpu:
        return str(event.name) if event.device_type.name == "CPU" and event.name.startswith(CPU_OPERATORS) else ""
    if event.device_type.name != "CUDA" or getattr(event, "is_user_annotation", False):
        return ""
    if event.name.startswith("Memset"):
        return "Memset"
    return " ".join(event.name.split()[:2]) if event.name.startswith("Memcpy") else str(event.name)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference of two tensors; the largest float where one of them is not finite."""
    largest = torch.finfo(torch.float32).max
    return float((a.float() - b.float()).abs().nan_to_num(nan=largest, posinf=largest).max())
