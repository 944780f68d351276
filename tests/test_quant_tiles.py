"""Codes laid out for tensor cores: who holds which code, for Marlin and for torch's int4 product; gptqmodel's own."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import packers
import pytest
import torch
from packers import codes, nibble, weight

from decodegap import quant_modules, quant_tiles, quantise
from decodegap.quantise import round_to_nearest

GPTQMODEL = importlib.util.find_spec("gptqmodel")  # finds it without importing it
quant_set = [pytest.mark.quant, pytest.mark.skipif(GPTQMODEL is None, reason="needs gptqmodel, the quant set")]


def test_marlin_words_follow_the_tensor_core() -> None:
    """Thread by thread: which inputs and outputs a 16 x 8 x 16 product gives it."""
    made = codes(128, 256)
    packed = quant_tiles.marlin(made, zero_points=True)
    for tile, block, warp, thread in ((0, 0, 0, 0), (5, 1, 3, 31), (15, 0, 2, 17), (9, 1, 1, 6)):
        word = packed.words[tile, block * 128 + thread * 4 + warp]
        out, first = block * 64 + warp * 16 + thread // 4, tile * 16 + thread % 4 * 2
        inputs = (first, first + 1, first + 8, first + 9)
        held = [int(made.codes[out, i]) for i in inputs] + [int(made.codes[out + 8, i]) for i in inputs]
        assert [nibble(word, place) for place in range(8)] == [held[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    for place, out in ((0, 0), (1, 8), (8, 1), (63, 63), (64, 64), (65, 72)):
        assert packed.scales[1, place] == made.scales[out, 1]
    assert packed.zeros is not None
    assert nibble(packed.zeros[1, 0], 4) == made.zeros[8, 1]  # the second of eight permuted ones, interleaved


def test_a_marlin_bias_is_permuted_by_pairs_and_back() -> None:
    bias = torch.arange(64.0)
    held = quant_tiles.marlin_bias(bias)
    assert held[:10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
    assert torch.equal(quant_tiles.marlin_bias(held), bias)


def test_tinygemm_words_follow_the_tensor_core() -> None:
    made = codes(16, 256).codes
    words = quant_tiles.tinygemm_words(made)
    assert words.shape == (2, 2, 32, 4)
    for block, outer, thread, pair in ((0, 0, 0, 0), (1, 1, 31, 3), (1, 0, 13, 2)):
        word = words[block, outer, thread, pair]
        out, first = block * 8 + thread // 4, outer * 128 + pair * 32 + thread % 4 * 2
        held = [int(made[out, first + i]) for i in (0, 1, 8, 9, 16, 17, 24, 25)]
        assert [nibble(word, place) for place in range(8)] == [held[i] for i in (0, 2, 4, 6, 1, 3, 5, 7)]


@pytest.mark.parametrize("group", quantise.GROUPS)
def test_a_floating_zero_is_the_integer_one_rounded(group: int) -> None:
    made = round_to_nearest(weight(64, 256), group, torch.bfloat16, symmetric=False)
    held = quant_tiles.tinygemm(made, inner_tiles=2)
    step = made.scales.float().repeat_interleave(group, dim=1)
    assert bool(((held.dequantised() - made.dequantised()).abs() <= 8 * step * 2**-8).all())
    symmetric = round_to_nearest(weight(64, 256), group, torch.bfloat16, symmetric=True)
    assert torch.equal(quant_tiles.tinygemm(symmetric).dequantised(), symmetric.dequantised())


@pytest.mark.parametrize("group", quantise.GROUPS)
@pytest.mark.parametrize("shape", [(48, 384), (128, 256)])
def test_torchs_cpu_operator_multiplies_by_our_affine_weights(shape: tuple[int, int], group: int) -> None:
    made = round_to_nearest(weight(*shape), group, torch.float32, symmetric=False)
    pairs = quant_tiles.scales_and_zeros(made)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(made.codes.int(), 1)
    x = torch.randn(3, shape[1], generator=torch.Generator().manual_seed(1))
    found = torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, group, pairs)
    expected = x.double() @ quant_tiles.affine(made.codes, pairs, group).double().T
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_two_codes_a_byte_have_the_even_input_high() -> None:
    assert packers.nibble_pairs(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x12, 0xF0]]


def test_marlin_takes_no_zero_points_for_symmetric_codes() -> None:
    with pytest.raises(ValueError, match="zero points of their own"):
        quant_tiles.marlin(codes(128, 256), zero_points=False)


# --- against the package whose kernels read these layouts; nothing of it is imported as a package --------------------


def by_path(relative: str) -> ModuleType:
    """One file of gptqmodel as a module of its own."""
    assert GPTQMODEL is not None
    assert GPTQMODEL.submodule_search_locations is not None
    path = Path(GPTQMODEL.submodule_search_locations[0], relative)
    spec = importlib.util.spec_from_file_location(f"of_gptqmodel_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[module.__name__]
    return module


def functions(relative: str, *names: str) -> dict[str, object]:
    """Some functions of one file of gptqmodel, run without the imports around them."""
    assert GPTQMODEL is not None
    assert GPTQMODEL.submodule_search_locations is not None
    tree = ast.parse(Path(GPTQMODEL.submodule_search_locations[0], relative).read_text(encoding="utf-8"))
    kept = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert sorted(node.name for node in kept) == sorted(names)
    for node in kept:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
    found: dict[str, object] = {"torch": torch, "np": np, "numpy": np, "List": list}
    exec(compile(ast.Module(kept, []), relative, "exec"), found)
    return found


class TestAgainstGptqmodel:
    """Its own helpers, function by function."""

    pytestmark = quant_set

    @pytest.mark.parametrize("group", quantise.GROUPS)
    def test_awq_and_gptq_words(self, group: int) -> None:
        theirs = by_path("quantization/awq/utils/packing_utils.py")
        made = codes(group=group)
        inputs_first, zeros = made.codes.T.int().contiguous(), made.zeros.T.int().contiguous()
        qweight, qzeros = theirs.pack_awq(inputs_first, zeros, 4)
        ours = packers.awq(made)
        assert torch.equal(qweight, ours.qweight)
        assert torch.equal(qzeros, ours.qzeros)
        qweight, qzeros = theirs.pack_exllama(inputs_first, zeros, 4)
        assert torch.equal(qweight, quantise.gptq(made, zeros="true").qweight)
        assert torch.equal(qzeros, quantise.gptq(made, zeros="true").qzeros)

    @pytest.mark.parametrize("group", quantise.GROUPS)
    def test_marlin_scales_zero_points_and_bias(self, group: int) -> None:
        names = ("get_scale_perms", "get_pack_factor", "pack_cols", "unpack_cols", "marlin_zero_points")
        theirs = functions("utils/marlin.py", *names, "awq_to_marlin_zero_points")
        made = codes(group=group)
        ours = quant_tiles.marlin(made, zero_points=True)
        convert = theirs["awq_to_marlin_zero_points"]
        assert callable(convert)
        assert ours.zeros is not None
        assert torch.equal(convert(packers.awq(made).qzeros, 384 // group, 192, 4), ours.zeros)
        permutations = theirs["get_scale_perms"]
        assert callable(permutations)
        full, single = permutations()
        assert torch.equal(made.scales.T.reshape(-1, 64)[:, full].reshape(-1, 192), ours.scales)
        bias = torch.arange(192.0)
        assert torch.equal(bias.reshape(-1, 32)[:, single].flatten(), quant_tiles.marlin_bias(bias))

    def test_marlin_names_of_types(self) -> None:
        types = by_path("utils/marlin_scalar_type.py").scalar_types
        assert types.uint4.id == quant_modules.MARLIN_U4
        assert types.uint4b8.id == quant_modules.MARLIN_U4_LESS_8

    def test_marlin_words(self) -> None:
        made = codes(128, 256)
        permutations = functions("nn_modules/qlinear/marlin.py", "_get_perms")["_get_perms"]
        assert callable(permutations)
        order = permutations()[0]  # of the 1,024 codes of a tile of 16 x 64
        tiles = made.codes.T.reshape(16, 16, 8, 16).permute(0, 2, 1, 3).reshape(16, -1, 1024)[..., order]
        assert torch.equal(quantise.pack(tiles).reshape(16, -1), quant_tiles.marlin_words(made.codes))
