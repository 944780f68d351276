"""How local records become shipped ones: the deliberate step from this machine's cache to the paper's data."""

from pathlib import Path

from decodegap import records
from decodegap.errors import BadInputError
from decodegap.paths import imported
from decodegap.records import MANIFEST
from decodegap.schema import Record


def publish(gpu: str, local: Path, results: Path) -> list[Path]:
    """Copy every valid local record of `gpu`, or imported one where there are none, into `results`, with its manifest.

    Returns the shipped files. A cell that is published replaces all shipped sessions of that cell, so that no cell
    mixes two campaigns. Raises `BadInputError` where there is nothing to publish or the records are a CPU's,
    `BadRecordError` for a bad record.
    """
    if gpu == "cpu":
        raise BadInputError("GPU=cpu: stand-in records are not the paper's data; they stay local")
    store = local if any(records.files(local, gpu)) else imported(local)
    fresh = [record for record in records.load_all(store, gpu) if record.outcome != "void"]
    if not fresh:
        raise BadInputError(f"GPU={gpu}: no local records to publish; run `make measure GPU={gpu}` first")
    if stand_in := [record for record in fresh if record.stand_in]:
        raise BadInputError(f"{stand_in[0].cell.model} is a stand-in model; remove its local records to publish")
    copied = [_copy(record, store, results) for record in fresh]
    for cell in {record.cell for record in fresh}:
        first = records.path_of(results, cell, 1)
        for old in {*first.parent.glob(first.name.removesuffix("1.json") + "*.json")} - {*copied}:
            old.unlink()
    records.write_atomically(results / gpu / MANIFEST, records.manifest_text(results, gpu).encode())
    return copied


def _copy(record: Record, store: Path, results: Path) -> Path:
    target = records.path_of(results, record.cell, record.session)
    records.write_atomically(target, records.path_of(store, record.cell, record.session).read_bytes())
    return target
