"""Whether GPTQ and AWQ checkpoints are read as their formats say and reach their kernels, and fail in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factory_checkpoint
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from decodegap import (
    arms,
    cells,
    decode,
    models,
    plan,
    quant_bench,
    quant_cells,
    quant_check,
    quant_checkpoint,
    quant_kernels,
    quant_paths,
    quant_tiles,
    quantise,
    reference,
)
from decodegap.arms import Setup
from decodegap.errors import BadInputError, UnsupportedError
from decodegap.models import Model
from decodegap.plan import Task
from decodegap.quant_catalogue import PATHS
from decodegap.quant_paths import QuantLinear
from decodegap.session import Findings

SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY = "tiny-qwen2"  # widths of 64 and 128, in groups of 32
FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq"},
    "gptq, zero points": {"method": "gptq", "symmetric": False},
    "gptq_v2": {"method": "gptq", "symmetric": False, "layout": "gptq_v2"},
    "awq": {"method": "awq"},
}
FIRST = "model.layers.0.self_attn.q_proj"


def small(slug: str = TINY, **changes: Any) -> Model:
    """A model of two layers, the projections of which every path can hold; Qwen2's has biases in three of seven."""
    model = models.lookup(slug)
    return replace(model, config=model.config | SHAPE | {"vocab_size": 512} | changes)


def load(model: Model, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
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


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", quantise.GROUPS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_weight_is_what_the_format_says(form: str, group: int, tmp_path: Path) -> None:
    expected = factory_checkpoint.write(tmp_path, small(), group=group, **FORMATS[form])
    found = dict(load(small(), tmp_path).named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("slug", ["tiny-qwen2", "tiny-llama", "tiny-mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_computes_what_transformers_does_with_those_weights(slug: str, tied: bool, tmp_path: Path) -> None:
    model = small(slug, tie_word_embeddings=tied)
    expected = factory_checkpoint.write(tmp_path, model, "awq", 64)
    dense = AutoModelForCausalLM.from_config(decode.transformers_config(model), attn_implementation="sdpa").eval()
    assert dense.load_state_dict(expected, strict=False).unexpected_keys == []
    dense.tie_weights()
    tokens = decode.prompt(512, 24, 1, "cpu")
    with torch.inference_mode():
        net = load(model, tmp_path)
        assert (net.lm_head.weight is net.model.embed_tokens.weight) == tied
        assert torch.equal(net(input_ids=tokens).logits, dense(input_ids=tokens).logits)


def test_a_bias_of_zeros_that_the_model_does_not_have_is_none(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, small("tiny-llama"), "gptq")
    retensor(tmp_path, f"{FIRST}.bias", lambda none: none)
    assert load(small("tiny-llama"), tmp_path).get_submodule(FIRST).bias is None
    retensor(tmp_path, f"{FIRST}.bias", torch.ones_like)
    with pytest.raises(BadInputError, match=r"q_proj\.bias is not zero; this model has no such bias"):
        load(small("tiny-llama"), tmp_path)


# --- what the paths make of it ---------------------------------------------------------------------------------------


class PlainKernels:
    """Marlin's and ExLlamaV2's products in plain torch, over the very tensors that the kernels are given."""

    name = "decodegap_exllamav2"

    def __init__(self) -> None:
        self.matrices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def gptq_marlin_gemm_fp16(self, x: torch.Tensor, *given: Any) -> torch.Tensor:
        words, bias, scales, zeros = given[1], given[2], given[3], given[5]
        inputs = given[-5]
        held = quant_tiles.Marlin(words, scales, zeros if zeros.numel() else None, inputs // scales.shape[0])
        weight = quant_tiles.from_marlin(held).dequantised()
        added = 0 if bias is None else quant_tiles.marlin_bias(bias).float()
        return (x.float() @ weight.T + added).half()

    def make_q_matrix(self, qweight: torch.Tensor, *given: Any) -> int:
        qweight.copy_(quantise.exllama_words(qweight))
        self.matrices.append((qweight, given[5], given[6]))
        return len(self.matrices) - 1

    def gemm_half_q_half(self, x: torch.Tensor, handle: int, out: torch.Tensor, _: bool) -> None:
        words, zeros, scales = self.matrices[handle]
        group = x.shape[1] // scales.shape[0]
        codes = quantise.from_gptq(quantise.Gptq(quantise.from_exllama_words(words), zeros, scales, group, "true"))
        out.copy_(x.float() @ codes.dequantised().T)


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the GPU's paths run here, on products in plain torch."""
    kernels = PlainKernels()
    monkeypatch.setattr(quant_paths, "require", lambda _path, _device: None)
    monkeypatch.setattr(quant_kernels, "load", lambda _name: kernels)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: card)


def prefilled(net: PreTrainedModel) -> Setup:
    cache, logits = decode.prefill(net, decode.prompt(512, 24, 1, "cpu"), chunk=16)
    return Setup(net, cache, logits.argmax(dim=-1, keepdim=True), 24, "cpu")


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(
    ("slug", "form", "group"),
    [
        ("gptq-marlin", "gptq", 128),
        ("gptq-marlin", "gptq", 32),
        ("gptq-exllamav2", "gptq", 64),
        ("gptq-exllamav2", "gptq, zero points", 128),
        ("gptq-exllamav2", "gptq_v2", 32),
        ("awq-marlin", "awq", 128),
        ("awq-marlin", "awq", 64),
    ],
)
def test_a_path_holds_the_checkpoints_own_codes_and_passes_its_check(
    slug: str, form: str, group: int, tmp_path: Path
) -> None:
    expected = factory_checkpoint.write(tmp_path, small(), group=group, **FORMATS[form])
    with torch.inference_mode():
        setup = prefilled(load(small(), tmp_path, torch.float16))
        held = quant_cells.quantised(setup, PATHS[slug])
        assert (held.group, held.packed) == (group, packed_bytes(slug, expected, group))
        converted = {name: each for name, each in setup.net.named_modules() if isinstance(each, QuantLinear)}
        assert len(converted) == 14
        for name, module in converted.items():
            assert torch.equal(module.dequantised(), expected[f"{name}.weight"]), name
            assert quantise.given(module) is None
            error, dense_error = quant_bench.errors_of(module, torch.ones(1, 1, module.in_features).half())
            assert error <= quant_check.multiple_of(PATHS[slug]) * dense_error
        truth = reference.reference_logits(setup.net, setup.cache, setup.token, setup.ctx)
        logits = cells.logits_of(arms.eager(quant_check._past(setup, setup.ctx - 1)))
        quant_check._densify(setup.net)
        dense = cells.logits_of(arms.eager(quant_check._past(setup, setup.ctx - 1)))
    result = reference.check(slug, logits, dense, truth, multiple=quant_check.multiple_of(PATHS[slug]))
    assert result.passed, reference.failure(result)


def packed_bytes(slug: str, expected: dict[str, torch.Tensor], group: int) -> int:
    """Half a byte a code, an fp16 scale a group, and half a byte of zero point but in symmetric Marlin."""
    count = sum(weight.numel() for name, weight in expected.items() if "_proj.weight" in name)
    return count // 2 + count // group * 2 + (0 if slug == "gptq-marlin" else count // group // 2)


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize(
    ("form", "slug", "line"),
    [
        ("gptq", "awq-marlin", "this checkpoint is GPTQ; awq-marlin needs an AWQ checkpoint or 16-bit weights"),
        ("awq", "gptq-exllamav2", "this checkpoint is AWQ; gptq-exllamav2 needs a GPTQ checkpoint or 16-bit weights"),
        ("awq", "bnb-nf4", "this checkpoint is AWQ; bnb-nf4 needs 16-bit weights, which it packs itself"),
        ("gptq", "int4-tinygemm", "this checkpoint is GPTQ; int4-tinygemm needs 16-bit weights"),
        ("gptq_v2", "gptq-marlin", "zero points other than 8; gptq-marlin takes symmetric codes alone"),
    ],
)
def test_every_other_path_is_unsupported_in_one_line(form: str, slug: str, line: str, tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, small(), **FORMATS[form])
    with pytest.raises(UnsupportedError, match=line):
        quant_paths.convert(load(small(), tmp_path), PATHS[slug], "cpu")


# --- sessions and plans ----------------------------------------------------------------------------------------------


def planned(folder: Path, arm: str) -> Task:
    """The session of one path, on the tiny model's checkpoint in `folder`."""
    req = plan.request(gpu="cpu", models=TINY, contexts="24", weights=f"{folder}/")
    cell = plan.cell_of("cpu", "quantised", models.lookup(TINY), 24, arm)
    return plan.tasks_of(req, [cell], 1)[0]


def measured(task: Task, store: Path) -> Findings:
    found = Findings()
    with torch.inference_mode():
        quant_cells.measure(task, arms.prefilled(arms.built(task, "cpu"), task, "cpu"), None, store, found)
    return found


def test_a_session_measures_the_baseline_and_says_why_it_measures_no_other_path(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path / "weights", models.lookup(TINY), "gptq", 32)
    check = measured(planned(tmp_path / "weights", plan.CHECK), tmp_path)
    assert [(each.arm, each.passed) for each in check.checks] == [("fp32", True)]
    reason = "this checkpoint is GPTQ; bnb-nf4 needs 16-bit weights, which it packs itself"
    assert check.refused["bnb-nf4"] == reason
    refused = measured(planned(tmp_path / "weights", "bnb-nf4"), tmp_path)
    assert (refused.outcome, refused.reasons) == ("unsupported", [reason])
    baseline = measured(planned(tmp_path / "weights", "fp32"), tmp_path)
    assert (baseline.outcome, [series.arm for series in baseline.series]) == ("ok", ["fp32"])


@pytest.mark.parametrize("experiment", ["baseline", "graphs", "ladder"])
def test_other_experiments_refuse_quantised_weights(experiment: str, tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, models.lookup(TINY), "gptq", 32)
    task = planned(tmp_path, "fp32")
    other = replace(task, cell=task.cell.model_copy(update={"experiment": experiment, "arm": "eager"}))
    with pytest.raises(BadInputError, match=r"quantised already; give the 16-bit ones, or .* EXPERIMENTS=quantised"):
        arms.built(other, "cpu")


def test_checkpoints_of_another_format_or_group_are_another_protocol(tmp_path: Path) -> None:
    digests = set()
    for number, (form, group) in enumerate((form, group) for form in FORMATS for group in (32, 64)):
        folder = tmp_path / str(number)
        factory_checkpoint.write(folder, models.lookup(TINY), group=group, **FORMATS[form])
        digests.add(planned(folder, "fp32").protocol.digest())
    assert len(digests) == 8


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "changes", "line"),
    [
        ("gptq", {"bits": 8}, "bits is '8'; read here is 4"),
        ("gptq", {"bits": "4"}, "bits is '4'"),
        ("gptq", {"bits": 4.0}, r"bits is '4\.0'"),
        ("gptq", {"group_size": -1}, "group_size is '-1'; read here is 32 or 64 or 128"),
        ("gptq", {"group_size": 10**30}, "group_size is"),
        ("gptq", {"group_size": None}, "group_size is 'None'"),
        ("gptq", {"group_size": 64}, r"q_proj\.qzeros has shape \[2, 32\], not \[4, 32\]: .* in groups of 64"),
        ("gptq", {"desc_act": True}, "desc_act is 'True'; read here is false"),
        ("gptq", {"sym": None}, "sym is 'None'"),
        ("gptq", {"sym": 1}, "sym is '1'; read here is true or false"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; read here is gptq or gptq_v2"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "qzeros are not all 8, although the config says sym: true"),
        ("gptq", {"dynamic": {"-:q_proj": {}}}, "dynamic gives layers formats of their own"),
        ("gptq", {"quant_method": "awq", "version": "gemm", "zero_point": True}, r"qweight has shape \[32, 256\]"),
        ("gptq", {"quant_method": "fp8"}, "quant_method is 'fp8'; read here is gptq or awq"),
        ("gptq", {"quant_method": ["gptq"]}, "quant_method is"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; read here is gemm"),
        ("awq", {"zero_point": False}, "zero_point is 'False'; read here is true"),
    ],
)
def test_a_config_that_no_path_takes_is_one_line(
    method: str, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    factory_checkpoint.write(tmp_path, small(), method)
    reconfigure(tmp_path, **changes)
    with pytest.raises(BadInputError, match=line) as caught:
        load(small(), tmp_path)
    assert str(caught.value).startswith("WEIGHTS: ")


def test_older_configs_that_leave_fields_out_are_read(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, small(), "gptq")
    reconfigure(tmp_path, checkpoint_format=None, desc_act=None)
    load(small(), tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (f"{FIRST}.qweight", None, r"lacks the tensor .*q_proj\.qweight"),
        (f"{FIRST}.g_idx", None, r"lacks the tensor .*g_idx"),
        ("lm_head.weight", None, r"lacks the tensor lm_head\.weight"),
        (f"{FIRST}.bias", None, r"lacks the tensor .*bias"),
        ("model.norm.weight", lambda _: torch.ones(8), r"norm\.weight has shape \[8\], not \[256\]"),
        ("model.norm.weight", lambda norm: norm.int(), "is I32, not F16"),
        (f"{FIRST}.qweight", lambda words: words[:-1], r"q_proj\.qweight has shape \[31, 256\], not \[32, 256\]"),
        (f"{FIRST}.qweight", lambda words: words.long(), "is I64, not I32"),
        (f"{FIRST}.scales", lambda scales: scales.bfloat16(), "scales is BF16, not F16"),
        (f"{FIRST}.scales", lambda scales: scales * float("inf"), "scales are not all finite"),
        (f"{FIRST}.g_idx", lambda order: order.flip(0), "g_idx is not in order; checkpoints with act-order"),
        (f"{FIRST}.g_idx", torch.zeros_like, "g_idx is not in order"),
        (f"{FIRST}.qzeros", lambda words: words + 1, "qzeros are not all 8"),
    ],
)
def test_a_tensor_that_is_missing_or_wrong_is_one_line(name: str, change: Any, line: str, tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, small(), "gptq")
    retensor(tmp_path, name, change)
    with pytest.raises(BadInputError, match=line):
        load(small(), tmp_path)


def test_a_zero_point_of_zero_is_ambiguous_in_the_first_format_alone(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path / "one", small(), symmetric=False, method="gptq")
    retensor(tmp_path / "one", f"{FIRST}.qzeros", lambda words: words | 15)
    with pytest.raises(BadInputError, match="a zero point of 0 is ambiguous in checkpoint_format gptq"):
        load(small(), tmp_path / "one")
    factory_checkpoint.write(tmp_path / "two", small(), symmetric=False, method="gptq", layout="gptq_v2")
    retensor(tmp_path / "two", f"{FIRST}.qzeros", lambda words: words & ~15)
    load(small(), tmp_path / "two")


def test_nothing_is_allocated_for_a_checkpoint_that_does_not_fit_its_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    factory_checkpoint.write(tmp_path, small(), "gptq")
    retensor(tmp_path, "model.layers.1.mlp.down_proj.qweight", lambda words: words[:8])
    monkeypatch.setattr(quant_checkpoint, "_filled", lambda *_: pytest.fail("it was filled"))
    with pytest.raises(BadInputError, match=r"down_proj\.qweight has shape"):
        load(small(), tmp_path)
    factory_checkpoint.write(tmp_path, small(), "gptq")
    with pytest.raises(BadInputError, match="hidden_size is 256, tiny-qwen2 has 64"):
        load(models.lookup(TINY), tmp_path)


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, models.lookup(TINY), "gptq", 32)
    reconfigure(tmp_path, group_size=128)
    with pytest.raises(BadInputError, match="is 64 x 64: groups of 128 inputs and words of 8 outputs do not divide it"):
        load(models.lookup(TINY), tmp_path)


def test_damaged_doubled_and_pickled_files_are_one_line(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, small(), "gptq")
    file = tmp_path / "model.safetensors"
    save_file({f"{FIRST}.scales": torch.ones(1)}, tmp_path / "second.safetensors")
    with pytest.raises(BadInputError, match=r"holds the tensor .*scales twice, the second time in second"):
        load(small(), tmp_path)
    (tmp_path / "second.safetensors").unlink()
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(BadInputError, match=r"model\.safetensors cannot be read"):
        load(small(), tmp_path)
    file.unlink()
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInputError, match=r"no \.safetensors file; pickled weights are not loaded"):
        load(small(), tmp_path)


@pytest.mark.parametrize("changes", [{"rms_norm_eps": "x"}, {"rope_scaling": {"rope_type": "no"}}, {"head_dim": 32}])
def test_a_bad_value_elsewhere_in_the_config_is_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, small("tiny-llama"), "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInputError, match=r"^WEIGHTS: .*config\.json"):
        load(small("tiny-llama"), tmp_path)
