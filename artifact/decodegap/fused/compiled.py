"""What the compiler makes of the kernels: compiled in parallel, with or without a GPU, and asked what they take."""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from decodegap.fused.launches import POINTERS, Kernel, kernels_of
from decodegap.fused.shape import Shape
from decodegap.fused.tiles import Tiles

USAGE = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True)
class Built:
    """One kernel as compiled: registers a thread, bytes a thread on the stack (0 unless it spills), shared memory."""

    kernel: Kernel
    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    error: str | None = None


def compile_only(
    shape: Shape, tiles: Iterable[Tiles], *, capacity: int, pdl: bool, capability: int, workers: int
) -> list[Built]:
    """Compile every kernel that these tiles need into Triton's cache, `workers` processes at once.

    `capability` is 90 for compute capability 9.0. A later launch with the same constants finds them there. A kernel
    that cannot be compiled has its `error` in one line; the others are not disturbed.
    """
    wanted: dict[tuple[object, ...], tuple[Kernel, bool]] = {}
    for each in tiles:
        for kernel in kernels_of(shape, each, capacity=capacity, pdl=pdl).values():
            for early in {pdl and kernel.name != "embed", pdl and kernel.name not in ("embed", "qkv")}:
                wanted[kernel.name, *kernel.constants.items(), kernel.warps, kernel.maxnreg, early] = kernel, early
    jobs = [(kernel, early, capability) for kernel, early in wanted.values()]
    if workers == 1:
        return [build(*job) for job in jobs]
    context = get_context("forkserver")  # a fork of this process would take its CUDA context along
    context.set_forkserver_preload(["decodegap.fused.kernels"])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(build, *zip(*jobs, strict=True)))


def build(kernel: Kernel, early: bool, capability: int) -> Built:
    """Compile one kernel for a compute capability, as a launch with programmatic launch on (`early`) or off would."""
    try:
        made = compiled(kernel, early=early, capability=capability)
        registers, stack = usage(made.asm["cubin"])
    except Exception as error:  # noqa: BLE001  (whatever the compiler or the assembler throws is this kernel's result)
        return Built(kernel, error=f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}")
    return Built(kernel, registers, stack, made.metadata.shared)


def compiled(kernel: Kernel, *, early: bool, capability: int) -> Any:
    """The compiled kernel, from Triton's cache if it is there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from decodegap.fused import kernels

    function = kernels.FUNCTIONS[kernel.function]
    names: list[str] = function.arg_names
    pointers = [name for name in names if name not in kernel.constants]
    source = ASTSource(
        fn=function,
        signature={name: POINTERS[name] if name in pointers else "constexpr" for name in names},
        constexprs={(names.index(name),): value for name, value in kernel.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=kernel.options(pdl=early))


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and stack bytes a thread of the one kernel in `cubin`.

    Raises `ValueError` if Triton's `cuobjdump` does not say.
    """
    found = USAGE.search(disassembled(cubin, "-res-usage"))
    if found is None:
        raise ValueError("cuobjdump says nothing of registers")
    return int(found[1]), int(found[2])


def disassembled(cubin: bytes, *options: str) -> str:
    """What Triton's own `cuobjdump` prints of `cubin`."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([str(tool), *options, file.name], capture_output=True, text=True, check=True).stdout
