"""The probes read everything, say so truthfully, and are quick."""

import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from decodegap import probes  # noqa: E402
from decodegap.errors import WrongResultError  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = 3


@pytest.fixture(scope="module")
def block():
    return probes._random_block("cpu")


@pytest.fixture(scope="module")
def buffer(block):
    return block.repeat(BLOCKS)


def test_the_cpu_is_read_at_a_possible_rate_and_in_time():
    start = time.perf_counter()
    probe = probes.read_bandwidth("cpu", 32 * probes.MIB)
    assert time.perf_counter() - start < 6  # 2 s on an idle machine
    assert probe.buffer_mib == 256
    assert probe.kernel in ("torch.sum", "torch.mv")
    assert 0.5 < probe.gb_s < 2000


def test_the_rate_counts_the_bytes_read_and_nothing_else(buffer, block):
    readers = probes.torch_readers(buffer, block)
    slow = [replace(reader, read=lambda r=reader: (time.sleep(0.1), r.read())) for reader in readers]
    _, gb_s = probes.fastest(slow, "cpu", buffer.nbytes)
    assert 0.5 * buffer.nbytes / 0.1 / 1e9 < gb_s < buffer.nbytes / 0.1 / 1e9


def test_the_fastest_reader_wins(buffer, block):
    reader = probes.torch_readers(buffer, block)[0]
    slow = replace(reader, name="slow", read=lambda: (time.sleep(0.05), reader.read()))
    assert probes.fastest([slow, reader], "cpu", buffer.nbytes)[0].name == reader.name


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("lost", [1, 64])
def test_a_reader_that_leaves_rows_out_is_caught(buffer, block, which, lost):
    reader = probes.torch_readers(buffer, block)[which]
    rows = buffer.view(len(reader.sums), -1)
    probes.check(reader)  # fills the sums that a careless check would find again
    short = replace(reader, read=lambda: reader.sums[:-lost].copy_(rows[:-lost].sum(dim=1)))
    for readers in ([short], [probes.torch_readers(buffer, block)[0], replace(short, read=lambda: time.sleep(0.05))]):
        with pytest.raises(WrongResultError, match=reader.name):
            probes.fastest(readers, "cpu", buffer.nbytes)


def test_a_reader_that_leaves_four_words_of_each_row_out_is_caught(buffer, block):
    reader = probes.torch_readers(buffer, block)[0]
    rows = buffer.view(len(reader.sums), -1)
    short = replace(reader, read=lambda: torch.sum(rows[:, :-4], 1, out=reader.sums))
    with pytest.raises(WrongResultError):
        probes.check(short)


def test_sums_with_the_rounding_of_bf16_still_pass():
    block = probes._random_block("cpu").to(torch.bfloat16)
    for reader in probes.torch_readers(block.repeat(2), block):
        probes.check(reader)


@pytest.mark.parametrize(
    ("cache_mib", "buffer_mib"), [(0, 256), (32, 256), (64, 256), (100, 400), (10**9, None)], ids=str
)
def test_the_buffer_is_several_caches_but_a_quarter_of_free_memory_at_most(cache_mib, buffer_mib):
    size = probes._buffer_bytes("cpu", cache_mib * probes.MIB)
    assert size % probes.BLOCK_BYTES == 0
    if buffer_mib is None:
        assert size <= max(probes.CPU_BUFFER_LEAST, probes.psutil.virtual_memory().total // 4)
    else:
        assert size == buffer_mib * probes.MIB


def test_dispatch_of_an_operator_is_microseconds_and_quick_to_measure():
    start = time.perf_counter()
    probe = probes.dispatch_cost("cpu")
    assert time.perf_counter() - start < 1
    assert 0.05 < probe.us < 1000
    assert probe.spread_us >= 0


def test_the_probe_leaves_the_global_random_numbers_alone():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    probes.read_bandwidth("cpu", 0)
    assert torch.equal(torch.rand(1), expected)


def test_without_triton_its_kernels_are_left_out_and_the_record_says_so(buffer, block, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "decodegap.probe_kernels", raising=False)
    readers, note = probes.triton_readers(buffer, block)
    assert readers == []
    assert note == " (Triton not usable: ModuleNotFoundError)"


def run_with_triton(code, **env):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton (it comes with a CUDA build of torch)")
    path = os.environ | {"PYTHONPATH": str(ROOT / "artifact")} | env
    done = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_triton_kernels_read_every_word_as_its_interpreter_shows():
    code = """
from decodegap import probes
from decodegap.probe_kernels import TILINGS, sum_slabs
from decodegap.errors import WrongResultError
from dataclasses import replace
block = probes._random_block("cpu")[: 2 ** 17]
buffer = block.repeat(2)
readers, note = probes.triton_readers(buffer, block)
assert len(readers) == len(TILINGS), note
for reader, tiling in zip(readers, TILINGS):
    probes.check(reader)
    words = buffer.view(probes.torch.int32)
    short = replace(reader, read=lambda: sum_slabs(words, reader.sums[:-1], tiling))
    try:
        probes.check(short)
    except WrongResultError:
        print("caught")
"""
    assert run_with_triton(code, TRITON_INTERPRET="1").split() == ["caught"] * 5


def test_the_triton_kernels_compile_to_wide_loads_without_a_gpu(tmp_path):
    code = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from decodegap.probe_kernels import TILINGS, _sum_slabs
for capability in (80, 89, 90):
    for tiling in TILINGS:
        source = ASTSource(
            fn=_sum_slabs,
            signature={"words": "*i32", "sums": "*i32", "slab": "constexpr", "width": "constexpr"},
            constexprs={"slab": tiling.slab_bytes // 4, "width": tiling.tile},
            attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
        )
        options = {"num_warps": tiling.warps}
        ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]
        loads = re.findall(r"ld\\.global\\S*", ptx)
        wide = [load for load in loads if "evict_first" in load and ".v4.b32" in load]
        print(len(loads) == len(wide) == tiling.slab_bytes // (16 * 32 * tiling.warps))
"""
    assert set(run_with_triton(code, TRITON_CACHE_DIR=str(tmp_path)).split()) == {"True"}


@pytest.mark.gpu
def test_a_gpu_reads_near_its_peak():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from decodegap import gpus

    peak = gpus.identify(gpus.detect()[0]).peak_gb_s
    probes.read_bandwidth("cuda", 0)  # compiles
    start = time.perf_counter()
    probe = probes.read_bandwidth("cuda", 0)
    assert time.perf_counter() - start < 2
    assert "not usable" not in probe.kernel
    assert peak is None or 0.8 < probe.gb_s / peak <= 1.0, probe
    assert 1 < probes.dispatch_cost("cuda").us < 100
