"""Every notebook through papermill, for real: tiny models, strict parameters, nothing saved in the committed files."""

import contextlib
import io
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest

from decodegap import cells, execute, records
from decodegap.errors import BadInputError
from decodegap.paths import HERE

NOTEBOOKS = sorted(path.stem for path in HERE.notebooks.glob("*.ipynb"))
TINY = {"gpu": "cpu", "models": "tiny-llama", "contexts": "24", "sessions": 1}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_notebooks_hold_no_outputs(name: str) -> None:
    notebook = nbformat.read(HERE.notebooks / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "%config InlineBackend.print_figure_kwargs={'bbox_inches': None}" in code[0].source
    assert [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    for cell in code:
        assert cell.outputs == []
        assert cell.execution_count is None


def test_the_baseline_notebook_measures_and_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = TINY | {"results": str(tmp_path)}
    executed = execute.run("01_baseline", parameters, tmp_path / "cpu" / "notebooks", tmp_path)
    said = capsys.readouterr().out
    assert "1 session on cpu" in said
    assert "[1/1] tiny-llama ctx 24 eager session 1: " in said
    assert [record.cell.model for record in records.load_all(tmp_path, "cpu")] == ["tiny-llama"]
    page = executed.with_suffix(".html").read_text()
    assert "tiny-llama" in page
    assert "data:image/png;base64," in page
    again = execute.run("01_baseline", parameters, tmp_path / "cpu" / "notebooks", tmp_path)
    assert "measured already: 1 of 1 session" in capsys.readouterr().out
    assert again == executed


@dataclass(frozen=True)
class Launched:
    """What the launch notebook left: the executed file, what was said meanwhile, and the store with its records."""

    executed: Path
    said: str
    store: Path


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """The launch notebook and its sessions, a check and a pair, run once for all who read them."""
    store = tmp_path_factory.mktemp("launched")
    parameters = TINY | {"models": "tiny-qwen2", "results": str(store)}
    with contextlib.redirect_stdout(io.StringIO()) as said:
        executed = execute.run("02_cuda_graphs", parameters, store / "cpu" / "notebooks", store)
    return Launched(executed, said.getvalue(), store)


@pytest.mark.slow
def test_the_launch_notebook_measures_a_pair_on_a_cpu_and_says_what_it_is(launched: Launched) -> None:
    assert "2 sessions on cpu" in launched.said
    assert [record.cell.arm for record in records.load_all(launched.store, "cpu")] == ["ab-compiled", "check"]
    made = nbformat.read(launched.executed, as_version=4).cells
    shown = [out.data for cell in made for out in cell.get("outputs", []) if "data" in out]
    text = "\n".join(data.get("text/markdown", "") for data in shown)
    compiled = any(record.pair for record in records.load_all(launched.store, "cpu"))
    assert "it changes the kernels" in text
    assert ("| measured, yours |" in text) == compiled  # without a compiler the line says that it is unsupported
    assert ("missing: unsupported" in text) != compiled
    assert sum("image/png" in data for data in shown) == (2 if compiled else 1)
    assert "No record here for the table `arms`" in text


@pytest.mark.slow
def test_a_cpu_session_records_its_pair(launched: Launched) -> None:
    record = records.load(launched.store / "cpu/graphs/tiny-qwen2_24_ab-compiled_s1.json")
    assert record.outcome == "ok"
    assert record.pair is not None
    assert [series.arm for series in record.series] == [record.pair.first, record.pair.second]
    assert record.pair.ratio == pytest.approx(record.series[0].step_ms / record.series[1].step_ms)
    (seen,) = record.attestations
    assert seen.outputs_changed
    assert not seen.kernels_equal
    assert any("other kernels" in flag for flag in record.flags)
    assert not any("not checked" in flag for flag in record.flags)


@pytest.mark.slow
def test_a_check_session_holds_every_arm_against_the_reference(launched: Launched) -> None:
    record = records.load(launched.store / "cpu/graphs/tiny-qwen2_24_check_s1.json")
    assert record.outcome == "ok"
    assert [check.arm for check in record.checks] == list(cells.CHECKED["cpu"])
    assert all(check.passed for check in record.checks)
    assert record.series == []
    assert record.step_ms is None


@pytest.mark.slow
def test_the_quantised_notebook_checks_measures_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = TINY | {"results": str(tmp_path)}
    executed = execute.run("03_quantised", parameters, tmp_path / "cpu" / "notebooks", tmp_path)
    assert "4 sessions on cpu" in capsys.readouterr().out
    outcomes = {record.cell.arm: record.outcome for record in records.load_all(tmp_path, "cpu")}
    assert outcomes == {"check": "ok", "fp32": "ok", "bnb-nf4": "ok", "int4-tinygemm": "unsupported"}
    made = nbformat.read(executed, as_version=4).cells
    shown = [out.data for cell in made for out in cell.get("outputs", []) if "data" in out]
    text = "\n".join(data.get("text/markdown", "") for data in shown)
    assert "| measured, yours |" in text
    assert "missing: unsupported: " in text
    assert "missing: awq-marlin has no kernel for a CPU" in text
    assert "an eighth of the fp32 step, launched kernel by kernel, would be" in text
    assert sum("image/png" in data for data in shown) == 1


@pytest.mark.slow
def test_the_ladder_notebook_climbs_what_a_cpu_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameters = TINY | {"models": "tiny-qwen2", "results": str(tmp_path)}
    executed = execute.run("04_closing_the_gap", parameters, tmp_path / "cpu" / "notebooks", tmp_path)
    assert "1 session on cpu" in capsys.readouterr().out
    (record,) = records.load_all(tmp_path, "cpu")
    assert [series.arm for series in record.series][:2] == ["eager", "eager-pinned"]
    made = nbformat.read(executed, as_version=4).cells
    shown = [out.data for cell in made for out in cell.get("outputs", []) if "data" in out]
    text = "\n".join(data.get("text/markdown", "") for data in shown)
    assert "| fused |" in text
    assert "missing: unsupported: " in text
    assert sum("image/png" in data for data in shown) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"modles": "tiny-llama"}, "'modles' is unknown"),
        ({"gpu": 7}, "GPU: 7"),
        ({"gpu": "../x"}, "'../x'"),
        ({"sessions": float("inf")}, "inf"),
        ({"contexts": "2k"}, "'2k'"),
        ({"results": 3}, "results: 3"),
    ],
)
def test_a_notebook_refuses_bad_parameters(tmp_path: Path, change: dict[str, object], named: str) -> None:
    with pytest.raises(BadInputError) as caught:
        execute.run("01_baseline", TINY | {"results": str(tmp_path)} | change, tmp_path / "out", tmp_path / "store")
    assert named in str(caught.value)
    assert not list(tmp_path.glob("cpu"))


def test_papermills_own_command_line_works_too(tmp_path: Path) -> None:
    """Types that papermill guesses (`007` becomes 7, `inf` a float) are refused, not rounded into something else."""
    env = execute.kernel_environment(tmp_path) | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "papermill",
                str(HERE.notebooks / "01_baseline.ipynb"),
                str(tmp_path / "out.ipynb"),
            ),
            *("--no-progress-bar", "-p", "gpu", "cpu", "-p", "sessions", "inf"),
        ],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "SESSIONS: inf is not a whole number" in done.stderr


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(execute.DecodeGapError, match="cannot write") as caught:
        execute.run("01_baseline", TINY, tmp_path / "out", tmp_path / "store")
    assert "\n" not in str(caught.value)


def test_a_users_own_kernelspec_does_not_win(tmp_path: Path) -> None:
    """The kernel called python3 is this interpreter, whatever a home folder says."""
    env = execute.kernel_environment(tmp_path)
    spec = json.loads((tmp_path / ".jupyter" / "kernels" / "python3" / "kernel.json").read_text())
    assert spec["argv"][0] == sys.executable
    assert env["JUPYTER_PATH"].split(":")[0] == str(tmp_path / ".jupyter")
