"""Whether what is predicted is marked as that wherever it stands, and only what nobody knows is."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from exhibiting import STUDY, lines, texts, view
from factory import checkout, write
from factory_launch import gpu_records

from decodegap import exhibits, numbers, plan, predict, render, standing
from decodegap import grid as cells
from decodegap.exhibits import View


@pytest.fixture(scope="module")
def paper() -> View:
    return view(gpu_records())


def test_every_published_cell_is_predicted_marked_and_none_is_fitted(paper: View) -> None:
    table = exhibits.table(paper, "predictions")
    found = lines(table)
    assert [line["quantity"] for line in found].count("floor_fraction") == 17
    assert [line["gpu"] for line in found if line["quantity"] == "graph_speedup"] == ["h100", "l4"]
    assert {(line["kind"], line["fitted"]) for line in found} == {("predicted", "False")}
    for row in table.rows:
        assert row[4].endswith("†")
        assert row[5].endswith("‡")
    for line in found:
        assert float(line["low"]) <= float(line["mid"]) <= float(line["high"])
        assert float(line["error"]) == pytest.approx(float(line["mid"]) / float(line["published"]) - 1)


def test_the_notes_say_where_the_model_is_wrong(paper: View) -> None:
    notes = exhibits.table(paper, "predictions").notes
    inside = sum(
        line["holds"] == "True" for line in lines(exhibits.table(paper, "predictions"), quantity="floor_fraction")
    )
    assert any(note.startswith(f"Of 17 published fractions {inside} lie in the predicted range") for note in notes)
    assert any("most of the error is in the" in note and "11.78†" in note for note in notes)
    assert any(note.startswith("Growth of the step") for note in notes)
    assert "No step-time model" in " ".join(exhibits.table(view([]), "predictions").notes)


def test_no_device_time_is_shorter_than_its_bytes_at_the_peak(paper: View) -> None:
    assert paper.fitted is not None
    tight = dataclasses.replace(paper.fitted, spread=predict.Span(0.1, 1.0, 1.1))
    found = predict.step(tight, "l4", "qwen2.5-7b", 2048)
    assert found.device_ms.low == pytest.approx((14.141e9 + 3 * 0.11744e9) / 300e6, rel=1e-3)


def test_the_grid_predicts_only_what_nobody_knows(paper: View) -> None:
    before = {(e.gpu, e.model, e.ctx): e for e in cells.entries(paper.frame, STUDY) if e.kind == "missing"}
    after = cells.entries(paper.frame, STUDY, paper.fitted)
    predicted = {(e.gpu, e.model, e.ctx): e for e in after if e.kind == "predicted"}
    assert set(predicted) < set(before)
    assert all(e.gpu in ("h100", "a100", "l40s", "l4") for e in predicted.values())
    left = {(e.gpu, e.model, e.ctx) for e in after if e.kind == "missing"}
    assert left == {("l4", "qwen2.5-7b", 8192), ("l4", "qwen2.5-7b", 16384)}  # did not fit, so would not with more
    for entry in predicted.values():
        low, high = entry.fractions["published"].between or (0, 0)
        assert low <= (entry.fractions["published"].value or 0) <= high
    text = render.markdown(exhibits.table(paper, "grid"))
    assert "‡: predicted by the step-time model" in text
    assert re.search(r"0\.\d{3}‡ \(\d\.\d\d–\d\.\d\d\)", text)


def test_the_heatmap_marks_predictions_and_says_what_the_mark_means(paper: View) -> None:
    found = texts(exhibits.figure(paper, "heatmap"))
    marked = [text for text in found if re.fullmatch(r"\.\d\d‡", text)]
    assert len(marked) == 4 * 12 - 17 - 2
    assert any("‡ predicted by the step-time model" in text for text in found)


def test_a_summary_says_predicted_with_its_range_and_published_for_the_studys_ab(tmp_path: Path) -> None:
    at = checkout(tmp_path / "checkout")
    write(gpu_records(), at.results)

    def said(gpu: str, planned: Callable[[plan.Request, str], list[plan.Task]]) -> dict[tuple[str, int, str], str]:
        tasks = planned(plan.request(gpu=gpu), gpu)
        lines = standing.lines(gpu, tasks, at.local, at)
        return {(line.cell.model, line.cell.ctx, line.cell.arm): f"{line.kind}: {line.reason}" for line in lines}

    grid_of_h100 = said("h100", plan.baseline)
    text = grid_of_h100["mistral-7b-v0.3", 2048, "eager"]
    shape = r"predicted: not quoted, not measured; 0\.\d{3}, 0\.\d{3} to 0\.\d{3} of the published floor"
    assert re.fullmatch(shape, text)
    assert grid_of_h100["qwen2.5-7b", 2048, "eager"].startswith("published")
    assert said("l4", plan.baseline)["qwen2.5-7b", 16384, "eager"].startswith("missing")
    graphs_of_h100 = said("h100", plan.graphs)
    assert graphs_of_h100["qwen2.5-7b", 2048, "ab"].startswith("published")
    assert graphs_of_h100["llama-3.1-8b", 2048, "ab"].startswith("missing")


def test_macros_of_the_model_have_the_same_names_without_records(paper: View) -> None:
    some, none = numbers.predictions(paper.fitted, STUDY), numbers.predictions(None, STUDY)
    assert set(some) == set(none)
    assert set(none.values()) == {"n/m"}
    assert some["PredictionCells"] == "17"
    assert all(name.isalpha() for name in some)
