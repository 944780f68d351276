"""Where the step of a quantised path goes: the anatomy of any step, with its packed bytes and its products apart."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from decodegap import anatomy, ledger
from decodegap.models import Model
from decodegap.quant_catalogue import QuantPath
from decodegap.schema import Anatomy, Cell, Quantised, Series
from decodegap.trace import Trace

if TYPE_CHECKING:
    from decodegap.arms import Step

TWIN_STEPS = 1  # what a replayed kernel's operator is looked up in; its times are not used


def measure(
    prepared: Sequence[tuple[Series, "Step"]],
    twin: "Step | None",
    cell: Cell,
    *,
    model: Model,
    path: QuantPath,
    held: Quantised,
    device: str,
    read_gb_s: float,
    trace_dir: Path | None = None,
) -> list[Anatomy]:
    """The anatomy of each timed series of a session, in order; `twin` is what a replayed one was captured from.

    As `anatomy.measure` otherwise. Raises `UnsupportedError` where the profiler does not work.
    """
    from decodegap import profiling

    head = int(model.config["vocab_size"]) * int(model.config["hidden_size"])
    empty = profiling.empty_kernels(device) if device.startswith("cuda") else None
    launched = None
    if twin is not None:
        launched = marked(profiling.profile_step(twin, device, TWIN_STEPS), path, head)
    found = []
    for series, step in prepared:
        keep = trace_dir / f"{cell.model}_{cell.ctx}_{series.arm}.trace.json.gz" if trace_dir else None
        seen = marked(profiling.profile_step(step, device, keep=keep), path, head)
        made = anatomy.of_trace(
            seen, series, cell, model, read_gb_s,
            empty=empty, twin=launched, replayed=step.replayed, weights=held.packed + held.kept,
        )  # fmt: skip
        found.append(shared(made, held))
    return found


def marked(seen: Trace, path: QuantPath, head_elements: int) -> Trace:
    """`seen` with the path's own kernels named as quantised products, and the output head's product named apart.

    By the kernels' names, because what launches them differs: an operator of a library, or a bare function.
    """
    wanted = path.kernels if seen.source == "device" else path.operators

    def operator(name: str, launched_by: str, elements: int) -> str:
        if any(part in name for part in wanted):
            return ledger.QUANTISED_PRODUCT
        return ledger.HEAD_PRODUCT if launched_by == "aten::linear" and elements == head_elements else launched_by

    named = (replace(each, operator=operator(each.name, each.operator, each.elements)) for each in seen.intervals)
    return replace(seen, intervals=tuple(named))


def shared(found: Anatomy, held: Quantised) -> Anatomy:
    """`found` with the weights' bytes at the products that read them: packed at the projections, kept at the head."""
    product = ledger.QUANTISED_PRODUCT if ledger.QUANTISED_PRODUCT in found.operators else "aten::linear"
    if not {product, ledger.HEAD_PRODUCT} <= set(found.operators):
        return found
    bytes_of = {product: held.packed, ledger.HEAD_PRODUCT: held.kept}
    operators = {
        name: each.model_copy(update={"bytes": bytes_of[name]}) if name in bytes_of else each
        for name, each in found.operators.items()
    }
    return found.model_copy(update={"operators": operators})
