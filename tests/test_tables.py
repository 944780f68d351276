"""Whether tables say what a value is, in bytes that do not change, and in LaTeX that prints what was meant."""

import csv
import io
import re

import pytest
from exhibiting import STUDY, golden, golden_table, on_cpu, shipped, yours
from factory import grid, record
from hypothesis import example, given
from hypothesis import strategies as st

from decodegap import frame, numbers, render, tables


@pytest.mark.parametrize("name", ["grid", "grid_yours", "cpu"])
def test_tables_have_the_golden_bytes(name: str) -> None:
    if name == "cpu":
        table = tables.cpu(frame.build([], on_cpu()))
    else:
        table = tables.grid(frame.build(shipped(), yours() if name == "grid_yours" else []), STUDY)
    golden_table(name, table)


def test_macros_have_the_golden_bytes() -> None:
    found = frame.build(shipped())
    golden("numbers.tex", numbers.latex(numbers.macros(found, STUDY), frame.records_hash(found)).encode())


def test_what_a_block_has_in_common_stands_above_it_in_print() -> None:
    tex = render.latex(tables.grid(frame.build(shipped()), STUDY))
    assert tex.count(r"\multicolumn{11}{@{}l}{\textit{") == 5
    assert r"\textit{H200 SXM}" in tex
    assert "measured, shipped" not in tex
    assert "& shipped" in tex
    single = render.Table("t", "c", ("a", "b"), (("1", "2"), ("3", "4")), ("x", "y"), (False, True), (), (), "0")
    assert "multicolumn" not in render.latex(single)
    assert r"1 & 2 \\" in render.latex(single)


def test_a_table_longer_than_a_page_goes_on_on_the_next() -> None:
    def long(blocks: int, lines: int) -> str:
        rows = tuple((f"block {b}", str(n)) for b in range(blocks) for n in range(lines))
        groups = tuple(row[0] for row in rows)
        return render.latex(render.Table("t", "c", ("a", "b"), rows, groups, (False, True), ("n",), (), "0"))

    whole, split = long(3, 20), long(4, 20)
    assert whole.count(r"\begin{table*}") == whole.count(r"\toprule") == 1
    assert split.count(r"\begin{table*}") == split.count(r"\end{table*}") == split.count(r"\toprule") == 2
    assert split.count(r"\caption") == split.count(r"\label") == split.count(r"\scriptsize") == 1
    second = split.split(r"Table~\ref{tab:t}, continued.")[1]
    assert r"\textit{block 3}" in second
    assert [split.count(f"{n} \\\\\n") >= 4 for n in range(10, 20)] == [True] * 10


def rows_of(table: render.Table, **wanted: object) -> list[dict[str, str]]:
    lines = csv.DictReader(io.StringIO(render.csv_text(table)))
    return [line for line in lines if all(line[key] == str(value) for key, value in wanted.items())]


def test_every_cell_of_the_studys_gpus_is_there_and_kinds_are_never_mixed() -> None:
    table = tables.grid(frame.build([]), STUDY)
    assert len(table.rows) == len(table.data) == 4 * 12
    kinds = [line["kind"] for line in rows_of(table)]
    assert (kinds.count("published"), kinds.count("missing"), kinds.count("measured")) == (17, 31, 0)
    (l4,) = rows_of(table, gpu="l4", model="qwen2.5-7b", ctx=2048)
    assert (l4["step_kind"], l4["fraction_published_kind"], l4["fraction_streamed_kind"]) == (
        "implied",
        "published",
        "implied",
    )
    assert l4["fraction_achievable"] == ""


def test_missing_cells_say_why() -> None:
    table = tables.grid(frame.build(shipped()), STUDY)
    reasons = {(d["gpu"], d["model"], d["ctx"]): d["reason"] for d in table.data if d["kind"] == "missing"}
    assert reasons["l4", "qwen2.5-7b", 8192] == "oom: asked for 1.5 GB"
    assert reasons["l4", "qwen2.5-7b", 16384] == "not quoted"
    alone = tables.grid(frame.build([]), STUDY)
    assert rows_of(alone, gpu="l4", model="qwen2.5-7b", ctx=8192)[0]["reason"] == "out of memory in the study"


def test_a_measured_cell_stands_beside_the_published_one() -> None:
    table = tables.grid(frame.build([], [record(gpu="h100", step_ms=15.0)]), STUDY)
    here = rows_of(table, gpu="h100", model="qwen2.5-7b", ctx=2048)
    assert [(line["kind"], line["store"]) for line in here] == [("measured", "yours"), ("published", "")]
    assert float(here[0]["floor_published_ms"]) == pytest.approx(float(here[1]["floor_published_ms"]))
    assert float(here[0]["fraction_published"]) == pytest.approx(4.582 / 15.0, rel=1e-3)


def test_an_unknown_gpu_and_an_extra_context_join_the_grid() -> None:
    table = tables.grid(frame.build([], [record(gpu="nvidia-test-card", ctx=1024)]), STUDY)
    assert len(rows_of(table, gpu="nvidia-test-card")) == 13
    assert rows_of(table, gpu="nvidia-test-card", ctx=1024)[0]["peak_source"] == "derived"


def test_a_range_is_called_a_range_and_hosts_are_shown_apart() -> None:
    text = render.markdown(tables.grid(frame.build(shipped(), yours()), STUDY))
    assert "(range " in text
    assert re.search(r"\d \[\d", text)
    assert "measured, yours, host 1 of 2" in text
    assert "measured, yours, host 2 of 2" in text
    assert "Flag power cap" in text


def test_a_stand_in_near_the_size_of_the_cache_is_flagged() -> None:
    lines = rows_of(tables.cpu(frame.build([], on_cpu())))
    assert {(line["model"], line["floor_applies"]) for line in lines} == {
        ("llama-standin", "True"),
        ("qwen2-standin", "False"),
        ("mistral-standin", "False"),
    }


def test_flags_that_differ_in_numbers_are_one_note() -> None:
    loaded = [record(session=k, flags=[f"load {k}.5 on 2 cores"]) for k in (1, 2)]
    notes = tables.grid(frame.build(loaded), STUDY).notes
    assert [note for note in notes if note.startswith("Flag")] == ["Flag load … on … cores: every measured cell."]
    (one,) = [
        note for note in tables.grid(frame.build([*loaded[:1], *grid("l4", sessions=1)]), STUDY).notes if "Flag" in note
    ]
    assert one == "Flag load 1.5 on 2 cores: h200 qwen2.5-7b 2048."


def test_csv_holds_unrounded_values() -> None:
    measured = frame.build(shipped())
    line = rows_of(tables.grid(measured, STUDY), gpu="h200", ctx=2048)[0]
    assert float(line["step_ms"]) == measured.iloc[-12]["step_ms"]


def test_latex_rows_have_as_many_fields_as_columns_and_balanced_braces() -> None:
    text = render.latex(tables.grid(frame.build(shipped(), yours()), STUDY))
    body = text.split(r"\toprule")[1].split(r"\bottomrule")[0]
    lines = [line for line in body.splitlines() if line.endswith(r"\\")]
    headings = [line for line in lines if line.startswith(r"\multicolumn{11}")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines if line not in headings} == {10}
    assert not [line for line in headings if "&" in line]
    assert text.count("{") == text.count("}")
    assert text.isascii()


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=40))
@example("a_b & 50% of $x$ #1 {y} ~ ^ \\ [z] 3.1–3.2 §†")
def test_escaped_text_holds_no_special_character(text: str) -> None:
    escaped = render.latex_escape(text)
    rest = re.sub(r"\\(textbackslash|textasciitilde|textasciicircum|[a-zA-Z]+)\{\}|\\[&%$#_{}]|\{[\[\]]\}", "", escaped)
    rest = rest.replace(r"\ensuremath{\geq}", "")
    assert not set(rest) & set("\\&%$#_{}~^\n\r")
    assert len(escaped) >= len(text)


def test_macros_are_letters_and_say_when_nothing_is_measured() -> None:
    alone, measured = (numbers.macros(frame.build(records), STUDY) for records in ([], shipped()))
    assert all(name.isascii() and name.isalpha() for name in measured)
    assert set(alone) == set(measured)
    assert alone["StepHTwoZeroZeroQwenTwoK"] == "n/m"
    assert measured["StepHTwoZeroZeroQwenTwoK"] == "20.69"
    assert measured["FractionHTwoZeroZeroQwenTwoK"] == "0.155"
    assert measured["PublishedFractionHOneZeroZeroLlamaSixteenK"] == "0.208"
    assert measured["CellsHTwoZeroZero"] == "12"
    assert "StepHOneZeroZeroQwenTwoK" not in measured  # the text speaks of no other GPU's measurements


def test_only_shipped_records_speak_in_the_text_and_hosts_are_a_span() -> None:
    assert numbers.macros(frame.build([], yours()), STUDY)["StepHTwoZeroZeroQwenTwoK"] == "n/m"
    two_hosts = numbers.macros(frame.build(yours()), STUDY)
    assert two_hosts["StepHTwoZeroZeroQwenTwoK"] == "18.50–30.00"
