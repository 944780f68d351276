"""A quick look at the fused step on the card that is here: `python -m decodegap.fused --ctx 2048`."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from functools import partial

import torch

from decodegap import gpus
from decodegap.errors import DecodeGapError
from decodegap.fused import bench, can_overlap, load_tiles, require
from decodegap.fused.compiled import compile_only
from decodegap.fused.layout import ROOM
from decodegap.fused.shape import Shape
from decodegap.fused.step import capture
from decodegap.fused.tiles import Attention, Matvec, Tiles, entry_name

STARTED = time.monotonic()


def say(line: str) -> None:
    """One line, at once, with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED:6.1f} s] {line}", flush=True)


def variants(tiles: Tiles, ctx: int, bits: int) -> dict[str, Tiles]:
    """The tiles of the data file, and a few that should tell what matters."""
    tokens = int(1.2 * ctx)
    few = Attention(splits=-(-tokens // 128), block=128, warps=8)
    small = Attention(splits=-(-tokens // 32), block=32, warps=1)
    found = {"as in the data file": tiles}
    if ctx <= 4096:
        found["attention in two kernels"] = tiles.having("attention", few)
        found["attention in two kernels, one warp a program"] = tiles.having("attention", small)
    if bits == 16:
        whole = Matvec(rows=4, block=512, warps=2, ahead=7, maxnreg=128)
        found |= {f"{name}, all of o on its way": each.having("o", whole) for name, each in found.items()}
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


def main() -> int:
    """Print what the fused step does here; 2 with one line where it cannot run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--bits", type=int, default=16, choices=(16, 4))
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
    tries = variants(tiles, asked.ctx, asked.bits)
    prepare_kernels(loaded.shape, tries.values(), asked.ctx + ROOM, pdl=pdl)
    for name, each in tries.items():
        say(bench.guarded(name, partial(bench.variant_line, loaded, truth, each, pdl=pdl)))
    say(bench.guarded("plain", lambda: bench.variant_line(loaded, truth, tiles, pdl=False)))
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
