"""Where a figure, table or number comes from: its records, their sessions, hosts and versions, and its commit.

A file that is made from records carries their hash. Here the hash is turned back into the records, which are checked on
the way, so that a file whose records were changed or taken away since is told from one that still stands on them.
"""

import csv
import io
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from decodegap import exhibits, frame, git, history, plan, records, report
from decodegap.errors import BadInputError, BadRecordError
from decodegap.paths import HERE, Places, imported
from decodegap.rows import counted
from decodegap.schema import Record

if TYPE_CHECKING:
    import pandas as pd

STAMP = re.compile(rb"[Rr]ecords\"?:?\s*\"?(?:sha256:)?\s*([0-9a-f]{64}|[0-9a-f]{16})(?![0-9a-f])")
HASH = re.compile(r"[0-9a-f]{64}")
STREAM = re.compile(rb"stream\r?\n(.*?)endstream", re.DOTALL)
LARGEST = 100_000_000  # bytes; nothing that the bundle makes comes near
GROUPS = ("store", "gpu", "experiment", "model", "arm")


@dataclass(frozen=True)
class Source:
    """One record behind a file, and where it lies."""

    path: Path
    record: Record


def lines(name: str, store: Path, at: Places = HERE) -> list[str]:
    """What `make provenance FILE=name` says. `name` is as the user gives it, from the folder they are in.

    Raises `BadInputError` for a file that is not there or carries no hash of records, `BadRecordError` for one whose
    records were changed or are not here.
    """
    path = _file(name, at)
    content = _content(path)
    cited = _cited(path, content)
    stamp = None if cited else STAMP.search(content) or _in_streams(path, content) or _in_twin(path)
    if not cited and stamp is None:
        raise BadInputError(f"FILE: {name}: carries no hash of records, so it was not made here from records")
    known = _known(store, at)
    if stamp is not None:
        digest = stamp[1].decode()
        cited = _behind(digest, store, at)
        if cited is None:
            raise BadRecordError(
                f"{name}: made from records {digest[:16]}, which are not those here: they were changed, added or taken "
                "away since; restore them with git, or rebuild with `make figures tables`"
            )
    if gone := sorted(set(cited or ()) - set(known)):
        raise BadRecordError(f"{name}: record {gone[0][:16]} is not here; restore it with git, or rebuild the file")
    every = sorted((known[each] for each in cited or ()), key=lambda source: str(source.path))
    sources, beside = (every, "") if stamp is None else _drawn_from(path, every)
    return [
        f"{report.shown(path, at)}: {_stands_on(sources)}{beside}",
        *_git(path, at),
        *_summary(sources, at),
        *_each(sources, at),
    ]


def _drawn_from(path: Path, every: list[Source]) -> tuple[list[Source], str]:
    """Those of the records whose hash a file carries that it draws from, and what to say of the others.

    A figure or table carries the hash of all records of its report, because which of them it shows is decided by all.
    """
    experiments = exhibits.DRAWN_FROM.get(path.stem.removeprefix("cpu-"))
    if experiments is None:
        return every, ""
    used = [source for source in every if source.record.cell.experiment in experiments]
    others = len(every) - len(used)
    if not others:
        return used, ""
    return used, f", those of {', '.join(experiments)}; its hash is of {others} more, which it does not show"


def _file(name: str, at: Places) -> Path:
    if not name.strip():
        raise BadInputError("FILE: give the file to trace, as in `make provenance FILE=figures/fraction.pdf`")
    path = plan.place("FILE", name)
    if not path.is_file():
        raise BadInputError(f"FILE: there is no file {name!r} here")
    if not path.is_relative_to(at.root) and not path.is_relative_to(at.local.resolve()):
        raise BadInputError(f"FILE: {name} is outside this checkout")
    return path


def _content(path: Path) -> bytes:
    try:
        if path.stat().st_size > LARGEST:
            raise BadInputError(f"FILE: {path.name}: too large to be made here")
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(f"FILE: {path.name} cannot be read: {error.strerror}") from None


def _cited(path: Path, content: bytes) -> tuple[str, ...] | None:
    """The records that a file names itself: a record, or a CSV with a column of them; None for any other file."""
    text = content.decode("utf-8", "replace")
    if path.suffix == ".json" and path.name.count("_s"):
        return (records.load_kept(path).content_hash,)
    if path.suffix != ".csv" or "records" not in text.partition("\n")[0].split(","):
        return None
    try:
        rows = list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise BadInputError(f"FILE: {path.name}: not a table as it is written here: {error}") from None
    return tuple(sorted({each for row in rows for each in HASH.findall(str(row.get("records") or ""))})) or None


def _in_streams(path: Path, content: bytes) -> re.Match[bytes] | None:
    """The hash in a PDF whose metadata are compressed."""
    if path.suffix != ".pdf":
        return None
    for stream in STREAM.finditer(content):
        try:
            plain = zlib.decompressobj().decompress(stream[1], LARGEST)
        except zlib.error:
            continue
        if found := STAMP.search(plain):
            return found
    return None


def _in_twin(path: Path) -> re.Match[bytes] | None:
    """The hash in the Markdown beside a CSV, which is the same table and has room for notes."""
    twin = path.with_suffix(".md")
    return STAMP.search(_content(twin)) if path.suffix == ".csv" and twin.is_file() else None


def _known(store: Path, at: Places) -> dict[str, Source]:
    """Every valid record here by its content hash; the shipped copy where a local one is the same."""
    found: dict[str, Source] = {}
    for base in (imported(store), store, at.results):
        for path in sorted(base.glob("*/*/*_s*.json")):
            if path.relative_to(base).parts[0] not in ("aside", "local"):
                record = records.load_kept(path)
                found[record.content_hash] = Source(path, record)
    return found


def _behind(digest: str, store: Path, at: Places) -> tuple[str, ...] | None:
    """The content hashes whose common hash starts with `digest`: all that a report shows, or one part of it."""
    for table in _frames(store, at):
        for part in _parts(table):
            if frame.records_hash(part).startswith(digest):
                return tuple(sorted({each for row in part["records"] for each in row}))
    return None


def _frames(store: Path, at: Places) -> Iterator["pd.DataFrame"]:
    yield report.paper(at).frame
    for gpu in report.local_gpus(store):
        view = report.local(gpu, store, at)
        if view is not None:
            yield view.frame


def _parts(table: "pd.DataFrame") -> Iterator["pd.DataFrame"]:
    yield table
    for size in range(1, len(GROUPS) + 1):
        for columns in combinations(GROUPS, size):
            yield from (part for _, part in table.groupby(list(columns)))


def _stands_on(sources: list[Source]) -> str:
    hosts = {source.record.machine.host_tag for source in sources if source.record.machine}
    return f"made from {counted(len(sources), 'record')}, one session each, of {counted(len(hosts), 'host')}"


def _git(path: Path, at: Places) -> list[str]:
    """Which commit drew the file, and whether it was changed since."""
    name = str(path.relative_to(at.root)) if path.is_relative_to(at.root) else ""
    last = _ask_git(at, "log", "-1", "--format=%H %cs %s", "--", name) if name else None
    if last is None:
        return ["commit: git says nothing here, so what drew the file is not known"]
    if not last:
        return ["commit: none, the file is this machine's own"]
    changed = _ask_git(at, "status", "--porcelain", "--", name)
    return [f"commit: {last}" + ("; the file was changed since" if changed else "")]


def _ask_git(at: Places, *question: str) -> str | None:
    try:
        return git.say(at.root, *question)
    except (OSError, subprocess.SubprocessError):
        return None


def _summary(sources: list[Source], at: Places) -> list[str]:
    every = [source.record for source in sources]
    commits = history.commits_of({record.source_hash for record in every}, at.root)
    held = {measuring: f"{measuring} (as in commit {commit[:12]})" for measuring, commit in commits.items()}
    tallies = {
        "hosts": Counter(f"{r.machine.host_tag} ({r.machine.device_name})" for r in every if r.machine),
        "protocols": Counter(r.protocol_hash for r in every),
        "measuring sources": Counter(held.get(r.source_hash, r.source_hash) for r in every),
        # The sources' hash says what measured: a copied working tree may have carried another commit than its own.
        "commit of the checkout": Counter((r.commit or "unknown")[:12] for r in every),
        "versions": Counter(", ".join(f"{k} {v}" for k, v in sorted(r.versions.items())) for r in every),
    }
    return [
        f"{what}: {'; '.join(f'{each} x {n}' for each, n in tally.most_common())}" for what, tally in tallies.items()
    ]


def _each(sources: list[Source], at: Places) -> Iterator[str]:
    for source in sources:
        record = source.record
        tag = record.machine.host_tag if record.machine else "unknown"
        where = report.shown(source.path, at)
        yield f"  {record.content_hash}  {where}  session {record.session}, host {tag}, {record.outcome}"
