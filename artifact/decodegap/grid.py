"""What is known about each cell of the baseline grid, and from which kind of source it is known."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from decodegap import floor, gpus, models, predict
from decodegap.frame import from_frame
from decodegap.plan import PAPER_CONTEXTS
from decodegap.published import DTYPE, Published
from decodegap.rows import CellRow, whose

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["measured", "published", "implied", "predicted", "missing"]

MARKS: dict[Kind, str] = {"measured": "", "published": "†", "implied": "§", "predicted": "‡", "missing": "—"}
LEGEND: dict[Kind, str] = {
    "measured": "no mark: measured, from records",
    "published": "†: published by the study (arXiv 2605.30571)",
    "implied": "§: implied by the published fraction (a floor divided by it), published by nobody",
    "predicted": "‡: predicted by the step-time model",
    "missing": "—: missing, with the reason beside it",
}
EXCLUDED = "out of memory in the study"
NOT_QUOTED = "not quoted"
NOT_MEASURED = "not measured"
CACHE_FACTOR = 3  # weights below this many last-level caches may be served from cache, so DRAM is no floor for them


@dataclass(frozen=True)
class Fact:
    """One number and the kind of source that it has. `value` is None exactly if it is missing.

    A predicted one has its range, a pair from low to high.
    """

    kind: Kind
    value: float | None = None
    between: tuple[float, float] | None = None


MISSING = Fact("missing")


@dataclass(frozen=True)
class Entry:
    """One line of the grid: a cell as one source knows it. Times in ms; `row` is the measurement behind it, if any.

    Floors at the peak are arithmetic on known bytes and a datasheet; the achievable one needs a measured bandwidth.
    """

    gpu: str
    gpu_label: str
    peak_gb_s: float | None
    model: str
    model_label: str
    ctx: int
    kind: Kind
    reason: str
    step_ms: Fact
    floors_ms: dict[str, float | None]  # published, streamed, achievable
    fractions: dict[str, Fact]
    row: CellRow | None = None

    @property
    def source(self) -> str:
        """Where the line comes from, for people: which store or text, which host, or why there is nothing."""
        if self.row is None or self.kind != "measured":
            return f"{self.kind}: {self.reason}" if self.reason else self.kind
        host = f", host {self.row.hosts.index(self.row.host) + 1} of {len(self.row.hosts)}"
        return f"measured, {self.row.store}" + (host if len(self.row.hosts) > 1 else "")

    @property
    def system(self) -> str:
        """The GPU's label, with the store and the host where more than the shipped one host is meant."""
        if self.row is None or self.kind != "measured":
            return self.gpu_label
        host = f" #{self.row.hosts.index(self.row.host) + 1}" if len(self.row.hosts) > 1 else ""
        return f"{self.gpu_label}{host}{whose(self.row.store)}"


def entries(frame: "pd.DataFrame", published: Published, fitted: predict.Model | None = None) -> list[Entry]:
    """The grid: the study's GPUs and every GPU with baseline records, by peak, model and context.

    A cell has one entry for each measurement (store and host), one for the published value if there is one, and a
    single one if there is neither: predicted by the `fitted` model for a GPU of the study, else missing with its
    reason. A cell that did not fit into the study's card, or would not because a shorter one did not, is missing.
    """
    rows = baseline(frame)
    found: list[Entry] = []
    for system in _systems(rows):
        mine = [row for row in rows if row.gpu == system[0]]
        for model, ctx in _coordinates(mine):
            here = [row for row in mine if (row.model, row.ctx) == (model, ctx)]
            found += _cell(system, (model, ctx), here, published, fitted)
    return found


def baseline(frame: "pd.DataFrame", arm: str = "eager") -> list[CellRow]:
    """The rows of the baseline experiment, arm `arm`."""
    return from_frame(frame[(frame["experiment"] == "baseline") & (frame["arm"] == arm)])


def floor_applies(row: CellRow) -> bool | None:
    """Whether the weights are too big for the last-level cache to serve them; None if the cache's size is unknown."""
    return None if not row.cache_mib else row.weights_bytes >= CACHE_FACTOR * row.cache_mib * 2**20


def model_label(slug: str) -> str:
    """What tables call the model."""
    known = models.catalogue().get(slug)
    return known.label if known else slug


def _systems(rows: Sequence[CellRow]) -> list[tuple[str, str, float | None]]:
    known = {gpu.slug: (gpu.label, gpu.peak_gb_s) for gpu in gpus.catalogue().values() if gpu.paper}
    known |= {row.gpu: (row.gpu_label, row.peak_gb_s) for row in rows if row.gpu not in known}
    return sorted(((slug, *rest) for slug, rest in known.items()), key=lambda item: (item[2] or 0.0, item[0]))


def _coordinates(rows: Iterable[CellRow]) -> list[tuple[str, int]]:
    wanted = {(model.slug, ctx) for model in models.with_role("paper") for ctx in PAPER_CONTEXTS}
    order = list(models.catalogue())
    wanted |= {(row.model, row.ctx) for row in rows}
    return sorted(wanted, key=lambda cell: (order.index(cell[0]) if cell[0] in order else len(order), *cell))


def _cell(
    system: tuple[str, str, float | None],
    cell: tuple[str, int],
    rows: Sequence[CellRow],
    published: Published,
    fitted: predict.Model | None,
) -> list[Entry]:
    (gpu, label, peak_gb_s), (model, ctx) = system, cell

    def entry(kind: Kind, reason: str, step_ms: Fact, fractions: dict[str, Fact], row: CellRow | None) -> Entry:
        floors = _row_floors(row) if row and row.outcome == "ok" else _peak_floors(model, ctx, peak_gb_s)
        return Entry(
            gpu=gpu, gpu_label=label, peak_gb_s=peak_gb_s, model=model, model_label=model_label(model), ctx=ctx,
            kind=kind, reason=reason, step_ms=step_ms, floors_ms=floors, fractions=fractions, row=row,
        )  # fmt: skip

    nothing = dict.fromkeys(FLOORS, MISSING)
    found = [
        entry("measured", "", Fact("measured", row.step_ms), _row_fractions(row), row)
        for row in rows
        if row.outcome == "ok"
    ]
    measured = {entry.row.store for entry in found if entry.row}
    found += [
        entry("missing", f"{row.outcome}: {row.reason}" if row.reason else row.outcome, MISSING, nothing, row)
        for row in rows
        if row.outcome != "ok" and row.store not in measured
    ]
    fraction = published.fraction(gpu, model, ctx)
    if fraction is not None:
        step_ms = Fact("implied", published.implied_step_ms(gpu, model, ctx))
        streamed = _peak_floors(model, ctx, peak_gb_s)["streamed"]
        implied = Fact("implied", streamed / step_ms.value) if streamed and step_ms.value else MISSING
        both = {"published": Fact("published", fraction), "streamed": implied, "achievable": MISSING}
        found.append(entry("published", "", step_ms, both, None))
    said = predict.cell(fitted, gpu, model, ctx)
    if not found and said and not published.out_of_memory(gpu, model, ctx):
        span = predict.step(fitted, gpu, model, ctx).eager_ms if fitted else said
        step_ms = Fact("predicted", span.mid, (span.low, span.high))
        fractions = nothing | {"published": Fact("predicted", said.mid, (said.low, said.high))}
        found.append(entry("predicted", _why(gpu, model, ctx, published), step_ms, fractions, None))
    return found or [entry("missing", _why(gpu, model, ctx, published), MISSING, nothing, None)]


FLOORS = ("published", "streamed", "achievable")


def _why(gpu: str, model: str, ctx: int, published: Published) -> str:
    if published.excluded(gpu, model, ctx):
        return EXCLUDED
    known = gpus.catalogue().get(gpu)
    return NOT_QUOTED if known and known.paper else NOT_MEASURED


def _row_floors(row: CellRow) -> dict[str, float | None]:
    return {name: getattr(row, f"floor_{name}_ms") for name in FLOORS}


def _row_fractions(row: CellRow) -> dict[str, Fact]:
    values = {name: getattr(row, f"fraction_{name}") for name in FLOORS}
    return {name: MISSING if value is None else Fact("measured", value) for name, value in values.items()}


def _peak_floors(model: str, ctx: int, peak_gb_s: float | None) -> dict[str, float | None]:
    known = models.catalogue().get(model)
    if known is None or peak_gb_s is None:
        return dict.fromkeys(FLOORS)
    kv_bytes = known.kv_bytes(ctx, DTYPE)
    return {
        "published": floor.floor_ms(known.weight_bytes(DTYPE) + kv_bytes, peak_gb_s),
        "streamed": floor.floor_ms(known.streamed_bytes(DTYPE) + kv_bytes, peak_gb_s),
        "achievable": None,
    }
