"""How a model is built, prefilled and stepped: the parts of a decode that every arm shares."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig, PreTrainedModel

from decodegap import floor
from decodegap.errors import BadInputError
from decodegap.models import Model, check_config

INIT_STD = 0.02  # the three models' own `initializer_range`
# Prefill may use any kernel; cuDNN is left out because it builds an execution plan for every new length.
PREFILL_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Fields that fix the shapes and the arithmetic of a step: a checkpoint that differs in one is another model.
SAME_FIELDS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)


def transformers_config(model: Model) -> PretrainedConfig:
    """The config object of transformers itself for `model`, from its config values alone."""
    values = {key: value for key, value in model.config.items() if key != "model_type"}
    config: PretrainedConfig = AutoConfig.for_model(model.config["model_type"], **values)
    return config


def build(
    model: Model, *, weights: str, weights_dir: str | None, device: str, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """The model with its weights on `device`, in `dtype`, ready to decode (no gradients, evaluation mode).

    `weights`: `synthetic` (random values made on the device), `hub` (the pinned revision) or `local`
    (`weights_dir`); real weights are read from safetensors only. Raises `BadInputError` for a checkpoint that is
    not this model, and `torch.OutOfMemoryError` where it does not fit.
    """
    if weights == "synthetic":
        return _synthetic(transformers_config(model), device, dtype, seed)
    source = str(weights_dir if weights == "local" else model.hf_id)
    if weights == "local" and checkpoint_config(model, Path(source)).get("quantization_config") is not None:
        raise BadInputError(
            f"WEIGHTS: {source}: these weights are quantised already; give the 16-bit ones, or measure these as they "
            f"are with EXPERIMENTS=quantised"
        )
    net, lacking = _pretrained(source, model.revision if weights == "hub" else None, dtype, model.slug)
    if lacking:  # transformers fills these with random values and a warning
        raise BadInputError(f"WEIGHTS: {source} lacks {len(lacking)} weights of {model.slug}, first {lacking[0]}")
    torch.nn.Module.to(net, device)  # in place; transformers' own `to` is a wrapper for quantised models
    return ready(net)


def _pretrained(source: str, revision: str | None, dtype: torch.dtype, slug: str) -> tuple[PreTrainedModel, list[str]]:
    """The model from safetensors in `source` (a folder or a hub name), and the names of weights that it lacks."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInputError(f"WEIGHTS: {slug} could not be loaded from {source}: {reason}") from None
    net, info = loaded
    return net, sorted(info["missing_keys"])


def checkpoint_config(model: Model, folder: Path) -> dict[str, Any]:
    """The `config.json` of the checkpoint in `folder`; raises `BadInputError` if it is not one of `model`."""
    where = f"WEIGHTS: {folder / 'config.json'}"
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise BadInputError(f"{where}: not a readable JSON file") from None
    if not isinstance(found, dict):
        raise BadInputError(f"{where}: not a config")
    check_config(found, where)
    for field in SAME_FIELDS:
        asked = model.config.get(field, False)
        if found.get(field, False) != asked:
            raise BadInputError(f"{where}: {field} is {found.get(field)!r}, {model.slug} has {asked!r}")
    if (dim := floor.head_dim(found)) != (asked := floor.head_dim(model.config)):
        raise BadInputError(f"{where}: heads are {dim} wide, those of {model.slug} {asked}")
    return found


def unfilled(config: PretrainedConfig, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` on `device` (or `meta`), its parameters allocated in `dtype` and holding nothing yet."""
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights(), torch.device(device):
            net: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    net.tie_weights()  # left out with the initialisation
    return net


def _synthetic(config: PretrainedConfig, device: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    net = unfilled(config, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.normal_(0.0, INIT_STD, generator=generator)
            if "norm" in name:
                parameter.add_(1.0)  # gains spread around one, so that a step that forgets them is wrong
    return ready(net)


def ready(net: PreTrainedModel) -> PreTrainedModel:
    """`net` in evaluation mode, without gradients."""
    net.eval()
    net.requires_grad_(False)
    return net


def cast_weights(net: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`net` with its weights in `dtype`, in place, and no buffer: rotary frequencies stay in fp32, as after loading.

    In bf16 a late position's angle would be off by more than a turn.
    """
    for weight in net.parameters():
        weight.data = weight.data.to(dtype)
    return net


def prompt(vocab: int, length: int, seed: int, device: str) -> torch.Tensor:
    """Random token ids, `[1, length]`, the same on every device for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (1, length), generator=generator).to(device)


def prefill(net: PreTrainedModel, tokens: torch.Tensor, chunk: int) -> tuple[DynamicCache, torch.Tensor]:
    """Fill a fresh cache with `tokens` `[1, ctx]`, `chunk` at a time; return it and the last logits `[1, vocab]`.

    Chunks and `logits_to_keep=1` keep the peak memory near weights + cache: the logits of all positions of a 16k
    prompt alone would be several GB.
    """
    cache = DynamicCache(config=net.config)
    logits = torch.empty(0)
    with backends(PREFILL_BACKENDS):
        for part in tokens.split(chunk, dim=1):
            logits = net(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return cache, logits


@contextlib.contextmanager
def backends(allowed: list[SDPBackend] | None) -> Iterator[None]:
    """Restrict scaled-dot-product attention to `allowed`; None leaves the choice to PyTorch."""
    if allowed is None:
        yield
        return
    with sdpa_kernel(allowed):
        yield


def crop(cache: DynamicCache, ctx: int) -> None:
    """Shorten `cache` to its first `ctx` tokens."""
    surplus = cache.get_seq_length() - ctx
    if surplus > 0:
        cache.crop(-surplus)


def synchronize(device: str) -> None:
    """Wait until all work queued on `device` is done (a CPU has none queued)."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def is_lost(device: str) -> bool:
    """Whether the device no longer answers, as after an illegal memory access."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False
