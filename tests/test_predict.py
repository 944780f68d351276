"""The step-time model: it finds the parameters that made its records, and stays marked as a prediction."""

from itertools import pairwise

import pytest
from factory import record

from decodegap import floor, gpus, ledger, models, predict, published
from decodegap.errors import NotMeasuredError
from decodegap.paths import HERE
from decodegap.schema import Anatomy, OperatorTime, Record

SMALL_US, A, DISPATCH_US, UNHIDDEN_MS = 3.0, 1.8, 8.0, 0.3
GAP_US = 0.8
EFFICIENCY = {"weights": 0.8, "KV read": 0.4, "KV concatenation": 0.6}
OWNERS = {
    "weights": "aten::linear",
    "KV read": "aten::scaled_dot_product_attention",
    "KV concatenation": "aten::cat (KV)",
}


def synthetic(model: str, ctx: int, arm: str, *, gpu: str = "h200", a: float = A) -> Record:
    """A record whose every time comes from the model itself, with the parameters above."""
    known, peak = models.lookup(model), gpus.catalogue()[gpu].peak_gb_s or 0.0
    layers = int(known.config["num_hidden_layers"])
    counts = ledger.ledger(known.config, ctx, arm, 2)
    launches = {"weights": 7 * layers + 1, "KV read": layers, "KV concatenation": 2 * layers}
    operators = {"aten::mul": OperatorTime(launches=36 * layers, ms=36 * layers * (SMALL_US - GAP_US) / 1e3)}
    for kind, n in launches.items():
        own_ms = floor.floor_ms(counts[kind], peak * EFFICIENCY[kind])
        ms = n * (SMALL_US - GAP_US) / 1e3 + own_ms
        operators[OWNERS[kind]] = OperatorTime(launches=n, ms=ms, bytes=counts[kind])
    count = sum(each.launches for each in operators.values())
    busy_ms = sum(each.ms for each in operators.values())
    bubbles_ms = count * GAP_US / 1e3
    host_ms = a * count * DISPATCH_US / 1e3 if arm.startswith("eager") else 0.05
    step_ms = max(host_ms + UNHIDDEN_MS, busy_ms + bubbles_ms)
    found = Anatomy(
        arm=arm,
        profiled_steps=3,
        launches=count,
        operators=operators,
        busy_ms=busy_ms,
        kernel_ms=busy_ms,
        bubbles_ms=bubbles_ms,
        gap_us=GAP_US,
        enqueue_ms=host_ms,
        exposed_host_ms=0.0,
        profiled_step_ms=60.0,
        ledger_bytes=counts,
        ledger_ms=dict.fromkeys(counts, 0.0),
        parts_ms={},
        residual_ms=0.0,
        step_ms=step_ms,
    )
    return record(gpu=gpu, model=model, ctx=ctx, arm=arm, step_ms=step_ms, anatomy=[found])


def records() -> list[Record]:
    return [
        synthetic(model, ctx, arm)
        for model in ("qwen2.5-7b", "llama-3.1-8b")
        for ctx in (2048, 16384)
        for arm in ("eager", "eager-pinned", "graph")
    ]


STUDY = published.load(HERE.published)


def test_the_fit_finds_the_parameters_that_made_the_records() -> None:
    fitted = predict.fit(records())
    assert fitted.small_kernel_us == pytest.approx(SMALL_US)
    assert fitted.efficiency == pytest.approx(EFFICIENCY)
    assert (fitted.a.low, fitted.a.mid, fitted.a.high) == pytest.approx((A, A, A))
    assert (fitted.spread.low, fitted.spread.high) == pytest.approx((1.0, 1.0))
    assert fitted.launches["qwen2.5-7b"] == 46 * 28 + 1
    assert fitted.records == 12


def test_it_predicts_the_step_it_was_fitted_on() -> None:
    rows = {r.cell.arm: r for r in records() if r.cell.model == "qwen2.5-7b" and r.cell.ctx == 2048}
    found = predict.step(predict.fit(records()), "h200", "qwen2.5-7b", 2048)
    assert found.graph_ms.mid == pytest.approx(rows["graph"].step_ms, rel=1e-6)
    given = predict.assumed().dispatch_us
    assert found.host_ms.mid == pytest.approx(A * (46 * 28 + 1) * given.mid / 1e3)
    assert found.host_bound


def test_a_model_without_records_has_launches_by_its_layers() -> None:
    fitted = predict.fit([r for r in records() if r.cell.model == "qwen2.5-7b"])
    found = predict.step(fitted, "h100", "llama-3.1-8b", 2048)
    given = predict.assumed().dispatch_us
    assert found.host_ms.mid == pytest.approx(A * (46 * 28 + 1) / 28 * 32 * given.mid / 1e3)


@pytest.mark.parametrize("gpu", ["h100", "a100", "l40s", "l4"])
def test_a_prediction_is_a_range_around_its_middle(gpu: str) -> None:
    found = predict.step(predict.fit(records()), gpu, "qwen2.5-7b", 4096)
    for span in (found.device_ms, found.host_ms, found.eager_ms, found.graph_ms, found.speedup):
        assert 0 < span.low <= span.mid <= span.high
    assert found.eager_ms.mid >= found.graph_ms.mid
    assert found.speedup.low >= 1


def test_less_bandwidth_is_slower_and_less_host_bound() -> None:
    fitted = predict.fit(records())
    steps = [predict.step(fitted, gpu, "qwen2.5-7b", 2048) for gpu in ("h200", "h100", "a100", "l40s", "l4")]
    assert all(fast.device_ms.mid < slow.device_ms.mid for fast, slow in pairwise(steps))
    assert all(fast.speedup.mid >= slow.speedup.mid for fast, slow in pairwise(steps))
    assert steps[0].host_bound
    assert not steps[-1].host_bound


def test_one_host_range_holds_for_every_gpu() -> None:
    fitted = predict.fit(records())
    hosts = {predict.step(fitted, gpu, "qwen2.5-7b", 2048).host_ms for gpu in ("h100", "a100", "l40s", "l4")}
    assert len(hosts) == 1


def test_every_published_cell_is_compared_and_none_is_fitted() -> None:
    rows = predict.table(predict.fit(records()), STUDY)
    assert sum(row.quantity == "floor_fraction" for row in rows) == 17
    assert [row.gpu for row in rows if row.quantity == "graph_speedup"] == ["h100", "l4"]
    for row in rows:
        assert row.kind == "predicted"
        assert not row.fitted
        assert row.low <= row.mid <= row.high
        assert row.published is not None
        assert row.error == pytest.approx(row.mid / row.published - 1)
        assert row.holds == (row.low <= row.published <= row.high)


def test_only_sound_h200_records_of_the_papers_models_are_fitted() -> None:
    good = records()
    others = [
        synthetic("qwen2.5-7b", 2048, "eager", gpu="h100", a=9.0),
        synthetic("qwen2.5-7b", 2048, "eager", a=9.0).model_copy(update={"outcome": "void"}),
        synthetic("qwen2.5-7b", 2048, "eager", a=9.0).model_copy(update={"stand_in": True}),
    ]
    assert predict.fit([*others, *good]) == predict.fit(good)


@pytest.mark.parametrize("these", [[], [record()], [synthetic("qwen2.5-7b", 2048, "graph")]])
def test_without_an_anatomy_of_an_eager_arm_it_says_what_to_measure(these: list[Record]) -> None:
    with pytest.raises(NotMeasuredError, match="make measure GPU=h200"):
        predict.fit(these)


def test_the_slope_against_dispatch_cost_is_a_times_the_launches() -> None:
    points = [(us, 1.8 * 1300 * us / 1e3, 1300.0) for us in (5.0, 7.0, 9.0)]
    assert predict.dispatch_slope(points) == pytest.approx((1.8 * 1300, 1.8))
    with pytest.raises(ValueError, match="no session"):
        predict.dispatch_slope([])
