"""The cost of each op of a stage: the estimator that prices tasks, which also records an entry per op."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from alpa_lite.inspection.why.stage_problem import StageProblem
from alpa_lite.intra_op.solve import drive
from alpa_lite.plan.pricing import Estimator
from alpa_lite.plan.walk import Application, Walk
from alpa_lite.program.ir import Op, Value, Wiring
from alpa_lite.program.phases import Phase
from alpa_lite.sharding.specs import Move
from alpa_lite.text import short_source

PRODUCTS, PASSES, OPAQUE = "matrix products", "passes over arrays", "ops without a sharding rule"
"""The kinds of kernels between which the advice distinguishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The cost of one op per step and device, without collectives: seconds, FLOPs, and bytes moved after fusion."""

    source: str
    primitive: str
    what: str
    phase: str
    dtype: str
    seconds: float
    flops: float
    bytes: float


class Ledger:
    """An interpreter of the walk that prices ops as `Estimator` does and records each."""

    def __init__(self, estimator: Estimator, opaque: Collection[str]) -> None:
        """Wrap an estimator; `opaque` are the primitives without a sharding rule."""
        self.estimator = estimator
        self.opaque = opaque
        self.entries: list[Entry] = []

    def literal(self, value: Value) -> int:
        """Price a scalar, which is free."""
        return self.estimator.literal(value)

    def reshard(self, array: int, value: Value, steps: tuple[Move, ...], op: Op | None) -> int:
        """Price a reshard as free: its collectives are listed by the plan."""
        return self.estimator.reshard(array, value, steps, op)

    def apply(self, application: Application, operands: list[int]) -> list[int]:
        """Price one op and record its entry."""
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
        """Price a loop or branch; the walk runs the ops of the bodies on this interpreter, so they are recorded too."""
        return self.estimator.control_flow(application, operands, wiring, walk)


def entries_of(stage: StageProblem, opaque: Collection[str]) -> list[Entry]:
    """Return the entries of a stage's ops as they are planned, phase by phase."""
    choice, found = stage.as_planned.choice, list[Entry]()
    assert choice is not None
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        runs = stage.view.step.num_microbatches if phase.in_loop else 1
        ledger = Ledger(Estimator(stage.pricer, stage=0, phase=phase.value, runs=runs), opaque)
        drive(stage.view, stage.pricer, choice, phase, ledger)
        found += ledger.entries
    return found
