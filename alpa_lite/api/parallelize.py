"""The public pipeline: decorate, trace, plan, lower, compile, call.

    parallelize(fn).trace(*args)  ->  TracedFunction      shapes, pytrees, batch
                   .plan(...)     ->  PlannedFunction     a Plan for a cluster
                   .lower()       ->  LoweredFunction     a Program of instructions
                   .compile()     ->  CompiledFunction    executables on devices; call it like fn

Each value prints itself. The first call of the decorated function with new shapes runs the whole pipeline.
"""

from __future__ import annotations

import functools
import logging
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, Generic, ParamSpec, TypedDict, TypeVar, Unpack, overload

import jax

from alpa_lite import _jax
from alpa_lite.api.call_key import CallKey, difference, form_of, key_of_call
from alpa_lite.api.job import check_same_program, planned_together
from alpa_lite.api.options import Options as Options
from alpa_lite.api.options import check_microbatches, cluster_of, planner_of
from alpa_lite.api.plan_cache import Cache
from alpa_lite.errors import AlpaLiteError, BatchError, NonAdditiveError
from alpa_lite.inter_op.plan_request import OnInterrupt
from alpa_lite.lower.instructions import Program, build_program
from alpa_lite.lower.plan_fits import check_fits
from alpa_lite.lower.planned_step import as_planned
from alpa_lite.lower.slices import TaskSpec
from alpa_lite.plan.plan import BatchDims, Plan
from alpa_lite.plan.progress import Progress, Say
from alpa_lite.planners import Planner, PlanRequest
from alpa_lite.runtime.calibrate.calibrate import Calibration as Calibration
from alpa_lite.runtime.calibrate.calibrate import calibrate as calibrate
from alpa_lite.runtime.calibrate.calibrate import local_cluster as local_cluster
from alpa_lite.runtime.check.check_report import CheckReport as CheckReport
from alpa_lite.runtime.check.compare import check_compiled
from alpa_lite.runtime.checkpoint.checkpoints import Checkpoints as Checkpoints
from alpa_lite.runtime.execute.compile import lowered_tasks, summed_costs
from alpa_lite.runtime.execute.execute import WATCHDOG_SECONDS, Executor, OnHang
from alpa_lite.runtime.execute.function import (
    CompiledFunction,
    compiling,
    refuse_shapes,
    refuse_tracing,
    with_own_constants,
)
from alpa_lite.runtime.execute.function import init_sharded as init_sharded
from alpa_lite.runtime.execute.measure import step_seconds
from alpa_lite.runtime.job.activity import busy
from alpa_lite.runtime.simulate import SimulatedStep, simulate_program
from alpa_lite.step.split import OnNonAdditive, TracedStep, split_step
from alpa_lite.trace.batch import BatchArgnums
from alpa_lite.trace.call import Call, NamedArguments
from alpa_lite.trace.trace import Traced, trace
from cost_models.cluster import Cluster, load_cluster
from cost_models.composed import ComposedCostModel

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger("alpa_lite")


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedFunction:
    """A step traced for one set of argument shapes."""

    traced: Traced
    options: Options
    _steps: dict[tuple[int, int, bool], TracedStep] = field(default_factory=dict[Any, TracedStep], repr=False)

    def step(self, num_microbatches: int = 1, *, loop_parts: int = 0, exact: bool = True) -> TracedStep:
        """Return the step split into phases at `num_microbatches` micro-batches, memoised; see `split_step`.

        loop_parts: the number of parts into which the loop over layers is split; 0 leaves it whole.
        exact: whether the step must be traced at this number; else one extrapolated from other numbers will do, unless
            an exact one was made before.
        """
        key = (num_microbatches, loop_parts, exact or (num_microbatches, loop_parts, True) in self._steps)
        if key not in self._steps:
            with _jax.no_mesh(), self.options.progress.during("split"), self._telling_batch():
                self._steps[key] = split_step(
                    self.traced,
                    num_microbatches,
                    loop_parts=loop_parts,
                    on_non_additive=self.options.on_non_additive,
                    exact=exact,
                )
        return self._steps[key]

    @contextmanager
    def _telling_batch(self) -> Iterator[None]:
        """Add the batch to the message of an error about micro-batches, where the batch was assumed and may be the
        cause.
        """
        try:
            yield
        except (NonAdditiveError, BatchError) as error:
            if self.batch is None or not self.batch.assumed:
                raise
            raise type(error)(f"{error} The batch is {self.batch}.") from error

    def plan(
        self,
        *,
        cluster: Cluster | str | PathLike[str] | None = None,
        planner: Planner | type[Planner] | Plan | str | None = None,
        num_microbatches: int | str | None = None,
        cache: Cache | None = None,
    ) -> PlannedFunction:
        """Plan for a cluster. Options that are not given here are those of `parallelize`; a `Plan` as planner is
        replayed.

        Raises:
            PlanError: no plan can be made; `InfeasibleError` if no plan fits into device memory.
            TraceError: the number of micro-batches does not divide the batch.
        """
        target = cluster_of(cluster if cluster is not None else self.options.cluster)
        chosen = planner_of(planner) if planner is not None else self.options.planner
        wanted = self.options.num_microbatches if num_microbatches is None else num_microbatches
        request = self._request(target, check_microbatches(wanted))
        with _jax.no_mesh(), busy("planning"):
            answer = planned_together(chosen, request, self.options.cache if cache is None else cache)
        plan = replace(answer.plan, request=request, batch=self.batch)
        if plan.batch is not None and plan.batch.assumed:
            _logger.info("%s: batch: %s", self.traced.name, plan.batch)
        return PlannedFunction(function=self, last_plan=plan, cached=answer.cached)

    @property
    def batch(self) -> BatchDims | None:
        """The arguments that hold the batch, and whether they were assumed; None if the step has no batch."""
        traced = self.traced
        if traced.batch_size is None:
            return None
        dims = {name: dim for name, dim in zip(traced.names, traced.batch_leaves, strict=True) if dim is not None}
        return BatchDims(size=traced.batch_size, dims=dims, assumed=traced.batch_assumed)

    def _request(self, cluster: Cluster, num_microbatches: int | str) -> PlanRequest:
        traced = self.traced
        if num_microbatches not in ("auto", 1):
            self.step(int(num_microbatches))  # says what is wrong with the user's number before any search

        return PlanRequest(
            function=traced.name,
            step_at=lambda m, loop_parts: self.step(m, loop_parts=loop_parts).step,
            likely_step_at=lambda m, loop_parts: self.step(m, loop_parts=loop_parts, exact=False).step,
            num_arguments=len(traced.leaves),
            arguments=traced.arguments,
            results=traced.out_names,
            batch_size=traced.batch_size,
            cluster=cluster,
            cost_model_for=ComposedCostModel,
            num_microbatches=num_microbatches,
            on_non_additive=self.options.on_non_additive,
            on_interrupt=self.options.on_interrupt,
            progress=self.options.progress,
            measure=self._measured_seconds,
        )

    def _measured_seconds(self, plan: Plan) -> float:
        """Run the step by a plan on the devices of this process and return the seconds that it takes."""
        compiled = PlannedFunction(function=self, last_plan=plan).lower().compile()
        return step_seconds(compiled.executor, self.traced.leaves, compiled.step.inputs)

    def __str__(self) -> str:
        batch = f"batch: {self.batch}" if self.batch is not None else "no batch found"
        return f"{self.traced.name}: {len(self.traced.leaves)} arrays in, {len(self.traced.out_leaves)} out, {batch}"


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedFunction:
    """A traced step and a plan for it.

    function     the traced step
    last_plan    the plan
    cached       whether the plan comes from the plan cache; `last_plan.solver.seconds` is then the time of that search
    """

    function: TracedFunction
    last_plan: Plan
    cached: bool = False

    def lower(self) -> LoweredFunction:
        """Lower the plan to a program of instructions. Raises `MismatchError` if the plan belongs to another step."""
        plan = self.last_plan
        step = self.function.step(plan.num_microbatches, loop_parts=plan.loop_parts)
        with _jax.no_mesh(), busy("lowering"), self.function.options.progress.during("lower"):
            plan.verify(step.step)
            step = as_planned(step, plan)
            check_fits(plan, step.step)
            return LoweredFunction(planned=self, step=step, program=build_program(plan, step.step))

    def __str__(self) -> str:
        return str(self.last_plan)


@dataclass(frozen=True, kw_only=True, eq=False)
class LoweredFunction:
    """A plan lowered to a program of instructions."""

    planned: PlannedFunction
    step: TracedStep
    program: Program

    def simulate(self) -> SimulatedStep:
        """Simulate the program on the cost model of the plan's cluster: times and memory of its instructions."""
        return simulate_program(self.program, self.planned.last_plan, self.step.step)

    def as_text(self, *, platform: str | None = None) -> str:
        """Return the StableHLO of each task, equal ones once, with a line of comment before it; no devices are needed.

        platform: the platform to lower for, such as "cpu", "cuda" or "tpu"; default: that of this process.
        """
        texts: dict[int, tuple[list[str], Any]] = {}
        for task, lowered in self._tasks(platform):
            texts.setdefault(id(lowered), ([], lowered))[0].append(task.name)
        return "\n".join(f"// {', '.join(names)}\n{lowered.as_text()}" for names, lowered in texts.values())

    def cost_analysis(self, *, platform: str | None = None) -> dict[str, float]:
        """Return XLA's estimates for the lowered tasks ("flops", "bytes accessed"), summed over the runs of a step."""
        runs = Counter(i.task for i in self.program.instructions if i.kind == "RUN")
        return summed_costs(
            (lowered.cost_analysis(), runs[number]) for number, (_, lowered) in enumerate(self._tasks(platform))
        )

    def _tasks(self, platform: str | None) -> list[tuple[TaskSpec, Any]]:
        with _jax.no_mesh(), busy("lowering"):
            return lowered_tasks(
                self.program,
                self.planned.last_plan,
                self.step.step,
                self.step.equations,
                platform or _jax.lowering_platform(jax.devices()[0]),
            )

    def compile(self, *, devices: Sequence[Any] | None = None) -> CompiledFunction:
        """Compile executables for the devices of this process (default: `jax.devices()`)."""
        traced = self.planned.function.traced
        options = self.planned.function.options
        check_same_program(self.planned.last_plan, self.program, traced.donated)
        with _jax.no_mesh(), busy("compiling"), options.progress.during("compile"):
            executor = Executor(
                self.program,
                self.planned.last_plan,
                self.step.step,
                self.step.equations,
                donated=traced.donated,
                devices=devices,
                progress=compiling(options.progress),
                watchdog_seconds=options.watchdog_seconds,
                on_hang=options.on_hang,
            )
            step = with_own_constants(self.step, executor, len(traced.leaves))
        return CompiledFunction(traced=traced, plan=self.planned.last_plan, step=step, executor=executor)

    def __str__(self) -> str:
        return str(self.program)


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
        self.__name__ = getattr(self, "__name__", type(fun).__name__)
        self.last_check: CheckReport | None = None
        self._static = NamedArguments.of("static_argnames", fun, options.static_argnums, options.static_argnames)
        self._donated = NamedArguments.of("donate_argnames", fun, options.donate_argnums, options.donate_argnames)
        self._compiled: dict[CallKey, CompiledFunction] = {}
        self._last: tuple[Any, CompiledFunction] | None = None
        self._last_key: CallKey | None = None
        self._methods: dict[int, tuple[Any, ParallelFunction[..., R]]] = {}

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> TracedFunction:
        """Trace the function for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._trace(args, kwargs)

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TracedFunction:
        options = self.options
        with busy("tracing"), options.progress.during("trace"):
            traced = trace(
                self.fun,
                args,
                kwargs,
                static=self._static,
                donate=self._donated,
                batch_argnums=options.batch_argnums,
            )
        return TracedFunction(traced=traced, options=options)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> LoweredFunction:
        """Trace, plan and lower the function for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        return self.trace(*args, **kwargs).plan().lower()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step; the first call with a new key (see `call_key`) traces, plans, lowers and compiles.

        While JAX traces or transforms another function (`jax.jit`, `jax.grad`, `jax.vmap`, `jax.eval_shape`, …), and
        under `jax.disable_jit`, it is the plain function.

        Raises `TraceError` for shapes given in place of arrays.
        """
        if _jax.is_tracing() or getattr(jax.config, "jax_disable_jit", False):
            return self.fun(*args, **kwargs)
        if self._static.numbers or self._static.names:
            return self._call(args, kwargs)
        configuration = _jax.configuration()
        leaves, structure = jax.tree.flatten((dict(enumerate(args)), kwargs))
        try:
            # Arrays that the step before returned have the very avals of the call before: this compares pointers.
            seen = (structure, (), [x.aval for x in leaves], configuration)  # type: ignore[union-attr]
        except AttributeError:
            return self._call(args, kwargs)
        if self._last is None or self._last[0] != seen:
            return self._call(args, kwargs)
        compiled = self._last[1]
        self.last_plan = compiled.plan
        return compiled.run_flat(leaves, None)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one step whose arguments have to be read first."""
        call = Call.of(self.fun, args, kwargs, self._static)
        configuration = _jax.configuration()
        leaves, structure = jax.tree.flatten(call.tree)
        seen = (structure, call.static, [form_of(x) for x in leaves], configuration)
        if self._last is not None and self._last[0] == seen:
            compiled = self._last[1]
        else:
            refuse_shapes(self.__name__, leaves)
            key = key_of_call(self.fun, structure, call.static, leaves, configuration)
            compiled = self._compiled_for(key, args, kwargs)
            self._last = seen, compiled
        self.last_plan = compiled.plan
        return compiled.finish(compiled.run_flat(leaves, None), call)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the step bound to an object, when a method is decorated.

        If the object is a pytree (a module), or `static_argnums` names it, it is the first argument of the step;
        otherwise it is a constant, as for `jax.jit(instance.method)`.
        """
        if instance is None:
            return self
        if 0 in self._static.numbers or not jax.tree_util.all_leaves([instance]):
            return BoundParallelFunction(self, instance)
        if id(instance) not in self._methods:
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

    def _compiled_for(self, key: CallKey, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CompiledFunction:
        """Return the compiled function of a key, compiling it if it is new."""
        if key not in self._compiled:
            if self._last_key is not None:
                told = difference(self.fun, self._last_key, key)
                _logger.info(
                    "%s is traced and compiled again, since the call differs from the last: %s", self.__name__, told
                )
            made = self._planned(key, self._trace(args, kwargs)).lower().compile()
            if self.options.check:
                self.last_check = check_compiled(made, args, kwargs)
            self._compiled[key] = made
        self._last_key = key
        return self._compiled[key]

    def _planned(self, key: CallKey, traced: TracedFunction) -> PlannedFunction:
        """Plan for a new key, with the plan of an earlier call of the same shapes and dtypes if it fits.

        Weak types, for example, change the key but not the plan.
        """
        for other, compiled in self._compiled.items():
            if key.has_same_arrays(other):
                with suppress(AlpaLiteError):  # whatever does not fit is planned anew, and told then
                    return traced.plan(planner=compiled.plan)
        return traced.plan()


class BoundParallelFunction(Generic[R]):
    """A decorated method of an object that is an argument of the step; its attributes are those of the function."""

    def __init__(self, function: ParallelFunction[..., R], instance: Any) -> None:
        """Bind the first argument."""
        self._function, self._instance = function, instance
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Run one step."""
        return self._function(self._instance, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> TracedFunction:
        """See `ParallelFunction.trace`."""
        return self._function.trace(self._instance, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredFunction:
        """See `ParallelFunction.lower`."""
        return self._function.lower(self._instance, *args, **kwargs)

    def compiled(self, *args: Any, **kwargs: Any) -> CompiledFunction:
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


@overload
def parallelize(fun: Callable[P, R], **options: Unpack[ParallelizeOptions]) -> ParallelFunction[P, R]: ...


@overload
def parallelize(
    fun: None = None, **options: Unpack[ParallelizeOptions]
) -> Callable[[Callable[P, R]], ParallelFunction[P, R]]: ...


def parallelize(
    fun: Callable[..., Any] | None = None,
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
            are also told the phases and how much work is left.
        cache: whether plans are cached and reused when everything they depend on is the same; or the cache's folder.
        watchdog_seconds: a step in which no task ends for this many seconds is taken to hang; None waits for ever.
            Processes of the job that plan or compile in the meantime are waited for.
        on_hang: the reaction to a hang: "end" writes the stacks of all processes and their last instructions, and ends
            the job with exit code 124; "raise" raises `HangError`, which names the instruction that hangs, at the next
            call; "auto" ends jobs of several processes that joined by `initialize`, and raises otherwise.
        on_interrupt: the effect of Ctrl-C on the search of `planners.Auto`: "raise" stops it and raises
            `KeyboardInterrupt`; "best" goes on with the best plan so far.
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
    )
    return functools.partial(ParallelFunction, options=options) if fun is None else ParallelFunction(fun, options)


def plan(
    fun: Callable[..., Any],
    *args: Any,
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
    **kwargs: Any,
) -> Plan:
    """Plan `fun(*args, **kwargs)`; arguments may be `jax.ShapeDtypeStruct`s. The options are those of `parallelize`.

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
        batch_argnums=batch_argnums,
        on_non_additive=on_non_additive,
        on_interrupt=on_interrupt,
        progress=progress,
        cache=cache,
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
