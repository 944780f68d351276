"""How a verb ends where what it says cannot be written, and where it is stopped twice."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FakeNvml


@pytest.mark.parametrize(("verb", "before"), [("status", 0), ("mode", 1)])  # `mode` says what it found beside it
def test_output_that_goes_to_a_full_disk_is_one_line(
    fake_nvml: FakeNvml, tmp_path: Path, verb: str, before: int
) -> None:
    env = fake_nvml.env(GPU="h100", RESULTS=str(tmp_path), PYTHONUNBUFFERED="")  # so that a word is written at the end
    command = [sys.executable, "-m", "decodegap", verb]
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    told = "decode-gap: what is said goes to a file: No space left on device; free some space"
    assert done.stderr.splitlines()[before:] == [told]


def test_a_signal_that_comes_twice_is_said_once(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    code = (
        "import atexit, os, runpy, signal\n"
        "from decodegap import cli\n"
        "cli.VERBS['figures'] = lambda _: signal.raise_signal(signal.SIGTERM)\n"
        "for each in (signal.SIGINT, signal.SIGTERM):\n"
        "    atexit.register(signal.raise_signal, each)\n"
        "runpy.run_module('decodegap', run_name='__main__', alter_sys=True)\n"
    )
    env = fake_nvml.env(RESULTS=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code, "figures"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr == "decode-gap: stopped; nothing is left half-written; the same command starts again\n"
