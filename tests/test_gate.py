"""What would void every session is said once, before the first of them."""

from pathlib import Path

import pytest
from conftest import FakeNvml, card
from factory_machine import GOOD, H200, IDLE, RUNNING, good

from decodegap import fitness, gate, gpus, plan, session
from decodegap.errors import UnsupportedError
from decodegap.schema import ByteCounts
from decodegap.session import Findings

COUNTS = ByteCounts(weights_all=2**33, weights_streamed=2**33, kv=2**27)


def tasks(gpu: str, models: str) -> list[plan.Task]:
    return plan.baseline(plan.request(gpu=gpu, models=models, contexts="128", sessions=1), gpu)


def judged(outcome: str, **machine: object) -> Findings:
    """A session of this outcome on an H200 with some values changed."""
    found = Findings(outcome=outcome, reasons=["out of device memory"] if outcome == "oom" else [])
    session._judge(good(**machine), H200, COUNTS, found)
    return found


@pytest.mark.skipif(gate.torch_cuda() != "", reason="needs a torch without CUDA to be wrong for a card")
def test_a_torch_that_cannot_use_the_card_is_said_before_any_session(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    fake_nvml.cards(card())
    settings = {"GPU": "h200", "EXPERIMENTS": "baseline", "RESULTS": str(tmp_path / "store"), "TMPDIR": str(tmp_path)}
    done = fake_nvml.run("-m", "decodegap", "measure", **settings)
    assert done.returncode == 2
    assert done.stderr.startswith("decode-gap: not measured, every session would be void: torch here is built without")
    assert done.stderr.count("\n") == 1
    assert "[1/36]" not in done.stdout
    assert not list((tmp_path / "store").rglob("*_s*.json"))


def test_this_cpu_passes_the_gate_and_a_model_beyond_its_memory_does_not(tmp_path: Path) -> None:
    gate.check(tasks("cpu", "tiny-llama"), gpus.CPU, None, tmp_path)
    wanted = gate.needs(tasks("cpu", "llama-3.1-8b"), gpus.CPU, tmp_path)
    assert wanted.host_memory_mib
    assert wanted.host_memory_mib > 30_000
    told = gate.voids(good(), gpus.CPU, fitness.Needs(host_memory_mib=wanted.host_memory_mib, host_free_mib=16_000))
    assert [text for text in told if "the plan takes about" in text]


def test_the_gate_looks_at_the_plan_that_was_asked_for(tmp_path: Path) -> None:
    small, large = (gate.needs(tasks("h200", name), H200, tmp_path) for name in ("qwen2.5-7b", "llama-3.1-8b"))
    assert small.device_memory_mib
    assert large.device_memory_mib
    assert 14_000 < small.device_memory_mib < large.device_memory_mib < 18_500


def test_more_than_one_danger_is_one_line(tmp_path: Path, fake_nvml: FakeNvml) -> None:
    lines = fake_nvml.ask(
        "gate.voids(gate.look(gpus.detect()[0], __import__('pathlib').Path(os.environ['STORE'])), gpus.detect() and"
        " gpus.identify(gpus.detect()[0]))",
        card(ecc_uncorrected=2, event_reasons="0x48"),
        imports="gate, gpus",
        STORE=str(tmp_path),
    )
    assert len(lines) == 3
    assert all("\n" not in line for line in lines)
    with pytest.raises(UnsupportedError, match=r"every session would be void: .* \(2 more: make doctor GPU=cpu\)$"):
        gate.refuse(lines, gpus.CPU)


def test_out_of_memory_beside_a_neighbour_says_nothing_about_the_card() -> None:
    assert judged("oom").outcome == "oom"
    assert judged("oom", idle=IDLE | {"memory_used_mib": 900}).outcome == "oom"
    found = judged("oom", idle=IDLE | {"memory_used_mib": 60_000})
    assert (found.outcome, found.reasons[-1]) == (
        "void",
        f"out of memory while others held 60000 of the card's {GOOD['memory_mib']} MiB",
    )
    assert judged("ok", idle=IDLE | {"memory_used_mib": 60_000}).outcome == "ok"


@pytest.mark.parametrize("outcome", ["ok", "oom"])
def test_a_void_finding_voids_what_it_breaks(outcome: str) -> None:
    found = judged(outcome, after=RUNNING | {"throttle_reasons": ["hardware slowdown"]})
    assert (found.outcome, found.reasons[-1]) == ("void", "hardware slowdown")
    assert judged("unsupported", persistence=False).outcome == "unsupported"
