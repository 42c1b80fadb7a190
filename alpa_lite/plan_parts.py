"""The parts of a plan: how ops run, what each stage is, what is predicted of a step, and how the plan was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa_lite.mesh import LogicalMesh, Submesh
from alpa_lite.sharding import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlacement:
    """How one op runs: mesh axes per factor of its rule, axes over which its linear operands are partial sums, the
    spec of each result after its reductions. For control flow also the placements inside each body, and the spec in
    which the bodies read each operand (of a scanned one: each slice)."""

    factors: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()
    results: tuple[Spec, ...] = ()
    bodies: tuple[Mapping[int, OpPlacement], ...] = ()
    body_operands: tuple[Spec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulator:
    """A value summed over micro-batches: as it is stored inside the loop, and as the update reads it."""

    stored: Spec
    resolved: Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective of the plan: what it moves, how often per step, what it costs, and the user's line.

    `axis` names several mesh axes with `·` between them. Collectives in a branch of a `cond` count as if all branches
    were equally likely, those in a `while` once.
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
    """Ops of one primitive that run whole on every device, as it has no sharding rule: number, bytes of results, lines.

    `bytes` counts the whole results of all of them, once each.
    """

    primitive: str
    num_ops: int
    bytes: float
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UndividedDim:
    """A dim of an argument that stays whole because an axis does not divide it; what padding it would save per device.

    `padded` is the next larger size that the axis divides; the seconds are those of contractions with the argument.
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
class StagePlan:
    """One pipeline stage. Value and op numbers refer to the traced graph.

    layers           first and last layer, inclusive
    specs            spec of each named argument that lives here, for reading
    inputs           spec of each graph input or value of another stage that is read here
    ops              placement of each op
    accumulators     values summed over micro-batches
    *_seconds        predicted time per micro-batch (forward, backward; of it, of gradients of weights where these are a
                     task of their own) and per step (update)
    state_bytes, accumulator_bytes, activation_bytes, temporary_bytes
                     per device: arguments that live here; sums; saved values per micro-batch; peak of the rest
    handed_bytes     per device and micro-batch: what is kept for the second part of a backward pass in two parts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model expects of one step: seconds, bytes per device of each stage, floating-point operations.

    `peak_bytes[i]` counts all that the devices of stage i hold, of other stages on them too.
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
    """How the plan was found: status of the search, seconds spent; a lower bound on the seconds of a step under the
    cost model, whatever the plan (a manual one: with as many micro-batches), and the gap to it relative to the plan."""

    status: str
    bound: float
    gap: float
    seconds: float
