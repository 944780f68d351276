"""Whether GPTQ and AWQ checkpoints are read as their formats say and reach their kernels, and fail in one line."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factory_checkpoint
import packers
import pytest
import torch
from factory_checkpoint import FIRST, FORMATS, load, retensor
from stepping import prefilled, wide
from transformers import AutoModelForCausalLM

from decodegap import (
    arms,
    cells,
    decode,
    models,
    plan,
    quant_bench,
    quant_cells,
    quant_check,
    quant_kernels,
    quant_paths,
    quant_tiles,
    quantise,
    reference,
)
from decodegap.errors import BadInputError, UnsupportedError
from decodegap.plan import Task
from decodegap.quant_catalogue import PATHS
from decodegap.quant_paths import QuantLinear
from decodegap.session import Findings

TINY = "tiny-qwen2"  # widths of 64 and 128, in groups of 32


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", quantise.GROUPS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_weight_is_what_the_format_says(form: str, group: int, tmp_path: Path) -> None:
    expected = factory_checkpoint.write(tmp_path, wide(), group=group, **FORMATS[form])
    found = dict(load(wide(), tmp_path).named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("slug", ["tiny-qwen2", "tiny-llama", "tiny-mistral"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_computes_what_transformers_does_with_those_weights(slug: str, tied: bool, tmp_path: Path) -> None:
    model = wide(slug, tie_word_embeddings=tied)
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
    factory_checkpoint.write(tmp_path, wide("tiny-llama"), "gptq")
    retensor(tmp_path, f"{FIRST}.bias", lambda none: none)
    assert load(wide("tiny-llama"), tmp_path).get_submodule(FIRST).bias is None
    retensor(tmp_path, f"{FIRST}.bias", torch.ones_like)
    with pytest.raises(BadInputError, match=r"q_proj\.bias is not zero; this model has no such bias"):
        load(wide("tiny-llama"), tmp_path)


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
        qweight.copy_(packers.exllama_words(qweight))
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
    expected = factory_checkpoint.write(tmp_path, wide(), group=group, **FORMATS[form])
    with torch.inference_mode():
        setup = prefilled(load(wide(), tmp_path, torch.float16))
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
    factory_checkpoint.write(tmp_path, wide(), **FORMATS[form])
    with pytest.raises(UnsupportedError, match=line):
        quant_paths.convert(load(wide(), tmp_path), PATHS[slug], "cpu")


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
