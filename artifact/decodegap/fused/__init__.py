"""Our own decode step, as fast as the memory allows: a few kernels a layer, one graph, every byte read once."""

import importlib.util
import os

import torch

from decodegap import arms, gpus, models
from decodegap.arms import Setup, Step
from decodegap.errors import UnsupportedError
from decodegap.fused.layout import Loaded, load
from decodegap.fused.tiles import Tiles, default_tiles, load_tiles

PROGRAMMATIC = (9, 0)  # the first compute capability with programmatic dependent launch
LEAST = (8, 0)  # the first with bf16 matrix units and the atomics that the kernels use


def prepare(
    setup: Setup,
    *,
    tiles: Tiles | None = None,
    pdl: bool | None = None,
    capacity: int | None = None,
    bits: int = 16,
) -> Step:
    """The fused step as an arm: one graph replay decodes a token, chooses the next, and the cache grows by one.

    `tiles` default to those of the model and card in data/fused; `pdl` to what the card can do; `capacity` to the
    context and what a session decodes beyond it; `bits` of a projection's weight are 16, or 4 with a scale for each
    128 columns and the head in 16. The net of `setup` can run no other arm afterwards.
    """
    require(setup.device)
    from decodegap.fused import step

    found = tiles or tiles_for(setup, bits)
    loaded = load(setup, capacity=capacity, bits=bits)
    return step.capture(loaded, found, pdl=can_overlap(setup.device) if pdl is None else pdl)


def require(device: str) -> None:
    """Raise `UnsupportedError`, in one line, where the fused step cannot run."""
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError("the fused step needs Triton, which comes with a CUDA build of torch")
    if device.startswith("cuda"):
        if (seen := torch.cuda.get_device_capability()) < LEAST:
            raise UnsupportedError(f"the fused step needs compute capability 8.0, this card has {seen[0]}.{seen[1]}")
    elif os.environ.get("TRITON_INTERPRET") != "1":
        raise UnsupportedError("the fused step needs an NVIDIA GPU; on a CPU only its tests run, in an interpreter")


def can_overlap(device: str) -> bool:
    """Whether a kernel can start here while the one before it still runs."""
    return device.startswith("cuda") and torch.cuda.get_device_capability() >= PROGRAMMATIC


def tiles_for(setup: Setup, bits: int = 16) -> Tiles:
    """The tiles of the setup's model on the card that is here; untuned ones for a model that is not in the data."""
    from decodegap.fused.shape import shape_of

    shape = shape_of(setup.net.config.to_dict(), bits)
    for model in models.catalogue().values():
        if model.role == "paper" and shape_of(model.config, bits) == shape:
            found = gpus.detect()
            return load_tiles(model.slug, gpus.identify(found[0]).slug if found else "", setup.ctx, bits)
    return default_tiles(shape)


def _plain(setup: Setup) -> Step:
    return prepare(setup, pdl=False)


def _int4(setup: Setup) -> Step:
    return prepare(setup, bits=4)


arms.ARMS.update({"fused": prepare, "fused-plain": _plain, "fused-int4": _int4})

__all__ = ["Loaded", "Tiles", "can_overlap", "default_tiles", "load", "load_tiles", "prepare", "require", "tiles_for"]
