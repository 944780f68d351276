"""The real session in a process that may take hardly more memory than it has once its packages are loaded."""

import resource
import sys
from pathlib import Path

from decodegap import decode, session  # noqa: F401  (torch and transformers load here)

HEADROOM = 256 << 20

if __name__ == "__main__":
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sys.exit(session.main())
