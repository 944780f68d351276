"""Whether the archive is the same bytes each time, complete, checkable, and of use without git."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from decodegap import archive
from decodegap.errors import BadInputError
from decodegap.paths import HERE, Places


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if not (HERE.root / ".git").exists():
        pytest.skip("needs a git checkout")
    return archive.build("0.1.0", 1_780_000_000, tmp_path_factory.mktemp("archive"))


def test_the_same_files_give_the_same_bytes_and_the_checksum_holds(built: tuple[Path, Path], tmp_path: Path) -> None:
    tarball, sums = built
    again, _ = archive.build("0.1.0", 1_780_000_000, tmp_path)
    assert again.read_bytes() == tarball.read_bytes()
    assert sums.read_text() == f"{hashlib.sha256(tarball.read_bytes()).hexdigest()}  {tarball.name}\n"
    with tarfile.open(tarball) as tar:
        assert {(m.uid, m.uname, m.mtime) for m in tar} == {(0, "", 1_780_000_000)}


def test_it_works_unpacked_and_packs_itself_again(built: tuple[Path, Path], tmp_path: Path) -> None:
    tarball, _ = built
    with tarfile.open(tarball) as tar:
        tar.extractall(tmp_path, filter="data")
    root = tmp_path / "decode-gap-0.1.0"
    assert not (root / ".git").exists()
    assert os.access(root / "requirements" / "install.sh", os.X_OK)
    done = subprocess.run(
        ["sha256sum", "--check", "--quiet", archive.LIST], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    again, _ = archive.build("0.1.0", 1_780_000_000, tmp_path / "again", Places(root))
    assert again.read_bytes() == tarball.read_bytes()
    env = os.environ | {"PYTHONPATH": str(root / "artifact"), "NAME": "grid"}
    command = [sys.executable, "-m", "decodegap", "table"]
    table = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert table.returncode == 0, table.stderr
    assert (root / "paper" / "generated" / "grid.md").is_file()


def test_neither_git_nor_a_list_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="neither a git checkout"):
        archive.files(Places(tmp_path))


def test_zenodo_metadata_agree_with_the_citation() -> None:
    data = json.loads((HERE.root / ".zenodo.json").read_text(encoding="utf-8"))
    citation = (HERE.root / "CITATION.cff").read_text(encoding="utf-8")
    assert data["title"] in citation
    assert f"version: {data['version']}" in citation
    assert data["license"].lower() == "apache-2.0"
    assert data["upload_type"] == "software"
    assert any("2605.30571" in each["identifier"] for each in data["related_identifiers"])
