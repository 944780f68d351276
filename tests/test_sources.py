"""A record's commit is that of the code that measured, or none."""

import subprocess
from pathlib import Path

from decodegap import sources


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    done = subprocess.run(["git", "-C", str(root), *who, *words], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_library_that_differs_from_its_commit_has_none(tmp_path: Path) -> None:
    assert sources.commit(tmp_path) is None  # no repository
    library = tmp_path / "artifact" / "decodegap"
    library.mkdir(parents=True)
    (library / "timing.py").write_text("measured = 1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "One")
    assert sources.commit(tmp_path) == git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "notes.md").write_text("beside the library\n")
    assert sources.commit(tmp_path) is not None
    (library / "timing.py").write_text("measured = 2\n")
    assert sources.commit(tmp_path) is None
    git(tmp_path, "checkout", "-q", "--", ".")
    (library / "fused.py").write_text("new = True\n")
    assert sources.commit(tmp_path) is None


def test_the_commit_of_a_repository_around_an_unpacked_archive_is_not_the_codes(tmp_path: Path) -> None:
    (tmp_path / "archive" / "artifact" / "decodegap").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("archive\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "Somebody's own")
    assert sources.commit(tmp_path / "archive") is None
