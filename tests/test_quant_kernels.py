"""Libraries of kernels: which sources they are compiled from, and what a build says when it cannot be."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from decodegap import quant_kernels, quant_patches
from decodegap.errors import UnsupportedError
from decodegap.paths import Places


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of sources as gptqmodel installs it, with the launches and names that are changed, and nothing more."""
    folder = tmp_path / "site/gptqmodel_ext"
    (folder / "exllamav2/cuda").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "exllamav2/ext_gptq.cpp").write_text("LIBRARY(gptqmodel_exllamav2)\nIMPL(gptqmodel_exllamav2)\n")
    launch = "kernel<<<gridDim, blockDim>>>(x);\n"
    (folder / "exllamav2/cuda/q_gemm.cu").write_text(launch * 3)
    (folder / "exllamav2/cuda/q_matrix.cu").write_text(launch * 4)
    about = tmp_path / "site/gptqmodel-7.6.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gptqmodel\nVersion: 7.6.0\n")
    monkeypatch.setattr(quant_kernels, "HERE", Places(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return folder


def test_every_launch_moves_to_the_current_stream_or_the_sources_are_refused(package: Path) -> None:
    stock = package / "exllamav2"
    assert quant_patches.prepare_exllama(stock) == ()
    for name in ("q_gemm.cu", "q_matrix.cu"):
        text = (stock / "cuda" / name).read_text()
        assert "<<<gridDim, blockDim>>>" not in text
        assert text.count("getCurrentCUDAStream()>>>") == quant_patches.LAUNCHES[name]
    assert "gptqmodel_exllamav2" not in (stock / "ext_gptq.cpp").read_text()
    with pytest.raises(UnsupportedError, match="0 places to change, not 2; these are other sources"):
        quant_patches.prepare_exllama(stock)


def test_a_new_launch_in_the_sources_is_noticed(package: Path) -> None:
    with (package / "exllamav2/cuda/q_gemm.cu").open("a") as file:
        file.write("more<<<gridDim, blockDim>>>(x);\n")
    with pytest.raises(UnsupportedError, match=r"q_gemm.cu: 4 places to change, not 3"):
        quant_patches.prepare_exllama(package / "exllamav2")


def test_a_library_is_named_by_its_sources_and_the_card(package: Path) -> None:
    extension = quant_patches.EXTENSIONS["exllamav2"]
    first = quant_kernels.library(extension, "9.0")
    assert first == quant_kernels.library(extension, "9.0")
    assert first.parts[-2].startswith("exllamav2-sm90-")
    assert quant_kernels.library(extension, "8.9") != first
    (package / "exllamav2/config.h").write_text("#define A 1\n")
    assert quant_kernels.library(extension, "9.0") != first


def test_sources_that_are_missing_or_of_another_release_are_one_line(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = package.parent / "gptqmodel-7.6.0.dist-info/METADATA"
    about.write_text(about.read_text().replace("7.6.0", "7.7.0"))
    with pytest.raises(UnsupportedError, match=r"checked against gptqmodel 7.6.0; here is 7.7.0"):
        quant_kernels.library(quant_patches.EXTENSIONS["exllamav2"], "9.0")
    with pytest.raises(UnsupportedError, match="are not installed"):
        quant_kernels.library(quant_patches.EXTENSIONS["marlin"], "9.0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
def test_without_a_card_every_library_is_unsupported_with_its_reason(package: Path) -> None:
    said: list[str] = []
    failed = quant_kernels.build(say=said.append)
    assert set(failed) == {"marlin", "exllamav2"}
    assert failed["exllamav2"] == "these kernels need an NVIDIA GPU"
    assert sorted(said) == sorted(f"unsupported: {reason}" for reason in failed.values())


def test_a_compiler_that_fails_leaves_nothing(package: Path) -> None:
    with pytest.raises((RuntimeError, OSError)):  # what stands in for sources compiles nowhere
        quant_kernels.compile_one("exllamav2", "9.0")
    folder = quant_kernels.HERE.kernels
    assert not folder.exists() or list(folder.iterdir()) == []


def test_a_failed_build_says_its_first_error_and_the_others_go_on(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, built = quant_kernels.HERE.kernels / "exllamav2.build.log", quant_patches.EXTENSIONS["exllamav2-stock"]
    log.parent.mkdir(parents=True)
    target = quant_kernels.library(built, "9.0")
    commands = {
        "exllamav2": "echo '[1/3] nvcc'; echo 'a.cu:7: fatal error: cusparse.h is missing'; echo more; exit 1",
        "exllamav2-stock": f"mkdir -p '{target.parent}' && echo library >'{target}'",
    }

    def start(name: str, arch: str, *, jobs: int) -> "subprocess.Popen[bytes]":
        assert arch == "9.0"
        assert jobs >= 1
        with (log.parent / f"{name}.build.log").open("wb") as out:
            return subprocess.Popen(["sh", "-c", commands[name]], stdout=out, start_new_session=True)

    monkeypatch.setattr(quant_kernels, "_start", start)
    monkeypatch.setattr(quant_kernels, "_require_compiler", lambda: None)
    said: list[str] = []
    failed = quant_kernels.build(list(commands), arch="9.0", say=said.append)
    assert failed == {
        "exllamav2": "exllamav2 kernels could not be compiled: a.cu:7: fatal error: cusparse.h is missing "
        "(all of it: .cache/kernels/exllamav2.build.log)"
    }
    assert any(line.startswith("exllamav2-stock: built in") for line in said)
    assert quant_kernels.build(["exllamav2-stock"], arch="9.0", say=said.append) == {}
    assert said[-1] == "exllamav2-stock: built already"


def test_an_interrupted_build_takes_its_compilers_along(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, arch: str, *, jobs: int) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen(["sh", "-c", "sleep 300 & wait"], start_new_session=True))
        return started[-1]

    def interrupt(line: str) -> None:
        if line.endswith("so far"):
            raise KeyboardInterrupt

    monkeypatch.setattr(quant_kernels, "_start", start)
    monkeypatch.setattr(quant_kernels, "_require_compiler", lambda: None)
    monkeypatch.setattr(quant_kernels, "SAY_EVERY_S", 0)
    try:
        with pytest.raises(KeyboardInterrupt):
            quant_kernels.build(["exllamav2", "exllamav2-stock"], arch="9.0", say=interrupt)
        assert [process.returncode for process in started] == [-signal.SIGKILL] * 2
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_an_unknown_library_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        quant_kernels.main(["machete"])
    assert stopped.value.code == 2
    assert "known are marlin, exllamav2" in capsys.readouterr().err
