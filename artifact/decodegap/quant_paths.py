"""How a built model becomes one of the quantised paths, what it holds then, and whether the right kernels ran."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from decodegap import quant_kernels, quantise
from decodegap.errors import MissingPackageError, UnsupportedError
from decodegap.quant_catalogue import PATHS, QuantPath
from decodegap.quant_modules import (
    ExllamaLinear,
    MarlinLinear,
    Nf4Linear,
    QuantLinear,
    TinygemmLinear,
    bitsandbytes,
)
from decodegap.quantise import Method

__all__ = [
    "PATHS",
    "PROJECTIONS",
    "Held",
    "QuantLinear",
    "QuantPath",
    "convert",
    "faults",
    "held",
    "projections",
    "require",
    "require_weights",
]

# The seven matrices of a decoder layer, and under which heading a table shows them.
PROJECTIONS = {
    "self_attn.q_proj": "q/o",
    "self_attn.k_proj": "k/v",
    "self_attn.v_proj": "k/v",
    "self_attn.o_proj": "q/o",
    "mlp.gate_proj": "gate/up",
    "mlp.up_proj": "gate/up",
    "mlp.down_proj": "down",
}
# Kernels by which a product falls back to dequantising and multiplying in full, named to say what went wrong.
FALLBACKS = ("dequantize", "kDequantize", "reconstruct")
# What a path's activations need of the card: tensor cores for bf16, or for fp16.
LEAST_CAPABILITY = {"bfloat16": (8, 0), "float16": (7, 5)}
MARLIN_CAPABILITY = (8, 0)  # the asynchronous copies of the kernels that are compiled
EXTENSIONS = {"awq-marlin": "marlin", "gptq-marlin": "marlin", "gptq-exllamav2": "exllamav2"}
# Which quantised checkpoints' own codes a path multiplies by.
TAKES: dict[str, Method] = {"awq-marlin": "awq", "gptq-marlin": "gptq", "gptq-exllamav2": "gptq"}
ARTICLES: dict[Method, str] = {"awq": "an AWQ", "gptq": "a GPTQ"}


@dataclass(frozen=True)
class Held:
    """Bytes that a converted model really holds, tied tensors counted once."""

    weights_all: int  # packed + kept
    weights_streamed: int  # less an untied input embedding, of which a step reads one row
    packed: int  # the projections as a product reads them: codes, scales, zero points; or dense, in a baseline
    kept_16bit: int  # what no path quantises: head, embedding, norms, biases (in fp32 on a CPU)


def require(path: QuantPath, device: str) -> None:
    """Raise `UnsupportedError` in one line if `path` cannot run on `device` (`cpu` or `cuda`) in this process."""
    on_gpu = device.startswith("cuda")
    if not (path.on_gpu if on_gpu else path.on_cpu):
        raise UnsupportedError(f"{path.slug} has no kernel for {'a GPU' if on_gpu else 'a CPU'}")
    if on_gpu:
        least = MARLIN_CAPABILITY if EXTENSIONS.get(path.slug) == "marlin" else LEAST_CAPABILITY[path.dtype]
        if (capability := torch.cuda.get_device_capability()) < least:
            raise UnsupportedError(
                f"{path.slug} needs sm_{least[0]}{least[1]}; here is sm_{capability[0]}{capability[1]}"
            )
    if path.slug.startswith("bnb-"):
        try:
            bitsandbytes()
        except MissingPackageError as error:
            raise UnsupportedError(f"{path.slug}: {error}") from None
    if path.slug in EXTENSIONS:
        quant_kernels.load(EXTENSIONS[path.slug])


def require_weights(path: QuantPath, net: PreTrainedModel) -> None:
    """Raise `UnsupportedError` in one line if `net` holds a checkpoint's own codes and `path` does not take them.

    A baseline multiplies by what the codes stand for.
    """
    kept = [codes for *_, module in projections(net) if (codes := quantise.given(module))]
    if path.is_baseline or not kept:
        return
    if (method := kept[0].method) != (wanted := TAKES.get(path.slug)):
        needs = f"{ARTICLES[wanted]} checkpoint or 16-bit weights" if wanted else "16-bit weights"
        raise UnsupportedError(f"this checkpoint is {method.upper()}; {path.slug} needs {needs}, which it packs itself")
    if path.slug == "gptq-marlin" and not all(codes.symmetric for codes in kept):
        raise UnsupportedError("this checkpoint has zero points other than 8; gptq-marlin takes symmetric codes alone")


def projections(net: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module, str, torch.nn.Module]]:
    """Every projection of every layer in order: its heading, the module that holds it, its name there, itself."""
    for _, layer in net.get_submodule("model").get_submodule("layers").named_children():
        for name, heading in PROJECTIONS.items():
            parent, _, child = name.rpartition(".")
            holder = layer.get_submodule(parent)
            yield heading, holder, child, holder.get_submodule(child)


def convert(net: PreTrainedModel, path: QuantPath, device: str) -> Held:
    """Quantise and swap the projections of `net` in place, one at a time, so that two copies never exist.

    Codes that came with a checkpoint are taken as they are, in its groups; other weights are rounded in the path's.
    Head, embedding and norms stay as they are; a baseline changes nothing. The net must be in the path's dtype
    (fp32 on a CPU). Raises `UnsupportedError` where the path cannot run or cannot hold a shape.
    """
    require(path, device)
    require_weights(path, net)
    dense: list[tuple[torch.nn.Module, str, torch.nn.Linear]] = []
    for _, holder, name, module in projections(net):
        if not isinstance(module, torch.nn.Linear):
            raise UnsupportedError(f"{name} is a {type(module).__name__}: quantised already, or no linear layer")
        dense.append((holder, name, module))
    make = maker(path, device, largest=max(module.weight.numel() for *_, module in dense))
    while make and dense:
        holder, name, module = dense.pop()  # nothing else holds it then, so its weight is freed when it is replaced
        setattr(holder, name, make(module).eval())
    return held(net)


def maker(
    path: QuantPath, device: str, *, largest: int, group: int = 0
) -> Callable[[torch.nn.Linear], QuantLinear] | None:
    """What turns a linear layer into one of `path`; None for a baseline. `largest`: weights of the largest of them.

    `group`: inputs that share a scale where weights are rounded, if not the path's own. The new layer may keep the old
    one's bias, never its weight.
    """
    if path.is_baseline:
        return None
    group = group or path.group
    if path.slug.startswith("bnb-"):
        return lambda linear: Nf4Linear(linear, double=path.slug == "bnb-nf4-dq")
    if path.slug == "int4-tinygemm":
        return lambda linear: TinygemmLinear(linear, group=group)
    ops = quant_kernels.load(EXTENSIONS[path.slug])
    if path.slug == "gptq-exllamav2":
        scratch = torch.empty(largest, dtype=torch.float16, device=device)
        return lambda linear: ExllamaLinear(linear, group=group, ops=ops, scratch=scratch)
    return lambda linear: MarlinLinear(
        linear, group=group, zero_points=path.slug == "awq-marlin", product=ops.gptq_marlin_gemm_fp16
    )


def held(net: PreTrainedModel) -> Held:
    """The bytes that `net` holds, its projections quantised or dense."""
    packed = 0
    biases = 0
    inside: set[int] = set()
    for _, _, _, module in projections(net):
        if isinstance(module, QuantLinear):
            packed += module.packed_bytes
        elif isinstance(module.weight, torch.Tensor):
            packed += module.weight.nbytes
        biases += module.bias.nbytes if isinstance(module.bias, torch.Tensor) else 0
        inside.update(id(parameter) for parameter in module.parameters())
    others = {id(parameter): parameter for parameter in net.parameters() if id(parameter) not in inside}
    kept = biases + sum(parameter.nbytes for parameter in others.values())
    table = net.get_submodule("model").get_submodule("embed_tokens").get_parameter("weight")
    tied = table is net.get_submodule("lm_head").get_parameter("weight")
    return Held(
        weights_all=packed + kept,
        weights_streamed=packed + kept - (0 if tied else table.nbytes),
        packed=packed,
        kept_16bit=kept,
    )


def faults(path: QuantPath, kernels: Mapping[str, int], layers: int) -> list[str]:
    """What is wrong with the kernels (on a CPU: operators) of one step of `path`; empty if nothing is.

    Each of the seven projections of each layer must have launched one of the path's own kernels, once.
    """
    if path.is_baseline:
        return []
    on_gpu = not any(name.startswith(("aten::", "bitsandbytes::")) for name in kernels)
    wanted = path.kernels if on_gpu else path.operators
    launches = sum(count for name, count in kernels.items() if any(part in name for part in wanted))
    expected = len(PROJECTIONS) * layers
    found = []
    if launches != expected:
        found.append(f"{path.slug} ran {' or '.join(wanted)} {launches} times a step, not {expected}")
    if on_gpu:
        fallen = sorted(name for name in kernels if any(part in name for part in FALLBACKS))
        if fallen:
            found.append(f"{path.slug} fell back to {fallen[0][:120]} ({kernels[fallen[0]]} times a step)")
    return found
