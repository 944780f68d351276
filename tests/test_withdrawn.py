"""Whether what the paper says of sessions that ship no more is what git holds, and what the README says is so."""

import re
import statistics
import subprocess
from pathlib import Path

import pytest
from exhibiting import STUDY
from factory import rehashed
from factory_ladder import rungs

from decodegap import plan_ladder, report, withdrawn
from decodegap.paths import HERE

LADDER = [record for record in report.shipped(HERE) if record.cell.experiment == plan_ladder.EXPERIMENT]
MISTRAL = "mistral-7b-v0.3"
KEPT = {1: 4300.0, 2: 4100.0, 3: 4200.0}  # session -> what a card read in it (GB/s)


@pytest.mark.parametrize("file", withdrawn.COMMITS, ids=lambda file: file.stem)
def test_the_file_says_what_git_holds(file: Path) -> None:
    try:
        found = withdrawn.from_git(HERE.root, file)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this checkout has no such history")
    assert withdrawn.text(found) == file.read_text(encoding="utf-8")


def test_no_session_that_was_taken_away_is_shipped() -> None:
    gone = {each.content_hash for file in withdrawn.COMMITS for each in withdrawn.load(file).sessions}
    assert len(gone) == sum(len(withdrawn.load(file).sessions) for file in withdrawn.COMMITS)
    assert not gone & {record.content_hash for record in report.shipped(HERE)}


def test_how_far_the_kept_steps_are_from_the_replaced_ones() -> None:
    some = withdrawn.macros(LADDER, STUDY)
    old: dict[tuple[str, int], list[float]] = {}
    for each in withdrawn.load(withdrawn.REPLACED).sessions:
        if "fused" in each.steps_ms:
            old.setdefault((each.model, each.ctx), []).append(each.steps_ms["fused"])
    apart = []
    for (model, ctx), steps_ms in old.items():
        wanted = [r for r in LADDER if (r.cell.model, r.cell.ctx) == (model, ctx)]
        kept = [s.step_ms for r in wanted for s in r.series if s.arm == "fused" and s.step_ms]
        apart.append(statistics.fmean(kept) / statistics.fmean(steps_ms) - 1)
    assert len(apart) == 5
    assert (some["ReplacedApartMin"], some["ReplacedApartMax"]) == (f"{min(apart):.1%}", f"{max(apart):.1%}")


def test_its_numbers_are_of_its_sessions_and_of_the_kept_ones() -> None:
    none, some = withdrawn.macros([], STUDY), withdrawn.macros(LADDER, STUDY)
    assert set(none) == set(some)
    sessions = withdrawn.load().sessions
    mistral = [each for each in sessions if each.model == MISTRAL]
    steps, rates = [each.steps_ms["fused"] for each in mistral], [each.read_gb_s / 1e3 for each in mistral]
    for found in (none, some):
        assert found["WithdrawnSessions"] == str(len(sessions))
        assert found["WithdrawnHosts"] == str(len({each.host_tag for each in sessions}))
        assert found["WithdrawnStepMistralTwoK"] == f"{min(steps):.2f}–{max(steps):.2f}"
        assert found["WithdrawnMeanMistralTwoK"] == f"{statistics.fmean(steps):.2f}"
        assert found["WithdrawnReadMistralTwoK"] == f"{min(rates):.2f}–{max(rates):.2f}"
    assert none["WithdrawnApartMax"] == none["MissMistralTwoK"] == none["KeptReadMistralTwoK"] == "n/m"
    assert some["WithdrawnReadMistralTwoK"] > some["KeptReadMistralTwoK"]


def test_the_kept_ones_are_those_of_the_same_cell_step_and_card() -> None:
    kept = [rungs("rungs", {"fused": 4.0}, session=n, model=MISTRAL, read_gb_s=rate) for n, rate in KEPT.items()]
    elsewhere = kept[0].cell.model_copy(update={"experiment": "baseline"})
    others = [
        rungs("rungs", {"fused": 3.4}, model="qwen2.5-7b", read_gb_s=5000.0),
        rungs("rungs", {"fused": 3.0}, model=MISTRAL, ctx=16384, read_gb_s=5000.0),
        rungs("rungs", {"fused": 3.0}, model=MISTRAL, gpu="h100", read_gb_s=5000.0),
        rungs("compiled", {"compiled": 3.0}, model=MISTRAL, read_gb_s=5000.0),
        rehashed(rungs("rungs", {"fused": 3.0}, model=MISTRAL, read_gb_s=5000.0), cell=elsewhere),
    ]
    said = withdrawn.macros([*others, *kept], STUDY)
    assert said["KeptReadMistralTwoK"] == "4.10–4.30"
    assert said["MissMistralTwoK"] == f"{4.0 / float(said['MustMistralTwoK']) - 1:.1%}"
    apart = [step_ms / mean_ms(model) - 1 for model, step_ms in (("qwen2.5-7b", 3.4), (MISTRAL, 4.0))]
    assert [said["WithdrawnApartMin"], said["WithdrawnApartMax"]] == [f"{each:.1%}" for each in apart]
    assert apart[0] < 0 < apart[1]


def mean_ms(model: str) -> float:
    """The mean fused step of the sessions that were taken back, at 2048 tokens."""
    sessions = withdrawn.load().sessions
    return statistics.fmean(each.steps_ms["fused"] for each in sessions if (each.model, each.ctx) == (model, 2048))


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
        f"{float(quoted('LadderFractionFusedQwenTwoK')):.2f}",
        f"{float(quoted('LadderGainInt')):.1f}",
        f"{float(quoted('LadderPromiseReadInt')):.1f}",
        quoted("MissMistralTwoK").rstrip("%"),
    ]
    assert quoted("LadderMustsMissed") == "1"
    missed, goals = quoted("LadderGoalsMissed"), quoted("LadderGoals")
    assert f" {missed} of {goals} goals " in said or f" {goals}개 가운데 {missed}개는 " in said


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_the_readme_names_memory_enough_for_the_ladder(name: str) -> None:
    (row,) = (line for line in (HERE.root / name).read_text(encoding="utf-8").splitlines() if "30 GB" in line)
    short, long, int4 = (float(found) for found in re.findall(r"(\d+) GB", row))
    for record in LADDER:
        allowed = int4 if record.cell.arm == "int4" else long if record.cell.ctx > 2048 else short
        assert (record.peak_memory_bytes or 0) <= allowed * 1e9, record.cell
