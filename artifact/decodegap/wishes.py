"""What `make tune` and `make bench-kernels` are asked for, as far as it can be checked before torch is installed."""

from collections.abc import Mapping
from dataclasses import dataclass

from decodegap import models, plan, plan_ladder
from decodegap.errors import BadInputError

SECONDS = 120  # a model and context; a round over some 400 candidates takes about half of it
MOST_SECONDS = 86_400


@dataclass(frozen=True)
class Wish:
    """What is to be tuned: models with contexts, seconds for each, which kernels, and whether to keep the result."""

    cells: tuple[tuple[str, int], ...]
    seconds: int
    kernels: tuple[str, ...]
    write: bool
    bits: int = 16


def wish(env: Mapping[str, str]) -> Wish:
    """The settings MODEL, CTX, SECONDS, KERNELS, BITS and WRITE in `env`; raises `BadInputError`.

    The kernels are as they are written, perhaps none: which there are, the fused step knows, and it needs torch.
    """
    req = plan.request(models=env.get("MODEL", ""), contexts=env.get("CTX", ""), names=plan.OF_A_CELL)
    chosen = req.models or tuple(plan_ladder.CONTEXTS)
    cells = [(slug, ctx) for slug in chosen for ctx in req.contexts or plan_ladder.CONTEXTS.get(slug, (2048,))]
    for slug, ctx in cells:
        _check_length(slug, ctx)
    kernels = tuple(dict.fromkeys(plan.items("KERNELS", env.get("KERNELS", ""))))
    if (write := env.get("WRITE", "")) not in ("", "0", "1"):
        raise BadInputError(f"WRITE: {write[:60]!r}; give 1 to keep the tiles that are found")
    seconds = plan.positive("SECONDS", env.get("SECONDS") or SECONDS, MOST_SECONDS)
    return Wish(tuple(cells), seconds, kernels, write == "1", bits(env))


def cell(env: Mapping[str, str]) -> tuple[str, int]:
    """The one model and context that MODEL and CTX in `env` ask for, by default the first of the ladder.

    Raises `BadInputError`.
    """
    first = next(iter(plan_ladder.CONTEXTS))
    given = (env.get("MODEL") or first, env.get("CTX") or plan_ladder.CONTEXTS[first][0])
    req = plan.request(models=given[0], contexts=given[1], names=plan.OF_A_CELL)
    if len(req.models) != 1 or len(req.contexts) != 1:
        raise BadInputError(f"{' and '.join(plan.OF_A_CELL)}: give one of each")
    _check_length(req.models[0], req.contexts[0])
    return req.models[0], req.contexts[0]


def bits(env: Mapping[str, str]) -> int:
    """The bits of a projection's weight that BITS in `env` asks for; raises `BadInputError` unless 16 or 4."""
    if (given := env.get("BITS") or "16") not in ("16", "4"):
        raise BadInputError(f"BITS: {given[:60]!r}; give 16 or 4")
    return int(given)


def _check_length(slug: str, ctx: int) -> None:
    longest = int(models.lookup(slug).config["max_position_embeddings"])
    if ctx > longest:
        raise BadInputError(f"CTX: {ctx} is beyond the {longest} positions of {slug}")
