"""What is left of a step when its launches are free: the same step enqueued kernel by kernel, captured, or compiled."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from transformers import AttentionInterface, Cache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decodegap import arms
from decodegap.arms import Setup, Step
from decodegap.errors import UnsupportedError

CAPTURE_WARMUPS = 3  # lets libraries pick kernels and allocate workspaces before a capture forbids both
# The stock sdpa function under a name that has no mask function: transformers then builds no mask. A step of one
# token needs none, and under stream capture the stock name builds one all the same, drops `enable_gqa` and copies
# K and V for every query head, so that the captured step would run other kernels than the eager one.
MASKLESS = "sdpa_nomask"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)


@dataclass(frozen=True)
class Body:
    """A step that repeats in place: it reads `token`, attends to exactly `ctx` tokens, and writes both outputs.

    `forward` enqueues the work. `restore` comes before it and costs the host microseconds: it puts back the cache's
    references and the net's attention function.
    """

    forward: Callable[[], None]
    restore: Callable[[], None]
    token: torch.Tensor  # [1, 1]
    logits: torch.Tensor  # [1, vocab]
    choice: torch.Tensor  # [1, 1], the greedy next token


def pinned(setup: Setup) -> Body:
    """The maskless step over a `DynamicCache` that is put back to the same K and V before every step.

    The last cached token is dropped, so that the step's own token makes the context `ctx`. That changes
    `setup.cache` for good: a copy of it would not fit beside the weights on a small card.
    """
    kept = _past(setup)

    def restore() -> None:
        arms.attend(setup.net, MASKLESS)
        for layer, (keys, values) in zip(_layers(setup.cache), kept, strict=True):
            layer.keys, layer.values = keys, values

    return _body(setup, setup.cache, restore, refill=None)


def static(setup: Setup, *, attention: str = MASKLESS, shared_lengths: bool = True) -> Body:
    """The step over a `StaticCache` of exactly `ctx` slots, the last of which the step itself fills.

    Without a mask every slot is attended to, so a longer cache would give wrong numbers. Every layer counts its
    tokens in a tensor of its own, which each step advances and the next must find put back; `shared_lengths` makes
    them views of one tensor, so that one kernel puts all of them back (a compiler prefers tensors without aliases).
    """
    kept = _past(setup)
    cache = StaticCache(config=setup.net.config, max_cache_len=setup.ctx)
    lengths = torch.full((len(kept),), setup.ctx - 1, device=setup.device)  # [layers]
    for index, (layer, (keys, values)) in enumerate(zip(_layers(cache), kept, strict=True)):
        layer.lazy_initialization(keys, values)
        if layer.keys.shape[-2] != setup.ctx:
            raise ValueError(f"a static cache of {layer.keys.shape[-2]} slots, of which {setup.ctx} would be filled")
        layer.keys[:, :, : setup.ctx - 1].copy_(keys)  # [1, kv_heads, ctx - 1, head_dim]
        layer.values[:, :, : setup.ctx - 1].copy_(values)
        layer.cumulative_length = lengths[index] if shared_lengths else lengths[index].clone()

    def refill() -> None:
        if shared_lengths:
            lengths.fill_(setup.ctx - 1)
        else:
            for layer in _layers(cache):
                layer.cumulative_length.fill_(setup.ctx - 1)

    return _body(setup, cache, lambda: arms.attend(setup.net, attention), refill=refill)


def _past(setup: Setup) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each layer's K and V of the first `ctx - 1` tokens `[1, kv_heads, ctx - 1, head_dim]`, cut in `setup.cache`.

    Contiguous, as the stock step's are, because a concatenation of strided tensors runs another kernel; layer by
    layer, so that no second copy of the cache exists at any moment.
    """
    if setup.cache.get_seq_length() < setup.ctx - 1:
        raise ValueError(f"the cache holds {setup.cache.get_seq_length()} tokens, not {setup.ctx - 1}")
    kept = []
    for layer in _layers(setup.cache):
        layer.keys = layer.keys[:, :, : setup.ctx - 1].contiguous()
        layer.values = layer.values[:, :, : setup.ctx - 1].contiguous()
        kept.append((layer.keys, layer.values))
    return kept


def _layers(cache: Cache) -> list[Any]:
    """The cache's layers, each with `keys` and `values`; their declared types also cover caches of other models."""
    return list(cache.layers)


def _body(setup: Setup, cache: Cache, restore: Callable[[], None], *, refill: Callable[[], None] | None) -> Body:
    token = setup.token.clone()
    position = torch.full_like(token, setup.ctx - 1)
    logits = torch.full((1, setup.net.config.vocab_size), float("nan"), dtype=setup.net.dtype, device=setup.device)
    choice = torch.full_like(token, -1)

    def forward() -> None:
        if refill:
            refill()
        out = setup.net(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True, logits_to_keep=1)
        # A product, not a copy: a captured copy replays as another kernel than the one that a launched copy runs.
        torch.mul(out.logits[:, -1], 1, out=logits)
        torch.argmax(logits, dim=-1, keepdim=True, out=choice)

    return Body(forward=forward, restore=restore, token=token, logits=logits, choice=choice)


def launched(setup: Setup, body: Body, forward: Callable[[], None] | None = None) -> Step:
    """`body` enqueued by the host in every step; `forward` may stand in for its own (a compiled one)."""
    enqueue = forward or body.forward

    def run() -> None:
        body.restore()
        enqueue()

    return _step(setup, body, run)


def captured(setup: Setup, body: Body, forward: Callable[[], None] | None = None) -> Step:
    """`body` captured once into a CUDA graph, which every step replays. Raises `UnsupportedError` without CUDA."""
    require_cuda(setup.device)
    enqueue = forward or body.forward
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CAPTURE_WARMUPS):
            body.restore()
            enqueue()
    torch.cuda.current_stream().wait_stream(side)
    body.restore()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    body.restore()
    return replace(_step(setup, body, graph.replay), replayed=True)


def _step(setup: Setup, body: Body, run: Callable[[], None]) -> Step:
    def reset() -> None:
        body.restore()
        body.token.copy_(setup.token)

    def set_token(value: int) -> None:
        body.token.fill_(value)

    def poison() -> None:
        body.logits.fill_(float("nan"))
        body.choice.fill_(-1)

    return Step(run=run, reset=reset, logits=lambda: body.logits, set_token=set_token, poison=poison)


def require_cuda(device: str) -> None:
    """Raise `UnsupportedError` unless `device` can capture a stream."""
    if not device.startswith("cuda"):
        raise UnsupportedError("CUDA graphs need an NVIDIA GPU; on a CPU the `compiled` arm reduces launches instead")


def compiled(setup: Setup) -> Step:
    """The maskless static step through `torch.compile`, then captured where there is CUDA.

    On a CPU this is the arm that reduces launches, by running other, fused kernels. What was compiled stays in torch's
    own cache in the temporary folder, so a second session compiles faster. Raises `UnsupportedError` where nothing
    can be compiled, with the compiler's reason in one line.
    """
    body = static(setup, shared_lengths=False)
    # One compilation of the whole step. The compiler's own graphs stay off (its default mode): it would copy the
    # inputs, and the arms should differ in their kernels, not in who captures them.
    forward = torch.compile(body.forward, fullgraph=True, dynamic=False)
    try:
        body.restore()
        forward()
    except TorchDynamoException as error:
        inner = error.inner_exception if isinstance(error, BackendCompilerFailed) else error
        if isinstance(inner, torch.OutOfMemoryError):
            raise inner from None
        reason = str(inner).strip().splitlines()
        raise UnsupportedError(
            f"torch.compile cannot build the step here: {type(inner).__name__}: {reason[0][:300] if reason else ''}"
        ) from None
    return captured(setup, body, forward) if setup.device.startswith("cuda") else launched(setup, body, forward)


arms.ARMS.update(
    {
        "eager-pinned": lambda setup: launched(setup, pinned(setup)),
        "graph": lambda setup: captured(setup, pinned(setup)),
        "graph-static": lambda setup: captured(setup, static(setup)),
        "graph-stock": lambda setup: captured(setup, static(setup, attention="sdpa")),
        "compiled": compiled,
    }
)
