"""Whether the study's numbers are read strictly, under our names, and kept apart from what they imply."""

import json
from pathlib import Path
from typing import Any

import pytest

from decodegap import floor, gpus, models, published
from decodegap.errors import BadInputError
from decodegap.paths import HERE


@pytest.fixture
def study() -> published.Published:
    return published.load(HERE.published)


@pytest.fixture
def edited(tmp_path: Path) -> Any:
    def edit(change: Any) -> Path:
        data = json.loads(HERE.published.read_text(encoding="utf-8"))
        change(data)
        path = tmp_path / "published.json"
        path.write_text(json.dumps(data), encoding="utf-8")
        return path

    return edit


def test_all_values_are_there_with_a_described_source(study: published.Published) -> None:
    everything = list(study.values)
    assert len(everything) == 49
    assert sum(v.quantity == "floor_fraction" for v in everything) == 17
    assert {v.source for v in everything} <= set(study.sources)


def test_models_have_our_names(study: published.Published) -> None:
    found = study.find("weight_gb", model="mistral-7b-v0.3")
    assert found is not None
    assert found.value == pytest.approx(models.lookup("mistral-7b").weight_bytes("bfloat16") / 1e9, abs=0.005)


def test_published_quantities_agree_with_our_arithmetic(study: published.Published) -> None:
    for value in study.values:
        if value.quantity == "kv_kib_per_token" and value.model:
            assert models.lookup(value.model).kv_bytes(1, "bfloat16") / 1024 == value.value
        if value.quantity == "weight_gb" and value.model:
            assert models.lookup(value.model).weight_bytes("bfloat16") / 1e9 == pytest.approx(value.value, abs=0.005)
        if value.quantity == "peak_gb_s" and value.gpu:
            assert gpus.catalogue()[value.gpu].peak_gb_s == value.value


def test_look_ups_know_what_is_quoted_and_what_is_not(study: published.Published) -> None:
    assert study.fraction("l4", "qwen2.5-7b", 2048) == 0.81
    assert study.fraction("l4", "qwen2.5-7b", 16384) is None
    assert study.excluded("l4", "qwen2.5-7b", 8192)
    assert not study.excluded("l4", "qwen2.5-7b", 16384)
    assert {v.quantity for v in study.cell("l4", "qwen2.5-7b", 8192)} == {"excluded_oom"}
    speedup = study.find("graph_speedup", gpu="h100", model="qwen2.5-7b", ctx=2048)
    assert speedup is not None
    assert speedup.ci95 == [1.253, 1.267]


def test_the_implied_step_is_the_floor_over_the_fraction(study: published.Published) -> None:
    n_bytes = 15_231_233_024 + 2048 * 57_344
    assert study.implied_step_ms("h100", "qwen2.5-7b", 2048) == pytest.approx(floor.floor_ms(n_bytes, 3350) / 0.27)
    assert study.implied_step_ms("h100", "qwen2.5-7b", 2048) == pytest.approx(16.97, abs=0.005)
    assert study.implied_step_ms("h200", "qwen2.5-7b", 2048) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["values"][5].update(value="0.27"), "values.5.value"),
        (lambda d: d["values"][5].update(value=1.27), "between 0 and 1"),
        (lambda d: d["values"][5].update(value=None), "h100 qwen2.5-7b 2048 floor_fraction"),
        (lambda d: d["values"][0].update(value=None), "a value is missing"),
        (lambda d: d["values"][5].update(ctx="most"), "values.5.ctx"),
        (lambda d: d["values"][5].update(colour="red"), "values.5.colour"),
        (lambda d: d["values"][5].update(gpu="h300"), "h300"),
        (lambda d: d["values"][5].update(model="gpt-9"), "gpt-9"),
        (lambda d: d["values"][5].update(source="hearsay"), "hearsay"),
        (lambda d: d["values"].append(d["values"][5]), "given twice"),
        (lambda d: d.pop("values"), "not the study's values"),
        (lambda d: d.update(values=[1]), "not the study's values"),
    ],
)
def test_rubbish_is_one_line_that_names_it(edited: Any, change: Any, named: str) -> None:
    path = edited(change)
    with pytest.raises(BadInputError) as caught:
        published.load(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"[" * 100_000])
def test_what_is_not_json_of_ours_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "published.json"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match="restore it with git"):
        published.load(path)
    with pytest.raises(BadInputError, match="cannot be read"):
        published.load(tmp_path / "absent.json")
