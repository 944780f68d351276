"""Kernels that a package ships as source: patched, compiled once for this card and this torch, and loaded.

The sources are those in gptqmodel's `gptqmodel_ext`, a package that only holds them; gptqmodel itself, which changes
its process, is never imported. `python -m decodegap.quant_kernels` builds what this machine can, before anything is
measured.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

from decodegap import quant_patches
from decodegap.errors import DecodeGapError, UnsupportedError
from decodegap.paths import HERE
from decodegap.quant_patches import EXTENSIONS, Extension

PACKAGE, RELEASE = "gptqmodel", "7.6.0"
BUILD = "python -m decodegap.quant_kernels"
LONGEST_BUILD_S = 900
SAY_EVERY_S = 15
LIBRARY, LOG = "library.so", "build.log"

Say = Callable[[str], None]
say_now: Say = partial(print, flush=True)


def sources(extension: Extension) -> Path:
    """The folder of `extension`'s sources. Raises `UnsupportedError` without the package, or for another release."""
    spec = importlib.util.find_spec("gptqmodel_ext")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    folder = Path(places[0], extension.folder) if places else None
    if folder is None or not folder.is_dir():
        raise UnsupportedError(
            f"{extension.name} kernels are compiled from {PACKAGE} {RELEASE}'s sources, which are not installed: "
            "requirements/install.sh quant"
        )
    try:
        release = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        release = "of an unknown release"
    if release != RELEASE:
        raise UnsupportedError(f"{extension.name} kernels are checked against {PACKAGE} {RELEASE}; here is {release}")
    return folder


def architecture() -> str:
    """The card's compute capability as a compiler names it, such as `9.0`. Raises `UnsupportedError` without a card."""
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("these kernels need an NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def library(extension: Extension, arch: str) -> Path:
    """Where the library is, or would be: by a hash of its sources, of what is changed in them, and of what built it."""
    import torch

    folder = sources(extension)
    hashed = hashlib.sha256(Path(quant_patches.__file__).read_bytes())
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            hashed.update(f"\0{path.relative_to(folder)}\0".encode() + path.read_bytes())
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    hashed.update(f"\0{torch.__version__} {torch.version.cuda} {arch} {python}".encode())
    return HERE.kernels / f"{extension.name}-sm{arch.replace('.', '')}-{hashed.hexdigest()[:16]}" / LIBRARY


@cache
def load(name: str) -> Any:
    """The operators of a library that was built before. Raises `UnsupportedError` where there is none for this card."""
    import torch

    extension = EXTENSIONS[name]
    path = library(extension, architecture())
    if not path.is_file():
        raise UnsupportedError(f"{name} kernels are not built for this card and this torch; first run {BUILD}")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise UnsupportedError(f"{name} kernels cannot be loaded: {error}") from None
    return getattr(torch.ops, extension.namespace)


def build(names: Sequence[str] = quant_patches.DEFAULT, *, arch: str = "", say: Say = say_now) -> dict[str, str]:
    """Build the libraries that are not there yet, side by side; return for each that cannot be why, in one line.

    For this machine's card, or for `arch` (such as `9.0`) where there is none. Each is compiled by a process of its
    own, so that one that fails or hangs takes nothing along; all of them end with this call, interrupted or not.
    """
    failed: dict[str, str] = {}
    wanted: dict[str, Path] = {}
    for name in names:
        try:
            path = library(EXTENSIONS[name], arch or architecture())
            if path.is_file():
                say(f"{name}: built already")
                continue
            _require_compiler()
        except UnsupportedError as error:
            failed[name] = str(error)
        else:
            wanted[name] = path
    jobs = max(1, (os.cpu_count() or 1) // max(1, len(wanted)))
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in wanted:
            running[name] = _start(name, arch or architecture(), jobs=jobs)
            say(f"{name}: compiling, once for this card and this torch")
        failed |= _finish(running, wanted, say)
    finally:
        for process in running.values():
            _end(process)
    for reason in failed.values():
        say(f"unsupported: {reason}")
    return failed


def _finish(running: "dict[str, subprocess.Popen[bytes]]", wanted: dict[str, Path], say: Say) -> dict[str, str]:
    """Wait for those in `running`, emptying it; why each that built nothing did not, in one line."""
    failed: dict[str, str] = {}
    began, said = time.monotonic(), 0.0
    while running:
        time.sleep(0.2)
        seconds = time.monotonic() - began
        for name, process in list(running.items()):
            if process.poll() is None and seconds < LONGEST_BUILD_S:
                continue
            _end(process)
            del running[name]
            if process.returncode == 0 and wanted[name].is_file():
                say(f"{name}: built in {seconds:.0f} s, {wanted[name].stat().st_size / 2**20:.1f} MiB")
            else:
                failed[name] = f"{name} kernels could not be compiled: {_first_error(_log(name))}"
        if running and seconds - said >= SAY_EVERY_S:
            said = seconds
            say(f"{' and '.join(running)}: compiling, {seconds:.0f} s so far")
    return failed


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill a build with the compilers that it started, in a session that no Ctrl-C reaches; nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _require_compiler() -> None:
    import torch
    from torch.utils import cpp_extension

    if torch.version.cuda is None:
        raise UnsupportedError("this torch is not a CUDA build, so kernels cannot be compiled for it")
    home = cpp_extension.CUDA_HOME
    if home is None or not Path(home, "bin", "nvcc").is_file():
        raise UnsupportedError("no nvcc is on the PATH or in CUDA_HOME, so kernels cannot be compiled")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise UnsupportedError("no C++ compiler is on the PATH, so kernels cannot be compiled")
    if shutil.which("ninja", path=_path()) is None:
        raise UnsupportedError("the build tool ninja is not installed (requirements/install.sh quant brings it)")


def _cuda_headers() -> list[str]:
    """Header folders of the CUDA packages that came with torch, where the compiler's own toolkit lacks some."""
    from torch.utils import cpp_extension

    spec = importlib.util.find_spec("nvidia")
    if spec is None or Path(cpp_extension.CUDA_HOME or "", "include", "cusparse.h").is_file():
        return []
    places = [Path(place) for place in spec.submodule_search_locations or []]
    return sorted(str(folder) for place in places for folder in place.glob("*/include"))


def _path() -> str:
    """The PATH with this interpreter's own programs behind it: a ninja that pip installed."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def _log(name: str) -> Path:
    return HERE.kernels / f"{name}.{LOG}"


def _start(name: str, arch: str, *, jobs: int) -> "subprocess.Popen[bytes]":
    log = _log(name)
    log.parent.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "PATH": _path(),
        "TORCH_CUDA_ARCH_LIST": arch,
        "MAX_JOBS": str(jobs),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    with log.open("wb") as out:
        command = [sys.executable, "-m", "decodegap.quant_kernels", "--one", name, "--arch", arch]
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env, start_new_session=True
        )


def _first_error(log: Path) -> str:
    """The line of a build's log that says what went wrong, and where the rest is."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    telling = [line.strip() for line in lines if "error" in line.lower() and "Traceback" not in line]
    last = [line.strip() for line in lines if line.strip()]
    line = (telling or last[-1:] or ["it ended without a word"])[0]
    return f"{line[:300]} (all of it: {log.relative_to(HERE.root)})"


def compile_one(name: str, arch: str) -> None:
    """Copy, change and compile one library in this process, under a temporary name until it loads.

    torch's builder reads the architecture from TORCH_CUDA_ARCH_LIST.
    """
    from torch.utils import cpp_extension

    extension = EXTENSIONS[name]
    target = library(extension, arch)
    scratch = target.parent.with_name(f"{target.parent.name}.{os.getpid()}")
    folder = scratch / "sources"
    try:
        shutil.copytree(sources(extension), folder, ignore=shutil.ignore_patterns("__pycache__"))
        files = [*extension.sources, *extension.prepare(folder)]
        (scratch / "objects").mkdir()
        cpp_extension.load(
            name=f"decodegap_{name.replace('-', '_')}",
            sources=[str(folder / file) for file in files],
            extra_include_paths=[str(folder), *_cuda_headers()],
            extra_cflags=["-O2"],
            extra_cuda_cflags=list(extension.cuda_flags),
            build_directory=str(scratch / "objects"),
            is_python_module=False,
            verbose=True,
        )
        (built,) = (scratch / "objects").glob("*.so")
        target.parent.mkdir(parents=True, exist_ok=True)
        built.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the libraries asked for; 1 if one of them cannot be built here."""
    parser = argparse.ArgumentParser(prog=BUILD, description="Compile the kernels of the quantised paths.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(EXTENSIONS)}; by default the first two")
    parser.add_argument("--arch", default="", help="for a card that is not in this machine, such as 9.0")
    parser.add_argument("--one", choices=list(EXTENSIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        try:
            compile_one(options.one, options.arch or architecture())
        except (DecodeGapError, RuntimeError, OSError) as error:
            say_now(f"error: {error}")
            return 1
        return 0
    unknown = [name for name in options.names if name not in EXTENSIONS]
    if unknown:
        parser.error(f"no library is called {unknown[0]!r}; known are {', '.join(EXTENSIONS)}")
    return 1 if build(options.names or quant_patches.DEFAULT, arch=options.arch) else 0


if __name__ == "__main__":
    raise SystemExit(main())
