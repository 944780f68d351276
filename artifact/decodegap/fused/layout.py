"""The weights of a transformers model as the fused kernels read them, and the buffers that a step writes."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from decodegap import quantise
from decodegap.arms import Setup
from decodegap.errors import BadInputError, UnsupportedError
from decodegap.fused.shape import GROUP, STATE_WORDS, UNIT_ROWS, Shape, shape_of

# What timing.measure may decode beyond the context, and a little: its energy loop is the longest.
ROOM = 4352
CODE_BITS = 4
ALIGNED = 32  # int32 counters a layer: its part of the buffer starts on a full line


@dataclass(frozen=True)
class Matrix:
    """Weights as a kernel reads them: int32 words, each two bf16 or eight codes, and the scales of the latter."""

    words: torch.Tensor  # [rows, columns / 2], or [rows / 16, columns / 128, 256] as `in_tiles` packs them
    scales: torch.Tensor | None = None  # bf16 [rows, columns / 128]; None for bf16 weights


@dataclass(frozen=True)
class Layer:
    """One layer's weights; gains are bf16 seen as words of two.

    `qkv` `[rows, hidden]`: heads of query, key and value; in each head the rows i and i + half, which a rotation
    mixes, are neighbours. `gate_up` `[2 inter, hidden]`: gate and up alternate, so that a program that computes
    some pairs reads one contiguous slab.
    """

    qkv: Matrix
    bias: torch.Tensor  # [rows], or the gain where there is none
    o: Matrix
    gate_up: Matrix
    down: Matrix
    first_gain: torch.Tensor
    second_gain: torch.Tensor


@dataclass(frozen=True)
class Buffers:
    """What a step writes. Every layer has its own, because several kernels are alive at once."""

    hidden: torch.Tensor  # [2 layers + 1, hidden] bf16, the residual stream after each addition
    scaled: torch.Tensor  # in 4 bits the same, times the gain of the norm that comes next
    squares: torch.Tensor  # in 4 bits [2 layers + 1, hidden / 16] fp32, of `hidden` the sums of 16 squares each
    query: torch.Tensor  # [layers, heads x head_dim] bf16
    mixed: torch.Tensor  # [layers, heads x head_dim] bf16, the attention's output
    gated: torch.Tensor  # [layers, inter] bf16
    logits: torch.Tensor  # [1, vocab] fp32
    arrivals: torch.Tensor  # [layers, >= kv_heads] int32, how many splits of a K/V head are done; zero between steps
    state: torch.Tensor  # [STATE_WORDS] int64, see device.py

    def poison(self) -> None:
        """Overwrite every output with NaN."""
        for each in (self.hidden, self.scaled, self.squares, self.query, self.mixed, self.gated, self.logits):
            each.fill_(float("nan"))


@dataclass(frozen=True)
class Loaded:
    """A model in the fused layout with a cache that holds the first `start` tokens, from which a step goes on."""

    shape: Shape
    layers: tuple[Layer, ...]
    embedding: torch.Tensor  # [vocab, hidden] bf16
    gain: torch.Tensor
    head: Matrix  # [vocab, hidden], in 16 bits
    cos: torch.Tensor  # [capacity, head_dim / 2] fp32
    sin: torch.Tensor
    cache: torch.Tensor  # [layers, 2, kv_heads, capacity, head_dim] bf16
    buffers: Buffers
    token: int  # that the first step decodes
    start: int
    capacity: int
    device: str


def load(setup: Setup, *, capacity: int | None = None, bits: int = 16) -> Loaded:
    """Take over the weights of `setup.net`, and copy the first `ctx - 1` tokens of its cache.

    The first step then decodes `setup.token` over a context of `ctx`, as the captured arms do, and each later one a
    token more, up to `capacity`. Projections that need another order, or 4 `bits`, are moved layer by layer and leave
    the net, so that it can run no other arm afterwards; the rest is shared with it. In 4 bits they are rounded to the
    nearest code, with a scale for each 128 columns, as the quantised paths' symmetric codes are.

    Raises `UnsupportedError` for another dtype than bf16 and for what there is no kernel for.
    """
    net, start = setup.net, setup.ctx - 1
    capacity = setup.ctx + ROOM if capacity is None else capacity
    if net.dtype != torch.bfloat16:
        raise UnsupportedError(f"the fused step reads bf16 weights, not {net.dtype}")
    if capacity < setup.ctx:
        raise BadInputError(f"capacity is {capacity}, less than the context of {setup.ctx}")
    if setup.cache.get_seq_length() < start:
        raise ValueError(f"the cache holds {setup.cache.get_seq_length()} tokens, not {start}")
    shape = shape_of(net.config.to_dict(), bits)
    cache = torch.zeros(
        (shape.layers, 2, shape.kv_heads, capacity, shape.head_dim), dtype=net.dtype, device=setup.device
    )
    past: list[Any] = list(setup.cache.layers)
    for kept, own in zip(past, cache, strict=True):
        own[0, :, :start] = kept.keys[0, :, :start]
        own[1, :, :start] = kept.values[0, :, :start]
    model = net.get_submodule("model")
    layers = tuple(_take(layer, shape) for _, layer in model.get_submodule("layers").named_children())
    cos, sin = _rotations(net, capacity, setup.device)
    return Loaded(
        shape=shape,
        layers=layers,
        embedding=_shared(model.get_submodule("embed_tokens").get_parameter("weight")),
        gain=_words(model.get_submodule("norm").get_parameter("weight")),
        head=Matrix(_words(net.get_submodule("lm_head").get_parameter("weight"))),
        cos=cos,
        sin=sin,
        cache=cache,
        buffers=_buffers(shape, setup.device),
        token=int(setup.token),
        start=start,
        capacity=capacity,
        device=setup.device,
    )


def _rotations(net: PreTrainedModel, capacity: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for each position in fp32, `[capacity, head_dim / 2]`: the net's own, with its scaling."""
    positions = torch.arange(capacity, device=device)[None]
    rotary = net.get_submodule("model").get_submodule("rotary_emb")
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=device), positions)  # [1, capacity, head_dim]
    half = cos.shape[-1] // 2  # the second half repeats the first
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _take(layer: nn.Module, shape: Shape) -> Layer:
    """One layer's weights in the kernels' order; what had to be moved is gone from `layer` afterwards."""
    attention, mlp = layer.get_submodule("self_attn"), layer.get_submodule("mlp")
    projections = [attention.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj")]
    sources = [module.get_parameter("weight") for module in projections]
    qkv = torch.cat([_paired(source, shape.head_dim) for source in sources])
    first_gain = _words(layer.get_submodule("input_layernorm").get_parameter("weight"))
    bias = first_gain.view(torch.bfloat16)
    if shape.bias:
        bias = torch.cat([_paired(module.get_parameter("bias")[:, None], shape.head_dim) for module in projections])
        bias = bias.flatten()
    gate_up = sources[0].new_empty((shape.inter, 2, shape.hidden))
    for index, name in enumerate(("gate_proj", "up_proj")):
        gate_up[:, index] = mlp.get_submodule(name).get_parameter("weight")
    o, down = attention.get_submodule("o_proj"), mlp.get_submodule("down_proj")
    taken = Layer(
        qkv=_matrix(qkv, shape.bits),
        bias=bias,
        o=_matrix(o.get_parameter("weight"), shape.bits),
        gate_up=_matrix(gate_up.view(2 * shape.inter, shape.hidden), shape.bits),
        down=_matrix(down.get_parameter("weight"), shape.bits),
        first_gain=first_gain,
        second_gain=_words(layer.get_submodule("post_attention_layernorm").get_parameter("weight")),
    )
    moved = [*projections, mlp.get_submodule("gate_proj"), mlp.get_submodule("up_proj")]
    for module in moved + ([o, down] if shape.bits == CODE_BITS else []):
        module.weight = nn.Parameter(sources[0].new_empty(0), requires_grad=False)
    return taken


def _matrix(weight: torch.Tensor, bits: int) -> Matrix:
    if bits != CODE_BITS:
        return Matrix(_words(weight))
    codes = quantise.round_to_nearest(weight, GROUP, torch.bfloat16, symmetric=True)
    return Matrix(in_tiles(codes.codes), codes.scales.contiguous())


def as_rounded(net: PreTrainedModel) -> PreTrainedModel:
    """A copy of `net` whose projections are what 4 bits leave of them, in fp32: what a step in 4 bits stands for."""
    copied = copy.deepcopy(net)
    for module in copied.get_submodule("model").get_submodule("layers").modules():
        if isinstance(module, nn.Linear):
            codes = quantise.round_to_nearest(module.weight, GROUP, torch.bfloat16, symmetric=True)
            module.weight = nn.Parameter(codes.dequantised(), requires_grad=False)
    return copied


def in_tiles(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[rows, columns]` as int32 words `[rows / 16, columns / 128, 256]` in the order in which threads read them.

    A matrix unit's operand is 16 rows of 16 columns, of which thread 4 r + c holds four columns in the rows r and
    r + 8. Which columns those are is free as long as the other operand agrees: of each 32 columns, thread c takes 8 c
    to 8 c + 7, in two such operands, so that it also reads 16 bytes of the vector at once. A word holds one operand's
    eight codes, in its lower half those of even columns; four words side by side are half of a group.
    """
    split = codes.view(len(codes) // UNIT_ROWS, 2, 8, -1, 2, 2, 4, 2, 2, 2)
    # block, row's upper half, r | group, its half, 32 columns, c, operand, column's upper and lower bit
    words = split.permute(0, 3, 4, 2, 6, 5, 7, 9, 1, 8)
    return quantise.pack(words.reshape(*words.shape[:7], 8)).reshape(len(split), -1, 2 * GROUP)


def _paired(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of whole heads `[heads x head_dim, n]` with i and i + half of each head side by side."""
    heads = rows.view(-1, 2, head_dim // 2, rows.shape[-1])
    return heads.transpose(1, 2).reshape(rows.shape)


def _shared(weight: torch.Tensor) -> torch.Tensor:
    """`weight` as it lies in memory; a copy only where that is not row by row and on 16 bytes, as kernels read it."""
    weight = weight.detach().contiguous()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def _words(weight: torch.Tensor) -> torch.Tensor:
    """bf16 pairs seen as int32 words, `[..., n / 2]`."""
    return _shared(weight).view(torch.int32)


def _buffers(shape: Shape, device: str) -> Buffers:
    def bf16(*sizes: int) -> torch.Tensor:
        return torch.full(sizes, float("nan"), dtype=torch.bfloat16, device=device)

    counters = -(-shape.kv_heads // ALIGNED) * ALIGNED
    return Buffers(
        hidden=bf16(2 * shape.layers + 1, shape.hidden),
        scaled=bf16(2 * shape.layers + 1, shape.hidden),
        squares=torch.full((2 * shape.layers + 1, shape.hidden // UNIT_ROWS), float("nan"), device=device),
        query=bf16(shape.layers, shape.heads * shape.head_dim),
        mixed=bf16(shape.layers, shape.heads * shape.head_dim),
        gated=bf16(shape.layers, shape.inter),
        logits=torch.full((1, shape.vocab), float("nan"), device=device),
        arrivals=torch.zeros((shape.layers, counters), dtype=torch.int32, device=device),
        state=torch.zeros(STATE_WORDS, dtype=torch.int64, device=device),
    )
