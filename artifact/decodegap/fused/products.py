"""Matrix-vector products of one program: some rows of weights, in bf16 or in 4 bits, times one vector, summed in fp32.

Weights and vectors are read as 32-bit words: a word stays one register until it is used, and no instruction before
the wait needs what a load brings (unpacked early, it would hold up the wait and take more registers).

A program reads its rows in tiles of `BLOCK` columns. `AHEAD` of them are on their way at any time; the first ones are
asked for before the wait, the part of the vector that they meet after it. Products with weights in 4 bits are in
codes.py.
"""

import triton
import triton.language as tl

from decodegap.fused.codes import code_product, code_scales, first_code_tiles
from decodegap.fused.device import high_half, low_half
from decodegap.fused.shape import UNIT_ROWS

_SUMMED = tl.constexpr(UNIT_ROWS)  # rows that every program has a multiple of in 4 bits
_WORDS = tl.constexpr(4)  # a thread loads so many neighbouring words at once: 16 bytes


@triton.jit
def _tile(at: tl.constexpr, weights: tl.tensor, row: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Tile `at` of these rows of `K` columns, `[ROWS, words]`; a last one past the row's end is filled with zeros."""
    columns = tl.arange(0, BLOCK // 2)
    slab = weights + row[:, None].to(tl.int64) * (K // 2) + columns[None, :]
    if (at + 1) * BLOCK <= K:
        return tl.load(slab + at * (BLOCK // 2))
    return tl.load(slab + at * (BLOCK // 2), mask=(columns < (K - at * BLOCK) // 2)[None, :], other=0)


@triton.jit
def first_tiles(
    weights: tl.tensor,
    row: tl.tensor,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tuple:
    """The first `AHEAD` tiles of these `ROWS` rows, all asked for at once."""
    if BITS == 16:
        tiles = ()
        for at in tl.static_range(min(AHEAD, (K + BLOCK - 1) // BLOCK)):
            tiles = tiles + (_tile(at, weights, row, K, BLOCK),)
    else:
        tiles = first_code_tiles(weights, ROWS, K, BLOCK, AHEAD)
    return tiles


@triton.jit
def first_scales(
    scales: tl.tensor, ROWS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """The scales that are applied first; nothing of use for bf16 weights, which have none."""
    return 0.0 if BITS == 16 else code_scales(0, scales, ROWS, K, BLOCK)


@triton.jit
def _part(at: tl.constexpr, vector: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The words of a bf16 vector that meet tile `at`, `[BLOCK / 2]`, with zeros past its end."""
    columns = tl.arange(0, BLOCK // 2)
    if (at + 1) * BLOCK <= K:
        return tl.load(vector + at * (BLOCK // 2) + columns)
    return tl.load(vector + at * (BLOCK // 2) + columns, mask=columns < (K - at * BLOCK) // 2, other=0)


@triton.jit
def first_parts(
    vector: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, BITS: tl.constexpr
) -> tl.tuple:
    """The parts of a vector that meet the first `AHEAD` tiles; none in 4 bits, where gains are applied before."""
    parts = ()
    if BITS == 16:
        for at in tl.static_range(min(AHEAD, (K + BLOCK - 1) // BLOCK)):
            parts = parts + (_part(at, vector, K, BLOCK),)
    return parts


@triton.jit
def _four(words: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tuple:
    """The four neighbours that each thread holds, apart: `[ROWS, WIDTH]` to four of `[ROWS, WIDTH / 4]`."""
    even, odd = tl.split(tl.reshape(words, [ROWS, WIDTH // _WORDS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _eight(words: tl.tensor, THREADS: tl.constexpr) -> tl.tuple:
    """The eight numbers in the four words of each thread, to eight of `[1, threads]` in fp32."""
    a, b, c, d = _four(tl.reshape(words, [1, THREADS * _WORDS]), 1, THREADS * _WORDS)
    return low_half(a), high_half(a), low_half(b), high_half(b), low_half(c), high_half(c), low_half(d), high_half(d)


@triton.jit
def _squares(numbers: tl.tuple) -> tl.tensor:
    """The sum of the squares of a thread's eight numbers."""
    total = numbers[0] * numbers[0]
    for index in tl.static_range(1, 8):
        total += numbers[index] * numbers[index]
    return total


@triton.jit
def _times(numbers: tl.tuple, gains: tl.tuple) -> tl.tuple:
    """Eight numbers times eight gains."""
    found = ()
    for index in tl.static_range(8):
        found = found + (numbers[index] * gains[index],)
    return found


@triton.jit
def _product(
    tiles: tl.tuple,
    gains: tl.tuple,
    weights: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    row: tl.tensor,
    eps: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tl.tensor:
    """`product` for weights in bf16. The sum of squares is taken beside the product, which it scales at the end."""
    THREADS: tl.constexpr = BLOCK // 2 // _WORDS
    parts = first_parts(x, K, BLOCK, AHEAD, 16)
    total = tl.zeros([ROWS, THREADS], dtype=tl.float32)
    squares = tl.zeros([1, THREADS], dtype=tl.float32)
    for at in tl.static_range((K + BLOCK - 1) // BLOCK):
        if at + AHEAD < (K + BLOCK - 1) // BLOCK:
            tiles = tiles + (_tile(at + AHEAD, weights, row, K, BLOCK),)
            parts = parts + (_part(at + AHEAD, x, K, BLOCK),)
            if NORM:
                gains = gains + (_part(at + AHEAD, gain, K, BLOCK),)
        words = _four(tiles[at], ROWS, BLOCK // 2)
        numbers = _eight(parts[at], THREADS)
        if NORM:
            squares += _squares(numbers)
            numbers = _times(numbers, _eight(gains[at], THREADS))
        for index in tl.static_range(4):
            total += low_half(words[index]) * numbers[2 * index]
            total += high_half(words[index]) * numbers[2 * index + 1]
    y = tl.sum(total, axis=1)
    if NORM:
        y = y * tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    return y


@triton.jit
def store_for_norm(
    numbers: tl.tensor,
    gains: tl.tensor,
    row: tl.tensor,
    scaled: tl.tensor,
    squares: tl.tensor,
    count: tl.tensor,
    ROWS: tl.constexpr,
) -> None:
    """Store what a norm over `count` numbers needs of these `ROWS`: each times its gain, and sums of their squares.

    What is scaled is rounded once more, as the stock model rounds its norm; the norm's other factor waits for the sums.
    """
    numbers = numbers.to(tl.float32)
    tl.store(scaled + row, (numbers * gains.to(tl.float32)).to(scaled.dtype.element_ty), mask=row < count)
    sums = tl.sum(tl.reshape(numbers * numbers, [ROWS // _SUMMED, _SUMMED]), axis=1)
    part = tl.program_id(0) * (ROWS // _SUMMED) + tl.arange(0, ROWS // _SUMMED)
    tl.store(squares + part, sums, mask=part < count // _SUMMED)


@triton.jit
def product(
    tiles: tl.tuple,
    found: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    row: tl.tensor,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """`ROWS` rows of `K` columns times `x`, `[ROWS]` in fp32.

    `tiles` and the scales `found` are the first ones; more are asked for as they are used up.
    """
    if BITS == 16:
        y = _product(tiles, (), weights, x, x, row, 0.0, False, ROWS, K, BLOCK, AHEAD)
    else:
        y = code_product(tiles, found, weights, scales, x, ROWS, K, BLOCK, AHEAD)
    return y


@triton.jit
def normed_product(
    tiles: tl.tuple,
    found: tl.tensor,
    gains: tl.tuple,
    weights: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    squares: tl.tensor,
    row: tl.tensor,
    eps: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """`ROWS` rows of `K` columns times the RMS norm of `x` with `gain`, `[ROWS]` in fp32; `gains` are the first parts.

    In 4 bits, where every instruction counts, `x` comes times its gain, and `squares` are sums of what it was before.
    """
    if BITS == 16:
        y = _product(tiles, gains, weights, x, gain, row, eps, True, ROWS, K, BLOCK, AHEAD)
    else:
        part = tl.arange(0, triton.next_power_of_2(K // _SUMMED))
        sums = tl.load(squares + part, mask=part < K // _SUMMED, other=0.0)
        y = code_product(tiles, found, weights, scales, x, ROWS, K, BLOCK, AHEAD)
        y = y * tl.rsqrt(tl.sum(sums, axis=0) / K + eps)
    return y
