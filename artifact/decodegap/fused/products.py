"""Matrix-vector products of one program: some rows of weights, in bf16 or in 4 bits, times one vector, summed in fp32.

Weights and vectors are read as 32-bit words: a word stays one register until it is used, and no instruction before
the wait needs what a load brings (unpacked early, it would hold up the wait and take more registers).

A program reads its rows in tiles of `BLOCK` columns. `AHEAD` of them are on their way at any time; the first ones are
asked for before the wait, the part of the vector that they meet after it.

In 4 bits, weights are `(code - 8) * scale` with a scale for each 128 columns, packed as `layout.in_runs` does: of a
run of 512 columns, which is four groups, thread t of 16 reads four words, and word q holds the codes of columns
8 t to 8 t + 7 of group q.
"""

import triton
import triton.language as tl

from decodegap.fused.device import high_half, low_half

_WORDS = tl.constexpr(4)  # a thread loads so many neighbouring words at once: 16 bytes
_RUN = tl.constexpr(512)
_GROUP = tl.constexpr(128)
_LANES = tl.constexpr(16)  # threads that share a run


@triton.jit
def columns_of(BLOCK: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The words of a tile."""
    return tl.arange(0, BLOCK * BITS // 32)


@triton.jit
def slab_of(weights: tl.tensor, row: tl.tensor, columns: tl.tensor, K: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Where the first tile of these rows of `K` columns lies, `[ROWS, words]`."""
    return weights + row[:, None].to(tl.int64) * (K * BITS // 32) + columns[None, :]


@triton.jit
def _tile(
    at: tl.constexpr, slab: tl.tensor, columns: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Tile `at` of a slab; a last one past the row's end is filled with zeros."""
    if (at + 1) * BLOCK <= K:
        return tl.load(slab + at * BLOCK * BITS // 32)
    inside = columns < (K - at * BLOCK) * BITS // 32
    return tl.load(slab + at * BLOCK * BITS // 32, mask=inside[None, :], other=0)


@triton.jit
def first_tiles(
    slab: tl.tensor,
    columns: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tuple:
    """The first `AHEAD` tiles of a slab, all asked for at once."""
    tiles = ()
    for at in tl.static_range(min(AHEAD, (K + BLOCK - 1) // BLOCK)):
        tiles = tiles + (_tile(at, slab, columns, K, BLOCK, BITS),)
    return tiles


@triton.jit
def _part_words(at: tl.constexpr, vector: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The words of a bf16 vector that meet tile `at` of bf16 weights, `[BLOCK / 2]`, with zeros past its end."""
    columns = tl.arange(0, BLOCK // 2)
    if (at + 1) * BLOCK <= K:
        return tl.load(vector + at * (BLOCK // 2) + columns)
    return tl.load(vector + at * (BLOCK // 2) + columns, mask=columns < (K - at * BLOCK) // 2, other=0)


@triton.jit
def _part_group(
    at: tl.constexpr, vector: tl.tensor, group: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The words that meet what each thread has of one group in tile `at` of weights in 4 bits, `[threads, 4]`."""
    thread = tl.arange(0, BLOCK // 32)
    first = at * (BLOCK // 2) + thread // _LANES * (_RUN // 2) + thread % _LANES * _WORDS
    word = vector + group * (_GROUP // 2) + first[:, None] + tl.arange(0, _WORDS)[None, :]
    if (at + 1) * BLOCK <= K:
        return tl.load(word)
    return tl.load(word, mask=(first < K // 2)[:, None], other=0)


@triton.jit
def _part(at: tl.constexpr, vector: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The part of a bf16 vector that meets tile `at`; for weights in 4 bits a tuple, one part for each group."""
    if BITS == 16:
        part = _part_words(at, vector, K, BLOCK)
    else:
        part = ()
        for group in tl.static_range(4):
            part = part + (_part_group(at, vector, group, K, BLOCK),)
    return part


@triton.jit
def first_parts(
    vector: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, BITS: tl.constexpr
) -> tl.tuple:
    """The parts of a vector that meet the first `AHEAD` tiles."""
    parts = ()
    for at in tl.static_range(min(AHEAD, (K + BLOCK - 1) // BLOCK)):
        parts = parts + (_part(at, vector, K, BLOCK, BITS),)
    return parts


@triton.jit
def _scale(at: tl.constexpr, scales: tl.tensor, row: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The scales of the four groups of each thread of tile `at`, as words of two, `[ROWS, 2 threads]`."""
    word = tl.arange(0, BLOCK // 16)
    run = at * (BLOCK // _RUN) + word // (2 * _LANES)
    from_row = scales + row[:, None] * (K // _GROUP // 2) + (run * 2 + word % 2)[None, :]
    if (at + 1) * BLOCK <= K:
        return tl.load(from_row)
    return tl.load(from_row, mask=(run < K // _RUN)[None, :], other=0)


@triton.jit
def first_scales(
    scales: tl.tensor,
    row: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tuple:
    """The scales of the first `AHEAD` tiles; nothing for bf16 weights, which have none."""
    found = ()
    if BITS == 4:
        for at in tl.static_range(min(AHEAD, (K + BLOCK - 1) // BLOCK)):
            found = found + (_scale(at, scales, row, K, BLOCK),)
    return found


@triton.jit
def _four(words: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tuple:
    """The four neighbours that each thread holds, apart: `[ROWS, WIDTH]` to four of `[ROWS, WIDTH / 4]`."""
    even, odd = tl.split(tl.reshape(words, [ROWS, WIDTH // _WORDS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _plus_one(words: tl.tensor, one: tl.tensor) -> tl.tensor:
    """1 + code / 128 in fp32, of a code that lies in bits 16 to 19: in the fraction of a float between 1 and 2."""
    return ((words & 0xF0000) | one).to(tl.float32, bitcast=True)


@triton.jit
def _plus_one_low(words: tl.tensor, one: tl.tensor) -> tl.tensor:
    """1 + code / 2048 in fp32, of a code that lies in bits 12 to 15."""
    return ((words & 0xF000) | one).to(tl.float32, bitcast=True)


@triton.jit
def _group_product(words: tl.tensor, x: tl.tuple, one: tl.tensor) -> tl.tensor:
    """The sum of (code - 8) * x over the eight codes of each word; `x` are their eight numbers `[1, threads]`.

    One integer instruction and half a shift make a float of a code: 1 + code / 128 or 1 + code / 2048, wherever the
    code lies after a shift that serves two. What that adds to the sum is known beforehand and taken off first. `one`
    holds the bits of 1.0.
    """
    known = 136.0 * (x[0] + x[2] + x[4] + x[6] + x[7]) + 2056.0 * (x[1] + x[3] + x[5])  # 128 + 8 and 2048 + 8
    up, down = words << 8, words >> 8
    total = _plus_one(words << 16, one) * (128.0 * x[0]) - known
    total += _plus_one_low(up, one) * (2048.0 * x[1])
    total += _plus_one(up, one) * (128.0 * x[2])
    total += _plus_one_low(words, one) * (2048.0 * x[3])
    total += _plus_one(words, one) * (128.0 * x[4])
    total += _plus_one_low(down, one) * (2048.0 * x[5])
    total += _plus_one(down, one) * (128.0 * x[6])
    total += _plus_one(words >> 12, one) * (128.0 * x[7])
    return total


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
def product(
    tiles: tl.tuple,
    found: tl.tuple,
    gains: tl.tuple,
    slab: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    eps: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """`ROWS` rows of `K` columns times `x`, `[ROWS]` in fp32; with `NORM`, times the RMS norm of `x` with `gain`.

    `tiles`, the scales `found` and `gains` are the first ones; more are asked for as they are used up. The sum of
    squares is taken beside the product, which it scales at the end.
    """
    THREADS: tl.constexpr = BLOCK * BITS // 32 // _WORDS
    parts = first_parts(x, K, BLOCK, AHEAD, BITS)
    total = tl.zeros([ROWS, THREADS], dtype=tl.float32)
    squares = tl.zeros([1, THREADS], dtype=tl.float32)
    # The bits of 1.0, hidden from the compiler, which would else spend two instructions on each code to have both the
    # mask and them as literals: no address has its uppermost bit set.
    one = (scales.to(tl.int64) >> 63).to(tl.int32) | 0x3F800000
    for at in tl.static_range((K + BLOCK - 1) // BLOCK):
        if at + AHEAD < (K + BLOCK - 1) // BLOCK:
            tiles = tiles + (_tile(at + AHEAD, slab, columns, K, BLOCK, BITS),)
            parts = parts + (_part(at + AHEAD, x, K, BLOCK, BITS),)
            if BITS == 4:
                found = found + (_scale(at + AHEAD, scales, row, K, BLOCK),)
            if NORM:
                gains = gains + (_part(at + AHEAD, gain, K, BLOCK, BITS),)
        words = _four(tiles[at], ROWS, BLOCK * BITS // 32)
        if BITS == 16:
            numbers = _eight(parts[at], THREADS)
            if NORM:
                squares += _squares(numbers)
                numbers = _times(numbers, _eight(gains[at], THREADS))
            for index in tl.static_range(4):
                total += low_half(words[index]) * numbers[2 * index]
                total += high_half(words[index]) * numbers[2 * index + 1]
        else:
            front, back = tl.split(tl.reshape(found[at], [ROWS, THREADS, 2]))  # two scales a word
            for group in tl.static_range(4):
                numbers = _eight(parts[at][group], THREADS)
                if NORM:
                    squares += _squares(numbers)
                    numbers = _times(numbers, _eight(gains[at][group], THREADS))
                pair = front if group < 2 else back
                scale = low_half(pair) if group % 2 == 0 else high_half(pair)
                total += scale * _group_product(words[group], numbers, one)
    y = tl.sum(total, axis=1)
    if NORM:
        y = y * tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    return y
