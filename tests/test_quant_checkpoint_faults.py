"""Whether a GPTQ or AWQ checkpoint that no path can take, or that is damaged, ends in one line."""

import json
from pathlib import Path
from typing import Any

import factory_checkpoint
import pytest
import torch
from factory_checkpoint import FIRST, load, reconfigure, retensor
from safetensors.torch import save_file
from stepping import wide

from decodegap import models, quant_checkpoint
from decodegap.errors import BadInputError

TINY = "tiny-qwen2"  # widths of 64 and 128, in groups of 32


@pytest.mark.parametrize(
    ("method", "changes", "line"),
    [
        ("gptq", {"bits": 8}, "bits is '8'; read here is 4"),
        ("gptq", {"bits": "4"}, "bits is '4'"),
        ("gptq", {"bits": 4.0}, r"bits is '4\.0'"),
        ("gptq", {"group_size": -1}, "group_size is '-1'; read here is 32 or 64 or 128"),
        ("gptq", {"group_size": 10**30}, "group_size is"),
        ("gptq", {"group_size": None}, "group_size is 'None'"),
        ("gptq", {"group_size": 64}, r"q_proj\.qzeros has shape \[2, 32\], not \[4, 32\]: .* in groups of 64"),
        ("gptq", {"desc_act": True}, "desc_act is 'True'; read here is false"),
        ("gptq", {"sym": None}, "sym is 'None'"),
        ("gptq", {"sym": 1}, "sym is '1'; read here is true or false"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; read here is gptq or gptq_v2"),
        ("gptq", {"checkpoint_format": "gptq_v2"}, "qzeros are not all 8, although the config says sym: true"),
        ("gptq", {"dynamic": {"-:q_proj": {}}}, "dynamic gives layers formats of their own"),
        ("gptq", {"quant_method": "awq", "version": "gemm", "zero_point": True}, r"qweight has shape \[32, 256\]"),
        ("gptq", {"quant_method": "fp8"}, "quant_method is 'fp8'; read here is gptq or awq"),
        ("gptq", {"quant_method": ["gptq"]}, "quant_method is"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; read here is gemm"),
        ("awq", {"zero_point": False}, "zero_point is 'False'; read here is true"),
    ],
)
def test_a_config_that_no_path_takes_is_one_line(
    method: str, changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    factory_checkpoint.write(tmp_path, wide(), method)
    reconfigure(tmp_path, **changes)
    with pytest.raises(BadInputError, match=line) as caught:
        load(wide(), tmp_path)
    assert str(caught.value).startswith("WEIGHTS: ")


def test_older_configs_that_leave_fields_out_are_read(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, wide(), "gptq")
    reconfigure(tmp_path, checkpoint_format=None, desc_act=None)
    load(wide(), tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (f"{FIRST}.qweight", None, r"lacks the tensor .*q_proj\.qweight"),
        (f"{FIRST}.g_idx", None, r"lacks the tensor .*g_idx"),
        ("lm_head.weight", None, r"lacks the tensor lm_head\.weight"),
        (f"{FIRST}.bias", None, r"lacks the tensor .*bias"),
        ("model.norm.weight", lambda _: torch.ones(8), r"norm\.weight has shape \[8\], not \[256\]"),
        ("model.norm.weight", lambda norm: norm.int(), "is I32, not F16"),
        (f"{FIRST}.qweight", lambda words: words[:-1], r"q_proj\.qweight has shape \[31, 256\], not \[32, 256\]"),
        (f"{FIRST}.qweight", lambda words: words.long(), "is I64, not I32"),
        (f"{FIRST}.scales", lambda scales: scales.bfloat16(), "scales is BF16, not F16"),
        (f"{FIRST}.scales", lambda scales: scales * float("inf"), "scales are not all finite"),
        (f"{FIRST}.g_idx", lambda order: order.flip(0), "g_idx is not in order; checkpoints with act-order"),
        (f"{FIRST}.g_idx", torch.zeros_like, "g_idx is not in order"),
        (f"{FIRST}.qzeros", lambda words: words + 1, "qzeros are not all 8"),
    ],
)
def test_a_tensor_that_is_missing_or_wrong_is_one_line(name: str, change: Any, line: str, tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, wide(), "gptq")
    retensor(tmp_path, name, change)
    with pytest.raises(BadInputError, match=line):
        load(wide(), tmp_path)


def test_a_zero_point_of_zero_is_ambiguous_in_the_first_format_alone(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path / "one", wide(), symmetric=False, method="gptq")
    retensor(tmp_path / "one", f"{FIRST}.qzeros", lambda words: words | 15)
    with pytest.raises(BadInputError, match="a zero point of 0 is ambiguous in checkpoint_format gptq"):
        load(wide(), tmp_path / "one")
    factory_checkpoint.write(tmp_path / "two", wide(), symmetric=False, method="gptq", layout="gptq_v2")
    retensor(tmp_path / "two", f"{FIRST}.qzeros", lambda words: words & ~15)
    load(wide(), tmp_path / "two")


def test_nothing_is_allocated_for_a_checkpoint_that_does_not_fit_its_config(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    factory_checkpoint.write(tmp_path, wide(), "gptq")
    retensor(tmp_path, "model.layers.1.mlp.down_proj.qweight", lambda words: words[:8])
    monkeypatch.setattr(quant_checkpoint, "_filled", lambda *_: pytest.fail("it was filled"))
    with pytest.raises(BadInputError, match=r"down_proj\.qweight has shape"):
        load(wide(), tmp_path)
    factory_checkpoint.write(tmp_path, wide(), "gptq")
    with pytest.raises(BadInputError, match="hidden_size is 256, tiny-qwen2 has 64"):
        load(models.lookup(TINY), tmp_path)


def test_groups_that_do_not_divide_the_inputs_are_refused(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, models.lookup(TINY), "gptq", 32)
    reconfigure(tmp_path, group_size=128)
    with pytest.raises(BadInputError, match="is 64 x 64: groups of 128 inputs and words of 8 outputs do not divide it"):
        load(models.lookup(TINY), tmp_path)


def test_damaged_doubled_and_pickled_files_are_one_line(tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, wide(), "gptq")
    file = tmp_path / "model.safetensors"
    save_file({f"{FIRST}.scales": torch.ones(1)}, tmp_path / "second.safetensors")
    with pytest.raises(BadInputError, match=r"holds the tensor .*scales twice, the second time in second"):
        load(wide(), tmp_path)
    (tmp_path / "second.safetensors").unlink()
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(BadInputError, match=r"model\.safetensors cannot be read"):
        load(wide(), tmp_path)
    file.unlink()
    torch.save({"x": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BadInputError, match=r"no \.safetensors file; pickled weights are not loaded"):
        load(wide(), tmp_path)


@pytest.mark.parametrize("changes", [{"rms_norm_eps": "x"}, {"rope_scaling": {"rope_type": "no"}}, {"head_dim": 32}])
def test_a_bad_value_elsewhere_in_the_config_is_one_line(changes: dict[str, Any], tmp_path: Path) -> None:
    factory_checkpoint.write(tmp_path, wide("tiny-llama"), "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(BadInputError, match=r"^WEIGHTS: .*config\.json"):
        load(wide("tiny-llama"), tmp_path)
