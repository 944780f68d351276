"""What make's targets about the fused step do: tune its tiles, and time its kernels one by one."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from decodegap.settings import Context


def tune(ctx: "Context") -> None:
    """Find the fastest tiles of the fused step on the card that is here, and say them."""
    from decodegap import gpus, tune_card

    asked = tune_card.wish(os.environ)
    gpus.require(ctx.request.gpu, ctx.devices)
    tune_card.tune_all(asked, ctx.gpu.slug, ctx.store, lambda text: print(text, flush=True))


def bench_kernels(ctx: "Context") -> None:
    """Time each kernel of the fused step on the card that is here."""
    from decodegap import gpus, kernel_bench, locks, tune_card

    (model, tokens), bits = kernel_bench.cell(os.environ), tune_card.bits_of(os.environ)
    gpus.require(ctx.request.gpu, ctx.devices)
    with locks.hold(ctx.store):
        for text in kernel_bench.measured(model, tokens, ctx.gpu.slug, bits):
            print(text, flush=True)


VERBS: dict[str, "Callable[[Context], None]"] = {"tune": tune, "bench-kernels": bench_kernels}
