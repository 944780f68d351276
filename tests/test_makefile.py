"""Does make use the interpreter the user meant, install only what is needed, and keep settings text?

The Makefile is run for real, in a copy of the packaging files, with stand-ins for Python that write down how they
were called. Nothing here uses the network.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERBS = ("measure", "reproduce", "status", "publish", "figures", "tables", "summary", "bench", "lab")
TARGETS = {*VERBS, "help", "test", "test-gpu", "lint", "lock", "clean"}
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


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The packaging files alone, in a folder with a space in its name, beside a PATH with no Python on it."""
    folder = tmp_path / "a clone"
    (folder / "artifact").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements", ignore=shutil.ignore_patterns("__pycache__"))
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found, f"these tests need {tool}"
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(found)
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


# Which interpreter, and what is installed into it


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


@pytest.mark.parametrize("target", ["measure", "reproduce", "kernels", "tune", "bench-kernels"])
def test_bad_input_ends_before_anything_large_is_installed(clone: Path, target: str) -> None:
    put_python(clone)
    refused = make(clone, target, "GPU=h100", FAKE_MODE="measure", FAKE_MODE_EXIT="2")
    assert refused.returncode == 2
    assert installs(clone) == ["analysis"]
    assert "decodegap mode" in calls(clone)[-1]


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


# Settings are text, and nothing else is a setting


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("gpu=h100", "GPU= is"),
        ("models=qwen2.5-7b", "MODELS= is"),
        ("CONTEXT=2048", "CONTEXTS= is"),
        ("session=3", "SESSIONS= is"),
        ("GPUS=h100", "GPU= is"),
        ("CUDA_VISIBLE_DEVICES=1", "`make help` lists those there are"),
        ("NAME=grid", "`make help` lists those there are"),
    ],
)
def test_a_name_that_is_no_setting_is_refused_before_anything_runs(clone: Path, typed: str, hint: str) -> None:
    put_python(clone)
    refused = make(clone, "reproduce", "GPU=h100", typed)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.count("\n") == 1
    assert f"decode-gap: {typed.partition('=')[0]}= is no setting, and {hint};" in refused.stderr
    assert calls(clone) == []


def test_every_setting_is_one_and_a_value_may_hold_spaces_and_signs(clone: Path) -> None:
    put_python(clone)
    known = re.findall(r"^SETTINGS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    values = [f"{name}=a b=c gpu=h100" for name in known if name != "PYTHON"]
    assert make(clone, "help", *values, "SHELL=/bin/sh").returncode == 0


@pytest.mark.parametrize(
    ("typed", "readers"),
    [
        ("verify GPU=h200 EXPERIMENTS=ladder", "reproduce measure status summary"),
        ("verify REQUIRE=measured", "reproduce summary"),
        ("reproduce STRICT=1", "verify"),
        ("figure-anatomy CONTEXTS=2048", "reproduce measure status summary"),
        ("measure FROM=their.tar", "import"),
        ("tune ARM=fused", "anatomy"),
        ("test lint CASES=3", "fuzz"),
    ],
)
def test_a_setting_that_no_target_of_the_call_reads_is_refused(clone: Path, typed: str, readers: str) -> None:
    put_python(clone)
    refused = make(clone, *typed.split())
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.count("\n") == 1
    target, *_, setting = typed.split()
    assert f"decode-gap: {setting.partition('=')[0]}= is read by {readers}, and not by {target}" in refused.stderr
    assert calls(clone) == []


def test_a_setting_that_one_target_of_the_call_reads_or_that_is_empty_is_not_refused(clone: Path) -> None:
    put_python(clone)
    assert make(clone, "tables", "figures", "verify", "GPU=l4", "STRICT=1", "FROM=").returncode == 0
    assert calls(clone)[-1].split("|")[1:3] == ["-m decodegap verify", "GPU=l4"]
    assert make(clone, "lint", "-n", GPU="l4", EXPERIMENTS="ladder").returncode == 0  # for every call, not this one


def test_help_says_which_targets_read_each_setting_and_all_of_them_are_there(clone: Path) -> None:
    readers = dict(re.findall(r"^  ([A-Z_]+)= +([a-z -]+)$", make(clone, "help").stdout, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    known = re.findall(r"^SETTINGS := (.*)$", makefile, re.MULTILINE)[0].split()
    assert sorted(readers) == sorted(known)
    targets = {target for read_by in readers.values() for target in read_by.split()} - {"any"}
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


@pytest.mark.parametrize("how", ["command line", "environment"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    "value", ["$(touch hit)", "$(shell touch hit)", "; touch hit", "`touch hit`", "'; touch hit; '", '"; touch hit; "']
)
def test_a_setting_never_runs_as_a_command(clone: Path, setting: str, value: str, how: str) -> None:
    put_python(clone)
    if how == "command line":
        make(clone, "reproduce", f"{setting}={value}")
    else:
        make(clone, "reproduce", **{setting: value})
    assert not (clone / "hit").exists()
    if setting == "GPU":
        assert f"|GPU={value}|" in calls(clone)[-1]


def test_no_recipe_pastes_a_setting_into_shell_text() -> None:
    recipes = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(("\t", "need ="))]
    pasted = re.compile(rf"\$[({{](?:PY|{'|'.join(SETTINGS)})[)}}]")
    assert recipes
    assert [line for line in recipes if pasted.search(line)] == []


def test_only_hub_weights_may_download(clone: Path) -> None:
    put_python(clone)
    make(clone, "status")
    assert calls(clone)[-1].endswith("GPU=auto|OFFLINE=1")
    make(clone, "status", "WEIGHTS=hub")
    assert calls(clone)[-1].endswith("|OFFLINE=")
