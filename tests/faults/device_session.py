"""The real session, with something real done to its device in the cells that FAULTS names by their context.

FAULTS is JSON, a context to the name of a function here. Each fault leaves a file `<name>-<process>` in MARKS as it
strikes, so that a test knows that it did. Without a card the same functions do the nearest thing that a CPU has.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from decodegap import plan, session
from decodegap.schema import Record

HANG_CYCLES = 120_000_000_000  # a minute at 2 GHz: far beyond the test's deadline, and still not for ever
HANG_S = 60.0
HEADROOM = 64 << 20  # less than the model's weights, on a host whose memory is the limit
PATIENCE_S = 60.0


def mark(name: str, text: object = "") -> None:
    """Leave a file that says that the fault struck in this process."""
    Path(os.environ["MARKS"], f"{name}-{os.getpid()}").write_text(str(text))


def before(module: Any, function: str, fault: Callable[[], None]) -> None:
    """Let `fault` strike whenever the session comes to this function of the library."""
    real = getattr(module, function)

    def struck(*args: Any, **more: Any) -> Any:
        fault()
        return real(*args, **more)

    setattr(module, function, struck)


def out_of_range() -> None:
    """The prompt holds tokens that the model does not have: its embedding reads beyond its table."""
    from decodegap import decode

    real = decode.prompt

    def prompt(vocab: int, *more: Any) -> Any:
        mark("out_of_range")
        return real(vocab, *more) + vocab

    decode.prompt = prompt


def no_memory() -> None:
    """From the building of the model on, the process gets no more memory than it holds already."""
    import torch

    from decodegap import decode

    def limit() -> None:
        mark("no_memory")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what the probes have left would hold the model
            torch.cuda.set_per_process_memory_fraction(1e-6)
        else:
            most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + HEADROOM
            resource.setrlimit(resource.RLIMIT_AS, (most, most))

    before(decode, "build", limit)


def hang() -> None:
    """The first probe waits for a kernel that spins, and a child of this process does nothing as long."""
    import torch

    from decodegap import probes

    def spin() -> None:
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({HANG_S})"])
        mark("hang", child.pid)
        if torch.cuda.is_available():
            torch.cuda._sleep(HANG_CYCLES)
            torch.cuda.synchronize()
        else:
            time.sleep(HANG_S)

    before(probes, "read_bandwidth", spin)


def crowd() -> None:
    """Just before the session looks at its card, `faults.full_card` takes all of it."""
    mark("crowd")
    Path(os.environ["MARKS"], "fill").touch()
    until = time.monotonic() + PATIENCE_S
    while not Path(os.environ["MARKS"], "full").exists():
        if time.monotonic() > until:
            sys.exit("nobody filled the card")
        time.sleep(0.05)


FAULTS: dict[str, Callable[[], None]] = {each.__name__: each for each in (out_of_range, no_memory, hang, crowd)}


def measure(task: plan.Task, store: Path) -> Record:
    """Do to this session what FAULTS asks for, and let it run."""
    if name := json.loads(os.environ["FAULTS"]).get(str(task.cell.ctx)):
        FAULTS[name]()
    return session.run(task, store)


if __name__ == "__main__":
    sys.exit(session.main(measure))
