"""What `make bench-kernels` prints: real, but for a CPU in place of the card and Triton's interpreter."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from decodegap import fused, kernel_bench, models, probes, reference
from decodegap.arms import Step
from decodegap.fused import bench, tiles
from decodegap.fused.shape import TILED, kernel_bytes, launches, shape_of
from decodegap.fused.step import capture
from decodegap.fused.tiles import Attention, Matvec, Tiles
from decodegap.models import Model
from decodegap.probes import ReadProbe

CTX = 9
SMALL = {"vocab_size": 64, "num_hidden_layers": 1}
ALIKE = SMALL | {"intermediate_size": 64}  # as wide as all heads, so that o and down are one kernel
IN_CODES = SMALL | {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = Matvec(rows=32, block=512, warps=4, ahead=1)  # few programs, because the interpreter runs them one by one
TILES = Tiles(WIDE, Attention(splits=1, block=16, warps=1), WIDE, WIDE, WIDE, WIDE, source="a test")


def tiny(patch: pytest.MonkeyPatch, changes: dict[str, int]) -> Model:
    """A model, which every name from now on stands for."""
    known = models.lookup("tiny-qwen2")
    small = replace(known, config=known.config | changes)
    patch.setattr(models, "lookup", lambda *_: small)
    return small


def test_in_4_bits_the_truth_and_eager_have_the_rounded_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny(monkeypatch, IN_CODES)
    tall = replace(WIDE, rows=256)
    with torch.inference_mode():
        loaded, truth = bench.start("tiny-qwen2", CTX, device="cpu", bits=4)
        step = capture(loaded, replace(TILES, qkv=tall, o=tall, gate_up=tall, down=tall), pdl=False)
        step.poison()
        step.run()
        _, unrounded = bench.start("tiny-qwen2", CTX, device="cpu")
        for held_against, passed in ((truth, True), (unrounded, False)):
            found = reference.check("fused-int4", step.logits(), held_against.eager, held_against.logits)
            assert found.passed == passed, found
            assert found.eager_error < 0.05  # rounding; with other weights than the truth's it is three times that
            assert bench.check_line(step, held_against).startswith("ok: " if passed else "WRONG: ")
        drift = iter(range(9))
        drifting = replace(step, logits=lambda: step.logits() + 1e-6 * next(drift))
        told = bench.check_line(drifting, truth)
        assert told.startswith("WRONG: ")
        assert told.endswith(", DOES NOT REPEAT")


def test_it_says_what_the_step_and_each_kernel_take(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tiny(monkeypatch, ALIKE)
    monkeypatch.setattr(fused, "require", lambda _: None)
    monkeypatch.setattr(fused, "can_overlap", lambda _: False)
    monkeypatch.setattr(probes, "read_bandwidth", lambda *_: ReadProbe(gb_s=10.0, kernel="a read", buffer_mib=1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(tiles, "load_tiles", lambda *_: TILES)
    monkeypatch.setattr(bench, "start", partial(bench.start, device="cpu"))
    monkeypatch.setattr(bench, "kernel_times", partial(bench.kernel_times, steps=1))
    monkeypatch.setattr(bench, "loop_ms", lambda step, device, *_, once=bench.loop_ms: once(step, device, 1))
    captured: list[tuple[object, object]] = []

    def noted(*given: Any, **how: Any) -> Step:
        captured.append((how.get("only"), how.get("skip")))
        return capture(*given, **how)

    monkeypatch.setattr(bench, "capture", noted)
    told = list(kernel_bench.measured("tiny-qwen2", CTX, "h200"))
    assert told[:2] == [
        "tiny-qwen2 at 9 tokens, 16 bits, on h200; read bandwidth 10 GB/s (a read)",
        "tiles: a test",
    ]
    assert re.fullmatch(r"plain: [\d.]+ ms back to back; ok: error .*, repeats bit for bit", told[2])
    rows = {cells[0]: cells[1:] for line in told[5:-7] for cells in [line.strip("| ").split(" | ")]}
    shape = shape_of(small.config)
    sizes, counts = kernel_bytes(shape, CTX), launches(shape)
    assert tuple(rows) == TILED
    for name, (count, megabytes, target_us, alone_us, gb_s, *_, registers, _, _) in rows.items():
        assert (count, megabytes) == (str(counts[name]), f"{sizes[name] / 1e6:.2f}")
        assert target_us == f"{sizes[name] / 10e3:.1f}"
        assert float(gb_s) == pytest.approx(sizes[name] / float(alone_us) / 1e3, abs=0.6)
        assert registers == "error"  # what is interpreted is not compiled, which is said below
    whole_gb = sum(sizes[name] * counts[name] for name in TILED) / 1e9
    assert told[-7].startswith(f"a step: {whole_gb:.3f} GB, target {whole_gb / 10 * 1e3:.3f} ms, kernels alone ")
    assert [line.split(":")[0] for line in told[-6:]] == list(TILED)
    parts = [frozenset({name, "combine"} if name == "attention" else {name}) for name in TILED]
    alone_and_left_out = [each for names in parts for each in ((names, frozenset()), (None, names))]
    assert captured == [(None, frozenset()), *alone_and_left_out]
