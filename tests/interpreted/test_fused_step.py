"""The fused step against transformers on tiny models: logits, cache, choice, and nothing left unwritten."""

import copy
from dataclasses import fields, replace

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

from decodegap import arms, attest, decode, fused, models, quantise, reference
from decodegap.errors import BadInputError, UnsupportedError
from decodegap.fused import bench, layout, step
from decodegap.fused.launches import POINTERS
from decodegap.fused.shape import shape_of
from decodegap.fused.tiles import Attention, Matvec, Tiles, default_tiles

MODELS = ("tiny-qwen2", "tiny-llama", "tiny-mistral")
WIDE = Matvec(rows=32, block=64, warps=4, ahead=2)
TILES = Tiles(WIDE, Attention(splits=4, block=16, warps=1), WIDE, WIDE, WIDE, WIDE)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def config_of(slug, **changes):
    model = models.lookup(slug)
    return replace(model, config=model.config | {"vocab_size": 64, "num_hidden_layers": 1} | changes)


def prepared(model, ctx, *, dtype=torch.bfloat16, seed=3):
    """A net, a cache of `ctx - 1` tokens, the token that comes next, and stock eager's logits after it."""
    net = decode.build(model, weights="synthetic", weights_dir=None, device="cpu", dtype=dtype, seed=seed)
    for name, parameter in net.named_parameters():
        # Each part must matter: an embedding of size one, products that keep the size of what they are given, and
        # scores far enough apart for some tokens to be heard more than others.
        if parameter.ndim == 2:
            size = 1.0 if "embed" in name else (3.0 if "q_proj" in name else 1.0) / parameter.shape[1] ** 0.5
            parameter.mul_(size / 0.02)
        elif "bias" in name:
            parameter.mul_(25)
    tokens = decode.prompt(model.config["vocab_size"], ctx, seed, "cpu")
    cache, _ = decode.prefill(net, tokens, 64)
    decode.crop(cache, ctx - 1)
    return arms.Setup(net, cache, tokens[:, -1:], ctx, "cpu")


def truth_and_eager(setup):
    exact = reference.reference_logits(setup.net, setup.cache, setup.token, setup.ctx)
    past = copy.deepcopy(setup.cache)
    return exact, setup.net(input_ids=setup.token, past_key_values=past, use_cache=True).logits[:, -1], past


def first_logits(setup, tiles=TILES, **options):
    options.setdefault("capacity", setup.ctx)
    loaded = layout.load(setup, capacity=options.pop("capacity"))
    made = step.capture(loaded, tiles, pdl=False, **options)
    made.poison()
    made.run()
    return made.logits().clone(), loaded, made


@pytest.mark.parametrize("slug", MODELS)
@pytest.mark.parametrize("ctx", [1, 2, 37])
def test_logits_are_as_near_the_truth_as_eager_s_at_the_last_position_of_the_cache(slug, ctx):
    setup = prepared(config_of(slug, num_hidden_layers=2, rms_norm_eps=0.1), ctx)  # an eps that is seen
    exact, eager, _ = truth_and_eager(setup)
    logits, loaded, _ = first_logits(setup)
    found = reference.check("fused", logits, eager, exact)
    assert found.passed, found
    assert step.chosen(loaded) == int(logits.argmax())


def test_a_kernel_alone_is_where_the_step_would_be_and_leaves_the_tokens_before_as_they_were():
    loaded = layout.load(prepared(config_of("tiny-qwen2"), 37), capacity=40)
    before = loaded.cache.clone()
    alone = step.capture(loaded, TILES, pdl=False, only=frozenset({"qkv"}))
    for _ in range(2):
        alone.run()
    changed = (loaded.cache != before).any(dim=-1).flatten(0, 2).any(dim=0)  # what qkv is given is poisoned
    assert changed.nonzero().flatten().tolist() == [36]


def test_a_llama_whose_rotation_is_scaled():
    scaling = models.lookup("llama-3.1-8b").config["rope_scaling"] | {"original_max_position_embeddings": 8}
    plain, scaled = config_of("tiny-llama"), config_of("tiny-llama", rope_scaling=scaling)
    setup = prepared(scaled, 40)
    exact, eager, _ = truth_and_eager(setup)
    logits, _, _ = first_logits(setup)
    assert reference.check("fused", logits, eager, exact).passed
    unscaled, _, _ = first_logits(prepared(plain, 40))
    assert not reference.check("fused", unscaled, eager, exact).passed


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (8, 1), (16, 1)])
def test_every_size_of_a_group_of_heads(heads, kv_heads):
    model = config_of("tiny-qwen2", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    setup = prepared(model, 21)
    exact, eager, _ = truth_and_eager(setup)
    for joined in (False, True):
        again = copy.deepcopy(setup)
        logits, _, _ = first_logits(again, replace(TILES, attention=replace(TILES.attention, joined=joined)))
        assert reference.check("fused", logits, eager, exact).passed, joined


def test_it_decodes_token_after_token_into_a_cache_that_grows_to_its_last_position():
    setup = prepared(config_of("tiny-qwen2", num_hidden_layers=2), 30)
    tokens, theirs, past = [int(setup.token)], [], copy.deepcopy(setup.cache)
    net = copy.deepcopy(setup.net)
    ours, loaded, made = first_logits(setup, capacity=34)
    for _ in range(5):
        theirs.append(net(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=past).logits[:, -1].float())
        assert float((ours - theirs[-1]).norm() / theirs[-1].norm()) < 0.02
        tokens.append(step.chosen(loaded))
        assert tokens[-1] == int(ours.argmax())
        if len(tokens) < 6:
            made.run()
            ours = made.logits()
    assert len(set(tokens)) > 2  # it does not say the same over and over
    for index, layer in enumerate(past.layers):
        for which, kept in enumerate((layer.keys, layer.values)):
            torch.testing.assert_close(loaded.cache[index, which][None], kept, rtol=0.05, atol=0.05)
    with pytest.raises(ValueError, match="the cache is full: it holds 34 tokens"):
        made.run()
    made.reset()
    made.run()


def test_every_output_is_written_and_nothing_else():
    setup = prepared(config_of("tiny-qwen2"), 19)
    loaded = layout.load(setup, capacity=24)
    made = step.capture(loaded, TILES, pdl=False)
    loaded.cache[:, :, :, 18:] = float("nan")
    before = loaded.cache.clone()
    made.poison()
    made.run()
    for name in ("hidden", "query", "mixed", "gated", "logits"):
        assert torch.isfinite(getattr(loaded.buffers, name)).all(), name
    assert torch.equal(loaded.cache[:, :, :, :18], before[:, :, :, :18])
    assert torch.isfinite(loaded.cache[:, :, :, 18]).all()
    assert torch.isnan(loaded.cache[:, :, :, 19:]).all()
    assert not loaded.buffers.arrivals.any()


def test_steps_repeat_bit_for_bit_follow_their_token_and_are_no_leftovers():
    setup = prepared(config_of("tiny-llama"), 12)
    _, loaded, made = first_logits(setup)
    assert attest.not_fresh("fused", made, "cpu") is None
    first = attest.outputs(made, 5, "cpu")
    assert torch.equal(first, attest.outputs(made, 5, "cpu"))
    assert int(loaded.buffers.state[0]) == 11


@pytest.mark.parametrize("ctx", [3, 50])
def test_no_way_to_cut_the_work_changes_the_result_by_more_than_rounding(ctx):
    setup = prepared(config_of("tiny-llama"), ctx)
    exact, eager, _ = truth_and_eager(setup)
    logits, loaded, _ = first_logits(setup)
    narrow = Matvec(rows=16, block=32, warps=1, ahead=1)
    for kernel, tile in [
        ("qkv", narrow),
        ("o", narrow),
        ("gate_up", narrow),
        ("down", replace(narrow, ahead=3)),
        ("lm_head", Matvec(rows=8, block=128, warps=4)),
        ("attention", Attention(splits=7, block=32, warps=2, double=True)),
        ("attention", Attention(splits=1, block=16, warps=2, double=True, joined=True)),
        ("attention", Attention(splits=70, block=16, warps=2)),
    ]:
        made = step.capture(loaded, TILES.having(kernel, tile), pdl=False)
        made.poison()
        made.run()
        assert reference.check("fused", made.logits(), eager, exact).passed, (kernel, tile)
        assert float((made.logits() - logits).norm() / logits.norm()) < 0.01


def test_of_equal_logits_the_first_wins_and_negative_ones_are_ordered():
    setup = prepared(config_of("tiny-llama"), 4)
    _, loaded, made = first_logits(setup)
    last = loaded.buffers.hidden[-1].float()
    towards = last / last.norm() * loaded.gain.view(torch.bfloat16).float().sign()
    factors = -torch.arange(1, 65).flip(0).float()
    factors[50] = factors[20] = -0.5
    setup.net.get_submodule("lm_head").weight.copy_(factors[:, None] * towards[None])
    made.reset()
    made.poison()
    made.run()
    assert (made.logits() < 0).all()
    assert step.chosen(loaded) == 20


def test_weights_move_and_a_net_that_cannot_be_read_is_refused():
    setup = prepared(config_of("tiny-qwen2"), 3)
    before = sum(parameter.nbytes for parameter in setup.net.parameters())
    layers = len(layout.load(setup, capacity=8).layers)
    left = sum(parameter.nbytes for parameter in setup.net.parameters())
    shape = shape_of(models.lookup("tiny-qwen2").config)
    assert layers == 1
    assert before - left == 2 * layers * shape.hidden * (shape.qkv_rows + 2 * shape.inter)
    with pytest.raises(UnsupportedError, match="float32"):
        layout.load(prepared(config_of("tiny-qwen2"), 3, dtype=torch.float32))
    with pytest.raises(BadInputError, match="capacity is 2"):
        layout.load(prepared(config_of("tiny-qwen2"), 3), capacity=2)
    empty = replace(setup, cache=DynamicCache(config=setup.net.config))
    with pytest.raises(ValueError, match="holds 0 tokens, not 2"):
        layout.load(empty)


def wide(**changes):
    """A model whose projections can be held in 4 bits: widths of whole groups."""
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    return config_of("tiny-qwen2", **(sizes | changes))


@pytest.mark.parametrize(("block", "inter"), [(1024, 1536), (256, 2304)])  # a last tile that is not full; nine tiles
def test_projections_in_4_bits_compute_what_their_codes_stand_for(block, inter):
    setup = prepared(wide(intermediate_size=inter), 9)
    exact = reference.reference_logits(layout.as_rounded(setup.net), setup.cache, setup.token, setup.ctx)
    unrounded, eager, _ = truth_and_eager(setup)
    loaded = layout.load(setup, capacity=9, bits=4)
    tall = Matvec(rows=256, block=block, warps=1, ahead=2)
    tiles = Tiles(tall, TILES.attention, tall, tall, tall, replace(WIDE, rows=64))
    made = step.capture(loaded, tiles, pdl=False)
    made.poison()
    made.run()
    eager_error = reference.check("eager", eager, eager, unrounded).error
    error = reference.check("fused-int4", made.logits(), eager, exact).error
    lost = reference.check("fused-int4", made.logits(), eager, unrounded).error
    assert error < 1.5 * eager_error, (error, eager_error)
    assert lost > 10 * error  # it is really four bits


def floats(buffers):
    """What of a step's buffers is made of numbers, and so poisoned."""
    found = {each.name: getattr(buffers, each.name) for each in fields(buffers)}
    return {name: each for name, each in found.items() if each.is_floating_point()}


def test_in_4_bits_a_norm_is_prepared_where_its_numbers_are_written():
    """In two layers, at a width that is no power of two, in programs of several blocks of 16 rows, with a large eps."""
    width, eps, ctx = 384, 0.1, 5
    sizes = {"hidden_size": width, "num_attention_heads": 6, "intermediate_size": 512, "num_hidden_layers": 2}
    setup = prepared(wide(**sizes, rms_norm_eps=eps), ctx)
    model = layout.as_rounded(setup.net).model.float()
    norms = [norm for layer in model.layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    gains = torch.stack([norm.weight for norm in (*norms, model.norm)])
    loaded = layout.load(setup, capacity=ctx, bits=4)
    tall = Matvec(rows=128, block=256, warps=2, ahead=2)
    tiles = Tiles(tall, replace(TILES.attention, splits=1), tall, tall, tall, WIDE)

    start = step.capture(loaded, tiles, pdl=False, only=frozenset({"embed"}))
    start.run()
    for name in ("hidden", "scaled", "squares"):
        written = torch.isfinite(floats(loaded.buffers)[name])
        assert written[0].all(), name
        assert not written[1:].any(), name

    made = step.capture(loaded, tiles, pdl=False)
    made.poison()
    made.run()
    assert all(torch.isfinite(each).all() for each in floats(loaded.buffers).values())
    hidden = loaded.buffers.hidden.float()
    scaled = loaded.buffers.scaled.float()
    torch.testing.assert_close(scaled, hidden * gains, rtol=2**-7, atol=0)  # the interpreter rounds towards zero
    torch.testing.assert_close(loaded.buffers.squares, hidden.square().view(5, width // 16, 16).sum(dim=2))
    for index, layer in enumerate(model.layers):
        first, second = (
            functional.rms_norm(hidden[2 * index + at], (width,), gains[2 * index + at], eps) for at in (0, 1)
        )
        value = layer.self_attn.v_proj(first)
        assert reference.relative_error(loaded.cache[index, 1, :, -1].flatten(), value) < 0.01
        gated = functional.silu(layer.mlp.gate_proj(second)) * layer.mlp.up_proj(second)
        assert reference.relative_error(loaded.buffers.gated[index], gated) < 0.01
    made.poison()
    assert all(torch.isnan(each).all() for each in floats(loaded.buffers).values())


@pytest.mark.parametrize("bits", [16, 4])
def test_kernels_are_compiled_ahead_for_what_they_are_given(monkeypatch, bits):
    given = []
    monkeypatch.setattr(step.Launch, "__call__", lambda launch: given.extend(launch.given.items()))
    loaded = layout.load(prepared(wide(intermediate_size=512, num_hidden_layers=2), 3), capacity=3, bits=bits)
    step.capture(loaded, default_tiles(loaded.shape), pdl=False).run()
    types = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
    assert {(name, types[each.dtype]) for name, each in given} == set(POINTERS.items())
    assert all(each.data_ptr() % 16 == 0 and each.is_contiguous() for _, each in given)


def test_codes_lie_where_the_thread_that_multiplies_them_reads():
    codes = torch.randint(0, 16, (32, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    words = layout.in_tiles(codes)
    assert words.shape == (2, 2, 256)
    found = quantise.unpack(words).view(2, 2, 2, 8, 4, 4, 8)  # block, group, half, r, c, word, code
    for r, c, word, code in ((0, 0, 0, 0), (5, 2, 3, 6), (7, 3, 1, 5), (2, 1, 2, 2)):
        row = 16 + r + 8 * (code // 2 % 2)
        column = 128 + 64 + 32 * (word // 2) + 8 * c + 4 * (word % 2) + 2 * (code % 2) + code // 4
        assert found[1, 1, 1, r, c, word, code] == codes[row, column]
    assert torch.equal(found.flatten().sort().values, codes.flatten().sort().values)


def test_it_is_an_arm_like_any_other():
    setup = prepared(config_of("tiny-mistral"), 5)
    exact, eager, _ = truth_and_eager(setup)
    made = arms.prepare("fused-plain", setup)
    made.poison()
    made.run()
    assert reference.check("fused-plain", made.logits(), eager, exact).passed
    assert not made.replayed
    assert not fused.can_overlap("cpu")


def test_the_benchmark_checks_and_times(monkeypatch):
    small = config_of("tiny-llama")
    monkeypatch.setattr(models, "lookup", lambda *_: small)
    loaded, truth = bench.start("tiny-llama", 9, device="cpu", capacity=12)
    made = step.capture(loaded, TILES, pdl=False)
    line = bench.check_line(made, truth)
    assert line.startswith("ok: error")
    assert line.endswith("repeats bit for bit")
    assert bench.loop_ms(made, "cpu", steps=1) > 0
    wrong = bench.Truth(-truth.logits, -truth.eager)
    assert "WRONG" in bench.check_line(made, wrong)
    with pytest.raises(BadInputError, match="tiles: o: rows is 3"):
        step.capture(loaded, TILES.having("o", Matvec(3, 8, 1)), pdl=False)
