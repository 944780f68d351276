"""What an experiment notebook does: check its parameters, plan, run, and say what came out."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decodegap import gpus, parameters, plan, plan_ladder, plan_quantised, records, runner
from decodegap.errors import BadInputError
from decodegap.paths import HERE
from decodegap.plan import Request, Task

PARAMETERS = ("gpu", "models", "contexts", "sessions", "weights", "results")
PLANS: dict[str, Callable[[Request, str], list[Task]]] = {
    "baseline": plan.baseline,
    "graphs": plan.graphs,
    "quantised": plan_quantised.quantised,
    "ladder": plan_ladder.ladder,
}
NOTEBOOKS = {
    "baseline": "01_baseline",
    "graphs": "02_cuda_graphs",
    "quantised": "03_quantised",
    "ladder": "04_closing_the_gap",
}


@dataclass(frozen=True)
class Experiment:
    """One experiment, planned on one GPU, with the store its records go to."""

    name: str
    gpu: str
    store: Path
    tasks: Sequence[Task]


def from_notebook(name: str, names: Mapping[str, Any]) -> Experiment:
    """The experiment `name` with the parameters found among a notebook's global `names`; checked strictly."""
    given = parameters.notebook_parameters(names, PARAMETERS)
    results = given.pop("results", "")
    if not isinstance(results, str):
        raise BadInputError(f"results: {results!r} is not a folder")
    return prepare(name, plan.request(**given), store(results))


def prepare(name: str, req: Request, where: Path) -> Experiment:
    """Plan experiment `name` for the GPU that `req` means on this machine. Raises where that GPU is not here."""
    gpu, _device = gpus.require(req.gpu, gpus.detect())
    return Experiment(name=name, gpu=gpu.slug, store=where, tasks=PLANS[name](req, gpu.slug))


def store(results: str) -> Path:
    """The folder that local records live in: `results`, or the checkout's own when it is empty."""
    return plan.place("RESULTS", results) if results else HERE.local


def run(experiment: Experiment) -> runner.Report:
    """Measure what is missing of `experiment`, printing one progress line a session."""
    if experiment.name == "quantised" and experiment.gpu != "cpu":
        build_kernels(experiment)
    return runner.run(experiment.tasks, experiment.store, say=lambda text: print(text, flush=True))


def build_kernels(experiment: Experiment) -> None:
    """Compile the quantised paths' kernels that are not there, unless everything is measured; say how it goes.

    In a process of its own, which ends before the first session: one that holds the card's context would be a
    neighbour to every session. What cannot be compiled is said here, and its paths are then unsupported.
    """
    paths = (records.path_of(experiment.store, task.cell, task.session) for task in experiment.tasks)
    if all(path.exists() for path in paths):
        return
    command = [sys.executable, "-m", "decodegap.quant_kernels"]
    env = runner.environment(None) | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as build:
        for line in build.stdout or ():
            print(line.rstrip(), flush=True)


def show_table(experiment: Experiment, name: str = "grid") -> Any:
    """Table `name` over this machine's records beside the shipped ones, for a notebook to display."""
    from IPython.display import Markdown

    from decodegap import exhibits, report

    shown = exhibits.show_table(report.local(experiment.gpu, experiment.store), name)
    return shown or Markdown(f"No record here for the table `{name}`.")


def show_figure(experiment: Experiment, name: str = "context") -> Any:
    """Figure `name` over this machine's records beside the shipped ones, for a notebook to display."""
    from decodegap import exhibits, report

    return exhibits.show_figure(report.local(experiment.gpu, experiment.store), name)


def show_reasons(experiment: Experiment) -> Any:
    """Why quantised paths are not faster, in a paragraph over the same records, for a notebook to display."""
    from decodegap import exhibits, report

    return exhibits.show_reasons(report.local(experiment.gpu, experiment.store))
