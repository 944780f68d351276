"""Whether a plan is completed whatever happens to its sessions: real processes, a tiny real model, real faults."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from decodegap import locks, plan, records, runner
from decodegap.errors import BadInputError, NotMeasuredError, StoreError
from decodegap.paths import HERE
from decodegap.plan import Task


def tasks(sessions: int = 1, contexts: str = "24", **changes: object) -> list[Task]:
    asked = {"gpu": "cpu", "models": "tiny-llama", "contexts": contexts, "sessions": sessions, **changes}
    return plan.baseline(plan.request(**asked), "cpu")


def quiet(_text: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one real session of a tiny model."""
    store = tmp_path_factory.mktemp("store")
    said: list[str] = []
    runner.run(tasks(), store, say=said.append)
    assert said[0].startswith("[1/1] tiny-llama ctx 24 eager session 1: ")
    return store


@pytest.fixture
def copied(measured: Path, tmp_path: Path) -> Path:
    """The measured store, copied so that a test may damage it; its record."""
    target = records.path_of(tmp_path, tasks()[0].cell, 1)
    target.parent.mkdir(parents=True)
    target.write_bytes(records.path_of(measured, tasks()[0].cell, 1).read_bytes())
    return target


def store_of(record: Path) -> Path:
    return record.parents[2]


def test_a_session_writes_a_whole_record(measured: Path) -> None:
    record = records.load(records.path_of(measured, tasks()[0].cell, 1))
    series = record.series[0]
    assert record.outcome == "ok"
    assert len(series.wall_ms) == len(series.enqueue_ms) == record.protocol.measured_steps
    assert series.event_ms is None
    assert record.step_ms == series.step_ms > 0
    assert series.free_total_ms > 0
    assert record.stand_in
    assert record.peak_source == "measured"
    assert record.machine
    assert record.peak_gb_s == record.machine.read_gb_s
    assert any("floor does not apply" in flag for flag in record.flags)
    assert record.ran
    assert record.ran.evidence.startswith("aten::_scaled_dot_product")
    assert set(record.durations_s) >= {"import", "probe", "build", "prefill", "measure", "attest"}


def test_a_second_run_measures_nothing(copied: Path) -> None:
    before = copied.read_bytes(), copied.stat().st_mtime_ns
    report = runner.run(tasks(), store_of(copied), say=quiet)
    assert (report.measured, report.cached) == ([], [copied])
    assert (copied.read_bytes(), copied.stat().st_mtime_ns) == before


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:500])


def edit(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"step_ms": 0.001}))


def foreign_protocol(path: Path) -> None:
    record = records.load(path)
    protocol = record.protocol.model_copy(update={"measured_steps": 7})
    changed = record.model_copy(update={"protocol": protocol, "protocol_hash": protocol.digest()})
    records.write(changed, store_of(path))


def void(path: Path) -> None:
    records.write(records.load(path).model_copy(update={"outcome": "void", "reasons": ["a neighbour"]}), store_of(path))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "truncated or damaged"),
        (edit, "edited or damaged"),
        (foreign_protocol, "under protocol"),
        (void, "a neighbour"),
    ],
)
def test_a_bad_record_is_set_aside_and_measured_again(
    copied: Path, damage: Callable[[Path], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE.root / "tests"))  # a real record was damaged; a quick one replaces it
    damage(copied)
    bad = copied.read_bytes()
    said: list[str] = []
    report = runner.run(tasks(), store_of(copied), say=said.append, module="faults.quick_session")
    assert reason in report.set_aside[0]
    assert reason in said[0]
    assert (store_of(copied) / "aside" / "cpu" / "baseline" / copied.name).read_bytes() == bad
    assert runner.valid_record(tasks()[0], store_of(copied)) is not None


def test_leftovers_of_a_killed_writer_are_swept(copied: Path) -> None:
    leftover = copied.with_name(f".{copied.name}.ab12.partial")
    leftover.write_text("half a rec")
    runner.run(tasks(), store_of(copied), say=quiet)
    assert not leftover.exists()
    assert copied.exists()


def session_pids() -> list[int]:
    """This process's running sessions."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            if "decodegap.session" in " ".join(child.cmdline()):
                found.append(child.pid)
    return found


def test_a_killed_session_is_measured_again(tmp_path: Path) -> None:
    def kill_the_first() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if pids := session_pids():
                time.sleep(0.5)
                os.kill(pids[0], signal.SIGKILL)
                return
            time.sleep(0.02)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    report = runner.run(tasks(), tmp_path, say=quiet)
    killer.join()
    assert [path.name for path in report.measured] == ["tiny-llama_24_eager_s1.json"]
    assert not list(tmp_path.rglob("*.partial"))


def test_a_session_that_keeps_dying_is_named_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(NotMeasuredError, match=r"1 of 1 session .* tiny-llama ctx 24 .*no result within 0 s"):
        runner.run(tasks(), tmp_path, say=quiet, deadline_s=0.2, attempts=2)
    assert session_pids() == []


def test_a_users_mistake_inside_a_session_stops_the_run_at_once(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text('{"model_type": "llama"}')
    (weights / "model.safetensors").write_bytes(b"nothing")
    began = time.monotonic()
    with pytest.raises(BadInputError, match=r"config\.json: hidden_size"):
        runner.run(tasks(sessions=3, weights=f"{weights}/"), tmp_path / "store", say=quiet)
    assert time.monotonic() - began < 60  # once, not three times for each of three sessions


def test_two_runs_never_measure_at_once(tmp_path: Path) -> None:
    with locks.hold(tmp_path):
        with pytest.raises(StoreError, match=f"process {os.getpid()}.*this results folder"), locks.hold(tmp_path):
            pass
        with pytest.raises(StoreError, match="this machine"), locks.hold(tmp_path / "other"):
            pass
    with locks.hold(tmp_path):
        pass


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from decodegap import locks\n"
        "with locks.hold(Path(sys.argv[1])): os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=runner.environment(None), check=False)
    with locks.hold(tmp_path):
        pass


def test_a_store_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(StoreError, match="cannot write here"):
        runner.run(tasks(), tmp_path / "store", say=quiet)


def test_a_session_dies_with_its_runner(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from decodegap import plan, runner\n"
        "req = plan.request(gpu='cpu', models='tiny-llama', contexts='24', sessions=1)\n"
        "runner.run(plan.baseline(req, 'cpu'), Path(sys.argv[1]), module='faults.endless_session')\n"
    )
    env = runner.environment(None)
    env["PYTHONPATH"] += os.pathsep + str(HERE.root / "tests")
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], env=env)
    found: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not found and time.monotonic() < deadline:
        found = [child for child in psutil.Process(process.pid).children() if "endless" in " ".join(child.cmdline())]
        time.sleep(0.02)
    time.sleep(1)
    process.kill()
    process.wait()
    assert found
    _, alive = psutil.wait_procs(found, timeout=10)
    orphans = [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
    for orphan in orphans:
        orphan.kill()
    assert orphans == []
