"""Whether what the guides tell a reader to type, open or look at is there."""

import re
from pathlib import Path

import pytest

from decodegap import exhibits
from decodegap.paths import HERE

GUIDES = ("README.md", "artifact/README.md", "figures/README.md", "paper/appendix.tex", "paper/main.tex")


def text_of(guide: str) -> str:
    return (HERE.root / guide).read_text(encoding="utf-8")


@pytest.mark.parametrize("guide", GUIDES)
def test_every_make_target_is_there(guide: str) -> None:
    makefile = text_of("Makefile")
    start = r"(?:`|^)" if guide.endswith(".md") else r"\\code\{"
    commands = re.findall(start + r"make ((?:[a-z][a-z-]*(?:NAME)? ?)+)(?![A-Z=])", text_of(guide), re.MULTILINE)
    targets = {target for command in commands for target in command.split()}
    assert targets
    for target in targets:
        kind, _, name = target.partition("-")
        if kind in ("figure", "table"):
            known = exhibits.FIGURES if kind == "figure" else [*exhibits.TABLES, "claims", "costs"]
            assert name in {*known, "NAME", ""}, f"{guide}: make {target}"
        else:
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{guide}: make {target}"


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide.endswith(".md")])
def test_every_link_leads_somewhere(guide: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text_of(guide))
    for link in links:
        assert ((HERE.root / guide).parent / link).resolve().exists(), f"{guide}: {link}"


def test_the_guide_names_every_figure_and_table() -> None:
    named = set(re.findall(r"`([a-z-]+)`", text_of("artifact/README.md")))
    assert {*exhibits.FIGURES, *exhibits.TABLES, "claims"} <= named


def test_every_figure_and_table_is_in_the_paper() -> None:
    paper = text_of("paper/main.tex")
    assert set(re.findall(r"includegraphics\[[^\]]*\]\{([\w-]+)\}", paper)) == set(exhibits.FIGURES)
    shown = set(re.findall(r"input\{generated/([\w-]+)\}", paper))
    assert {*exhibits.TABLES, "claims", "costs", "numbers", "findings"} == shown


def test_generated_files_are_all_made_by_a_known_table() -> None:
    known = {*exhibits.TABLES, "claims", "costs", "numbers", "findings"}
    assert {Path(name).stem for name in map(str, HERE.generated.iterdir())} == known
