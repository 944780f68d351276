"""Where the study's numbers disagree with one another: each recomputed from published.json, none smoothed over."""

from dataclasses import dataclass, field

from decodegap import floor, gpus, models, quant_catalogue
from decodegap.errors import BadInputError
from decodegap.published import DTYPE, Published, Quantity

QWEN, CTX = "qwen2.5-7b", 2048


@dataclass(frozen=True)
class Finding:
    """One disagreement (or agreement) among published numbers: what it is, and the numbers by name."""

    id: str
    text: str
    numbers: dict[str, float] = field(default_factory=dict)


def findings(published: Published) -> list[Finding]:
    """Every tension, in the order a reader meets them. Raises `BadInputError` where a number it needs is gone."""
    return [_headline(published), _counted_bytes(), _what_graphs_leave(published), _l4_baselines(published),
            _profiler(published), _quantised(published), _out_of_memory(published)]  # fmt: skip


def _headline(published: Published) -> Finding:
    implied = published.implied_step_ms("h100", QWEN, CTX) or 0.0
    quoted = _number(published, "step_ms", "h100", arm="eager")
    fraction = _number(published, "floor_fraction", "h100")
    from_quoted = _floor_ms("h100") / quoted
    return Finding(
        "h100-headline",
        f"The H100 headline cell takes {implied:.2f} ms by its fraction ({fraction:.3f}) but {quoted:.2f} ms in the "
        f"A/B, whose fraction would be {from_quoted:.3f}: two steps for one cell, {implied / quoted - 1:.0%} apart.",
        {"implied_ms": implied, "quoted_ms": quoted, "fraction": fraction, "fraction_from_quoted": from_quoted},
    )


def _counted_bytes() -> Finding:
    model = models.lookup(QWEN)
    table = (model.weight_bytes(DTYPE) - model.streamed_bytes(DTYPE)) / 1e9
    everything = (model.weight_bytes(DTYPE) + model.kv_bytes(CTX, DTYPE)) / 1e9
    blocks = everything - 2 * table
    return Finding(
        "counted-bytes",
        f"Counting all weights and the KV cache, a Qwen2.5-7B step moves {everything:.2f} GB; counting the decoder's "
        f"blocks alone (neither embedding nor output head) {blocks:.2f} GB, and one figure of the study does so. A "
        f"step reads the output head and not the embedding: {everything - table:.2f} GB.",
        {"everything_gb": everything, "blocks_gb": blocks, "streamed_gb": everything - table},
    )


def _what_graphs_leave(published: Published) -> Finding:
    eager = _number(published, "step_ms", "h100", arm="eager")
    graph = _number(published, "step_ms", "h100", arm="cuda_graph")
    saved, least = _number(published, "graph_saving_ms", "h100"), _floor_ms("h100")
    implied = published.implied_step_ms("h100", QWEN, CTX) or 0.0
    return Finding(
        "what-graphs-leave",
        f"On the H100 a graph removes {saved:.2f} ms of a step that stands {eager - least:.1f} ms (by the A/B) or "
        f"{implied - least:.1f} ms (by the fraction) above its floor of {least:.2f} ms: launching alone explains "
        f"{saved / (eager - least):.0%} or {saved / (implied - least):.0%} of the gap, and most of it is left.",
        {"saved_ms": saved, "gap_ms": eager - least, "implied_gap_ms": implied - least, "left_ms": graph - least,
         "share": saved / (eager - least), "implied_share": saved / (implied - least)},
    )  # fmt: skip


def _l4_baselines(published: Published) -> Finding:
    bf16, table8 = _number(published, "step_ms", "l4", arm="bf16"), _number(published, "step_ms_table8", "l4")
    implied = published.implied_step_ms("l4", QWEN, CTX) or 0.0
    every = (bf16, table8, implied)
    return Finding(
        "l4-baseline",
        f"The L4 baseline is {bf16:.2f} ms beside the quantised paths, {table8:.2f} ms in a table, and {implied:.2f} "
        f"ms by its fraction: {max(every) / min(every) - 1:.1%} between the smallest and the largest.",
        {"bf16_ms": bf16, "table_ms": table8, "implied_ms": implied, "spread": max(every) / min(every) - 1},
    )


def _profiler(published: Published) -> Finding:
    plain, profiled = _number(published, "step_ms_table8", "h100"), _number(published, "step_ms_profiled", "h100")
    slow = _number(published, "step_ms_profiled", "l4") / _number(published, "step_ms_table8", "l4")
    return Finding(
        "profiler",
        f"Under the profiler the H100 step takes {profiled:.2f} ms instead of {plain:.2f} ({profiled / plain:.1f} "
        f"times), the L4's {slow:.2f} times: a profiled step says little about the time of a fast card's step.",
        {"h100_factor": profiled / plain, "l4_factor": slow},
    )


def _quantised(published: Published) -> Finding:
    slow = _number(published, "step_ms", "l4", arm="bf16")
    fast = _number(published, "step_ms", "l4", arm="gptq-exllamav2")
    path, model = quant_catalogue.PATHS["gptq-exllamav2"], models.lookup(QWEN)
    peak = gpus.known("l4").peak_gb_s or 0.0
    read = floor.quantised_bytes(model.config, floor.ELEMENT_BYTES[DTYPE], path.bits) + model.kv_bytes(CTX, DTYPE)
    table = model.weight_bytes(DTYPE) - model.streamed_bytes(DTYPE)
    streamed, everything = floor.floor_ms(read, peak), floor.floor_ms(read + table, peak)
    before = floor.floor_ms(model.streamed_bytes(DTYPE) + model.kv_bytes(CTX, DTYPE), peak)
    return Finding(
        "quantised-floor",
        f"The L4's GPTQ step of {fast:.2f} ms is shorter than a floor that counts every weight held, {everything:.1f} "
        f"ms, which no step can be; without the embedding the floor is {streamed:.1f} ms. It gains {slow / fast:.2f} "
        f"times where its bytes promise {before / streamed:.2f}, because the bf16 step reaches {before / slow:.0%} of "
        f"its own streamed floor and this one {streamed / fast:.0%}.",
        {"everything_ms": everything, "streamed_ms": streamed, "gain": slow / fast, "promised": before / streamed,
         "bf16_share": before / slow, "share": streamed / fast},
    )  # fmt: skip


def _out_of_memory(published: Published) -> Finding:
    if not published.excluded("l4", QWEN, 8192):
        raise BadInputError("published.json does not list the L4 cell at ctx 8192 as excluded; restore it with git")
    model, card = models.lookup(QWEN), gpus.known("l4")
    needed = (model.weight_bytes(DTYPE) + model.kv_bytes(8192, DTYPE)) / 2**30
    memory = (card.memory_mib or 0) / 1024
    return Finding(
        "l4-out-of-memory",
        f"The L4 cell at ctx 8192 was lost to out-of-memory, though weights and KV cache fill {needed:.1f} GiB of its "
        f"{memory:.1f} GiB: the step itself fits, so what did not is something else, such as a prefill in one piece.",
        {"needed_gib": needed, "memory_gib": memory},
    )


def _number(published: Published, quantity: Quantity, gpu: str, arm: str | None = None) -> float:
    value = published.find(quantity, gpu=gpu, model=QWEN, ctx=CTX, arm=arm)
    if value is None or value.value is None:
        raise BadInputError(f"published.json has no {quantity} of {gpu} at ctx {CTX}; restore it with git")
    return value.value


def _floor_ms(gpu: str) -> float:
    model = models.lookup(QWEN)
    n_bytes = model.weight_bytes(DTYPE) + model.kv_bytes(CTX, DTYPE)
    return floor.floor_ms(n_bytes, gpus.known(gpu).peak_gb_s or 0.0)
