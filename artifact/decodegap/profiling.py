"""How a step is profiled, apart from the timed ones, and what a graph of empty kernels costs on this card."""

import gzip
import json
import statistics
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from decodegap import records, scratch, trace
from decodegap.arms import Step
from decodegap.decode import synchronize
from decodegap.errors import UnsupportedError
from decodegap.schema import EmptyKernels
from decodegap.trace import Trace

STEPS = 5
EMPTY_KERNELS = 1000
REPLAYS = 20


def profile_step(step: Step, device: str, steps: int = STEPS, keep: Path | None = None) -> Trace:
    """Run `step` so many times under the profiler, each to the end of a synchronisation, and return what ran.

    Starts from the arm's own start and returns to it. `keep` is where a cleaned Chrome trace (gzip) is written for
    Perfetto. Raises `UnsupportedError` if the profiler saw nothing on the device.
    """
    step.reset()
    step.run()  # the cache's first growth and any lazy set-up are not part of a step
    synchronize(device)

    def one() -> None:
        step.run()
        synchronize(device)

    data = _chrome(one, device, steps, shapes=True)
    step.reset()
    if keep is not None:
        text = json.dumps(trace.anonymous(data), separators=(",", ":"))
        records.write_atomically(keep, gzip.compress(text.encode(), mtime=0))
    return _read(data, device)


@cache
def empty_kernels(device: str) -> EmptyKernels:
    """What one-element kernels cost in a captured graph of a thousand of them (us each); measured once a process.

    `period_us`: device events around back-to-back replays, unprofiled, over all kernels. `kernel_us`: the median
    duration that the profiler gives one of them in a replay. `between_us`: the median time from the end of one to
    the start of the next, on the profiler's clock.
    """
    tiny = torch.zeros(1, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            tiny.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(EMPTY_KERNELS):
            tiny.add_(1)
    for _ in range(3):
        graph.replay()
    synchronize(device)
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(REPLAYS):
        graph.replay()
    ended.record()
    synchronize(device)
    period_us = began.elapsed_time(ended) * 1e3 / REPLAYS / EMPTY_KERNELS

    def one() -> None:
        graph.replay()
        synchronize(device)

    seen = _read(_chrome(one, device, 2, shapes=False), device).intervals
    kernels = [each for each in seen if each.step == 1]
    if len(kernels) < EMPTY_KERNELS:
        raise UnsupportedError(f"the profiler shows {len(kernels)} of the {EMPTY_KERNELS} kernels of a replayed graph")
    return EmptyKernels(
        period_us=period_us,
        kernel_us=statistics.median(each.end_us - each.start_us for each in kernels),
        between_us=statistics.median(b.start_us - a.end_us for a, b in pairwise(kernels)),
    )


def _chrome(one: Callable[[], None], device: str, steps: int, *, shapes: bool) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile, record_function

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.startswith("cuda") else [])
    with profile(activities=activities, record_shapes=shapes) as seen:
        for _ in range(steps):
            with record_function(trace.STEP_MARK):
                one()
    with scratch.folder() as folder:
        path = folder / "trace.json"
        seen.export_chrome_trace(str(path))
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    return data


def _read(data: dict[str, Any], device: str) -> Trace:
    try:
        return trace.from_chrome(data, "device" if device.startswith("cuda") else "host")
    except ValueError as error:
        raise UnsupportedError(f"the profiler gives no usable trace here: {error}") from None
