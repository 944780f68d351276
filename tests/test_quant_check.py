"""Whether a check holds each quantised path against its own weights, and what a session makes of its outcome."""

from dataclasses import replace
from pathlib import Path

import pytest
import stepping
import torch
from quant_sessions import MODEL, keep_check, measured, task

from decodegap import plan, quant_catalogue, quant_cells, quant_check, quant_paths
from decodegap.quant_catalogue import PATHS
from decodegap.session import Findings


@pytest.fixture(scope="module")
def check() -> Findings:
    """What a check session on the tiny model finds."""
    found = Findings()
    with torch.inference_mode():
        quant_check.measure(task(plan.CHECK), stepping.setup(MODEL), found)
    return found


def test_a_check_holds_each_path_against_its_own_weights_and_names_those_that_cannot_run(check: Findings) -> None:
    assert [(result.arm, result.passed) for result in check.checks] == [("fp32", True), ("bnb-nf4", True)]
    assert {each.path for each in check.projections} == {"fp32", "bnb-nf4"}
    assert {each.kind for each in check.projections} == {"q/o", "k/v", "gate/up", "down"}
    assert set(check.refused) == {"bnb-nf4-dq", "awq-marlin", "gptq-marlin", "gptq-exllamav2", "int4-tinygemm"}
    assert "CPU" in check.refused["awq-marlin"]
    assert check.flags == []


def test_a_path_that_was_checked_is_timed_without_a_flag(check: Findings, tmp_path: Path) -> None:
    assert any("no record of a check" in flag for flag in measured("fp32", tmp_path).flags)
    keep_check(check, tmp_path)
    assert measured("fp32", tmp_path).flags == []
    other = replace(task("fp32"), protocol=task("fp32").protocol.model_copy(update={"seed": 5}))
    found = Findings()
    with torch.inference_mode():
        quant_cells.measure(other, stepping.setup(MODEL), None, tmp_path, found)
    assert any("another protocol" in flag for flag in found.flags)


def test_a_path_whose_product_is_wrong_fails_its_check_and_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nf4 = type(_first(PATHS["bnb-nf4"]))
    real = nf4.forward
    monkeypatch.setattr(nf4, "forward", lambda self, x: real(self, x) * 1.001)
    found = Findings()
    with torch.inference_mode():
        quant_check.measure(task(plan.CHECK), stepping.setup(MODEL), found)
    assert [(result.arm, result.passed) for result in found.checks] == [("fp32", True), ("bnb-nf4", False)]
    assert any("bnb-nf4 failed its check: projection q/o: relative error 0.001" in flag for flag in found.flags)
    keep_check(found, tmp_path)
    refused = measured("bnb-nf4", tmp_path)
    assert (refused.outcome, refused.series) == ("unsupported", [])
    assert "not timed, because its check failed: projection" in refused.reasons[0]
    assert measured("fp32", tmp_path).outcome == "ok"


def test_a_projection_that_fails_is_not_blamed_on_the_models_token(check: Findings) -> None:
    (result,) = [each for each in check.checks if each.arm == "bnb-nf4"]
    projections = [each.model_copy(update={"error": 0.5}) for each in check.projections if each.kind == "down"]
    failed = result.model_copy(update={"passed": False})
    (reason,) = quant_check.failures(PATHS["bnb-nf4"], [failed], projections)
    assert reason.startswith("projection down")
    wrong = failed.model_copy(update={"error": 0.5})
    assert len(quant_check.failures(PATHS["bnb-nf4"], [wrong], projections)) == 2
    assert len(quant_check.failures(PATHS["bnb-nf4"], [failed], [])) == 1


def test_a_path_after_a_lost_device_says_why_it_was_not_checked(check: Findings, tmp_path: Path) -> None:
    keep_check(replace(check, checks=check.checks[:1], projections=[], refused={}), tmp_path)
    (flag,) = measured("bnb-nf4", tmp_path).flags
    assert flag.endswith("weights: the check stopped before it came to this path")


def test_a_path_whose_kernel_stops_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(_self: object, _x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: an illegal\ninstruction was encountered")

    monkeypatch.setattr(type(_first(PATHS["bnb-nf4"])), "forward", stop)
    found = Findings()
    with torch.inference_mode():
        quant_check.measure(task(plan.CHECK), stepping.setup(MODEL), found)
    assert [result.arm for result in found.checks] == ["fp32"]
    assert found.refused["bnb-nf4"] == "its check stopped: CUDA error: an illegal instruction was encountered"
    keep_check(found, tmp_path)
    assert measured("bnb-nf4", tmp_path).outcome == "unsupported"


def _first(path: quant_catalogue.QuantPath) -> torch.nn.Module:
    """The first projection of a converted tiny model."""
    setup = stepping.setup(MODEL)
    with torch.inference_mode():
        quant_paths.convert(setup.net, path, "cpu")
    return next(quant_paths.projections(setup.net))[-1]


def test_an_error_below_the_dense_products_own_is_no_failure() -> None:
    path = PATHS["gptq-exllamav2"]
    assert quant_check.multiple_of(path) > quant_check.multiple_of(PATHS["gptq-marlin"])
    assert quant_check.failures(path, [], []) == []


def test_two_dtypes_are_prefilled_apart_and_each_path_gets_a_fresh_net() -> None:
    setup = stepping.setup(MODEL)
    with torch.inference_mode():
        nets = quant_check._Nets(task(plan.CHECK), setup)
        assert nets.setup("float32") is setup
        other = nets.setup("bfloat16")
        assert other.net.dtype == torch.bfloat16
        again = nets.setup("float32")
    assert other.cache is not setup.cache
    assert other.cache.layers[0].keys.dtype == torch.bfloat16
    assert again.net is not setup.net
    assert again.cache is setup.cache
    assert not list(setup.net.named_children()), "the net before is let go"
    names = [name for name, _ in again.net.named_parameters()]
    assert len(names) == len(list(stepping.setup(MODEL).net.named_parameters()))
