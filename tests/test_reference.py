"""Whether the reference is the truth, and whether a check catches the faults that arms really have."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import stepping
import torch

from decodegap import arms, decode, graphs, models, reference
from decodegap.arms import Setup
from decodegap.schema import MOST_EAGER_ERROR, Check

ARCHITECTURES = ["tiny-qwen2", "tiny-llama", "tiny-mistral"]
# Random weights of the tiny models attend almost evenly, which hides a wrong position from bf16's errors; from fp32's,
# nothing is hidden.
DTYPES = [torch.float32, torch.bfloat16]


def checked(setup: Setup, run: Callable[[Setup], torch.Tensor] | None = None) -> Check:
    """The check of `run`'s logits (of the pinned step's by default) on the setup's own token."""
    past = replace(setup, ctx=setup.ctx - 1)
    decode.crop(setup.cache, past.ctx)
    truth = reference.reference_logits(setup.net, setup.cache, setup.token, setup.ctx)
    eager = logits(arms.eager(past))
    return reference.check("graph", (run or pinned)(setup), eager, truth)


def pinned(setup: Setup) -> torch.Tensor:
    return logits(graphs.launched(setup, graphs.pinned(setup)))


def logits(step: arms.Step) -> torch.Tensor:
    step.run()
    out = step.logits().clone()
    step.reset()
    return out


@pytest.mark.parametrize("slug", ARCHITECTURES)
@torch.inference_mode()
def test_the_reference_is_the_full_forward(slug: str) -> None:
    setup = stepping.setup(slug)
    tokens = torch.cat([stepping.prompt(slug)[:, :-1], setup.token], dim=1)
    full = setup.net(input_ids=tokens, use_cache=False).logits[:, -1]
    truth = reference.reference_logits(setup.net, setup.cache, setup.token, setup.ctx)
    assert truth.shape == full.shape
    assert stepping.relative_error(truth, full) < 1e-5


@torch.inference_mode()
def test_scaled_frequencies_are_the_nets_own() -> None:
    llama = models.lookup("tiny-llama")
    rope = models.lookup("llama-3.1-8b").config["rope_scaling"]
    scaled = replace(llama, config=llama.config | {"rope_scaling": rope})
    net = decode.build(scaled, weights="synthetic", weights_dir=None, device="cpu", dtype=torch.float32, seed=0)
    cache, last = decode.prefill(net, stepping.prompt("tiny-llama"), chunk=16)
    setup = Setup(net, cache, last.argmax(dim=-1, keepdim=True), stepping.CTX, "cpu")
    tokens = torch.cat([stepping.prompt("tiny-llama")[:, :-1], setup.token], dim=1)
    full = net(input_ids=tokens, use_cache=False).logits[:, -1]
    truth = reference.reference_logits(net, cache, setup.token, setup.ctx)
    assert net.config.rope_parameters["rope_type"] == "llama3"
    assert stepping.relative_error(truth, full) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("slug", ARCHITECTURES)
@pytest.mark.parametrize("attention", ["pinned", "static", "stock"])
@torch.inference_mode()
def test_every_right_arm_passes(attention: str, slug: str, dtype: torch.dtype) -> None:
    bodies: dict[str, Callable[[Setup], graphs.Body]] = {
        "pinned": graphs.pinned,
        "static": graphs.static,
        "stock": lambda setup: graphs.static(setup, attention="sdpa"),
    }
    setup = stepping.setup(slug, dtype=dtype)
    result = checked(setup, lambda setup: logits(graphs.launched(setup, bodies[attention](setup))))
    assert result.passed
    assert 0 < result.error <= 1.5 * result.eager_error
    assert result.eager_error < (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(("dtype", "layers"), [(torch.float32, [1]), (torch.bfloat16, [0, 1])], ids=str)
@torch.inference_mode()
def test_a_dropped_bias_is_caught(dtype: torch.dtype, layers: list[int]) -> None:
    def without_bias(setup: Setup) -> torch.Tensor:
        for index in layers:
            setup.net.model.layers[index].self_attn.v_proj.bias.zero_()
        return pinned(setup)

    assert not checked(stepping.setup("tiny-qwen2", dtype=dtype), without_bias).passed


@torch.inference_mode()
def test_wrong_frequencies_are_caught() -> None:
    def other_base(setup: Setup) -> torch.Tensor:
        setup.net.model.rotary_emb.inv_freq.mul_(0.5)
        return pinned(setup)

    assert not checked(stepping.setup(), other_base).passed


@torch.inference_mode()
def test_a_shifted_position_is_caught() -> None:
    def shifted(setup: Setup) -> torch.Tensor:
        arms.attend(setup.net, graphs.MASKLESS)
        position = torch.full_like(setup.token, setup.ctx)
        out = setup.net(input_ids=setup.token, position_ids=position, past_key_values=setup.cache, use_cache=True)
        return out.logits[:, -1]

    assert not checked(stepping.setup(), shifted).passed


@torch.inference_mode()
def test_a_missing_token_of_context_is_caught() -> None:
    for dtype in DTYPES:

        def shorter(setup: Setup) -> torch.Tensor:
            decode.crop(setup.cache, setup.ctx - 5)
            return pinned(replace(setup, ctx=setup.ctx - 4))

        result = checked(stepping.setup(dtype=dtype), shorter)
        assert result.error > 1.5 * result.eager_error
        assert not result.passed


@torch.inference_mode()
def test_unwritten_logits_are_caught_and_recordable() -> None:
    result = checked(stepping.setup(), lambda setup: torch.full_like(pinned(setup), float("nan")))
    assert not result.passed
    assert result.error == reference.NOT_FINITE > 1


def test_another_token_fails_only_where_the_reference_is_decided() -> None:
    truth = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    first, second = truth.topk(2).indices[0].tolist()

    def swapped(gap: float) -> Check:
        """The reference leads by `gap`; the arm, no less exact than eager, has its two best tokens swapped."""
        exact = truth.clone()
        exact[0, first] = exact[0, second] + gap
        arm = exact + 1e-3 * noise
        arm[0, first], arm[0, second] = exact[0, second] - 1e-4, exact[0, second] + 1e-4
        return reference.check("graph", arm, exact + 1e-3 * noise, exact)

    near, far = swapped(1e-3), swapped(2e-2)
    assert not near.argmax_equal
    assert near.passed
    assert not far.argmax_equal
    assert far.error <= 1.5 * far.eager_error
    assert not far.passed


@torch.inference_mode()
def test_a_reference_that_stock_eager_is_far_from_passes_nothing() -> None:
    setup = stepping.setup()
    found = pinned(setup)
    result = reference.check("graph", found, found, torch.roll(found, 1, dims=-1))
    assert result.error == result.eager_error > MOST_EAGER_ERROR
    assert not result.passed
    assert "stock eager itself is" in reference.failure(result)
    assert not reference.check("graph", found * torch.nan, found * torch.nan, found).passed
