"""Work: what one device computes, before any device is chosen.

    w * n = n kernels of the size of w, so flops and bytes grow n times      (Work.__mul__)

The number of kernels is kept beside the totals: a loop of 1000 small matmuls must not be priced as one large matmul.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from cost_models.checks import require_amount, require_choice

WorkKind = Literal["matmul", "convolution", "elementwise"]
WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point operations and memory traffic of equal kernels on one device.

    Attributes:
        flops: floating-point operations, all kernels together; a multiply-add counts 2.
        bytes: bytes read from and written to device memory, all kernels together.
        kind: "matmul" and "convolution" run on matrix units as kernels of their own; "elementwise" is everything else
            (reductions and copies too), which compilers fuse with its neighbours.
        dtype: name of the operand type, as numpy and JAX spell it ("float32", "bfloat16", ...).
        num_kernels: how many equal kernels `flops` and `bytes` are the totals of.

    Raises:
        CostModelError: a negative or infinite amount, or an unknown kind.
    """

    flops: float = 0
    bytes: float = 0
    kind: WorkKind = "elementwise"
    dtype: str = "float32"
    num_kernels: float = 1

    def __post_init__(self) -> None:
        require_amount("Work.flops", self.flops, advice="count the floating-point operations")
        require_amount("Work.bytes", self.bytes, advice="count the bytes read and written")
        require_amount("Work.num_kernels", self.num_kernels, advice="count the kernels, or leave it at 1")
        require_choice("Work.kind", self.kind, WORK_KINDS)

    def __mul__(self, count: float) -> Work:
        """The same kernels `count` times (a trip count; 0 leaves no work)."""
        require_amount("The count that multiplies a Work", count, advice="give the trip count of the loop")
        return replace(self, flops=self.flops * count, bytes=self.bytes * count, num_kernels=self.num_kernels * count)

    __rmul__ = __mul__
