"""Which numbers the text quotes of the quantised paths, on the H200 and, as the study published them, on the L4."""

from collections.abc import Iterable, Sequence

from decodegap import frame, quant_results, quant_why
from decodegap.launch import Kept
from decodegap.numbers import NOT_MEASURED, letters
from decodegap.published import Published
from decodegap.quant_results import Line
from decodegap.schema import Record

CELL = ("h200", "qwen2.5-7b", 2048)  # the cell that the text speaks of
STUDY = {"bnb-nf4": "Nf", "awq-marlin": "Awq", "gptq-exllamav2": "Gptq"}
KERNELS = ("QuantNarrowMin", "QuantNarrowMinPath", "QuantNarrowMax", "QuantNarrowMaxPath", "QuantNarrowBase",
           "QuantNarrowCost", "QuantWideMax", "QuantWideBase")  # fmt: skip
# Whose name is its first word; what quantising adds is quoted over all paths.
PARTS = {name: name.split(maxsplit=1)[0] for name in quant_why.PARTS if name != "added kernels"}


def macros(shipped: Sequence[Record], study: Published) -> dict[str, str]:
    """Name -> text of each; `n/m` where nothing is measured, and the same names whatever records there are."""
    found = quant_results.lines(frame.build(shipped), study)
    mine = [line for line in found if line.kind == "measured" and _cell(line) == CELL and not line.path.is_baseline]
    reasons = [each for each in quant_why.why(Kept("shipped", record) for record in shipped)
               if (each.where.gpu, each.where.model, each.where.ctx) == CELL]  # fmt: skip
    reasons.sort(key=lambda each: each.step_ms)
    out = {"QuantPaths": str(len({line.path.slug for line in mine})) if mine else NOT_MEASURED}
    for name, values in (
        ("Promise", [line.promised for line in mine]),
        ("Gain", [line.gain for line in mine]),
        ("GraphGain", [line.graph_gain for line in mine]),
    ):
        out |= _span(f"Quant{name}", values)
    for name, each in (("Fastest", reasons[0]), ("Slowest", reasons[-1])) if reasons else ():
        out |= {f"Quant{name}": each.path.slug, f"Quant{name}Above": _ms(each.above_ms)}
        out |= {f"Quant{name}{letters(word)}": _ms(each.parts_ms[part]) for part, word in PARTS.items()}
    if reasons:
        out["QuantShare"] = _ms(reasons[0].share_ms)
    names = ["QuantShare", *(f"Quant{name}{part}" for name in ("Fastest", "Slowest")
                             for part in ("", "Above", *map(letters, PARTS.values())))]  # fmt: skip
    out |= _kernels(Kept("shipped", record) for record in shipped)
    out["QuantAddedMost"] = (
        _ms(max(abs(each.parts_ms["added kernels"]) for each in reasons)) if reasons else NOT_MEASURED
    )
    quoted = {line.path.slug: line for line in found if line.kind == "published"}
    out |= {f"StudyGain{name}": _times(quoted[slug].gain) if slug in quoted else NOT_MEASURED
            for slug, name in STUDY.items()}  # fmt: skip
    out |= _span("StudyPromise", [quoted[slug].promised for slug in STUDY if slug in quoted])
    return dict.fromkeys(names, NOT_MEASURED) | out


def _kernels(kept: Iterable[Kept]) -> dict[str, str]:
    """The narrowest projections' time, and the widest ones' bandwidth, over the quantised paths and in bf16."""
    found = [each for each in quant_results.checked(kept) if (each.where.gpu, each.where.model, each.where.ctx) == CELL]
    by = {(each.path.slug, p.kind): p for each in found for p in each.projections}
    quantised = [each.path.slug for each in found if not each.path.is_baseline and each.projections]
    if not quantised or ("bf16", "k/v") not in by:
        return dict.fromkeys(KERNELS, NOT_MEASURED)
    quantised.sort(key=lambda slug: by[slug, "k/v"].us)
    first, last = quantised[0], quantised[-1]
    wide = max(by[slug, "gate/up"].gb_s for slug in quantised)
    narrow = {slug: by[slug, "k/v"].us for slug in (first, last, "bf16")}
    cost_ms = quant_why.slower_ms(CELL[1], "k/v", narrow[last], narrow["bf16"])
    values = (f"{narrow[first]:.1f}", first, f"{narrow[last]:.1f}", last, f"{narrow['bf16']:.1f}", _ms(cost_ms),
              f"{wide / 1e3:.1f}", f"{by['bf16', 'gate/up'].gb_s / 1e3:.1f}")  # fmt: skip
    return dict(zip(KERNELS, values, strict=True))


def _cell(line: Line) -> tuple[str, str, int]:
    return line.where.gpu, line.where.model, line.where.ctx


def _span(name: str, values: Iterable[float | None]) -> dict[str, str]:
    known = [value for value in values if value is not None]
    return {f"{name}Min": _times(min(known, default=None)), f"{name}Max": _times(max(known, default=None))}


def _times(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2f}"


def _ms(value: float) -> str:
    return f"{value:.2f}"
