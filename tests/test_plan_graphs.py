"""Whether the launch experiment is planned so that its checks and its published cell come first."""

import pytest
from factory import named

from decodegap import plan
from decodegap.errors import BadInputError
from decodegap.plan import Task


def planned(gpu: str = "h200", **given: object) -> list[Task]:
    return plan.graphs(plan.request(gpu=gpu, **given), gpu)


def test_every_model_and_context_is_checked_once_and_first() -> None:
    tasks = named(planned())
    checks = [task for task in tasks if task[2] == "check"]
    assert tasks[: len(checks)] == checks
    assert [check[:2] for check in checks] == [
        ("qwen2.5-7b", 2048),
        ("qwen2.5-7b", 16384),
        ("llama-3.1-8b", 2048),
        ("llama-3.1-8b", 16384),
    ]


def test_the_published_pair_gets_ten_sessions_and_the_rest_whole_passes_of_three() -> None:
    timed = [task for task in named(planned()) if task[2] != "check"]
    assert timed[:10] == [("qwen2.5-7b", 2048, "ab", session) for session in range(1, 11)]
    rest = timed[10:]
    assert [task[3] for task in rest] == sorted(task[3] for task in rest)
    one_pass = [task[:3] for task in rest if task[3] == 1]
    assert len(one_pass) == 3 + 4 * 5
    assert len(rest) == 3 * len(one_pass)
    assert {task[2] for task in rest} == {"ab", "eager", "eager-auto", "graph-static", "graph-stock", "compiled"}


def test_sdpa_is_pinned_except_where_pytorchs_choice_is_the_point() -> None:
    asked = {task.cell.arm: task.cell.sdpa for task in planned()}
    assert {arm for arm, sdpa in asked.items() if sdpa == "auto"} == {"check", "eager-auto", "graph-stock"}
    assert {sdpa for arm, sdpa in asked.items() if sdpa != "auto"} == {"flash"}


def test_a_cpu_compares_eager_with_compiled() -> None:
    assert named(planned("cpu")) == [
        ("qwen2-standin", 128, "check", 1),
        *(("qwen2-standin", 128, "ab-compiled", session) for session in (1, 2, 3)),
    ]


def test_parameters_narrow_and_widen() -> None:
    tasks = named(planned(models="mistral-7b", contexts="4096", sessions="2"))
    assert {task[:2] for task in tasks} == {("mistral-7b-v0.3", 4096)}
    assert [task[3] for task in tasks if task[2] == "ab"] == [1, 2]
    assert [task[3] for task in tasks if task[2] == "compiled"] == [1, 2]
    with pytest.raises(BadInputError, match="beyond"):
        planned(models="mistral-7b", contexts="16777216")


def test_a_task_knows_its_check() -> None:
    tasks = planned()
    checks = {(task.cell.model, task.cell.ctx): task for task in tasks if task.cell.arm == "check"}
    for task in tasks:
        assert plan.check_task(task) == checks[task.cell.model, task.cell.ctx]
