"""How a record is kept: its content hash, how it is written so that it is whole or absent, and how it is read back."""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from decodegap.errors import BadRecordError, StoreError
from decodegap.schema import SCHEMA_VERSION, Cell, Record, canonical

MANIFEST = "MANIFEST.sha256"
# What helps where a record is bad: after another way out, so neither is an order.
RESTORED = "git has the shipped one"
MOVED_AWAY = "once it is moved away, `make measure` or `make import` brings another"


def content_hash(data: dict[str, Any]) -> str:
    """Hex SHA-256 over everything in `data` but its own `content_hash`."""
    body = {key: value for key, value in data.items() if key != "content_hash"}
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def path_of(store: Path, cell: Cell, session: int) -> Path:
    """Where the record of this cell and session lies below `store`."""
    return store / cell.gpu / cell.experiment / cell.file_name(session)


def write(record: Record, store: Path) -> Path:
    """Write `record` below `store`, whole or not at all, and return its path. Raises `StoreError`."""
    data = record.model_dump(mode="json")
    data["content_hash"] = content_hash(data)
    path = path_of(store, record.cell, record.session)
    write_atomically(path, (json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n").encode())
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to a temporary name beside `path`, fsync, rename. Raises `StoreError`; leaves no part behind."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise StoreError(f"{path.parent}: cannot write {path.name}: {error.strerror}; free space or rights?") from None


def load(path: Path) -> Record:
    """Read one record; raise `BadRecordError` if it is truncated, edited, or not of this schema."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from None
    return parse(content, str(path))


def load_kept(path: Path) -> Record:
    """Read a record where a store keeps it; raise as `load`, with what helps where it lies."""
    try:
        return load(path)
    except BadRecordError as error:
        raise BadRecordError(f"{error}; {_way_out(path)}") from None


def _way_out(path: Path) -> str:
    return RESTORED if (path.parent.parent / MANIFEST).exists() else MOVED_AWAY


def parse(content: bytes, where: str) -> Record:
    """The record that a file holds; raise `BadRecordError` naming `where` if anything about it is wrong."""
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        raise BadRecordError(f"{where}: not JSON, so truncated or damaged") from None
    return check(data, where)


def check(data: Any, where: str) -> Record:
    """The record in `data`; raise `BadRecordError` naming `where` if anything about it is wrong."""
    if not isinstance(data, dict):
        raise BadRecordError(f"{where}: not a record")
    if "schema_version" not in data:
        raise BadRecordError(f"{where}: not a record")
    if data["schema_version"] != SCHEMA_VERSION:
        seen = repr(data["schema_version"])[:40]
        raise BadRecordError(f"{where}: schema {seen}, this version reads {SCHEMA_VERSION}; update the checkout")
    try:
        if data.get("content_hash") != content_hash(data):
            raise BadRecordError(f"{where}: the content does not match its own hash, so it was edited or damaged")
        record = Record.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadRecordError(f"{where}: {field}: {first['msg']}") from None
    except (ValueError, RecursionError):
        raise BadRecordError(f"{where}: holds a value that no record can hold (NaN, Infinity or too deep)") from None
    if record.protocol_hash != record.protocol.digest():
        raise BadRecordError(f"{where}: the protocol does not match its hash")
    return record


def files(store: Path, gpu: str) -> Iterator[Path]:
    """The record files of one GPU below `store`, sorted by experiment and name."""
    yield from sorted((store / gpu).glob("*/*_s*.json"))


def load_shipped(results: Path, gpu: str) -> list[Record]:
    """Every shipped record of `gpu`; raise as `load_all`, and where the manifest that guards them is gone."""
    if any(files(results, gpu)) and not (results / gpu / MANIFEST).exists():
        raise BadRecordError(
            f"{results / gpu / MANIFEST}: not there, so nothing vouches for the records; restore it with git"
        )
    return load_all(results, gpu)


def load_all(store: Path, gpu: str) -> list[Record]:
    """Every record of `gpu` in `store`; raise on the first bad, misplaced or (where there is one) unlisted one."""
    listed = _manifest(store / gpu / MANIFEST)
    records, seen = [], set()
    for path in files(store, gpu):
        record = load_kept(path)
        if path_of(store, record.cell, record.session) != path:
            held = record.cell.file_name(record.session)
            raise BadRecordError(f"{path}: holds the record of {held}; {_way_out(path)}")
        name = path.relative_to(store / gpu).as_posix()
        if listed is not None and listed.get(name) != hashlib.sha256(path.read_bytes()).hexdigest():
            raise BadRecordError(f"{path}: not what {MANIFEST} lists; restore it with git, or publish again")
        records.append(record)
        seen.add(name)
    if listed is not None and (gone := sorted(set(listed) - seen)):
        raise BadRecordError(f"{store / gpu / gone[0]}: listed in {MANIFEST} but not there; restore it with git")
    return records


def manifest_text(store: Path, gpu: str) -> str:
    """The manifest of one GPU in the format of `sha256sum`: digest, two spaces, path below the GPU's folder."""
    base = store / gpu
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files(store, gpu)}
    return "".join(f"{digest}  {path.relative_to(base).as_posix()}\n" for path, digest in digests.items())


def _manifest(path: Path) -> dict[str, str] | None:
    if not path.exists():
        return None
    listed = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if len(digest) != 64 or not name:
            raise BadRecordError(f"{path}: {line[:60]!r} is not a line of a manifest")
        listed[name] = digest
    return listed
