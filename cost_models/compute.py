"""Time of work on one device: a roofline with a start-up time per kernel.

    seconds = n * launch(kind) + max(flops / (e(kind) * peak), bytes / (e_m * bandwidth))     (compute_seconds)
    fraction of peak = flops / (peak * seconds)                                               (achieved_fraction)

n is the number of kernels and launch(kind) the device's launch_seconds for kernels of their own (matmul, convolution),
0 for elementwise work, which is fused with its neighbours. A compute-bound matmul of f FLOPs therefore reaches

    e * f / (f + e * peak * launch)

of the peak: small matmuls lose. Roofline: Williams, Waterman, Patterson, CACM 52(4), 2009.

Efficiencies are fractions of data-sheet values. Matmul: the best measured bf16 rates are 87 % of peak on A100, 80 % on
H100, 78 % on B200 (stas00/ml-engineering, compute/accelerator README) and 90 % on TPU v6e (AI-Hypercomputer/tpu-recipes
microbenchmarks). Memory: 83 % for a copy on TPU v6e (same), 92 % on GB200 (Azure engineering blog). Convolution and
elementwise are assumptions.
"""

from __future__ import annotations

from cost_models.hardware import Device
from cost_models.work import Work, WorkKind

FLOPS_EFFICIENCY: dict[WorkKind, float] = {"matmul": 0.8, "convolution": 0.6, "elementwise": 0.8}
MEMORY_EFFICIENCY = 0.8


def compute_seconds(work: Work, device: Device) -> float:
    """Seconds that one device needs for `work`; 0 when there is none. Linear in `work * n`."""
    if work.flops == 0 and work.bytes == 0:
        return 0.0
    matrix = work.kind != "elementwise"
    peak = device.peak(work.dtype, matrix=matrix)
    arithmetic = work.flops / (FLOPS_EFFICIENCY[work.kind] * peak)
    traffic = work.bytes / (MEMORY_EFFICIENCY * device.memory_bandwidth)
    launches = work.num_kernels * device.launch_seconds if matrix else 0.0
    return launches + max(arithmetic, traffic)


def achieved_fraction(work: Work, device: Device) -> float:
    """Fraction of the peak rate of its type that `work` reaches, between 0 and 1; 0 when there is no work."""
    seconds = compute_seconds(work, device)
    return work.flops / (device.peak(work.dtype, matrix=work.kind != "elementwise") * seconds) if seconds else 0.0
