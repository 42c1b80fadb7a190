"""The degrees of a plan: what each axis of its meshes splits, as trainers with fixed forms of parallelism count it.

A trainer of this kind knows data, tensor, pipeline, context and expert parallelism, with one degree of each for the
whole model. The degrees of a plan are read off its specs, whoever chose them (`degrees_of`). An axis stands for the
first of these that holds:

    context    it splits arguments of the batch along another dim than their samples, and no weights in products
    expert     it splits experts in products with weights, and no other dims of weights (`product_axes`)
    data       it splits arguments along their samples
    tensor     it splits dims of weights in products
    data       it splits samples in products, of arguments that arrive whole
    tensor     it splits weights at rest

ZeRO is what the data and expert axes split besides samples and experts, by most of its bytes: optimizer state (1), sums
of gradients (2), weights (3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from alpa_lite.errors import PlanError
from alpa_lite.export.product_axes import ProductAxes
from alpa_lite.lower.plan_fits import as_planned
from alpa_lite.plan.parts import StagePlan
from alpa_lite.plan.plan import Plan
from alpa_lite.program.phases import StepGraph
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.recomputation import Remat
from alpa_lite.step.split import StepPrograms
from alpa_lite.step.written_recomputation import written_recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """What all stages of a plan have in common.

    Attributes:
        pipeline: groups of devices, each with one stage or, in an interleaved schedule, `chunks` of them.
        chunks: stages of each group.
        replicas: groups of data-parallel devices that hold whole copies of what `zero` splits within them.
        data: data-parallel devices of a group of replicas.
        tensor, context, expert: devices that share weights, positions, and experts.
        zero: the stage of ZeRO, 0 to 3.
        sequence_parallel: whether sums over tensor-parallel devices are scattered.
        recompute: policy of recomputation in the backward pass, of the plan or of the step itself: "none", "selective"
            or "full".
        schedule: name of the schedule of the pipeline.
        num_microbatches: micro-batches of a step.
        batch_size: samples of a step.
        stored: the degrees, of "data", "context" and "expert", over which ZeRO splits what `zero` says.
        axes: the degrees above 1 but `chunks`, in the order of the devices: the first lies over the most distant ones.
    """

    pipeline: int
    chunks: int
    replicas: int
    data: int
    tensor: int
    context: int
    expert: int
    zero: int
    sequence_parallel: bool
    recompute: str
    schedule: str
    num_microbatches: int
    batch_size: int
    stored: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]

    @property
    def words(self) -> str:
        """The degrees above 1 and what else splits, such as `4 pipeline × 2 tensor × 8 data, ZeRO-1`."""
        degrees = {
            "pipeline": self.pipeline,
            "chunks": self.chunks,
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
            "data": self.data,
            "replicas": self.replicas,
        }
        shown = " × ".join(f"{degree} {name}" for name, degree in degrees.items() if degree > 1) or "no parallelism"
        return (
            shown
            + (f", ZeRO-{self.zero}" if self.zero else "")
            + (", sequence parallel" if self.sequence_parallel else "")
        )

    @property
    def ways(self) -> int:
        """The number of parts into which the samples of a micro-batch are split."""
        return self.replicas * self.data * self.expert

    @property
    def microbatch_samples(self) -> int:
        """The samples of a micro-batch on one data-parallel device."""
        return self.batch_size // (self.num_microbatches * self.ways)


def programs_of(plan: Plan) -> StepPrograms:
    """Return the step that a plan was made for. Raises `PlanError` for a plan from a file."""
    programs = getattr(plan.request, "steps", None)
    if not isinstance(programs, StepPrograms):
        raise PlanError(
            f"{plan!r} is from a file, which holds no step: its shardings by path do not suffice. Replay the plan "
            "first, al.plan(step, *args, planner=plan), and export what that returns."
        )
    return programs


def degrees_of(plan: Plan) -> ParallelDegrees:
    """Return the degrees of a plan. Raises `PlanError` if its stages are not split alike, or not as any degree says."""
    first = plan.stages[0]
    sizes = first.mesh_shape.axis_sizes
    if any(dict(stage.mesh_shape.axis_sizes) != dict(sizes) for stage in plan.stages):
        raise PlanError(
            f"The stages of {plan.name} lie on different meshes: {', '.join(str(s.mesh_shape) for s in plan.stages)}. "
            "Trainers with one degree for the whole model take plans of equal stages: al.planners.GridSearch()."
        )
    if plan.batch is None:
        raise PlanError(f"{plan.name} knows no batch, of which degrees of data parallelism split the samples.")
    step = as_planned(programs_of(plan).with_equations(plan.num_microbatches, plan.loop_parts), plan).step
    splits = _Splits.of(plan, step)
    roles = {axis: splits.role(axis) for axis, size in sizes.items() if size > 1}
    of_role = {role: [axis for axis in roles if roles[axis] == role] for role in (*_ROLES, "")}
    if of_role[""]:
        raise PlanError(
            f"The axes {', '.join(of_role[''])} of {plan.name} split neither samples nor weights of the step, which no "
            "degree of a trainer stands for."
        )
    zero = splits.zero([*of_role["data"], *of_role["expert"]])
    # What is split over the inner axes and whole along the outer ones is held once per group of replicas.
    within = [axis for axis in of_role["data"] if not zero or splits.zero([axis])]
    # Axes of which each splits some arrays, and only together most, are one degree.
    if not within and splits.zero(of_role["data"]):
        within = of_role["data"]
    schedule, count = plan.schedule, len(plan.stages)
    pipeline = len({schedule.processor_of(stage, count) for stage in range(count)})
    shown = {axis: "replicas" if role == "data" and axis not in within else role for axis, role in roles.items()}
    return ParallelDegrees(
        pipeline=pipeline,
        chunks=schedule.stages_per_processor,
        replicas=prod(sizes[axis] for axis in of_role["data"] if axis not in within),
        data=prod(sizes[axis] for axis in within),
        tensor=prod(sizes[axis] for axis in of_role["tensor"]),
        context=prod(sizes[axis] for axis in of_role["context"]),
        expert=prod(sizes[axis] for axis in of_role["expert"]),
        zero=zero,
        sequence_parallel=any(
            use.kind == "reduce_scatter" and set(use.axis.split("·")) <= set(of_role["tensor"])
            for use in plan.prediction.collectives
        ),
        recompute=_recompute(plan),
        schedule=schedule.name if count > 1 else "",
        num_microbatches=plan.num_microbatches,
        batch_size=plan.batch.size,
        stored=tuple(role for role in ("data", "context", "expert") if zero and splits.zero(of_role[role]) == zero),
        axes=(*((("pipeline", pipeline),) if pipeline > 1 else ()), *((shown[axis], sizes[axis]) for axis in roles)),
    )


_ROLES = ("data", "context", "expert", "tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """An array that a stage holds: what it is, the axes that split it, and those of them that split experts."""

    kind: Literal["weights", "state", "sums"]
    axes: frozenset[str]
    of_experts: frozenset[str]
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """What the mesh axes split: arguments with samples, what is stored, and products."""

    samples: frozenset[str]
    positions: frozenset[str]
    stored: tuple[_Stored, ...]
    products: ProductAxes

    @staticmethod
    def of(plan: Plan, step: StepGraph) -> _Splits:
        """Collect the axes from the specs of the inputs and sums of all stages, and from their products."""
        products = ProductAxes.of(plan.stages, step)
        samples, positions = set[str](), set[str]()
        for stage in plan.stages:
            for value, spec in _arguments(stage, step):
                if (dim := step.batch_dims[value]) is not None:
                    samples.update(spec.dims[dim])
                    positions |= Spec((*spec.dims[:dim], *spec.dims[dim + 1 :])).axes
        stored = (each for stage in plan.stages for each in _stored(stage, step, products))
        return _Splits(
            samples=frozenset(samples), positions=frozenset(positions), stored=tuple(stored), products=products
        )

    def role(self, axis: str) -> str:
        """Return the form of parallelism that an axis stands for; "" if it splits nothing of the step."""
        for role, split in (
            # Sequence parallelism scatters positions over tensor-parallel devices, tokens included.
            ("context", self.positions - self.products.weights),
            ("expert", self.products.experts),
            ("data", self.samples),
            ("tensor", self.products.weights),
            ("data", self.products.samples),
            ("tensor", {axis for each in self.stored if each.kind != "sums" for axis in each.axes}),
        ):
            if axis in split:
                return role
        return ""

    def zero(self, axes: Sequence[str]) -> int:
        """Return the stage of ZeRO that axes stand for."""
        if self._split("weights", axes):
            return 3
        return 0 if not self._split("state", axes) else 2 if self._split("sums", axes) else 1

    def _split(self, kind: str, axes: Sequence[str]) -> bool:
        """Return whether axes split most bytes of a kind; a small array may be split for no price in any plan."""
        # Arrays with experts on these axes have no choice: what the others do tells.
        found = [each for each in self.stored if each.kind == kind and not each.of_experts & set(axes)]
        return 2 * sum(each.bytes for each in found if each.axes & set(axes)) > sum(each.bytes for each in found)


def _arguments(stage: StagePlan, step: StepGraph) -> Iterator[tuple[int, Spec]]:
    return ((value, spec) for value, spec in stage.inputs.items() if step.graph.producer[value] is None)


def _stored(stage: StagePlan, step: StepGraph, products: ProductAxes) -> Iterator[_Stored]:
    graph = step.graph
    in_loop = {v for op in graph.ops if step.phases[op.id].in_loop for v in op.operands}

    def stored(kind: Literal["weights", "state", "sums"], value: int, spec: Spec) -> _Stored:
        of_experts = products.expert_axes(value, spec)
        return _Stored(kind=kind, axes=Spec(spec.dims).axes, of_experts=of_experts, bytes=graph.values[value].bytes)

    for value, spec in _arguments(stage, step):
        if step.batch_dims[value] is None:
            yield stored("weights" if value in in_loop else "state", value, spec)
    for value, sums in stage.accumulators.items():
        yield stored("sums", value, sums.stored)


def _recompute(plan: Plan) -> str:
    """Return the policy of the plan, or that of the step itself where it recomputes more."""
    if plan.host_optimizer or Remat.OFFLOAD in plan.remat:
        raise PlanError(
            f"{plan.name} lets arrays wait in the memory of the host, which trainers have other options for. Plan "
            'with Auto(host_memory=False), or with remat="none" and without host_optimizer.'
        )
    policies = {policy for policy in plan.remat if policy is not Remat.NONE}
    if len(policies) > 1:
        raise PlanError(
            f"Layers of {plan.name} recompute by different policies ({plan.recomputed}), and trainers have one for "
            "all. Plan with Hybrid(remat=…)."
        )
    return str(max([*policies, written_policy(plan)], key=list(Remat).index))


def written_policy(plan: Plan) -> Remat:
    """Return the policy that a step's own recomputation amounts to. Raises `PlanError` for a plan from a file."""
    step = programs_of(plan).at(plan.num_microbatches)
    return written_recomputation(step, plan.request.cost_model.backend.fused_attention)
