"""What plans consist of, as frozen, JSON-serialisable data: stages with their specs, predictions, what was found out.

Numbers of ops and values are those of the traced graph; quantities carry their unit in their name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from alpa_lite.program.ir import item_bytes
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec

_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """How one op runs.

    Attributes:
        factors: mesh axes per factor of its rule.
        partial: axes over which its linear operands are partial sums.
        results: spec of each result after its reductions.
        bodies: of control flow, the placements inside each body by op number.
        body_operands: of control flow, the spec in which the bodies read each operand (of a scanned one: each slice).
    """

    factors: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    results: tuple[Spec, ...] = ()
    bodies: tuple[Mapping[int, OpPlacement], ...] = ()
    body_operands: tuple[Spec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """A value summed over micro-batches.

    Attributes:
        stored: its spec inside the loop.
        resolved: its spec as the update reads it.
    """

    stored: Spec
    resolved: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective of the plan: what it moves, how often per step, what it costs, and the user's line.

    Attributes:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all or permute.
        bytes: that each device hands to it.
        axis: the mesh axis that it goes along; several have `·` between them.
        num_devices: that take part together.
        count: how often in a step. In a branch of a `cond` it counts as if all branches were equally likely, in a
            `while` once.
        seconds: of one.
        stage: where.
        phase: forward, backward or update.
        source: the line of the user's code from which it arises, with the functions around it.
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
    """Ops of one primitive that run whole on every device, as it has no sharding rule.

    Attributes:
        primitive: its name.
        num_ops: how many there are.
        bytes: of the whole results of all of them, once each.
        sources: their lines.
    """

    primitive: str
    num_ops: int
    bytes: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UndividedDim:
    """A dim of an argument that stays whole because an axis does not divide it; what padding it would save per device.

    Attributes:
        name: path of the argument.
        dim: which of its dims, from 0.
        size: of the dim.
        axis: the mesh axis.
        num_devices: of the axis.
        padded: the next larger size that the axis divides.
        bytes_saved: per device.
        seconds_saved: of contractions with the argument, per step.
        stage: where it lives.
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
    """What an array is: its dims, and the name of its dtype."""

    dims: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Of the whole array."""
        return prod(self.dims) * item_bytes(self.dtype)

    def __str__(self) -> str:
        """`float32[1024, 4096]`-like."""
        return f"{self.dtype}[{', '.join(map(str, self.dims))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDims:
    """Which arguments hold the batch.

    Attributes:
        size: samples of a step.
        dims: the dim that holds them, of each argument by its path.
        assumed: whether it was found by itself: nothing was named as `batch_argnums`.
    """

    size: int
    dims: Mapping[str, int]
    assumed: bool

    def __str__(self) -> str:
        """`16 samples along dim 0 of batch/x, batch/y (assumed; …)`-like."""
        by_dim: dict[int, list[str]] = {}
        for name, dim in self.dims.items():
            by_dim.setdefault(dim, []).append(name)
        parts = [f"dim {dim} of {_first_of(names)}" for dim, names in sorted(by_dim.items())]
        samples = "1 sample" if self.size == 1 else f"{self.size} samples"
        assumed = " (assumed; name others with batch_argnums)" if self.assumed else ""
        return f"{samples} along {' and '.join(parts)}{assumed}"


def _first_of(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage. Value and op numbers refer to the traced graph; bytes are those of one device.

    Attributes:
        layers: first and last layer, inclusive.
        submesh: its devices.
        mesh_shape: the logical mesh over them.
        specs: spec of each argument that lives here, by path, for reading.
        inputs: spec of each graph input or value of another stage that is read here.
        ops: placement of each op.
        accumulators: values summed over micro-batches.
        keeps_gathered: whether parameters that are gathered for the forward pass stay so for the backward pass.
        outputs: spec in which a result of the step is returned, where it was asked for; state comes back as it went in,
            and other results as they are computed.
        forward_seconds: predicted, per micro-batch.
        backward_seconds: the same of the backward pass.
        update_seconds: of what runs once per step.
        state_bytes: of the arguments that live here.
        accumulator_bytes: of the sums over micro-batches.
        activation_bytes: of what one micro-batch in flight keeps for its backward pass.
        temporary_bytes: the most that a task needs besides.
        weight_seconds: of the backward pass, the gradients of weights, where these are a task of their own.
        handed_bytes: of what one micro-batch keeps for the second part of a backward pass in two parts.
        shapes: of the same arguments, before they are cut; of stacked ones the rows that live here. Files of earlier
            versions have none.
    """

    layers: tuple[int, int]
    submesh: Submesh
    mesh_shape: LogicalMesh
    specs: Mapping[str, Spec]
    inputs: Mapping[int, Spec]
    ops: Mapping[int, OpPlacement]
    accumulators: Mapping[int, Accumulator]
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    state_bytes: float
    accumulator_bytes: float
    activation_bytes: float
    temporary_bytes: float
    weight_seconds: float = 0.0
    handed_bytes: float = 0.0
    keeps_gathered: bool = False
    outputs: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    shapes: Mapping[str, ArrayShape] = field(default_factory=dict[str, ArrayShape])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model expects of one step.

    Attributes:
        step_seconds: from the start of one step to that of the next.
        compute_seconds: of all kernels, summed over the stages.
        collective_seconds: of all collectives, hidden ones too, summed over the stages.
        transfer_seconds: of all transfers between stages.
        peak_bytes: per stage the most that one of its devices holds, of other stages on it too.
        flops_per_device: floating-point operations in a step of a device that does the most.
        bubble_fraction: part of the devices' time that they wait for other stages.
        collectives: what `collective_seconds` consists of.
    """

    step_seconds: float
    compute_seconds: float
    collective_seconds: float
    transfer_seconds: float
    peak_bytes: tuple[float, ...]
    flops_per_device: float
    bubble_fraction: float
    collectives: tuple[CollectiveUse, ...] = ()

    def breakdown(self) -> dict[str, float]:
        """Seconds of one step by cause; the causes overlap across stages, so they need not add up to the step."""
        by_kind: dict[str, float] = {"compute": self.compute_seconds, "transfers": self.transfer_seconds}
        for use in self.collectives:
            by_kind[use.kind] = by_kind.get(use.kind, 0.0) + use.seconds * use.count
        return by_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """How the plan was found.

    Attributes:
        status: of the search: "optimal" where the gap is as good as closed, "feasible" where it is not, "interrupted"
            where the user ended it. Of a manual plan: whether the integer programs of its stages were solved to the
            end.
        bound: a lower bound on the seconds of a step under the cost model, whatever the plan (of a manual one: with as
            many micro-batches).
        gap: from the plan down to the bound, relative to the plan.
        seconds: spent on it.
    """

    status: str
    bound: float
    gap: float
    seconds: float
