"""On an NVIDIA GPU: whether each path multiplies by the weights that we packed, and whether faults are caught."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import factory_checkpoint
import packers
import pytest
import torch
from transformers import PreTrainedModel

from decodegap import (
    arms,
    attest,
    decode,
    graphs,
    models,
    quant_attest,
    quant_bench,
    quant_checkpoint,
    quant_kernels,
    quant_modules,
    quant_paths,
    quant_tiles,
    quantise,
)
from decodegap.arms import Setup, Step
from decodegap.errors import UnsupportedError
from decodegap.quant_catalogue import PATHS, QuantPath, on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),  # the profiler warns of its own deprecations
]

LAYERS, CTX = 2, 96
QWEN = models.lookup("qwen2.5-7b")
SMALL = replace(QWEN, config=QWEN.config | {"num_hidden_layers": LAYERS, "vocab_size": 2048})
GPU_PATHS = [path.slug for path in on("gpu") if not path.is_baseline]
SHAPES = ((512, 3584), (3584, 18944))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        yield


def usable(slug: str) -> QuantPath:
    """The path, or a skipped test with the reason where this machine cannot run it."""
    try:
        quant_paths.require(PATHS[slug], "cuda")
    except UnsupportedError as error:
        pytest.skip(str(error))
    return PATHS[slug]


def library(name: str) -> object:
    try:
        return quant_kernels.load(name)
    except UnsupportedError as error:
        pytest.skip(str(error))


def linear(rows: int, columns: int, dtype: torch.dtype, *, bias: bool = True) -> torch.nn.Linear:
    made = torch.nn.Linear(columns, rows, bias=bias, device="cuda", dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(rows)
    made.weight.normal_(0, 0.02, generator=generator)
    return made


def prepared(path: QuantPath) -> tuple[PreTrainedModel, Setup]:
    net = quant_bench.built(SMALL, path, "cuda", None)
    cache, logits = decode.prefill(net, decode.prompt(2048, CTX, 1, "cuda"), chunk=64)
    quant_paths.convert(net, path, "cuda")
    return net, Setup(net, cache, logits.argmax(dim=-1, keepdim=True), CTX, "cuda")


def pair(setup: Setup) -> tuple[Step, Step]:
    body = graphs.pinned(setup)
    return graphs.launched(setup, body), graphs.captured(setup, body)


# --- packings, by what the packages' own kernels make of the same codes ----------------------------------------------


@pytest.mark.parametrize("inner", [2, 4, 8])
def test_torch_packs_int4_as_we_do(inner: int) -> None:
    codes = torch.randint(0, 16, (64, 512), dtype=torch.uint8, device="cuda")
    theirs = torch.ops.aten._convert_weight_to_int4pack(packers.nibble_pairs(codes), inner)
    assert torch.equal(theirs, quant_tiles.tinygemm_words(codes, inner_tiles=inner))


@pytest.mark.parametrize("shape", SHAPES)
def test_marlin_repacks_gptq_and_awq_words_as_we_do(shape: tuple[int, int]) -> None:
    ops = library("marlin")
    out, inputs = shape
    weight = linear(*shape, torch.float16).weight
    codes = quantise.round_to_nearest(weight, 128, torch.float16, symmetric=False)
    ours = quant_tiles.marlin_words(codes.codes)
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    assert torch.equal(ops.gptq_marlin_repack(quantise.gptq(codes, zeros="true").qweight, none, inputs, out, 4), ours)
    assert torch.equal(ops.awq_marlin_repack(packers.awq(codes).qweight, inputs, out, 4), ours)


# --- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("slug", GPU_PATHS)
def test_a_projection_is_the_product_with_its_dequantised_weight(slug: str, shape: tuple[int, int]) -> None:
    path = usable(slug)
    source = linear(*shape, getattr(torch, path.dtype))
    make = quant_paths.maker(path, "cuda", largest=source.weight.numel())
    assert make is not None
    made = make(source)
    assert torch.equal(made.bias, source.bias)
    assert 0.05 < quant_attest.relative_error(made.dequantised(), source.weight) < 0.15
    x = torch.randn(1, 1, shape[1], device="cuda", dtype=source.weight.dtype)
    for _ in range(3):
        error, dense_error = quant_bench.errors_of(made, x)
        assert error < max(0.01, 4 * dense_error)


@pytest.mark.parametrize("group", quantise.GROUPS)
@pytest.mark.parametrize("slug", [slug for slug in GPU_PATHS if not slug.startswith("bnb-")])
def test_codes_come_back_exactly_from_what_the_kernel_reads(slug: str, group: int) -> None:
    path = replace(usable(slug), group=group)
    source = linear(512, 3584, getattr(torch, path.dtype))
    make = quant_paths.maker(path, "cuda", largest=source.weight.numel())
    assert make is not None
    made = make(source)
    symmetric = slug in {"gptq-marlin", "gptq-exllamav2"}
    codes = quantise.round_to_nearest(source.weight, group, source.weight.dtype, symmetric=symmetric)
    expected = quant_tiles.tinygemm(codes).dequantised() if slug == "int4-tinygemm" else codes.dequantised()
    assert torch.equal(made.dequantised(), expected)
    x = torch.randn(1, 1, 3584, device="cuda", dtype=source.weight.dtype)
    assert quant_bench.errors_of(made, x)[0] < 0.01


@pytest.mark.parametrize("group", quantise.GROUPS)
@pytest.mark.parametrize(
    ("slug", "form"),
    [
        ("gptq-marlin", {"method": "gptq"}),
        ("gptq-exllamav2", {"method": "gptq", "symmetric": False}),
        ("awq-marlin", {"method": "awq"}),
    ],
)
def test_a_checkpoints_own_codes_are_what_the_kernel_multiplies_by(
    slug: str, form: dict[str, Any], group: int, tmp_path: Path
) -> None:
    path = usable(slug)
    model = replace(SMALL, config=SMALL.config | {"num_hidden_layers": 1})
    expected = factory_checkpoint.write(tmp_path, model, group=group, **form)
    net = quant_checkpoint.build(model, tmp_path, device="cuda", dtype=torch.float16)
    quant_paths.convert(net, path, "cuda")
    for name, module in net.named_modules():
        if isinstance(module, quant_paths.QuantLinear):
            assert torch.equal(module.dequantised().cpu(), expected[f"{name}.weight"]), name
            x = torch.randn(1, 1, module.in_features, device="cuda", dtype=torch.float16)
            assert quant_bench.errors_of(module, x)[0] < 0.01, name


# --- steps, launched and replayed ------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", GPU_PATHS)
def test_a_converted_step_runs_its_kernels_and_replays_itself(slug: str) -> None:
    path = usable(slug)
    net, setup = prepared(path)
    quant_attest.require_capture(net)
    launched, captured = pair(setup)
    assert quant_paths.faults(path, attest.kernels(launched, "cuda"), LAYERS) == []
    assert quant_attest.replay_faults(path, launched, captured, "cuda", LAYERS) == []
    assert attest.differences(attest.kernels(launched, "cuda"), attest.kernels(captured, "cuda")) == {}


def test_a_planted_dense_product_is_named_a_fallback() -> None:
    path = PATHS["int4-tinygemm"]
    net, setup = prepared(path)
    _, holder, name, module = list(quant_paths.projections(net))[3]
    assert isinstance(module, quant_paths.QuantLinear)
    dense = linear(module.out_features, module.in_features, net.dtype, bias=False)
    dense.weight.copy_(module.dequantised())
    setattr(holder, name, dense)
    launched, captured = pair(setup)
    (fault,) = quant_paths.faults(path, attest.kernels(launched, "cuda"), LAYERS)
    assert "13 times a step, not 14" in fault
    assert any("13 times" in found for found in quant_attest.replay_faults(path, launched, captured, "cuda", LAYERS))


def test_a_stock_build_is_refused_a_graph_and_its_stale_replay_is_caught() -> None:
    """Needs `python -m decodegap.quant_kernels exllamav2-stock`, which is only built to be refused."""
    ops = library("exllamav2-stock")
    path = PATHS["gptq-exllamav2"]
    net = quant_bench.built(SMALL, path, "cuda", None)
    cache, logits = decode.prefill(net, decode.prompt(2048, CTX, 1, "cuda"), chunk=64)
    dense = [(holder, name, module) for _, holder, name, module in quant_paths.projections(net)]
    scratch = torch.empty(3584 * 18944, dtype=torch.float16, device="cuda")
    for holder, name, module in dense:
        assert isinstance(module, torch.nn.Linear)
        setattr(holder, name, quant_modules.ExllamaLinear(module, group=128, ops=ops, scratch=scratch))
    torch.cuda.synchronize()
    with pytest.raises(UnsupportedError, match="launches on the default stream"):
        quant_attest.require_capture(net)
    launched, captured = pair(Setup(net, cache, logits.argmax(dim=-1, keepdim=True), CTX, "cuda"))
    found = quant_attest.replay_faults(path, launched, captured, "cuda", LAYERS)
    assert any("0 times a step, not 14" in fault for fault in found)
    assert any("from the launched step on token" in fault for fault in found)


@pytest.mark.parametrize("slug", ["bf16", "int4-tinygemm"])
def test_the_bench_reads_from_memory(slug: str) -> None:
    net, _ = prepared(PATHS[slug])
    for row in quant_bench.projections(net, PATHS[slug], "cuda"):
        assert row.error < 0.01
        assert row.gb_s < 1.02 * 4800 or torch.cuda.get_device_name() != "NVIDIA H200"  # no cache is that slow
