"""Whether the tuner finds the fastest tiles, keeps what it tried, stops in time and goes on where it stopped.

The search is the real one; only the card is a formula, whose fastest tiles are known.
"""

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest

from decodegap import models, tune, tune_card
from decodegap.errors import BadInputError, BadRecordError, DecodeGapError, NotMeasuredError, UnsupportedError
from decodegap.fused.search import candidates
from decodegap.fused.shape import TILED, shape_of
from decodegap.fused.tiles import FOLDER, Matvec, Tile, Tiles, check_tiles, default_tiles, from_dict, load_tiles
from decodegap.tune import Card, Journal

SHAPE = shape_of(models.lookup("qwen2.5-7b").config)
START = default_tiles(SHAPE)
OPTIONS: dict[str, list[Tile]] = {
    name: [Matvec(rows=rows, block=block, warps=4) for rows in (1, 2, 4) for block in (512, 1024)]
    for name in ("qkv", "o", "down")
}
BEST = {"qkv": Matvec(4, 512, 4), "o": Matvec(1, 1024, 4), "down": Matvec(2, 512, 4)}


@dataclass
class Formula:
    """A card that is a formula: 1 ms a kernel whose tile is not the best, and whatever a test adds."""

    calls: list[tuple[Tiles, Tiles, bool]] = field(default_factory=list)
    extra_ms: Callable[[Tiles], float] = lambda _: 0.0
    slower_by: float = 0.0  # what every call adds to every later time, as a card that warms up does
    raises: Callable[[Tiles], Exception | BaseException | None] = lambda _: None
    fault: Callable[[Tiles], str] = lambda _: ""
    rejected: dict[tuple[str, Tile], str] = field(default_factory=dict)

    def step_ms(self, tiles: Tiles) -> float:
        wrong = sum(tiles.of(name) != tile for name, tile in BEST.items())
        return (3.0 + wrong + self.extra_ms(tiles)) * (1 + self.slower_by * len(self.calls))

    def card(self) -> Card:
        def compare(best: Tiles, candidate: Tiles, closely: bool) -> tuple[float, float]:
            if (error := self.raises(candidate)) is not None:
                raise error
            self.calls.append((best, candidate, closely))
            return self.step_ms(best), self.step_ms(candidate)

        return Card(compare, self.fault, self.rejected)


@pytest.fixture
def book(tmp_path: Path) -> Journal:
    return tune.journal(tmp_path / "tuning.jsonl", {"gpu": "none"})


def searched(formula: Formula, book: Journal, *, seconds: float = 1e9, clock: Iterator[int] | None = None) -> Tiles:
    ticks = clock or count()
    best, _ = tune.descend(
        START, OPTIONS, formula.card(), book, seconds=seconds, say=lambda _: None, clock=lambda: float(next(ticks))
    )
    return best


def found(tiles: Tiles) -> dict[str, Tile]:
    return {name: tiles.of(name) for name in BEST}


def lines(book: Journal) -> list[dict[str, object]]:
    return [json.loads(line) for line in book.path.read_text().splitlines()]


def test_the_fastest_tiles_are_found_and_what_was_not_asked_for_stays(book: Journal) -> None:
    best = searched(Formula(), book)
    assert found(best) == BEST
    assert {name: best.of(name) for name in TILED if name not in BEST} == {
        name: START.of(name) for name in TILED if name not in BEST
    }


def test_a_card_that_grows_slower_misleads_nobody(book: Journal) -> None:
    assert found(searched(Formula(slower_by=0.02), book)) == BEST


def test_a_second_round_finds_what_only_pays_together(book: Journal) -> None:
    """`qkv` (tried after `o`) makes another tile of `o` the better one."""
    other = Matvec(4, 1024, 4)

    def extra_ms(tiles: Tiles) -> float:
        return -2.0 if tiles.o == other and tiles.qkv == BEST["qkv"] else 0.0

    assert found(searched(Formula(extra_ms=extra_ms), book)) == BEST | {"o": other}


def test_a_gain_within_the_noise_is_none(book: Journal) -> None:
    near = START.having("o", BEST["o"])
    formula = Formula(extra_ms=lambda tiles: 0.9995 if tiles.o == near.o else 0.0)
    assert searched(formula, book).o == START.o


def test_a_quick_look_that_was_luck_is_looked_at_again_and_refused(book: Journal) -> None:
    formula = Formula()
    card = formula.card()

    def compare(best: Tiles, candidate: Tiles, closely: bool) -> tuple[float, float]:
        best_ms, step_ms = card.compare(best, candidate, closely)
        lucky = candidate.o == Matvec(4, 512, 4) and not closely
        return best_ms, 0.1 if lucky else step_ms

    best, finished = tune.descend(
        START, OPTIONS, replace(card, compare=compare), book, seconds=1e9, say=lambda _: None, clock=lambda: 0.0
    )
    assert (found(best), finished) == (BEST, True)


@pytest.mark.parametrize("error", [RuntimeError("out of resource: shared memory"), BadInputError("rows must divide")])
def test_a_candidate_that_fails_is_noted_and_does_not_end_the_search(book: Journal, error: Exception) -> None:
    bad = Matvec(1, 512, 4)
    assert found(searched(Formula(raises=lambda tiles: error if tiles.o == bad else None), book)) == BEST
    (noted, *_) = [line for line in lines(book) if line.get("reason")]
    assert str(error) in str(noted["reason"])
    assert noted["step_ms"] is None


def test_the_fastest_that_computes_something_else_is_not_taken(book: Journal) -> None:
    formula = Formula(fault=lambda tiles: "error 3.0, eager 0.05" if tiles.down == BEST["down"] else "")
    assert searched(formula, book).down == START.down
    assert any("error 3.0" in str(line.get("reason")) for line in lines(book))


def test_what_spills_is_never_run(book: Journal) -> None:
    formula = Formula(rejected={("down", BEST["down"]): "spills 64 bytes a thread"})
    assert searched(formula, book).down == START.down
    assert not [call for call in formula.calls if call[1].down == BEST["down"]]
    assert any(line.get("reason") == "spills 64 bytes a thread" for line in lines(book))


def test_a_card_that_is_gone_ends_the_search_and_blames_no_candidate(book: Journal) -> None:
    gone = NotMeasuredError("the card no longer runs what it ran before")
    with pytest.raises(NotMeasuredError):
        searched(Formula(raises=lambda tiles: gone if tiles.o == Matvec(2, 512, 4) else None), book)
    assert not [line for line in lines(book) if line.get("reason")]


def test_time_is_kept_and_the_best_so_far_is_taken(book: Journal) -> None:
    """The clock ticks twice a candidate, and time is up in the middle of the second kernel, past its best tile."""
    formula = Formula()
    best = searched(formula, book, seconds=22)
    assert len([call for call in formula.calls if not call[2]]) == 11
    assert found(best) == BEST | {"down": START.down}
    assert searched(Formula(), book, seconds=1) == START  # not even time for what is known


@pytest.mark.parametrize("stopped_after", [1, 4, 9, 17])
def test_a_stopped_search_goes_on_where_it_was(tmp_path: Path, stopped_after: int) -> None:
    whole = Formula()
    uninterrupted = searched(whole, tune.journal(tmp_path / "whole.jsonl", {}))
    path = tmp_path / "stopped.jsonl"
    first = Formula()
    first.raises = lambda _: KeyboardInterrupt() if len(first.calls) == stopped_after else None
    with pytest.raises(KeyboardInterrupt):
        searched(first, tune.journal(path, {}))
    second = Formula()
    assert searched(second, tune.journal(path, {})) == uninterrupted
    assert first.calls + second.calls == whole.calls
    third = Formula()
    assert searched(third, tune.journal(path, {})) == uninterrupted
    assert third.calls == []


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "tuning.jsonl"
    whole = Formula()
    searched(whole, tune.journal(path, {}))
    path.write_bytes(path.read_bytes()[:-20])
    again = Formula()
    searched(again, tune.journal(path, {}))
    assert again.calls == whole.calls[-1:]
    assert len({line["key"] for line in map(json.loads, path.read_text().splitlines()[1:])}) == len(whole.calls)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"conditions": {"gpu": "l4"}}\n', "other conditions"),
        ('{"conditions": {"gpu": "none"}}\nnot json\n', "line 2 is not JSON"),
        ('{"conditions": {"gpu": "none"}}\n[]\n', "line 2 is not an object"),
        ('{"conditions": {"gpu": "none"}}\n{"key": "x"}\n', "lacks 'best_ms'"),
        ("{}\n", "other conditions"),
        ("\xff\n", "is not JSON"),
    ],
)
def test_a_journal_that_is_not_this_searchs_is_refused_in_one_line(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "tuning.jsonl"
    path.write_text(content)
    with pytest.raises(BadRecordError) as caught:
        tune.journal(path, {"gpu": "none"})
    assert named in str(caught.value)
    assert path.read_text() == content


def test_an_unwritable_journal_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(DecodeGapError, match="cannot be"):
        tune.journal(tmp_path / "folder" / "tuning.jsonl", {})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\n")
    with pytest.raises(DecodeGapError, match="cannot be read"):
        tune.journal(tmp_path / "bytes", {})


def test_each_trial_is_said_with_how_far_it_is_and_how_long_it_takes_at_most(book: Journal) -> None:
    said: list[str] = []
    tune.descend(START, OPTIONS, Formula().card(), book, seconds=100, say=said.append, clock=lambda: 0.0)
    assert said[0].startswith("[ 1/18] round 1: o rows=1 block=512 warps=4 ahead=1: 6.0000 ms against 6.0000;")
    assert "at most 2 min left" in said[0]
    assert any(text.startswith("taken: o rows=1 block=1024") for text in said)
    assert said[-1].startswith("nothing is faster after")


def test_candidates_are_plenty_and_all_fit() -> None:
    for slug in ("qwen2.5-7b", "llama-3.1-8b", "mistral-7b-v0.3"):
        shape = shape_of(models.lookup(slug).config)
        for kernel in TILED:
            options = candidates(kernel, shape, 2048)
            assert len(options) == len(set(options)) > 10
            for tile in options:
                check_tiles(default_tiles(shape).having(kernel, tile), shape)


def test_what_is_found_replaces_its_entry_and_nothing_else(tmp_path: Path) -> None:
    before = (FOLDER / "h200.toml").read_text()
    (tmp_path / "h200.toml").write_text(before)
    tiles = replace(START, source="make tune on h200")
    assert tune_card.keep("llama-3.1-8b", 2048, tiles, "h200", tmp_path) == "h200.toml"
    after = (tmp_path / "h200.toml").read_text()
    assert after.count("[") == before.count("[")
    assert after.startswith(before[: before.index("[")])
    read = {(model, at): from_dict(entry, "test") for model, per in tomllib.loads(after).items()
            for at, entry in per.items()}  # fmt: skip
    assert read.pop(("llama-3.1-8b", "ctx-2048")) == tiles
    for (model, at), kept in read.items():
        assert kept == load_tiles(model, "h200", int(at.removeprefix("ctx-")))
    tune_card.keep("tiny-llama", 64, tiles, "l4", tmp_path)
    tune_card.keep("tiny-qwen2", 64, tiles, "l4", tmp_path)
    assert (tmp_path / "l4.toml").read_text().count("source") == 2


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"MODEL": "gpt-9"}, "MODEL: no model is called 'gpt-9'"),
        ({"CTX": "2k"}, "CTX: '2k'"),
        ({"CTX": "40000", "MODEL": "mistral-7b"}, "beyond"),
        ({"SECONDS": "0"}, "SECONDS: '0'"),
        ({"SECONDS": "soon"}, "SECONDS: 'soon'"),
        ({"KERNELS": "qkv,head"}, "KERNELS: 'head'"),
        ({"KERNELS": ","}, "KERNELS: ',' names nothing"),
        ({"WRITE": "yes"}, "WRITE: 'yes'"),
        ({"BITS": "8"}, "BITS: '8'"),
        ({"BITS": "4", "MODEL": "tiny-llama", "CTX": "64"}, "no kernel for widths in 4 bits"),
    ],
)
def test_a_wish_that_makes_no_sense_is_one_line(env: dict[str, str], named: str) -> None:
    with pytest.raises((BadInputError, UnsupportedError)) as caught:
        tune_card.wish(env)
    assert named in str(caught.value)


def test_a_wish_is_for_the_ladders_cells_unless_it_says_more() -> None:
    assert list(tune_card.wish({}).cells) == [
        ("qwen2.5-7b", 2048),
        ("qwen2.5-7b", 16384),
        ("llama-3.1-8b", 2048),
        ("llama-3.1-8b", 16384),
        ("mistral-7b-v0.3", 2048),
    ]
    asked = tune_card.wish(
        {"MODEL": "qwen2.5-7b", "CTX": "4096", "SECONDS": "30", "KERNELS": "o, down,o", "WRITE": "1"}
    )
    assert asked == tune_card.Wish((("qwen2.5-7b", 4096),), 30, ("o", "down"), write=True)
    assert tune_card.wish({"BITS": "4"}).bits == 4
    assert not tune_card.wish({"WRITE": "0"}).write
