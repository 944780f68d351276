"""Whether what is told of the claims, by `make verify`, in the paper and in tables, is what the verdicts say."""

import json
from pathlib import Path

import pytest
from factory import grid, record, write
from factory_ladder import rungs

from decodegap import claims, cli, frame, published, review, tables_review, tensions, verdicts
from decodegap.paths import HERE

STUDY = published.load(HERE.published)
CLAIMS = claims.load(HERE.claims, STUDY)


def test_what_is_not_reproduced_is_said_where_it_is_read() -> None:
    """A missed must is shipped as what it is: in the paper, beside the table of claims, at the end of `make verify`."""
    assert r"\input{generated/missed}" in (HERE.paper / "main.tex").read_text(encoding="utf-8")
    found = review.judged()
    missed = sorted(v.claim.id for v in found if v.word == "not reproduced")
    files = {
        "missed.tex": (HERE.generated / "missed.tex").read_text(encoding="utf-8"),
        "claims.md": section((HERE.generated / "claims.md").read_text(encoding="utf-8"), "## Not reproduced"),
    }
    for name, text in files.items():
        assert [claim.id for claim in CLAIMS if f"({claim.id}): " in text] == [
            claim.id for claim in CLAIMS if claim.id in missed
        ], name
    (last,) = [line for line in review.lines(found, []) if line.startswith("Not reproduced: ")]
    assert sorted(last.removeprefix("Not reproduced: ").split(", ")) == (missed or ["none"])


def section(text: str, heading: str) -> str:
    """What stands under a heading of a Markdown file."""
    return text.partition(f"{heading}\n")[2].partition("\n## ")[0]


def test_a_missed_must_is_listed_before_goals_with_what_holds_the_step_back(tmp_path: Path) -> None:
    steps = {"fused-plain": 4.4, "fused": 4.2}
    found = verdicts.judge(CLAIMS, STUDY, [rungs("rungs", steps)])
    missed = review.missed_claims(found)
    assert [v.claim.id for v in missed] == ["fused-qwen-2048", "fused-qwen-2048-goal"]
    assert missed[0].detail.startswith("1 session; of a dissected step of 4.20 ms: floor 3.30, kernel inefficiency ")
    files = {path.name: content.decode() for path, content in review.files(tmp_path, found, [], "0" * 64)}
    for name in ("missed.tex", "claims.md"):
        assert files[name].index("(fused-qwen-2048)") < files[name].index("(fused-qwen-2048-goal)")
    none = {path.name: content.decode() for path, content in review.files(tmp_path, [], [], "0" * 64)}
    assert r"\item None." in none["missed.tex"]


def test_verify_says_the_verdicts_about_the_gpu_of_the_run_first() -> None:
    found = verdicts.judge(CLAIMS, STUDY, [*grid("h200"), *grid("l4")])
    said = list(review.lines(found, [], "l4"))
    heads = [said.index(text) for text in ("About l4:", "About other GPUs, the study's together, and arithmetic:")]
    first = said[heads[0] + 1 : heads[1]]
    about = [v for v in found if v.gpu == "l4"]
    assert heads[0] == 0
    assert len(first) == 2 * len(about) > 0
    assert said[-1].startswith("of these, about l4: ")
    assert sorted(said[1 : heads[1]] + said[heads[1] + 1 : -2]) == sorted(list(review.lines(found, []))[:-1])
    assert not [line for line in review.lines(found, [], "b200") if line.startswith("About ")]  # none is about it


def test_verify_prints_writes_and_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write([record(gpu="l4", step_ms=90.0)], tmp_path)
    for name in ("MODELS", "CONTEXTS", "SESSIONS", "EXPERIMENTS", "WEIGHTS", "REQUIRE", "STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPU", "l4")
    monkeypatch.setenv("RESULTS", str(tmp_path))
    assert cli.main(["verify"]) == 0
    shown = capsys.readouterr().out
    assert "Headline: L4, Qwen2.5-7B, ctx 2048: fraction of the floor: not reproduced" in shown
    missed = 1 + sum(verdict.word == "not reproduced" for verdict in review.judged())  # the L4's, and shipped goals
    assert f"{missed} not reproduced" in shown
    written = {path.name for path in (tmp_path / "l4" / "report").iterdir()}
    assert {"claims.md", "claims.csv", "claims.tex", "claims.json"} <= written
    data = json.loads((tmp_path / "l4" / "report" / "claims.json").read_text(encoding="utf-8"))
    assert data["counts"]["not reproduced"] == missed
    monkeypatch.setenv("STRICT", "1")
    assert cli.main(["verify"]) == 1
    goals = sum(v.word == "not reproduced" and v.claim.id.endswith(review.GOAL) for v in review.judged())
    musts = missed - goals
    said = f"STRICT: {musts} claim{'s' * (musts > 1)} and {goals} goals not reproduced, first "
    assert capsys.readouterr().err.partition(said)[2].startswith("Headline: L4")  # what must hold before the goals


def test_tensions_are_recomputed_from_the_published_numbers(tmp_path: Path) -> None:
    found = {each.id: each for each in tensions.findings(STUDY)}
    assert found["h100-headline"].numbers["implied_ms"] == pytest.approx(16.97, abs=0.005)
    assert found["h100-headline"].numbers["fraction_from_quoted"] == pytest.approx(0.309, abs=0.0005)
    assert found["counted-bytes"].numbers["everything_gb"] == pytest.approx(15.35, abs=0.005)
    assert found["counted-bytes"].numbers["blocks_gb"] == pytest.approx(13.16, abs=0.02)
    assert (
        10 < found["what-graphs-leave"].numbers["gap_ms"] < found["what-graphs-leave"].numbers["implied_gap_ms"] < 12.5
    )
    assert found["l4-baseline"].numbers["implied_ms"] == pytest.approx(63.16, abs=0.005)
    data = json.loads(HERE.published.read_text(encoding="utf-8"))
    for value in data["values"]:
        if (value["gpu"], value["ctx"], value["quantity"]) == ("h100", 2048, "floor_fraction"):
            value["value"] = 0.309
    path = tmp_path / "published.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    changed = {each.id: each for each in tensions.findings(published.load(path))}
    assert changed["h100-headline"].numbers["implied_ms"] == pytest.approx(14.83, abs=0.02)


def test_costs_are_sums_of_the_records() -> None:
    table = tables_review.costs([record(session=k) for k in (1, 2)], "0" * 64)
    assert table.data[0]["sessions"] == 2
    assert table.data[0]["minutes"] == pytest.approx(2 * 6.0 / 60)


def test_actions_are_rates_of_the_measured_step() -> None:
    arms = {"eager-pinned": 20.0, "graph": 8.0}
    found = [
        record(experiment="graphs", arm="ab", arms=arms),
        record(step_ms=25.0),
        record(outcome="oom", ctx=4096, reasons=["asked for 9 GB"]),
    ]
    table = tables_review.actions(frame.build(found), STUDY)
    rows = {row["arm"]: row for row in table.data}
    assert set(rows) == {"eager-pinned", "graph", "eager"}
    assert rows["graph"]["tokens_per_s"] == pytest.approx(125.0)
    assert rows["graph"]["actions_8_per_s"] == pytest.approx(125.0 / 8)
    assert rows["eager"]["actions_256_per_s"] == pytest.approx(40.0 / 256)
    assert rows["graph"]["j_per_token"] == 6.5
