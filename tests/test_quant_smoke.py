"""The smoke test of the quantised paths, on a CPU: what it says of one that is right, wrong, absent or stopped."""

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from decodegap import decode, quant_paths, quant_smoke
from decodegap.quant_catalogue import PATHS

RUNS, ABSENT = "int4-tinygemm", "awq-marlin"
OK = f"{RUNS:<15} ok: 6.9 MB packed; q/o "
STOPPED = f"{RUNS:<15} FAIL: RuntimeError: CUDA error: unspecified launch failure ["
UNSUPPORTED = f"{ABSENT:<15} unsupported: "


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for the process that takes over


def test_a_path_that_is_right_and_one_that_is_not_here_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert quant_smoke.main([ABSENT, RUNS]) == 0
    absent, right = capsys.readouterr().out.splitlines()
    assert absent.startswith(UNSUPPORTED)
    assert right.startswith(OK)
    assert all(f"; {kind} " in right for kind in ("k/v", "gate/up", "down"))


def test_a_path_with_other_weights_or_kernels_is_wrong_and_the_next_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    convert = quant_paths.convert

    def other_weights(net: Any, *given: Any) -> Any:
        held = convert(net, *given)
        query, output = (module for kind, _, _, module in list(quant_paths.projections(net))[:4] if kind == "q/o")
        query.dequantised = output.dequantised
        return held

    monkeypatch.setattr(quant_paths, "convert", other_weights)
    monkeypatch.setitem(PATHS, RUNS, replace(PATHS[RUNS], operators=("none such",)))
    assert quant_smoke.main([RUNS, ABSENT]) == 1
    wrong, absent = capsys.readouterr().out.splitlines()
    assert wrong.startswith(f"{RUNS:<15} FAIL: q/o is off by 1.")
    assert f"; {RUNS} ran none such 0 times a step, not 14; it ran aten::" in wrong
    assert absent.startswith(UNSUPPORTED)


def gone(*_: Any) -> None:
    raise RuntimeError("CUDA error:\n unspecified launch failure")


def test_one_that_is_stopped_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quant_paths, "convert", gone)
    assert quant_smoke.main([RUNS, ABSENT]) == 1
    stopped, absent = capsys.readouterr().out.splitlines()
    assert stopped.startswith(STOPPED)
    assert absent.startswith(UNSUPPORTED)


def test_after_one_that_takes_the_device_along_the_rest_have_a_process_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quant_paths, "convert", gone)
    monkeypatch.setattr(decode, "synchronize", gone)
    assert quant_smoke.main([RUNS, RUNS]) == 1
    stopped, right = capfd.readouterr().out.splitlines()
    assert stopped.startswith(STOPPED)
    assert right.startswith(OK)  # in this process, it would be stopped too


def test_a_name_that_is_no_paths_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert quant_smoke.main([RUNS, "int3"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("decode-gap: no path is called 'int3'; known are bf16, ")
    assert told.err.count("\n") == 1
