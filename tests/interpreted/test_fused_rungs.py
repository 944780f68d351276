"""A ladder's session with its fused rung: real, but for a CPU in place of the card and Triton's interpreter."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decodegap import arms, cells, fused, models, plan, plan_ladder, rungs, tune_card
from decodegap.arms import Setup
from decodegap.errors import BadInputError, NotMeasuredError
from decodegap.fused import bench
from decodegap.fused.tiles import Attention, Matvec, Tiles
from decodegap.session import Findings

CTX = 24
QUICK = {"warmup_steps": 0, "measured_steps": 1, "free_steps": 1}
SMALL = {"vocab_size": 64, "num_hidden_layers": 1}
IN_CODES = SMALL | {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = Matvec(rows=32, block=512, warps=4, ahead=1)  # few programs, because the interpreter runs them one by one
TILES = Tiles(WIDE, Attention(splits=2, block=16, warps=1), WIDE, WIDE, WIDE, WIDE)
TALL = replace(WIDE, rows=256)
TILES_IN_CODES = Tiles(TALL, TILES.attention, TALL, TALL, TALL, WIDE)


def measured(
    patch: pytest.MonkeyPatch, names: tuple[str, ...], config: dict[str, int], tiles: Tiles = TILES
) -> tuple[Findings, Setup]:
    """A session of these rungs on a tiny model in bf16."""
    known = models.lookup("tiny-qwen2")
    small = replace(known, config=known.config | config)
    patch.setattr(models, "lookup", lambda *_: small)
    patch.setitem(plan_ladder.CPU_GROUPS, "rungs", names)
    patch.setattr(fused, "tiles_for", lambda *_: tiles)
    patch.setattr(rungs, "_other_work", lambda *_: "")  # an interpreter launches no kernels
    (planned,) = plan_ladder.ladder(plan.request(gpu="cpu", models="tiny-qwen2", contexts=str(CTX)), "cpu")
    cell = planned.cell.model_copy(update={"dtype": "bfloat16"})
    task = replace(planned, cell=cell, protocol=planned.protocol.model_copy(update=QUICK))
    found = Findings()
    with torch.inference_mode():
        setup = arms.prefilled(arms.built(task, "cpu"), task, "cpu")
        cells.measure(task, setup, None, Path("a store that a ladder never reads"), found)
    return found, setup


def test_the_fused_rung_takes_the_weights_and_the_others_get_them_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[bool] = []
    whole = arms.built
    monkeypatch.setattr(arms, "built", lambda *given: built.append(True) or whole(*given))
    found, setup = measured(monkeypatch, ("eager", "eager-pinned", *plan_ladder.FUSED), SMALL)
    assert (found.outcome, found.reasons) == ("ok", [])
    arms_timed = ["eager", "eager-pinned", "fused-plain"]
    assert [series.arm for series in found.series] == arms_timed
    assert [(check.arm, check.passed) for check in found.checks] == [(arm, True) for arm in arms_timed]
    assert found.refused == {"fused": "this card has no programmatic launch; its fused step is the rung fused-plain"}
    assert built == [True, True]
    assert all(series.ran is not None for series in found.series)
    layer = setup.net.get_submodule("model").get_submodule("layers")[0]
    assert layer.self_attn.q_proj.weight.numel() == 0


def test_the_tuner_compares_and_judges_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    known = models.lookup("tiny-qwen2")
    monkeypatch.setattr(models, "lookup", lambda *_: replace(known, config=known.config | SMALL))
    monkeypatch.setattr(tune_card, "QUICK_STEPS", 1)
    monkeypatch.setattr(tune_card, "CLOSE_STEPS", 1)
    with torch.inference_mode():
        loaded, truth = bench.start("tiny-qwen2", CTX, device="cpu")
        card = tune_card.card_of(loaded, truth, {}, pdl=False)
        other = TILES.having("o", replace(WIDE, rows=16))
        assert all(ms > 0 for closely in (False, True) for ms in card.compare(TILES, other, closely))
        assert card.fault(other) == ""
        with pytest.raises(BadInputError, match="rows"):  # and the best tiles still run, so the card is not to blame
            card.compare(TILES, TILES.having("o", replace(WIDE, rows=3)), False)
        loaded.layers[0].o.words.zero_()
        assert "WRONG" in card.fault(other)
        monkeypatch.setattr(bench, "loop_ms", lambda *_: 1 / 0)  # what a dead card does to every step
        with pytest.raises(NotMeasuredError, match="goes on from here"):
            card.compare(TILES, other, False)


def test_a_session_in_four_bits_is_held_against_its_own_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(monkeypatch, (plan_ladder.INT4,), IN_CODES, TILES_IN_CODES)
    assert (found.outcome, found.refused) == ("ok", {})
    assert [(check.arm, check.passed) for check in found.checks] == [(plan_ladder.INT4, True)]
    assert found.checks[0].error < 0.02  # what rounding to four bits adds would be ten times as much
    held = found.quantised
    assert held is not None
    projections = 512 * (2 * 512 + 2 * 256 + 3 * 512)
    assert (held.dense, held.packed) == (2 * projections, projections * 4.125 / 8)
    assert held.table == 2 * 64 * 512
