"""Run a list of ops on one logical mesh under given placements: one walk, shared by pricing and lowering.

The estimator and the emitter are both *machines* driven by this walk, so the collectives that are priced are the
collectives that run. The walk stores each value in every spec in which it was needed; a value that is needed twice in a
spec is resharded once.

Values computed from scalars alone (masks, broadcast constants, random bits) are *free*: they have no home spec and are
made in the spec that a reader needs (`alpa_lite.rules.op_info.free_values`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, NamedTuple, Protocol, TypeVar

from alpa_lite.errors import VerificationError
from alpa_lite.plan.plan import OpPlacement
from alpa_lite.program.ir import Graph, Op, Value, Wiring, item_bytes, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import OpClass, free_values, op_class, op_classes, rule_of_op
from alpa_lite.sharding.reshard import reshard
from alpa_lite.sharding.specs import Move, Spec, addend, replicated, sent_bytes_factor

A = TypeVar("A")


class Application(NamedTuple):
    """One op with all its specs.

    Attributes:
        graph: the graph that holds the op.
        op: the op.
        rule: its factor rule.
        placement: its placement.
        operand_specs: spec in which each operand is read.
        raw_specs: spec of each result before its reductions are carried out.
    """

    graph: Graph
    op: Op
    rule: Rule
    placement: OpPlacement
    operand_specs: tuple[Spec, ...]
    raw_specs: tuple[Spec, ...]


class Machine(Protocol[A]):
    """The interface that a walk drives: it reshards values and applies ops to arrays of type A."""

    def literal(self, value: Value) -> A:
        """Return the array of a scalar constant."""
        ...

    def reshard(self, array: A, value: Value, steps: tuple[Move, ...], op: Op | None) -> A:
        """Return the array after elementary moves; `op` is the reader for which they are made."""
        ...

    def apply(self, application: Application, operands: list[A]) -> list[A]:
        """Run one op on local blocks and return its results in `raw_specs`."""
        ...

    def control_flow(self, application: Application, operands: list[A], wiring: Wiring, walk: Walk[A]) -> list[A]:
        """Run a loop or branches, each body on a walk of its own, and return the results in the placement's specs."""
        ...


def operand_specs(rule: Rule, operands: Sequence[Value], placement: OpPlacement) -> tuple[Spec, ...]:
    """Return the spec in which a placement requires each operand."""
    axes = placement.factors
    specs = [Spec(tuple([_axes(factors, axes) for factors in dims])) for dims in rule.operands]
    # Partial sums pass through one linear group of operands only: the product of two partial sums is none.
    if placement.partial:
        for i in linear_group(rule, operands):
            specs[i] = Spec(specs[i].dims, tuple(sorted(placement.partial)))
    return tuple(specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedSpecs:
    """The specs in which a placement requires the operands, and in which the results are made."""

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]


def placed_specs(graph: Graph, op: Op, placement: OpPlacement) -> PlacedSpecs:
    """Return `operand_specs` and `raw_result_specs` of an op without bodies, computed once per op class."""
    return specs_of_class(op_class(graph, op.id), placement.factors, placement.partial)


@memoized(entries=100_000)
def specs_of_class(kind: OpClass, factors: tuple[tuple[str, ...], ...], partial: tuple[str, ...]) -> PlacedSpecs:
    """Return the `placed_specs` of the ops of a class."""
    placement = OpPlacement(factors=factors, partial=partial)
    return PlacedSpecs(
        operands=operand_specs(kind.rule, kind.view.operands, placement),
        results=raw_result_specs(kind.rule, placement),
    )


def linear_group(rule: Rule, operands: Sequence[Value]) -> tuple[int, ...]:
    """Return the operands that a placement may take as partial sums: the linear group with the most elements."""
    # The larger the operands that stay partial, the more reductions can be put off.
    return max(rule.linear, key=lambda g: sum(operands[i].num_elements for i in g), default=())


def raw_result_specs(rule: Rule, placement: OpPlacement) -> tuple[Spec, ...]:
    """Return the specs of the results before their reductions are carried out."""
    partial = placement.partial
    # Parts of other reductions are combined inside the op, since specs only know partial sums.
    reduced = reduced_axes(rule, placement) if rule.reduction == "sum" else ()
    if reduced or len(partial) > 1:
        # Specs compare by value, so the same axes must be in the same order.
        partial = tuple(sorted({*partial, *reduced}))
    axes = placement.factors
    return tuple([Spec(tuple([_axes(factors, axes) for factors in dims]), partial) for dims in rule.results])


def reduced_axes(rule: Rule, placement: OpPlacement) -> set[str]:
    """Return the mesh axes over which each device reduces a part."""
    return {a for f in rule.reduced for a in placement.factors[f]}


def combination(reduction: str, dtype: str) -> tuple[str, int]:
    """Return the kind of the collective that combines parts of a non-sum reduction, and the bytes per element it sends.

    Maxima and minima (of booleans, `or` and `and`) are all-reduced; other parts are gathered and reduced locally.
    """
    # No collective compares complex numbers, which XLA orders by their real and then their imaginary parts.
    if reduction in ("max", "min") and not dtype.startswith("complex"):
        # Narrow floats would be compared as 16-bit integers, for which GPUs have no collective: they are widened.
        return "all_reduce", max(4, item_bytes(dtype)) if dtype.startswith(("float", "bfloat")) else item_bytes(dtype)
    if reduction in ("and", "or") and dtype == "bool":
        return "all_reduce", item_bytes(dtype)
    return "all_gather", item_bytes(dtype)


def _axes(factors: tuple[int, ...], axes: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    # Most dims hold one factor, and this runs for every placement that is considered.
    if len(factors) == 1:
        return axes[factors[0]]
    return tuple(axis for factor in factors for axis in axes[factor])


class Walk(Generic[A]):
    """Run the ops of one graph in order; see the module docstring."""

    def __init__(
        self, graph: Graph, placements: Mapping[int, OpPlacement], sizes: Mapping[str, int], machine: Machine[A]
    ) -> None:
        """Create a walk without values; `sizes` is the number of devices along each mesh axis."""
        self.graph = graph
        self.placements = placements
        self.sizes = sizes
        self.machine = machine
        self.free = free_values(graph)
        self.classes = op_classes(graph)
        self.arrays: dict[int, dict[Spec, A]] = {}

    def put(self, value: int, spec: Spec, array: A) -> None:
        """Store the array of a value in a spec."""
        self.arrays.setdefault(value, {})[spec] = array

    def get(self, value_id: int, spec: Spec, op: Op | None = None) -> A:
        """Return the array of a value in a spec, resharded if necessary."""
        value = self.graph.values[value_id]
        if value.literal is not None:
            return self._literal(value, spec, op)
        known = self.arrays.get(value_id, {})
        if spec in known:
            return known[spec]
        if value_id in self.free:
            self._make_free(value_id, spec, op)
            return self.arrays[value_id][spec]
        source, steps = self._cheapest(value, known, spec)
        array = self.machine.reshard(known[source], value, steps, op)
        # Stored, so that the next reader in this spec shares the collectives.
        self.put(value_id, spec, array)
        return array

    def _literal(self, value: Value, spec: Spec, op: Op | None) -> A:
        """Return the array of a literal; if it is needed as a partial sum, its value is on the first device only."""
        # Zero is zero in every spec.
        array, steps, whole = self.machine.literal(value), list[Move](), spec.without_partial()
        for axis in spec.partial if value.literal != 0 else ():
            steps.append(addend(steps[-1].spec if steps else whole, axis))
        return self.machine.reshard(array, value, tuple(steps), op) if steps else array

    def _cheapest(self, value: Value, known: Mapping[Spec, A], spec: Spec) -> tuple[Spec, tuple[Move, ...]]:
        """Return the available spec from which a value is resharded with the least communication, and the moves."""
        best: tuple[float, Spec, tuple[Move, ...]] | None = None
        for source in known:
            steps = reshard(source, spec, value.shape, self.sizes, item_bytes(value.dtype))
            if steps is not None:
                # The small constant prefers fewer moves among sequences that send equally many bytes.
                cost = sum(sent_bytes_factor(s, self.sizes) + 1e-9 for s in steps)
                if best is None or cost < best[0]:
                    best = (cost, source, steps)
        if best is None:
            raise VerificationError(f"{value} is known in {[*map(str, known)]} but needed in {spec}.")
        return best[1], best[2]

    def _make_free(self, value_id: int, spec: Spec, reader: Op | None) -> None:
        """Run the op of a free value so that it is made in `spec`; a partial sum is on the first device only."""
        value = self.graph.values[value_id]
        op = self.graph.ops[self.graph.producer[value_id] or 0]
        rule = rule_of_op(self.graph, op.id)
        index = op.results.index(value_id)
        # The op is split as the spec says where its rule allows that; the rest is cut locally from the whole result.
        factors: list[tuple[str, ...]] = [()] * len(rule.sizes)
        for axes, dim_factors in zip(spec.dims, rule.results[index], strict=True):
            # Factors of size 1 ahead of it leave it the outermost one.
            major = next((f for f in dim_factors if rule.sizes[f] > 1), None)
            if axes and major is not None and can_split(rule, major, axes, self.sizes):
                factors[major] = axes
        raw = raw_result_specs(rule, OpPlacement(factors=tuple(factors)))
        # Made as a whole sum first: below it becomes the addend of the first device where the reader wants a partial
        # one.
        placement = OpPlacement(factors=tuple(factors), results=tuple(s.without_partial() for s in raw))
        self.apply(op, placement)
        made, whole = placement.results[index], spec.without_partial()
        steps = reshard(made, whole, value.shape, self.sizes)
        if steps is None:
            raise VerificationError(f"{op.source}: {op.primitive} cannot be made in {spec}.")
        for axis in spec.partial:
            steps = (*steps, addend(steps[-1].spec if steps else whole, axis))
        array = self.arrays[value_id][made]
        self.put(value_id, spec, self.machine.reshard(array, value, steps, reader) if steps else array)

    def forget(self, but: Collection[int] = ()) -> None:
        """Drop all specs of each value but that in which it was computed; free values and the values `but` stay."""
        for v, known in self.arrays.items():
            if v not in self.free and v not in but:
                # Dicts keep their order: the first spec is the one in which the value was put.
                self.arrays[v] = dict([next(iter(known.items()))])

    def run(self, ops: Iterable[int]) -> None:
        """Run ops in order; free ops run when a reader needs them."""
        for op_id in ops:
            op = self.graph.ops[op_id]
            if self.free.isdisjoint(op.results):
                self.apply(op, self.placements.get(op_id) or replicated_placement(self.graph, op))

    def apply(self, op: Op, placement: OpPlacement) -> None:
        """Run one op and bring its results into their planned specs."""
        kind, wiring = self.classes[op.id], wiring_of(op)
        if wiring is None:
            placed = specs_of_class(kind, placement.factors, placement.partial)
            specs, raw = placed.operands, placed.results
        else:
            specs, raw = body_operand_specs(wiring, placement), placement.results
        application = Application(
            graph=self.graph, op=op, rule=kind.rule, placement=placement, operand_specs=specs, raw_specs=raw
        )
        operands = [self.get(v, s, op) for v, s in zip(op.operands, specs, strict=True)]
        if wiring is None:
            results = self.machine.apply(application, operands)
        else:
            results = self.machine.control_flow(application, operands, wiring, self)
        for result, array, made, wanted in zip(op.results, results, raw, placement.results, strict=True):
            # A partial result may be needed as such, as a sum over micro-batches is; else it is reduced at once.
            if made != wanted:
                value = self.graph.values[result]
                steps = reshard(made, wanted, value.shape, self.sizes, item_bytes(value.dtype))
                if steps is None:
                    raise VerificationError(f"{op.source}: {op.primitive} makes {made}, which cannot become {wanted}.")
                array = self.machine.reshard(array, value, steps, op)
            self.put(result, wanted, array)


def can_split(rule: Rule, factor: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> bool:
    """Return whether axes may split a factor: into equal blocks, with the factor major in every dim that holds it."""
    return factor in rule.major and rule.splits_into(factor, prod(sizes[axis] for axis in axes))


def sharing_axes(op: Op, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes over which all-reduces share the results that an op with an effect has on one device."""
    return tuple(axis for axis, size in sizes.items() if size > 1) if op.effectful else ()


def replicated_placement(graph: Graph, op: Op) -> OpPlacement:
    """Return the placement in which an op runs replicated on every device."""
    results = tuple(replicated(v.rank) for v in graph.results(op))
    wiring = wiring_of(op)
    if wiring is not None:
        inside = tuple(replicated(v.rank - (i in wiring.scanned)) for i, v in enumerate(graph.operands(op)))
        # Ops of the bodies without a placement run replicated too (`Walk.run`).
        return OpPlacement(factors=(), results=results, bodies=({},) * len(op.bodies), body_operands=inside)
    rule = rule_of_op(graph, op.id)
    return OpPlacement(factors=((),) * len(rule.sizes), results=results)


def body_operand_specs(wiring: Wiring, placement: OpPlacement) -> tuple[Spec, ...]:
    """Return the specs of the operands of control flow from those inside; scanned operands have a whole leading dim."""
    return tuple(stacked(s) if i in wiring.scanned else s for i, s in enumerate(placement.body_operands))


def stacked(spec: Spec) -> Spec:
    """Return the spec of values in `spec` stacked along a new unsharded leading dim."""
    return Spec(((), *spec.dims), spec.partial)


def body_output_specs(wiring: Wiring, placement: OpPlacement, number: int) -> tuple[Spec, ...]:
    """Return the specs in which body `number` must return its outputs.

    Carried values have the spec in which they entered, others that of the result, and a predicate is a replicated
    scalar.
    """

    def spec_of(result: int | None) -> Spec:
        if result is None:
            return replicated(0)
        # What a trip returns is the operand of the next trip.
        if result in wiring.carried:
            return placement.body_operands[wiring.carried[result]]
        spec = placement.results[result]
        return Spec(spec.dims[1:], spec.partial) if result in wiring.stacked else spec

    return tuple(map(spec_of, wiring.outputs[number]))


def body_walk(application: Application, wiring: Wiring, number: int, walk: Walk[A], operands: Sequence[A]) -> list[A]:
    """Walk body `number` on the operands that it reads (numbered as the op's) and return its outputs."""
    op, placement = application.op, application.placement
    body = op.bodies[number]
    # The same machine, so that work and collectives of bodies are recorded with those of the task.
    inner: Walk[A] = Walk(body, placement.bodies[number], walk.sizes, walk.machine)
    for value, i in zip(body.inputs, wiring.inputs[number], strict=True):
        inner.put(value, placement.body_operands[i], operands[i])
    inner.run(range(len(body.ops)))
    specs = body_output_specs(wiring, placement, number)
    return [inner.get(value, spec, op) for value, spec in zip(body.outputs, specs, strict=True)]
