"""Compile a task: one `jit` of a `shard_map` whose body runs the planned ops on local blocks.

The body is the walk of `alpa_lite.plan.walk` on a machine that emits JAX operations (`local_machine`), so the
collectives of the executable are those that the plan was priced with: nothing is left to sharding propagation.

A partial sum crosses a task's boundary as an array with one more leading dim that is split over the axes of the sum:
each device stores its addend (`boundary_spec`).

Tasks that are the same program are recognised, so that one executable serves all: most layers of a pipeline are equal.

    form(task) = (ports, ops, results), values numbered in the order of their first use           `task_form`

The form contains everything that `emit_task` reads: for each op its primitive, the equation's parameters, its operands
and results, its placement, phase and rule; for each value its shape, dtype, batch dim, size in the full batch and the
phase that makes it; literals by content. It contains no numbers of the traced graph, no names and no source lines. Two
tasks with equal forms on logical meshes of one shape are traced and lowered once. Objects without comparable content
(functions among the parameters) are equal only if they are the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from alpa_lite import _jax
from alpa_lite.lower.local_machine import POSITIONAL, LocalMachine, PlacedTask
from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.task_specs import Port, TaskSpec, run_task
from alpa_lite.plan.walk import Walk
from alpa_lite.program.equations import Equation
from alpa_lite.program.identity import content, structure
from alpa_lite.program.ir import Graph, Op, Value, wiring_of
from alpa_lite.program.phases import Combination, Phase, StepGraph
from alpa_lite.rules.op_info import free_values, op_classes
from alpa_lite.sharding.specs import Spec

SUMS_SCOPE = "sums"
"""The scope in which a task adds what a micro-batch has computed to the sums over micro-batches."""

TaskFunction = Callable[..., tuple[jax.Array, ...]]


def boundary_spec(spec: Spec) -> PartitionSpec:
    """Return the `PartitionSpec` of a value at a task's boundary; a partial sum has one more leading dim."""
    dims = [axes if axes else None for axes in spec.dims]
    return PartitionSpec(spec.partial, *dims) if spec.partial else PartitionSpec(*dims)


def boundary_shape(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the global shape of a value at a task's boundary; a partial sum has one more leading dim."""
    return (prod(sizes[a] for a in spec.partial), *shape) if spec.partial else shape


def boundary_layout(value: Value, port: Port, sizes: Mapping[str, int]) -> BoundaryArray:
    """Return the array that holds a value at a task's boundary."""
    shape = boundary_shape(value.shape, port.spec, sizes)
    return BoundaryArray(shape=shape, dtype=value.dtype, spec=boundary_spec(port.spec), on_host=value.on_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryArray:
    """The global shape, dtype, `PartitionSpec` and memory of an array at a task's boundary."""

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    on_host: bool = False

    def on(self, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
        """Return the abstract array with its sharding on a mesh."""
        dtype = _jax.struct((), self.dtype).dtype
        sharding = _jax.named_sharding(mesh, self.spec, on_host=self.on_host)
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)


@dataclass(frozen=True, kw_only=True, eq=False)
class Emitted:
    """A task as a function for any mesh of one logical shape; equal tasks on other submeshes share it.

    Calling convention: inputs, sums (if accumulated), [micro-batch index] -> outputs, sums, token. The token is a
    scalar that is ready when the whole task is done. Unlike the other results it is never donated, so waiting for it
    keeps no other buffer alive. Outputs and sums come in `order` (see `result_order`); the results with numbers in
    `hosted` come in the memory of the host.
    """

    function: TaskFunction
    mesh: AbstractMesh
    platform: str
    ins: tuple[BoundaryArray, ...]
    outs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]
    takes_microbatch: bool
    order: tuple[int, ...] = ()
    hosted: frozenset[int] = frozenset()

    def lower(
        self, on: Mesh | AbstractMesh | None = None, *, keep_unused: bool = False, elsewhere: bool = False
    ) -> jax.stages.Lowered:
        """Trace and lower the function, by default for an abstract mesh without devices.

        keep_unused: whether the program takes the inputs too that it does not read.
        elsewhere: whether this process does not have the devices of the mesh, which can only be compiled for.

        JAX lowers some ops (a callback into Python) only for concrete devices, and raises errors of various types for
        an abstract mesh.
        """
        mesh = on if on is not None else self.mesh
        specs, tree = jax.tree.flatten(self.outs, is_leaf=lambda x: isinstance(x, PartitionSpec))
        placed = [_jax.named_sharding(mesh, spec, on_host=i in self.hosted) for i, spec in enumerate(specs)]
        shardings = jax.tree.unflatten(tree, placed)
        jitted = jax.jit(self.function, donate_argnums=self.donated, out_shardings=shardings, keep_unused=keep_unused)
        traced = jitted.trace(*(x.on(mesh) for x in self.ins))
        return traced.lower(lowering_platforms=(self.platform,)) if on is None or elsewhere else traced.lower()


@dataclass(frozen=True, kw_only=True, eq=False)
class Executable:
    """A task compiled for the mesh of its stage; `compiled` has the calling convention of `Emitted`.

    `compiled` is None on a process without devices of the mesh.
    """

    task: TaskSpec
    mesh: Mesh
    emitted: Emitted
    compiled: jax.stages.Compiled | None

    @property
    def function(self) -> TaskFunction:
        """The function that was compiled."""
        return self.emitted.function

    @property
    def avals(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The abstract arrays that the executable takes, with their shardings."""
        return tuple(x.on(self.mesh) for x in self.emitted.ins)

    @property
    def donated(self) -> tuple[int, ...]:
        """Numbers of the operands whose buffers are donated to results."""
        return self.emitted.donated

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of the task's outputs and sums, in the order of the results."""
        return self.emitted.order

    @property
    def takes_microbatch(self) -> bool:
        """True if the last operand is the index of the micro-batch."""
        return self.emitted.takes_microbatch


def emit_task(placed: PlacedTask, mesh: AbstractMesh, *, name: str, platform: str) -> Emitted:
    """Return a task as a function. Sums over micro-batches follow the inputs and are returned increased.

    `name`: the name that profilers show. `platform`: the one to lower for, such as "cpu" or "cuda".
    """
    task, step, sizes = placed.task, placed.step, dict(mesh.shape)
    graph = step.graph
    accumulate = accumulates(task, step)
    ins = [*task.inputs, *(task.sums if accumulate else ())]
    outs, order = [*task.outputs, *task.sums], result_order(placed)
    positional = step.num_microbatches > 1 and (
        any(_is_positional(graph.ops[i]) for i in task.ops)
        or any(p.value in step.loop_results.combined for p in task.sums)
    )

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        microbatch = arrays[-1] if positional else 0
        # The CPU backend drops barriers before it eliminates common subexpressions.
        machine = LocalMachine(placed, sizes, microbatch, barriers_stay=platform != "cpu")
        walk: Walk[jax.Array] = Walk(graph, placed.placements, sizes, machine)
        machine.arrays = walk.arrays
        # Not strict: sums and the index of the micro-batch follow the inputs. Of a partial sum, each device has one
        # addend, at index 0 of the leading dim.
        inputs = [a[0] if p.spec.partial else a for p, a in zip(task.inputs, arrays, strict=False)]
        numbers = count()

        def begin(_: Phase) -> None:
            machine.part = next(numbers)

        results = run_task(walk, task, inputs, begin)
        if accumulate:
            old = arrays[len(task.inputs) : len(ins)]
            first = len(task.outputs)
            added = [(o[0] if p.spec.partial else o) for o, p in zip(old, task.sums, strict=True)]
            triples = zip(task.sums, added, results[first:], strict=True)
            with jax.named_scope(SUMS_SCOPE):
                results[first:] = [_combined(step, p.value, old, new, microbatch) for p, old, new in triples]
        # An output like the others, so that it is ready only when the whole executable has ended.
        token = jax.numpy.zeros((), jax.numpy.int8)
        return (*(results[i][None] if outs[i].spec.partial else results[i] for i in order), token)

    layouts = [boundary_layout(graph.values[p.value], p, sizes) for p in ins]
    if positional:
        layouts.append(BoundaryArray(shape=(), dtype="int32", spec=PartitionSpec()))
    out_specs = (*(boundary_spec(outs[i].spec) for i in order), PartitionSpec())
    in_specs = tuple(x.spec for x in layouts)
    # `check_vma` would reject results that the plan knows to be equal on several devices, which JAX cannot derive.
    sharded = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    summed = tuple(range(len(task.inputs), len(ins)))
    return Emitted(
        function=_named(sharded, name),
        mesh=mesh,
        platform=platform,
        ins=tuple(layouts),
        outs=out_specs,
        donated=(*placed.donated, *summed),
        takes_microbatch=positional,
        order=order,
        hosted=frozenset(place for place, i in enumerate(order) if graph.values[outs[i].value].on_host),
    )


def result_order(placed: PlacedTask) -> tuple[int, ...]:
    """Return the numbers of a task's outputs and sums in the order in which its program returns them.

    First those that replace donated inputs in the next step, in the order of these: JAX gives each result in turn the
    first donated buffer of its shape and dtype that is left, and XLA copies what is still read from a buffer that
    another result than the next value takes. Last come the results on the host, which no buffer of a device can hold.
    """
    task, next_of = placed.task, {old: new for new, old in placed.step.aliases.items()}
    number = {(port.value, port.spec): i for i, port in enumerate(task.outputs)}
    donated = [task.inputs[i] for i in placed.donated]
    replacing = [number.get((next_of.get(port.value, -1), port.spec)) for port in donated]
    first, values = dict.fromkeys(i for i in replacing if i is not None), placed.step.graph.values
    rest = [i for i in range(len(task.outputs) + len(task.sums)) if i not in first]
    on_host = {i for i in rest if i < len(task.outputs) and values[task.outputs[i].value].on_host}
    return (*first, *(i for i in rest if i not in on_host), *sorted(on_host))


def accumulates(task: TaskSpec, step: StepGraph) -> bool:
    """Return True if a task adds to sums over micro-batches that are passed in."""
    return step.accumulates and bool(task.sums)


def _combined(step: StepGraph, value: int, old: jax.Array, new: jax.Array, microbatch: jax.Array | int) -> jax.Array:
    """Return the combination of all micro-batches up to this one: `old` from those before it, `new` from this one."""
    how = step.loop_results.combined.get(value)
    # Values without an entry are sums over the batch, the default.
    if how is None:
        return old + (_part_of_mean(new, step) if step.loop_results.averaged else new)
    if how is Combination.SAME:
        return new
    # Only sums can be added up; a maximum over the batch is the maximum over its micro-batches.
    extreme = jax.numpy.maximum if how is Combination.MAX else jax.numpy.minimum
    # Accumulators start as zeros, which are not neutral for a maximum or minimum.
    return jax.numpy.where(jax.numpy.asarray(microbatch) == 0, new, extreme(old, new))


def _part_of_mean(result: jax.Array, step: StepGraph) -> jax.Array:
    """Return a micro-batch's addend to a mean over those of an update; integers (counts) are added unscaled."""
    inexact = jax.numpy.issubdtype(result.dtype, jax.numpy.inexact)
    return result * (1 / step.microbatches_per_update) if inexact else result


def _is_positional(op: Op) -> bool:
    """Return True for ops that depend on the index of the micro-batch, including loops around such ops."""
    if op.primitive in POSITIONAL or op.once or op.own_columns:
        return True
    return any(_is_positional(o) for body in op.bodies for o in body.ops)


def _named(function: TaskFunction, name: str) -> TaskFunction:
    """Return `function` under a name that is a valid identifier: XLA shows it as the module's name."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return function(*arrays)

    run.__name__ = name.replace(" ", "_").replace("+", "_")
    return run


# --------------------------------------------------------------------------------------------------------- equal tasks


def task_form(placed: PlacedTask, sizes: Mapping[str, int]) -> Hashable:
    """Return a hashable form of a task, equal for two tasks exactly if both are the same program on a mesh of `sizes`.

    See the module docstring.
    """
    task, step = placed.task, placed.step
    form = _Form(placed)
    # First, so that the number of an input is its position.
    inputs = tuple([(form.fresh(p.value), p.spec) for p in task.inputs])
    for op_id in task.ops:
        form.add(step.graph.ops[op_id])
    resolved = tuple([(form.number(value), stored, wanted) for value, stored, wanted in task.resolved])
    buckets = tuple([tuple([form.number(value) for value in bucket]) for bucket in task.buckets])
    ports = (inputs, form.ports(task.outputs), form.ports(task.sums), resolved, buckets)
    parts = tuple([(part.phase, len(part.ops)) for part in task.parts])
    returned = placed.donated, result_order(placed)
    runs = step.num_microbatches, step.num_updates
    return tuple(sizes.items()), runs, returned, bool(task.kept), parts, ports, tuple(form.ops)


class _Form:
    """Builder of a task's form: numbers the values of the task in the order of their first use."""

    def __init__(self, placed: PlacedTask) -> None:
        step = self.step = placed.step
        self.graph = step.graph
        self.equations, self.placements = placed.equations, placed.placements
        self.free, self.classes = free_values(step.graph), op_classes(step.graph)
        self.numbers: dict[int, int] = {}
        self.added: set[int] = set()
        self.ops: list[Hashable] = []

    def ports(self, ports: Sequence[Port]) -> Hashable:
        """Return the form of values that leave the task: number, spec and how micro-batches are combined."""
        return tuple([(self.number(p.value), p.spec, self.step.loop_results.combined.get(p.value)) for p in ports])

    def fresh(self, v: int) -> Hashable:
        """Number a value at its first use and return its properties."""
        # By first use: equal tasks meet their values in the same order, whatever these are called in the traced graph.
        self.numbers[v] = len(self.numbers)
        value, producer = self.graph.values[v], self.graph.producer[v]
        phase = None if producer is None else self.step.phases[producer]
        free = v in self.free
        return value.shape, value.dtype, value.on_host, free, phase, self.step.batch_dims[v], self.step.full_shapes[v]

    def number(self, v: int) -> Hashable:
        """Return the form's reference to a value: its number, or the content of a literal.

        Free values that no op of the task has made so far are added together with their op.
        """
        value = self.graph.values[v]
        if value.literal is not None:
            return value.dtype, value.shape, content(value.literal)
        producer = self.graph.producer[v]
        if v not in self.numbers and producer is not None:
            self.add(self.graph.ops[producer])
        return self.numbers[v]

    def add(self, op: Op) -> None:
        """Add an op, after the ops that produce its operands."""
        if op.id in self.added:
            return
        self.added.add(op.id)
        operands = tuple([self.number(v) for v in op.operands])
        results = tuple([self.fresh(v) for v in op.results])
        # Positions instead of value ids, which differ between equal tasks.
        once = tuple([v in op.once for v in op.operands])
        facts = (self.step.phases[op.id], once, op.own_columns, op.effectful)
        placement = self.placements.get(op.id)
        placed = None if placement is None else _placed(placement)
        equation = self.equations[op.id]

        # Two ops in one class share their factor rule, so the class represents the rule in the form.
        kind = None if op.bodies else self.classes[op.id]
        bodies = tuple(
            [_body(b, e, self.step) for b, e in zip(op.bodies, equation.bodies, strict=True)] if op.bodies else ()
        )
        self.ops.append((op.primitive, _params(op, equation), operands, results, facts, placed, kind, bodies))


def _params(op: Op, equation: Equation) -> Hashable:
    """Return the parameters that lowering reads. Bodies of known control flow are compared op by op instead."""
    return content(op.params if wiring_of(op) is not None else equation.params)


def _placed(placement: OpPlacement) -> Hashable:
    """Return a hashable form of a placement, nested bodies included."""
    bodies = tuple([tuple([(i, _placed(p)) for i, p in sorted(body.items())]) for body in placement.bodies])
    return placement.factors, placement.partial, placement.results, bodies, placement.body_operands


def _body(graph: Graph, equations: Sequence[Equation], step: StepGraph) -> Hashable:
    """Return a hashable form of a body of control flow; its value numbers are local, so they need no renumbering."""
    scope = step.bodies.get(graph)
    scoped = None if scope is None else (scope.full_shapes, scope.batch_dims)
    ops = tuple(
        [
            (
                _params(op, equation),
                op.effectful,
                op.once,
                op.own_columns,
                tuple([_body(b, e, step) for b, e in zip(op.bodies, equation.bodies, strict=True)]),
            )
            for op, equation in zip(graph.ops, equations, strict=True)
        ]
    )
    return structure(graph), ops, scoped
