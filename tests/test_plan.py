"""What a user may ask for, and which sessions that becomes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodegap import parameters, plan
from decodegap.errors import BadInputError, DecodeGapError


def test_the_default_grid_on_a_gpu_is_the_studys() -> None:
    tasks = plan.baseline(plan.request(gpu="h200"), "h200")
    cells = {(task.cell.model, task.cell.ctx) for task in tasks}
    assert len(tasks) == 36
    assert cells == {
        (model, ctx) for model in ("qwen2.5-7b", "llama-3.1-8b", "mistral-7b-v0.3") for ctx in (2048, 4096, 8192, 16384)
    }
    assert {task.cell.dtype for task in tasks} == {"bfloat16"}
    assert {task.cell.sdpa for task in tasks} == {"flash"}


def test_the_session_index_is_outermost() -> None:
    tasks = plan.baseline(plan.request(gpu="h200", sessions=2), "h200")
    assert [task.session for task in tasks] == [1] * 12 + [2] * 12


def test_a_cpu_measures_stand_ins() -> None:
    tasks = plan.baseline(plan.request(gpu="cpu"), "cpu")
    assert {task.cell.model for task in tasks} == {"qwen2-standin", "llama-standin", "mistral-standin"}
    assert {task.cell.dtype for task in tasks} == {"float32"}


def test_narrowing_takes_text_or_lists_and_aliases() -> None:
    text = plan.request(gpu="h200", models="mistral-7b, qwen2.5-7b", contexts="2048 64", sessions="1")
    lists = plan.request(gpu="h200", models=["mistral-7b-v0.3", "qwen2.5-7b"], contexts=[2048, 64], sessions=1)
    assert text == lists
    assert len(plan.baseline(text, "h200")) == 4


@pytest.mark.parametrize(
    ("given_", "named"),
    [
        ({"gpu": "../x"}, "'../x'"),
        ({"gpu": "H100"}, "'H100'"),
        ({"gpu": 7}, "7"),
        ({"models": "gpt-9"}, "MODELS: no model is called 'gpt-9'"),
        ({"models": "../../etc"}, "'../../etc'"),
        ({"models": 3.5}, "MODELS: 3.5"),
        ({"models": [7]}, "MODELS: no model is called 7"),
        ({"models": ","}, "','"),
        ({"contexts": " , "}, "' , '"),
        ({"contexts": "2k"}, "CONTEXTS: '2k'"),
        ({"contexts": "0"}, "'0'"),
        ({"contexts": "-1"}, "'-1'"),
        ({"contexts": "007"}, "'007'"),
        ({"contexts": [2048.0]}, "2048.0"),
        ({"contexts": "٣"}, "'٣'"),
        ({"sessions": float("inf")}, "inf"),
        ({"sessions": True}, "True"),
        ({"sessions": "1e3"}, "'1e3'"),
        ({"sessions": 0}, "0"),
        ({"sessions": 10**30}, "1000"),
        ({"weights": "real"}, "'real'"),
        ({"weights": "./no-such-folder"}, "'./no-such-folder'"),
        ({"weights": None}, "None"),
    ],
)
def test_nonsense_is_refused_in_one_line_that_names_it(given_: dict[str, object], named: str) -> None:
    with pytest.raises(BadInputError) as caught:
        plan.request(**given_)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(BadInputError, match="32768 positions of mistral"):
        plan.baseline(plan.request(gpu="h200", models="mistral-7b", contexts="40000"), "h200")


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.text(max_size=8), max_size=3),
)


@given(gpu=anything, models=anything, contexts=anything, sessions=anything, weights=anything)
def test_any_parameters_give_a_request_or_one_line(**given_: object) -> None:
    message = ""
    try:
        assert 0 <= plan.request(**given_).sessions <= plan.MAX_SESSIONS
    except DecodeGapError as error:
        message = str(error)
    assert "\n" not in message


def test_a_task_survives_the_trip_to_its_session() -> None:
    for task in plan.baseline(plan.request(gpu="cpu"), "cpu"):
        assert plan.task_from_json(plan.task_to_json(task)) == task


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", json.dumps({"cell": {}, "session": 1})])
def test_a_session_refuses_what_is_not_a_task(text: str) -> None:
    with pytest.raises(BadInputError):
        plan.task_from_json(text)


def test_an_unknown_notebook_parameter_is_named() -> None:
    with pytest.raises(BadInputError, match=r"'modles' is unknown.*models"):
        parameters.notebook_parameters(
            {"modles": "x", "gpu": "cpu", "plan": plan, "In": [], "_i": ""}, ["gpu", "models"]
        )


def test_known_notebook_parameters_come_back() -> None:
    assert parameters.notebook_parameters({"gpu": "cpu", "plan": plan, "_x": 1}, ["gpu", "models"]) == {"gpu": "cpu"}


def test_the_protocol_hash_moves_with_every_field() -> None:
    base = plan.protocol("h200", "synthetic", "a")
    changed = [
        base.model_copy(update={name: value})
        for name, value in {
            "version": 99,
            "warmup_steps": 6,
            "measured_steps": 31,
            "free_steps": 31,
            "energy_seconds": 0.0,
            "seed": 1,
            "prefill_chunk": 256,
            "timing": "other",
            "weights": "hub",
            "weights_revision": "b",
        }.items()
    ]
    assert set(type(base).model_fields) == {
        name for other in changed for name in type(base).model_fields if getattr(other, name) != getattr(base, name)
    }
    assert len({base.digest(), *(other.digest() for other in changed)}) == 11
