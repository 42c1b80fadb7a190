"""Parameters that stay gathered from the forward to the backward pass: what the backward pass makes of them alone.

The turned kernel of a convolution, say, is made of the kernel as it was gathered, not of its part, of which it would
have to be gathered once more.
"""

from __future__ import annotations

from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.strategies import AxisRole, Restriction
from alpa_lite.program.ir import Op
from alpa_lite.program.phases import Phase
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.loop_invariants import parameters


def reads_gathered(view: StageView, op: Op, operand: int) -> bool:
    """Whether an op makes something for the backward pass alone of a parameter that the forward pass reads itself."""
    graph, phases, v = view.graph, view.step.phases, op.operands[operand]
    if not view.keeps_gathered or not parameters(view.step).issuperset((v, *op.results)):
        return False
    beside = any(phases[c] is Phase.FORWARD for c in graph.consumers[v])
    return beside and all(phases[c] is Phase.BACKWARD for r in op.results for c in graph.consumers[r])


def gathered(spec: Spec, restriction: Restriction) -> Spec:
    """The spec of a parameter that is split over BATCH axes no more."""
    kept = tuple(tuple(a for a in dim if restriction.role(a) is not AxisRole.BATCH) for dim in spec.dims)
    return Spec(kept, spec.partial)
