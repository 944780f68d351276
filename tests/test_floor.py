"""The floors against the values that the study and the models' own files give."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodegap import floor, gpus, models
from decodegap.errors import BadInputError
from decodegap.paths import DATA

PAPER = [model.slug for model in models.with_role("paper")]


@pytest.mark.parametrize("slug", PAPER)
def test_counts_equal_the_models_own_files(slug: str) -> None:
    model, facts = models.lookup(slug), json.loads((DATA / "models" / f"{slug}.json").read_text())
    assert floor.parameter_count(model.config) == facts["parameters"]
    assert model.weight_bytes("bfloat16") == facts["weight_bytes_bf16"]
    assert model.streamed_bytes("bfloat16") == facts["streamed_bytes_bf16"]
    assert model.kv_bytes(1, "bfloat16") == facts["kv_bytes_per_token_bf16"]


@pytest.mark.parametrize(("gpu", "expected_ms"), [("h100", 4.58), ("l4", 51.2), ("h200", 3.20)])
def test_published_floor_of_qwen_at_2048(gpu: str, expected_ms: float) -> None:
    qwen = models.lookup("qwen2.5-7b")
    n_bytes = qwen.weight_bytes("bfloat16") + qwen.kv_bytes(2048, "bfloat16")
    peak_gb_s = gpus.catalogue()[gpu].peak_gb_s
    assert peak_gb_s
    assert floor.floor_ms(n_bytes, peak_gb_s) == pytest.approx(expected_ms, rel=2e-3)


@given(st.integers(1, 2**17), st.integers(1, 2**17))
def test_kv_bytes_are_additive_in_context(a: int, b: int) -> None:
    llama = models.lookup("llama-3.1-8b")
    assert llama.kv_bytes(a, "float16") + llama.kv_bytes(b, "float16") == llama.kv_bytes(a + b, "float16")


@given(st.integers(1, 10**12), st.floats(1, 1e5))
def test_the_floor_falls_as_bandwidth_rises(n_bytes: int, gb_s: float) -> None:
    assert floor.floor_ms(n_bytes, gb_s) >= floor.floor_ms(n_bytes, gb_s * 2) > 0


def test_a_tied_embedding_is_streamed_and_counted_once() -> None:
    config = dict(models.lookup("tiny-llama").config)
    tied = config | {"tie_word_embeddings": True}
    table = config["vocab_size"] * config["hidden_size"]
    assert floor.parameter_count(config) - floor.parameter_count(tied) == table
    assert floor.streamed_bytes(tied, 2) == floor.weight_bytes(tied, 2)


def test_an_alias_names_its_model() -> None:
    assert models.lookup("mistral-7b") is models.lookup("mistral-7b-v0.3")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 10**9}, "hidden_size"),
        ({"hidden_size": "4096"}, None),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"model_type": "bert"}, "model_type"),
        ({"vocab_size": -1}, "vocab_size"),
    ],
)
def test_an_impossible_config_is_refused_by_field(change: dict[str, object], field: str | None) -> None:
    config = models.lookup("tiny-llama").config | change
    if field is None:
        models.check_config(config, "here")
        return
    with pytest.raises(BadInputError, match=field):
        models.check_config(config, "here")
