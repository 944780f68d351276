"""Real GPTQ and AWQ checkpoints: a folder's own codes, on a dense net that multiplies by what they stand for.

A layer is three tensors in a published layout, so they are read here with this bundle's own unpackers; the libraries
that write such folders change the process that imports them, and a process that measures must not be changed.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from decodegap import decode, quantise
from decodegap.errors import BadInputError
from decodegap.models import Model
from decodegap.quant_modules import detached_bias
from decodegap.quant_paths import PROJECTIONS
from decodegap.quantise import PER_WORD, Codes, Given, Method

BITS = 4
FLOATS = ("F16", "BF16", "F32")  # how safetensors names the types of what is not quantised
ZEROS: dict[str, quantise.Zeros] = {"gptq": "less one", "gptq_v2": "true"}  # by the field `checkpoint_format`


@dataclass(frozen=True)
class Format:
    """What a config says of its codes: which layout, how many inputs share a scale, and how zero points are stored."""

    method: Method
    group: int
    symmetric: bool = False
    zeros: quantise.Zeros = "true"


@dataclass(frozen=True)
class Tensors:
    """Every tensor of a folder by name: its open file, which holds the header and not yet any value."""

    folder: Path
    files: dict[str, Any]

    def require(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], because: str) -> None:
        """Raise `BadInputError` unless the header has `name` with this shape and one of these types."""
        if name not in self.files:
            raise BadInputError(f"WEIGHTS: {self.folder} lacks the tensor {name}")
        header = self.files[name].get_slice(name)
        found, dtype = tuple(header.get_shape()), header.get_dtype()
        if found != shape:
            raise BadInputError(f"WEIGHTS: {self.folder}: {name} has shape {list(found)}, not {list(shape)}: {because}")
        if dtype not in dtypes:
            raise BadInputError(f"WEIGHTS: {self.folder}: {name} is {dtype}, not {' or '.join(dtypes)}")

    def read(self, name: str, device: str) -> torch.Tensor:
        """The values of `name`, on `device`."""
        values: torch.Tensor = self.files[name].get_tensor(name)
        return values.to(device)


def is_quantised(model: Model, folder: Path) -> bool:
    """Whether `folder` is a checkpoint of `model` with codes in the place of weights; raises as `decode.build` does."""
    return decode.checkpoint_config(model, folder).get("quantization_config") is not None


def build(model: Model, folder: Path, *, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model in `dtype` on `device`, its projections the dequantised codes, which each layer keeps for its path.

    What is not quantised comes from the checkpoint too. Nothing is allocated before all names, shapes and types have
    been checked. Raises `BadInputError` in one line for a folder that is not such a checkpoint of `model`, or one in
    an order, a number of bits or a layout that no path takes.
    """
    where = f"WEIGHTS: {folder / 'config.json'}"
    form = format_of(decode.checkpoint_config(model, folder)["quantization_config"], where)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        del config.quantization_config  # or transformers would look for the library that wrote it
        outline = decode.unfilled(config, "meta", dtype)
    except Exception as error:  # noqa: BLE001  (what transformers raises for a bad value depends on the field)
        raise BadInputError(f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from None
    with ExitStack() as stack:
        tensors = opened(folder, stack)
        check_headers(outline, tensors, form)
        return _filled(config, tensors, form, device, dtype)


def format_of(asked: Any, where: str) -> Format:
    """The format that a `quantization_config` names; raises `BadInputError` unless a path here takes it."""

    def require(field: str, possible: tuple[Any, ...], default: Any = None) -> Any:
        value = asked.get(field, default)
        if not any(value == each and type(value) is type(each) for each in possible):
            known = " or ".join(str(each).lower() for each in possible)
            raise BadInputError(f"{where}: quantization_config: {field} is {str(value)[:80]!r}; read here is {known}")
        return value

    if not isinstance(asked, dict):
        raise BadInputError(f"{where}: quantization_config is not a table of fields")
    method: Method = require("quant_method", ("gptq", "awq"))
    require("bits", (BITS,))
    group = int(require("group_size", quantise.GROUPS))
    if method == "awq":
        require("zero_point", (True,))
        if str(asked.get("version")).lower() != "gemm":
            require("version", ("gemm",))
        return Format(method, group)
    require("desc_act", (False,), default=False)
    if asked.get("dynamic"):
        raise BadInputError(f"{where}: quantization_config: dynamic gives layers formats of their own; none is read")
    zeros = ZEROS[require("checkpoint_format", tuple(ZEROS), default="gptq")]
    return Format(method, group, symmetric=bool(require("sym", (True, False))), zeros=zeros)


def opened(folder: Path, stack: ExitStack) -> Tensors:
    """The safetensors files of `folder`, open until `stack` ends. Raises `BadInputError` for none, or damaged ones."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file: Any = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise BadInputError(f"WEIGHTS: {path} cannot be read: {' '.join(str(error).split())[:200]}") from None
        for name in file.keys():  # noqa: SIM118  (it is no mapping)
            if name in files:
                raise BadInputError(f"WEIGHTS: {folder} holds the tensor {name} twice, the second time in {path.name}")
            files[name] = file
    if not files:
        raise BadInputError(f"WEIGHTS: {folder} holds no .safetensors file; pickled weights are not loaded")
    return Tensors(folder, files)


def check_headers(outline: PreTrainedModel, tensors: Tensors, form: Format) -> None:
    """Raise `BadInputError` unless every tensor of the net is there, packed or not, in its shape and type."""
    packed = _projections(outline)
    for name, linear in packed.items():
        inputs, outputs, group = linear.in_features, linear.out_features, form.group
        if inputs % group or outputs % PER_WORD:
            raise BadInputError(
                f"WEIGHTS: {tensors.folder}: {name} is {outputs} x {inputs}: groups of {group} inputs and words of "
                f"{PER_WORD} outputs do not divide it"
            )
        because = f"{outputs} outputs of {inputs} inputs in groups of {group}"
        words = (inputs, outputs // PER_WORD) if form.method == "awq" else (inputs // PER_WORD, outputs)
        tensors.require(f"{name}.qweight", words, ("I32",), because)
        tensors.require(f"{name}.qzeros", (inputs // group, outputs // PER_WORD), ("I32",), because)
        tensors.require(f"{name}.scales", (inputs // group, outputs), ("F16",), because)
        if form.method == "gptq":
            tensors.require(f"{name}.g_idx", (inputs,), ("I32",), because)
    for name, parameter in outline.named_parameters():
        if name.removesuffix(".weight") not in packed:
            tensors.require(name, tuple(parameter.shape), FLOATS, "the config says so")


def codes_in(name: str, tensors: Tensors, form: Format, device: str) -> Codes:
    """The codes of the projection `name`, on `device`. Raises `BadInputError` for what the headers cannot show."""
    where = f"WEIGHTS: {tensors.folder}: {name}"
    qweight, qzeros, scales = (tensors.read(f"{name}.{part}", device) for part in ("qweight", "qzeros", "scales"))
    if not bool(scales.isfinite().all()):
        raise BadInputError(f"{where}.scales are not all finite")
    if form.method == "awq":
        return quantise.from_awq(quantise.Awq(qweight, qzeros, scales, form.group))
    order = tensors.read(f"{name}.g_idx", device)
    if not torch.equal(order, torch.arange(len(order), dtype=order.dtype, device=device) // form.group):
        raise BadInputError(f"{where}.g_idx is not in order; checkpoints with act-order (desc_act) are not read")
    codes = quantise.from_gptq(quantise.Gptq(qweight, qzeros, scales, form.group, form.zeros))
    if form.symmetric and bool((codes.zeros != quantise.MIDDLE).any()):
        raise BadInputError(f"{where}.qzeros are not all {quantise.MIDDLE}, although the config says sym: true")
    # Writers subtract the one from whole words, where a zero borrows from its neighbour, or from each zero point.
    if form.zeros == "less one" and bool((codes.zeros == 0).any()):
        raise BadInputError(f"{where}.qzeros: a zero point of 0 is ambiguous in checkpoint_format gptq; use gptq_v2")
    return codes


def _filled(
    config: PretrainedConfig, tensors: Tensors, form: Format, device: str, dtype: torch.dtype
) -> PreTrainedModel:
    net = decode.unfilled(config, device, dtype)
    packed = _projections(net)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.removesuffix(".weight") not in packed:
                parameter.copy_(tensors.read(name, device))
        for name, linear in packed.items():
            # Some writers give every layer a bias; one of zeros is none.
            has_extra = detached_bias(linear) is None and (extra := f"{name}.bias") in tensors.files
            if has_extra and bool(tensors.read(extra, "cpu").any()):
                raise BadInputError(f"WEIGHTS: {tensors.folder}: {extra} is not zero; this model has no such bias")
            codes = codes_in(name, tensors, form, device)
            linear.weight.copy_(codes.dequantised())
            symmetric = bool((codes.zeros == quantise.MIDDLE).all())
            quantise.give(linear, Given(form.method, quantise.rows(codes).to("cpu"), symmetric))
    return decode.ready(net)


def _projections(net: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """The layers that hold codes, by the names that their tensors begin with."""
    return {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(tuple(PROJECTIONS))
    }
