"""Which further numbers the text quotes: the A/B, the arms, the anatomy, energy, costs, verdicts and tensions."""

import math
import re
import statistics
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, PositiveInt

from decodegap import claims, datafile, frame, gpus, models, plan_ladder, review, stats, steadiness, tensions, verdicts
from decodegap.launch import ARM_ORDER, GRAPH_LAUNCHED
from decodegap.numbers import CONTEXT_WORDS, NOT_MEASURED, letters
from decodegap.paths import HERE, Places
from decodegap.published import Published, Quantity
from decodegap.schema import Anatomy, Record, Series
from decodegap.tables_review import ACTION_TOKENS

GPU, MODEL, SHORT, LONG = "h200", "qwen2.5-7b", 2048, 16384  # the cell that the text speaks of
ARMS = ("eager", "eager-auto", "eager-pinned", "graph", "graph-static", "graph-stock", "compiled")
DISK_GPU = "about 7 GB"  # the authors' estimate: pip resolves what a CUDA build of torch brings, and no lock pins it
PARTS = ("floor", "extra traffic", "kernel inefficiency", "bubbles", "exposed host")
CONTEXT = {SHORT: "Short", LONG: "Long"}


class _Size(BaseModel):
    mb: PositiveInt  # 10^6 bytes


class _Sizes(BaseModel):
    analysis: _Size
    measure: _Size


def macros(shipped: Sequence[Record], study: Published, at: Places) -> dict[str, str]:
    """Name -> text of each; `n/m` where nothing is measured, and the same names whatever records there are."""
    mine = [record for record in shipped if record.cell.gpu == GPU and record.outcome == "ok"]
    out = _study(study) | _machine(mine) | _costs(mine) | _pairs(mine) | _verdicts(shipped, study, at)
    for ctx, word in CONTEXT.items():
        for arm in ARMS:
            out |= _arm(mine, arm, ctx, letters(*arm.split("-")) + word)
    shares = [abs(a.residual_ms) / a.step_ms for r in mine for a in r.anatomy if a.arm in GRAPH_LAUNCHED]
    auto, plain = (_steps(mine, arm, SHORT) for arm in ("eager-auto", "eager"))
    plan_ms = statistics.fmean(auto) - statistics.fmean(plain) if auto and plain else None
    return out | {
        "ResidualWorst": f"{max(shares):.1%}" if shares else NOT_MEASURED,
        "PlanCostMs": _text(plan_ms, 1),
        "SchemaVersion": str(Record.model_fields["schema_version"].default),
        **disk(),
        "TokensShort": str(min(ACTION_TOKENS)),
        "TokensLong": str(max(ACTION_TOKENS)),
    }


def disk(at: Places = HERE) -> dict[str, str]:
    """What .venv takes: measured from the locked packages, but for a CUDA build of torch, which is estimated."""
    sizes = datafile.load(at.sizes, _Sizes)
    replay_mb = sizes.analysis.mb
    return {
        "DiskReplay": f"{replay_mb / 1e3:.1f} GB",
        "DiskCpu": f"{(replay_mb + sizes.measure.mb) / 1e3:.1f} GB",
        "DiskGpu": DISK_GPU,
    }


def quantity(name: str) -> str:
    """The quantity of a macro: its name without the GPU, model, context, arm or token count that it ends with.

    Nor with which of the quantised paths it is about.
    """
    name = re.sub("Fastest|Slowest", "", name)
    models_first = [re.split(r"[^a-z]", model)[0] for model in models.catalogue()]
    words = {letters(word) for word in (*gpus.catalogue(), *models_first, *map(str, ACTION_TOKENS))}
    words |= {letters(*arm.split("-")) for arm in (*ARMS, *ARM_ORDER)} | {*CONTEXT_WORDS.values(), *CONTEXT.values()}
    ends = re.compile(rf"(?:{'|'.join(sorted(words, key=len, reverse=True))})$")
    while (shorter := ends.sub("", name)) not in ("", name):
        name = shorter
    return name


def _arm(mine: Sequence[Record], arm: str, ctx: int, name: str) -> dict[str, str]:
    steps = _steps(mine, arm, ctx)
    joules = [s.energy_j_per_step for s in _series(mine, arm, ctx) if s.energy_j_per_step]
    anatomy = _anatomy(mine, arm, ctx)
    step = statistics.fmean(steps) if steps else None
    floors = [
        r.floors_ms.published
        for r in mine
        if (r.cell.experiment, r.cell.model, r.cell.ctx) == ("graphs", MODEL, ctx) and r.floors_ms.published
    ]
    out = {
        f"ArmStep{name}": _text(step, 2),
        f"ArmFraction{name}": _text(floors[0] / step if floors and step else None, 2),
        f"ArmJoules{name}": _text(statistics.fmean(joules) if joules else None, 2),
        f"ArmLaunches{name}": _text(statistics.fmean(a.launches for a in anatomy) if anatomy else None, 0),
    }
    for n in ACTION_TOKENS if ctx == SHORT else ():
        out[f"ArmRate{letters(str(n))}{name}"] = _text(1e3 / step / n if step else None, 1)
    for part in PARTS:
        found = [a.parts_ms[part] for a in anatomy if part in a.parts_ms]
        out[f"Part{letters(*part.split())}{name}"] = _text(statistics.fmean(found) if found else None, 2)
    return out


def _pairs(mine: Sequence[Record]) -> dict[str, str]:
    ratios = []
    for record in _of(mine, "ab", SHORT):
        steps = {series.arm: statistics.median(series.wall_ms) for series in record.series}
        ratios.append(steps["eager-pinned"] / steps["graph"])
    found = stats.summarise(ratios) if ratios else None
    spans = {letters(method): found.intervals.get(method) if found else None for method in stats.METHODS}
    attested = [a for r in mine for a in r.attestations if r.cell.arm == "ab"]
    return {
        "PairSessions": str(len(ratios)) if ratios else NOT_MEASURED,
        "PairRatio": _text(found.mean if found else None, 3),
        "PairRatioMin": _text(min(ratios, default=None), 3),
        "PairRatioMax": _text(max(ratios, default=None), 3),
        "PairsAttested": f"{sum(a.outputs_equal and a.kernels_equal for a in attested)}" if attested else NOT_MEASURED,
        "PairsTried": str(len(attested)) if attested else NOT_MEASURED,
        **{
            f"PairInterval{name}": f"{span[0]:.3f}–{span[1]:.3f}" if span else NOT_MEASURED
            for name, span in spans.items()
        },
    }


def _machine(mine: Sequence[Record]) -> dict[str, str]:
    machines = [record.machine for record in mine if record.machine]
    reads = [m.read_gb_s for m in machines if m.read_gb_s]
    dispatch = [m.dispatch_us for m in machines if m.dispatch_us]
    peak = next((record.peak_gb_s for record in mine if record.peak_gb_s), None)
    newest = max(mine, key=lambda record: record.started_at, default=None)
    hosts = {m.host_tag for m in machines}
    versions = newest.versions if newest else {}
    return {
        "ReadBandwidth": _text(statistics.median(reads) / 1e3 if reads else None, 2),
        "ReadShare": f"{statistics.median(reads) / peak:.0%}" if reads and peak else NOT_MEASURED,
        "PeakBandwidth": _text(peak / 1e3 if peak else None, 1),
        "DispatchMin": _text(min(dispatch, default=None), 1),
        "DispatchMax": _text(max(dispatch, default=None), 1),
        "Hosts": str(len(hosts)) if hosts else NOT_MEASURED,
        "CpuModel": machines[-1].cpu_model if machines else NOT_MEASURED,
        "CpuCores": str(machines[-1].cores) if machines else NOT_MEASURED,
        "HostMemory": _text(machines[-1].host_memory_mib / 1024 if machines else None, 0),
        "DeviceName": machines[-1].device_name if machines else NOT_MEASURED,
        "DeviceMemory": _text(machines[-1].memory_mib / 1024 if machines else None, 0),
        "Driver": (machines[-1].driver or NOT_MEASURED) if machines else NOT_MEASURED,
        **{f"Version{letters(name)}": versions.get(name, NOT_MEASURED) for name in
           ("torch", "transformers", "triton", "python", "cuda")},
    }  # fmt: skip


def _costs(mine: Sequence[Record]) -> dict[str, str]:
    out = {}
    for experiment in ("baseline", "graphs", "quantised", "ladder"):
        seconds = [sum(r.durations_s.values()) for r in mine if r.cell.experiment == experiment]
        name = letters(experiment)
        out[f"Sessions{name}"] = str(len(seconds)) if seconds else NOT_MEASURED
        out[f"Minutes{name}"] = str(math.ceil(sum(seconds) / 60)) if seconds else NOT_MEASURED
        out[f"SessionSeconds{name}"] = _text(statistics.median(seconds) if seconds else None, 0)
    peaks = [record.peak_memory_bytes for record in mine if record.peak_memory_bytes]
    spans = [max(v) / min(v) - 1 for v in _by_cell(mine) if len(v) > 1]
    return out | {
        "PeakMemory": _text(max(peaks) / 1e9 if peaks else None, 1),
        "SessionsAll": str(len(mine)) if mine else NOT_MEASURED,
        "SessionsUnstable": str(sum(bool(steadiness.doubts(r)) for r in mine)) if mine else NOT_MEASURED,
        "SessionSpread": f"{statistics.median(spans):.0%}" if spans else NOT_MEASURED,
        "SessionSpreadWorst": f"{max(spans):.0%}" if spans else NOT_MEASURED,
    }


def _by_cell(mine: Iterable[Record]) -> list[list[float]]:
    rows = frame.cells(frame.sessions((r for r in mine if r.cell.experiment == "baseline"), "shipped"))
    return [list(row.values_ms) for row in rows if row.outcome == "ok"]


def _study(study: Published) -> dict[str, str]:
    def quoted(quantity: Quantity, gpu: str, arm: str | None, decimals: int) -> str:
        value = study.find(quantity, gpu=gpu, model=MODEL, ctx=SHORT, arm=arm)
        return _text(value.value if value else None, decimals)

    found = {finding.id: finding.numbers for finding in tensions.findings(study)}
    ratio = study.find("graph_speedup", gpu="h100", model=MODEL, ctx=SHORT)
    interval = ratio.ci95 if ratio and ratio.ci95 else None
    arms = {"bf16": "BfSixteen", "bnb-nf4": "Nf", "awq-marlin": "Awq", "gptq-exllamav2": "Gptq"}
    headline, left = found["h100-headline"], found["what-graphs-leave"]
    return {
        "StudyRatioHOneZeroZero": quoted("graph_speedup", "h100", None, 3),
        "StudyRatioInterval": f"{interval[0]:.3f}–{interval[1]:.3f}" if interval else NOT_MEASURED,
        "StudyRatioLFour": quoted("graph_speedup", "l4", None, 3),
        **{f"StudyQuantised{name}": quoted("step_ms", "l4", arm, 2) for arm, name in arms.items()},
        "StudyHeadlineH": f"{headline['fraction']:.0%}",
        "StudyHeadlineL": f"{study.fraction('l4', MODEL, SHORT) or 0:.0%}",
        "StudySaved": _text(left["saved_ms"], 2),
        "StudyGap": _text(left["gap_ms"], 1),
        "StudyGapImplied": _text(left["implied_gap_ms"], 1),
        "StudyFloor": _text(headline["fraction"] * headline["implied_ms"], 2),
        "BytesAll": _text(found["counted-bytes"]["everything_gb"], 2),
        "BytesStreamed": _text(found["counted-bytes"]["streamed_gb"], 2),
        "StudyPeak": _text((gpus.known("h100").peak_gb_s or 0.0) / 1e3, 2),
        "StudyPeakSlow": _text((gpus.known("l4").peak_gb_s or 0.0) / 1e3, 1),
    }


def _verdicts(shipped: Sequence[Record], study: Published, at: Places) -> dict[str, str]:
    found = verdicts.judge(claims.load(at.claims, study), study, shipped)
    counts = {f"Claims{letters(*word.split())}": str(number) for word, number in verdicts.count(found).items()}
    ladder = [v for v in found if v.claim.experiment == plan_ladder.EXPERIMENT and v.gpu == GPU]
    goals = [v for v in ladder if review.is_goal(v)]
    missed = review.missed_claims(ladder)
    missed_goals = sum(map(review.is_goal, missed))
    return counts | {
        "ClaimsAll": str(len(found)),
        "LadderMusts": str(len(ladder) - len(goals)),
        "LadderMustsMissed": str(len(missed) - missed_goals),
        "LadderGoals": str(len(goals)),
        "LadderGoalsMissed": str(missed_goals),
    }


def _of(mine: Iterable[Record], arm: str, ctx: int) -> list[Record]:
    return [r for r in mine if (r.cell.experiment, r.cell.model, r.cell.ctx, r.cell.arm) == ("graphs", MODEL, ctx, arm)]


def _series(mine: Iterable[Record], arm: str, ctx: int) -> list[Series]:
    return [s for r in mine if (r.cell.experiment, r.cell.model, r.cell.ctx) == ("graphs", MODEL, ctx)
            for s in r.series if s.arm == arm]  # fmt: skip


def _steps(mine: Iterable[Record], arm: str, ctx: int) -> list[float]:
    return [statistics.median(series.wall_ms) for series in _series(mine, arm, ctx) if series.wall_ms]


def _anatomy(mine: Iterable[Record], arm: str, ctx: int) -> list[Anatomy]:
    here = [r for r in mine if (r.cell.experiment, r.cell.model, r.cell.ctx) == ("graphs", MODEL, ctx)]
    return [each for record in here for each in record.anatomy if each.arm == arm]


def _text(value: float | None, decimals: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{decimals}f}"
