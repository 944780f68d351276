"""What the study itself says: its numbers, each with its source, and what they imply by arithmetic."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decodegap import floor, gpus, models
from decodegap.errors import BadInputError

DTYPE = "bfloat16"  # every published cell is bf16

Quantity = Literal[
    "peak_gb_s",
    "weight_gb",
    "kv_kib_per_token",
    "floor_fraction",
    "floor_fraction_min",
    "floor_fraction_max",
    "floor_fraction_median",
    "excluded_oom",
    "step_ms",
    "step_ms_table8",
    "step_ms_profiled",
    "graph_speedup",
    "graph_speedup_cv_percent",
    "graph_saving_ms",
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Paper(_Strict):
    """Which text the numbers are from."""

    title: str
    author: str
    arxiv: str
    version: str
    date: str


class Value(_Strict):
    """One number of the study. `ctx` is in tokens, `all` for every cell of the GPU, None where it plays no part."""

    gpu: str | None
    model: str | None
    ctx: Annotated[int, Field(ge=1)] | Literal["all"] | None
    quantity: Quantity
    value: Annotated[float, Field(gt=0)] | None
    source: str
    arm: str | None = None
    ci95: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    sessions: int | None = None


class Published(_Strict):
    """All of the study's numbers, model names resolved to the slugs used here."""

    paper: Paper
    sources: dict[str, str]
    protocol: str
    values: tuple[Value, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _consistent(self) -> "Published":
        keys = set()
        for value in self.values:
            where = " ".join(str(part) for part in (value.gpu, value.model, value.ctx, value.quantity) if part)
            if value.source not in self.sources:
                raise ValueError(f"{where}: source {value.source!r} is not described")
            if value.gpu is not None and value.gpu not in gpus.catalogue():
                raise ValueError(f"{where}: no GPU of the catalogue is called {value.gpu!r}")
            if (value.value is None) != (value.quantity == "excluded_oom"):
                raise ValueError(f"{where}: a value is missing, or given for an excluded cell")
            if value.quantity.startswith("floor_fraction") and not 0 < (value.value or 0) <= 1:
                raise ValueError(f"{where}: a fraction of a floor lies between 0 and 1")
            if (key := (value.gpu, value.model, value.ctx, value.quantity, value.arm)) in keys:
                raise ValueError(f"{where}: given twice")
            keys.add(key)
        return self

    def find(
        self,
        quantity: Quantity,
        *,
        gpu: str | None = None,
        model: str | None = None,
        ctx: int | Literal["all"] | None = None,
        arm: str | None = None,
    ) -> Value | None:
        """The value of `quantity` for exactly these coordinates, or None if the study (as known here) does not say."""
        for value in self.values:
            if (value.quantity, value.gpu, value.model, value.ctx, value.arm) == (quantity, gpu, model, ctx, arm):
                return value
        return None

    def cell(self, gpu: str, model: str, ctx: int) -> Iterator[Value]:
        """Everything that the study says about one cell."""
        return (v for v in self.values if (v.gpu, v.model, v.ctx) == (gpu, model, ctx))

    def fraction(self, gpu: str, model: str, ctx: int) -> float | None:
        """The published fraction of the published floor in one baseline cell, or None if it is not quoted."""
        value = self.find("floor_fraction", gpu=gpu, model=model, ctx=ctx)
        return value.value if value else None

    def excluded(self, gpu: str, model: str, ctx: int) -> bool:
        """Whether the study is known to have lost this cell to an out-of-memory error."""
        return self.find("excluded_oom", gpu=gpu, model=model, ctx=ctx) is not None

    def out_of_memory(self, gpu: str, model: str, ctx: int) -> bool:
        """Whether the study lost this cell to an out-of-memory error, or one of the same model with less context."""
        lost = (v for v in self.values if (v.quantity, v.gpu, v.model) == ("excluded_oom", gpu, model))
        return any(isinstance(value.ctx, int) and value.ctx <= ctx for value in lost)

    def implied_step_ms(self, gpu: str, model: str, ctx: int) -> float | None:
        """The step (ms) that the published fraction implies: floor as published / fraction.

        Nobody published this number; wherever it is shown it is marked as implied.
        """
        fraction = self.fraction(gpu, model, ctx)
        if fraction is None:
            return None
        found, peak_gb_s = models.lookup(model), gpus.known(gpu).peak_gb_s
        n_bytes = found.weight_bytes(DTYPE) + found.kv_bytes(ctx, DTYPE)
        return floor.floor_ms(n_bytes, peak_gb_s) / fraction if peak_gb_s else None


def load(path: Path) -> Published:
    """The study's numbers from `path`; raise `BadInputError` with one line if it holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for value in data["values"]:
            if value["model"] is not None:
                value["model"] = models.lookup(value["model"]).slug
        return Published.model_validate(data)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror}; restore it with git") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "values"
        raise BadInputError(f"{path}: {field}: {first['msg']}; restore it with git") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadInputError(f"{path}: not the study's values in JSON; restore it with git") from None
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None
