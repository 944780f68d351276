"""A session on a machine that voids everything: its record says that it ran on a slice of a card."""

import sys

from factory import machine
from faults import quick_session

if __name__ == "__main__":
    seen = machine("cpu").model_copy(update={"mig": True})
    sys.exit(quick_session.main(outcome="void", reasons=["MIG mode is on"], step_ms=None, series=[], machine=seen))
