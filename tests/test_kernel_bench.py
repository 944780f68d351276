"""Whether the table of kernels adds up; what fills it needs a GPU."""

from dataclasses import dataclass

import pytest

from decodegap import kernel_bench, models
from decodegap.fused.compiled import Built
from decodegap.fused.launches import kernels_of
from decodegap.fused.shape import TILED, kernel_bytes, launches, shape_of
from decodegap.fused.tiles import load_tiles

SHAPE = shape_of(models.lookup("qwen2.5-7b").config)
READ_GB_S = 4340.0


@dataclass(frozen=True)
class KernelTime:
    """The fields of fused.bench.KernelTime, which cannot be imported without Triton."""

    kernel: str
    launches: int
    bytes: int
    only_us: float
    skip_us: float


def lines(broken: str = "") -> list[kernel_bench.Line]:
    sizes, counts = kernel_bytes(SHAPE, 2048), launches(SHAPE)
    times = [KernelTime(name, counts[name], sizes[name], only_us=10.0, skip_us=12.0) for name in TILED]
    kernels = kernels_of(SHAPE, load_tiles("qwen2.5-7b", "h200", 2048), capacity=4096, pdl=True)
    built = [
        Built(kernel, registers=registers, error=f"no {broken}" if (kernel.name, registers) == (broken, 64) else None)
        for kernel in kernels.values()
        for registers in (64, 71)
    ]
    return kernel_bench.joined(times, built, READ_GB_S)


def test_each_kernel_has_its_bytes_target_and_registers() -> None:
    found = {line.kernel: line for line in lines()}
    assert tuple(found) == TILED
    pairs = 2 * 18944 * 3584 + 3584
    assert found["gate_up"].n_bytes == 2 * pairs
    assert found["gate_up"].target_us == pytest.approx(2 * pairs / READ_GB_S / 1e3)
    assert found["gate_up"].gb_s == pytest.approx(2 * pairs / 10.0 / 1e3)
    assert {(line.alone_us, line.missed_us) for line in found.values()} == {(10.0, 12.0)}
    assert {line.registers for line in found.values()} == {71}  # of the two variants, the one that takes more


def test_the_sum_is_the_steps_bytes() -> None:
    *_, total = kernel_bench.table(lines(), READ_GB_S)
    streamed = models.lookup("qwen2.5-7b").streamed_bytes("bfloat16") + models.lookup("qwen2.5-7b").kv_bytes(
        2048, "bfloat16"
    )
    assert total.startswith(f"a step: {streamed / 1e9:.3f} GB, target {streamed / READ_GB_S / 1e6:.3f} ms")


def test_every_line_has_a_text_for_each_header() -> None:
    head, rule, *body, _ = kernel_bench.table(lines(), READ_GB_S)
    assert {text.count("|") for text in (head, rule, *body)} == {len(kernel_bench.HEADERS) + 1}


def test_a_kernel_that_was_not_compiled_says_why_and_no_registers() -> None:
    *told, error = kernel_bench.table(lines("o"), READ_GB_S)
    assert error == "o: no o"
    assert [line.endswith("| error | error | error |") for line in told].count(True) == 1
