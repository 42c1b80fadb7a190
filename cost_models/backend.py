"""What the software on the devices does with a program, as far as it changes the time: which costs it hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fusion = Literal["all", "calls", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """How a program is executed. The defaults are what XLA does with plain array code.

    Attributes:
        fused_attention: attention runs as one kernel that keeps the scores out of memory (XLA makes none by itself).
        ported_attention: that kernel was written for an earlier generation of devices
            (`Device.ported_attention_efficiency`).
        fusion: which element-wise ops run inside their neighbours' kernels: "all" that can, as compilers do it;
            "calls", those of one named scope or source line, as frameworks do it that run one library call after
            another; or "none".
        overlap: collectives run beside kernels that do not need them.
        overlap_gradients: gradients are reduced during the last backward pass, and state that was updated in parts is
            gathered during the next forward pass, instead of between the two.
        overlap_products: products take the results of collectives in parts, so that the two overlap.
        call_seconds: what a host needs to issue one kernel or collective, where it issues each by itself; devices wait
            for it when their kernels are shorter. Compiled programs are issued whole.
    """

    fused_attention: bool = False
    ported_attention: bool = False
    fusion: Fusion = "all"
    overlap: bool = True
    overlap_gradients: bool = False
    overlap_products: bool = False
    call_seconds: float = 0.0
