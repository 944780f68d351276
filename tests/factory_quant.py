"""Records of quantised paths that no machine measured, valid in every field, for tests only."""

from typing import Any

from factory import record, rehashed

from decodegap import anatomy, floor, ledger, models, plan
from decodegap.quant_catalogue import GRAPH_SUFFIX, PATHS
from decodegap.schema import Anatomy, ByteCounts, Check, Floors, OperatorTime, Projection, Quantised, Record

EAGER_MS = {"bf16": 18.0, "fp16": 18.1, "bnb-nf4": 24.0, "bnb-nf4-dq": 27.5, "awq-marlin": 19.0, "gptq-marlin": 18.4,
            "gptq-exllamav2": 18.2, "int4-tinygemm": 18.6}  # fmt: skip
GRAPH_MS = {"bf16": 7.0, "fp16": 7.0, "bnb-nf4": 6.6, "bnb-nf4-dq": 7.9, "awq-marlin": 6.5, "gptq-marlin": 6.3,
            "gptq-exllamav2": 4.7, "int4-tinygemm": 4.6}  # fmt: skip
CPU_MS = {"fp32": 12.0, "bnb-nf4": 15.0, "int4-tinygemm": 9.0}


def held(path: str, model: str, gpu: str) -> Quantised:
    """What `path` holds of `model`, by its bits a weight."""
    known, dtype = models.lookup(model), PATHS[path].dtype_on(gpu)
    element = floor.ELEMENT_BYTES[dtype]
    count = floor.projection_count(known.config)
    return Quantised(
        path=path,
        group=PATHS[path].group,
        packed=round(count * PATHS[path].bits / 8),
        kept=known.streamed_bytes(dtype) - count * element,
        table=known.weight_bytes(dtype) - known.streamed_bytes(dtype),
        dense=count * element,
    )


def measured(
    path: str, eager_ms: float, graph_ms: float | None = None, *, gpu: str = "h200", model: str = "qwen2.5-7b",
    ctx: int = 2048, **changes: Any,
) -> Record:  # fmt: skip
    """One session of one path, with the anatomy of each of its series."""
    arms = {path: eager_ms} | ({path + GRAPH_SUFFIX: graph_ms} if graph_ms is not None else {})
    found = record(gpu=gpu, model=model, ctx=ctx, arm=path, arms=arms, experiment="quantised", **changes)
    if found.outcome != "ok":
        return found
    own, dtype = held(path, model, gpu), PATHS[path].dtype_on(gpu)
    kv, read = models.lookup(model).kv_bytes(ctx, dtype), found.machine and found.machine.read_gb_s
    counts = ByteCounts(weights_all=own.packed + own.kept + own.table, weights_streamed=own.packed + own.kept, kv=kv)
    everything, streamed = counts.weights_all + kv, counts.weights_streamed + kv
    return rehashed(
        found,
        cell=found.cell.model_copy(update={"dtype": dtype}),
        quantised=own,
        bytes=counts,
        floors_ms=Floors(
            published=floor.floor_ms(everything, found.peak_gb_s or 1.0),
            streamed=floor.floor_ms(streamed, found.peak_gb_s or 1.0),
            achievable=floor.floor_ms(streamed, read or 1.0),
        ),
        anatomy=[dissected(path, name, ms, found, own) for name, ms in arms.items()],
    )


def dissected(path: str, name: str, step_ms: float, found: Record, own: Quantised) -> Anatomy:
    """The anatomy of one series: products at 70% of the read bandwidth, 2 ms of small kernels, 2% not explained."""
    known, gpu, ctx = models.lookup(found.cell.model), found.cell.gpu, found.cell.ctx
    layers, on_gpu = int(known.config["num_hidden_layers"]), gpu != "cpu"
    read = (found.machine and found.machine.read_gb_s) or 1.0
    element = floor.ELEMENT_BYTES[PATHS[path].dtype_on(gpu)]
    counts = ledger.ledger(known.config, ctx, name, element, weights=own.packed + own.kept)
    ledger_ms = {item: floor.floor_ms(n, read) for item, n in counts.items()}
    product = "aten::linear" if PATHS[path].is_baseline else ledger.QUANTISED_PRODUCT
    others_ms = sum(ledger_ms.values()) - floor.floor_ms(own.packed, read)
    head_ms, added_ms = floor.floor_ms(own.kept, read), 0.0 if PATHS[path].is_baseline else 0.1
    small_ms, bubbles, graph = 1.5 + others_ms - head_ms + added_ms, 0.2 if on_gpu else 0.0, name.endswith(GRAPH_SUFFIX)
    product_ms = floor.floor_ms(own.packed, read) / 0.7
    if graph or not on_gpu:  # a step that nothing but the device decides
        product_ms = 0.98 * step_ms - bubbles - head_ms - small_ms
    operators = {
        product: OperatorTime(launches=7 * layers, ms=product_ms, bytes=own.packed),
        ledger.HEAD_PRODUCT: OperatorTime(launches=1, ms=head_ms, bytes=own.kept),
        "aten::mul": OperatorTime(launches=20 * layers, ms=small_ms),
    }
    busy = sum(each.ms for each in operators.values())
    exposed = max(0.0, 0.98 * step_ms - busy - bubbles) if on_gpu and not graph else 0.0
    parts = (
        sum(ledger_ms[item] for item in ledger.FLOOR_ITEMS),
        sum(ledger_ms[item] for item in ledger.EXTRA_ITEMS),
        busy - sum(ledger_ms.values()),
        bubbles,
        exposed,
    )
    return Anatomy(
        arm=name, profiled_steps=5, launches=27 * layers + 1, operators=operators, busy_ms=busy, kernel_ms=busy,
        bubbles_ms=bubbles, gap_us=0.25, enqueue_ms=exposed, exposed_host_ms=exposed, profiled_step_ms=1.4 * step_ms,
        ledger_bytes=counts, ledger_ms=ledger_ms, parts_ms=dict(zip(anatomy.PARTS, parts, strict=True)),
        residual_ms=step_ms - sum(parts), step_ms=step_ms, source="device" if on_gpu else "host", idle_ms=bubbles,
    )  # fmt: skip


def checked(
    failing: str = "", refused: dict[str, str] | None = None, *, gpu: str = "h200", model: str = "qwen2.5-7b",
    ctx: int = 2048, **changes: Any,
) -> Record:  # fmt: skip
    """The check session of one cell: every path that is not `refused` passes, but for one."""
    found = record(gpu=gpu, model=model, ctx=ctx, arm=plan.CHECK, experiment="quantised", **changes)
    here = [path for path in PATHS.values() if (path.on_cpu if gpu == "cpu" else path.on_gpu)]
    here = [path for path in here if path.slug not in (refused or {})]
    shapes = {"q/o": (3584, 3584), "k/v": (512, 3584), "gate/up": (18944, 3584), "down": (3584, 18944)}
    return rehashed(
        found,
        checks=[
            Check(arm=path.slug, error=0.3 if path.slug == failing else 0.06, eager_error=0.05, allowed_multiple=4.0,
                  argmax_equal=True, reference_margin=0.2, passed=path.slug != failing)
            for path in here
        ],
        projections=[
            Projection(path=path.slug, kind=kind, rows=rows, columns=columns, us=rows * columns / 8e6 + 6,
                       n_bytes=round(rows * columns * path.bits / 8), error=6e-4, dense_error=5e-4,
                       gb_s=round(rows * columns * path.bits / 8) / (rows * columns / 8e6 + 6) / 1e3)
            for path in here for kind, (rows, columns) in shapes.items()
        ],
        refused=refused or {},
        series=[], step_ms=None, ran=None,
    )  # fmt: skip


def experiment(gpu: str = "h200", *, sessions: int = 3, **changes: Any) -> list[Record]:
    """The whole experiment on one GPU, or on a CPU: a check, and so many sessions of every path."""
    on_cpu = gpu == "cpu"
    where = {"gpu": gpu} | ({"model": "mistral-standin", "ctx": 128} if on_cpu else {}) | changes
    steps = {slug: (ms, None if on_cpu else GRAPH_MS[slug]) for slug, ms in (CPU_MS if on_cpu else EAGER_MS).items()}
    found = [checked(refused={"bnb-nf4-dq": "bnb-nf4-dq has no kernel for a CPU"} if on_cpu else None, **where)]
    for session in range(1, sessions + 1):
        factor = 1 + 0.01 * (session - 2)
        for path, (eager_ms, graph_ms) in steps.items():
            graph = None if graph_ms is None else graph_ms * factor
            found.append(measured(path, eager_ms * factor, graph, session=session, **where))
    return found
