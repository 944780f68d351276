"""What a step should take on a GPU that was not measured: the step-time model, fitted on H200 records only.

Device time = (launches x time of a small kernel) + (bytes / (peak x achieved efficiency), for each kind of traffic).
Host time = a x launches x dispatch cost. A graph's step is the device time. An eager step is the larger of the two
plus what cannot overlap: the part of the device's work that is still running when the last launch returns if the host
is slower, one launch if the device is. Everything here is a prediction with a range, and no published cell is fitted.

Low and high: a small kernel's time and the host's dispatch cost span the ranges of `data/predict.toml`; efficiency
reaches from what the H200 achieves to the share of peak that a plain read achieves there, because less bandwidth per
SM is easier to saturate; and the whole device time carries the spread of the fit over the records. No device time is
shorter than its bytes at the peak.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decodegap import datafile, floor, gpus, ledger, models
from decodegap.errors import NotMeasuredError
from decodegap.paths import DATA
from decodegap.published import DTYPE, Published
from decodegap.rows import counted
from decodegap.schema import Anatomy, Record

FIT_ARMS = ("eager", "eager-pinned", "graph")  # the arms whose kernels are those of the predicted steps
HOST_ARMS = ("eager", "eager-pinned")
KINDS = (ledger.WEIGHTS, ledger.KV_READ, ledger.KV_CAT)
QUANTITIES = ("floor_fraction", "graph_speedup")
KIND = "predicted"


@dataclass(frozen=True)
class Span:
    """A value with its range, `low <= mid <= high`."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True)
class Given(Span):
    """A range that is assumed, and from where."""

    source: str


@dataclass(frozen=True)
class Assumed:
    """`data/predict.toml`: which GPU is fitted, and the ranges that hold for every host and every GPU."""

    fit_gpu: str
    dispatch_us: Given
    small_kernel_scale: Given


@dataclass(frozen=True)
class Model:
    """The fitted model.

    `efficiency` is the share of peak by kind of traffic, `read_share` that of a plain read, `spread` measured over
    modelled device time in the fit, `a` the host's time for an operator's launch over that of a bare one, `unhidden`
    the share of the device time that runs after the last launch of a host-bound step, `launches` per step by model.
    """

    small_kernel_us: float
    efficiency: dict[str, float]
    read_share: float
    spread: Span
    a: Span
    unhidden: Span
    launches: dict[str, float]
    launches_per_layer: float
    records: int


@dataclass(frozen=True)
class Step:
    """A predicted step: device and host time, eager and graph step, each in ms with a range."""

    device_ms: Span
    host_ms: Span
    eager_ms: Span
    graph_ms: Span
    speedup: Span

    @property
    def host_bound(self) -> bool:
        """Whether, at mid, the host is slower than the device."""
        return self.host_ms.mid > self.device_ms.mid


@dataclass(frozen=True)
class Prediction:
    """One published number beside its prediction; `error` is mid / published - 1. Always marked predicted."""

    gpu: str
    model: str
    ctx: int
    quantity: str
    low: float
    mid: float
    high: float
    published: float | None
    error: float | None
    host_bound: bool
    fitted: bool = False
    kind: str = KIND

    @property
    def holds(self) -> bool | None:
        """Whether the published value lies in the predicted range; None without one."""
        return None if self.published is None else self.low <= self.published <= self.high


def assumed() -> Assumed:
    """The model's fixed assumptions, from `data/predict.toml`; raises `BadInputError` for a file that is broken."""
    return datafile.load(DATA / "predict.toml", Assumed)


def fit(records: Iterable[Record]) -> Model:
    """The model that the H200's records give; others, stand-ins and failed sessions are left out.

    Raises `NotMeasuredError` if no record of the fitted GPU has the anatomy of an eagerly launched arm with the
    session's dispatch cost.
    """
    gpu = assumed().fit_gpu
    used = [r for r in records if r.cell.gpu == gpu and r.outcome == "ok" and not r.stand_in and r.cell.dtype == DTYPE]
    seen = [(r, a) for r in used for a in r.anatomy if a.arm in FIT_ARMS and a.source == "device" and r.peak_gb_s]
    hosted = [(a, r.machine.dispatch_us) for r, a in seen if a.arm in HOST_ARMS and r.machine and r.machine.dispatch_us]
    if not hosted:
        raise NotMeasuredError(
            f"the step-time model needs a {gpu} record with the anatomy of an eager arm and the host's dispatch cost, "
            f"which none of {counted(len(used), f'sound {gpu} record')} has; measure with `make measure GPU={gpu}`"
        )
    small_us = statistics.median(_small_kernel_us(a) for _, a in seen)
    efficiency = {kind: _efficiency([(a, r.peak_gb_s or 0.0) for r, a in seen], kind, small_us) for kind in KINDS}
    shares = [r.machine.read_gb_s / r.peak_gb_s for r, _ in seen if r.machine and r.machine.read_gb_s and r.peak_gb_s]
    model_ms = [
        device_ms(a.launches, _bytes(a), r.peak_gb_s or 0.0, small_us=small_us, efficiency=efficiency) for r, a in seen
    ]
    by_model: dict[str, list[float]] = {}
    for record, found in seen:
        by_model.setdefault(record.cell.model, []).append(found.launches)
    launches = {slug: statistics.median(counts) for slug, counts in by_model.items()}
    layers = {slug: int(models.lookup(slug).config["num_hidden_layers"]) for slug in launches}
    return Model(
        small_kernel_us=small_us,
        efficiency=efficiency,
        read_share=max([*shares, *efficiency.values()]),
        spread=_span([_device_ms(a) / ms for (_, a), ms in zip(seen, model_ms, strict=True)]),
        a=_span([a.enqueue_ms * 1e3 / (a.launches * us) for a, us in hosted]),
        unhidden=_span([max(0.0, a.step_ms - max(a.enqueue_ms, _device_ms(a))) / _device_ms(a) for a, _ in hosted]),
        launches=launches,
        launches_per_layer=statistics.median(launches[slug] / layers[slug] for slug in launches),
        records=len({r.content_hash or id(r) for r, _ in seen}),
    )


def device_ms(
    launches: float, n_bytes: dict[str, int], peak_gb_s: float, *, small_us: float, efficiency: dict[str, float]
) -> float:
    """Device time (ms) of a step: every launch costs `small_us`, every byte its time at the achieved bandwidth."""
    return launches * small_us / 1e3 + sum(
        floor.floor_ms(n, peak_gb_s * efficiency[kind]) for kind, n in n_bytes.items()
    )


def step(fitted: Model, gpu: str, model: str, ctx: int) -> Step:
    """The predicted step of `model` at `ctx` tokens on `gpu` (slugs); bf16, batch 1.

    Raises `BadInputError` for a model that is not known or a GPU that is not in the catalogue.
    """
    given = assumed()
    known = models.lookup(model)
    peak = float(gpus.known(gpu).peak_gb_s or 0.0)
    layers = int(known.config["num_hidden_layers"])
    n = fitted.launches.get(known.slug, fitted.launches_per_layer * layers)
    counts = ledger.ledger(known.config, ctx, "eager", floor.ELEMENT_BYTES[DTYPE])
    n_bytes = {kind: counts[kind] for kind in KINDS}
    best = dict.fromkeys(KINDS, fitted.read_share)
    scale, small = given.small_kernel_scale, fitted.small_kernel_us
    own = fitted.efficiency
    at_peak = floor.floor_ms(sum(n_bytes.values()), peak)
    device = Span(
        max(at_peak, fitted.spread.low * device_ms(n, n_bytes, peak, small_us=small * scale.low, efficiency=best)),
        fitted.spread.mid * device_ms(n, n_bytes, peak, small_us=small * scale.mid, efficiency=own),
        fitted.spread.high * device_ms(n, n_bytes, peak, small_us=small * scale.high, efficiency=own),
    )
    launch = Span(*(a * us for a, us in zip(_ends(fitted.a), _ends(given.dispatch_us), strict=True)))
    host = Span(*(n * us / 1e3 for us in _ends(launch)))
    late = fitted.unhidden
    eager = Span(*(_eager(*each) for each in zip(*map(_ends, (device, host, launch, late)), strict=True)))
    return Step(
        device_ms=device,
        host_ms=host,
        eager_ms=eager,
        graph_ms=device,
        speedup=Span(
            _eager(device.high, host.low, launch.low, late.low) / device.high,
            eager.mid / device.mid,
            _eager(device.low, host.high, launch.high, late.high) / device.low,
        ),
    )


def cell(fitted: Model | None, gpu: str, model: str, ctx: int) -> Span | None:
    """The predicted fraction of the floor as published, for one of the study's GPUs and models; else None."""
    card, known = gpus.catalogue().get(gpu), models.catalogue().get(model)
    if fitted is None or card is None or not card.paper or not card.peak_gb_s or known is None or known.role != "paper":
        return None
    return _fraction(step(fitted, gpu, model, ctx).eager_ms, gpu, model, ctx)


def table(fitted: Model, published: Published) -> list[Prediction]:
    """Every published fraction and A/B ratio of one cell beside its prediction, in the study's order."""
    rows = []
    for value in published.values:
        usual = value.quantity in QUANTITIES and value.gpu and value.model and isinstance(value.ctx, int)
        if not usual or value.gpu is None or value.model is None or not isinstance(value.ctx, int):
            continue
        found = step(fitted, value.gpu, value.model, value.ctx)
        span = found.speedup
        if value.quantity == "floor_fraction":
            span = _fraction(found.eager_ms, value.gpu, value.model, value.ctx)
        rows.append(
            Prediction(
                gpu=value.gpu,
                model=models.lookup(value.model).slug,
                ctx=value.ctx,
                quantity=value.quantity,
                low=span.low,
                mid=span.mid,
                high=span.high,
                published=value.value,
                error=span.mid / value.value - 1 if value.value else None,
                host_bound=found.host_bound,
            )
        )
    return rows


def dispatch_slope(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares through the origin of the eager step against the dispatch cost: (slope in launches, a).

    Each point is (dispatch us, eager step ms, launches). The slope is the number of bare launches that the step is
    worth; `a` is the slope over the mean launch count. Raises `ValueError` without a point.
    """
    if not points:
        raise ValueError("no session to fit a slope to")
    slope = sum(us * ms * 1e3 for us, ms, _ in points) / sum(us * us for us, _, _ in points)
    return slope, slope / statistics.fmean(n for _, _, n in points)


def _fraction(eager: Span, gpu: str, model: str, ctx: int) -> Span:
    known, peak = models.lookup(model), float(gpus.known(gpu).peak_gb_s or 0.0)
    floor_ms = floor.floor_ms(known.weight_bytes(DTYPE) + known.kv_bytes(ctx, DTYPE), peak)
    return Span(floor_ms / eager.high, floor_ms / eager.mid, floor_ms / eager.low)


def _eager(device: float, host: float, launch_us: float, unhidden: float) -> float:
    return max(host + unhidden * device, device + launch_us / 1e3)


def _small_kernel_us(found: Anatomy) -> float:
    """Mean time of the kernels that move activations only, with the gap before the next (us)."""
    small = [each for name, each in found.operators.items() if not ledger.item_of(name)]
    launches = sum(each.launches for each in small)
    return (sum(each.ms for each in small) * 1e3 / launches if launches else 0.0) + found.gap_us


def _efficiency(seen: Sequence[tuple[Anatomy, float]], kind: str, small_us: float) -> float:
    """Share of peak that a kind of traffic reaches once each of its launches has been charged `small_us`.

    Pooled over the anatomies, so that the ones with much traffic decide; between 1% and 100% of peak.
    """
    ideal = beyond = 0.0
    for found, peak in seen:
        mine = [each for name, each in found.operators.items() if ledger.item_of(name) == kind]
        launches, ms = sum(each.launches for each in mine), sum(each.ms for each in mine)
        ideal += floor.floor_ms(found.ledger_bytes[kind], peak)
        beyond += ms - launches * (small_us - found.gap_us) / 1e3
    return min(1.0, max(0.01, ideal / beyond)) if beyond > 0 else 1.0


def _bytes(found: Anatomy) -> dict[str, int]:
    return {kind: found.ledger_bytes[kind] for kind in KINDS}


def _device_ms(found: Anatomy) -> float:
    return found.busy_ms + found.bubbles_ms


def _span(values: Sequence[float]) -> Span:
    return Span(min(values), statistics.median(values), max(values))


def _ends(span: Span) -> tuple[float, float, float]:
    return span.low, span.mid, span.high
