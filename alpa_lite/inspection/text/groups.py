"""The arguments and the collectives of a plan in groups: many of them become one row of a table.

layers/0/mlp/w, layers/1/mlp/w, … with one spec          →   layers/*/mlp/w ×n          (`group_arguments`)
layers/w[0:6], layers/w[6:12] (rows of a stacked array)  →   layers/w[*] ×2             (`group_arguments`)
opt_state/0/mu/layers/0/mlp/w                            →   belongs to layers/0/mlp/w  (`parameter_of`)

collectives by source line    of one kind, axis and phase, the longest first                    (`group_collectives`)
collectives by mesh axis      bytes and seconds, and the links: inside hosts or between them    (`axis_uses`)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from alpa_lite.plan.plan import ArrayShape, CollectiveUse, Plan, StagePlan
from alpa_lite.sharding.specs import Spec, local_shape, num_shards
from alpa_lite.text import short_source, show_numbers

OPTIMIZER_NAMES = frozenset(
    "opt_state opt optimizer optimizer_state optim mu nu momentum momentums velocity trace inner_state".split()
)
"""Path components that mark optimizer state in optax, flax and most hand-written train steps."""

# The numbers of layer_1 and layer_2, or of 1 and 2, are places in a list; w1 and w2 are different names.
_NUMBER = re.compile(r"^(?P<stem>|.*_)(?P<number>\d+)$")
_ROWS = re.compile(r"^(?P<stem>.+)\[(?P<rows>\d+:\d+)\]$")

_MOST_ROWS = 3
"""The greatest number of row blocks of a stacked array that are listed; more are shown as `*`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One array among the arguments of the step.

    name          its path in the arguments
    stage         the stage that stores it
    spec          how its dims are split over the stage's mesh axes
    num_shards    the number of different blocks it is split into
    shape         shape and dtype of the whole array; None in plans of earlier versions
    block         shape and dtype of the block on one device; None in plans of earlier versions
    """

    name: str
    stage: int
    spec: Spec
    num_shards: int
    shape: ArrayShape | None = None
    block: ArrayShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentGroup:
    """Arguments that share a spec and whose paths differ only in numbers; `pattern` has `*` in those places."""

    pattern: str
    members: tuple[Argument, ...]

    @property
    def spec(self) -> Spec:
        """The spec that all members share."""
        return self.members[0].spec

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of all members; replicas of a stage have the same."""
        return tuple(dict.fromkeys(member.name for member in self.members))

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages that store a member, in order."""
        return tuple(sorted({member.stage for member in self.members}))


@dataclass(frozen=True)
class Arguments:
    """All named arguments of a plan, with the optimizer state identified."""

    all: tuple[Argument, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Argument]:
        """The arguments by path."""
        return {argument.name: argument for argument in self.all}

    @cached_property
    def plain(self) -> tuple[Argument, ...]:
        """Parameters and inputs: all arguments but optimizer state."""
        return tuple(a for a in self.all if not is_optimizer_state(a.name))

    @cached_property
    def optimizer(self) -> tuple[Argument, ...]:
        """The arguments that are optimizer state."""
        return tuple(a for a in self.all if is_optimizer_state(a.name))

    @cached_property
    def owners(self) -> Mapping[str, str]:
        """The path of the parameter to which an optimizer array belongs, by the path of the array."""
        by_suffix: dict[tuple[str, ...], str] = {}
        # Of several parameters that end alike, the one with the shortest path is taken for the owner.
        for argument in sorted(self.plain, key=lambda a: a.name.count("/")):
            parts = tuple(argument.name.split("/"))
            for start in range(len(parts)):
                # Every suffix of every path, so that the owner is one lookup per optimizer array and not a search.
                by_suffix.setdefault(parts[start:], argument.name)
        owners = {a.name: parameter_of(a.name, by_suffix) for a in self.optimizer}
        return {name: owner for name, owner in owners.items() if owner is not None}

    @cached_property
    def unlike_parameter(self) -> tuple[Argument, ...]:
        """The optimizer arrays whose spec differs from their parameter's spec."""
        return tuple(
            a for a in self.optimizer if a.name in self.owners and a.spec != self.by_name[self.owners[a.name]].spec
        )


def arguments_of(plan: Plan) -> Arguments:
    """Return the named arguments of a plan, stage by stage."""
    return Arguments(
        tuple(_argument(name, number, stage) for number, stage in enumerate(plan.stages) for name in stage.specs)
    )


def _argument(name: str, number: int, stage: StagePlan) -> Argument:
    spec, sizes, shape = stage.specs[name], stage.mesh_shape.axis_sizes, stage.shapes.get(name)
    # Plans of earlier versions have no shapes, and so no blocks.
    block = None if shape is None else replace(shape, dims=local_shape(spec, shape.dims, sizes))
    return Argument(name=name, stage=number, spec=spec, num_shards=num_shards(spec, sizes), shape=shape, block=block)


def is_optimizer_state(name: str) -> bool:
    """Return True if a path goes through optimizer state."""
    # Not by the name of the array itself: a parameter may be called mu.
    return any(part in OPTIMIZER_NAMES for part in name.split("/")[:-1])


def parameter_of(name: str, by_suffix: Mapping[tuple[str, ...], str]) -> str | None:
    """Return the parameter of an optimizer array: the one whose path ends in the longest suffix of its path."""
    parts = tuple(name.split("/"))
    # Optimizers nest, so the path of the parameter begins after the last of their names.
    last = max(i for i, part in enumerate(parts[:-1]) if part in OPTIMIZER_NAMES)
    tails = (parts[start:] for start in range(last + 1, len(parts)))
    return next((by_suffix[tail] for tail in tails if tail in by_suffix), None)


def group_arguments(arguments: Iterable[Argument]) -> tuple[ArgumentGroup, ...]:
    """Group arguments with one spec whose paths differ only in numbers, in order of first appearance of the path."""
    listed = tuple(arguments)
    alike: dict[tuple[str, ...], int] = {}
    groups: dict[tuple[tuple[str, ...], Spec], list[Argument]] = {}
    for argument in listed:
        stems = tuple(map(_stem, argument.name.split("/")))
        alike[stems] = alike.get(stems, 0) + 1
        # By stems and spec together: a layer that is sharded differently gets a row of its own.
        groups.setdefault((stems, argument.spec), []).append(argument)
    # Groups of one path stand together, where its first array stands.
    order = {stems: number for number, stems in enumerate(alike)}
    return tuple(
        ArgumentGroup(pattern=_pattern(members, whole=len(members) == alike[stems]), members=tuple(members))
        for (stems, _), members in sorted(groups.items(), key=lambda item: order[item[0][0]])
    )


def _stem(part: str) -> str:
    """Return a component of a path with `*` in place of its number."""
    if (rows := _ROWS.match(part)) is not None:
        return f"{_stem(rows['stem'])}[*]"
    match = _NUMBER.match(part)
    return part if match is None else f"{match['stem']}*"


def _pattern(members: Sequence[Argument], *, whole: bool) -> str:
    """Return the common path of members, with `*` where they differ.

    Where others with the same stems have another spec (not `whole`), the numbers are listed instead of `*`.
    """
    columns = zip(*(member.name.split("/") for member in members), strict=True)
    return "/".join(_column(parts, whole=whole) for parts in columns)


def _column(parts: Sequence[str], *, whole: bool) -> str:
    if len(set(parts)) == 1:
        return parts[0]
    rows = [match for part in parts if (match := _ROWS.match(part)) is not None]
    if rows:
        stem = _column([match["stem"] for match in rows], whole=whole)
        # Stages that store equal row blocks would list them twice.
        listed = list(dict.fromkeys(match["rows"] for match in rows))
        return f"{stem}[{'*' if whole or len(listed) > _MOST_ROWS else ', '.join(listed)}]"
    matches = [match for part in parts if (match := _NUMBER.match(part)) is not None]
    numbers = "*" if whole else f"{{{show_numbers(int(match['number']) for match in matches)}}}"
    return f"{matches[0]['stem']}{numbers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveGroup:
    """Collectives of one kind, axis and phase that arise on one source line.

    stages     the stages that run them
    count      runs per step
    bytes      bytes of all runs in a step
    seconds    predicted seconds of all runs in a step
    """

    kind: str
    axis: str
    phase: str
    source: str
    stages: tuple[int, ...]
    count: float
    bytes: float
    seconds: float


def group_collectives(uses: Iterable[CollectiveUse]) -> tuple[CollectiveGroup, ...]:
    """Group collectives by kind, axis, phase and source line, the longest first."""
    groups: dict[tuple[str, ...], list[CollectiveUse]] = {}
    for use in uses:
        # Without the stage: a line of a repeated layer runs on many.
        groups.setdefault((use.kind, use.axis, use.phase, source_of(use)), []).append(use)
    found = [
        CollectiveGroup(
            kind=kind,
            axis=axis,
            phase=phase,
            source=source,
            stages=tuple(sorted({use.stage for use in members})),
            count=sum(use.count for use in members),
            bytes=sum(use.bytes * use.count for use in members),
            seconds=sum(use.seconds * use.count for use in members),
        )
        for (kind, axis, phase, source), members in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: -group.seconds))


def source_of(use: CollectiveUse) -> str:
    """Return the user's source line, shortened; for a collective that belongs to no line, its purpose."""
    if use.source:
        return short_source(use.source)
    if use.phase == "update":
        return "(gradients, summed)" if use.kind in ("all_reduce", "reduce_scatter") else "(new state)"
    return "(between lines)"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """Collectives of one kind over one axis (or several, joined by `·`), summed over all stages and one step.

    axis      name of the mesh axis or axes
    kind      kind of the collective
    devices   number of devices that take part, `4`, or `2, 8` where stages differ
    links     `inside a host`, `between hosts`, or `both` where stages differ
    count     runs per step
    bytes     bytes of all runs
    seconds   predicted seconds of all runs
    """

    axis: str
    kind: str
    devices: str
    links: str
    count: float
    bytes: float
    seconds: float


def axis_uses(plan: Plan) -> tuple[AxisUse, ...]:
    """Return the traffic by axis and kind: the axis with most bytes first, and within it the kind with most bytes."""
    groups: dict[tuple[str, str], list[CollectiveUse]] = {}
    by_axis: dict[str, float] = {}
    for use in plan.prediction.collectives:
        groups.setdefault((use.axis, use.kind), []).append(use)
        by_axis[use.axis] = by_axis.get(use.axis, 0.0) + use.bytes * use.count
    found = [_use(plan, axis, kind, uses) for (axis, kind), uses in groups.items()]
    # All kinds of one axis stay together, whatever their own bytes.
    return tuple(sorted(found, key=lambda use: (-by_axis[use.axis], use.axis, -use.bytes)))


def _use(plan: Plan, axis: str, kind: str, uses: list[CollectiveUse]) -> AxisUse:
    links = {crosses_hosts(plan.stages[use.stage], axis, plan.cluster.devices_per_host) for use in uses}
    return AxisUse(
        axis=axis,
        kind=kind,
        devices=show_numbers(use.num_devices for use in uses),
        links="both" if len(links) > 1 else "between hosts" if True in links else "inside a host",
        count=sum(use.count for use in uses),
        bytes=sum(use.bytes * use.count for use in uses),
        seconds=sum(use.seconds * use.count for use in uses),
    )


def crosses_hosts(stage: StagePlan, axis: str, devices_per_host: int) -> bool:
    """Return True if devices that differ along an axis are on different hosts; False if the stage's mesh lacks it."""
    names = [name for name in axis.split("·") if name in stage.mesh_shape.axis_names]
    # Devices are numbered host by host, so the host of a device is its number divided by the devices per host.
    first = stage.submesh.first_device
    return any(
        len({(first + place) // devices_per_host for place in group}) > 1 for group in stage.mesh_shape.groups(*names)
    )
