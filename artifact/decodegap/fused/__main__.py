"""A quick look at the fused step on the card that is here: `python -m decodegap.fused --ctx 2048`."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from functools import partial
from itertools import islice

import torch

from decodegap import gpus
from decodegap.errors import DecodeGapError
from decodegap.fused import bench, can_overlap, load_tiles, require
from decodegap.fused.compiled import compile_only
from decodegap.fused.layout import ROOM, Loaded
from decodegap.fused.search import ORDER, candidates, descend
from decodegap.fused.shape import Shape
from decodegap.fused.step import capture
from decodegap.fused.tiles import Attention, Tile, Tiles, entry_name, to_toml

STARTED = time.monotonic()


def say(line: str) -> None:
    """One line, at once, with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {line}", flush=True)


def variants(tiles: Tiles, ctx: int) -> dict[str, Tiles]:
    """The tiles of the data file, and a few that should tell what matters."""
    tokens = int(1.2 * ctx)
    few = Attention(splits=-(-tokens // 128), block=128, warps=8)
    small = Attention(splits=-(-tokens // 32), block=32, warps=1)
    found = {"as in the data file": tiles}
    if ctx <= 4096:
        found["attention in two kernels"] = tiles.having("attention", few)
        found["attention in two kernels, one warp a program"] = tiles.having("attention", small)
    return found


def prepare_kernels(shape: Shape, tiles: Iterable[Tiles], capacity: int, *, pdl: bool) -> None:
    """Compile in parallel what is needed, and say what spills or fails."""
    major, minor = torch.cuda.get_device_capability()
    built = compile_only(
        shape, tiles, capacity=capacity, pdl=pdl, capability=10 * major + minor, workers=os.cpu_count() or 1
    )
    for each in built:
        if each.error or each.spilled_bytes:
            what = each.error or f"{each.spilled_bytes} bytes spilled"
            say(f"{each.kernel.name} {each.kernel.constants}: {what}")
    say(f"compiled {len(built)} kernels")


def explore(loaded: Loaded, tiles: Tiles, *, pdl: bool, most: int, kernels: list[str], ctx: int) -> Tiles:
    """A descent over each kernel's first `most` candidates; every trial is a line."""
    options: dict[str, list[Tile]] = {
        name: list(islice(candidates(name, loaded.shape, ctx), most)) for name in ORDER if name in kernels
    }
    trials = [tiles.having(name, tile) for name, each in options.items() for tile in each]
    prepare_kernels(loaded.shape, trials, loaded.capacity, pdl=pdl)
    best = tiles
    for tried, best in descend(tiles, options, lambda each: bench.loop_ms(capture(loaded, each, pdl=pdl), "cuda", 30)):
        kept = "  kept" if best.of(tried.kernel if tried.kernel in ORDER else "qkv") == tried.tile else ""
        say(f"{tried.step_ms or 0:.4f} ms  {tried.kernel} {tried.tile} {tried.error or ''}{kept}")
    return best


def main() -> int:
    """Print what the fused step does here; 2 with one line where it cannot run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=16, choices=(16, 4))
    parser.add_argument("--explore", type=int, default=0, metavar="N", help="try the first N candidates of each kernel")
    parser.add_argument("--kernels", default=",".join(ORDER), help="which kernels to explore")
    asked = parser.parse_args()
    try:
        require("cuda" if torch.cuda.is_available() else "cpu")
        found = gpus.detect()
        tiles = load_tiles(asked.model, gpus.identify(found[0]).slug if found else "", asked.ctx, asked.bits)
    except DecodeGapError as error:
        print(f"decode-gap: {error}", file=sys.stderr)
        return error.exit_code
    with torch.inference_mode():
        look(asked, tiles)
    return 0


def look(asked: argparse.Namespace, tiles: Tiles) -> None:
    """Check, time, and take apart; one failure is one line."""
    pdl = can_overlap("cuda")
    loaded, truth = bench.start(asked.model, asked.ctx, bits=asked.bits)
    say(
        f"{entry_name(asked.model, asked.bits)} at {asked.ctx}: {torch.cuda.memory_allocated() / 1e9:.1f} GB, peak "
        f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB, programmatic launch {'on' if pdl else 'not on this card'}"
    )
    tries = variants(tiles, asked.ctx)
    prepare_kernels(loaded.shape, tries.values(), asked.ctx + ROOM, pdl=pdl)
    for name, each in tries.items():
        say(bench.guarded(name, partial(bench.variant_line, loaded, truth, each, pdl=pdl)))
    say(bench.guarded("plain", lambda: bench.variant_line(loaded, truth, tiles, pdl=False)))
    if asked.explore:
        tiles = explore(loaded, tiles, pdl=pdl, most=asked.explore, kernels=asked.kernels.split(","), ctx=asked.ctx)
        say(bench.guarded("explored", lambda: bench.variant_line(loaded, truth, tiles, pdl=pdl)))
        say(bench.guarded("explored, plain", lambda: bench.variant_line(loaded, truth, tiles, pdl=False)))
        print(to_toml(entry_name(asked.model, asked.bits), asked.ctx, tiles), flush=True)
    step = capture(loaded, tiles, pdl=pdl)
    room = loaded.capacity - loaded.start
    say(bench.guarded("two seconds", lambda: bench.sustained(step, bench.single_ms(step, "cuda"), room)))
    for took in bench.kernel_times(loaded, tiles, pdl=pdl):
        say(
            f"{took.kernel:9} x{took.launches}: {took.bytes / 1e6:7.1f} MB, alone {took.only_us:6.1f} us, "
            f"{took.gb_s:5.0f} GB/s, missed {took.skip_us:6.1f} us"
        )


if __name__ == "__main__":
    sys.exit(main())
