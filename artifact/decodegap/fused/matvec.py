"""The matrix-vector kernels of a fused decode step, and the one that starts it; each reads its weights once.

The target of a launch is what its bytes take at the read bandwidth of the card. `make bench-kernels` measures each
alone, which for the small ones is more than the step loses without them. Qwen2.5-7B on one H200 that read 4529 GB/s:

| kernel  |      MB | target us | alone us | GB/s |
| ------- | ------: | --------: | -------: | ---: |
| qkv     |   33.05 |       7.3 |     10.0 | 3304 |
| o       |   25.69 |       5.7 |      7.1 | 3622 |
| gate_up |  271.59 |      60.0 |     60.3 | 4507 |
| down    |  135.79 |      30.0 |     33.7 | 4031 |
| lm_head | 1090.00 |     240.7 |    244.7 | 4455 |
"""

import triton
import triton.language as tl

from decodegap.fused.device import BEST, LOWEST, NEXT, NOW, start_next, wait
from decodegap.fused.products import first_parts, first_scales, first_tiles, normed_product, product, store_for_norm


@triton.jit
def embed(
    table: tl.tensor,
    next_gain: tl.tensor,
    hidden: tl.tensor,
    scaled: tl.tensor,
    squares: tl.tensor,
    state: tl.tensor,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Take the token that the last step chose, write its row of `table` `[VOCAB, COLUMNS]`, and move the position on.

    One program. It is launched as an ordinary kernel, and so is the one after it: what it writes is complete before
    anything else of the step starts, so the position may be read before a wait.
    """
    token = 0x7FFFFFFF - (tl.load(state + BEST) & 0x7FFFFFFF)
    token = tl.minimum(token, VOCAB - 1)  # nobody has chosen yet
    position = tl.minimum(tl.load(state + NEXT), CAPACITY - 1)
    columns = tl.arange(0, BLOCK)
    row = tl.load(table + token * COLUMNS + columns, mask=columns < COLUMNS, other=0.0)
    tl.store(hidden + columns, row, mask=columns < COLUMNS)
    if BITS == 4:
        gains = tl.load(next_gain + columns, mask=columns < COLUMNS, other=0.0)
        store_for_norm(row, gains, columns, scaled, squares, COLUMNS, BLOCK)
    tl.debug_barrier()  # every thread has read the state before one of them changes it
    tl.store(state + NOW, position)
    tl.store(state + NEXT, position + 1)
    tl.store(state + BEST, LOWEST)


@triton.jit
def qkv(
    weights: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    squares: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    state: tl.tensor,
    eps: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """Query, key and value of the new token: norm, product, bias, rotation; K and V go straight into the cache.

    The two rows that a rotation mixes are neighbours, so `ROWS` is even; those of V lie alike and are not rotated.
    """
    start_next(PDL)
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = first_tiles(weights, row, ROWS, COLUMNS, BLOCK, AHEAD, BITS)
    found = first_scales(scales, ROWS, COLUMNS, BLOCK, BITS)
    gains = first_parts(gain, COLUMNS, BLOCK, AHEAD, BITS)
    pair = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    head, at = pair // HALF, pair % HALF
    position = tl.load(state + NOW)
    turned = head < HEADS + KV_HEADS
    if BIAS:
        added = tl.load(bias + row)
    wait(PDL, WAIT)
    # Only now, because their address is the position's, and nothing before the wait should wait for a load.
    cosine = tl.load(cos + position * HALF + at, mask=turned, other=1.0)
    sine = tl.load(sin + position * HALF + at, mask=turned, other=0.0)
    y = normed_product(
        tiles, found, gains, weights, scales, x, gain, squares, row, eps, ROWS, COLUMNS, BLOCK, AHEAD, BITS
    )
    if BIAS:
        y += added.to(tl.float32)
    low, high = tl.split(tl.reshape(y, [ROWS // 2, 2]))
    first = (low * cosine - high * sine).to(query.dtype.element_ty)
    second = (high * cosine + low * sine).to(query.dtype.element_ty)
    tl.store(query + head * DIM + at, first, mask=head < HEADS)
    tl.store(query + head * DIM + at + HALF, second, mask=head < HEADS)
    slot = keys + ((head - HEADS) * CAPACITY + position) * DIM + at
    tl.store(slot, first, mask=turned & (head >= HEADS))
    tl.store(slot + HALF, second, mask=turned & (head >= HEADS))
    slot = values + ((head - HEADS - KV_HEADS) * CAPACITY + position) * DIM + at
    tl.store(slot, first, mask=head >= HEADS + KV_HEADS)
    tl.store(slot + HALF, second, mask=head >= HEADS + KV_HEADS)


@triton.jit
def project(
    weights: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    residual: tl.tensor,
    next_gain: tl.tensor,
    out: tl.tensor,
    scaled: tl.tensor,
    squares: tl.tensor,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """A product added to the residual: the output projection of the attention, and that of the MLP.

    In 4 bits it also makes of it what the next product's norm needs.
    """
    start_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = first_tiles(weights, row, ROWS, COLUMNS, BLOCK, AHEAD, BITS)
    found = first_scales(scales, ROWS, COLUMNS, BLOCK, BITS)
    if BITS == 4:
        gains = tl.load(next_gain + row)
    wait(PDL, WAIT)
    added = tl.load(residual + row)
    y = product(tiles, found, weights, scales, x, row, ROWS, COLUMNS, BLOCK, AHEAD, BITS)
    y = (y + added.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row, y)
    if BITS == 4:
        store_for_norm(y, gains, row, scaled, squares, tl.num_programs(0) * ROWS, ROWS)


@triton.jit
def gate_up(
    weights: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    squares: tl.tensor,
    out: tl.tensor,
    eps: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """silu(gate) * up of `ROWS` pairs: norm and product; the rows of gate and up alternate."""
    start_next(PDL)
    row = tl.program_id(0) * (2 * ROWS) + tl.arange(0, 2 * ROWS)
    tiles = first_tiles(weights, row, 2 * ROWS, COLUMNS, BLOCK, AHEAD, BITS)
    found = first_scales(scales, 2 * ROWS, COLUMNS, BLOCK, BITS)
    gains = first_parts(gain, COLUMNS, BLOCK, AHEAD, BITS)
    wait(PDL, WAIT)
    y = normed_product(
        tiles, found, gains, weights, scales, x, gain, squares, row, eps, 2 * ROWS, COLUMNS, BLOCK, AHEAD, BITS
    )
    gate, up = tl.split(tl.reshape(y, [ROWS, 2]))
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + tl.program_id(0) * ROWS + tl.arange(0, ROWS), y.to(out.dtype.element_ty))


@triton.jit
def lm_head(
    weights: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    logits: tl.tensor,
    state: tl.tensor,
    eps: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """The logits in fp32: norm and product; the largest of all and its token end up in the step's state.

    Its weights are in bf16 whatever those of the projections are, so it takes the norm itself.
    """
    start_next(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tiles = first_tiles(weights, row, ROWS, COLUMNS, BLOCK, AHEAD, BITS)
    found = first_scales(scales, ROWS, COLUMNS, BLOCK, BITS)
    gains = first_parts(gain, COLUMNS, BLOCK, AHEAD, BITS)
    wait(PDL, WAIT)
    y = normed_product(tiles, found, gains, weights, scales, x, gain, gain, row, eps, ROWS, COLUMNS, BLOCK, AHEAD, BITS)
    tl.store(logits + row, y)
    # A float's bits are ordered as an integer's once those of a negative one are turned over.
    bits = y.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    packed = (ordered << 32) | (0x7FFFFFFF - row).to(tl.int64)  # of equal logits the first token wins
    tl.atomic_max(state + BEST, tl.max(packed, axis=0), sem="relaxed")
