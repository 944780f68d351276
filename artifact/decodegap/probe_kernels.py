"""Triton kernels that read as fast as a card can: a good matrix-vector kernel's shape, with nothing to compute.

A program reads one contiguous slab in wide tiles, the next tile requested before the last is used, each line marked to
leave the cache first. Sums of 32-bit words wrap, so they are exact in any order and a single word left out shows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Tiling:
    """How a slab (bytes) is read: words a tile, warps a program. A tile is a multiple of 4 words x 32 lanes x warps."""

    slab_bytes: int
    tile: int
    warps: int

    @property
    def name(self) -> str:
        """What the record calls this kernel."""
        return f"triton {self.slab_bytes // 1024} KiB slab, tile {self.tile}, {self.warps} warps"


# Shapes around those that streamed fastest on an H200 in a fused decode step (4.48 TB/s): slabs of 28 to 57 KiB,
# half a slab or more in flight at once.
TILINGS = (
    Tiling(32 * 1024, 8192, 8),
    Tiling(32 * 1024, 4096, 8),
    Tiling(64 * 1024, 4096, 4),
    Tiling(64 * 1024, 2048, 2),
    Tiling(128 * 1024, 4096, 8),
)


@triton.jit
def _sum_slabs(words: tl.tensor, sums: tl.tensor, slab: tl.constexpr, width: tl.constexpr) -> None:
    first = words + tl.program_id(0).to(tl.int64) * slab + tl.arange(0, width)  # [width]
    total = tl.zeros([width], dtype=tl.int32)
    tile = tl.load(first, eviction_policy="evict_first")
    for at in tl.static_range(width, slab, width):
        ahead = tl.load(first + at, eviction_policy="evict_first")
        total += tile
        tile = ahead
    whole = tl.sum((total + tile).to(tl.int64), axis=0)  # in 64 bits, because Triton's interpreter cannot wrap a sum
    tl.store(sums + tl.program_id(0), whole.to(tl.int32))


def sum_slabs(words: torch.Tensor, sums: torch.Tensor, tiling: Tiling) -> None:
    """Read `words` (int32, whole slabs) once and leave each slab's wrapped sum in `sums` (int32, one a slab)."""
    _sum_slabs[(sums.numel(),)](words, sums, slab=tiling.slab_bytes // 4, width=tiling.tile, num_warps=tiling.warps)
