"""How the tuner asks a card, without one: compiled for compute capability 9.0 for real, and timed by a formula."""

import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from decodegap import fused, models, tune, tune_card  # noqa: E402
from decodegap.fused import bench  # noqa: E402
from decodegap.fused.layout import Loaded  # noqa: E402
from decodegap.fused.shape import shape_of  # noqa: E402
from decodegap.fused.tiles import Attention, Matvec, Tile, Tiles, default_tiles, from_dict  # noqa: E402
from decodegap.tune import Card  # noqa: E402

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6"), reason=f"knows what Triton 3.6 compiles to, not {triton.__version__}"
)
MODEL, CTX = "tiny-qwen2", 9
START = default_tiles(shape_of(models.lookup(MODEL).config))
# Tiles of `o`: one that a cap would make spill, one that is capped and spills, and one that is no tile.
GOOD, SPILLS, ODD = Matvec(8, 4096, 4, ahead=3), Matvec(4, 1024, 4, maxnreg=24), Matvec(4, 100, 4)
MANY_SPLITS = Attention(splits=512, block=32, warps=2)
ASKED = tune_card.Wish(((MODEL, CTX),), seconds=100, kernels=("o",), write=False)


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fused, "require", lambda _: None)
    monkeypatch.setattr(fused, "can_overlap", lambda _: True)
    monkeypatch.setattr(bench, "start", partial(bench.start, device="cpu"))
    monkeypatch.setattr(tune_card, "load_tiles", lambda *_: START)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    with torch.inference_mode():
        found, _ = bench.start(MODEL, CTX, device="cpu")
    return found


def card(kernel: str, step_ms: dict[Tile, float]) -> Card:
    """A card on which a step takes what its tile of a kernel says, and 4 ms with any other."""

    def compare(best: Tiles, candidate: Tiles, _closely: bool) -> tuple[float, float]:
        return step_ms.get(best.of(kernel), 4.0), step_ms.get(candidate.of(kernel), 4.0)

    return Card(compare, lambda _: "")


def tuned(store: Path) -> list[str]:
    """What a whole run says."""
    said: list[str] = []
    tune_card.tune_all(ASKED, "h200", store, said.append)
    return said


def test_what_spills_or_does_not_compile_is_unfit_and_says_why(loaded: Loaded) -> None:
    options = {
        "o": [GOOD, replace(SPILLS, maxnreg=None), SPILLS, ODD],
        "attention": [MANY_SPLITS, replace(START.attention, splits=4)],
    }
    found = tune_card.unfit(loaded, START, options, pdl=True)
    assert set(found) == {("o", SPILLS), ("o", ODD), ("attention", MANY_SPLITS)}
    assert re.fullmatch(r"spills \d+ bytes a thread", found["o", SPILLS])
    assert found["o", ODD].startswith("CompilationError: ")
    assert found["attention", MANY_SPLITS].startswith("spills ")  # the kernel that adds up its splits does


@pytest.mark.parametrize(("capped_ms", "capped"), [(2.0, 96), (3.5, None)])
def test_what_was_found_is_tried_with_fewer_registers(
    loaded: Loaded, tmp_path: Path, capped_ms: float, capped: int | None
) -> None:
    """100 registers a thread: a cap of 96 makes room for another program, and one of 80 for two, but then it spills."""
    shape = shape_of(models.lookup("qwen2.5-7b").config)
    wide, tile = replace(loaded, shape=shape, capacity=4096), Matvec(4, 1024, 4, ahead=4)
    best, asked = default_tiles(shape).having("down", tile), replace(ASKED, kernels=("down",))
    steps = card("down", {tile: 3.0, replace(tile, maxnreg=96): capped_ms, replace(tile, maxnreg=80): 1.0})
    found = tune_card._capped(
        best, asked, wide, steps, tune.journal(tmp_path / "book", {}), pdl=True, say=lambda _: None
    )
    assert found == (best.having("down", replace(tile, maxnreg=capped)), True)


def test_tiles_of_which_the_compiler_says_no_registers_are_not_capped(loaded: Loaded, tmp_path: Path) -> None:
    book, best = tune.journal(tmp_path / "book", {}), START.having("o", ODD)
    assert tune_card._capped(best, ASKED, loaded, card("o", {}), book, pdl=True, say=lambda _: None) == (best, True)


def test_that_time_is_up_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No time for the tiles, for the caps on the registers of the best, for either, and enough for both."""
    monkeypatch.setattr(tune_card.os, "cpu_count", lambda: 1)  # what compiles in this process starts no others
    monkeypatch.setattr(tune_card, "load_tiles", lambda *_: START.having("o", GOOD))
    monkeypatch.setattr(tune_card, "familiar", lambda *_: [])
    monkeypatch.setattr(tune_card, "candidates", lambda *_: [START.o])
    monkeypatch.setattr(tune_card, "card_of", lambda *given, **_: replace(card("o", {}), rejected=given[2]))
    for seconds, capping, looked_at in [
        (0, 0.15, set()),
        (100, 0.0, {"tiles"}),
        (100, 1.0, {"caps"}),
        (100, 0.15, {"tiles", "caps"}),
    ]:
        monkeypatch.setattr(tune_card, "CAPPING", capping)
        said: list[str] = []
        tune_card.tune_all(replace(ASKED, seconds=seconds), "h200", tmp_path / f"{seconds}-{capping}", said.append)
        assert {"caps" if "maxnreg" in line else "tiles" for line in said if line.startswith("[")} == looked_at
        finished = looked_at == {"tiles", "caps"}
        up = [line for line in said if "time is up" in line]
        assert up == ([] if finished else ["time is up; the same command goes on from here"])


@pytest.mark.parametrize(
    ("step_ms", "best", "last"),
    [
        ({GOOD: 3.0, SPILLS: 1.0}, GOOD, "4.0000 ms with the first tiles, 3.0000 ms with the best; "),
        ({START.o: 1.0}, START.o, "1.0000 ms: nothing is faster than the first tiles, which stay; "),
    ],
)
def test_the_whole_of_it_says_what_it_found_and_knows_it_the_next_time(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    step_ms: dict[Tile, float],
    best: Matvec,
    last: str,
) -> None:
    monkeypatch.setattr(tune_card, "familiar", lambda *_: [GOOD])
    monkeypatch.setattr(tune_card, "candidates", lambda *_: [GOOD, SPILLS])
    monkeypatch.setattr(tune_card, "card_of", lambda *given, **_: replace(card("o", step_ms), rejected=given[2]))
    said = [tuned(tmp_path) for _ in range(2)]
    for entry in capsys.readouterr().out.strip().split("\n\n"):
        tiles = from_dict(tomllib.loads(entry)[MODEL][f"ctx-{CTX}"], "printed")
        assert replace(tiles, source="") == replace(START.having("o", best), source="")
        assert tiles.source.startswith("untuned" if best == START.o else "make tune on h200, Triton 3.")
    assert all(lines[1].startswith("compiling 2 candidates ") for lines in said)  # one of them is known twice
    assert [lines[0] for lines in said] == 2 * ["tiny-qwen2 at 9 tokens, 16 bits: 100 s for o"]
    assert [any(line.startswith("1 of them spill") for line in lines) for lines in said] == [True, True]
    assert [any("are known from earlier runs" in line for line in lines) for lines in said] == [False, True]
    assert all(lines[-1].startswith(last) and "h200/tuning/tiny-qwen2_9_" in lines[-1] for lines in said)
    assert [any("maxnreg=40: spills " in line for line in lines) for lines in said] == 2 * [best == GOOD]
