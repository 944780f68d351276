"""How 4-bit weights are made and laid out: round-to-nearest codes, and each format's packing of them.

Weights are `[out, in]` as `torch.nn.Linear` holds them; a group is a run of inputs of one output that shares a scale.
Everything here is plain torch and runs on any device.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from decodegap.errors import UnsupportedError

GROUPS = (32, 64, 128)
HIGHEST = 15  # of a 4-bit code
MIDDLE = 8  # the zero point of symmetric codes
PER_WORD = 8  # codes in an int32
# Which of eight neighbouring outputs the nibbles of an AWQ word hold, lowest nibble first: even ones, then odd ones,
# so that two of them are half a word apart and unpack as a pair of 16-bit numbers.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Zeros = Literal["true", "less one"]
Method = Literal["gptq", "awq"]


@dataclass(frozen=True)
class Codes:
    """A weight in 4 bits: `(codes - zeros) * scales` by groups, exactly what every packing of it must give back."""

    codes: torch.Tensor  # uint8 [out, in], 0 to 15
    scales: torch.Tensor  # [out, in / group], in the dtype that the kernel reads
    zeros: torch.Tensor  # uint8 [out, in / group], 0 to 15
    group: int

    def dequantised(self) -> torch.Tensor:
        """The weight that these codes stand for, float32 `[out, in]`."""
        by_group = split(self.codes, self.group).float()  # [out, in / group, group]
        return ((by_group - self.zeros[..., None].float()) * self.scales[..., None].float()).reshape(self.codes.shape)


def round_to_nearest(weight: torch.Tensor, group: int, dtype: torch.dtype, *, symmetric: bool) -> Codes:
    """`weight` `[out, in]` in 4-bit codes with one scale in `dtype` a group of `group` inputs.

    Symmetric codes have the zero point 8 and reach from -8 to 7 scales, 15 of which span both extremes (GPTQ's
    convention); others put 0 to 15 between the group's extremes and zero. Codes are rounded with the scale as it is
    stored, so that the dequantised weight holds no second rounding. Raises `UnsupportedError` for a shape that does
    not divide into groups.
    """
    require_shape(tuple(weight.shape), group)
    values = split(weight.float(), group)  # [out, in / group, group]
    if symmetric:
        span = 2 * values.abs().amax(dim=-1)
    else:
        low = values.amin(dim=-1).clamp(max=0)
        span = values.amax(dim=-1).clamp(min=0) - low
    scales = (span / HIGHEST).to(dtype)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)  # a group of zeros; any scale would do
    steps = scales.float()
    zeros = torch.full_like(steps, MIDDLE) if symmetric else (-low / steps).round().clamp(0, HIGHEST)
    codes = (values / steps[..., None]).round().add_(zeros[..., None]).clamp_(0, HIGHEST)
    return Codes(codes.to(torch.uint8).reshape(weight.shape), scales, zeros.to(torch.uint8), group)


def require_shape(shape: tuple[int, ...], group: int, *, outputs: int = 1, inputs: int = 1) -> None:
    """Raise `UnsupportedError` in one line unless a weight of `shape` can be held.

    Its inputs must divide into groups of `group` and by `inputs`, its outputs by `outputs`.
    """
    if len(shape) != 2 or 0 in shape:
        raise UnsupportedError(f"a weight of shape {list(shape)} is no matrix of outputs by inputs")
    if group not in GROUPS:
        raise UnsupportedError(f"groups of {group} inputs are not supported; known are {', '.join(map(str, GROUPS))}")
    rows, columns = shape
    for count, unit, what in ((columns, group, "inputs"), (columns, inputs, "inputs"), (rows, outputs, "outputs")):
        if count % unit:
            raise UnsupportedError(f"a weight of shape {rows} x {columns}: {count} {what} are not a multiple of {unit}")


def split(values: torch.Tensor, size: int) -> torch.Tensor:
    """The last dimension in runs of `size`: `[..., n size]` to `[..., n, size]`."""
    return values.reshape(*values.shape[:-1], -1, size)


def pack(nibbles: torch.Tensor) -> torch.Tensor:
    """Eight codes to an int32, the first in the lowest bits: integers `[..., 8 n]` to int32 `[..., n]`."""
    words = split(nibbles, PER_WORD).to(torch.int32)
    packed = words[..., 0].clone()
    for place in range(1, PER_WORD):
        packed |= words[..., place] << (4 * place)
    return packed


def unpack(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: int32 `[..., n]` to uint8 `[..., 8 n]`."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    codes = ((words[..., None] >> shifts) & HIGHEST).to(torch.uint8)  # [..., n, 8]
    return codes.reshape(*words.shape[:-1], -1)


# --- plain rows, for a kernel of our own -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Codes in the order of the weight: word `j` of a row holds its inputs `8 j` to `8 j + 7`, lowest bits first."""

    words: torch.Tensor  # int32 [out, in / 8]
    scales: torch.Tensor  # [out, in / group]
    zeros: torch.Tensor  # uint8 [out, in / group]
    group: int

    @property
    def packed_bytes(self) -> int:
        """Bytes of all three tensors."""
        return sum(tensor.nbytes for tensor in (self.words, self.scales, self.zeros))

    def to(self, device: str | torch.device) -> "Rows":
        """The same rows on `device`."""
        return Rows(self.words.to(device), self.scales.to(device), self.zeros.to(device), self.group)


def rows(codes: Codes) -> Rows:
    """`codes` packed along the inputs, with nothing interleaved."""
    return Rows(pack(codes.codes), codes.scales, codes.zeros, codes.group)


def from_rows(packed: Rows) -> Codes:
    """The codes that `rows` packed."""
    return Codes(unpack(packed.words), packed.scales, packed.zeros, packed.group)


# --- codes that came with a checkpoint -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """The codes that a quantised checkpoint holds for a layer, in the host's memory until a path takes them."""

    method: Method
    rows: Rows
    symmetric: bool  # every zero point is 8


def give(linear: torch.nn.Linear, codes: Given) -> None:
    """Keep `codes` with the layer that multiplies by their dequantised weight; they go when it goes."""
    vars(linear)["given_codes"] = codes


def given(linear: torch.nn.Module) -> Given | None:
    """The codes that a checkpoint gave the layer; None where its weights came unquantised."""
    return vars(linear).get("given_codes")


def codes_of(linear: torch.nn.Linear, group: int, *, symmetric: bool) -> Codes:
    """The codes a checkpoint gave the layer, as they are; else its weight as `round_to_nearest` codes it."""
    weight = linear.weight.detach()
    if kept := given(linear):
        return from_rows(kept.rows.to(weight.device))
    return round_to_nearest(weight, group, weight.dtype, symmetric=symmetric)


# --- GPTQ ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gptq:
    """GPTQ's layout: a word holds eight neighbouring inputs of one output, a zero word eight neighbouring outputs.

    Files of the first format store each zero point less one (modulo 16); kernels that compute with the true zero
    point want it as it is.
    """

    qweight: torch.Tensor  # int32 [in / 8, out]
    qzeros: torch.Tensor  # int32 [in / group, out / 8]
    scales: torch.Tensor  # [in / group, out]
    group: int
    zeros: Zeros


def gptq(codes: Codes, *, zeros: Zeros) -> Gptq:
    """`codes` in GPTQ's layout. Raises `UnsupportedError` for outputs that do not fill words."""
    require_shape(tuple(codes.codes.shape), codes.group, outputs=PER_WORD)
    shift = 1 if zeros == "less one" else 0
    stored = (codes.zeros.int() - shift) & HIGHEST
    return Gptq(
        qweight=pack(codes.codes).T.contiguous(),
        qzeros=pack(stored.T.contiguous()),
        scales=codes.scales.T.contiguous(),
        group=codes.group,
        zeros=zeros,
    )


def from_gptq(packed: Gptq) -> Codes:
    """The codes that `gptq` packed."""
    shift = 1 if packed.zeros == "less one" else 0
    zeros = (unpack(packed.qzeros).T.int() + shift) & HIGHEST
    return Codes(
        unpack(packed.qweight.T.contiguous()), packed.scales.T.contiguous(), zeros.to(torch.uint8), packed.group
    )


def from_exllama_words(words: torch.Tensor) -> torch.Tensor:
    """GPTQ's words as they were before ExLlamaV2 reordered them in place: even inputs in the low half, odd ones above.

    Source: the permutation `77775555 33331111 66664444 22220000` of its 4-bit mode.
    """
    return pack(uninterleave(unpack(words[..., None]))).squeeze(-1)


# --- AWQ -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Awq:
    """AWQ's layout: a word holds eight neighbouring outputs of one input, interleaved, and so do the zero points."""

    qweight: torch.Tensor  # int32 [in, out / 8]
    qzeros: torch.Tensor  # int32 [in / group, out / 8]
    scales: torch.Tensor  # [in / group, out]
    group: int


def from_awq(packed: Awq) -> Codes:
    """The codes that `packed` holds."""
    return Codes(
        uninterleave(unpack(packed.qweight)).T.contiguous(),
        packed.scales.T.contiguous(),
        uninterleave(unpack(packed.qzeros)).T.contiguous(),
        packed.group,
    )


def interleave(values: torch.Tensor) -> torch.Tensor:
    """Each eight neighbours of the last dimension in the order of an AWQ word's nibbles."""
    return split(values, PER_WORD)[..., AWQ_ORDER].reshape(values.shape)


def uninterleave(values: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave`."""
    back = [AWQ_ORDER.index(place) for place in range(PER_WORD)]
    return split(values, PER_WORD)[..., back].reshape(values.shape)
