"""The request that a planner answers: a step to plan for a cluster, with the options of the search.

Pins are the shardings of arguments that the user gives; the search determines the others.

    pins = {"state/params/head": PartitionSpec(None, "model")}

A pin names an argument by its path, or by the end of it (whole components) if that is unique; for each dim None, an
axis or several axes, as in `jax.sharding.PartitionSpec`. The axes have the names of the search: "x" where there is one;
"replica" and "data" (which split the batch) and "model" where there are several. Only meshes with all pinned axes are
searched. On a mesh of the user's own (`OnMesh`, `Custom`) they are the user's, and results can be pinned as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

from alpa_lite.errors import BatchError, NonAdditiveError, PlanError, TraceError
from alpa_lite.inter_op.work_floor import least_seconds
from alpa_lite.inter_op.workers import Workers
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.progress import Progress
from alpa_lite.program.ir import Value
from alpa_lite.program.phases import StepGraph
from alpa_lite.program.user_shardings import NO_USER_SHARDINGS, UserShardings
from alpa_lite.schedule import Schedule
from alpa_lite.sharding.specs import Spec, divides
from cost_models.checks import printable
from cost_models.cluster import Cluster
from cost_models.composed import CostModel

OnInterrupt = Literal["raise", "best"]
"""The behaviour of a search when it is interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSignature:
    """The arguments and results of a step.

    Attributes:
        function: name of the step function.
        num_arguments: number of arrays that the step takes; the others are captured by the function.
        batch_size: samples of a step; None if its batch is unknown.
        arguments: names of the positional arguments, with which the names of their arrays begin.
        results: the path of each returned array, such as `0/params/w`; empty if the function returns a single array.
        user_shardings: the shardings of arguments that the user gives, and whether a plan must obey these and others.
    """

    function: str
    num_arguments: int
    batch_size: int | None
    arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    user_shardings: UserShardings = NO_USER_SHARDINGS


class Steps(Protocol):
    """A step at any number of micro-batches: each takes a trace of its own, which is made on demand."""

    def at(self, num_microbatches: int, loop_parts: int) -> StepGraph:
        """Return the step cut into phases, with loops over layers in about `loop_parts` parts if that is above 0."""
        ...

    def pinned(self) -> Steps:
        """Return the steps in which the shardings of the user's code are demands."""
        ...

    def updated_every(self, num_microbatches: int) -> Steps:
        """Return the steps whose weights are updated after so many micro-batches each; 0: after all of them."""
        ...


@dataclass(frozen=True, kw_only=True)
class SentSteps:
    """Some steps made before: all that a worker process has of `Steps`.

    Attributes:
        known: steps by number of micro-batches and number of loop parts.
    """

    known: Mapping[tuple[int, int], StepGraph] = field(default_factory=dict[tuple[int, int], StepGraph])

    def at(self, num_microbatches: int, loop_parts: int) -> StepGraph:
        """Return the step. Raises `LookupError` if it was not sent."""
        return self.known[num_microbatches, loop_parts]

    def pinned(self) -> Steps:
        """Raise `LookupError`: the step that was sent has no demands."""
        raise LookupError("the step with the shardings of the user's code as demands")

    def updated_every(self, num_microbatches: int) -> Steps:
        """Return the steps as they are, if they are updated once; raise `LookupError` otherwise."""
        if num_microbatches:
            raise LookupError("the step with several updates")
        return self


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A step to plan for a cluster.

    Attributes:
        signature: arguments and results of the step.
        steps: the step at each number of micro-batches.
        cluster: the cluster to plan for.
        cost_model_for: `cost_model_for(cluster)` is the cost model to plan with, for this or another cluster.
        num_microbatches: a number, or "auto".
        advise: whether a planner without a plan should look for changes that would allow one.
        on_non_additive: how `steps` treat several micro-batches of a step that is no sum.
        on_interrupt: the effect of Ctrl-C on a search: "raise" stops it, "best" ends it with the best plan so far.
        progress: receives the work that is done and that is left.
        workers: processes that may solve stages before they are needed.
        measure: `measure(plan)` is seconds of a step of a plan on real devices; None where there are none.
    """

    signature: StepSignature
    steps: Steps
    cluster: Cluster
    cost_model_for: Callable[[Cluster], CostModel]
    num_microbatches: int | str = "auto"
    advise: bool = True
    on_non_additive: str = "refuse"
    on_interrupt: OnInterrupt = "raise"
    progress: Progress = field(default_factory=Progress)
    workers: Workers = field(default_factory=Workers)
    measure: Callable[[Plan], float] | None = None

    @property
    def batch_size(self) -> int | None:
        """The samples of a step; None if its batch is unknown."""
        return self.signature.batch_size

    @property
    def floor_seconds(self) -> float:
        """A lower bound on the seconds of a step, whatever the plan (`work_floor`)."""
        # Of the step as written: several micro-batches read weights more often, and recomputation adds work.
        return self.floor_at(1)

    def floor_at(self, num_microbatches: int) -> float:
        """Return a lower bound on the seconds of a step with so many micro-batches."""
        return least_seconds(self.step_at(num_microbatches, 0), self.cluster, self.cost_model_for)

    @cached_property
    def cost_model(self) -> CostModel:
        """The cost model of the cluster to plan for."""
        return self.cost_model_for(self.cluster)

    def under(self, schedule: Schedule, num_stages: int) -> PlanRequest:
        """Return the request for the step as a schedule runs it: with several updates if it is asynchronous."""
        return replace(self, steps=self.steps.updated_every(schedule.microbatches_per_update(num_stages)))

    def step_of(self, plan: Plan) -> StepGraph:
        """Return the step that a plan was made for, without recomputation."""
        request = self.under(plan.schedule, len(plan.stages))
        return request.step_at(plan.num_microbatches, plan.loop_parts)

    def step_at(self, num_microbatches: int, loop_parts: int) -> StepGraph:
        """Return the step cut into phases; see `Steps.at`."""
        return self.steps.at(num_microbatches, loop_parts)

    def microbatch_choices(self, default: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of micro-batches to consider: the user's, or those of `default` that divide the batch."""
        if self.num_microbatches != "auto":
            return (int(self.num_microbatches),)
        if self.batch_size is None:
            return (1,)
        size = self.batch_size
        return tuple(dict.fromkeys(m for m in default if m >= 1 and size % m == 0)) or (1,)

    def best_step(self, default: Sequence[int], *, loop_parts: int) -> StepGraph:
        """Return the step at the first number of micro-batches that can be traced, at the latest at 1.

        Errors are raised only for a number that the user gave.
        """
        choices = self.microbatch_choices(default)
        for m in choices:
            try:
                return self.step_at(m, loop_parts)
            except (NonAdditiveError, BatchError, TraceError):
                if self.num_microbatches != "auto":
                    raise
        # With one micro-batch nothing has to be cut: whatever this raises concerns the step itself.
        return self.step_at(1, loop_parts)


AXES = ("x", "replica", "data", "model")

Pin = Sequence[str | Sequence[str] | None]
"""For each dim of an array an axis, several axes, or None, as a `PartitionSpec` has them."""

Pins = Mapping[str, Pin]
Axes = Mapping[str, int]


def pinned_axes(pins: Pins) -> frozenset[str]:
    """Return all axes that pins name. Raises `PlanError` for axes that no mesh of the search has."""
    axes = frozenset(axis for name, dims in pins.items() for dim in _dims(name, dims) for axis in dim)
    unknown = sorted(axes - {*AXES})
    if unknown:
        raise PlanError(f"pins name the mesh axes {unknown}, but those of the search are {', '.join(AXES)}. Use these.")
    if "x" in axes and len(axes) > 1:
        raise PlanError(
            f"pins name the mesh axes {sorted(axes)}, but a mesh has either the axis x alone or some of replica, data"
            " and model. Use axes of one of the two."
        )
    return axes


def pinned_specs(step: StepGraph, pins: Pins) -> dict[int, Spec]:
    """Return the spec of each pinned input of a step's graph, rows of stacked arguments included."""
    names = step.argument_paths()
    found: dict[int, Spec] = {}
    for pin, dims in pins.items():
        name = _named(pin, names.values())
        for v in (v for v, other in names.items() if other == name):
            value, wanted = step.graph.values[v], _dims(pin, dims)
            if len(wanted) > value.rank:
                raise PlanError(
                    f"The pin of {pin!r} has {len(wanted)} dims, but {name} has shape {list(value.shape)}. Give one "
                    "entry per dim at most."
                )
            # As in a `PartitionSpec`, dims without an entry are whole.
            found[v] = Spec((*wanted, *((),) * (value.rank - len(wanted))))
    return found


def pins_on_mesh(step: StepGraph, pins: Pins, axes: Axes) -> dict[int, Spec]:
    """Return `pinned_specs` for a mesh with these axes, without axes of one device.

    Raises `PlanError` for other axes, one that a spec names twice, and dims that their devices do not divide.
    """
    values = step.graph.values
    return {v: _on_mesh(values[v].name, values[v], spec, axes) for v, spec in pinned_specs(step, pins).items()}


def _on_mesh(name: str, value: Value, spec: Spec, axes: Axes) -> Spec:
    """Return the spec of a value without the axes of one device. Raises `PlanError` if the value cannot have it."""
    named = [axis for dim in spec.dims for axis in dim]
    if unknown := [axis for axis in named if axis not in axes]:
        raise PlanError(f"The pin of {name} names the axes {unknown}, but the mesh has {list(axes)}.")
    if len(set(named)) < len(named):
        raise PlanError(f"The pin {spec} of {name} names an axis twice. Each splits one dim at most.")
    if not divides(spec, value.shape, axes):
        raise PlanError(
            f"The pin {spec} of {name} needs dims that its axes divide ({dict(axes)}), but the shape is "
            f"{list(value.shape)}. Pin other dims, or pad the array."
        )
    # A mesh of the plan has no axes of one device.
    wide = Spec(tuple(tuple(axis for axis in dim if axes[axis] > 1) for dim in spec.dims))
    if wide.axes and value.dtype.startswith("key<"):
        raise PlanError(f"The pin {spec} splits the random keys {name}, which every device holds whole.")
    return wide


class Pinned(NamedTuple):
    """The given specs of inputs and outputs of a graph."""

    inputs: Mapping[int, Spec]
    outputs: Mapping[int, Spec]


def with_results(step: StepGraph, results: Sequence[str], inputs: Mapping[int, Spec], pins: Pins, axes: Axes) -> Pinned:
    """Add `pins` of results, on a mesh with these axes, to the given specs of inputs; `results` are the paths by leaf.

    State whose argument has no spec of its own comes in as it goes out. Raises `PlanError` as `pins_on_mesh` does, and
    if one array would be returned in two specs.
    """
    graph, found, taken = step.graph, dict[int, Spec](), dict(inputs)
    for v, part in zip(graph.outputs, step.output_parts, strict=True):
        name = results[part.leaf]
        if name not in pins:
            continue
        spec = _of_result(name, graph.values[v], pins[name], axes)
        if found.setdefault(v, spec) != spec:
            raise PlanError(f"Result {name!r} is returned twice, in {found[v]} and in {spec}. Give both one spec.")
        # An argument that is returned as it came is one array, with one spec.
        if v in graph.inputs and taken.setdefault(v, spec) != spec:
            raise PlanError(
                f"Result {name!r} is an argument that is handed on as it came, in {taken[v]}, but {spec} was asked "
                "for. Give both one spec."
            )
    # The results of one step are the arguments of the next: in the same spec nothing moves between steps.
    for v in found.keys() & step.aliases.keys():
        taken.setdefault(step.aliases[v], found[v])
    # State is returned in the spec of its argument in any case, so that it needs no entry among the outputs.
    return Pinned(taken, {v: s for v, s in found.items() if v not in taken and taken.get(step.aliases.get(v, -1)) != s})


def check_results(pins: Pins, results: Sequence[str]) -> None:
    """Raise `PlanError` for pins of results that do not exist."""
    if unknown := [name for name in pins if name not in results]:
        near = get_close_matches(unknown[0], results, n=3, cutoff=0.3) or [*results][:3]
        raise PlanError(f"There is no result {unknown[0]!r} to pin. Did you mean {', '.join(map(repr, near))}?")


def _of_result(name: str, value: Value, pin: Pin, axes: Axes) -> Spec:
    wanted = _dims(f"result {name}", pin)
    if len(wanted) > value.rank:
        raise PlanError(
            f"The pin of result {name!r} has {len(wanted)} dims, but its shape is {list(value.shape)}. Give one entry "
            "per dim at most."
        )
    return _on_mesh(f"result {name!r}", value, Spec((*wanted, *((),) * (value.rank - len(wanted)))), axes)


def _named(pin: str, names: Iterable[str]) -> str:
    # Pins may come from a file, and the name ends up in an error or a table.
    pin, known = printable(pin), dict.fromkeys(filter(None, names))
    # A whole path takes precedence over paths that end like it.
    matches = [name for name in known if name == pin] or [name for name in known if name.endswith("/" + pin)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise PlanError(f"The pin {pin!r} fits {', '.join(matches[:4])}. Give more of the path.")
    near = get_close_matches(pin, known, n=3, cutoff=0.3) or [*known][:3]
    raise PlanError(f"There is no argument {pin!r} to pin. Did you mean {', '.join(near)}?")


def _dims(name: str, dims: Pin) -> tuple[tuple[str, ...], ...]:
    # A string is a sequence too, whose letters would be taken for axes.
    if isinstance(dims, str):
        raise PlanError(f"The pin of {name!r} is {dims!r}; give a PartitionSpec, or one entry per dim in a tuple.")
    return tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in dims)
