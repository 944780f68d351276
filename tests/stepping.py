"""Models prefilled and ready to step, for the tests of arms."""

import torch

from decodegap import decode, models
from decodegap.arms import Setup

CTX = 40


def setup(
    slug: str = "tiny-qwen2", *, ctx: int = CTX, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Setup:
    """A synthetic model whose cache holds `ctx` tokens, and the token that comes next."""
    model = models.lookup(slug)
    net = decode.build(model, weights="synthetic", weights_dir=None, device=device, dtype=dtype, seed=0)
    cache, logits = decode.prefill(net, prompt(slug, ctx, device), chunk=16)
    return Setup(net, cache, logits.argmax(dim=-1, keepdim=True), ctx, device)


def prompt(slug: str, ctx: int = CTX, device: str = "cpu") -> torch.Tensor:
    """The tokens that `setup` prefills, `[1, ctx]`."""
    return decode.prompt(models.lookup(slug).config["vocab_size"], ctx, 1, device)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())
