"""Describe one device (its memory, rates and efficiencies) and the software that runs programs on it.

peak(dtype) of a matrix kernel = the first rate that the device has in the dtype's row of fallbacks   (Device.peak)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from cost_models.errors import ClusterError, require_amount, require_count

# JAX lets matrix kernels read float32 operands as TF32 on NVIDIA GPUs that have it (docs.jax.dev, "Matmul precision").
_MATRIX_FALLBACKS: dict[str, tuple[str, ...]] = {
    "float32": ("tensorfloat32",),
    "bfloat16": ("bfloat16", "float16"),
    "float16": ("float16", "bfloat16"),
    "float8": ("float8", "bfloat16", "float16"),
}

PeakFlops = Mapping[str, float] | tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator as JAX exposes it (a TPU v3 chip is two devices), or the processor behind virtual devices.

    Attributes:
        name: display name.
        memory_bytes: capacity that programs can use on this device (its share, on a shared processor).
        memory_bandwidth: bytes per second between memory and compute units, data-sheet value.
        peak_flops: dense FLOP/s by dtype name, data-sheet values. "float32" is needed (the last fallback, and the rate
            of elementwise work); "tensorfloat32" and "float8" stand for those formats. Give a mapping; it is stored as
            pairs sorted by name, so that a device can be hashed.
        launch_seconds: seconds before a kernel reaches its full rate, per kernel.
        dispatch_seconds: host seconds to launch one compiled program.
        num_units: number of units that process blocks of a matrix product in parallel (streaming multiprocessors,
            matrix units).
        tiles: (rows, columns) of the blocks that one unit can process; the best one is used for each product.
        fill_depth: depth of a product at which a unit reaches half of its rate, as if so many steps were lost.
        matrix_efficiency: fraction of the peak rate that large products sustain in training, by dtype name (as in
            `peak_flops`) or one number for all; includes the drop of clock rates under load.
        convolution_efficiency: fraction of the sustained matrix rate that convolutions reach.
        attention_efficiency: fraction of the sustained matrix rate that fused attention kernels reach with wide heads.
        ported_attention_efficiency: the same for a kernel that was written for an earlier generation; None if equal.
        memory_efficiency: fraction of the memory bandwidth that large kernels sustain.
        contention: relative slowdown of kernels and collectives while both run.

    Raises:
        ClusterError: a rate that is not above 0, a time below 0, an efficiency outside (0, 1], or no float32 rate.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: PeakFlops
    launch_seconds: float
    dispatch_seconds: float
    num_units: int = 1
    tiles: tuple[tuple[int, int], ...] = ((128, 128),)
    fill_depth: float = 0.0
    matrix_efficiency: PeakFlops | float = 0.8
    convolution_efficiency: float = 0.75
    attention_efficiency: float = 0.7
    ported_attention_efficiency: float | None = None
    memory_efficiency: float = 0.8
    contention: float = 0.0

    def __post_init__(self) -> None:
        label = f"The device {self.name!r}:"
        # Mappings are stored as sorted pairs, so that a device is hashable: prices are cached by device.
        pairs = tuple(sorted(dict(self.peak_flops).items()))
        object.__setattr__(self, "peak_flops", pairs)
        object.__setattr__(self, "tiles", tuple((int(rows), int(columns)) for rows, columns in self.tiles))
        if not isinstance(self.matrix_efficiency, (int, float)):
            object.__setattr__(self, "matrix_efficiency", tuple(sorted(dict(self.matrix_efficiency).items())))
        self._check_kernels(label)
        for what, unit in (("memory_bytes", "bytes"), ("memory_bandwidth", "bytes per second")):
            value = getattr(self, what)
            require_amount(f"{label} {what}", value, advice=f"give it in {unit}", positive=True, error=ClusterError)
        for what in ("launch_seconds", "dispatch_seconds"):
            require_amount(f"{label} {what}", getattr(self, what), advice="give it in seconds", error=ClusterError)
        for dtype, rate in pairs:
            what = f"{label} peak_flops[{dtype!r}]"
            require_amount(what, rate, advice="give it in FLOP per second", positive=True, error=ClusterError)
        if "float32" not in self.peaks:
            raise ClusterError(
                f"{label} peak_flops has rates for {sorted(self.peaks)}, but 'float32' is needed because every other "
                "type falls back to it: add it (on a device without float32 units, the rate of what runs instead)."
            )

    def _check_kernels(self, label: str) -> None:
        require_count(f"{label} num_units", self.num_units, advice="count the units of one device", error=ClusterError)
        if not self.tiles or any(rows < 1 or columns < 1 for rows, columns in self.tiles):
            raise ClusterError(f"{label} tiles is {self.tiles!r}, but pairs of at least 1 row and column are needed.")
        require_amount(f"{label} fill_depth", self.fill_depth, advice="give it in steps of depth", error=ClusterError)
        require_amount(f"{label} contention", self.contention, advice="give a part, 0 for none", error=ClusterError)
        parts = {f"matrix_efficiency[{dtype!r}]": part for dtype, part in self.efficiencies.items()}
        parts |= {
            name: getattr(self, name)
            for name in ("convolution_efficiency", "attention_efficiency", "memory_efficiency")
        }
        if self.ported_attention_efficiency is not None:
            parts["ported_attention_efficiency"] = self.ported_attention_efficiency
        for what, part in parts.items():
            advice = "give the part of the rate that is reached"
            require_amount(f"{label} {what}", part, advice=advice, positive=True, error=ClusterError)
            if part > 1:
                raise ClusterError(f"{label} {what} is {part!r}, but it is a part of at most 1: {advice}.")

    @property
    def peaks(self) -> dict[str, float]:
        """Peak FLOP/s by dtype name."""
        return dict(self.peak_flops)

    @property
    def with_ported_attention(self) -> Device:
        """This device running fused attention that was written for an earlier generation."""
        return _with_ported_attention(self)

    @property
    def efficiencies(self) -> dict[str, float]:
        """Fraction of the peak rate that large products sustain, for each dtype of `peaks`."""
        given = self.matrix_efficiency
        if isinstance(given, (int, float)):
            return dict.fromkeys(self.peaks, float(given))
        stated = dict(given)
        # The lowest stated efficiency is the cautious guess for a dtype that was not measured.
        return {dtype: stated.get(dtype, min(stated.values())) for dtype in self.peaks}

    def format(self, dtype: str, *, matrix: bool = True) -> str:
        """Return the number format, a key of `peaks`, in which kernels run on operands of `dtype`.

        A missing 16-bit type uses the other one; float8 uses the 16-bit types; everything else float32. Vector units
        (`matrix=False`) run at the float32 rate, except for float64 where the device states it.
        """
        # The variants of float8 (e4m3fn, e5m2, …) run at one rate.
        family = "float8" if dtype.startswith("float8") else dtype
        names = _MATRIX_FALLBACKS.get(family, (family,)) if matrix or family == "float64" else ()
        return next((name for name in names if name in self.peaks), "float32")

    def peak(self, dtype: str, *, matrix: bool = True) -> float:
        """Return the peak FLOP/s for operands of `dtype` on the matrix units, or (`matrix=False`) the vector units."""
        return self.peaks[self.format(dtype, matrix=matrix)]


# Cached because `replace` validates all fields again, and this is read for every attention kernel that is priced.
@lru_cache(maxsize=256)
def _with_ported_attention(device: Device) -> Device:
    ported = device.ported_attention_efficiency
    return device if ported is None else replace(device, attention_efficiency=ported)


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
