"""Which code and which packages a record was measured with."""

import hashlib
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from decodegap import git
from decodegap.paths import DATA, HERE

MEASURING_SOURCES = (
    "anatomy.py",
    "anatomy_quant.py",
    "arms.py",
    "attest.py",
    "cells.py",
    "decode.py",
    "floor.py",
    "graphs.py",
    "ledger.py",
    "models.py",
    "pairing.py",
    "plan_ladder.py",
    "probe_kernels.py",
    "probes.py",
    "profiling.py",
    "quant_attest.py",
    "quant_bench.py",
    "quant_catalogue.py",
    "quant_cells.py",
    "quant_check.py",
    "quant_checkpoint.py",
    "quant_kernels.py",
    "quant_modules.py",
    "quant_nf4.py",
    "quant_patches.py",
    "quant_paths.py",
    "quant_tiles.py",
    "quantise.py",
    "reference.py",
    "rungs.py",
    "session.py",
    "timing.py",
    "trace.py",
)


def versions() -> dict[str, str]:
    """Versions of what a measurement runs on, by package name; absent ones are left out."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    names = ("torch", "transformers", "triton", "numpy", "safetensors", "bitsandbytes", "gptqmodel", "decode-gap")
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if (torch := sys.modules.get("torch")) is not None and torch.version.cuda:
        found["torch"], found["cuda"] = str(torch.__version__), str(torch.version.cuda)
    return found


def source_hash() -> str:
    """Hex SHA-256 (16 digits) over the sources that decide what is measured and how."""
    here = Path(__file__).resolve().parent
    named = [here / name for name in MEASURING_SOURCES]
    beside = sorted([*here.glob("fused/*.py"), *DATA.glob("fused/*.toml"), *DATA.glob("models/*.json")])
    return digest((path.name, path.read_bytes()) for path in named + beside)


def digest(contents: Iterable[tuple[str, bytes]]) -> str:
    """Hex SHA-256 (16 digits) over the names and contents of measuring sources, in their order."""
    whole = hashlib.sha256()
    for name, content in contents:
        whole.update(name.encode() + b"\0" + content)
    return whole.hexdigest()[:16]


def commit(root: Path = HERE.root) -> str | None:
    """The checkout's commit, or None where git knows none or where the library differs from it.

    A copy of a working tree may carry the history of another state, which must not pass for what was measured.
    """
    try:
        changed = git.say(root, "status", "--porcelain", "--", "artifact/decodegap")
        return None if changed else git.say(root, "rev-parse", "HEAD") or None
    except (OSError, subprocess.SubprocessError):
        return None
