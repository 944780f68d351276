"""Does make keep settings text, and refuse what is none or what no target of the call reads?"""

import re
from pathlib import Path

import pytest
from making import ROOT, SETTINGS, calls, make, put_python


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


@pytest.mark.parametrize("cases", ["abc", "0", "-1", "1e3", "007", " 5", "5\nx", "1" * 5000, "$(touch hit)"])
def test_cases_that_are_no_number_are_refused_before_anything_runs(clone: Path, cases: str) -> None:
    put_python(clone)
    refused = make(clone, "fuzz", CASES=cases)
    assert refused.returncode == 2
    first, *rest = refused.stderr.splitlines()
    assert first.startswith("decode-gap: CASES: ")
    assert first.endswith(" is not a whole number from 1 to 999999999")
    assert all(line.startswith("make: ***") for line in rest)
    assert calls(clone) == []


@pytest.mark.parametrize(("typed", "cases"), [("CASES=7", "7"), ("CASES=", "10000"), ("CASES=999999999", "999999999")])
def test_cases_that_are_a_number_reach_the_tests(clone: Path, typed: str, cases: str) -> None:
    put_python(clone)
    assert make(clone, "fuzz", typed).returncode == 0
    assert calls(clone)[-1].startswith(f"python|-m pytest tests/fuzz --cases {cases}|")


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
