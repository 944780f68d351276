"""How the tuner asks a real card: which models, compiled how, timed how, and where the tiles that it finds are kept."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from decodegap import locks, models, records, tune, wishes
from decodegap.errors import BadInputError, NotMeasuredError
from decodegap.fused.search import ORDER, candidates, familiar, tighter
from decodegap.fused.shape import shape_of
from decodegap.fused.tiles import FOLDER, Tile, Tiles, entry_name, known_tiles, load_tiles, to_toml
from decodegap.sources import versions
from decodegap.tune import Card, Journal, Say
from decodegap.wishes import Wish

if TYPE_CHECKING:
    from decodegap.fused.bench import Truth
    from decodegap.fused.compiled import Built
    from decodegap.fused.launches import Kernel
    from decodegap.fused.layout import Loaded

CAPPING = 0.15  # of the seconds, for caps on the registers of what was found without
QUICK_STEPS, CLOSE_STEPS = 8, 40


def wish(env: Mapping[str, str]) -> Wish:
    """The wish in `env` with its kernels, all of them if it names none.

    Raises `BadInputError`, and `UnsupportedError` for a model that the fused step has no kernels for.
    """
    asked = wishes.wish(env)
    for slug, _ in asked.cells:
        shape_of(models.lookup(slug).config, asked.bits)
    for name in asked.kernels:
        if name not in ORDER:
            raise BadInputError(f"KERNELS: {name[:60]!r} is none of {', '.join(ORDER)}")
    return replace(asked, kernels=asked.kernels or ORDER)


def tune_all(asked: Wish, gpu: str, store: Path, say: Say = print) -> None:
    """Tune every model and context that was asked for on the card that is here, one after the other.

    Raises `UnsupportedError` where the fused step cannot run, and `StoreError` where another run measures.
    """
    from decodegap import fused

    fused.require("cuda")
    with locks.hold(store):
        for model, ctx in asked.cells:
            say(f"{model} at {ctx} tokens, {asked.bits} bits: {asked.seconds} s for {', '.join(asked.kernels)}")
            found = _tune_one(model, ctx, asked, gpu, store=store, say=say)
            name = entry_name(model, asked.bits)
            print(to_toml(name, ctx, found), flush=True)
            if asked.write:
                say(f"kept in {keep(name, ctx, found, gpu)}")


def _tune_one(model: str, ctx: int, asked: Wish, gpu: str, *, store: Path, say: Say) -> Tiles:
    import torch

    from decodegap import fused
    from decodegap.fused import bench

    pdl = fused.can_overlap("cuda")
    start = load_tiles(model, gpu, ctx, asked.bits)
    with torch.inference_mode():
        loaded, truth = bench.start(model, ctx, bits=asked.bits)
        known = known_tiles(gpu, asked.bits)
        options = {
            name: [*dict.fromkeys(familiar(name, start, known, loaded.shape) + candidates(name, loaded.shape, ctx))]
            for name in asked.kernels
        }
        say(f"compiling {sum(map(len, options.values()))} candidates with {os.cpu_count()} processes")
        rejected = unfit(loaded, start, options, pdl=pdl)
        say(f"{len(rejected)} of them spill registers or do not compile, and are left out")
        conditions = {"gpu": gpu, "model": model, "ctx": ctx, "bits": asked.bits, "pdl": pdl, **_software()}
        digest = hashlib.sha256(repr(sorted(conditions.items())).encode()).hexdigest()[:8]
        book = tune.journal(
            store / gpu / "tuning" / f"{entry_name(model, asked.bits)}_{ctx}_{digest}.jsonl", conditions
        )
        if book.known:
            say(f"{len(book.known)} comparisons are known from earlier runs")
        card = card_of(loaded, truth, rejected, pdl=pdl)
        best, searched = tune.descend(start, options, card, book, seconds=(1 - CAPPING) * asked.seconds, say=say)
        best, capped = _capped(best, asked, loaded, card, book, pdl=pdl, say=say)
        if not (searched and capped):
            say("time is up; the same command goes on from here")
        before_ms, after_ms = card.compare(start, best, True)
    if best == start:
        say(f"{before_ms:.4f} ms: nothing is faster than the first tiles, which stay; {os.path.relpath(book.path)}")
        return start
    say(f"{before_ms:.4f} ms with the first tiles, {after_ms:.4f} ms with the best; {os.path.relpath(book.path)}")
    return replace(best, source=f"make tune on {gpu}, {_software()['triton']}: {after_ms:.3f} ms back to back")


def _capped(
    best: Tiles, asked: Wish, loaded: "Loaded", card: Card, book: Journal, *, pdl: bool, say: Say
) -> tuple[Tiles, bool]:
    """`best`, or what is faster with fewer registers a thread; and whether there was time to try all of it."""
    registers = {each.kernel.name: each.registers for each in _built(loaded, [best], pdl=pdl)}
    options = {name: tighter(best.of(name), registers[name]) for name in asked.kernels if registers[name]}
    card = replace(card, rejected=unfit(loaded, best, options, pdl=pdl))
    return tune.descend(best, options, card, book, seconds=CAPPING * asked.seconds, say=say)


def card_of(loaded: "Loaded", truth: "Truth", rejected: Mapping[tuple[str, Tile], str], *, pdl: bool) -> Card:
    """The card that is here, with this model loaded."""
    from decodegap.arms import Step  # noqa: TC001 - the import of torch that it brings belongs here
    from decodegap.fused import bench
    from decodegap.fused.step import capture

    kept: dict[Tiles, Step] = {}  # the best tiles' graph, which every comparison needs

    def best_ms(best: Tiles, steps: int) -> float:
        try:
            if best not in kept:
                kept.clear()
                kept[best] = capture(loaded, best, pdl=pdl)
            return bench.loop_ms(kept[best], loaded.device, steps)
        except Exception as error:  # noqa: BLE001 - a driver throws what it likes
            raise NotMeasuredError(
                f"the best tiles so far do not run any more ({type(error).__name__}: {str(error)[:200]}); what was "
                "tried is kept, and the same command goes on from here"
            ) from None

    def compare(best: Tiles, candidate: Tiles, closely: bool) -> tuple[float, float]:
        steps = CLOSE_STEPS if closely else QUICK_STEPS
        before_ms = best_ms(best, steps)
        try:
            step = capture(loaded, candidate, pdl=pdl)
            step_ms = bench.loop_ms(step, loaded.device, steps)
            again_ms = bench.loop_ms(step, loaded.device, steps) if closely else step_ms
        except Exception:
            best_ms(best, 1)  # a candidate that takes the card with it is not only its own failure
            raise
        after_ms = best_ms(best, steps) if closely else before_ms
        return (before_ms + after_ms) / 2, (step_ms + again_ms) / 2

    def fault(candidate: Tiles) -> str:
        line = bench.check_line(capture(loaded, candidate, pdl=pdl), truth)
        return "" if line.startswith("ok") else line

    return Card(compare, fault, rejected)


def unfit(
    loaded: "Loaded", start: Tiles, options: Mapping[str, Sequence[Tile]], *, pdl: bool
) -> dict[tuple[str, Tile], str]:
    """Compile every option in parallel; those that spill registers or do not compile, with the reason."""
    from decodegap.fused.launches import kernels_of

    pairs = [(name, tile) for name, tiles in options.items() for tile in tiles]
    built = _built(loaded, [start, *(start.having(name, tile) for name, tile in pairs)], pdl=pdl)
    bad = {_identity(each.kernel): each.error or f"spills {each.spilled_bytes} bytes a thread" for each in built
           if each.error or each.spilled_bytes}  # fmt: skip
    found = {}
    for name, tile in pairs:
        kernels = kernels_of(loaded.shape, start.having(name, tile), capacity=loaded.capacity, pdl=pdl)
        mine = [kernels[name], *([kernels["combine"]] if name == "attention" and "combine" in kernels else [])]
        reasons = [bad[identity] for identity in map(_identity, mine) if identity in bad]
        if reasons:
            found[name, tile] = reasons[0]
    return found


def _built(loaded: "Loaded", tiles: Iterable[Tiles], *, pdl: bool) -> "list[Built]":
    import torch

    from decodegap.fused.compiled import compile_only

    major, minor = torch.cuda.get_device_capability()
    return compile_only(
        loaded.shape,
        tiles,
        capacity=loaded.capacity,
        pdl=pdl,
        capability=10 * major + minor,
        workers=os.cpu_count() or 1,
    )


def _identity(kernel: "Kernel") -> tuple[object, ...]:
    return kernel.function, *sorted(kernel.constants.items()), kernel.warps, kernel.maxnreg


def keep(model: str, ctx: int, tiles: Tiles, gpu: str, folder: Path = FOLDER) -> str:
    """Put `tiles` into the data file of `gpu`, in place of the entry of this model and context; return its name.

    The other entries and the file's comments stay as they are. Raises `StoreError`.
    """
    path = folder / f"{gpu}.toml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    entry = to_toml(model, ctx, tiles)
    head = re.escape(entry.splitlines()[0])
    block = re.compile(rf"^{head}\n(?:(?!\[).+\n?)*", re.MULTILINE)
    changed, count = block.subn(lambda _: entry, text)
    if not count:
        changed = text + ("\n" if text else "") + entry
    records.write_atomically(path, changed.encode())
    return path.name


def _software() -> dict[str, str]:
    """Versions of compiler and library, and a hash of the sources that a time depends on."""
    sources = sorted((Path(__file__).resolve().parent / "fused").glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    found = versions()
    return {"torch": found.get("torch", ""), "triton": f"Triton {found.get('triton', '')}", "sources": digest}
