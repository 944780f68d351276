"""Whether the arms that differ in their launches do the stock step's work, and say where they cannot run."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import stepping
import torch

from decodegap import arms, attest, graphs, models
from decodegap.arms import Setup, Step
from decodegap.errors import BadInputError, UnsupportedError

ARCHITECTURES = ["tiny-qwen2", "tiny-llama", "tiny-mistral"]
CTX = stepping.CTX
# Enqueued by the host, these bodies run anywhere; their captured arms need CUDA.
BODIES: dict[str, Callable[[Setup], graphs.Body]] = {
    "pinned": graphs.pinned,
    "static": graphs.static,
    "static, own lengths": lambda setup: graphs.static(setup, shared_lengths=False),
    "stock": lambda setup: graphs.static(setup, attention="sdpa"),
}


def full_forward(slug: str, setup: Setup, token: int) -> torch.Tensor:
    """Logits `[1, vocab]` after the first `ctx - 1` tokens and `token`, without any cache."""
    history = stepping.prompt(slug, setup.ctx)[:, :-1]
    arms.attend(setup.net, "sdpa")
    return setup.net(input_ids=torch.cat([history, torch.tensor([[token]])], dim=1), use_cache=False).logits[:, -1]


def ready(body: str, setup: Setup) -> Step:
    return graphs.launched(setup, BODIES[body](setup))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("slug", ARCHITECTURES)
@torch.inference_mode()
def test_a_step_attends_to_exactly_the_context(slug: str, body: str) -> None:
    setup = stepping.setup(slug)
    step = ready(body, setup)
    for token in (7, 8, 7):
        step.set_token(token)
        step.run()
        assert stepping.relative_error(step.logits(), full_forward(slug, setup, token)) < 1e-5


@pytest.mark.parametrize("body", BODIES)
@torch.inference_mode()
def test_every_step_starts_from_the_same_cache(body: str) -> None:
    step = ready(body, stepping.setup())
    step.run()
    first = step.logits().clone()
    for _ in range(3):
        step.poison()
        assert bool(step.logits().isnan().all())
        step.run()
        assert torch.equal(step.logits(), first)
    step.set_token(3)
    step.run()
    assert not torch.equal(step.logits(), first)
    step.reset()
    step.run()
    assert torch.equal(step.logits(), first)


@torch.inference_mode()
def test_stock_eager_and_the_pinned_step_agree_bit_for_bit() -> None:
    setup = stepping.setup()
    pinned = ready("pinned", setup)
    stock = arms.prepare("eager", replace(setup, ctx=CTX - 1))
    pinned.run()
    expected = pinned.logits().clone()
    pinned.reset()
    stock.run()
    assert torch.equal(stock.logits(), expected)


@torch.inference_mode()
def test_the_greedy_token_is_written_too() -> None:
    setup = stepping.setup()
    body = graphs.pinned(setup)
    step = graphs.launched(setup, body)
    step.poison()
    step.run()
    assert body.choice.tolist() == [[int(step.logits().argmax())]]


@torch.inference_mode()
def test_only_the_stock_step_builds_a_mask() -> None:
    operators = {body: attest.kernels(ready(body, stepping.setup()), "cpu") for body in ("pinned", "static", "stock")}
    for body in ("pinned", "static"):
        assert not mask_operators(operators[body])
    assert mask_operators(operators["stock"])


def mask_operators(operators: Counter[str]) -> list[str]:
    return sorted(name for name in operators if name in ("aten::le", "aten::lt", "aten::__and__", "aten::bitwise_and"))


@torch.inference_mode()
def test_arms_on_one_net_do_not_change_each_others_attention() -> None:
    setup = stepping.setup()
    maskless, stock = ready("static", setup), ready("stock", setup)
    for _ in range(2):
        assert not mask_operators(attest.kernels(maskless, "cpu"))
        assert mask_operators(attest.kernels(stock, "cpu"))


@torch.inference_mode()
def test_a_static_cache_of_another_length_is_refused() -> None:
    setup = stepping.setup("tiny-mistral")
    setup.net.config.sliding_window = CTX // 2  # makes transformers cap every layer at the window
    with pytest.raises(ValueError, match=f"{CTX // 2} slots"):
        graphs.static(setup)


@torch.inference_mode()
def test_a_cache_that_is_too_short_is_refused() -> None:
    setup = stepping.setup()
    longer = replace(setup, ctx=CTX + 2)
    for prepare in (arms.eager, graphs.pinned, graphs.static):
        with pytest.raises(ValueError, match=f"holds {CTX} tokens"):
            prepare(longer)


@pytest.mark.parametrize("arm", ["graph", "graph-static", "graph-stock"])
@torch.inference_mode()
def test_without_cuda_a_graph_is_unsupported_in_one_line(arm: str) -> None:
    with pytest.raises(UnsupportedError, match="need an NVIDIA GPU") as caught:
        arms.prepare(arm, stepping.setup())
    assert "\n" not in str(caught.value)


@torch.inference_mode()
def test_an_unknown_arm_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInputError, match=r"'grapf'.*eager-auto.*graph-static.*compiled"):
        arms.prepare("grapf", stepping.setup())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of its own deprecations
@torch.inference_mode()
def test_the_compiled_step_gives_the_same_numbers() -> None:
    setup = stepping.setup("tiny-llama")
    step = arms.prepare("compiled", setup)
    assert attest.not_fresh("compiled", step, "cpu") is None
    for token in (7, 8):
        logits = attest.outputs(step, token, "cpu")
        assert stepping.relative_error(logits, full_forward("tiny-llama", setup, token)) < 1e-5


NO_COMPILER = """
import torch, stepping
from decodegap import arms
from decodegap.errors import UnsupportedError
with torch.inference_mode():
    try:
        arms.prepare("compiled", stepping.setup())
    except UnsupportedError as error:
        print(f"unsupported: {error}")
"""


@pytest.mark.slow
def test_without_a_compiler_the_compiled_arm_is_unsupported_in_one_line(tmp_path: object) -> None:
    env = os.environ | {
        "CXX": "/nonexistent",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(["artifact", "tests"]),
    }
    done = subprocess.run(
        [sys.executable, "-c", NO_COMPILER], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("unsupported: ")]
    assert len(lines) == 1
    assert "compiler" in lines[0]
    assert "/nonexistent" in lines[0]


def test_the_paper_models_have_no_sliding_window() -> None:
    for model in models.with_role("paper"):
        assert model.config.get("sliding_window") is None
        assert not model.config.get("use_sliding_window", False)
