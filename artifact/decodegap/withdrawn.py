"""Which ladder sessions were shipped once and taken back or replaced, what they timed, and why: never evidence.

Git alone holds their records. What the paper says of them was read there once and stands in small files, so that a
checkout without its history says it too; `python -m decodegap.withdrawn` writes them again.
"""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from decodegap import claims, git, plan_ladder, selection
from decodegap.numbers import NOT_MEASURED, span
from decodegap.numbers_paper import GPU
from decodegap.paths import DATA, HERE, Places
from decodegap.published import Published
from decodegap.schema import Record

ARM, GROUP = plan_ladder.FUSED[-1], "rungs"  # the fused rung, and the sessions that it is measured in
TAKEN_BACK, REPLACED = DATA / "withdrawn.json", DATA / "replaced.json"
# For each file the commit, what it did to the records (git's letter), and why.
COMMITS = {
    TAKEN_BACK: (
        "114b2a0c77c57f6f38bbb8f440db8650d48698c6",
        "D",
        "every rung was held against a step with other rotary frequencies, by a check that could not fail",
    ),
    REPLACED: (
        "31e1ab0b76fbd4755c08272a8fc845e3e245fa6a",
        "M",
        "sound, and measured again on one host, with tiles that were searched on its own card",
    ),
}


class Session(BaseModel):
    """One session that ships no more: where git has its record, the card's read rate, and the rungs' steps (ms)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    content_hash: str
    started_at: str
    host_tag: str
    model: str
    ctx: int
    read_gb_s: float
    steps_ms: dict[str, float]


class Withdrawn(BaseModel):
    """Sessions that one commit took away, and for which reason. Their records are in its parent."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    commit: str
    reason: str
    sessions: tuple[Session, ...]


def load(file: Path = TAKEN_BACK) -> Withdrawn:
    """What this checkout says of them."""
    return Withdrawn.model_validate_json(file.read_bytes())


def from_git(root: Path, file: Path = TAKEN_BACK) -> Withdrawn:
    """The same, read from the history of the checkout at `root`.

    Raises `subprocess.CalledProcessError` where git does not hold the commit.
    """
    commit, done, reason = COMMITS[file]
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


def text(found: Withdrawn) -> str:
    """`found` as the file that holds it."""
    return found.model_dump_json(indent=1) + "\n"


def macros(shipped: Sequence[Record], study: Published, at: Places = HERE) -> dict[str, str]:
    """Name -> text: how many were taken away, their fused steps, and how far the kept ones are from them."""
    gone, mine = load(TAKEN_BACK), [record for record in shipped if record.cell.gpu == GPU]
    (must,) = (each for each in claims.load(at.claims, study) if each.id == "fused-mistral-2048")
    place = plan_ladder.EXPERIMENT, must.model, must.ctx
    kept = selection.step_ms(mine, *place, ARM)
    machines = [record.machine for record in selection.sessions(mine, *place, GROUP)]
    read = [machine.read_gb_s / 1e3 for machine in machines if machine and machine.read_gb_s]
    old = [each for each in gone.sessions if (each.model, each.ctx) == (must.model, must.ctx)]
    return {
        **_counted("Withdrawn", gone, mine),
        **_counted("Replaced", load(REPLACED), mine),
        "WithdrawnStepMistralTwoK": span((each.steps_ms[ARM] for each in old), 2),
        "WithdrawnReadMistralTwoK": span((each.read_gb_s / 1e3 for each in old), 2),
        "KeptReadMistralTwoK": span(read, 2),
        "WithdrawnMeanMistralTwoK": f"{statistics.fmean(each.steps_ms[ARM] for each in old):.2f}",
        "MustMistralTwoK": f"{must.expected:.2f}",
        "MissMistralTwoK": f"{kept / must.expected - 1:.1%}" if kept else NOT_MEASURED,
    }


def _counted(name: str, gone: Withdrawn, shipped: Sequence[Record]) -> dict[str, str]:
    apart = [kept / statistics.fmean(old) - 1 for old, kept in _pairs(gone.sessions, shipped)]
    return {
        f"{name}Sessions": str(len(gone.sessions)),
        f"{name}Hosts": str(len({each.host_tag for each in gone.sessions})),
        f"{name}Commit": gone.commit[:7],
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
