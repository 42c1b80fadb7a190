"""Compile a task: one `jit` of a `shard_map` whose body runs the planned ops on local blocks.

The body is the walk of `alpa_lite.plan.walk` on a machine that emits JAX operations, so the collectives of the
executable are those that the plan was priced with: nothing is left to sharding propagation.

A partial sum crosses a task's boundary as an array with one more leading dim that is split over the axes of the sum:
each device stores its addend (`boundary_spec`).

Sums of gradients are reduced in buckets, one bucket after the other (`Plan.buckets`):

    bucket n starts when all of bucket n - 1 is reduced, as on one queue of collectives            (Buckets.held)

XLA combines reductions that do not wait for each other into one, up to some size. Combining within a bucket is left to
XLA; every value of a bucket waits for a number computed from the whole bucket before it, so that two buckets stay apart
on any backend.

An op with side effects (a print or a callback) runs on one device of those that hold its operands, not on each
(`on_first_device`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.lower.block import LocalOp, block_index
from alpa_lite.lower.run_local import bind_local
from alpa_lite.lower.slices import Port, TaskSpec, run_parts
from alpa_lite.lower.waiting import Gathered, once_there
from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.walk import Application, Walk, body_walk, sharing_axes
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph, Op, Value, Wiring
from alpa_lite.program.phases import Combination, Phase, StepGraph, parameters
from alpa_lite.sharding.specs import Move, Spec, num_shards
from alpa_lite.trace.evaluate import run_control_flow

_POSITIONAL = frozenset(("iota", "random_bits", "random_split"))

TaskFunction = Callable[..., tuple[jax.Array, ...]]


def boundary_spec(spec: Spec) -> PartitionSpec:
    """Return the `PartitionSpec` of a value at a task's boundary; a partial sum has one more leading dim."""
    dims = [axes if axes else None for axes in spec.dims]
    return PartitionSpec(spec.partial, *dims) if spec.partial else PartitionSpec(*dims)


def boundary_shape(shape: tuple[int, ...], spec: Spec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the global shape of a value at a task's boundary; a partial sum has one more leading dim."""
    return (prod(sizes[a] for a in spec.partial), *shape) if spec.partial else shape


def move(x: jax.Array, step: Move, sizes: Mapping[str, int]) -> jax.Array:
    """Emit the collective (or local operation) of one step of a resharding, on a device's block `x`."""
    if step.kind == "all_reduce":
        return lax.psum(x, step.axis)
    if step.kind == "reduce_scatter":
        return lax.psum_scatter(x, step.axis, scatter_dimension=step.dim, tiled=True)
    if step.kind == "all_gather":
        return lax.all_gather(x, step.axis, axis=step.dim, tiled=True)
    if step.kind == "all_to_all":
        return lax.all_to_all(x, step.axis, split_axis=step.target_dim, concat_axis=step.dim, tiled=True)
    if step.kind == "permute":
        return lax.ppermute(x, step.axes, step.pairs)
    if step.kind == "addend":
        return jax.numpy.where(lax.axis_index(step.axis) == 0, x, jax.numpy.zeros_like(x))
    size = x.shape[step.dim] // sizes[step.axis]
    return lax.dynamic_slice_in_dim(x, lax.axis_index(step.axis) * size, size, step.dim)


class LocalMachine:
    """A machine that emits JAX operations on local blocks; drives a `Walk` inside `shard_map`."""

    def __init__(
        self,
        step: StepGraph,
        equations: Sequence[Equation],
        sizes: Mapping[str, int],
        microbatch: jax.Array | int,
        *,
        barriers_stay: bool = True,
        buckets: Sequence[Sequence[int]] = (),
    ) -> None:
        """Make a machine for one task on a mesh of the given axis sizes.

        `microbatch`: index of the micro-batch being run. `barriers_stay`: whether XLA keeps optimisation barriers to
        the end. `buckets`: values of the step that are reduced together, one bucket after the other.
        """
        self.step = step
        self.barriers_stay = barriers_stay
        self.buckets = Buckets(buckets, barriers_stay=barriers_stay)
        self.gathered = Gathered(barriers_stay=barriers_stay)
        self.graph = step.graph  # the graph that runs now: the step or a body
        self.latest: jax.Array | None = None  # latest float result of the backward pass
        self.sizes = sizes
        self.microbatch = microbatch
        self.equations: dict[Graph, Sequence[Equation]] = {}
        self._register(step.graph, equations)
        self.part = 0  # number of phases of the task before this one: their loops may move the same values
        # How often each resharding was emitted so far; see `reshard`.
        self.moved: Counter[tuple[Value, tuple[Move, ...]]] = Counter()

    def _register(self, graph: Graph, equations: Sequence[Equation]) -> None:
        self.equations[graph] = equations
        for op, equation in zip(graph.ops, equations, strict=True):
            for body, inner in zip(op.bodies, equation.bodies, strict=True):
                self._register(body, inner)

    def literal(self, value: Value) -> jax.Array:
        """Return a NumPy scalar of the right dtype."""
        # Ops accept it as an array, and it stays a constant of the program.
        return cast(jax.Array, np.asarray(value.literal, jax.numpy.dtype(value.dtype)))

    def reshard(self, array: jax.Array, value: Value, steps: tuple[Move, ...], op: Op | None) -> jax.Array:
        """Emit the collectives of a resharding and return the new block.

        A resharding that is repeated (a parameter gathered again for the backward pass) must not be merged with the
        earlier one by XLA, which drops barriers on some platforms. The n-th repetition therefore runs with n more
        leading dims of size 1: two collectives of different rank are never common subexpressions.
        """
        # The ids of values in bodies repeat those of the step, so the value is also compared by identity.
        bucketed = op is None and value.id in self.buckets.numbers and value is self.step.graph.values[value.id]
        array = self.buckets.held(value.id, array) if bucketed else array
        if op is not None and self._is_parameter(value) and any(step.kind == "all_gather" for step in steps):
            array = self.gathered.held(array, value.bytes / num_shards(steps[-1].spec, self.sizes))
        times = self.part + self.moved[value, steps]
        self.moved[value, steps] += 1
        array = jax.numpy.reshape(array, (*(1,) * times, *array.shape))
        for step in steps:
            array = move(array, step.below(times), self.sizes)
        array = jax.numpy.reshape(array, array.shape[times:])
        if bucketed:
            self.buckets.reduced(value.id, array)
        return array

    def _is_parameter(self, value: Value) -> bool:
        """Return True for values that enter the loop, or a trip of a loop in it, without a batch dim."""
        graph, step = self.graph, self.step
        if graph is step.graph:
            return value.id in parameters(step)
        scope = step.bodies.get(graph)
        return graph.producer[value.id] is None and (scope is None or scope.batch_dims[value.id] is None)

    def apply(self, application: Application, operands: list[jax.Array]) -> list[jax.Array]:
        """Bind the op's primitive on local blocks and return the blocks of its results."""
        graph, op = application.graph, application.op
        equation = self.equations[graph][op.id]
        origins, full_shapes = self._positions(graph, op)
        operands = self._in_micro_batch(op, graph, operands)
        local = LocalOp(
            primitive=equation.primitive,
            params=equation.params,
            rule=application.rule,
            operand_shapes=tuple(v.shape for v in graph.operands(op)),
            result_shapes=tuple(v.shape for v in graph.results(op)),
            operand_specs=application.operand_specs,
            result_specs=application.raw_specs,
            axis_sizes=self.sizes,
            origins=origins,
            full_shapes=full_shapes,
        )
        if graph is self.step.graph and op.primitive == "optimization_barrier":
            operands = [self._held_back(v, x) for v, x in zip(op.operands, operands, strict=True)]
        with jax.named_scope(f"op{op.id}"):
            axes = sharing_axes(op, self.sizes)
            if axes:
                return on_first_device(lambda *xs: bind_local(local, xs), operands, axes, self.sizes)
            return self._noted(application, bind_local(local, operands))

    def _held_back(self, value: int, array: jax.Array) -> jax.Array:
        """Return a forward value that the backward pass reads to recompute others, delayed until the backward pass gets
        there.
        """
        producer = self.step.graph.producer[value]
        is_backward = producer is not None and self.step.phases[producer] is Phase.BACKWARD
        is_state = producer is None and self.step.batch_dims[value] is None
        if self.latest is None or is_backward or is_state or not isinstance(array, jax.Array):
            return array
        return once_there(array, self.latest, barriers_stay=self.barriers_stay)

    def _noted(self, application: Application, results: list[jax.Array]) -> list[jax.Array]:
        """Record results of an op for the values that wait for them, and return the results."""
        self.gathered.read(results)
        if application.graph is self.step.graph and self.step.phases[application.op.id] is Phase.BACKWARD:
            floats = [r for r in results if jax.numpy.issubdtype(r.dtype, jax.numpy.floating) and r.size]
            self.latest = floats[0] if floats else self.latest
        return results

    def _positions(
        self, graph: Graph, op: Op
    ) -> tuple[tuple[tuple[jax.Array | int, ...] | None, ...], tuple[tuple[int, ...] | None, ...]]:
        """Return the position of this micro-batch's results in the full batch's and the full shapes, None where
        irrelevant.

        Only ops whose values depend on the position need them.
        """
        none = (None,) * len(op.results)
        step = self.step
        if step.num_microbatches == 1 or op.primitive not in _POSITIONAL:
            return none, none
        # A mean over micro-batches treats each one as a batch of its own, which counts its samples from 0.
        if step.averaged and op.primitive == "iota":
            return none, none
        outermost = graph is step.graph
        scope = step if outermost else step.bodies.get(graph)
        dim = scope.batch_dims[op.results[0]] if scope is not None else None
        if scope is None or dim is None:
            return none, none
        shape = graph.values[op.results[0]].shape
        start = tuple(self.microbatch * n if d == dim else 0 for d, n in enumerate(shape))
        return (start, *none[1:]), (scope.full_shapes[op.results[0]], *none[1:])

    def _in_micro_batch(self, op: Op, graph: Graph, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the operands as this micro-batch reads them.

        Operands that count once per step are zero in all micro-batches but the first, and indices into the batch are
        shifted to the start of the micro-batch.
        """
        arrays = list(operands)
        if op.once:
            first = jax.numpy.asarray(self.microbatch) == 0
            arrays = [
                jax.numpy.where(first, x, jax.numpy.zeros_like(x)) if v in op.once else x
                for v, x in zip(op.operands, arrays, strict=True)
            ]
        if op.own_columns:
            # The index vectors are the second operand of both gather and scatter.
            arrays[1] = arrays[1] - self._first_rows(op, graph).astype(arrays[1].dtype)
        return arrays

    def _first_rows(self, op: Op, graph: Graph) -> jax.Array:
        """Return for each column of the index vectors the first row of this micro-batch, 0 for columns that index other
        dims.
        """
        numbers = op.params["dimension_numbers"]
        dims = numbers["start_index_map" if op.primitive == "gather" else "scatter_dims_to_operand_dims"]
        rows = graph.values[op.operands[0]].shape
        sizes = [rows[d] if column in op.own_columns else 0 for column, d in enumerate(dims)]
        return jax.numpy.asarray(self.microbatch) * jax.numpy.asarray(sizes)

    def control_flow(
        self, application: Application, operands: list[jax.Array], wiring: Wiring, walk: Walk[jax.Array]
    ) -> list[jax.Array]:
        """Emit the same control flow on local blocks."""
        operands = self._in_micro_batch(application.op, self.graph, operands)

        def body(number: int, arrays: Mapping[int, jax.Array]) -> tuple[jax.Array, ...]:
            # A body has units of its own: the arrays inside are tracers, which must not leak out of it.
            around = self.graph, self.gathered
            self.graph = application.op.bodies[number]
            self.gathered = Gathered(barriers_stay=self.barriers_stay)
            outputs = body_walk(application, wiring, number, walk, [arrays.get(i, x) for i, x in enumerate(operands)])
            self.graph, self.gathered = around
            # Literals are NumPy scalars, but a body must return JAX arrays.
            return tuple(x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in outputs)

        return self._noted(application, run_control_flow(application.op, wiring, body, operands))


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryArray:
    """The global shape, dtype and `PartitionSpec` of an array at a task's boundary."""

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec

    def on(self, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
        """Return the abstract array with its sharding on a mesh."""
        dtype = _jax.struct((), self.dtype).dtype
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=NamedSharding(mesh, self.spec))


@dataclass(frozen=True, kw_only=True, eq=False)
class Emitted:
    """A task as a function for any mesh of one logical shape; equal tasks on other submeshes share it.

    Calling convention: inputs, sums (if accumulated), [micro-batch index] -> outputs, sums, token. The token is a
    scalar that is ready when the whole task is done. Unlike the other results it is never donated, so waiting for it
    keeps no other buffer alive.
    """

    function: TaskFunction
    mesh: AbstractMesh
    platform: str
    ins: tuple[BoundaryArray, ...]
    outs: tuple[PartitionSpec, ...]
    donated: tuple[int, ...]
    takes_microbatch: bool

    def lower(self, on: Mesh | None = None) -> jax.stages.Lowered:
        """Trace and lower the function, by default for an abstract mesh without devices.

        JAX lowers some ops (a callback into Python) only for concrete devices, and raises errors of various types for
        an abstract mesh.
        """
        mesh = on if on is not None else self.mesh
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.outs, is_leaf=_is_spec)
        jitted = jax.jit(self.function, donate_argnums=self.donated, out_shardings=shardings)
        traced = jitted.trace(*(x.on(mesh) for x in self.ins))
        return traced.lower(lowering_platforms=(self.platform,)) if on is None else traced.lower()


@dataclass(frozen=True, kw_only=True, eq=False)
class Executable:
    """A task compiled for the mesh of its stage; `compiled` has the calling convention of `Emitted`."""

    task: TaskSpec
    mesh: Mesh
    emitted: Emitted
    compiled: Any

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
    def takes_microbatch(self) -> bool:
        """Whether the last operand is the index of the micro-batch."""
        return self.emitted.takes_microbatch


def emit_task(
    task: TaskSpec,
    step: StepGraph,
    equations: Sequence[Equation],
    placements: Mapping[int, OpPlacement],
    mesh: AbstractMesh,
    *,
    name: str,
    platform: str,
    donated: Sequence[int] = (),
) -> Emitted:
    """Return a task as a function. Sums over micro-batches follow the inputs and are returned increased.

    `name`: the name that profilers show. `platform`: the one to lower for, such as "cpu" or "cuda". `donated`: numbers
    of inputs whose buffers may be reused.
    """
    graph, sizes = step.graph, dict(mesh.shape)
    accumulate = accumulates(task, step)
    ins = [*task.inputs, *(task.sums if accumulate else ())]
    outs = [*task.outputs, *task.sums]
    positional = step.num_microbatches > 1 and (
        any(_is_positional(graph.ops[i]) for i in task.ops) or any(p.value in step.combined for p in task.sums)
    )

    def local(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        microbatch = arrays[-1] if positional else 0
        machine = LocalMachine(
            # The CPU backend drops barriers before it eliminates common subexpressions.
            step,
            equations,
            sizes,
            microbatch,
            barriers_stay=platform != "cpu",
            buckets=task.buckets,
        )
        walk: Walk[jax.Array] = Walk(graph, placements, sizes, machine)
        # Not strict: sums and the index of the micro-batch follow the inputs. Of a partial sum, each device has one
        # addend, at index 0 of the leading dim.
        for port, array in zip(task.inputs, arrays, strict=False):
            walk.put(port.value, port.spec, array[0] if port.spec.partial else array)
        for number, _ in enumerate(run_parts(walk, task, step)):
            # Set before the phase runs, since `run_parts` yields a phase when it is about to begin.
            machine.part = number
        results = [walk.get(port.value, port.spec) for port in outs]
        if accumulate:
            old = arrays[len(task.inputs) : len(ins)]
            first = len(task.outputs)
            added = [(o[0] if p.spec.partial else o) for o, p in zip(old, task.sums, strict=True)]
            triples = zip(task.sums, added, results[first:], strict=True)
            results[first:] = [_combined(step, p.value, old, new, microbatch) for p, old, new in triples]
        token = jax.numpy.zeros((), jax.numpy.int8)
        return (*(r[None] if p.spec.partial else r for r, p in zip(results, outs, strict=True)), token)

    layouts = [boundary_layout(graph.values[p.value], p, sizes) for p in ins]
    if positional:
        layouts.append(BoundaryArray(shape=(), dtype="int32", spec=PartitionSpec()))
    out_specs = (*(boundary_spec(p.spec) for p in outs), PartitionSpec())
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
        donated=(*donated, *summed),
        takes_microbatch=positional,
    )


def _is_spec(value: object) -> bool:
    return isinstance(value, PartitionSpec)


def accumulates(task: TaskSpec, step: StepGraph) -> bool:
    """Return True if a task adds to sums over micro-batches that are passed in."""
    return step.num_microbatches > 1 and bool(task.sums)


def _combined(step: StepGraph, value: int, old: jax.Array, new: jax.Array, microbatch: jax.Array | int) -> jax.Array:
    """Return the combination of all micro-batches up to this one: `old` from those before it, `new` from this one."""
    how = step.combined.get(value)
    if how is None:
        return old + (_part_of_mean(new, step) if step.averaged else new)
    if how is Combination.SAME:
        return new
    extreme = jax.numpy.maximum if how is Combination.MAX else jax.numpy.minimum
    # Accumulators start as zeros, which are not neutral for a maximum or minimum.
    return jax.numpy.where(jax.numpy.asarray(microbatch) == 0, new, extreme(old, new))


def _part_of_mean(result: jax.Array, step: StepGraph) -> jax.Array:
    """Return a micro-batch's addend to a mean over micro-batches; integers (counts) are added unscaled."""
    inexact = jax.numpy.issubdtype(result.dtype, jax.numpy.inexact)
    return result * (1 / step.num_microbatches) if inexact else result


def _is_positional(op: Op) -> bool:
    """Return True for ops that depend on the index of the micro-batch, including loops around such ops."""
    if op.primitive in _POSITIONAL or op.once or op.own_columns:
        return True
    return any(_is_positional(o) for body in op.bodies for o in body.ops)


def _named(function: TaskFunction, name: str) -> TaskFunction:
    """Return `function` under a name that is a valid identifier: XLA shows it as the module's name."""

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return function(*arrays)

    run.__name__ = name.replace(" ", "_").replace("+", "_")
    return run


def boundary_layout(value: Value, port: Port, sizes: Mapping[str, int]) -> BoundaryArray:
    """Return the array that holds a value at a task's boundary."""
    shape = boundary_shape(value.shape, port.spec, sizes)
    return BoundaryArray(shape=shape, dtype=value.dtype, spec=boundary_spec(port.spec))


class Buckets:
    """Delays the values of each bucket, so that a task reduces bucket after bucket."""

    def __init__(self, buckets: Sequence[Sequence[int]], *, barriers_stay: bool) -> None:
        """Number the buckets.

        `buckets`: values of the step's graph. `barriers_stay`: whether XLA keeps optimisation barriers to the end.
        """
        self.numbers = {v: number for number, bucket in enumerate(buckets) for v in bucket}
        self.barriers_stay = barriers_stay
        self.done: dict[int, jax.Array] = {}  # per bucket, a scalar that depends on all results so far

    def held(self, value: int, array: jax.Array) -> jax.Array:
        """Return a value that is about to be reduced, delayed until the preceding bucket is reduced."""
        before = self.done.get(self.numbers[value] - 1)
        return array if before is None else once_there(array, before, barriers_stay=self.barriers_stay)

    def reduced(self, value: int, result: jax.Array) -> None:
        """Record the reduced `value`, for which the next bucket waits."""
        number = self.numbers[value]
        # One real number that depends on the result, whatever its dtype; complex gradients have a real part.
        first = lax.reshape(lax.slice(result, (0,) * result.ndim, (1,) * result.ndim), ()).real.astype("float32")
        self.done[number] = first + self.done[number] if number in self.done else first


def on_first_device(
    run: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
) -> list[jax.Array]:
    """Return `run(*operands)` as computed on the first device along `axes`, on all devices. Operands must be
    replicated.
    """
    # Only shapes are needed here; running the op for them would cause its effect a second time.
    shapes = jax.eval_shape(lambda *xs: tuple(run(*xs)), *operands)
    results = lax.cond(
        block_index(axes, sizes) == 0,
        lambda *xs: tuple(run(*xs)),
        lambda *_: tuple(jnp.zeros(s.shape, s.dtype) for s in shapes),
        *operands,
    )
    return [_shared(x, axes) for x in results]


def _shared(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over devices, of which all but one add zero. Booleans are summed as bytes, which is their size."""
    if x.size == 0:
        return x
    return lax.psum(x.astype(jnp.uint8), axes).astype(x.dtype) if x.dtype == jnp.bool_ else lax.psum(x, axes)
