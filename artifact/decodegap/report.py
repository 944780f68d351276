"""How records become the paper's files.

The paper's tables and figures are made of shipped records alone. Local records of a GPU get the same tables and
figures, theirs beside the shipped ones, in that GPU's local report; a CPU's get a report of their own.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodegap import frame, gpus, numbers, parameters, plan, published, records, render, style
from decodegap.errors import BadInputError, StoreError
from decodegap.exhibits import FIGURES, TABLES, View, figure, figures_of, table, tables_of
from decodegap.launch import Kept
from decodegap.paths import HERE, Places, imported
from decodegap.render import Table
from decodegap.schema import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from decodegap.rows import Store
    from decodegap.tensions import Finding
    from decodegap.verdicts import Verdict

EVERYTHING = frozenset({"tables", "figures"})
PARAMETERS = ("gpu", "results")


@dataclass(frozen=True)
class Views:
    """What a notebook shows: the paper's view or that of your records beside it, and your CPU's if there is one."""

    store: Path
    main: View
    cpu: View | None


def paper(at: Places = HERE) -> View:
    """The paper's view: shipped records of every GPU, and the study's numbers.

    Raises `BadRecordError` or `StoreError` for the first record that is not what it should be.
    """
    found = shipped(at)
    kept = tuple(Kept("shipped", record) for record in found)
    return View(frame.build(found), published.load(at.published), None, kept=kept)


def local(gpu: str, store: Path, at: Places = HERE) -> View | None:
    """The view of the local records of `gpu`, measured here or imported, beside the shipped and all imported ones.

    None if there are none of `gpu`. Raises as `paper`.
    """
    yours = records.load_all(store, gpu)
    brought = [] if gpu == "cpu" else _imported(store)
    mine = yours or [record for record in brought if record.cell.gpu == gpu]
    if not mine:
        return None
    others: dict[Store, list[Record]] = {"shipped": [] if gpu == "cpu" else shipped(at), "imported": brought}
    beside = {store: frame.comparable(found, mine) for store, found in others.items()}
    left_out = sum(map(len, others.values())) - sum(map(len, beside.values()))
    stores: dict[Store, list[Record]] = {"shipped": beside["shipped"], "yours": yours, "imported": beside["imported"]}
    kept = tuple(Kept(store, record) for store, found in stores.items() for record in found)
    return View(frame.build(*stores.values()), published.load(at.published), store / gpu / "report", left_out, kept)


def shipped(at: Places = HERE) -> list[Record]:
    """Every shipped record. Raises `BadRecordError` or `StoreError` for the first bad one."""
    return [
        record for gpu in _gpus_in(at.results) if gpu != "local" for record in records.load_shipped(at.results, gpu)
    ]


def _imported(store: Path) -> list[Record]:
    return [record for gpu in _gpus_in(imported(store)) for record in records.load_all(imported(store), gpu)]


def local_gpus(store: Path) -> list[str]:
    """The GPUs that `store` has records of, measured here or imported."""
    return sorted({*_gpus_in(store), *_gpus_in(imported(store))})


def from_notebook(names: Mapping[str, Any], at: Places = HERE) -> Views:
    """What a notebook with these global `names` shows: the paper, or your records of `gpu` beside it, and your CPU's.

    Raises `BadInputError` for a parameter that is unknown or of the wrong type, and as `paper` does.
    """
    given = parameters.notebook_parameters(names, PARAMETERS)
    results = given.get("results", "")
    if not isinstance(results, str):
        raise BadInputError(f"results: {results!r} is not a folder")
    store = plan.place("RESULTS", results) if results else at.local
    wanted = plan.request(gpu=given.get("gpu", "auto")).gpu
    known = [*_gpus_in(at.results), *local_gpus(store)]
    gpu = gpus.choose(wanted, gpus.detect() if wanted not in known else [], extra=known)[0].slug
    beside = None if gpu == "cpu" else local(gpu, store, at)
    return Views(store=store, main=beside or paper(at), cpu=local("cpu", store, at))


def rebuild(
    at: Places = HERE, what: Collection[str] = EVERYTHING, *, store: Path | None = None, gpu: str | None = None
) -> list[Path]:
    """Write the paper's files from shipped records, and a report for each GPU with records in `store` (or just `gpu`).

    Returns every file in order; one whose bytes stay the same is not touched. Nothing is written before everything
    is loaded and checked, so a bad record leaves all files as they were. Raises as `paper`.
    """
    store = store or at.local
    mine = [local(slug, store, at) for slug in ([gpu] if gpu else local_gpus(store))]
    views = [paper(at), *(view for view in mine if view is not None)]
    return [_put(path, content) for view in views for path, content in _files(view, at, what)]


def rebuild_claims(
    gpu: str, store: Path, found: "Sequence[Verdict]", findings: "Sequence[Finding]", at: Places = HERE
) -> list[Path]:
    """Write these verdicts to the local report of `gpu` if it has records, else the paper's from the shipped records.

    Returns every file. Raises as `paper`.
    """
    from decodegap import review

    view = None if gpu == "cpu" else local(gpu, store, at)
    if view is None or view.folder is None:
        all_shipped = shipped(at)
        digest = frame.records_hash(frame.build(all_shipped))
        return [_put(path, content) for path, content in review.files(at.generated, found, findings, digest)]
    digest = frame.records_hash(view.frame)
    return [_put(path, content) for path, content in review.files(view.folder, found, findings, digest)]


def rebuild_one(kind: str, name: str, at: Places = HERE) -> list[Path]:
    """Write one of the paper's figures or tables, in all its formats, and return the files.

    Raises `BadInputError` for a name that there is not, and as `paper`.
    """
    from decodegap import review

    reviewed = ("claims", "costs")
    known = [*FIGURES] if kind == "figure" else [*TABLES, *reviewed]
    if name not in known:
        raise BadInputError(f"{kind} {name[:60]!r}: known are {', '.join(known)}")
    view = paper(at)
    if kind == "table" and name in reviewed:
        files = [each for each in review.paper_files(at, shipped(at), view.published) if each[0].stem == name]
    elif kind == "table":
        files = list(_table_files(at.generated, table(view, name)))
    else:
        files = list(_figure_files(view, at.figures, name, figure(view, name)))
    return [_put(path, content) for path, content in files]


def places(gpu: str, store: Path, at: Places = HERE) -> list[Path]:
    """The folders a reader may want to open after `rebuild`, those that exist."""
    wanted = [store / gpu / "report", store / gpu / "notebooks", at.figures, at.generated]
    return [folder for folder in wanted if folder.is_dir() and any(folder.iterdir())]


def shown(path: Path, at: Places = HERE) -> str:
    """`path` as people read it: from the checkout's root if it is inside."""
    return str(path.relative_to(at.root) if path.is_relative_to(at.root) else path)


def epoch_s(view: View) -> int:
    """The newest record's time as a Unix time; the study's date where there is no record."""
    newest = max(view.frame["started_at"], default="") or view.published.paper.date
    when = datetime.fromisoformat(newest)
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def _gpus_in(store: Path) -> list[str]:
    """The GPUs that have a folder with records in `store`; one that cannot be listed is a `StoreError`."""
    if not store.is_dir():
        return []
    try:
        names = sorted(path.name for path in store.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise StoreError(f"{store}: cannot be read: {error.strerror}") from None
    return [name for name in names if name != "local" and gpus.SLUG.fullmatch(name) and _has_records(store, name)]


def _has_records(store: Path, gpu: str) -> bool:
    return (store / gpu / records.MANIFEST).exists() or next(records.files(store, gpu), None) is not None


def _files(view: View, at: Places, what: Collection[str]) -> Iterator[tuple[Path, bytes]]:
    """Every file of `view`, path and content, drawn one by one."""
    if "tables" in what:
        folder = view.folder or at.generated
        for made in tables_of(view):
            yield from _table_files(folder, made)
        if view.folder is None:
            # These start from this module.
            from decodegap import numbers_ladder, numbers_paper, numbers_quant, review, withdrawn

            all_shipped = shipped(at)
            macros = numbers.macros(view.frame, view.published)
            macros |= numbers.predictions(view.fitted, view.published)
            macros |= numbers_paper.macros(all_shipped, view.published, at)
            macros |= numbers_quant.macros(all_shipped, view.published)
            macros |= numbers_ladder.macros(all_shipped)
            macros |= withdrawn.macros(all_shipped, view.published, at)
            yield folder / "numbers.tex", numbers.latex(macros, frame.records_hash(view.frame)).encode()
            yield from review.paper_files(at, all_shipped, view.published)
    if "figures" in what:
        for name, drawn in figures_of(view):
            yield from _figure_files(view, view.folder or at.figures, name, drawn)


def _table_files(folder: Path, made: Table) -> Iterator[tuple[Path, bytes]]:
    yield folder / f"{made.name}.md", render.markdown(made).encode()
    yield folder / f"{made.name}.csv", render.csv_text(made).encode()
    yield folder / f"{made.name}.tex", render.latex(made).encode()


def _figure_files(view: View, folder: Path, name: str, drawn: "Figure") -> Iterator[tuple[Path, bytes]]:
    digest, epoch = frame.records_hash(view.frame), epoch_s(view)
    for fmt in style.FORMATS:
        yield folder / f"{name}.{fmt}", style.to_bytes(drawn, fmt, title=name, records=digest, epoch_s=epoch)


def _put(path: Path, content: bytes) -> Path:
    try:
        same = path.read_bytes() == content
    except OSError:
        same = False
    if not same:
        records.write_atomically(path, content)
    return path
