"""Records of the launch experiment that no machine measured."""

from factory import checked, grid, pair, single

from decodegap.schema import Record

RATIOS = (2.52, 2.61, 2.55, 2.7, 2.48, 2.66, 2.58, 2.59, 2.63, 3.4)


def gpu_records() -> list[Record]:
    """Ten A/B sessions and every arm of one cell, one A/B session and no arm of another."""
    ten = [pair(ratio, session=k, started_at=f"2026-06-02T0{k % 10}:00:00Z") for k, ratio in enumerate(RATIOS, 1)]
    arms = {"eager": 18.5, "eager-auto": 60.0, "graph-static": 7.2, "graph-stock": 8.6, "compiled": 5.5}
    errors = {"eager": 0.05, "eager-auto": 0.049, "eager-pinned": 0.05, "graph": 0.05, "compiled": 0.2}
    return [
        *ten,
        *(single(arm, step_ms, session=k) for arm, step_ms in arms.items() for k in (1, 2)),
        checked(errors),
        pair(2.2, model="llama-3.1-8b", ctx=16384, equal=False),
        *grid("h200", sessions=1, host="bb"),
    ]
