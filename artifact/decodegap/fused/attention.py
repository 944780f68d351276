"""Attention of one token over the cache: its splits, and what adds them up.

At 2048 tokens of Qwen2.5-7B it reads 4.19 MB, whose target on an H200 that reads 4529 GB/s is 0.9 us; alone it takes
5.5 us (762 GB/s), and the step loses 3.1 us without it (`make bench-kernels`). It is bound by the round trips that
follow each other, not by bytes.
"""

import triton
import triton.language as tl

from decodegap.fused.device import NOW, start_next, wait

_VOID = tl.constexpr(-1.0e30)  # a score that counts for nothing, finite so that a difference of two is no NaN


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
    start_next(PDL)
    head, split = tl.program_id(0), tl.program_id(1)
    position = tl.load(state + NOW).to(tl.int32)
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
    wait(PDL, WAIT)
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
    start_next(PDL)
    head = tl.program_id(0)
    kv_head, row = head // GROUP, head % GROUP
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, PADDED)
    there = split < SPLITS
    mine = (kv_head * SPLITS + split) * GROUP
    new = (kv_head.to(tl.int64) * CAPACITY + tl.load(state + NOW)) * DIM
    wait(PDL, WAIT)
    # Everything is asked for before anything is used.
    parts = tl.load(
        partial + (mine + row)[:, None] * DIM + dims[None, :], mask=there[:, None], other=0.0, cache_modifier=".cg"
    )
    largest = tl.load(stats + 2 * mine + row, mask=there, other=_VOID, cache_modifier=".cg")
    sums = tl.load(stats + 2 * mine + GROUP + row, mask=there, other=0.0, cache_modifier=".cg")
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
