"""The fastest plan of a family of trainers: a pattern search over the degrees of `Hybrid`.

A family says which degrees its trainers have (`Family`). The search starts at the leanest splitting whose weights and
state take at most half of a device, and then changes one thing at a time, while the predicted step gets shorter (Hooke
and Jeeves, "Direct search solution of numerical and statistical problems", JACM 1961):

    degree × q, degree / q        q the smallest prime factor of what is left, or of the degree         `_scaled`
    degree / q, other · q         from tensor to pipeline parallelism, and the like                      `_traded`
    degree / q, recompute more    and the reverse: of one alone either may not fit                       `_balanced`
    longer pipeline, more chunks  with less tensor parallelism                                           `_deepened`
    samples of a micro-batch      the next larger or smaller divisor of those of a device                `_resized`
    recomputation, ZeRO           the next policy or stage, in both directions                           `_stepped`

A change that helped is tried again before others. Positions are split (context parallelism) only where there is no
pipeline: a plan with both takes seconds. `GridSearch` tries all degrees, in minutes where this takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import Any, Literal

from alpa_lite.errors import AlpaLiteError, InfeasibleError, PlanError
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.schedule import Interleaved1F1B, OneFOneB

Degree = Literal["pipeline", "chunks", "tensor", "context", "expert", "replicas"]
Varied = Literal[Degree, "zero", "remat", "samples"]

REMAT: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
ZERO = (0, 1, 3)
SHARE_OF_STATE = 0.5
"""The part of a device's memory that weights, gradients and state may take where a search begins."""

WORTHWHILE = 0.002
"""The part of a step by which a change must shorten it: prices are not better than that."""


_LESS: tuple[Degree, ...] = ("tensor", "pipeline", "context", "replicas", "chunks", "expert")
_MORE: tuple[Degree, ...] = ("pipeline", "tensor", "replicas", "context")
_TRADED: tuple[Degree, ...] = ("tensor", "pipeline", "context")
_TRADES = tuple(permutations(_TRADED, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What the trainers of a family have in common.

    Attributes:
        name: name for tables.
        varied: the degrees and settings that they have.
        zero: the stage of ZeRO, where the search begins if it is varied.
        target: the target of `Plan.export` for a trainer of this family; "" if there is none.
    """

    name: str
    varied: tuple[Varied, ...]
    zero: int = 0
    target: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DegreePoint:
    """A point of the search: degrees as in `Hybrid`, and the samples of a micro-batch on a data-parallel device."""

    pipeline: int = 1
    chunks: int = 1
    tensor: int = 1
    context: int = 1
    expert: int = 1
    replicas: int = 1
    zero: int = 0
    remat: Literal["none", "selective", "full"] = "none"
    samples: int = 1


_Change = Callable[[DegreePoint], "DegreePoint | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyPlan:
    """The fastest plan of a family that was found.

    Attributes:
        plan: the plan; None if there is none.
        point: its degrees; None without a plan.
        problem: why there is none, a sentence.
        does_not_fit: whether there is none for lack of memory.
        num_plans: plans that were tried for this family alone.
        cut_short: whether the search ended by its time limit, before no change helped.
    """

    family: Family
    plan: Plan | None = None
    point: DegreePoint | None = None
    problem: str = ""
    does_not_fit: bool = False
    num_plans: int = 0
    cut_short: bool = False


@dataclass(kw_only=True)
class DegreeSearch:
    """The plans of one step on one cluster by their degrees; families share those that they have in common.

    Attributes:
        request: the step and the cluster; its number of micro-batches means nothing.
        most_tensor: the most tensor-parallel devices: those that the fastest network joins.
        has_experts: whether weights of the step have a dim of experts, which an expert axis splits.
    """

    request: PlanRequest
    most_tensor: int
    has_experts: bool
    _plans: dict[DegreePoint, Plan | AlpaLiteError] = field(default_factory=dict[DegreePoint, Plan | AlpaLiteError])

    def fastest(
        self, family: Family, starts: Iterable[DegreePoint] | None = None, *, is_over: Callable[[], bool]
    ) -> FamilyPlan:
        """Return the fastest plan of a family.

        Args:
            family: the family.
            starts: points, of which the first that has a plan is where the search begins; None: by memory.
            is_over: says whether the time is up; a first plan is looked for nevertheless.
        """
        before, problem = len(self._plans), None
        for point in self._starts(family) if starts is None else starts:
            found = self.plan_at(point)
            if isinstance(found, Plan):
                best = self._climbed(family, point, found, is_over)
                return replace(best, num_plans=len(self._plans) - before)
            # The user can act on a lack of memory, rather than on degrees that do not divide something.
            if problem is None or (isinstance(found, InfeasibleError) and not isinstance(problem, InfeasibleError)):
                problem = found
        if problem is None:
            problem = (
                self._no_start(family)
                if starts is None
                else PlanError(
                    f"These degrees do not divide a batch of {self.request.batch_size} on "
                    f"{self.request.cluster.num_devices} devices."
                )
            )
        return FamilyPlan(
            family=family,
            problem=str(problem),
            does_not_fit=isinstance(problem, InfeasibleError),
            num_plans=len(self._plans) - before,
        )

    def _climbed(self, family: Family, point: DegreePoint, plan: Plan, is_over: Callable[[], bool]) -> FamilyPlan:
        """Change a point as long as that helps."""
        changes = [*self._changes(family)]
        number = 0
        # Ends where every change was tried in vain since the last that helped.
        while number < len(changes):
            if is_over():
                return FamilyPlan(family=family, plan=plan, point=point, cut_short=True)
            changed = changes[number](point)
            found = None if changed is None else self.plan_at(changed)
            if changed is not None and isinstance(found, Plan) and _seconds(found) < (1 - WORTHWHILE) * _seconds(plan):
                point, plan = changed, found
                changes = [*changes[number:], *changes[:number]]
                number = 0
            else:
                number += 1
        return FamilyPlan(family=family, plan=plan, point=point)

    def _no_start(self, family: Family) -> AlpaLiteError:
        """Return why no degrees were tried: none divides the batch, or none makes the state small enough."""
        cluster, batch = self.request.cluster, self.request.batch_size
        if batch is None:
            return PlanError(f"{family.name} splits samples, but the batch of the step is unknown: give batch_argnums.")
        if not any(self._samples(point) for point in self._splits(family, DegreePoint())):
            return PlanError(
                f"{family.name} has no degrees for a batch of {batch} on {cluster.num_devices} devices: those that it "
                "leaves to data parallelism must divide the batch. Change the batch or the number of hosts."
            )
        return InfeasibleError(
            f"Weights and optimizer state take more than {SHARE_OF_STATE:.0%} of the memory of {cluster.name} under "
            f"all degrees of {family.name}. Use more hosts."
        )

    def plan_at(self, point: DegreePoint) -> Plan | AlpaLiteError:
        """Return the plan of some degrees, or the error that says why there is none."""
        if point not in self._plans:
            planner, num_microbatches = planner_at(point, self.request)
            try:
                self._plans[point] = planner.plan(replace(self.request, num_microbatches=num_microbatches))
            except AlpaLiteError as error:
                self._plans[point] = error
        return self._plans[point]

    def nearest(self, family: Family, point: DegreePoint) -> Iterator[DegreePoint]:
        """Yield a point and those that need less memory: smaller micro-batches, more recomputation, wider splits."""
        for wider in self._splits(family, point):
            same = self._valid(wider, {})
            if same is not None:
                policies, sizes = REMAT[REMAT.index(same.remat) :], dict.fromkeys((same.samples, 1))
                yield from (replace(same, remat=policy, samples=size) for policy in policies for size in sizes)

    def _starts(self, family: Family) -> Iterator[DegreePoint]:
        """Yield points in the order in which they split more, from the first whose state leaves room for the rest."""
        room, devices = self.request.cluster.device.usable_bytes, self.request.cluster.num_devices
        remat = REMAT if "remat" in family.varied else REMAT[:1]
        for point in self._splits(family, DegreePoint(zero=family.zero)):
            left = _left(point, devices)
            if not left or not self._samples(point) or self._state_bytes(point, left) > SHARE_OF_STATE * room:
                continue
            # Whole batches first: micro-batches only save memory where there is no pipeline, and take time.
            sizes = [1] if point.pipeline > 1 or "samples" not in family.varied else [self._samples(point), 1]
            for samples in dict.fromkeys(sizes):
                yield from (replace(point, samples=samples, remat=policy) for policy in remat)

    def _splits(self, family: Family, point: DegreePoint) -> Iterator[DegreePoint]:
        """Yield a point and wider ones: more tensor parallelism, then for the most of it more of other degrees.

        They need not divide the batch: with fewer data-parallel devices a wider one may.
        """
        yield point
        order: tuple[Degree, ...] = ("tensor", "pipeline", "context")
        for degree in (each for each in order if each in family.varied):
            while (left := _left(point, self.request.cluster.num_devices)) > 1:
                wider = _with(point, {degree: getattr(point, degree) * _prime(left)})
                if wider.tensor > self.most_tensor:
                    break
                point = wider
                yield point

    def _state_bytes(self, point: DegreePoint, data: int) -> float:
        """Return the bytes of arguments without samples on one device, as if degrees split all of them evenly.

        Weights are those that micro-batches read; ZeRO-1 splits the others over data-parallel devices, ZeRO-3 all.
        """
        step = self.request.step_at(1, 0)
        graph = step.graph
        read = {v for op in graph.ops if step.phases[op.id].in_loop for v in op.operands}
        held = [v for v in graph.inputs if step.batch_dims[v] is None]
        weights = sum(graph.values[v].bytes for v in held if v in read)
        # A gradient for each weight stands beside it until the update.
        others = sum(graph.values[v].bytes for v in held if v not in read)
        shards = data * point.context // point.replicas
        return (2 * weights / (shards if point.zero >= 3 else 1) + others / (shards if point.zero else 1)) / (
            point.tensor * point.pipeline
        )

    def _changes(self, family: Family) -> Iterator[_Change]:
        """Yield the changes of a point that a family has, those first that help most often."""
        varied = set(family.varied) - (set() if self.has_experts else {"expert"})
        changes: list[tuple[set[Varied], _Change]] = [
            ({"remat"}, partial(_stepped, name="remat", values=REMAT, up=False)),
            ({"samples"}, partial(self._resized, up=True)),
            ({"expert"}, partial(self._scaled, degree="expert", up=True)),
            *(({a, b}, partial(self._traded, degree=a, other=b)) for a, b in _TRADES[:1]),
            ({"chunks"}, partial(self._scaled, degree="chunks", up=True)),
            *(({degree}, partial(self._scaled, degree=degree, up=False)) for degree in _LESS),
            *(({degree, "remat"}, partial(self._balanced, degree=degree, up=False)) for degree in _LESS[:2]),
            ({"tensor", "pipeline", "chunks"}, self._deepened),
            *(({degree}, partial(self._scaled, degree=degree, up=True)) for degree in _MORE),
            *(({degree, "remat"}, partial(self._balanced, degree=degree, up=True)) for degree in _MORE),
            ({"samples"}, partial(self._resized, up=False)),
            ({"remat"}, partial(_stepped, name="remat", values=REMAT, up=True)),
            *(({a, b}, partial(self._traded, degree=a, other=b)) for a, b in _TRADES[1:]),
            ({"zero"}, partial(_stepped, name="zero", values=ZERO, up=True)),
            ({"zero"}, partial(_stepped, name="zero", values=ZERO, up=False)),
        ]
        yield from (change for needed, change in changes if needed <= varied)

    def _scaled(self, point: DegreePoint, degree: Degree, *, up: bool) -> DegreePoint | None:
        """Return a point with a degree multiplied or divided by its smallest prime factor; None if there is none."""
        value = getattr(point, degree)
        if not up:
            return self._valid(point, {degree: value // _prime(value)}) if value > 1 else None
        if degree == "chunks":
            return self._valid(point, {degree: 2 * value}) if point.pipeline > 1 else None
        if degree == "context" and point.pipeline > 1:
            return None
        left = _left(point, self.request.cluster.num_devices) // (point.replicas * point.expert)
        return self._valid(point, {degree: value * _prime(left)}) if left > 1 else None

    def _traded(self, point: DegreePoint, degree: Degree, other: Degree) -> DegreePoint | None:
        """Return a point with a prime factor of a degree moved to another one; None if the degree is 1."""
        value = getattr(point, degree)
        if value == 1:
            return None
        factor = _prime(value)
        return self._valid(point, {degree: value // factor, other: getattr(point, other) * factor})

    def _balanced(self, point: DegreePoint, degree: Degree, *, up: bool) -> DegreePoint | None:
        """Return a point that splits less and recomputes more, or the reverse: of one alone either may not fit."""
        scaled = self._scaled(point, degree, up=up)
        return None if scaled is None else _stepped(scaled, "remat", REMAT, up=not up)

    def _deepened(self, point: DegreePoint) -> DegreePoint | None:
        """Return a point with a longer pipeline, less tensor parallelism, and more chunks for the longer bubble."""
        traded = self._traded(point, "tensor", "pipeline")
        return None if traded is None else self._scaled(traded, "chunks", up=True)

    def _resized(self, point: DegreePoint, *, up: bool) -> DegreePoint | None:
        """Return a point with the next larger or smaller micro-batches; None if there are none."""
        sizes = divisors(self._samples(point))
        place = sizes.index(point.samples) + (1 if up else -1)
        return replace(point, samples=sizes[place]) if 0 <= place < len(sizes) else None

    def _valid(self, point: DegreePoint, changes: Mapping[str, Any]) -> DegreePoint | None:
        """Return a changed point with micro-batches that its devices divide; None if there is no such plan."""
        changed = _with(point, changes)
        if changed.pipeline == 1:
            changed = replace(changed, chunks=1)
        room = self._samples(changed)
        if not room or changed.tensor > self.most_tensor:
            return None
        return replace(changed, samples=math.gcd(changed.samples, room))

    def _samples(self, point: DegreePoint) -> int:
        """Return the samples of a step on each data-parallel device; 0 if the degrees do not divide them."""
        left, batch = _left(point, self.request.cluster.num_devices), self.request.batch_size or 0
        ways = point.replicas * point.expert
        return batch // left if left and left % ways == 0 and batch % left == 0 else 0


def planner_at(point: DegreePoint, request: PlanRequest) -> tuple[Hybrid, int]:
    """Return the planner of some degrees, and the micro-batches of a step: at least one, and no part of one."""
    left = _left(point, request.cluster.num_devices)
    hybrid = Hybrid(
        pipeline=point.pipeline,
        data=left or None,
        tensor=point.tensor,
        context=point.context,
        expert=point.expert,
        replicas=point.replicas,
        zero=point.zero,
        remat=point.remat,
        projections=point.tensor > 1,
        schedule=Interleaved1F1B(num_chunks=point.chunks) if point.chunks > 1 else OneFOneB(),
    )
    return hybrid, max(1, (request.batch_size or 1) // (max(1, left) * point.samples))


def _left(point: DegreePoint, devices: int) -> int:
    """Return the data-parallel devices that the other degrees leave; 0 if they do not divide the devices."""
    others = point.pipeline * point.tensor * point.context
    return devices // others if devices % others == 0 else 0


def _stepped(point: DegreePoint, name: str, values: tuple[Any, ...], *, up: bool) -> DegreePoint | None:
    place = values.index(getattr(point, name)) + (1 if up else -1)
    return _with(point, {name: values[place]}) if 0 <= place < len(values) else None


def _with(point: DegreePoint, changes: Mapping[str, Any]) -> DegreePoint:
    return replace(point, **changes)


def _prime(number: int) -> int:
    """Return the smallest prime factor of a number above 1."""
    return next((q for q in range(2, math.isqrt(number) + 1) if number % q == 0), number)


def _seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds
