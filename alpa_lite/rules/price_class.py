"""Which ops have the same prices under the same placements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from alpa_lite.program.ir import Graph
from alpa_lite.program.memo import kept
from alpa_lite.rules.fusion import Access, accesses, on_chip
from alpa_lite.rules.op_info import OpClass, op_class
from cost_models.backend import Fusion


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PriceClass:
    """The class of an op, what it moves, and what part it has in a fused attention kernel.

    A class is one object, in all graphs, but for ops with bodies.
    """

    op: OpClass
    access: Access
    in_attention: bool
    half_masked: bool


@kept
def price_classes(graph: Graph, fusion: Fusion = "all", fused_attention: bool = False) -> tuple[PriceClass, ...]:
    """For each op what it has in common with others that have the same prices under the same placements."""
    table = accesses(graph, fusion=fusion, fused_attention=fused_attention)
    kernels = on_chip(graph) if fused_attention else None
    return tuple(
        # A table of all classes would keep bodies alive.
        (_class_of if op.bodies else _class)(
            op_class(graph, op.id),
            access,
            kernels is not None and op.id in kernels.products,
            kernels is not None and op.id in kernels.half_masked,
        )
        for op, access in zip(graph.ops, table, strict=True)
    )


def _class_of(op: OpClass, access: Access, in_attention: bool, half_masked: bool) -> PriceClass:
    return PriceClass(op=op, access=access, in_attention=in_attention, half_masked=half_masked)


@lru_cache(maxsize=50_000)
def _class(op: OpClass, access: Access, in_attention: bool, half_masked: bool) -> PriceClass:
    return _class_of(op, access, in_attention, half_masked)
