"""What the tests do not reach, as docs/coverage.md: uncovered.py coverage.json PAGE.

`make coverage` runs the tests that need no GPU, in all their processes, and then this. Functions are named rather than
lines, so that the page says something to a reader and changes when the tests do.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HEAD = """# Coverage

Branch coverage of the library by the tests that need no GPU, sessions and notebook kernels included. Written by
`make coverage`. A function is whole if every line of it ran and every branch was taken both ways; the others are named,
with what was missed. What launches kernels is left to `make test-gpu`, which this page does not count.
"""
OPTIONAL = {"triton": "interpreter", "gptqmodel_ext": "quant"}  # by what requirements/install.sh calls their set
SKIPPED = "Tests that need {} were skipped, because it was not installed (`requirements/install.sh {}`).\n"
LIBRARY = "artifact/decodegap/"


def page(found: dict[str, Any], absent: Sequence[str] = ()) -> str:
    """The page for coverage.py's JSON report `found`, which must be one of branches; `absent` are of `OPTIONAL`."""
    if not found["meta"]["branch_coverage"]:
        raise SystemExit("decode-gap: the report counts lines only; run it with branches, as pyproject.toml says")
    total = found["totals"]
    statements = f"{total['covered_lines']} of {total['num_statements']} statements"
    branches = f"{total['covered_branches']} of {total['num_branches']} branches"
    lines = [
        HEAD,
        f"In all: {total['percent_covered']:.1f}% of statements and branches together; {statements}, {branches}.",
        "",
        *(SKIPPED.format(name, OPTIONAL[name]) for name in absent),
        "| Module | Covered | Statements missed | Branches missed | Functions that are not whole |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    files = {path.removeprefix(LIBRARY): each for path, each in found["files"].items()}
    partly = {name: each for name, each in files.items() if _missed(each["summary"])}
    for name, each in sorted(partly.items(), key=lambda item: (item[1]["summary"]["percent_covered"], item[0])):
        said = each["summary"]
        functions = ", ".join(_functions(each["functions"]))
        lines.append(
            f"| `{name}` | {said['percent_covered']:.0f}% | {said['missing_lines']} | {said['missing_branches']} "
            f"| {functions} |"
        )
    whole = sorted(set(files) - set(partly))
    return "\n".join([*lines, "", f"Whole: {', '.join(f'`{name}`' for name in whole) or 'none'}.", ""])


def _functions(functions: dict[str, Any]) -> Iterator[str]:
    """The functions of a file that are not whole, those that never ran with a mark."""
    for name, each in functions.items():
        said = each["summary"]
        if _missed(said):
            never = said["covered_lines"] == 0 and said["num_statements"] > 0
            yield f"`{name or 'the module itself'}`{' (never)' if never else ''}"


def _missed(summary: dict[str, Any]) -> int:
    return int(summary["missing_lines"]) + int(summary["missing_branches"])


if __name__ == "__main__":
    lacking = [name for name in OPTIONAL if find_spec(name) is None]
    text = page(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), lacking)
    Path(sys.argv[2]).write_text(text, encoding="utf-8")
    print(sys.argv[2])
