"""Input that nobody meant: one clear line or a valid result, never a traceback, a hang, or a file outside its place."""

import contextlib
import io
import json
import random
import shutil
import tarfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from factory import grid, record, write
from fuzz import mutate

from decodegap import bundle, claims, experiment, models, plan, provenance, published, records
from decodegap.errors import DecodeGapError
from decodegap.paths import HERE, Places

SECONDS = 10.0  # the slowest case takes a fraction of one; this one has hung
SHARES = {"parameters": 4, "record": 4, "published": 3, "config": 4, "claims": 2, "tar": 2, "provenance": 1}


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Any:
    """How many cases a kind of input gets, of `--cases` in all."""
    every = int(request.config.getoption("--cases"))
    return lambda kind: range(-(-every * SHARES[kind] // sum(SHARES.values())))


@contextlib.contextmanager
def one_line_or_fine(shown: object) -> Iterator[None]:
    """Whatever happens inside ends soon, well, or with an error of ours in one line."""
    began = time.monotonic()
    try:
        yield
    except DecodeGapError as error:
        message = str(error)
        assert message, shown
        assert "\n" not in message, (message, shown)
        assert len(message) < 3000, (message, shown)
    except Exception as error:  # noqa: BLE001  (everything else is what this is about)
        pytest.fail(f"{type(error).__name__}: {str(error)[:300]} for {str(shown)[:2000]}")
    assert time.monotonic() - began < SECONDS, shown


def test_parameters(dice: random.Random, cases: Any) -> None:
    names = ("gpu", "models", "contexts", "sessions", "weights")
    for _ in cases("parameters"):
        given = {name: mutate.value(dice) for name in names if dice.random() < 0.6}
        with one_line_or_fine(given):
            asked = plan.request(**given)
            plan.baseline(asked, "cpu" if dice.random() < 0.5 else "h200")
        with one_line_or_fine(given):
            experiment.from_notebook("baseline", given | {dice.choice(mutate.WORDS): mutate.value(dice)})


def test_records(dice: random.Random, cases: Any, tmp_path: Path) -> None:
    whole = json.loads(records.write(record(), tmp_path).read_bytes())
    path = tmp_path / "x.json"
    for _ in cases("record"):
        data = mutate.tree(dice, whole)
        with contextlib.suppress(ValueError):  # a value that no hash can be made of
            if isinstance(data, dict) and dice.random() < 0.7:
                data["content_hash"] = records.content_hash(data)  # what only the schema can refuse
        content = mutate.text(data)
        path.write_bytes(mutate.damaged(dice, content) if dice.random() < 0.4 else content)
        with one_line_or_fine(path.read_bytes()[:3000]):
            records.load(path)


def test_the_studys_values(dice: random.Random, cases: Any, tmp_path: Path) -> None:
    whole = json.loads(HERE.published.read_bytes())
    path = tmp_path / "published.json"
    for _ in cases("published"):
        content = mutate.text(mutate.tree(dice, whole))
        path.write_bytes(mutate.damaged(dice, content) if dice.random() < 0.3 else content)
        with one_line_or_fine(path.read_bytes()[:3000]):
            published.load(path)


def test_a_checkpoints_config(dice: random.Random, cases: Any, tmp_path: Path) -> None:
    from decodegap import decode

    model = models.lookup("tiny-llama")
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    for _ in cases("config"):
        content = mutate.text(mutate.tree(dice, model.config))
        (tmp_path / "config.json").write_bytes(mutate.damaged(dice, content) if dice.random() < 0.3 else content)
        with one_line_or_fine(content):
            plan.weights_revision(plan.request(weights=f"{tmp_path}/"), model)
            decode.checkpoint_config(model, tmp_path)


def test_claims(dice: random.Random, cases: Any, tmp_path: Path) -> None:
    whole = HERE.claims.read_bytes()
    study = published.load(HERE.published)
    rows = tomllib.loads(whole.decode())["claim"]
    path = tmp_path / "claims.toml"
    for _ in cases("claims"):
        if dice.random() < 0.5:
            path.write_bytes(mutate.damaged(dice, whole))
        else:
            changed = mutate.tree(dice, dice.choice(rows))
            pairs = [f"{key if key.isidentifier() else 'id'} = {json.dumps(each)}" for key, each in changed.items()]
            path.write_bytes("\n".join(["[[claim]]", *pairs]).encode("utf-8", "replace"))
        with one_line_or_fine(path.read_bytes()[:3000]):
            claims.load(path, study)


def inventory(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def odd_member(dice: random.Random, tar: tarfile.TarFile) -> None:
    """A member that must not be unpacked: a link, a device, a name that leads out."""
    name = dice.choice(("../../evil", "h200/../../evil", "h200/baseline/x_1_eager_s1.json", "h200", "h200/a/b/c.json"))
    member = tarfile.TarInfo(dice.choice((name, f"{Path.cwd().anchor}tmp/evil")))
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.REGTYPE)
    member.type = dice.choice(kinds)
    member.linkname = dice.choice(("../../..", "x", f"{Path.cwd().anchor}etc/passwd"))
    tar.addfile(member)


def test_imported_tars(dice: random.Random, cases: Any, tmp_path: Path) -> None:
    write(grid("h200", sessions=1), tmp_path / "shipped")
    source = bundle.export("h200", tmp_path / "shipped", tmp_path / "none", tmp_path)
    whole = source.read_bytes()
    inside = tmp_path / "inside"
    for number in cases("tar"):
        store = inside / f"store{number}"
        out = io.BytesIO()
        if dice.random() < 0.5:
            out.write(mutate.damaged(dice, whole))
        else:
            with tarfile.open(fileobj=io.BytesIO(whole)) as old, tarfile.open(fileobj=out, mode="w") as new:
                for member in old:
                    content = old.extractfile(member)
                    data = content.read() if content else b""
                    if dice.random() < 0.1:
                        data = mutate.damaged(dice, data)
                        member.size = len(data)
                    if dice.random() < 0.95:
                        new.addfile(member, io.BytesIO(data))
                    if dice.random() < 0.05:
                        odd_member(dice, new)
        source.write_bytes(out.getvalue())
        before = inventory(tmp_path)
        with one_line_or_fine(f"case {number}"):
            bundle.bring(source, store)
        after = inventory(tmp_path)
        new_files = [name for name in after if after[name] != before.get(name)]
        assert all(name.startswith(("inside", ".")) for name in new_files), new_files
        assert not any("evil" in name for name in new_files)
        shutil.rmtree(inside, ignore_errors=True)


def test_files_to_trace(dice: random.Random, cases: Any, tmp_path: Path) -> None:
    at = Places(tmp_path)
    at.published.parent.mkdir(parents=True)
    shutil.copyfile(HERE.published, at.published)
    write([record()], at.results)
    samples = [HERE.figures / "fraction.pdf", HERE.figures / "heatmap.svg", HERE.generated / "grid.csv"]
    for _ in cases("provenance"):
        sample = dice.choice(samples)
        path = tmp_path / f"x{sample.suffix}"
        path.write_bytes(mutate.damaged(dice, sample.read_bytes()))
        with one_line_or_fine(sample.name):
            provenance.lines(str(path), at.local, at)
        with one_line_or_fine("a name"):
            provenance.lines(dice.choice(mutate.WORDS), at.local, at)
