"""What a user sees at the command line: modes, status, replay, and one clear line for a mistake."""

import builtins
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from conftest import FakeNvml, card
from factory import checkout, record, write

from decodegap import cli, records, settings, typeset, webpage
from decodegap.paths import HERE, Places

H100 = card(name="NVIDIA H100 80GB HBM3", memory_mib=81559, bus_width=5120, max_memory_clock=2619)
H100_PCIE = card(name="NVIDIA H100 PCIe", memory_mib=81559, cuda_cores=114 * 128)


def run(verb: str, *args: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "decodegap", verb, *args],
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"GPU": "h9000"}, "'h9000'"),
        ({"GPU": "../x"}, "'../x'"),
        ({"GPU": "$(id)"}, "'$(id)'"),
        ({"MODELS": "gpt-9"}, "'gpt-9'"),
        ({"MODELS": ","}, "','"),
        ({"MODELS": "../models/x"}, "'../models/x'"),
        ({"CONTEXTS": "many"}, "'many'"),
        ({"CONTEXTS": "999999"}, "999999"),
        ({"SESSIONS": "0"}, "'0'"),
        ({"EXPERIMENTS": "nothing"}, "'nothing'"),
        ({"EXPERIMENTS": ","}, "','"),
        ({"RESULTS": __file__}, "is no folder"),
        ({"WEIGHTS": "/no/such/folder"}, "'/no/such/folder'"),
        ({"REQUIRE": "everything"}, "'everything'"),
    ],
)
@pytest.mark.parametrize("verb", ["mode", "status"])
def test_a_mistake_is_one_line_and_exit_2(fake_nvml: FakeNvml, settings: dict[str, str], named: str, verb: str) -> None:
    done = run(verb, env=fake_nvml.env(**settings))
    assert done.returncode == 2
    assert done.stderr.startswith("decode-gap: ")
    assert named in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_experiment_named_twice_is_planned_once() -> None:
    asked = settings.context({"GPU": "cpu", "EXPERIMENTS": "ladder,baseline,ladder"})
    assert asked.experiments == ("ladder", "baseline")
    assert len(set(settings.tasks(asked))) == len(settings.tasks(asked))


def test_mode_is_measure_only_where_the_card_is(fake_nvml: FakeNvml) -> None:
    def mode(gpu: str, *cards: dict[str, object]) -> str:
        fake_nvml.cards(*cards)
        done = run("mode", env=fake_nvml.env(GPU=gpu))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert mode("h100", H100) == "measure"
    assert mode("auto", H100) == "measure"
    assert mode("auto") == "measure"  # the CPU
    assert mode("h100") == "replay"
    assert mode("h100", H100_PCIE) == "replay"
    assert mode("h100", H100 | {"mig": 1}) == "replay"
    assert mode("h100", H100 | {"cuda_cores": 100 * 128}) == "replay"


@pytest.mark.parametrize(
    ("cards", "why"),
    [
        ([], "no NVIDIA GPU was found"),
        ([H100_PCIE], "NVIDIA H100 PCIe"),
        ([H100 | {"mig": 1}], "MIG"),
        ([H100 | {"memory_mib": 40000}], "40000 MiB"),
    ],
)
def test_measuring_on_another_card_is_refused(fake_nvml: FakeNvml, cards: list[dict[str, object]], why: str) -> None:
    fake_nvml.cards(*cards)
    for done in (
        run("mode", "--must-measure", env=fake_nvml.env(GPU="h100")),
        run("measure", env=fake_nvml.env(GPU="h100")),
    ):
        assert done.returncode == 2
        assert why in done.stderr
        assert done.stderr.count("\n") == 1


def test_kernels_are_refused_without_a_card_and_not_with_one(fake_nvml: FakeNvml) -> None:
    for gpu, found in (("auto", "none was found"), ("h200", "none was found"), ("cpu", "none was found")):
        done = run("mode", "--on-a-card", env=fake_nvml.env(GPU=gpu))
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert f"this compiles kernels for an NVIDIA GPU, and {found}" in done.stderr
    fake_nvml.cards(card())
    assert run("mode", "--on-a-card", env=fake_nvml.env(GPU="auto")).returncode == 0
    assert "GPU=cpu was asked for" in run("mode", "--on-a-card", env=fake_nvml.env(GPU="cpu")).stderr


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("anatomy MODEL=gpt-9", "MODEL: no model is called 'gpt-9'"),
        ("anatomy CTX=2k", "CTX: '2k'"),
        ("anatomy ARM=faster", "ARM: no arm is called 'faster'"),
        ("anatomy TRACE=yes", "TRACE: 'yes'"),
        ("tune MODEL=gpt-9", "MODEL: no model is called 'gpt-9'"),
        ("tune SECONDS=soon", "SECONDS: 'soon'"),
        ("tune WRITE=yes", "WRITE: 'yes'"),
        ("tune BITS=8", "BITS: '8'"),
        ("bench-kernels CTX=1,2", "MODEL and CTX: give one of each"),
        ("bench-kernels BITS=8", "BITS: '8'"),
        ("anatomy", ""),
        ("tune", ""),
        ("bench-kernels", ""),
    ],
)
def test_what_only_one_verb_reads_is_checked_without_torch(
    fake_nvml: FakeNvml, tmp_path: Path, settings: str, named: str
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch yet')\n")
    fake_nvml.cards(card())
    verb, *given = settings.split()
    env = fake_nvml.env(**dict(each.split("=") for each in given))
    env["PYTHONPATH"] = f"{tmp_path}:{env['PYTHONPATH']}"
    done = run("mode", "--must-measure", "--settings-of", verb, env=env)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"decode-gap: {named or 'found NVIDIA H200'}")
    assert (done.returncode, done.stdout) == ((2, "") if named else (0, "measure\n"))


def test_an_old_card_is_unsupported(fake_nvml: FakeNvml) -> None:
    fake_nvml.cards(card(name="Tesla T4", capability="7.5", cuda_cores=2560))
    done = run("mode", "--must-measure", env=fake_nvml.env(GPU="auto"))
    assert done.returncode == 2
    assert "sm_75; bf16 needs sm_80" in done.stderr


def test_status_names_every_session_and_why(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    settings = {"GPU": "h100", "MODELS": "qwen2.5-7b", "CONTEXTS": "2048", "EXPERIMENTS": "baseline"}
    absent = run("status", env=fake_nvml.env(RESULTS=str(tmp_path), **settings))
    assert absent.stdout.count("will not be measured: no NVIDIA GPU was found") == 3
    assert "shipped" not in absent.stdout.partition("\n")[2]
    fake_nvml.cards(H100)
    present = run("status", env=fake_nvml.env(RESULTS=str(tmp_path), **settings))
    assert present.stdout.count(": will be measured\n") == 3
    assert present.stdout.endswith("3 sessions to measure\n")


def test_status_of_what_is_no_record_says_so_and_counts_it_where_it_can_be_measured(
    fake_nvml: FakeNvml, tmp_path: Path
) -> None:
    settings = {"GPU": "h100", "MODELS": "qwen2.5-7b", "CONTEXTS": "2048", "EXPERIMENTS": "baseline"}
    (path,) = write([record(gpu="h100")], tmp_path)
    path.write_text('{"a": 1}')
    absent = run("status", env=fake_nvml.env(RESULTS=str(tmp_path), **settings)).stdout
    assert "session 1: will not be measured, and what is kept of it is broken: not a record\n" in absent
    assert absent.endswith("0 sessions to measure\n")
    fake_nvml.cards(H100)
    present = run("status", env=fake_nvml.env(RESULTS=str(tmp_path), **settings)).stdout
    assert "session 1: will be measured again: not a record\n" in present
    assert present.endswith("3 sessions to measure\n")


def test_status_of_an_absent_card_says_what_is_shipped(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    settings = {"MODELS": "qwen2.5-7b", "CONTEXTS": "2048", "EXPERIMENTS": "baseline", "SESSIONS": "4"}
    absent = run("status", env=fake_nvml.env(RESULTS=str(tmp_path), GPU="h200", **settings))
    assert absent.stdout.count(": shipped (ok), will not be measured: no NVIDIA GPU was found") == 3
    assert absent.stdout.count(": will not be measured: no NVIDIA GPU was found") == 1
    assert absent.stdout.endswith(
        "0 sessions to measure; 3 of the others are shipped, which `make reproduce GPU=h200` shows\n"
    )


def test_publishing_needs_real_records(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    for gpu, why in (("cpu", "stand-in records"), ("h100", "no local records")):
        done = run("publish", env=fake_nvml.env(GPU=gpu, RESULTS=str(tmp_path)))
        assert done.returncode == 2
        assert why in done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("verb", "told"), [("measure", "what was measured is kept"), ("figures", "nothing is left half-written")]
)
def test_stopping_says_what_is_kept_and_only_where_something_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, sent: int, verb: str, told: str
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for name in ("GPU", "MODELS", "CONTEXTS", "SESSIONS", "EXPERIMENTS", "WEIGHTS", "REQUIRE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RESULTS", str(tmp_path))
    monkeypatch.setitem(cli.VERBS, verb, lambda _ctx: signal.raise_signal(sent))
    try:
        assert cli.main([verb]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("when", ["loading", "late"])
def test_a_stop_outside_a_verb_is_one_line_and_only_an_early_one_came_before_anything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    if when == "loading":
        monkeypatch.setattr(builtins, "__import__", stopped_at("decodegap.cli"))
    else:
        monkeypatch.setattr(cli, "main", stopped)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(HERE.root / "artifact/decodegap/__main__.py"), run_name="__main__")
    assert ended.value.code == 130
    said = {"loading": "stopped before anything was begun", "late": "stopped; the same command starts again"}
    assert capsys.readouterr().err == f"decode-gap: {said[when]}\n"


def stopped_at(module: str) -> Callable[..., object]:
    """An `import` during which Ctrl-C is pressed when it comes to `module`."""
    real = builtins.__import__

    def load(name: str, *given: object) -> object:
        if name == module:
            raise KeyboardInterrupt
        return real(name, *given)

    return load


def test_figures_and_tables_of_one_gpu_leave_the_reports_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("MODELS", "CONTEXTS", "SESSIONS", "EXPERIMENTS", "WEIGHTS", "REQUIRE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RESULTS", str(tmp_path / "store"))
    monkeypatch.setattr(cli, "HERE", checkout(tmp_path / "checkout"))
    for gpu in ("l4", "a100"):
        write([record(gpu=gpu)], tmp_path / "store")
    for asked, made in (("l4", ["l4"]), ("auto", ["a100", "l4"])):
        monkeypatch.setenv("GPU", asked)
        assert cli.main(["tables"]) == 0
        assert sorted(path.parent.name for path in (tmp_path / "store").glob("*/report")) == made


def test_a_part_of_the_bundle_that_is_gone_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("GPU", "MODELS", "CONTEXTS", "SESSIONS", "EXPERIMENTS", "WEIGHTS", "REQUIRE", "RESULTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(cli.VERBS, "paper", lambda _ctx: webpage.build(Places(tmp_path)))
    assert cli.main(["paper"]) == 2
    assert "abstract_en.tex: No such file or directory; restore it with git" in capsys.readouterr().err


def reproduced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, programs: Mapping[str, str], **env: str) -> int:
    """Replay with these programs on the PATH and no others; what the notebook rebuilds is left as it is."""
    for name in ("GPU", "MODELS", "CONTEXTS", "SESSIONS", "EXPERIMENTS", "WEIGHTS", "REQUIRE", "RESULTS"):
        monkeypatch.delenv(name, raising=False)
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    for name, value in {"GPU": "h100", "RESULTS": str(tmp_path / "store"), "PATH": str(tmp_path), **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli.execute, "run", lambda *_: None)
    paper = Places(tmp_path / "checkout").paper
    shutil.copytree(HERE.paper, paper, ignore=shutil.ignore_patterns("build"))
    (paper / "main.pdf").write_text("of older tables")
    monkeypatch.setattr(webpage, "build", lambda: paper / "paper.html")
    monkeypatch.setattr(typeset, "pdf", partial(typeset.pdf, at=Places(tmp_path / "checkout")))
    return cli.main(["reproduce"])


def test_a_tex_that_breaks_is_said_last_and_fails_once_everything_else_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    programs = {"lualatex": "exit 9", "latexmk": "echo ! LaTeX Error: no such thing >build/main.log; exit 12"}
    assert reproduced(monkeypatch, tmp_path, programs, REQUIRE="measured") == 1
    said = capsys.readouterr()
    assert "Files:" in said.out
    first, last = said.err.splitlines()
    assert first == (
        "decode-gap: no PDF, while everything else is there: paper/main.tex: LaTeX Error: no such thing; "
        "see paper/build/main.log"
    )
    assert last.startswith("decode-gap: REQUIRE=measured: ")
    assert not (tmp_path / "checkout/paper/main.pdf").exists()


def test_without_tex_a_replay_is_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert reproduced(monkeypatch, tmp_path, {"lualatex": "exit 9"}) == 0
    said = capsys.readouterr()
    assert f"no PDF: latexmk is not installed ({typeset.INSTALL})" in said.out
    assert said.err == ""


def test_a_card_that_only_local_records_know_has_a_name(fake_nvml: FakeNvml, tmp_path: Path) -> None:
    """Records of a card outside the catalogue, imported or moved here, can be asked for."""
    absent = run("status", env=fake_nvml.env(RESULTS=str(tmp_path), GPU="test-card"))
    assert absent.returncode == 2
    write([record(gpu="test-card")], tmp_path)
    known = run("status", env=fake_nvml.env(RESULTS=str(tmp_path), GPU="test-card", MODELS="qwen2.5-7b"))
    assert known.returncode == 0, known.stderr
    assert "baseline qwen2.5-7b ctx 2048 eager session 1: measured" in known.stdout


def test_nothing_of_the_checkout_was_touched() -> None:
    """The tests above ran against the real checkout; shipped records are as their manifests say."""
    for manifest in HERE.results.glob("*/MANIFEST.sha256"):
        records.load_all(HERE.results, manifest.parent.name)
