"""What the fused step does on this card: right or wrong, how fast as a whole, and what each kernel costs in it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from decodegap import arms, decode, models, reference
from decodegap.arms import Step
from decodegap.fused.layout import CODE_BITS, Loaded, as_rounded, load
from decodegap.fused.shape import TILED, kernel_bytes, launches
from decodegap.fused.step import capture
from decodegap.fused.tiles import Tiles
from decodegap.timing import free_running

CHUNK = 2048
LOOP_STEPS = 60


@dataclass(frozen=True)
class Truth:
    """What a step must give for the token at hand: the fp32 logits, and stock eager's in bf16, both `[1, vocab]`."""

    logits: torch.Tensor
    eager: torch.Tensor


@dataclass(frozen=True)
class KernelTime:
    """One kernel of a step: microseconds a launch alone in a graph, and what the step loses without it, a launch."""

    kernel: str
    launches: int
    bytes: int
    only_us: float
    skip_us: float

    @property
    def gb_s(self) -> float:
        """Bytes it must read over its time alone."""
        return self.bytes / self.only_us / 1e3


def start(
    model: str, ctx: int, *, device: str = "cuda", capacity: int | None = None, seed: int = 0, bits: int = 16
) -> tuple[Loaded, Truth]:
    """A synthetic model on the card after a prefill of `ctx` random tokens, in the fused layout, with its truth.

    The last of them is decoded by the first step. With 4 `bits`, the truth and eager have the weights that the codes
    stand for; K and V come from the model as it was.
    """
    config = models.lookup(model)
    net = decode.build(config, weights="synthetic", weights_dir=None, device=device, dtype=torch.bfloat16, seed=seed)
    tokens = decode.prompt(config.config["vocab_size"], ctx, seed, device)
    cache, _ = decode.prefill(net, tokens, CHUNK)
    decode.crop(cache, ctx - 1)
    token = tokens[:, -1:]
    meant = as_rounded(net) if bits == CODE_BITS else net
    exact = reference.reference_logits(meant, cache, token, ctx)
    with decode.backends(arms.SDPA_BACKENDS["flash"]):
        rounded = decode.cast_weights(meant, torch.bfloat16)
        eager = rounded(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1].clone()
    loaded = load(arms.Setup(net, cache, token, ctx, device), capacity=capacity, bits=bits)
    return loaded, Truth(exact, eager)


def check_line(step: Step, truth: Truth) -> str:
    """The first step's error against the truth beside eager's own, and whether poison, token and repeats are right."""
    step.reset()
    step.poison()
    step.run()
    logits = step.logits().clone()
    found = reference.check("fused", logits, truth.eager, truth.logits)
    again = []
    for _ in range(3):
        step.reset()
        step.poison()
        step.run()
        again.append(torch.equal(step.logits(), logits))
    step.reset()
    verdict = "ok" if found.passed and all(again) else "WRONG"
    same = "same" if found.argmax_equal else f"another (margin {found.reference_margin:.3f} sd)"
    repeats = "repeats bit for bit" if all(again) else "DOES NOT REPEAT"
    return f"{verdict}: error {found.error:.3e}, eager {found.eager_error:.3e}, argmax {same}, {repeats}"


def loop_ms(step: Step, device: str, steps: int = LOOP_STEPS) -> float:
    """Milliseconds a step in back-to-back replays, from the context on."""
    step.reset()
    for _ in range(2):
        step.run()
    return free_running(step, device, steps) / steps


def kernel_times(loaded: Loaded, tiles: Tiles, *, pdl: bool, steps: int = LOOP_STEPS) -> Iterator[KernelTime]:
    """Each kernel of a step alone and by its absence; attention with the kernel that adds up its splits."""
    shape = loaded.shape
    counts = launches(shape)
    sizes = kernel_bytes(shape, loaded.start)

    def timed(*, only: frozenset[str] | None = None, skip: frozenset[str] = frozenset()) -> float:
        return loop_ms(capture(loaded, tiles, pdl=pdl, only=only, skip=skip), loaded.device, steps)

    whole = timed()
    for name in TILED:
        names = frozenset({name, "combine"} if name == "attention" else {name})
        only = timed(only=names)
        without = timed(skip=names)
        count = counts[name]
        yield KernelTime(name, count, sizes[name], only * 1e3 / count, (whole - without) * 1e3 / count)
