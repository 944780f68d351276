"""Whether a file leads back to its records, and one that cannot says why in one line."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from factory import checkout, grid, record, write

from decodegap import exhibits, history, provenance, records, report, style, webpage
from decodegap.errors import BadInputError, BadRecordError
from decodegap.exhibits import View
from decodegap.paths import HERE, Places

HOST = "0badcafe"
SHIPPED = sorted([*HERE.figures.glob("*.pdf"), *HERE.figures.glob("*.png"), *HERE.generated.iterdir()])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """A checkout in git with a grid of shipped records, its figures and tables."""
    here = checkout(tmp_path_factory.mktemp("drawn") / "checkout")
    write(grid("h200", host=HOST), here.results)
    report.rebuild(here)
    git(here, "init", "-q")
    git(here, "add", ".")
    git(here, "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-qm", "Draw everything")
    return here


@pytest.fixture
def at(drawn: Places, tmp_path: Path) -> Places:
    """The same, for a test to change."""
    shutil.copytree(drawn.root, tmp_path / "checkout")
    return Places(tmp_path / "checkout")


def git(at: Places, *command: str) -> None:
    subprocess.run(["git", *command], cwd=at.root, check=True, capture_output=True)


def traced(at: Places, path: Path) -> list[str]:
    return provenance.lines(str(path), at.local, at)


@pytest.mark.parametrize("name", ["fraction.pdf", "context.png", "heatmap.svg"])
def test_a_figure_leads_to_its_records_and_its_commit(at: Places, name: str) -> None:
    said = traced(at, at.figures / name)
    every = records.load_all(at.results, "h200")
    assert said[0] == f"figures/{name}: made from 36 records, one session each, of 1 host"
    assert said[1].startswith("commit: ")
    assert said[1].endswith(" Draw everything")
    assert f"{HOST} (NVIDIA H200) x 36" in said[2]
    text = "\n".join(said)
    assert all(each.content_hash in text for each in every)
    assert "artifact/results/h200/baseline/qwen2.5-7b_2048_eager_s1.json  session 1" in text
    assert "torch 2.13.0 x 36" in text
    assert f"measuring sources: {every[0].source_hash} x 36" in text


def test_a_figure_names_only_the_records_that_it_draws_from() -> None:
    said = provenance.lines(str(HERE.figures / "quantised.pdf"), HERE.local)
    shipped = records.load_all(HERE.results, "h200")
    own = [each.content_hash for each in shipped if each.cell.experiment == "quantised"]
    assert f"made from {len(own)} records" in said[0]
    assert f"those of quantised; its hash is of {len(shipped) - len(own)} more, which it does not show" in said[0]
    assert sorted(line.split()[0] for line in said if line.startswith("  ")) == sorted(own)
    numbers = provenance.lines(str(HERE.generated / "numbers.tex"), HERE.local)[0]
    assert f"made from {len(shipped)} records" in numbers
    assert "more" not in numbers


def test_what_is_drawn_from_some_experiments_is_the_same_without_the_others() -> None:
    whole = report.paper()

    def without_others(name: str) -> View:
        used = exhibits.DRAWN_FROM[name]
        kept = tuple(each for each in whole.kept if each.record.cell.experiment in used)
        return View(whole.frame[whole.frame["experiment"].isin(used)], whole.published, None, kept=kept)

    for name in exhibits.FIGURES:
        some, every = (
            style.to_bytes(exhibits.figure(view, name), "svg", title=name, records="0" * 64, epoch_s=0)
            for view in (without_others(name), whole)
        )
        assert some == every, name
    for name in [name for name in exhibits.TABLES if name in exhibits.DRAWN_FROM]:
        some_of, all_of = (replace(exhibits.table(view, name), records="") for view in (without_others(name), whole))
        assert (some_of.rows, some_of.notes, some_of.data) == (all_of.rows, all_of.notes, all_of.data), name
    assert set(exhibits.TABLES) - set(exhibits.DRAWN_FROM) == {"actions"}  # which shows every experiment


@pytest.mark.parametrize("name", ["grid.md", "grid.csv", "grid.tex", "numbers.tex"])
def test_a_table_and_the_numbers_lead_there_too(at: Places, name: str) -> None:
    assert "made from 36 records" in traced(at, at.generated / name)[0]


def test_a_record_leads_to_itself(at: Places) -> None:
    path = next(records.files(at.results, "h200"))
    assert traced(at, path)[-1].split()[0] == records.load(path).content_hash


def test_a_local_report_leads_to_both_stores(at: Places) -> None:
    write([record(session=n, host="feedface", step_ms=12.0 + n) for n in (1, 2)], at.local)
    report.rebuild(at, {"figures"})
    said = traced(at, at.local / "h200" / "report" / "fraction.pdf")
    assert said[0].endswith("made from 38 records, one session each, of 2 hosts")
    assert said[1] == "commit: none, the file is this machine's own"


def test_a_repository_around_an_unpacked_archive_is_not_asked(at: Places) -> None:
    shutil.rmtree(at.root / ".git")
    git(Places(at.root.parent), "init", "-q")
    git(Places(at.root.parent), "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-qm", "x", "--allow-empty")
    said = traced(at, at.figures / "fraction.pdf")
    assert said[1] == "commit: git says nothing here, so what drew the file is not known"


def test_a_figure_that_was_changed_since_its_commit_says_so(at: Places) -> None:
    path = at.figures / "heatmap.svg"
    path.write_text(path.read_text().replace("</svg>", "<!-- --></svg>"))
    assert traced(at, path)[1].endswith("; the file was changed since")


def test_records_that_are_others_than_those_drawn_are_told(at: Places) -> None:
    write([record(session=4, host=HOST)], at.results)
    (at.results / "h200" / records.MANIFEST).write_text(records.manifest_text(at.results, "h200"))
    with pytest.raises(BadRecordError, match=r"made from records [0-9a-f]{16}, which are not those here"):
        traced(at, at.figures / "fraction.pdf")


def test_a_record_edited_since_is_named(at: Places) -> None:
    path = next(records.files(at.results, "h200"))
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"step_ms": 1.0}))
    with pytest.raises(BadRecordError, match=f"{path.name}: the content does not match its own hash"):
        traced(at, at.figures / "fraction.pdf")


def test_a_bad_record_that_is_traced_itself_has_the_way_out_of_every_other_target(at: Places) -> None:
    shipped, own = next(records.files(at.results, "h200")), write([record()], at.local)[0]
    for path, way_out in ((shipped, records.RESTORED), (own, records.MOVED_AWAY)):
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(BadRecordError, match=f"{path.name}: not JSON, so truncated or damaged; {way_out}$"):
            traced(at, path)
        path.unlink()


def test_measuring_sources_that_git_holds_are_named_with_their_commit() -> None:
    found = [each for each in records.load_all(HERE.results, "h200") if each.cell.experiment == "ladder"]
    commits = history.commits_of({each.source_hash for each in found})
    if not commits:
        pytest.skip("needs a git checkout with its history")
    said = "\n".join(provenance.lines(str(HERE.figures / "ladder.pdf"), HERE.local))
    for each in found:
        assert f"{each.source_hash} (as in commit {commits[each.source_hash][:12]}) x " in said


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("artifact/claims.toml", "carries no hash of records"),
        ("no/such/file", "there is no file"),
        ("../outside", "outside this checkout"),
        ("", "give the file to trace"),
        ("a\0b", "is not a path"),
    ],
)
def test_what_is_not_ours_is_one_line(at: Places, name: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(at.root)
    (at.root.parent / "outside").write_text("records 0123456789abcdef")
    with pytest.raises(BadInputError, match=told) as caught:
        provenance.lines(name, at.local, at)
    assert "\n" not in str(caught.value)


def test_the_page_leads_to_the_records_behind_it(at: Places) -> None:
    shutil.copytree(HERE.paper, at.paper, dirs_exist_ok=True, ignore=shutil.ignore_patterns("generated", "build"))
    assert "made from 36 records" in traced(at, webpage.build(at))[0]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_figure_and_table_is_traced(path: Path) -> None:
    assert "made from" in provenance.lines(str(path), HERE.local)[0]


def test_the_verb(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HERE.root / "artifact"), "RESULTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "decodegap", "provenance"],
        cwd=HERE.root, env=env | {"FILE": "README.md", "GPU": "cpu"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("decode-gap: FILE: README.md: carries no hash of records")
    assert done.stderr.count("\n") == 1
