"""What the bundle itself costs: a session beyond its steps, finding what is cached, rebuilding the paper."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from decodegap import plan, records, report, runner, scratch
from decodegap.paths import HERE
from decodegap.rows import counted
from decodegap.schema import Record

REPEATS = 3
IMPORTED = ("decodegap.cli", "decodegap.figures", "decodegap.session", "decodegap.decode")


def lines(store: Path) -> Iterator[str]:
    """One line a measurement, the quick ones first; real sessions of a tiny model on the CPU, in a scratch store."""
    yield from _imports()
    yield from _phases_of_local_records(store)
    with scratch.folder() as folder:
        yield from _sessions(folder)
    began = time.monotonic()
    report.rebuild(HERE, {"figures", "tables"}, store=store)
    yield f"rebuild every table and figure: {time.monotonic() - began:.2f} s"


def _imports() -> Iterator[str]:
    for module in IMPORTED:
        seconds = []
        for _ in range(REPEATS):
            began = time.monotonic()
            subprocess.run([sys.executable, "-c", f"import {module}"], check=True, env=runner.environment(None))
            seconds.append(time.monotonic() - began)
        yield f"start Python and import {module}: {statistics.median(seconds):.2f} s"


def _sessions(store: Path) -> Iterator[str]:
    req = plan.request(gpu="cpu", models="tiny-llama", contexts="64", sessions=REPEATS)
    tasks = plan.baseline(req, "cpu")
    began = time.monotonic()
    done = runner.run(tasks, store, say=lambda _: None)
    whole_s = (time.monotonic() - began) / len(tasks)
    found = [records.load(path) for path in done.measured]
    yield f"a session of a tiny model, start to record: {whole_s:.2f} s; {_phases(found, whole_s)}"
    began = time.monotonic()
    runner.run(tasks, store, say=lambda _: None)
    yield f"find {counted(len(tasks), 'measured session')}: {(time.monotonic() - began) * 1e3:.0f} ms"


def _phases_of_local_records(store: Path) -> Iterator[str]:
    for gpu in sorted(path.name for path in store.glob("*") if (path / "baseline").is_dir()):
        found = [record for record in records.load_all(store, gpu) if record.outcome == "ok"]
        if found:
            yield f"{counted(len(found), 'local session')} on {gpu}, median seconds: {_phases(found, None)}"


def _phases(found: list[Record], whole_s: float | None) -> str:
    names = list(dict.fromkeys(name for record in found for name in record.durations_s))
    medians = {name: statistics.median(r.durations_s.get(name, 0.0) for r in found) for name in names}
    if whole_s is not None:
        medians["process, record and rest"] = whole_s - sum(medians.values())
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in medians.items())
