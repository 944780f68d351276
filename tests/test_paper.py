"""Whether the paper holds no typed digit, stops at an undefined number, and is the same document each time."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from decodegap import numbers_paper, provenance, records, typeset, webpage
from decodegap.errors import BadInputError
from decodegap.paths import HERE, Places
from decodegap.typeset import TypesetError

# Digits that a person may type, each with its reason; everything else is measured, published or computed.
NAMES = {
    r"Qwen2\.5-7B|Llama-3\.1-8B|Mistral-7B-v0\.3": "names of models",
    r"\b[HA]100\b|\bH200\b|\bL40S\b|\bL4\b|GPU=h100": "names of cards",
    r"\bbf16\b|\bfp32\b|\bint4\b|\bNF4\b|ExLlamaV2": "names of number formats and kernels",
    r"sm\\_80|Python 3\.11 to 3\.13|Apache 2\.0": "requirements and a licence",
    r"95\\%": "the confidence that intervals are made for",
    r"batch-1|배치 크기 1": "the study's setting",
    r"\bE[1-4]\b": "names of experiments",
}
LAYOUT = re.compile(
    r"\\(?:cite|ref|label|input|includegraphics|bibliography\w*|usepackage|documentclass|set\w+|renew\w+|new\w+|"
    r"pdfvariable|hypersetup|graphicspath|AddToHook|begin|end)\b(?:\[[^\]]*\])?(?:\{[^{}]*\})*(?:\[[^\]]*\])?"
)
SMALLEST_PT = 7.0  # what many venues ask for in figures and tables
needs_tex = pytest.mark.skipif(bool(typeset.missing_tools()), reason="TeX is not installed (.ci/run installs it)")


def typed_digits(text: str) -> list[str]:
    """The digits of a TeX text that are neither layout nor on the list of names."""
    text = re.sub(r"(?<!\\)%.*", "", text)
    body = text.partition(r"\begin{document}")[2] or text
    for pattern in NAMES:
        body = re.sub(pattern, " ", body, flags=re.ASCII)
    return re.findall(r"\S*\d\S*", LAYOUT.sub(" ", body))


@pytest.fixture
def at(tmp_path: Path) -> Places:
    """A copy of what the document is made of."""
    here = Places(tmp_path / "checkout")
    shutil.copytree(HERE.paper, here.paper, ignore=shutil.ignore_patterns("build", "main.pdf", "paper.html"))
    shutil.copytree(HERE.figures, here.figures)
    return here


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """The PDF, built in a copy of this checkout's paper, beside the records behind it."""
    here = Places(tmp_path_factory.mktemp("paper") / "a checkout")
    shutil.copytree(HERE.results, here.results, ignore=shutil.ignore_patterns("local"))
    shutil.copytree(HERE.published.parent, here.published.parent)
    shutil.copytree(HERE.paper, here.paper, ignore=shutil.ignore_patterns("build", "main.pdf", "paper.html"))
    shutil.copytree(HERE.figures, here.figures)
    typeset.pdf(1_780_000_000, here)
    return here


@pytest.mark.parametrize("name", typeset.TEX_FILES)
def test_no_measured_digit_is_typed(name: str) -> None:
    assert typed_digits((HERE.paper / name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", ["takes 17.3 ms", r"\begin{document} a speed-up of 2.5", "81\\% on an L4", "약 3배"])
def test_a_typed_digit_is_found(text: str) -> None:
    assert typed_digits(text)


def test_every_macro_of_the_text_is_generated_or_tex() -> None:
    for name in ("abstract_en", "abstract_ko"):
        text = webpage.abstract(name)
        assert not re.search(r"[\\{}]|text[a-z]{3,}", text), text
        assert "–" in text, "an interval has a dash"
    used = set(typeset.MACRO.findall((HERE.paper / "abstract_en.tex").read_text(encoding="utf-8")))
    korean = set(typeset.MACRO.findall((HERE.paper / "abstract_ko.tex").read_text(encoding="utf-8")))
    assert used == korean, "both abstracts say the same numbers"


def test_every_number_that_the_text_quotes_is_generated() -> None:
    """TeX stops at an undefined one; this says so without TeX. TeX's own commands begin with small letters."""
    text = "\n".join(typeset.texts())
    own = set(re.findall(r"\\newcommand\{\\([A-Z]\w+)\}", text))
    quoted = set(re.findall(r"(?<!\\)\\([A-Z][A-Za-z]+)", text)) - {"AddToHook", "LaTeX", "P", "S", "TeX"}
    assert sorted(quoted - own - set(typeset.macros())) == []


def test_an_undefined_number_stops_the_page(at: Places) -> None:
    path = at.paper / "abstract_en.tex"
    path.write_text(path.read_text(encoding="utf-8") + "\\SpeedOfLight", encoding="utf-8")
    with pytest.raises(BadInputError, match=r"\\SpeedOfLight"):
        webpage.build(at)


def test_the_page_is_one_file_the_same_bytes_with_everything_in_it(at: Places) -> None:
    first = webpage.build(at).read_bytes()
    assert webpage.build(at).read_bytes() == first
    page = first.decode()
    assert page.count("data:image/png") == len(list(at.figures.glob("*.png")))
    assert page.count("<table") >= len(list(at.generated.glob("*.md")))
    assert "초록" in page
    assert webpage.abstract("abstract_ko", at)[:40] in page
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page)
    assert 'alt="figure heatmap"' in page


def test_a_value_not_yet_measured_prints_nm(at: Places) -> None:
    path = at.generated / "numbers.tex"
    measured = path.read_text(encoding="utf-8")
    path.write_text(re.sub(r"(?<=\{\\PairRatio\}\{)[^}]+", "n/m", measured), encoding="utf-8")
    assert typeset.macros(at)["PairRatio"] == "n/m"
    assert "gives a speed-up of n/m" in webpage.abstract("abstract_en", at).replace("\n", " ")


def test_every_generated_quantity_is_quoted_for_some_cell(at: Places) -> None:
    assert typeset.unused(at) == []
    (at.paper / "main.tex").write_text("nothing", encoding="utf-8")
    idle = typeset.unused(at)
    assert "StudySaved" in idle
    assert "SessionsAll" not in idle, "the appendix quotes it"
    families = [numbers_paper.quantity(name) for name in idle]
    assert len(set(families)) == len(families), "one macro stands for its quantity"


@pytest.mark.parametrize(
    ("name", "quantity"),
    [
        ("ArmRateSixFourGraphStaticShort", "ArmRate"),
        ("StepHTwoZeroZeroQwenSixteenK", "Step"),
        ("PublishedFractionMaxLFourZeros", "PublishedFractionMax"),
        ("SessionsAll", "SessionsAll"),
        ("PairIntervalT", "PairIntervalT"),
    ],
)
def test_a_macro_without_its_cell_is_its_quantity(name: str, quantity: str) -> None:
    assert numbers_paper.quantity(name) == quantity


def test_without_tex_the_page_is_built_and_the_packages_are_named(tmp_path: Path) -> None:
    code = "from decodegap import verbs_review; verbs_review.document()"
    env = os.environ | {"PYTHONPATH": str(HERE.root / "artifact"), "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    page, why = done.stdout.splitlines()
    assert page.endswith("paper.html")
    assert why == f"no PDF: latexmk is not installed ({typeset.INSTALL})"


@needs_tex
@pytest.mark.slow
def test_the_pdf_has_the_same_bytes_in_another_folder(built: Places, at: Places) -> None:
    assert typeset.pdf(1_780_000_000, at).read_bytes() == (built.paper / "main.pdf").read_bytes()


@needs_tex
@pytest.mark.slow
def test_the_pdf_leads_to_the_records_behind_it(built: Places) -> None:
    for command in (["init", "-q"], ["-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-qm", "No file yet",
                    "--allow-empty"]):  # fmt: skip
        subprocess.run(["git", *command], cwd=built.root, check=True)
    said = provenance.lines(str(built.paper / "main.pdf"), built.local, built)
    count = sum(1 for folder in built.results.iterdir() for _ in records.files(built.results, folder.name))
    assert f"made from {count} records" in said[0]
    assert said[1] == "commit: none, the file is this machine's own"


@needs_tex
@pytest.mark.slow
def test_an_undefined_number_stops_the_pdf_and_is_named(at: Places) -> None:
    text = (at.paper / "main.tex").read_text(encoding="utf-8")
    (at.paper / "main.tex").write_text(text.replace(r"\ClaimsAll{}", r"\SpeedOfLight{}"), encoding="utf-8")
    with pytest.raises(TypesetError, match=r"Undefined control sequence.*SpeedOfLight") as caught:
        typeset.pdf(1_780_000_000, at)
    assert "\n" not in str(caught.value)
    assert not (at.paper / "main.pdf").exists()


@needs_tex
@pytest.mark.slow
def test_nothing_sticks_out_and_nothing_is_unresolved(built: Places) -> None:
    assert typeset.overfull(built) == []
    log = (built.paper / "build" / "main.log").read_text(encoding="utf-8", errors="replace")
    assert not re.findall(r"(?:Reference|Citation) .* undefined", log)
    assert "Missing character" not in log
    assert "Float too large" not in log


@needs_tex
@pytest.mark.slow
def test_no_table_is_too_small_to_read(built: Places) -> None:
    sizes = typeset.table_letters_pt(built)
    assert len(sizes) > len(list(built.generated.glob("*.md"))), "each generated table and those typed in the text"
    assert min(sizes) >= SMALLEST_PT


@needs_tex
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdffonts") is None, reason="poppler-utils is not installed")
def test_the_pdf_embeds_its_fonts_and_can_be_read(built: Places) -> None:
    pdf = str(built.paper / "main.pdf")
    rows = subprocess.run(["pdffonts", pdf], capture_output=True, text=True, check=True).stdout.splitlines()[2:]
    assert any("NanumMyeongjo" in row for row in rows)
    assert not [row for row in rows if "Type 3" in row]
    assert all(row.split()[-5] == "yes" for row in rows), "every font is embedded"
    info = subprocess.run(["pdfinfo", pdf], capture_output=True, text=True, check=True).stdout
    pages = int(re.findall(r"Pages: +(\d+)", info)[0])
    assert 6 <= pages <= 24
    text = subprocess.run(["pdftotext", pdf, "-"], capture_output=True, text=True, check=True).stdout
    assert "토큰 하나를 만들려면" in text.replace("\n", " ")
    assert "??" not in text
    assert typeset.macros(built)["PairRatio"] in text
    assert "Artifact appendix" in text
