"""A linear layer in 4 bits, as each library computes it for one token: packed weights, one product, the bias."""

import logging
from functools import cache
from typing import Any

import torch

from decodegap import quant_nf4, quant_tiles, quantise
from decodegap.errors import MissingPackageError, UnsupportedError
from decodegap.quant_patches import EXTENSIONS

MARLIN_LEAST_LOCKS = 128  # of a product's blocks that wait for each other; more than that where there are more SMs
# How Marlin names the type of a weight: the fields of its `ScalarType` packed into an integer (mantissa bits from bit
# 8, a bias from bit 17, from bit 50 how it would hold NaN). Unsigned 4-bit integers, as they are or less 8.
MARLIN_U4 = 4 << 8 | 1 << 50
MARLIN_U4_LESS_8 = MARLIN_U4 | 8 << 17


def detached_bias(source: torch.nn.Linear) -> torch.Tensor | None:
    """The bias `[out]` of a linear layer as a plain tensor, or None (its declared type forgets that)."""
    bias: torch.nn.Parameter | None = source.bias
    return None if bias is None else bias.detach()


class QuantLinear(torch.nn.Module):
    """`y = x W + bias` with `W` held in 4 bits; `x` `[..., in]`, `y` `[..., out]`."""

    held_bias: torch.Tensor | None

    def __init__(self, source: torch.nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = source.out_features, source.in_features

    def dequantised(self) -> torch.Tensor:
        """The weight that the packed tensors stand for, float32 `[out, in]`, unpacked from what the kernel reads."""
        raise NotImplementedError

    def packed(self) -> list[torch.Tensor]:
        """The tensors that a product reads beside its input: codes, scales, zero points; not the bias."""
        raise NotImplementedError

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias in the order of the outputs, `[out]`."""
        raise NotImplementedError

    @property
    def packed_bytes(self) -> int:
        """Bytes of all that `packed` lists."""
        return sum(tensor.nbytes for tensor in self.packed())


class Nf4Linear(QuantLinear):
    """bitsandbytes' own `Linear4bit`, quantised by bitsandbytes."""

    def __init__(self, source: torch.nn.Linear, *, double: bool) -> None:
        super().__init__(source)
        quant_nf4.require_nf4(tuple(source.weight.shape))
        bnb = bitsandbytes()
        weight = source.weight.detach()
        # An explicit compute dtype: without one the layer takes it from its first input, and warns.
        inner = bnb.nn.Linear4bit(
            self.in_features,
            self.out_features,
            bias=source.bias is not None,
            compute_dtype=weight.dtype,
            compress_statistics=double,
            quant_type="nf4",
            device="meta",
        )
        inner.weight = bnb.nn.Params4bit(
            weight, requires_grad=False, compress_statistics=double, quant_type="nf4", module=inner
        ).to(weight.device)
        inner.bias = source.bias
        # On a CPU with AVX512-BF16 the layer would repack itself and compute in bf16: another result on another CPU.
        inner.support_avx512bf16_for_cpu = False
        self.inner = inner.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product through bitsandbytes: one fused kernel on a GPU, on a CPU its dequantisation and a product."""
        out: torch.Tensor = self.inner(x)
        return out

    def dequantised(self) -> torch.Tensor:
        """See the base class; by our own reading of the format, not by bitsandbytes'."""
        state = self.inner.weight.quant_state
        absmax: torch.Tensor | quant_nf4.Outer = state.absmax
        if state.nested:
            absmax = quant_nf4.Outer(state.absmax, state.state2.absmax, state.state2.code, state.offset)
        packed = self.inner.weight.data.flatten()
        return quant_nf4.Nf4(packed, absmax, (self.out_features, self.in_features)).dequantised()

    def packed(self) -> list[torch.Tensor]:
        """See the base class."""
        state = self.inner.weight.quant_state
        return [self.inner.weight.data, state.absmax, *([state.state2.absmax] if state.nested else [])]

    @property
    def bias(self) -> torch.Tensor | None:
        """See the base class."""
        bias: torch.Tensor | None = self.inner.bias
        return bias


class TinygemmLinear(QuantLinear):
    """torch's own int4 product: tensor-core tiles in bf16 on a GPU, its own layout on a CPU."""

    words: torch.Tensor
    scales_and_zeros: torch.Tensor

    def __init__(self, source: torch.nn.Linear, *, group: int) -> None:
        super().__init__(source)
        weight = source.weight.detach()
        codes = quantise.round_to_nearest(weight, group, weight.dtype, symmetric=False)
        self.group = group
        on_cpu = weight.device.type == "cpu"
        if on_cpu:
            quantise.require_shape(tuple(weight.shape), group, outputs=16)
            words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.codes.int(), 1)  # noqa: SLF001
            pairs = quant_tiles.scales_and_zeros(codes)
        else:
            packed = quant_tiles.tinygemm(codes)
            words, pairs = packed.words, packed.scales_and_zeros
        self.codes = codes.codes if on_cpu else None  # not part of what a product reads
        self.register_buffer("words", words)
        self.register_buffer("scales_and_zeros", pairs)
        self.register_buffer("held_bias", detached_bias(source))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product through torch's operator, and the bias after it."""
        rows = x.reshape(-1, self.in_features)
        ops = torch.ops.aten
        product = ops._weight_int4pack_mm if self.codes is None else ops._weight_int4pack_mm_for_cpu  # noqa: SLF001
        out: torch.Tensor = product(rows, self.words, self.group, self.scales_and_zeros)
        out = out.view(*x.shape[:-1], self.out_features)
        return out if self.held_bias is None else out + self.held_bias

    def dequantised(self) -> torch.Tensor:
        """See the base class; on a CPU from the codes as they were packed, because the layout there is the processor's.

        That the operator multiplies by these is for a check of its product to find, as for every path.
        """
        if self.codes is None:
            return quant_tiles.Tinygemm(self.words, self.scales_and_zeros, self.group).dequantised()
        return quant_tiles.affine(self.codes, self.scales_and_zeros, self.group)

    def packed(self) -> list[torch.Tensor]:
        """See the base class."""
        return [self.words, self.scales_and_zeros]

    @property
    def bias(self) -> torch.Tensor | None:
        """See the base class."""
        return self.held_bias


class MarlinLinear(QuantLinear):
    """Marlin, called as gptqmodel calls it, the bias fused: AWQ's codes with zero points, or GPTQ's symmetric ones."""

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    workspace: torch.Tensor
    none: torch.Tensor

    def __init__(self, source: torch.nn.Linear, *, group: int, zero_points: bool, product: Any) -> None:
        super().__init__(source)
        weight = source.weight.detach()
        codes = quantise.codes_of(source, group, symmetric=not zero_points)
        packed = quant_tiles.marlin(codes, zero_points=zero_points)
        self.group, self.product = codes.group, product
        self.type_id = MARLIN_U4 if zero_points else MARLIN_U4_LESS_8
        # gptqmodel lets AWQ's blocks add up their parts by atomics where a layer is narrow and deep, GPTQ's never.
        self.atomic = zero_points and self.out_features < 2048 <= self.in_features
        processors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        locks = torch.zeros(max(processors, MARLIN_LEAST_LOCKS), dtype=torch.int32, device=weight.device)
        none = torch.empty(0, dtype=torch.int32, device=weight.device)
        self.register_buffer("words", packed.words)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("zeros", none if packed.zeros is None else packed.zeros)
        self.register_buffer("workspace", locks)
        self.register_buffer("none", none)
        bias = detached_bias(source)
        self.register_buffer("held_bias", None if bias is None else quant_tiles.marlin_bias(bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One Marlin product with the sums in fp32, as gptqmodel asks for by default."""
        rows = x.reshape(-1, self.in_features)
        out: torch.Tensor = self.product(
            rows,
            None,  # where to write
            self.words,
            self.held_bias,
            self.scales,
            None,  # a scale of the whole weight
            self.zeros,
            self.none,  # the group of each input, and the order of inputs: as they come
            self.none,
            self.workspace,
            self.type_id,
            rows.shape[0],
            self.out_features,
            self.in_features,
            True,  # whole rows of inputs are here
            self.atomic,
            True,  # sums in fp32
            False,  # zero points are integers
        )
        return out.view(*x.shape[:-1], self.out_features)

    def dequantised(self) -> torch.Tensor:
        """See the base class."""
        zeros = self.zeros if self.zeros.numel() else None
        return quant_tiles.from_marlin(quant_tiles.Marlin(self.words, self.scales, zeros, self.group)).dequantised()

    def packed(self) -> list[torch.Tensor]:
        """See the base class."""
        return [self.words, self.scales, self.zeros]

    @property
    def bias(self) -> torch.Tensor | None:
        """See the base class; putting it in the order of Marlin's threads twice puts it back."""
        return None if self.held_bias is None else quant_tiles.marlin_bias(self.held_bias)


class ExllamaLinear(QuantLinear):
    """ExLlamaV2's product over GPTQ's layout, called as gptqmodel calls it; the bias is added after it."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __init__(self, source: torch.nn.Linear, *, group: int, ops: Any, scratch: torch.Tensor) -> None:
        super().__init__(source)
        weight = source.weight.detach()
        if weight.dtype != torch.float16:
            raise UnsupportedError(f"ExLlamaV2 computes in float16; a weight in {weight.dtype} would be cast both ways")
        codes = quantise.codes_of(source, group, symmetric=True)
        quantise.require_shape(tuple(weight.shape), codes.group, outputs=32, inputs=32)
        packed = quantise.gptq(codes, zeros="true")  # what the kernel subtracts
        self.group, self.ops = codes.group, ops
        self.on_current_stream = ops.name == EXTENSIONS["exllamav2"].namespace
        self.scratch = scratch  # the matrix keeps its address
        self.register_buffer("qweight", packed.qweight)
        self.register_buffer("qzeros", packed.qzeros)
        self.register_buffer("scales", packed.scales)
        self.register_buffer("held_bias", detached_bias(source))
        # No group index: with one, even in order, the kernel would look inputs up. The matrix keeps the addresses of
        # these tensors and reorders the words in place; `scratch` is only read back for more rows than a decode has.
        nothing = [None] * 5
        self.handle = int(ops.make_q_matrix(self.qweight, *nothing, self.qzeros, self.scales, None, scratch))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One product, its parts added up in fp16 by atomics, and the bias."""
        rows = x.reshape(-1, self.in_features)
        out = torch.empty((rows.shape[0], self.out_features), dtype=torch.float16, device=x.device)
        self.ops.gemm_half_q_half(rows, self.handle, out, False)
        if self.held_bias is not None:
            out.add_(self.held_bias)
        return out.view(*x.shape[:-1], self.out_features)

    def dequantised(self) -> torch.Tensor:
        """See the base class."""
        words = quantise.from_exllama_words(self.qweight)
        return quantise.from_gptq(quantise.Gptq(words, self.qzeros, self.scales, self.group, "true")).dequantised()

    def packed(self) -> list[torch.Tensor]:
        """See the base class."""
        return [self.qweight, self.qzeros, self.scales]

    @property
    def bias(self) -> torch.Tensor | None:
        """See the base class."""
        return self.held_bias


@cache
def bitsandbytes() -> Any:
    """The bitsandbytes package, imported when it is first needed. Raises `MissingPackageError` where it cannot be."""
    # It says through its log which optional packages of a CPU path it misses; that path is not ours.
    log = logging.getLogger("bitsandbytes")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        import bitsandbytes as found
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingPackageError(f"bitsandbytes cannot be imported here: {type(error).__name__}: {error}") from None
    finally:
        log.setLevel(before)
    return found
