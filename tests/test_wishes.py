"""Which one cell `make bench-kernels` is asked for; what `make tune` is asked for stands with the tuner's tests."""

import pytest

from decodegap import wishes
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
