"""Stage costs of a request's step, by number of micro-batches, cut into layers, and policy of rematerialisation.

    of        every layer under one policy: the costs of stages that follow it                    `StageCostCache.of`
    mixed     each layer under a policy of its own, for stages that were chosen                   `StageCostCache.mixed`

Policies apply to parts of layers of about a block each (`layers.subdivided`), so that a backward pass holds the
insides of one block at a time. The costs of a stage do not depend on the policies of the other stages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa_lite.inter_op.loop_cuts import is_even, parts_that_may_do
from alpa_lite.inter_op.plan_request import Pins, PlanRequest, pinned_specs
from alpa_lite.inter_op.solved_stages import SolvedStages
from alpa_lite.inter_op.stage_costs import Recomputed, SolveEffort, StageConstraints, StageCosts
from alpa_lite.program.ir import MAX_TRIPS
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.step.clustering import make_layers, subdivided
from alpa_lite.step.layers import Cut, LayerBalance, Layers, natural_cut
from alpa_lite.step.planned_step import planned_step, policies_of
from alpa_lite.step.recomputation import Remat


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A step as traced, its layers, and the same layers in parts of about a block."""

    step: StepGraph
    layers: Layers
    parts: Layers

    @property
    def per_layer(self) -> int:
        """The number of parts of each layer."""
        return self.parts.num_layers // self.layers.num_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Layering:
    """The cut of a step into the layers of which stages consist.

    Attributes:
        num_layers: number of layers; None: by the model.
        stages: numbers of stages that the layers should allow.
        equal: the quantity of which layers have equal shares.
    """

    num_layers: int | None
    stages: Collection[int]
    equal: LayerBalance


@dataclass(frozen=True, kw_only=True)
class StageCostCache:
    """Stage costs of the step of a request, made on demand and memoised; all share strategies and solved stages.

    Attributes:
        effort: the effort of solving stages.
        usual: the number of micro-batches for which layers are made; others with the same ops have the same layers.
        solved: the stages solved so far.
    """

    request: PlanRequest
    layering: Layering
    pins: Pins
    effort: SolveEffort
    usual: int = 1
    solved: SolvedStages = field(default_factory=SolvedStages, repr=False)

    @cached_property
    def natural(self) -> Cut:
        """The cut into the layers of which stages consist."""
        if self.layering.num_layers is not None:
            return Cut(loop_parts=self.layering.num_layers, num_layers=self.layering.num_layers)
        return natural_cut(self.request.step_at(1, 0), self.layering.stages)

    @property
    def known(self) -> StageCosts:
        """Stage costs of the natural cut at the usual number of micro-batches."""
        return self.of(self.usual, self.natural)

    @memoized
    def of(self, number: int, cut: Cut, policy: Remat = Remat.NONE) -> StageCosts:
        """Return the costs of stages of the layers of a cut, at a number of micro-batches, under one policy."""
        if policy is Remat.NONE:
            return self._as_written(number, cut)
        again = self._again(number, cut, (policy,) * self.of(number, cut).layers.num_layers)
        known = self._parts(number, cut)
        of_op = tuple(None if part is None else part // known.per_layer for part in again.layers.of_op)
        return replace(again, layers=replace(known.layers, of_op=of_op), recomputed=Recomputed())

    def mixed(self, number: int, cut: Cut, policies: Sequence[Remat]) -> tuple[StageCosts, int]:
        """Return the costs of stages whose layers have a policy each, and into how many parts each layer is cut there.

        Stages that were solved where all layers follow the policy of a stage are known here too.
        """
        if all(policy is Remat.NONE for policy in policies):
            return self.of(number, cut), 1
        return self._again(number, cut, policies), self._parts(number, cut).per_layer

    def _as_written(self, number: int, cut: Cut) -> StageCosts:
        step, layers = self._in_layers(number, cut)
        planned = planned_step(step, layers.of_op).step
        return StageCosts(
            step=planned,
            layers=layers,
            cost_model=self.request.cost_model,
            cost_model_for=self.request.cost_model_for,
            constraints=StageConstraints(pins=pinned_specs(step, self.pins)),
            effort=self.effort,
            progress=self.request.progress,
            workers=self.request.workers,
            solved=self.solved,
            as_traced=None if planned is step else step,
        )

    @memoized
    def _in_layers(self, number: int, cut: Cut) -> tuple[StepGraph, Layers]:
        """Return the step and its layers: the same natural layers at every number of micro-batches with the same ops,
        since what is known of a layer at one number is used at others.
        """
        if cut == self.natural and number != self.usual:
            usual, layers = self._in_layers(self.usual, cut)
            step = self.request.step_at(number, usual.loop_parts)
            if _is_same_program(usual, step):
                return step, layers
        parts = cut.loop_parts
        # Layers that each become a stage should be even, for which loops may have to be cut into more parts.
        each_a_stage = self.layering.equal == "flops" and parts > 0 and cut == Cut.into(cut.num_layers)
        if each_a_stage:
            # The estimate needs a step whose loops are whole.
            parts = parts_that_may_do(self.request.step_at(1, 0), parts, (1.0,) * cut.num_layers)
        while True:
            step = self.request.step_at(number, parts)
            layers = self._made(step, cut)
            if not each_a_stage or parts >= MAX_TRIPS or is_even(step, layers):
                break
            parts = min(2 * parts, MAX_TRIPS)
        return step, layers

    def _made(self, step: StepGraph, cut: Cut) -> Layers:
        equal = cut.equal if self.layering.equal == "flops" else self.layering.equal
        count = cut.num_layers
        if cut == self.natural:
            # Loops over samples look like loops over layers, but are never cut, so that there may be fewer ops than
            # layers.
            forward = step.phases.count(Phase.FORWARD)
            count = max(1, min(self.layering.stages), min(count, forward))
        return make_layers(step, count, equal=equal, imbalance=cut.imbalance, shares=cut.shares)

    def _again(self, number: int, cut: Cut, policies: Sequence[Remat]) -> StageCosts:
        """Return the costs of stages of parts of layers; each layer has its policy."""
        known = self._parts(number, cut)
        remat = policies_of(known.step, known.parts, [p for p in policies for _ in range(known.per_layer)])
        planned = planned_step(known.step, known.parts.of_op, remat)
        return replace(
            self.of(number, cut),
            step=planned.step,
            layers=replace(known.parts, of_op=planned.of_op),
            recomputed=Recomputed(remat=remat, traced_layers=known.parts.of_op),
            as_traced=None,
        )

    @memoized
    def _parts(self, number: int, cut: Cut) -> _Parts:
        written = self.of(number, cut)
        step = self.request.step_at(number, written.step.loop_parts)
        return _Parts(step=step, layers=written.layers, parts=subdivided(step, written.layers))


def _is_same_program(step: StepGraph, other: StepGraph) -> bool:
    """Return True if two steps run the same ops, so that the layers of one are valid for the other."""
    return step.phases == other.phases and all(
        (a.primitive, a.operands) == (b.primitive, b.operands)
        for a, b in zip(step.graph.ops, other.graph.ops, strict=True)
    )
