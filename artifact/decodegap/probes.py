"""What this device can do at best: how fast it reads memory, and how long the host takes to start a tiny kernel."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import psutil
import torch

from decodegap.errors import WrongResultError

MIB = 2**20
# The buffer is one random block, repeated: quick to make, and what every part must sum to is known from the block.
BLOCK_BYTES = 16 * MIB
ROW_BYTES = 16 * 1024
# Some 70 times the largest cache of a GPU (60 MB), about 1 ms of reading on an H200. Larger ones read no slower there:
# 4.59 TB/s from 4 GiB, 4.60 from 8, 4.60 from 16, and 4.60 from 8 GiB in which no block repeats; 4.51 from 1 GiB.
CUDA_BUFFER_BYTES = 4096 * MIB
CPU_BUFFER_LEAST = 256 * MIB
CACHE_MULTIPLE = 4
FREE_FRACTION = 4  # at most a quarter of the free memory
REPEATS = 5
CUDA_FINAL_S, CPU_FINAL_S = 0.2, 0.8  # time for the finalists' repeats; the screening before takes about as long
CUDA_REPEAT_S = 0.004  # back-to-back launches a repeat: enough that the events' resolution (0.5 us) is nothing
# Row sums may be off by this part of their root mean square. bf16 rounds to 2**-9 of a value, 4 sigma at most here:
# 0.008. A row of which 1 of 64 parts is left out is off by 0.125.
ROW_TOLERANCE = 0.02
DISPATCH_BATCHES, DISPATCH_LAUNCHES = 30, 100  # a batch stays well below the 1,024 launches that a stream queues


@dataclass(frozen=True)
class ReadProbe:
    """The best read rate found (GB/s, bytes read only), by which kernel, over how large a buffer."""

    gb_s: float
    kernel: str
    buffer_mib: int


@dataclass(frozen=True)
class DispatchProbe:
    """Host time to start one tiny kernel: median over batches, and the distance between their quartiles (us)."""

    us: float
    spread_us: float


@dataclass(frozen=True)
class Reader:
    """One way to read the whole buffer: `read` leaves partial sums in `sums`, which must equal `expected`."""

    name: str
    read: Callable[[], object]
    sums: torch.Tensor
    expected: torch.Tensor


def read_bandwidth(device: str, last_level_cache_bytes: int) -> ReadProbe:
    """The best rate at which `device` ("cuda" or "cpu") streams a buffer that no cache holds.

    `last_level_cache_bytes` is the host's and sizes the CPU's buffer; a GPU's is sized by its free memory. Raises
    `WrongResultError` if a kernel did not read everything.
    """
    with torch.inference_mode():
        n_blocks = _buffer_bytes(device, last_level_cache_bytes) // BLOCK_BYTES
        block = _random_block(device)
        buffer = block.repeat(n_blocks)
        readers = torch_readers(buffer, block)
        note = ""
        if device.startswith("cuda"):
            fast, note = triton_readers(buffer, block)
            readers += fast
        best, gb_s = fastest(readers, device, buffer.nbytes)
    probe = ReadProbe(round(gb_s, 2), best.name + note, buffer.nbytes // MIB)
    del buffer, block, readers, best
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
    return probe


def dispatch_cost(device: str) -> DispatchProbe:
    """Host time to enqueue a one-element kernel on `device`; on a CPU, the overhead of a one-element operator."""
    tiny = torch.zeros(1, device=device)
    costs = []
    with torch.inference_mode():
        for batch in range(DISPATCH_BATCHES + 3):
            _synchronize(device)
            start = perf_counter()
            for _ in range(DISPATCH_LAUNCHES):
                tiny.add_(1)
            if batch >= 3:  # the first ones load the kernel and wake the clocks
                costs.append((perf_counter() - start) / DISPATCH_LAUNCHES * 1e6)
        _synchronize(device)
    low, middle, high = statistics.quantiles(costs, n=4)
    return DispatchProbe(round(middle, 3), round(high - low, 3))


def torch_readers(buffer: torch.Tensor, block: torch.Tensor) -> list[Reader]:
    """A reduction and a matrix-vector product (cuBLAS, MKL) over `buffer`, which is `block` repeated."""
    width = ROW_BYTES // buffer.element_size()
    rows = buffer.view(-1, width)  # [rows, width]
    expected = block.view(-1, width).double().sum(dim=1).repeat(buffer.numel() // block.numel())  # [rows]
    ones = torch.ones(width, dtype=buffer.dtype, device=buffer.device)
    by_sum = torch.empty(len(rows), dtype=torch.float32, device=buffer.device)
    by_mv = torch.empty(len(rows), dtype=buffer.dtype, device=buffer.device)
    return [
        Reader("torch.sum", lambda: torch.sum(rows, 1, dtype=torch.float32, out=by_sum), by_sum, expected),
        Reader("torch.mv", lambda: torch.mv(rows, ones, out=by_mv), by_mv, expected),
    ]


def triton_readers(buffer: torch.Tensor, block: torch.Tensor) -> tuple[list[Reader], str]:
    """The Triton kernels over `buffer`, compiled; without a working Triton none, and a note that says so."""
    readers = []
    try:
        from decodegap.probe_kernels import TILINGS, Tiling, sum_slabs

        words = buffer.view(torch.int32)

        def reader(tiling: Tiling) -> Reader:
            slabs = block.view(torch.int32).view(-1, tiling.slab_bytes // 4)
            # The sum in 64 bits, cut to its low 32: what a sum that wraps gives.
            expected = slabs.sum(dim=1, dtype=torch.int64).to(torch.int32).repeat(buffer.nbytes // block.nbytes)
            sums = torch.empty_like(expected)
            return Reader(tiling.name, lambda: sum_slabs(words, sums, tiling), sums, expected)

        for tiling in TILINGS:
            readers.append(reader(tiling))
            readers[-1].read()
    except Exception as error:  # noqa: BLE001 - no Triton, no compiler, a version that cannot compile this: torch's kernels remain
        return [], f" (Triton not usable: {type(error).__name__})"
    return readers, ""


def fastest(readers: Sequence[Reader], device: str, n_bytes: int) -> tuple[Reader, float]:
    """The fastest of `readers` and its rate in GB/s; raise `WrongResultError` if any of them skips data.

    Each is checked and timed once; the best are then timed again, as many as the time allows, median of 5 or more.
    """
    for reader in readers:
        check(reader)
    screened = sorted(((_seconds(reader, device, 1), i) for i, reader in enumerate(readers)))
    budget_s = CUDA_FINAL_S if device.startswith("cuda") else CPU_FINAL_S
    finals: list[tuple[float, Reader]] = []
    for single_s, i in screened:
        launches = max(1, round(CUDA_REPEAT_S / single_s)) if device.startswith("cuda") else 1
        budget_s -= REPEATS * launches * single_s
        if finals and budget_s < 0:
            break
        times = [_seconds(readers[i], device, launches) / launches for _ in range(REPEATS)]
        finals.append((statistics.median(times), readers[i]))
    seconds, best = min(finals, key=lambda final: final[0])
    check(best)
    return best, n_bytes / seconds / 1e9


def check(reader: Reader) -> None:
    """Read once and compare every partial sum with what it must be; raise `WrongResultError` on the first wrong one."""
    reader.sums.zero_()  # what is not written again must not pass for a result
    reader.read()
    if reader.expected.dtype == torch.int32:
        right = torch.equal(reader.sums, reader.expected)
    else:
        error = (reader.sums.double() - reader.expected).abs().max()
        right = bool(error <= ROW_TOLERANCE * reader.expected.square().mean().sqrt())
    if not right:
        raise WrongResultError(
            f"read bandwidth: {reader.name} did not give the sums of the data it read; memory or kernel is faulty"
        )


def _buffer_bytes(device: str, last_level_cache_bytes: int) -> int:
    if device.startswith("cuda"):
        size = min(CUDA_BUFFER_BYTES, torch.cuda.mem_get_info()[0] // FREE_FRACTION)
    else:
        most = psutil.virtual_memory().available // FREE_FRACTION
        size = max(CPU_BUFFER_LEAST, min(CACHE_MULTIPLE * last_level_cache_bytes, most))
    return max(size // BLOCK_BYTES, 1) * BLOCK_BYTES


def _random_block(device: str) -> torch.Tensor:
    """Normal values: bf16 as in the models on a GPU, fp32 on a CPU. Zero mean, so that a part left out changes sums."""
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    numbers = torch.Generator(device=device).manual_seed(0)  # leaves the global generator alone
    return torch.randn(BLOCK_BYTES // dtype.itemsize, generator=numbers, device=device, dtype=dtype)


def _seconds(reader: Reader, device: str, launches: int) -> float:
    if device.startswith("cuda"):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(launches):
            reader.read()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begun = perf_counter()
    for _ in range(launches):
        reader.read()
    return perf_counter() - begun


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
