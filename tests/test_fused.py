"""What the fused step decides without a GPU: its tiles, its launches, and that its kernels compute what they should."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from decodegap import arms, models  # noqa: E402
from decodegap.errors import BadInputError, UnsupportedError  # noqa: E402
from decodegap.fused import search  # noqa: E402
from decodegap.fused import tiles as tiles_module  # noqa: E402
from decodegap.fused.launches import POINTERS, kernels_of  # noqa: E402
from decodegap.fused.shape import TILED, kernel_bytes, launches, shape_of  # noqa: E402
from decodegap.fused.tiles import (  # noqa: E402
    FOLDER,
    Attention,
    Matvec,
    check_tiles,
    default_tiles,
    from_dict,
    known_tiles,
    load_tiles,
    to_toml,
)

ROOT = Path(__file__).resolve().parents[1]
PAPER = [model.slug for model in models.with_role("paper")]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def shape(slug):
    return shape_of(models.lookup(slug).config)


@needs_triton
def test_the_kernels_in_the_interpreter():
    import triton

    if not triton.__version__.startswith("3.6"):
        pytest.skip(f"mends the interpreter of Triton 3.6, and {triton.__version__} is installed")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "artifact")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.parametrize("slug", PAPER)
def test_kernels_read_every_streamed_byte_once(slug):
    model = models.lookup(slug)
    counts, sizes = launches(shape(slug)), kernel_bytes(shape(slug), 2048)
    weights = sum(sizes[name] * counts[name] for name in TILED if name != "attention")
    assert weights == model.streamed_bytes("bfloat16")
    assert sizes["attention"] * counts["attention"] == model.kv_bytes(2048, "bfloat16")


@pytest.mark.parametrize("slug", PAPER)
def test_in_4_bits_projections_take_a_quarter_and_a_scale_a_group_and_the_head_what_it_took(slug):
    full = kernel_bytes(shape(slug), 2048)
    packed = kernel_bytes(shape_of(models.lookup(slug).config, 4), 2048)
    gain, part = 2 * shape(slug).hidden, (4 + 16 / 128) / 16
    bias = 2 * shape(slug).qkv_rows if shape(slug).bias else 0
    # In 4 bits who writes the numbers of a norm reads its gain, in 16 bits who takes the norm.
    assert packed == {
        "embed": full["embed"] + gain,
        "qkv": (full["qkv"] - gain - bias) * part + bias,
        "attention": full["attention"],
        "o": full["o"] * part + gain,
        "gate_up": (full["gate_up"] - gain) * part,
        "down": full["down"] * part + gain,
        "lm_head": full["lm_head"] - gain,
    }


@pytest.mark.parametrize("slug", PAPER)
@pytest.mark.parametrize(("ctx", "bits"), [(1, 16), (2048, 16), (16384, 16), (40000, 16), (2048, 4)])
def test_every_card_has_tiles_that_fit(slug, ctx, bits):
    for gpu in [path.stem for path in FOLDER.glob("*.toml")] + ["never-seen", ""]:
        tiles = load_tiles(slug, gpu, ctx, bits)
        check_tiles(tiles, shape_of(models.lookup(slug).config, bits))
        assert tiles.source
        assert from_dict(tomllib.loads(to_toml(slug, ctx, tiles))[slug][f"ctx-{ctx}"], "written") == tiles
    with pytest.raises(BadInputError, match="no tiles for 'tiny-llama'"):
        load_tiles("tiny-llama", "h200", 2048)


def test_tiles_for_a_longer_context_than_any_are_those_of_the_longest():
    assert load_tiles("qwen2.5-7b", "h200", 2049) == load_tiles("qwen2.5-7b", "h200", 10**6)
    assert load_tiles("qwen2.5-7b", "h200", 2048) != load_tiles("qwen2.5-7b", "h200", 2049)


@pytest.mark.parametrize(
    ("kernel", "change", "said"),
    [
        ("qkv", {"rows": 1}, "qkv: rows is 1"),
        ("o", {"rows": 3}, "o: rows is 3, which is no power of two"),
        ("o", {"rows": 1024}, "must divide 3584"),
        ("down", {"block": 4}, "block is 4"),
        ("lm_head", {"ahead": 0}, "ahead is 0"),
        ("gate_up", {"warps": 64}, "warps is 64"),
        ("attention", {"block": 8}, "attention: block must be at least 16"),
        ("attention", {"splits": 0}, "splits at least 1"),
    ],
)
def test_tiles_that_do_not_fit_are_named(kernel, change, said):
    tiles = load_tiles("qwen2.5-7b", "h200", 2048)
    with pytest.raises(BadInputError, match=said):
        check_tiles(tiles.having(kernel, replace(tiles.of(kernel), **change)), shape("qwen2.5-7b"))


@pytest.mark.parametrize(
    ("kernel", "change", "said"),
    [
        ("o", {"rows": 8}, "o: rows is 8 and must divide 3584 and be 16 at least"),
        ("gate_up", {"rows": 4}, "be 8 at least"),
        ("qkv", {"block": 256, "warps": 4}, "block is 256 and must be 512 at least"),
    ],
)
def test_in_4_bits_a_tile_is_a_matrix_unit_s_at_least_and_a_group_a_warp(kernel, change, said):
    tiles = load_tiles("qwen2.5-7b", "h200", 2048, 4)
    with pytest.raises(BadInputError, match=said):
        check_tiles(
            tiles.having(kernel, replace(tiles.of(kernel), **change)), shape_of(models.lookup("qwen2.5-7b").config, 4)
        )


def test_an_entry_with_a_mistake_says_where():
    with pytest.raises(BadInputError, match=r"h200\.toml: x\.ctx-1: 'qkv'"):
        from_dict({}, "h200.toml: x.ctx-1")
    entry = {name: {"rows": 1, "block": 8, "warps": 1} for name in TILED}
    with pytest.raises(BadInputError, match="unexpected keyword argument 'rows'"):
        from_dict(entry, "h200.toml: x.ctx-1")
    tiles = load_tiles("qwen2.5-7b", "h200", 2048)
    written = tomllib.loads(to_toml("x", 1, tiles))["x"]["ctx-1"]
    for bad in ("2", 2.0, []):
        with pytest.raises(BadInputError, match=r"^here: down: rows is .* and must be a whole number"):
            from_dict(written | {"down": written["down"] | {"rows": bad}}, "here")


@pytest.mark.parametrize(
    "content", [b"[x", b"\xff", b"x = 1", b"[x.2048]", b"[x.ctx-y]", b"x.ctx-1 = 2", b"[x.ctx-1]\nqkv = 3"]
)
def test_a_broken_file_of_tiles_is_named_in_one_line(content, monkeypatch, tmp_path):
    monkeypatch.setattr(tiles_module, "FOLDER", tmp_path)
    tiles_module._file.cache_clear()
    (tmp_path / "h200.toml").write_bytes(content)
    try:
        with pytest.raises(BadInputError, match=r"^(h200\.toml: |data/fused has no tiles for)") as raised:
            load_tiles("qwen2.5-7b", "h200", 2048)
    finally:
        tiles_module._file.cache_clear()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma"}, "model type 'gemma'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"sliding_window": 4096}, "a sliding window"),
        ({"attention_bias": True}, "a bias"),
        ({"head_dim": 96}, "96 dimensions"),
        ({"hidden_size": 72, "head_dim": 16}, "multiples of 16"),
    ],
)
def test_a_model_without_kernels_is_named(change, said):
    with pytest.raises(UnsupportedError, match=said):
        shape_of(models.lookup("tiny-llama").config | change)


def test_grids_cover_every_output_and_wants_no_argument_that_has_no_type():
    one = shape("llama-3.1-8b")
    tiles = load_tiles("llama-3.1-8b", "h200", 2048)
    built = kernels_of(one, tiles, capacity=4096, pdl=True)
    for name in ("qkv", "o", "gate_up", "down", "lm_head"):
        assert built[name].grid[0] * tiles.of(name).rows == one.rows(name)
    separate = tiles.having("attention", Attention(splits=9, block=64, warps=4))
    assert list(kernels_of(one, separate, capacity=4096, pdl=True)) == [
        *("embed", "qkv", "attention", "combine", "o", "gate_up", "down", "lm_head")
    ]
    dropped = kernels_of(one, separate, capacity=4096, pdl=True, without_wait="o")
    assert [name for name, each in dropped.items() if each.constants.get("WAIT") is False] == ["o"]


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "bits", "first"), [("qkv", 16, 5), ("attention", 16, 16), ("o", 16, 4), ("o", 4, 6)]
)
def test_kernels_ask_for_weights_before_they_wait_and_do_not_spill(kernel, bits, first, tmp_path, monkeypatch):
    from decodegap.fused import compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one = shape_of(models.lookup("qwen2.5-7b").config, bits)
    tiles = load_tiles("qwen2.5-7b", "h200", 2048, bits)
    built = kernels_of(one, tiles, capacity=4096, pdl=True)[kernel]
    cubin = compiled.compiled(built, early=True, capability=90).asm["cubin"]
    registers, stack = compiled.usage(cubin)
    assert 24 <= registers <= 168
    assert stack == 0
    steps = re.findall(r"^\s+/\*\w+\*/\s+(?:@!?\w+ )?([A-Z0-9]+)", compiled.disassembled(cubin, "-sass"), re.MULTILINE)
    waiting = steps.index("ACQBULK")
    assert steps.index("PREEXIT") < steps.index("LDG")
    assert steps[:waiting].count("LDG") >= first
    assert "STG" not in steps[:waiting]
    assert "LDG" in steps[waiting:]
    plain = kernels_of(one, tiles, capacity=4096, pdl=False)[kernel]
    assert "griddepcontrol" not in compiled.compiled(plain, early=False, capability=80).asm["ptx"]


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "bits", "constant"),
    [
        ("qkv", 16, {"weights", "gain", "bias", "state"}),  # the position was written before an ordinary launch
        ("o", 16, {"weights"}),
        ("gate_up", 16, {"weights", "gain"}),
        ("lm_head", 16, {"weights", "gain"}),
        ("qkv", 4, {"weights", "scales", "bias", "state"}),
        ("o", 4, {"weights", "scales", "next_gain"}),
        ("gate_up", 4, {"weights", "scales"}),
    ],
)
def test_nothing_that_the_kernel_before_writes_is_read_before_the_wait(kernel, bits, constant, tmp_path, monkeypatch):
    from decodegap.fused import compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    one = shape_of(models.lookup("tiny-qwen2").config | sizes, bits)
    built = kernels_of(one, default_tiles(one), capacity=64, pdl=True)[kernel]
    before, wait, _ = compiled.compiled(built, early=True, capability=90).asm["ttir"].partition("griddepcontrol.wait")
    assert wait
    pointers, loaded = {}, set()
    for result, operation, operand in re.findall(r"^\s+(%\w+) = (tt\.\w+) (%\w+)", before, re.MULTILINE):
        pointers[result] = pointers.get(operand, operand)
        if operation == "tt.load":
            loaded.add(pointers[result].removeprefix("%"))
    assert loaded == constant


@needs_triton
def test_every_pointer_has_a_type():
    from decodegap.fused import kernels

    for kernel in kernels_of(shape("tiny-qwen2"), default_tiles(shape("tiny-qwen2")), capacity=8, pdl=True).values():
        names = set(kernels.FUNCTIONS[kernel.function].arg_names)
        assert set(kernel.constants) <= names
        assert names - set(kernel.constants) <= set(POINTERS)


@pytest.mark.parametrize("slug", PAPER)
@pytest.mark.parametrize(("ctx", "bits"), [(2048, 16), (16384, 16), (2048, 4)])
def test_candidates_fit_and_differ(slug, ctx, bits):
    wanted = shape_of(models.lookup(slug).config, bits)
    tiles = default_tiles(wanted)
    for kernel in TILED:
        found = search.candidates(kernel, wanted, ctx)
        assert len(set(found)) == len(found) > 10
        for tile in found:
            check_tiles(tiles.having(kernel, tile), wanted)


def test_the_tuner_can_find_every_tile_that_is_shipped():
    for name, per_context in tomllib.loads((FOLDER / "h200.toml").read_text()).items():
        model, bits = name.removesuffix("-int4"), 4 if name.endswith("-int4") else 16
        for key, entry in per_context.items():
            tiles, ctx = from_dict(entry, key), int(key.removeprefix("ctx-"))
            for kernel in TILED:
                tried = search.candidates(kernel, shape_of(models.lookup(model).config, bits), ctx)
                assert replace(tiles.of(kernel), maxnreg=None) in tried, (name, key, kernel)


def test_what_was_found_for_another_model_is_tried_where_it_fits():
    known = known_tiles("h200", 16)
    assert len(known) == sum(
        len(per) for name, per in tomllib.loads((FOLDER / "h200.toml").read_text()).items() if "-int" not in name
    )
    assert known_tiles("a card without a file", 16) == known
    wanted = shape_of(models.lookup("llama-3.1-8b").config)
    start = load_tiles("llama-3.1-8b", "h200", 2048)
    own, theirs = start.gate_up, load_tiles("mistral-7b-v0.3", "h200", 2048).qkv
    assert own in search.familiar("gate_up", start, known, wanted)
    found = search.familiar("qkv", start, known, wanted)
    assert theirs in found
    assert len(set(found)) == len(found)
    assert all(tile.rows < 16 for tile in found)
    odd = [start.having("o", Matvec(rows=3, block=512, warps=2)), start.having("o", Matvec(4, 512, 2))]
    assert search.familiar("o", start, odd, wanted) == [Matvec(4, 512, 2)]
    assert search.familiar("qkv", start, odd[:1], wanted) == [start.qkv]  # though its o does not fit
    wanted, start = shape_of(models.lookup("llama-3.1-8b").config, 4), load_tiles("llama-3.1-8b", "h200", 2048, 4)
    assert search.familiar("o", start, known, wanted) == []
    assert {tile.rows for tile in search.familiar("o", start, known_tiles("h200", 4), wanted)} == {16}


@pytest.mark.parametrize(
    ("warps", "registers", "caps"),
    [
        (8, 71, [64]),  # from 3 programs of 256 threads to 4; 5 would leave 48
        (8, 64, [48]),  # 4 fill the multiprocessor already
        (2, 141, [128, 112]),
        (8, 33, [32]),  # 40 are handed out
        (8, 25, []),  # 8 programs have all the threads that there can be
        (1, 65, [64]),  # for 29 programs or 30
        (1, 64, []),  # 32 are the most
        (4, 49, [48, 40]),  # 9 programs, because 56 are handed out: to 10 and 11
        (2, 96, [88, 80]),  # from 10 to 11 and 12; 13 would leave 72
        (4, 255, []),  # a third program would leave 168, and spill
    ],
)
def test_a_cap_on_registers_makes_room_for_another_program(warps, registers, caps):
    tile = Matvec(rows=2, block=2048, warps=warps)
    found = search.tighter(tile, registers)
    assert [each.maxnreg for each in found] == caps
    assert {replace(each, maxnreg=None) for each in found} <= {tile}


def test_without_a_gpu_the_arm_says_so_in_one_line(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match=r"GPU|Triton"):
        arms.prepare("fused", arms.Setup(None, None, None, 8, "cpu"))


@needs_triton
def test_the_interpreters_tests_are_skipped_with_a_reason_under_another_triton():
    code = (
        "import sys, triton, pytest; triton.__version__ = '9.0'; "
        "sys.exit(pytest.main(['-q', '-rs', '-p', 'no:cacheprovider', 'tests/interpreted/test_fused_rungs.py']))"
    )
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "artifact")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert "interpreter of Triton 3.6, and 9.0 is installed" in done.stdout
    assert "passed" not in done.stdout + done.stderr


def test_a_card_that_was_tuned_for_one_model_starts_from_an_h200_for_the_others(tmp_path, monkeypatch):
    own = replace(load_tiles("qwen2.5-7b", "h200", 2048), source="tuned here")
    monkeypatch.setattr(tiles_module, "FOLDER", tmp_path)
    shutil.copy(FOLDER / "h200.toml", tmp_path)
    (tmp_path / "new-card.toml").write_text(to_toml("qwen2.5-7b", 2048, own))
    assert load_tiles("qwen2.5-7b", "new-card", 2048) == own
    assert known_tiles("new-card", 16) == [own, *known_tiles("h200", 16)]
    assert load_tiles("llama-3.1-8b", "new-card", 2048) == load_tiles("llama-3.1-8b", "h200", 2048)


@needs_triton
def test_a_kernel_of_which_the_disassembler_says_nothing_leaves_the_others_alone(tmp_path, monkeypatch):
    from decodegap.fused import compiled

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one = shape("tiny-qwen2")
    monkeypatch.setattr(compiled, "USAGE", re.compile("what no tool prints"))
    kernel = kernels_of(one, default_tiles(one), capacity=8, pdl=False)["embed"]
    assert compiled.build(kernel, early=False, capability=90).error == "ValueError: cuobjdump says nothing of registers"
