"""The session's own main with a measurement that never ends: only its parent's death, or a signal, ends it."""

import sys
import time
from pathlib import Path

from decodegap import plan, session
from decodegap.schema import Record


def measure(_task: plan.Task, _store: Path) -> Record:
    """Never return."""
    while True:
        time.sleep(600)


if __name__ == "__main__":
    sys.exit(session.main(measure))
