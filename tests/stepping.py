"""Models prefilled and ready to step, for the tests of arms."""

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from decodegap import decode, models
from decodegap.arms import Setup
from decodegap.models import Model

CTX = 40
LAYERS = 2  # of every tiny model
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}


def setup(
    slug: str = "tiny-qwen2", *, ctx: int = CTX, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Setup:
    """A synthetic model whose cache holds `ctx` tokens, and the token that comes next."""
    net = build(models.lookup(slug), dtype, device)
    cache, logits = decode.prefill(net, prompt(slug, ctx, device), chunk=16)
    return Setup(net, cache, logits.argmax(dim=-1, keepdim=True), ctx, device)


def build(model: Model, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PreTrainedModel:
    """`model` with synthetic weights."""
    return decode.build(model, weights="synthetic", weights_dir=None, device=device, dtype=dtype, seed=0)


def wide(slug: str = "tiny-qwen2", **changes: Any) -> Model:
    """A tiny model with projections that every quantised path can hold; Qwen2's has biases in three of the seven."""
    model = models.lookup(slug)
    return replace(model, config=model.config | WIDE | {"num_hidden_layers": LAYERS, "vocab_size": 512} | changes)


def prefilled(net: PreTrainedModel, past: PreTrainedModel | None = None, *, ctx: int = 24) -> Setup:
    """`net` of a `wide` model over a cache of `ctx` tokens, which `past` (itself, if not given) filled."""
    with torch.inference_mode():
        cache, logits = decode.prefill(past or net, decode.prompt(512, ctx, 1, "cpu"), chunk=16)
    return Setup(net, cache, logits.argmax(dim=-1, keepdim=True), ctx, "cpu")


def prompt(slug: str, ctx: int = CTX, device: str = "cpu") -> torch.Tensor:
    """The tokens that `setup` prefills, `[1, ctx]`."""
    return decode.prompt(models.lookup(slug).config["vocab_size"], ctx, 1, device)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())
