"""The plan: all decisions about running a step, as frozen, JSON-serialisable data.

The automatic search and manual planners return the same `Plan`, which is the only input of lowering, running and
explaining. A plan refers to ops and values by their id in the traced graph; `fingerprint` ties it to that graph.

A plan from a file is checked for consistency in itself, so that lowering can rely on it for any step (`check_plan`):

    stages      follow each other without gaps; submeshes lie in the cluster and match the devices of their meshes
    layers      of ops, inputs and recomputed layers exist
    specs       use axes of their stage's mesh, each once
    prediction  refers to existing stages, with numbers that times and sizes can have

Whether the plan fits the ops of a given step is checked by `lower.plan_fits`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain, groupby
from math import prod
from pathlib import Path
from typing import Any

from alpa_lite.errors import MismatchError, PlanError
from alpa_lite.plan.codec import decode, encode, hints_of, read_file, to_text
from alpa_lite.plan.parts import Accumulator as Accumulator
from alpa_lite.plan.parts import ArrayShape as ArrayShape
from alpa_lite.plan.parts import BatchDims as BatchDims
from alpa_lite.plan.parts import CollectiveUse as CollectiveUse
from alpa_lite.plan.parts import OpaqueUse as OpaqueUse
from alpa_lite.plan.parts import OpPlacement as OpPlacement
from alpa_lite.plan.parts import Prediction as Prediction
from alpa_lite.plan.parts import ShardingDemands as ShardingDemands
from alpa_lite.plan.parts import SolverReport as SolverReport
from alpa_lite.plan.parts import StageCost as StageCost
from alpa_lite.plan.parts import StagePlan as StagePlan
from alpa_lite.plan.parts import TransferRuns as TransferRuns
from alpa_lite.plan.parts import UndividedDim as UndividedDim
from alpa_lite.plan.parts import UserShardingUse as UserShardingUse
from alpa_lite.program.identity import structure
from alpa_lite.program.memo import memoized
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import Schedule
from alpa_lite.schedule.tasks import MOST_MICROBATCHES, SpanLike
from alpa_lite.sharding.meshes import sharing
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.recomputation import Remat
from alpa_lite.text import View, one_line, show_count, show_seconds, view
from cost_models.cluster import MOST_DEVICES, Cluster
from cost_models.hardware import Device
from cost_models.uncertainty import LikelyRange, likely_range

FORMAT = 5
"""Version of the plan file format."""

_LATER = (
    "batch",
    "refusals",
    "notes",
    "first_device",
    "idle_devices",
    "user_shardings",
    "host_optimizer",
    "demands",
)
"""Fields that were added to this format later, and that old files lack."""

# A file may come from anywhere: without these limits a few digits in it could make lowering run for hours, or out of
# memory.
_MOST_PARTS = 2**16
_MOST_DIMS = 64
_MOST_ELEMENTS = 2**48
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,20}|key<\w{1,20}>")
# In seconds, bytes or FLOPs: more than any step takes.
_LARGEST = 1e30

INTERRUPTED = "interrupted"
"""The solver status of a search that the user ended; its plan is the best one up to then."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A complete decision about running a step.

    Attributes:
        name: name of the planner.
        function: name of the step function.
        stages: stages in the order of the forward pass.
        schedule: order in which the stages run micro-batches.
        num_microbatches: number of micro-batches per step.
        num_layers: number of layers, of which stages consist.
        op_layers: layer of each op; None for ops that are repeated where their result is read.
        input_layers: home layer of each graph input.
        loop_parts: about how many parts each loop over layers is split into; 0 leaves loops whole.
        cluster: the cluster for which the plan was made, without devices that it leaves idle.
        prediction: predictions of the cost model.
        solver: outcome of the search.
        fingerprint: digest of the step, which ties the plan to it.
        alternatives: (name, seconds per step) of every other plan that was considered; infinite where there is none.
        refusals: for alternatives without a plan, the name and the reason.
        opaque: ops that run replicated for want of a sharding rule.
        undivided: dims that stay whole because an axis does not divide them.
        notes: sentences on the choice of the plan, such as why it leaves devices idle.
        first_device: number of the first device of `cluster` among the devices that there are.
        idle_devices: devices beside those of `cluster` that the plan leaves idle.
        averaged: whether the step is no sum over its samples, so that results are means over micro-batches.
        remat: policy of each layer for its backward pass; () if the step runs as it is written. With `remat`, op ids
            are those of the step with recomputation.
        host_optimizer: whether the state of the optimizer waits in the memory of the host, but for the update. With
            `host_optimizer`, op ids are those of the step with copies from there and back.
        traced_layers: with `remat` or `host_optimizer`, the layer of each op of the step as it was traced.
        buckets: groups of gradients that are reduced together, in this order; () to reduce each separately.
        user_shardings: the shardings that the user's code gives, each with the plan's specs.
        demands: the shardings that the plan was made to obey, beside those that the step itself names; None if it was
            free to choose.
        batch: the arguments that hold the batch; None if no batch is known, or the file does not say.
        request: the `planners.PlanRequest` that the plan answers, from which explanations price alternatives. A plan
            from a file has none until it is replayed: `al.plan(step, *args, planner=plan)`.
    """

    name: str
    function: str
    stages: tuple[StagePlan, ...]
    schedule: Schedule
    num_microbatches: int
    num_layers: int
    op_layers: tuple[int | None, ...]
    input_layers: tuple[int, ...]
    loop_parts: int
    cluster: Cluster
    prediction: Prediction
    solver: SolverReport
    fingerprint: str
    alternatives: tuple[tuple[str, float], ...] = ()
    refusals: tuple[tuple[str, str], ...] = ()
    opaque: tuple[OpaqueUse, ...] = ()
    undivided: tuple[UndividedDim, ...] = ()
    notes: tuple[str, ...] = ()
    first_device: int = 0
    idle_devices: int = 0
    averaged: bool = False
    remat: tuple[Remat, ...] = ()
    traced_layers: tuple[int | None, ...] = ()
    host_optimizer: bool = False
    buckets: tuple[tuple[int, ...], ...] = ()
    user_shardings: tuple[UserShardingUse, ...] = ()
    demands: ShardingDemands | None = None
    batch: BatchDims | None = None
    request: Any = field(default=None, compare=False, repr=False)

    @property
    def layers_as_traced(self) -> tuple[int | None, ...]:
        """The layer of each op of the step without what `remat` and `host_optimizer` add."""
        return self.traced_layers or self.op_layers

    def __getstate__(self) -> dict[str, object]:
        """Return the state that is pickled for files and other processes: all fields but the request."""
        # A request holds functions that cannot be pickled.
        return {**self.__dict__, "request": None}

    def stage_of_layer(self, layer: int) -> int:
        """Return the number of the stage that contains a layer."""
        return next(i for i, s in enumerate(self.stages) if s.layers[0] <= layer <= s.layers[1])

    @property
    def likely_seconds(self) -> LikelyRange | None:
        """The seconds between which a step lies in four of five cases (`cost_models.uncertainty`).

        None on virtual devices that share a processor, of which no runs are known.
        """
        if self.cluster.shared_processor:
            return None
        prediction = self.prediction
        return likely_range(
            prediction.step_seconds,
            collective_seconds=prediction.collective_seconds / len(self.stages),
            num_devices=self.cluster.num_devices,
        )

    def capacity_bytes(self, stage: int) -> float:
        """Return the bytes that a plan may use of each device of a stage; the minimum, where devices differ."""
        return self._device(stage).usable_bytes

    def reserved_bytes(self, stage: int) -> float:
        """Return the bytes of each device of a stage that are kept for the allocator."""
        return self._device(stage).reserved_bytes

    def default_bytes(self, stage: int) -> float:
        """Return the bytes of each device of a stage that the backend gives to a program without any setting."""
        return self._device(stage).default_bytes

    def _device(self, stage: int) -> Device:
        submesh = self.stages[stage].submesh
        return self.cluster.at(submesh.first_device, submesh.num_devices).device

    @property
    def fullest_stage(self) -> int:
        """The number of the stage that uses the largest fraction of its devices' memory."""
        return max(range(len(self.stages)), key=lambda n: self.prediction.peak_bytes[n] / self.capacity_bytes(n))

    @property
    def recomputed(self) -> str:
        """The layers that recompute values in their backward pass, such as `layers 0–6: full`; empty for none."""
        runs = [(policy, list(run)) for policy, run in groupby(range(len(self.remat)), key=self.remat.__getitem__)]
        shown = [
            f"layers {run[0]}–{run[-1]}: {policy}" if len(run) > 1 else f"layer {run[0]}: {policy}"
            for policy, run in runs
            if policy is not Remat.NONE
        ]
        return ", ".join(shown)

    @property
    def update_every(self) -> int:
        """The number of micro-batches that one update of the weights follows; 0: all those of a step."""
        return self.schedule.microbatches_per_update(len(self.stages))

    @property
    def num_updates(self) -> int:
        """The number of updates of the weights per step, of the stage with the most: several if asynchronous."""
        return max(map(self.updates_of, range(len(self.stages))))

    def updates_of(self, stage: int) -> int:
        """Return how often the weights of a stage are updated per step: once for each round of its replicas."""
        if not self.update_every:
            return 1
        turns = self.num_microbatches // len(self.schedule.replicas_of(stage, len(self.stages)))
        return max(1, turns // self.update_every)

    @property
    def semantics(self) -> str:
        """Whether results are those of the step on one device: `synchronous`, or `asynchronous, staleness <= 3`."""
        # With one update nothing has changed since the weights that it reads.
        if not self.schedule.is_asynchronous or self.num_updates == 1:
            return "synchronous"
        most = self.schedule.most_stale(len(self.stages))
        return "asynchronous, staleness " + ("without limit" if most is None else f"<= {most}")

    @property
    def stages_together(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the stages on each submesh; several where a schedule interleaves stages."""
        return sharing([stage.submesh for stage in self.stages])

    def to_json(self) -> dict[str, object]:
        """Return plain data from which `from_json` makes an equal plan."""
        return {"format": FORMAT, **{name: encode(getattr(self, name)) for name in _decided()}}

    @staticmethod
    def from_json(data: Mapping[str, object]) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            PlanError: the data are no consistent plan of this version.
        """
        # Before anything else, since the same field may mean something else in another format.
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            raise PlanError(f"This is no plan of format {FORMAT}. Give a file that plan.save of this version wrote.")
        hints = hints_of(Plan)
        missing = [name for name in _decided() if name not in data and name not in _LATER]
        if missing:
            raise PlanError(f"The plan file lacks {missing}: it is cut off or was edited. Save the plan again.")
        try:
            # Fields that were added to the format later have their defaults.
            plan = Plan(**{name: _decoded(name, hints[name], data[name]) for name in _decided() if name in data})
            check_plan(plan)
        # A hostile file may nest deeper than the stack of Python.
        except RecursionError as error:
            raise PlanError("The plan nests too deeply. Give data that to_json of this version made.") from error
        return plan

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file with a checksum."""
        Path(path).write_bytes(to_text(self.to_json()))

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        A file whose checksum does not match its content is refused; one without a checksum is accepted, so that plans
        can be edited by hand. Every plan is checked for consistency.

        Raises:
            PlanError: the file is no usable plan.
        """
        data = read_file(path)
        try:
            return Plan.from_json(data)
        except PlanError as error:
            raise PlanError(f"{path} holds no plan that can be used: {error}") from error

    def __str__(self) -> str:
        return view(View.PLAN_TEXT, self)

    def __repr__(self) -> str:
        counts = f"{show_count(len(self.stages), 'stage')} on {show_count(self.cluster.num_devices, 'device')}"
        step = f"{show_count(self.num_microbatches, 'micro-batch')}, {show_seconds(self.prediction.step_seconds)}"
        return one_line(self, f"{self.name} of {self.function}: {counts} of {self.cluster.name}, {step} predicted")

    def explain(self, subject: str) -> str:
        """Explain a decision about `subject`: a parameter path, `op 12`, `layer 3`, `stage 0` or part of a line."""
        return view(View.PLAN_EXPLANATION, self, subject)

    def explain_time(self) -> str:
        """Return the parts of the time of a step, largest first, each with its source line and possible remedies."""
        return view(View.PLAN_TIME, self)

    def explain_memory(self) -> str:
        """Return when the memory of each stage peaks, and which arrays are alive then."""
        return view(View.PLAN_MEMORY, self)

    def explain_profile(self, profile: object) -> str:
        """Return where a measured step differs most from the prediction, op by op.

        profile: the measured step, `compiled.profile()`.

        Raises `PlanError` for a plan without its step, and `MismatchError` for a profile of another plan.
        """
        return view(View.PLAN_PROFILE, self, profile)

    def explain_user_shardings(self) -> str:
        """Return what each sharding that the user's code gives would cost, in a plan with every stage on its mesh."""
        return view(View.PLAN_SHARDING_COSTS, self)

    def diff(self, other: Plan) -> PlanPair:
        """Return this plan with another one: a value that prints the differences and their effect, and has a page."""
        return PlanPair(before=self, after=other)

    def to_html(
        self,
        path: str | Path,
        *,
        simulated: Sequence[SpanLike] | None = None,
        measured: Sequence[SpanLike] | None = None,
        allocated_bytes: Sequence[float] | None = None,
    ) -> None:
        """Write the plan as one self-contained HTML page.

        Args:
            path: path of the file to write.
            simulated: simulated start and end of each instruction (`lowered.simulate().times`); shown below the
                prediction.
            measured: the same as measured on devices (`compiled.measure()`).
            allocated_bytes: for each stage the bytes that XLA allocates on a device (`peak_bytes` of
                `compiled.allocated()`); shown next to the predicted peak.
        """
        page = view(View.PLAN_PAGE, self, simulated=simulated, measured=measured, allocated_bytes=allocated_bytes)
        Path(path).write_text(page, encoding="utf-8")

    def export(self, target: str, path: str | Path | None = None, **options: object) -> str:
        """Return the plan in the form of another program, and write it to a file if a path is given.

        Args:
            target: "jax" for a module of plain JAX, with stage functions and a loop for pipelines; "flax" for one with
                logical axis rules; "megatron", "nemo", "torchtitan", "deepspeed" or "maxtext" for options of these;
                "stablehlo" for the program of each task, "mpmd" for one module of the MPMD dialect with all of them.
            path: path of the file to write.
            options: options of the target; "jax" takes `step="module:function"`, where the step is imported from,
                "stablehlo" and "mpmd" take `platform="tpu"` for others than that of this process.

        Raises:
            PlanError: an unknown target, or a plan that cannot be said in this form; the sentence says why.
        """
        text = view(View.PLAN_EXPORT, self, target, **options)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _repr_html_(self) -> str:
        return view(View.PLAN_FRAGMENT, self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the plan where IPython shows no HTML."""
        printer.text(f"plan {self.name}" if cycle else str(self))

    def verify(self, step: StepGraph, cluster: Cluster | None = None) -> None:
        """Check that this plan was made for this step (and this cluster).

        Raises:
            MismatchError: it was made for another step or for another number of devices.
        """
        if self.fingerprint != fingerprint(step):
            raise MismatchError(
                f"This plan was made for {self.function!r} with other code or other argument shapes: its fingerprint "
                f"is {self.fingerprint[:12]}, that of this call is {fingerprint(step)[:12]}. Make a new plan with "
                "al.plan."
            )
        count = self.cluster.num_devices
        if cluster is not None and cluster.num_devices not in (count, count + self.idle_devices):
            raise MismatchError(
                f"This plan is for {count + self.idle_devices} devices ({self.cluster.name}), but {cluster.name} has "
                f"{cluster.num_devices}. Make a new plan for this cluster."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPair:
    """Two plans, side by side. It prints the differences from the first to the second, and their effect.

    Attributes:
        before: the first plan.
        after: the second plan.
    """

    before: Plan
    after: Plan

    def __str__(self) -> str:
        return view(View.PLAN_DIFF, self.before, self.after)

    def __repr__(self) -> str:
        return one_line(self, f"from {self.before.name} on {self.before.cluster.name} to {self.after!r}")

    def to_html(self, path: str | Path) -> None:
        """Write both plans as one self-contained HTML page: key numbers, timelines on one clock, all differences."""
        Path(path).write_text(view(View.PAIR_PAGE, self.before, self.after), encoding="utf-8")

    def _repr_html_(self) -> str:
        return view(View.PAIR_FRAGMENT, self.before, self.after)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the differences where IPython shows no HTML."""
        printer.text(repr(self) if cycle else str(self))


def _decided() -> list[str]:
    """Return the names of the fields that are saved and compared."""
    return [f.name for f in fields(Plan) if f.compare]


def _decoded(name: str, wanted: object, data: object) -> Any:
    """Return a field of the plan from its plain data."""
    try:
        return decode(wanted, data)
    except PlanError as error:
        raise PlanError(f"{name!r} of the plan file is none: {error}") from error


@memoized
def fingerprint(step: StepGraph) -> str:
    """Return the digest of a step: its ops, shapes, dtypes, literals and phases, loop bodies included."""
    digest = hashlib.sha256(structure(step.graph))
    # Names of arguments and source lines are left out: they do not change what is computed.
    digest.update(repr([p.value for p in step.phases]).encode())
    averaged = ["averaged"] if step.loop_results.averaged else []
    # An update per step leaves the digest as it was before steps could have several.
    often = [f"{step.num_updates} updates"] if step.num_updates > 1 else []
    digest.update(repr((step.num_microbatches, step.batch.size, *averaged, *often)).encode())
    return digest.hexdigest()


def check_plan(plan: Plan) -> None:
    """Raise `PlanError` for a `Plan` that contradicts itself."""
    # The checks are generators: later ones may rely on earlier ones, as the first problem raises.
    for problem in chain(_numbers(plan), _layers(plan), _stages(plan), _prediction(plan), _tasks(plan)):
        raise PlanError(f"The plan of {plan.function!r} contradicts itself: {problem}. Make a new one with al.plan.")


def _numbers(plan: Plan) -> Iterator[str]:
    """Yield the problems of counts and sizes, which must be small enough for lowering to handle."""
    if not plan.stages:
        yield "it has no stage"
    if plan.demands is not None:
        yield from plan.demands.problems({path: shape for s in plan.stages for path, shape in s.shapes.items()})
    # A program has tasks for every stage and micro-batch, so that their product is limited.
    if not 1 <= plan.num_microbatches <= MOST_MICROBATCHES // max(1, len(plan.stages)):
        yield f"it has {plan.num_microbatches} micro-batches in {len(plan.stages)} stages"
    if plan.batch is not None and not all(0 <= dim < _MOST_DIMS for dim in plan.batch.dims.values()):
        yield "its batch is along a dim that no array has"
    if plan.batch is not None and not 1 <= plan.batch.size <= _MOST_ELEMENTS:
        yield f"its batch has {plan.batch.size} samples"
    if not 0 <= plan.first_device <= plan.idle_devices <= MOST_DEVICES:
        yield f"it leaves {plan.idle_devices} devices idle, of which {plan.first_device} come first"
    if not 0 <= plan.loop_parts <= _MOST_PARTS:
        yield f"loops are cut into {plan.loop_parts} parts"
    # Called for their errors about a number of stages that the schedule cannot run.
    plan.schedule.num_processors(len(plan.stages))
    plan.schedule.microbatches_per_update(len(plan.stages))


def _layers(plan: Plan) -> Iterator[str]:
    """Yield the problems of layers: gaps between stages, and layers that do not exist."""
    begins = 0
    for number, stage in enumerate(plan.stages):
        first, last = stage.layers
        # Of equal stages the first one counts, and its tasks are those of all.
        equal = plan.schedule.replicas_of(number, len(plan.stages)).start
        if number != equal:
            like = plan.stages[equal]
            if (stage.layers, stage.mesh_shape) != (like.layers, like.mesh_shape):
                yield f"stage {number} has other layers or another mesh than stage {equal}, its equal"
            continue
        if first != begins or last < first:
            yield f"stage {number} has the layers {first} to {last}, but should begin with {begins}"
        begins = last + 1
    if begins != plan.num_layers:
        yield f"its stages have {begins} layers, of {plan.num_layers}"
    for layer in chain(plan.op_layers, plan.input_layers, plan.traced_layers):
        if layer is not None and not 0 <= layer < plan.num_layers:
            yield f"it uses layer {layer} of {plan.num_layers}"
    if plan.remat and len(plan.remat) != plan.num_layers:
        yield f"it has rematerialisation policies for {len(plan.remat)} layers, of {plan.num_layers}"


def _stages(plan: Plan) -> Iterator[str]:
    """Yield the problems of stages: submeshes, meshes, axes and ops that do not exist."""
    for number, stage in enumerate(plan.stages):
        submesh, name = stage.submesh, f"stage {number}"
        if submesh.first_device + submesh.num_devices > plan.cluster.num_devices:
            yield f"{name} has {submesh}, of {plan.cluster.num_devices}"
        if stage.mesh_shape.num_devices != submesh.num_devices:
            yield f"{name} has {submesh.num_devices} devices in a mesh of {stage.mesh_shape.num_devices}"
        axes = stage.mesh_shape.axis_names
        for spec in _specs(stage):
            # An axis may split one dim, or stand for a partial sum, but not both.
            yield from (f"{name}: {problem}" for problem in _misuse((*spec.dims, spec.partial), axes))
        for placement in _placements(stage.ops.values()):
            yield from (f"{name}: {x}" for x in _misuse((*placement.factors, placement.partial), axes))
        yield from (f"{name} {problem}" for problem in _shapes(stage))
        # Negative ids cannot occur: `codec` accepts digits alone as the keys of mappings.
        if any(op >= len(plan.op_layers) for op in stage.ops):
            yield f"{name} places ops beyond the {len(plan.op_layers)} that there are"


def _shapes(stage: StagePlan) -> Iterator[str]:
    """Yield the problems of argument shapes: other ranks than the specs, or shapes that no array has."""
    for name, shape in stage.shapes.items():
        spec = stage.specs.get(name)
        if spec is None or len(spec.dims) != len(shape.dims):
            yield f"has an argument {name!r} of shape {shape}, in the spec {spec}"
        elif not _DTYPE.fullmatch(shape.dtype) or min(shape.dims, default=0) < 0 or prod(shape.dims) > _MOST_ELEMENTS:
            yield f"has an argument {name!r} of shape {shape}, which no array has"


def _specs(stage: StagePlan) -> Iterator[Spec]:
    """Yield every spec of a stage."""
    yield from stage.specs.values()
    yield from stage.inputs.values()
    yield from stage.outputs.values()
    for accumulator in stage.accumulators.values():
        yield from (accumulator.stored, accumulator.resolved)
    for placement in _placements(stage.ops.values()):
        yield from (*placement.results, *placement.body_operands)


def _placements(placements: Iterable[OpPlacement]) -> Iterator[OpPlacement]:
    """Yield all placements, those inside bodies included."""
    for placement in placements:
        yield placement
        for body in placement.bodies:
            yield from _placements(body.values())


def _misuse(groups: Sequence[Sequence[str]], known: Sequence[str]) -> Iterator[str]:
    """Yield the problems of axis groups: axes that the mesh lacks, and axes used twice."""
    named = [axis for group in groups for axis in group]
    if not set(named) <= set(known):
        yield f"the axes {sorted(set(named) - set(known))} are named, of {list(known)}"
    if len(set(named)) != len(named):
        yield f"an axis is used twice in {named}"


def _prediction(plan: Plan) -> Iterator[str]:
    """Yield the problems of the prediction: stages that do not exist, and numbers that are negative or not finite."""
    prediction, count = plan.prediction, len(plan.stages)
    if len(prediction.peak_bytes) != count:
        yield f"it predicts the memory of {len(prediction.peak_bytes)} stages, of {count}"
    if len(prediction.host_bytes) not in (0, count):
        yield f"it predicts the memory on the host of {len(prediction.host_bytes)} stages, of {count}"
    for use in (*prediction.collectives, *plan.undivided):
        if not 0 <= use.stage < count:
            yield f"it predicts something of stage {use.stage}, of {count}"
    costs = [part for stage in plan.stages for part in (stage.cost, stage.cost.work) if part is not None]
    for part in (*costs, prediction, *prediction.collectives, *plan.opaque, *plan.undivided):
        for each in fields(part):
            value = getattr(part, each.name)
            of_stages = each.name in ("peak_bytes", "host_bytes")
            numbers = value if of_stages else (value,) if isinstance(value, float) else ()
            # NaN satisfies no comparison, so that this refuses it too.
            if not all(0 <= number <= _LARGEST or each.name == "bubble_fraction" for number in numbers):
                yield f"it predicts {each.name} of {value}"
    if not abs(prediction.bubble_fraction) <= 1:
        yield f"it predicts bubble_fraction of {prediction.bubble_fraction}"


def _tasks(plan: Plan) -> Iterator[str]:
    """Yield the problems of the predicted tasks and transfers."""
    tasks, sent = plan.prediction.tasks, plan.prediction.transfers
    for what, runs, stages, sizes in (
        ("tasks", tasks, tasks.stages, tasks.held_bytes),
        ("transfers", sent, (*sent.sources, *sent.stages), sent.bytes),
    ):
        if len({*map(len, runs.columns)}) > 1:
            yield f"the columns of its predicted {what} have different lengths"
        if not all(0 <= stage < len(plan.stages) for stage in stages):
            yield f"it predicts {what} of a stage that does not exist, of {len(plan.stages)}"
        for numbers in (runs.start_seconds, runs.end_seconds, sizes):
            if not all(0 <= number <= _LARGEST for number in numbers):
                yield f"it predicts {what} with seconds or bytes that are negative or not finite"
