"""What the records say about a claim: one pure function a measure, from one GPU's records to a value and its detail.

A function returns None where the records do not hold what it needs. Nothing here knows what is expected.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from decodegap import floor, frame, gpus, measures_quant, models, ordering, steadiness
from decodegap.claims import Claim, Found
from decodegap.launch import GRAPH_LAUNCHED
from decodegap.plan import PAPER_CONTEXTS
from decodegap.published import DTYPE
from decodegap.rows import CellRow
from decodegap.schema import Anatomy, Record

Evidence = Mapping[str, Sequence[Record]]  # GPU slug -> its records, all of one store

EAGER, GRAPH = "eager-pinned", "graph"
QUANTISED = ("bf16", "bnb-nf4", "awq-marlin", "gptq-exllamav2")
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
            arm: [step for row in _of_cell(claim, _rows(records, "quantised", arm)) for step in row.values_ms]
            for arm in QUANTISED
        }
    )


def quantised_gain(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The bf16 step over the claim's quantised arm's."""
    slow = _step(records, "quantised", claim.model, claim.ctx, "bf16")
    fast = _step(records, "quantised", claim.model, claim.ctx, claim.arm or "")
    return Found(slow / fast, f"{slow:.2f} over {fast:.2f} ms") if slow and fast else None


def step_ms(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The step (ms) of one arm of the claim's experiment."""
    step = _step(records, claim.experiment, claim.model, claim.ctx, claim.arm or "")
    return None if step is None else Found(step, "mean over sessions")


def fraction(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Published floor over the mean step of the claim's cell and arm."""
    rows = _of_cell(claim, _rows(records, claim.experiment, claim.arm))
    values = [row.fraction_published for row in rows if row.fraction_published is not None]
    if not values:
        return None
    hosts = f" on {len(rows)} hosts, mean of their fractions" if len(rows) > 1 else ""
    each = _fractions(rows)
    span = f" from {min(each):.3f} to {max(each):.3f}" if len(each) > 1 else ""
    unstable = f", {shaky} unstable" if (shaky := sum(row.unstable for row in rows)) else ""
    return Found(statistics.fmean(values), f"{len(each)} sessions{span}{unstable}{hosts}")


def over_cells(pick: Callable[[list[float]], float]) -> "Callable[[Claim, Sequence[Record]], Found | None]":
    """The measure that applies `pick` to the fractions of every cell of the study's grid that this GPU can run."""

    def measure(claim: Claim, records: Sequence[Record]) -> Found | None:
        cells, lost = _grid(records, claim.arm)
        if len(cells) + lost < STUDY_CELLS or not cells:
            return None
        without = f", {lost} lost to out-of-memory" if lost else ""
        return Found(pick(list(cells.values())), f"{len(cells)} cells{without}")

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
    return Found(float(not fitted), f"{fitted} of {len(here)} sessions fitted")


def pair_ratio(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Mean over sessions of the eager arm's step over the graph arm's."""
    pairs = _pairs(records, claim.model, claim.ctx)
    if not pairs:
        return None
    return Found(statistics.fmean(ratio for ratio, _ in pairs), f"{len(pairs)} sessions{_unstable(claim, records)}")


def pair_ratio_min(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The smallest ratio of any A/B session, whatever model and context."""
    pairs = _pairs(records, None, None)
    return Found(min(ratio for ratio, _ in pairs), f"smallest of {len(pairs)} sessions") if pairs else None


def pair_saving_ms(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Mean over sessions of the milliseconds that the graph saves."""
    pairs = _pairs(records, claim.model, claim.ctx)
    if not pairs:
        return None
    return Found(statistics.fmean(saved for _, saved in pairs), f"{len(pairs)} sessions{_unstable(claim, records)}")


def read_share(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The largest share of the peak that any session read; the largest, because a read above the peak is an error."""
    shares = [r.machine.read_gb_s / r.peak_gb_s for r in records if r.machine and r.machine.read_gb_s and r.peak_gb_s]
    return Found(max(shares), f"{min(shares):.3f} to {max(shares):.3f} over {len(shares)} sessions") if shares else None


def attested(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """Share of A/B sessions, the void ones included, whose arms' outputs and kernels were equal."""
    tried = [r for r in records if r.cell.arm == "ab" and r.outcome in ("ok", "void")]
    if not tried:
        return None
    proven = [r for r in tried if r.attestations and all(
        a.outputs_equal and a.outputs_changed and a.kernels_equal for a in r.attestations)]  # fmt: skip
    return Found(len(proven) / len(tried), f"{len(proven)} of {len(tried)} sessions")


def graph_over_floor(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The graph arm's mean step over the published floor."""
    rows = _of_cell(claim, _rows(records, "graphs", claim.arm))
    values = [1 / row.fraction_published for row in rows if row.fraction_published]
    return Found(statistics.fmean(values), f"{sum(row.sessions for row in rows)} sessions") if values else None


def residual(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The largest |residual| / step over every anatomy of a graph-launched arm."""
    shares = [(abs(a.residual_ms) / a.step_ms, f"{r.cell.model} {r.cell.ctx} {a.arm}") for r, a in _anatomies(records)]
    if not shares:
        return None
    share, where = max(shares)
    return Found(share, f"largest of {len(shares)} anatomies: {where}")


def checks_passed(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Share of the experiment's arms that passed their check against a reference in higher precision."""
    checks = [check for record in records if record.cell.experiment == claim.experiment for check in record.checks]
    return Found(sum(c.passed for c in checks) / len(checks), f"{len(checks)} checks") if checks else None


def auto_over_eager(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The step with the backend left to PyTorch over the pinned one's."""
    slow = _step(records, "graphs", claim.model, claim.ctx, "eager-auto")
    fast = _step(records, "graphs", claim.model, claim.ctx, "eager")
    return Found(slow / fast, f"{slow:.1f} over {fast:.1f} ms") if slow and fast else None


def rung_gain(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The fused bf16 step over the claim's rung's."""
    slow = _step(records, "ladder", claim.model, claim.ctx, "fused")
    fast = _step(records, "ladder", claim.model, claim.ctx, claim.arm or "")
    return Found(slow / fast, f"{slow:.2f} over {fast:.2f} ms") if slow and fast else None


def energy_ratio(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Joules a token of the graph arm over the eager arm's, the largest of any A/B session."""
    ratios = []
    for record in _of(records, "graphs", claim.model, claim.ctx, "ab"):
        joules = {s.arm: s.energy_j_per_step for s in record.series}
        slow, fast = joules.get(EAGER), joules.get(GRAPH)
        if slow and fast:
            ratios.append(fast / slow)
    if not ratios:
        return None
    return Found(max(ratios), f"largest of {len(ratios)} sessions, mean {statistics.fmean(ratios):.3f}")


def falling(claim: Claim, evidence: Evidence) -> Found | None:
    """1 if the fraction falls from GPU to GPU in the order of their peaks, 0 if not; needs all of the study's GPUs."""
    cards = sorted(_study_gpus(), key=lambda slug: gpus.catalogue()[slug].peak_gb_s or 0.0)
    rows = {slug: _of_cell(claim, _rows(evidence.get(slug, ()), "baseline", claim.arm)) for slug in cards}
    return _order({slug: _fractions(found) for slug, found in rows.items()})


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
    model, card = models.lookup(claim.model or ""), gpus.catalogue()[claim.card or ""]
    n_bytes = model.weight_bytes(DTYPE) + model.kv_bytes(claim.ctx or 0, DTYPE)
    return Found(floor.floor_ms(n_bytes, card.peak_gb_s or 0.0), f"{n_bytes / 1e9:.3f} GB at {card.peak_gb_s:g} GB/s")


def _order(values: Mapping[str, Sequence[float]]) -> Found | None:
    return Found(*found) if (found := ordering.falls(values)) else None


def _fractions(rows: Iterable[CellRow]) -> list[float]:
    """The published fraction of each session."""
    return [row.floor_published_ms / step for row in rows if row.floor_published_ms for step in row.values_ms]


def _of_cell(claim: Claim, rows: Iterable[CellRow]) -> list[CellRow]:
    return [row for row in rows if (row.model, row.ctx) == (claim.model, claim.ctx)]


def _rows(records: Iterable[Record], experiment: str, arm: str | None) -> list[CellRow]:
    rows = frame.cells(frame.sessions((r for r in records if r.cell.experiment == experiment), "shipped"))
    return [row for row in rows if row.outcome == "ok" and row.arm == arm]


def _step(records: Iterable[Record], experiment: str, model: str | None, ctx: int | None, arm: str) -> float | None:
    rows = [row for row in _rows(records, experiment, arm) if (row.model, row.ctx) == (model, ctx)]
    steps = [row.step_ms for row in rows if row.step_ms is not None]
    return statistics.fmean(steps) if steps else None


def _grid(records: Iterable[Record], arm: str | None) -> tuple[dict[tuple[str, int], float], int]:
    """Fraction by cell of the study's grid, and how many further cells ran out of memory."""
    wanted = {(model.slug, ctx) for model in models.with_role("paper") for ctx in PAPER_CONTEXTS}
    found = list(records)
    values: dict[tuple[str, int], list[float]] = {}
    for row in _rows(found, "baseline", arm):
        if (row.model, row.ctx) in wanted and row.fraction_published is not None:
            values.setdefault((row.model, row.ctx), []).append(row.fraction_published)
    lost = {(r.cell.model, r.cell.ctx) for r in found if r.cell.experiment == "baseline" and r.outcome == "oom"}
    return {cell: statistics.fmean(each) for cell, each in values.items()}, len((lost & wanted) - set(values))


def _of(records: Iterable[Record], experiment: str, model: str | None, ctx: int | None, arm: str) -> list[Record]:
    wanted = [r for r in records if r.outcome == "ok" and (r.cell.experiment, r.cell.arm) == (experiment, arm)]
    return [r for r in wanted if model is None or (r.cell.model, r.cell.ctx) == (model, ctx)]


def _pairs(records: Iterable[Record], model: str | None, ctx: int | None) -> list[tuple[float, float]]:
    """(ratio, ms saved) of each sound A/B session, recomputed from its raw samples."""
    found = []
    for record in _of(records, "graphs", model, ctx, "ab"):
        steps = {s.arm: statistics.median(s.wall_ms) for s in record.series if s.wall_ms}
        if EAGER in steps and GRAPH in steps:
            found.append((steps[EAGER] / steps[GRAPH], steps[EAGER] - steps[GRAPH]))
    return found


def _unstable(claim: Claim, records: Iterable[Record]) -> str:
    """How many A/B sessions of the claim's cell did not hold still, in words; empty if all did."""
    found = sum(bool(steadiness.doubts(record)) for record in _of(records, "graphs", claim.model, claim.ctx, "ab"))
    return f", {found} unstable" if found else ""


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
    "pair-ratio": pair_ratio,
    "pair-ratio-min": pair_ratio_min,
    "pair-saving-ms": pair_saving_ms,
    "step-ms": step_ms,
    "quantised-order": quantised_order,
    "quantised-gain": quantised_gain,
    **measures_quant.OF_ONE_GPU,
    "read-share": read_share,
    "attested": attested,
    "graph-over-floor": graph_over_floor,
    "residual": residual,
    "checks-passed": checks_passed,
    "auto-over-eager": auto_over_eager,
    "energy-ratio": energy_ratio,
    "rung-gain": rung_gain,
}
TOGETHER: dict[str, Callable[[Claim, Evidence], Found | None]] = {"falling": falling, "valid-cells": valid_cells}
ARITHMETIC: dict[str, Callable[[Claim], Found]] = {"weight-gb": weight_gb, "kv-kib": kv_kib, "floor-ms": floor_ms}
