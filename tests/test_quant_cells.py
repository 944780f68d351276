"""Whether sessions of quantised paths measure, check and refuse as they should; real paths on a tiny model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import stepping
import torch
from quant_sessions import MODEL, measured, task

from decodegap import (
    arms,
    floor,
    graphs,
    models,
    plan,
    plan_quantised,
    quant_catalogue,
    quant_cells,
    quant_check,
    quant_paths,
    session,
)  # fmt: skip
from decodegap.arms import Setup, Step
from decodegap.errors import BadInputError
from decodegap.plan import Task
from decodegap.probes import ReadProbe
from decodegap.quant_catalogue import PATHS
from decodegap.schema import Series
from decodegap.session import Findings

LAYERS = 2
PROBED = ReadProbe(gb_s=10.0, kernel="sum", buffer_mib=64)


def planned(gpu: str = "cpu", **given: object) -> list[Task]:
    return plan_quantised.quantised(plan.request(gpu=gpu, **given), gpu)


def test_a_check_comes_first_then_whole_passes_over_every_path_in_its_own_dtype() -> None:
    tasks = planned("h200")
    named = [(t.cell.model, t.cell.ctx, t.cell.arm, t.session) for t in tasks]
    paths = [slug for slug in PATHS if slug != "fp32"]
    assert named == [
        ("qwen2.5-7b", 2048, "check", 1),
        *(("qwen2.5-7b", 2048, slug, session) for session in (1, 2, 3) for slug in paths),
    ]
    dtypes = {t.cell.arm: t.cell.dtype for t in tasks}
    assert dtypes["bf16"] == dtypes["bnb-nf4"] == dtypes["int4-tinygemm"] == dtypes["check"] == "bfloat16"
    assert dtypes["fp16"] == dtypes["awq-marlin"] == dtypes["gptq-exllamav2"] == "float16"
    assert {t.cell.sdpa for t in tasks if t.cell.arm != "check"} == {"flash"}
    assert {plan.check_task(t) for t in tasks} == {tasks[0]}


def test_a_cpu_runs_what_has_a_kernel_there_in_fp32_and_parameters_narrow() -> None:
    tasks = planned()
    assert [t.cell.arm for t in tasks] == ["check", *["fp32", "bnb-nf4", "int4-tinygemm"] * 3]
    assert {t.cell.dtype for t in tasks} == {"float32"}
    narrow = planned("l4", models="llama-3.1-8b,mistral-7b", contexts="4096", sessions="1")
    assert len(narrow) == 2 + 2 * 8
    assert {t.cell.ctx for t in narrow} == {4096}
    with pytest.raises(BadInputError, match="beyond"):
        planned("l4", contexts="16777216")


def test_a_path_is_timed_proven_and_dissected_with_the_bytes_that_it_holds(tmp_path: Path) -> None:
    found = Findings()
    found.read = PROBED
    with torch.inference_mode():
        quant_cells.measure(task("bnb-nf4"), stepping.setup(MODEL), None, tmp_path, found)
    assert found.outcome == "ok", found.reasons
    assert [series.arm for series in found.series] == ["bnb-nf4"]
    assert found.ran is not None
    assert found.ran == found.series[0].ran
    assert found.quantised is not None
    config = models.lookup(MODEL).config
    count = floor.projection_count(config)
    assert found.quantised.packed == round(count * PATHS["bnb-nf4"].bits / 8)
    assert found.quantised.dense == 4 * count
    streamed = found.quantised.packed + found.quantised.kept
    assert streamed == floor.quantised_bytes(config, 4, PATHS["bnb-nf4"].bits)
    counts = session._counts(task("bnb-nf4"), found)
    assert (counts.weights_streamed, counts.weights_all) == (streamed, streamed + found.quantised.table)
    (anatomy,) = found.anatomy
    assert anatomy.flags == []
    assert anatomy.operators["quantised product"].launches == 7 * LAYERS
    assert anatomy.operators["quantised product"].bytes == found.quantised.packed
    assert anatomy.operators["aten::linear (head)"].bytes == found.quantised.kept
    assert "aten::linear" not in anatomy.operators
    assert anatomy.ledger_bytes["weights"] == streamed


def test_bytes_by_arithmetic_are_those_of_the_study_s_model() -> None:
    config = models.lookup("qwen2.5-7b").config
    assert floor.projection_count(config) == 6_525_288_448
    assert floor.quantised_bytes(config, 2, 16) == floor.streamed_bytes(config, 2)
    assert floor.quantised_bytes(config, 2, 4.5) == pytest.approx(4.76e9, rel=1e-3)


def test_a_path_without_a_kernel_here_is_unsupported_in_one_line(tmp_path: Path) -> None:
    found = measured("awq-marlin", tmp_path)
    assert (found.outcome, found.series) == ("unsupported", [])
    assert found.reasons == ["awq-marlin has no kernel for a CPU"]
    found = measured("int4-tinygemm", tmp_path)
    assert (found.outcome, found.series) == ("unsupported", [])
    assert "not a multiple of 128" in found.reasons[0]
    with pytest.raises(BadInputError, match=r"'eager'; known are bf16"):
        measured("eager", tmp_path)


def test_a_projection_that_fell_back_to_a_dense_product_voids_the_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = quant_paths.convert

    def half(net: torch.nn.Module, path: quant_catalogue.QuantPath, device: str) -> quant_paths.Held:
        held = real(net, path, device)
        _, holder, name, module = next(quant_paths.projections(net))
        dense = torch.nn.Linear(module.in_features, module.out_features)
        setattr(holder, name, dense.requires_grad_(requires_grad=False))
        return held

    monkeypatch.setattr(quant_paths, "convert", half)
    found = measured("bnb-nf4", tmp_path)
    assert found.outcome == "void"
    assert any(f"{7 * LAYERS - 1} times a step, not {7 * LAYERS}" in reason for reason in found.reasons), found.reasons


def test_a_stale_launched_step_voids_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = arms.eager
    monkeypatch.setattr(arms, "eager", lambda setup: replace(real(setup), set_token=lambda _value: None))
    found = measured("bnb-nf4", tmp_path)
    assert found.outcome == "void"
    assert any("empty or stale" in reason for reason in found.reasons)


def replayed(change: Callable[[Setup], Callable[[Step], Step]]) -> Findings:
    """What is proven of a converted net's step and of a stand-in for its replay, which `change` makes of a launch."""
    setup = stepping.setup(MODEL)
    found = Findings()
    with torch.inference_mode():
        quant_paths.convert(setup.net, PATHS["bnb-nf4"], "cpu")
        eager = arms.eager(replace(setup, cache=quant_check.sharing(setup.cache)))
        body = graphs.pinned(setup)
        twin = graphs.launched(setup, body)
        graph = replace(change(setup)(graphs.launched(setup, body)), replayed=True)
        empty = {"wall_ms": [], "enqueue_ms": [], "event_ms": None, "free_steps": 1, "free_total_ms": 1.0, "step_ms": 1}
        found.series = [Series(arm=name, **empty) for name in ("bnb-nf4", "bnb-nf4-graph")]
        quant_cells.prove(task("bnb-nf4"), [eager, graph], twin, "cpu", found)
    return found


def stale_product(setup: Setup) -> Callable[[Step], Step]:
    """A replay in which one projection runs and its output is not written anew."""
    _, _, _, module = next(quant_paths.projections(setup.net))
    kept: dict[str, torch.Tensor] = {}

    def changed(step: Step) -> Step:
        def run() -> None:
            real = module.forward

            def first(x: torch.Tensor) -> torch.Tensor:
                out = real(x)
                return kept.setdefault("first", out)

            module.forward = first  # type: ignore[method-assign]
            step.run()
            module.forward = real  # type: ignore[method-assign]

        return replace(step, run=run)

    return changed


def test_a_replay_that_does_its_launches_work_is_attested() -> None:
    found = replayed(lambda _setup: lambda step: step)
    assert (found.outcome, found.reasons) == ("ok", [])
    (seen,) = found.attestations
    assert seen.outputs_equal
    assert seen.kernels_equal
    assert found.series[1].ran is not None


def test_a_replay_with_one_stale_projection_voids_the_session() -> None:
    found = replayed(stale_product)
    assert found.outcome == "void"
    assert any("from the launched step" in reason for reason in found.reasons), found.reasons
    assert found.attestations[0].outputs_changed, "its logits follow the token all the same"


def test_an_empty_replay_voids_the_session() -> None:
    found = replayed(lambda _setup: lambda step: replace(step, run=lambda: None))
    assert found.outcome == "void"


def test_both_series_of_a_session_are_timed_proven_and_dissected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The order of a GPU's session, with a launch in the place of the replay that a CPU does not have."""
    monkeypatch.setattr(graphs, "require_cuda", lambda _device: None)
    monkeypatch.setattr(graphs, "captured", lambda setup, body: replace(graphs.launched(setup, body), replayed=True))
    found = Findings()
    found.read = PROBED
    with torch.inference_mode():
        quant_cells.measure(task("bnb-nf4"), stepping.setup(MODEL), None, tmp_path, found)
    assert found.outcome == "ok", found.reasons
    both = ["bnb-nf4", "bnb-nf4-graph"]
    assert [series.arm for series in found.series] == both
    assert all(series.ran is not None for series in found.series)
    assert [anatomy.arm for anatomy in found.anatomy] == both
    assert [(seen.reference, seen.arm) for seen in found.attestations] == [tuple(both)]
    assert found.refused == {}
    assert {"convert", "prepare", "measure", "capture", "measure graph", "attest", "anatomy"} <= set(found.durations_s)


def test_a_step_that_cannot_be_captured_keeps_its_launched_series_and_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_setup: Setup, _body: graphs.Body) -> Step:
        raise RuntimeError("CUDA error: operation not\npermitted when stream is capturing")

    monkeypatch.setattr(graphs, "require_cuda", lambda _device: None)
    monkeypatch.setattr(graphs, "captured", broken)
    found = measured("bnb-nf4", tmp_path)
    assert found.outcome == "ok", found.reasons
    assert [series.arm for series in found.series] == ["bnb-nf4"]
    assert found.refused == {"bnb-nf4-graph": "CUDA error: operation not permitted when stream is capturing"}


def test_the_cache_that_is_shared_is_left_alone() -> None:
    setup = stepping.setup(MODEL)
    with torch.inference_mode():
        step = arms.eager(replace(setup, cache=quant_check.sharing(setup.cache)))
        step.run()
        graphs.pinned(setup)
        step.reset()
        step.run()
    assert setup.cache.get_seq_length() == stepping.CTX - 1
