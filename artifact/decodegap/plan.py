"""Which cells an experiment on this GPU consists of, from strict, typed parameters."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from decodegap import gpus, models
from decodegap.errors import BadInputError
from decodegap.schema import Cell, Dtype, Experiment, Protocol

PROTOCOL_VERSION = 1
TIMING = "perf_counter_ns around step and device synchronisation; device events around the step"
PAPER_CONTEXTS = (2048, 4096, 8192, 16384)
CPU_CONTEXTS = (128, 512)
BASELINE_SESSIONS = 3
GRAPH_MODELS = ("qwen2.5-7b", "llama-3.1-8b")
GRAPH_CONTEXTS = (2048, 16384)
CPU_GRAPH_MODELS = ("qwen2-standin",)
PAIR_SESSIONS = 10
GRAPH_SESSIONS = 3
CHECK = "check"  # the session of a model and context that holds every arm against the reference, and times none
USERS_ARMS = ("eager", "eager-auto", "graph-static", "graph-stock", "compiled")
ANY_BACKEND = (CHECK, "eager-auto", "graph-stock")  # flash attention takes no mask, and a check pins arm by arm
MAX_SESSIONS = 100
OF_A_CELL = ("MODEL", "CTX")  # what make calls a model and a context where no grid is meant

Weights = Literal["synthetic", "hub", "local"]


@dataclass(frozen=True)
class Task:
    """One session to run: a cell, which repetition of it, how, and where real weights lie."""

    cell: Cell
    session: int
    protocol: Protocol
    weights_dir: str | None = None


@dataclass(frozen=True)
class Request:
    """What a user asked for, checked: every field can be planned as it stands."""

    gpu: str
    models: tuple[str, ...]
    contexts: tuple[int, ...]
    sessions: int
    weights: Weights
    weights_dir: str | None


def request(
    *,
    gpu: Any = "auto",
    models: Any = "",
    contexts: Any = "",
    sessions: Any = "",
    weights: Any = "synthetic",
    names: tuple[str, str] = ("MODELS", "CONTEXTS"),
) -> Request:
    """Check raw parameters (from make's environment, a notebook or papermill) and return them typed.

    `models` and `contexts` are lists or comma- or space-separated text, empty for the default of the GPU; `names` is
    what the user calls these two. Raises `BadInputError` with one line that names the parameter, the value and what is
    possible.
    """
    if not isinstance(gpu, str):
        raise BadInputError(f"GPU: {gpu!r} is not a name; give one like h100, auto or cpu")
    kind, folder = _weights(weights)
    return Request(
        gpu=gpus.check_slug(gpu),
        models=tuple(dict.fromkeys(_model(names[0], item) for item in items(names[0], models))),
        contexts=tuple(dict.fromkeys(positive(names[1], item, 16_777_216) for item in items(names[1], contexts))),
        sessions=positive("SESSIONS", sessions, MAX_SESSIONS) if sessions not in ("", None) else 0,
        weights=kind,
        weights_dir=folder,
    )


def items(name: str, value: Any) -> list[Any]:
    """The values of parameter `name`, a list or text with commas or spaces; empty where it is empty, else raise."""
    if isinstance(value, str):
        found = value.replace(",", " ").split()
        if value.strip() and not found:
            raise BadInputError(f"{name}: {value[:80]!r} names nothing; leave it empty for all of them")
        return found
    if isinstance(value, list | tuple):
        return list(value)
    if value is None:
        return []
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    raise BadInputError(f"{name}: {value!r} is not a list; give values with commas between them")


def _model(name: str, item: Any) -> str:
    return models.lookup(item, name).slug


def positive(name: str, value: Any, most: int) -> int:
    """The whole number that setting `name` holds; raise `BadInputError` unless it is one from 1 to `most`."""
    text = str(value)
    plain = isinstance(value, int | str) and not isinstance(value, bool) and text.isascii() and text.isdigit()
    if not plain or not 1 <= (number := int(text[:20])) <= most or text != str(number):
        raise BadInputError(f"{name}: {value!r} is not a whole number from 1 to {most}")
    return number


def _weights(value: Any) -> tuple[Weights, str | None]:
    if value in ("synthetic", "hub"):
        return cast("Weights", value), None
    if isinstance(value, str) and "/" in value:
        folder = place("WEIGHTS", value)
        if not folder.is_dir():
            raise BadInputError(f"WEIGHTS: no folder {value!r}; give synthetic, hub or a folder with safetensors")
        return "local", str(folder)
    raise BadInputError(f"WEIGHTS: {value!r} is neither synthetic, hub nor a path; a folder is written with a '/'")


def place(name: str, value: str) -> Path:
    """The path that parameter `name` gives, absolute; raise `BadInputError` for what no file system could hold."""
    try:
        path = Path(value).expanduser().resolve()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise BadInputError(f"{name}: {value[:80]!r} is not a path: {error}") from None
    return path


def dtype_on(gpu: str) -> Dtype:
    """Weights and activations: bf16 on a GPU as published; fp32 on a CPU, where bf16 is emulated on many."""
    return "float32" if gpu == "cpu" else "bfloat16"


def protocol(gpu: str, weights: Weights, weights_revision: str) -> Protocol:
    """The measuring protocol on this kind of device: 5 warm-up and 30 measured steps, as the study publishes."""
    on_cpu = gpu == "cpu"
    return Protocol(
        version=PROTOCOL_VERSION,
        warmup_steps=5,
        measured_steps=30,
        free_steps=10 if on_cpu else 30,
        energy_seconds=0.0 if on_cpu else 2.0,
        seed=0,
        prefill_chunk=512,
        timing=TIMING,
        weights=weights,
        weights_revision=weights_revision,
    )


def baseline(req: Request, gpu: str) -> list[Task]:
    """The baseline grid on `gpu`: models x contexts, arm `eager`, the session index outermost.

    An interrupted plan then holds whole passes over the grid, not some cells complete and others empty.
    """
    chosen = models_of(req, gpu)
    contexts = req.contexts or (CPU_CONTEXTS if gpu == "cpu" else PAPER_CONTEXTS)
    cells = [cell_of(gpu, "baseline", model, ctx, "eager") for model in chosen for ctx in contexts]
    return tasks_of(req, cells, req.sessions or BASELINE_SESSIONS)


def graphs(req: Request, gpu: str) -> list[Task]:
    """The launch experiment on `gpu`: a check per model and context, the A/B pairs, and the arms a user would meet.

    The checks come first, because an arm that fails is not timed. Then all sessions of the first pair, which is the
    published A/B; then the other pairs and arms in whole passes, the session index outermost. On a CPU the A/B is
    eager against compiled, and nothing else is timed.
    """
    on_cpu = gpu == "cpu"
    chosen = (
        models_of(req, gpu)
        if req.models
        else [models.lookup(slug) for slug in (CPU_GRAPH_MODELS if on_cpu else GRAPH_MODELS)]
    )
    contexts = req.contexts or (CPU_CONTEXTS[:1] if on_cpu else GRAPH_CONTEXTS)

    def cells(*names: str) -> list[Cell]:
        return [cell_of(gpu, "graphs", model, ctx, arm) for model in chosen for ctx in contexts for arm in names]

    first, *pairs = cells("ab-compiled" if on_cpu else "ab")
    others = [] if on_cpu else cells(*USERS_ARMS)
    return [
        *tasks_of(req, cells(CHECK), 1),
        *tasks_of(req, [first], req.sessions or (GRAPH_SESSIONS if on_cpu else PAIR_SESSIONS)),
        *tasks_of(req, [*pairs, *others], req.sessions or GRAPH_SESSIONS),
    ]


def check_task(task: Task) -> Task:
    """The check that goes with a task: same experiment, model, context and protocol, in the GPU's usual dtype."""
    gpu = task.cell.gpu
    cell = task.cell.model_copy(update={"arm": CHECK, "sdpa": sdpa_on(gpu, CHECK), "dtype": dtype_on(gpu)})
    return Task(cell=cell, session=1, protocol=task.protocol, weights_dir=task.weights_dir)


def sdpa_on(gpu: str, arm: str) -> str:
    """The SDPA backend to ask for: flash as published, `auto` where the arm needs PyTorch's own choice."""
    return "auto" if gpu == "cpu" or arm in ANY_BACKEND else "flash"


def models_of(req: Request, gpu: str) -> list[models.Model]:
    """The models that `req` asks for, or else the study's on a GPU and the stand-ins on a CPU."""
    if req.models:
        return [models.lookup(slug) for slug in req.models]
    return models.with_role("stand-in" if gpu == "cpu" else "paper")


def cell_of(
    gpu: str, experiment: Experiment, model: models.Model, ctx: int, arm: str, *, dtype: Dtype | None = None
) -> Cell:
    """The cell with its SDPA backend, in the GPU's usual dtype if none is given.

    Raises `BadInputError` for a context that the model does not have.
    """
    longest = int(model.config["max_position_embeddings"])
    if ctx > longest:
        raise BadInputError(f"CONTEXTS: {ctx} is beyond the {longest} positions of {model.slug}")
    dtype = dtype or dtype_on(gpu)
    sdpa = sdpa_on(gpu, arm)
    return Cell(gpu=gpu, experiment=experiment, model=model.slug, ctx=ctx, arm=arm, dtype=dtype, sdpa=sdpa)


def tasks_of(req: Request, cells: Sequence[Cell], sessions: int) -> list[Task]:
    """So many sessions of each cell, the session index outermost."""
    revisions = {slug: weights_revision(req, models.lookup(slug)) for slug in {cell.model for cell in cells}}
    return [
        Task(
            cell=cell,
            session=session,
            protocol=protocol(cell.gpu, req.weights, revisions[cell.model][0]),
            weights_dir=revisions[cell.model][1],
        )
        for session in range(1, sessions + 1)
        for cell in cells
    ]


def weights_revision(req: Request, model: models.Model) -> tuple[str, str | None]:
    """Which weights exactly, and their folder if they are local.

    Synthetic: the name of the initialisation. Hub: the pinned commit. Local: a hash of the config and of each
    safetensors file's name and size, so that another checkpoint is another protocol. Raises `BadInputError`.
    """
    if req.weights == "synthetic":
        return "normal-0.02-v1", None
    if req.weights == "hub":
        if model.hf_id is None or model.revision is None:
            raise BadInputError(f"WEIGHTS=hub: {model.slug} has no weights on the hub; use WEIGHTS=synthetic")
        return model.revision, None
    folder = _checkpoint(Path(req.weights_dir or ""), model)
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size};".encode())
    return digest.hexdigest()[:16], str(folder)


def _checkpoint(folder: Path, model: models.Model) -> Path:
    for candidate in (folder / model.slug, folder):
        if (candidate / "config.json").is_file():
            if not any(candidate.glob("*.safetensors")):
                raise BadInputError(f"WEIGHTS: {candidate} holds no .safetensors file; pickled weights are not loaded")
            return candidate
    raise BadInputError(f"WEIGHTS: neither {folder / model.slug} nor {folder} holds a config.json")


def task_to_json(task: Task) -> str:
    """`task` as one line of JSON for a session's standard input."""
    return json.dumps(
        {
            "cell": task.cell.model_dump(),
            "session": task.session,
            "protocol": task.protocol.model_dump(),
            "weights_dir": task.weights_dir,
        }
    )


def task_from_json(text: str) -> Task:
    """The task that `task_to_json` wrote; raise `BadInputError` for anything else."""
    try:
        data = json.loads(text)
        return Task(
            cell=Cell.model_validate(data["cell"]),
            session=int(data["session"]),
            protocol=Protocol.model_validate(data["protocol"]),
            weights_dir=data["weights_dir"],
        )
    except (ValueError, KeyError, TypeError):
        raise BadInputError("a session reads one task as JSON on standard input; it got something else") from None
