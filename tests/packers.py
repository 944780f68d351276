"""Codes of random weights, and packings that the library reads and never makes: AWQ, ExLlamaV2's words, NF4."""

import torch

from decodegap.quant_nf4 import BLOCK, LEVELS, OUTER_BLOCK, Nf4, Outer, require_nf4
from decodegap.quantise import Awq, Codes, interleave, pack, round_to_nearest, unpack


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """A random weight `[rows, columns]`, of the size that real ones have."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def codes(rows: int = 192, columns: int = 384, group: int = 128, *, symmetric: bool = False, seed: int = 0) -> Codes:
    """The codes of such a weight, with fp16 scales."""
    return round_to_nearest(weight(rows, columns, seed), group, torch.float16, symmetric=symmetric)


def nibble(word: torch.Tensor, place: int) -> int:
    """The code at a place of a word, the lowest first."""
    return int(word) >> (4 * place) & 15


def awq(made: Codes) -> Awq:
    """`made` in AWQ's layout, whose words hold eight outputs each."""
    return Awq(
        qweight=pack(interleave(made.codes.T)),
        qzeros=pack(interleave(made.zeros.T)),
        scales=made.scales.T.contiguous(),
        group=made.group,
    )


def exllama_words(qweight: torch.Tensor) -> torch.Tensor:
    """GPTQ's words as ExLlamaV2 reorders them in place when it takes them."""
    return pack(interleave(unpack(qweight[..., None]))).squeeze(-1)  # by way of [in / 8, out, 8]


def nibble_pairs(numbers: torch.Tensor) -> torch.Tensor:
    """Codes uint8 `[out, in]`, two to a byte `[out, in / 2]`, the even input in the high half."""
    return (numbers[:, ::2] << 4) | numbers[:, 1::2]


def nf4(exact: torch.Tensor, *, double: bool) -> Nf4:
    """`exact` `[out, in]` rounded to the nearest NF4 level of its block, with `double` quantisation or without."""
    require_nf4(tuple(exact.shape))
    blocks = exact.float().reshape(-1, BLOCK)
    absmax = blocks.abs().amax(dim=-1)
    scaled = blocks / torch.where(absmax == 0, torch.ones_like(absmax), absmax)[:, None]
    levels = nearest(scaled, torch.tensor(LEVELS, device=exact.device)).flatten()
    packed = (levels[::2] << 4) | levels[1::2]
    out, inputs = exact.shape
    return Nf4(packed, outer(absmax) if double else absmax, (out, inputs))


def nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The number of the nearest of the ascending `levels`, uint8 in the shape of `values`."""
    return torch.bucketize(values, (levels[1:] + levels[:-1]) / 2).to(torch.uint8)


def outer(absmax: torch.Tensor) -> Outer:
    """Largest values float32 `[blocks]` in 8 bits, around their mean."""
    offset = absmax.mean()
    short = -absmax.numel() % OUTER_BLOCK
    blocks = torch.nn.functional.pad(absmax - offset, (0, short)).reshape(-1, OUTER_BLOCK)
    largest = blocks.abs().amax(dim=-1)
    levels = dynamic_levels().to(absmax.device)
    numbers = nearest(blocks / torch.where(largest == 0, torch.ones_like(largest), largest)[:, None], levels)
    return Outer(numbers.flatten()[: absmax.numel()], largest, levels, offset)


def dynamic_levels() -> torch.Tensor:
    """The 256 signed levels of the dynamic 8-bit type of arXiv 2110.02861, float32, ascending.

    Decade `d` from 1e-6 to 1 has `2 ** d` levels a sign, at the middles of equal parts of 0.1 to 1; then 0 and 1.
    """
    decades = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        decades.append((edges[1:] + edges[:-1]) / 2 * 10 ** (exponent - 6))
    positive = torch.cat(decades)  # 127 levels
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0])]).sort().values
