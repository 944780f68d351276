"""What a reviewer holds against the records, as files: the verdicts with their findings, and what measuring took."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodegap import claims, frame, records, render, report, tables_review, tensions, verdicts
from decodegap.paths import HERE, Places
from decodegap.published import Published
from decodegap.rows import counted
from decodegap.schema import Record
from decodegap.tensions import Finding
from decodegap.verdicts import Verdict

if TYPE_CHECKING:
    from decodegap.exhibits import View

GOAL = "-goal"  # how the name of a claim ends that says what to strive for beyond what must hold


def judged(at: Places = HERE, store: Path | None = None, gpu: str = "") -> list[Verdict]:
    """The verdicts over the shipped records, or over all that the local report of `gpu` in `store` shows."""
    view = report.local(gpu, store, at) if store is not None and gpu not in ("", "cpu") else None
    return _over(view or report.paper(at), at)


def show(view: "View", at: Places = HERE) -> Any:
    """The verdicts over what `view` shows, with the findings, for a notebook to display."""
    from IPython.display import Markdown

    found = _over(view, at)
    table = tables_review.claims(found, frame.records_hash(view.frame))
    findings = tensions.findings(view.published)
    return Markdown("\n".join([render.markdown(table), "", *(f"- {finding.text}" for finding in findings)]))


def _over(view: "View", at: Places) -> list[Verdict]:
    stores = ([each.record for each in view.kept if each.store == store] for store in ("shipped", "yours", "imported"))
    return verdicts.judge(claims.load(at.claims, view.published), view.published, *stores)


def lines(found: Sequence[Verdict], findings: Sequence[Finding], gpu: str = "") -> Iterator[str]:
    """The verdicts and findings as `make verify` prints them, those about `gpu`, if it has any, first."""
    about = [verdict for verdict in found if gpu and verdict.gpu == gpu]
    if about:
        yield f"About {gpu}:"
        for verdict in about:
            yield from _verdict_lines(verdict)
        yield "About other GPUs, the study's together, and arithmetic:"
    for verdict in found:
        if verdict not in about:
            yield from _verdict_lines(verdict)
    yield "Findings among the study's own numbers:"
    yield from (f"  {finding.text}" for finding in findings)
    missed = missed_claims(found)
    yield f"Not reproduced: {', '.join(verdict.claim.id for verdict in missed) or 'none'}"
    yield _counts(found)
    if about:
        yield f"of these, about {gpu}: {_counts(about)}"


def missed_claims(found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts that say no: goals, which may be missed, behind what must hold."""
    return sorted((v for v in found if v.word == "not reproduced"), key=is_goal)


def missed_count(missed: Sequence[Verdict]) -> str:
    """How many of these verdicts are of claims that must hold, and how many of goals: `1 claim and 6 goals`."""
    goals = sum(map(is_goal, missed))
    counts = ((len(missed) - goals, "claim"), (goals, "goal"))
    return " and ".join(counted(n, what) for n, what in counts if n) or "none"


def is_goal(verdict: Verdict) -> bool:
    """Whether the claim is one to strive for, and may be missed."""
    return verdict.claim.id.endswith(GOAL)


def _counts(found: Sequence[Verdict]) -> str:
    return ", ".join(f"{number} {word}" for word, number in verdicts.count(found).items())


def _verdict_lines(verdict: Verdict) -> Iterator[str]:
    made = tables_review.claims([verdict], "")
    row = dict(zip(made.headers, made.rows[0], strict=True))
    whose = "paper" if verdict.claim.source == "study" else "expected"
    yours = {"shipped": "shipped records", "imported": "imported records", "": "found"}.get(
        verdict.basis, verdict.basis
    )
    yield f"{row['Claim']}: {row['Verdict']}"
    yield (f"    {whose} {row['Expected']}, {yours} {row['Found']}, difference {row['Difference']}, "
           f"allowed {row['Allowed']}; {verdict.detail}")  # fmt: skip


def files(
    folder: Path, found: Sequence[Verdict], findings: Sequence[Finding], digest: str
) -> Iterator[tuple[Path, bytes]]:
    """The verdicts as Markdown, CSV, LaTeX and JSON in `folder`, path and content."""
    table = tables_review.claims(found, digest)
    yield folder / "claims.md", _markdown(render.markdown(table), found, findings).encode()
    yield folder / "claims.csv", render.csv_text(table).encode()
    yield folder / "claims.tex", render.latex(table).encode()
    yield folder / "findings.tex", _items_latex([each.text for each in findings], digest).encode()
    missed = [_missed_text(verdict) for verdict in missed_claims(found)] or ["None."]
    yield folder / "missed.tex", _items_latex(missed, digest).encode()
    data = {
        "records": digest,
        "counts": verdicts.count(found),
        "claims": list(table.data),
        "findings": [{"id": each.id, "text": each.text, "numbers": each.numbers} for each in findings],
    }
    yield folder / "claims.json", (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def paper_files(at: Places, shipped: Sequence[Record], study: Published) -> Iterator[tuple[Path, bytes]]:
    """What the paper needs beside the tables of the frame: verdicts, findings and costs of the shipped records."""
    digest = frame.records_hash(frame.build(shipped))
    found = verdicts.judge(claims.load(at.claims, study), study, shipped)
    yield from files(at.generated, found, tensions.findings(study), digest)
    table = tables_review.costs(shipped, digest, sizes(at.results, shipped))
    for suffix, write in (("md", render.markdown), ("csv", render.csv_text), ("tex", render.latex)):
        yield at.generated / f"{table.name}.{suffix}", write(table).encode()


def sizes(store: Path, found: Sequence[Record]) -> dict[str, int]:
    """Bytes of each record's file, by its content hash."""
    return {r.content_hash: records.path_of(store, r.cell, r.session).stat().st_size for r in found}


def _markdown(table: str, found: Sequence[Verdict], findings: Sequence[Finding]) -> str:
    detail = [f"- **{v.claim.id}**{f' on {v.gpu}' if v.claim.gpu == 'each' and v.gpu else ''}: {v.word}; {v.detail}. "
              f"Shown in {v.claim.shown}. Allowed because {v.claim.why}." for v in found]  # fmt: skip
    missed = [f"- {_missed_text(verdict)}" for verdict in missed_claims(found)] or ["None."]
    tensions_text = [f"- {finding.text}" for finding in findings]
    heads = (
        *("", "## Not reproduced", "", *missed),
        *("", "## Findings among the study's own numbers", "", *tensions_text),
        *("", "## Claim by claim", "", *detail),
    )
    return "\n".join([table.rstrip("\n"), *heads, ""])


def _missed_text(v: Verdict) -> str:
    """A claim that is not reproduced, in a sentence: what was asked, what was found, and what the records say of it."""
    made = tables_review.claims([v], "")
    row = dict(zip(made.headers, made.rows[0], strict=True))
    return f"{row['Claim']} ({v.claim.id}): {row['Found']}, allowed {row['Allowed']}; {v.detail}."


def _items_latex(texts: Sequence[str], digest: str) -> str:
    items = [rf"\item {render.latex_escape(text)}" for text in texts]
    return "\n".join([f"% records {digest}", r"\begin{itemize}", *items, r"\end{itemize}", ""])
