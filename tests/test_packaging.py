"""Do the locks, environment.yml and pyproject.toml say the same, and does nothing committed name a host or a home?"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
MADE_FROM = (
    "pyproject.toml",
    "environment.yml",
    "requirements/compile.py",
    *(f"requirements/{name}.lock" for name in ("analysis", "measure", "dev", "quant", "interpreter")),
)


def load_compile() -> ModuleType:
    """requirements/compile.py as a module."""
    spec = importlib.util.spec_from_file_location("requirements_compile", ROOT / "requirements/compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lock_lines(name: str) -> list[str]:
    lines = (ROOT / f"requirements/{name}.lock").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_locks_environment_and_direct_pins_agree() -> None:
    assert load_compile().problems() == []


def test_environment_lists_exactly_the_analysis_and_measure_pins() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *conda, pip = environment["dependencies"]
    assert environment["name"] == "decode-gap"
    assert [entry.partition("=")[0] for entry in conda] == ["python", "pip"]
    assert sorted(pip["pip"]) == sorted(lock_lines("analysis") + lock_lines("measure"))


def test_every_pin_is_exact_and_none_belongs_to_a_cuda_build() -> None:
    for name in ("analysis", "measure", "dev", "quant"):
        for pin in lock_lines(name):
            assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; .+)?", pin), pin
            assert pin.startswith("nvidia-ml-py==") or not pin.startswith(("nvidia-", "cuda-", "triton=="))
    assert lock_lines("interpreter") == ["triton==3.6.0"]  # no part of what measures: its torch brings its own
    assert "torch==2.13.0" in lock_lines("measure")
    assert not any(pin.startswith("torch") for pin in lock_lines("analysis"))


def test_sizes_are_those_of_the_sets_that_the_locks_install() -> None:
    sizes = tomllib.loads((ROOT / "requirements/sizes.toml").read_text(encoding="utf-8"))
    locks = {path.stem for path in (ROOT / "requirements").glob("*.lock")}
    assert {"analysis", "measure", "dev", "interpreter"} <= set(sizes) <= locks
    for name, size in sizes.items():
        there = {"python_version": size["python"].rpartition(".")[0], "python_full_version": size["python"]}
        pins = [Requirement(line) for line in lock_lines(name)]
        kept = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(there)]
        assert size["packages"] == len(kept), f"{name}: the lock has other packages than were measured; run make sizes"
        assert size["mb"] > 0
        torch = [pin.specifier for pin in kept if pin.name == "torch"]
        assert [specifier.contains(size["torch"]) for specifier in torch] == [True] * len(torch)


@pytest.mark.parametrize(
    ("file", "before", "after", "named"),
    [
        ("environment.yml", "torch==2.13.0", "torch==2.12.0", "environment.yml differs"),
        ("pyproject.toml", "numpy==2.2.6", "numpy==2.2.5", "numpy==2.2.5"),
        ("requirements/analysis.lock", "scipy==1.17.1", "scipy==1.17.0", "the locks hold ==1.17.0"),
        ("requirements/measure.lock", "mpmath==", "nvidia-cublas==13.1\nmpmath==", "CUDA build"),
        ("requirements/dev.lock", "ruff==", "numpy==2.4.6\nruff==", "another lock says ==2.2.6"),
        ("requirements/quant.lock", "ninja==", "accelerate==1.13.0\nninja==", "more than pyproject.toml asks for"),
        ("requirements/quant.lock", "gptqmodel==7.6.0", "gptqmodel==7.7.0", "the locks hold ==7.7.0"),
        ("requirements/interpreter.lock", "triton==3.6.0", "triton==3.7.0", "the locks hold ==3.7.0"),
    ],
)
def test_check_names_a_file_that_was_edited(tmp_path: Path, file: str, before: str, after: str, named: str) -> None:
    (tmp_path / "requirements").mkdir()
    for name in MADE_FROM:
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "requirements/compile.py", "--check"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    text = (tmp_path / file).read_text()
    assert before in text
    (tmp_path / file).write_text(text.replace(before, after))
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert checked.returncode == 1
    assert named in checked.stderr


@pytest.mark.parametrize(
    ("marker", "short"),
    [
        ("python_full_version < '3.14' and sys_platform == 'linux'", ""),
        ("python_full_version == '3.12.*' and sys_platform == 'linux'", " ; python_version == '3.12'"),
        ("python_full_version < '3.13'", " ; python_version == '3.11' or python_version == '3.12'"),
        ("platform_machine == 'x86_64'", ' ; platform_machine == "x86_64"'),
    ],
)
def test_markers_keep_what_matters_here(marker: str, short: str) -> None:
    module = load_compile()
    assert module.short_marker(module.Marker(marker)) == short


def test_no_registry_host_and_no_absolute_path_is_committed() -> None:
    host = re.compile(r"pypi[.]org|pythonhosted[.]org|anaconda[.](?:org|com)|download[.]pytorch[.]org|registry[.]npmjs")
    path = re.compile(r"(?<![\w.~-])/(?:home|root|work|Users|opt|mnt)/\w")
    bad = []
    for file in tracked_files():
        data = file.read_bytes()
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), start=1):
            if host.search(line) or path.search(line):
                bad.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert bad == []


def test_the_interpreter_check_knows_the_range_of_pyproject() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    text = (ROOT / "requirements/interpreter.py").read_text()
    found = re.search(r"= \(3, (\d+)\), \(3, (\d+)\)", text)
    assert found
    assert required == f">=3.{found[1]},<3.{int(found[2]) + 1}"


def test_ci_runs_the_documented_command() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "make lint test" in script.read_text()
