"""Matrix-vector products with weights in 4 bits, on matrix units: what a thread multiplies is what it has loaded.

A weight is `(code - 8) * scale`, with a scale for each 128 columns of a row. Matrix units multiply tiles of 16 rows by
16 columns, and of such a tile a thread holds four columns of two rows. `layout.in_tiles` packs those eight codes into
one word, so that they become the operand without moving between threads: thread 5 of a warp, say, holds rows 1 and 9
and columns 8 to 15 of each 32. Set before it the right bits, and a code is the fraction of a bf16, 128 + code, in one
instruction for two codes. What that adds to a sum, 136 (128 + 8) times the sum of the vector's part, is taken off when
the scales are applied.

The vector is the other operand, its eight columns all alike, and each thread loads its numbers of it too. The
product's columns are alike then; so column n keeps the product over the n-th of eight groups, and the scales of eight
groups are applied at once: one turn.

Qwen2.5-7B in 4 bits on one H200, each kernel alone, against a target at 4529 GB/s:

| kernel  |    MB | target us | alone us | GB/s |
| ------- | ----: | --------: | -------: | ---: |
| qkv     |  8.52 |       1.9 |      5.9 | 1436 |
| o       |  6.63 |       1.5 |      4.6 | 1432 |
| gate_up | 70.02 |      15.5 |     20.6 | 3399 |
| down    | 35.02 |       7.7 |     14.2 | 2463 |
"""

import triton
import triton.language as tl

from decodegap.fused.device import high_half, low_half, unknown_zero
from decodegap.fused.shape import GROUP, UNIT_ROWS

_GROUP = tl.constexpr(GROUP)
_HIGH = tl.constexpr(UNIT_ROWS)
_GROUP_WORDS = tl.constexpr(UNIT_ROWS * GROUP // 8)  # two loads of 16 bytes for each of 32 threads
_TURN = tl.constexpr(8)  # columns of a matrix unit's product
_ADDED = tl.constexpr(136.0)


@triton.jit
def _code_tile(
    at: tl.constexpr, weights: tl.tensor, ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The words of tile `at`, `[groups, ROWS / 16, 2, 128]`; those of groups past the row's end are zero."""
    group = tl.arange(0, BLOCK // _GROUP) + at * (BLOCK // _GROUP)
    block = tl.program_id(0) * (ROWS // _HIGH) + tl.arange(0, ROWS // _HIGH)
    word = tl.arange(0, 2)[:, None] * (_GROUP_WORDS // 2) + tl.arange(0, _GROUP_WORDS // 2)[None, :]
    first = group[:, None] * _GROUP_WORDS + block[None, :] * (K // _GROUP * _GROUP_WORDS)
    place = weights + first[:, :, None, None] + word[None, None, :, :]
    if (at + 1) * BLOCK <= K:
        return tl.load(place)
    return tl.load(place, mask=(group < K // _GROUP)[:, None, None, None], other=0)


@triton.jit
def first_code_tiles(
    weights: tl.tensor, ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
) -> tl.tuple:
    """The first `AHEAD` tiles, all asked for at once."""
    tiles = ()
    for at in tl.static_range(min(AHEAD, (K + BLOCK - 1) // BLOCK)):
        tiles = tiles + (_code_tile(at, weights, ROWS, K, BLOCK),)
    return tiles


@triton.jit
def code_scales(
    turn: tl.constexpr, scales: tl.tensor, ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The scales of the eight tiles of a turn, `[groups, ROWS, 8]`; past the row's end they are zero."""
    SPREAD: tl.constexpr = BLOCK // _GROUP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = (tl.arange(0, _TURN) + turn * _TURN)[None, None, :] * SPREAD + tl.arange(0, SPREAD)[:, None, None]
    return tl.load(scales + row[None, :, None] * (K // _GROUP) + group, mask=group < K // _GROUP, other=0.0)


@triton.jit
def _quarter(
    at: tl.constexpr, quarter: tl.constexpr, vector: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Words of a bf16 vector as threads need them for 32 columns of each group of tile `at`, `[4, 8, groups, 4]`.

    Four threads load different columns, eight the same. They come first because the compiler lays threads along the
    first dimensions.
    """
    group = tl.arange(0, BLOCK // _GROUP)[None, None, :, None] + at * (BLOCK // _GROUP)
    word = tl.arange(0, 4)[:, None, None, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    first = group * (_GROUP // 2) + quarter * (_GROUP // 8) + tl.arange(0, _TURN)[None, :, None, None] * 0
    if (at + 1) * BLOCK <= K:
        return tl.load(vector + first + word)
    return tl.load(vector + first + word, mask=group < K // _GROUP, other=0)


@triton.jit
def _code_part(at: tl.constexpr, vector: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """What each thread needs of a bf16 vector for tile `at`, in words, `[4, 8, groups, 4, 2, 2]`.

    The last two are the quarter: which of a half, and which half of the group.
    """
    front = tl.join(_quarter(at, 0, vector, K, BLOCK), _quarter(at, 1, vector, K, BLOCK))
    back = tl.join(_quarter(at, 2, vector, K, BLOCK), _quarter(at, 3, vector, K, BLOCK))
    return tl.join(front, back)


@triton.jit
def _halves(words: tl.tensor) -> tl.tensor:
    """The two bf16 of each word, in a last dimension of two."""
    halves = tl.join((words & 0xFFFF).to(tl.int16), (words >> 16).to(tl.int16))
    return halves.to(tl.bfloat16, bitcast=True)


@triton.jit
def _operand(words: tl.tensor, exponents: tl.tensor, SPREAD: tl.constexpr, ROWS: tl.constexpr) -> tl.tensor:
    """The words of a tile as 128 + code, `[groups, ROWS, 128]` in bf16."""
    upper = tl.join(_halves((words & 0x000F000F) | exponents), _halves(((words >> 4) & 0x000F000F) | exponents))
    lower = tl.join(_halves(((words >> 8) & 0x000F000F) | exponents), _halves(((words >> 12) & 0x000F000F) | exponents))
    # After the first two: half of the group, row, columns' place, word of four, and in the word the column's lowest
    # bit, its next one, and whether the row is 8 further.
    split = tl.reshape(tl.join(upper, lower), [SPREAD, ROWS // _HIGH, 2, 8, 4, 4, 2, 2, 2])
    return tl.reshape(tl.permute(split, 0, 1, 8, 3, 2, 5, 4, 7, 6), [SPREAD, ROWS, _GROUP])


@triton.jit
def _other_operand(numbers: tl.tensor, SPREAD: tl.constexpr) -> tl.tensor:
    """A part's numbers as `[groups, 128, 8]`, in the order that `_operand` gives columns."""
    # Columns' place, threads that hold the same, groups, operand, the column's upper bit, quarter, half, lowest bit.
    split = tl.reshape(numbers, [4, _TURN, SPREAD, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(split, 2, 6, 5, 3, 0, 4, 7, 1), [SPREAD, _GROUP, _TURN])


@triton.jit
def _turn_sums(turn: tl.constexpr, x: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The sums of the vector's parts for the eight tiles of a turn, `[groups, 8]`."""
    SPREAD: tl.constexpr = BLOCK // _GROUP
    group = (tl.arange(0, _TURN) + turn * _TURN)[None, :] * SPREAD + tl.arange(0, SPREAD)[:, None]
    place = group[:, :, None] * (_GROUP // 2) + tl.arange(0, _GROUP // 2)[None, None, :]
    words = tl.load(x + place, mask=(group < K // _GROUP)[:, :, None], other=0)
    return tl.sum(low_half(words) + high_half(words), axis=2)


@triton.jit
def code_product(
    tiles: tl.tuple,
    found: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tl.tensor:
    """As `products.product`: `ROWS` rows of `K` columns times `x`; `found` are the first scales."""
    SPREAD: tl.constexpr = BLOCK // _GROUP
    COUNT: tl.constexpr = (K + BLOCK - 1) // BLOCK
    TURN: tl.constexpr = 8  # as _TURN, by which Triton's interpreter cannot divide a plain number
    column = tl.arange(0, _TURN)[None, None, :]
    exponents = unknown_zero(weights) | 0x43004300
    parts = (_code_part(0, x, K, BLOCK),)
    y = tl.zeros([SPREAD, ROWS], dtype=tl.float32)
    products = tl.zeros([SPREAD, ROWS, _TURN], dtype=tl.float32)
    for at in tl.static_range(COUNT):
        if at + AHEAD < COUNT:
            tiles = tiles + (_code_tile(at + AHEAD, weights, ROWS, K, BLOCK),)
        if at + 1 < COUNT:
            parts = parts + (_code_part(at + 1, x, K, BLOCK),)
        numbers = _other_operand(_halves(parts[at]), SPREAD)
        product = tl.dot(_operand(tiles[at], exponents, SPREAD, ROWS), numbers)
        products = tl.where(column == at % TURN, product, products)
        if at % TURN == TURN - 1 or at == COUNT - 1:
            if at >= TURN:
                found = code_scales(at // TURN, scales, ROWS, K, BLOCK)
            sums = _turn_sums(at // TURN, x, K, BLOCK)
            y += tl.sum((products - sums[:, None, :] * _ADDED) * found.to(tl.float32), axis=2)
    return tl.sum(y, axis=0)
