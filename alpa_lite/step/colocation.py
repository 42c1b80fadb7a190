"""Groups of forward ops that stay on one device: branches of a step apart from each other.

    atoms       an op is grouped with the only op that reads its results, as long as the group has one contraction or
                loop; what several ops read ends a group                                              `_atoms`
    order       groups follow those that they read, and a branch is finished before the next begins   `_in_order`
    merging     groups without a contraction join those beside them; then the two neighbours with the least FLOPs are
                merged until there are few enough, first those of which one reads the other and which together wait for
                no more than before                                                                   `_merge`

The first rule is that of Mirhoseini et al., Device Placement Optimization with Reinforcement Learning (ICML 2017),
section 3.3. Groups that follow each other never depend on each other in a circle, so that each can be a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alpa_lite.errors import PlanError
from alpa_lite.program.phases import Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.step.layers import Layers, contractions, followed, op_flops, readers_of
from alpa_lite.text import did_you_mean


@dataclass(frozen=True, kw_only=True)
class ColocatedGroups:
    """The forward pass in groups, which are the layers of a step.

    Attributes:
        layers: the layers; each is one group.
        edges: pairs of a group and a later one that reads its results.
        together: for each group the number of the set of groups that the user wants on one device; a group that the
            user does not name is a set of its own. Sets are numbered in the order of their first group.
    """

    layers: Layers
    edges: tuple[tuple[int, int], ...]
    together: tuple[int, ...]


def colocated_groups(step: StepGraph, most: int, names: Sequence[str] = ()) -> ColocatedGroups:
    """Return the groups of a step.

    Args:
        step: the step.
        most: the largest number of groups, unless `names` need more.
        names: beginnings of argument paths, such as `params/encoder`. Groups that read an argument with such a path are
            placed together.

    Raises:
        PlanError: `most` is less than 1, or no argument begins with a name.
    """
    if most < 1:
        raise PlanError(f"groups = {most} was asked for. Ask for at least 1.")
    forward = [op.id for op in step.graph.ops if step.phases[op.id] is Phase.FORWARD]
    reads = _reads(step, forward)
    atoms = _atoms(step, forward, reads)
    units = _Units(step, _in_order(forward, atoms, reads), atoms, _labels(step, names))
    number = {op: unit for unit, ops in enumerate(units.ops) for op in ops}
    for op, made in reads.items():
        for other in made:
            if number[other] != number[op]:
                units.link(number[other], number[op])
    _merge(units, most)
    place = {unit: layer for layer, unit in enumerate(units.order)}
    home = {op: place[unit] for unit in units.order for op in units.ops[unit]}
    of_op = [home.get(op.id) for op in step.graph.ops]
    sets = dict[object, int]()
    together = [sets.setdefault(units.label[unit] or unit, len(sets)) for unit in units.order]
    return ColocatedGroups(
        # A step that returns its arguments has a layer without ops.
        layers=followed(step, of_op, max(1, len(units.order))),
        edges=tuple(sorted((place[a], place[b]) for a in units.order for b in units.after[a])),
        together=tuple(together) or (0,),
    )


def _reads(step: StepGraph, forward: Sequence[int]) -> dict[int, set[int]]:
    """Return for each forward op the forward ops whose results it reads."""
    graph, free = step.graph, free_values(step.graph)
    found = {op: set[int]() for op in forward}
    for op in forward:
        for v in graph.ops[op].operands:
            maker = graph.producer[v]
            # Free values are made anew by each reader.
            if maker in found and v not in free:
                found[op].add(maker)
    return found


def _atoms(step: StepGraph, forward: Sequence[int], reads: Mapping[int, set[int]]) -> dict[int, int]:
    """Return for each forward op the number of its group: that of its last op."""
    graph = step.graph
    heavy = {op: contractions(graph, graph.ops[op]) > 0 for op in forward}
    readers = {op: set[int]() for op in forward}
    for op, made in reads.items():
        for other in made:
            readers[other].add(op)
    atom, is_heavy = dict[int, int](), dict[int, bool]()
    for op in reversed(forward):
        only = next(iter(readers[op])) if len(readers[op]) == 1 else None
        home = atom[only] if only is not None else op
        if home != op and heavy[op] and is_heavy[home]:
            home = op
        atom[op] = home
        is_heavy[home] = is_heavy.get(home, False) or heavy[op]
    return atom


def _in_order(forward: Sequence[int], atoms: Mapping[int, int], reads: Mapping[int, set[int]]) -> list[int]:
    """Return the groups in an order in which each follows those that it reads, branch after branch."""
    waits = {atom: set[int]() for atom in atoms.values()}
    readers = {atom: set[int]() for atom in atoms.values()}
    for op in forward:
        for other in reads[op]:
            if atoms[other] != atoms[op]:
                waits[atoms[op]].add(atoms[other])
                readers[atoms[other]].add(atoms[op])
    # The group that became ready last comes first: it goes on with the branch that was just reached. Of those that
    # become ready at once, the first in the program.
    ready, order = sorted((atom for atom in waits if not waits[atom]), reverse=True), list[int]()
    while ready:
        atom = ready.pop()
        order.append(atom)
        for reader in sorted(readers[atom], reverse=True):
            waits[reader].discard(atom)
            if not waits[reader]:
                ready.append(reader)
    return order


class _Units:
    """Groups in their order, with what they read; neighbours can be merged."""

    def __init__(
        self, step: StepGraph, order: Sequence[int], atoms: Mapping[int, int], label: Mapping[int, str]
    ) -> None:
        """Begin with the groups of `atoms`, none of which reads another yet; `label`: the user's names of ops."""
        flops, number = op_flops(step), {atom: n for n, atom in enumerate(order)}
        self.ops: list[list[int]] = [[] for _ in order]
        for op, atom in atoms.items():
            self.ops[number[atom]].append(op)
        self.flops = [sum(flops[op] for op in ops) for ops in self.ops]
        self.heavy = [any(contractions(step.graph, step.graph.ops[op]) for op in ops) for ops in self.ops]
        self.label = [next((label[op] for op in ops if op in label), "") for ops in self.ops]
        self.before = [set[int]() for _ in order]
        self.after = [set[int]() for _ in order]
        self.order = [*range(len(order))]

    def link(self, first: int, then: int) -> None:
        """Record that a group reads the results of another."""
        self.before[then].add(first)
        self.after[first].add(then)

    def pairs(self) -> list[tuple[int, int, int]]:
        """Return the neighbours that may be merged: place in the order, first and second group."""
        found = ((place, *self.order[place : place + 2]) for place in range(len(self.order) - 1))
        labels = self.label
        return [(place, a, b) for place, a, b in found if labels[a] == labels[b] or not (labels[a] and labels[b])]

    def delays_nothing(self, a: int, b: int) -> bool:
        """Return whether the first of two neighbours has to wait for nothing more, and nothing more for it, in one."""
        return self.before[b] <= {a} or self.after[a] <= {b}

    def merge(self, place: int, a: int, b: int) -> None:
        """Make one group of two neighbours."""
        self.ops[a] += self.ops[b]
        self.flops[a] += self.flops[b]
        self.heavy[a] = self.heavy[a] or self.heavy[b]
        self.label[a] = self.label[a] or self.label[b]
        for other in self.before[b] - {a}:
            self.after[other].discard(b)
            self.link(other, a)
        for other in self.after[b]:
            self.before[other].discard(b)
            self.link(a, other)
        self.after[a].discard(b)
        self.order.pop(place + 1)


def _merge(units: _Units, most: int) -> None:
    """Merge light groups with those beside them, and then neighbours until there are at most so many.

    Groups that the user names differently stay apart.
    """

    def linked(a: int, b: int) -> bool:
        return b in units.after[a]

    while light := [
        (place, a, b)
        for place, a, b in units.pairs()
        if linked(a, b) and units.delays_nothing(a, b) and not (units.heavy[a] and units.heavy[b])
    ]:
        units.merge(*light[0])
    while len(units.order) > most:
        pairs = units.pairs()
        if not pairs:
            break
        # Branches stay apart as long as possible: together they would run one after the other.
        units.merge(
            *min(
                pairs,
                key=lambda pair: (
                    not (linked(*pair[1:]) and units.delays_nothing(*pair[1:])),
                    not linked(*pair[1:]),
                    units.flops[pair[1]] + units.flops[pair[2]],
                    pair[0],
                ),
            )
        )


def _labels(step: StepGraph, names: Sequence[str]) -> dict[int, str]:
    """Return the name of each forward op that reads an argument whose path begins with one of `names`."""
    paths, found = step.argument_paths(), dict[int, str]()
    for name in names:
        inputs = [v for v, path in paths.items() if path == name or path.startswith(f"{name}/")]
        if not inputs:
            raise PlanError(
                f"groups names {name!r}, but no argument has such a path.{did_you_mean(name, paths.values())} Give "
                "paths, or beginnings of paths, of arguments."
            )
        for v in inputs:
            for op in readers_of(step, v):
                if step.phases[op] is Phase.FORWARD:
                    found.setdefault(op, name)
    return found
