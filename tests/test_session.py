"""What a session makes of an allocation that failed: the bytes asked for, or no allocation at all."""

import pytest
import torch

from decodegap import session


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
