"""A results folder that is full, read-only, held by another run, damaged or disordered in time."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from factory import grid, record, rehashed, write
from faults.ledger import Ledger
from faults.test_sessions import QUICK, quiet, resumed, tasks, wrong

from decodegap import bundle, frame, locks, plan, publish, published, records, render, runner, tables
from decodegap.errors import BadInputError, BadRecordError, StoreError, UnsupportedError
from decodegap.paths import HERE, imported


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system of its own of this size; skips where this user may not mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mounted.stderr.strip()[:100]}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the space there is."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as handle:
        while handle.write(b"\0" * 4096):
            pass
    return path


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in records.files(store, "cpu")}


def lost(before: dict[str, bytes], store: Path) -> list[str]:
    after = contents(store)
    return sorted(name for name, content in before.items() if after.get(name) != content)


def test_a_disk_that_fills_up_costs_the_session_in_flight(tmp_path: Path, faults: Ledger) -> None:
    asked = tasks(sessions=3)
    with small_disk(tmp_path / "disk", 80) as disk:
        store = disk / "store"

        def fill_after_the_first(text: str) -> None:
            if text.startswith("[1/"):
                fill(disk)

        with pytest.raises(BadInputError, match="No space left on device") as caught:
            runner.run(asked, store, say=fill_after_the_first, module=QUICK)
        before = contents(store)
        assert len(before) == 1
        with pytest.raises(StoreError, match="No space left on device"):
            records.write_atomically(next(records.files(store, "cpu")), bytes(2**20))
        assert contents(store) == before, "what cannot be replaced stays"
        assert not list(store.rglob("*.partial"))
        (disk / "filler").unlink()
        bad = resumed(asked, store)
        faults.check("the disk fills up in the middle of a run", caught.value, lost=lost(before, store), wrong=bad)


def test_an_import_that_does_not_fit_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    theirs = grid("l4", sessions=2)
    write(theirs, tmp_path / "theirs")
    packed = bundle.export("l4", tmp_path / "theirs", tmp_path / "none", tmp_path / "out")
    with small_disk(tmp_path / "disk", 1) as disk:
        [mine] = write(theirs[-1:], imported(disk / "ours"))
        (disk / "filler").write_bytes(bytes(2**20 - 64 * 1024))
        with pytest.raises(StoreError, match="No space left on device"):
            bundle.bring(packed, disk / "ours")
        assert list(imported(disk / "ours").rglob("*.json")) == [mine]
        (disk / "filler").unlink()
        assert len(bundle.bring(packed, disk / "ours")) == len(theirs)


def test_records_that_do_not_fit_where_they_ship_leave_what_is_shipped(tmp_path: Path) -> None:
    old = grid("l4", sessions=2)
    write([rehashed(each, seconds_total=9.0) for each in old], tmp_path / "store")
    with small_disk(tmp_path / "disk", 2) as disk:
        results = disk / "results"
        before = {path: path.read_bytes() for path in write(old, results)}
        fill(disk)
        with pytest.raises(StoreError, match=r"cannot write [^\n]*\.json: No space left on device"):
            publish.publish("l4", tmp_path / "store", results)
        assert {path: path.read_bytes() for path in before} == before
        records.load_shipped(results, "l4")
        (disk / "filler").unlink()
        assert len(publish.publish("l4", tmp_path / "store", results)) == len(old)


def test_a_disk_that_is_nearly_full_is_refused_before_anything_runs(tmp_path: Path, faults: Ledger) -> None:
    with small_disk(tmp_path / "disk", 16) as disk:
        with pytest.raises(UnsupportedError, match="MiB free where results go, 64 wanted") as caught:
            runner.run(tasks(), disk / "store", say=quiet, module=QUICK)
        assert contents(disk / "store") == {}
        faults.check("a disk with too little space", caught.value)


def test_results_that_cannot_be_written_are_left_as_they_are(tmp_path: Path, faults: Ledger) -> None:
    asked = tasks(sessions=2)
    with small_disk(tmp_path / "disk", 80) as disk:
        store = disk / "store"
        runner.run(asked[:2], store, say=quiet, module=QUICK)
        before = contents(store)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StoreError, match="Read-only file system") as caught:
            runner.run(asked, store, say=quiet, module=QUICK)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        bad = resumed(asked, store)
        faults.check("a read-only results folder", caught.value, lost=lost(before, store), wrong=bad)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(b'"step_ms": ') + 11] ^= 1
    path.write_bytes(bytes(content))


def edit(path: Path) -> None:
    data = json.loads(path.read_bytes())
    data["series"][0]["wall_ms"][0] /= 2
    path.write_text(json.dumps(data))


def duplicate(path: Path) -> None:
    shutil.copyfile(path, path.with_name(path.name.replace("_s1.", "_s2.")))


def from_the_future(path: Path) -> None:
    data = json.loads(path.read_bytes()) | {"schema_version": 2, "new_field": 1}
    path.write_text(json.dumps(data | {"content_hash": records.content_hash(data)}))


@pytest.mark.parametrize(
    ("fault", "damage", "told"),
    [
        ("a truncated record", truncate, "truncated or damaged"),
        ("a record with a flipped bit", flip, "edited or damaged"),
        ("a record edited by hand", edit, "edited or damaged"),
        ("a record copied to another session", duplicate, "holds another cell"),
        ("a record of a later version", from_the_future, "update the checkout"),
    ],
)
def test_a_damaged_record_is_kept_aside_and_measured_again(
    tmp_path: Path, faults: Ledger, fault: str, damage: Callable[[Path], None], told: str
) -> None:
    asked = tasks(sessions=2, contexts="8")
    runner.run(asked, tmp_path, say=quiet, module=QUICK)
    whole = contents(tmp_path)
    damage(records.path_of(tmp_path, asked[0].cell, 1))
    with pytest.raises(BadRecordError) as refused:
        records.load_all(tmp_path, "cpu")
    assert len(str(refused.value).splitlines()) == 1
    assert str(refused.value).endswith("once it is moved away, `make measure` or `make import` brings another")
    said: list[str] = []
    runner.run(asked, tmp_path, say=said.append, module=QUICK)
    assert told in said[0]
    assert len(list((tmp_path / "aside").rglob("*.json"))) == 1
    faults.check(fault, said[0], lost=lost(whole, tmp_path), wrong=wrong(asked, tmp_path))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("changed", "_s1.json: not what MANIFEST.sha256 lists"),
        ("gone", "_s2.json: listed in MANIFEST.sha256 but not there"),
        ("extra", "_s3.json: not what MANIFEST.sha256 lists"),
        ("swapped", "_s1.json: holds the record of qwen2.5-7b_2048_eager_s2.json"),
    ],
)
def test_a_manifest_that_disagrees_stops_every_reader(tmp_path: Path, faults: Ledger, fault: str, told: str) -> None:
    first, second = (records.write(record(session=n), tmp_path) for n in (1, 2))
    (tmp_path / "h200" / records.MANIFEST).write_text(records.manifest_text(tmp_path, "h200"))
    assert len(records.load_all(tmp_path, "h200")) == 2
    if fault == "changed":
        records.write(record(session=1, step_ms=9.0), tmp_path)  # a valid record, and not the published one
    elif fault == "gone":
        second.unlink()
    elif fault == "extra":
        records.write(record(session=3), tmp_path)
    else:
        first.rename(tmp_path / "x"), second.rename(first), (tmp_path / "x").rename(second)
    with pytest.raises(BadRecordError, match=re.escape(told)) as caught:
        records.load_all(tmp_path, "h200")
    faults.check(f"a manifest that disagrees ({fault})", caught.value)


def test_two_runs_at_once(tmp_path: Path, faults: Ledger) -> None:
    asked, store = tasks(sessions=3), tmp_path / "store"
    (tmp_path / "run.py").write_text(
        "import sys; from pathlib import Path; from decodegap import runner; from faults.test_sessions import tasks\n"
        f"runner.run(tasks(sessions=3), Path(sys.argv[1]), module={QUICK!r})\n"
    )
    (tmp_path / "Makefile").write_text(f"measure:\n\t@'{sys.executable}' run.py store\n")
    store.mkdir()
    (store / ".lock").write_text("process 999999, `make measure`, of which nothing is left\n")
    command = ["make", "measure", "GPU=cpu"]
    env = {name: text for name, text in runner.environment(None).items() if not name.startswith("MAKE")}
    first = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    assert first.stdout
    assert first.stdout.readline().startswith("[1/6]")
    (measuring,) = (each.pid for each in psutil.Process(first.pid).children() if "run.py" in each.cmdline())
    holder = rf"process {first.pid}, `make measure GPU=cpu`, measuring in process {measuring}"
    with pytest.raises(StoreError, match=rf"^another run \({holder}\) is measuring with this results folder") as caught:
        runner.run(asked, store, say=quiet, module=QUICK)
    with pytest.raises(StoreError, match=rf"^another run \({holder}\) is measuring with this machine"):
        runner.run(asked, tmp_path / "elsewhere", say=quiet, module=QUICK)
    assert first.wait(60) == 0
    first.stdout.close()
    faults.check("two runs at once", caught.value, wrong=wrong(asked, store))


@pytest.mark.parametrize(
    ("chain", "told"),
    [
        ([(9, []), (1, ["init"])], "process 9"),
        ([(9, ["/x/python", "-m", "decodegap", "measure"]), (4, ["bash"])], "process 9, `python -m decodegap measure`"),
        (
            [(9, ["python", "-m", "ipykernel_launcher"]), (7, ["/x/python3", "-m", "decodegap", "measure"])],
            "process 7, `python3 -m decodegap measure`, measuring in process 9",
        ),
        (
            [(9, ["python"]), (7, ["p", "-m", "decodegap", "x"]), (6, ["/bin/make", "x"]), (5, ["make", "test"])],
            "process 6, `make x`, measuring in process 9",
        ),
    ],
)
def test_a_run_is_described_by_what_somebody_started(chain: list[tuple[int, list[str]]], told: str) -> None:
    assert locks.described(chain) == told


def test_a_stale_lock_is_no_lock(tmp_path: Path, faults: Ledger) -> None:
    (tmp_path / ".lock").write_text("999999\n")
    faults.check("a lock file whose process is gone", "nothing: the run goes on", wrong=resumed(tasks(), tmp_path))


def test_nothing_is_ordered_by_the_wall_clock() -> None:
    """Records whose times run backwards, and whose files are older than those before, make the same tables."""
    forwards = grid(sessions=3)
    times = [f"2026-06-01T12:{59 - n:02d}:00Z" for n in range(len(forwards))]
    backwards = [each.model_copy(update={"started_at": when}) for each, when in zip(forwards, times, strict=True)]
    one, two = (
        [replace(row, started_at="") for row in frame.sessions(found, "shipped")] for found in (forwards, backwards)
    )
    assert one == two
    study = published.load(HERE.published)
    one, two = (render.markdown(tables.grid(frame.build(found), study)) for found in (forwards, backwards))
    assert one == two


def test_a_clock_that_jumps_back_changes_no_duration(tmp_path: Path, faults: Ledger) -> None:
    """What a session times, it times with clocks that nobody sets: each wall-clock call here answers an hour less."""
    code = (
        "import sys, time, datetime; from pathlib import Path; from decodegap import plan, records, session\n"
        "real, calls = time.time, []\n"
        "time.time = lambda: (calls.append(1), real() - 3600 * len(calls))[1]\n"
        "record = session.run(plan.task_from_json(sys.stdin.read()), Path(sys.argv[1]))\n"
        "records.write(record, Path(sys.argv[1]))\n"
    )
    task = tasks(contexts="16")[0]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        input=plan.task_to_json(task), env=runner.environment(None), text=True, check=True, timeout=120,
    )  # fmt: skip
    made = records.load(records.path_of(tmp_path, task.cell, 1))
    assert made.outcome == "ok"
    assert all(0 <= seconds < 100 for seconds in made.durations_s.values())
    assert all(0 < ms < 1e5 for ms in made.series[0].wall_ms)
    os.utime(records.path_of(tmp_path, task.cell, 1), (0, 0))
    said: list[str] = []
    runner.run([task], tmp_path, say=said.append)
    assert said == ["measured already: 1 of 1 session"]
    faults.check("the clock jumps back, in a session and between two runs", "nothing: no time is taken from it")
