"""Fixtures for more than one test file: a stand-in for the NVIDIA driver library, with the cards a test describes."""

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from making import clone_into

# One thread a process: at these sizes more of them only wait for one another, four times as long where the cores are
# busy. Sessions and kernels inherit it. It is read when torch is imported, so it is set before anything is.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
DRIVER = {"driver": "580.95.05", "cuda": 13010}
# What NVML says of an H200 on an idle, healthy machine; the tests change single values.
H200: dict[str, Any] = {
    "uuid": "GPU-6f0e1c1a-0000-4000-8000-00000000000a",
    "name": "NVIDIA H200",
    "memory_mib": 143771,
    "reserved_mib": 620,
    "used_mib": 4,
    "cuda_cores": 132 * 128,
    "capability": "9.0",
    "bus_width": 6016,
    "max_memory_clock": 3201,
    "memory_clock": 3201,
    "sm_clock": 1980,
    "temperature_c": 34,
    "power_mw": 76210,
    "power_cap_mw": 700000,
    "power_cap_default_mw": 700000,
    "event_reasons": "0x1",
    "utilisation": 0,
    "persistence": 1,
    "ecc": 1,
    "ecc_uncorrected": 0,
    "mig": 0,
    "energy_mj": 1234567,
}


def card(**changes: Any) -> dict[str, Any]:
    """An H200 with some values changed; None takes a value away, so that the card does not report it."""
    return {key: value for key, value in (H200 | changes).items() if value is not None}


@dataclass(frozen=True)
class FakeNvml:
    """A built stand-in library, and the file that tells it which cards there are."""

    folder: Path
    state: Path

    def cards(self, *cards: dict[str, Any], driver: dict[str, Any] | None = None) -> None:
        """From now on, these are the cards."""
        lines = _lines(DRIVER if driver is None else driver)
        for described in cards:
            lines += ["[gpu]", *_lines(described)]
        self.state.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def env(self, **changes: str) -> dict[str, str]:
        """The environment of a process that finds these cards."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "NVIDIA_"))}
        return {
            **kept,
            "LD_LIBRARY_PATH": str(self.folder),
            "FAKE_NVML": str(self.state),
            "PYTHONPATH": str(ROOT / "artifact"),
            "PYTHONWARNINGS": "error",
            **changes,
        }

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with `args` where these cards are."""
        command = [sys.executable, *args]
        return subprocess.run(command, env=self.env(**env), capture_output=True, text=True, timeout=120, check=False)

    def ask(self, expression: str, *cards: dict[str, Any], imports: str = "gpus, machine", **env: str) -> Any:
        """The value of `expression` (plain data) in a fresh process where `cards` are the devices."""
        if cards:
            self.cards(*cards)
        code = f"import json, os\nfrom decodegap import {imports}\nprint(json.dumps({expression}, default=vars))"
        done = self.run("-c", code, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def _lines(values: dict[str, Any]) -> list[str]:
    listed = {key: value if isinstance(value, list) else [value] for key, value in values.items()}
    return [f"{key} = {each}" for key, every in listed.items() for each in every]


@pytest.fixture(autouse=True, scope="session")
def _locks_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests lock a machine of their own, so that they neither wait for a measurement nor pass for one.

    What torch compiles for one of them, the others find: each worker of a run has folders of its own, below one.
    """
    folder = str(tmp_path_factory.mktemp("locks"))
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(shared / "inductor"))
        patch.setattr(tempfile, "tempdir", folder)
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """How much the slow suites do, and where what they saw is written."""
    group = parser.getgroup("decode-gap")
    group.addoption("--kills", type=int, default=5, help="per cent of the fault suite's 200 kills (default: 5)")
    group.addoption("--cases", type=int, default=600, help="fuzz cases in all (default: 600)")
    group.addoption("--seed", type=int, default=0, help="repeat a random test from the seed it printed")
    group.addoption("--faults-table", default="", help="write what the fault suite saw to this file")


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    """Chance, repeatable by `--seed`."""
    seed = int(request.config.getoption("--seed") or random.SystemRandom().randrange(2**32))
    print(f"\n{request.node.name}: --seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled stand-in."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler for the stand-in driver library")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "fake_nvml" / "nvml.c"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True)
    return folder


@pytest.fixture
def fake_nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """A machine with no card yet; give it some with `cards`."""
    fake = FakeNvml(nvml_library, tmp_path / "cards.txt")
    fake.cards()
    return fake


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the packaging files, in a folder with a space in its name, beside a PATH with no Python on it."""
    return clone_into(tmp_path / "a clone", tmp_path / "bin")


@pytest.fixture
def h200() -> Any:
    """`card`: an H200's description, with the values changed that are given by name."""
    return card
