"""The tables a reviewer asks for: verdicts, what it means for a machine that acts, and what each experiment costs."""

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from decodegap.frame import from_frame, records_hash
from decodegap.grid import LEGEND, MARKS, model_label
from decodegap.published import Published
from decodegap.render import Table
from decodegap.rows import CellRow, counted, whose
from decodegap.schema import Record
from decodegap.tables import DASH, number, step
from decodegap.verdicts import Verdict, count

if TYPE_CHECKING:
    import pandas as pd

ACTION_TOKENS = (8, 64, 256)  # a short action, a sentence, a plan
NOT_ARMS = ("check",)
AGAIN = ("baseline", "ladder")  # experiments whose arms the launch experiment measures too
ENERGY_NOTE = (
    "Energy: the card's own counter over a loop of at least 2 s without synchronisation, host not included; "
    f"{DASH}: the card has no counter, or the arm was not looped."
)
COST_NOTE = (
    "A session is a fresh process; starting it adds under a second that its record cannot hold. Every experiment is "
    "one command and needs nobody beside it."
)


def claims(verdicts: Sequence[Verdict], records: str) -> Table:
    """One line a claim: what is expected, what was found, how far apart, how far is allowed, and the verdict."""
    words = ", ".join(f"{number} {word}" for word, number in count(verdicts).items())
    return Table(
        name="claims",
        caption=(
            "Each claim of the study and of this bundle against the records of the GPU that it is about. "
            f"{counted(len(verdicts), 'verdict')}: {words}."
        ),
        headers=("Whose", "Experiment", "Claim", "Kind", "Expected", "Found", "Difference", "Allowed", "Verdict"),
        rows=tuple(_claim_row(verdict) for verdict in verdicts),
        groups=tuple(f"{verdict.claim.source} {verdict.claim.experiment}" for verdict in verdicts),
        numeric=(*[False] * 4, True, True, True, False, False),
        notes=(
            f"Found: {LEGEND['measured']}; {LEGEND['predicted']}, without records of that GPU; (a): arithmetic.",
            "Expected: the study's numbers are published (arXiv 2605.30571); ours follow from claims.toml's reasons.",
        ),
        data=tuple(_claim_data(verdict) for verdict in verdicts),
        records=records,
    )


def actions(frame: "pd.DataFrame", _published: Published) -> Table:
    """Tokens a second, decisions a second and joules a token, per GPU and arm, of the first paper model's contexts."""
    rows = [row for row in from_frame(frame) if row.outcome == "ok" and row.step_ms and row.gpu != "cpu"]
    rows = [row for row in rows if row.arm not in NOT_ARMS and (row.experiment not in AGAIN or not _again(row, rows))]
    order = {(row.gpu, row.store, row.model, row.ctx): index for index, row in reversed(list(enumerate(rows)))}
    rows.sort(key=lambda row: order[row.gpu, row.store, row.model, row.ctx])
    return Table(
        name="actions",
        caption=(
            "What a step means for a machine that acts: tokens a second, decisions a second if a decision is an action "
            f"of {', '.join(map(str, ACTION_TOKENS))} tokens (decode alone, without the prefill of what was observed), "
            "and energy. All measured."
        ),
        headers=("GPU", "Model", "Context", "Experiment", "Arm", "Step (ms)", "Tokens/s",
                 *[f"{n}-token actions/s" for n in ACTION_TOKENS], "J/token", "Sessions", "Host"),
        rows=tuple(_action_row(row) for row in rows),
        groups=tuple(f"{row.gpu} {row.store} {row.model} {row.ctx}" for row in rows),
        numeric=(False, False, True, False, False, *[True] * (4 + len(ACTION_TOKENS)), False),
        notes=(ENERGY_NOTE, "Host: which of those that measured this experiment on this GPU."),
        data=tuple(_action_data(row) for row in rows),
        records=records_hash(frame),
    )  # fmt: skip


def costs(found: Sequence[Record], records: str, sizes: dict[str, int] | None = None) -> Table:
    """What each experiment takes on each GPU: sessions, seconds a session, minutes in all, memory, bytes on disk.

    `sizes` are the bytes of the record files by content hash.
    """
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        groups.setdefault((record.cell.gpu, record.cell.experiment), []).append(record)
    data = [_cost(gpu, name, each, sizes or {}) for (gpu, name), each in sorted(groups.items())]
    return Table(
        name="costs",
        caption="What the shipped measurements took, from their own records: phases of each session, added up.",
        headers=("GPU", "Experiment", "Sessions", "Median session (s)", "GPU minutes", "Peak memory (GB)",
                 "Records (MB)", "torch", "Driver"),
        rows=tuple((d["gpu"], d["experiment"], str(d["sessions"]), f"{d['median_s']:.0f}", f"{d['minutes']:.1f}",
                    number(d["peak_gb"]), f"{d['record_mb']:.2f}", d["torch"], d["driver"]) for d in data),
        groups=tuple(d["gpu"] for d in data),
        numeric=(False, False, True, True, True, True, True, False, False),
        notes=(COST_NOTE,),
        data=tuple(data),
        records=records,
    )  # fmt: skip


def _claim_row(v: Verdict) -> tuple[str, ...]:
    named = v.claim.text if v.claim.gpu != "each" or not v.gpu else f"{v.gpu}: {v.claim.text}"
    mark = {"predicted": MARKS["predicted"], "arithmetic": " (a)"}.get(v.basis, "")
    difference = DASH if v.difference is None else f"{v.difference:+.3g}"
    head = (v.claim.source, v.claim.experiment, named, v.claim.kind)
    return (*head, _plain(v.claim.expected), DASH if v.value is None else
            _plain(v.value) + mark, difference, allowed_text(v), v.word)  # fmt: skip


def allowed_text(v: Verdict) -> str:
    """The limits within which a value reproduces the claim."""
    low, high = v.claim.limits()
    if low is None:
        return f"≤ {_plain(high or 0.0)}"
    return f"≥ {_plain(low)}" if high is None else f"{_plain(low)}–{_plain(high)}" if low != high else _plain(low)


def _plain(value: float) -> str:
    return f"{value:.4g}"


def _claim_data(v: Verdict) -> dict[str, Any]:
    claim, (low, high) = v.claim, v.claim.limits()
    return {
        "id": claim.id, "source": claim.source, "claim": claim.text, "experiment": claim.experiment,
        "shown": claim.shown, "kind": claim.kind, "gpu": v.gpu or claim.gpu, "expected": claim.expected,
        "value": v.value, "difference": v.difference, "allowed_low": low, "allowed_high": high, "why": claim.why,
        "verdict": v.word, "basis": v.basis, "predicted_low": v.low, "predicted_high": v.high, "detail": v.detail,
    }  # fmt: skip


def _again(row: CellRow, rows: Iterable[CellRow]) -> bool:
    """Whether the launch experiment measured the same arm of the same cell in the same store too."""

    def cell(of: CellRow) -> tuple[str, str, str, int, str, str]:
        return of.store, of.gpu, of.model, of.ctx, of.arm, of.host

    return any(r.experiment == "graphs" and cell(r) == cell(row) and r.sessions >= row.sessions for r in rows)


def _action_row(row: CellRow) -> tuple[str, ...]:
    data = _action_data(row)
    host = f"{row.hosts.index(row.host) + 1} of {len(row.hosts)}"
    rates = [number(data[f"actions_{n}_per_s"]) for n in ACTION_TOKENS]
    system = row.gpu_label + whose(row.store)
    return (system, model_label(row.model), str(row.ctx), row.experiment, row.arm, step(row),
            number(data["tokens_per_s"]), *rates, number(row.energy_j_per_step), str(row.sessions), host)  # fmt: skip


def _action_data(row: CellRow) -> dict[str, Any]:
    per_s = 1e3 / (row.step_ms or 1.0)
    base: dict[str, Any] = {name: getattr(row, name) for name in ("gpu", "model", "ctx", "arm", "experiment", "store")}
    rates = {f"actions_{n}_per_s": per_s / n for n in ACTION_TOKENS}
    return base | {"step_ms": row.step_ms, "tokens_per_s": per_s} | rates | {
        "j_per_token": row.energy_j_per_step, "sessions": row.sessions, "host": row.host,
        "records": " ".join(row.records)}  # fmt: skip


def _cost(gpu: str, experiment: str, found: Sequence[Record], sizes: dict[str, int]) -> dict[str, Any]:
    seconds = [sum(record.durations_s.values()) for record in found]
    drivers = {record.machine.driver for record in found if record.machine and record.machine.driver}
    return {
        "gpu": gpu, "experiment": experiment, "sessions": len(found), "median_s": statistics.median(seconds),
        "longest_s": max(seconds), "minutes": sum(seconds) / 60,
        "peak_gb": max(r.peak_memory_bytes or 0 for r in found) / 1e9,
        "record_mb": sum(sizes.get(record.content_hash, 0) for record in found) / 1e6,
        "torch": ", ".join(sorted({record.versions.get("torch", "") for record in found})),
        "driver": ", ".join(sorted(drivers)),
    }  # fmt: skip
