"""Which ladder sessions were shipped once and taken back or replaced, what they timed, and why: never evidence.

Git alone holds their records. What the paper says of them was read there once and stands in small files, so that a
checkout without its history says it too; `python -m decodegap.withdrawn` writes them again.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, TypeAdapter

from decodegap import claims, git, plan_ladder, selection
from decodegap.errors import BadInputError
from decodegap.numbers import NOT_MEASURED, span
from decodegap.numbers_paper import GPU, MODEL, SHORT
from decodegap.paths import DATA, HERE, Places
from decodegap.published import Published
from decodegap.schema import Record

ARM, GROUP = plan_ladder.FUSED[-1], "rungs"  # the fused rung, and the sessions that it is measured in
TAKEN_BACK, REPLACED = DATA / "withdrawn.json", DATA / "replaced.json"
# For each file its commits, what each did to the records (git's letter), and why.
COMMITS = {
    TAKEN_BACK: (
        (
            "114b2a0c77c57f6f38bbb8f440db8650d48698c6",
            "D",
            "every rung was held against a step with other rotary frequencies, by a check that could not fail",
        ),
    ),
    REPLACED: (
        (
            "31e1ab0b76fbd4755c08272a8fc845e3e245fa6a",
            "M",
            "sound, and measured again on one host, with tiles that were searched on its own card",
        ),
        (
            "3ebcbed58ed327472ab7ef0b2f62d6c526913b19",
            "M",
            "sound, and measured again on one host, with three sessions of the compiled rung as well",
        ),
        (
            "2e6cf7dc005dc97854ef3e47c3d0cb96dafc78fa",
            "M",
            "sound, and measured again with other kernels of the int4 rung, beside the other rungs of its cell",
        ),
    ),
}
# Of what was replaced: those whose fused steps had the tiles of the kept ones, and those with earlier int4 kernels.
SAME_TILES, EARLIER_INT4 = 1, 2


class Session(BaseModel):
    """One session that ships no more: where git has its record, the card's read rate, and the rungs' steps (ms)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    path: str
    content_hash: str
    started_at: str
    host_tag: str
    model: str
    ctx: int
    read_gb_s: PositiveFloat
    steps_ms: dict[str, PositiveFloat] = Field(min_length=1)


class Withdrawn(BaseModel):
    """Sessions that one commit took away, and for which reason. Their records are in its parent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    commit: str
    reason: str
    sessions: tuple[Session, ...] = Field(min_length=1)


_FILE = TypeAdapter(tuple[Withdrawn, ...])


def load(file: Path = TAKEN_BACK) -> tuple[Withdrawn, ...]:
    """What this checkout says of them, a commit each; raises `BadInputError` for a file that is broken."""
    try:
        found = _FILE.validate_json(file.read_bytes())
    except ValueError as error:
        what = " ".join(str(error).split())[:200]
        raise BadInputError(f"{file.name}: not what it came as: {what}; git has it") from None
    if file in COMMITS and [each.commit for each in found] != [commit for commit, _, _ in COMMITS[file]]:
        raise BadInputError(f"{file.name}: not what it came as: its commits are others; git has it")
    return found


def from_git(root: Path, file: Path = TAKEN_BACK) -> tuple[Withdrawn, ...]:
    """The same, read from the history of the checkout at `root`.

    Raises `subprocess.CalledProcessError` where git does not hold the commits.
    """
    return tuple(_of_commit(root, *each) for each in COMMITS[file])


def _of_commit(root: Path, commit: str, done: str, reason: str) -> Withdrawn:
    wanted = ("--name-only", f"--diff-filter={done}", "--format=")
    listed = git.say(root, "show", *wanted, commit, "--", "artifact/results/*/ladder/*.json")
    records = ((path, json.loads(git.say(root, "show", f"{commit}^:{path}"))) for path in listed.split())
    found = tuple(
        Session(
            path=path,
            content_hash=each["content_hash"],
            started_at=each["started_at"],
            host_tag=each["machine"]["host_tag"],
            model=each["cell"]["model"],
            ctx=each["cell"]["ctx"],
            read_gb_s=each["machine"]["read_gb_s"],
            steps_ms={series["arm"]: series["step_ms"] for series in each["series"]},
        )
        for path, each in records
    )
    return Withdrawn(commit=commit, reason=reason, sessions=found)


def text(found: Sequence[Withdrawn]) -> str:
    """`found` as the file that holds it."""
    return _FILE.dump_json(tuple(found), indent=1).decode() + "\n"


def macros(shipped: Sequence[Record], study: Published, at: Places = HERE) -> dict[str, str]:
    """Name -> text: how many were taken away, their fused steps, and how far the kept ones are from them."""
    gone, replaced = load(TAKEN_BACK), load(REPLACED)
    mine = [record for record in shipped if record.cell.gpu == GPU]
    (must,) = (each for each in claims.load(at.claims, study) if each.id == "fused-mistral-2048")
    place = plan_ladder.EXPERIMENT, must.model, must.ctx
    machines = [record.machine for record in selection.sessions(mine, *place, GROUP)]
    read = [machine.read_gb_s for machine in machines if machine and machine.read_gb_s]
    same = replaced[SAME_TILES]
    mistral = _of_cell(same, ARM, must.model, must.ctx)
    earlier = {arm: _of_cell(replaced[EARLIER_INT4], arm, MODEL, SHORT) for arm in (ARM, plan_ladder.INT4)}
    bf16_ms, int4_ms = (_mean_ms(found, arm) for arm, found in earlier.items())
    return {
        **_counted("Withdrawn", gone, mine),
        **_counted("Replaced", replaced, mine),
        **_apart("Same", [same], mine),
        "SameStepMistralTwoK": span((each.steps_ms[ARM] for each in mistral), 2),
        "SameReadMistralTwoK": _tb_s(each.read_gb_s for each in mistral),
        "SameMissMistralTwoK": f"{_mean_ms(mistral, ARM) / must.expected - 1:.1%}",
        "EarlierStepFused": f"{bf16_ms:.2f}",
        "EarlierStepInt": f"{int4_ms:.2f}",
        "EarlierGainInt": f"{bf16_ms / int4_ms:.2f}",
        "KeptReadMistralTwoK": _tb_s(read),
        "MustMistralTwoK": f"{must.expected:.2f}",
    }


def _of_cell(gone: Withdrawn, arm: str, model: str | None, ctx: int | None) -> tuple[Session, ...]:
    """The sessions that timed an arm in a cell; raises `BadInputError` for none."""
    found = tuple(each for each in gone.sessions if (each.model, each.ctx) == (model, ctx) and arm in each.steps_ms)
    if not found:
        lacking = f"{gone.commit[:7]} has no {arm} of {model} {ctx}"
        raise BadInputError(f"{REPLACED.name}: not what it came as: {lacking}; git has it")
    return found


def _mean_ms(found: Iterable[Session], arm: str) -> float:
    return statistics.fmean(each.steps_ms[arm] for each in found)


def _tb_s(read_gb_s: Iterable[float]) -> str:
    return span((each / 1e3 for each in read_gb_s), 2)


def _counted(name: str, gone: Sequence[Withdrawn], shipped: Sequence[Record]) -> dict[str, str]:
    return {
        **_apart(name, gone, shipped),
        f"{name}Hosts": str(len({each.host_tag for group in gone for each in group.sessions})),
        f"{name}Commits": ", ".join(group.commit[:7] for group in gone),
    }


def _apart(name: str, gone: Sequence[Withdrawn], shipped: Sequence[Record]) -> dict[str, str]:
    apart = [kept / statistics.fmean(old) - 1 for group in gone for old, kept in _pairs(group.sessions, shipped)]
    return {
        f"{name}Sessions": str(sum(len(group.sessions) for group in gone)),
        f"{name}ApartMin": f"{min(apart):.1%}" if apart else NOT_MEASURED,
        f"{name}ApartMax": f"{max(apart):.1%}" if apart else NOT_MEASURED,
    }


def _pairs(gone: Sequence[Session], shipped: Sequence[Record]) -> Iterable[tuple[list[float], float]]:
    """For each cell that has both: the fused steps taken away, and the mean of the kept ones (ms)."""
    steps: dict[tuple[str, int], list[float]] = {}
    for each in gone:
        if ARM in each.steps_ms:
            steps.setdefault((each.model, each.ctx), []).append(each.steps_ms[ARM])
    for (model, ctx), old in steps.items():
        kept = selection.step_ms(shipped, plan_ladder.EXPERIMENT, model, ctx, ARM)
        if kept:
            yield old, kept


if __name__ == "__main__":
    for each in COMMITS:
        each.write_text(text(from_git(HERE.root, each)), encoding="utf-8")
