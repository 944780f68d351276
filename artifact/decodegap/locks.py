"""Who may measure now: one run on a results folder and one on a machine, because two would disturb each other."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from decodegap.errors import StoreError


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
            holder = handle.read(100).strip() or "unknown"
            message = f"another run (process {holder}) is measuring with {what}; wait for it or stop it"
            raise StoreError(message) from None
        handle.truncate(0)
        handle.write(f"{os.getpid()}\n")
        handle.flush()
        yield
