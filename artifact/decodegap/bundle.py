"""How records travel: one GPU's as a tar with a manifest, and a tar from elsewhere checked before a byte is kept."""

import hashlib
import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

from decodegap import frame, plan, records
from decodegap.errors import BadInputError, BadRecordError, StoreError
from decodegap.paths import imported
from decodegap.records import MANIFEST
from decodegap.rows import counted
from decodegap.schema import Record

MOST_FILES = 5000
MOST_BYTES_EACH = 4 * 2**20
MOST_BYTES = 256 * 2**20
LONGEST_END = 2 * tarfile.RECORDSIZE  # bytes after the last member: two empty blocks, filled up to a whole record
AGAIN = "compare its sha256 with the one that `make export` said to its sender"
NAME = re.compile(r"([a-z0-9][a-z0-9.-]{0,63})/(?:MANIFEST\.sha256|[a-z]{1,32}/[a-z0-9][a-z0-9._-]{0,199}\.json)")


def export(gpu: str, local: Path, results: Path, folder: Path) -> Path:
    """Pack the records of `gpu` measured here, else those imported, else the shipped ones, into a tar in `folder`.

    Returns the tar. The same records give the same bytes: sorted names, the newest record's time, no owner. Raises
    `BadInputError` where there is nothing to pack, `BadRecordError` for a bad record.
    """
    store = next((each for each in (local, imported(local)) if records.load_all(each, gpu)), results)
    found = records.load_shipped(results, gpu) if store == results else records.load_all(store, gpu)
    if not found:
        raise BadInputError(f"GPU={gpu}: no records to export; run `make measure GPU={gpu}` first")
    when = max(int(datetime.fromisoformat(record.started_at).timestamp()) for record in found)
    base = store / gpu
    paths = {path.relative_to(base).as_posix(): path for path in records.files(store, gpu)}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        add(tar, f"{gpu}/{MANIFEST}", records.manifest_text(store, gpu).encode(), when)
        for name, path in sorted(paths.items()):
            add(tar, f"{gpu}/{name}", path.read_bytes(), when)
    target = folder / f"decode-gap-records-{gpu}.tar"
    records.write_atomically(target, out.getvalue())
    return target


def add(tar: tarfile.TarFile, name: str, content: bytes, mtime: int, mode: int = 0o644) -> None:
    """Add a file to `tar` that carries nothing of this machine or its user."""
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = len(content), mtime, mode
    tar.addfile(member, io.BytesIO(content))


def bring(source: Path, local: Path, gpu: str = "auto") -> list[Path]:
    """Check the tar `source` and write its records to those imported in `local`, under their own GPU.

    Returns the files. `gpu` is whose records are wanted, `auto` for any.

    Nothing is unpacked before its name, kind and size are known to be possible, and nothing is written before every
    record is known to be whole, listed, of this protocol, and no other than what `local` holds. Where not all of them
    can be written, none is kept. Raises `BadInputError`, `BadRecordError` or `StoreError`, one line each.
    """
    try:
        if not source.is_file() and source.exists():  # opening a pipe would wait for its other end
            raise BadInputError(f"FROM: {source} is no plain file; give the tar that `make export` wrote")
        with source.open("rb") as handle:
            content = dict(_members(handle, source))
    except (OSError, ValueError) as error:
        raise StoreError(f"FROM: {source} cannot be read: {getattr(error, 'strerror', error)}") from None
    found = _records(content, source)
    if gpu not in ("auto", found[0].cell.gpu):
        raise BadInputError(f"FROM: {source}: holds records of {found[0].cell.gpu}, and GPU={gpu} asks for another's")
    frame.build([], found)  # contradictory or mixed records would stop every table later
    store = imported(local)
    for record in found:
        path = records.path_of(store, record.cell, record.session)
        name = f"{record.cell.gpu}/{record.cell.experiment}/{record.cell.file_name(record.session)}"
        if path.exists() and path.read_bytes() != content[name]:
            raise BadInputError(f"FROM: {source}: {path} is there already and differs; move it away first")
    wanted = [records.path_of(store, record.cell, record.session) for record in found]
    written: list[Path] = []
    try:
        for path in wanted:
            if not path.exists():
                records.write_atomically(path, content[str(path.relative_to(store))])
                written.append(path)
    except StoreError:
        for path in written:
            path.unlink()
        raise
    return wanted


def _members(handle: IO[bytes], source: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of each member, refused before it is read if it cannot be a record or a manifest."""
    total = number = 0
    seen = set()
    try:
        with tarfile.open(fileobj=handle, mode="r:") as tar:  # no compression, so no bomb hides in it
            for member in tar:
                number, total = number + 1, total + max(0, member.size)
                shown = repr(member.name[:80])
                if not member.isreg() or member.issparse():
                    raise BadInputError(
                        f"FROM: {source}: member {shown} is no plain file (a link, device or folder), and an export "
                        "holds no other; take the tar itself that `make export` wrote, not one that was packed again"
                    )
                if not NAME.fullmatch(member.name) or ".." in member.name:
                    raise BadInputError(f"FROM: {source}: member {shown} is not GPU/EXPERIMENT/RECORD.json")
                if member.name in seen:
                    raise BadInputError(f"FROM: {source}: member {shown} is there twice")
                if member.size > MOST_BYTES_EACH or total > MOST_BYTES or number > MOST_FILES:
                    raise BadInputError(
                        f"FROM: {source}: too much at member {shown}: at most {MOST_FILES} files, "
                        f"{MOST_BYTES_EACH >> 20} MiB each, {MOST_BYTES >> 20} MiB in all"
                    )
                seen.add(member.name)
                taken = tar.extractfile(member)
                yield member.name, taken.read(MOST_BYTES_EACH) if taken else b""
            handle.seek(tar.offset)  # tarfile stops at the first empty or odd block, and never looks further
            if (rest := handle.read(LONGEST_END + 1)).strip(b"\0") or len(rest) > LONGEST_END:
                raise BadInputError(f"FROM: {source}: more follows after the end of the tar, so it was not exported")
    except tarfile.TarError:
        raise BadInputError(
            f"FROM: {source} is not a plain tar as `make export` writes it, so it was cut off, compressed or changed; "
            f"{AGAIN}"
        ) from None


def _records(content: dict[str, bytes], source: Path) -> list[Record]:
    gpus = {name.split("/", 1)[0] for name in content}
    if len(gpus) != 1:
        raise BadInputError(f"FROM: {source}: holds records of {len(gpus)} GPUs, and an export holds those of one")
    gpu = gpus.pop()
    manifest = content.get(f"{gpu}/{MANIFEST}")
    if manifest is None:
        raise BadInputError(f"FROM: {source}: has no {gpu}/{MANIFEST}")
    listed = {}
    for line in manifest.decode("utf-8", "replace").splitlines():
        digest, _, name = line.partition("  ")
        listed[f"{gpu}/{name}"] = digest
    files = {name: data for name, data in content.items() if name != f"{gpu}/{MANIFEST}"}
    if odd := sorted(set(files) ^ set(listed)):
        raise BadRecordError(f"FROM: {source}: {odd[0]} is not both in the tar and in its manifest; {AGAIN}")
    found = []
    for name, data in sorted(files.items()):
        if hashlib.sha256(data).hexdigest() != listed[name]:
            raise BadRecordError(f"FROM: {source}: {name} is not what its manifest lists, so it was changed")
        found.append(_record(name, data, source))
    if not found:
        raise BadInputError(f"FROM: {source}: holds no record")
    return found


def _record(name: str, data: bytes, source: Path) -> Record:
    record = records.parse(data, f"FROM: {source}: {name}")
    cell = record.cell
    if name != f"{cell.gpu}/{cell.experiment}/{cell.file_name(record.session)}":
        raise BadRecordError(f"FROM: {source}: {name} holds the record of {cell.gpu} {cell.file_name(record.session)}")
    if cell.gpu == "cpu" or record.stand_in:
        raise BadInputError(f"FROM: {source}: {name} is of a stand-in model or a CPU, which no table compares")
    ours = plan.protocol(cell.gpu, record.protocol.weights, record.protocol.weights_revision)
    if record.protocol != ours:
        theirs, mine = record.protocol.model_dump(), ours.model_dump()
        field = next(key for key in mine if mine[key] != theirs[key])
        raise BadRecordError(
            f"FROM: {source}: {name} was measured by another protocol ({field} {theirs[field]}, here {mine[field]})"
        )
    return record


def describe(found: Sequence[Path], local: Path) -> str:
    """What was brought in, in one line."""
    gpu = found[0].relative_to(imported(local)).parts[0]
    return f"imported {counted(len(found), 'record')} of {gpu}; `make tables figures verify GPU={gpu}` shows them"
