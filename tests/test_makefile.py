"""Does make use the interpreter the user meant, and install only what is needed?"""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from making import PRETENDER, SETTINGS, STAND_IN, calls, executable, installs, make, put_python

VERBS = ("measure", "reproduce", "status", "publish", "figures", "tables", "summary", "bench", "lab")
TARGETS = {*VERBS, "help", "test", "test-gpu", "lint", "lock", "clean"}


def test_help_is_the_default_and_lists_every_target(clone: Path) -> None:
    shown = make(clone)
    assert shown.returncode == 0
    assert set(re.findall(r"^  ([a-z-]+) +\S", shown.stdout, re.MULTILINE)) >= TARGETS
    assert all(f"{name}=" in shown.stdout for name in SETTINGS)
    assert not (clone / ".venv").exists()


def test_a_given_interpreter_is_used_as_it_is(clone: Path) -> None:
    given = executable(clone.parent / "given here/python", STAND_IN)
    assert make(clone, "measure", f"PYTHON={given}", FAKE_MODE="measure").returncode == 0
    assert installs(clone) == []
    assert not (clone / ".venv").exists()
    assert [line.split("|")[1] for line in calls(clone)] == [
        "requirements/interpreter.py analysis",
        "-m decodegap mode --must-measure",
        "requirements/interpreter.py analysis measure",
        "-m decodegap measure",
    ]


def test_a_given_interpreter_that_lacks_packages_is_refused_in_one_line(clone: Path) -> None:
    text = (clone / "pyproject.toml").read_text().replace('"tqdm==4.70.1"', '"no-such-package-here==1.0"')
    (clone / "pyproject.toml").write_text(text)
    refused = make(clone, "status", f"PYTHON={sys.executable}")
    assert refused.returncode == 2
    first, *rest = refused.stderr.splitlines()
    assert "lacks no-such-package-here==1.0:" in first
    assert all(line.startswith("make: ***") for line in rest)


def test_an_active_conda_environment_is_used_as_it_is(clone: Path) -> None:
    executable(clone.parent / "envs/torch/bin/python", STAND_IN)
    prefix = str(clone.parent / "envs/torch")
    assert make(clone, "status", CONDA_PREFIX=prefix, CONDA_DEFAULT_ENV="torch").returncode == 0
    assert calls(clone)[-1].startswith("python|-m decodegap status|")
    assert installs(clone) == []
    assert not (clone / ".venv").exists()


def test_condas_base_is_left_alone(clone: Path) -> None:
    executable(clone.parent / "conda/bin/python", "#!/bin/bash\nexit 9\n")
    put_python(clone)
    prefix = str(clone.parent / "conda")
    assert make(clone, "status", CONDA_PREFIX=prefix, CONDA_DEFAULT_ENV="base").returncode == 0
    assert installs(clone) == ["analysis"]


@pytest.mark.parametrize(
    ("version", "hidden", "reason"),
    [
        ((3, 9, 18), (), "is Python 3.9.18, not 3.11, 3.12 or 3.13"),
        ((3, 14, 0), (), "is Python 3.14.0, not 3.11, 3.12 or 3.13"),
        ((3, 12, 1), ("ensurepip",), "has no ensurepip"),
    ],
)
def test_an_unusable_python_is_one_line(clone: Path, version: tuple[int], hidden: tuple[str], reason: str) -> None:
    put_python(clone, PRETENDER.format(python=sys.executable, version=version, hidden=json.dumps(hidden)))
    refused = make(clone, "reproduce")
    assert refused.returncode == 2
    first, *rest = refused.stderr.splitlines()
    assert reason in first
    assert "no python3.13" in first
    assert "apt install python3 python3-venv" in first
    assert all(line.startswith("make: ***") for line in rest)
    assert not (clone / ".venv").exists()


def test_the_next_python_is_tried_when_the_first_is_too_old(clone: Path) -> None:
    put_python(clone, PRETENDER.format(python=sys.executable, version=(3, 9, 18), hidden=[]))
    executable(clone.parent / "bin/python3.12", STAND_IN)
    assert make(clone, "status").returncode == 0
    assert any(line.startswith("python3.12|-m venv .venv|") for line in calls(clone))


def test_an_interrupted_install_is_finished_by_the_next_make(clone: Path) -> None:
    put_python(clone)
    assert make(clone, "status", FAKE_PIP_EXIT="1").returncode != 0
    assert not (clone / ".venv/analysis.stamp").exists()
    assert not any("decodegap" in line for line in calls(clone))
    assert make(clone, "status").returncode == 0
    assert make(clone, "status").returncode == 0
    assert installs(clone) == ["analysis", "analysis"]  # the third make had nothing to do


def test_a_changed_lock_is_installed_and_a_touched_one_is_not(clone: Path) -> None:
    put_python(clone)
    make(clone, "status")
    lock = clone / "requirements/analysis.lock"
    os.utime(lock, (4e9, 4e9))
    make(clone, "status")
    assert installs(clone) == ["analysis"]
    lock.write_text(lock.read_text() + "one-more==1.0\n")
    make(clone, "status")
    assert installs(clone) == ["analysis", "analysis"]


@pytest.mark.parametrize(("mode", "sets"), [("replay", ["analysis"]), ("measure", ["analysis", "measure"])])
def test_torch_is_installed_only_to_measure(clone: Path, mode: str, sets: list[str]) -> None:
    put_python(clone)
    assert make(clone, "reproduce", FAKE_MODE=mode).returncode == 0
    assert installs(clone) == sets
    assert "-m decodegap reproduce" in calls(clone)[-1]


@pytest.mark.parametrize("target", ["measure", "reproduce", "kernels"])
def test_sources_of_kernels_come_where_a_compiler_is_and_stop_nothing(clone: Path, target: str) -> None:
    put_python(clone)
    executable(clone.parent / "cuda/bin/nvcc", "#!/bin/bash\n")
    done = make(clone, target, FAKE_MODE="measure", FAKE_QUANT_EXIT="1")
    assert done.returncode == 0
    assert installs(clone) == ["analysis", "measure", "quant"]
    assert "--no-deps" in next(line for line in calls(clone) if "quant.lock" in line)
    assert not (clone / ".venv/quant.stamp").exists()
    last = {"kernels": "-m decodegap.quant_kernels"}.get(target, f"-m decodegap {target}")
    assert last in calls(clone)[-1]


@pytest.mark.parametrize("target", ["measure", "reproduce", "kernels", "anatomy", "tune", "bench-kernels"])
def test_bad_input_ends_before_anything_large_is_installed(clone: Path, target: str) -> None:
    put_python(clone)
    refused = make(clone, target, "GPU=h100", FAKE_MODE="measure", FAKE_MODE_EXIT="2")
    assert refused.returncode == 2
    assert installs(clone) == ["analysis"]
    assert "decodegap mode" in calls(clone)[-1]


@pytest.mark.parametrize(
    ("target", "checks"),
    [
        ("kernels", "--on-a-card"),
        ("anatomy", "--must-measure --settings-of anatomy"),
        ("tune", "--must-measure --on-a-card --settings-of tune"),
        ("bench-kernels", "--must-measure --on-a-card --settings-of bench-kernels"),
    ],
)
def test_card_and_settings_are_checked_before_anything_large_is_installed(
    clone: Path, target: str, checks: str
) -> None:
    put_python(clone)
    make(clone, target, FAKE_MODE_EXIT="2")
    assert calls(clone)[-1].startswith(f"python|-m decodegap mode {checks}|")


def test_clean_takes_caches_and_leaves_records(clone: Path) -> None:
    records = [clone / "artifact/results" / store / "h100/record.json" for store in (".", "local")]
    caches = [clone / "artifact/decodegap/__pycache__/a.pyc", clone / ".mypy_cache/a"]
    for file in (*records, *caches):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    assert make(clone, "clean").returncode == 0
    assert [file.exists() for file in (*records, *caches)] == [True, True, False, False]


def test_make_n_runs_nothing(clone: Path) -> None:
    put_python(clone)
    assert make(clone, "-n", *VERBS, "test", "lint").returncode == 0
    assert calls(clone) == []


def test_pip_gets_the_users_options_and_cannot_leave_the_venv(clone: Path) -> None:
    put_python(clone)
    make(clone, "status", "PIP_ARGS=--find-links wheels --prefer-binary")
    first = next(line for line in calls(clone) if "--requirement" in line)
    assert "--require-virtualenv" in first
    assert " --find-links wheels --prefer-binary " in first


@pytest.mark.parametrize("place", ["/no/such/python", "no-such-python", "requirements", "Makefile"])
def test_an_interpreter_that_is_none_is_one_line(clone: Path, place: str) -> None:
    refused = make(clone, "status", f"PYTHON={place}")
    assert refused.returncode == 2
    first, *rest = refused.stderr.splitlines()
    assert first == f"decode-gap: PYTHON: there is no program {place}"
    assert all(line.startswith("make: ***") for line in rest)


def test_an_interpreter_that_may_not_be_run_is_said_to_be_there(clone: Path) -> None:
    given = executable(clone.parent / "given here/python", STAND_IN)
    given.chmod(0o644)
    refused = make(clone, "status", f"PYTHON={given}")
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"decode-gap: PYTHON: {given} is there but may not be run; chmod +x ")
    assert calls(clone) == []
