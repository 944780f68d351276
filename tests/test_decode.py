"""Whether what is decoded is right: cached steps against full forwards, weights from disk, prefill in chunks."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from decodegap import arms, decode, models
from decodegap.errors import BadInputError
from decodegap.models import Model

ARCHITECTURES = ["tiny-qwen2", "tiny-llama", "tiny-mistral"]


def build(model: Model, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    return decode.build(model, weights="synthetic", weights_dir=None, device="cpu", dtype=dtype, seed=seed)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("slug", ARCHITECTURES)
@torch.inference_mode()
def test_cached_steps_equal_full_forwards(slug: str) -> None:
    model = models.lookup(slug)
    net = build(model)
    tokens = decode.prompt(model.config["vocab_size"], 37, 1, "cpu")
    cache, logits = decode.prefill(net, tokens, chunk=16)
    token = logits.argmax(dim=-1, keepdim=True)
    step = arms.prepare("eager", arms.Setup(net, cache, token, 37, "cpu"))
    history = torch.cat([tokens, token], dim=1)
    for _ in range(4):
        step.run()
        full = net(input_ids=history, use_cache=False).logits[:, -1]
        assert relative_error(step.logits(), full) < 1e-5
        history = torch.cat([history, full.argmax(dim=-1, keepdim=True)], dim=1)
    step.reset()
    assert cache.get_seq_length() == 37
    step.run()
    again = net(input_ids=history[:, :38], use_cache=False).logits[:, -1]
    assert relative_error(step.logits(), again) < 1e-5


@torch.inference_mode()
def test_the_chunk_size_does_not_change_the_prefill() -> None:
    model = models.lookup("tiny-qwen2")
    net = build(model)
    tokens = decode.prompt(model.config["vocab_size"], 50, 1, "cpu")
    whole = decode.prefill(net, tokens, chunk=50)[1]
    assert relative_error(decode.prefill(net, tokens, chunk=7)[1], whole) < 1e-5


def test_synthetic_weights_depend_on_the_seed_alone() -> None:
    model = models.lookup("tiny-llama")
    first, same, other = build(model), build(model), build(model, seed=1)
    for a, b, c in zip(first.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_rotary_frequencies_stay_fp32_in_a_bf16_model() -> None:
    model = models.lookup("tiny-llama")
    net = build(model, torch.bfloat16)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    frequencies = net.model.rotary_emb.inv_freq
    assert frequencies.dtype == torch.float32
    assert torch.equal(frequencies, build(model).model.rotary_emb.inv_freq)


@pytest.mark.parametrize("slug", ["qwen2.5-7b", "llama-3.1-8b", "mistral-7b-v0.3"])
def test_the_papers_models_have_the_bytes_that_their_config_says(slug: str) -> None:
    model = models.lookup(slug)
    with torch.device("meta"):
        net = decode.AutoModelForCausalLM.from_config(decode.transformers_config(model))
    assert sum(p.numel() for p in net.parameters()) * 2 == model.weight_bytes("bfloat16")
    assert net.config.to_dict().get("sliding_window") is None or not net.config.use_sliding_window


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A real checkpoint in safetensors, saved by transformers."""
    net = build(models.lookup("tiny-llama"), seed=5)
    net.save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


def load(folder: Path) -> torch.nn.Module:
    model = models.lookup("tiny-llama")
    return decode.build(model, weights="local", weights_dir=str(folder), device="cpu", dtype=torch.float32, seed=0)


def test_a_local_checkpoint_is_loaded_as_saved(checkpoint: Path) -> None:
    saved = build(models.lookup("tiny-llama"), seed=5).state_dict()
    for name, value in load(checkpoint).state_dict().items():
        assert torch.equal(value, saved[name])


def test_a_checkpoint_of_another_shape_is_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(BadInputError, match="num_hidden_layers is 3, tiny-llama has 2"):
        load(checkpoint)


def test_a_checkpoint_that_is_quantised_already_is_refused(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (checkpoint / "config.json").write_text(json.dumps(config | quantised))
    with pytest.raises(BadInputError, match="quantised already; give the 16-bit ones"):
        load(checkpoint)


def test_a_damaged_checkpoint_is_one_line(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(BadInputError, match="could not be loaded") as caught:
        load(checkpoint)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_never_loaded(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    torch.save({"x": torch.ones(1)}, checkpoint / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(BadInputError, match="could not be loaded"):
        load(checkpoint)


def test_a_checkpoint_that_lacks_weights_is_refused(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    kept = load_file(weights)
    del kept["model.layers.1.mlp.up_proj.weight"]
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(BadInputError, match=r"lacks 1 weights of tiny-llama, first model\.layers\.1\.mlp\.up_proj"):
        load(checkpoint)
