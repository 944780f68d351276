"""Whether anything that leaves this machine tells whose it is: files of the checkout, and a notebook just executed."""

import getpass
import os
import platform
import re
import subprocess
import sys
import zlib
from pathlib import Path

import psutil
import pytest

from decodegap import execute, host
from decodegap.paths import HERE

SEARCHED = (".json", ".ipynb", ".md", ".csv", ".tex", ".svg", ".pdf", ".png", ".html", ".toml", ".txt", ".sha256")
PNG_TEXT = re.compile(rb"(?:tEXt|iTXt|zTXt)[^\0]*\0[\x20-\x7e]*")
PATTERNS = {
    "a GPU's UUID": rb"GPU-[0-9a-f]{8}-[0-9a-f]{4}",
    "a MAC address": rb"(?<![0-9a-f:])[0-9a-f]{2}(?::[0-9a-f]{2}){5}(?![0-9a-f:])",
    "an IP address": rb"(?<![\w.])(?!127\.0\.0\.1|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\w.])",
    "an absolute path": rb"(?<![\w.~<-])/(?:home|root|work|Users|tmp|opt|mnt|data|scratch)/\w",
    "a serial number": rb"(?i)\bserial(?:_number)?\W{1,4}\d{6,}",
}
# Versions of four numbers are no addresses: of drivers, packages and browsers.
NOT_ADDRESSES = re.compile(rb"(?i)(?:driver|version|cuda|kernel|==|v|\|)\W{0,5}(?:\d+\.){3}\d+")


def names_here() -> list[bytes]:
    """What this machine and its user are called, where that is more than a common word."""
    common = {"root", "user", "vm", "localhost", "runner", "ubuntu", "debian", "admin"}
    found = {platform.node(), platform.node().partition(".")[0], getpass.getuser(), os.environ.get("USER", "")}
    return [name.encode() for name in found if len(name) > 3 and name.lower() not in common]


def ids_here() -> list[bytes]:
    """The machine id and the hardware addresses of this machine."""
    addresses = [each.address for every in psutil.net_if_addrs().values() for each in every]
    loop = {"00:00:00:00:00:00", "127.0.0.1", "::1"}
    return [text.encode() for text in {host._machine_id(Path("/")), *addresses} - loop if len(text) > 5]


def leaks(content: bytes) -> list[str]:
    """What in `content` would tell somebody where it was made."""
    text = NOT_ADDRESSES.sub(b"", content)
    found = [f"{what}: {match[0][:60]!r}" for what, pattern in PATTERNS.items() if (match := re.search(pattern, text))]
    return found + [
        f"a name or address of this machine: {each!r}" for each in names_here() + ids_here() if each in content
    ]


def readable(path: Path) -> bytes:
    """What there is to read in a file: a picture's metadata, a PDF's streams, any other file as it is."""
    content = path.read_bytes()
    if path.suffix == ".png":
        return b"\n".join(PNG_TEXT.findall(content))
    if path.suffix == ".pdf":
        head, plain = re.sub(rb"stream\r?\n.*?endstream", b"", content, flags=re.DOTALL), []
        for stream in re.findall(rb"stream\r?\n(.*?)endstream", content, re.DOTALL):
            try:
                plain.append(zlib.decompressobj().decompress(stream))
            except zlib.error:
                continue
        strings = [text for each in plain for text in re.findall(rb"\(([\x20-\x7e]{6,})\)", each)]
        return b"\n".join([head, *strings])
    return re.sub(rb"data:[\w/+.-]+;base64,[A-Za-z0-9+/=]+", b"", content)


def shipped() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=HERE.root, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    folders = ("artifact/results", "artifact/published", "figures", "paper", "notebooks", "docs")
    names = [name for name in done.stdout.split("\0") if name.startswith(folders) and name.endswith(SEARCHED)]
    return [HERE.root / name for name in names]


def test_the_search_finds_what_it_is_for() -> None:
    own = sys.prefix.encode()
    samples = [
        b'"uuid": "GPU-6f0e1c1a-0000-4000"',
        b"at 52:54:00:12:34:56",
        b"from 10.1.2.3 x",
        b"in /ho" + b"me/somebody/x",
    ]
    assert [len(leaks(each)) for each in samples] == [1, 1, 1, 1]
    assert leaks(b"serial_number: 1650522012345")
    assert leaks(b'"driver": "580.95.05.01", torch==2.13.0.1, 127.0.0.1, 12:30:45') == []
    assert not leaks(own) or own.startswith((b"/home", b"/root", b"/work", b"/tmp", b"/opt"))


def test_nothing_shipped_tells_whose_it_is() -> None:
    files = [path for path in shipped() if path.is_file()]
    assert files
    assert {str(path.relative_to(HERE.root)): found for path in files if (found := leaks(readable(path)))} == {}


def test_an_executed_notebook_tells_nothing(tmp_path: Path) -> None:
    """Its parameters, its outputs and its metadata, with the results in a folder that has a telling name."""
    store = tmp_path / "somebodys-results"
    parameters = {"gpu": "cpu", "models": "tiny-llama", "contexts": "24", "sessions": 1, "results": str(store)}
    executed = execute.run("01_baseline", parameters, store / "cpu" / "notebooks", store)
    for path in (executed, executed.with_suffix(".html"), *store.glob("cpu/*/*.json")):
        content = readable(path)
        assert leaks(content) == [], path.name
        assert b"somebodys-results" not in content, path.name
    assert b"<RESULTS>" in executed.read_bytes()


def test_a_traceback_in_a_notebook_tells_nothing(tmp_path: Path) -> None:
    with pytest.raises(execute.DecodeGapError):
        execute.run("01_baseline", {"gpu": "../x", "results": str(tmp_path)}, tmp_path / "out", tmp_path)
    text = (tmp_path / "out" / "01_baseline.ipynb").read_bytes()
    assert b"BadInputError" in text
    assert str(HERE.root).encode() not in text
    assert leaks(readable(tmp_path / "out" / "01_baseline.ipynb")) == []
