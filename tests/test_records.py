"""Whether a record is whole or absent, and whether any later change to it shows."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from factory import record as make_record
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decodegap import records, schema
from decodegap.errors import BadRecordError, DecodeGapError, StoreError
from decodegap.paths import HERE


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    return records.write(make_record(), tmp_path)


def test_a_record_comes_back_as_it_was_written(stored: Path) -> None:
    written = make_record().model_copy(update={"content_hash": ""})
    read = records.load(stored)
    assert read.model_copy(update={"content_hash": ""}) == written
    assert not list(stored.parent.glob("*.partial"))


def test_every_truncation_is_refused(stored: Path) -> None:
    whole = stored.read_bytes()
    for length in range(0, len(whole) - 2, 97):
        stored.write_bytes(whole[:length])
        with pytest.raises(BadRecordError):
            records.load(stored)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_changes_nothing(stored: Path, place: float, bit: int) -> None:
    whole = stored.read_bytes()
    damaged = bytearray(whole)
    damaged[int(place * len(damaged))] ^= 1 << bit
    copy = stored.with_name("damaged.json")
    copy.write_bytes(bytes(damaged))
    message = ""
    try:
        assert records.load(copy) == records.load(stored)  # white space between tokens is nobody's data
    except DecodeGapError as error:
        message = str(error)
    assert "\n" not in message


def test_an_edited_value_is_refused(stored: Path) -> None:
    data = json.loads(stored.read_text())
    data["step_ms"] = data["step_ms"] / 2
    stored.write_text(json.dumps(data))
    with pytest.raises(BadRecordError, match="edited or damaged"):
        records.load(stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema 2, this version reads 1"),
        ({"protocol_hash": "0" * 16}, "protocol does not match its hash"),
        ({"surprise": 1}, "surprise"),
        ({"session": 0}, "session"),
        ({"step_ms": -1.0}, "step_ms"),
        ({"step_ms": "12"}, "step_ms"),
        ({"outcome": "fine"}, "outcome"),
    ],
)
def test_a_resealed_record_must_still_fit_the_schema(stored: Path, change: dict[str, object], message: str) -> None:
    data = json.loads(stored.read_text()) | change
    data["content_hash"] = records.content_hash(data)
    stored.write_text(json.dumps(data))
    with pytest.raises(BadRecordError, match=message):
        records.load(stored)


@pytest.mark.parametrize("text", ["", "nul", "[]", "7", '"x"', "{}", "NaN", "[" * 100_000, '{"schema_version": 1}'])
def test_what_is_no_record_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadRecordError) as caught:
        records.load(path)
    assert "\n" not in str(caught.value)


def test_nan_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="finite"):
        make_record(peak_gb_s=float("nan"))
    broken = make_record().model_copy(update={"peak_gb_s": float("inf")})
    with pytest.raises(ValueError, match="JSON compliant"):
        records.write(broken, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


def test_the_manifest_is_one_that_sha256sum_checks(tmp_path: Path) -> None:
    path = records.write(make_record(), tmp_path)
    base = tmp_path / "h200"
    (base / records.MANIFEST).write_text(records.manifest_text(tmp_path, "h200"))
    subprocess.run(["sha256sum", "--check", "--strict", records.MANIFEST], cwd=base, check=True, capture_output=True)
    assert hashlib.sha256(path.read_bytes()).hexdigest() in (base / records.MANIFEST).read_text()
    assert len(records.load_all(tmp_path, "h200")) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("missing", "listed in MANIFEST.sha256 but not there"),
        ("extra", "not what MANIFEST.sha256 lists"),
        ("changed", "not what MANIFEST.sha256 lists"),
        ("garbled", "'what is this' is not a line of a manifest"),
        ("misplaced", "holds the record of qwen2.5-7b_2048_eager_s1.json"),
    ],
)
def test_a_manifest_that_disagrees_is_refused(tmp_path: Path, fault: str, told: str) -> None:
    path = records.write(make_record(session=1), tmp_path)
    manifest = tmp_path / "h200" / records.MANIFEST
    manifest.write_text(records.manifest_text(tmp_path, "h200"))
    if fault == "missing":
        path.unlink()
    elif fault == "extra":
        records.write(make_record(session=2), tmp_path)
    elif fault == "changed":
        path.write_text(path.read_text() + "\n")
    elif fault == "garbled":
        manifest.write_text("what is this\n")
    else:
        path.rename(path.with_name(path.name.replace("_s1", "_s9")))
    with pytest.raises(BadRecordError, match=re.escape(told)):
        records.load_all(tmp_path, "h200")


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """The kernel itself refuses the write: a file-size limit in a process of its own."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from decodegap import records\n"
        "from decodegap.errors import StoreError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: records.write_atomically(Path(sys.argv[1]) / 'a' / 'x.json', b'x' * 100_000)\n"
        "except StoreError as error: print(error)\n"
    )
    env = {"PYTHONPATH": str(HERE.root / "artifact"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, env=env
    )
    assert "cannot write x.json: File too large" in done.stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_results_folder_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "h200").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write"):
        records.write(make_record(), tmp_path)


def test_the_shipped_schema_is_the_models() -> None:
    """`artifact/schema/record.schema.json` is exported, never edited."""
    assert HERE.schema.read_text() == schema.schema_text()
    assert json.loads(HERE.schema.read_text())["properties"]["cell"]


def test_shipped_records_without_their_manifest_are_refused(tmp_path: Path) -> None:
    """Otherwise deleting the manifest would let records be taken away unseen."""
    records.write(make_record(), tmp_path)
    assert len(records.load_all(tmp_path, "h200")) == 1
    with pytest.raises(BadRecordError, match="nothing vouches"):
        records.load_shipped(tmp_path, "h200")
    assert records.load_shipped(tmp_path, "h100") == []
