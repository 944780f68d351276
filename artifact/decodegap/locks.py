"""Who may measure now: one run on a results folder and one on a machine, because two would disturb each other."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from decodegap.errors import StoreError

MOST_SHOWN = 120  # characters of a command
LONGEST = 300  # characters that a lock holds at most


@contextlib.contextmanager
def hold(store: Path) -> Iterator[None]:
    """Hold `store` and this machine for one run; the locks end with the process, so none can be stale.

    Raises `StoreError` saying which process holds them.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock(store / ".lock", "this results folder"))
        machine_wide = Path(tempfile.gettempdir()) / f"decode-gap-{os.getuid()}.lock"
        stack.enter_context(_lock(machine_wide, "this machine"))
        yield


def described(chain: Sequence[tuple[int, Sequence[str]]]) -> str:
    """This run for people: what they started it by, and which process measures.

    `chain` is this process, its parent and so on, each with its command line. What somebody started is the nearest
    make, or else the nearest `python -m decodegap`.
    """
    own = f"process {chain[0][0]}"
    makes = [each for each in chain if each[1] and Path(each[1][0]).name in ("make", "gmake")]
    verbs = [each for each in chain if tuple(each[1][1:3]) == ("-m", "decodegap")]
    for number, command in [*makes, *verbs][:1]:
        text = " ".join([Path(command[0]).name, *command[1:]])[:MOST_SHOWN]
        return f"process {number}, `{text}`" + (f", measuring in {own}" if number != chain[0][0] else "")
    return own


def _chain() -> list[tuple[int, list[str]]]:
    me = psutil.Process()
    found = [(me.pid, me.cmdline())]
    with contextlib.suppress(psutil.Error):
        for parent in me.parents():
            found.append((parent.pid, parent.cmdline()))  # noqa: PERF401  (what is known before one that is hidden)
    return found


@contextlib.contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+")
    except OSError as error:
        raise StoreError(f"{path.parent}: cannot write here: {error.strerror}; check rights and free space") from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.readline(LONGEST).strip() or "of unknown process"
            message = f"another run ({holder}) is measuring with {what}; wait for it or stop it"
            raise StoreError(message) from None
        handle.truncate(0)
        handle.write(f"{described(_chain())}\n")
        handle.flush()
        yield
