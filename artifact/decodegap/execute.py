"""How a notebook is run: papermill with this interpreter's kernel, progress shown, the result as .ipynb and HTML."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decodegap import errors, progress, records, scratch
from decodegap.errors import DecodeGapError, MissingPackageError
from decodegap.paths import HERE

SOCKET_PATH_MAX = 108  # sun_path of sockaddr_un; in a temporary folder deeper than this they go beside the notebook


class NotebookFailedError(DecodeGapError):
    """A notebook stopped for a reason that is not a user's mistake; the executed copy holds the traceback."""

    exit_code = 1


def run(name: str, parameters: dict[str, Any], folder: Path, store: Path) -> Path:
    """Execute `notebooks/<name>.ipynb` with `parameters`; return the executed copy in `folder` (HTML beside it).

    An error of ours inside the notebook is raised again here as itself, so that its one line and its exit code
    reach the user.
    """
    try:
        import papermill
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError
        from traitlets.config import Config
    except ImportError as error:
        raise MissingPackageError(
            f"{error.name} is not installed in {sys.executable}; install requirements/analysis.lock there, "
            "or leave PYTHON unset to get a .venv"
        ) from None
    executed = folder / f"{name}.ipynb"
    records.write_atomically(executed, b"")  # says at once, in one line, if the folder cannot be written
    with _relay(), _sockets() as sockets, _environment(store):
        try:
            with _stoppable():
                papermill.execute_notebook(
                    HERE.notebooks / f"{name}.ipynb",
                    executed,
                    parameters=parameters,
                    kernel_name="python3",
                    progress_bar=False,
                    log_output=True,
                    cwd=HERE.notebooks,
                    config=Config({"KernelManager": sockets}),
                )
        except PapermillExecutionError as error:
            ours = getattr(errors, error.ename, None)
            if isinstance(ours, type) and issubclass(ours, DecodeGapError):
                raise ours(error.evalue) from None
            raise NotebookFailedError(
                f"{name}.ipynb stopped with {error.ename}: {error.evalue[:300]}; see {_relative(executed)}"
            ) from None
        except DeadKernelError:
            raise NotebookFailedError(
                f"the kernel of {name}.ipynb ended (stopped, killed, or out of memory?); what was measured is kept, "
                "and the same command goes on from here"
            ) from None
        finally:
            with contextlib.suppress(OSError, ValueError):
                _anonymise(executed, store)
                _to_html(executed)
    return executed


def _anonymise(executed: Path, store: Path) -> None:
    """Take this machine's paths out of an executed notebook: they name people, and change from machine to machine."""
    notebook = json.loads(executed.read_text(encoding="utf-8"))
    for key in ("input_path", "output_path", "environment_variables"):
        notebook.get("metadata", {}).get("papermill", {}).pop(key, None)
    text = json.dumps(notebook, indent=1, ensure_ascii=False)
    for path, stand_in in _paths(store):
        text = text.replace(json.dumps(path, ensure_ascii=False)[1:-1], stand_in)
    records.write_atomically(executed, (text + "\n").encode())


def _paths(store: Path) -> list[tuple[str, str]]:
    """Paths of this machine that a notebook may show, and what stands for them; those inside others first."""
    named = {
        str(store.resolve()): "RESULTS",
        str(HERE.root): "CHECKOUT",
        sys.prefix: "PYTHON",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
        str(Path.home()): "HOME",
    }
    found = [(path, f"<{name}>") for path, name in named.items() if path != os.sep]
    return sorted(found, key=lambda item: -len(item[0]))


def _to_html(executed: Path) -> None:
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(executed, as_version=4)
    body, _ = HTMLExporter(embed_images=True).from_notebook_node(notebook)
    # What the template would fetch from elsewhere is for formulas and widgets, which no notebook here has.
    offline = re.sub(r'<script[^>]*\bsrc="https?://[^"]*"[^>]*>\s*</script>', "", body)
    records.write_atomically(executed.with_suffix(".html"), offline.encode())


@contextlib.contextmanager
def _sockets() -> Iterator[dict[str, str]]:
    """Where kernel and client meet: sockets in a private folder for as long as they live, no TCP port."""
    with scratch.folder() as folder:
        at = folder / "kernel"
        settings = {"transport": "ipc", "connection_file": f"{at}.json"}
        if len(f"{at}-00000") < SOCKET_PATH_MAX:
            settings["ip"] = str(at)
        yield settings


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM stop a notebook between two steps of nbclient's event loop, then raise KeyboardInterrupt.

    Raised inside a step, as Python does it, the interrupt stays in whichever task was running, and asyncio prints a
    traceback of it when that task is dropped. A second signal changes nothing: ending the kernel takes seconds at most.
    """
    from jupyter_core.utils import ensure_event_loop

    loop, came = ensure_event_loop(), asyncio.Event()

    def stop() -> None:
        if not came.is_set():
            came.set()
            for task in asyncio.all_tasks(loop):
                task.cancel()

    # A signal that is ignored (a job in the background) or ends the process at once stays as it is.
    ours = {sent: was for sent in (signal.SIGINT, signal.SIGTERM) if callable(was := signal.getsignal(sent))}
    for sent in ours:
        loop.add_signal_handler(sent, stop)
    try:
        yield
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(asyncio.sleep(0))  # a turn for a signal that came after the last step
        for sent, was in ours.items():
            loop.remove_signal_handler(sent)
            signal.signal(sent, was)
        loop.run_until_complete(_drop_tasks())
        if came.is_set():
            raise KeyboardInterrupt


async def _drop_tasks() -> None:
    """Cancel what else is left in this loop and see it end."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


@contextlib.contextmanager
def _relay() -> Iterator[None]:
    """Show the kernel's output as it comes; papermill hands it to its logger."""
    logger, relay = logging.getLogger("papermill"), progress.Relay()
    before = logger.propagate
    logger.addHandler(relay)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    relay.addFilter(_is_text_output)
    try:
        yield
    finally:
        relay.finish()
        logger.removeHandler(relay)
        logger.propagate = before


def _is_text_output(record: logging.LogRecord) -> bool:
    """Whether papermill's log record is text that a cell printed, not the stand-in text of a picture or a table."""
    return record.funcName == "log_output_message" and not re.match(r"<(Figure|IPython)\b", record.getMessage())


def kernel_environment(store: Path) -> dict[str, str]:
    """Variables under which `python3` means this interpreter and our library is importable, for a kernel or a lab.

    A user's own kernelspec of that name, or an IPython start-up file, would otherwise run something else.
    """
    home = store / ".jupyter"
    spec = {
        # Critical only: a kernel that is stopped by Ctrl-C would print a traceback of its own.
        "argv": [sys.executable, "-m", "ipykernel_launcher", "--log-level=CRITICAL", "-f", "{connection_file}"],
        "display_name": "decode-gap",
        "language": "python",
    }
    records.write_atomically(home / "kernels" / "python3" / "kernel.json", json.dumps(spec).encode())
    return {
        "JUPYTER_PATH": os.pathsep.join(filter(None, [str(home), os.environ.get("JUPYTER_PATH")])),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.root / "artifact"), os.environ.get("PYTHONPATH")])),
    }


@contextlib.contextmanager
def _environment(store: Path) -> Iterator[None]:
    wanted = kernel_environment(store)
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _relative(path: Path) -> str:
    return os.path.relpath(path)
