"""Which models are measured: the study's three, their CPU stand-ins, and what a config must look like."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decodegap import floor
from decodegap.errors import BadInputError
from decodegap.paths import DATA

Role = Literal["paper", "stand-in", "test"]


class DecoderConfig(BaseModel):
    """The fields of a Qwen2, Llama or Mistral `config.json` that fix shapes, bounded to what can exist.

    A local checkpoint's config goes through this before any memory is touched.
    """

    model_config = ConfigDict(extra="allow", frozen=True, protected_namespaces=())

    model_type: Literal["qwen2", "llama", "mistral"]
    hidden_size: int = Field(ge=8, le=65536)
    intermediate_size: int = Field(ge=8, le=262144)
    num_hidden_layers: int = Field(ge=1, le=256)
    num_attention_heads: int = Field(ge=1, le=512)
    num_key_value_heads: int = Field(ge=1, le=512)
    head_dim: int | None = Field(default=None, ge=2, le=1024)
    vocab_size: int = Field(ge=2, le=1_000_000)
    max_position_embeddings: int = Field(ge=1, le=16_777_216)
    tie_word_embeddings: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> "DecoderConfig":
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is not a multiple of num_attention_heads")
        return self


@dataclass(frozen=True)
class Model:
    """One model: its slug, its place on the hub, and the config values that fix its shapes."""

    slug: str
    label: str
    hf_id: str | None
    revision: str | None
    role: Role
    aliases: tuple[str, ...]
    config: dict[str, Any]

    def weight_bytes(self, dtype: str) -> int:
        """`W_all` in bytes for weights of `dtype`."""
        return floor.weight_bytes(self.config, floor.ELEMENT_BYTES[dtype])

    def streamed_bytes(self, dtype: str) -> int:
        """`W_streamed` in bytes for weights of `dtype`."""
        return floor.streamed_bytes(self.config, floor.ELEMENT_BYTES[dtype])

    def kv_bytes(self, ctx: int, dtype: str) -> int:
        """`K` in bytes at `ctx` tokens of context."""
        return floor.kv_bytes(self.config, ctx, floor.ELEMENT_BYTES[dtype])


def check_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `config` if its sizes are possible and agree; raise `BadInputError` naming the field and `where`."""
    try:
        DecoderConfig.model_validate(config)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "config"
        raise BadInputError(f"{where}: {field}: {first['msg']}; this is not a config that can be run") from None
    return config


@cache
def catalogue() -> dict[str, Model]:
    """Every model the bundle knows, by slug, in the order of the study and then the stand-ins."""
    found = [_read(path) for path in sorted((DATA / "models").glob("*.json"))]
    order = ["qwen2.5-7b", "llama-3.1-8b", "mistral-7b-v0.3", "qwen2-standin", "llama-standin", "mistral-standin"]
    found.sort(key=lambda m: (order.index(m.slug) if m.slug in order else len(order), m.slug))
    return {model.slug: model for model in found}


def lookup(slug: str, setting: str = "MODELS") -> Model:
    """The model called `slug` or one of its aliases; raise `BadInputError` naming `setting` and the known ones."""
    for model in catalogue().values():
        if slug == model.slug or slug in model.aliases:
            return model
    known = ", ".join(catalogue())
    raise BadInputError(f"{setting}: no model is called {slug!r}; known are {known}")


def with_role(role: Role) -> list[Model]:
    """The models of one role, in catalogue order."""
    return [model for model in catalogue().values() if model.role == role]


def _read(path: Path) -> Model:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return Model(
            slug=path.stem,
            label=data["label"],
            hf_id=data["hf_id"],
            revision=data["revision"],
            role=data["role"],
            aliases=tuple(data["aliases"]),
            config=check_config(data["config"], path.name),
        )
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise BadInputError(f"{path.name}: no model: {error}; git has the one that came with it") from None
