"""Why a quarter of the bytes does not make a quarter of the step: a path's step against its baseline's, part by part.

Analysis only, without torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodegap import launch, ledger, models, quant_catalogue, quant_results
from decodegap.launch import Kept, Where
from decodegap.quant_catalogue import GRAPH_SUFFIX, PATHS, QuantPath
from decodegap.quant_results import CODE_BITS, EAGER, EXPERIMENT, GRAPH, Checked, Line
from decodegap.schema import Anatomy, Quantised, Record

if TYPE_CHECKING:
    from decodegap.exhibits import View

NOTHING = "No quantised path has been measured here yet, so there is nothing to explain."
# What a path's step takes beyond a quarter (on a CPU, an eighth) of the baseline's, in the order of tables.
PARTS = ("bytes not reduced", "products", "added kernels", "kernels without weights", "launch and bubbles")
PER_LAYER = {"q/o": 2, "k/v": 2, "gate/up": 2, "down": 1}  # projections of each kind
SLOWED = 1.25  # a projection that takes so many times the baseline's, though it reads less, is named
LEAST_SHARE = 0.03  # smaller parts, and those below zero, are told together
SHORT_OF = {
    "bytes not reduced": "bytes that stay (output head, KV cache, scales)",
    "products": "products below the bandwidth that they need",
    "added kernels": "casts, biases and other kernels that quantising adds",
    "kernels without weights": "kernels without weights, which stay as they are",
    "launch and bubbles": "launching and bubbles",
    "residual": "not explained by any of these",
}


@dataclass(frozen=True)
class Why:
    """A path's step beside a share of the baseline's (a quarter on a GPU): where each millisecond above it goes."""

    where: Where
    path: QuantPath
    series: str  # eager or graph
    step_ms: float
    share: float
    share_ms: float  # that share of the baseline's step
    parts_ms: dict[str, float]
    residual_ms: float
    records: tuple[str, str]  # whose anatomies: the path's and the baseline's

    @property
    def above_ms(self) -> float:
        """What the step takes beyond the share: the parts and the residual together."""
        return self.step_ms - self.share_ms


def why(kept: Iterable[Kept], *, cpu: bool = False) -> list[Why]:
    """For each measured path that has a baseline's anatomy beside it: its parts, by graph where there is one."""
    found = [each for each in launch.dissected(kept, EXPERIMENT) if (each.where.gpu == "cpu") == cpu]
    by_arm = {(each.where, each.arm): each for each in found}
    made = []
    for (where, arm), each in by_arm.items():
        slug, series = _series_of(arm)
        base_arm = arm.replace(slug, quant_catalogue.baseline_on(where.gpu), 1)
        base = by_arm.get((where, base_arm))
        has_graph = (where, slug + GRAPH_SUFFIX) in by_arm
        if PATHS[slug].is_baseline or base is None or (series == EAGER and has_graph):
            continue
        bits = PATHS[quant_catalogue.baseline_on(where.gpu)].bits
        made.append(_why(where, PATHS[slug], series, each, base, share=CODE_BITS / bits))
    return sorted(made, key=lambda each: (launch.order(each.where), list(PATHS).index(each.path.slug)))


def slowed(checked: Sequence[Checked]) -> list[str]:
    """A sentence for each cell with projections that became slower than the baseline's, though they read less."""
    sentences = []
    for where in dict.fromkeys(each.where for each in checked):
        base = quant_catalogue.baseline_on(where.gpu)
        here = [each for each in checked if each.where == where]
        usual_us = {p.kind: p.us for each in here if each.path.slug == base for p in each.projections}
        found = []
        for slug, p in [(each.path.slug, p) for each in here if not each.path.is_baseline for p in each.projections]:
            usual = usual_us.get(p.kind, p.us)
            if p.us >= SLOWED * usual:
                more_ms = slower_ms(where.model, p.kind, p.us, usual)
                times = f"{p.us:.1f} against {usual:.1f} µs a launch"
                found.append((more_ms, f"{p.kind} on {slug}, {times}, {more_ms:.2f} ms a step"))
        if found:
            told = "; ".join(text for _, text in sorted(found, reverse=True))
            sentences.append(
                f"{where.short}, projections that take longer than in {base}, though they read less: {told}."
            )
    return sentences


def slower_ms(model: str, kind: str, us: float, usual_us: float) -> float:
    """How much longer (ms) a step takes whose projections of `kind` take `us` instead of `usual_us` each."""
    launches = PER_LAYER[kind] * int(models.lookup(model).config["num_hidden_layers"])
    return launches * (us - usual_us) / 1e3


def paragraph(found: Sequence[Line], reasons: Sequence[Why], checked: Sequence[Checked]) -> str:
    """Why a quarter of the bytes does not make a quarter of the step, in one paragraph with its numbers."""
    sentences = [text for where in dict.fromkeys(each.where for each in reasons)
                 for text in _sentences(where, found, [each for each in reasons if each.where == where])]  # fmt: skip
    sentences = [*sentences, *slowed(checked)] if sentences else [NOTHING]
    quoted = [line for line in found if line.kind == "published" and not line.path.is_baseline and line.gain]
    if quoted:
        told = ", ".join(f"{line.path.slug} {line.gain:.2f} of {line.promised:.2f}" for line in quoted)
        first = quoted[0].where
        sentences.append(f"The study's steps on the {first.gpu_label} realise, of the speed-ups promised: {told}.")
    return " ".join(sentences)


def of_view(view: "View") -> str:
    """The paragraph of everything that `view` shows."""
    found = quant_results.lines(view.frame, None if view.is_cpu else view.published, cpu=view.is_cpu)
    checked = quant_results.checked(view.kept, cpu=view.is_cpu)
    return paragraph(found, why(view.kept, cpu=view.is_cpu), checked)


def _sentences(where: Where, found: Sequence[Line], reasons: Sequence[Why]) -> list[str]:
    mine = [line for line in found if line.where == where and not line.path.is_baseline and line.best_gain]
    share = "A quarter" if reasons[0].share == 1 / 4 else "An eighth"
    base = quant_catalogue.baseline_on(where.gpu)
    how = {EAGER: "launched kernel by kernel", GRAPH: "replayed from a graph"}[reasons[0].series]
    text = [f"{where.short}: {share.lower()} of the {base} step, {how}, would be {reasons[0].share_ms:.2f} ms."]
    if mine:
        promises = [line.promised for line in mine if line.promised]
        gains = [line.best_gain or 0.0 for line in mine]
        text.append(
            f"The bytes that the paths hold promise {min(promises):.2f} to {max(promises):.2f} times the speed; "
            f"they realise {min(gains):.2f} to {max(gains):.2f}."
        )
    ordered = sorted(reasons, key=lambda each: each.step_ms)
    for name, each in dict([("fastest", ordered[0]), ("slowest", ordered[-1])][: len(ordered)]).items():
        parts = sorted((each.parts_ms | {"residual": each.residual_ms}).items(), key=lambda item: -item[1])
        named = [f"{ms:.2f} ms {SHORT_OF[part]}" for part, ms in parts if ms >= LEAST_SHARE * each.above_ms]
        rest = sum(ms for _, ms in parts if ms < LEAST_SHARE * each.above_ms)
        told = "; ".join([*named, f"{rest:.2f} ms the rest"])
        text.append(f"Of the {each.above_ms:.2f} ms that the {name} path, {each.path.slug}, takes above that: {told}.")
    return text


def _series_of(arm: str) -> tuple[str, str]:
    return (arm.removesuffix(GRAPH_SUFFIX), GRAPH) if arm.endswith(GRAPH_SUFFIX) else (arm, EAGER)


def _why(
    where: Where, path: QuantPath, series: str, mine: launch.Dissected, base: launch.Dissected, *, share: float
) -> Why:
    own, other = _accounts(mine.anatomy, mine.kept.record), _accounts(base.anatomy, base.kept.record)
    parts = {
        "bytes not reduced": own["bytes"] - share * other["bytes"],
        "products": own["products"] - share * other["products"],
        "added kernels": own["rest"] - other["rest"],
        "kernels without weights": (1 - share) * other["rest"],
        "launch and bubbles": own["launch"] - share * other["launch"],
    }
    return Why(
        where=where,
        path=path,
        series=series,
        step_ms=mine.anatomy.step_ms,
        share=share,
        share_ms=share * base.anatomy.step_ms,
        parts_ms=parts,
        residual_ms=mine.anatomy.residual_ms - share * base.anatomy.residual_ms,
        records=(mine.kept.record.content_hash, base.kept.record.content_hash),
    )


def _accounts(found: Anatomy, record: Record) -> dict[str, float]:
    """A step's ms: its bytes at the read bandwidth, what products and other kernels take beyond, and launching."""
    held = record.quantised or Quantised(path="none", group=0, packed=0, kept=0, table=0, dense=0)
    total = sum(found.ledger_bytes.values())
    per_byte = sum(found.ledger_ms.values()) / total if total else 0.0
    name = ledger.QUANTISED_PRODUCT if ledger.QUANTISED_PRODUCT in found.operators else "aten::linear"
    product = found.operators[name].ms if name in found.operators else 0.0
    packed = held.packed * per_byte
    return {
        "bytes": total * per_byte,
        "products": product - packed,
        "rest": found.busy_ms - product - (total * per_byte - packed),
        "launch": found.bubbles_ms + found.exposed_host_ms,
    }
