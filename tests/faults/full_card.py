"""A neighbour: once the file `fill` is in the folder, it takes all memory of the card, and holds it until told to end.

It makes the file `full` when it has it. It ends when its standard input does, so with the test that started it.
"""

import sys
import threading
import time
from pathlib import Path

import torch

LEAST = 2 << 20  # bytes that are worth asking for


def fill() -> list[torch.Tensor]:
    """All the memory that is to be had, in ever smaller pieces."""
    held, size = [], torch.cuda.mem_get_info()[0]
    while size >= LEAST:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def when_asked(folder: Path) -> None:
    """Wait to be asked, fill the card, say so, and keep it."""
    while not (folder / "fill").exists():
        time.sleep(0.05)
    held = fill()
    (folder / "full").write_text(str(sum(each.nbytes for each in held)))
    time.sleep(3600)


if __name__ == "__main__":
    threading.Thread(target=when_asked, args=[Path(sys.argv[1])], daemon=True).start()
    sys.stdin.read()
