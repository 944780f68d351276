"""What the A/B gives: its ratios with their intervals beside the study's, and every session behind them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from decodegap import gpus, launch, stats, steadiness
from decodegap.frame import records_hash
from decodegap.grid import LEGEND, MARKS, NOT_MEASURED, model_label
from decodegap.launch import Kept, Paired, PairedSession
from decodegap.published import Published, Value
from decodegap.render import Table
from decodegap.rows import sessions as count_sessions
from decodegap.stats import METHODS, MIN_FOR_INTERVAL
from decodegap.tables import DASH, number

if TYPE_CHECKING:
    import pandas as pd

QUOTED = MARKS["published"]
PAIR_HEADERS = (
    "GPU", "Model", "Context", "Sessions", "Eager (ms)", "Other (ms)", "Saved (ms)", "Ratio", "Median", "95% BCa",
    "Percentile", "t", "Source",
)  # fmt: skip
ONE_NUMBER_NOTES = (
    "Ratio: mean over sessions of eager / other; Median: the middle one.",
    (
        "In parentheses after each interval: how often such an interval held the true ratio in 1,000 simulated "
        "experiments of as many sessions, with a log-normal noise as wide as these sessions' own and a drift common to "
        "both arms."
    ),
    f"Fewer than {MIN_FOR_INTERVAL} sessions give a range, which is no interval; one session gives neither.",
)


def ab(frame: "pd.DataFrame", kept: Sequence[Kept], published: Published) -> Table:
    """The A/B: eager over graph in each cell, with three intervals, beside the study's two ratios."""
    found = [pair for pair in launch.pairs(kept) if pair.where.gpu != "cpu"]
    missing = _missing_pairs(found)
    quoted = [value for value in published.values if value.quantity == "graph_speedup"]  # noqa: PD011
    return Table(
        name="ab",
        caption=(
            "The price of launching: the same step enqueued kernel by kernel (eager) and replayed from one CUDA graph "
            "(other), interleaved in each fresh session, one paired ratio a session."
        ),
        headers=PAIR_HEADERS,
        rows=(
            *map(_pair_row, found),
            *(_missing_row(*each[1:]) for each in missing),
            *(_quoted_row(value, published) for value in quoted),
        ),
        groups=(*(p.where.gpu for p in found), *(gpu for gpu, *_ in missing), *(f"study {v.gpu}" for v in quoted)),
        numeric=(False, False, *[True] * 10, False),
        notes=(
            *ONE_NUMBER_NOTES,
            *_attested_notes(found),
            *_host_notes(found),
            f"{LEGEND['published']}. Which kind of interval it gives is not known here; for the L4 none is known.",
            *([f"{LEGEND['missing']}."] if missing else []),
        ),
        data=(*map(_pair_data, found), *(_quoted_data(value) for value in quoted)),
        records=records_hash(frame),
    )  # fmt: skip


def cpu_ab(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """The A/B on a CPU, where compiling takes the graph's place."""
    found = [pair for pair in launch.pairs(kept) if pair.where.gpu == "cpu"]
    return Table(
        name="cpu-ab",
        caption=(
            "Eager against torch.compile (other) on this machine's CPU, fp32, interleaved in each fresh session. "
            "Compiling fuses operators: it changes the kernels, so this ratio is not the price of launching alone."
        ),
        headers=PAIR_HEADERS,
        rows=tuple(map(_pair_row, found)),
        groups=tuple(pair.where.model for pair in found),
        numeric=(False, False, *[True] * 10, False),
        notes=(
            *ONE_NUMBER_NOTES,
            *_attested_notes(found),
            *_host_notes(found),
            *(
                f"Ratios of {p.where.short}: {', '.join(number(s.ratio, 4) for s in p.counted)}."
                for p in found
                if p.counted
            ),
        ),
        data=tuple(map(_pair_data, found)),
        records=records_hash(frame),
    )


def sessions(frame: "pd.DataFrame", kept: Sequence[Kept]) -> Table:
    """Every A/B session: its ratio, both steps, whether it is attested, its host and what a launch cost that host."""
    found = [(pair, session) for pair in launch.pairs(kept) if pair.where.gpu != "cpu" for session in pair.sessions]
    return Table(
        name="ab-sessions",
        caption=(
            "Every session of the A/B. Attested: on a changed token and with poisoned buffers, both arms gave the same "
            "logits bit for bit, and the multisets of their kernels were equal."
        ),
        headers=(
            "GPU", "Model", "Context", "Session", "Ratio", "Eager (ms)", "Graph (ms)", "Attested", "Dispatch (µs)",
            "Host",
        ),
        rows=tuple(_session_row(pair, session) for pair, session in found),
        groups=tuple(pair.where.short for pair, _ in found),
        numeric=(False, False, *[True] * 5, False, True, False),
        notes=("Dispatch: what starting one tiny kernel cost that host in that session.",),
        data=tuple(_session_data(pair, session) for pair, session in found),
        records=records_hash(frame),
    )  # fmt: skip


def _missing_pairs(found: Sequence[Paired]) -> list[tuple[str, str, str, int, int]]:
    have = {(pair.where.gpu, pair.where.model, pair.where.ctx) for pair in found}
    labels = {pair.where.gpu: pair.where.gpu_label for pair in found}
    return [
        (gpu, label, model, ctx, wanted)
        for gpu, label in labels.items()
        for (model, ctx, arm), wanted in launch.planned(gpu).items()
        if arm == launch.SAME_WORK and (gpu, model, ctx) not in have
    ]


def _missing_row(label: str, model: str, ctx: int, wanted: int) -> tuple[str, ...]:
    return (label, model_label(model), str(ctx), f"0 of {wanted}", *[DASH] * 8, f"missing: {NOT_MEASURED}")


def _pair_row(pair: Paired) -> tuple[str, ...]:
    cell, summary = pair.where, pair.summary
    head = (cell.gpu_label, model_label(cell.model), str(cell.ctx))
    wanted = launch.planned(cell.gpu).get((cell.model, cell.ctx, pair.arm), 0)
    counted = len(pair.counted)
    count = f"{counted} of {wanted}" if counted < wanted else str(counted)
    if summary is None:
        why = "; ".join(dict.fromkeys(doubt for session in pair.sessions for doubt in session.doubts))
        return (*head, count, *[DASH] * 8, f"missing: {why}")
    eager, other = pair.step_ms(0), pair.step_ms(1)
    return (
        *head,
        count,
        number(eager, 4) + _unstable(pair, pair.first),
        number(other, 4) + _unstable(pair, pair.second),
        number(eager - other, 4),
        number(summary.mean, 4),
        number(_median(pair), 4),
        *_interval_texts(pair),
        f"measured, {cell.store}",
    )


def _unstable(pair: Paired, arm: str) -> str:
    """The mark of an arm that did not hold still in one of the sessions."""
    found = [(each.kept.record, series) for each in pair.counted for series in each.kept.record.series]
    shaky = any(series.arm == arm and steadiness.doubts(record, series) for record, series in found)
    return steadiness.MARK if shaky else ""


def _interval_texts(pair: Paired) -> list[str]:
    summary = pair.summary
    if summary is None or summary.spread == "degenerate":
        return [DASH] * len(METHODS)
    if summary.spread == "range":
        return [f"range {summary.low:.3f}–{summary.high:.3f}", DASH, DASH]
    return [
        f"{low:.3f}–{high:.3f} ({pair.coverage[method]:.2f})"
        for method, (low, high) in ((m, summary.intervals[m]) for m in METHODS)
    ]


def _median(pair: Paired) -> float:
    return stats.median([session.ratio for session in pair.counted if session.ratio is not None])


def _pair_data(pair: Paired) -> dict[str, Any]:
    summary = pair.summary
    data = _empty_pair(pair.where.gpu, pair.where.model, pair.where.ctx) | {
        "kind": "measured" if summary else "missing",
        "store": pair.where.store,
        "first": pair.first,
        "second": pair.second,
        "sessions": len(pair.counted),
        "attested": sum(not session.doubts for session in pair.counted),
        "hosts": " ".join(pair.hosts),
        "records": " ".join(session.kept.record.content_hash for session in pair.sessions),
    }
    if summary is None:
        return data
    data |= {
        "first_ms": pair.step_ms(0),
        "second_ms": pair.step_ms(1),
        "ratio": summary.mean,
        "median": _median(pair),
        "spread": summary.spread,
        "low": summary.low,
        "high": summary.high,
        "ratios": " ".join(repr(session.ratio) for session in pair.counted),
    }
    for method, (low, high) in summary.intervals.items():
        data |= {f"{method}_low": low, f"{method}_high": high, f"{method}_coverage": pair.coverage.get(method)}
    return data


def _empty_pair(gpu: str, model: str, ctx: Any) -> dict[str, Any]:
    names = (
        "kind", "store", "first", "second", "sessions", "attested", "first_ms", "second_ms", "ratio", "median",
        "spread", "low", "high", *[f"{m}_{part}" for m in METHODS for part in ("low", "high", "coverage")],
        "ratios", "hosts", "records",
    )  # fmt: skip
    return {"gpu": gpu, "model": model, "ctx": ctx} | dict.fromkeys(names)


def _quoted_row(value: Value, published: Published) -> tuple[str, ...]:
    at = {"gpu": value.gpu, "model": value.model, "ctx": value.ctx}
    steps = [published.find("step_ms", **at, arm=arm) for arm in ("eager", "cuda_graph")]  # type: ignore[arg-type]
    saved = published.find("graph_saving_ms", **at)  # type: ignore[arg-type]
    known = [number(v.value, 4) + QUOTED if v else DASH for v in (*steps, saved)]
    interval = f"{value.ci95[0]:g}–{value.ci95[1]:g}{QUOTED}" if value.ci95 else DASH
    label = gpus.known(value.gpu).label if value.gpu else DASH
    return (
        label, model_label(value.model or ""), str(value.ctx), f"{value.sessions}{QUOTED}" if value.sessions else DASH,
        *known, number(value.value, 4) + QUOTED, DASH, interval, DASH, DASH, "published",
    )  # fmt: skip


def _quoted_data(value: Value) -> dict[str, Any]:
    low, high = value.ci95 or (None, None)
    known = {"kind": "published", "ratio": value.value, "low": low, "high": high, "sessions": value.sessions}
    return _empty_pair(value.gpu or "", value.model or "", value.ctx) | known


def _attested_notes(found: Sequence[Paired]) -> list[str]:
    notes = []
    for pair in (each for each in found if each.counted):
        good = sum(not session.doubts for session in pair.sessions)
        doubts = dict.fromkeys(doubt for session in pair.sessions for doubt in session.doubts)
        why = f" ({'; '.join(doubts)})" if doubts else ""
        notes.append(
            f"{pair.where.short}, {pair.first} and {pair.second}: {good} of {count_sessions(len(pair.sessions))} "
            f"attested as the same work{why}."
        )
    return notes


def _host_notes(found: Sequence[Paired]) -> list[str]:
    return [
        f"{pair.where.short}: sessions of {len(pair.hosts)} hosts ({', '.join(pair.hosts)}) stand in one mean."
        for pair in found
        if len(pair.hosts) > 1
    ]


def _session_row(pair: Paired, session: PairedSession) -> tuple[str, ...]:
    steps = [number(ms, 4) for ms in session.steps_ms] if session.steps_ms else [DASH, DASH]
    return (
        pair.where.system,
        model_label(pair.where.model),
        str(pair.where.ctx),
        str(session.kept.record.session),
        number(session.ratio, 4),
        *steps,
        f"no: {'; '.join(session.doubts)}" if session.doubts else "yes",
        number(session.kept.dispatch_us),
        session.kept.host or DASH,
    )


def _session_data(pair: Paired, session: PairedSession) -> dict[str, Any]:
    first, second = session.steps_ms or (None, None)
    return {
        "gpu": pair.where.gpu,
        "model": pair.where.model,
        "ctx": pair.where.ctx,
        "store": pair.where.store,
        "session": session.kept.record.session,
        "ratio": session.ratio,
        "first": pair.first,
        "second": pair.second,
        "first_ms": first,
        "second_ms": second,
        "attested": not session.doubts,
        "doubts": "; ".join(session.doubts),
        "dispatch_us": session.kept.dispatch_us,
        "host": session.kept.host,
        "record": session.kept.record.content_hash,
    }
