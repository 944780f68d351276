"""Tiny GPTQ and AWQ checkpoints, packed here from known codes by the formats' own definitions, nibble by nibble."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from decodegap import decode, quant_checkpoint
from decodegap.models import Model
from decodegap.quant_paths import PROJECTIONS

FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq"},
    "gptq, zero points": {"method": "gptq", "symmetric": False},
    "gptq_v2": {"method": "gptq", "symmetric": False, "layout": "gptq_v2"},
    "awq": {"method": "awq"},
}
FIRST = "model.layers.0.self_attn.q_proj"
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that each nibble of a word holds


@dataclass(frozen=True)
class Layer:
    """What one projection's codes are, before any packing: uint8 `[out, in]`, `[out, in / group]`, and fp16 scales."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray

    def weight(self) -> torch.Tensor:
        """`(code - zero) * scale`, element by element, float32 `[out, in]`."""
        group = self.codes.shape[1] // self.zeros.shape[1]
        per_input = np.arange(self.codes.shape[1]) // group
        offsets = self.codes.astype(np.float32) - self.zeros[:, per_input].astype(np.float32)
        return torch.from_numpy(offsets * self.scales[:, per_input].astype(np.float32))


def layer(outputs: int, inputs: int, group: int, *, symmetric: bool, seed: int) -> Layer:
    """Random codes and scales, with zero points of 8 or of 1 to 15."""
    random = np.random.default_rng(seed)
    shape = (outputs, inputs // group)
    zeros = np.full(shape, 8, np.uint8) if symmetric else random.integers(1, 16, shape, dtype=np.uint8)
    codes = random.integers(0, 16, (outputs, inputs), dtype=np.uint8)
    return Layer(codes, zeros, random.uniform(0.001, 0.006, shape).astype(np.float16))


def words(values: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Words `[rows / 8, columns]`: nibble `j` of a word holds row `order[j]` of its eight."""
    packed = np.zeros((values.shape[0] // 8, values.shape[1]), np.uint32)
    for place, row in enumerate(order):
        packed |= values[row::8].astype(np.uint32) << np.uint32(4 * place)
    return packed.view(np.int32)


def packed(one: Layer, method: str, *, less: int) -> dict[str, np.ndarray]:
    """The tensors of a layer; `less` is what is taken off a zero point before it is stored."""
    scales = one.scales.T
    if method == "awq":
        qweight, qzeros = words(one.codes, AWQ_NIBBLES).T, words(one.zeros, AWQ_NIBBLES).T
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales}
    group = one.codes.shape[1] // one.zeros.shape[1]
    order = (np.arange(one.codes.shape[1]) // group).astype(np.int32)
    return {"qweight": words(one.codes.T), "qzeros": words(one.zeros - less).T, "scales": scales, "g_idx": order}


def config_of(method: str, group: int, *, symmetric: bool, layout: str) -> dict[str, Any]:
    """A `quantization_config` as the libraries write it."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
                "modules_to_not_convert": None}  # fmt: skip
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": symmetric, "desc_act": False,
            "checkpoint_format": layout, "true_sequential": True}  # fmt: skip


def write(
    folder: Path, model: Model, method: str, group: int = 128, *, symmetric: bool = True, layout: str = "gptq"
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of `model`; what every parameter of the loaded model must be, by name, in float32."""
    net = decode.build(model, weights="synthetic", weights_dir=None, device="cpu", dtype=torch.float16, seed=3)
    tensors: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for seed, (name, parameter) in enumerate(net.named_parameters()):
        stem = name.removesuffix(".weight")
        if not stem.endswith(tuple(PROJECTIONS)):
            tensors[name] = parameter.data
            expected[name] = parameter.data.float()
            continue
        one = layer(*parameter.shape, group, symmetric=symmetric and method == "gptq", seed=seed)
        expected[name] = one.weight()
        for part, values in packed(one, method, less=1 if layout == "gptq" else 0).items():
            tensors[f"{stem}.{part}"] = torch.from_numpy(np.ascontiguousarray(values))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    asked = config_of(method, group, symmetric=symmetric, layout=layout)
    (folder / "config.json").write_text(json.dumps(model.config | {"quantization_config": asked}))
    return expected


def load(model: Model, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as the library reads it from `folder`, on a CPU."""
    return quant_checkpoint.build(model, folder, device="cpu", dtype=dtype)


def reconfigure(folder: Path, **changes: Any) -> None:
    """Change fields of the quantization_config; None takes a field away."""
    config = json.loads((folder / "config.json").read_text())
    asked = config["quantization_config"] | changes
    config["quantization_config"] = {field: value for field, value in asked.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def retensor(folder: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Change one tensor of the file, or take it away."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors.pop(name, torch.zeros(256))).contiguous() if change else torch.empty(0)
    if change is None:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors")
