"""The session's own main with a device error, in torch's words of many lines, after which libraries go on talking.

With ABORTS set, it is a library that ends the process, as some do when they find the device lost on their way out.
"""

import atexit
import os
import sys
from pathlib import Path

from decodegap import plan, session
from decodegap.schema import Record

ERROR = """CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' in the runtime's documentation for more information.
CUDA kernel errors might be asynchronously reported at some other API call.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def measure(_task: plan.Task, _store: Path) -> Record:
    """Fail as a session fails whose device is lost."""
    atexit.register(leave)
    raise RuntimeError(ERROR)


def leave() -> None:
    """Say something that nobody asked for, at the very end."""
    print("Warning: CUDA warning: an illegal memory access was encountered (function destroyEvent)", file=sys.stderr)
    sys.stderr.flush()
    if "ABORTS" in os.environ:
        os.abort()


if __name__ == "__main__":
    sys.exit(session.main(measure))
