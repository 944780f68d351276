"""How fast a path's projections are one by one, and how exact: `python -m decodegap.quant_bench` prints a table."""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from transformers import PreTrainedModel

from decodegap import decode, models, quant_catalogue, quant_paths
from decodegap.errors import DecodeGapError
from decodegap.models import Model
from decodegap.quant_catalogue import QuantPath
from decodegap.quant_paths import QuantLinear
from decodegap.reference import relative_error
from decodegap.schema import Projection

BEYOND_CACHE = 4  # times the last-level cache that a round reads, so that no weight is still there when it is due
ROUNDS = 5
ROUND_MS = 20.0  # each round repeats what it times to last about so long
CHECKED_LAYERS = 1  # whose projections are compared with their dequantised weights; all hold the same kind of codes
ROWS_AT_A_TIME = 4096  # outputs of a reference product in fp64: 0.6 GB for the widest input, 18,944
SEED = 7


def projections(net: PreTrainedModel, path: QuantPath, device: str) -> list[Projection]:
    """Time and errors of each kind of projection of a converted `net` (of its dense ones, for a baseline).

    All layers' modules of a kind run in turn, from one CUDA graph on a GPU, and copies of them where together they
    would fit the cache, so that weights come from memory as in a step. `us` is that of one module with all it
    launches, `gb_s` its packed bytes over that.
    """
    kinds: dict[str, list[torch.nn.Module]] = {}
    for kind, _, _, module in quant_paths.projections(net):
        kinds.setdefault(kind, []).append(module)
    per_layer = {kind: len(modules) // net.config.num_hidden_layers for kind, modules in kinds.items()}
    with torch.inference_mode():
        return [
            _measured(path, kind, modules, device=device, dtype=net.dtype, checked=per_layer[kind] * CHECKED_LAYERS)
            for kind, modules in kinds.items()
        ]


def _measured(
    path: QuantPath,
    kind: str,
    modules: list[torch.nn.Module],
    *,
    device: str,
    dtype: torch.dtype,
    checked: int,
) -> Projection:
    first = modules[0]
    rows, columns = int(first.out_features), int(first.in_features)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(1, 1, columns, generator=generator).to(device, dtype)
    n_bytes = bytes_of(first)
    errors = [errors_of(module, x) for module in modules[:checked]]
    error, dense_error = max(errors, key=lambda pair: pair[0])
    turns = [*modules, *copies(path, first, modules, dtype, device)]
    us = (_graph_us if device.startswith("cuda") else _loop_us)(turns, x)
    return Projection(
        path=path.slug,
        kind=kind,
        rows=rows,
        columns=columns,
        n_bytes=n_bytes,
        us=us,
        gb_s=n_bytes / us / 1e3,
        error=error,
        dense_error=dense_error,
    )


def bytes_of(module: torch.nn.Module) -> int:
    """Bytes of the weight of a quantised or a dense linear module, as held."""
    return module.packed_bytes if isinstance(module, QuantLinear) else module.get_parameter("weight").nbytes


def errors_of(module: torch.nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Relative L2 errors of the module's output for `x` `[1, 1, in]`, and of a dense product in `x`'s dtype.

    Both against the module's own weights, dequantised, multiplied in fp64.
    """
    weight = module.dequantised() if isinstance(module, QuantLinear) else module.get_parameter("weight")  # [out, in]
    exact = torch.cat([x.double() @ part.double().T for part in weight.split(ROWS_AT_A_TIME)], dim=-1)
    bias = module.bias
    if isinstance(bias, torch.Tensor):
        exact += bias.double()
    dense = torch.nn.functional.linear(x, weight.to(x.dtype), bias if isinstance(bias, torch.Tensor) else None)
    return relative_error(module(x), exact), relative_error(dense, exact)


def copies(
    path: QuantPath, like: torch.nn.Module, modules: Sequence[torch.nn.Module], dtype: torch.dtype, device: str
) -> list[torch.nn.Module]:
    """More modules of the shape of `like`, with random weights, so many that a round reads what no cache holds."""
    if not device.startswith("cuda"):
        return []  # a check that the code runs; a CPU's projections are nobody's result
    short = BEYOND_CACHE * torch.cuda.get_device_properties(device).L2_cache_size - len(modules) * bytes_of(like)
    rows, columns = int(like.out_features), int(like.in_features)  # type: ignore[arg-type]
    group = int(getattr(like, "group", path.group))  # a checkpoint has its own
    make = quant_paths.maker(path, device, largest=rows * columns, group=group)
    made: list[torch.nn.Module] = []
    for _ in range(max(0, -(-short // bytes_of(like)))):
        linear = torch.nn.Linear(columns, rows, bias=isinstance(like.bias, torch.Tensor), device=device, dtype=dtype)
        linear.requires_grad_(requires_grad=False)
        made.append(make(linear) if make else linear)
    return made


def _graph_us(modules: Sequence[torch.nn.Module], x: torch.Tensor) -> float:
    """Microseconds a module: replays of one graph that runs all of them, between device events."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for module in modules:  # each once: libraries set themselves up for a shape when they first see it
            module(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for module in modules:
            module(x)
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(repeats: int) -> float:
        before.record()
        for _ in range(repeats):
            graph.replay()
        after.record()
        torch.cuda.synchronize()
        total_ms: float = before.elapsed_time(after)
        return total_ms / repeats

    return _median_us(timed, len(modules))


def _loop_us(modules: Sequence[torch.nn.Module], x: torch.Tensor) -> float:
    """Microseconds a module, one after the other on the host."""

    def timed(repeats: int) -> float:
        began = perf_counter()
        for _ in range(repeats):
            for module in modules:
                module(x)
        return (perf_counter() - began) * 1e3 / repeats

    return _median_us(timed, len(modules))


def _median_us(timed: Callable[[int], float], modules: int) -> float:
    """The median of some rounds; `timed` gives milliseconds a repeat over so many."""
    repeats = max(1, round(ROUND_MS / max(timed(1), 1e-3)))
    return statistics.median(timed(repeats) for _ in range(ROUNDS)) * 1e3 / modules


# --- the command -----------------------------------------------------------------------------------------------------


def built(model: Model, path: QuantPath, device: str, layers: int | None) -> PreTrainedModel:
    """`model` with synthetic weights in the path's dtype on `device`, cut to so many layers."""
    config = model.config | ({"num_hidden_layers": layers} if layers else {})
    dtype = getattr(torch, path.dtype_on("cpu" if device == "cpu" else "gpu"))
    return decode.build(
        replace(model, config=config), weights="synthetic", weights_dir=None, device=device, dtype=dtype, seed=SEED
    )


def lines(model: Model, paths: Sequence[QuantPath], device: str, layers: int | None) -> Iterator[str]:
    """One line a kind of projection, path after path; a path that cannot run says why and the others go on."""
    yield f"{'path':<15} {'kind':<8} {'shape':>14} {'MB':>8} {'us':>8} {'GB/s':>7} {'error':>9} {'dense':>9}"
    for path in paths:
        reason, rows = "", list[Projection]()
        try:
            rows = _of_path(model, path, device, layers)
        except (DecodeGapError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
        gc.collect()  # a model refers to itself, and the next one needs its memory
        if reason:
            yield f"{path.slug:<15} {reason}"
        for row in rows:
            yield (
                f"{path.slug:<15} {row.kind:<8} {f'{row.rows} x {row.columns}':>14} {row.n_bytes / 1e6:>8.2f} "
                f"{row.us:>8.2f} {row.gb_s:>7.0f} {row.error:>9.1e} {row.dense_error:>9.1e}"
            )


def _of_path(model: Model, path: QuantPath, device: str, layers: int | None) -> list[Projection]:
    net = built(model, path, device, layers)
    quant_paths.convert(net, path, device)
    return projections(net, path, device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table for one model, on the GPU if there is one; 2 for a model that nobody knows."""
    parser = argparse.ArgumentParser(prog="python -m decodegap.quant_bench", description=__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--paths", nargs="*", choices=list(quant_catalogue.PATHS))
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    here = [path.slug for path in quant_catalogue.on("gpu" if device == "cuda" else "cpu")]
    chosen = [quant_catalogue.PATHS[slug] for slug in options.paths or here]
    try:
        for line in lines(models.lookup(options.model), chosen, device, options.layers):
            print(line, flush=True)
    except DecodeGapError as error:
        print(f"decode-gap: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
