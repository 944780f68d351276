"""What every kernel of the fused step shares: the step's state, its order, and how bf16 pairs are read.

With programmatic dependent launch (`PDL`) a kernel starts while the one before it still runs. It lets the next one
start, asks for its first weights, which nothing in the step writes, and only then waits for the kernel before it. A
wait covers that kernel alone, so every program of every kernel waits: then whatever came earlier is complete too.
Without it, and in Triton's interpreter, the same code runs kernel after kernel. `WAIT` is off only in the test that
shows that each wait is needed.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

# The step's state on the device, `STATE_WORDS` int64: the position that the next step writes, the best (logit, token)
# so far, and the position that this step writes.
NEXT = tl.constexpr(0)
BEST = tl.constexpr(1)
NOW = tl.constexpr(2)
LOWEST = tl.constexpr(-(2**63))  # below every (logit, token)


@triton.jit
def start_next(PDL: tl.constexpr) -> None:
    """Let the next kernel start as soon as every program of this one has."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr, WAIT: tl.constexpr) -> None:
    """Go on when the kernel before this one is complete and what it wrote can be read."""
    if PDL and WAIT:
        cuda.gdc_wait()


@triton.jit
def low_half(words: tl.tensor) -> tl.tensor:
    """The first bf16 of each word, as fp32: a bf16 is the upper half of the fp32 of the same value."""
    return (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def high_half(words: tl.tensor) -> tl.tensor:
    """The second bf16 of each word, as fp32."""
    return (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def unknown_zero(pointer: tl.tensor) -> tl.tensor:
    """0 in a register, which the compiler does not know to be 0: no address has its uppermost bit set.

    Of a mask and bits to set after it, only one can be a literal in an instruction; with the other one in a register
    both are one instruction, where the compiler would else keep two literals and spend two.
    """
    return (pointer.to(tl.int64) >> 63).to(tl.int32)
