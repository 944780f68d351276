"""Whether the page of coverage says what a real run of coverage found."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import uncovered

TESTED = """
def both(x):
    return "high" if x > 1 else "low"

def one(x):
    if x > 1:
        x = 1
    return x

def never():
    return 0
"""
CALLS = "import halves\nhalves.both(0), halves.both(2), halves.one(2)\n"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Coverage's report of a module whose functions are covered whole, in one of two branches, and never."""
    folder = tmp_path_factory.mktemp("covered")
    (folder / "halves.py").write_text(TESTED)
    (folder / "empty.py").write_text("X = 1\n")
    (folder / "calls.py").write_text(CALLS + "import empty\n")
    env = {key: value for key, value in os.environ.items() if not key.startswith("COV")}
    for command in (["run", "--branch", "--source=.", "calls.py"], ["json", "-q", "-o", "found.json"]):
        subprocess.run([sys.executable, "-m", "coverage", *command], cwd=folder, env=env, check=True, timeout=60)
    report: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return report


def test_functions_that_are_not_whole_are_named(found: dict[str, Any]) -> None:
    page = uncovered.page(found)
    assert "| `halves.py` | 80% | 1 | 1 | `one`, `never` (never) |" in page
    assert page.endswith("\nWhole: `calls.py`, `empty.py`.\n")
    total = re.search(r"In all: ([\d.]+)% .*; (\d+) of (\d+) statements, (\d+) of (\d+) branches", page)
    assert total
    assert [float(each) for each in total.groups()] == [85.7, 11, 12, 1, 2]


def test_packages_whose_tests_were_skipped_are_named(found: dict[str, Any]) -> None:
    assert "skipped" not in uncovered.page(found)
    said = uncovered.page(found, ["triton"])
    assert "\n\nTests that need triton were skipped, because it was not installed " in said
    assert "(`requirements/install.sh interpreter`).\n\n| Module |" in said


def test_a_report_without_branches_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="counts lines only"):
        uncovered.page(found | {"meta": {"branch_coverage": False}})


def test_make_coverage_writes_the_page() -> None:
    recipe = (Path(__file__).resolve().parents[1] / "Makefile").read_text().partition("\ncoverage:")[2].split("\n\n")[0]
    assert "--cov-report=json:" in recipe
    assert "tests/uncovered.py build/coverage.json docs/coverage.md" in recipe
