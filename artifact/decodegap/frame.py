"""What the records say together: one row per session and arm, then one row per store, cell, arm and host.

Two steps, so that what pairs arms within a session (A/B ratios) starts from `sessions` and what compares cells starts
from `cells`. Only sessions with outcome `ok` are summarised; the others stay as rows of their own with their reason.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from decodegap import gpus, models, stats, steadiness
from decodegap.errors import BadRecordError
from decodegap.rows import CellRow, SessionRow, Store
from decodegap.schema import Protocol, Record, Series, canonical

if TYPE_CHECKING:
    import pandas as pd

MEDIAN_TOLERANCE = 1e-3  # a record may round its medians; more than that is a record that contradicts itself


def build(shipped: Iterable[Record], yours: Iterable[Record] = (), imported: Iterable[Record] = ()) -> "pd.DataFrame":
    """The frame of these records: one row per store, cell, arm, host and outcome, with the columns of `CellRow`.

    Raises `BadRecordError` where two protocols would meet in one experiment, or a record contradicts itself.
    """
    stores: dict[Store, Iterable[Record]] = {"shipped": shipped, "yours": yours, "imported": imported}
    return to_frame(cells([row for store, found in stores.items() for row in sessions(found, store)]))


def to_frame(rows: Sequence[CellRow]) -> "pd.DataFrame":
    """`rows` as a DataFrame that has every column even if it is empty; a missing number is NaN."""
    import pandas as pd

    names = [field.name for field in fields(CellRow)]
    numbers = [f.name for f in fields(CellRow) if f.type == float | None]
    found = pd.DataFrame([[getattr(row, name) for name in names] for row in rows], columns=names)
    return found.astype(dict.fromkeys(numbers, float))


def from_frame(frame: "pd.DataFrame") -> list[CellRow]:
    """The rows of a frame (or of a selection from it), typed; NaN becomes None."""
    numbers = {f.name for f in fields(CellRow) if f.type == float | None}
    rows = []
    for values in frame.itertuples(index=False):
        found = {f.name: getattr(values, f.name) for f in fields(CellRow)}
        found |= {name: None for name in numbers if found[name] != found[name]}  # NaN is not itself
        rows.append(CellRow(**found))
    return rows


def sessions(records: Iterable[Record], store: Store) -> list[SessionRow]:
    """One row per record and arm; a record without series (it died, or never ran) gives one row."""
    rows = []
    for record in records:
        if record.outcome == "ok" and not record.series and not record.checks:  # a check times nothing
            raise BadRecordError(f"{_name(record)}: says ok but holds no samples; measure it again")
        arms: list[Series | None] = [*record.series] if record.series else [None]
        rows += [_session(record, series, store) for series in arms]
    return rows


def cells(rows: Sequence[SessionRow]) -> list[CellRow]:
    """Summarise sessions to cells, sorted by GPU peak, model, context, arm, store, outcome and host.

    Raises `BadRecordError` as `check_protocols` does.
    """
    check_protocols(rows)
    groups: dict[tuple[Any, ...], list[SessionRow]] = defaultdict(list)
    hosts: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for row in rows:
        cell = (row.store, row.gpu, row.experiment, row.model, row.ctx, row.cell_arm, row.arm, row.dtype, row.sdpa)
        groups[(*cell, row.outcome, row.host)].append(row)
        if row.outcome == "ok":
            hosts[row.store, row.gpu, row.experiment].add(row.host)
    found = [_cell(group, tuple(sorted(hosts[key[:3]]))) for key, group in groups.items()]
    return sorted(found, key=_order)


def check_protocols(rows: Sequence[SessionRow]) -> None:
    """Raise `BadRecordError` if rows of one experiment were measured by two protocols, or a model with two weights."""
    first: dict[tuple[str, ...], SessionRow] = {}
    for row in rows:
        for key, seen in (((row.experiment,), "protocol"), ((row.experiment, row.model), "weights_revision")):
            other = first.setdefault(key, row)
            if getattr(other, seen) != getattr(row, seen):
                what = seen.replace("_", " ")
                raise BadRecordError(
                    f"{row.experiment}: one table cannot hold {_place(other)} of {what} {getattr(other, seen)} "
                    f"({other.weights} weights) and {_place(row)} of {what} {getattr(row, seen)} ({row.weights} "
                    "weights); measure all with one protocol, or move one set of records away"
                )


def comparable(others: Sequence[Record], yours: Sequence[Record]) -> list[Record]:
    """Those of `others` that may stand in one table with `yours`: same protocol, and the same weights of a model."""
    families = {r.cell.experiment: protocol_family(r.protocol) for r in yours}
    revisions = {(r.cell.experiment, r.cell.model): r.protocol.weights_revision for r in yours}

    def agrees(record: Record) -> bool:
        cell, family, revision = record.cell, protocol_family(record.protocol), record.protocol.weights_revision
        same_weights = revisions.get((cell.experiment, cell.model), revision) == revision
        return same_weights and families.get(cell.experiment, family) == family

    return [record for record in others if agrees(record)]


def protocol_family(protocol: Protocol) -> str:
    """Hash of a protocol without the revision of its weights, which differs from model to model."""
    shared = {key: value for key, value in protocol.model_dump().items() if key != "weights_revision"}
    return hashlib.sha256(canonical(shared).encode()).hexdigest()[:16]


def records_hash(frame: "pd.DataFrame") -> str:
    """One hex SHA-256 over the content hashes of every record in the frame, whatever their order."""
    return hashlib.sha256("".join(sorted({h for row in frame["records"] for h in row})).encode()).hexdigest()


def _session(record: Record, series: Series | None, store: Store) -> SessionRow:
    cell, machine, floors = record.cell, record.machine, record.floors_ms
    return SessionRow(
        store=store,
        gpu=cell.gpu,
        gpu_label=label(record),
        experiment=cell.experiment,
        model=cell.model,
        ctx=cell.ctx,
        cell_arm=cell.arm,
        arm=series.arm if series else cell.arm,
        dtype=cell.dtype,
        sdpa=cell.sdpa,
        protocol=protocol_family(record.protocol),
        weights=record.protocol.weights,
        weights_revision=record.protocol.weights_revision,
        host=machine.host_tag if machine else "",
        session=record.session,
        outcome=record.outcome,
        reason="; ".join(record.reasons),
        step_ms=_step_ms(record, series) if series else None,
        event_ms=stats.median(series.event_ms) if series and series.event_ms else None,
        free_ms=series.free_total_ms / series.free_steps if series and series.free_steps else None,
        energy_j_per_step=series.energy_j_per_step if series else None,
        sustained_ms=series.sustained.step_ms if series and series.sustained else None,
        sustained_clock_mhz=_during(series, "sm_clock_mhz"),
        sustained_power_w=_during(series, "power_w"),
        floor_published_ms=floors.published,
        floor_streamed_ms=floors.streamed,
        floor_achievable_ms=floors.achievable,
        weights_bytes=record.bytes.weights_all,
        streamed_bytes=record.bytes.weights_streamed,
        kv_bytes=record.bytes.kv,
        peak_gb_s=record.peak_gb_s,
        peak_source=record.peak_source,
        read_gb_s=machine.read_gb_s if machine else None,
        dispatch_us=machine.dispatch_us if machine else None,
        cache_mib=machine.last_level_cache_mib if machine else None,
        stand_in=record.stand_in,
        flags=tuple(record.flags),
        unstable=bool(steadiness.doubts(record, series)),
        capped=steadiness.capped(record, series),
        started_at=record.started_at,
        record=record.content_hash,
    )


def _during(series: Series | None, name: str) -> float | None:
    """What the device said of itself near the end of the sustained loop."""
    state = series.sustained.during if series and series.sustained else None
    return None if state is None else getattr(state, name)


def _step_ms(record: Record, series: Series) -> float | None:
    if not series.wall_ms:
        if record.outcome == "ok":
            raise BadRecordError(f"{_name(record)}: says ok but arm {series.arm} has no samples; measure it again")
        return None
    found = stats.median(series.wall_ms)
    if abs(found - series.step_ms) > MEDIAN_TOLERANCE * found:
        raise BadRecordError(f"{_name(record)}: step_ms {series.step_ms} is not the median of its samples, {found:.6g}")
    return found


def _cell(group: Sequence[SessionRow], hosts: tuple[str, ...]) -> CellRow:
    group = sorted(group, key=lambda row: row.session)
    values = tuple(row.step_ms for row in group if row.step_ms is not None)
    summary = stats.summarise(values) if values and group[0].outcome == "ok" else None
    middle: dict[str, Any] = {name: _median_of(group, name) for name in _MEDIANS}
    step = summary.mean if summary else None
    floors = {name: middle[f"floor_{name}_ms"] for name in ("published", "streamed", "achievable")}
    fractions: dict[str, Any] = {
        f"fraction_{n}": ms / step if ms is not None and step else None for n, ms in floors.items()
    }
    same = {name: getattr(group[0], name) for name in _SAME}
    return CellRow(
        **same,
        **middle,
        **fractions,
        hosts=hosts,
        reason="; ".join(dict.fromkeys(row.reason for row in group if row.reason)),
        sessions=len(group),
        session_ids=tuple(row.session for row in group),
        values_ms=values,
        step_ms=step,
        low_ms=summary.low if summary else None,
        high_ms=summary.high if summary else None,
        spread=summary.spread if summary else "",
        flags=tuple(sorted({flag for row in group for flag in row.flags})),
        unstable=sum(row.unstable for row in group),
        capped=sum(row.capped for row in group),
        started_at=max(row.started_at for row in group),
        records=tuple(row.record for row in group),
    )


_MEDIANS = (
    "event_ms", "free_ms", "energy_j_per_step", "sustained_ms", "sustained_clock_mhz", "sustained_power_w",
    "floor_published_ms", "floor_streamed_ms", "floor_achievable_ms",
    "peak_gb_s", "read_gb_s", "dispatch_us", "cache_mib",
)  # fmt: skip
_SUMMARISED = {"reason", "step_ms", "flags", "unstable", "capped", "started_at"}
_SAME = tuple(
    f.name for f in fields(CellRow) if f.name in {s.name for s in fields(SessionRow)} - set(_MEDIANS) - _SUMMARISED
)


def _median_of(group: Sequence[SessionRow], name: str) -> float | None:
    found = [value for row in group if (value := getattr(row, name)) is not None]
    return stats.median(found) if found else None


def _order(row: CellRow) -> tuple[Any, ...]:
    known = list(models.catalogue())
    model = known.index(row.model) if row.model in known else len(known)
    cell = (row.experiment, model, row.model, row.ctx, row.arm, row.cell_arm, row.dtype, row.sdpa)
    return (0.0 if row.gpu == "cpu" else row.peak_gb_s or 0.0, row.gpu, *cell, row.store, row.outcome, row.host)


def label(record: Record) -> str:
    """What the record's GPU is called: the catalogue's name, or for another card what it calls itself."""
    known = gpus.CPU if record.cell.gpu == "cpu" else gpus.catalogue().get(record.cell.gpu)
    if known:
        return known.label
    return record.machine.device_name.removeprefix("NVIDIA ") if record.machine else record.cell.gpu


def _name(record: Record) -> str:
    return f"{record.cell.gpu}/{record.cell.experiment}/{record.cell.file_name(record.session)}"


def _place(row: SessionRow) -> str:
    return f"{row.gpu} {row.model} {row.ctx} s{row.session} ({row.store})"
