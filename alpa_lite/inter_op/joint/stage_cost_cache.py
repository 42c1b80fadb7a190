"""The step of a request in layers, at numbers of micro-batches, under policies of rematerialisation, with stage costs.

    of        every layer under one policy: what stages would take if they followed it            `StageCostCache.of`
    mixed     each layer under a policy of its own, for stages that were chosen                   `StageCostCache.mixed`

Policies are those of parts of layers of about a block each (`layers.subdivided`), so that a backward pass holds the
insides of one block at a time. What a stage of one policy takes does not depend on the policies of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa_lite.inter_op.loop_cuts import is_even, parts_that_may_do
from alpa_lite.inter_op.pins import Pins, pinned_specs
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.stage_costs import MeshKey, StageCosts
from alpa_lite.intra_op.formulate import Builders
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.program.wiring import MAX_TRIPS
from alpa_lite.step.layers import Cut, LayerBalance, Layers, forward_loops, make_layers, natural_cut, subdivided
from alpa_lite.step.recomputation import read_originals_across
from alpa_lite.step.rematerialisation import Remat, rematerialise


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A step as it was traced, its layers, and these in parts of about a block."""

    step: StepGraph
    layers: Layers
    parts: Layers

    @property
    def per_layer(self) -> int:
        """Parts of each layer."""
        return self.parts.num_layers // self.layers.num_layers


@dataclass(kw_only=True)
class StageCostCache:
    """Makes the step of a request as it is asked for, and remembers; its stage costs share what they know.

    num_layers            layers that stages are made of; None: by the model
    stages                numbers of stages that should be possible then
    equal                 what layers have equal shares of
    relative_gap          how close to the best stages are solved
    time_limit_seconds    how long one of them may take
    """

    request: PlanRequest
    num_layers: int | None
    stages: Collection[int]
    equal: LayerBalance
    pins: Pins
    relative_gap: float
    time_limit_seconds: float
    _costs: dict[tuple[int, Cut, Remat], StageCosts] = field(default_factory=dict[tuple[int, Cut, Remat], StageCosts])
    _parts: dict[tuple[int, Cut], _Parts] = field(default_factory=dict[tuple[int, Cut], _Parts])
    _layers: dict[Cut, tuple[StepGraph, Layers]] = field(default_factory=dict[Cut, tuple[StepGraph, Layers]])
    _builders: dict[MeshKey, Builders] = field(default_factory=dict[MeshKey, Builders])
    _structures: dict[object, object] = field(default_factory=dict[object, object])

    @cached_property
    def natural(self) -> Cut:
        """The layers that stages are made of."""
        if self.num_layers is not None:
            return Cut(loop_parts=self.num_layers, num_layers=self.num_layers)
        return natural_cut(self.request.step_at(1, 0), self.stages)

    @property
    def known(self) -> StageCosts:
        """Some of the costs that were asked for."""
        return next(iter(self._costs.values()))

    def at(self, number: int) -> list[StageCosts]:
        """What was asked for at a number of micro-batches, in the most layers first, and those that keep least."""
        keeps_least = [*reversed(Remat)]
        asked = [(key[2], costs) for key, costs in self._costs.items() if key[0] == number]
        ordered = sorted(asked, key=lambda each: (-each[1].layers.num_layers, keeps_least.index(each[0])))
        return [costs for _, costs in ordered]

    def let_take(self, seconds: float) -> None:
        """Let stages take so many seconds each to solve; those that were not solved in less may be now."""
        self.time_limit_seconds = seconds
        self._costs = {key: replace(costs, time_limit_seconds=seconds) for key, costs in self._costs.items()}
        for costs in self._costs.values():
            costs.forget_unsolved()

    def of(self, number: int, cut: Cut, policy: Remat = Remat.NONE) -> StageCosts:
        """Stages of the layers of a cut at a number of micro-batches, whose layers all follow a policy."""
        key = (number, cut, policy)
        if key not in self._costs:
            if policy is Remat.NONE:
                self._costs[key] = self._as_written(number, cut)
            else:
                again = self._again(number, cut, (policy,) * self.of(number, cut).layers.num_layers)
                known = self._parts[number, cut]
                of_op = tuple(None if part is None else part // known.per_layer for part in again.layers.of_op)
                self._costs[key] = again.of_another(again.step, replace(known.layers, of_op=of_op))
        return self._costs[key]

    def mixed(self, number: int, cut: Cut, policies: Sequence[Remat]) -> tuple[StageCosts, int]:
        """Stages of the layers of a cut, or of equally many parts of each, and how many; each layer has its policy.

        What was solved where all layers follow the policy of a stage counts.
        """
        if all(policy is Remat.NONE for policy in policies):
            return self.of(number, cut), 1
        beside = tuple(self.of(number, cut, policy) for policy in dict.fromkeys(policies))
        return replace(self._again(number, cut, policies), beside=beside), self._parts[number, cut].per_layer

    def _as_written(self, number: int, cut: Cut) -> StageCosts:
        step, layers = self._in_layers(number, cut)
        return StageCosts(
            step=read_originals_across(step, layers.of_op),
            layers=layers,
            cost_model=self.request.cost_model,
            seeks_peaks=False,
            relative_gap=self.relative_gap,
            time_limit_seconds=self.time_limit_seconds,
            cost_model_for=self.request.cost_model_for,
            pins=pinned_specs(step, self.pins),
            progress=self.request.progress,
            workers=self.request.workers,
            builders=self._builders,
            structures=self._structures,
        )

    def _in_layers(self, number: int, cut: Cut) -> tuple[StepGraph, Layers]:
        """The step in the layers of a cut: at every number of micro-batches the same, where it runs the same ops."""
        if cut in self._layers:
            known, layers = self._layers[cut]
            step = self.request.step_at(number, known.loop_parts)
            if _is_same_program(known, step):
                return step, layers
        parts = cut.loop_parts
        # Layers that each become a stage are to be even: loops are cut into more parts for that.
        each_a_stage = self.equal == "flops" and parts > 0 and cut == Cut.into(cut.num_layers)
        if each_a_stage:
            parts = parts_that_may_do(self.request.step_at(1, 0), parts, (1.0,) * cut.num_layers)
        while True:
            step = self.request.step_at(number, parts)
            layers = self._made(step, cut)
            if not each_a_stage or parts >= MAX_TRIPS or is_even(step, layers):
                break
            parts = min(2 * parts, MAX_TRIPS)
        self._layers[cut] = step, layers
        return step, layers

    def _made(self, step: StepGraph, cut: Cut) -> Layers:
        equal = cut.equal if self.equal == "flops" else self.equal
        count = cut.num_layers
        if cut == self.natural:
            # Loops over samples look like loops over layers, but are never cut. More layers than ops serve nothing.
            forward = step.phases.count(Phase.FORWARD)
            count = max(1, min(self.stages), min(count, forward))
        return make_layers(step, count, equal=equal, imbalance=cut.imbalance)

    def _again(self, number: int, cut: Cut, policies: Sequence[Remat]) -> StageCosts:
        """Stages of parts of layers, whose layers have each its policy."""
        written = self.of(number, cut)
        if (number, cut) not in self._parts:
            step = self.request.step_at(number, written.step.loop_parts)
            self._parts[number, cut] = _Parts(step=step, layers=written.layers, parts=subdivided(step, written.layers))
        known = self._parts[number, cut]
        remat = policies_of(known.step, known.parts, [p for p in policies for _ in range(known.per_layer)])
        traced = known.parts.of_op
        nothing = (Remat.NONE,) * known.parts.num_layers
        again = rematerialise(read_originals_across(known.step, traced), traced, remat or nothing)
        made = written.of_another(again.step, replace(known.parts, of_op=again.of_op))
        return replace(made, remat=remat, traced_layers=traced)


def _is_same_program(step: StepGraph, other: StepGraph) -> bool:
    """Whether two steps run the same ops: then the same layers serve both, and layers compare between them."""
    return step.phases == other.phases and all(
        (a.primitive, a.operands) == (b.primitive, b.operands)
        for a, b in zip(step.graph.ops, other.graph.ops, strict=True)
    )


def policies_of(step: StepGraph, layers: Layers, wanted: Sequence[Remat]) -> tuple[Remat, ...]:
    """The policy of each layer; the last layer of all keeps everything, as its backward pass follows at once, unless it
    is a loop. Nothing where no layer computes anything again."""
    last = layers.num_layers - 1
    loops = any(layers.of_op[loop] == last for loop in forward_loops(step))
    remat = (*wanted[:last], wanted[last] if loops else Remat.NONE)
    return remat if any(policy is not Remat.NONE for policy in remat) else ()
