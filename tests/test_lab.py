"""JupyterLab as `make lab` starts it: on loopback alone, and closed to whoever has no token."""

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from decodegap import cli, execute


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def lab(folder: Path, port: int) -> Iterator[psutil.Process]:
    """A running JupyterLab whose user's own configuration opens it to everybody."""
    (folder / "config").mkdir()
    (folder / "config" / "jupyter_server_config.py").write_text("c.ServerApp.ip = '0.0.0.0'\n")
    extra = ["--no-browser", "--allow-root", f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    env = dict(os.environ) | execute.kernel_environment(folder) | {"JUPYTER_CONFIG_DIR": str(folder / "config")}
    env["JUPYTER_RUNTIME_DIR"] = str(folder / "runtime")
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen([*cli.lab_command(), *extra], env=env, stdout=said, stderr=said)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_the_lab_listens_on_loopback_and_wants_its_token(tmp_path: Path) -> None:
    port = free_port()
    with lab(tmp_path, port) as process:
        deadline = time.monotonic() + 60
        listening: set[str] = set()
        while not listening and time.monotonic() < deadline:
            time.sleep(0.2)
            listening = {each.laddr.ip for each in process.net_connections("tcp") if each.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        said = (tmp_path / "said").read_text()
        while "?token=" not in said and time.monotonic() < deadline:
            time.sleep(0.2)
            said = (tmp_path / "said").read_text()
        token = said.partition("?token=")[2].split()[0]
        contents = f"http://127.0.0.1:{port}/api/contents"
        assert len(token) >= 32
        assert (status(contents), status(f"{contents}?token={token}")) == (403, 200)
