"""On an NVIDIA GPU: whole sessions of the quantised paths on a small model, the check among them."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import stepping
import torch

from decodegap import plan, plan_quantised, quant_catalogue, quant_cells, quant_paths
from decodegap.errors import UnsupportedError
from decodegap.plan import Task
from decodegap.probes import ReadProbe
from decodegap.quant_catalogue import PATHS
from decodegap.session import Findings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),  # the profiler warns of its own deprecations
]

MODEL, CTX, GPU = "qwen2-standin", 96, "h200"
GPU_PATHS = [path.slug for path in quant_catalogue.on(GPU)]


def task(arm: str) -> Task:
    tasks = plan_quantised.quantised(plan.request(gpu=GPU, models=MODEL, contexts=str(CTX), sessions="1"), GPU)
    found = next(each for each in tasks if each.cell.arm == arm)
    return replace(found, protocol=found.protocol.model_copy(update={"energy_seconds": 0.0}))


def measured(arm: str, store: Path) -> Findings:
    gc.collect()
    found = Findings()
    found.read = ReadProbe(gb_s=4000.0, kernel="sum", buffer_mib=64)
    with torch.inference_mode():
        dtype = getattr(torch, task(arm).cell.dtype)
        setup = stepping.setup(MODEL, ctx=CTX, dtype=dtype, device="cuda")
        quant_cells.measure(task(arm), setup, None, store, found)
    return found


@pytest.mark.parametrize("slug", GPU_PATHS)
def test_a_session_times_and_proves_both_of_its_series(slug: str, tmp_path: Path) -> None:
    try:
        quant_paths.require(PATHS[slug], "cuda")
    except UnsupportedError as error:
        pytest.skip(str(error))
    found = measured(slug, tmp_path)
    assert (found.outcome, found.reasons) == ("ok", [])
    assert [series.arm for series in found.series] == [slug, f"{slug}-graph"], found.refused
    assert [anatomy.arm for anatomy in found.anatomy] == [slug, f"{slug}-graph"]
    assert found.ran is not None
    assert found.ran.sdpa == "flash"
    product = "aten::linear" if PATHS[slug].is_baseline else "quantised product"
    for anatomy in found.anatomy:
        assert anatomy.operators[product].ms > 0
        assert anatomy.operators["aten::linear (head)"].launches >= 1
    if not PATHS[slug].sums_in_fp16:
        assert found.attestations[0].outputs_equal


def test_a_check_holds_every_path_that_runs_here(tmp_path: Path) -> None:
    found = measured(plan.CHECK, tmp_path)
    assert found.outcome == "ok"
    assert {check.arm for check in found.checks} | set(found.refused) == set(GPU_PATHS)
    assert [check.arm for check in found.checks if not check.passed] == [], found.flags
    assert not [why for why in found.refused.values() if why.startswith("its check stopped")]
