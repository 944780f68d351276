"""NF4 as the library reads it: levels, blocks and the largest values in 8 bits, against bitsandbytes' own."""

import packers
import pytest
import torch
from packers import weight

from decodegap import quant_nf4


def test_nf4_rounds_to_the_nearest_level_of_its_block() -> None:
    exact = weight(8, 256)
    held = packers.nf4(exact, double=False)
    assert isinstance(held.absmax, torch.Tensor)
    levels = torch.tensor(quant_nf4.LEVELS)
    scaled = exact.reshape(-1, 64) / held.absmax[:, None]
    best = (scaled[..., None] - levels).abs().amin(dim=-1)
    found = (held.dequantised().reshape(-1, 64) - exact.reshape(-1, 64)).abs() / held.absmax[:, None]
    assert torch.allclose(found, best, atol=1e-6)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (24, 192), (100, 704)])
def test_nf4_is_bitsandbytes_own(shape: tuple[int, int], double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    exact = weight(*shape)
    packed, state = functional.quantize_4bit(exact, blocksize=64, quant_type="nf4", compress_statistics=double)
    ours = packers.nf4(exact, double=double)
    assert float((packed.flatten() != ours.packed).float().mean()) < 1e-3  # a weight in the middle of two levels
    absmax: torch.Tensor | quant_nf4.Outer = state.absmax
    if double:
        assert isinstance(ours.absmax, quant_nf4.Outer)
        assert torch.equal(state.state2.code, ours.absmax.levels)
        # An 8-bit number may be the neighbour of ours: bitsandbytes finds it by a coarser search.
        assert int((state.absmax.int() - ours.absmax.codes.int()).abs().max()) <= 1
        absmax = quant_nf4.Outer(state.absmax, state.state2.absmax, state.state2.code, state.offset)
    theirs = quant_nf4.Nf4(packed, absmax, shape).dequantised()
    assert torch.allclose(theirs, functional.dequantize_4bit(packed, state), atol=1e-8)


def test_double_quantisation_stays_within_a_level() -> None:
    single, double = (packers.nf4(weight(64, 1024), double=twice) for twice in (False, True))
    assert isinstance(double.absmax, quant_nf4.Outer)
    assert isinstance(single.absmax, torch.Tensor)
    values = quant_nf4.outer_values(double.absmax)
    spread = single.absmax.max() - single.absmax.min()
    assert float((values - single.absmax).abs().max()) < 0.02 * spread
    assert double.absmax.codes.nbytes * 4 == single.absmax.nbytes
