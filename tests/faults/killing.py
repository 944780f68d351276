"""Kill the processes of a run at random moments, again and again, and keep account of what that cost."""

import contextlib
import fcntl
import json
import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from decodegap import records
from decodegap.errors import DecodeGapError

PATIENCE_S = 240.0  # nothing here takes this long; a run that does has hung


@dataclass
class Account:
    """What a campaign of kills did: kills by target and signal, what was lost or wrong, and what was said."""

    kills: dict[tuple[str, str], int] = field(default_factory=dict)
    said: dict[tuple[str, str], str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    half_written: int = 0  # kills that left a writer's temporary file, so that hit it in the act

    @property
    def total(self) -> int:
        return sum(self.kills.values())


@dataclass(frozen=True)
class Campaign:
    """How to start a run, which of its processes are which, and how long a session lives."""

    command: Sequence[str]
    env: Mapping[str, str]
    store: Path
    targets: Mapping[str, float]  # session, writer, runner or kernel -> its share of the kills
    marks: Mapping[str, str]  # a process kind -> text in its command line
    horizon_s: float

    def victim(self, done: int, dice: random.Random) -> str:
        """Whom to kill after `done` kills: first each kind once, the rarest before the others, then by their shares."""
        rarest_first = sorted(self.targets, key=lambda kind: self.targets[kind])
        if done < len(rarest_first):
            return rarest_first[done]
        return dice.choices(list(self.targets), list(self.targets.values()))[0]

    def alive(self, process: "subprocess.Popen[bytes]", kind: str) -> list[psutil.Process]:
        """The processes of one kind in the run: the started one is the runner, and the session is the writer."""
        kind = "session" if kind == "writer" else kind
        with contextlib.suppress(psutil.Error):
            whole = psutil.Process(process.pid)
            if kind == "runner":
                return [whole]
            return [child for child in whole.children(recursive=True) if self.marks[kind] in _command(child)]
        return []


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def ravage(
    campaign: Campaign,
    kills: int,
    dice: random.Random,
    account: Account,
    done: Callable[[], bool],
    fresh: Callable[[], None],
) -> None:
    """Start the run until `kills` kills are done, each at a random moment of a session's life, then let it finish.

    `done` says whether the store is complete; `fresh` empties it, for kills beyond one plan.
    """
    began = time.monotonic()
    while account.total < kills:
        if done():
            fresh()
        _one_run(campaign, kills, dice, account)
        assert time.monotonic() - began < PATIENCE_S + 30 * kills
    last = subprocess.run(
        campaign.command, env=campaign.env, capture_output=True, text=True, timeout=PATIENCE_S * 3, check=False
    )
    assert last.returncode == 0, last.stderr[-2000:]


def _one_run(campaign: Campaign, kills: int, dice: random.Random, account: Account) -> None:
    before = _records(campaign.store)
    with (campaign.store.parent / "said.txt").open("w+b") as said:
        process = subprocess.Popen(campaign.command, env=campaign.env, stdout=said, stderr=said)
        seen: set[int] = set()
        pair = ("", "")
        began = time.monotonic()
        while process.poll() is None:
            assert time.monotonic() - began < PATIENCE_S * 3, "a run hangs"
            sessions = [each for each in campaign.alive(process, "session") if each.pid not in seen]
            if not sessions or account.total >= kills:
                time.sleep(0.01)
                continue
            seen.add(sessions[0].pid)
            kind = campaign.victim(account.total, dice)
            sent = dice.choice((signal.SIGKILL, signal.SIGTERM))
            if kind == "writer":
                _wait_for_writer(campaign.store, sessions[0])
            else:
                time.sleep(dice.uniform(0, campaign.horizon_s))
            if not sessions[0].is_running() or not (victims := campaign.alive(process, kind)):
                continue
            before |= _records(campaign.store)
            with contextlib.suppress(psutil.Error):
                victims[0].send_signal(sent)
                pair = (kind, sent.name)
                account.kills[pair] = account.kills.get(pair, 0) + 1
            with contextlib.suppress(psutil.Error):
                sessions[0].wait(10)
            account.half_written += bool(list(campaign.store.glob("*/*/.*.partial")))
        wait_for_lock(campaign.store)
        said.seek(0)
        text = said.read().decode()
    assert "Traceback" not in text, text[-3000:]
    if lines := [line for line in text.splitlines() if line.startswith("decode-gap: ")]:
        account.said[pair] = lines[-1]
    after = _records(campaign.store)
    account.lost += sorted(name for name, content in before.items() if after.get(name) != content)
    account.wrong += _bad(campaign.store)


def _wait_for_writer(store: Path, session: psutil.Process) -> None:
    """Return at the moment at which the session begins a file, whatever its name, or has ended."""
    before = set(store.glob("*/*/*"))
    while session.is_running() and not set(store.glob("*/*/*")) - before:
        time.sleep(0.0005)


def _records(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in records.files(store, "cpu")}


def _bad(store: Path) -> list[str]:
    """Files that stand where records stand and are none, and records that had to be set aside."""
    found = [str(path.name) for path in (store / "aside").rglob("*.json")]
    for path in records.files(store, "cpu"):
        try:
            records.load(path)
        except DecodeGapError as error:
            found.append(str(error))
    return found


def wait_for_lock(store: Path) -> None:
    """Wait until nobody holds the store: what a killed run started must end by itself, and soon."""
    deadline = time.monotonic() + 20
    path = store / ".lock"
    while path.exists():
        with path.open("r+") as handle, contextlib.suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        assert time.monotonic() < deadline, "an orphan of a killed run holds its results folder"
        time.sleep(0.05)


def samples(path: Path) -> list[float]:
    """A record's raw samples, to see that two of them are two measurements."""
    return [value for series in json.loads(path.read_bytes())["series"] for value in series["wall_ms"]]
