"""A whole decode step as one list of launches, and that list captured into one CUDA graph."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

import torch

from decodegap.arms import Step
from decodegap.fused import device, kernels
from decodegap.fused.launches import Kernel, kernels_of
from decodegap.fused.layout import CODE_BITS, Loaded, Matrix
from decodegap.fused.shape import IN_LAYER, STATE_WORDS
from decodegap.fused.tiles import Tiles, check_tiles

WARMUPS = 2  # the first compiles and loads the kernels, which a capture forbids
TOKEN_MASK = 0x7FFFFFFF  # the low bits of a choice; the smaller of two tokens is the larger number


@dataclass(frozen=True)
class Launch:
    """One kernel launch with what it is given. `early` lets it start before the kernel ahead of it is complete."""

    kernel: Kernel
    given: dict[str, torch.Tensor]
    early: bool

    def __call__(self) -> None:
        """Enqueue it on the current stream."""
        function = kernels.FUNCTIONS[self.kernel.function]
        on_gpu = next(iter(self.given.values())).is_cuda
        options = self.kernel.options(pdl=self.early) if on_gpu else {}  # the interpreter has none
        function[self.kernel.grid](**self.given, **self.kernel.constants, **options)


def capture(
    loaded: Loaded,
    tiles: Tiles,
    *,
    pdl: bool,
    only: frozenset[str] | None = None,
    skip: frozenset[str] = frozenset(),
    without_wait: str | None = None,
) -> Step:
    """The step with these tiles, captured into one CUDA graph (on a CPU: launched in Triton's interpreter).

    `pdl`: kernels start while the one before still runs (compute capability 9.0 and later). `only` and `skip` name
    kernels to run alone or to leave out, which times them; the logits are nonsense then. `without_wait` as in
    `kernels_of`. Raises `BadInputError` for tiles that do not fit.
    """
    check_tiles(tiles, loaded.shape)
    built = kernels_of(loaded.shape, tiles, capacity=loaded.capacity, pdl=pdl, without_wait=without_wait)
    kept = {name: kernel for name, kernel in built.items() if (only is None or name in only) and name not in skip}
    splits = (loaded.shape.layers, loaded.shape.heads * tiles.attention.splits)
    partial = torch.full((*splits, loaded.shape.head_dim), float("nan"), device=loaded.device)
    stats = torch.full((*splits, 2), float("nan"), device=loaded.device)
    launches = list(_launches(loaded, kept, partial, stats, pdl=pdl))

    def enqueue() -> None:
        for launch in launches:
            launch()

    replay = _graph(enqueue, loaded) if loaded.device.startswith("cuda") else enqueue
    return _step(loaded, replay, [partial, stats])


def _launches(
    loaded: Loaded, kept: dict[str, Kernel], partial: torch.Tensor, stats: torch.Tensor, *, pdl: bool
) -> Iterator[Launch]:
    buffers, state = loaded.buffers, loaded.buffers.state
    in_codes = loaded.shape.bits == CODE_BITS
    gains = [gain for layer in loaded.layers for gain in (layer.first_gain, layer.second_gain)] + [loaded.gain]
    number = count()

    def launch(name: str, **given: torch.Tensor) -> Iterator[Launch]:
        if name in kept:
            # What `embed` writes must be complete before anything later starts: the position is read before a wait.
            yield Launch(kept[name], given, early=pdl and next(number) > 1)

    def prepared(at: int) -> dict[str, torch.Tensor]:
        """Where to leave what the `at`-th norm of the step needs."""
        return {"next_gain": _as_bf16(gains[at]), "scaled": buffers.scaled[at], "squares": buffers.squares[at]}

    def normed(at: int) -> dict[str, torch.Tensor]:
        """What the `at`-th norm is taken of."""
        x = buffers.scaled[at] if in_codes else buffers.hidden[at]
        return {"x": _as_words(x), "gain": gains[at], "squares": buffers.squares[at]}

    yield from launch("embed", table=loaded.embedding, hidden=buffers.hidden[0], **prepared(0), state=state)
    for index, layer in enumerate(loaded.layers):
        at = 2 * index
        before, between, after = buffers.hidden[at : at + 3]
        keys, values = loaded.cache[index]
        query, mixed, gated = (each[index] for each in (buffers.query, buffers.mixed, buffers.gated))
        seen = {"query": query, "keys": keys, "values": values, "partial": partial[index], "stats": stats[index]}
        given = {
            "qkv": {
                **_matrix(layer.qkv),
                **normed(at),
                "bias": layer.bias,
                "cos": loaded.cos,
                "sin": loaded.sin,
                "query": query,
                "keys": keys,
                "values": values,
                "state": state,
            },
            "attention": {**seen, "arrivals": buffers.arrivals[index], "out": mixed, "state": state},
            "combine": {**seen, "out": mixed, "state": state},
            "o": {**_matrix(layer.o), "x": _as_words(mixed), "residual": before, "out": between, **prepared(at + 1)},
            "gate_up": {**_matrix(layer.gate_up), **normed(at + 1), "out": gated},
            "down": {
                **_matrix(layer.down),
                "x": _as_words(gated),
                "residual": between,
                "out": after,
                **prepared(at + 2),
            },
        }
        for name in IN_LAYER:
            yield from launch(name, **given[name])
    last = _as_words(buffers.hidden[-1])
    yield from launch("lm_head", **_matrix(loaded.head), x=last, gain=loaded.gain, logits=buffers.logits, state=state)


def _matrix(matrix: Matrix) -> dict[str, torch.Tensor]:
    return {"weights": matrix.words, "scales": _as_bf16(matrix.words) if matrix.scales is None else matrix.scales}


def _as_words(vector: torch.Tensor) -> torch.Tensor:
    return vector.view(torch.int32)


def _as_bf16(vector: torch.Tensor) -> torch.Tensor:
    return vector.view(torch.bfloat16)


def _graph(enqueue: Callable[[], None], loaded: Loaded) -> Callable[[], None]:
    """`enqueue` captured; the warm-up decodes a few tokens, which `reset` takes back."""
    _reset(loaded)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            enqueue()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    return graph.replay


def _reset(loaded: Loaded) -> None:
    first = [0] * STATE_WORDS
    first[device.NEXT.value], first[device.BEST.value] = loaded.start, TOKEN_MASK - loaded.token
    first[device.NOW.value] = loaded.start  # where a kernel that is timed without `embed` shall be
    loaded.buffers.state.copy_(torch.tensor(first))
    loaded.buffers.arrivals.zero_()


def _step(loaded: Loaded, replay: Callable[[], None], scratch: list[torch.Tensor]) -> Step:
    position = loaded.start

    def run() -> None:
        nonlocal position
        if position >= loaded.capacity:
            raise ValueError(f"the cache is full: it holds {loaded.capacity} tokens")
        position += 1
        replay()

    def reset() -> None:
        nonlocal position
        position = loaded.start
        _reset(loaded)

    def set_token(value: int) -> None:
        loaded.buffers.state[device.BEST.value] = TOKEN_MASK - value

    def poison() -> None:
        loaded.buffers.poison()
        loaded.cache[:, :, :, position : position + 1] = float("nan")
        for each in scratch:
            each.fill_(float("nan"))

    reset()
    return Step(
        run=run,
        reset=reset,
        logits=lambda: loaded.buffers.logits,
        set_token=set_token,
        poison=poison,
        replayed=loaded.device.startswith("cuda"),
    )


def chosen(loaded: Loaded) -> int:
    """The token that the last step chose, which the next one decodes."""
    return TOKEN_MASK - (int(loaded.buffers.state[device.BEST.value]) & TOKEN_MASK)
