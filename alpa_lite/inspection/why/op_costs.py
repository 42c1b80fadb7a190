"""What each op of a stage takes: the estimator that prices tasks, with an entry for every op that it is given."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from alpa_lite.inspection.why.stage_problem import StageProblem
from alpa_lite.intra_op.solve import drive
from alpa_lite.plan.pricing import Estimator
from alpa_lite.plan.walk import Application, Walk
from alpa_lite.program.ir import Op, Value
from alpa_lite.program.phases import Phase
from alpa_lite.program.wiring import Wiring
from alpa_lite.sharding.specs import Move
from alpa_lite.text import short_source

PRODUCTS, PASSES, OPAQUE = "matrix products", "passes over arrays", "ops without a sharding rule"
"""What kernels do, as far as advice differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one op takes per step and device, without collectives: seconds, FLOPs, bytes moved after fusion."""

    source: str
    primitive: str
    what: str
    phase: str
    dtype: str
    seconds: float
    flops: float
    bytes: float


class Ledger:
    """A machine that prices ops as `Estimator` does, and writes down each."""

    def __init__(self, estimator: Estimator, opaque: Collection[str]) -> None:
        """Wrap an estimator; `opaque`: primitives that have no rule."""
        self.estimator = estimator
        self.opaque = opaque
        self.entries: list[Entry] = []

    def literal(self, value: Value) -> int:
        """Scalars are free."""
        return self.estimator.literal(value)

    def reshard(self, array: int, value: Value, steps: tuple[Move, ...], op: Op | None) -> int:
        """Moves are collectives, which the plan lists."""
        return self.estimator.reshard(array, value, steps, op)

    def apply(self, application: Application, operands: list[int]) -> list[int]:
        """One op, and its entry."""
        estimator, op = self.estimator, application.op
        seconds, flops = estimator.compute_seconds, estimator.flops
        made = estimator.apply(application, operands)
        times = estimator.trips * estimator.runs
        work = estimator.pricer.op_work(application.graph, op, application.placement)
        self.entries.append(
            Entry(
                source=short_source(op.source),
                primitive=op.primitive,
                what=OPAQUE if op.primitive in self.opaque else PASSES if work.kind == "elementwise" else PRODUCTS,
                phase=estimator.phase,
                dtype=work.dtype,
                seconds=(estimator.compute_seconds - seconds) * estimator.runs,
                flops=(estimator.flops - flops) * estimator.runs,
                bytes=work.bytes * times,
            )
        )
        return made

    def control_flow(self, application: Application, operands: list[int], wiring: Wiring, walk: Walk[int]) -> list[int]:
        """The ops of bodies come back to this machine, for it is that of the walk."""
        return self.estimator.control_flow(application, operands, wiring, walk)


def entries_of(stage: StageProblem, opaque: Collection[str]) -> list[Entry]:
    """The ops of a stage as they are planned, phase by phase."""
    choice, found = stage.as_planned.choice, list[Entry]()
    assert choice is not None
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        runs = stage.view.step.num_microbatches if phase.in_loop else 1
        ledger = Ledger(Estimator(stage.pricer, stage=0, phase=phase.value, runs=runs), opaque)
        drive(stage.view, stage.pricer, choice, phase, ledger)
        found += ledger.entries
    return found
