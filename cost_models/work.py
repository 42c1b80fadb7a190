"""Describe the work that one device computes, independent of any device.

    w * n = n kernels of the size of w, so flops and bytes grow n times      (Work.__mul__)

The number of kernels is stored next to the totals: a loop of 1000 small matmuls must not be priced as one large matmul.
A product keeps its shape, [count, rows, depth] x [count, depth, columns], because small and oddly shaped ones waste
part of a device; flops = 2 * count * rows * columns * depth of each kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from cost_models.checks import require_amount, require_choice

WorkKind = Literal["matmul", "convolution", "attention", "elementwise"]
WORK_KINDS: tuple[WorkKind, ...] = get_args(WorkKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The shape of one matrix product, or of the one that a convolution amounts to, on one device.

    Attributes:
        rows, columns, depth: sizes of the operands, [rows, depth] x [depth, columns].
        count: number of products of this shape in one kernel (batched products).

    Raises:
        CostModelError: a size that is not above 0.
    """

    rows: float
    columns: float
    depth: float
    count: float = 1

    def __post_init__(self) -> None:
        for what in ("rows", "columns", "depth", "count"):
            value = getattr(self, what)
            require_amount(f"Product.{what}", value, advice="give the sizes of the local blocks", positive=True)

    @property
    def flops(self) -> float:
        """Floating-point operations; a multiply-add counts 2."""
        return 2 * self.count * self.rows * self.columns * self.depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point operations and memory traffic of equal kernels on one device.

    Attributes:
        flops: floating-point operations, all kernels together; a multiply-add counts 2.
        bytes: bytes read from and written to device memory, all kernels together.
        kind: "matmul" and "convolution" run on matrix units as kernels of their own, "attention" as products inside a
            fused kernel; "elementwise" is everything else (reductions and copies too), which compilers fuse with its
            neighbours.
        dtype: name of the operand type, as numpy and JAX spell it ("float32", "bfloat16", ...).
        num_kernels: number of equal kernels that `flops` and `bytes` total; element-wise work that is fused into
            the kernel of its neighbours has none of its own.
        product: the shape of each kernel, for "matmul" and "convolution"; None where it is unknown.

    Raises:
        CostModelError: a negative or infinite amount, or an unknown kind.
    """

    flops: float = 0
    bytes: float = 0
    kind: WorkKind = "elementwise"
    dtype: str = "float32"
    num_kernels: float = 1
    product: Product | None = None

    def __post_init__(self) -> None:
        require_amount("Work.flops", self.flops, advice="count the floating-point operations")
        require_amount("Work.bytes", self.bytes, advice="count the bytes read and written")
        require_amount("Work.num_kernels", self.num_kernels, advice="count the kernels, or leave it at 1")
        require_choice("Work.kind", self.kind, WORK_KINDS)

    def __mul__(self, count: float) -> Work:
        """Return the work of `count` repetitions (a trip count; 0 for no work)."""
        require_amount("The count that multiplies a Work", count, advice="give the trip count of the loop")
        return replace(self, flops=self.flops * count, bytes=self.bytes * count, num_kernels=self.num_kernels * count)

    __rmul__ = __mul__
