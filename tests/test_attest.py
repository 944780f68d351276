"""Whether an attestation fails for every fault it is there for, and for nothing else."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import stepping
import torch

from decodegap import arms, attest, graphs
from decodegap.arms import Step


@pytest.fixture
def pair() -> tuple[Step, Step]:
    """The same pinned step twice, over the same K and V."""
    with torch.inference_mode():
        setup = stepping.setup()
        return tuple(graphs.launched(setup, graphs.pinned(setup)) for _ in range(2))


def judged(reference: Step, arm: Step, *, same_work: bool = True) -> list[str]:
    with torch.inference_mode():
        seen = attest.attest(reference, arm, "cpu", names=("eager-pinned", "graph"))
    return attest.faults(seen, same_work=same_work)


def test_the_same_work_passes(pair: tuple[Step, Step]) -> None:
    with torch.inference_mode():
        seen = attest.attest(*pair, "cpu", names=("eager-pinned", "graph"))
    assert attest.faults(seen) == []
    assert seen.outputs_equal
    assert seen.outputs_changed
    assert seen.kernels_equal
    assert (seen.max_abs_difference, seen.reference_spread, seen.kernels_differing) == (0.0, 0.0, {})


def test_an_empty_step_fails(pair: tuple[Step, Step]) -> None:
    reasons = judged(pair[0], replace(pair[1], run=lambda: None))
    assert any("empty or stale" in reason for reason in reasons)
    assert any("other kernels" in reason for reason in reasons)


def test_a_stale_step_fails(pair: tuple[Step, Step]) -> None:
    reference, arm = pair
    with torch.inference_mode():
        arm.run()
        old = arm.logits().clone()

    def replay() -> None:
        arm.run()  # all the kernels run, but what they computed for the new token is lost
        arm.logits().copy_(old)

    assert any("empty or stale" in reason for reason in judged(reference, replace(arm, run=replay)))


def test_a_step_that_reads_a_frozen_token_fails(pair: tuple[Step, Step]) -> None:
    reasons = judged(pair[0], replace(pair[1], set_token=lambda _value: None))
    assert any("empty or stale" in reason for reason in reasons)


def test_an_extra_operator_fails_and_is_named(pair: tuple[Step, Step]) -> None:
    def run() -> None:
        pair[1].run()
        torch.erf(torch.ones(2))

    reasons = judged(pair[0], replace(pair[1], run=run))
    assert len(reasons) == 1
    assert "aten::erf 0 against 1" in reasons[0]


def test_another_kernel_in_the_place_of_one_fails(pair: tuple[Step, Step]) -> None:
    setup = stepping.setup()
    with torch.inference_mode():
        stock = graphs.launched(setup, graphs.static(setup, attention="sdpa"))
    assert any("other kernels" in reason for reason in judged(pair[0], stock))


def test_one_flipped_logit_fails(pair: tuple[Step, Step]) -> None:
    def run() -> None:
        pair[1].run()
        value = pair[1].logits()[0, 5].item()
        pair[1].logits().view(torch.int32)[0, 5] ^= 1  # the last bit of one of 256
        assert pair[1].logits()[0, 5].item() != value

    with torch.inference_mode():
        seen = attest.attest(pair[0], replace(pair[1], run=run), "cpu", names=("eager-pinned", "graph"))
    assert not seen.outputs_equal
    assert 0 < seen.max_abs_difference < 1e-6
    assert any("differ from those of eager-pinned" in reason for reason in attest.faults(seen))


def test_an_output_that_is_not_written_fails(pair: tuple[Step, Step]) -> None:
    with torch.inference_mode():
        pair[1].run()  # as a warm-up does, which leaves right-looking numbers behind

    def run() -> None:
        held = pair[1].logits()[0, 5].clone()
        pair[1].run()
        pair[1].logits()[0, 5] = held  # whatever was there before the step

    assert any("finite" in reason for reason in judged(pair[0], replace(pair[1], run=run)))


def test_a_reference_that_does_not_repeat_itself_is_the_yardstick(pair: tuple[Step, Step]) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(step: Step, size: float) -> Step:
        def run() -> None:
            step.run()
            logits = step.logits()
            logits[0, 0] += size * (1 + torch.rand(1, generator=generator).item())

        return replace(step, run=run)

    with torch.inference_mode():
        seen = attest.attest(noisy(pair[0], 1e-3), pair[0], "cpu", names=("eager-pinned", "graph"))
    assert seen.reference_spread > 0
    within = seen.model_copy(update={"max_abs_difference": seen.reference_spread, "kernels_equal": True})
    assert attest.faults(within) == []
    assert attest.faults(within.model_copy(update={"max_abs_difference": 2 * seen.reference_spread}))


def test_arms_that_change_kernels_on_purpose_must_still_be_fresh(pair: tuple[Step, Step]) -> None:
    def run() -> None:
        pair[1].run()
        pair[1].logits().mul_(1.0001)

    assert judged(pair[0], replace(pair[1], run=run), same_work=False) == []
    assert judged(pair[0], replace(pair[1], run=lambda: None), same_work=False)


def named(a: Counter[str], b: Counter[str]) -> str:
    return attest.describe({name: list(counts) for name, counts in attest.differences(a, b).items()})


def test_differences_are_named_with_both_counts() -> None:
    a, b = Counter({"gemm": 4, "copy": 2, "norm": 1}), Counter({"gemm": 4, "copy": 5, "cast": 1})
    assert named(a, b) == "copy 2 against 5; cast 0 against 1; norm 1 against 0"
    assert named(a, a) == ""
    many = Counter({f"k{i}": 1 for i in range(9)})
    assert named(many, Counter()).endswith("; and 6 more")


@torch.inference_mode()
def test_what_ran_is_named_with_its_proof() -> None:
    setup = stepping.setup()
    seen = attest.ran(arms.prepare("eager", setup), "cpu")
    assert seen.sdpa == "flash"
    assert "flash_attention" in seen.evidence
    assert seen.kernels["aten::cat"] > 0
    assert setup.cache.get_seq_length() == setup.ctx


@pytest.mark.parametrize(
    ("name", "counted"),
    [
        ("Memset (Device)", "Memset"),
        ("Memset (Unknown)", "Memset"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("void gemm<int>(int*)", "void gemm<int>(int*)"),
    ],
)
def test_what_a_graph_calls_otherwise_is_counted_as_the_same(name: str, counted: str) -> None:
    event = SimpleNamespace(name=name, device_type=SimpleNamespace(name="CUDA"))
    assert attest._name(event, on_gpu=True) == counted


def test_names_that_begin_alike_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attest, "NAME_LENGTH", len("aten::m"))
    with torch.inference_mode():
        step = arms.prepare("eager", stepping.setup())
        whole, seen = attest.kernels(step, "cpu"), attest.ran(step, "cpu").kernels
    assert sum(seen.values()) == whole.total()
    assert len(seen) < len(whole)
