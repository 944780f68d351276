"""Quantised paths on a CPU: what a converted model computes and holds, and which faults are seen and named."""

import sys
from dataclasses import replace

import pytest
import torch
from stepping import LAYERS, build, prefilled, wide
from transformers import PreTrainedModel

from decodegap import arms, attest, quant_attest, quant_modules, quant_paths
from decodegap.arms import Step
from decodegap.errors import UnsupportedError
from decodegap.quant_catalogue import PATHS, on

CPU_PATHS = [path.slug for path in on("cpu") if not path.is_baseline]
SMALL = wide()


def densify(net: PreTrainedModel) -> None:
    """Put dense layers with the dequantised weights in the place of the quantised ones."""
    for _, holder, name, module in list(quant_paths.projections(net)):
        assert isinstance(module, quant_paths.QuantLinear)
        dense = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
        dense.weight = torch.nn.Parameter(module.dequantised(), requires_grad=False)
        if module.bias is not None:
            dense.bias = torch.nn.Parameter(module.bias, requires_grad=False)
        setattr(holder, name, dense)


@pytest.mark.parametrize("slug", CPU_PATHS)
def test_a_converted_model_is_the_dense_one_with_its_dequantised_weights(slug: str) -> None:
    net = build(SMALL)
    exact = {name: module.weight for name, module in net.named_modules() if isinstance(module, torch.nn.Linear)}
    setup = prefilled(net, build(SMALL))
    quant_paths.convert(net, PATHS[slug], "cpu")
    step = arms.prepare("eager", setup)
    with torch.inference_mode():
        quantised = attest.outputs(step, 7, "cpu")
        for name, module in net.named_modules():
            if isinstance(module, quant_paths.QuantLinear):
                off = quant_attest.relative_error(module.dequantised(), exact[name])
                assert 0.01 < off < 0.15  # 4 bits of a normal distribution, neither more nor less
        densify(net)
        dense = attest.outputs(step, 7, "cpu")
    assert quant_attest.relative_error(quantised, dense) < 1e-5


@pytest.mark.parametrize("slug", CPU_PATHS)
def test_each_projection_keeps_its_shape_and_its_bias(slug: str) -> None:
    net = build(SMALL)
    before = {name: module.bias for name, module in net.named_modules() if name.endswith("_proj")}
    quant_paths.convert(net, PATHS[slug], "cpu")
    assert sum(bias is not None for bias in before.values()) == 3 * LAYERS
    for name, module in net.named_modules():
        if not name.endswith("_proj"):
            continue
        assert isinstance(module, quant_paths.QuantLinear)
        bias = before[name]
        assert (module.bias is None) == (bias is None)
        assert bias is None or torch.equal(module.bias, bias)
        x = torch.randn(2, 3, module.in_features)
        assert module(x).shape == (2, 3, module.out_features)
        exact = x.double() @ module.dequantised().double().T + (0 if bias is None else bias.double())
        assert quant_attest.relative_error(module(x), exact) < 1e-5


@pytest.mark.parametrize("tied", [False, True])
def test_held_bytes_are_counted_once_each(tied: bool) -> None:
    net = build(SMALL)
    if tied:
        net.lm_head.weight = net.model.embed_tokens.weight
    dense = quant_paths.held(net)
    elements = LAYERS * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 384 * 256)
    table, small = 512 * 256 * 4, (LAYERS * (2 * 256 + 256 + 2 * 128) + 256) * 4  # norms and biases
    assert dense.packed == elements * 4
    assert dense.kept_16bit == (1 if tied else 2) * table + small
    assert dense.weights_all == sum(each.nbytes for each in net.parameters())
    assert dense.weights_streamed == dense.weights_all - (0 if tied else table)
    held = quant_paths.convert(net, PATHS["int4-tinygemm"], "cpu")
    assert held.kept_16bit == dense.kept_16bit
    assert held.packed == elements // 2 + elements // 128 * 8  # fp32 scales and zeros on a CPU
    assert held.weights_all == held.packed + held.kept_16bit


def test_nf4_holds_a_largest_value_a_block_or_an_eighth_of_it() -> None:
    linear = torch.nn.Linear(256, 512, bias=False).requires_grad_(requires_grad=False)
    blocks = 256 * 512 // 64
    assert quant_modules.Nf4Linear(linear, double=False).packed_bytes == 256 * 256 + 4 * blocks
    assert quant_modules.Nf4Linear(linear, double=True).packed_bytes == 256 * 256 + blocks + 4 * blocks // 256


def test_a_baseline_changes_nothing_and_nothing_is_quantised_twice() -> None:
    net = build(SMALL)
    before = dict(net.named_modules())
    held = quant_paths.convert(net, PATHS["fp32"], "cpu")
    assert dict(net.named_modules()) == before
    assert held == quant_paths.held(net)
    quant_paths.convert(net, PATHS["int4-tinygemm"], "cpu")
    with pytest.raises(UnsupportedError, match="quantised already"):
        quant_paths.convert(net, PATHS["bnb-nf4"], "cpu")


def test_a_shape_that_a_path_cannot_hold_is_refused_in_one_line() -> None:
    net = build(replace(SMALL, config=SMALL.config | {"intermediate_size": 200}))
    with pytest.raises(UnsupportedError, match="200 inputs are not a multiple of 128"):
        quant_paths.convert(net, PATHS["int4-tinygemm"], "cpu")


def test_layers_are_made_in_the_groups_that_are_asked_for() -> None:
    linear = torch.nn.Linear(256, 128).requires_grad_(requires_grad=False)
    for given, group in (({}, 128), ({"group": 64}, 64)):
        make = quant_paths.maker(PATHS["int4-tinygemm"], "cpu", largest=linear.weight.numel(), **given)
        assert make is not None
        assert make(linear).group == group


# --- what cannot run here --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", [slug for slug, path in PATHS.items() if not path.on_cpu])
def test_a_path_without_a_cpu_kernel_says_so(slug: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{slug} has no kernel for a CPU"):
        quant_paths.require(PATHS[slug], "cpu")


def test_a_missing_bitsandbytes_makes_its_path_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    quant_paths.require(PATHS["bnb-nf4"], "cpu")
    quant_modules.bitsandbytes.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UnsupportedError, match="bitsandbytes cannot be imported"):
        quant_paths.require(PATHS["bnb-nf4"], "cpu")
    quant_paths.require(PATHS["int4-tinygemm"], "cpu")


# --- attestation -----------------------------------------------------------------------------------------------------


def prepared(slug: str) -> tuple[PreTrainedModel, Step]:
    net = build(SMALL)
    setup = prefilled(net, build(SMALL))
    quant_paths.convert(net, PATHS[slug], "cpu")
    return net, arms.prepare("eager", setup)


def operators(step: Step) -> dict[str, int]:
    """How often each operator ran in a step, those of bitsandbytes too."""
    with torch.inference_mode():
        return dict(attest.kernels(step, "cpu"))


@pytest.mark.parametrize("slug", CPU_PATHS)
def test_the_right_operators_are_attested_and_a_planted_fallback_is_named(slug: str) -> None:
    net, step = prepared(slug)
    assert quant_paths.faults(PATHS[slug], operators(step), LAYERS) == []
    _, holder, name, module = list(quant_paths.projections(net))[9]
    assert isinstance(module, quant_paths.QuantLinear)
    dense = torch.nn.Linear(module.in_features, module.out_features, bias=False)
    dense.weight = torch.nn.Parameter(module.dequantised(), requires_grad=False)
    setattr(holder, name, dense)
    (fault,) = quant_paths.faults(PATHS[slug], operators(step), LAYERS)
    assert "13 times a step, not 14" in fault


MARLIN = (
    "void marlin::Marlin<__half, 1125899906843648l, 2814749767107624l, 256, 1, 8, 8, true, 4, 8, false>(int4 const*)"
)
EXLLAMA = "void gemm_half_q_half_gptq_kernel<true, 1>(__half const*, unsigned int const*, ...)"
OTHER = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>>(int)"


@pytest.mark.parametrize(
    ("slug", "kernels", "named"),
    [
        ("gptq-marlin", {MARLIN: 14, OTHER: 60}, []),
        ("gptq-marlin", {MARLIN: 8, MARLIN.replace("256, 1", "128, 1"): 6}, []),
        ("awq-marlin", {MARLIN: 13, OTHER: 60}, ["13 times a step, not 14"]),
        ("awq-marlin", {MARLIN: 28}, ["28 times a step, not 14"]),
        ("awq-marlin", {}, ["0 times a step, not 14"]),
        ("gptq-exllamav2", {MARLIN: 14}, ["0 times a step, not 14"]),
        (
            "gptq-exllamav2",
            {EXLLAMA: 13, "reconstruct_gptq_kernel(unsigned int const*)": 1},
            ["13 times", "fell back to"],
        ),
        ("bnb-nf4", {"void gemm_4bit_simt<__nv_bfloat16, 1>(...)": 14}, []),
        ("bnb-nf4", {"void kgemm_4bit_inference_naive<__nv_bfloat16, 128, 16>(...)": 14}, []),
        ("bnb-nf4", {"void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(...)": 14}, ["0 times", "fell back to"]),
        ("int4-tinygemm", {"void at::native::tinygemm_m16n8k16_chunk_kernel<...>(void const*)": 14}, []),
        ("bf16", {OTHER: 3}, []),
    ],
)
def test_kernels_of_a_card_are_judged_by_name_and_number(slug: str, kernels: dict[str, int], named: list[str]) -> None:
    found = quant_paths.faults(PATHS[slug], kernels, LAYERS)
    assert len(found) == len(named)
    assert all(part in fault for part, fault in zip(named, found, strict=True))


class Repeating:
    """Makes projections repeat what they first gave while a step runs, as those do whose launches a capture missed.

    The rest of the step goes on computing, so its logits still follow the token.
    """

    def __init__(self, step: Step, modules: list[torch.nn.Module]) -> None:
        self.step, self.on = step, False
        self.kept: dict[torch.nn.Module, torch.Tensor] = {}
        for module in modules:
            module.register_forward_hook(self.hook)

    def hook(self, module: torch.nn.Module, _: object, out: torch.Tensor) -> torch.Tensor:
        return self.kept.setdefault(module, out.clone()) if self.on else out

    def run(self) -> None:
        self.on = True
        self.step.run()
        self.on = False

    def captured(self) -> Step:
        """The step after its capture, on a token of its own."""
        captured = replace(self.step, run=self.run)
        attest.outputs(captured, 200, "cpu")
        return captured


@pytest.mark.parametrize("stale", [14, 1])
def test_a_stale_replay_is_caught_although_its_logits_follow_the_token(stale: int) -> None:
    net, step = prepared("int4-tinygemm")
    modules = [module for *_, module in quant_paths.projections(net)]
    path = PATHS["int4-tinygemm"]
    with torch.inference_mode():
        assert quant_attest.replay_faults(path, step, step, "cpu", LAYERS) == []
        captured = Repeating(step, modules[-stale:]).captured()
        assert attest.not_fresh("the graph", captured, "cpu") is None
        found = quant_attest.replay_faults(path, step, captured, "cpu", LAYERS)
    assert len(found) == len(attest.TOKENS)
    assert all("from the launched step on token" in fault for fault in found)


def test_where_fp16_is_added_up_by_atomics_two_runs_that_agree_prove_nothing() -> None:
    _, step = prepared("int4-tinygemm")
    exact = PATHS["int4-tinygemm"]
    near = replace(step, logits=lambda: step.logits() * 1.001)
    with torch.inference_mode():
        assert quant_attest.replay_faults(replace(exact, sums_in_fp16=True), step, near, "cpu", LAYERS) == []
        assert len(quant_attest.replay_faults(exact, step, near, "cpu", LAYERS)) == len(attest.TOKENS)


def test_an_empty_replay_and_one_without_a_projection_are_caught() -> None:
    net, step = prepared("int4-tinygemm")
    path = PATHS["int4-tinygemm"]
    with torch.inference_mode():
        attest.outputs(step, 200, "cpu")
        empty = quant_attest.replay_faults(path, step, replace(step, run=lambda: None), "cpu", LAYERS)
        *_, last = list(quant_paths.projections(net))[-1]

        def without_the_last() -> None:
            last.forward = lambda _: torch.zeros(1, 1, 256)  # type: ignore[method-assign]
            step.run()
            del last.forward

        partial = quant_attest.replay_faults(path, step, replace(step, run=without_the_last), "cpu", LAYERS)
    assert any("empty or stale" in fault for fault in empty)
    assert any("0 times a step, not 14" in fault for fault in empty)
    assert any("13 times a step, not 14" in fault for fault in partial)


def test_a_build_that_launches_on_the_default_stream_is_refused_a_graph() -> None:
    module = quant_modules.ExllamaLinear.__new__(quant_modules.ExllamaLinear)
    torch.nn.Module.__init__(module)
    module.on_current_stream = True
    quant_attest.require_capture(torch.nn.Sequential(module))
    module.on_current_stream = False
    with pytest.raises(UnsupportedError, match="launches on the default stream"):
        quant_attest.require_capture(torch.nn.Sequential(module))
