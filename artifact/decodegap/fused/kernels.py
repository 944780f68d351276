"""The kernels of a fused decode step: each reads its weights once and waits for the one before it as late as it can.

With programmatic dependent launch (`PDL`) a kernel starts while the one before it still runs. It lets the next one
start, asks for its first weights, which nothing in the step writes, and only then waits for the kernel before it. A
wait covers that kernel alone, so every program of every kernel waits: then whatever came earlier is complete too.
Without it, and in Triton's interpreter, the same code runs kernel after kernel. `WAIT` is off only in the test that
shows that each wait is needed.

Weights and activations are bf16, read as words of two: a word stays one register until it is used, and no instruction
before the wait needs what a load brings (unpacked early, it would hold up the wait and take two registers).
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

# The step's state on the device, int64 each: the position that the next step writes, the best (logit, token) so far,
# and the position that this step writes.
NEXT, BEST, NOW, STATE_WORDS = 0, 1, 2, 3
LOWEST = -(2**63)  # below every (logit, token)

_NEXT = tl.constexpr(NEXT)
_BEST = tl.constexpr(BEST)
_NOW = tl.constexpr(NOW)
_LOWEST = tl.constexpr(LOWEST)
_WORDS = tl.constexpr(4)  # a thread loads so many neighbouring words at once: 16 bytes
_VOID = tl.constexpr(-1.0e30)  # a score that counts for nothing, finite so that a difference of two is no NaN


@triton.jit
def embed(
    table: tl.tensor,
    hidden: tl.tensor,
    state: tl.tensor,
    VOCAB: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Take the token that the last step chose, write its row of `table` `[VOCAB, COLUMNS]`, and move the position on.

    One program. It is launched as an ordinary kernel, and so is the one after it: what it writes is complete before
    anything else of the step starts, so the position may be read before a wait.
    """
    token = 0x7FFFFFFF - (tl.load(state + _BEST) & 0x7FFFFFFF)
    token = tl.minimum(token, VOCAB - 1)  # nobody has chosen yet
    position = tl.minimum(tl.load(state + _NEXT), CAPACITY - 1)
    columns = tl.arange(0, BLOCK)
    row = tl.load(table + token * COLUMNS + columns, mask=columns < COLUMNS)
    tl.store(hidden + columns, row, mask=columns < COLUMNS)
    tl.debug_barrier()  # every thread has read the state before one of them changes it
    tl.store(state + _NOW, position)
    tl.store(state + _NEXT, position + 1)
    tl.store(state + _BEST, _LOWEST)


@triton.jit
def _start(PDL: tl.constexpr) -> None:
    """Let the next kernel start as soon as every program of this one has."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def _wait(PDL: tl.constexpr, WAIT: tl.constexpr) -> None:
    """Go on when the kernel before this one is complete and what it wrote can be read."""
    if PDL and WAIT:
        cuda.gdc_wait()


@triton.jit
def _low(words: tl.tensor) -> tl.tensor:
    """The first bf16 of each word, as fp32: a bf16 is the upper half of the fp32 of the same value."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(words: tl.tensor) -> tl.tensor:
    """The second bf16 of each word, as fp32."""
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _run_sums(values: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Add up what one thread holds side by side: `[ROWS, WIDTH]` to `[ROWS, WIDTH / 4]`, with no traffic."""
    return tl.sum(tl.reshape(values, [ROWS, WIDTH // _WORDS, _WORDS]), axis=2)


@triton.jit
def _tile(at: tl.constexpr, slab: tl.tensor, columns: tl.tensor, K: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Tile `at` of a slab of rows of `K` words `[ROWS, WIDTH]`; a last one past the row's end is filled with zeros."""
    if (at + 1) * WIDTH <= K:
        return tl.load(slab + at * WIDTH)
    return tl.load(slab + at * WIDTH, mask=columns[None, :] < K - at * WIDTH, other=0)


@triton.jit
def _part(at: tl.constexpr, vector: tl.tensor, columns: tl.tensor, K: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """The part of a vector of `K` words that meets tile `at`, with zeros past its end."""
    if (at + 1) * WIDTH <= K:
        return tl.load(vector + at * WIDTH + columns)
    return tl.load(vector + at * WIDTH + columns, mask=columns < K - at * WIDTH, other=0)


@triton.jit
def _first_tiles(
    slab: tl.tensor, columns: tl.tensor, K: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr
) -> tl.tuple:
    """The first `AHEAD` tiles of a slab, all asked for at once."""
    tiles = ()
    for at in tl.static_range(min(AHEAD, (K + WIDTH - 1) // WIDTH)):
        tiles = tiles + (_tile(at, slab, columns, K, WIDTH),)
    return tiles


@triton.jit
def _first_parts(
    vector: tl.tensor, columns: tl.tensor, K: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr
) -> tl.tuple:
    """The parts of a vector that meet the first `AHEAD` tiles."""
    parts = ()
    for at in tl.static_range(min(AHEAD, (K + WIDTH - 1) // WIDTH)):
        parts = parts + (_part(at, vector, columns, K, WIDTH),)
    return parts


@triton.jit
def _product(
    tiles: tl.tuple,
    slab: tl.tensor,
    x: tl.tensor,
    columns: tl.tensor,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tl.tensor:
    """`slab` times `x`, `[ROWS]` in fp32; `tiles` are the slab's first ones, and as many are always in flight."""
    parts = _first_parts(x, columns, K, WIDTH, AHEAD)
    total = tl.zeros([ROWS, WIDTH // _WORDS], dtype=tl.float32)
    for at in tl.static_range((K + WIDTH - 1) // WIDTH):
        if at + AHEAD < (K + WIDTH - 1) // WIDTH:
            tiles = tiles + (_tile(at + AHEAD, slab, columns, K, WIDTH),)
            parts = parts + (_part(at + AHEAD, x, columns, K, WIDTH),)
        low, high = _low(parts[at])[None, :], _high(parts[at])[None, :]
        total += _run_sums(_low(tiles[at]) * low + _high(tiles[at]) * high, ROWS, WIDTH)
    return tl.sum(total, axis=1)


@triton.jit
def _normed_product(
    tiles: tl.tuple,
    gains: tl.tuple,
    slab: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    columns: tl.tensor,
    eps: tl.constexpr,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tl.tensor:
    """`slab` times the RMS norm of `x`, `[ROWS]` in fp32; the sum of squares is taken beside the product."""
    parts = _first_parts(x, columns, K, WIDTH, AHEAD)
    total = tl.zeros([ROWS, WIDTH // _WORDS], dtype=tl.float32)
    squares = tl.zeros([1, WIDTH // _WORDS], dtype=tl.float32)
    for at in tl.static_range((K + WIDTH - 1) // WIDTH):
        if at + AHEAD < (K + WIDTH - 1) // WIDTH:
            tiles = tiles + (_tile(at + AHEAD, slab, columns, K, WIDTH),)
            gains = gains + (_part(at + AHEAD, gain, columns, K, WIDTH),)
            parts = parts + (_part(at + AHEAD, x, columns, K, WIDTH),)
        low, high = _low(parts[at])[None, :], _high(parts[at])[None, :]
        squares += _run_sums(low * low + high * high, 1, WIDTH)
        low *= _low(gains[at])[None, :]
        high *= _high(gains[at])[None, :]
        total += _run_sums(_low(tiles[at]) * low + _high(tiles[at]) * high, ROWS, WIDTH)
    return tl.sum(total, axis=1) * tl.rsqrt(tl.sum(squares, axis=1) / (2 * K) + eps)


@triton.jit
def qkv(
    weights: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
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
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """Query, key and value of the new token: norm, product, bias, rotation; K and V go straight into the cache.

    The two rows that a rotation mixes are neighbours, so `ROWS` is even; those of V lie alike and are not rotated.
    """
    _start(PDL)
    K: tl.constexpr = COLUMNS // 2
    HALF: tl.constexpr = DIM // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK // 2)
    slab = weights + row[:, None].to(tl.int64) * K + columns[None, :]
    tiles = _first_tiles(slab, columns, K, BLOCK // 2, AHEAD)
    gains = _first_parts(gain, columns, K, BLOCK // 2, AHEAD)
    pair = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    head, at = pair // HALF, pair % HALF
    position = tl.load(state + _NOW)
    turned = head < HEADS + KV_HEADS
    if BIAS:
        added = tl.load(bias + row)
    _wait(PDL, WAIT)
    # Only now, because their address is the position's, and nothing before the wait should wait for a load.
    cosine = tl.load(cos + position * HALF + at, mask=turned, other=1.0)
    sine = tl.load(sin + position * HALF + at, mask=turned, other=0.0)
    y = _normed_product(tiles, gains, slab, x, gain, columns, eps, ROWS, K, BLOCK // 2, AHEAD)
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
    x: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """A product added to the residual: the output projection of the attention, and that of the MLP."""
    _start(PDL)
    K: tl.constexpr = COLUMNS // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK // 2)
    slab = weights + row[:, None].to(tl.int64) * K + columns[None, :]
    tiles = _first_tiles(slab, columns, K, BLOCK // 2, AHEAD)
    _wait(PDL, WAIT)
    added = tl.load(residual + row)
    y = _product(tiles, slab, x, columns, ROWS, K, BLOCK // 2, AHEAD)
    tl.store(out + row, (y + added.to(tl.float32)).to(out.dtype.element_ty))


@triton.jit
def gate_up(
    weights: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    out: tl.tensor,
    eps: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """silu(gate) * up of `ROWS` pairs: norm and product; the rows of gate and up alternate."""
    _start(PDL)
    K: tl.constexpr = COLUMNS // 2
    row = tl.program_id(0) * (2 * ROWS) + tl.arange(0, 2 * ROWS)
    columns = tl.arange(0, BLOCK // 2)
    slab = weights + row[:, None].to(tl.int64) * K + columns[None, :]
    tiles = _first_tiles(slab, columns, K, BLOCK // 2, AHEAD)
    gains = _first_parts(gain, columns, K, BLOCK // 2, AHEAD)
    _wait(PDL, WAIT)
    y = _normed_product(tiles, gains, slab, x, gain, columns, eps, 2 * ROWS, K, BLOCK // 2, AHEAD)
    gate, up = tl.split(tl.reshape(y, [ROWS, 2]))
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + tl.program_id(0) * ROWS + tl.arange(0, ROWS), y.to(out.dtype.element_ty))


@triton.jit
def lm_head(
    weights: tl.tensor,
    x: tl.tensor,
    gain: tl.tensor,
    logits: tl.tensor,
    state: tl.tensor,
    eps: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """The logits in fp32: norm and product; the largest of all and its token end up in the step's state."""
    _start(PDL)
    K: tl.constexpr = COLUMNS // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK // 2)
    slab = weights + row[:, None].to(tl.int64) * K + columns[None, :]
    tiles = _first_tiles(slab, columns, K, BLOCK // 2, AHEAD)
    gains = _first_parts(gain, columns, K, BLOCK // 2, AHEAD)
    _wait(PDL, WAIT)
    y = _normed_product(tiles, gains, slab, x, gain, columns, eps, ROWS, K, BLOCK // 2, AHEAD)
    tl.store(logits + row, y)
    # A float's bits are ordered as an integer's once those of a negative one are turned over.
    bits = y.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    packed = (ordered << 32) | (0x7FFFFFFF - row).to(tl.int64)  # of equal logits the first token wins
    tl.atomic_max(state + _BEST, tl.max(packed, axis=0), sem="relaxed")


@triton.jit
def _rows_of_cache(
    cache: tl.tensor, start: tl.tensor, end: tl.tensor, tokens: tl.tensor, dims: tl.tensor, DIM: tl.constexpr
) -> tl.tensor:
    """The cache's rows from `start` on, `[BLOCK, DIM]`, with zeros from `end` on."""
    inside = (start + tokens < end)[:, None]
    return tl.load(cache + (start + tokens)[:, None] * DIM + dims[None, :], mask=inside, other=0.0)


@triton.jit
def _joined(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    partial: tl.tensor,
    stats: tl.tensor,
    heads: tl.tensor,
    dims: tl.tensor,
    scale: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """What `combine` computes, for all the query heads of one K/V head at once: `[heads, DIM]`."""
    real = heads < GROUP
    q = tl.load(query + heads[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    v = tl.load(value + dims).to(tl.float32)
    own = tl.sum(q * tl.load(key + dims).to(tl.float32)[None, :], axis=1) * scale
    top = own
    for split in tl.static_range(SPLITS):
        largest = tl.load(stats + split * 2 * GROUP + heads, mask=real, other=0.0, cache_modifier=".cg")
        top = tl.maximum(top, largest)
    below = tl.exp2(own - top)
    total = below[:, None] * v[None, :]
    for split in tl.static_range(SPLITS):
        largest = tl.load(stats + split * 2 * GROUP + heads, mask=real, other=0.0, cache_modifier=".cg")
        sums = tl.load(stats + split * 2 * GROUP + GROUP + heads, mask=real, other=0.0, cache_modifier=".cg")
        at = partial + (split * GROUP + heads)[:, None] * DIM + dims[None, :]
        weight = tl.exp2(largest - top)
        below += weight * sums
        total += weight[:, None] * tl.load(at, mask=real[:, None], other=0.0, cache_modifier=".cg")
    return total / below[:, None]


@triton.jit
def attention(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    partial: tl.tensor,
    stats: tl.tensor,
    arrivals: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    scale: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    DOUBLE: tl.constexpr,
    JOINED: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """The `GROUP` query heads of one K/V head over a share of the older tokens: unnormalised sums, and their scale.

    The first tile of K and V is asked for before the wait: those tokens are older than the step. The new token's own
    part is left to `combine`, or with `JOINED` to the last program of the K/V head, which then does the work of
    `combine` too. `scale` makes the scores powers of two. `DOUBLE` asks for the next tile of tokens before this one
    is used. Tokens are the rows of each product and heads, padded to 8, its columns.
    """
    _start(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    position = tl.load(state + _NOW).to(tl.int32)
    share = (position + SPLITS - 1) // SPLITS
    first = split * share
    end = tl.minimum(first + share, position)
    heads = tl.arange(0, PADDED)
    dims = tl.arange(0, DIM)
    tokens = tl.arange(0, BLOCK)
    keys += head.to(tl.int64) * (CAPACITY * DIM)
    values += head.to(tl.int64) * (CAPACITY * DIM)
    k = _rows_of_cache(keys, first, end, tokens, dims, DIM)
    v = _rows_of_cache(values, first, end, tokens, dims, DIM)
    _wait(PDL, WAIT)
    real = (heads < GROUP)[None, :]
    q = tl.load(query + (head * GROUP + heads)[None, :] * DIM + dims[:, None], mask=real, other=0.0)  # [DIM, PADDED]

    largest = tl.full([PADDED], _VOID, dtype=tl.float32)
    below = tl.zeros([PADDED], dtype=tl.float32)
    total = tl.zeros([DIM, PADDED], dtype=tl.float32)
    for start in tl.range(first, end, BLOCK, num_stages=1):
        if DOUBLE:
            k_next = _rows_of_cache(keys, start + BLOCK, end, tokens, dims, DIM)
            v_next = _rows_of_cache(values, start + BLOCK, end, tokens, dims, DIM)
        scores = tl.dot(k, q) * scale  # [BLOCK, PADDED]
        valid = (start + tokens < end)[:, None]
        scores = tl.where(valid, scores, _VOID)
        top = tl.maximum(largest, tl.max(scores, axis=0))
        shrink = tl.exp2(largest - top)
        p = tl.where(valid, tl.exp2(scores - top[None, :]), 0.0)
        below = below * shrink + tl.sum(p, axis=0)
        total = total * shrink[None, :] + tl.dot(tl.trans(v), p.to(v.dtype))
        largest = top
        if DOUBLE:
            k, v = k_next, v_next
        else:
            k = _rows_of_cache(keys, start + BLOCK, end, tokens, dims, DIM)
            v = _rows_of_cache(values, start + BLOCK, end, tokens, dims, DIM)

    mine = head * SPLITS + split
    tl.store(partial + mine * GROUP * DIM + heads[None, :] * DIM + dims[:, None], total, mask=real)
    tl.store(stats + mine * 2 * GROUP + heads, largest, mask=heads < GROUP)
    tl.store(stats + mine * 2 * GROUP + GROUP + heads, below, mask=heads < GROUP)
    if JOINED:
        tl.debug_barrier()  # what every thread of this program has stored comes before the arrival of one of them
        arrived = tl.atomic_add(arrivals + head, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            whole = _joined(
                query + head * GROUP * DIM,
                keys + position * DIM,
                values + position * DIM,
                partial + head * SPLITS * GROUP * DIM,
                stats + head * SPLITS * 2 * GROUP,
                heads,
                dims,
                scale,
                GROUP,
                DIM,
                SPLITS,
            )
            at = out + (head * GROUP + heads)[:, None] * DIM + dims[None, :]
            tl.store(at, whole.to(out.dtype.element_ty), mask=(heads < GROUP)[:, None])
            tl.store(arrivals + head, 0)


@triton.jit
def combine(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    partial: tl.tensor,
    stats: tl.tensor,
    out: tl.tensor,
    state: tl.tensor,
    scale: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CAPACITY: tl.constexpr,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
    WAIT: tl.constexpr,
) -> None:
    """One query head's attention from what its splits left and the new token, `WIDTH` dimensions a program."""
    _start(PDL)
    head = tl.program_id(0)
    kv_head, row = head // GROUP, head % GROUP
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, PADDED)
    there = split < SPLITS
    mine = (kv_head * SPLITS + split) * GROUP
    new = (kv_head.to(tl.int64) * CAPACITY + tl.load(state + _NOW)) * DIM
    _wait(PDL, WAIT)
    # Everything is asked for before anything is used.
    parts = tl.load(partial + (mine + row)[:, None] * DIM + dims[None, :], mask=there[:, None], other=0.0)
    largest = tl.load(stats + 2 * mine + row, mask=there, other=_VOID)
    sums = tl.load(stats + 2 * mine + GROUP + row, mask=there, other=0.0)
    q = tl.load(query + head * DIM + tl.arange(0, DIM)).to(tl.float32)
    k = tl.load(keys + new + tl.arange(0, DIM)).to(tl.float32)
    v = tl.load(values + new + dims).to(tl.float32)
    own = tl.sum(q * k, axis=0) * scale
    top = tl.maximum(tl.max(largest, axis=0), own)
    weight = tl.exp2(largest - top)
    own = tl.exp2(own - top)
    total = tl.sum(weight[:, None] * parts, axis=0) + own * v
    whole = total / (tl.sum(weight * sums, axis=0) + own)
    tl.store(out + head * DIM + dims, whole.to(out.dtype.element_ty))
