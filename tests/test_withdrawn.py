"""Whether what the paper says of sessions that were taken back is what git holds, and what the README says is so."""

import re
import subprocess

import pytest
from exhibiting import STUDY

from decodegap import plan_ladder, report, withdrawn
from decodegap.paths import HERE

LADDER = [record for record in report.shipped(HERE) if record.cell.experiment == plan_ladder.EXPERIMENT]


def test_the_file_says_what_git_holds() -> None:
    try:
        found = withdrawn.from_git(HERE.root)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this checkout has no such history")
    assert withdrawn.text(found) == withdrawn.FILE.read_text(encoding="utf-8")


def test_no_withdrawn_session_is_shipped() -> None:
    gone = {each.content_hash for each in withdrawn.load().sessions}
    assert gone
    assert not gone & {record.content_hash for record in report.shipped(HERE)}


def test_its_numbers_are_of_its_sessions_and_of_the_kept_ones() -> None:
    none, some = withdrawn.macros([], STUDY), withdrawn.macros(LADDER, STUDY)
    assert set(none) == set(some)
    sessions = withdrawn.load().sessions
    assert none["WithdrawnSessions"] == some["WithdrawnSessions"] == str(len(sessions))
    mistral = [each.steps_ms["fused"] for each in sessions if each.model == "mistral-7b-v0.3"]
    assert some["WithdrawnStepMistralTwoK"] == f"{min(mistral):.2f}–{max(mistral):.2f}"
    assert none["WithdrawnApartMax"] == none["MissMistralTwoK"] == "n/m"
    assert float(some["WithdrawnApartMin"].rstrip("%")) <= float(some["WithdrawnApartMax"].rstrip("%"))
    kept = [r.machine.read_gb_s for r in LADDER if (r.cell.model, r.cell.arm) == ("mistral-7b-v0.3", "rungs")]
    assert some["KeptReadMistralTwoK"].split("–")[0] == f"{min(kept) / 1e3:.2f}"
    assert none["KeptReadMistralTwoK"] == "n/m"
    assert some["WithdrawnReadMistralTwoK"] == none["WithdrawnReadMistralTwoK"] > some["KeptReadMistralTwoK"]


def quoted(name: str) -> str:
    """A number that the paper quotes, as it stands in the generated file."""
    numbers = (HERE.generated / "numbers.tex").read_text(encoding="utf-8")
    found = re.search(rf"\\{name}}}\{{(.*)\}}$", numbers, re.MULTILINE)
    assert found, name
    return found[1].replace("\\%", "%")


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_the_readme_says_of_the_ladder_what_the_records_say(name: str) -> None:
    lines = (HERE.root / name).read_text(encoding="utf-8").split("\n\n")
    (said,) = (" ".join(part.split()) for part in lines if "fused" in part and "claims.md" in part)
    assert re.findall(r"\d+\.\d+(?=%| |배|에)", said.replace("Qwen2.5", "").replace("v0.3", "")) == [
        quoted("LadderFractionFusedQwenTwoK"),
        f"{float(quoted('LadderGainInt')):.1f}",
        f"{float(quoted('LadderPromiseReadInt')):.1f}",
        quoted("MissMistralTwoK").rstrip("%"),
    ]
    assert quoted("LadderMustsMissed") == "1"
    goals = [quoted("LadderGoalsMissed"), quoted("LadderGoals")]
    assert sorted(re.findall(r"\b(\d)(?= goals| of 6|개)", said)) == sorted(goals)


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_the_readme_names_memory_enough_for_the_ladder(name: str) -> None:
    (row,) = (line for line in (HERE.root / name).read_text(encoding="utf-8").splitlines() if "30 GB" in line)
    short, long, int4 = (float(found) for found in re.findall(r"(\d+) GB", row))
    for record in LADDER:
        allowed = int4 if record.cell.arm == "int4" else long if record.cell.ctx > 2048 else short
        assert (record.peak_memory_bytes or 0) <= allowed * 1e9, record.cell
