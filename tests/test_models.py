"""What is said of a file of models that is broken."""

import pytest

from decodegap import models
from decodegap.errors import BadInputError


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"3",
        b"[" * 100_000,
        b"{}",
        b'{"label": "x", "hf_id": "", "revision": "", "role": "test"}',
    ],
)
def test_a_broken_model_is_one_line_that_names_its_file(content, monkeypatch, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "some.json").write_bytes(content)
    monkeypatch.setattr(models, "DATA", tmp_path)
    with pytest.raises(BadInputError, match=r"^some\.json: no model: [^\n]*; git has the one that came with it$"):
        models.catalogue.__wrapped__()


def test_a_config_that_cannot_be_is_named_with_its_field(monkeypatch, tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    text = (models.DATA / "models" / "tiny-qwen2.json").read_text(encoding="utf-8")
    (folder / "some.json").write_text(text.replace('"hidden_size": 64', '"hidden_size": 63'), encoding="utf-8")
    monkeypatch.setattr(models, "DATA", tmp_path)
    with pytest.raises(BadInputError, match=r"^some\.json: config: "):
        models.catalogue.__wrapped__()
