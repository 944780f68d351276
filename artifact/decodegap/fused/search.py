"""Which tiles are worth trying for a kernel."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from decodegap.errors import BadInputError
from decodegap.fused.shape import TILED, Shape
from decodegap.fused.tiles import Attention, Matvec, Tile, Tiles, check_tiles, least

LANES = 32
LOAD_BITS = 128  # that a thread loads at once
MOST_TILES = 40  # a row has: each is unrolled
FEWEST_WORDS, MOST_WORDS = 8, 112  # registers a thread that hold weights on their way
# Of a multiprocessor (CUDA C++ Programming Guide, technical specifications); 8.6 and 8.9 have fewer threads.
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32
REGISTER_STEP = 8  # that a thread's registers are handed out in
MOST_CAPPED = 0.25  # of a thread's registers that a cap may take away: more, and it spills
ORDER = ("attention", "o", "qkv", "down", "gate_up", "lm_head")  # what costs most beyond its bytes first


def candidates(kernel: str, shape: Shape, ctx: int) -> list[Tile]:
    """Tiles for a kernel that fit its shape and may be good, mixed, so that the first few differ as much as all do."""
    found: list[Tile] = list(_attention(shape, ctx) if kernel == "attention" else _matvec(kernel, shape))
    random.Random(kernel).shuffle(found)
    return found


def familiar(kernel: str, start: Tiles, known: Iterable[Tiles], shape: Shape) -> list[Tile]:
    """The tiles that `known` entries of a data file have for a kernel, if `start` can have them; each once."""
    found: dict[Tile, None] = {}
    for each in known:
        try:
            check_tiles(start.having(kernel, each.of(kernel)), shape)
        except BadInputError:
            continue  # another model's rows, or another number of bits
        found[each.of(kernel)] = None
    return list(found)


def tighter(tile: Tile, registers: int) -> list[Tile]:
    """`tile`, which takes so many registers a thread, capped so that one or two more programs fit on a multiprocessor.

    Only those a cap is likely to serve: what it takes away is `MOST_CAPPED` at most.
    """
    threads = LANES * tile.warps
    programs = REGISTERS // (threads * -(-registers // REGISTER_STEP) * REGISTER_STEP)
    more = [count for count in (programs + 1, programs + 2) if count <= min(PROGRAMS, THREADS // threads)]
    caps = [REGISTERS // (threads * count) // REGISTER_STEP * REGISTER_STEP for count in more]
    return [replace(tile, maxnreg=cap) for cap in dict.fromkeys(caps) if (1 - MOST_CAPPED) * registers <= cap]


def _matvec(kernel: str, shape: Shape) -> Iterator[Matvec]:
    """Rows and columns such that each thread has enough on its way; a tile is whole loads of whole warps."""
    columns, bits = shape.columns(kernel), shape.bits_of(kernel)
    pairs = 2 if kernel == "gate_up" else 1
    for warps in (4, 2, 8) if bits == 16 else (4, 8, 2, 16):  # one warp of bf16 never was any good
        fewest, width = least(kernel, shape, warps)
        for passes in (1, 2):
            block = passes * (LOAD_BITS // bits * LANES * warps if bits == 16 else width)
            tiles = -(-columns // block)
            if tiles > MOST_TILES or (tiles * block > 1.25 * columns and tiles > 1):
                continue  # too much code, or too much of the last tile is empty
            for rows in (2, 4, 1, 8) if bits == 16 else (fewest, 2 * fewest, 4 * fewest):
                if shape.rows(kernel) % rows or rows < fewest:
                    continue
                words = pairs * rows * block * bits // 32 // (LANES * warps)
                for ahead in (tile for tile in (1, 2, 3, 4, 7) if tile <= tiles):
                    if FEWEST_WORDS <= words * ahead <= MOST_WORDS:
                        yield Matvec(rows=rows, block=block, warps=warps, ahead=ahead)


def _attention(shape: Shape, ctx: int) -> Iterator[Attention]:
    """One tile of tokens a split with a little room to grow where the context is short, several where it is long."""
    for block, warps in ((128, 8), (64, 4), (32, 2), (64, 2), (32, 1), (16, 1), (128, 4)):
        for tiles in (1, 2, 4, 8):
            splits = -(-int(1.2 * ctx) // (block * tiles))
            programs = splits * shape.kv_heads
            if 48 <= programs <= 1100 and splits <= 160:
                for joined in (False, True) if splits <= 48 else (False,):
                    for double in (False, True) if tiles > 1 else (False,):
                        yield Attention(splits=splits, block=block, warps=warps, double=double, joined=joined)


assert set(ORDER) == set(TILED)
