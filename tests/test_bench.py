"""What `make bench` says of the bundle's own cost, with a real session on this CPU."""

import re
from pathlib import Path

import pytest
from factory import record, write

pytest.importorskip("torch")

from decodegap import bench, report


def test_each_cost_is_a_line_and_the_store_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rebuilt: list[set[str]] = []
    monkeypatch.setattr(report, "rebuild", lambda _, what, **_given: rebuilt.append(what))  # test_report.py's
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "IMPORTED", ("decodegap.cli",))
    write([record(durations_s={"import": 4.0, "measure": 0.5}), record(ctx=8192, outcome="oom")], tmp_path)
    before = sorted(tmp_path.rglob("*"))
    imports, local, session, found, paper = bench.lines(tmp_path)
    assert re.fullmatch(r"start Python and import decodegap\.cli: \d+\.\d\d s", imports)
    assert local == "1 local session on h200, median seconds: import 4.00, measure 0.50"
    whole_s, *phases_s = map(float, re.findall(r"\d+\.\d\d", session))
    assert session.startswith("a session of a tiny model, start to record: ")
    assert all(f" {phase} " in session for phase in ("import", "build", "prefill", "measure", "rest"))
    assert sum(phases_s) == pytest.approx(whole_s, abs=0.1)
    assert re.fullmatch(r"find 1 measured session: \d+ ms", found)
    assert paper.startswith("rebuild every table and figure: ")
    assert rebuilt == [{"figures", "tables"}]
    assert sorted(tmp_path.rglob("*")) == before
