"""Claim by claim, whether this evidence reproduces it: the verdicts that `make verify` prints.

A claim about a GPU is judged by that GPU's records and no other's. Without them, a claim about one published cell is
held against the step-time model's prediction, which can agree with it and never reproduce it.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from decodegap import experiment, gpus, measures, models, plan, predict
from decodegap.claims import Claim
from decodegap.errors import NotMeasuredError
from decodegap.measures import Evidence
from decodegap.published import Published
from decodegap.rows import Store
from decodegap.rows import sessions as count_sessions
from decodegap.schema import Record

Word = Literal["reproduced", "not reproduced", "consistent with prediction", "not measured here"]
WORDS: tuple[Word, ...] = ("reproduced", "not reproduced", "consistent with prediction", "not measured here")
Basis = Literal["yours", "imported", "shipped", "arithmetic", "predicted", ""]

MORE_SESSIONS = 10  # what the study's own A/B has, where fewer do not settle an order


@dataclass(frozen=True)
class Verdict:
    """One claim held against the evidence for one GPU. `value` is None where there is none, predicted or found."""

    claim: Claim
    gpu: str  # empty for arithmetic
    word: Word
    value: float | None
    low: float | None  # of a prediction
    high: float | None
    basis: Basis
    detail: str

    @property
    def difference(self) -> float | None:
        """Value minus expectation."""
        return None if self.value is None else self.value - self.claim.expected


def judge(
    claims: Sequence[Claim],
    published: Published,
    shipped: Iterable[Record],
    yours: Iterable[Record] = (),
    imported: Iterable[Record] = (),
) -> list[Verdict]:
    """A verdict for every claim; one about `each` GPU gets one for each GPU that has records.

    Where a GPU has records of yours, they are the evidence for it, else those you imported, else the shipped ones:
    nothing is pooled.
    """
    evidence, bases = _evidence({"yours": yours, "imported": imported, "shipped": shipped})
    predicted = _predictions(evidence, published)
    return [_verdict(claim, gpu, evidence, bases, predicted) for claim in claims for gpu in _asked(claim, evidence)]


def count(verdicts: Iterable[Verdict]) -> dict[Word, int]:
    """How many verdicts there are of each kind, in the order of `WORDS`."""
    words = [verdict.word for verdict in verdicts]
    return {word: words.count(word) for word in WORDS}


def _evidence(stores: Mapping[Store, Iterable[Record]]) -> tuple[Evidence, dict[str, Store]]:
    by_gpu: dict[str, list[Record]] = {}
    bases: dict[str, Store] = {}
    for store, found in stores.items():
        here: dict[str, list[Record]] = {}
        for record in found:
            if record.cell.gpu != "cpu" and not record.stand_in:
                here.setdefault(record.cell.gpu, []).append(record)
        for gpu, each in here.items():
            if gpu not in by_gpu:
                by_gpu[gpu] = each
                bases[gpu] = store
    return by_gpu, bases


def _asked(claim: Claim, evidence: Evidence) -> list[str]:
    if claim.gpu == "each":
        return sorted(evidence) or [""]
    return [""] if claim.gpu in ("study", "none") else [claim.gpu]


def _verdict(
    claim: Claim,
    gpu: str,
    evidence: Evidence,
    bases: Mapping[str, Store],
    predicted: Mapping[tuple[str, str, int, str], predict.Prediction],
) -> Verdict:
    found = measures.find(claim, gpu, evidence)
    if found is not None:
        word: Word = "reproduced" if claim.holds(found.value) else "not reproduced"
        detail = found.detail
        if found.unsettled:
            word = "not measured here"
            detail = f"{found.unsettled}: {detail}; {what_it_takes(claim, gpu, evidence, MORE_SESSIONS)}"
        mixed: Basis = next((store for store in ("yours", "imported") if store in bases.values()), "shipped")
        basis: Basis = "arithmetic" if claim.gpu == "none" else bases.get(gpu, mixed)
        return Verdict(claim, gpu, word, found.value, None, None, basis, detail)
    needed = what_it_takes(claim, gpu, evidence)
    if claim.measure == "falling" and (order := _predicted_order(claim, predicted)):
        word, value, text = order
        return Verdict(claim, gpu, word, value, None, None, "predicted", f"{text}; {needed}")
    quantity = claim.published if claim.measure in ("fraction", "pair-ratio") else None
    guess = predicted.get((gpu, claim.model or "", claim.ctx or 0, quantity or ""))
    if guess is None:
        return Verdict(claim, gpu, "not measured here", None, None, None, "", needed)
    failed = _disagreements(claim, guess)
    if not failed:
        text = f"predicted {guess.low:.3g} to {guess.high:.3g}; {needed}"
        return Verdict(claim, gpu, "consistent with prediction", guess.mid, guess.low, guess.high, "predicted", text)
    text = f"the model predicts {guess.mid:.4g} ({guess.low:.4g} to {guess.high:.4g}), which does not agree: {failed}"
    return Verdict(claim, gpu, "not measured here", guess.mid, guess.low, guess.high, "predicted", f"{text}; {needed}")


def _disagreements(claim: Claim, guess: predict.Prediction) -> str:
    """Which of the two conditions of agreeing with a prediction fail, in words; a wide range alone agrees with all."""
    failed = []
    if not guess.low <= claim.expected <= guess.high:
        failed.append(f"the expected {claim.expected:.4g} is outside that range")
    if not claim.holds(guess.mid):
        low, high = claim.limits()
        allowed = [f"{word} {limit:.4g}" for word, limit in (("at least", low), ("at most", high)) if limit is not None]
        failed.append(f"its middle {guess.mid:.4g} is not what is allowed, {' and '.join(allowed)}")
    return ", and ".join(failed)


def what_it_takes(claim: Claim, gpu: str, evidence: Evidence, sessions: int = 0) -> str:
    """What would have to be measured for a verdict: on what, by which command, in how many minutes.

    `sessions` is how many each cell needs where the plan's own number did not settle it.
    """
    if claim.experiment not in experiment.PLANS:
        return f"needs {_a(gpu)} and the {claim.experiment} experiment, which no plan of this version runs"
    cell = [f"MODELS={claim.model}"] * (claim.model is not None) + [f"CONTEXTS={claim.ctx}"] * (claim.ctx is not None)
    more = [f"SESSIONS={sessions}"] * (sessions > 0)
    narrow = " ".join([f"EXPERIMENTS={claim.experiment}", *cell, *more])
    minutes = _minutes(claim, gpu if gpu in gpus.catalogue() else predict.assumed().fit_gpu, evidence, sessions)
    if claim.gpu == "study":
        study = ", ".join(each.slug for each in gpus.catalogue().values() if each.paper)
        return (
            f"needs {'more' if sessions else 'the'} records of {study}: `make reproduce GPU=... {narrow}` on each, "
            f"{minutes}, or `make import FROM=` of what others measured"
        )
    if claim.gpu == "each" and not gpu:
        return f"needs any NVIDIA GPU: `make reproduce {narrow}`, {minutes}"
    needed = "further records" if gpu in evidence else _a(gpu)
    return f"needs {needed}: `make reproduce GPU={gpu} {narrow}`, {minutes}"


def _minutes(claim: Claim, gpu: str, evidence: Evidence, sessions: int) -> str:
    """How long the plan for a claim takes by the sessions of its experiment that are recorded, on whichever GPU."""
    known = [r for found in evidence.values() for r in found if r.cell.experiment == claim.experiment]
    if not known:
        return "minutes unknown, because no session of it is recorded yet"
    asked = plan.request(gpu=gpu, models=claim.model or "", contexts=claim.ctx or "", sessions=sessions or "")
    each_s = statistics.median(sum(record.durations_s.values()) for record in known)
    make_plan = experiment.PLANS[claim.experiment]
    tasks, usual = make_plan(asked, gpu), {task.cell for task in make_plan(plan.request(gpu=gpu), gpu)}
    more = sum(task.cell not in usual for task in tasks)  # a plan narrowed to a cell has the int4 rung for it, too
    added = f", {more} of them of a rung that the whole plan does not ask of this cell" if more else ""
    where = ", ".join(sorted({record.cell.gpu for record in known}))
    minutes = math.ceil(len(tasks) * each_s / 60)
    return f"about {minutes} min ({count_sessions(len(tasks))} of {each_s:.0f} s, as on {where}{added})"


def _a(gpu: str) -> str:
    known = gpus.catalogue().get(gpu)
    name = known.label if known else gpu or "GPU"
    return f"{'an' if name[0] in 'AEFHILMNORSX' else 'a'} {name}"


def _predictions(evidence: Evidence, published: Published) -> dict[tuple[str, str, int, str], predict.Prediction]:
    """The model's predictions of published cells, from the fitted GPU's records; none where those do not suffice."""
    try:
        fitted = predict.fit(evidence.get(predict.assumed().fit_gpu, ()))
    except NotMeasuredError:
        return {}
    return {(p.gpu, p.model, p.ctx, p.quantity): p for p in predict.table(fitted, published)}


def _predicted_order(
    claim: Claim, predicted: Mapping[tuple[str, str, int, str], predict.Prediction]
) -> tuple[Word, float, str] | None:
    """Whether the model predicts that the study's fractions fall as peaks rise; ranges that overlap are no order."""
    cards = sorted((gpu for gpu in gpus.catalogue().values() if gpu.paper), key=lambda gpu: gpu.peak_gb_s or 0.0)
    model = models.lookup(claim.model or "").slug
    wanted = [predicted.get((gpu.slug, model, claim.ctx or 0, "floor_fraction")) for gpu in cards]
    found = [each for each in wanted if each is not None]
    if len(found) < len(cards):
        return None
    falls = all(a.mid > b.mid for a, b in pairwise(found))
    text = "predicted " + ", ".join(f"{each.gpu} {each.mid:.3f} ({each.low:.2f} to {each.high:.2f})" for each in found)
    unsettled = [f"{a.gpu} and {b.gpu}" for a, b in pairwise(found) if a.low <= b.high]
    if not unsettled:
        return "consistent with prediction", float(falls), text
    middles = "the middles fall" if falls else "the middles do not all fall"
    ranges = f"the ranges of {', and those of '.join(unsettled)} overlap or rise, so the model settles no order"
    return "not measured here", float(falls), f"{text}: {middles}, and {ranges}"
