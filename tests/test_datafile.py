"""Whether a data file that is broken is named in one line, wherever it is read."""

import shutil
from functools import cache
from pathlib import Path

import pytest

from decodegap import gpus, numbers_paper, predict
from decodegap.errors import BadInputError
from decodegap.paths import DATA, HERE, Places

GIT = "; git has the one that came with it$"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[dispatch_us]", "[dispatch_us", "Expected ']'"),
        ("mid = 6.6\n", "", "dispatch_us.mid: Field required"),
        ("mid = 6.6", "mid = 'fast'", "dispatch_us.mid: Input should be a valid number"),
        ("fit_gpu =", "gpu =", "fit_gpu: Field required"),
    ],
)
def test_broken_assumptions_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, named: str):
    whole = (DATA / "predict.toml").read_text(encoding="utf-8")
    assert old in whole
    (tmp_path / "predict.toml").write_text(whole.replace(old, new, 1), encoding="utf-8")
    monkeypatch.setattr(predict, "DATA", tmp_path)
    with pytest.raises(BadInputError, match=rf"^predict\.toml: {named}[^\n]*{GIT}"):
        predict.assumed()


@pytest.mark.parametrize(
    ("content", "named"),
    [("]", "Invalid statement"), ("analysis = 3", "analysis: "), ("[analysis]\nmb = 1", "measure: Field required")],
)
def test_broken_sizes_are_named(tmp_path: Path, content: str, named: str) -> None:
    at = Places(tmp_path)
    at.sizes.parent.mkdir()
    at.sizes.write_text(content, encoding="utf-8")
    with pytest.raises(BadInputError, match=rf"^sizes\.toml: {named}[^\n]*{GIT}"):
        numbers_paper.disk(at)
    shutil.copyfile(HERE.sizes, at.sizes)
    assert numbers_paper.disk(at) == numbers_paper.disk()


def test_a_gpu_that_data_is_about_and_the_catalogue_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpus.known("h200") == gpus.catalogue()["h200"]
    whole = (DATA / gpus.CATALOGUE).read_text(encoding="utf-8")
    (tmp_path / gpus.CATALOGUE).write_text(whole.replace("[h200]", "[h201]"), encoding="utf-8")
    monkeypatch.setattr(gpus, "DATA", tmp_path)
    monkeypatch.setattr(gpus, "catalogue", cache(gpus.catalogue.__wrapped__))
    assert gpus.known("h201").peak_gb_s == 4800
    with pytest.raises(BadInputError, match=rf"^gpus\.toml: 'h200' is not in it{GIT}"):
        gpus.known("h200")
