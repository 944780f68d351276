"""4-bit codes and their packings: what rounding keeps, and that each layout holds every code where it should."""

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodegap import quant_modules, quant_nf4, quant_tiles, quantise
from decodegap.errors import UnsupportedError
from decodegap.quantise import Codes, round_to_nearest

SHAPES = ((128, 256), (192, 384), (64, 1152), (320, 128 * 3))
GPTQMODEL = importlib.util.find_spec("gptqmodel")  # finds it without importing it
quant_set = [pytest.mark.quant, pytest.mark.skipif(GPTQMODEL is None, reason="needs gptqmodel, the quant set")]


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def codes(rows: int = 192, columns: int = 384, group: int = 128, *, symmetric: bool = False, seed: int = 0) -> Codes:
    return round_to_nearest(weight(rows, columns, seed), group, torch.float16, symmetric=symmetric)


def assert_same(found: Codes, expected: Codes) -> None:
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.zeros, expected.zeros)
    assert torch.equal(found.scales, expected.scales)
    assert found.group == expected.group


def nibble(word: torch.Tensor, place: int) -> int:
    return int(word) >> (4 * place) & 15


# --- rounding --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(quantise.GROUPS),
    st.booleans(),
    st.floats(1e-3, 1e3),
    st.floats(-2, 2),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_no_weight_is_further_than_half_a_step(
    seed: int, group: int, symmetric: bool, size: float, shift: float, dtype: torch.dtype
) -> None:
    values = (weight(8, 2 * group, seed) * 50 + shift) * size
    made = round_to_nearest(values, group, dtype, symmetric=symmetric)
    assert int(made.codes.max()) <= 15
    steps = made.scales.float().repeat_interleave(group, dim=1)
    # A scale that the dtype rounded down lets the extreme code fall short, by as much as 15 of its roundings; and the
    # positive extreme of symmetric codes is 7.5 steps, of which 7 are held.
    slack = 0.5 + 15 * torch.finfo(dtype).eps
    assert bool(((made.dequantised() - values).abs() <= slack * steps + 1e-6 * size).all())


def test_codes_that_are_there_already_are_kept() -> None:
    steps = torch.tensor([[0.5, 0.25]])
    held = torch.randint(0, 16, (1, 64), generator=torch.Generator().manual_seed(3))
    held[0, 0], held[0, 1], held[0, 32], held[0, 33] = 0, 15, 0, 15
    values = (held - 5) * steps.repeat_interleave(32, dim=1)
    made = round_to_nearest(values, 32, torch.float16, symmetric=False)
    assert torch.equal(made.codes, held.to(torch.uint8))
    assert made.zeros.tolist() == [[5, 5]]
    assert torch.equal(made.scales.float(), steps)


def test_symmetric_codes_span_both_extremes_around_eight() -> None:
    values = torch.zeros(1, 32)
    values[0, :3] = torch.tensor([-7.5, 7.5, 1.0])
    made = round_to_nearest(values, 32, torch.float16, symmetric=True)
    assert made.scales.item() == 1.0  # 15 of them from -7.5 to 7.5
    assert made.codes[0, :4].tolist() == [0, 15, 9, 8]
    assert made.zeros.item() == 8


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e-9])
def test_a_group_of_zeros_stays_zero(value: float, symmetric: bool) -> None:
    made = round_to_nearest(torch.full((2, 64), value), 64, torch.float16, symmetric=symmetric)
    assert bool((made.scales > 0).all())
    assert torch.equal(made.codes, made.zeros.repeat_interleave(64, dim=1))
    assert float(made.dequantised().abs().max()) == 0


def test_more_groups_are_closer() -> None:
    exact = weight(64, 1024)
    far = [
        (round_to_nearest(exact, g, torch.float16, symmetric=True).dequantised() - exact).norm() for g in (128, 64, 32)
    ]
    assert far[0] > far[1] > far[2]


# --- packings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", quantise.GROUPS)
@pytest.mark.parametrize("symmetric", [False, True])
def test_every_packing_gives_back_what_went_in(shape: tuple[int, int], group: int, symmetric: bool) -> None:
    made = codes(*shape, group, symmetric=symmetric)
    assert_same(quantise.from_rows(quantise.rows(made)), made)
    for zeros in ("true", "less one"):
        assert_same(quantise.from_gptq(quantise.gptq(made, zeros=zeros)), made)
    assert_same(quantise.from_awq(quantise.awq(made)), made)
    assert_same(quant_tiles.from_marlin(quant_tiles.marlin(made, zero_points=True)), made)
    if symmetric:
        assert_same(quant_tiles.from_marlin(quant_tiles.marlin(made, zero_points=False)), made)
    words = quantise.gptq(made, zeros="true").qweight
    assert torch.equal(quantise.from_exllama_words(quantise.exllama_words(words)), words)
    assert torch.equal(quant_tiles.from_tinygemm_words(quant_tiles.tinygemm_words(made.codes)), made.codes)


def test_kernels_get_contiguous_tensors() -> None:
    made = codes(symmetric=True)
    marlin, exllama, awq = (
        quant_tiles.marlin(made, zero_points=True),
        quantise.gptq(made, zeros="true"),
        quantise.awq(made),
    )
    tinygemm = quant_tiles.tinygemm(made)
    assert marlin.zeros is not None
    handed = [marlin.words, marlin.scales, marlin.zeros, quant_tiles.marlin_bias(torch.arange(192.0))]
    handed += [exllama.qweight, exllama.qzeros, exllama.scales, awq.qweight, awq.qzeros, awq.scales]
    handed += [tinygemm.words, tinygemm.scales_and_zeros, quantise.rows(made).words]
    assert all(tensor.is_contiguous() for tensor in handed)


def test_packed_weights_are_half_a_byte_each() -> None:
    made = codes(symmetric=True)
    half = made.codes.numel() // 2
    marlin = quant_tiles.marlin(made, zero_points=True)
    packings = [quantise.rows(made).words, quantise.gptq(made, zeros="true").qweight, quantise.awq(made).qweight]
    packings += [marlin.words, quant_tiles.tinygemm(made).words, quant_nf4.nf4(weight(192, 384), double=False).packed]
    assert [packed.nbytes for packed in packings] == [half] * 6
    assert quantise.rows(made).packed_bytes == half + 3 * made.scales.numel()
    assert marlin.zeros is not None
    assert marlin.zeros.nbytes == made.zeros.numel() // 2


def test_rows_hold_eight_neighbouring_inputs_a_word() -> None:
    made = codes()
    words = quantise.rows(made).words
    assert words.shape == (192, 48)
    for row, column in ((0, 0), (1, 9), (191, 383), (77, 130)):
        assert nibble(words[row, column // 8], column % 8) == made.codes[row, column]


def test_gptq_words_go_down_the_inputs_and_zero_words_along_the_outputs() -> None:
    made = codes()
    file, module = quantise.gptq(made, zeros="less one"), quantise.gptq(made, zeros="true")
    assert file.qweight.shape == (48, 192)
    assert file.qzeros.shape == (3, 24)
    for out, inp in ((0, 0), (3, 13), (191, 383)):
        assert nibble(file.qweight[inp // 8, out], inp % 8) == made.codes[out, inp]
        zero = int(made.zeros[out, inp // 128])
        assert nibble(module.qzeros[inp // 128, out // 8], out % 8) == zero
        assert nibble(file.qzeros[inp // 128, out // 8], out % 8) == (zero - 1) % 16
        assert file.scales[inp // 128, out] == made.scales[out, inp // 128]


def test_awq_words_interleave_eight_outputs() -> None:
    made = codes()
    packed = quantise.awq(made)
    for out, inp in ((0, 0), (1, 5), (6, 7), (187, 383)):
        place = (0, 4, 1, 5, 2, 6, 3, 7)[out % 8]  # where each output of eight went
        assert nibble(packed.qweight[inp, out // 8], place) == made.codes[out, inp]
        assert nibble(packed.qzeros[inp // 128, out // 8], place) == made.zeros[out, inp // 128]


def test_exllama_words_hold_even_inputs_low() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert int(quantise.exllama_words(word)) == 0x75316420


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
    assert quant_tiles.nibble_pairs(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x12, 0xF0]]


# --- NF4 -------------------------------------------------------------------------------------------------------------


def test_nf4_rounds_to_the_nearest_level_of_its_block() -> None:
    exact = weight(8, 256)
    held = quant_nf4.nf4(exact, double=False)
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
    ours = quant_nf4.nf4(exact, double=double)
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
    single, double = (quant_nf4.nf4(weight(64, 1024), double=twice) for twice in (False, True))
    assert isinstance(double.absmax, quant_nf4.Outer)
    assert isinstance(single.absmax, torch.Tensor)
    values = quant_nf4.outer_values(double.absmax)
    spread = single.absmax.max() - single.absmax.min()
    assert float((values - single.absmax).abs().max()) < 0.02 * spread
    assert double.absmax.codes.nbytes * 4 == single.absmax.nbytes


# --- what a format cannot hold ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: codes(8, 100, 32), "100 inputs are not a multiple of 32"),
        (lambda: codes(8, 96, 64), "96 inputs are not a multiple of 64"),
        (lambda: codes(8, 96, 48), "groups of 48"),
        (lambda: round_to_nearest(torch.zeros(64), 32, torch.float16, symmetric=True), "no matrix"),
        (lambda: round_to_nearest(torch.zeros(0, 64), 32, torch.float16, symmetric=True), "no matrix"),
        (lambda: quantise.gptq(codes(12, 128), zeros="true"), "12 outputs are not a multiple of 8"),
        (lambda: quantise.awq(codes(20, 128)), "20 outputs"),
        (lambda: quant_tiles.marlin(codes(96, 256), zero_points=True), "96 outputs are not a multiple of 64"),
        (lambda: quant_tiles.marlin(codes(64, 192, 64), zero_points=True), "multiples of 128"),
        (lambda: quant_tiles.marlin(codes(128, 128), zero_points=True), "one group of 128"),
        (lambda: quant_tiles.marlin(codes(128, 96, 32), zero_points=True), "96 inputs are not a multiple of 64"),
        (lambda: quant_tiles.tinygemm(codes(12, 128)), "12 outputs"),
        (lambda: quant_tiles.tinygemm(codes(16, 192, 64)), "192 inputs are not a multiple of 128"),
        (lambda: quant_nf4.nf4(torch.zeros(4, 96), double=False), "multiples of 64"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(call: object, named: str) -> None:
    assert callable(call)
    with pytest.raises(UnsupportedError, match=named) as caught:
        call()
    assert "\n" not in str(caught.value)


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
        ours = quantise.awq(made)
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
        assert torch.equal(convert(quantise.awq(made).qzeros, 384 // group, 192, 4), ours.zeros)
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
