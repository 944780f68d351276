"""What a fused step needs to know of a model, and the bytes that each of its kernels must read."""

from dataclasses import dataclass
from typing import Any

from decodegap.errors import UnsupportedError

# In the order in which a step runs them; `qkv` to `down` once a layer. `embed` has no tiles to choose.
TILED = ("qkv", "attention", "o", "gate_up", "down", "lm_head")
IN_LAYER = ("qkv", "attention", "combine", "o", "gate_up", "down")
BF16_BYTES = 2
GROUP = 128  # columns that share a scale in 4 bits
UNIT_ROWS = 16  # rows that a matrix unit multiplies together, and a program reads at least, in 4 bits
STATE_WORDS = 3  # int64 of a step's state on the device; device.py says which


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder of the Llama family, as its kernels see them."""

    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    bias: bool  # of query, key and value
    eps: float
    bits: int = 16  # of a weight of the layers' projections; the head is always in 16

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.heads // self.kv_heads

    @property
    def qkv_rows(self) -> int:
        """Outputs of the joined query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def columns(self, kernel: str) -> int:
        """Inputs of a matrix-vector kernel."""
        return {"o": self.heads * self.head_dim, "down": self.inter}.get(kernel, self.hidden)

    def bits_of(self, kernel: str) -> int:
        """Bits of a weight of a matrix-vector kernel."""
        return 16 if kernel == "lm_head" else self.bits

    def rows(self, kernel: str) -> int:
        """Outputs of a matrix-vector kernel; of `gate_up` the pairs."""
        sizes = {"qkv": self.qkv_rows, "o": self.hidden, "gate_up": self.inter, "down": self.hidden}
        return {**sizes, "lm_head": self.vocab}[kernel]


def shape_of(config: dict[str, Any], bits: int = 16) -> Shape:
    """The shape in a model's config values, with projections in 16 or 4 `bits`.

    `UnsupportedError` names what the fused step has no kernel for.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    shape = Shape(
        hidden=hidden,
        inter=config["intermediate_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or hidden // heads,
        layers=config["num_hidden_layers"],
        vocab=config["vocab_size"],
        bias=config["model_type"] == "qwen2",
        eps=config["rms_norm_eps"],
        bits=bits,
    )
    for wrong, what in (
        (config["model_type"] not in ("qwen2", "llama", "mistral"), f"model type {config['model_type']!r}"),
        (config.get("hidden_act", "silu") != "silu", f"activation {config.get('hidden_act')!r}"),
        (bool(config.get("sliding_window")) and config.get("use_sliding_window", True), "a sliding window"),
        (config.get("attention_bias", False) or config.get("mlp_bias", False), "a bias in the output projections"),
        (shape.head_dim < 16 or shape.head_dim & (shape.head_dim - 1), f"a head of {shape.head_dim} dimensions"),
        (bool(hidden % 16 or shape.inter % 16), "widths that are no multiples of 16"),
        (
            bits == 4 and any(shape.columns(name) % GROUP for name in ("qkv", "o", "down")),
            f"widths in 4 bits that are no multiples of {GROUP}",
        ),
    ):
        if wrong:
            raise UnsupportedError(f"the fused step has no kernel for {what}")
    return shape


def kernel_bytes(shape: Shape, ctx: int) -> dict[str, int]:
    """Bytes that one launch of each kernel must read at a context of `ctx`: weights, scales, gains, biases, K and V."""

    def matrix(name: str) -> int:
        count = shape.rows(name) * shape.columns(name) * (2 if name == "gate_up" else 1)
        bits = shape.bits_of(name)
        return count * bits // 8 + (count // GROUP * BF16_BYTES if bits == 4 else 0)

    sizes = {name: matrix(name) for name in TILED if name != "attention"}
    sizes["embed"] = BF16_BYTES * shape.hidden
    # Whoever reads a norm's gain; in 4 bits `lm_head` finds the last one where the last `down` has brought it.
    for name in ("qkv", "gate_up", "lm_head") if shape.bits == 16 else ("embed", "o", "down"):
        sizes[name] += BF16_BYTES * shape.hidden
    if shape.bias:
        sizes["qkv"] += BF16_BYTES * shape.qkv_rows
    sizes["attention"] = 2 * BF16_BYTES * shape.kv_heads * shape.head_dim * ctx
    return sizes


def launches(shape: Shape) -> dict[str, int]:
    """How often a step launches `embed` and each tiled kernel."""
    return {name: 1 if name in ("embed", "lm_head") else shape.layers for name in ("embed", *TILED)}
