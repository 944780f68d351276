"""On an NVIDIA GPU: whether captured steps do the launched ones' work, and whether real faulty graphs are caught."""

import gc
from dataclasses import replace

import pytest
import stepping
import torch

from decodegap import arms, attest, decode, graphs, pairing, plan, reference
from decodegap.arms import Setup, Step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler and profiler warn of their own deprecations
]

CTX = 96


@pytest.fixture
def setup() -> Setup:
    """A stand-in with a real head size, so that flash attention takes it, in bf16."""
    gc.collect()
    with torch.inference_mode():
        return stepping.setup("qwen2-standin", ctx=CTX, dtype=torch.bfloat16, device="cuda")


def judged(reference_step: Step, arm: Step) -> list[str]:
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        return attest.faults(attest.attest(reference_step, arm, "cuda", names=("eager-pinned", "graph")))


def flash_pair(setup: Setup) -> tuple[Step, Step]:
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        return arms.prepare("eager-pinned", setup), arms.prepare("graph", setup)


def test_the_captured_step_is_the_launched_one_bit_for_bit_and_kernel_for_kernel(setup: Setup) -> None:
    eager, graph = flash_pair(setup)
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        seen = attest.attest(eager, graph, "cuda", names=("eager-pinned", "graph"))
    assert attest.faults(seen) == []
    assert seen.outputs_equal
    assert seen.kernels_differing == {}
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        assert attest.ran(graph, "cuda").sdpa == attest.ran(eager, "cuda").sdpa == "flash"


@pytest.mark.parametrize(
    "arm", ["eager", "eager-auto", "eager-pinned", "graph", "graph-static", "graph-stock", "compiled"]
)
def test_every_arm_passes_its_check_and_follows_its_token(setup: Setup, arm: str) -> None:
    with torch.inference_mode():
        past = replace(setup, ctx=CTX - 1)
        decode.crop(setup.cache, CTX - 1)
        truth = reference.reference_logits(setup.net, setup.cache, setup.token, CTX)
        with decode.backends(arms.SDPA_BACKENDS["flash"]):
            stock = arms.prepare("eager", past)
            stock.run()
            eager_logits = stock.logits().clone()
            stock.reset()
        with decode.backends(arms.SDPA_BACKENDS[plan.sdpa_on("h200", arm)]):
            step = arms.prepare(arm, past if arm in ("eager", "eager-auto") else setup)
            step.poison()
            step.run()
            result = reference.check(arm, step.logits(), eager_logits, truth)
            step.reset()
            stale = attest.not_fresh(arm, step, "cuda")
    assert result.passed, result
    assert stale is None


def test_an_empty_graph_is_caught(setup: Setup) -> None:
    eager, graph = flash_pair(setup)
    empty = torch.cuda.CUDAGraph()
    with torch.cuda.graph(empty):
        pass  # as a library does whose kernels go to another stream than the one captured
    reasons = judged(eager, replace(graph, run=empty.replay))
    assert any("empty or stale" in reason for reason in reasons)
    assert any("other kernels" in reason for reason in reasons)


def test_a_stale_graph_is_caught(setup: Setup) -> None:
    eager, _ = flash_pair(setup)
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        body = graphs.pinned(setup)
        frozen = graphs.captured(setup, body)
        # The graph goes on reading the token buffer it was captured with; the new token is written to another.
        elsewhere = body.token.clone()
        stale = replace(frozen, set_token=lambda value: elsewhere.fill_(value) and None)
    assert any("empty or stale" in reason for reason in judged(eager, stale))


def test_another_kernel_in_the_graph_is_caught_and_named(setup: Setup) -> None:
    eager, _ = flash_pair(setup)
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        body = graphs.pinned(setup)
        extra = torch.ones(64, device="cuda")

        def forward() -> None:
            body.forward()
            extra.erfinv_()

        graph = graphs.captured(setup, body, forward)
    reasons = judged(eager, graph)
    assert len(reasons) == 1
    assert "other kernels" in reasons[0]
    assert "erfinv" in reasons[0]


def test_the_stock_step_under_capture_runs_other_kernels(setup: Setup) -> None:
    eager, _ = flash_pair(setup)
    with torch.inference_mode():
        stock = arms.prepare("graph-stock", setup)
    assert any("other kernels" in reason for reason in judged(eager, stock))


def test_a_pair_is_timed_with_device_events(setup: Setup) -> None:
    eager, graph = flash_pair(setup)
    protocol = plan.protocol("h200", "synthetic", "test").model_copy(update={"energy_seconds": 0.0})
    with torch.inference_mode(), decode.backends(arms.SDPA_BACKENDS["flash"]):
        a, b, pair = pairing.measure_pair(("eager-pinned", eager), ("graph", graph), "cuda", protocol, lambda: None)
    assert len(a.wall_ms) == len(b.wall_ms) == 30
    assert a.event_ms is not None
    assert b.event_ms is not None
    assert pair.ratio > 1
