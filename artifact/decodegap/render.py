"""How a table becomes text: Markdown to read, CSV with unrounded values, LaTeX to include."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

RANGE = "(range "
SAID_BY_MARKS = re.compile(r"^(measured, |predicted: |missing: )")
LINES_PER_PAGE = 68.0  # of 9.5 pt in 257 mm, with caption and notes
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
    unprinted: tuple[str, ...] = ()  # headers of columns that a page has no room for
    printed_caption: str = ""  # the caption of a page that lacks them
    unprinted_notes: tuple[str, ...] = ()  # notes that are about them alone


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

    To be readable at the width of a page, leading columns that stay the same for several lines, such as the GPU, become
    a heading above them, a source does not repeat what the marks say, one note says what parentheses are instead of
    each range, `unprinted` columns and the notes on them are left out, and what is longer than a page goes on in a
    second float.
    """
    lifted = _lifted(table)
    kept = [column for column, header in enumerate(table.headers) if column >= lifted and header not in table.unprinted]
    said = ["In parentheses after a step: its range."] * any(RANGE in text for row in table.rows for text in row)
    said += [f"Not in print: {', '.join(table.unprinted)}."] * bool(table.unprinted)
    notes = " ".join(latex_escape(note) for note in (*table.notes, *said) if note not in table.unprinted_notes)
    caption = "\n".join(
        [rf"\caption{{{latex_escape(table.printed_caption or table.caption)}}}", rf"\label{{tab:{table.name}}}"]
    )
    pages = [_latex_lines(table, rows, kept, lifted) for rows in _pages(table)]
    lines = [f"% records {table.records}"]
    for number, body in enumerate(pages, 1):
        lines += [
            r"\begin{table*}[p]",
            r"\centering\footnotesize\setlength{\tabcolsep}{2.5pt}",
            caption if number == 1 else rf"Table~\ref{{tab:{table.name}}}, continued.\par\smallskip",
            rf"\begin{{tabular}}{{@{{}}{''.join('r' if table.numeric[column] else 'l' for column in kept)}@{{}}}}",
            r"\toprule",
            " & ".join(latex_escape(table.headers[column]) for column in kept) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            *([rf"\par\smallskip\parbox{{\textwidth}}{{\scriptsize {notes}}}"] if number == len(pages) else []),
            r"\end{table*}",
        ]
    return "\n".join([*lines, ""])


def _latex_lines(table: Table, rows: Sequence[int], kept: Sequence[int], lifted: int) -> list[str]:
    """These rows of `table` as lines of a tabular, with rules between blocks and headings where the lifted change."""
    body: list[str] = []
    above: tuple[str, ...] = ()
    for index in rows:
        row = table.rows[index]
        if body and table.groups[index] != table.groups[index - 1]:
            body.append(r"\addlinespace" if lifted else r"\midrule")
        if row[:lifted] != above:
            above = row[:lifted]
            heading = ", ".join(latex_escape(text) for text in above)
            body.append(rf"\multicolumn{{{len(kept)}}}{{@{{}}l}}{{\textit{{{heading}}}}} \\")
        shown = (SAID_BY_MARKS.sub("", row[c]) if table.headers[c] == "Source" else row[c] for c in kept)
        body.append(" & ".join(latex_escape(text.replace(RANGE, "(")) for text in shown) + r" \\")
    return body


def _pages(table: Table) -> list[list[int]]:
    """The rows of each page: whole blocks, as many as fit, a block with its heading and rule."""
    blocks = [[index for index, _ in found] for _, found in groupby(enumerate(table.groups), key=itemgetter(1))]
    pages: list[list[int]] = [[]]
    left = LINES_PER_PAGE
    for block in blocks:
        if len(block) + 1.5 > left and pages[-1]:
            pages.append([])
            left = LINES_PER_PAGE
        pages[-1] += block
        left -= len(block) + 1.5
    return pages


def _lifted(table: Table) -> int:
    """How many leading columns to lift: those that stay the same within each block and for two lines on average."""
    found = 0
    for columns in range(1, len(table.headers)):
        heads = [(group, *row[:columns]) for group, row in zip(table.groups, table.rows, strict=True)]
        changes = 1 + sum(a[1:] != b[1:] for a, b in pairwise(heads))
        within = any(a != b and a[0] == b[0] for a, b in pairwise(heads))
        if within or len(heads) < LINES_PER_HEADING * changes:
            break
        found = columns
    return found


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}", "§": r"\S{}", "—": r"\textemdash{}",
    "–": r"\textendash{}", "×": r"\texttimes{}", "µ": r"\textmu{}", "≥": r"\ensuremath{\geq}",
    "≤": r"\ensuremath{\leq}", "…": r"\ldots{}",
    "¶": r"\P{}", "‖": r"\ensuremath{\parallel}",
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
