"""Which tiles make the whole fused step fastest: a descent over one kernel after another, with a journal of it.

Nothing here knows a GPU: what is compared is handed in as functions (`Card`), so that the search, its journal and its
resumption are the same with a real card and with a formula. A candidate is only ever compared with the best so far,
both timed one after the other, because a card that works for minutes grows slower.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from decodegap import progress, records
from decodegap.errors import BadRecordError, NotMeasuredError, StoreError
from decodegap.fused.search import ORDER
from decodegap.fused.tiles import Tile, Tiles

GAIN = 0.001  # a step that is not faster by this part of itself is the same step
FINALISTS = 3  # candidates of a kernel that are looked at again, closely, before one is taken

Say = Callable[[str], None]


@dataclass(frozen=True)
class Card:
    """What the search asks of a card.

    `compare` times the best tiles and a candidate next to each other (`closely`: for longer), in ms a step; what it
    raises is the candidate's failure, and `NotMeasuredError` the card's. `fault` says what is wrong with a
    candidate's output, "" if nothing is. `rejected` holds, by kernel and tile, why a candidate is not to be tried at
    all: it does not compile, or it spills.
    """

    compare: Callable[[Tiles, Tiles, bool], tuple[float, float]]
    fault: Callable[[Tiles], str]
    rejected: Mapping[tuple[str, Tile], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """One comparison: the best tiles then, the kernel whose tile the candidate has otherwise, and both steps (ms)."""

    best: Tiles
    kernel: str
    tile: Tile
    closely: bool
    best_ms: float | None = None
    step_ms: float | None = None
    reason: str = ""  # why there is no time, or why the candidate was not taken

    @property
    def ratio(self) -> float:
        """The candidate's step over the best one's; infinite where there is none."""
        return self.step_ms / self.best_ms if self.step_ms and self.best_ms and not self.reason else float("inf")

    @property
    def key(self) -> str:
        """What two runs of the same comparison have in common."""
        parts = [_plain(self.best), self.kernel, _plain(self.tile), self.closely]
        return json.dumps(parts, sort_keys=True)


@dataclass(frozen=True)
class Journal:
    """What was tried, one JSON line each, written as it happens; `known` are the trials of earlier runs by their key.

    A run that is stopped, or killed in the middle of a line, loses that line at most.
    """

    path: Path
    known: dict[str, dict[str, Any]]

    def recall(self, trial: Trial) -> Trial | None:
        """`trial` as it went before; None if it is new."""
        seen = self.known.get(trial.key)
        if seen is None:
            return None
        return Trial(trial.best, trial.kernel, trial.tile, trial.closely, **seen)

    def note(self, trial: Trial) -> None:
        """Write `trial` down. Raises `StoreError`."""
        found = {"best_ms": trial.best_ms, "step_ms": trial.step_ms, "reason": trial.reason}
        line = {
            "key": trial.key,
            "kernel": trial.kernel,
            "tile": asdict(trial.tile),
            "closely": trial.closely,
            **found,
        }
        self.known[trial.key] = found
        _append(self.path, line)


def journal(path: Path, conditions: Mapping[str, Any]) -> Journal:
    """The journal at `path`, begun with `conditions` if it is not there: what a time depends on beside the tiles.

    A last line that was cut off is dropped. Raises `BadRecordError` for a journal of other conditions or with damage
    further up, and `StoreError` where it cannot be read or written.
    """
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: cannot be read: {error}; move it away") from None
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        records.write_atomically(path, whole.encode())
    lines = [_line(line, path, number) for number, line in enumerate(whole.splitlines(), 1)]
    if not lines:
        _append(path, {"conditions": dict(conditions)})
        return Journal(path, {})
    if lines[0].get("conditions") != json.loads(json.dumps(dict(conditions))):
        raise BadRecordError(f"{path}: was written under other conditions; move it away to begin anew")
    try:
        known = {line["key"]: {name: line[name] for name in ("best_ms", "step_ms", "reason")} for line in lines[1:]}
    except KeyError as error:
        raise BadRecordError(f"{path}: a line lacks {error}; move it away to begin anew") from None
    return Journal(path, known)


def descend(
    start: Tiles,
    options: Mapping[str, Sequence[Tile]],
    card: Card,
    book: Journal,
    *,
    seconds: float,
    say: Say = print,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Tiles, bool]:
    """The best tiles found from `start` on within `seconds`, and whether that was time enough to finish.

    The seconds are exceeded at most by a last close look at what is best.

    Kernel by kernel, every option is compared with the best so far; the fastest are compared again, closely, and the
    first that is still faster by `GAIN` and computes the right thing is taken. It ends when a whole round takes none.
    What the journal knows is not measured again, so a run that was stopped goes on where it was.
    """
    deadline = clock() + seconds
    total = sum(len(options.get(kernel, ())) for kernel in ORDER)
    best, taken, turn = start, True, 0
    while taken:
        taken, turn, done = False, turn + 1, 0
        for kernel in ORDER:
            trials: list[Trial] = []
            for tile in options.get(kernel, ()):
                done += 1
                if tile == best.of(kernel):
                    continue
                if clock() >= deadline:
                    return _take(trials, card, book, say) or best, False
                trial = _try(Trial(best, kernel, tile, closely=False), card, book)
                trials.append(trial)
                left = progress.duration(max(0.0, deadline - clock()))
                say(progress.line(done, total, f"round {turn}: {told(trial)}; at most {left} left"))
            found = _take(trials, card, book, say)
            if found is not None:
                best, taken = found, True
    say(f"nothing is faster after {turn} rounds")
    return best, True


def told(trial: Trial) -> str:
    """A trial in words."""
    shape = " ".join(f"{name}={value}" for name, value in asdict(trial.tile).items() if value not in (None, False))
    if trial.step_ms is None or trial.best_ms is None:
        return f"{trial.kernel} {shape}: {trial.reason}"
    against = f"{trial.step_ms:.4f} ms against {trial.best_ms:.4f}"
    return f"{trial.kernel} {shape}: {against}" + (f", but {trial.reason}" if trial.reason else "")


def _take(trials: Sequence[Trial], card: Card, book: Journal, say: Say) -> Tiles | None:
    """The tiles with the best of `trials`, if it holds up when it is looked at closely."""
    for trial in sorted(trials, key=lambda each: each.ratio)[:FINALISTS]:
        if trial.ratio > 1 - GAIN:
            return None
        again = _try(Trial(trial.best, trial.kernel, trial.tile, closely=True), card, book)
        if again.ratio <= 1 - GAIN:
            say(f"taken: {told(again)}")
            return trial.best.having(trial.kernel, trial.tile)
        say(f"not taken: {told(again)}")
    return None


def _try(trial: Trial, card: Card, book: Journal) -> Trial:
    """`trial` with its times, from the journal if they are there; a failure is its reason."""
    if (seen := book.recall(trial)) is not None:
        return seen
    found = _measured(trial, card)
    book.note(found)
    return found


def _measured(trial: Trial, card: Card) -> Trial:
    given = (trial.best, trial.kernel, trial.tile, trial.closely)
    if reason := card.rejected.get((trial.kernel, trial.tile), ""):
        return Trial(*given, reason=reason)
    candidate = trial.best.having(trial.kernel, trial.tile)
    try:
        wrong = card.fault(candidate) if trial.closely else ""
        best_ms, step_ms = card.compare(trial.best, candidate, trial.closely)
    except NotMeasuredError:  # the card itself is gone, which is no candidate's result
        raise
    except Exception as error:  # noqa: BLE001 - whatever the compiler or the driver throws is this candidate's result
        return Trial(*given, reason=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return Trial(*given, best_ms, step_ms, wrong)


def _plain(tile: Tile | Tiles) -> dict[str, Any]:
    return {name: value for name, value in asdict(tile).items() if name != "source"}


def _append(path: Path, line: Mapping[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line, sort_keys=True, allow_nan=False) + "\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}; free space or rights?") from None


def _line(text: str, path: Path, number: int) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        raise BadRecordError(f"{path}: line {number} is not JSON; move it away to begin anew") from None
    if not isinstance(found, dict):
        raise BadRecordError(f"{path}: line {number} is not an object; move it away to begin anew")
    return found
