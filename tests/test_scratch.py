"""Whether a killed process's temporary folder goes at the next start, and a living one's stays."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from decodegap import scratch
from decodegap.paths import HERE

HOLD = """
import sys
from decodegap import scratch
with scratch.folder() as folder:
    (folder / "inside").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that holds a folder, and that folder, in a temporary folder of the test's own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(HERE.root / "artifact")}
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def test_the_folder_of_a_killed_process_goes_at_the_next_start(holder: tuple[subprocess.Popen[str], Path]) -> None:
    process, folder = holder
    with scratch.folder() as mine:
        assert mine.is_dir()
        assert (folder / "inside").exists(), "its process lives"
    assert not mine.exists()
    process.kill()
    process.wait()
    assert folder.exists()
    with scratch.folder():
        assert not folder.exists()


def test_what_is_not_a_dead_process_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "decode-gap-0.lock").write_text("1\n")
    (tmp_path / "decode-gap-new").mkdir()  # made this moment, not marked yet
    (tmp_path / "decode-gap-old").mkdir()
    os.utime(tmp_path / "decode-gap-old", (0, 0))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / scratch.MARK).touch()
    (tmp_path / "decode-gap-link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "other-folder").mkdir()
    scratch.sweep()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"decode-gap-0.lock", "decode-gap-new", "elsewhere", "decode-gap-link", "other-folder"}
