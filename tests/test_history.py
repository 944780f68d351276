"""Whether git leads from the hash of measuring sources to the commit that first held them."""

import json
from collections import Counter
from pathlib import Path

import pytest
from test_sources import git

from decodegap import history, records, sources
from decodegap.paths import HERE


def committed(root: Path, title: str, **files: str) -> str:
    for name, text in files.items():
        path = root / history.LIBRARY / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(root, "add", "-A")
    git(root, "commit", "-qm", title)
    return git(root, "rev-parse", "HEAD")


def listing(*names: str) -> str:
    return f'"""Which."""\n\nMEASURING_SOURCES = ({", ".join(map(json.dumps, names))},)\n'


def hashed(*contents: tuple[str, str]) -> str:
    return sources.digest((name, text.encode()) for name, text in contents)


def test_the_first_commit_with_these_sources_is_found_by_its_own_list(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    committed(tmp_path, "None", **{"timing.py": "0\n", "sources.py": "no list = at all\n"})
    one = committed(tmp_path, "One", **{"timing.py": "1\n", "sources.py": listing("timing.py")})
    committed(tmp_path, "Broken", **{"sources.py": "\nMEASURING_SOURCES = (\n<<<<<<< HEAD\n"})
    committed(tmp_path, "Mended", **{"sources.py": listing("timing.py")})
    committed(tmp_path, "Beside", **{"report.py": "not listed\n", "fused__deep__step.py": "below\n"})
    two = committed(tmp_path, "Two", **{"fused__step.py": "2\n", "data__models__m.json": "{}\n"})
    committed(tmp_path, "Gone", **{"sources.py": listing("timing.py", "gone.py")})
    first = hashed(("timing.py", "1\n"))
    second = hashed(("timing.py", "1\n"), ("m.json", "{}\n"), ("step.py", "2\n"))
    assert history.commits_of({first, second, "0" * 16}, tmp_path) == {first: one, second: two}
    assert history.commits_of({second}, tmp_path) == {second: two}


def test_without_git_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert history.commits_of({sources.source_hash()}, tmp_path) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert history.commits_of({sources.source_hash()}, HERE.root) == {}


def test_every_shipped_record_leads_to_a_commit() -> None:
    if not (HERE.root / ".git").exists() or git(HERE.root, "rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("needs a git checkout with its history")
    measured = Counter(record.source_hash for record in records.load_all(HERE.results, "h200"))
    assert set(history.commits_of(measured)) == set(measured)
