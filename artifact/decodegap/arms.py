"""The ways to run a step, each behind the same small interface."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend
from transformers import DynamicCache, PreTrainedModel

from decodegap import decode, models, quant_checkpoint
from decodegap.errors import BadInputError
from decodegap.plan import Task

SDPA_BACKENDS: dict[str, list[SDPBackend] | None] = {"flash": [SDPBackend.FLASH_ATTENTION], "auto": None}


@dataclass(frozen=True)
class Setup:
    """What an arm starts from: a model whose cache holds `ctx` tokens, and the token that comes next `[1, 1]`."""

    net: PreTrainedModel
    cache: DynamicCache
    token: torch.Tensor
    ctx: int
    device: str


def built(task: Task, device: str) -> PreTrainedModel:
    """The task's model with its weights on `device`, the same ones every time. Raises as `decode.build` does.

    A quantised checkpoint is for the experiment on quantised paths alone.
    """
    cell, protocol = task.cell, task.protocol
    model, dtype, folder = models.lookup(cell.model), getattr(torch, cell.dtype), Path(task.weights_dir or "")
    own_codes = cell.experiment == "quantised" and protocol.weights == "local"
    if own_codes and quant_checkpoint.is_quantised(model, folder):
        net = quant_checkpoint.build(model, folder, device=device, dtype=dtype)
    else:
        net = decode.build(
            model,
            weights=protocol.weights,
            weights_dir=task.weights_dir,
            device=device,
            dtype=dtype,
            seed=protocol.seed,
        )
    decode.synchronize(device)
    return net


def prefilled(net: PreTrainedModel, task: Task, device: str) -> Setup:
    """`net` with the task's context prefilled."""
    tokens = decode.prompt(net.config.vocab_size, task.cell.ctx, task.protocol.seed, device)
    cache, logits = decode.prefill(net, tokens, task.protocol.prefill_chunk)
    decode.synchronize(device)
    return Setup(net, cache, logits.argmax(dim=-1, keepdim=True), task.cell.ctx, device)


def _not_attested(*_: int) -> None:
    raise NotImplementedError("this step's token and outputs cannot be changed, so it cannot be attested")


@dataclass(frozen=True)
class Step:
    """One arm, prepared. `run` enqueues a step, `reset` returns to `ctx` tokens, `logits` are the last step's.

    `set_token` changes the token that the next step reads (until `reset`); `poison` overwrites the outputs with NaN,
    so that what is read afterwards was written afterwards. `replayed`: one graph launch starts the whole step.
    """

    run: Callable[[], None]
    reset: Callable[[], None]
    logits: Callable[[], torch.Tensor]  # [1, vocab]
    set_token: Callable[[int], None] = _not_attested
    poison: Callable[[], None] = _not_attested
    replayed: bool = False


def attend(net: PreTrainedModel, implementation: str) -> None:
    """Make `net` use this attention function from now on; costs a comparison where it already does.

    The choice is a field of the net's config, which every arm prepared on the net shares: each step says what it
    needs, or it would run whatever the arm prepared last has asked for.
    """
    if net.config._attn_implementation != implementation:  # noqa: SLF001  (transformers has no other way to read it)
        net.set_attn_implementation(implementation)


def eager(setup: Setup) -> Step:
    """Stock transformers: `DynamicCache`, one forward and a greedy argmax; the cache grows by a token a step."""
    if setup.cache.get_seq_length() < setup.ctx:
        raise ValueError(f"the cache holds {setup.cache.get_seq_length()} tokens, not {setup.ctx}")
    last = torch.empty(0)
    token = setup.token.clone()

    def run() -> None:
        nonlocal last, token
        attend(setup.net, "sdpa")
        out = setup.net(input_ids=token, past_key_values=setup.cache, use_cache=True)
        last = out.logits[:, -1]  # [1, vocab]
        token = last.argmax(dim=-1, keepdim=True)

    def reset() -> None:
        nonlocal token
        decode.crop(setup.cache, setup.ctx)
        token = setup.token.clone()

    def set_token(value: int) -> None:
        nonlocal token
        token = torch.full_like(setup.token, value)

    def poison() -> None:
        nonlocal last
        last = torch.full_like(last, float("nan"))

    return Step(run=run, reset=reset, logits=lambda: last, set_token=set_token, poison=poison)


ARMS: dict[str, Callable[[Setup], Step]] = {"eager": eager, "eager-auto": eager}  # they differ in the cell's `sdpa`
# Modules that add arms of their own to ARMS. They import this one, so they are loaded when an arm is asked for.
MORE_ARMS = ("decodegap.graphs", "decodegap.fused")


def prepare(arm: str, setup: Setup) -> Step:
    """The arm called `arm` on `setup`.

    Raises `BadInputError` naming the known ones, and `UnsupportedError` where this machine cannot run it.
    """
    for module in MORE_ARMS:
        importlib.import_module(module)
    if arm not in ARMS:
        raise BadInputError(f"no arm is called {arm!r}; known are {', '.join(ARMS)}")
    return ARMS[arm](setup)


def sdpa_seen(operators: set[str], kernels: set[str]) -> tuple[str, str]:
    """Which SDPA backend ran, and the operator or kernel that proves it.

    `operators` are the names of the profiled step's operators, `kernels` those of its device kernels (a replayed
    graph has kernels only).
    """
    by_operator = {
        "_scaled_dot_product_flash_attention": "flash",
        "_scaled_dot_product_flash_attention_for_cpu": "flash",
        "_scaled_dot_product_efficient_attention": "efficient",
        "_scaled_dot_product_cudnn_attention": "cudnn",
        "_scaled_dot_product_attention_math": "math",
    }
    for name in sorted(operators):
        if (short := name.removeprefix("aten::")) in by_operator:
            return by_operator[short], name
    for marker, backend in (("flash_fwd", "flash"), ("fmha_cutlass", "efficient"), ("cudnn", "cudnn")):
        if hits := sorted(name for name in kernels if marker in name):
            return backend, hits[0][:200]
    return "none", "no attention operator or kernel was seen"
