"""Whether a TOML file that came with the bundle holds what it must."""

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from decodegap.errors import BadInputError

T = TypeVar("T")


def load(path: Path, kind: type[T]) -> T:
    """What the file at `path` holds, checked to be of `kind`; raises `BadInputError` naming what of it is broken."""
    try:
        return TypeAdapter(kind).validate_python(tomllib.loads(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        first = error.errors()[0]
        wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except (ValueError, RecursionError) as error:
        wrong = str(error)
    raise BadInputError(f"{path.name}: {wrong}; git has the one that came with it")
