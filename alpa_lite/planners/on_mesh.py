"""One stage on a logical mesh of the user, with named axes, some of which split the batch.

The integer program chooses the sharding of every op on it, as it does for the 1-D and 2-D meshes of the search. With
axes such as data × fsdp × model this is the mesh for which a GSPMD program would be annotated by hand.

`Custom` plans for the placement that the user already has, as `PartitionSpec`s of arguments and results:

    al.planners.Custom(mesh={"data": 2, "model": 4}, in_specs=(state_specs, P("data")))      as jax.jit(in_shardings=…)
    al.planners.Custom(mesh=mesh, in_specs=…, out_specs=(state_specs, P()))         … and as jax.jit(out_shardings=…)
    al.planners.Custom(mesh=mesh, rules=[(r"w_up$", P(None, "model")), (r"w_down$", P("model"))])

It is `OnMesh` with these arrays pinned. The integer program chooses how the ops inside are split, where XLA's
partitioner would propagate the placement of the arguments. State keeps its placement from step to step, and other
results are returned in the placement in which they are computed, unless `out_specs` says otherwise.

Trees of `PartitionSpec`s and `NamedSharding`s are read as `jax.jit` reads them. Planning imports no JAX: containers are
recognised by the types of which pytrees of parameters consist, and everything else is a spec.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import NamedTuple, Protocol, TypeGuard, cast, runtime_checkable

from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.assembly import StagedStep, assemble
from alpa_lite.inter_op.plan_request import Pin, Pins, PlanRequest, check_results, pins_on_mesh, with_results
from alpa_lite.inter_op.sharding_demands import argument_pins, result_pins, user_layout, user_mesh
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.stage_costs import SolveEffort, StageConstraints, StageCosts
from alpa_lite.inter_op.what_would_fit import show_bytes, show_shortage
from alpa_lite.intra_op.stage import NO_LAYOUT, GivenLayout
from alpa_lite.intra_op.strategies import AxisRole, BatchSplit, Restriction
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.planner import Planner
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import OneFOneB
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers
from alpa_lite.text import show_usable


@dataclass(frozen=True, kw_only=True)
class OnMesh(Planner):
    """One stage on all devices, which form a mesh with axes of your own; the integer program chooses all shardings.

    Attributes:
        axes: devices per axis, the last one over neighbouring devices; at most four of more than one device.
        batch: axes that split the batch wherever they divide it, and may split state (ZeRO). The other axes split
            whatever is best, the batch included.
        pins: given shardings of arguments over these axes, by path, as in `Auto`.
        outputs: the same for results of the step, by path (`0/params/w`, or "" for a single one). Without them state is
            returned as it came in, and other results as they are computed.
    """

    obeys_user_shardings = True

    axes: Mapping[str, int] = field(hash=False)
    batch: tuple[str, ...] = field(default=())
    pins: Pins = field(default_factory=dict[str, Pin], hash=False)
    outputs: Pins = field(default_factory=dict[str, Pin], hash=False)

    @property
    def name(self) -> str:
        """The axes, such as `mesh data=2 × model=4`."""
        return "mesh " + " × ".join(f"{name}={size}" for name, size in self.axes.items())

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the axes do not cover the cluster, `InfeasibleError` if none fits."""
        if unknown := [axis for axis in self.batch if axis not in self.axes]:
            raise PlanError(f"batch names the axes {unknown}, but the mesh has {list(self.axes)}.")
        check_results(self.outputs, request.signature.results)
        # Axes of one device are not part of the logical mesh (`_mesh`).
        roles = {axis: AxisRole.BATCH for axis in self.batch if self.axes[axis] > 1}
        restriction = Restriction(roles=roles, optimizer=BatchSplit.MAY, parameters=BatchSplit.MAY)
        asked = user_mesh(request.step_at(1, 0), request.signature.user_shardings)
        if asked is not None and _wide(asked) != _wide(self.axes):
            raise PlanError(
                f'user_shardings="pin": the shardings of {request.signature.function} are on the mesh {asked}, but the '
                f"planner is to use {dict(self.axes)}. Give the planner that mesh."
            )
        constraints = MeshConstraints(restriction=restriction, pins=self.pins, outputs=self.outputs)
        return plan_on_mesh(self.name, request, self.axes, constraints)


@dataclass(frozen=True, kw_only=True)
class MeshConstraints:
    """The restrictions of a plan on a mesh of given axes.

    Attributes:
        restriction: the use of each axis.
        pins, outputs: as in `OnMesh`.
        layout: constraints on the values of `request.best_step((1,), loop_parts=0)` (`intra_op.stage`).
        keeps_gathered: whether parameters that the forward pass gathers stay gathered for the backward pass.
    """

    restriction: Restriction
    pins: Pins = field(default_factory=dict[str, Pin])
    outputs: Pins = field(default_factory=dict[str, Pin])
    layout: GivenLayout = NO_LAYOUT
    keeps_gathered: bool = False

    def on(self, request: PlanRequest, step: StepGraph, axes: Mapping[str, int]) -> StageConstraints:
        """Return the constraints on the values of a step. Raises `PlanError` for pins that do not fit."""
        pins, outputs, layout = self.pins, self.outputs, self.layout
        if request.signature.user_shardings.mode == "pin":
            # Pins given as an option take precedence over the placement of the arguments.
            pins = {**argument_pins(step, request.signature.user_shardings), **pins}
            outputs = {**result_pins(request.signature.user_shardings), **outputs}
            layout = user_layout(step, request.signature.user_shardings, axes) if layout is NO_LAYOUT else layout
        pinned = with_results(step, request.signature.results, pins_on_mesh(step, pins, axes), outputs, axes)
        return StageConstraints(
            restriction=self.restriction,
            pins=pinned.inputs,
            outputs=pinned.outputs,
            keeps_gathered=self.keeps_gathered,
            layout=layout,
        )


def plan_on_mesh(name: str, request: PlanRequest, axes: Mapping[str, int], constraints: MeshConstraints) -> Plan:
    """Return a plan of one stage on all devices, which form a mesh of these axes; see `OnMesh.plan`."""
    started = time.perf_counter()
    mesh, cluster = _mesh(name, request, axes), request.cluster
    step = request.best_step((1,), loop_parts=0)
    layers = make_layers(step, 1)
    given = constraints.on(request, step, axes)
    costs = StageCosts(
        step=step,
        layers=layers,
        cost_model=request.cost_model,
        constraints=given,
        # Where nothing is explained, a bound is enough.
        effort=SolveEffort(peaks="least" if request.advise else "bounded"),
        progress=request.progress,
    )
    submesh = Submesh(first_device=0, num_hosts=cluster.num_hosts, devices_per_host=cluster.devices_per_host)
    place = StagePlace(0, 0, submesh, mesh)
    solution = costs.solution(place)
    if solution.choice is None:
        # Explaining a shortage takes further solves.
        why = costs.shortage(place) if request.advise else None
        device = cluster.device
        raise InfeasibleError(
            f"{name} does not fit: it needs at least {show_bytes(solution.peak_bytes)} per device, but "
            f"{device.name} has {show_usable(device.usable_bytes, device.reserved_bytes)}. {show_shortage(why)}"
            "Use more micro-batches, more hosts, or al.planners.Auto, which also tries pipelines."
        )
    # With one stage all schedules run the same tasks in the same order.
    staged = StagedStep(step=step, layers=layers, stages=[place.with_solution(solution)], schedule=OneFOneB())
    return assemble(name, request, staged, started)


def _wide(axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes of more than one device."""
    return {axis: size for axis, size in axes.items() if size > 1}


def _mesh(name: str, request: PlanRequest, axes: Mapping[str, int]) -> LogicalMesh:
    total = request.cluster.num_devices
    if not axes or prod(axes.values()) != total:
        raise PlanError(
            f"The axes {dict(axes)} have {prod(axes.values())} devices, but {request.cluster.name} has {total}. Choose "
            f"sizes whose product is {total}."
        )
    # An axis of one device splits nothing; with none left, the first stands for all.
    wide = {axis: size for axis, size in axes.items() if size > 1} or dict([*axes.items()][:1])
    if len(wide) > 4:
        raise PlanError(
            f"{name} has {len(wide)} axes. The strategies grow exponentially with their number: use at most 4."
        )
    return LogicalMesh(axis_names=tuple(wide), shape=tuple(wide.values()))


class _Sharding(Protocol):
    """The parts of a `jax.sharding.NamedSharding` that are read here."""

    mesh: _HasShape
    spec: object


class _HasShape(Protocol):
    """A mesh with its number of devices per axis."""

    @property
    def shape(self) -> Mapping[str, int]: ...


@runtime_checkable
class _Named(Protocol):
    """A named tuple."""

    _fields: tuple[str, ...]


class _Given(NamedTuple):
    """A leaf of a tree of specs."""

    path: str
    spec: object


def by_path(option: str, tree: object, paths: Sequence[str], empty: Sequence[str] = ()) -> dict[str, object]:
    """Return the specs of arrays by path, from a tree with specs for arrays or for whole subtrees.

    Args:
        option: name of the option that holds the tree, for messages.
        tree: tree of specs; None leaves arrays open.
        paths: paths of all arrays.
        empty: paths below which there need not be any arrays.

    Raises:
        PlanError: an entry belongs to no array, or a list has fewer entries than there are arrays.
    """
    found: dict[str, object] = {}
    for path, spec in _leaves(tree, "", option, paths):
        # A spec for a subtree holds for all arrays in it, as in `jax.jit`.
        below = [name for name in paths if _is_in(name, path)]
        if not below and path not in empty:
            near = get_close_matches(path, paths, n=3, cutoff=0.3) or [*paths][:3]
            # An argument or result that is one array has the empty path.
            meant = f"Did you mean {', '.join(near)}?" if near != [""] else "There is one array, and no container."
            raise PlanError(
                f"{option} has an entry for {path!r}, but there is no such array. {meant} Write specs as "
                "PartitionSpec(...): a tuple is a tree."
            )
        found |= dict.fromkeys(below, spec)
    return found


def meshes(tree: object) -> list[dict[str, int]]:
    """Return the devices per axis of the mesh of each `NamedSharding` in a tree."""
    children = _children(tree)
    if children is not None:
        return [mesh for _, child in children for mesh in meshes(child)]
    return [dict(tree.mesh.shape)] if _is_sharding(tree) else []


def dims_of(name: str, spec: object) -> Pin:
    """Return the dims of a spec, each None, an axis or a tuple of axes. Raises `PlanError` for anything else."""
    spec = spec.spec if _is_sharding(spec) else spec
    # "?" marks something that is no spec, and is refused below together with wrong entries.
    dims = tuple(spec) if isinstance(spec, Iterable) and not isinstance(spec, str) else ("?",)
    entries = [axis for dim in dims for axis in (dim if isinstance(dim, tuple) else (dim,))]
    plain = all(axis is None or type(axis) is str for axis in entries) and "?" not in entries
    # Specs of partial sums would lose what makes them partial.
    if not plain or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise PlanError(
            f"The spec of {name} is {spec!r}; give a PartitionSpec or a NamedSharding of whole sums, with None, an "
            "axis or a tuple of axes for each dim. Give None in its place where the planner may choose."
        )
    return dims


def _is_in(name: str, path: str) -> bool:
    """Return True if a path is another one or continues it."""
    return not path or name == path or name.startswith(f"{path}/")


def _is_sharding(spec: object) -> TypeGuard[_Sharding]:
    """Return True for a `jax.sharding.NamedSharding`."""
    return hasattr(spec, "mesh") and hasattr(spec, "spec")


def _leaves(tree: object, path: str, option: str, paths: Sequence[str]) -> Iterator[_Given]:
    """Yield the specs in a tree, each with its path; None is left out."""
    children = _children(tree)
    if tree is None:
        return
    if children is None:
        yield _Given(path, tree)
        return
    below = f"{path}/" if path else ""
    if isinstance(tree, (tuple, list)):
        # A list that is too short would leave arrays open without a word; entries too many are found by the caller.
        next_keys = (name.removeprefix(below).partition("/")[0] for name in paths if _is_in(name, path))
        most = max((int(key) + 1 for key in next_keys if key.isdecimal()), default=0)
        if len(children) < most:
            raise PlanError(
                f"{option} has {len(children)} entries{f' at {path!r}' if path else ''}, but there are arrays in "
                f"{most}. Give one for each, None where the planner may choose."
            )
    for key, child in children:
        yield from _leaves(child, f"{below}{key}", option, paths)


def _children(tree: object) -> list[tuple[str, object]] | None:
    """Return the entries of a container by their keys in paths; None for a leaf."""
    if isinstance(tree, Mapping):
        return [(str(key), child) for key, child in cast("Mapping[object, object]", tree).items()]
    # Named tuples before tuples: paths name their fields.
    if isinstance(tree, tuple) and isinstance(tree, _Named):
        return list(zip(tree._fields, cast("tuple[object, ...]", tree), strict=True))
    if isinstance(tree, (tuple, list)):
        return [(str(i), child) for i, child in enumerate(cast("Sequence[object]", tree))]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in fields(tree)]
    return None


@dataclass(frozen=True, kw_only=True)
class Custom(Planner):
    """A plan with given placements of arguments and results.

    Attributes:
        mesh: devices per axis, or a `jax.sharding.Mesh`, of which only names and sizes count: the devices are those of
            the cluster in their order. None: the mesh of the `NamedSharding`s.
        in_specs: a tuple with one entry per positional argument that is not static, or a mapping from argument names.
            An entry is a `PartitionSpec` or `NamedSharding` for the whole argument, or a tree of such in the structure
            of the argument or of a prefix of it. None leaves the choice to the planner.
        out_specs: one such entry for the result of the step. State whose argument has no spec of its own comes in as it
            is returned.
        rules: pairs of a regular expression and a `PartitionSpec`: arguments that `in_specs` leaves open, with more
            than one element, get the spec of the first expression that matches in their path (`state/params/w`).
        batch: axes that split only the batch and state; see `OnMesh`. The others may split anything.
    """

    obeys_user_shardings = True

    mesh: object = field(default=None, hash=False)
    in_specs: object = field(default=(), hash=False)
    out_specs: object = field(default=None, hash=False)
    rules: Sequence[tuple[str, object]] = field(default=(), hash=False)
    batch: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name for tables."""
        return "custom"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if a spec fits no array, or the mesh does not cover the cluster."""
        step = request.step_at(1, 0)
        arrays = {
            step.graph.values[v].name: step.graph.values[v].num_elements
            for v, part in zip(step.graph.inputs, step.input_parts, strict=True)
            if part.leaf < request.signature.num_arguments
        }
        trees = self._trees(request)
        pins = by_path("in_specs", trees, [*arrays], request.signature.arguments)
        pins |= self._by_rules([name for name, size in arrays.items() if name not in pins and size > 1])
        returned = by_path("out_specs", self.out_specs, request.signature.results)
        found = OnMesh(
            axes=self._axes(trees),
            batch=self.batch,
            pins={name: dims_of(name, spec) for name, spec in pins.items()},
            outputs={name: dims_of(f"result {name}", spec) for name, spec in returned.items()},
        )
        return replace(found.plan(request), name=self.name)

    def _trees(self, request: PlanRequest) -> Mapping[str, object]:
        """Return the entry of each argument, by its name."""
        names = request.signature.arguments
        if isinstance(self.in_specs, Mapping):
            return cast("Mapping[str, object]", self.in_specs)
        if not isinstance(self.in_specs, (tuple, list)):
            raise PlanError(
                f"in_specs = {self.in_specs!r} was given; give a tuple with one entry per argument, or a mapping from "
                f"the names {', '.join(names)}."
            )
        entries = cast("Sequence[object]", self.in_specs)
        if entries and len(entries) != len(names):
            raise PlanError(
                f"in_specs has {len(entries)} entries, but the step takes {len(names)} positional "
                f"arguments ({', '.join(names)}). Give one for each, None where the planner may choose."
            )
        # No entries at all leave every argument open.
        return dict(zip(names, entries, strict=False))

    def _by_rules(self, names: Sequence[str]) -> dict[str, object]:
        found: dict[str, object] = {}
        for pattern, spec in self.rules:
            fitting = [name for name in names if re.search(pattern, name)]
            # Most likely a mistake in the pattern, which would go unnoticed otherwise.
            if not fitting:
                raise PlanError(f"The rule {pattern!r} fits no array that has no spec yet. Take it out, or correct it.")
            found |= {name: spec for name in fitting if name not in found}
        return found

    def _axes(self, trees: Mapping[str, object]) -> Mapping[str, int]:
        found = meshes((trees, self.out_specs))
        if self.mesh is not None:
            # A mesh of JAX has its sizes in `shape`; a mapping of the user is used as it is.
            shape = cast("Mapping[str, int]", getattr(self.mesh, "shape", self.mesh))
            found.append(dict(shape))
        if not found:
            raise PlanError('Specs need a mesh to name axes of: give mesh={"data": 2, "model": 4}, or NamedShardings.')
        for other in found[1:]:
            if other != found[0]:
                raise PlanError(f"The specs are for meshes {found[0]} and {other}. Give specs for one mesh.")
        return found[0]
