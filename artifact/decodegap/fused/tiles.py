"""How the work of each kernel is cut up: the tile shapes, found by a tuner, in a data file per card."""

from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import Any

from decodegap import datafile
from decodegap.errors import BadInputError
from decodegap.fused.shape import GROUP, TILED, UNIT_ROWS, Shape
from decodegap.paths import DATA

FOLDER = DATA / "fused"
START_FROM = "h200"  # a model that was not tuned on a card starts from this one's tiles
MOST_WARPS = 32
FULL_BITS = 16


@dataclass(frozen=True)
class Matvec:
    """How a matrix-vector kernel is cut: rows (of `gate_up`, pairs) a program, columns a tile, tiles in flight."""

    rows: int
    block: int
    warps: int
    ahead: int = 1
    maxnreg: int | None = None  # registers a thread at most; None leaves it to the compiler


@dataclass(frozen=True)
class Attention:
    """How attention is cut: splits of the context, tokens a tile, and whether one kernel or two do the work."""

    splits: int
    block: int
    warps: int
    double: bool = False  # the next tile is asked for before this one is used
    joined: bool = False  # the last program adds up the splits; else a kernel of its own does
    maxnreg: int | None = None


Tile = Matvec | Attention


@dataclass(frozen=True)
class Tiles:
    """The tiles of a whole step. `source` says where they come from."""

    qkv: Matvec
    attention: Attention
    o: Matvec
    gate_up: Matvec
    down: Matvec
    lm_head: Matvec
    source: str = ""

    def of(self, kernel: str) -> Tile:
        """The tile of one of `TILED`."""
        tile: Tile = getattr(self, kernel)
        return tile

    def having(self, kernel: str, tile: Tile) -> "Tiles":
        """The same with another tile for one kernel."""
        changes: dict[str, Any] = {kernel: tile}
        return replace(self, **changes)


def load_tiles(model: str, gpu: str, ctx: int, bits: int = 16) -> Tiles:
    """The tiles for a model and card: those of the smallest context that is not below `ctx`, else of the largest.

    A model that the card's own file lacks starts from an H200's, which then are a start for tuning and no more. Raises
    `BadInputError` for a model that neither file knows.
    """
    known = {**_file(START_FROM), **_file(gpu)}
    model = entry_name(model, bits)
    if model not in known:
        raise BadInputError(f"data/fused has no tiles for {model!r}; it has them for {', '.join(known)}")
    contexts = sorted(known[model])
    return known[model][next((at for at in contexts if at >= ctx), contexts[-1])]


def known_tiles(gpu: str, bits: int) -> list[Tiles]:
    """A card's entries for projections in so many bits, and those of the card that one without its own starts from."""
    files = [_file(name) for name in dict.fromkeys((gpu, START_FROM))]
    return [
        tiles
        for known in files
        for model, per in known.items()
        if model == entry_name(model.partition("-int")[0], bits)
        for tiles in per.values()
    ]


def entry_name(model: str, bits: int) -> str:
    """What a data file calls a model with projections in so many bits."""
    return model if bits == FULL_BITS else f"{model}-int{bits}"


@cache
def _file(gpu: str) -> dict[str, dict[int, Tiles]]:
    path = FOLDER / f"{gpu}.toml"
    if not path.exists():
        return {}
    found: dict[str, dict[int, Tiles]] = {}
    for model, per in datafile.load(path, dict[str, dict[str, dict[str, Any]]]).items():
        for key, entry in per.items():
            where, ctx = f"{path.name}: {model}.{key}", key.removeprefix("ctx-")
            if not ctx.isdecimal():
                raise BadInputError(f"{where}: not a context such as ctx-2048; git has the file that came with it")
            found.setdefault(model, {})[int(ctx)] = from_dict(entry, where)
    return found


def from_dict(entry: dict[str, Any], where: str) -> Tiles:
    """Tiles from an entry of a data file; `BadInputError` says what is missing or unknown in it."""
    try:
        made: dict[str, Any] = {name: (Attention if name == "attention" else Matvec)(**entry[name]) for name in TILED}
        found = Tiles(**made, source=entry.get("source", ""))
    except (KeyError, TypeError) as error:
        raise BadInputError(f"{where}: {error}; an entry has {', '.join(TILED)} and a source") from None
    for name in TILED:
        for key, value in entry[name].items():
            if not isinstance(value, int):
                raise BadInputError(f"{where}: {name}: {key} is {value!r} and must be a whole number, true or false")
    return found


def to_toml(model: str, ctx: int, tiles: Tiles) -> str:
    """The entry of a data file that holds `tiles`."""
    lines = [f'["{model}".ctx-{ctx}]', f'source = "{tiles.source}"']
    for name in TILED:
        pairs = [
            f"{key} = {_literal(value)}" for key, value in asdict(tiles.of(name)).items() if value not in (None, False)
        ]
        lines.append(f"{name} = {{ {', '.join(pairs)} }}")
    return "\n".join(lines) + "\n"


def _literal(value: int | bool) -> str:
    return str(value).lower()


def check_tiles(tiles: Tiles, shape: Shape) -> None:
    """Raise `BadInputError` that names the kernel, the field and what it must be, if `tiles` do not fit `shape`."""
    for name in TILED:
        tile = tiles.of(name)
        few, narrow = least(name, shape, tile.warps)
        for field in fields(tile):
            value = getattr(tile, field.name)
            if field.name in ("block", "warps", "rows") and (value < 1 or value & (value - 1)):
                raise BadInputError(f"tiles: {name}: {field.name} is {value}, which is no power of two")
        if tile.warps > MOST_WARPS:
            raise BadInputError(f"tiles: {name}: warps is {tile.warps}, more than {MOST_WARPS}")
        if isinstance(tile, Attention):
            if tile.block < 16 or tile.splits < 1:
                raise BadInputError(f"tiles: {name}: block must be at least 16 and splits at least 1")
        elif shape.rows(name) % tile.rows or tile.rows < few or tile.block < narrow or tile.ahead < 1:
            raise BadInputError(
                f"tiles: {name}: rows is {tile.rows} and must divide {shape.rows(name)} and be {few} at least, "
                f"block is {tile.block} and must be {narrow} at least, ahead is {tile.ahead} and must be 1 at least"
            )


def least(kernel: str, shape: Shape, warps: int) -> tuple[int, int]:
    """The fewest rows (of `gate_up`, pairs) and columns that a tile of a matrix-vector kernel can have.

    In 4 bits that is a matrix unit's tile, and a group of columns for each warp.
    """
    if kernel == "attention" or shape.bits_of(kernel) == FULL_BITS:
        return (2 if kernel == "qkv" else 1), 8
    return UNIT_ROWS // (2 if kernel == "gate_up" else 1), GROUP * warps


def default_tiles(shape: Shape) -> Tiles:
    """Tiles that run on any shape, tuned for none: what a small model takes."""

    def matvec(name: str) -> Matvec:
        if shape.bits_of(name) == 4:
            few, narrow = least(name, shape, 2)
            return Matvec(rows=few, block=narrow, warps=2, ahead=2)
        rows = next(rows for rows in (4, 2, 1) if shape.rows(name) % rows == 0)
        block = min(1024, 1 << (shape.columns(name) - 1).bit_length())
        return Matvec(rows=rows, block=block, warps=4, ahead=2)

    made: dict[str, Any] = {name: matvec(name) for name in TILED if name != "attention"}
    return Tiles(**made, attention=Attention(splits=8, block=32, warps=2), source="untuned")
