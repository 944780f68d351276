"""Temporary folders that a killed process cannot leave behind for ever: the next one to need a folder removes them.

A folder belongs to a living process for as long as the lock on its mark is held. The lock ends with the process,
however that ends, so a folder is never taken from somebody who uses it, whatever number the process had.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "decode-gap-"
MARK = "in-use.lock"
UNMARKED_S = 86_400.0  # a folder without a mark is one second old at most while its maker lives


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A private folder in the temporary folder for as long as the context lasts; sweeps what dead processes left."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        unlocked = Path(name) / f"{MARK}.new"
        with unlocked.open("w") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX)
            unlocked.rename(unlocked.with_name(MARK))  # nobody ever sees the mark without its lock
            yield Path(name)


def sweep() -> None:
    """Remove this user's folders whose process is gone."""
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if left.is_dir() and not left.is_symlink() and left.stat().st_uid == os.getuid() and _is_dead(left):
                shutil.rmtree(left, ignore_errors=True)


def _is_dead(left: Path) -> bool:
    try:
        with (left / MARK).open("r") as mark:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return time.time() - left.stat().st_mtime > UNMARKED_S
    return True
