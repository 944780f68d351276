"""Which cell `make bench-kernels` is asked for; most of what `make tune` is asked for stands with the tuner's tests."""

import pytest

from decodegap import models, wishes
from decodegap.errors import BadInputError


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"MODEL": "gpt-9"}, "MODEL: no model is called 'gpt-9'"),
        ({"MODEL": "qwen2.5-7b,llama-3.1-8b"}, "one of each"),
        ({"CTX": "1,2"}, "one of each"),
        ({"CTX": "99999999"}, "CTX: '99999999'"),
        ({"CTX": "50000", "MODEL": "mistral-7b"}, "beyond"),
    ],
)
def test_bad_settings_are_one_line(env: dict[str, str], named: str) -> None:
    with pytest.raises(BadInputError) as caught:
        wishes.cell(env)
    assert named in str(caught.value)


def test_the_first_cell_of_the_ladder_is_the_usual_one() -> None:
    assert wishes.cell({}) == ("qwen2.5-7b", 2048)


def test_a_context_that_ends_at_the_model_s_last_position_is_none_too_long() -> None:
    longest = models.lookup("mistral-7b").config["max_position_embeddings"]
    assert wishes.cell({"MODEL": "mistral-7b", "CTX": str(longest)}) == ("mistral-7b-v0.3", longest)
    with pytest.raises(BadInputError, match=f"CTX: {longest + 1} is beyond the {longest} positions of mistral-7b-v0.3"):
        wishes.wish({"MODEL": "llama-3.1-8b,mistral-7b", "CTX": str(longest + 1)})
