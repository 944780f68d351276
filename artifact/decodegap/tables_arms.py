"""What every arm of the launch experiment takes: its step in two ways, fractions, energy, check and backend."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from decodegap import launch, models
from decodegap.frame import from_frame, records_hash
from decodegap.grid import FLOORS, LEGEND, NOT_MEASURED, Fact, model_label
from decodegap.launch import Kept
from decodegap.render import Table
from decodegap.rows import CellRow
from decodegap.schema import Check
from decodegap.stats import MIN_FOR_INTERVAL
from decodegap.tables import DASH, flag_notes, number, share, step_text

if TYPE_CHECKING:
    import pandas as pd


def arms(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """Every arm in every cell of the launch experiment: its step in two ways, fractions, energy, check and backend."""
    rows = from_frame(frame[(frame["experiment"] == launch.EXPERIMENT) & (frame["gpu"] != "cpu")])
    timed = [row for row in rows if row.cell_arm != "check"]
    lines = sorted([*map(_line, timed), *_missing(timed)], key=_order)
    seen = _Seen(kept)
    return Table(
        name="arms",
        caption=(
            "Every arm of the launch experiment, bf16, batch 1. Step: synchronised after each; free-running: "
            "one synchronisation after many. Fractions: floor a (as published), b (streamed) and c (achievable), "
            "as in the grid, over the synchronised step."
        ),
        headers=(
            "GPU", "Model", "Context", "Arm", "Step (ms)", "Free-running", "Of a", "Of b", "Of c", "J/step",
            "Error (x eager's)", "SDPA", "Sessions", "Source",
        ),
        rows=tuple(_arm_row(line, seen) for line in lines),
        groups=tuple(f"{line.gpu} {line.model} {line.ctx}" for line in lines),
        numeric=(False, False, True, False, *[True] * 7, False, True, False),
        notes=(
            "Error: relative L2 error of the logits against an fp32 reference, as a multiple of eager's own in bf16.",
            "SDPA: the attention backend seen in a profiled step, not the one asked for.",
            *([f"Range: smallest and largest of fewer than {MIN_FOR_INTERVAL} sessions; not an interval."]
              if any(row.spread == "range" for row in timed) else []),
            *([f"{LEGEND['missing']}."] if any(line.row is None for line in lines) else []),
            *flag_notes(timed),
        ),
        data=tuple(_arm_data(line, seen) for line in lines),
        records=records_hash(frame),
    )  # fmt: skip


@dataclass(frozen=True)
class _Line:
    """A line of the table: a cell and arm, with the row of what was measured there, if anything was."""

    gpu: str
    gpu_label: str
    model: str
    ctx: int
    arm: str
    cell_arm: str
    row: CellRow | None = None


def _line(row: CellRow) -> _Line:
    return _Line(row.gpu, row.gpu_label, row.model, row.ctx, row.arm, row.cell_arm, row)


def _order(line: _Line) -> tuple[Any, ...]:
    known = list(models.catalogue())
    model = known.index(line.model) if line.model in known else len(known)
    place = (line.row.store, line.row.host) if line.row else ("", "")
    return line.gpu, model, line.model, line.ctx, launch.arm_index(line.arm), line.arm, place


class _Seen:
    """What was checked and attested, by store, cell and arm."""

    def __init__(self, kept: Iterable[Kept]) -> None:
        self.checks: dict[tuple[str, str, str, int, str], Check] = {}
        self.backends: dict[tuple[str, str, str, int, str], set[str]] = {}
        for each in kept:
            record = each.record
            if record.cell.experiment != launch.EXPERIMENT:
                continue
            at = (each.store, record.cell.gpu, record.cell.model, record.cell.ctx)
            for check in record.checks:
                self.checks[(*at, check.arm)] = check
            same = any(seen.kernels_equal for seen in record.attestations)
            if record.ran is None:
                continue
            for series in record.series:
                if series.arm == record.series[-1].arm or same:  # what ran was looked at in a session's last arm
                    self.backends.setdefault((*at, series.arm), set()).add(record.ran.sdpa)


def _missing(rows: Sequence[CellRow]) -> list[_Line]:
    have = {(row.gpu, row.model, row.ctx, row.arm) for row in rows}
    labels = {row.gpu: row.gpu_label for row in rows}
    lines = []
    for gpu, label in labels.items():
        for model, ctx, cell_arm in launch.planned(gpu):
            both = ("eager-pinned", "graph") if cell_arm == launch.SAME_WORK else (cell_arm,)
            lines += [
                _Line(gpu, label, model, ctx, arm, cell_arm)
                for arm in both
                if cell_arm != "check" and (gpu, model, ctx, arm) not in have
            ]
    return lines


def _arm_row(line: _Line, seen: _Seen) -> tuple[str, ...]:
    row = line.row
    head = (line.gpu_label, model_label(line.model), str(line.ctx), line.arm)
    wanted = launch.planned(line.gpu).get((line.model, line.ctx, line.cell_arm), 0)
    if row is None:
        return (*head, *[DASH] * 8, f"0 of {wanted}", f"missing: {NOT_MEASURED}")
    if row.outcome != "ok":
        return (*head, *[DASH] * 9, f"missing: {row.outcome}: {row.reason}")
    check, backends = _of(row, seen)
    host = f", host {row.hosts.index(row.host) + 1} of {len(row.hosts)}" if len(row.hosts) > 1 else ""
    return (
        *head,
        step_text(row),
        number(row.free_ms, 4),
        *[share(Fact("measured", getattr(row, f"fraction_{name}"))) for name in FLOORS],
        number(row.energy_j_per_step),
        _check_text(check),
        ", ".join(backends) or DASH,
        f"{row.sessions} of {wanted}" if row.sessions < wanted else str(row.sessions),
        f"measured, {row.store}{host}",
    )


def _arm_data(line: _Line, seen: _Seen) -> dict[str, Any]:
    row = line.row
    check, backends = _of(row, seen) if row else (None, [])
    names = (
        "store", "outcome", "reason", "step_ms", "low_ms", "high_ms", "spread", "free_ms", "event_ms",
        "energy_j_per_step", *[f"fraction_{name}" for name in FLOORS], "dispatch_us", "host", "sessions",
    )  # fmt: skip
    return (
        {"gpu": line.gpu, "model": line.model, "ctx": line.ctx, "arm": line.arm}
        | {"kind": "measured" if row and row.outcome == "ok" else "missing"}
        | {name: getattr(row, name) if row else None for name in names}
        | {
            "check_error": check.error if check else None,
            "check_eager_error": check.eager_error if check else None,
            "check_passed": check.passed if check else None,
            "sdpa": " ".join(backends),
            "records": " ".join(row.records) if row else "",
        }
    )


def _of(row: CellRow, seen: _Seen) -> tuple[Check | None, list[str]]:
    at = (row.store, row.gpu, row.model, row.ctx, row.arm)
    return seen.checks.get(at), sorted(seen.backends.get(at, ()))


def _check_text(check: Check | None) -> str:
    if check is None:
        return "not checked"
    times = f" ({check.error / check.eager_error:.2f}x)" if check.eager_error else ""
    return f"{number(check.error)}{times}" + ("" if check.passed else " failed")
