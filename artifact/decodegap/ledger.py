"""Which bytes a step of each arm moves, and which operators move them. Pure arithmetic on a model's config."""

from collections.abc import Mapping
from typing import Any

from decodegap import floor, quant_catalogue

WEIGHTS, KV_READ = "weights", "KV read"
KV_CAT, REPEAT_KV, MASK = "KV concatenation", "repeat_kv", "mask"
CASTS, DEQUANTISATION = "casts", "dequantisation"
FLOOR_ITEMS = (WEIGHTS, KV_READ)
EXTRA_ITEMS = (KV_CAT, REPEAT_KV, MASK, CASTS, DEQUANTISATION)

# What an arm moves beyond the floor, by its definition: a `DynamicCache` concatenates the whole K and V in every
# layer; a stock `StaticCache` step under capture builds a mask and copies K and V for every query head; a maskless
# static step writes one token in place.
EXTRA: dict[str, tuple[str, ...]] = {
    "eager": (KV_CAT,),
    "eager-auto": (KV_CAT,),
    "eager-pinned": (KV_CAT,),
    "graph": (KV_CAT,),
    "graph-static": (),
    "graph-stock": (REPEAT_KV, MASK),
    "compiled": (),
    "fused-plain": (),
    "fused": (),
    **dict.fromkeys(quant_catalogue.series(), (KV_CAT,)),
    "fused-int4": (),
}
CAT_KV_OPERATOR = "aten::cat (KV)"  # a concatenation whose input is as large as a layer's K
QUANTISED_PRODUCT = "quantised product"  # the projections' products of a quantised path, whatever launches them
HEAD_PRODUCT = "aten::linear (head)"  # told apart on the quantised paths, where it alone of the products stays dense
BY_NAME = " (by name)"
# Classes of device kernels by what their names hold, first match wins; used only where no operator launched them.
KERNEL_CLASSES = (
    ("triton", ("triton_",)),  # first: a generated kernel's name lists all that was fused into it
    ("attention", ("flash", "fmha", "attention", "cudnn")),
    ("cat", ("CatArray",)),
    ("matrix product", ("gemm", "gemv", "cutlass", "cublas", "splitK", "nvjet", "dot_kernel")),
    ("memory copy or set", ("Memcpy", "Memset")),
    ("copy", ("copy",)),
    ("reduction", ("reduce",)),
    ("elementwise", ("elementwise", "vectorized", "index")),
)
# The kernels of the fused step by their exact names, and what stands for their operator: it has none.
OWN_KERNELS = {
    "embed": "fused embed",
    "qkv": "fused qkv",
    "attention": "fused attention",
    "combine": "fused combine",
    "project": "fused o and down",  # one function for both, which a name cannot tell apart
    "gate_up": "fused gate and up",
    "lm_head": "fused lm_head",
}
_OPERATORS = {
    WEIGHTS: (
        *("aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::bmm", "matrix product" + BY_NAME),
        *(QUANTISED_PRODUCT, HEAD_PRODUCT),
    ),
    KV_CAT: (CAT_KV_OPERATOR, "cat" + BY_NAME),
    REPEAT_KV: ("aten::reshape", "aten::clone", "aten::contiguous", "copy" + BY_NAME),
}


def ledger(
    config: Mapping[str, Any], ctx: int, arm: str, element_bytes: int, *, weights: int | None = None, casts: int = 0
) -> dict[str, int]:
    """Bytes that one step of `arm` moves at `ctx` tokens, by item; every item is there, 0 where the arm has none.

    KV concatenation: K and V of every layer read and written once, 2 x K. repeat_kv, with g query heads a KV head:
    K read, gK written, and (g - 1)K more for attention to read, 2gK in all (nothing for g = 1). Mask: per layer a
    bool row read and an additive row written and read. `weights` replaces the streamed bytes of `config` (packed
    weights), `casts` are the bytes of converting them. Items that an arm's definition does not name are 0.
    """
    k = floor.kv_bytes(config, ctx, element_bytes)
    heads_per_kv = int(config["num_attention_heads"]) // int(config["num_key_value_heads"])
    extra = {
        KV_CAT: 2 * k,
        REPEAT_KV: 2 * heads_per_kv * k if heads_per_kv > 1 else 0,
        MASK: int(config["num_hidden_layers"]) * ctx * (1 + 2 * element_bytes),
    }
    found = {
        WEIGHTS: floor.streamed_bytes(config, element_bytes) if weights is None else weights,
        KV_READ: k,
    }
    named = EXTRA.get(arm, ())
    found |= {item: extra[item] if item in named else 0 for item in (KV_CAT, REPEAT_KV, MASK)}
    return found | {CASTS: casts, DEQUANTISATION: 0}


def item_of(operator: str) -> str:
    """The ledger item whose bytes `operator` moves, or "" for one that moves activations only."""
    if "scaled_dot_product" in operator or operator == "attention" + BY_NAME:
        return KV_READ
    return next((item for item, names in _OPERATORS.items() if operator in names), "")


def is_own(arm: str) -> bool:
    """Whether the arm is one of our own fused step, whose kernels we name."""
    return arm.startswith("fused")


def own_bits(arm: str) -> int:
    """Bits of a projection's weight in one of our own arms."""
    return 4 if arm.endswith("int4") else 16


def own_bytes(config: Mapping[str, Any], ctx: int, arm: str) -> dict[str, int]:
    """Bytes that a step of one of our own arms must read, by what stands for the operator."""
    from decodegap.fused import shape  # whose package needs torch, as this module does not

    found = shape.shape_of(dict(config), own_bits(arm))
    each, launches = shape.kernel_bytes(found, ctx), shape.launches(found)
    moved = {name: each[name] * launches[name] for name in each}
    joined = {"project": moved.pop("o") + moved.pop("down")}
    return {OWN_KERNELS[name]: n for name, n in (moved | joined).items()}


def own_weights(config: Mapping[str, Any], arm: str) -> int:
    """Bytes of the weights that a step of one of our own arms streams, the scales of rounded ones among them."""
    from decodegap.fused.shape import GROUP

    if own_bits(arm) == 16:
        return floor.streamed_bytes(config, 2)
    return floor.quantised_bytes(config, 2, own_bits(arm) + 16 / GROUP)


def own_launches(config: Mapping[str, Any]) -> dict[str, int]:
    """How often a fused step launches each of its kernels, by kernel name; `combine`, which some tiles do without."""
    from decodegap.fused import shape

    found = shape.launches(shape.shape_of(dict(config)))
    joined = {"project": found.pop("o") + found.pop("down"), "combine": found["attention"]}
    return found | joined


def kernel_class(kernel: str) -> str:
    """What a kernel is, from its name alone: a class of `KERNEL_CLASSES` or the name itself, marked as by name."""
    for label, markers in KERNEL_CLASSES:
        if any(marker in kernel for marker in markers):
            return label + BY_NAME
    return kernel[:60] + BY_NAME


def layer_kv_elements(config: Mapping[str, Any], ctx: int) -> int:
    """Elements of one layer's K (or V) at `ctx` tokens."""
    return int(config["num_key_value_heads"]) * floor.head_dim(config) * ctx
