"""Whether what the paper says of sessions that ship no more is what git holds, and what the README says is so."""

import re
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from exhibiting import STUDY
from factory import rehashed
from factory_ladder import rungs

from decodegap import plan_ladder, report, withdrawn
from decodegap.errors import BadInputError
from decodegap.paths import HERE

LADDER = [record for record in report.shipped(HERE) if record.cell.experiment == plan_ladder.EXPERIMENT]
Groups = tuple[withdrawn.Withdrawn, ...]
MISTRAL = "mistral-7b-v0.3"
KEPT = {1: 4300.0, 2: 4100.0, 3: 4200.0}  # session -> what a card read in it (GB/s)


@pytest.mark.parametrize("file", withdrawn.COMMITS, ids=lambda file: file.stem)
def test_the_file_says_what_git_holds(file: Path) -> None:
    try:
        found = withdrawn.from_git(HERE.root, file)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this checkout has no such history")
    assert withdrawn.text(found) == file.read_text(encoding="utf-8")


BROKEN = ["", "{}", "[{}]", '[{"commit": "x", "reason": "y", "sessions": [{"ctx": "z"}]}]']
WHOLE = withdrawn.REPLACED.read_text(encoding="utf-8")
NO_STEP = [re.sub(r'"fused": [\d.]+', f'"fused": {value}', WHOLE, count=1) for value in ("0", "NaN")]


@pytest.mark.parametrize("content", [*BROKEN, *NO_STEP])
def test_a_broken_file_is_one_line_that_names_it(content: str, tmp_path: Path) -> None:
    (file := tmp_path / "replaced.json").write_text(content, encoding="utf-8")
    with pytest.raises(BadInputError, match=r"^replaced\.json: not what it came as: [^\n]*; git has it$"):
        withdrawn.load(file)


@pytest.mark.parametrize(
    ("file", "kept", "told"),
    [
        (withdrawn.TAKEN_BACK, lambda found: (), "its commits are others"),
        (withdrawn.REPLACED, lambda found: found[1:], "its commits are others"),
        (withdrawn.REPLACED, lambda found: without(found, "mistral"), "3ebcbed has no fused of mistral-7b-v0.3 2048"),
        (withdrawn.REPLACED, lambda found: without(found, "_int4_"), "2e6cf7d has no fused-int4 of qwen2.5-7b 2048"),
    ],
)
def test_a_file_that_lacks_what_the_paper_says_is_one_line_that_names_it(
    file: Path, kept: Callable[[Groups], Groups], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (other := tmp_path / file.name).write_text(withdrawn.text(kept(withdrawn.load(file))), encoding="utf-8")
    monkeypatch.setitem(withdrawn.COMMITS, other, withdrawn.COMMITS[file])
    monkeypatch.setattr(withdrawn, "TAKEN_BACK" if file == withdrawn.TAKEN_BACK else "REPLACED", other)
    with pytest.raises(BadInputError, match=rf"^{file.name}: not what it came as: {told}; git has it$"):
        withdrawn.macros(LADDER, STUDY)


def without(groups: Groups, kind: str) -> Groups:
    """`groups` less the sessions whose path has `kind` in it."""
    kept = (tuple(each for each in group.sessions if kind not in each.path) for group in groups)
    return tuple(group.model_copy(update={"sessions": some}) for group, some in zip(groups, kept, strict=True))


def test_no_session_that_was_taken_away_is_shipped() -> None:
    every = [each.content_hash for file in withdrawn.COMMITS for each in sessions(file)]
    gone = set(every)
    assert len(gone) == len(every)
    assert not gone & {record.content_hash for record in report.shipped(HERE)}


def test_how_far_the_kept_steps_are_from_the_replaced_ones() -> None:
    some = withdrawn.macros(LADDER, STUDY)
    replaced = withdrawn.load(withdrawn.REPLACED)
    found = [apart(group) for group in replaced]
    assert [len(each) for each in found[:2]] == [5, 5]
    every = [each for group in found for each in group]
    assert (some["ReplacedApartMin"], some["ReplacedApartMax"]) == (f"{min(every):.1%}", f"{max(every):.1%}")
    same = found[withdrawn.SAME_TILES]
    assert (some["SameApartMin"], some["SameApartMax"]) == (f"{min(same):.1%}", f"{max(same):.1%}")


def apart(group: withdrawn.Withdrawn) -> list[float]:
    """For each cell by how much the mean of its kept fused steps is off that of the group's."""
    old: dict[tuple[str, int], list[float]] = {}
    for each in group.sessions:
        if "fused" in each.steps_ms:
            old.setdefault((each.model, each.ctx), []).append(each.steps_ms["fused"])
    found = []
    for (model, ctx), steps_ms in old.items():
        wanted = [r for r in LADDER if (r.cell.model, r.cell.ctx) == (model, ctx)]
        kept = [s.step_ms for r in wanted for s in r.series if s.arm == "fused" and s.step_ms]
        found.append(statistics.fmean(kept) / statistics.fmean(steps_ms) - 1)
    return found


def sessions(*files: Path) -> list[withdrawn.Session]:
    """All sessions that these files name, in their order."""
    return [each for file in files for group in withdrawn.load(file) for each in group.sessions]


def test_its_numbers_are_of_its_sessions_and_of_the_kept_ones() -> None:
    none, some = withdrawn.macros([], STUDY), withdrawn.macros(LADDER, STUDY)
    assert set(none) == set(some)
    same = withdrawn.load(withdrawn.REPLACED)[withdrawn.SAME_TILES]
    mistral = [each for each in same.sessions if each.model == MISTRAL and "fused" in each.steps_ms]
    steps, rates = [each.steps_ms["fused"] for each in mistral], [each.read_gb_s / 1e3 for each in mistral]
    for found in (none, some):
        for name, gone in (("Withdrawn", sessions(withdrawn.TAKEN_BACK)), ("Replaced", sessions(withdrawn.REPLACED))):
            assert found[f"{name}Sessions"] == str(len(gone))
            assert found[f"{name}Hosts"] == str(len({each.host_tag for each in gone}))
        assert found["SameSessions"] == str(len(same.sessions))
        assert found["SameStepMistralTwoK"] == f"{min(steps):.2f}–{max(steps):.2f}"
        assert found["SameReadMistralTwoK"] == f"{min(rates):.2f}–{max(rates):.2f}"
        assert found["SameMissMistralTwoK"] == f"{statistics.fmean(steps) / 3.42 - 1:.1%}"
        assert found["ReplacedCommits"].split(", ")[withdrawn.SAME_TILES] == same.commit[:7]
    earlier = withdrawn.load(withdrawn.REPLACED)[withdrawn.EARLIER_INT4].sessions
    fused, int4 = ([s.steps_ms[arm] for s in earlier if arm in s.steps_ms] for arm in ("fused", "fused-int4"))
    assert (len(fused), len(int4)) == (3, 3)
    assert [some["EarlierStepFused"], some["EarlierStepInt"]] == [f"{sum(steps) / 3:.2f}" for steps in (fused, int4)]
    assert none["EarlierGainInt"] == some["EarlierGainInt"] == f"{sum(fused) / sum(int4):.2f}"
    assert none["WithdrawnApartMax"] == none["SameApartMin"] == none["KeptReadMistralTwoK"] == "n/m"
    assert some["SameReadMistralTwoK"] < some["KeptReadMistralTwoK"]


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
    assert said["MustMistralTwoK"] == "3.42"
    off = [step_ms / mean_ms(model) - 1 for model, step_ms in (("qwen2.5-7b", 3.4), (MISTRAL, 4.0))]
    assert [said["WithdrawnApartMin"], said["WithdrawnApartMax"]] == [f"{each:.1%}" for each in off]
    assert off[0] < 0 < off[1]


def mean_ms(model: str) -> float:
    """The mean fused step of the sessions that were taken back, at 2048 tokens."""
    gone = sessions(withdrawn.TAKEN_BACK)
    return statistics.fmean(each.steps_ms["fused"] for each in gone if (each.model, each.ctx) == (model, 2048))


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
    ]
    assert quoted("LadderMustsMissed") == "0"
    missed, goals = quoted("LadderGoalsMissed"), quoted("LadderGoals")
    assert f" {missed} of {goals} goals " in said or f" {goals}개 가운데 {missed}개는 " in said


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_the_readme_names_memory_enough_for_the_ladder(name: str) -> None:
    (row,) = (line for line in (HERE.root / name).read_text(encoding="utf-8").splitlines() if "30 GB" in line)
    short, long, int4 = (float(found) for found in re.findall(r"(\d+) GB", row))
    for record in LADDER:
        allowed = int4 if record.cell.arm == "int4" else long if record.cell.ctx > 2048 else short
        assert (record.peak_memory_bytes or 0) <= allowed * 1e9, record.cell
