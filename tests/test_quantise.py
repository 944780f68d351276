"""4-bit codes and their packings: what rounding keeps, and that each layout holds every code where it should."""

import packers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packers import codes, nibble, weight

from decodegap import quant_nf4, quant_tiles, quantise
from decodegap.errors import UnsupportedError
from decodegap.quantise import Codes, round_to_nearest

SHAPES = ((128, 256), (192, 384), (64, 1152), (320, 128 * 3))


def assert_same(found: Codes, expected: Codes) -> None:
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.zeros, expected.zeros)
    assert torch.equal(found.scales, expected.scales)
    assert found.group == expected.group


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
    assert_same(quantise.from_awq(packers.awq(made)), made)
    assert_same(quant_tiles.from_marlin(quant_tiles.marlin(made, zero_points=True)), made)
    if symmetric:
        assert_same(quant_tiles.from_marlin(quant_tiles.marlin(made, zero_points=False)), made)
    words = quantise.gptq(made, zeros="true").qweight
    assert torch.equal(quantise.from_exllama_words(packers.exllama_words(words)), words)
    assert torch.equal(quant_tiles.from_tinygemm_words(quant_tiles.tinygemm_words(made.codes)), made.codes)


def test_kernels_get_contiguous_tensors() -> None:
    made = codes(symmetric=True)
    marlin, exllama, awq = (
        quant_tiles.marlin(made, zero_points=True),
        quantise.gptq(made, zeros="true"),
        packers.awq(made),
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
    packings = [quantise.rows(made).words, quantise.gptq(made, zeros="true").qweight, packers.awq(made).qweight]
    packings += [marlin.words, quant_tiles.tinygemm(made).words, packers.nf4(weight(192, 384), double=False).packed]
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
    packed = packers.awq(made)
    for out, inp in ((0, 0), (1, 5), (6, 7), (187, 383)):
        place = (0, 4, 1, 5, 2, 6, 3, 7)[out % 8]  # where each output of eight went
        assert nibble(packed.qweight[inp, out // 8], place) == made.codes[out, inp]
        assert nibble(packed.qzeros[inp // 128, out // 8], place) == made.zeros[out, inp // 128]


def test_exllama_words_hold_even_inputs_low() -> None:
    word = torch.tensor([[0x76543210]], dtype=torch.int32)
    assert int(packers.exllama_words(word)) == 0x75316420


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
        (lambda: quant_tiles.marlin(codes(96, 256), zero_points=True), "96 outputs are not a multiple of 64"),
        (lambda: quant_tiles.marlin(codes(64, 192, 64), zero_points=True), "multiples of 128"),
        (lambda: quant_tiles.marlin(codes(128, 128), zero_points=True), "one group of 128"),
        (lambda: quant_tiles.marlin(codes(128, 96, 32), zero_points=True), "96 inputs are not a multiple of 64"),
        (lambda: quant_tiles.tinygemm(codes(12, 128)), "12 outputs"),
        (lambda: quant_tiles.tinygemm(codes(16, 192, 64)), "192 inputs are not a multiple of 128"),
        (lambda: quant_nf4.require_nf4((4, 96)), "multiples of 64"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(call: object, named: str) -> None:
    assert callable(call)
    with pytest.raises(UnsupportedError, match=named) as caught:
        call()
    assert "\n" not in str(caught.value)
