"""What a record is: its fields, their units, and the JSON Schema that ships beside the records."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1

Slug = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,63}$")]
Dtype = Literal["bfloat16", "float16", "float32"]
Experiment = Literal["baseline", "graphs", "quantised", "ladder"]
Outcome = Literal["ok", "oom", "unsupported", "void"]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Strict(BaseModel):
    """Immutable, no unknown fields, no coercion of types, never NaN or Infinity."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class Cell(Strict):
    """What is measured: GPU x experiment x model x context x arm, with its dtype and the SDPA backend asked for."""

    gpu: Slug
    experiment: Experiment
    model: Slug
    ctx: int = Field(ge=1)
    arm: Slug
    dtype: Dtype
    sdpa: str

    def file_name(self, session: int) -> str:
        """`<model>_<ctx>_<arm>_s<k>.json`."""
        return f"{self.model}_{self.ctx}_{self.arm}_s{session}.json"


class Protocol(Strict):
    """How a cell is measured, all of it known before the run; its hash decides whether two records may meet."""

    version: int
    warmup_steps: int = Field(ge=0)
    measured_steps: int = Field(ge=1)
    free_steps: int = Field(ge=1)
    energy_seconds: float = Field(ge=0)
    seed: int
    prefill_chunk: int = Field(ge=1)
    timing: str
    weights: Literal["synthetic", "hub", "local"]
    weights_revision: str

    def digest(self) -> str:
        """Hex SHA-256 of the protocol's canonical JSON, its first 16 digits."""
        return hashlib.sha256(canonical(self.model_dump()).encode()).hexdigest()[:16]


class DeviceState(Strict):
    """What moves on a device: read before and after the measured steps. None where the card does not say."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    throttle_reasons: list[str]
    memory_used_mib: int | None
    utilisation_percent: int | None
    other_processes: int | None
    ecc_uncorrected: int | None = None  # uncorrected memory errors since the driver was loaded


class Ran(Strict):
    """Proof of what ran: the SDPA backend seen and the kernels (or CPU operators) of one profiled step."""

    sdpa: str
    evidence: str
    kernels: dict[str, int]  # name -> launches in the step


class Sustained(Strict):
    """A free-running loop of seconds, long enough for the card's clock and power to settle."""

    steps: int = Field(ge=1)
    step_ms: Milliseconds  # the loop's time over its steps; between device events where there is a device
    before: DeviceState | None  # just before the loop
    during: DeviceState | None  # once the last step is enqueued, while the device still works; None without a device
    after: DeviceState | None  # just after it


class Series(Strict):
    """The raw samples of one arm in one session. Each list has one value a measured step."""

    arm: Slug
    wall_ms: list[Milliseconds]  # start of the step to the end of a device synchronisation
    enqueue_ms: list[Milliseconds]  # start of the step to the return of its last launch
    event_ms: list[Milliseconds] | None  # between device events around the step; None without a device
    free_steps: int
    free_total_ms: Milliseconds  # that many steps with one synchronisation at the end
    step_ms: Milliseconds  # median of wall_ms
    energy_steps: int | None = None
    energy_j_per_step: float | None = None  # from NVML's energy counter over the free-running energy loop
    sustained: Sustained | None = None
    ran: Ran | None = None  # this arm's own, in a session that measures several


class Pair(Strict):
    """Two arms measured interleaved in one session: the statistic of the A/B."""

    first: Slug
    second: Slug
    order: str  # e.g. "ABBAABBA", one letter a measured block
    ratio: float = Field(gt=0)  # median wall of `first` over median wall of `second`


class Attestation(Strict):
    """Evidence that two arms did the same work: compared on a changed token after poisoning every output."""

    reference: Slug
    arm: Slug
    outputs_equal: bool  # logits equal bit for bit
    max_abs_difference: float
    reference_spread: float  # the reference against itself; 0 where it is reproducible bit for bit
    outputs_changed: bool  # finite, and different from the logits before the token was changed
    kernels_equal: bool  # equal multisets of kernel names
    kernels_differing: dict[str, list[int]]  # name -> [launches in the reference, launches in the arm]


# Relative L2. Rounding to 16 bits leaves 0.05 here; logits that have nothing to do with the reference are at 1.4.
MOST_EAGER_ERROR = 0.5


class Check(Strict):
    """One arm's logits against the fp32 reference (relative L2 error), beside eager's own error in its dtype."""

    arm: Slug
    error: float
    eager_error: float
    allowed_multiple: float
    argmax_equal: bool
    reference_margin: float  # gap between the reference's two largest logits, over the logits' standard deviation
    passed: bool

    @property
    def proves(self) -> bool:
        """Whether stock eager is near enough to the reference for an error beside its own to say anything."""
        return self.eager_error <= MOST_EAGER_ERROR


class Quantised(Strict):
    """What a quantised session really held, in bytes; `bytes` and the floors of its record are made of these."""

    path: Slug
    group: int  # weights that share a scale; 0 for a baseline, whose weights are as they were
    packed: int = Field(ge=0)  # the projections of all layers: codes, scales and zeros, or plain weights
    kept: int = Field(ge=0)  # read in every step as before: output head, norms, biases
    table: int = Field(ge=0)  # an untied input embedding, of which a step reads one row
    dense: int = Field(ge=0)  # the same projections at two bytes a weight (four on a CPU)


class Projection(Strict):
    """One kind of projection on a path, on its own: all layers' in turn, so that weights come from memory."""

    path: Slug
    kind: str  # q/o, k/v, gate/up, down
    rows: int = Field(ge=1)  # outputs
    columns: int = Field(ge=1)  # inputs
    n_bytes: int = Field(ge=0)  # of one module's weights as held
    us: float = Field(gt=0)
    gb_s: float = Field(gt=0)
    error: float  # relative L2, against the dequantised weights in higher precision
    dense_error: float  # the same of a dense product with those weights in the path's dtype


class OperatorTime(Strict):
    """Device time of the kernels launched under one parent operator, per step; overlaps count once."""

    launches: float
    ms: float
    bytes: int = 0  # what the ledger says these kernels must move


class EmptyKernels(Strict):
    """One-element kernels in a captured graph, us each: unprofiled period, profiled duration, and time between two."""

    period_us: float
    kernel_us: float
    between_us: float


class Anatomy(Strict):
    """Where one arm's step goes. Times in ms a step; every part is measured, the residual is what they leave."""

    arm: Slug
    profiled_steps: int
    launches: float  # kernels, copies and memsets a step
    operators: dict[str, OperatorTime]
    busy_ms: float  # union of the device intervals
    kernel_ms: float  # sum of the device intervals
    bubbles_ms: float  # (launches - 1) x the gap between kernels in a graph of empty ones on this card
    gap_us: float
    enqueue_ms: float  # from the unprofiled steps
    exposed_host_ms: float
    profiled_step_ms: float  # what profiling did to the step
    ledger_bytes: dict[str, int]
    ledger_ms: dict[str, float]  # each at the measured read bandwidth
    parts_ms: dict[str, float]  # floor, extra traffic, kernel inefficiency, bubbles, exposed host
    residual_ms: float
    step_ms: float  # the unprofiled step that the parts are held against
    source: Literal["device", "host"] = "device"  # kernels of a device, or top-level operators of a CPU
    attributed: Literal["operator", "twin", "name"] = "operator"  # how each kernel's parent operator is known
    overlapping: float = 0.0  # kernels a step that start before the one before has ended
    idle_ms: float = 0.0  # between kernels, in the profiled steps
    empty_kernels: EmptyKernels | None = None
    flags: list[str] = []  # where what ran is not what the arm's definition says


class ByteCounts(Strict):
    """Bytes that floors are made of."""

    weights_all: int = Field(ge=0)
    weights_streamed: int = Field(ge=0)
    kv: int = Field(ge=0)


class Floors(Strict):
    """Lower bounds in ms: all weights at the peak, streamed weights at the peak, and at the measured read rate."""

    published: Milliseconds | None
    streamed: Milliseconds | None
    achievable: Milliseconds | None


class Machine(Strict):
    """What the session ran on; nothing that names the host, its user, its address or a serial number."""

    device_name: str
    memory_mib: int
    sm_count: int | None
    capability: str | None
    bus_width_bits: int | None
    max_memory_clock_mhz: int | None
    driver: str | None
    cuda: str | None
    ecc: bool | None
    mig: bool | None
    persistence: bool | None
    power_cap_w: float | None
    power_cap_default_w: float | None
    cpu_model: str
    cores: int
    host_memory_mib: int
    last_level_cache_mib: float | None
    governor: str | None
    load_1min: float
    cpu_quota_cores: float | None
    container: str | None
    host_tag: str
    idle: DeviceState | None = None  # before this process touched the device: whatever is busy then is a neighbour
    before: DeviceState | None
    after: DeviceState | None
    read_gb_s: float | None
    read_kernel: str | None
    read_buffer_mib: int | None
    dispatch_us: float | None
    dispatch_us_spread: float | None


class Record(Strict):
    """One session's result: one file, written once."""

    schema_version: Literal[1] = 1
    cell: Cell
    session: int = Field(ge=1)
    protocol: Protocol
    protocol_hash: str
    outcome: Outcome
    reasons: list[str]
    flags: list[str]
    series: list[Series]
    ran: Ran | None
    step_ms: Milliseconds | None
    pair: Pair | None = None
    attestations: list[Attestation] = []
    checks: list[Check] = []
    refused: dict[str, str] = {}  # arms of a session of several that were not timed -> why
    anatomy: list[Anatomy] = []
    quantised: Quantised | None = None
    projections: list[Projection] = []
    bytes: ByteCounts
    floors_ms: Floors
    peak_gb_s: float | None
    peak_source: Literal["datasheet", "derived", "measured"]
    machine: Machine | None
    versions: dict[str, str]
    source_hash: str
    commit: str | None
    started_at: str
    durations_s: dict[str, float]
    peak_memory_bytes: int | None
    bytes_asked: int | None
    stand_in: bool
    content_hash: str = ""


def canonical(data: Any) -> str:
    """The one JSON text of `data`: sorted keys, no spaces, NaN and Infinity refused."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def schema_text() -> str:
    """JSON Schema of a record, as `artifact/schema/record.schema.json` ships it."""
    return json.dumps(Record.model_json_schema(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":  # `make schema`
    print(schema_text(), end="")
