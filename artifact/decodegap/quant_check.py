"""Whether each quantised path computes what its packed weights say: each projection, and the whole model.

The truth is the path's own weights, dequantised and multiplied in higher precision: this finds a wrong packing, zero or
scale, and says nothing of what rounding to 4 bits does to a model. The yardstick is a dense product with those weights
in the path's own type.
"""

import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import DynamicCache

from decodegap import arms, cells, decode, plan, quant_bench, quant_catalogue, quant_paths, reference
from decodegap.arms import Setup
from decodegap.errors import UnsupportedError
from decodegap.plan import Task
from decodegap.quant_catalogue import PATHS, QuantPath
from decodegap.schema import Check, Dtype, Projection

if TYPE_CHECKING:
    from decodegap.session import Findings

STOPPED = "its check stopped: "  # how a reason begins if the path's kernels failed, not if they are not here
# How many times the dense product's error a path may have. Kernels that add up in fp32 round as it does, give or take
# the order; one that adds up in fp16, by atomics, rounds at every partial sum. A shifted nibble, a zero point off by
# one or a neighbour's scale is wrong by a tenth and more, which is hundreds of times the dense error.
FP32_MULTIPLE, FP16_MULTIPLE = 4.0, 16.0


def measure(task: Task, setup: Setup, found: "Findings") -> None:
    """Check every path that may run here; what does not run, or stops, is left in `found.refused` with its reason.

    The session itself is `ok`: it has done what it is for. Paths of one dtype follow one another, over one cache.
    """
    gpu = task.cell.gpu
    here = quant_catalogue.on(gpu)
    runnable = []
    for path in (path for path in PATHS.values() if path in here or not path.is_baseline):
        try:
            quant_paths.require(path, setup.device)
            quant_paths.require_weights(path, setup.net)
        except UnsupportedError as error:
            found.refused[path.slug] = str(error)
        else:
            runnable.append(path)
    runnable.sort(key=lambda path: path.dtype_on(gpu) != task.cell.dtype)
    nets = _Nets(task, setup)
    for path in runnable:
        try:
            _check(task, path, nets.setup(path.dtype_on(gpu)), found)
        except UnsupportedError as error:
            found.refused[path.slug] = str(error)
        except torch.OutOfMemoryError:
            found.refused[path.slug] = "its check did not fit into the device's memory"
        except RuntimeError as error:
            found.refused[path.slug] = STOPPED + " ".join(str(error).split())[:200]
            if decode.is_lost(setup.device):
                found.flags.append(f"the paths after {path.slug} were not checked: it took the device's context along")
                break
    order = list(PATHS)
    found.checks.sort(key=lambda check: order.index(check.arm))
    found.projections.sort(key=lambda each: order.index(each.path))


def failures(path: QuantPath, checks: Sequence[Check], projections: Sequence[Projection]) -> list[str]:
    """Why `path` failed its check, one phrase a reason; empty if it passed, or was not checked."""
    multiple = multiple_of(path)
    found = [
        f"projection {each.kind}: relative error {each.error:.3g}, more than {multiple:g} x the {each.dense_error:.3g} "
        f"of a dense product"
        for each in projections
        if each.path == path.slug and each.error > multiple * max(each.dense_error, reference.ROUNDING)
    ]
    return found + [
        f"whole model: {reference.failure(each)}"
        for each in checks
        if each.arm == path.slug and not each.passed and not (found and reference.holds(each))
    ]


def multiple_of(path: QuantPath) -> float:
    """How many times a dense product's error this path may have."""
    return FP16_MULTIPLE if path.sums_in_fp16 else FP32_MULTIPLE


def sharing(cache: DynamicCache) -> DynamicCache:
    """A cache of its own over the same K and V, so that cutting or growing it leaves the other as it is."""
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    return own


class _Nets:
    """The one net that is loaded at a time, fresh for each path, and the cache of each dtype, made once."""

    def __init__(self, task: Task, setup: Setup) -> None:
        self.task, self.device = task, setup.device
        self.loaded: Setup | None = setup
        self.past = {task.cell.dtype: setup}

    def setup(self, dtype: Dtype) -> Setup:
        """An unquantised net in `dtype` whose cache holds `ctx - 1` tokens, with the token that comes next."""
        fresh = self.loaded
        if fresh is None or fresh is not self.past.get(dtype):
            task = replace(self.task, cell=self.task.cell.model_copy(update={"dtype": dtype}))
            for each in self.past.values():
                _strip(each.net)
            gc.collect()
            net = arms.built(task, self.device)
            if dtype not in self.past:
                self.past[dtype] = arms.prefilled(net, task, self.device)
            fresh = replace(self.past[dtype], net=net)
            self.past[dtype] = fresh
        self.loaded = None
        return fresh


def _check(task: Task, path: QuantPath, setup: Setup, found: "Findings") -> None:
    if not path.is_baseline:
        quant_paths.convert(setup.net, path, setup.device)
    token, ctx = setup.token, task.cell.ctx
    truth = reference.reference_logits(setup.net, setup.cache, token, ctx)
    with decode.backends(arms.SDPA_BACKENDS[plan.sdpa_on(task.cell.gpu, path.slug)]):
        logits = cells.logits_of(arms.eager(_past(setup, ctx - 1)))
        found.projections += quant_bench.projections(setup.net, path, setup.device)
        _densify(setup.net)
        dense = logits if path.is_baseline else cells.logits_of(arms.eager(_past(setup, ctx - 1)))
    result = reference.check(path.slug, logits, dense, truth, multiple=multiple_of(path))
    if reasons := failures(path, [result], found.projections):
        result = result.model_copy(update={"passed": False})
        found.flags += [f"{path.slug} failed its check: {reason}" for reason in reasons]
    found.checks.append(result)


def _past(setup: Setup, ctx: int) -> Setup:
    """`setup` at its first `ctx` tokens, in a cache of its own over the same K and V."""
    cache = sharing(setup.cache)
    decode.crop(cache, ctx)
    return replace(setup, cache=cache, ctx=ctx)


def _densify(net: Any) -> None:
    """Put a dense layer with its dequantised weights, in the net's dtype, in the place of every quantised one."""
    for _, holder, name, module in list(quant_paths.projections(net)):
        if not isinstance(module, quant_paths.QuantLinear):
            continue
        weight = module.dequantised().to(net.dtype)
        bias = module.bias
        dense = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=net.dtype)
        dense.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            dense.bias = nn.Parameter(bias.to(net.dtype), requires_grad=False)
        setattr(holder, name, dense.eval())


def _strip(net: nn.Module) -> None:
    """Let go of everything in `net`, of which others still hold the name, so that the next one fits."""
    for name, _ in list(net.named_children()):
        delattr(net, name)
