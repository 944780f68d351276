"""Whether a quantised step that is replayed from a graph is the launched one, projections and all."""

import torch

from decodegap import attest, quant_paths
from decodegap.arms import Step
from decodegap.errors import UnsupportedError
from decodegap.quant_catalogue import QuantPath
from decodegap.quant_modules import ExllamaLinear
from decodegap.reference import relative_error

# How far, in relative L2, a replay's logits may be from the launched step's where that does not repeat itself: beyond
# three times what it is from itself, by this. One that repeats itself bit for bit must be repeated bit for bit: a
# single stale projection may move the logits by less than a per cent. Where fp16 is added up by atomics, two runs that
# agree did so by luck.
REPLAY_ERROR = 0.02
SPREADS = 3


def require_capture(net: torch.nn.Module) -> None:
    """Raise `UnsupportedError` if a capture would miss one of the net's kernels.

    The stock ExLlamaV2 launches on the legacy default stream: its kernels run once, while the graph is captured, and
    the graph replays without them and without an error.
    """
    for name, module in net.named_modules():
        if isinstance(module, ExllamaLinear) and not module.on_current_stream:
            raise UnsupportedError(
                f"{name}: this build of ExLlamaV2 launches on the default stream, where a graph's capture does not look"
            )


def replay_faults(path: QuantPath, launched: Step, captured: Step, device: str, layers: int) -> list[str]:
    """What is wrong with a captured step of `path` beside the same step launched kernel by kernel; empty if nothing is.

    Fresh outputs alone prove little here: a graph that misses only the projections still computes the rest, and its
    logits follow the token through the embedding. So its kernels are counted, and its logits must be the launched
    step's on two tokens, of which the capture can have seen one at most.
    """
    name = f"{path.slug}'s graph"
    found = [reason] if (reason := attest.not_fresh(name, captured, device)) else []
    for _ in range(attest.PROFILES):  # a profiler may lose an event
        faults = quant_paths.faults(path, attest.kernels(captured, device), layers)
        if not faults:
            break
    found += [f"in the replay, {reason}" for reason in faults]
    for token in attest.TOKENS:
        expected, again = attest.outputs(launched, token, device), attest.outputs(launched, token, device)
        error = relative_error(attest.outputs(captured, token, device), expected)
        spread = relative_error(again, expected)
        allowed = REPLAY_ERROR + SPREADS * spread if spread or path.sums_in_fp16 else 0.0
        if not error <= allowed:
            found.append(f"{name} is {error:.3g} from the launched step on token {token}, more than {allowed:.3g}")
    return found
