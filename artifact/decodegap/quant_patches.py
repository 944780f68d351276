"""What is changed in a copy of the kernels' sources before they are compiled, and which of them are.

Every change counts what it changed and refuses sources in which it finds another number of places: other sources are
other kernels.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from decodegap.errors import UnsupportedError

GROUP_TILES = {32: 2, 64: 4, 128: 8}  # a group of inputs in tiles of 16
# Marlin's thread tiles for a few rows, in its own order: tiles of outputs and of inputs, threads.
THREAD_TILES = ((8, 8, 256), (8, 4, 128), (4, 8, 128))
MARLIN_TYPES = ("kU4", "kU4B8")  # AWQ's codes with zero points, GPTQ's symmetric ones
PIPELINE = "pipe_stages"
LAUNCHES = {"q_gemm.cu": 3, "q_matrix.cu": 4}  # of ExLlamaV2, all on the legacy default stream


@dataclass(frozen=True)
class Extension:
    """A library of kernels: the folder of its sources, the files that are compiled, and what is changed first.

    `prepare` changes a copy of the folder and returns the names of files that it adds. `namespace` is where torch
    finds the operators; it is ours, so that a library that someone else built cannot be taken for this one.
    """

    name: str
    folder: str
    namespace: str
    sources: tuple[str, ...]
    prepare: Callable[[Path], tuple[str, ...]]
    cuda_flags: tuple[str, ...]


def replace(path: Path, pattern: str, by: str | Callable[[re.Match[str]], str], *, times: int) -> None:
    """Replace the pattern in a file, exactly so many times. Raises `UnsupportedError` for another number."""
    text, found = re.subn(pattern, by, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if found != times:
        raise UnsupportedError(f"{path.name}: {found} places to change, not {times}; these are other sources")
    path.write_text(text, encoding="utf-8")


def prepare_marlin(folder: Path) -> tuple[str, ...]:
    """Leave of Marlin's choice of kernels those for up to eight rows of 4-bit weights, and instantiate just them."""
    _kernel_list(folder / "gptq_marlin.cu")
    replace(folder / "marlin_torch_fp16.cpp", r"\bgptqmodel_marlin_fp16\b", "decodegap_marlin", times=2)
    added = []
    for weight in MARLIN_TYPES:
        for group, tiles in GROUP_TILES.items():
            name = f"kernel_fp16_{weight.lower()}_{group}.cu"
            lines = [
                f"template __global__ void Marlin<half, vllm::{weight}.id(), vllm::kFloat16.id(), {threads}, 1, {out}, "
                f"{inputs}, true, {PIPELINE}, {tiles}, false>(MARLIN_KERNEL_PARAMS);"
                for out, inputs, threads in THREAD_TILES
            ]
            body = "\n".join(
                [
                    '#include "kernel.h"',
                    '#include "marlin_template.h"',
                    "namespace MARLIN_NAMESPACE_NAME {",
                    *lines,
                    "}",
                ]
            )
            (folder / name).write_text(body + "\n", encoding="utf-8")
            added.append(name)
    return tuple(added)


def _kernel_list(path: Path) -> None:
    """Rewrite the list from which Marlin picks its kernel: what is not compiled must not be named there either."""
    ours = [
        f"_GET_IF(vllm::{weight}, 1, {out}, {inputs}, true, {PIPELINE}, {tiles}, {threads}, false)"
        for weight in MARLIN_TYPES
        for tiles in GROUP_TILES.values()
        for out, inputs, threads in THREAD_TILES
    ]
    listed = r"^ +(?:COMMON|BIGGROUP|NVFP4|MXFP4|MXFP8|FZP|ACT)_GET_IF\(vllm::\w+, (?:2|pipe_stages)\)\n"
    first = r"^ +COMMON_GET_IF\(vllm::kU4, pipe_stages\)\n"
    keep = "      // the kernels that are compiled\n"
    replace(path, first, keep, times=1)
    replace(path, listed, "", times=19)
    replace(path, re.escape(keep), "".join(f"      {line}\n" for line in ours), times=1)


def prepare_exllama(folder: Path) -> tuple[str, ...]:
    """Launch every ExLlamaV2 kernel on torch's current stream, so that a capture sees it."""
    prepare_exllama_stock(folder, "decodegap_exllamav2")
    for name, launches in LAUNCHES.items():
        stream = "<<<gridDim, blockDim, 0, at::cuda::getCurrentCUDAStream()>>>"
        replace(folder / "cuda" / name, r"<<<gridDim, blockDim>>>", stream, times=launches)
    replace(folder / "cuda" / "q_matrix.cu", r"\A", "#include <ATen/cuda/CUDAContext.h>\n", times=1)
    return ()


def prepare_exllama_stock(folder: Path, namespace: str = "decodegap_exllamav2_stock") -> tuple[str, ...]:
    """ExLlamaV2 as it is shipped but for its namespace; it launches where no capture looks."""
    replace(folder / "ext_gptq.cpp", r"\bgptqmodel_exllamav2\b", namespace, times=2)
    return ()


_EXLLAMA_SOURCES = ("ext_gptq.cpp", "cuda/q_matrix.cu", "cuda/q_gemm.cu")
_EXTENSIONS = (
    Extension(
        name="marlin",
        folder="marlin",
        namespace="decodegap_marlin",
        sources=("marlin_torch_fp16.cpp", "gptq_marlin_fp16.cu", "gptq_marlin_repack.cu", "awq_marlin_repack.cu"),
        prepare=prepare_marlin,
        # A kernel that one file instantiates and another launches: CUDA 13 makes such stubs private to a file.
        cuda_flags=("-O3", "-Xptxas=-O3,-dlcm=ca", "-static-global-template-stub=false"),
    ),
    Extension(
        name="exllamav2",
        folder="exllamav2",
        namespace="decodegap_exllamav2",
        sources=_EXLLAMA_SOURCES,
        prepare=prepare_exllama,
        cuda_flags=("-O2", "-Xptxas=-O2,-dlcm=ca"),
    ),
    Extension(
        name="exllamav2-stock",
        folder="exllamav2",
        namespace="decodegap_exllamav2_stock",
        sources=_EXLLAMA_SOURCES,
        prepare=prepare_exllama_stock,
        cuda_flags=("-O2", "-Xptxas=-O2,-dlcm=ca"),
    ),
)
EXTENSIONS: dict[str, Extension] = {extension.name: extension for extension in _EXTENSIONS}
DEFAULT = ("marlin", "exllamav2")  # the stock build is only there to be refused
