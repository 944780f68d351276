"""What is claimed, by the study and by this bundle, and when a claim counts as reproduced: `artifact/claims.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decodegap import gpus, models
from decodegap.errors import BadInputError
from decodegap.published import Published, Quantity

Measure = Literal[
    "fraction", "fraction-min", "fraction-median", "fraction-max", "falling", "valid-cells", "out-of-memory",
    "cells-measured", "pair-ratio", "pair-ratio-min", "pair-saving-ms", "step-ms", "quantised-order",
    "quantised-gain", "quantised-kept-promise", "quantised-over-floor", "quantised-attested", "weight-gb", "kv-kib",
    "floor-ms", "read-share", "attested", "graph-over-floor", "residual",
    "checks-passed", "auto-over-eager", "energy-ratio", "rung-gain",
]  # fmt: skip
MEASURES: tuple[str, ...] = get_args(Measure)
SPECIAL_GPUS = ("each", "study", "none")  # every GPU with records; the study's four together; arithmetic
Text = Annotated[str, Field(min_length=3, max_length=300)]


class Claim(BaseModel):
    """One claim: what is expected, from which experiment, how far off it may be, and why so far.

    `card` is the GPU whose datasheet an arithmetic claim is about, and `published_gpu` the study's GPU that `expected`
    is quoted for where that is not `gpu`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{1,40}$")]
    source: Literal["study", "ours"]
    experiment: Literal["baseline", "graphs", "quantised", "ladder", "none"]
    shown: Text
    text: Text
    kind: Literal["absolute", "ratio", "ordering"]
    gpu: str
    measure: Measure
    model: str | None = None
    ctx: Annotated[int, Field(ge=1)] | None = None
    arm: str | None = None
    card: str | None = None
    published: Quantity | None = None
    published_gpu: str | None = None
    expected: Annotated[float, Field(strict=False)]
    bound: Literal["within", "at-least", "at-most"] = "within"
    allowed: Annotated[float, Field(ge=0, le=1)] | None = None
    allowed_is: Literal["relative", "absolute"] = "relative"
    low: float | None = None
    high: float | None = None
    why: Text

    @model_validator(mode="after")
    def _possible(self) -> "Claim":
        for name, gpu in (("gpu", self.gpu), ("card", self.card), ("published_gpu", self.published_gpu)):
            if gpu is not None and gpu not in gpus.catalogue() and not (name == "gpu" and gpu in SPECIAL_GPUS):
                raise ValueError(f"{name}: no GPU of the catalogue is called {gpu!r}")
        if (self.allowed is None) == (self.low is None or self.high is None):
            raise ValueError("give either allowed, or both low and high")
        return self

    def limits(self) -> tuple[float | None, float | None]:
        """The smallest and the largest value that reproduce the claim; None where that side is open."""
        if self.low is not None:
            return self.low, self.high
        width = (self.allowed or 0.0) * (abs(self.expected) if self.allowed_is == "relative" else 1.0)
        low, high = self.expected - width, self.expected + width
        return (None if self.bound == "at-most" else low, None if self.bound == "at-least" else high)

    def holds(self, value: float) -> bool:
        """Whether `value` reproduces the claim."""
        low, high = self.limits()
        room = 1e-9 * max(1.0, abs(self.expected))  # a limit itself is allowed, whatever binary fractions make of it
        return (low is None or value >= low - room) and (high is None or value <= high + room)


@dataclass(frozen=True)
class Found:
    """What records say about a claim: a value, and what it was found from.

    `unsettled` says why the records do not decide; empty where they do.
    """

    value: float
    detail: str
    unsettled: str = ""


def load(path: Path, published: Published) -> tuple[Claim, ...]:
    """The claims in `path`; raise `BadInputError` with one line if it holds anything else.

    A claim whose expected value is said to be the study's must repeat the number of `published` exactly.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}; restore it with git") from None
    except (ValueError, RecursionError):
        raise BadInputError(f"{path}: not TOML; restore it with git") from None
    rows = table.get("claim")
    if set(table) != {"claim"} or not isinstance(rows, list) or not rows:
        raise BadInputError(f"{path}: holds something else than [[claim]] tables; restore it with git")
    found: dict[str, Claim] = {}
    for number, row in enumerate(rows, 1):
        name = row.get("id", number) if isinstance(row, dict) else number
        try:
            claim = Claim.model_validate(row)
            if claim.model is not None:
                claim = claim.model_copy(update={"model": models.lookup(claim.model).slug})
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise BadInputError(f"{path}: claim {name!r}: {f'{field}: ' if field else ''}{first['msg']}") from None
        except BadInputError as error:
            raise BadInputError(f"{path}: claim {name!r}: {error}") from None
        if claim.id in found:
            raise BadInputError(f"{path}: claim {claim.id!r} is there twice")
        _check_quoted(claim, published, path)
        found[claim.id] = claim
    return tuple(found.values())


def _check_quoted(claim: Claim, published: Published, path: Path) -> None:
    if claim.published is None:
        return
    gpu = claim.published_gpu or (None if claim.gpu in SPECIAL_GPUS else claim.gpu)
    here = [v for v in published.values if v.quantity == claim.published and v.gpu == gpu and _same_cell(v, claim)]
    if claim.expected not in [v.value for v in here]:
        quoted = ", ".join(str(v.value) for v in here) or "nothing"
        raise BadInputError(
            f"{path}: claim {claim.id!r}: expects {claim.expected:g}, "
            f"but the study's {claim.published} there is {quoted}"
        )


def _same_cell(value: object, claim: Claim) -> bool:
    """Whether a published value is about the claim's cell; one for all contexts names no model."""
    model, ctx = getattr(value, "model", None), getattr(value, "ctx", None)
    return model == claim.model and ctx in (claim.ctx, "all" if claim.ctx is None else claim.ctx)
