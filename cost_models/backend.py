"""Describe how the software on the devices executes a program: which costs it fuses, overlaps or adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fusion = Literal["all", "calls", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Execution properties of the software stack. The defaults describe XLA on plain array code.

    Attributes:
        fused_attention: whether attention runs as one kernel that never writes the scores to memory (XLA does not
            generate one by itself).
        ported_attention: whether that kernel was written for an earlier generation of devices
            (`Device.ported_attention_efficiency`).
        fusion: element-wise ops that run inside the kernels of their neighbours: "all" possible ones, as compilers do;
            "calls", those of one named scope or source line, as frameworks do that run one library call after another;
            or "none".
        overlap: whether collectives run concurrently with kernels that do not depend on them.
        overlap_gradients: whether gradients are reduced during the last backward pass, and state that was updated in
            parts is gathered during the next forward pass, instead of between the two.
        overlap_products: whether products consume the results of collectives in parts, so that the two overlap.
        call_seconds: host seconds to issue one kernel or collective, where the host issues each individually; devices
            wait for it when their kernels are shorter. 0 for compiled programs, which are issued as a whole.
    """

    fused_attention: bool = False
    ported_attention: bool = False
    fusion: Fusion = "all"
    overlap: bool = True
    overlap_gradients: bool = False
    overlap_products: bool = False
    call_seconds: float = 0.0
