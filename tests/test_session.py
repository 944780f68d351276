"""What a session makes of an allocation that failed: the bytes asked for, or no allocation at all."""

from pathlib import Path

import pytest
import torch

from decodegap import plan, probes, session
from decodegap.schema import Record


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0 has a total capacity of 139.81 GiB", 21_495_808),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB", 2**31),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 512),
        ("CUDA error: an illegal memory access was encountered", None),
    ],
)
def test_the_bytes_asked_for_are_read_in_every_unit(message: str, asked: int | None) -> None:
    assert session._bytes_asked(message) == asked


def test_the_host_s_own_words_are_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert session._bytes_asked(str(caught.value)) == 2**60


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation.\nFor debugging ...",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Triton Error [CUDA]: out of memory",
    ],
)
def test_memory_that_a_driver_or_library_lacks_is_a_record_of_running_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    record = raising(said, tmp_path, monkeypatch)
    assert (record.outcome, record.bytes_asked) == ("oom", None)
    assert record.reasons == [f"out of host memory: {said.splitlines()[0]}"]


def test_another_error_of_the_device_is_no_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        raising("CUDA error: an illegal memory access was encountered", tmp_path, monkeypatch)


def raising(said: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """The record of a session whose first probe raises what a driver would."""

    def full(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(probes, "read_bandwidth", full)
    asked = plan.request(gpu="cpu", models="tiny-llama", contexts="8", sessions=1)
    return session.run(plan.baseline(asked, "cpu")[0], store)
