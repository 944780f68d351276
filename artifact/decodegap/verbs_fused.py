"""What make's targets about the fused step do: tune its tiles, and time its kernels one by one."""

import os
from typing import TYPE_CHECKING

from decodegap import wishes
from decodegap.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from decodegap.settings import Context


def tune(ctx: "Context") -> None:
    """Find the fastest tiles of the fused step on the card that is here, and say them."""
    from decodegap import tune_card

    asked = tune_card.wish(os.environ)
    _require_cuda(ctx)
    tune_card.tune_all(asked, ctx.gpu.slug, ctx.store, lambda text: print(text, flush=True))


def bench_kernels(ctx: "Context") -> None:
    """Time each kernel of the fused step on the card that is here."""
    from decodegap import kernel_bench, locks

    (model, tokens), bits = _bench_settings()
    _require_cuda(ctx)
    with locks.hold(ctx.store):
        for text in kernel_bench.measured(model, tokens, ctx.gpu.slug, bits):
            print(text, flush=True)


def _bench_settings() -> tuple[tuple[str, int], int]:
    return wishes.cell(os.environ), wishes.bits(os.environ)


def _require_cuda(ctx: "Context") -> None:
    """Raise an error of one line unless the card asked for is here, and torch can use it."""
    from decodegap import gpus, settings

    gpus.require(ctx.request.gpu, ctx.devices)
    settings.require_card(ctx)
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(f"torch cannot use the card that the driver lists; make doctor GPU={ctx.gpu.slug}")


# What reads the settings of a verb, without torch.
CHECKS: dict[str, "Callable[[Context], object]"] = {
    "tune": lambda _: wishes.wish(os.environ),
    "bench-kernels": lambda _: _bench_settings(),
}
VERBS: dict[str, "Callable[[Context], None]"] = {"tune": tune, "bench-kernels": bench_kernels}
