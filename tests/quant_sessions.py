"""Sessions of quantised paths on a tiny model, run in this process."""

from dataclasses import replace
from pathlib import Path

import stepping
import torch
from factory import record

from decodegap import plan, plan_quantised, quant_cells, records
from decodegap.arms import Setup
from decodegap.plan import Task
from decodegap.session import Findings

MODEL = "tiny-qwen2"  # its widths divide into NF4's blocks of 64 and not into groups of 128


def task(arm: str) -> Task:
    """The first session of a path, or of the check, on the tiny model."""
    here = plan_quantised.quantised(plan.request(gpu="cpu", models=MODEL, contexts=str(stepping.CTX)), "cpu")[0]
    return replace(here, cell=here.cell.model_copy(update={"arm": arm}))


def measured(arm: str, store: Path, setup: Setup | None = None) -> Findings:
    """What a session of `arm` finds, on a CPU, with `setup` or a fresh one."""
    found = Findings()
    with torch.inference_mode():
        quant_cells.measure(task(arm), setup or stepping.setup(MODEL), None, store, found)
    return found


def keep_check(found: Findings, store: Path) -> None:
    """Write the record of a check session with what it found."""
    checked = task(plan.CHECK)
    changes = {
        "cell": checked.cell, "session": 1, "protocol": checked.protocol, "protocol_hash": checked.protocol.digest(),
        "checks": found.checks, "projections": found.projections, "refused": found.refused,
    }  # fmt: skip
    records.write(record().model_copy(update=changes), store)
