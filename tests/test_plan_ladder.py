"""Whether the ladder is planned in whole passes, group by group, and whether its order favours no rung."""

from collections import Counter

import pytest
from factory import named

from decodegap import plan, plan_ladder
from decodegap.errors import BadInputError
from decodegap.plan import Task


def planned(gpu: str = "h200", **given: object) -> list[Task]:
    return plan_ladder.ladder(plan.request(gpu=gpu, **given), gpu)


def test_five_cells_get_three_sessions_of_each_group_the_session_outermost() -> None:
    tasks = named(planned())
    cells = [
        ("qwen2.5-7b", 2048),
        ("qwen2.5-7b", 16384),
        ("llama-3.1-8b", 2048),
        ("llama-3.1-8b", 16384),
        ("mistral-7b-v0.3", 2048),
    ]
    assert tasks == [
        *((*cell, "rungs", session) for session in (1, 2, 3) for cell in cells),
        *(("qwen2.5-7b", 2048, "int4", session) for session in (1, 2, 3)),
        *((*cell, "compiled", session) for session in (1, 2, 3) for cell in cells),
    ]
    assert {task.cell.experiment for task in planned()} == {"ladder"}
    assert {task.cell.sdpa for task in planned()} == {"flash"}


def test_every_rung_is_in_exactly_one_group() -> None:
    for groups in (plan_ladder.GROUPS, plan_ladder.CPU_GROUPS):
        rungs = Counter(arm for arms in groups.values() for arm in arms)
        assert set(rungs.values()) == {1}
        assert set(rungs) <= set(plan_ladder.RUNGS)
    assert set(plan_ladder.RUNGS) == {arm for arms in plan_ladder.GROUPS.values() for arm in arms}


def test_a_cpu_has_one_session_of_one_stand_in() -> None:
    assert named(planned("cpu")) == [("qwen2-standin", 128, "rungs", 1)]


def test_parameters_narrow_and_widen() -> None:
    assert {task[:2] for task in named(planned(models="llama-3.1-8b"))} == {
        ("llama-3.1-8b", 2048),
        ("llama-3.1-8b", 16384),
    }
    assert {task[:2] for task in named(planned(models="tiny-llama", contexts="64"))} == {("tiny-llama", 64)}
    assert {task[:2] for task in named(planned(contexts="4096", models="mistral-7b"))} == {("mistral-7b-v0.3", 4096)}
    assert {task[3] for task in named(planned(sessions="2"))} == {1, 2}
    asked = named(planned(models="llama-3.1-8b", contexts="2048"))
    assert {task[2] for task in asked} == {"rungs", "compiled", "int4"}
    for narrowed in ({"models": "qwen2.5-7b"}, {"contexts": "2048"}, {"models": "llama-3.1-8b"}, {"sessions": "1"}):
        assert set(named(planned(**narrowed))) < set(named(planned())), narrowed
    with pytest.raises(BadInputError, match="beyond"):
        planned(models="mistral-7b", contexts="40000")


def test_no_rung_always_follows_the_same_one_and_our_own_come_last() -> None:
    names = plan_ladder.GROUPS["rungs"]
    orders = [plan_ladder.order(names, session) for session in (1, 2, 3, 4)]
    assert orders[0] == names
    for order in orders:
        assert sorted(order) == sorted(names)
        assert set(order[-2:]) == set(plan_ladder.FUSED)
    for name in names[:4]:
        assert len({order.index(name) for order in orders}) == 4
    assert {order[-1] for order in orders} == set(plan_ladder.FUSED)
