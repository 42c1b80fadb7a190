"""The parts of a plan as frozen, JSON-serialisable data: stages with their specs, predictions, and search reports.

Op and value ids refer to the traced graph; names of quantities include their unit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from math import prod

from alpa_lite.plan.codec import INLINE
from alpa_lite.program.ir import item_bytes
from alpa_lite.program.user_shardings import UserSharding, UserShardings
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.text import one_line, show_bytes, show_count, show_first, show_layers, show_percent, show_seconds
from cost_models.cluster import MOST_DEVICES

_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """The sharding of one op.

    Attributes:
        factors: for each factor of the op's rule the mesh axes that split it.
        partial: mesh axes over which its linear operands are partial sums.
        results: spec of each result after its reductions.
        bodies: for control flow, op id → placement inside each body.
        body_operands: for control flow, the spec in which the bodies read each operand (for a scanned operand, each
            row).
    """

    factors: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    results: tuple[Spec, ...] = ()
    bodies: tuple[Mapping[int, OpPlacement], ...] = ()
    body_operands: tuple[Spec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """The specs of a value that is summed over micro-batches.

    Attributes:
        stored: spec inside the loop over micro-batches.
        resolved: spec in which the update reads it.
    """

    stored: Spec
    resolved: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective of the plan.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        bytes: size of each device's input buffer in bytes.
        axis: the mesh axis along which it communicates; several are joined by `·`.
        num_devices: number of devices per group.
        count: executions per step. In a branch of a `cond` it counts as if all branches were equally likely, in a
            `while` once.
        seconds: duration of one execution in seconds.
        stage: number of the stage that runs it.
        phase: forward, backward or update.
        source: the line of the user's code from which it arises, with the enclosing functions.
    """

    kind: str
    bytes: float
    axis: str
    num_devices: int
    count: float
    seconds: float
    stage: int
    phase: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueUse:
    """Ops of one primitive that run replicated on every device, since the primitive has no sharding rule.

    Attributes:
        primitive: name of the primitive.
        num_ops: number of these ops.
        bytes: total size of their results in bytes, unsharded, each op counted once.
        sources: source lines of the ops.
    """

    primitive: str
    num_ops: int
    bytes: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShardingUse:
    """A sharding that the user's code gives for an array, with the plan's specs of the same array.

    Attributes:
        source: the line of the user's code, or `argument` and a path.
        shape: shape of the array; of a micro-batch, for an array with samples.
        mesh: pairs of an axis of the user's mesh and its number of devices.
        wanted: the user's sharding, as text: `[data, -]`.
        planned: the specs that the plan has for it, as text; several where stages or layers differ.
        follows: whether all of these split each dim into as many parts as the user does.
        divides: whether the user's sharding has equal parts; the plan can have no other.
    """

    source: str
    shape: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...]
    wanted: str
    planned: tuple[str, ...]
    follows: bool
    divides: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UndividedDim:
    """A dim of an argument that is not split because a mesh axis does not divide it, and what padding it would save.

    Attributes:
        name: path of the argument.
        dim: index of the dim, from 0.
        size: size of the dim.
        axis: name of the mesh axis.
        num_devices: size of the mesh axis.
        padded: the next larger size that the axis divides.
        bytes_saved: memory saved per device, in bytes.
        seconds_saved: time saved per step in contractions with the argument, in seconds.
        stage: number of the stage that holds the argument.
    """

    name: str
    dim: int
    size: int
    axis: str
    num_devices: int
    padded: int
    bytes_saved: float
    seconds_saved: float
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayShape:
    """The shape of an array and the name of its dtype."""

    dims: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """The size of the whole array in bytes."""
        return prod(self.dims) * item_bytes(self.dtype)

    def __str__(self) -> str:
        """Return text such as `float32[1024, 4096]`."""
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingDemands:
    """The shardings that a step was planned to obey, beside those that its code names; replays of the plan obey them.

    Attributes:
        arguments: the layouts of arguments, by path.
        results: the layouts of results, by path.
        propagated: whether values in between have the shardings that XLA's propagation makes of these.
    """

    arguments: dict[str, UserSharding]
    results: dict[str, UserSharding]
    propagated: bool

    @staticmethod
    def of(given: UserShardings) -> ShardingDemands:
        """Return the demands among the shardings of a user."""
        return ShardingDemands(
            arguments=dict(given.arguments), results=dict(given.results), propagated=given.propagated
        )

    def as_user_shardings(self) -> UserShardings:
        """Return the shardings as a user would give them."""
        return UserShardings(mode="pin", arguments=self.arguments, results=self.results, propagated=self.propagated)

    def problems(self, shapes: Mapping[str, ArrayShape]) -> Iterator[str]:
        """Yield a phrase for each layout that no array of a plan can have; `shapes`: of its arguments, by path."""
        layouts = self.arguments | self.results
        mesh = next((each.mesh for each in layouts.values()), ())
        is_mesh = all(size > 0 for _, size in mesh) and 1 < prod(size for _, size in mesh) <= MOST_DEVICES
        for path, each in self.arguments.items():
            if path in shapes and len(shapes[path].dims) != len(each.dims):
                yield f"{path} is {shapes[path]}, and to lie as {each}"
        for path, each in layouts.items():
            axes = [axis for dim in each.dims if dim is not None for axis in dim]
            if not is_mesh or each.mesh != mesh or len({*axes}) != len(axes) or not {*axes} <= each.sizes.keys():
                yield f"{path} is to lie as {each} on a mesh {dict(each.mesh)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDims:
    """The arguments that hold the batch.

    Attributes:
        size: samples per step.
        dims: path of an argument → its dim that holds the batch.
        assumed: whether the batch was inferred, as the user gave no `batch_argnums`.
    """

    size: int
    dims: Mapping[str, int]
    assumed: bool

    def __str__(self) -> str:
        """Return text such as `16 samples along dim 0 of batch/x, batch/y (assumed; …)`."""
        by_dim: dict[int, list[str]] = {}
        for name, dim in self.dims.items():
            # Mostly all arguments hold the batch along the same dim, which is then written once.
            by_dim.setdefault(dim, []).append(name)
        parts = [f"dim {dim} of {show_first(names, _SHOWN)}" for dim, names in sorted(by_dim.items())]
        assumed = " (assumed; name others with batch_argnums)" if self.assumed else ""
        return f"{show_count(self.size, 'sample')} along {' and '.join(parts)}{assumed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkBytes:
    """The memory in bytes that the programs of a stage take on a device beside their arguments and results.

    Attributes:
        forward: of the forward pass as a program of its own.
        backward: of the backward pass as a program of its own.
        loop: of both passes as one program, which keeps what it saves for itself.
        update: of the update.
    """

    forward: float
    backward: float
    loop: float
    update: float

    def of(self, role: TaskRole) -> float:
        """Return the bytes that a task takes."""
        match role:
            case TaskRole.FORWARD:
                return self.forward
            case TaskRole.FORWARD_BACKWARD:
                return self.loop
            case TaskRole.UPDATE:
                return self.update
            case TaskRole.STEP:
                return max(self.loop, self.update)
            case TaskRole.BACKWARD | TaskRole.INPUT_GRADIENT | TaskRole.WEIGHT_GRADIENT:
                return self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The predicted time of one stage and the memory of one of its devices.

    The stage solver computes it, searches compare it, and a plan contains it unchanged.

    Attributes:
        forward_seconds: time of the forward pass per micro-batch.
        backward_seconds: time of the backward pass per micro-batch.
        update_seconds: time of the ops that run once per step.
        state_bytes: arguments that live here.
        accumulator_bytes: sums over micro-batches.
        activation_bytes: values that one micro-batch in flight stores for its backward pass.
        temporary_bytes: maximum memory of a task in addition to the above.
        weight_seconds: part of the backward time for gradients of weights, where these are a task of their own.
        handed_bytes: values that one micro-batch stores for the second part of a backward pass in two parts.
        work: what the programs of the stage take beside their arguments and results; None if it was not computed.
    """

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    state_bytes: float
    accumulator_bytes: float
    activation_bytes: float
    temporary_bytes: float
    # Files omit these two where a backward pass is one task; their place after the others is that of the file format.
    weight_seconds: float = 0.0
    handed_bytes: float = 0.0
    work: WorkBytes | None = None

    @property
    def loop_seconds(self) -> float:
        """The time of both passes of one micro-batch."""
        # `weight_seconds` is contained in the time of the backward pass.
        return self.forward_seconds + self.backward_seconds

    @property
    def resident_bytes(self) -> float:
        """The memory that is in use throughout the step: state and sums over micro-batches."""
        return self.state_bytes + self.accumulator_bytes

    def step_seconds(self, num_microbatches: int, num_updates: int = 1) -> float:
        """Return the time that a step of so many micro-batches and updates keeps the stage busy."""
        return num_microbatches * self.loop_seconds + num_updates * self.update_seconds

    def bytes_in_flight(self, num_microbatches: int) -> float:
        """Return the peak memory while `num_microbatches` micro-batches are in flight."""
        # Temporary memory counts once, since the tasks of a stage run one after another.
        return self.resident_bytes + self.temporary_bytes + num_microbatches * self.activation_bytes


NO_COST = StageCost(
    forward_seconds=0.0,
    backward_seconds=0.0,
    update_seconds=0.0,
    state_bytes=0.0,
    accumulator_bytes=0.0,
    activation_bytes=0.0,
    temporary_bytes=0.0,
)
"""The cost of a stage without ops, and of one without a solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The decisions for one stage that its tasks follow; the fields of `StagePlan` with the same names."""

    inputs: Mapping[int, Spec]
    ops: Mapping[int, OpPlacement]
    accumulators: Mapping[int, Accumulator]
    outputs: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    keeps_gathered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage. Op and value ids refer to the traced graph.

    Attributes:
        layers: first and last layer, inclusive.
        submesh: devices of the stage.
        mesh_shape: logical mesh over these devices.
        specs: path of an argument that lives here → its spec; for readers of the plan.
        inputs: id of a graph input, or of a value of another stage, that is read here → its spec.
        ops: op id → placement.
        accumulators: id of a value summed over micro-batches → its specs.
        cost: predicted time and memory; files hold its fields among those of the stage.
        keeps_gathered: whether parameters gathered for the forward pass stay gathered until the backward pass.
        outputs: id of a step result → the spec in which the user requested it. State is returned in its input spec, and
            other results in the spec in which they are computed.
        shapes: path → unsharded shape of the arguments in `specs`; for stacked arrays, of the rows that live here.
            Empty in files of earlier versions.
    """

    layers: tuple[int, int]
    submesh: Submesh
    mesh_shape: LogicalMesh
    specs: Mapping[str, Spec]
    inputs: Mapping[int, Spec]
    ops: Mapping[int, OpPlacement]
    accumulators: Mapping[int, Accumulator]
    cost: StageCost = field(metadata=INLINE)
    keeps_gathered: bool = False
    outputs: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    shapes: Mapping[str, ArrayShape] = field(default_factory=dict[str, ArrayShape])

    def __repr__(self) -> str:
        held = f"{show_count(len(self.specs), 'argument')}, {show_count(len(self.ops), 'op')}"
        return one_line(self, f"{show_layers(*self.layers)} on {self.submesh} as {self.mesh_shape}: {held}")

    @property
    def choice(self) -> Choice:
        """The decisions that the tasks of the stage follow."""
        return Choice(
            inputs=self.inputs,
            ops=self.ops,
            accumulators=self.accumulators,
            outputs=self.outputs,
            keeps_gathered=self.keeps_gathered,
        )


class TaskRole(StrEnum):
    """The part of a step that a task runs, with the values of `TaskKind` where the schedule has such tasks."""

    STEP = "step"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward+backward"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"
    UPDATE = "update"

    # That of `Enum` is a function in Python, and sets of the places of all ops are made for each stage.
    __hash__ = str.__hash__

    @property
    def in_loop(self) -> bool:
        """True for tasks that run once per micro-batch."""
        return self not in (TaskRole.STEP, TaskRole.UPDATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRuns:
    """The runs of tasks in a predicted step: element i of each field is about run i.

    Attributes:
        stages: the number of the stage.
        roles: the part of a step that the task runs.
        microbatches: the micro-batch; None for tasks that run once per step.
        start_seconds: when the run starts, since the beginning of the step.
        end_seconds: when it ends.
        held_bytes: the most bytes in use per device of its submesh, from the start of the run to the start of the next.
    """

    stages: tuple[int, ...] = ()
    roles: tuple[TaskRole, ...] = ()
    microbatches: tuple[int | None, ...] = ()
    start_seconds: tuple[float, ...] = ()
    end_seconds: tuple[float, ...] = ()
    held_bytes: tuple[float, ...] = ()

    @property
    def columns(self) -> tuple[tuple[object, ...], ...]:
        """All fields, of equal lengths."""
        return tuple(getattr(self, each.name) for each in fields(self))

    def __repr__(self) -> str:
        return one_line(self, f"of {show_count(len(self.stages), 'task')}")

    def held_on(self, stages: Collection[int]) -> list[float]:
        """Return `held_bytes` of the runs of some stages."""
        return [most for stage, most in zip(self.stages, self.held_bytes, strict=True) if stage in stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRuns:
    """The transfers between stages in a predicted step: element i of each field is about transfer i.

    Values that are sent to the same stage for the same micro-batch, one right after the other, are one transfer.

    Attributes:
        sources: the number of the stage that sends.
        stages: the number of the stage that receives.
        microbatches: the micro-batch; None for values that are sent once per step.
        start_seconds: when the transfer starts, since the beginning of the step.
        end_seconds: when it ends.
        bytes: the bytes that are sent to other devices.
    """

    sources: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    microbatches: tuple[int | None, ...] = ()
    start_seconds: tuple[float, ...] = ()
    end_seconds: tuple[float, ...] = ()
    bytes: tuple[float, ...] = ()

    @property
    def columns(self) -> tuple[tuple[object, ...], ...]:
        """All fields, of equal lengths."""
        return tuple(getattr(self, each.name) for each in fields(self))

    def __repr__(self) -> str:
        return one_line(self, f"of {show_count(len(self.stages), 'transfer')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predictions of the cost model for one step.

    Attributes:
        step_seconds: time from the start of one step to the start of the next.
        compute_seconds: total time of all kernels, summed over stages.
        collective_seconds: total time of all collectives, overlapped ones included, summed over stages.
        transfer_seconds: total time of all transfers between stages.
        peak_bytes: for each stage the peak memory of one of its devices, including other stages on that device.
        flops_per_device: FLOPs per step of the device with the most.
        bubble_fraction: fraction of the devices' time spent waiting for other stages.
        collectives: the collectives that make up `collective_seconds`.
        tasks: the runs of all tasks; empty in files of earlier versions.
        transfers: the transfers between stages; empty in files of earlier versions.
        mfu: model FLOPs utilisation: the FLOPs that the results of the step need, without recomputed ones, as a
            fraction of what all devices could do in the time of the step at their peak rate for the dtype of most of
            these FLOPs; 0 in files of earlier versions.
        hfu: hardware FLOPs utilisation: the same for all FLOPs that the devices execute, recomputed and repeated ones
            included.
        host_bytes: for each stage the memory of its host that each of its devices uses; () if nothing waits there.
    """

    step_seconds: float
    compute_seconds: float
    collective_seconds: float
    transfer_seconds: float
    peak_bytes: tuple[float, ...]
    flops_per_device: float
    bubble_fraction: float
    collectives: tuple[CollectiveUse, ...] = ()
    tasks: TaskRuns = field(default_factory=TaskRuns)
    transfers: TransferRuns = field(default_factory=TransferRuns)
    mfu: float = 0.0
    hfu: float = 0.0
    host_bytes: tuple[float, ...] = ()

    def __repr__(self) -> str:
        peak = show_bytes(max(self.peak_bytes, default=0.0))
        bubble = show_percent(self.bubble_fraction)
        return one_line(self, f"{show_seconds(self.step_seconds)} per step, bubble {bubble}, peak {peak} per device")

    def breakdown(self) -> dict[str, float]:
        """Return the seconds of one step by cause; causes overlap across stages and need not add up to the step."""
        by_kind: dict[str, float] = {"compute": self.compute_seconds, "transfers": self.transfer_seconds}
        for use in self.collectives:
            by_kind[use.kind] = by_kind.get(use.kind, 0.0) + use.seconds * use.count
        return by_kind


NOT_PREDICTED = Prediction(
    step_seconds=0.0,
    compute_seconds=0.0,
    collective_seconds=0.0,
    transfer_seconds=0.0,
    peak_bytes=(),
    flops_per_device=0.0,
    bubble_fraction=0.0,
)
"""The prediction of a plan whose program has not been simulated yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """The outcome of the search that made the plan.

    Attributes:
        status: "optimal" if the gap is practically closed, "feasible" if not, "interrupted" if the user or a time limit
            ended the search. For a manual plan: whether the integer programs of its stages were solved to optimality.
        bound: lower bound on the seconds per step of any plan under the cost model (for a manual plan: of any plan with
            equally many micro-batches).
        gap: (seconds per step − bound) / seconds per step.
        seconds: duration of the search in seconds.
    """

    status: str
    bound: float
    gap: float
    seconds: float


NOT_SOLVED = SolverReport(status="", bound=0.0, gap=0.0, seconds=0.0)
"""The report of a plan in the making."""
