"""How the paper becomes a document: a PDF where TeX is installed, and an HTML page everywhere."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from decodegap.errors import DecodeGapError
from decodegap.paths import HERE, Places

DEBIAN_PACKAGES = (
    "latexmk texlive-luatex texlive-latex-recommended texlive-lang-korean fonts-nanum texlive-fonts-recommended"
)
INSTALL = f"Debian: apt-get install {DEBIAN_PACKAGES}"
LONGEST_S = 900
NO_PDF = "no PDF, while everything else is there"
SYSTEM_FONTS = "/usr/share/fonts"
TEX_FILES = ("main.tex", "abstract_en.tex", "abstract_ko.tex", "appendix.tex")
MACRO = re.compile(r"\\([A-Za-z]+)")
DEFINED = re.compile(r"\\newcommand\{\\([A-Za-z]+)\}\{(.*)\}$", re.MULTILINE)


class TypesetError(DecodeGapError):
    """TeX stopped: an undefined macro, a missing file or a missing package."""

    exit_code = 1


def missing_tools() -> list[str]:
    """The programs that a PDF needs and this machine lacks."""
    return [tool for tool in ("latexmk", "lualatex") if shutil.which(tool) is None]


def pdf(epoch_s: int, at: Places = HERE) -> Path:
    """Build `paper/main.pdf` in `paper/build` and return it; the same records and TeX version give the same bytes.

    Raises `TypesetError` with TeX's first error.
    """
    build = at.paper / "build"
    build.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TEXMF")}
    env = kept | {
        "SOURCE_DATE_EPOCH": str(epoch_s),
        "FORCE_SOURCE_DATE": "1",  # \today too
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
        "TEXMFVAR": str(build / "texmf"),  # font caches, not in the user's home
        "OSFONTDIR": os.environ.get("OSFONTDIR", SYSTEM_FONTS),
        "max_print_line": "1000",  # log lines in one piece
    }
    command = ["latexmk", "-norc", "-g", "-lualatex", "-bibtex", "-halt-on-error", "-interaction=nonstopmode",
               "-file-line-error", "-output-directory=build", "main.tex"]  # fmt: skip
    target = at.paper / "main.pdf"
    for older in (target, build / "main.log"):  # a PDF that would pass for that of newer tables, an error long mended
        older.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command, cwd=at.paper, env=env, capture_output=True, text=True, errors="replace", check=False,
            timeout=LONGEST_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TypesetError(f"{NO_PDF}: latexmk did not end within {LONGEST_S} s; see paper/build/main.log") from None
    if done.returncode:
        error = _first_error(build / "main.log", done.stdout)
        way_out = INSTALL if "not found" in error or "cannot be found" in error else "see paper/build/main.log"
        raise TypesetError(f"{NO_PDF}: paper/main.tex: {error}; {way_out}")
    shutil.copyfile(build / "main.pdf", target)
    return target


def macros(at: Places = HERE) -> dict[str, str]:
    """The generated macros, name to text as TeX reads it."""
    return dict(DEFINED.findall((at.generated / "numbers.tex").read_text(encoding="utf-8")))


def unused(at: Places = HERE) -> list[str]:
    """The generated quantities that the paper quotes for no cell at all, each by one of its macros.

    A quantity is generated for every arm and context, so that the text may speak of any; one that it never speaks of
    has no reason to be there.
    """
    from decodegap.numbers_paper import quantity

    used = {quantity(name) for text in texts(at) for name in MACRO.findall(text)}
    idle: dict[str, str] = {}
    for name in sorted(macros(at)):
        if quantity(name) not in used:
            idle.setdefault(quantity(name), name)
    return list(idle.values())


def texts(at: Places = HERE) -> Iterable[str]:
    """The paper's own TeX files, those that a person writes."""
    return [(at.paper / name).read_text(encoding="utf-8") for name in TEX_FILES]


def overfull(at: Places = HERE) -> list[str]:
    """TeX's warnings of lines or tables that stick out of their column by more than a point."""
    log = (at.paper / "build" / "main.log").read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"^(Overfull \\hbox \((\d+\.\d+)pt too wide\).*)$", log, re.MULTILINE)
    return [line for line, points in found if float(points) > 1.0]


def table_letters_pt(at: Places = HERE) -> list[float]:
    """The size of each table's letters as printed (pt), in order, by what TeX's log says of its width and scaling."""
    log = (at.paper / "build" / "main.log").read_text(encoding="utf-8", errors="replace")
    found = re.findall(r"^table ([\d.]+)pt wide in ([\d.]+)pt, letters of ([\d.]+) ?pt", log, re.MULTILINE)
    return [float(size) * min(1.0, float(room) / float(width)) for width, room, size in found]


def _first_error(log: Path, printed: str) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else printed
    found = re.search(r"^(?:\S+?:\d+: |! )(.+)$\n?(.*)$\n?(.*)$", text, re.MULTILINE)
    if not found:
        return printed.strip().splitlines()[-1][:200] if printed.strip() else "latexmk failed"
    named = re.search(r"\\[A-Za-z]+\s*$", found[2]) if "Undefined" in found[1] else None
    return f"{found[1].strip()[:160]}{' ' + named[0].strip() if named else ''}"
