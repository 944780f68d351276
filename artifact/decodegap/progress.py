"""How far a run is: one plain line a session, which a terminal turns into a bar."""

import logging
import re
import sys
from typing import Any

from tqdm import tqdm

LINE = re.compile(r"^\[ *(\d+)/(\d+)\] (.*)$")


def line(done: int, total: int, text: str) -> str:
    """The progress line for `done` of `total` sessions, e.g. `[ 7/36] text`."""
    return f"[{done:>{len(str(total))}}/{total}] {text}"


def duration(seconds: float) -> str:
    """A length of time for people: `8 s`, `3 min`, `1 h 10 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


class Relay(logging.Handler):
    """Shows what a notebook's kernel prints: plain lines, or a tqdm bar for progress lines in a terminal."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._bar: tqdm[Any] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Print each line of the message, or move the bar to where a progress line says the run is."""
        for text in record.getMessage().splitlines():
            match = LINE.match(text)
            if match and sys.stderr.isatty():
                self._move(int(match[1]), int(match[2]), match[3])
            elif text.strip():
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def _move(self, done: int, total: int, text: str) -> None:
        if self._bar is None or self._bar.total != total:
            self.finish()
            self._bar = tqdm(total=total, unit="session", dynamic_ncols=True)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(done - self._bar.n)

    def finish(self) -> None:
        """Close the bar, if one is open."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
