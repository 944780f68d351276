"""An installation that is killed half-way is finished by the next make; nothing here uses the network."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from faults.ledger import Ledger
from making import STAND_IN, calls, executable, installs, make, put_python

HANG = "echo half >.venv/half-installed; sleep 30"
SLOW_PIP = STAND_IN.replace('exit "${FAKE_PIP_EXIT:-0}"', HANG)
SLOW_VENV = STAND_IN.replace('cp "$0" .venv/bin/python', f'cp "$0" .venv/bin/python; {HANG}')


@pytest.mark.parametrize(("slow", "venvs", "pips"), [(SLOW_VENV, 2, 1), (SLOW_PIP, 1, 2)], ids=["venv", "pip"])
def test_an_installation_that_is_killed_is_finished_by_the_next_make(
    clone: Path, faults: Ledger, slow: str, venvs: int, pips: int
) -> None:
    sleep = shutil.which("sleep")
    assert sleep
    (clone.parent / "bin/sleep").symlink_to(sleep)
    put_python(clone, slow)
    program = shutil.which("make")
    assert program
    env = {"PATH": str(clone.parent / "bin"), "HOME": str(clone.parent), "CALLS": str(clone.parent / "calls.log")}
    first = subprocess.Popen([program, "status"], cwd=clone, env=env, start_new_session=True, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not (clone / ".venv/half-installed").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not list((clone / ".venv").glob("analysis.stamp*"))
    for place in (clone.parent / "bin/python3", clone / ".venv/bin/python"):
        executable(place, STAND_IN)
    second = make(clone, "status")
    assert second.returncode == 0, second.stderr
    assert sum("-m venv .venv" in line for line in calls(clone)) == venvs
    assert installs(clone) == ["analysis"] * pips
    assert (clone / ".venv/analysis.stamp").read_bytes() == (clone / "requirements/analysis.lock").read_bytes()
    faults.check("SIGKILL of an installation", second.stderr.splitlines()[-2])
