"""Codes laid out for tensor cores: Marlin's repacked tiles and the tiles of torch's own int4 product, both ways."""

from dataclasses import dataclass

import torch

from decodegap.errors import UnsupportedError
from decodegap.quantise import Codes, interleave, pack, require_shape, split, uninterleave, unpack

TILE = 16  # inputs of a tensor core's tile
INNER_TILES = 8  # tiles of inputs that torch's int4 kernel keeps together; the most it knows, and the fastest


# --- Marlin ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marlin:
    """Marlin's layout: tiles of 16 inputs by 64 outputs, each thread's eight codes of a tile in one word.

    `zeros` is None for symmetric codes, whose zero point 8 the kernel knows.
    """

    words: torch.Tensor  # int32 [in / 16, 2 out]
    scales: torch.Tensor  # [in / group, out], permuted
    zeros: torch.Tensor | None  # int32 [in / group, out / 8], permuted and interleaved
    group: int


def marlin(codes: Codes, *, zero_points: bool) -> Marlin:
    """`codes` in Marlin's layout, with their zero points or as symmetric ones.

    Raises `UnsupportedError` for shapes without a whole number of thread tiles (64 x 128 or 128 x 64), and for a
    single group, which is another kernel.
    """
    require_marlin(tuple(codes.codes.shape), codes.group)
    if not zero_points and bool((codes.zeros != 8).any()):
        raise ValueError("codes with zero points of their own cannot be packed as symmetric ones")
    return Marlin(
        words=marlin_words(codes.codes),
        scales=_permute(codes.scales.T),
        zeros=pack(interleave(_permute(codes.zeros.T))) if zero_points else None,
        group=codes.group,
    )


def require_marlin(shape: tuple[int, ...], group: int) -> None:
    """Raise `UnsupportedError` unless Marlin can hold a weight of `shape` `(out, in)` in groups of `group`."""
    require_shape(shape, group, outputs=64, inputs=64)
    out, inputs = shape
    if out % 128 and inputs % 128:
        raise UnsupportedError(
            f"a weight of shape {out} x {inputs}: Marlin needs outputs or inputs in multiples of 128"
        )
    if inputs == group:
        raise UnsupportedError(f"a weight of shape {out} x {inputs}: one group of {group} inputs is not compiled in")


def marlin_words(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 `[out, in]` as Marlin's words, int32 `[in / 16, 2 out]`.

    Thread `4 c + q` of warp `w` multiplies the inputs `8 h + 2 q + b` of a tile by its outputs `16 w + 8 g + c`, as
    the tensor core's 16 x 8 x 16 product hands them out; its word lies at `4 thread + w`.
    """
    out, inputs = codes.shape
    tiles = codes.T.reshape(inputs // TILE, 2, 4, 2, out // 64, 4, 2, 8)  # tile, h, q, b, block, w, g, c
    by_thread = tiles.permute(0, 4, 7, 2, 5, 6, 1, 3).reshape(
        inputs // TILE, -1, 8, 4, 4, 8
    )  # tile, block, c, q, w, 8 codes: g, h, b
    return pack(interleave(by_thread)).reshape(inputs // TILE, 2 * out)


def from_marlin_words(words: torch.Tensor) -> torch.Tensor:
    """The codes uint8 `[out, in]` that `marlin_words` packed."""
    tiles, out = words.shape[0], words.shape[1] // 2
    by_thread = uninterleave(unpack(words.reshape(tiles, out // 64, 8, 4, 4, 1)))  # tile, block, c, q, w, 8 codes
    spread = by_thread.reshape(tiles, -1, 8, 4, 4, 2, 2, 2)  # tile, block, c, q, w, g, h, b
    spread = spread.permute(0, 6, 3, 7, 1, 4, 5, 2)  # tile, h, q, b, block, w, g, c
    return spread.reshape(tiles * TILE, out).T.contiguous()


def from_marlin(packed: Marlin) -> Codes:
    """The codes that `marlin` packed."""
    scales = _permute(packed.scales).T.contiguous()
    if packed.zeros is None:
        zeros = torch.full_like(scales, 8, dtype=torch.uint8)
    else:
        zeros = _permute(uninterleave(unpack(packed.zeros))).T.contiguous()
    return Codes(from_marlin_words(packed.words), scales, zeros, packed.group)


def _permute(values: torch.Tensor) -> torch.Tensor:
    """Each 64 neighbouring outputs of `[groups, out]` as an 8 x 8 square, transposed; its own inverse."""
    squares = values.reshape(*values.shape[:-1], -1, 8, 8)
    return squares.transpose(-1, -2).reshape(values.shape)


def marlin_bias(bias: torch.Tensor) -> torch.Tensor:
    """A bias `[out]` in the order in which Marlin's threads add it."""
    return bias.reshape(-1, 4, 4, 2).transpose(1, 2).reshape(bias.shape)


# --- torch's own int4 product ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tinygemm:
    """torch's int4 layout on a GPU; a weight is `(code - 8) * scale + zero` with a zero of its own in floating point.

    That zero is `(8 - zero point) * scale`, rounded to the activations' dtype: part of what the weight is, so the
    dequantised reference holds it too.
    """

    words: torch.Tensor  # int32 [out / 8, in / (16 inner tiles), 32, inner tiles / 2]
    scales_and_zeros: torch.Tensor  # [in / group, out, 2]
    group: int

    def dequantised(self) -> torch.Tensor:
        """The weight that these words stand for, float32 `[out, in]`."""
        return affine(from_tinygemm_words(self.words), self.scales_and_zeros, self.group)


def affine(codes: torch.Tensor, scales_and_zeros: torch.Tensor, group: int) -> torch.Tensor:
    """`(code - 8) * scale + zero` in float32 `[out, in]`, for codes `[out, in]` and pairs `[in / group, out, 2]`."""
    scales, zeros = scales_and_zeros.float().unbind(-1)  # [in / group, out] each
    by_group = split(codes, group).float() - 8
    return (by_group * scales.T[..., None] + zeros.T[..., None]).reshape(codes.shape)


def scales_and_zeros(codes: Codes) -> torch.Tensor:
    """The pairs that torch's int4 product reads, `[in / group, out, 2]`, in the scales' dtype."""
    zeros = (8 - codes.zeros.float()) * codes.scales.float()
    return torch.stack([codes.scales.T, zeros.T.to(codes.scales.dtype)], dim=-1).contiguous()


def tinygemm(codes: Codes, *, inner_tiles: int = INNER_TILES) -> Tinygemm:
    """`codes` in torch's int4 layout. Raises `UnsupportedError` for shapes without whole tiles."""
    require_shape(tuple(codes.codes.shape), codes.group, outputs=8, inputs=TILE * inner_tiles)
    return Tinygemm(tinygemm_words(codes.codes, inner_tiles=inner_tiles), scales_and_zeros(codes), codes.group)


def tinygemm_words(codes: torch.Tensor, *, inner_tiles: int = INNER_TILES) -> torch.Tensor:
    """Codes uint8 `[out, in]` as the words that `aten::_convert_weight_to_int4pack` makes of them.

    Thread `4 r + q` holds of output `r` the inputs `8 h + 2 q + b` of two neighbouring tiles in one word.
    """
    out, inputs = codes.shape
    outer = inputs // (TILE * inner_tiles)
    tiles = codes.reshape(out // 8, 8, outer, inner_tiles // 2, 2, 2, 4, 2)  # block, r, outer, pair, tile, h, q, b
    by_thread = tiles.permute(0, 2, 1, 6, 3, 4, 5, 7).reshape(
        out // 8, outer, 8, 4, -1, 8
    )  # block, outer, r, q, pair, 8 codes: tile, h, b
    return pack(interleave(by_thread)).reshape(out // 8, outer, 32, inner_tiles // 2)


def from_tinygemm_words(words: torch.Tensor) -> torch.Tensor:
    """The codes uint8 `[out, in]` that `tinygemm_words` packed."""
    blocks, outer, _, pairs = words.shape
    by_thread = uninterleave(unpack(words.reshape(blocks, outer, 8, 4, pairs, 1)))  # block, outer, r, q, pair, 8 codes
    spread = by_thread.reshape(blocks, outer, 8, 4, pairs, 2, 2, 2)  # block, outer, r, q, pair, tile, h, b
    spread = spread.permute(0, 2, 1, 4, 5, 6, 3, 7)  # block, r, outer, pair, tile, h, q, b
    return spread.reshape(blocks * 8, outer * pairs * 2 * TILE)
