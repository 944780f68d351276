"""Records of the ladder that no machine measured."""

from typing import Any

from factory import dissection, grid, passed, record, rehashed

from decodegap.schema import Record, Sustained

SHARED = {"eager": 20.0, "eager-pinned": 18.0, "graph": 6.7, "graph-static": 6.6, "fused-plain": 3.8, "fused": 3.5}
LONG = {name: 1.1 * step_ms for name, step_ms in SHARED.items()}


def rungs(group: str, steps: dict[str, float], **changes: Any) -> Record:
    """One session of a group of rungs, each with a sustained loop that is 2% slower; the first one is dissected too."""
    where = {name: changes[name] for name in ("gpu", "model", "ctx", "read_gb_s") if name in changes}
    found = record(arm=group, experiment="ladder", arms=steps, **changes)
    state = found.machine and found.machine.after
    made = [
        each.model_copy(
            update={
                "sustained": state and Sustained(
                    steps=600, step_ms=1.02 * each.step_ms, before=state, after=state,
                    during=state.model_copy(update={"sm_clock_mhz": 1830, "power_w": 699.0}),
                ),
                "ran": found.ran,
            }
        )
        for each in found.series
    ]  # fmt: skip
    first = found.session == 1
    return rehashed(
        found,
        series=made,
        checks=[passed(arm) for arm in steps],
        anatomy=[dissection(arm, step_ms, **where) for arm, step_ms in steps.items()] if first else [],
    )


def gpu_records() -> list[Record]:
    """A whole ladder of one cell over three sessions, half of one of another, and a grid that has nothing to do."""
    spread = {1: 1.0, 2: 1.01, 3: 0.99}
    found = [rungs("rungs", {a: k * ms for a, ms in SHARED.items()}, session=s) for s, k in spread.items()]
    found += [rungs("compiled", {"compiled": 5.3 * k}, session=s) for s, k in spread.items()]
    found += [rungs("rungs", LONG, session=2, ctx=16384)]
    lost = rungs("rungs", {a: ms for a, ms in LONG.items() if a != "fused"}, session=1, ctx=16384)
    found += [rehashed(lost, refused={"fused": "not timed, because its check failed: it is wrong"})]
    return [*found, *grid("h200", sessions=1)]
