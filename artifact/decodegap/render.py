"""How a table becomes text: Markdown to read, CSV with unrounded values, LaTeX to include."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SAID_BY_MARKS = re.compile(r"^(measured, |predicted: |missing: )")
LINES_PER_HEADING = 2  # with fewer lines a block, headings would cost more room than the columns they replace


@dataclass(frozen=True)
class Table:
    """What a reader sees (`headers`, `rows`, one row of texts a line) and what a machine reads (`data`).

    `groups[i]` names the block that row `i` belongs to; a rule separates blocks. `numeric` columns align right.
    `data` has one dict of unrounded values a line, all with the same keys.
    """

    name: str
    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    groups: tuple[str, ...]
    numeric: tuple[bool, ...]
    notes: tuple[str, ...]
    data: tuple[dict[str, Any], ...]
    records: str  # hash of the records behind it


def markdown(table: Table) -> str:
    """`table` in Markdown: caption, table, notes, and the hash of its records."""
    rule = ["---:" if right else "---" for right in table.numeric]
    lines = [_md_line(table.headers), f"| {' | '.join(rule)} |", *[_md_line(row) for row in table.rows]]
    notes = [f"- {_md(note)}" for note in table.notes]
    return "\n".join([_md(table.caption), "", *lines, "", *notes, "", f"Records: {table.records[:16]}.", ""])


def csv_text(table: Table) -> str:
    """`table` as CSV, values unrounded; an empty field is a missing value."""
    out = io.StringIO()
    if table.data:
        writer = csv.DictWriter(out, fieldnames=list(table.data[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table.data)
    return out.getvalue()


def latex(table: Table) -> str:
    """`table` as a full-width LaTeX float (booktabs) with caption, label and notes; every text escaped.

    To be readable at the width of a page, the leading columns that say the same in every line of a block, such as its
    GPU, become a heading above the block, and a source does not repeat what the marks say.
    """
    lifted, source = _lifted(table), table.headers.index("Source") if "Source" in table.headers else None
    numeric, headers = table.numeric[lifted:], table.headers[lifted:]
    columns = "".join("r" if right else "l" for right in numeric)
    body: list[str] = []
    for index, row in enumerate(table.rows):
        if not index or table.groups[index] != table.groups[index - 1]:
            body += [r"\addlinespace"] if index and lifted else [r"\midrule"] if index else []
            heading = ", ".join(latex_escape(text) for text in row[:lifted])
            body += [rf"\multicolumn{{{len(headers)}}}{{@{{}}l}}{{\textit{{{heading}}}}} \\"] if lifted else []
        shown = [SAID_BY_MARKS.sub("", text) if column == source else text for column, text in enumerate(row)]
        body.append(" & ".join(latex_escape(text) for text in shown[lifted:]) + r" \\")
    notes = " ".join(latex_escape(note) for note in table.notes)
    return "\n".join(
        [
            f"% records {table.records}",
            r"\begin{table*}[p]",
            r"\centering\footnotesize\setlength{\tabcolsep}{2.5pt}",
            rf"\caption{{{latex_escape(table.caption)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"\toprule",
            " & ".join(latex_escape(text) for text in headers) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\par\smallskip\parbox{{\textwidth}}{{\scriptsize {notes}}}",
            r"\end{table*}",
            "",
        ]
    )


def _lifted(table: Table) -> int:
    """How many leading columns are the same throughout each block, where a block has several lines."""
    blocks: dict[str, list[tuple[str, ...]]] = {}
    for group, row in zip(table.groups, table.rows, strict=True):
        blocks.setdefault(group, []).append(row)
    if len(table.rows) < LINES_PER_HEADING * len(blocks):
        return 0
    found = 0
    while found < len(table.headers) - 1 and all(len({row[found] for row in rows}) == 1 for rows in blocks.values()):
        found += 1
    return found


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "§": r"\S{}", "—": r"\textemdash{}",
    "–": r"\textendash{}", "×": r"\texttimes{}", "µ": r"\textmu{}", "≥": r"\ensuremath{\geq}", "…": r"\ldots{}",
    "¶": r"\P{}",
    "\n": " ", "\r": " ",
}  # fmt: skip


def latex_escape(text: str) -> str:
    """`text` so that LaTeX prints it as it is."""
    # A bracket right after `\\` would be read as that command's optional argument, so brackets are wrapped.
    return "".join(LATEX.get(character, f"{{{character}}}" if character in "[]" else character) for character in text)


def _md_line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(_md(text) for text in texts)} |"


def _md(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")
