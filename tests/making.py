"""The Makefile run for real, in a copy of the packaging files, for the tests of it.

Stand-ins for Python write down how they were called. Nothing here uses the network.
"""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("GPU", "MODELS", "CONTEXTS", "SESSIONS", "EXPERIMENTS", "WEIGHTS", "REQUIRE", "PIP_ARGS", "PYTHON")
TOOLS = ("awk", "bash", "cat", "chmod", "cmp", "cp", "dirname", "env", "find", "mkdir", "mv", "rm", "sed", "touch")

# Writes its arguments and settings to calls.log; makes a .venv holding itself; answers `mode` as it is told to.
STAND_IN = """#!/bin/bash
echo "$(basename_of "$0")|$*|GPU=${GPU-}|OFFLINE=${HF_HUB_OFFLINE-}" >>"$CALLS"
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"quant.lock"*) exit "${FAKE_QUANT_EXIT:-0}" ;;
    *"pip "*) exit "${FAKE_PIP_EXIT:-0}" ;;
    *"decodegap mode"*) echo "${FAKE_MODE:-replay}"; exit "${FAKE_MODE_EXIT:-0}" ;;
esac
""".replace('$(basename_of "$0")', "${0##*/}")

# The real interpreter, pretending to be another version or to lack a module, for requirements/interpreter.py only.
PRETENDER = """#!/bin/bash
exec {python} -c '
import runpy, sys
sys.version_info, sys.version = {version}, ".".join(map(str, {version}))
for name in {hidden}: sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def clone_into(folder: Path, programs: Path) -> Path:
    """The packaging files alone in `folder`, and beside them, in `programs`, a PATH with no Python on it."""
    (folder / "artifact").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements", ignore=shutil.ignore_patterns("__pycache__"))
    programs.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"these tests need {tool}"
        (programs / tool).symlink_to(found)
    return folder


def make(clone: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run make in the clone, away from this process's own settings and interpreter."""
    program = shutil.which("make")
    assert program
    base = {"PATH": str(clone.parent / "bin"), "HOME": str(clone.parent), "CALLS": str(clone.parent / "calls.log")}
    base["CUDA_HOME"] = str(clone.parent / "cuda")  # this machine's own compiler is not the clone's
    return subprocess.run(
        [program, *arguments],
        cwd=clone,
        env=base | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def calls(clone: Path) -> list[str]:
    log = clone.parent / "calls.log"
    return log.read_text().splitlines() if log.exists() else []


def installs(clone: Path) -> list[str]:
    """The sets that pip was asked for, in order."""
    pip = [line for line in calls(clone) if "pip " in line and "--requirement" in line]
    return [re.findall(r"requirements/(\w+)\.lock", line)[-1] for line in pip]


def put_python(clone: Path, text: str = STAND_IN) -> Path:
    return executable(clone.parent / "bin/python3", text)
