"""The anatomy on a real card: graphs add up, operators are found through the twin, the empty kernels' gap is sane."""

from typing import Any

import pytest
import torch

from decodegap import anatomy, arms, decode, ledger, models, plan, probes, profiling, timing
from decodegap.schema import Anatomy, Cell

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
MODEL, CTX = models.lookup("qwen2.5-7b"), 2048


def setup(net: Any) -> arms.Setup:
    tokens = decode.prompt(MODEL.config["vocab_size"], CTX, 0, "cuda")
    cache, logits = decode.prefill(net, tokens, 512)
    return arms.Setup(net, cache, logits.argmax(-1, keepdim=True), CTX, "cuda")


@pytest.fixture(scope="module")
def found() -> dict[str, Anatomy]:
    """The anatomies of the pair, measured together, and of one graph that has no twin."""
    protocol = plan.protocol("h200", "synthetic", "x").model_copy(update={"energy_seconds": 0.0})
    read_gb_s = probes.read_bandwidth("cuda", 0).gb_s
    cell = Cell(gpu="h200", experiment="graphs", model=MODEL.slug, ctx=CTX, arm="graph", dtype="bfloat16", sdpa="flash")
    seen = {}
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        net = decode.build(MODEL, weights="synthetic", weights_dir=None, device="cuda", dtype=torch.bfloat16, seed=0)
        for together in (("eager-pinned", "graph"), ("graph-static",)):
            shared = setup(net)
            timed = []
            for arm in together:
                step = arms.prepare(arm, shared)
                timed.append((timing.measure(arm, step, "cuda", protocol, lambda: None), step))
            for each in anatomy.measure(timed, cell, MODEL, "cuda", read_gb_s):
                seen[each.arm] = each
    return seen


def test_the_gap_of_empty_kernels_is_about_a_microsecond() -> None:
    empty = profiling.empty_kernels("cuda")
    assert 0.2 < empty.period_us < 5
    assert 0.2 < empty.kernel_us < 5
    assert 0 <= anatomy.gap_us(empty) <= empty.period_us


@pytest.mark.parametrize("arm", ["graph", "graph-static"])
def test_a_graphs_parts_add_up_within_five_percent(found: dict[str, Anatomy], arm: str) -> None:
    here = found[arm]
    assert abs(here.residual_ms) <= 0.05 * here.step_ms, here.model_dump_json(indent=1)
    assert here.exposed_host_ms == here.enqueue_ms
    assert here.flags == []


def test_the_pair_has_the_same_kernels_and_operators(found: dict[str, Anatomy]) -> None:
    eager, graph = found["eager-pinned"], found["graph"]
    assert eager.launches == graph.launches
    assert graph.attributed == "twin"
    assert eager.operators[ledger.CAT_KV_OPERATOR].launches == 56
    assert {name: each.launches for name, each in eager.operators.items()} == {
        name: each.launches for name, each in graph.operators.items()
    }
    assert graph.busy_ms == pytest.approx(eager.busy_ms, rel=0.2)


def test_an_eager_step_exposes_its_host(found: dict[str, Anatomy]) -> None:
    eager = found["eager-pinned"]
    assert eager.attributed == "operator"
    assert eager.exposed_host_ms > 0
    assert abs(eager.residual_ms) <= 0.1 * eager.step_ms, eager.model_dump_json(indent=1)


def test_nothing_beats_the_read_bandwidth(found: dict[str, Anatomy]) -> None:
    for here in found.values():
        weights = [each for name, each in here.operators.items() if ledger.item_of(name) == ledger.WEIGHTS]
        assert sum(each.ms for each in weights) >= 0.99 * here.ledger_ms[ledger.WEIGHTS]
