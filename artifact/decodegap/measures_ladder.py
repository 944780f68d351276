"""What the ladder's records say about a claim, as `measures` asks."""

from collections.abc import Callable, Sequence

from decodegap import launch, plan_ladder, selection
from decodegap.claims import Claim, Found
from decodegap.launch import Kept
from decodegap.rows import counted, sessions
from decodegap.schema import Record

LEAST_MS = 0.01  # a part that takes less holds no step back


def rung_gain(claim: Claim, records: Sequence[Record]) -> Found | None:
    """The fused bf16 step over the claim's rung's."""
    names = (plan_ladder.FUSED[-1], claim.arm or "")
    slow, fast = (selection.step_ms(records, plan_ladder.EXPERIMENT, claim.model, claim.ctx, arm) for arm in names)
    if not slow or not fast:
        return None
    return Found(slow / fast, f"{slow:.3f} over {fast:.3f} ms, {_behind(claim, records, names)}"
                 f"{parts_of(claim, records)}")  # fmt: skip


def _behind(claim: Claim, records: Sequence[Record], arms: Sequence[str]) -> str:
    """How many sessions on how many hosts each of these rungs has."""
    told = []
    for arm in arms:
        rows = selection.of_cell(claim, selection.rows(records, plan_ladder.EXPERIMENT, arm))
        told.append(f"{arm} from {sessions(sum(row.sessions for row in rows))} on {counted(len(rows), 'host')}")
    return " and ".join(told)


def parts_of(claim: Claim, records: Sequence[Record]) -> str:
    """What the step of the claim's rung consists of, the largest part first, and whether its checks prove anything."""
    here = [r for r in records if (r.cell.model, r.cell.ctx) == (claim.model, claim.ctx) and r.outcome == "ok"]
    found = launch.dissected((Kept("shipped", record) for record in here), plan_ladder.EXPERIMENT)
    seen = [each.anatomy for each in found if each.arm == claim.arm]
    text = ""
    if seen:
        parts = sorted((seen[0].parts_ms | {"residual": seen[0].residual_ms}).items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {ms:.2f}" for name, ms in parts if ms >= LEAST_MS)
        text = f"; of a dissected step of {seen[0].step_ms:.2f} ms: {told}"
    checks = [c for r in here if r.cell.experiment == plan_ladder.EXPERIMENT for c in r.checks if c.arm == claim.arm]
    void = sum(not check.proves for check in checks)
    return text + (f"; the check of its logits proves nothing in {void} of {sessions(len(checks))}" if void else "")


OF_ONE_GPU: dict[str, Callable[[Claim, Sequence[Record]], Found | None]] = {"rung-gain": rung_gain}
