"""Ctrl-C, as a terminal sends it: to every process in front, at a moment of its own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from faults.killing import wait_for_lock
from faults.ledger import Ledger
from jupyter_core.utils import ensure_event_loop

from decodegap import execute, records
from decodegap.paths import HERE

STOPPED = "decode-gap: stopped; what was measured is kept, and the same command goes on from here"
# A kernel that does not stop talking: nbclient is always in the middle of a message when the signal comes. In the end,
# nothing keeps alive what asyncio would complain of. It falls silent at last, should the test itself be killed.
TALK = """
import time
print('begun', flush=True)
end = time.monotonic() + 180
while time.monotonic() < end:
    print('on and on', flush=True)
"""
Start = Callable[..., "subprocess.Popen[bytes]"]
DRIVE = """
import gc, sys
from pathlib import Path
from jupyter_core.utils import ensure_event_loop
from decodegap import cli, execute
from decodegap.paths import Places
execute.HERE = Places(Path(sys.argv[1]))
code = cli.main(["measure"])
ensure_event_loop().close()
ensure_event_loop()
gc.collect()
sys.exit(code)
"""


@contextlib.contextmanager
def starting(store: Path) -> Iterator[Start]:
    """Starts commands in process groups of their own, with everything that one says in `said`, and `store` as theirs.

    However this ends, their groups end with it, and so do their kernels, which have groups of their own.
    """
    begun: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], said: Path, **settings: str) -> "subprocess.Popen[bytes]":
        env = os.environ | {"PYTHONPATH": str(HERE.root / "artifact"), "RESULTS": str(store)} | settings
        with said.open("wb") as out:
            begun.append(
                subprocess.Popen(command, cwd=HERE.root, env=env, stdout=out, stderr=out, start_new_session=True)
            )
        return begun[-1]

    try:
        yield start
    finally:
        for process in begun:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        deadline = time.monotonic() + 20
        while (left := kernels_of(store)) and time.monotonic() < deadline:
            for each in left:
                with contextlib.suppress(psutil.Error):
                    each.kill()
            psutil.wait_procs(left, timeout=1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`starting` for one test, with the store in its folder."""
    with starting(tmp_path / "store") as start:
        yield start


def wait_for(what: Callable[[], object], process: "subprocess.Popen[bytes]", said: Path) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.02)


def kernels_of(store: Path) -> list[psutil.Process]:
    """The kernels that were started for `store`, whoever their parent is now."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get("IPYTHONDIR", "").startswith(f"{store}{os.sep}"):
                found.append(each)
    return found


def test_what_a_test_began_ends_with_it_though_it_fails(tmp_path: Path) -> None:
    store, said = tmp_path / "store", tmp_path / "said.txt"
    script = f"IPYTHONDIR={store}/kernel setsid sleep 100 & echo begun; trap '' INT TERM; wait"
    begun, kernels = [], []

    def failing() -> None:
        with starting(store) as start:
            begun.append(start(["bash", "-c", script], said))
            wait_for(lambda: kernels_of(store), begun[0], said)
            kernels.extend(kernels_of(store))
            pytest.fail("as a test may")

    with pytest.raises(pytest.fail.Exception, match="as a test may"):
        failing()
    assert begun[0].poll() == -signal.SIGKILL
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in kernels)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_message_is_one_line(
    tmp_path: Path, sent: signal.Signals, faults: Ledger, start: Start
) -> None:
    cells = [nbformat.v4.new_code_cell(text) for text in ("gpu = 'cpu'", TALK)]
    cells[0].metadata.tags = ["parameters"]
    kernel = {"kernelspec": {"name": "python3", "language": "python", "display_name": "python3"}}
    (tmp_path / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "notebooks" / "01_baseline.ipynb")
    (tmp_path / "artifact").symlink_to(HERE.root / "artifact")
    said = tmp_path / "said.txt"
    process = start([sys.executable, "-c", DRIVE, str(tmp_path)], said, GPU="cpu", EXPERIMENTS="baseline")
    wait_for(lambda: "on and on" in said.read_text(), process, said)
    os.killpg(process.pid, sent)
    assert process.wait(60) == 130
    assert {line for line in said.read_text().splitlines() if line.strip()} == {"begun", "on and on", STOPPED}
    assert psutil.wait_procs(kernels_of(tmp_path / "store"), timeout=10)[1] == []
    faults.check(f"{sent.name} while papermill reads what its kernel prints", STOPPED)


def test_a_signal_after_the_last_step_is_not_lost_and_no_task_is_left() -> None:
    loop, before = ensure_event_loop(), signal.signal(signal.SIGTERM, signal.default_int_handler)
    tasks = [loop.create_task(asyncio.sleep(600))]
    with pytest.raises(KeyboardInterrupt), execute._stoppable():
        signal.raise_signal(signal.SIGTERM)
    assert signal.signal(signal.SIGTERM, before) is signal.default_int_handler
    with execute._stoppable():
        tasks.append(loop.create_task(asyncio.sleep(600)))
    assert [task.cancelled() for task in tasks] == [True, True]


@pytest.mark.slow
def test_ctrl_c_of_make_reproduce_loses_nothing(tmp_path: Path, faults: Ledger, start: Start) -> None:
    store, said = tmp_path / "store", tmp_path / "said.txt"
    plan = ["GPU=cpu", "MODELS=tiny-llama", "CONTEXTS=24", "SESSIONS=9", "EXPERIMENTS=baseline"]
    process = start(["make", "reproduce", f"PYTHON={sys.executable}", *plan], said)
    wait_for(lambda: any(records.files(store, "cpu")), process, said)
    kept = {path.name: path.read_bytes() for path in records.files(store, "cpu")}
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    told = said.read_text()
    assert told.count(STOPPED) == 1, told
    assert not [line for line in told.splitlines() if line.startswith("decode-gap: ") and line != STOPPED][1:], told
    assert "Traceback" not in told
    assert "Task " not in told
    assert psutil.wait_procs(kernels_of(store), timeout=10)[1] == []
    wait_for_lock(store)
    after = {record.cell.file_name(record.session) for record in records.load_all(store, "cpu")}
    assert set(kept) <= after
    assert all((store / "cpu/baseline" / name).read_bytes() == content for name, content in kept.items())
    faults.check("SIGINT of make reproduce, with all in front", STOPPED)
