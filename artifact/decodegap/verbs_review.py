"""What make's reviewing targets do: verdicts, one table or figure, the paper, records that travel, the archive."""

import os
from typing import TYPE_CHECKING

from decodegap.errors import BadInputError, NotMeasuredError
from decodegap.paths import HERE

if TYPE_CHECKING:
    from collections.abc import Callable

    from decodegap.settings import Context


def verify(ctx: "Context") -> None:
    """Print and write a verdict for every claim, judged by your records of the GPU if there are any."""
    from decodegap import published, report, review, tensions, verdicts

    if (strict := os.environ.get("STRICT", "")) not in ("", "0", "1"):
        raise BadInputError(f"STRICT: {strict[:80]!r}; give 1 to fail on a claim that is not reproduced")
    found = review.judged(HERE, ctx.store, ctx.gpu.slug)
    findings = tensions.findings(published.load(HERE.published))
    print("\n".join(review.lines(found, findings, ctx.gpu.slug)))
    for path in report.rebuild_claims(ctx.gpu.slug, ctx.store, found, findings):
        print(os.path.relpath(path))
    if strict != "1":
        return
    if failed := review.missed_claims(found):
        raise NotMeasuredError(f"STRICT: {review.missed_count(failed)} not reproduced, first {failed[0].claim.text}")
    if not any(verdict.gpu == ctx.gpu.slug and verdict.word == verdicts.WORDS[0] for verdict in found):
        raise NotMeasuredError(f"STRICT: no claim about {ctx.gpu.slug} is measured here, so none is reproduced")


def figure(_ctx: "Context") -> None:
    """Rebuild the figure that NAME names."""
    from decodegap import report

    for path in report.rebuild_one("figure", os.environ.get("NAME", "")):
        print(os.path.relpath(path))


def table(_ctx: "Context") -> None:
    """Rebuild the table that NAME names."""
    from decodegap import report

    for path in report.rebuild_one("table", os.environ.get("NAME", "")):
        print(os.path.relpath(path))


def paper(ctx: "Context") -> None:
    """Run the paper's notebook, then build the document."""
    from decodegap import execute

    parameters = {"gpu": ctx.gpu.slug, "results": str(ctx.store)}
    execute.run("05_paper", parameters, ctx.store / ctx.gpu.slug / "notebooks", ctx.store)
    document()


def document() -> None:
    """Build the HTML paper, and the PDF where TeX is; say which packages it needs where it is not.

    Raises `TypesetError` if TeX is there and breaks, once the page is built.
    """
    from decodegap import report, typeset, webpage

    print(os.path.relpath(webpage.build()))
    if lacking := typeset.missing_tools():
        print(f"no PDF: {lacking[0]} is not installed ({typeset.INSTALL})")
        return
    print(os.path.relpath(typeset.pdf(report.epoch_s(report.paper()))))
    if idle := typeset.unused():
        print(f"warning: the paper quotes these generated numbers nowhere: {', '.join(idle)}")
    for line in typeset.overfull():
        print(f"warning: {line}")


def export(ctx: "Context") -> None:
    """Pack the records of the GPU for someone else."""
    import hashlib

    from decodegap import bundle

    path = bundle.export(ctx.gpu.slug, ctx.store, HERE.results, HERE.root / "build")
    print(f"{os.path.relpath(path)} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


def bring(ctx: "Context") -> None:
    """Check the tar that FROM names and take its records into the local store."""
    from decodegap import bundle, plan

    source = os.environ.get("FROM", "")
    if not source:
        raise BadInputError("FROM: names no file; `make import FROM=their.tar` takes what `make export` wrote")
    print(bundle.describe(bundle.bring(plan.place("FROM", source), ctx.store, ctx.request.gpu), ctx.store))


def archive(_ctx: "Context") -> None:
    """Pack the bundle for a DOI archive."""
    import tomllib

    from decodegap import archive as tarball
    from decodegap import report

    project = tomllib.loads((HERE.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for path in tarball.build(project["version"], report.epoch_s(report.paper()), HERE.root / "build"):
        print(os.path.relpath(path))


VERBS: dict[str, "Callable[[Context], None]"] = {
    "verify": verify,
    "figure": figure,
    "table": table,
    "paper": paper,
    "export": export,
    "import": bring,
    "archive": archive,
}
