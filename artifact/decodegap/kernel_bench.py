"""What each kernel of the fused step costs on this card: bytes, time alone and in the step, bandwidth, registers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decodegap.floor import floor_ms

if TYPE_CHECKING:
    from decodegap.fused.bench import KernelTime
    from decodegap.fused.compiled import Built

HEADERS = (
    "kernel", "launches", "MB", "target us", "alone us", "GB/s", "of read", "missed us", "registers", "spills",
    "shared",
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One kernel of a step, a launch: `target_us` is what its bytes take at the card's read bandwidth.

    `alone_us` is its time in a graph of nothing else, `missed_us` what the whole step loses with it left out.
    """

    kernel: str
    launches: int
    n_bytes: int
    target_us: float
    alone_us: float
    missed_us: float
    registers: int
    spilled_bytes: int
    shared_bytes: int
    error: str | None = None  # why a variant could not be compiled; what the compiler made of it is then not known

    @property
    def gb_s(self) -> float:
        """Bytes it must read over its time alone."""
        return self.n_bytes / self.alone_us / 1e3

    def texts(self, read_gb_s: float) -> tuple[str, ...]:
        """The line as people read it."""
        made = (self.registers, self.spilled_bytes, self.shared_bytes)
        return (
            self.kernel, str(self.launches), f"{self.n_bytes / 1e6:.2f}", f"{self.target_us:.1f}",
            f"{self.alone_us:.1f}", f"{self.gb_s:.0f}", f"{self.gb_s / read_gb_s:.2f}", f"{self.missed_us:.1f}",
            *("error" if self.error else str(number) for number in made),
        )  # fmt: skip


def joined(times: Sequence["KernelTime"], built: Sequence["Built"], read_gb_s: float) -> list[Line]:
    """Each kernel's times beside what the compiler made of it (of two variants, the one with more registers).

    A variant that could not be compiled goes before one that could, so that its error is told.
    """
    made: dict[str, Built] = {}
    for each in built:
        name = each.kernel.name
        if name not in made or _weight(each) > _weight(made[name]):
            made[name] = each
    return [
        Line(
            kernel=each.kernel,
            launches=each.launches,
            n_bytes=each.bytes,
            target_us=floor_ms(each.bytes, read_gb_s) * 1e3,
            alone_us=each.only_us,
            missed_us=each.skip_us,
            registers=made[each.kernel].registers,
            spilled_bytes=made[each.kernel].spilled_bytes,
            shared_bytes=made[each.kernel].shared_bytes,
            error=made[each.kernel].error,
        )
        for each in times
    ]


def _weight(built: "Built") -> tuple[bool, int]:
    return built.error is not None, built.registers


def table(lines: Sequence[Line], read_gb_s: float) -> Iterator[str]:
    """The lines as a Markdown table, the sum that a step's launches make, and what could not be compiled."""
    yield f"| {' | '.join(HEADERS)} |"
    yield f"| --- |{' ---: |' * (len(HEADERS) - 1)}"
    yield from (f"| {' | '.join(line.texts(read_gb_s))} |" for line in lines)
    whole = {name: sum(getattr(line, name) * line.launches for line in lines) for name in
             ("n_bytes", "target_us", "alone_us", "missed_us")}  # fmt: skip
    yield (
        f"a step: {whole['n_bytes'] / 1e9:.3f} GB, target {whole['target_us'] / 1e3:.3f} ms, kernels alone "
        f"{whole['alone_us'] / 1e3:.3f} ms, missed {whole['missed_us'] / 1e3:.3f} ms"
    )
    yield from (f"{line.kernel}: {line.error}" for line in lines if line.error)


def measured(model: str, ctx: int, gpu: str, bits: int = 16) -> Iterator[str]:
    """The benchmark on the card that is here, line by line. Raises `UnsupportedError` where the step cannot run."""
    from decodegap import fused

    fused.require("cuda")
    import torch

    from decodegap import probes
    from decodegap.fused import bench
    from decodegap.fused.compiled import compile_only
    from decodegap.fused.step import capture
    from decodegap.fused.tiles import load_tiles

    pdl, tiles = fused.can_overlap("cuda"), load_tiles(model, gpu, ctx, bits)
    read = probes.read_bandwidth("cuda", 0)
    yield f"{model} at {ctx} tokens, {bits} bits, on {gpu}; read bandwidth {read.gb_s:.0f} GB/s ({read.kernel})"
    yield f"tiles: {tiles.source}"
    with torch.inference_mode():
        loaded, truth = bench.start(model, ctx, bits=bits)
        major, minor = torch.cuda.get_device_capability()
        built = compile_only(loaded.shape, [tiles], capacity=loaded.capacity, pdl=pdl,
                             capability=10 * major + minor, workers=1)  # fmt: skip
        for early in dict.fromkeys((pdl, False)):
            step = capture(loaded, tiles, pdl=early)
            kind = "with programmatic launch" if early else "plain"
            step_ms = bench.loop_ms(step, loaded.device)
            yield f"{kind}: {step_ms:.3f} ms back to back; {bench.check_line(step, truth)}"
        yield from table(joined(list(bench.kernel_times(loaded, tiles, pdl=pdl)), built, read.gb_s), read.gb_s)
