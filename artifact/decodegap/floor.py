"""What a decode step costs at least: the bytes it must move, and the time that takes. Pure arithmetic."""

from collections.abc import Mapping
from typing import Any

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of one attention head (elements)."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def parameter_count(config: Mapping[str, Any]) -> int:
    """Number of parameters of a Qwen2, Llama or Mistral decoder with this config.

    Source: the published architectures; the models' own files give 7,615,616,512 for Qwen2.5-7B,
    8,030,261,248 for Llama-3.1-8B and 7,248,023,552 for Mistral-7B-v0.3, which tests compare.
    """
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    q_rows = int(config["num_attention_heads"]) * head_dim(config)
    kv_rows = int(config["num_key_value_heads"]) * head_dim(config)
    biased = config["model_type"] == "qwen2" or bool(config.get("attention_bias"))
    attention = hidden * (2 * q_rows + 2 * kv_rows) + (q_rows + 2 * kv_rows if biased else 0)
    layer = attention + 3 * hidden * inter + 2 * hidden
    tables = 1 if config.get("tie_word_embeddings") else 2
    return int(config["num_hidden_layers"]) * layer + hidden + tables * hidden * int(config["vocab_size"])


def projection_count(config: Mapping[str, Any]) -> int:
    """Number of weights in the seven projections of all layers, without biases: what quantised paths quantise."""
    hidden, inter = int(config["hidden_size"]), int(config["intermediate_size"])
    q_rows = int(config["num_attention_heads"]) * head_dim(config)
    kv_rows = int(config["num_key_value_heads"]) * head_dim(config)
    return int(config["num_hidden_layers"]) * hidden * (2 * q_rows + 2 * kv_rows + 3 * inter)


def quantised_bytes(config: Mapping[str, Any], element_bytes: int, bits: float) -> int:
    """Bytes of the weights that a step reads if the projections have `bits` bits a weight and the rest stays."""
    kept = streamed_bytes(config, element_bytes) - projection_count(config) * element_bytes
    return kept + round(projection_count(config) * bits / 8)


def weight_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """`W_all`: bytes of every parameter."""
    return parameter_count(config) * element_bytes


def streamed_bytes(config: Mapping[str, Any], element_bytes: int) -> int:
    """`W_streamed`: `W_all` without an untied input embedding, of which decode reads a single row."""
    table = 0 if config.get("tie_word_embeddings") else int(config["vocab_size"]) * int(config["hidden_size"])
    return weight_bytes(config, element_bytes) - table * element_bytes


def kv_bytes(config: Mapping[str, Any], ctx: int, element_bytes: int) -> int:
    """`K`: bytes of keys and values that one step reads at `ctx` tokens of context."""
    per_token = 2 * int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * head_dim(config)
    return per_token * ctx * element_bytes


def floor_ms(n_bytes: int, bandwidth_gb_s: float) -> float:
    """Milliseconds that `n_bytes` take at `bandwidth_gb_s` (1 GB = 1e9 bytes)."""
    return n_bytes / bandwidth_gb_s / 1e6
