"""How far an arm's logits are from the truth: one step in higher precision, written from the architecture."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional
from transformers import Cache, PreTrainedModel

from decodegap.schema import Check

# An arm may be this much further from the reference than the stock step is. Other kernels round elsewhere, which moves
# the error by some 10 to 20% either way; a dropped bias, a shifted position or a wrong scale multiplies it.
ALLOWED_MULTIPLE = 1.5
# The reference's first two logits must be this many typical errors apart before an arm has to agree on the first.
# Nearer ones may swap within rounding: the difference of two errors is sqrt(2) of one, and there are many logits.
DECISIVE_ERRORS = 6.0
ROUNDING = 1e-6  # errors below this are fp32 rounding: an fp32 arm's is a few times 1e-7, larger or smaller by chance
NOT_FINITE = 1e9  # the error of NaN: a record holds no Infinity
HEAD_ROWS = 16384  # rows of the output head upcast at a time: 0.23 GB in fp32 for a hidden size of 3584


@runtime_checkable
class Dequantised(Protocol):
    """A linear module that holds its weight packed, and says what it stands for."""

    bias: torch.Tensor | None

    def dequantised(self) -> torch.Tensor:
        """The weight `[out, in]` in fp32."""


def reference_logits(net: PreTrainedModel, cache: Cache, token: torch.Tensor, ctx: int) -> torch.Tensor:
    """Logits `[1, vocab]` after `token` `[1, 1]` at position `ctx - 1`, over the first `ctx - 1` tokens of `cache`.

    In fp32, or in fp64 for a net that is itself fp32: a reference must be finer than what it judges. Weights are
    upcast, or dequantised, one matrix at a time, so that it fits beside the weights on a small card; K and V are taken
    as cached, because that is what every arm is given.
    """
    dtype = torch.float64 if net.dtype == torch.float32 else torch.float32
    model = net.get_submodule("model")
    past: list[Any] = list(cache.layers)
    hidden = model.get_submodule("embed_tokens").get_parameter("weight")[token].to(dtype)  # [1, 1, hidden]
    # The net's own frequencies, with whatever scaling its config asks for; the module computes in fp32.
    cos, sin = model.get_submodule("rotary_emb")(hidden.float(), torch.full_like(token, ctx - 1))  # [1, 1, head_dim]
    rope = cos[0].to(dtype), sin[0].to(dtype)
    with _exact():
        for kept, (_, layer) in zip(past, model.get_submodule("layers").named_children(), strict=True):
            keys, values = (cached[0, :, : ctx - 1].to(dtype) for cached in (kept.keys, kept.values))
            hidden = _layer(hidden, layer, keys, values, rope=rope, eps=net.config.rms_norm_eps)
        hidden = _rms_norm(hidden, model.get_submodule("norm"), net.config.rms_norm_eps)[:, -1]  # [1, hidden]
        head = net.get_submodule("lm_head").get_parameter("weight")
        return torch.cat([hidden @ rows.to(dtype).T for rows in head.split(HEAD_ROWS)], dim=-1)


def check(
    arm: str,
    logits: torch.Tensor,
    eager_logits: torch.Tensor,
    reference: torch.Tensor,
    *,
    multiple: float = ALLOWED_MULTIPLE,
) -> Check:
    """Hold an arm's `logits` and stock eager's, all `[1, vocab]`, against the `reference` of the same step.

    The error is relative L2. It passes within `multiple` of eager's own, if eager itself is near the reference, and if
    it also picks the reference's token wherever the reference is decided by more than rounding. Logits that are not
    finite have error 1e9.
    """
    error, eager_error = relative_error(logits, reference), relative_error(eager_logits, reference)
    first, second = reference.flatten().topk(2).values.tolist()
    margin = (first - second) / float(reference.std())
    found = Check(
        arm=arm,
        error=error,
        eager_error=eager_error,
        allowed_multiple=multiple,
        argmax_equal=bool(logits.argmax() == reference.argmax()),
        reference_margin=margin,
        passed=False,
    )
    return found.model_copy(update={"passed": holds(found)})


def holds(result: Check) -> bool:
    """Whether the errors and the token of `result` are those of one that passes, whatever else it failed for."""
    decided = result.reference_margin > DECISIVE_ERRORS * max(result.error, result.eager_error)
    return result.proves and _is_near(result) and (result.argmax_equal or not decided)


def _is_near(result: Check) -> bool:
    return result.error <= result.allowed_multiple * max(result.eager_error, ROUNDING)


def failure(result: Check) -> str:
    """Why `result` did not pass, in a phrase."""
    if not result.proves:
        return f"stock eager itself is {result.eager_error:.3g} (relative) from the reference, so it proves nothing"
    if not _is_near(result):
        return (
            f"relative error {result.error:.3g} against the reference, more than {result.allowed_multiple} x eager's "
            f"own {result.eager_error:.3g}"
        )
    return f"another token than the reference, which is decided by {result.reference_margin:.3g} standard deviations"


def relative_error(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 distance of `found` from `reference`; 1e9 if it is not finite."""
    exact = reference.double()
    distance = float((found.double() - exact).norm() / exact.norm())
    return distance if math.isfinite(distance) else NOT_FINITE


@contextlib.contextmanager
def _exact() -> Iterator[None]:
    """Full fp32 products: no TF32, whatever the process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _layer(
    hidden: torch.Tensor,
    layer: nn.Module,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rope: tuple[torch.Tensor, torch.Tensor],
    eps: float,
) -> torch.Tensor:
    """One decoder layer on `hidden` `[1, 1, hidden]`, with what it has cached `[kv_heads, n, head_dim]`."""
    normed = _rms_norm(hidden, layer.get_submodule("input_layernorm"), eps)
    hidden = hidden + _attention(normed, layer.get_submodule("self_attn"), keys, values, rope)
    normed = _rms_norm(hidden, layer.get_submodule("post_attention_layernorm"), eps)
    mlp = layer.get_submodule("mlp")
    gated = functional.silu(_linear(normed, mlp, "gate_proj")) * _linear(normed, mlp, "up_proj")
    return hidden + _linear(gated, mlp, "down_proj")


def _linear(x: torch.Tensor, module: nn.Module, name: str) -> torch.Tensor:
    """`x` through the weight, and the bias if there is one, of the linear module `name` in `module`, upcast to `x`."""
    linear = module.get_submodule(name)
    if isinstance(linear, Dequantised):
        weight, bias = linear.dequantised(), linear.bias
    else:
        assert isinstance(linear, nn.Linear)
        weight, bias = linear.weight, linear.bias
    out = x @ weight.to(x.dtype).T
    return out if bias is None else out + bias.to(x.dtype)


def _rms_norm(x: torch.Tensor, module: nn.Module, eps: float) -> torch.Tensor:
    gain = module.get_parameter("weight").to(x.dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def _rotate(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary position embedding of `x` `[heads, head_dim]`; the two of a pair are `head_dim / 2` apart."""
    low, high = x.chunk(2, dim=-1)
    return x * rope[0] + torch.cat([-high, low], dim=-1) * rope[1]


def _attention(
    x: torch.Tensor,
    module: nn.Module,
    keys: torch.Tensor,
    values: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Grouped-query attention of one token `x` `[1, 1, hidden]` over the cached ones `[kv_heads, n, d]` and itself."""
    kv_heads, _, dim = keys.shape
    query = _rotate(_linear(x, module, "q_proj").view(-1, dim), rope)  # [heads, d]
    key = _rotate(_linear(x, module, "k_proj").view(kv_heads, dim), rope)
    value = _linear(x, module, "v_proj").view(kv_heads, dim)
    keys = torch.cat([keys, key[:, None]], dim=1)  # [kv_heads, n + 1, d]
    values = torch.cat([values, value[:, None]], dim=1)
    # Query heads that share a K/V head are neighbours.
    scores = query.view(kv_heads, -1, dim) @ keys.transpose(1, 2) / math.sqrt(dim)  # [kv_heads, group, n + 1]
    mixed = scores.softmax(dim=-1) @ values
    return _linear(mixed.reshape(1, 1, -1), module, "o_proj")
