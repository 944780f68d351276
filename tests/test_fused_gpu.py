"""On an NVIDIA GPU: the fused step is as right as eager, repeats bit for bit, and needs every one of its waits."""

import copy
import os
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)
pytest.importorskip("triton")

from decodegap import arms, attest, decode, fused, gpus, models, reference  # noqa: E402
from decodegap.fused import bench, search, step  # noqa: E402
from decodegap.fused.compiled import compile_only  # noqa: E402
from decodegap.fused.layout import ROOM, as_rounded, load  # noqa: E402
from decodegap.fused.shape import shape_of  # noqa: E402
from decodegap.fused.tiles import Attention, Matvec, default_tiles, load_tiles  # noqa: E402

PDL = fused.can_overlap("cuda")
QWEN, CTX = "qwen2.5-7b", 2047  # a context that is a multiple of nothing
HEADS_OF = {"qwen2.5-7b": (28, 4), "llama-3.1-8b": (8, 2), "mistral-7b-v0.3": (4, 4)}
TOKENS = 256  # of the greedy run
MATVECS = ("qkv", "o", "gate_up", "down", "lm_head")
WAITING = ("attention", "combine", *MATVECS)


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def small(slug):
    """A few layers of a model, narrow, with heads of the real size: seconds, not minutes."""
    heads, kv_heads = HEADS_OF[slug]
    model = models.lookup(slug)
    sizes = {"hidden_size": 1024, "intermediate_size": 2560, "num_hidden_layers": 3, "vocab_size": 4096}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 128}
    return replace(model, config=model.config | sizes | counts)


def setup_of(model, ctx, seed=1):
    net = decode.build(model, weights="synthetic", weights_dir=None, device="cuda", dtype=torch.bfloat16, seed=seed)
    for name, parameter in net.named_parameters():
        if parameter.ndim == 2:  # a narrow model's products would be small beside the embedding
            parameter.mul_(
                50.0 if "embed" in name else 50 * (2.0 if "q_proj" in name else 1.0) / parameter.shape[1] ** 0.5
            )
    tokens = decode.prompt(model.config["vocab_size"], ctx, seed, "cuda")
    cache, _ = decode.prefill(net, tokens, 2048)
    decode.crop(cache, ctx - 1)
    return arms.Setup(net, cache, tokens[:, -1:], ctx, "cuda")


def truth_and_eager(setup):
    exact = reference.reference_logits(setup.net, setup.cache, setup.token, setup.ctx)
    past = copy.deepcopy(setup.cache)
    return exact, setup.net(input_ids=setup.token, past_key_values=past, use_cache=True).logits[:, -1]


def poisoned(made):
    made.reset()
    made.poison()
    made.run()
    return made.logits().clone()


@pytest.fixture(scope="module")
def qwen():
    """The whole model in the fused layout at a real context; no other test may hold memory of that size."""
    with torch.inference_mode():
        loaded, truth = bench.start(QWEN, CTX)
        found = gpus.detect()
        tiles = load_tiles(QWEN, gpus.identify(found[0]).slug if found else "", CTX)
        yield loaded, truth, tiles
    del loaded, truth
    torch.cuda.empty_cache()


@pytest.mark.parametrize("slug", list(HEADS_OF))
@pytest.mark.parametrize("ctx", [1, 2, 333, 2049])
def test_logits_at_the_last_position_of_the_cache_are_as_near_the_truth_as_eager_s(slug, ctx):
    setup = setup_of(small(slug), ctx)
    exact, eager = truth_and_eager(setup)
    loaded = load(setup, capacity=ctx)
    for joined in (False, True):
        tiles = default_tiles(loaded.shape).having("attention", Attention(7, 64, 4, double=joined, joined=joined))
        logits = poisoned(step.capture(loaded, tiles, pdl=PDL))
        found = reference.check("fused", logits, eager, exact)
        assert found.passed, found
        assert step.chosen(loaded) == int(logits.argmax())


def test_candidates_of_every_kernel_compute_the_same():
    setup = setup_of(small("qwen2.5-7b"), 500)
    exact, eager = truth_and_eager(setup)
    loaded = load(setup, capacity=512)
    start = default_tiles(loaded.shape)
    for kernel in search.ORDER:
        for tile in search.candidates(kernel, loaded.shape, 500)[:3]:
            logits = poisoned(step.capture(loaded, start.having(kernel, tile), pdl=PDL))
            found = reference.check("fused", logits, eager, exact)
            assert found.passed, (kernel, tile, found)


def test_the_whole_model_is_right_and_the_same_with_overlap_and_without(qwen):
    loaded, truth, tiles = qwen
    overlapped = poisoned(step.capture(loaded, tiles, pdl=PDL))
    found = reference.check("fused", overlapped, truth.eager, truth.logits)
    assert found.error <= found.eager_error, found
    assert found.passed, found
    assert torch.equal(overlapped, poisoned(step.capture(loaded, tiles, pdl=False)))


def test_two_hundred_replays_are_equal_bit_for_bit(qwen):
    loaded, _, tiles = qwen
    made = step.capture(loaded, tiles, pdl=PDL)
    first = poisoned(made)
    assert attest.not_fresh("fused", made, "cuda") is None
    for _ in range(200):
        assert torch.equal(poisoned(made), first)
    made.reset()
    tokens = []
    for _ in range(40):  # the same tokens again, however far the host runs ahead
        made.run()
    tokens.append(step.chosen(loaded))
    made.reset()
    for _ in range(40):
        made.run()
        torch.cuda.synchronize()
    assert step.chosen(loaded) == tokens[0]


@pytest.mark.skipif(not PDL, reason="needs programmatic dependent launch")
@pytest.mark.parametrize("kernel", WAITING)
def test_each_wait_is_needed(kernel):
    """On a model so small that all programs of neighbouring kernels are on the card at once, long before their turn."""
    loaded = load(setup_of(small(QWEN), 500), capacity=512)
    tiles = default_tiles(loaded.shape).having("attention", Attention(splits=7, block=64, warps=4))
    for name in MATVECS:
        tiles = tiles.having(name, Matvec(rows=4, block=512, warps=2))
    made = step.capture(loaded, tiles, pdl=True)
    right = poisoned(made)
    assert torch.isfinite(right).all()
    hasty = step.capture(loaded, tiles, pdl=True, without_wait=kernel)
    assert any(not torch.equal(poisoned(hasty), right) for _ in range(10))
    torch.cuda.synchronize()
    assert torch.equal(poisoned(made), right)


@pytest.mark.parametrize("slug", list(HEADS_OF))
def test_projections_in_4_bits_compute_what_their_codes_stand_for(slug):
    setup = setup_of(small(slug), 700)
    meant = as_rounded(setup.net)
    exact = reference.reference_logits(meant, setup.cache, setup.token, setup.ctx)
    past = copy.deepcopy(setup.cache)
    rounded = decode.cast_weights(meant, torch.bfloat16)
    eager = rounded(input_ids=setup.token, past_key_values=past, use_cache=True).logits[:, -1]
    loaded = load(setup, capacity=704, bits=4)
    start = default_tiles(loaded.shape)
    tries = [start] + [
        start.having(kernel, tile)
        for kernel in ("qkv", "o", "gate_up", "down")
        for tile in search.candidates(kernel, loaded.shape, 700)[:3]
    ]
    for tiles in tries:
        logits = poisoned(step.capture(loaded, tiles, pdl=PDL))
        found = reference.check("fused-int4", logits, eager, exact)
        assert found.passed, (tiles, found)


def test_no_kernel_spills():
    built = []
    major, minor = torch.cuda.get_device_capability()
    for model in models.with_role("paper"):
        for bits, contexts in ((16, (2048, 16384)), (4, (2048,))):
            tiles = [load_tiles(model.slug, "h200", ctx, bits) for ctx in contexts]
            built += compile_only(
                shape_of(model.config, bits),
                tiles,
                capacity=2048 + ROOM,
                pdl=PDL,
                capability=10 * major + minor,
                workers=os.cpu_count() or 1,
            )
    assert not [each for each in built if each.error or each.spilled_bytes]


def test_a_greedy_run_leaves_eager_s_only_where_rounding_decides():
    model = models.lookup(QWEN)
    net = decode.build(model, weights="synthetic", weights_dir=None, device="cuda", dtype=torch.bfloat16, seed=5)
    exact_net = copy.deepcopy(net).float()
    prompt = decode.prompt(model.config["vocab_size"], 128, 5, "cuda")
    cache, _ = decode.prefill(net, prompt, 2048)
    decode.crop(cache, 127)
    eager_cache = copy.deepcopy(cache)
    setup = arms.Setup(net, cache, prompt[:, -1:], 128, "cuda")
    eager_net = copy.deepcopy(net)
    loaded = load(setup, capacity=128 + TOKENS)
    tiles = load_tiles(QWEN, "h200", 2048)
    made = step.capture(loaded, tiles, pdl=PDL)
    made.reset()
    ours, ours_logits, theirs, theirs_logits = [], [], [], []
    token = prompt[:, -1:]
    for _ in range(TOKENS):
        made.run()
        ours_logits.append(made.logits().clone())
        ours.append(step.chosen(loaded))
        out = eager_net(input_ids=token, past_key_values=eager_cache, use_cache=True).logits[:, -1]
        theirs.append(int(out.argmax()))
        theirs_logits.append(out.float())
        token = torch.tensor([[ours[-1]]], device="cuda")  # both go on from our token
    whole = torch.cat([prompt, torch.tensor([ours[:-1]], device="cuda")], dim=1)
    with reference._exact():
        exact = exact_net(input_ids=whole, logits_to_keep=TOKENS).logits[0]  # [TOKENS, vocab]
    first, second = exact.topk(2).values.T
    margins = ((first - second) / exact.std(dim=-1)).tolist()
    right = exact.argmax(dim=-1).tolist()
    checks = [
        reference.check("fused", a, b, truth[None])
        for a, b, truth in zip(ours_logits, theirs_logits, exact, strict=True)
    ]
    ours_wrong = [at for at in range(TOKENS) if ours[at] != right[at]]
    theirs_wrong = [at for at in range(TOKENS) if theirs[at] != right[at]]
    apart = [at for at in range(TOKENS) if ours[at] != theirs[at]]
    print(
        f"{len(apart)} of {TOKENS} tokens apart; fp32 sides with us in {sum(ours[at] == right[at] for at in apart)}, "
        f"with eager in {sum(theirs[at] == right[at] for at in apart)}; errors {max(c.error for c in checks):.3g} and "
        f"{max(c.eager_error for c in checks):.3g}; largest margin of a token that we miss "
        f"{max([margins[at] for at in ours_wrong], default=0):.3g}"
    )
    assert sum(found.error for found in checks) <= sum(found.eager_error for found in checks)
    assert all(found.passed for found in checks)
    assert len(ours_wrong) <= 1.5 * len(theirs_wrong) + 5
    assert len(set(ours)) > 8  # it does not go round in a circle
