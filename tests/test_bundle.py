"""Whether records travel whole, the same bytes each time, and nothing else gets in: tampering, links, bombs, paths."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from factory import checkout, grid, record, write

from decodegap import bundle, cli, frame, plan, records, report, review, runner, standing, verdicts
from decodegap.errors import DecodeGapError
from decodegap.paths import HERE, imported

Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("theirs")
    write(grid("l4", sessions=2), store)
    return store


@pytest.fixture(scope="module")
def exported(theirs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle.export("l4", theirs, theirs / "none", tmp_path_factory.mktemp("out"))


def members(path: Path) -> list[Member]:
    with tarfile.open(path) as tar:
        return [(member, (tar.extractfile(member) or io.BytesIO()).read()) for member in tar]


def pack(path: Path, content: Iterable[Member]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member, data in content:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    return path


def relisted(content: list[Member]) -> list[Member]:
    """`content` with a manifest that lists what is there, as a careful forger would."""
    files = [(m, d) for m, d in content if not m.name.endswith(records.MANIFEST)]
    lines = "".join(f"{hashlib.sha256(d).hexdigest()}  {m.name.split('/', 1)[1]}\n" for m, d in files)
    return [(tarfile.TarInfo(f"l4/{records.MANIFEST}"), lines.encode()), *files]


def test_export_is_the_same_bytes_and_names_nobody(theirs: Path, exported: Path, tmp_path: Path) -> None:
    again = bundle.export("l4", theirs, tmp_path / "none", tmp_path / "again")
    assert again.read_bytes() == exported.read_bytes()
    for member, _ in members(exported):
        assert (member.uid, member.gid, member.uname, member.gname, member.mode) == (0, 0, "", "", 0o644)
    assert len({member.mtime for member, _ in members(exported)}) == 1


def test_from_one_clone_to_another_the_tables_are_equal(theirs: Path, exported: Path, tmp_path: Path) -> None:
    local = tmp_path / "ours"
    assert len(bundle.bring(exported, local)) == 24
    at = checkout(tmp_path / "checkout")
    made = []
    for store in (theirs, local):
        report.rebuild(at, {"tables"}, store=store, gpu="l4")
        made.append({path.name: path.read_text() for path in (store / "l4" / "report").iterdir()})
    assert "(imported)" in made[1]["actions.md"]
    assert {name: text.replace("imported", "yours") for name, text in made[1].items()} == made[0]
    assert bundle.export("l4", local, tmp_path / "none", tmp_path / "back").read_bytes() == exported.read_bytes()
    assert len(bundle.bring(exported, local)) == 24, "the same records again are no conflict"


def test_imported_records_are_judged_under_their_own_gpu(tmp_path: Path) -> None:
    write([record(gpu="l4", step_ms=63.0)], tmp_path / "theirs")
    bundle.bring(bundle.export("l4", tmp_path / "theirs", tmp_path, tmp_path / "out"), tmp_path / "ours")

    found = {v.claim.id: v for v in review.judged(HERE, tmp_path / "ours", "l4")}
    assert (found["l4-qwen25-2048"].word, found["l4-qwen25-2048"].basis) == (verdicts.WORDS[0], "imported")
    told = "\n".join(review.lines(review.judged(HERE, tmp_path / "ours", "l4"), []))
    assert "paper 0.81, imported records 0.812" in told
    assert "yours" not in told


def test_imported_records_are_never_taken_for_measured_here(tmp_path: Path) -> None:
    """They neither count as done in a plan nor hide what is measured here later."""
    write([record(gpu="l4", step_ms=63.0)], tmp_path / "theirs")
    ours = tmp_path / "ours"
    bundle.bring(bundle.export("l4", tmp_path / "theirs", tmp_path, tmp_path / "out"), ours)
    [task] = plan.baseline(plan.request(gpu="l4", models="qwen2.5-7b", contexts="2048", sessions=1), "l4")
    assert runner.valid_record(task, ours) is None
    [line] = standing.lines("l4", [task], ours)
    assert (line.kind, line.store, line.reason) == ("measured", "imported", "1 session, imported")
    write([record(gpu="l4", step_ms=90.0)], ours)
    assert {v.claim.id: v for v in review.judged(HERE, ours, "l4")}["l4-qwen25-2048"].basis == "yours"
    assert standing.lines("l4", [task], ours)[0].store == "yours"
    view = report.local("l4", ours)
    assert view is not None
    assert {(row.store, row.sessions) for row in frame.from_frame(view.frame) if row.gpu == "l4"} == {
        ("imported", 1), ("yours", 1)
    }  # fmt: skip


def test_imports_of_several_gpus_are_judged_together(tmp_path: Path) -> None:
    steps = {"h100": 17.0, "a100": 24.0, "l40s": 24.6, "l4": 63.0}
    for gpu, step in steps.items():
        write([record(gpu=gpu, step_ms=step + k / 10, session=k) for k in (1, 2)], tmp_path / gpu)
        bundle.bring(bundle.export(gpu, tmp_path / gpu, tmp_path, tmp_path / "out"), tmp_path / "ours")
    for gpu in steps:
        falling = {v.claim.id: v for v in review.judged(HERE, tmp_path / "ours", gpu)}["falling"]
        assert (falling.word, falling.basis) == ("reproduced", "imported")
    assert report.local_gpus(tmp_path / "ours") == sorted(steps)


def test_shipped_records_are_exported_where_there_are_no_local_ones(tmp_path: Path) -> None:
    path = bundle.export("h200", tmp_path / "none", HERE.results, tmp_path)
    shipped = sum(1 for _ in records.files(HERE.results, "h200"))
    assert len(members(path)) == shipped + 1
    assert len(bundle.bring(path, tmp_path / "ours")) == shipped


def link(name: str, kind: bytes, target: str = "") -> Member:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def renamed(name: str) -> Callable[[list[Member]], list[Member]]:
    def change(content: list[Member]) -> list[Member]:
        member, data = content[3]
        member.name = name
        return [*content[:3], (member, data), *content[4:]]

    return change


def edited(content: list[Member]) -> list[Member]:
    member, data = content[3]
    return [*content[:3], (member, data.replace(b'"session": 1', b'"session": 7')), *content[4:]]


def foreign(content: list[Member]) -> list[Member]:
    ours = plan.protocol("l4", "synthetic", "normal-0.02-v1")
    theirs = record(gpu="l4", session=9, protocol=ours.model_copy(update={"measured_steps": 7}))
    name = f"l4/baseline/{theirs.cell.file_name(9)}"
    return relisted([*content, (tarfile.TarInfo(name), theirs.model_dump_json().encode())])


def stand_in(content: list[Member]) -> list[Member]:
    odd = record(gpu="l4", stand_in=True, session=9)
    odd = odd.model_copy(update={"content_hash": records.content_hash(odd.model_dump(mode="json"))})
    return relisted(
        [*content, (tarfile.TarInfo(f"l4/baseline/{odd.cell.file_name(9)}"), odd.model_dump_json().encode())]
    )


DAMAGE: dict[str, tuple[Callable[[list[Member]], list[Member]], str]] = {
    "tampered": (edited, "not what its manifest lists"),
    "tampered-and-relisted": (lambda c: relisted(edited(c)), "does not match its own hash"),
    "foreign-protocol": (foreign, "another protocol"),
    "stand-in": (stand_in, "stand-in"),
    "unlisted": (lambda c: [*c, (tarfile.TarInfo("l4/baseline/x_1_eager_s1.json"), b"{}")], "manifest"),
    "gone": (lambda c: c[:-1], "in its manifest; compare its sha256"),
    "no-manifest": (lambda c: c[1:], "MANIFEST"),
    "twice": (lambda c: [*c, c[3]], "twice"),
    "two-gpus": (lambda c: [*c, (tarfile.TarInfo("h100/MANIFEST.sha256"), b"")], "2 GPUs"),
    "parent": (renamed("l4/../../evil.json"), "is not GPU/EXPERIMENT"),
    "absolute": (renamed("/etc/evil.json"), "is not GPU/EXPERIMENT"),
    "deep": (renamed("l4/baseline/../x.json"), "is not GPU/EXPERIMENT"),
    "wrong-place": (lambda c: relisted(renamed("l4/graphs/x_1_eager_s1.json")(c)), "holds the record of"),
    "symlink": (lambda c: [*c, link("l4/baseline/a_1_eager_s1.json", tarfile.SYMTYPE, "/etc/passwd")], "no plain file"),
    "hard-link": (lambda c: [*c, link("l4/baseline/a_1_eager_s1.json", tarfile.LNKTYPE, "l4/x")], "no plain file"),
    "device": (lambda c: [*c, link("l4/baseline/a_1_eager_s1.json", tarfile.CHRTYPE)], "no plain file"),
    "fifo": (lambda c: [*c, link("l4/baseline/a_1_eager_s1.json", tarfile.FIFOTYPE)], "no plain file"),
    "folder": (lambda c: [*c, link("l4/baseline", tarfile.DIRTYPE)], "no plain file"),
    "packed-again": (lambda c: [link("l4", tarfile.DIRTYPE), *c], "take the tar itself that `make export` wrote"),
    "empty": (lambda _: [], "0 GPUs"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_not_an_export_is_refused_in_one_line_and_leaves_nothing(
    exported: Path, tmp_path: Path, case: str
) -> None:
    change, reason = DAMAGE[case]
    bad = pack(tmp_path / "bad.tar", change(members(exported)))
    with pytest.raises(DecodeGapError, match=reason) as caught:
        bundle.bring(bad, tmp_path / "ours")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ours").exists()


NOISE = {
    "declared": "too much",
    "sparse-file": "too much",
    "many": "too much",
    "gzip": "so it was cut off, compressed or changed; compare its sha256 with the one that `make export` said",
    "noise": "not a plain tar",
    "missing": "cannot be read",
    "folder": "is no plain file",
    "truncated": "so it was cut off, compressed or changed; compare its sha256 with the one that `make export` said",
    "pipe": "is no plain file",
    "device-file": "is no plain file",
    "text-after": "more follows after the end",
    "zeros-after": "more follows after the end",
    "tar-after": "more follows after the end",
    "odd-block": "more follows after the end",
}


@pytest.mark.parametrize("kind", NOISE)
def test_bombs_and_noise_are_refused_at_once_with_little_memory(exported: Path, tmp_path: Path, kind: str) -> None:
    bad = tmp_path / "bad.tar"
    if kind in ("declared", "sparse-file"):  # one gigabyte of zeros; on disk a sparse file
        member = tarfile.TarInfo("l4/baseline/a_1_eager_s1.json")
        member.size = 2**30
        bad.write_bytes(member.tobuf())
        if kind == "sparse-file":
            os.truncate(bad, 2**30 + 512 + 1024)
    if kind == "many":
        pack(bad, ((tarfile.TarInfo(f"l4/baseline/m_1_a{i}_s1.json"), b"") for i in range(bundle.MOST_FILES + 1)))
    if kind == "gzip":
        with tarfile.open(bad, "w:gz") as tar:
            for member, data in members(exported):
                tar.addfile(member, io.BytesIO(data))
    if kind == "noise":
        bad.write_bytes(os.urandom(4096))
    if kind == "folder":
        bad.mkdir()
    if kind == "pipe":
        os.mkfifo(bad)
    if kind == "device-file":
        bad.symlink_to("/dev/zero")
    whole = exported.read_bytes()
    tails = {"text-after": b"x", "zeros-after": bytes(2**20), "tar-after": whole}
    if kind in tails:
        bad.write_bytes(whole + tails[kind])
    if kind == "odd-block":  # where the next member would begin
        bad.write_bytes(whole.rstrip(b"\0") + bytes(-len(whole.rstrip(b"\0")) % 512) + b"odd" * 512 + bytes(1024))
    if kind == "truncated":
        bad.write_bytes(exported.read_bytes()[:5000])
    code = (
        "import re, sys; from decodegap import cli\n"
        "code = cli.main(['import'])\n"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\nsys.exit(code)"
    )
    kept = {k: v for k, v in os.environ.items() if k not in ("GPU", "MODELS", "REQUIRE")}
    env = kept | {"PYTHONPATH": str(HERE.root / "artifact"), "FROM": str(bad), "RESULTS": str(tmp_path / "ours")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("decode-gap: FROM: ")
    assert NOISE[kind] in done.stderr
    assert int(done.stdout) < 500_000, "kB of memory at most"
    assert not (tmp_path / "ours").exists()


def test_records_that_are_here_and_differ_are_not_overwritten(exported: Path, tmp_path: Path) -> None:
    [mine] = write([record(gpu="l4", step_ms=50.0)], imported(tmp_path / "ours"))
    before = mine.read_bytes()
    with pytest.raises(DecodeGapError, match="there already"):
        bundle.bring(exported, tmp_path / "ours")
    assert mine.read_bytes() == before
    assert len(list((tmp_path / "ours").rglob("*.json"))) == 1


def test_records_of_another_gpu_than_the_one_asked_for_are_refused(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path / "ours"))
    monkeypatch.setenv("FROM", str(exported))
    monkeypatch.setenv("GPU", "h100")
    assert cli.main(["import"]) == 2
    assert "holds records of l4, and GPU=h100 asks for another's" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()
    monkeypatch.setenv("GPU", "l4")
    assert cli.main(["import"]) == 0


def test_import_without_a_file_and_export_without_records_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.setenv("GPU", "l40s")
    monkeypatch.delenv("FROM", raising=False)
    assert cli.main(["import"]) == 2
    assert cli.main(["export"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
