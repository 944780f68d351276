"""Whether what the guides tell a reader to type, open or look at is there."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from decodegap import exhibits, numbers_paper
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
def test_every_setting_of_a_make_command_is_read_by_a_target_of_it(guide: str) -> None:
    commands = re.findall(r"(?:`|^)make ([a-z][a-zA-Z -]* [A-Z]+=[^`\n]*)", text_of(guide), re.MULTILINE)
    env = {"PATH": os.environ["PATH"]}
    for command in {each.partition("#")[0] for each in commands}:
        done = subprocess.run(
            ["make", "-n", *command.split()], cwd=HERE.root, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{guide}: make {command}: {done.stderr}"


@pytest.mark.parametrize("guide", [guide for guide in GUIDES if guide.endswith(".md")])
def test_every_link_leads_somewhere(guide: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", text_of(guide))
    for link in links:
        assert ((HERE.root / guide).parent / link).resolve().exists(), f"{guide}: {link}"


def test_sizes_in_the_guides_are_the_measured_ones() -> None:
    disk = numbers_paper.disk()
    for guide in ("README.md", "README.ko.md"):
        rows = [line for line in text_of(guide).splitlines() if re.match(r"\|.*\d GB[^|]*\|$", line)]
        found = [re.findall(r"[\d.]+ GB", row)[-1] for row in rows]
        assert found == [disk["DiskReplay"], disk["DiskCpu"], disk["DiskGpu"].removeprefix("about ")], guide
    sizes = tomllib.loads(HERE.sizes.read_text(encoding="utf-8"))
    everything = sum(sizes[name]["mb"] for name in ("analysis", "measure", "dev")) / 1e3
    assert f"{disk['DiskReplay']} in `.venv`" in text_of("artifact/README.md")
    assert f"{everything:.1f} GB of `.venv`" in text_of("artifact/README.md")


SAME_TEXT = (
    r"`make [^`]+`",
    r"\b[A-Z]+=",
    r"\]\((?!README)([^)]+)\)",
    r"`[\w./<>-]+/`",
)  # commands, settings, links, places
SAME_NUMBER = (r"^\|.*\|$", r"^```$", r"^##? ", r"^- \*")  # table rows, code blocks, headings, terms


def test_both_readmes_have_the_same_commands_links_and_parts() -> None:
    english, korean = (text_of(name) for name in ("README.md", "README.ko.md"))
    for pattern in SAME_TEXT:
        one, other = (sorted(" ".join(each.split()) for each in re.findall(pattern, t)) for t in (english, korean))
        assert one == other, pattern
    for pattern in SAME_NUMBER:
        one, other = (re.findall(pattern, text, re.MULTILINE) for text in (english, korean))
        assert len(one) == len(other), pattern


def test_the_guide_names_every_figure_and_table() -> None:
    named = set(re.findall(r"`([a-z-]+)`", text_of("artifact/README.md")))
    assert {*exhibits.FIGURES, *exhibits.TABLES, "claims"} <= named


def test_every_figure_and_table_is_in_the_paper() -> None:
    paper = text_of("paper/main.tex")
    assert set(re.findall(r"includegraphics\[[^\]]*\]\{([\w-]+)\}", paper)) == set(exhibits.FIGURES)
    shown = set(re.findall(r"input\{generated/([\w-]+)\}", paper))
    assert {*exhibits.TABLES, "claims", "costs", "numbers", "findings", "missed"} == shown


def test_generated_files_are_all_made_by_a_known_table() -> None:
    known = {*exhibits.TABLES, "claims", "costs", "numbers", "findings", "missed"}
    assert {Path(name).stem for name in map(str, HERE.generated.iterdir())} == known
