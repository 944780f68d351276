"""Which quantised paths there are: their names, the type they compute in, their bits a weight, and their kernels.

Without torch, because plans and tables need it too. What a path does is in `quant_paths`.
"""

from dataclasses import dataclass

from decodegap.schema import Dtype


@dataclass(frozen=True)
class QuantPath:
    """One way to hold and to multiply by the projections' weights. The output head and the embedding stay as they are.

    `bits` are those of one quantised weight with its share of scales and zeros; `group` the weights that share a
    scale (0 for none). One of `kernels` is part of the name of the kernel that every projection must run on a GPU,
    one of `operators` of the operator on a CPU.
    """

    slug: str
    label: str
    dtype: Dtype  # of activations and of what is not quantised, on a GPU; on a CPU it is fp32
    bits: float
    group: int = 0
    kernels: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    sums_in_fp16: bool = False  # adds up partial sums by atomics in fp16, so that it does not repeat itself bit for bit
    on_gpu: bool = True
    on_cpu: bool = False

    @property
    def is_baseline(self) -> bool:
        """Whether it leaves the weights as they are."""
        return self.group == 0

    def dtype_on(self, gpu: str) -> Dtype:
        """The type it computes in on this GPU, or on a CPU."""
        return "float32" if gpu == "cpu" else self.dtype


# In the order of tables. Bits: 4 a code, and a group's scale (and zero) over its weights. NF4: an fp32 scale each 64,
# or, quantised twice, 8 bits each 64 and an fp32 scale of those each 256.
_ALL = (
    QuantPath("bf16", "bf16", "bfloat16", bits=16),
    QuantPath("fp16", "fp16", "float16", bits=16),
    QuantPath("fp32", "fp32", "float32", bits=32, on_gpu=False, on_cpu=True),
    QuantPath(
        "bnb-nf4", "NF4 (bitsandbytes)", "bfloat16", bits=4 + 32 / 64, group=64,
        kernels=("gemm_4bit_simt", "kgemm_4bit_inference_naive"), operators=("bitsandbytes::gemm_4bit",), on_cpu=True,
    ),
    QuantPath(
        "bnb-nf4-dq", "NF4, double quantisation", "bfloat16", bits=4 + 8 / 64 + 32 / (64 * 256), group=64,
        kernels=("gemm_4bit_simt", "kgemm_4bit_inference_naive"),
    ),
    QuantPath(
        "awq-marlin", "AWQ (Marlin)", "float16", bits=4 + 20 / 128, group=128, kernels=("Marlin",), sums_in_fp16=True,
    ),
    QuantPath("gptq-marlin", "GPTQ (Marlin)", "float16", bits=4 + 16 / 128, group=128, kernels=("Marlin",)),
    QuantPath(
        "gptq-exllamav2", "GPTQ (ExLlamaV2)", "float16", bits=4 + 20 / 128, group=128,
        kernels=("gemm_half_q_half_gptq_kernel",), sums_in_fp16=True,
    ),
    QuantPath(
        "int4-tinygemm", "int4 (torch's tinygemm)", "bfloat16", bits=4 + 32 / 128, group=128,
        kernels=("tinygemm",), operators=("aten::_weight_int4pack_mm_for_cpu",), on_cpu=True,
    ),
)  # fmt: skip
PATHS: dict[str, QuantPath] = {path.slug: path for path in _ALL}
BASELINE = {"cpu": "fp32"}  # what speed-ups are over, where it is not bf16
GRAPH_SUFFIX = "-graph"  # of a path's second series: its step replayed from one graph


def on(gpu: str) -> list[QuantPath]:
    """The paths that are measured on this GPU, or on a CPU, in the order of tables; the baselines first."""
    return [path for path in _ALL if (path.on_cpu if gpu == "cpu" else path.on_gpu)]


def baseline_on(gpu: str) -> str:
    """The path that speed-ups on this GPU are over: bf16 as published, fp32 on a CPU."""
    return BASELINE.get(gpu, "bf16")


def series() -> list[str]:
    """The names of all series that the paths may have: launched kernel by kernel, and replayed from a graph."""
    return [name for slug in PATHS for name in (slug, slug + GRAPH_SUFFIX)]
