"""Every kernel of a fused step by the name that launches.py gives it."""

from typing import Any

from decodegap.fused.attention import attention, combine
from decodegap.fused.matvec import embed, gate_up, lm_head, project, qkv

FUNCTIONS: dict[str, Any] = {
    "embed": embed,
    "qkv": qkv,
    "attention": attention,
    "combine": combine,
    "project": project,
    "gate_up": gate_up,
    "lm_head": lm_head,
}
