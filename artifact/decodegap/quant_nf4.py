"""What NF4 is: sixteen levels of a normal distribution, one largest value a block, and those values in 8 bits again.

Sources: the QLoRA paper (arXiv 2305.14314) for the levels and the double quantisation, and "8-bit Optimizers via
Block-wise Quantization" (arXiv 2110.02861) for the dynamic 8-bit levels. Plain torch, for references.
"""

from dataclasses import dataclass

import torch

from decodegap.errors import UnsupportedError

BLOCK = 64  # weights that share a largest value, along the flattened rows
OUTER_BLOCK = 256  # largest values that share one of their own, where they are quantised again
# The quantiles of a normal distribution that the QLoRA paper fixes, normalised to -1 and 1, with an exact zero.
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Outer:
    """Largest values in 8 bits: `levels[codes] * absmax + offset` by blocks of 256."""

    codes: torch.Tensor  # uint8 [blocks]
    absmax: torch.Tensor  # float32 [blocks / 256, rounded up]
    levels: torch.Tensor  # float32 [256]
    offset: torch.Tensor  # float32 scalar


@dataclass(frozen=True)
class Nf4:
    """A weight in NF4: two level numbers a byte, the first in the high half, and a largest value a block of 64."""

    packed: torch.Tensor  # uint8 [out * in / 2]
    absmax: torch.Tensor | Outer  # float32 [out * in / 64], or quantised again
    shape: tuple[int, int]

    def dequantised(self) -> torch.Tensor:
        """The weight that this stands for, float32 `[out, in]`."""
        levels = torch.tensor(LEVELS, device=self.packed.device)
        bytes_ = self.packed.flatten().int()
        values = levels[torch.stack([bytes_ >> 4, bytes_ & 15], dim=-1).flatten()]
        absmax = outer_values(self.absmax) if isinstance(self.absmax, Outer) else self.absmax
        return (values.reshape(-1, BLOCK) * absmax[:, None]).reshape(self.shape)


def require_nf4(shape: tuple[int, ...]) -> None:
    """Raise `UnsupportedError` unless each row of a weight of `shape` is whole blocks: the kernel needs it."""
    if len(shape) != 2 or 0 in shape or shape[1] % BLOCK:
        raise UnsupportedError(f"a weight of shape {list(shape)}: NF4 needs inputs in multiples of {BLOCK}")


def nf4(weight: torch.Tensor, *, double: bool) -> Nf4:
    """`weight` `[out, in]` rounded to the nearest NF4 level of its block, with `double` quantisation or without."""
    require_nf4(tuple(weight.shape))
    blocks = weight.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(dim=-1)
    scaled = blocks / torch.where(absmax == 0, torch.ones_like(absmax), absmax)[:, None]
    codes = nearest(scaled, torch.tensor(LEVELS, device=weight.device)).flatten()
    packed = (codes[::2] << 4) | codes[1::2]
    out, inputs = weight.shape
    return Nf4(packed, outer(absmax) if double else absmax, (out, inputs))


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The number of the nearest of the ascending `levels`, uint8 in the shape of `values`."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def outer(absmax: torch.Tensor) -> Outer:
    """Largest values float32 `[blocks]` in 8 bits, around their mean."""
    offset = absmax.mean()
    short = -absmax.numel() % OUTER_BLOCK
    blocks = torch.nn.functional.pad(absmax - offset, (0, short)).reshape(-1, OUTER_BLOCK)
    largest = blocks.abs().amax(dim=-1)
    levels = dynamic_levels().to(absmax.device)
    codes = nearest(blocks / torch.where(largest == 0, torch.ones_like(largest), largest)[:, None], levels)
    return Outer(codes.flatten()[: absmax.numel()], largest, levels, offset)


def outer_values(quantised: Outer) -> torch.Tensor:
    """The largest values float32 `[blocks]` that `quantised` stands for."""
    numbers = torch.arange(quantised.codes.numel(), device=quantised.codes.device) // OUTER_BLOCK
    return quantised.levels[quantised.codes.int()] * quantised.absmax[numbers] + quantised.offset


def dynamic_levels() -> torch.Tensor:
    """The 256 signed levels of the dynamic 8-bit type, float32, ascending.

    Decade `d` from 1e-6 to 1 has `2 ** d` levels a sign, at the middles of equal parts of 0.1 to 1; then 0 and 1.
    """
    decades = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        decades.append((edges[1:] + edges[:-1]) / 2 * 10 ** (exponent - 6))
    positive = torch.cat(decades)  # 127 levels
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0])]).sort().values
