"""What every fault test shares: a lock and temporary folder of its own, seeds that are printed, and the ledger."""

import os
import tempfile
import time
from pathlib import Path

import pytest
from faults import ledger

HEAD = """
# Faults

What `make faults-table` injected on the machine that wrote this page, for real: processes were killed, disks were full,
files were damaged. A record is lost if it was there, whole, and is not any more; a result is wrong if it differs from
what an undisturbed run writes, stands twice, or lies half-written where a record should be. Both are counted over every
injection. The message is what a user is shown; `…` stands for a folder, N for a process.

`make test` runs the same suite with few kills, `make test-faults` with all of them.

Faults that need an NVIDIA GPU have no row here. `make test-gpu` injects them on the card there is, in real sessions:
its memory runs out, a kernel reads beyond a table and takes the context along, a kernel never ends, and another process
holds the whole card (`tests/test_faults_gpu.py`).
"""
TESTS = Path(__file__).resolve().parents[1]
KEPT = pytest.StashKey[ledger.Ledger]()
BEGAN = pytest.StashKey[float]()


def pytest_configure(config: pytest.Config) -> None:
    """One ledger and one beginning for the whole run."""
    config.stash[KEPT] = ledger.Ledger()
    config.stash[BEGAN] = time.monotonic()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the table, if it was asked for and every fault was survived."""
    target = session.config.getoption("--faults-table")
    if target and exitstatus == 0:
        per_cent = session.config.getoption("--kills")
        took_s = round(time.monotonic() - session.config.stash[BEGAN])
        made = f"This page: {per_cent}% of the suite's 200 kills, {took_s} s on {os.cpu_count()} cores, nothing edited."
        ledger.write(session.config.stash[KEPT].rows, Path(target), f"{HEAD}\n{made}")


@pytest.fixture
def faults(request: pytest.FixtureRequest) -> ledger.Ledger:
    """Where a test notes what it injected."""
    return request.config.stash[KEPT]


@pytest.fixture
def kills(request: pytest.FixtureRequest) -> int:
    """The per cent of kills to do: 100 on demand, few in CI."""
    return int(request.config.getoption("--kills"))


@pytest.fixture(autouse=True)
def own_machine(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder of its own, so that the machine-wide lock of another run is not in the way."""
    folder = tmp_path_factory.mktemp("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
