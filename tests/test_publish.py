"""Whether publishing replaces whole cells, touches no other, and vouches for what it ships."""

from pathlib import Path

import pytest
from factory import grid, rehashed, write

from decodegap import publish, records
from decodegap.errors import BadInputError
from decodegap.paths import imported


def shipped(results: Path) -> dict[tuple[str, int, int], str]:
    """The content hash of each shipped session, by model, context and session."""
    found = records.load_shipped(results, "l4")
    return {(each.cell.model, each.cell.ctx, each.session): each.content_hash or "" for each in found}


def test_a_published_cell_replaces_all_sessions_of_that_cell_and_no_other(tmp_path: Path) -> None:
    old = grid("l4", sessions=3)
    write(old, tmp_path / "results")
    before = shipped(tmp_path / "results")
    cell = old[0].cell
    mine = [rehashed(each, seconds_total=9.0) for each in old if each.cell == cell and each.session <= 2]
    write(mine, tmp_path / "store")
    copied = publish.publish("l4", tmp_path / "store", tmp_path / "results")
    assert len(copied) == len(mine) == 2
    after = shipped(tmp_path / "results")
    here = {key for key in before if key[:2] == (cell.model, cell.ctx)}
    assert {key: after[key] for key in before.keys() - here} == {key: before[key] for key in before.keys() - here}
    assert [after.get((cell.model, cell.ctx, n)) for n in (1, 2, 3)] == [*(each.content_hash for each in mine), None]


def test_imported_records_are_published_where_there_are_none_of_ones_own(tmp_path: Path) -> None:
    store, results = tmp_path / "store", tmp_path / "results"
    with pytest.raises(BadInputError, match="no local records to publish"):
        publish.publish("l4", store, results)
    theirs = grid("l4", sessions=1)
    write(theirs, imported(store))
    assert len(publish.publish("l4", store, results)) == len(shipped(results)) == len(theirs)
