"""Which commit held the sources that a record was measured with: the way back from a record that names no commit."""

import ast
import contextlib
import subprocess
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from decodegap import git
from decodegap.paths import HERE
from decodegap.sources import digest

LIBRARY = "artifact/decodegap"
LISTED_IN = ("sources.py", "session.py", "records.py")  # where the list of measuring sources lay, the newest first
BESIDE = ("fused/*.py", "data/fused/*.toml", "data/models/*.json")


def commits_of(hashes: Collection[str], root: Path = HERE.root) -> dict[str, str]:
    """The first commit whose measuring sources have each of `hashes` (see `sources.source_hash`), where git has one.

    Every commit's own list of measuring sources counts. Without git nothing is found.
    """
    try:
        known = _first_commits(root, git.say(root, "rev-parse", "HEAD"))
    except (OSError, subprocess.SubprocessError):
        return {}
    return {measuring: known[measuring] for measuring in hashes if measuring in known}


@lru_cache(maxsize=1)
def _first_commits(root: Path, head: str) -> dict[str, str]:
    """For every state of the measuring sources in the history of `head`, by its hash, the first commit that had it."""
    commits = git.say(root, "rev-list", head, "--", LIBRARY).split()
    trees = {commit: _tree(root, commit) for commit in reversed(commits)}
    blobs = _blobs(root, {blob for tree in trees.values() for blob in tree.values()})
    found: dict[str, str] = {}
    for commit, tree in trees.items():
        found.setdefault(_source_hash({name: blobs[blob] for name, blob in tree.items()}), commit)
    return found


def _source_hash(library: Mapping[str, bytes]) -> str:
    """What `sources.source_hash` said of a library with these files, or nothing if it did not list them as today."""
    named = next((names for name in LISTED_IN if (names := _list(library.get(name, b"")))), ())
    paths = {Path(name) for name in library}
    every = [*map(Path, named), *sorted(path for path in paths if any(_fits(path, each) for each in BESIDE))]
    if not named or not paths.issuperset(every):
        return ""
    return digest((path.name, library[path.as_posix()]) for path in every)


def _fits(path: Path, pattern: str) -> bool:
    return len(path.parts) == len(Path(pattern).parts) and path.match(pattern)


def _list(code: bytes) -> tuple[str, ...]:
    """The value of MEASURING_SOURCES in `code`, empty if that does not define it as a plain tuple."""
    if b"\nMEASURING_SOURCES = (" not in code:
        return ()
    with contextlib.suppress(SyntaxError, ValueError):
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "MEASURING_SOURCES":
                return tuple(ast.literal_eval(statement.value))
    return ()


def _tree(root: Path, commit: str) -> dict[str, str]:
    """The blob of each file of the library at `commit`, by its path below the library."""
    lines = git.say(root, "ls-tree", "-r", "--full-tree", commit, "--", LIBRARY).splitlines()
    split = [line.partition("\t") for line in lines]
    return {name.removeprefix(f"{LIBRARY}/"): described.split()[2] for described, _, name in split}


def _blobs(root: Path, wanted: Collection[str]) -> dict[str, bytes]:
    return dict(_batch(git.ask(root, "cat-file", "--batch", given="".join(f"{blob}\n" for blob in wanted).encode())))


def _batch(out: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of each object in the answer of `git cat-file --batch`."""
    at = 0
    while at < len(out):
        begin = out.index(b"\n", at) + 1
        name, _, size = out[at:begin].decode().split()
        yield name, out[begin : begin + int(size)]
        at = begin + int(size) + 1
