"""A session that skips only the model: the same task, parent watch, messages and writer, and a record of some size."""

import sys
from pathlib import Path
from typing import Any

from factory import record

from decodegap import plan, session
from decodegap.schema import Record

PADDING = 60_000  # samples in the record, so that serialising, writing and flushing take long enough to be hit


def made(task: plan.Task, **changes: Any) -> Record:
    """The record that this session writes for `task`: the same content however often it is run."""
    cell = task.cell
    whole = record(
        gpu=cell.gpu, model=cell.model, ctx=cell.ctx, session=task.session, protocol=task.protocol,
        step_ms=cell.ctx + task.session / 100,
    )  # fmt: skip
    series = whole.series[0].model_copy(update={"free_steps": PADDING, "enqueue_ms": [0.125] * PADDING})
    return whole.model_copy(update={"cell": cell, "series": [series], "content_hash": ""} | changes)


def main(**changes: Any) -> int:
    """The session's own main, with another way to come by a record."""

    def measure(task: plan.Task, _store: Path) -> Record:
        return made(task, **changes)

    return session.main(measure)


if __name__ == "__main__":
    sys.exit(main())
