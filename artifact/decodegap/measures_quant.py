"""What the records of quantised paths say about a claim, as `measures` asks."""

from collections.abc import Callable, Sequence

from decodegap import frame, quant_results
from decodegap.claims import Claim, Found
from decodegap.plan import CHECK
from decodegap.quant_catalogue import PATHS
from decodegap.rows import counted, sessions
from decodegap.schema import Record


def kept_promise(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The largest share of the speed-up that its bytes promise which any path realises, by whichever launching."""
    found = [
        (line.best_gain / line.promised, f"{line.where.model} {line.where.ctx} {line.path.slug}")
        for line in quant_results.lines(frame.build(records), None)
        if line.kind == "measured" and not line.path.is_baseline and line.best_gain and line.promised
    ]
    if not found:
        return None
    share, where = max(found)
    return Found(share, f"largest of {counted(len(found), 'path')}: {where}")


def over_floor(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """The smallest step of any path but the baselines, however launched, over its floor without the embedding."""
    found = [
        (row.step_ms / row.floor_streamed_ms, f"{row.model} {row.ctx} {row.arm}")
        for row in frame.cells(frame.sessions((r for r in records if r.cell.experiment == "quantised"), "shipped"))
        if row.outcome == "ok"
        and row.step_ms
        and row.floor_streamed_ms
        and row.cell_arm in PATHS
        and not PATHS[row.cell_arm].is_baseline
    ]
    if not found:
        return None
    times, where = min(found)
    return Found(times, f"smallest of {len(found)} series: {where}")


def attested(_claim: Claim, records: Sequence[Record]) -> Found | None:
    """Share of the quantised paths' sessions, the void ones included, that ran their own kernels afresh."""
    tried = [r for r in records if r.cell.experiment == "quantised" and r.outcome in ("ok", "void")
             and r.cell.arm != CHECK]  # fmt: skip
    if not tried:
        return None
    proven = sum(record.outcome == "ok" and all(seen.outputs_changed for seen in record.attestations)
                 for record in tried)  # fmt: skip
    return Found(proven / len(tried), f"{proven} of {sessions(len(tried))}")


OF_ONE_GPU: dict[str, Callable[[Claim, Sequence[Record]], Found | None]] = {
    "quantised-kept-promise": kept_promise,
    "quantised-over-floor": over_floor,
    "quantised-attested": attested,
}
