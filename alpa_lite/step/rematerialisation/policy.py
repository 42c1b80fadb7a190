"""Policies that decide which forward values a layer stores for its backward pass.

Values that other layers read are stored in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from alpa_lite.program.ir import Graph, Op
from alpa_lite.rules.op_info import rule_of_op


class Remat(StrEnum):
    """What the backward pass of a layer recomputes.

    NONE        nothing: the step as it is written
    SELECTIVE   all but results of contractions with weights (those of attention have few FLOPs and large results)
    FULL        everything: the layer stores only its inputs
    """

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def keeps_results(policy: Remat, graph: Graph, op: Op, batch_dims: Sequence[int | None]) -> bool:
    """Return whether a layer stores the results of a forward op instead of recomputing them."""
    if op.effectful:
        return True
    if policy is not Remat.SELECTIVE:
        return policy is Remat.NONE
    if op.bodies:
        return any(_is_contraction(body, inner) for outer in op.bodies for body, inner in outer.walk())
    weights = (v for v in graph.operands(op) if batch_dims[v.id] is None and v.is_float and v.rank > 1)
    return _is_contraction(graph, op) and any(weights)


def _is_contraction(graph: Graph, op: Op) -> bool:
    return not op.bodies and rule_of_op(graph, op.id).work_kind != "elementwise"
