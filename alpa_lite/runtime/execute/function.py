"""A compiled step as a function of the user's arguments, and the initialisation of its state in their shardings."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from alpa_lite import _jax
from alpa_lite._jax import Aval, DType, Tree, TreeLeaf
from alpa_lite.errors import ExecutionError, PlanError, TraceError
from alpa_lite.plan.instructions import InstructionKind, TaskTime
from alpa_lite.plan.plan import Plan
from alpa_lite.runtime.execute.aliasing import Apart, copies
from alpa_lite.runtime.execute.arrivals import ServedRun
from alpa_lite.runtime.execute.compile import joined_texts, summed_costs
from alpa_lite.runtime.execute.crossing import Blanks
from alpa_lite.runtime.execute.execute import Executor
from alpa_lite.runtime.execute.measure import Allocated, allocated, typical_times
from alpa_lite.runtime.execute.placing import InJob
from alpa_lite.runtime.execute.step_profile import StepProfile, profiled
from alpa_lite.runtime.execute.typed_results import TypedResults
from alpa_lite.runtime.job.processes import all_here, any_here, devices_of, handle
from alpa_lite.step.split import TracedStep
from alpa_lite.text import one_line
from alpa_lite.trace.call import Call
from alpa_lite.trace.trace import Traced, aval_of
from cost_models.checks import printable


@dataclass(frozen=True, kw_only=True, eq=False)
class CompiledFunction:
    """A compiled step, to be called with arguments of the traced shapes."""

    traced: Traced
    plan: Plan
    step: TracedStep
    executor: Executor

    def __str__(self) -> str:
        return str(self.plan)

    def __repr__(self) -> str:
        return one_line(self, f"{self.traced.name} by {self.plan!r}")

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the plan where IPython shows no HTML."""
        self.plan._repr_pretty_(printer, cycle)

    def __call__(self, *args: Tree, **kwargs: Tree) -> Tree:
        """Run one step and return its outputs."""
        call = self._call(args, kwargs)
        return self.finish(self.run_flat(self._leaves(call), None), call)

    def timed(self, *args: Tree, **kwargs: Tree) -> tuple[Tree, list[TaskTime]]:
        """Run one step with every instruction awaited; return the outputs and the measured spans."""
        record: list[TaskTime] = []
        call = self._call(args, kwargs)
        return self.finish(self.run_flat(self._leaves(call), record), call), record

    def measure(self, *, awaited: bool | None = None) -> tuple[TaskTime, ...]:
        """Return the span of each instruction of a step on arguments of zeros.

        The caller's arrays are not touched. The instructions are those that `LoweredFunction.simulate` prices.

        awaited: whether each instruction is awaited before the next one starts, so that a span is its time without
            overlap. Otherwise they overlap as in any step. Default: True where devices share one processor, as virtual
            CPU devices do, whose overlapping tasks slow each other down.
        """
        alone = self.plan.cluster.shared_processor if awaited is None else awaited
        with _jax.no_mesh():
            return typical_times(self.executor, self.traced.inputs.leaves, self.step.inputs, awaited=alone)

    def profile(self) -> StepProfile:
        """Return the span of each instruction of a step on arguments of zeros, with the kernels that ran in it.

        The step runs under JAX's profiler, with every instruction awaited before the next one starts. What
        `plan.explain_profile` says of it names the ops whose times differ most from the prediction.

        Raises `ExecutionError` in a job of several processes, and where the profiler names no kernels.
        """
        with _jax.no_mesh():
            return profiled(self.executor, self.traced.inputs.leaves, self.step.inputs)

    def staleness(self) -> tuple[int, ...]:
        """Return by how many updates the weights of each micro-batch of the last step were too old.

        Of a parameter server with several updates per step, whose order follows the devices; of any other plan (), as
        the schedule says it. Before the first step it is that of the planned order.
        """
        run = self.executor.arrivals
        return tuple(count for _, count in sorted(run.staleness.lacking.items())) if isinstance(run, ServedRun) else ()

    def allocated(self) -> tuple[Allocated, ...]:
        """Return the peak allocation on a device of each stage, as XLA reports it for the executables; nothing runs.

        Raises `ExecutionError` for a stage on devices of other processes alone.
        """
        executor = self.executor
        return allocated(self.plan, executor.program, executor.step, executor.executables)

    def as_text(self) -> str:
        """Return XLA's optimised program of each executable, equal ones once, with a line of comment before it."""
        return joined_texts((each.task.name, each.compiled) for each in self.executor.executables)

    def cost_analysis(self) -> dict[str, float]:
        """Return XLA's "flops" and "bytes accessed" of one device per stage, summed over stages and micro-batches."""
        # An executable runs once for each micro-batch.
        runs = Counter(i.task for i in self.executor.program.instructions if i.kind == InstructionKind.RUN)
        tasks = enumerate(self.executor.executables)
        return summed_costs((each.compiled.cost_analysis(), runs[i]) for i, each in tasks if each.compiled is not None)

    def memory_analysis(self) -> Allocated:
        """Return the peak allocation on the device that needs most, as XLA reports it; see `allocated` for all."""
        return max(self.allocated(), key=lambda stage: stage.peak_bytes)

    def run_flat(self, leaves: Sequence[TreeLeaf], record: list[TaskTime] | None) -> Tree:
        """Run one step on flattened traced arguments; return the pytree of all arrays that come out."""
        try:
            # Without a look at the types: mostly all leaves are JAX arrays, and this runs before every step.
            gone = any([leaf.is_deleted() for leaf in leaves])
        except AttributeError:  # NumPy's arrays and numbers
            refuse_shapes(self.traced.name, leaves)
            gone = any([isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves])
        if gone:
            raise ExecutionError(self._given_away(leaves))  # XLA may abort the process on a deleted buffer
        try:
            # The programs run on the plan's meshes, whatever mesh the caller has set.
            with _jax.no_mesh():
                outputs = self.executor(self.step.inputs(self._apart(leaves)), record)
                for number, finish in self._finished:
                    outputs[number] = finish(outputs[number])
        except _jax.InvalidNumbersError as error:
            # `jax.jit` now runs its function op by op to find the culprit, which a compiled step cannot.
            raise FloatingPointError(
                f"{self.traced.name}: {' '.join(map(str, error.args))} among the results (jax_debug_nans or "
                f"jax_debug_infs is on). Call {self.traced.name}.fun with these arguments to see the operation."
            ) from error
        outputs = self._typed(leaves, outputs)
        self._apart.note(leaves, outputs)
        return jax.tree.unflatten(self.traced.outputs.tree, outputs)

    def finish(self, arrays: Tree, call: Call) -> Tree:
        """Return the results of a call, made of the arrays that come out of a step; see `Results.finish`."""
        results = self.traced.outputs.results
        return arrays if results.is_plain else results.finish(arrays, call)

    def place(self, *args: Tree, **kwargs: Tree) -> tuple[Tree, ...]:
        """Return the positional arguments on their planned devices, where state stays from then on."""
        call = self._call(args, kwargs)
        with _jax.no_mesh():
            leaves = self.executor.place_inputs(self._leaves(call))
        placed = call.with_values(jax.tree.unflatten(self.traced.inputs.tree, leaves))
        return tuple(placed[i] for i in range(len(args)))

    def input_shardings(self) -> Tree:
        """The arguments' pytrees with a `NamedSharding` in place of each array."""
        shardings = [self.executor.input_sharding(leaf) for leaf in range(len(self.traced.inputs.leaves))]
        return jax.tree.unflatten(self.traced.inputs.tree, shardings)

    @functools.cached_property
    def _apart(self) -> Apart:
        """Copies arguments that share a buffer with one that XLA will overwrite."""
        traced = self.traced
        shardings = [self.executor.input_sharding(leaf) for leaf in range(len(traced.inputs.leaves))]
        next_of = {leaf: out for out, leaf in traced.aliases.items()}
        return Apart(traced.inputs.leaves, shardings, traced.inputs.donated, next_of)

    @functools.cached_property
    def _typed(self) -> TypedResults:
        """Gives results the types that they have under a mesh of the user."""
        return TypedResults(self.traced)

    @functools.cached_property
    def _finished(self) -> list[tuple[int, Callable[[jax.Array], Any]]]:
        """The results that `jax.jit` returns as another type of array than executables do, with their conversions."""
        leaves = enumerate(self.traced.outputs.leaves)
        return [(i, _finishing(leaf)) for i, leaf in leaves if leaf.weak_type or leaf.dtype == jax.dtypes.float0]

    def _call(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Call:
        refuse_tracing(self.traced.name)
        return Call.of(self.traced.fun, args, kwargs, self.traced.inputs.static)

    def _leaves(self, call: Call) -> list[TreeLeaf]:
        """Return the traced arguments of a call, flattened. Raises `PlanError` for others than were compiled for."""
        leaves, structure = jax.tree.flatten(call.tree)
        if structure != self.traced.inputs.tree:
            raise PlanError(
                f"{self.traced.name} was compiled for other arguments: their structure is {structure}, it was "
                f"{self.traced.inputs.tree}. Trace and compile again."
            )
        if call.static != self.traced.call.static:
            raise PlanError(
                f"{self.traced.name} was compiled for other static arguments or constants: they are "
                f"{printable(str(call.static))}, and were {printable(str(self.traced.call.static))}. Trace and compile "
                "again."
            )
        # Whole lists are compared first, and a message is made only if they differ: this runs before every step.
        if [np.shape(leaf) for leaf in leaves] != self._shapes:
            raise PlanError(self._misfit(leaves))
        if [getattr(leaf, "dtype", None) for leaf in leaves] != self._dtypes:
            self._check_dtypes(leaves)
        return leaves

    @functools.cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in self.traced.inputs.leaves]

    @functools.cached_property
    def _dtypes(self) -> list[DType]:
        return [leaf.dtype for leaf in self.traced.inputs.leaves]

    def _check_dtypes(self, leaves: Sequence[TreeLeaf]) -> None:
        """Raise `PlanError` for another dtype than was compiled for, after converting NumPy dtypes to JAX's."""
        for leaf, wanted, name in zip(leaves, self._dtypes, self.traced.inputs.names, strict=True):
            given = aval_of(leaf, name).dtype
            if given != wanted:
                raise PlanError(
                    f"{self.traced.name} was compiled for {name} of dtype {wanted}, but {given} was given. Trace and "
                    "compile again."
                )

    def _misfit(self, leaves: Sequence[TreeLeaf]) -> str:
        given = zip(leaves, self._shapes, self.traced.inputs.names, strict=True)
        leaf, wanted, name = next(each for each in given if np.shape(each[0]) != each[1])
        return (
            f"{self.traced.name} was compiled for {name} of shape {list(wanted)}, but {list(np.shape(leaf))} was "
            "given. Trace and compile again."
        )

    def _given_away(self, leaves: Sequence[TreeLeaf]) -> str:
        pairs = zip(leaves, self.traced.inputs.names, strict=True)
        name = next(name for leaf, name in pairs if isinstance(leaf, jax.Array) and leaf.is_deleted())
        return (
            f"{self.traced.name} was given an array for {name} that has been deleted: an earlier call took its memory "
            "over (donate_argnums). Pass what that call returned instead, or do not donate it."
        )


def _finishing(leaf: jax.ShapeDtypeStruct) -> Callable[[jax.Array], Any]:
    """Return the conversion of a result to the type of `jax.jit`'s: weakly typed, or without bytes (float0)."""
    if leaf.dtype == jax.dtypes.float0:
        return lambda array: np.zeros(leaf.shape, leaf.dtype)
    avals: dict[Sharding, Aval] = {}

    def finish(array: jax.Array) -> jax.Array:
        # The same object in all steps, since the next step recognises its arguments by identity.
        if array.sharding not in avals:
            avals[array.sharding] = array.aval.update(weak_type=True)
        return _jax.relabeled(array, avals[array.sharding], array.sharding)

    return finish


def refuse_tracing(name: str) -> None:
    """Raise `TraceError` while JAX traces another function, which cannot contain a planned step."""
    if _jax.is_tracing():
        raise TraceError(
            f"{name} was called while JAX traces or transforms another function (jax.jit, jax.grad, jax.vmap, "
            "jax.lax.scan, jax.eval_shape, …). A parallel step runs on the devices of its own plan and cannot be part "
            f"of another program. Call it outside of the transformation, or use the function that it decorates inside: "
            f"{name}.fun."
        )


def refuse_shapes(name: str, leaves: Sequence[TreeLeaf]) -> None:
    """Raise `TraceError` for a call with abstract arrays instead of arrays."""
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TraceError(
            f"{name} was called with a jax.ShapeDtypeStruct, but to run it needs arrays. With shapes alone, use "
            f"{name}.trace(…).plan(), {name}.compiled(…), al.plan({name}, …), or jax.eval_shape({name}.fun, …) for the "
            "shapes of the results."
        )


def with_own_constants(step: TracedStep, executor: Executor, first: int) -> TracedStep:
    """Return the step with copies of its captured arrays, which are inputs from number `first` on."""
    if step.precomputed is None:
        return replace(step, constants=tuple(executor.own_constants(first, step.constants)))
    # A program that precomputes constants reads several of them, which must then lie on the devices of one stage.
    own = (copies([x])[0] if isinstance(x, jax.Array) else np.array(x) for x in step.constants)
    return replace(step, constants=tuple(own))


def init_sharded(init_fn: Callable[..., Tree], *args: Tree, like: CompiledFunction, argument: int | str = 0) -> Tree:
    """Initialise state directly in the shardings of a compiled step: no device ever holds more than its own blocks.

    Args:
        init_fn: `init_fn(*args)` must return a pytree like the argument. Every stage computes only the arrays that live
            on it, and of these each device only its blocks; arrays of other processes' stages are handles.
        args: arguments of `init_fn`. Processes that share a stage must pass equal ones.
        like: the compiled step.
        argument: the argument of the step to initialise, by position or name.

    Raises:
        PlanError: the step has no such argument, or the result of `init_fn` has another structure.
    """
    positional, keywords = like.input_shardings()
    # One name space, since positions are numbers and keywords are strings.
    by_name = {**positional, **keywords}
    if argument not in by_name:
        raise PlanError(
            f"argument={argument!r} was given, but the compiled step takes arrays in {', '.join(map(repr, by_name))}. "
            "Name one of these."
        )
    shardings = by_name[argument]
    flat, structure = jax.tree.flatten(shardings)
    # Abstractly: the whole state may be larger than the memory of this process.
    shapes = jax.eval_shape(init_fn, *args)
    if jax.tree.structure(shapes) != structure:
        raise PlanError(
            f"init_fn returns {jax.tree.structure(shapes)}, but argument {argument!r} of the compiled step is "
            f"{structure}. Give an init_fn that returns that argument."
        )
    result: list[jax.Array | None] = [None] * len(flat)
    leaves = jax.tree.leaves(shapes)
    # A jitted function runs on one set of devices, so each mesh has its own; XLA drops what its arrays do not need.
    for mesh in dict.fromkeys(s.mesh for s in flat):
        mine = [i for i, s in enumerate(flat) if s.mesh == mesh]
        if not any_here(devices_of(mesh)):
            for i in mine:
                result[i] = handle(leaves[i].shape, leaves[i].dtype, flat[i])
            continue

        def part(*inputs: Tree, mine: Sequence[int] = tuple(mine)) -> list[TreeLeaf]:
            leaves = jax.tree.leaves(init_fn(*inputs))
            return [leaves[i] for i in mine]

        with _jax.no_mesh():
            built = jax.jit(part, out_shardings=[flat[i] for i in mine])(*_on(mesh, args))
        for i, array in zip(mine, built, strict=True):
            result[i] = array
    return jax.tree.unflatten(structure, result)


def _on(mesh: Mesh, args: Sequence[Tree]) -> Sequence[Tree]:
    """Return the arguments with arrays replicated on all devices of a mesh, if it spans several processes."""
    if all_here(devices_of(mesh)):
        return args
    # A function on several processes takes only arrays that lie on the devices of all of them.
    placing, whole = InJob(Blanks()), NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: placing.put(x, whole) if isinstance(x, jax.Array) else x, args)
