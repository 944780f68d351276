"""On an NVIDIA GPU: real sessions whose device runs out of memory, reports an error, hangs, or is full of others' data.

One results folder goes through all of it, as a user's would, one run after the other; each test looks at one run.
"""

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
import torch

from decodegap import cli, fitness, gpus, machine, plan, records, runner, session
from decodegap.errors import DecodeGapError, NotMeasuredError, UnsupportedError
from decodegap.paths import HERE
from decodegap.plan import Task
from decodegap.schema import Record
from decodegap.settings import Context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.filterwarnings("ignore"),  # torch warns of its own deprecations
]

MODEL = "qwen2-standin"  # small, with heads that flash attention takes
LOST, OUT, FINE = 16, 24, 32  # contexts: whose session loses its device, runs out of memory, and is left in peace
HANG_DEADLINE_S = 20.0  # a session is at its first probe after some seven
PATIENCE_S = 60.0


@dataclass
class Run:
    """What one run said, how it ended, and which faults struck: their names, and the processes they struck in."""

    said: list[str] = field(default_factory=list)
    error: DecodeGapError | None = None
    struck: list[tuple[str, int]] = field(default_factory=list)
    report: runner.Report = field(default_factory=runner.Report)

    def lines(self, ctx: int) -> list[str]:
        """What was said when the session of this context was over."""
        return [line for line in self.said if f" ctx {ctx} " in line and not line.endswith("so far")]

    def told(self) -> str:
        """All of it, for the message of an assertion."""
        return "\n".join([*self.said, f"{type(self.error).__name__}: {self.error}", f"struck: {self.struck}"])


@dataclass(frozen=True)
class Story:
    """A results folder and the card it is of."""

    store: Path
    marks: Path
    gpu: str
    device: gpus.Device | None

    def tasks(self, *contexts: int) -> list[Task]:
        """A short session of each context."""
        asked = plan.request(gpu=self.gpu, models=MODEL, contexts=list(contexts), sessions=1)
        brief = {"energy_seconds": 0.0, "measured_steps": 10, "free_steps": 5}
        return [
            replace(task, protocol=task.protocol.model_copy(update=brief)) for task in plan.baseline(asked, self.gpu)
        ]

    def run(self, *contexts: int, faults: dict[int, str], attempts: int = 2, deadline_s: float = 120.0) -> Run:
        """Run the sessions of these contexts, with a fault in some."""
        found, known = Run(), set(self.marks.glob("*-*"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(HERE.root / "tests"), prepend=os.pathsep)
            patch.setenv("MARKS", str(self.marks))
            patch.setenv("FAULTS", json.dumps({str(ctx): name for ctx, name in faults.items()}))
            try:
                found.report = runner.run(
                    self.tasks(*contexts), self.store, say=found.said.append, attempts=attempts,
                    deadline_s=deadline_s, module="faults.device_session",
                )  # fmt: skip
            except DecodeGapError as error:
                found.error = error
        pairs = [path.name.split("-") for path in sorted(set(self.marks.glob("*-*")) - known)]
        found.struck = [(name, int(number)) for name, number in pairs]
        return found

    def record(self, ctx: int) -> Record | None:
        """The record of this context's session, if there is one."""
        path = records.path_of(self.store, self.tasks(ctx)[0].cell, 1)
        return records.load(path) if path.exists() else None

    def used_mib(self) -> int:
        """How much of the card's memory is in use."""
        state = machine.state(self.device)
        return (state.memory_used_mib or 0) if state else 0

    @contextlib.contextmanager
    def neighbour(self) -> Iterator[None]:
        """A process that fills the card when a session asks it to; gone, and its memory free, afterwards."""
        env = runner.environment(self.device)
        command = [sys.executable, str(HERE.root / "tests/faults/full_card.py"), str(self.marks)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=env) as process:
            try:
                yield
            finally:
                process.kill()
        until = time.monotonic() + PATIENCE_S
        while self.used_mib() > fitness.HELD_MIB and time.monotonic() < until:
            time.sleep(0.1)


def written(found: Run, record: Record | None, outcome: str) -> Record:
    """The record, of this outcome; a machine that voids it for reasons of its own makes a skip that says so."""
    assert record is not None, found.told()
    if record.outcome == "void":
        pytest.skip(f"this machine voids what is measured: {'; '.join(record.reasons)}")
    assert record.outcome == outcome, found.told()
    return record


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """An empty results folder for this card."""
    gc.collect()
    torch.cuda.empty_cache()
    gpu, device = gpus.choose("auto", gpus.detect())
    folder = tmp_path_factory.mktemp("faults")
    (folder / "marks").mkdir()
    made = Story(folder / "store", folder / "marks", gpu.slug, device)
    if made.used_mib() > fitness.HELD_MIB:
        pytest.skip(f"{made.used_mib()} MiB of the card are in use already; run this file by itself")
    return made


@pytest.fixture(scope="module")
def first(story: Story) -> Run:
    """The first run: a session that loses its device, one that runs out of its memory, and one that nothing befalls."""
    return story.run(LOST, OUT, FINE, faults={LOST: "out_of_range", OUT: "no_memory"})


@pytest.fixture(scope="module")
def hung(story: Story, first: Run) -> Run:
    """The second: the first session again, and it hangs."""
    return story.run(LOST, faults={LOST: "hang"}, attempts=1, deadline_s=HANG_DEADLINE_S)


@pytest.fixture(scope="module")
def crowded(story: Story, hung: Run) -> tuple[Run, Run]:
    """The third and fourth: the session again, and another process takes the whole card as it starts, and keeps it."""
    with story.neighbour():
        return story.run(LOST, faults={LOST: "crowd"}, attempts=1), story.run(LOST, faults={})


@pytest.fixture(scope="module")
def last(story: Story, crowded: tuple[Run, Run]) -> Run:
    """The last: everything that was asked for, undisturbed."""
    return story.run(LOST, OUT, FINE, faults={})


def test_a_device_error_ends_a_session_and_not_the_run(story: Story, first: Run) -> None:
    assert [name for name, _ in first.struck].count("out_of_range") == 2, first.told()  # in two processes, not in one
    (line,) = first.lines(LOST)
    assert "not measured after 2 attempts: exit code 1: " in line or "ended by SIGABRT after " in line, first.told()
    assert "CUDA error: " in line, first.told()
    assert not any(hint in line for hint in ("Traceback", "TORCH_USE_CUDA_DSA", "Search for")), first.told()
    assert isinstance(first.error, NotMeasuredError), first.told()
    assert f"{MODEL} ctx {LOST} eager session 1 (" in str(first.error), first.told()
    assert "the same command goes on from here" in str(first.error), first.told()
    assert not list(story.store.rglob("*.partial")), first.told()


def test_out_of_device_memory_is_a_record_of_it(story: Story, first: Run) -> None:
    record = written(first, story.record(OUT), "oom")
    assert (record.series, record.step_ms) == ([], None), first.told()
    (reason,) = record.reasons
    assert reason.startswith("out of device memory: "), reason
    assert record.bytes_asked == session._bytes_asked(reason), (record.bytes_asked, reason)
    assert record.bytes_asked, reason
    assert record.machine
    assert record.machine.read_gb_s, "what was learnt before it ran out is kept"
    (line,) = first.lines(OUT)
    assert line.split(" session 1: ")[1].startswith(f"oom: {reason}"), first.told()
    assert [name for name, _ in first.struck].count("no_memory") == 1, first.told()  # another would ask for as much


def test_the_session_after_them_is_measured(story: Story, first: Run) -> None:
    assert written(first, story.record(FINE), "ok").step_ms, first.told()


def test_a_session_that_hangs_on_the_device_ends_with_all_that_it_started(story: Story, hung: Run) -> None:
    assert [name for name, _ in hung.struck] == ["hang"], f"it did not come to the device in time\n{hung.told()}"
    (pid,) = (number for _, number in hung.struck)
    child = int((story.marks / f"hang-{pid}").read_text())
    until = time.monotonic() + PATIENCE_S
    while any(is_alive(each) for each in (pid, child)) and time.monotonic() < until:
        time.sleep(0.1)
    assert [each for each in (pid, child) if is_alive(each)] == [], hung.told()
    (line,) = hung.lines(LOST)
    assert f"no result within {HANG_DEADLINE_S:.0f} s, so it was ended" in line, hung.told()
    assert isinstance(hung.error, NotMeasuredError), hung.told()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_card_full_of_others_data_is_not_the_cards_own_limit(story: Story, crowded: tuple[Run, Run]) -> None:
    during, after = crowded
    assert (story.marks / "full").exists(), f"nobody filled the card\n{during.told()}"
    assert [name for name, _ in during.struck] == ["crowd"], during.told()
    (line,) = during.lines(LOST)
    assert "void: " in line, during.told()
    assert "out of memory while others held " in line, during.told()
    assert isinstance(during.error, NotMeasuredError), during.told()
    assert str(during.error).startswith("stopped at "), during.told()
    assert isinstance(after.error, UnsupportedError), after.told()
    assert "not measured, every session would be void: the largest cell takes about " in str(after.error), after.told()
    name = story.tasks(LOST)[0].cell.file_name(1)
    assert after.said == [f"set aside {name}: {line[line.index('void: ') :]}; measuring it again"], after.told()


def test_the_next_run_measures_what_is_missing_and_nothing_else(story: Story, last: Run) -> None:
    assert written(last, story.record(LOST), "ok").step_ms, last.told()
    assert last.said[0] == "measured already: 2 of 3 sessions", last.told()
    assert last.report.measured == [records.path_of(story.store, story.tasks(LOST)[0].cell, 1)], last.told()
    assert not list(story.store.rglob("*.partial")), last.told()


def test_a_record_of_running_out_stays_until_somebody_removes_it(story: Story, last: Run) -> None:
    gpu, device = gpus.choose("auto", gpus.detect())
    asked = plan.request(gpu=story.gpu)
    where = Context(asked, gpus.detect(), gpu, device, story.store, ("baseline",), require_measured=False)
    state = cli._state(where, story.tasks(OUT)[0])
    assert state.startswith("oom: out of device memory: "), state
    assert "; remove " in state, state
    assert state.endswith(" to try again"), state
