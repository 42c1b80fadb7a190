"""Run planned ops on local blocks inside `shard_map`: the machine that drives the walk of a task, and its delays.

A `LocalMachine` emits JAX operations for what `alpa_lite.plan.walk` says: collectives for reshardings, the primitives
of the ops on blocks, control flow around bodies. An op with side effects (a print or a callback) runs on one device of
those that hold its operands, not on each (`on_first_device`).

Some values are delayed that XLA would compute or gather too early, although the plan counts on their memory being free:

Recomputed values, and loops of the backward pass: XLA has no reason to delay a recomputation whose operands are
available since the forward pass, nor what the first trip of a loop recomputes; only a barrier shared with results of
the preceding ops delays it (`rules.awaited` says which). XLA drops an array from a barrier behind which nothing reads
it, so that what is waited for is read behind the barrier from then on:

    x, r = optimization_barrier(x, r)                                                            (LocalMachine._after)

The CPU backend drops barriers before it eliminates common subexpressions, and would store the first results instead;
its loops need not wait. There, for what is recomputed outside of loops, and for gathered parameters, the value depends
on the result by a select:

    x if r = r or r ≠ r else 0        r: the first element of the result                            (`once_there`)

The result is always x, but XLA does not reason about NaN.

Gathered parameters: those that are stored sharded and gathered where an op reads them form a unit per op. XLA would
issue the all-gathers of all units at once, when the task starts. Here unit n waits until enough of the units before it
have been read:

    b_n + … + b_{j+1} <= 2 · max b      the units after unit j, for whose op unit n waits          (Gathered.held)

so that the next unit can be gathered while one is read, and small ones further ahead; b are bytes per device. The
result of that op may have been read by the time that unit n comes, so that no barrier would stay. The select runs on
the part of a parameter that a device stores, which loops copy out of its stack anyway.

Sums of gradients are reduced in buckets, one bucket after the other (`Plan.buckets`):

    bucket n starts when all of bucket n - 1 is reduced, as on one queue of collectives            (Buckets.awaited)

XLA combines reductions that do not wait for each other into one, up to some size. Combining within a bucket is left to
XLA; every value of a bucket waits for the whole bucket before it, so that two buckets stay apart on any backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from alpa_lite import _jax
from alpa_lite.lower.run_local import LocalOp, bind_local, block_index
from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.plan.walk import Application, Walk, body_walk, sharing_axes
from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import TO_DEVICE, Graph, Op, Value, Wiring, is_one_trip_loop
from alpa_lite.program.phases import GATHERED_AHEAD, StepGraph, is_parameter
from alpa_lite.rules.awaited import awaited_result, awaited_values, waiting_operands
from alpa_lite.rules.op_info import free_ops
from alpa_lite.sharding.specs import Move, MoveKind, Spec, num_shards
from alpa_lite.trace.evaluate import run_control_flow

POSITIONAL = frozenset(("iota", "random_bits", "random_split"))
"""Primitives whose results depend on the position of a micro-batch in the full batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedTask:
    """A task with all that determines its program on a mesh of given axis sizes.

    step          the step as planned
    equations     the JAX equation of each op of the step
    placements    by op id, the placement of each op of the task's stage
    donated       numbers of the inputs whose buffers may be reused
    """

    task: TaskSpec
    step: StepGraph
    equations: Sequence[Equation]
    placements: Mapping[int, OpPlacement]
    donated: tuple[int, ...] = ()


def move(x: jax.Array, step: Move, sizes: Mapping[str, int]) -> jax.Array:
    """Emit the collective (or local operation) of one step of a resharding, on a device's block `x`."""
    if step.kind is MoveKind.ALL_REDUCE:
        return lax.psum(x, step.axis)
    if step.kind is MoveKind.REDUCE_SCATTER:
        return lax.psum_scatter(x, step.axis, scatter_dimension=step.dim, tiled=True)
    if step.kind is MoveKind.ALL_GATHER:
        return lax.all_gather(x, step.axis, axis=step.dim, tiled=True)
    if step.kind is MoveKind.ALL_TO_ALL:
        return lax.all_to_all(x, step.axis, split_axis=step.target_dim, concat_axis=step.dim, tiled=True)
    if step.kind is MoveKind.PERMUTE:
        return lax.ppermute(x, step.axes, step.pairs)
    # An addend makes a partial sum of a scalar that all devices hold: the first device keeps it, all others add zero.
    if step.kind is MoveKind.ADDEND:
        return jax.numpy.where(lax.axis_index(step.axis) == 0, x, jax.numpy.zeros_like(x))
    # What remains is a slice, which is local: each device cuts out its own block.
    size = x.shape[step.dim] // sizes[step.axis]
    return lax.dynamic_slice_in_dim(x, lax.axis_index(step.axis) * size, size, step.dim)


class LocalMachine:
    """A machine that emits JAX operations on local blocks; drives a `Walk` inside `shard_map`."""

    def __init__(
        self, placed: PlacedTask, sizes: Mapping[str, int], microbatch: jax.Array | int, *, barriers_stay: bool
    ) -> None:
        """Make a machine for one task on a mesh of the given axis sizes.

        `microbatch`: index of the micro-batch being run. `barriers_stay`: whether XLA keeps optimisation barriers to
        the end.
        """
        self.step = step = placed.step
        self.barriers_stay = barriers_stay
        self.buckets = Buckets(placed.task.buckets, barriers_stay=barriers_stay)
        self.gathered = Gathered()
        self.awaited = awaited_values(step, [op_id for part in placed.task.parts for op_id in part.ops])
        # For values that others wait for by a select, a number that is there when they are.
        self.numbers: dict[tuple[int, ...], jax.Array] = {}
        # The arrays of the values of the step in each spec, those of the walk that drives this machine.
        self.arrays: dict[int, dict[Spec, jax.Array]] = {}
        self.graph = step.graph  # the graph that runs now: the step or a body
        self.sizes = sizes
        self.microbatch = microbatch
        self.equations: dict[Graph, Sequence[Equation]] = {}
        self._register(step.graph, placed.equations)
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
        # Values in bodies repeat the ids of the step, so the value is also compared by identity.
        bucketed = op is None and value.id in self.buckets.numbers and value is self.step.graph.values[value.id]
        (array,) = self._after([array], self.buckets.awaited(value.id) if bucketed else ())
        if (
            op is not None
            and is_parameter(self.step, self.graph, value.id)
            and any(step.kind is MoveKind.ALL_GATHER for step in steps)
        ):
            array = self.gathered.held(array, value.bytes / num_shards(steps[-1].spec, self.sizes))
        if value.on_host:  # collectives run on the memory of devices
            moved = self.reshard(_jax.in_memory(array, on_host=False), replace(value, on_host=False), steps, op)
            return _jax.in_memory(moved, on_host=True)
        times = self.part + self.moved[value, steps]
        self.moved[value, steps] += 1
        array = jax.numpy.reshape(array, (*(1,) * times, *array.shape))
        for step in steps:
            array = move(array, step.below(times), self.sizes)
        array = jax.numpy.reshape(array, array.shape[times:])
        if bucketed:
            self.buckets.reduced(value.id)
        return array

    def _after(self, arrays: Sequence[jax.Array], values: Sequence[int]) -> list[jax.Array]:
        """Return arrays, available only after values of the step's graph, in the form that they have now."""
        if not values:
            return [*arrays]
        if not self.barriers_stay:
            key = tuple(values)
            if key not in self.numbers:
                self.numbers[key] = first_numbers([self._newest(value)[1] for value in values])
            return [once_there(x, self.numbers[key]) for x in arrays]
        newest = [(value, *self._newest(value)) for value in values]
        behind = lax.optimization_barrier((*arrays, *(x for _, _, x in newest)))
        for (value, spec, _), x in zip(newest, behind[len(arrays) :], strict=True):
            self.arrays[value][spec] = x
        return [*behind[: len(arrays)]]

    def _newest(self, value: int) -> tuple[Spec, jax.Array]:
        return next(reversed(self.arrays[value].items()))

    def apply(self, application: Application, operands: list[jax.Array]) -> list[jax.Array]:
        """Bind the op's primitive on local blocks and return the blocks of its results."""
        graph, op = application.graph, application.op
        equation = self.equations[graph][op.id]
        # Positions are those in the full batch: random bits and counts must not depend on the number of micro-batches.
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
        # Devices of the CPU backend have the memory of the host.
        if op.primitive != TO_DEVICE or self.barriers_stay:
            operands = self._handed_back(op, operands)
        with jax.named_scope(f"op{op.id}"):
            axes = sharing_axes(op, self.sizes)
            if axes:
                return on_first_device(lambda *xs: bind_local(local, xs), operands, axes, self.sizes)
            return self._noted(application, bind_local(local, operands))

    def _handed_back(self, op: Op, operands: list[jax.Array]) -> list[jax.Array]:
        """Return the operands of an op, of which those of the forward pass wait for what is `awaited`, if anything."""
        awaited = self.awaited.get(op.id, ()) if self.graph is self.step.graph else ()
        waiting = waiting_operands(self.step, op) if awaited else ()
        held = [i for i in waiting if isinstance(operands[i], jax.Array)]
        if not held:
            return operands
        before = {value: self._newest(value)[1] for value in awaited}
        arrays = self._after([operands[i] for i in held], awaited if self.barriers_stay else awaited[:1])
        behind = dict(zip(held, arrays, strict=True))
        # Of what is waited for, the op itself reads what is behind the barrier.
        behind |= {i: self._newest(v)[1] for i, v in enumerate(op.operands) if before.get(v) is operands[i]}
        return [behind.get(i, x) for i, x in enumerate(operands)]

    def _noted(self, application: Application, results: list[jax.Array]) -> list[jax.Array]:
        """Record results of an op for the values that wait for them, and return the results."""
        op, graph = application.op, application.graph
        if op.id in free_ops(graph):
            return results  # the op that needs them is the one that has read what was gathered
        position = awaited_result(graph, op)
        awaited = None if position is None else results[position]
        self.gathered.read(awaited)
        return results

    def _positions(
        self, graph: Graph, op: Op
    ) -> tuple[tuple[tuple[jax.Array | int, ...] | None, ...], tuple[tuple[int, ...] | None, ...]]:
        """Return the position of this micro-batch's results in the full batch's and the full shapes; None: irrelevant.

        Only ops whose values depend on the position need them.
        """
        none = (None,) * len(op.results)
        step = self.step
        if step.num_microbatches == 1 or op.primitive not in POSITIONAL:
            return none, none
        # A mean over micro-batches treats each one as a batch of its own, which counts its samples from 0.
        if step.loop_results.averaged and op.primitive == "iota":
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
        """Return per column of the index vectors the first row of this micro-batch; 0 where it is another dim."""
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
        # A select would copy what is stacked; the CPU backend takes no trips out of loops.
        operands = self._handed_back(application.op, operands) if self.barriers_stay else operands

        def body(number: int, arrays: Mapping[int, jax.Array]) -> tuple[jax.Array, ...]:
            # A body has units of its own: the arrays inside are tracers, which must not leak out of it. A loop of one
            # trip is written out, and its units wait for those before it.
            around = self.graph, self.gathered
            self.graph = application.op.bodies[number]
            if not is_one_trip_loop(application.op):
                self.gathered = Gathered()
            given = [arrays.get(i, x) for i, x in enumerate(operands)]
            with jax.named_scope(f"body{number}"):
                outputs = body_walk(application, wiring, number, walk, given)
            self.graph, self.gathered = around
            # Literals are NumPy scalars, but a body must return JAX arrays.
            return tuple(x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in outputs)

        with jax.named_scope(f"op{application.op.id}"):
            results = run_control_flow(application.op, wiring, body, operands)
        return self._noted(application, results)


def first_numbers(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return one number that depends on the first element of each array that has any; complex ones have a real part."""
    firsts = [lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), ()) for x in arrays if x.size]
    return sum((first.real.astype("float32") for first in firsts), jnp.float32(0.0))


def once_there(x: jax.Array, number: jax.Array) -> jax.Array:
    """Return `x`, available only after a floating-point number, by a select that XLA does not see through."""
    if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        # `select` does not accept typed keys: wait for their words instead.
        return jax.random.wrap_key_data(once_there(jax.random.key_data(x), number), impl=jax.random.key_impl(x))
    there = (number == number) | (number != number)
    return lax.select(there, x, lax.full_like(x, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _GatheredUse:
    """The bytes per device that were gathered for one op, and a result of that op to wait for."""

    bytes: float
    result: jax.Array


class Gathered:
    """The units of one pass over a graph, or of one trip of a loop."""

    def __init__(self) -> None:
        """Start without units."""
        self.units: list[_GatheredUse] = []
        self.largest = 0.0
        self.waiting = 0.0  # bytes that are gathered for the next op

    def held(self, array: jax.Array, size_bytes: float) -> jax.Array:
        """Return an array that is about to be gathered, delayed until the earlier units leave enough memory.

        `size_bytes`: size of the gathered array per device, in bytes.
        """
        self.waiting += size_bytes
        self.largest = max(self.largest, self.waiting)
        room = GATHERED_AHEAD * self.largest - self.waiting
        # From the latest unit backwards: the first one that does not fit any more must be read before this one starts.
        for unit in reversed(self.units):
            room -= unit.bytes
            if room < 0:
                return once_there(array, first_numbers([unit.result]))
        return array

    def read(self, result: jax.Array | None) -> None:
        """Record the result to wait for of the op that reads everything gathered since the last op; None without one.

        Nothing waits for what an op without one has read.
        """
        if self.waiting and result is not None:
            self.units.append(_GatheredUse(bytes=self.waiting, result=result))
        self.waiting = 0.0


class Buckets:
    """The order of the reductions of a task, bucket after bucket."""

    def __init__(self, buckets: Sequence[Sequence[int]], *, barriers_stay: bool) -> None:
        """Number the buckets.

        `buckets`: values of the step's graph. `barriers_stay`: whether XLA keeps optimisation barriers to the end.
        """
        self.numbers = {v: number for number, bucket in enumerate(buckets) for v in bucket}
        self.barriers_stay = barriers_stay
        self.done: dict[int, tuple[int, ...]] = {}  # per bucket, the values that the next bucket waits for

    def awaited(self, value: int) -> tuple[int, ...]:
        """Return the values of the preceding bucket that a value waits for, which is about to be reduced."""
        # Bucket n - 1 was itself held back for the one before it, so that waiting for it alone keeps the whole order.
        before = self.done.get(self.numbers[value] - 1, ())
        if before and self.barriers_stay:
            # Behind the barrier for the first value of a bucket each of them is there when all are.
            self.done[self.numbers[value] - 1] = before[:1]
        return before

    def reduced(self, value: int) -> None:
        """Record that a value was reduced, for which the next bucket waits."""
        number = self.numbers[value]
        self.done[number] = (*self.done.get(number, ()), value)


def on_first_device(
    run: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
) -> list[jax.Array]:
    """Return `run(*operands)`, computed on the first device along `axes`, on all of them; operands are replicated."""
    # Only shapes are needed here; running the op for them would cause its effect a second time.
    shapes = jax.eval_shape(lambda *xs: tuple(run(*xs)), *operands)
    # A branch and not a select: in a select both sides run, and with them the side effect, on every device.
    results = lax.cond(
        block_index(axes, sizes) == 0,
        lambda *xs: tuple(run(*xs)),
        lambda *_: tuple(jnp.zeros(s.shape, s.dtype) for s in shapes),
        *operands,
    )
    # All other devices hold zeros, so that a sum broadcasts the results of the first one.
    return [_shared(x, axes) for x in results]


def _shared(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the sum over devices, of which all but one add zero. Booleans are summed as bytes, which is their size."""
    if x.size == 0:
        return x
    return lax.psum(x.astype(jnp.uint8), axes).astype(x.dtype) if x.dtype == jnp.bool_ else lax.psum(x, axes)
