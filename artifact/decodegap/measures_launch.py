"""What the launch experiment's records say about a claim, as `measures` asks."""

import statistics
from collections.abc import Callable, Iterable, Sequence

from decodegap import selection, steadiness
from decodegap.claims import Claim, Found
from decodegap.rows import sessions
from decodegap.schema import Record

EAGER, GRAPH = "eager-pinned", "graph"


def pair_ratio(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Mean over sessions of the eager arm's step over the graph arm's."""
    pairs = _pairs(records, claim.model, claim.ctx)
    if not pairs:
        return None
    return Found(statistics.fmean(ratio for ratio, _ in pairs), f"{sessions(len(pairs))}{_unstable(claim, records)}")


def pair_ratio_min(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The smallest ratio of any A/B session, whatever model and context."""
    pairs = _pairs(records, None, None)
    return Found(min(ratio for ratio, _ in pairs), f"smallest of {sessions(len(pairs))}") if pairs else None


def pair_saving_ms(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Mean over sessions of the milliseconds that the graph saves."""
    pairs = _pairs(records, claim.model, claim.ctx)
    if not pairs:
        return None
    return Found(statistics.fmean(saved for _, saved in pairs), f"{sessions(len(pairs))}{_unstable(claim, records)}")


def attested(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """Share of A/B sessions, the void ones included, whose arms' outputs and kernels were equal."""
    tried = [r for r in records if r.cell.arm == "ab" and r.outcome in ("ok", "void")]
    if not tried:
        return None
    proven = [r for r in tried if r.attestations and all(
        a.outputs_equal and a.outputs_changed and a.kernels_equal for a in r.attestations)]  # fmt: skip
    return Found(len(proven) / len(tried), f"{len(proven)} of {sessions(len(tried))}")


def graph_over_floor(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The graph arm's mean step over the published floor."""
    rows = selection.of_cell(claim, selection.rows(records, "graphs", claim.arm))
    values = [1 / row.fraction_published for row in rows if row.fraction_published]
    return Found(statistics.fmean(values), sessions(sum(row.sessions for row in rows))) if values else None


def auto_over_eager(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The step with the backend left to PyTorch over the pinned one's."""
    slow = selection.step_ms(records, "graphs", claim.model, claim.ctx, "eager-auto")
    fast = selection.step_ms(records, "graphs", claim.model, claim.ctx, "eager")
    return Found(slow / fast, f"{slow:.1f} over {fast:.1f} ms") if slow and fast else None


def energy_ratio(claim: Claim, records: Sequence[Record]) -> Found | None:
    """Joules a token of the graph arm over the eager arm's, the largest of any A/B session."""
    ratios = []
    for record in selection.sessions(records, "graphs", claim.model, claim.ctx, "ab"):
        joules = {s.arm: s.energy_j_per_step for s in record.series}
        slow, fast = joules.get(EAGER), joules.get(GRAPH)
        if slow and fast:
            ratios.append(fast / slow)
    if not ratios:
        return None
    return Found(max(ratios), f"largest of {sessions(len(ratios))}, mean {statistics.fmean(ratios):.3f}")


def _pairs(records: Iterable[Record], model: str | None, ctx: int | None) -> list[tuple[float, float]]:
    """(ratio, ms saved) of each sound A/B session, recomputed from its raw samples."""
    found = []
    for record in selection.sessions(records, "graphs", model, ctx, "ab"):
        steps = {s.arm: statistics.median(s.wall_ms) for s in record.series if s.wall_ms}
        if EAGER in steps and GRAPH in steps:
            found.append((steps[EAGER] / steps[GRAPH], steps[EAGER] - steps[GRAPH]))
    return found


def _unstable(claim: Claim, records: Iterable[Record]) -> str:
    """How many A/B sessions of the claim's cell did not hold still, in words; empty if all did."""
    found = sum(
        bool(steadiness.doubts(record))
        for record in selection.sessions(records, "graphs", claim.model, claim.ctx, "ab")
    )
    return f", {found} unstable" if found else ""


OF_ONE_GPU: dict[str, Callable[[Claim, Sequence[Record]], Found | None]] = {
    "pair-ratio": pair_ratio,
    "pair-ratio-min": pair_ratio_min,
    "pair-saving-ms": pair_saving_ms,
    "attested": attested,
    "graph-over-floor": graph_over_floor,
    "auto-over-eager": auto_over_eager,
    "energy-ratio": energy_ratio,
}
