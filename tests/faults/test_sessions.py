"""Sessions that hang, fail, run out of memory, or run where nothing can be compiled or fetched."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from faults import quick_session
from faults.ledger import Ledger

from decodegap import plan, records, runner
from decodegap.errors import BadInputError, NotMeasuredError

QUICK = "faults.quick_session"
LOST = "RuntimeError: CUDA error: an illegal memory access was encountered"


def tasks(sessions: int = 1, models: str = "tiny-llama", contexts: str = "8,16", **more: object) -> list[plan.Task]:
    return plan.baseline(plan.request(gpu="cpu", models=models, contexts=contexts, sessions=sessions, **more), "cpu")


def quiet(_text: str) -> None:
    """Progress that nobody reads."""


def wrong(asked: list[plan.Task], store: Path) -> list[str]:
    """Records that are not there, or not what an undisturbed run writes."""
    found = []
    for task in asked:
        path = records.path_of(store, task.cell, task.session)
        if not path.exists():
            found.append(f"no {path.name}")
        elif records.load(path).model_copy(update={"content_hash": ""}) != quick_session.made(task):
            found.append(path.name)
    return found


def resumed(asked: list[plan.Task], store: Path) -> list[str]:
    """What is wrong after the same run is started again and nothing disturbs it."""
    runner.run(asked, store, say=quiet, module=QUICK)
    return wrong(asked, store)


def test_a_hung_session_ends_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Ledger
) -> None:
    said: list[str] = []
    monkeypatch.setattr(runner, "FIRST_WORD_S", 0.3)
    with pytest.raises(NotMeasuredError, match="no result within 1 s, so it was ended") as caught:
        runner.run(tasks()[:1], tmp_path, say=said.append, deadline_s=1.2, attempts=2, module="faults.hung_session")
    going_on = "[0/1] tiny-llama ctx 8 eager session 1: "
    assert len([text for text in said if text.startswith(going_on) and text.endswith("s so far")]) >= 2, said
    left = [each for each in psutil.process_iter() if is_hung_child_of_this_test(each)]
    assert psutil.wait_procs(left, timeout=5)[1] == []
    faults.check("a session that hangs, deaf to SIGTERM, with a child", caught.value, wrong=resumed(tasks(), tmp_path))


def is_hung_child_of_this_test(process: psutil.Process) -> bool:
    """Each test has a temporary folder of its own, by which it knows its processes from another run's."""
    try:
        ours = process.environ().get("TMPDIR") == os.environ["TMPDIR"]
        return ours and "decode-gap hung child" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_a_long_session_is_not_silent_and_still_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(runner, "FIRST_WORD_S", 0.05)
    asked = tasks()
    runner.run(asked, tmp_path, say=said.append, module=QUICK)
    assert wrong(asked, tmp_path) == []
    assert said[0].startswith("[0/2] tiny-llama ctx 8 eager session 1: 0 s so far")
    assert [text[:5] for text in said if "so far" not in text] == ["[1/2]", "[2/2]"]


def test_a_device_error_ends_one_session_and_not_the_run(tmp_path: Path, faults: Ledger) -> None:
    said: list[str] = []
    with pytest.raises(NotMeasuredError, match="2 of 2 sessions could not be measured") as caught:
        runner.run(tasks(), tmp_path, say=said.append, attempts=1, module="faults.failing_session")
    assert [line.split(": ", 2)[1:] for line in said] == 2 * [["not measured after 1 attempts", f"exit code 1: {LOST}"]]
    faults.check("a CUDA error (raised on a CPU)", caught.value, wrong=resumed(tasks(), tmp_path))


def test_a_device_error_is_named_though_a_library_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ABORTS", "1")
    with pytest.raises(NotMeasuredError, match=re.escape(f"(ended by SIGABRT after {LOST})")):
        runner.run(tasks()[:1], tmp_path, say=quiet, attempts=1, module="faults.failing_session")


def test_a_machine_that_voids_everything_ends_the_run(tmp_path: Path, faults: Ledger) -> None:
    said: list[str] = []
    asked = tasks(sessions=3)
    with pytest.raises(NotMeasuredError, match=r"^stopped at tiny-llama ctx 8 .*MIG mode is on") as caught:
        runner.run(asked, tmp_path, say=said.append, module="faults.void_session")
    kept = sorted(path.name for path in tmp_path.rglob("*_s*.json"))
    assert len(said) == 1
    assert len(kept) == runner.ATTEMPTS  # every void record is kept, and no other session was tried
    faults.check("a machine that voids every session", caught.value, wrong=resumed(asked, tmp_path))


@pytest.mark.slow
def test_out_of_host_memory_is_a_record_of_it(tmp_path: Path, faults: Ledger) -> None:
    said: list[str] = []
    asked = tasks(models="qwen2-standin", contexts="128")
    runner.run(asked, tmp_path, say=said.append, module="faults.small_memory_session")
    record = records.load(records.path_of(tmp_path, asked[0].cell, 1))
    assert (record.outcome, record.series, record.step_ms) == ("oom", [], None)
    assert record.bytes_asked
    (reason,) = record.reasons
    assert reason.startswith("out of host memory: ")
    assert said[-1].endswith(f"oom: {reason}")
    faults.check("out of host memory", said[-1].split(": ", 1)[1])


@pytest.mark.slow
def test_without_a_compiler_the_compiled_arm_is_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Ledger
) -> None:
    """It is said once, whatever the number of its sessions, and not tried again."""
    planned = plan.graphs(plan.request(gpu="cpu", models="tiny-llama", contexts="16", sessions=3), "cpu")
    asked = [task for task in planned if task.cell.arm == "ab-compiled"]
    (tmp_path / "no-programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    said: list[str] = []
    first = runner.run(asked, tmp_path / "store", say=said.append)
    assert len(first.measured) == 1
    assert [line.split(": ")[1] for line in said if "so far" not in line] == ["unsupported"]
    again = runner.run(asked, tmp_path / "store", say=quiet)
    assert (len(again.measured), len(again.cached)) == (0, 1)
    assert [runner.refused(task, tmp_path / "store") for task in asked] == [False, True, True]
    record = records.load(records.path_of(tmp_path / "store", asked[0].cell, 1))
    assert (record.outcome, record.series) == ("unsupported", [])
    (reason,) = record.reasons
    cause = r"InvalidCxxCompiler: No working .{10,100}no-such-compiler'\)"
    assert re.fullmatch(rf"torch\.compile cannot build the step here: {cause}", reason)
    assert said[-1].endswith(f"unsupported: {reason}")
    assert len(said[-1].splitlines()) == 1
    faults.check("no compiler for the compiled arm", said[-1].split(": ", 1)[1])


@pytest.mark.slow
def test_without_a_network_real_weights_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int, faults: Ledger
) -> None:
    if kills < 100:
        pytest.skip("the hub's client tries for most of a minute; make test-faults waits for it")
    for name, value in {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hub")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    done = subprocess.run(
        [sys.executable, "-m", "decodegap.session", "--store", str(tmp_path / "store")],
        input=plan.task_to_json(tasks(models="qwen2.5-7b", contexts="16", weights="hub")[0]),
        env=runner.environment(None, online=True),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    told = done.stderr.splitlines()[-1]
    assert done.returncode == BadInputError.exit_code
    assert told.startswith("decode-gap: WEIGHTS: qwen2.5-7b could not be loaded")
    faults.check("no network for WEIGHTS=hub", told)


def test_a_session_is_offline_unless_it_fetches_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert runner.environment(None)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in runner.environment(None, online=True)
    assert json.dumps(dict(os.environ)).count("HF_HUB_OFFLINE") == 0
