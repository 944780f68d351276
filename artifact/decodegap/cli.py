"""What `python -m decodegap VERB` does: a thin wrapper that reads make's settings from the environment."""

import argparse
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from decodegap import execute, experiment, gpus, publish, records, runner, verbs_fused, verbs_review
from decodegap.errors import BadRecordError, DecodeGapError, NotFitError, NotMeasuredError
from decodegap.paths import HERE
from decodegap.plan import Task
from decodegap.rows import counted, sessions
from decodegap.schema import Cell
from decodegap.settings import Context, context, here, require_card, tasks
from decodegap.typeset import TypesetError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
WILL, WILL_NOT = "will be measured", "will not be measured"


def mode(ctx: Context, *, must_measure: bool = False, on_a_card: bool = False, settings_of: str | None = None) -> None:
    """Print `measure` or `replay`, so that make knows which packages are needed; refuse what cannot be done here."""
    if settings_of:
        CHECKS[settings_of](ctx)
    if must_measure:
        gpus.require(ctx.request.gpu, ctx.devices)
    if on_a_card:
        require_card(ctx)
    tasks(ctx)
    print("measure" if ctx.measurable else "replay")
    print(f"decode-gap: {here(ctx)}", file=sys.stderr)


def measure(ctx: Context) -> None:
    """Measure what is missing, each experiment through its notebook."""
    gpus.require(ctx.request.gpu, ctx.devices)
    for name in ctx.experiments:
        parameters = {
            "gpu": ctx.gpu.slug,
            "models": list(ctx.request.models),
            "contexts": list(ctx.request.contexts),
            "sessions": ctx.request.sessions or "",
            "weights": ctx.request.weights_dir or ctx.request.weights,
            "results": str(ctx.store),
        }
        execute.run(experiment.NOTEBOOKS[name], parameters, ctx.store / ctx.gpu.slug / "notebooks", ctx.store)


def reproduce(ctx: Context) -> None:
    """Measure if the GPU is here, else replay; rebuild the paper's tables and figures; say what stands where."""
    failed: list[DecodeGapError] = []
    if ctx.measurable:
        with _kept_for_the_end(failed):
            measure(ctx)
    execute.run(
        "05_paper", {"gpu": ctx.gpu.slug, "results": str(ctx.store)}, ctx.store / ctx.gpu.slug / "notebooks", ctx.store
    )
    with _kept_for_the_end(failed):
        verbs_review.document()
    with _kept_for_the_end(failed):
        summary(ctx)
    for error in failed[:-1]:
        print(f"decode-gap: {error}", file=sys.stderr)
    if failed:
        raise failed[-1]


@contextlib.contextmanager
def _kept_for_the_end(failed: list[DecodeGapError]) -> Iterator[None]:
    """Note in `failed` that something is not measured or cannot be typeset: what follows is worth having without it."""
    try:
        yield
    except (NotMeasuredError, TypesetError) as error:
        failed.append(error)


def summary(ctx: Context) -> None:
    """Say what is measured, published, predicted or missing and why, line by line, and where the files are."""
    from decodegap import report, standing

    print(f"\n{here(ctx)}")
    lines = standing.lines(ctx.gpu.slug, tasks(ctx), ctx.store, HERE)
    for item in lines:
        print(f"  {item.text()}")
    print("Files:")
    for place in report.places(ctx.gpu.slug, ctx.store, HERE):
        print(f"  {os.path.relpath(place)}")
    lacking = [item for item in lines if item.kind != "measured"]
    if ctx.require_measured and lacking:
        raise NotMeasuredError(
            f"REQUIRE=measured: {len(lacking)} of {len(lines)} cells are not measured, first {lacking[0].text()}"
        )


def status(ctx: Context) -> None:
    """Every session of the plan: measured already, or to be measured, or why not; and what is shipped instead."""
    print(here(ctx))
    shipped = {} if ctx.gpu.slug == "cpu" else _shipped(ctx.gpu.slug)
    todo = instead = 0
    for task in tasks(ctx):
        state = _state(ctx, task)
        todo += state.startswith(WILL)
        if state.startswith(WILL_NOT) and (outcome := shipped.get((task.cell, task.session))):
            state = f"shipped ({outcome}), {state}"
            instead += 1
        print(f"  {task.cell.experiment} {runner.name(task)}: {state}")
    others = (
        f"; {instead} of the others are shipped, which `make reproduce GPU={ctx.gpu.slug}` shows" if instead else ""
    )
    print(f"{sessions(todo)} to measure{others}")


def _shipped(gpu: str) -> dict[tuple[Cell, int], str]:
    """The outcome of each shipped session of `gpu`."""
    return {(record.cell, record.session): record.outcome for record in records.load_shipped(HERE.results, gpu)}


def _state(ctx: Context, task: Task) -> str:
    try:
        record = runner.valid_record(task, ctx.store)
    except BadRecordError as error:
        state = f"{WILL} again" if ctx.measurable else f"{WILL_NOT}, and what is kept of it is broken"
        return f"{state}: {str(error).split(': ', 1)[-1]}"
    if record is not None:
        if record.outcome == "ok":
            return "measured"
        again = os.path.relpath(records.path_of(ctx.store, task.cell, task.session))
        return f"{record.outcome}: {'; '.join(record.reasons)}; remove {again} to try again"
    if runner.refused(task, ctx.store):
        return "unsupported: an earlier session of it says why"
    if ctx.measurable:
        return WILL
    return f"{WILL_NOT}: {gpus.absence(ctx.gpu, ctx.devices)}"


def publish_records(ctx: Context) -> None:
    """Make the local records of the GPU the shipped ones."""
    copied = publish.publish(ctx.gpu.slug, ctx.store, HERE.results)
    print(f"published {counted(len(copied), 'record')} of {ctx.gpu.slug}; now run `make figures tables` and commit")


def figures(ctx: Context) -> None:
    """Rebuild every figure from the records."""
    _rebuild(ctx, "figures")


def tables(ctx: Context) -> None:
    """Rebuild every table from the records."""
    _rebuild(ctx, "tables")


def _rebuild(ctx: Context, what: str) -> None:
    from decodegap import report

    only = None if ctx.request.gpu == "auto" else ctx.gpu.slug
    for path in report.rebuild(HERE, {what}, store=ctx.store, gpu=only):
        print(os.path.relpath(path))


def provenance(ctx: Context) -> None:
    """Say which records, hosts, versions and commit are behind the file that FILE names."""
    from decodegap import provenance as trace

    print("\n".join(trace.lines(os.environ.get("FILE", ""), ctx.store)))


def anatomy(ctx: Context) -> None:
    """Say where one cell's step goes, measured now in a fresh process."""
    from decodegap import anatomy_cli

    anatomy_cli.show(os.environ, ctx.gpu.slug, ctx.store)


def _anatomy_task(ctx: Context) -> Task:
    from decodegap import anatomy_cli

    return anatomy_cli.task(os.environ, ctx.gpu.slug)


def doctor(ctx: Context) -> None:
    """Say whether this machine is fit to measure the GPU on."""
    from decodegap import doctor as fit

    lines, code = fit.doctor(ctx.request.gpu, ctx.store)
    print("\n".join(lines))
    if code:
        raise NotFitError("this machine is not fit to measure on; see above")


def clean(ctx: Context) -> None:
    """Remove the executed notebooks and the kernel's files; records stay."""
    for folder in [ctx.store / ".jupyter", *ctx.store.glob("*/notebooks"), *ctx.store.glob("*/report")]:
        shutil.rmtree(folder, ignore_errors=True)


def lab(ctx: Context) -> None:
    """JupyterLab on the notebooks, on loopback with its token, with this interpreter as the kernel."""
    env = dict(os.environ) | execute.kernel_environment(ctx.store)
    subprocess.run(lab_command(), env=env, check=False)


def lab_command() -> list[str]:
    """JupyterLab: on loopback whatever a user's own configuration says, with its token, which is the default."""
    loopback = ("--ServerApp.ip=127.0.0.1", "--ServerApp.allow_remote_access=False")
    command = [sys.executable, "-m", "jupyterlab", *loopback, f"--notebook-dir={HERE.root}"]
    return [*command, str(HERE.notebooks / "05_paper.ipynb")]


def bench(ctx: Context) -> None:
    """What the bundle itself costs: the phases of real sessions, the runner, loading and rebuilding."""
    from decodegap import bench as benchmark

    for text in benchmark.lines(ctx.store):
        print(text, flush=True)


VERBS: dict[str, Callable[[Context], None]] = {
    "measure": measure,
    "reproduce": reproduce,
    "status": status,
    "publish": publish_records,
    "figures": figures,
    "tables": tables,
    "summary": summary,
    "provenance": provenance,
    "anatomy": anatomy,
    "doctor": doctor,
    "bench": bench,
    "clean": clean,
    "lab": lab,
    **verbs_review.VERBS,
    **verbs_fused.VERBS,
}
# What reads the settings that only one verb has, without torch.
CHECKS: dict[str, Callable[[Context], object]] = {"anatomy": _anatomy_task, **verbs_fused.CHECKS}
MEASURING = ("measure", "reproduce")


def main(argv: list[str] | None = None) -> int:
    """Run one verb; 0, or the error's exit code after its one line on standard error."""
    parser = argparse.ArgumentParser(prog="decodegap", description="Settings are environment variables: see make help")
    parser.add_argument("verb", choices=["mode", *VERBS])
    parser.add_argument("--must-measure", action="store_true", help="mode only: fail if the GPU is not here")
    parser.add_argument("--on-a-card", action="store_true", help="mode only: fail if there is no GPU")
    parser.add_argument("--settings-of", choices=CHECKS, help="mode only: fail if these make no sense to this verb")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's way of saying Ctrl-C
    try:
        ctx = context(os.environ)
        if args.verb == "mode":
            mode(ctx, must_measure=args.must_measure, on_a_card=args.on_a_card, settings_of=args.settings_of)
        else:
            VERBS[args.verb](ctx)
        sys.stdout.flush()
    except DecodeGapError as error:
        print(f"decode-gap: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has seen enough, as `head` does
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None and error.errno not in NO_SPACE:
            raise
        where, way_out = f"{error.filename}: ", "restore it with git, or mend its rights"
        if error.errno in NO_SPACE:
            where, way_out = where if error.filename else "what is said goes to a file: ", "free some space"
            _drop_output()
        print(f"decode-gap: {where}{error.strerror}; {way_out}", file=sys.stderr)
        return DecodeGapError.exit_code
    except KeyboardInterrupt:
        kept = "what was measured is kept, and the same command goes on from here"
        said = kept if args.verb in MEASURING else "nothing is left half-written; the same command starts again"
        print(f"decode-gap: stopped; {said}", file=sys.stderr)
        return 130
    return 0


def _drop_output() -> None:
    """Let what is still to be written to standard output, at the end too, go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
