"""What `make tune` and `make bench-kernels` say where they cannot run; what they do on a card needs one."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from decodegap import cli, gate, gpus

H200 = gpus.Device(0, "GPU-0", "NVIDIA H200", 143_771, 132, (9, 0), 6016, 3201, mig=False)
NO_CUDA = pytest.mark.skipif(gate.torch_cuda() != "", reason="needs a torch without CUDA to be wrong for a card")


@pytest.mark.parametrize("verb", ["tune", "bench-kernels"])
@pytest.mark.parametrize(
    ("devices", "settings", "said"),
    [
        ([H200], {"BITS": "8"}, "BITS: '8'; give 16 or 4"),
        ([H200], {"MODEL": "gpt-9"}, "MODEL: no model is called 'gpt-9'"),
        ([H200], {"CTX": "0"}, "CTX: '0'"),
        ([], {"GPU": "h200"}, "GPU=h200 cannot be measured here: no NVIDIA GPU was found"),
        ([], {}, "this compiles kernels for an NVIDIA GPU, and none was found"),
        ([H200], {"GPU": "cpu"}, "this compiles kernels for an NVIDIA GPU, and GPU=cpu was asked for"),
        pytest.param([H200], {}, "torch cannot use the card that the driver lists; make doctor GPU=", marks=NO_CUDA),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    devices: list[gpus.Device],
    settings: dict[str, str],
    said: str,
) -> None:
    monkeypatch.setattr(gpus, "detect", lambda: devices)
    for name in ("GPU", "MODEL", "CTX", "BITS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RESULTS": str(tmp_path), **settings}.items():
        monkeypatch.setenv(name, value)
    assert cli.main([verb]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("decode-gap: ")
    assert said in told.err
    assert told.err.count("\n") == 1
