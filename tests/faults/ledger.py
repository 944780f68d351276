"""What the fault suite saw: one row a fault, for people, and the table they make."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

ANYWHERE = re.compile(r"(?<![\w.])/(?:[\w.@+-]+/)+")
NUMBERED = re.compile(r"process \d+")


@dataclass
class Row:
    """One fault: how often it was injected, what it cost, and what the user was told."""

    fault: str
    injected: int = 0
    lost: int = 0
    wrong: int = 0
    message: str = ""


@dataclass
class Ledger:
    """Every fault injected by this run of the suite, in order."""

    rows: list[Row] = field(default_factory=list)

    def row(self, fault: str) -> Row:
        """The row of `fault`, made at its first mention."""
        for row in self.rows:
            if row.fault == fault:
                return row
        self.rows.append(Row(fault))
        return self.rows[-1]

    def note(self, fault: str, message: object, *, injected: int = 1, lost: int = 0, wrong: int = 0) -> None:
        """Add to a fault's row; the message is kept without folders and process numbers."""
        row = self.row(fault)
        row.injected, row.lost, row.wrong = row.injected + injected, row.lost + lost, row.wrong + wrong
        row.message = cleaned(str(message)) or row.message

    def check(self, fault: str, message: object, *, lost: Iterable[object] = (), wrong: Iterable[object] = ()) -> None:
        """Note one injection, and fail if it lost a record or left a wrong one."""
        lost, wrong = list(lost), list(wrong)
        self.note(fault, message, lost=len(lost), wrong=len(wrong))
        assert (lost, wrong) == ([], [])


def cleaned(message: str) -> str:
    """`message` on one line, without this run's folders and numbers."""
    text = " ".join(message.split()).removeprefix("decode-gap: ")
    return NUMBERED.sub("process N", ANYWHERE.sub("…/", text)).replace("|", "\\|")


def table(rows: Iterable[Row], head: str) -> str:
    """The rows in Markdown under `head`."""
    lines = [
        "| Fault | Times injected | Lost records | Wrong results | Message shown |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    lines += [f"| {row.fault} | {row.injected} | {row.lost} | {row.wrong} | {row.message} |" for row in rows]
    return "\n".join([head.strip(), "", *lines, ""])


def write(rows: Iterable[Row], path: Path, head: str) -> None:
    """Write the table to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(table(rows, head), encoding="utf-8")
