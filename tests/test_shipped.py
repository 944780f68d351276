"""What ships: the H200 grid is whole, its floors are what the design says, and nobody can be recognised in it."""

import re

import pytest

from decodegap import floor, models, quant_catalogue, records
from decodegap.paths import HERE
from decodegap.schema import Record

# Published floors in ms: (W_all + K) / 4800 GB/s, from the models' own byte counts.
FLOORS_MS = {
    "qwen2.5-7b": (15_231_233_024, 57_344),
    "llama-3.1-8b": (16_060_522_496, 131_072),
    "mistral-7b-v0.3": (14_496_047_104, 131_072),
}


@pytest.fixture(scope="module")
def h200() -> list[Record]:
    return records.load_all(HERE.results, "h200")


def test_the_h200_grid_has_twelve_cells_of_three_sessions(h200: list[Record]) -> None:
    grid = [record for record in h200 if record.cell.experiment == "baseline"]
    sessions: dict[tuple[str, int], set[int]] = {}
    for record in grid:
        sessions.setdefault((record.cell.model, record.cell.ctx), set()).add(record.session)
    assert len(sessions) == 12
    assert all(found == {1, 2, 3} for found in sessions.values())
    assert {record.outcome for record in grid} == {"ok"}
    assert {record.ran.sdpa for record in grid if record.ran} == {"flash"}


@pytest.mark.parametrize("model", FLOORS_MS)
def test_floors_equal_the_check_values(h200: list[Record], model: str) -> None:
    weight_bytes, kv_bytes = FLOORS_MS[model]
    for record in (record for record in h200 if record.cell.model == model and record.quantised is None):
        assert record.floors_ms.published == pytest.approx((weight_bytes + record.cell.ctx * kv_bytes) / 4.8e9)


def test_quantised_floors_are_made_of_the_bytes_held_which_are_those_of_the_format(h200: list[Record]) -> None:
    found = [record for record in h200 if record.quantised is not None and record.cell.experiment == "quantised"]
    assert {record.cell.arm for record in found} == {path.slug for path in quant_catalogue.on("h200")}
    for record in found:
        held, config = record.quantised, models.lookup(record.cell.model).config
        assert held is not None
        streamed = held.packed + held.kept
        assert record.floors_ms.streamed == pytest.approx((streamed + record.bytes.kv) / 4.8e9)
        assert record.floors_ms.published == pytest.approx((streamed + held.table + record.bytes.kv) / 4.8e9)
        bits = quant_catalogue.PATHS[record.cell.arm].bits
        assert streamed == pytest.approx(floor.quantised_bytes(config, 2, bits), rel=1e-3)


def test_every_quantised_session_ran_its_own_kernels_and_replayed_what_it_launched(h200: list[Record]) -> None:
    for record in (r for r in h200 if r.quantised is not None and r.cell.experiment == "quantised"):
        path = quant_catalogue.PATHS[record.cell.arm]
        assert [series.arm for series in record.series] == [path.slug, path.slug + quant_catalogue.GRAPH_SUFFIX]
        layers = models.lookup(record.cell.model).config["num_hidden_layers"]
        for series in record.series:
            assert series.ran is not None
            ran = sum(n for name, n in series.ran.kernels.items() if any(part in name for part in path.kernels))
            assert ran == (0 if path.is_baseline else 7 * layers)
        (seen,) = record.attestations
        assert seen.outputs_changed
        assert seen.outputs_equal or path.sums_in_fp16


def test_every_ab_session_is_attested(h200: list[Record]) -> None:
    pairs = [record for record in h200 if record.cell.arm == "ab"]
    assert len([r for r in pairs if (r.cell.model, r.cell.ctx) == ("qwen2.5-7b", 2048)]) == 10
    for record in pairs:
        assert [seen.outputs_equal and seen.kernels_equal and seen.outputs_changed for seen in record.attestations] == [
            True
        ]


def test_no_read_probe_beats_the_datasheet(h200: list[Record]) -> None:
    """A probe that reads less than it counts would; so would one that a cache serves."""
    assert all(0.8 < r.machine.read_gb_s / 4800 < 1 for r in h200 if r.machine and r.machine.read_gb_s)


def test_records_name_no_host_user_card_or_place() -> None:
    identifying = re.compile(
        rb"GPU-[0-9a-f]{8}-|[0-9a-f]{2}(:[0-9a-f]{2}){5}|\b\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b|\"/|: */[a-z]+/"
        rb"|/(home|root)/|hostname|username",
        re.IGNORECASE,
    )
    for path in HERE.results.glob("*/*/*.json"):
        if HERE.local not in path.parents:
            content = re.sub(rb'"driver": "[\d.]+"', b"", path.read_bytes())
            assert not identifying.search(content), path.name
