"""Where a step's time goes: the byte ledger by hand, parts that add up on a trace whose answer is known, a real CPU."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from factory import machine, record
from factory import series as make_series

from decodegap import anatomy, anatomy_cli, floor, ledger, models, plan, schema
from decodegap.errors import BadInputError, NotMeasuredError
from decodegap.schema import Anatomy, Cell, EmptyKernels, Series
from decodegap.trace import Interval, Trace

QWEN = models.lookup("qwen2.5-7b")
LAYERS = 28
B = 4000.0  # GB/s
EMPTY = EmptyKernels(period_us=0.95, kernel_us=0.9, between_us=0.8)


def cell(arm: str, gpu: str = "h200", model: str = "qwen2.5-7b", ctx: int = 2048) -> Cell:
    dtype = plan.dtype_on(gpu)
    return Cell(gpu=gpu, experiment="graphs", model=model, ctx=ctx, arm=arm, dtype=dtype, sdpa="flash")


def series(arm: str, step_ms: float, enqueue_ms: float) -> Series:
    made = make_series(arm, step_ms, plan.protocol("h200", "synthetic", "x"), device=True)
    return made.model_copy(update={"enqueue_ms": [enqueue_ms] * 5, "step_ms": step_ms})


def known_trace(*, layers: int = LAYERS, cats: int = 2, gap: float = 0.8) -> Trace:
    """One step of a graph: per layer a product (150 us), attention (8), concatenations (5 each) and 10 norms (2)."""
    plan_of_layer = [("aten::linear", 150.0), ("aten::scaled_dot_product_attention", 8.0)]
    plan_of_layer += [("aten::cat (KV)", 5.0)] * cats + [("aten::mul", 2.0)] * 10
    found, at = [], 0.0
    for operator, length in plan_of_layer * layers:
        found.append(Interval(at, at + length, operator, operator))
        at += length + gap
    return Trace(tuple(found), steps=1, step_ms=8.0, source="device")


def of(
    seen: Trace, arm: str = "graph", *, step_ms: float = 5.6, enqueue_ms: float = 0.05, replayed: bool = False
) -> Anatomy:
    measured = series(arm, step_ms, enqueue_ms)
    return anatomy.of_trace(seen, measured, cell(arm), QWEN, B, empty=EMPTY, replayed=replayed)


# Qwen2.5-7B at 2048: 57,344 bytes of K and V a token, 7 query heads a KV head.
K = 57_344 * 2048


def test_the_ledger_of_each_arm_by_hand() -> None:
    def extra(arm: str) -> dict[str, int]:
        found = ledger.ledger(QWEN.config, 2048, arm, 2)
        assert found["weights"] == 14_141_238_272
        assert found["KV read"] == K == 117_440_512
        return {item: n for item, n in found.items() if n and item not in ledger.FLOOR_ITEMS}

    for arm in ("eager", "eager-auto", "eager-pinned", "graph"):
        # K and V of 28 layers, 4 heads of 128, 2048 tokens, 2 bytes: read and written.
        assert extra(arm) == {"KV concatenation": 2 * (2 * 28 * 4 * 128 * 2048 * 2)}
    assert extra("graph-stock") == {"repeat_kv": (1 + 7 + 6) * K, "mask": 28 * 2048 * (1 + 2 + 2)}
    for arm in ("graph-static", "compiled", "fused"):
        assert extra(arm) == {}


def test_packed_weights_and_casts_replace_the_config() -> None:
    found = ledger.ledger(QWEN.config, 2048, "eager", 2, weights=5_000_000_000, casts=77)
    assert (found["weights"], found["casts"]) == (5_000_000_000, 77)


def test_a_model_without_grouped_heads_repeats_nothing() -> None:
    config = QWEN.config | {"num_key_value_heads": QWEN.config["num_attention_heads"]}
    assert ledger.ledger(config, 2048, "graph-stock", 2)["repeat_kv"] == 0


def test_the_parts_of_a_known_graph_are_known_and_add_up() -> None:
    found = of(known_trace())
    launches = 14 * LAYERS
    busy_ms = LAYERS * (150 + 8 + 10 + 20) / 1e3
    ledger_ms = (14_141_238_272 + K + 2 * K) / B / 1e6
    assert found.launches == launches
    assert found.busy_ms == pytest.approx(busy_ms)
    assert found.parts_ms == pytest.approx(
        {
            "floor": (14_141_238_272 + K) / B / 1e6,
            "extra traffic": 2 * K / B / 1e6,
            "kernel inefficiency": busy_ms - ledger_ms,
            "bubbles": (launches - 1) * 0.8 / 1e3,
            "exposed host": 0.0,
        }
    )
    assert found.residual_ms == pytest.approx(5.6 - busy_ms - (launches - 1) * 0.8 / 1e3)
    assert abs(found.residual_ms) < 0.05 * found.step_ms
    assert sum(found.parts_ms.values()) + found.residual_ms == pytest.approx(found.step_ms)
    assert found.idle_ms == pytest.approx((launches - 1) * 0.8 / 1e3)
    assert sum(anatomy.inefficiency_ms(found).values()) == pytest.approx(found.parts_ms["kernel inefficiency"])
    assert anatomy.inefficiency_ms(found)["aten::mul"] == pytest.approx(LAYERS * 0.020)
    assert found.flags == []


def test_all_of_a_replayed_graphs_one_launch_is_exposed() -> None:
    assert of(known_trace(), enqueue_ms=0.75, replayed=True).exposed_host_ms == 0.75
    assert of(known_trace(), enqueue_ms=0.75).exposed_host_ms == 0.0  # launched one by one, the device covers it


def test_a_slow_host_is_exposed_by_what_the_device_cannot_cover() -> None:
    found = of(known_trace(), "eager", step_ms=20.3, enqueue_ms=20.0)
    assert found.exposed_host_ms == pytest.approx(20.0 - found.busy_ms - found.bubbles_ms)
    assert found.residual_ms == pytest.approx(0.3)  # what ran after the last launch


def test_overlapping_launches_have_no_bubble() -> None:
    two = Trace((Interval(0, 10, "a", "a"), Interval(5, 20, "b", "b"), Interval(21, 30, "c", "c")), 1, 1.0, "device")
    found = of(two)
    assert found.overlapping == 1
    assert found.bubbles_ms == pytest.approx(0.8e-3)
    assert (found.busy_ms, found.kernel_ms) == pytest.approx((0.029, 0.034))


@pytest.mark.parametrize(
    ("between", "expected"), [(0.8, 0.8), (1.7, 0.95), (-0.2, 0.0)], ids=["as seen", "stretched by profiling", "none"]
)
def test_the_gap_is_the_profilers_but_no_longer_than_an_empty_kernels_period(between: float, expected: float) -> None:
    assert anatomy.gap_us(EMPTY.model_copy(update={"between_us": between})) == expected


def test_concatenations_that_are_missing_or_too_many_are_flagged() -> None:
    assert "28 KV concatenations a step were seen, 56 were expected" in of(known_trace(cats=1)).flags[0]
    assert "56 KV concatenations a step were seen, 0 were expected" in of(known_trace(), "graph-static").flags[0]
    assert of(known_trace(cats=0), "graph-static").flags == []
    assert "no operator was seen that moves: KV concatenation" in of(known_trace(cats=0)).flags


def test_an_arm_that_the_ledger_does_not_know_is_flagged() -> None:
    assert "does not know what arm novel moves" in of(known_trace(cats=0), "novel").flags[0]


def fused_trace(layers: int = LAYERS, gap: float = 0.8) -> Trace:
    """A replayed fused step: kernels of our own names, which no operator launched."""
    names = ["embed", *(["qkv", "attention", "combine", "project", "gate_up", "project"] * layers), "lm_head"]
    found, at = [], 0.0
    for name in names:
        found.append(Interval(at, at + 10.0, name))
        at += 10.0 + gap
    return Trace(tuple(found), steps=1, step_ms=at / 1e3, source="device")


def test_a_fused_step_is_taken_apart_by_the_names_of_its_kernels_and_their_bytes() -> None:
    found = of(fused_trace(), "fused")
    assert found.flags == []
    assert found.attributed == "name"
    assert {name: each.launches for name, each in found.operators.items()} == {
        "fused embed": 1,
        "fused qkv": LAYERS,
        "fused attention": LAYERS,
        "fused combine": LAYERS,
        "fused o and down": 2 * LAYERS,
        "fused gate and up": LAYERS,
        "fused lm_head": 1,
    }
    assert found.operators["fused attention"].bytes == 2048 * 57_344
    assert found.operators["fused gate and up"].bytes == LAYERS * 2 * (2 * 18944 * 3584 + 3584)
    assert found.operators["fused combine"].bytes == 0
    beyond = anatomy.inefficiency_ms(found)
    assert sum(beyond.values()) == pytest.approx(found.parts_ms["kernel inefficiency"], abs=1e-3)


@pytest.mark.parametrize("arm", ["fused-plain", "fused", "fused-int4"])
@pytest.mark.parametrize("slug", ["qwen2.5-7b", "llama-3.1-8b", "mistral-7b-v0.3"])
def test_the_fused_kernels_bytes_are_the_ledgers(slug: str, arm: str) -> None:
    """The step reads each weight and each K and V once, and one row of the embedding."""
    config = models.lookup(slug).config
    counts = ledger.ledger(config, 2048, arm, 2, weights=ledger.own_weights(config, arm))
    row = 2 * config["hidden_size"]
    assert sum(ledger.own_bytes(config, 2048, arm).values()) == sum(counts.values()) + row
    assert sum(ledger.own_launches(config).values()) == 2 + 6 * config["num_hidden_layers"]


def test_a_fused_step_in_four_bits_has_the_bytes_that_it_holds() -> None:
    whole, rounded = of(fused_trace(), "fused"), of(fused_trace(), "fused-int4")
    assert rounded.ledger_bytes["KV read"] == whole.ledger_bytes["KV read"]
    projections = 6_525_288_448
    assert whole.ledger_bytes["weights"] - rounded.ledger_bytes["weights"] == projections * (2 - 4.125 / 8)
    assert rounded.parts_ms["floor"] < 0.36 * whole.parts_ms["floor"]


def test_the_cost_of_choosing_a_backend_is_the_difference_of_the_enqueues() -> None:
    auto = of(known_trace(), "eager-auto", step_ms=60.0, enqueue_ms=59.0)
    assert anatomy.plan_cost_ms(auto, of(known_trace(), "eager", step_ms=20.3, enqueue_ms=20.0)) == pytest.approx(39.0)


def test_the_report_shows_every_part_and_the_residual() -> None:
    found = of(known_trace())
    stored = Anatomy.model_validate_json(schema.canonical(found.model_dump()))  # keys in alphabetical order
    lines = anatomy_cli.report_lines(stored, series("graph", 5.6, 0.05), machine("h200"))
    assert lines == anatomy_cli.report_lines(found, series("graph", 5.6, 0.05), machine("h200"))
    text = "\n".join(lines)
    places = [text.index(f"  {name}") for name in (*anatomy.PARTS, "residual", "weights", "aten::linear", "aten::mul")]
    assert places == sorted(places)
    for name in (*anatomy.PARTS, "residual", "KV concatenation", "free-running", "4300 GB/s"):
        assert name in text


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"ARM": "faster"}, "ARM: no arm is called 'faster'"),
        ({"CTX": "lots"}, "CTX: 'lots' is not a whole number"),
        ({"MODEL": "gpt"}, "MODEL: no model is called 'gpt'"),
        ({"MODEL": "tiny-qwen2", "CTX": "999999"}, "CTX: 999999 is beyond"),
    ],
)
def test_a_setting_that_makes_no_sense_is_one_clear_line(env: dict[str, str], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        anatomy_cli.task(env, "cpu")


def test_without_settings_the_first_cell_of_the_grid_is_meant() -> None:
    here, there = anatomy_cli.task({}, "cpu").cell, anatomy_cli.task({"ARM": "graph-stock"}, "h200").cell
    assert (here.model, here.ctx, here.arm, here.sdpa) == ("qwen2-standin", 128, "eager", "auto")
    assert (there.model, there.ctx, there.arm, there.sdpa) == ("qwen2.5-7b", 2048, "graph-stock", "auto")


def test_half_of_an_ab_is_measured_with_its_twin_where_there_are_graphs() -> None:
    assert anatomy_cli.task({"ARM": "graph"}, "h200").cell.arm == "ab"
    assert anatomy_cli.task({"ARM": "eager-pinned"}, "cpu").cell.arm == "eager-pinned"


def test_a_record_without_an_anatomy_says_why() -> None:
    with pytest.raises(NotMeasuredError, match="out of device memory"):
        anatomy_cli.record_lines(record(outcome="oom", reasons=["out of device memory"]))


def test_the_verb_runs_one_cell_and_keeps_nothing_but_the_trace_asked_for(tmp_path: Path) -> None:
    """A real session of a tiny model, in a process of its own as every session."""
    said: list[str] = []
    anatomy_cli.show({"TRACE": "1", "MODEL": "tiny-qwen2", "CTX": "24"}, "cpu", tmp_path, said.append)
    assert anatomy_cli.trace_dir() is None
    assert said[0] == "tiny-qwen2, ctx 24, float32, arm eager"
    assert any("residual" in line for line in said)
    assert said[-1].endswith("tiny-qwen2_24_eager.trace.json.gz")
    kept = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert kept == ["cpu/traces/tiny-qwen2_24_eager.trace.json.gz"]


def test_a_real_step_on_this_cpu_through_the_same_code(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from decodegap import arms, decode, timing

    model = models.lookup("tiny-qwen2")
    protocol = plan.protocol("cpu", "synthetic", "x").model_copy(update={"measured_steps": 5, "free_steps": 2})
    with torch.inference_mode():
        net = decode.build(model, weights="synthetic", weights_dir=None, device="cpu", dtype=torch.float32, seed=0)
        cache, logits = decode.prefill(net, decode.prompt(256, 64, 0, "cpu"), 64)
        step = arms.prepare("eager", arms.Setup(net, cache, logits.argmax(-1, keepdim=True), 64, "cpu"))
        timed = timing.measure("eager", step, "cpu", protocol, lambda: None)
        here = cell("eager", gpu="cpu", model="tiny-qwen2", ctx=64)
        found = anatomy.measure([(timed, step)], here, model, "cpu", 10.0, trace_dir=tmp_path)[0]
        assert cache.get_seq_length() == 64  # the profiled steps left the arm as it was
    assert (found.source, found.profiled_steps, found.bubbles_ms, found.exposed_host_ms) == ("host", 5, 0.0, 0.0)
    assert found.operators["aten::cat (KV)"].launches == 2 * model.config["num_hidden_layers"]
    assert found.operators["aten::linear"].bytes == floor.streamed_bytes(model.config, 4)
    assert found.flags == []
    assert found.busy_ms > 0
    assert sum(found.parts_ms.values()) + found.residual_ms == pytest.approx(found.step_ms)
    kept: dict[str, Any] = json.loads(gzip.decompress((tmp_path / "tiny-qwen2_64_eager.trace.json.gz").read_bytes()))
    assert {"aten::linear", "decode-gap step"} <= {event["name"] for event in kept["traceEvents"]}
    assert str(tmp_path.anchor + "tmp") not in json.dumps(kept)
