"""The public functions: `parallelize` decorates a step, `plan` plans one, `cluster` describes where to.

The first call of the decorated function with new shapes runs the whole pipeline (see `api.stages`).
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from os import PathLike
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from alpa_lite import _jax
from alpa_lite._jax import Tree
from alpa_lite.api.earlier_calls import (
    CallKey,
    difference,
    form_of,
    key_of_call,
    num_shared,
    planner_with_placement,
)
from alpa_lite.api.options import Options, plan_of
from alpa_lite.api.plan_cache import Cache
from alpa_lite.api.smaller_batch import plan_for_smaller_batch, smaller_microbatches
from alpa_lite.api.stages import LoweredFunction, PlannedFunction, TracedFunction
from alpa_lite.errors import AlpaLiteError
from alpa_lite.inter_op.plan_request import OnInterrupt
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.progress import Progress, Say
from alpa_lite.planners import Auto, Jitted, Planner
from alpa_lite.planners.planner import Replay
from alpa_lite.program.user_shardings import Mode
from alpa_lite.runtime.check_report import CheckReport
from alpa_lite.runtime.compare import check_compiled
from alpa_lite.runtime.execute.execute import WATCHDOG_SECONDS, OnHang
from alpa_lite.runtime.execute.function import (
    CompiledFunction,
    refuse_shapes,
    refuse_tracing,
)
from alpa_lite.runtime.job.activity import busy
from alpa_lite.step.split import OnNonAdditive
from alpa_lite.text import one_line
from alpa_lite.trace.batch import BatchArgnums
from alpa_lite.trace.call import ArgumentRoles, Call, NamedArguments
from alpa_lite.trace.trace import trace
from cost_models.cluster import Cluster, load_cluster

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger("alpa_lite")


class ParallelFunction(Generic[P, R]):
    """The callable that `parallelize` returns: call it like the function, or go through the pipeline with `trace`.

    fun           the plain function
    options       the checked options of `parallelize`
    last_plan     the plan of the last call; None before the first
    last_check    the report of the last comparison with `jax.jit` (`parallelize(check=True)`); None before the first
    """

    def __init__(self, fun: Callable[P, R], options: Options) -> None:
        """Wrap a function; see `parallelize`."""
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.options = options
        self.last_plan: Plan | None = None
        # `update_wrapper` copies a name only if there is one: partials and callable objects have none.
        self.__name__ = getattr(self, "__name__", type(fun).__name__)
        self.last_check: CheckReport | None = None
        self._static = NamedArguments.of("static_argnames", fun, options.static_argnums, options.static_argnames)
        self._donated = NamedArguments.of("donate_argnames", fun, options.donate_argnums, options.donate_argnames)
        self._compiled: dict[CallKey, CompiledFunction] = {}
        # The cheap key of the last call, which most calls repeat, and what it ran.
        self._last: tuple[object, CompiledFunction] | None = None
        # The full key of the last call, from which the log says what is different in a new one.
        self._last_key: CallKey | None = None
        self._methods: dict[int, tuple[object, ParallelFunction[..., R]]] = {}

    def __repr__(self) -> str:
        return one_line(self, f"of {self.__name__}")

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> TracedFunction:
        """Trace the function for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._trace(args, kwargs)

    def _trace(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> TracedFunction:
        options = self.options
        with busy("tracing"), options.progress.during("trace"):
            traced = trace(
                self.fun,
                args,
                kwargs,
                roles=ArgumentRoles(static=self._static, donated=self._donated),
                batch_argnums=options.batch_argnums,
                user_shardings=options.user_shardings,
            )
        return TracedFunction(traced=traced, options=options)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> LoweredFunction:
        """Trace, plan and lower the function for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        return self.trace(*args, **kwargs).plan().lower()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step; the first call with a new key (see `earlier_calls`) traces, plans, lowers and compiles.

        While JAX traces or transforms another function (`jax.jit`, `jax.grad`, `jax.vmap`, `jax.eval_shape`, …), and
        under `jax.disable_jit`, it is the plain function.

        Raises `TraceError` for shapes given in place of arrays.
        """
        # Tracers lie on no devices, and JAX can only transform the plain function.
        if _jax.is_tracing() or getattr(jax.config, "jax_disable_jit", False):
            return self.fun(*args, **kwargs)
        # Static values need not be pytrees of arrays: they are taken out before anything is flattened.
        if self._static.numbers or self._static.names:
            return self._call(args, kwargs)
        configuration = _jax.configuration()
        # The form of `Call.tree`: `_call` stores the key that is compared here.
        leaves, structure = jax.tree.flatten((dict(enumerate(args)), kwargs))
        try:
            # Arrays that the step before returned have the very avals of the call before: this compares pointers.
            seen = (structure, (), [x.aval for x in leaves], configuration)
        # NumPy arrays, Python numbers and the functions in an Equinox module have no aval.
        except AttributeError:
            return self._call(args, kwargs)
        if self._last is None or self._last[0] != seen:
            return self._call(args, kwargs)
        compiled = self._last[1]
        self.last_plan = compiled.plan
        # No result has to be finished here: calls with constants, or with modules that are updated in place, have a
        # non-empty static part in their key.
        return compiled.run_flat(leaves, None)

    def _call(self, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> Any:
        """Run one step whose arguments have to be read first."""
        call = Call.of(self.fun, args, kwargs, self._static)
        configuration = _jax.configuration()
        leaves, structure = jax.tree.flatten(call.tree)
        seen = (structure, call.static, [form_of(x) for x in leaves], configuration)
        if self._last is not None and self._last[0] == seen:
            compiled = self._last[1]
        else:
            # A `ShapeDtypeStruct` would trace and compile, and fail only when the step runs.
            refuse_shapes(self.__name__, leaves)
            key = key_of_call(self.fun, structure, call.static, leaves, configuration)
            compiled = self._compiled_for(key, args, kwargs)
            self._last = seen, compiled
        self.last_plan = compiled.plan
        return compiled.finish(compiled.run_flat(leaves, None), call)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Return the step bound to an object, when a method is decorated.

        If the object is a pytree (a module), or `static_argnums` names it, it is the first argument of the step;
        otherwise it is a constant, as for `jax.jit(instance.method)`.
        """
        if instance is None:
            return self
        if 0 in self._static.numbers or not jax.tree_util.all_leaves([instance]):
            return BoundParallelFunction(self, instance)
        # The object is held with its step: a compiled step reads its constants, and an id must stay its own.
        if id(instance) not in self._methods:
            # Without the object, positions are one lower; negative ones count from the end and stay.
            moved = {
                f"{kind}_argnums": tuple(n - 1 if n > 0 else n for n in getattr(self.options, f"{kind}_argnums") if n)
                for kind in ("static", "donate")
            }
            bound = ParallelFunction(types.MethodType(self.fun, instance), replace(self.options, **moved))
            self._methods[id(instance)] = instance, bound
        return self._methods[id(instance)][1]

    def clear_cache(self) -> None:
        """Forget all compiled steps, so that the next call traces, plans and compiles anew."""
        self._compiled.clear()
        self._methods.clear()
        self._last = self._last_key = None

    def compiled(self, *args: P.args, **kwargs: P.kwargs) -> CompiledFunction:
        """Return the compiled function for these arguments, without running it; `jax.ShapeDtypeStruct`s will do."""
        refuse_tracing(self.__name__)
        call = Call.of(self.fun, args, kwargs, self._static)
        leaves, structure = jax.tree.flatten(call.tree)
        key = key_of_call(self.fun, structure, call.static, leaves, _jax.configuration())
        return self._compiled_for(key, args, kwargs)

    def _compiled_for(self, key: CallKey, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> CompiledFunction:
        """Return the compiled function of a key, compiling it if it is new."""
        if key not in self._compiled:
            if self._last_key is not None:
                told = difference(self.fun, self._last_key, key)
                _logger.info(
                    "%s is traced and compiled again, since the call differs from the last: %s", self.__name__, told
                )
            # One phase around all, so that the line of progress stays from the first to the last.
            with self.options.progress.during("call"):
                made = self._planned(key, self._trace(args, kwargs)).lower().compile()
            # A step that fails the comparison raises an error here, before later calls could use it.
            if self.options.check:
                self.last_check = check_compiled(made, args, kwargs)
            self._compiled[key] = made
        self._last_key = key
        return self._compiled[key]

    def _planned(self, key: CallKey, traced: TracedFunction) -> PlannedFunction:
        """Plan for a new key: by the plan of an earlier call if it fits, as where only weak types differ; so that the
        state stays where it is, if only the batch is smaller, or if `like` names a step with that state; or anew.
        """
        # A plan that obeys the placement of one call is none for another placement.
        pins = self.options.user_shardings == "pin" or isinstance(self.options.planner, Jitted)
        for other, compiled in self._compiled.items():
            if key.has_same_arrays(other, split_alike=pins):
                with suppress(AlpaLiteError):  # whatever does not fit is planned anew, and told then
                    number = compiled.plan.num_microbatches
                    return traced.plan(planner=compiled.plan, num_microbatches=number)
        for compiled in self._compiled.values():
            if traced.is_smaller_batch_of(compiled.traced):
                return self._planned_for_fewer(traced, compiled.plan)
        return (
            traced.plan() if self.options.like is None else self._planned_in_place(traced, plan_of(self.options.like))
        )

    def _planned_for_fewer(self, traced: TracedFunction, full: Plan) -> PlannedFunction:
        """Plan for fewer samples than a plan has: by that plan, or anew where it does not fit them."""
        step_at = functools.partial(traced.step, loop_parts=full.loop_parts, update_every=full.update_every)
        plan = plan_for_smaller_batch(full, traced.request(full.cluster), step_at)
        if plan is None:
            return self._planned_in_place(traced, full)
        samples = f"{traced.traced.batch.size} samples run by the plan of the full batch, {full.name}"
        count = plan.num_microbatches
        _logger.info("%s: %s, in %d micro-batch%s", self.__name__, samples, count, "" if count == 1 else "es")
        return traced.plan(planner=plan, num_microbatches=count)

    def _planned_in_place(self, traced: TracedFunction, plan: Plan) -> PlannedFunction:
        """Plan a step that shares arguments with the step of a plan, which should stay where they are."""
        size = traced.traced.batch.size
        number: int | None = None
        if size is not None and plan.batch is not None:
            # No micro-batch is larger than in that plan, under which the activations fit into memory.
            number = next(smaller_microbatches(size, plan.batch.size / plan.num_microbatches))
        planner = planner_with_placement(plan, traced.traced)
        if planner is not None:
            with suppress(AlpaLiteError):
                planned = traced.plan(planner=planner, num_microbatches=number)
                stay = f"{num_shared(plan, traced.traced)} arguments stay where that plan has them"
                _logger.info("%s is planned beside %s: %s", self.__name__, plan.name, stay)
                return planned
        planned = self._planned_for_batch(traced, plan, number)
        _logger.warning(
            "%s is planned anew beside %s, and arguments may move between the two: %s",
            self.__name__,
            plan.name,
            "a pipeline's stages lie apart" if len(plan.stages) > 1 else "there is no plan with the same placement",
        )
        return planned

    def _planned_for_batch(self, traced: TracedFunction, plan: Plan, number: int | None) -> PlannedFunction:
        """Plan with the user's options; if these do not suit the batch, with other micro-batches or another planner."""
        # With as many stages, more of the state is likely to stay on its devices.
        stages = Auto(pipeline=len(plan.stages))
        # A replayed plan is valid for the shapes of its own step alone.
        own = stages if isinstance(self.options.planner, Replay) else self.options.planner
        # The planner of the user may need a batch that its degrees divide.
        choices = ((None, None), (own, number), (stages, number), (Auto(), "auto"))
        problems: list[AlpaLiteError] = []
        for planner, count in choices:
            try:
                return traced.plan(planner=planner, num_microbatches=count)
            except AlpaLiteError as error:
                problems.append(error)
        # The first error is about the user's own choice; the others are about substitutes for it.
        raise problems[0]


class BoundParallelFunction(Generic[R]):
    """A decorated method of an object that is an argument of the step; other attributes are taken from the function."""

    def __init__(self, function: ParallelFunction[..., R], instance: object) -> None:
        """Bind the first argument."""
        self._function, self._instance = function, instance
        functools.update_wrapper(self, function)

    def __call__(self, *args: Tree, **kwargs: Tree) -> R:
        """Run one step."""
        return self._function(self._instance, *args, **kwargs)

    def trace(self, *args: Tree, **kwargs: Tree) -> TracedFunction:
        """See `ParallelFunction.trace`."""
        return self._function.trace(self._instance, *args, **kwargs)

    def lower(self, *args: Tree, **kwargs: Tree) -> LoweredFunction:
        """See `ParallelFunction.lower`."""
        return self._function.lower(self._instance, *args, **kwargs)

    def compiled(self, *args: Tree, **kwargs: Tree) -> CompiledFunction:
        """See `ParallelFunction.compiled`."""
        return self._function.compiled(self._instance, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the decorated function."""
        return getattr(self._function, name)


class ParallelizeOptions(TypedDict, total=False):
    """The options of `parallelize`, which documents them."""

    cluster: Cluster | str | PathLike[str] | None
    planner: Planner | type[Planner] | Plan | str | None
    num_microbatches: int | str
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Iterable[str] | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Iterable[str] | None
    batch_argnums: BatchArgnums
    on_non_additive: OnNonAdditive
    progress: Say | Progress | None
    cache: Cache
    watchdog_seconds: float | None
    on_hang: OnHang
    on_interrupt: OnInterrupt
    check: bool
    like: ParallelFunction[..., Tree] | CompiledFunction | PlannedFunction | Plan | None
    user_shardings: Mode


@overload
def parallelize(fun: Callable[P, R], **options: Unpack[ParallelizeOptions]) -> ParallelFunction[P, R]: ...


@overload
def parallelize(
    fun: None = None, **options: Unpack[ParallelizeOptions]
) -> Callable[[Callable[P, R]], ParallelFunction[P, R]]: ...


def parallelize(
    fun: Callable[..., Tree] | None = None,
    *,
    cluster: Cluster | str | PathLike[str] | None = None,
    planner: Planner | type[Planner] | Plan | str | None = None,
    num_microbatches: int | str = "auto",
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    batch_argnums: BatchArgnums = None,
    on_non_additive: OnNonAdditive = "refuse",
    progress: Say | Progress | None = None,
    cache: Cache = True,
    watchdog_seconds: float | None = WATCHDOG_SECONDS,
    on_hang: OnHang = "auto",
    on_interrupt: OnInterrupt = "raise",
    check: bool = False,
    like: ParallelFunction[..., Tree] | CompiledFunction | PlannedFunction | Plan | None = None,
    user_shardings: Mode = "hint",
) -> Any:
    """Decorate a plain JAX train step so that it runs in parallel.

    Args:
        fun: the step: a function of arrays and pytrees of arrays. If it is left out, as in `@parallelize(cluster=…)`,
            a decorator is returned.
        cluster: the cluster to plan for, or its name; default: the devices of this process.
        planner: the planner; default `planners.Auto()`. A `Plan` is replayed.
        num_microbatches: a number that divides the batch, or "auto".
        donate_argnums: arguments whose buffers may be reused, by position, as in `jax.jit`.
        donate_argnames: the same, by name.
        static_argnums: arguments that are not arrays, by position, as in `jax.jit`. Functions and other constants among
            the leaves of an Equinox module need not be named.
        static_argnames: the same, by name.
        batch_argnums: the arguments that hold the batch, by position, name or path ("state/carry"), with the batch as
            their leading dim; a mapping gives another dim. Most steps do not need it: the batch is detected.
        on_non_additive: the treatment of a step that is not a sum over its samples, as with batch norm, when it is to
            run in micro-batches: "refuse" raises an error, "mean_of_means" takes the mean of the micro-batches'
            results.
        progress: called with a line of text at each step of planning and compiling; or a `Progress`, whose followers
            are also told the phases and how much work is left. By default a line shows them on terminals and in
            notebooks.
        cache: whether plans are cached and reused when everything they depend on is the same; or the cache's folder.
        watchdog_seconds: a step in which no task ends for this many seconds is taken to hang; None waits for ever.
            Processes of the job that plan or compile in the meantime are waited for.
        on_hang: the reaction to a hang: "end" writes the stacks of all processes and their last instructions, and ends
            the job with exit code 124; "raise" raises `HangError`, which names the instruction that hangs, at the next
            call; "auto" ends jobs of several processes that joined by `initialize`, and raises otherwise.
        on_interrupt: the effect of Ctrl-C on the search of `planners.Auto`: "raise" stops it and raises
            `KeyboardInterrupt`; "best" goes on with the best plan so far.
        like: another parallel step, what it compiled, or a plan: arguments that this step shares with it (by the end of
            their paths, and shape) stay where that plan has them, as for an evaluation step that reads the parameters
            of a train step.
        user_shardings: the effect of shardings that the step and its arguments name (`with_sharding_constraint`,
            `reshard`, `out_sharding=`, arrays on several devices): with "hint" the plan is free, and lists them beside
            its own; with "pin" it obeys them, on the mesh that they name; with "ignore" they are dropped.
        check: whether each newly compiled step is compared with `jax.jit` on copies of its first arguments before its
            first run; see `alpa_lite.check`. `ParallelFunction.last_check` is the report.

    Returns:
        A `ParallelFunction`, which is called like `fun`. Its calls raise `AlpaLiteError`s.

    Raises:
        PlanError: an option has a value that is not allowed.
    """
    options = Options.of(
        cluster=cluster,
        planner=planner,
        num_microbatches=num_microbatches,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        batch_argnums=batch_argnums,
        on_non_additive=on_non_additive,
        progress=progress,
        cache=cache,
        watchdog_seconds=watchdog_seconds,
        on_hang=on_hang,
        on_interrupt=on_interrupt,
        check=check,
        like=like,
        user_shardings=user_shardings,
    )
    # The options were checked above, so that a mistake is reported at the line of the decorator.
    return functools.partial(ParallelFunction, options=options) if fun is None else ParallelFunction(fun, options)


def plan(
    fun: Callable[..., Tree],
    *args: Tree,
    cluster: Cluster | str | PathLike[str] | None = None,
    planner: Planner | type[Planner] | Plan | str | None = None,
    num_microbatches: int | str = "auto",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    batch_argnums: BatchArgnums = None,
    on_non_additive: OnNonAdditive = "refuse",
    on_interrupt: OnInterrupt = "raise",
    progress: Say | Progress | None = None,
    cache: Cache = True,
    user_shardings: Mode = "hint",
    **kwargs: Tree,
) -> Plan:
    """Plan `fun(*args, **kwargs)`; arguments may be `jax.ShapeDtypeStruct`s. See `parallelize` for the options.

    Nothing runs on a device, with two exceptions: without a `cluster` this machine's devices are measured, unless
    `calibrate` did so before; and `Auto(measure_top=k)` runs the plans that it chooses from, on arguments of zeros.

    If `fun` is decorated already, the options given here apply, not those of the decorator.

    Raises:
        TraceError: the function cannot be traced, or micro-batches do not divide its batch.
        PlanError: no plan can be made; `InfeasibleError` if no plan fits into device memory.
    """
    function = parallelize(
        fun.fun if isinstance(fun, ParallelFunction) else fun,
        cluster=cluster,
        planner=planner,
        num_microbatches=num_microbatches,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        batch_argnums=batch_argnums,
        on_non_additive=on_non_additive,
        on_interrupt=on_interrupt,
        progress=progress,
        cache=cache,
        user_shardings=user_shardings,
    )
    return function.trace(*args, **kwargs).plan().last_plan


def cluster(name: str, *, num_hosts: int | None = None) -> Cluster:
    """Return a cluster by name (`alpa_lite.cluster("p3.16xlarge:2")`) or from a JSON file.

    Args:
        name: a cluster that ships with the package, or the path of a `.json` file; ":N" after it gives the number of
            hosts.
        num_hosts: the number of hosts; None takes the number of the description (1 in all that ship).

    Raises:
        ClusterError: the name is unknown (the message lists close ones), the file describes no cluster, or two
            numbers of hosts were given.
    """
    return load_cluster(name, num_hosts=num_hosts)
