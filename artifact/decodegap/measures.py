"""What the records say about a claim: one pure function a measure, from one GPU's records to a value and its detail.

A function returns None where the records do not hold what it needs. Nothing here knows what is expected.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from decodegap import floor, gpus, measures_ladder, measures_launch, measures_quant, models, ordering, selection
from decodegap.claims import Claim, Found
from decodegap.launch import GRAPH_LAUNCHED
from decodegap.plan import PAPER_CONTEXTS
from decodegap.published import DTYPE
from decodegap.rows import counted, sessions
from decodegap.schema import Anatomy, Record

Evidence = Mapping[str, Sequence[Record]]  # GPU slug -> its records, all of one store

QUANTISED = ("bf16", "bnb-nf4", "awq-marlin", "gptq-exllamav2")
STOCK = "eager"  # the library's own step
STUDY_CELLS = 12  # three models by four contexts


def find(claim: Claim, gpu: str, evidence: Evidence) -> Found | None:
    """What `evidence` says about `claim`, asked for `gpu`; None if it says nothing."""
    if claim.gpu == "none":
        return ARITHMETIC[claim.measure](claim)
    if claim.gpu == "study":
        return TOGETHER[claim.measure](claim, evidence)
    found = [record for record in evidence.get(gpu, ()) if not record.stand_in]
    return OF_ONE_GPU[claim.measure](claim, found) if found else None


def quantised_order(claim: Claim, records: Sequence[Record]) -> Found | None:
    """1 if the four paths' steps (ms) fall in the study's order, 0 if not."""
    return _order(
        {
            arm: [
                step
                for row in selection.of_cell(claim, selection.rows(records, "quantised", arm))
                for step in row.values_ms
            ]
            for arm in QUANTISED
        }
    )


def quantised_gain(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The bf16 step over the claim's quantised arm's."""
    slow = selection.step_ms(records, "quantised", claim.model, claim.ctx, "bf16")
    fast = selection.step_ms(records, "quantised", claim.model, claim.ctx, claim.arm or "")
    return Found(slow / fast, f"{slow:.2f} over {fast:.2f} ms") if slow and fast else None


def step_ms(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The step (ms) of one arm of the claim's experiment, the mean over hosts."""
    step = selection.step_ms(records, claim.experiment, claim.model, claim.ctx, claim.arm or "")
    if step is None:
        return None
    each = [ms for row in selection.of_cell(claim, selection.rows(records, claim.experiment, claim.arm)) for ms in
            row.values_ms]  # fmt: skip
    span = f" from {min(each):#.4g} to {max(each):#.4g} ms" if len(each) > 1 else ""
    parts = measures_ladder.parts_of(claim, records) if claim.experiment == "ladder" else ""
    return Found(step, f"{sessions(len(each))}{span}{parts}")


def fraction(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Published floor over the mean step of the claim's cell and arm."""
    rows = selection.of_cell(claim, selection.rows(records, claim.experiment, claim.arm))
    values = [row.fraction_published for row in rows if row.fraction_published is not None]
    if not values:
        return None
    hosts = f" on {len(rows)} hosts, mean of their fractions" if len(rows) > 1 else ""
    each = selection.fractions(rows)
    span = f" from {min(each):.3f} to {max(each):.3f}" if len(each) > 1 else ""
    unstable = f", {shaky} unstable" if (shaky := sum(row.unstable for row in rows)) else ""
    parts = measures_ladder.parts_of(claim, records) if claim.experiment == "ladder" else ""
    return Found(statistics.fmean(values), f"{sessions(len(each))}{span}{unstable}{hosts}{parts}")


def over_cells(pick: Callable[[list[float]], float]) -> "Callable[[Claim, Sequence[Record]], Found | None]":
    """The measure that applies `pick` to the fractions of every cell of the study's grid that this GPU can run."""

    def measure(claim: Claim, records: Sequence[Record]) -> Found | None:
        cells, lost = _grid(records, claim.arm)
        if len(cells) + lost < STUDY_CELLS or not cells:
            return None
        without = f", {lost} lost to out-of-memory" if lost else ""
        return Found(pick(list(cells.values())), f"{counted(len(cells), 'cell')}{without}")

    return measure


def cells_measured(claim: Claim, records: Sequence[Record]) -> Found | None:
    """How many cells of the study's grid have a sound session."""
    cells, lost = _grid(records, claim.arm)
    return Found(len(cells), f"of {STUDY_CELLS}; {lost} lost to out-of-memory") if cells or lost else None


def out_of_memory(claim: Claim, records: Sequence[Record]) -> Found | None:
    """1 if the claim's cell ran out of memory and never fitted, 0 if it fitted."""
    here = [r for r in records if r.cell.experiment == "baseline" and (r.cell.model, r.cell.ctx, r.cell.arm) ==
            (claim.model, claim.ctx, claim.arm) and r.outcome in ("ok", "oom")]  # fmt: skip
    if not here:
        return None
    fitted = sum(record.outcome == "ok" for record in here)
    return Found(float(not fitted), f"{fitted} of {sessions(len(here))} fitted")


def read_share(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The largest share of the peak that any session read; the largest, because a read above the peak is an error."""
    shares = [r.machine.read_gb_s / r.peak_gb_s for r in records if r.machine and r.machine.read_gb_s and r.peak_gb_s]
    return (
        Found(max(shares), f"{min(shares):.3f} to {max(shares):.3f} over {sessions(len(shares))}") if shares else None
    )


def residual(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The largest |residual| / step over every anatomy of a graph-launched arm."""
    shares = [(abs(a.residual_ms) / a.step_ms, f"{r.cell.model} {r.cell.ctx} {a.arm}") for r, a in _anatomies(records)]
    if not shares:
        return None
    share, where = max(shares)
    return Found(share, f"largest of {counted(len(shares), 'anatomy', 'anatomies')}: {where}")


def checks_passed(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Share of the experiment's arms that passed their check against a reference in higher precision.

    Stock eager is left out: it is the yardstick of the others' error, and held against itself it cannot fail.
    """
    here = [record for record in records if record.cell.experiment == claim.experiment]
    checks = [check for record in here for check in record.checks if check.arm != STOCK]
    if not checks:
        return None
    void = sum(not check.proves for check in checks)
    without = f", {void} of them against a reference that stock eager itself is far from" if void else ""
    return Found(sum(c.passed and c.proves for c in checks) / len(checks), f"{counted(len(checks), 'check')}{without}")


def falling(claim: Claim, evidence: Evidence) -> Found | None:
    """1 if the fraction falls from GPU to GPU in the order of their peaks, 0 if not; needs all of the study's GPUs."""
    cards = sorted(_study_gpus(), key=lambda slug: gpus.known(slug).peak_gb_s or 0.0)
    rows = {
        slug: selection.of_cell(claim, selection.rows(evidence.get(slug, ()), "baseline", claim.arm)) for slug in cards
    }
    return _order({slug: selection.fractions(found) for slug, found in rows.items()})


def valid_cells(claim: Claim, evidence: Evidence) -> Found | None:
    """How many of the study's cells have a sound session, over its four GPUs; needs every cell tried on each."""
    total, text = 0, []
    for slug in _study_gpus():
        cells, lost = _grid(evidence.get(slug, ()), claim.arm)
        if len(cells) + lost < STUDY_CELLS:
            return None
        total += len(cells)
        text.append(f"{slug} {len(cells)}")
    return Found(total, ", ".join(text))


def weight_gb(claim: Claim) -> Found:
    """GB of all parameters in bf16."""
    return Found(models.lookup(claim.model or "").weight_bytes(DTYPE) / 1e9, "from the config")


def kv_kib(claim: Claim) -> Found:
    """KiB of keys and values per token in bf16."""
    return Found(models.lookup(claim.model or "").kv_bytes(1, DTYPE) / 1024, "from the config")


def floor_ms(claim: Claim) -> Found:
    """The floor as published (ms) of the claim's model and context on its card."""
    model, card = models.lookup(claim.model or ""), gpus.known(claim.card or "")
    n_bytes = model.weight_bytes(DTYPE) + model.kv_bytes(claim.ctx or 0, DTYPE)
    return Found(floor.floor_ms(n_bytes, card.peak_gb_s or 0.0), f"{n_bytes / 1e9:.3f} GB at {card.peak_gb_s:g} GB/s")


def _order(values: Mapping[str, Sequence[float]]) -> Found | None:
    return Found(*found) if (found := ordering.falls(values)) else None


def _grid(records: Iterable[Record], arm: str | None) -> tuple[dict[tuple[str, int], float], int]:
    """Fraction by cell of the study's grid, and how many further cells ran out of memory."""
    wanted = {(model.slug, ctx) for model in models.with_role("paper") for ctx in PAPER_CONTEXTS}
    found = list(records)
    values: dict[tuple[str, int], list[float]] = {}
    for row in selection.rows(found, "baseline", arm):
        if (row.model, row.ctx) in wanted and row.fraction_published is not None:
            values.setdefault((row.model, row.ctx), []).append(row.fraction_published)
    lost = {(r.cell.model, r.cell.ctx) for r in found if r.cell.experiment == "baseline" and r.outcome == "oom"}
    return {cell: statistics.fmean(each) for cell, each in values.items()}, len((lost & wanted) - set(values))


def _anatomies(records: Iterable[Record]) -> list[tuple[Record, Anatomy]]:
    ok = [record for record in records if record.outcome == "ok"]
    return [(record, each) for record in ok for each in record.anatomy if each.arm in GRAPH_LAUNCHED]


def _study_gpus() -> list[str]:
    return [gpu.slug for gpu in gpus.catalogue().values() if gpu.paper]


OF_ONE_GPU: dict[str, Callable[[Claim, Sequence[Record]], Found | None]] = {
    "fraction": fraction,
    "fraction-min": over_cells(min),
    "fraction-median": over_cells(statistics.median),
    "fraction-max": over_cells(max),
    "out-of-memory": out_of_memory,
    "cells-measured": cells_measured,
    "step-ms": step_ms,
    "quantised-order": quantised_order,
    "quantised-gain": quantised_gain,
    **measures_launch.OF_ONE_GPU,
    **measures_quant.OF_ONE_GPU,
    **measures_ladder.OF_ONE_GPU,
    "read-share": read_share,
    "residual": residual,
    "checks-passed": checks_passed,
}
TOGETHER: dict[str, Callable[[Claim, Evidence], Found | None]] = {"falling": falling, "valid-cells": valid_cells}
ARITHMETIC: dict[str, Callable[[Claim], Found]] = {"weight-gb": weight_gb, "kv-kib": kv_kib, "floor-ms": floor_ms}
