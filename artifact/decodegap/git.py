"""What git says in a checkout."""

import os
import subprocess
from pathlib import Path

PATIENCE_S = 30


def ask(root: Path, *question: str, given: bytes = b"") -> bytes:
    """Git's answer in the checkout at `root`, with `given` on its standard input.

    A repository around an unpacked archive knows nothing of it, and is not asked. Raises `OSError` where there is no
    git, and `subprocess.SubprocessError` where it has no answer.
    """
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}
    command = ["git", "-C", str(root), *question]
    return subprocess.run(command, input=given, capture_output=True, check=True, timeout=PATIENCE_S, env=env).stdout


def say(root: Path, *question: str) -> str:
    """The same as text, without the white space around it."""
    return ask(root, *question).decode().strip()
