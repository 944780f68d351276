"""The bench of quantised projections on a CPU: what it measures, what it sees, and how it goes on."""

import weakref
from typing import Any

import pytest
import torch
from stepping import build, wide

from decodegap import quant_bench, quant_paths
from decodegap.quant_catalogue import PATHS, on

CPU_PATHS = [path.slug for path in on("cpu") if not path.is_baseline]
SMALL = wide()


@pytest.mark.parametrize("slug", ["fp32", *CPU_PATHS])
def test_the_bench_measures_each_kind_of_projection(slug: str) -> None:
    net = build(SMALL)
    quant_paths.convert(net, PATHS[slug], "cpu")
    rows = quant_bench.projections(net, PATHS[slug], "cpu")
    assert [(row.kind, row.rows, row.columns) for row in rows] == [
        ("q/o", 256, 256), ("k/v", 128, 256), ("gate/up", 384, 256), ("down", 256, 384)
    ]  # fmt: skip
    for row in rows:
        assert row.path == slug
        assert row.gb_s == pytest.approx(row.n_bytes / row.us / 1e3)
        assert max(row.error, row.dense_error) < 1e-5
    modules = {kind: module for kind, _, _, module in quant_paths.projections(net)}
    assert {row.kind: row.n_bytes for row in rows} == {
        kind: quant_bench.bytes_of(each) for kind, each in modules.items()
    }


def test_the_bench_sees_a_product_with_other_weights() -> None:
    net = build(SMALL)
    quant_paths.convert(net, PATHS["int4-tinygemm"], "cpu")
    key, value = (module for kind, _, _, module in list(quant_paths.projections(net))[:3] if kind == "k/v")
    x = torch.randn(1, 1, 256)
    assert max(quant_bench.errors_of(key, x)) < 1e-5
    key.dequantised = value.dequantised
    error, dense_error = quant_bench.errors_of(key, x)
    assert error > 0.5
    assert dense_error < 1e-5


def test_the_benchs_table_names_a_path_that_cannot_run_and_goes_on() -> None:
    paths = [PATHS["awq-marlin"], PATHS["int4-tinygemm"]]
    head, refused, *rows = quant_bench.lines(SMALL, paths, "cpu", 1)
    assert head.split()[:2] == ["path", "kind"]
    assert "no kernel for a CPU" in refused
    assert len(rows) == 4
    assert all(row.startswith("int4-tinygemm") for row in rows)


def test_the_bench_lets_go_of_a_model_that_failed_before_it_builds_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    real, nets = quant_bench.built, list[weakref.ref[torch.nn.Module]]()

    def built(*given: Any) -> torch.nn.Module:
        assert [net() for net in nets] == [None] * len(nets)
        net = real(*given)
        nets.append(weakref.ref(net))
        return net

    monkeypatch.setattr(quant_bench, "built", built)
    paths = [PATHS[slug] for slug in ("awq-marlin", "gptq-marlin", "int4-tinygemm")]
    assert len(list(quant_bench.lines(SMALL, paths, "cpu", 1))) == 7
    assert len(nets) == 3


def test_the_bench_names_a_model_that_nobody_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert quant_bench.main(["--model", "gpt-9"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "gpt-9" in said
