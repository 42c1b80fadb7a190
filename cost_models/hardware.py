"""One device, as data.

peak(dtype) of a matrix kernel = the first rate that the device has in the dtype's row of fallbacks   (Device.peak)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cost_models.checks import require_amount
from cost_models.errors import ClusterError
from cost_models.link import Link as Link

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
    """One accelerator as JAX shows it (a TPU v3 chip is two devices), or the processor behind virtual devices.

    Attributes:
        name: for people.
        memory_bytes: capacity that programs can use on this device (of a shared processor: this device's share).
        memory_bandwidth: bytes per second between memory and compute units, data-sheet value.
        peak_flops: dense FLOP/s by dtype name, data-sheet values. "float32" is needed (the last fallback, and the rate
            of elementwise work); "tensorfloat32" and "float8" stand for those formats. Give a mapping; it is stored as
            pairs sorted by name, so that a device can be hashed.
        launch_seconds: time before a kernel reaches its full rate, per kernel.
        dispatch_seconds: host time to launch one compiled program.

    Raises:
        ClusterError: a rate that is not above 0, a time below 0, or no float32 rate.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: PeakFlops
    launch_seconds: float
    dispatch_seconds: float

    def __post_init__(self) -> None:
        label = f"The device {self.name!r}:"
        pairs = tuple(sorted(dict(self.peak_flops).items()))
        object.__setattr__(self, "peak_flops", pairs)
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

    @property
    def peaks(self) -> dict[str, float]:
        """FLOP/s by dtype name."""
        return dict(self.peak_flops)

    def peak(self, dtype: str, *, matrix: bool = True) -> float:
        """FLOP/s for operands of `dtype`, on the matrix units or (`matrix=False`) on the vector units.

        A missing 16-bit type uses the other one; float8 uses the 16-bit types; everything else float32. Vector units
        run at the float32 rate, except for float64 where the device states it.
        """
        family = "float8" if dtype.startswith("float8") else dtype
        names = _MATRIX_FALLBACKS.get(family, (family,)) if matrix or family == "float64" else ()
        peaks = self.peaks
        return next((peaks[name] for name in names if name in peaks), peaks["float32"])
