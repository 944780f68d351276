"""What NF4 is: sixteen levels of a normal distribution, one largest value a block, and those values in 8 bits again.

Source: the QLoRA paper (arXiv 2305.14314) for the levels and the double quantisation. Plain torch, for references.
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


def outer_values(quantised: Outer) -> torch.Tensor:
    """The largest values float32 `[blocks]` that `quantised` stands for."""
    numbers = torch.arange(quantised.codes.numel(), device=quantised.codes.device) // OUTER_BLOCK
    return quantised.levels[quantised.codes.int()] * quantised.absmax[numbers] + quantised.offset
