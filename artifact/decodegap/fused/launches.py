"""Which kernels a step launches, with which grids, constants and options; nothing here needs a GPU, or Triton."""

import math
from dataclasses import dataclass, field

from decodegap.fused.shape import Shape
from decodegap.fused.tiles import Matvec, Tiles

# The type of each pointer that a kernel takes, by name; whatever else it takes is a constant. All are 16-byte aligned.
POINTERS = {
    **dict.fromkeys(("weights", "x", "gain"), "*i32"),  # pairs of bf16, or eight codes
    **dict.fromkeys(("scales", "table", "hidden", "bias", "residual", "out", "query", "keys", "values"), "*bf16"),
    **dict.fromkeys(("next_gain", "scaled"), "*bf16"),
    **dict.fromkeys(("squares", "cos", "sin", "partial", "stats", "logits"), "*fp32"),
    "arrivals": "*i32",
    "state": "*i64",
}
PADDED_HEADS = 8  # columns of a matrix unit's smallest product
COMBINE_WIDTH = 32  # dimensions a program of `combine`


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step: the function in kernels.py, its grid, constants and compiler options."""

    name: str
    function: str
    grid: tuple[int, ...]
    constants: dict[str, int | float | bool] = field(hash=False)
    warps: int
    maxnreg: int | None = None

    def options(self, *, pdl: bool) -> dict[str, int | bool]:
        """What the compiler is told beside the constants."""
        cap = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {"num_warps": self.warps, "num_stages": 1, "launch_pdl": pdl, **cap}


def kernels_of(
    shape: Shape, tiles: Tiles, *, capacity: int, pdl: bool, without_wait: str | None = None
) -> dict[str, Kernel]:
    """Each kernel of a step over a cache of `capacity` tokens, by name, in the order of a step.

    `without_wait` names one that does not wait for the kernel before it, and so computes nonsense: for tests.
    """
    scale = math.log2(math.e) / math.sqrt(shape.head_dim)

    def launch(constants: dict[str, int | float | bool], name: str) -> dict[str, int | float | bool]:
        return {**constants, "PDL": pdl, "WAIT": name != without_wait}

    def matvec(name: str, function: str, **constants: float) -> Kernel:
        tile = tiles.of(name)
        assert isinstance(tile, Matvec)
        cut = {"COLUMNS": shape.columns(name), "ROWS": tile.rows, "BLOCK": tile.block, "AHEAD": tile.ahead}
        cut["BITS"] = shape.bits_of(name)
        grid = (shape.rows(name) // tile.rows,)
        return Kernel(name, function, grid, launch({**cut, **constants}, name), tile.warps, tile.maxnreg)

    heads = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "DIM": shape.head_dim, "CAPACITY": capacity}
    cut = tiles.attention
    attention = {
        "scale": scale,
        "GROUP": shape.group,
        "PADDED": max(PADDED_HEADS, _power(shape.group)),
        "DIM": shape.head_dim,
        "CAPACITY": capacity,
        "SPLITS": cut.splits,
        "BLOCK": cut.block,
        "DOUBLE": cut.double,
        "JOINED": cut.joined,
    }
    width = min(COMBINE_WIDTH, shape.head_dim)
    combine = {key: attention[key] for key in ("scale", "GROUP", "DIM", "CAPACITY", "SPLITS")}
    combine |= {"PADDED": _power(cut.splits), "WIDTH": width}
    embed = {"VOCAB": shape.vocab, "COLUMNS": shape.hidden, "CAPACITY": capacity, "BLOCK": _power(shape.hidden)}
    found = [
        Kernel("embed", "embed", (1,), {**embed, "BITS": shape.bits}, 8),
        matvec("qkv", "qkv", eps=shape.eps, BIAS=shape.bias, **heads),
        Kernel(
            "attention",
            "attention",
            (shape.kv_heads, cut.splits),
            launch(attention, "attention"),
            cut.warps,
            cut.maxnreg,
        ),
        Kernel("combine", "combine", (shape.heads, shape.head_dim // width), launch(combine, "combine"), 1),
        matvec("o", "project"),
        matvec("gate_up", "gate_up", eps=shape.eps),
        matvec("down", "project"),
        matvec("lm_head", "lm_head", eps=shape.eps),
    ]
    return {kernel.name: kernel for kernel in found if not (cut.joined and kernel.name == "combine")}


def _power(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
