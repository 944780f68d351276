"""Whether claims.toml says what the study says, within limits that mean what they say, and rubbish is one line."""

from pathlib import Path

import pytest

from decodegap import claims, measures, published
from decodegap.claims import Claim
from decodegap.errors import BadInputError
from decodegap.paths import HERE

STUDY = published.load(HERE.published)
CLAIMS = claims.load(HERE.claims, STUDY)


RUBBISH = {  # what is in the file (None: a claim with one change), and what is said of it
    "not-toml": ("[[claim]\n", "not TOML"),
    "empty": ("", "something else than [[claim]] tables"),
    "other-key": ("[paper]\nx = 1\n", "something else than [[claim]] tables"),
    "unknown-field": (None, "verdict: Extra inputs are not permitted"),
    "wrong-type": (None, "ctx: Input should be a valid integer"),
    "unknown-gpu": (None, "no GPU of the catalogue is called 'h101'"),
    "unknown-measure": (None, "measure: Input should be 'fraction'"),
    "unknown-model": (None, "no model is called 'gpt'"),
    "no-limits": (None, "give either allowed, or both low and high"),
    "twice": (None, "'one' is there twice"),
    "not-the-studys": (None, "expects 0.28, but the study's floor_fraction there is 0.27"),
    "nan": (None, "expected: Input should be a finite number"),
}
ONE = """[[claim]]
id = "one"
source = "study"
experiment = "baseline"
shown = "table grid"
text = "a fraction"
kind = "ratio"
gpu = "h100"
measure = "fraction"
model = "qwen2.5-7b"
ctx = 2048
arm = "eager"
published = "floor_fraction"
expected = 0.27
allowed = 0.1
why = "hosts differ"
"""
CHANGES = {
    "wrong-type": ("ctx = 2048", 'ctx = "2048"'),
    "unknown-gpu": ('gpu = "h100"', 'gpu = "h101"'),
    "unknown-measure": ('measure = "fraction"', 'measure = "guess"'),
    "unknown-model": ('model = "qwen2.5-7b"', 'model = "gpt"'),
    "no-limits": ("allowed = 0.1\n", ""),
    "twice": ("[[claim]]", ONE + "[[claim]]"),
    "not-the-studys": ("expected = 0.27", "expected = 0.28"),
    "nan": ('published = "floor_fraction"\nexpected = 0.27', "expected = nan"),
    "unknown-field": ("ctx = 2048", 'ctx = 2048\nverdict = "reproduced"'),
}


@pytest.mark.parametrize("case", RUBBISH)
def test_rubbish_in_claims_is_one_line(tmp_path: Path, case: str) -> None:
    text, told = RUBBISH[case]
    text = ONE.replace(*CHANGES[case]) if text is None else text
    path = tmp_path / "claims.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInputError) as caught:
        claims.load(path, STUDY)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert told in str(caught.value)


def test_the_unchanged_claim_loads(tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(ONE, encoding="utf-8")
    assert [claim.id for claim in claims.load(tmp_path / "claims.toml", STUDY)] == ["one"]


@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [("within", (0.9, 1.1, 1.0), (0.89, 1.11)), ("at-least", (0.9, 50.0), (0.89,)), ("at-most", (1.1, -3.0), (1.11,))],
)
def test_limits(bound: str, inside: tuple[float, ...], outside: tuple[float, ...]) -> None:
    base = CLAIMS[0].model_dump() | {"expected": 1.0, "allowed": 0.1, "bound": bound}
    claim = Claim.model_validate(base)
    assert all(claim.holds(value) for value in inside)
    assert not any(claim.holds(value) for value in outside)


def test_measures_are_all_there() -> None:
    known = set(measures.OF_ONE_GPU) | set(measures.TOGETHER) | set(measures.ARITHMETIC)
    assert known == set(claims.MEASURES)


def test_every_published_fraction_ratio_and_quantised_step_is_claimed() -> None:
    claimed = {
        (c.published_gpu or c.gpu, c.model, c.ctx, c.published, c.expected) for c in CLAIMS if c.source == "study"
    }
    for value in STUDY.values:
        wanted = value.quantity in ("floor_fraction", "graph_speedup") or (
            value.quantity == "step_ms" and value.gpu == "l4"
        )
        if wanted:
            assert (value.gpu, value.model, value.ctx, value.quantity, value.value) in claimed
    for gpu in ("h100", "a100", "l40s", "l4"):
        assert {f"{gpu}-min", f"{gpu}-median", f"{gpu}-max"} <= {claim.id for claim in CLAIMS}
