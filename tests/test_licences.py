"""The licence page names every package that the locks pin, and no licence is a blank."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)


def load() -> ModuleType:
    """requirements/licences.py as a module."""
    spec = importlib.util.spec_from_file_location("licences", ROOT / "requirements/licences.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_locks_pin() -> None:
    licences = load()
    rows = [row for row in ROW.findall(licences.PAGE.read_text()) if row[0] not in ("Package", "---")]
    pinned = [pin for name in licences.SETS for pin in licences.pins(name)]
    assert [row[:2] for row in rows] == pinned
    assert len(pinned) > 100
    assert all(row[2].strip() for row in rows)
    licences_here = {package: licences.licence(package) for package in ("numpy", "pydantic", "torch")}
    assert all(re.search(r"BSD|MIT|Apache", text) for text in licences_here.values()), licences_here
    assert licences.licence("no-such-package-here").startswith("not needed by the Python")


def test_check_notices_another_page(tmp_path: Path) -> None:
    licences = load()
    licences.PAGE = tmp_path / "licences.md"
    before = sys.argv
    try:
        sys.argv = ["licences.py", "--check"]
        assert licences.main() == 1
        licences.PAGE.write_text(licences.page())
        assert licences.main() == 0
    finally:
        sys.argv = before
