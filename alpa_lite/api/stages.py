"""The stages of a step on its way to the devices.

    parallelize(fn).trace(*args)  ->  TracedFunction      shapes, pytrees, batch
                   .plan(...)     ->  PlannedFunction     a Plan for a cluster
                   .lower()       ->  LoweredFunction     a Program of instructions
                   .compile()     ->  CompiledFunction    executables on devices; call it like fn

Each value prints itself.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite._jax import Device
from alpa_lite.api.options import Options, check_microbatches, cluster_of, planner_of
from alpa_lite.api.plan_cache import Answer, Cache, check_same_program, planned_together
from alpa_lite.errors import BatchError, NonAdditiveError, PlanError
from alpa_lite.inspection.text.pass_files import PassFiles
from alpa_lite.inter_op.plan_request import StepSignature
from alpa_lite.lower.plan_fits import as_planned, check_fits
from alpa_lite.plan.instructions import Program
from alpa_lite.plan.plan import BatchDims, Plan, ShardingDemands
from alpa_lite.plan.program_builder import build_program
from alpa_lite.plan.simulation import SimulatedStep, simulate_program
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.planners import Planner, PlanRequest
from alpa_lite.program.passes import PassDriver
from alpa_lite.runtime.execute.compile import LoweredStep, joined_texts, lowered_tasks, summed_costs
from alpa_lite.runtime.execute.execute import Executor, HangOptions
from alpa_lite.runtime.execute.function import (
    CompiledFunction,
    with_own_constants,
)
from alpa_lite.runtime.execute.measure import short_of_memory, step_seconds
from alpa_lite.runtime.job.activity import busy
from alpa_lite.step.split import StepPrograms, TracedStep
from alpa_lite.text import View, one_line, show_count, show_seconds, view
from alpa_lite.trace.kernels.kernel_params import check_platform
from alpa_lite.trace.trace import Traced
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel
from cost_models.hardware import Backend

_logger = logging.getLogger("alpa_lite")


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedFunction:
    """A step traced for one set of argument shapes."""

    traced: Traced
    options: Options

    def step(self, num_microbatches: int = 1, *, loop_parts: int = 0, update_every: int = 0) -> TracedStep:
        """Return the step split into phases at `num_microbatches` micro-batches; see `StepPrograms.with_equations`.

        update_every: micro-batches that one update of the weights follows, in asynchronous pipelines.
        """
        return self.programs.updated_every(update_every).with_equations(num_microbatches, loop_parts)

    @cached_property
    def programs(self) -> StepPrograms:
        """The step at any number of micro-batches."""
        return self._programs(PassDriver())

    def _programs(self, driver: PassDriver) -> StepPrograms:
        return StepPrograms(
            traced=self.traced, on_non_additive=self.options.on_non_additive, driver=driver, around=self._splitting
        )

    @contextmanager
    def _splitting(self) -> Iterator[None]:
        """Report the phase. An error about micro-batches names the batch if it was assumed and may be the cause."""
        try:
            with self.options.progress.during("split"):
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
        """Plan for a cluster; options not given are those of `parallelize`, and a `Plan` as planner is replayed.

        Raises:
            PlanError: no plan can be made; `InfeasibleError` if no plan fits into device memory.
            TraceError: the number of micro-batches does not divide the batch.
        """
        with self.options.progress.during("plan"):
            return self._planned(cluster, planner, num_microbatches, cache)

    def _planned(
        self,
        cluster: Cluster | str | PathLike[str] | None,
        planner: Planner | type[Planner] | Plan | str | None,
        num_microbatches: int | str | None,
        cache: Cache | None,
    ) -> PlannedFunction:
        given = cluster if cluster is not None else self.options.cluster
        target = self._cluster_of(given)
        chosen = planner_of(planner) if planner is not None else self.options.planner
        wanted = self.options.num_microbatches if num_microbatches is None else num_microbatches
        demands = chosen.demands(self.request(target, wanted))
        # The ops of the plan are those of the step with its demands, which is lowered later as well.
        function = self if demands is None else replace(self, traced=self.traced.under(demands))
        made = function._planned_as_traced(given, target, chosen, wanted, cache)
        pinned = self.traced.user_shardings if self.traced.user_shardings.mode == "pin" else None
        obeyed = pinned if demands is None else demands
        recorded = None if obeyed is None else ShardingDemands.of(obeyed)
        return replace(made, last_plan=replace(made.last_plan, demands=recorded))

    def _planned_as_traced(
        self,
        given: Cluster | str | PathLike[str] | None,
        target: Cluster,
        chosen: Planner,
        wanted: int | str,
        cache: Cache | None,
    ) -> PlannedFunction:
        # A planner with a mesh of its own would drop the user's demands in silence.
        if self.traced.user_shardings.mode == "pin" and not chosen.obeys_user_shardings:
            raise PlanError(
                f'user_shardings="pin" gives stages on the mesh of the shardings, but {chosen.name} lays out its own '
                "mesh. Use al.planners.Auto(), Pipeline, OnMesh or Custom, or "
                'user_shardings="hint", with which the plan lists the shardings.'
            )
        if check_microbatches(wanted) not in ("auto", 1) and not chosen.is_asynchronous:
            self.step(int(wanted))  # says what is wrong with the user's number before any search
        if given is None:
            traced = self.step(1 if isinstance(wanted, str) or chosen.is_asynchronous else wanted)
            check_platform(traced.step.graph, traced.equations, _jax.lowering_platform(jax.devices()[0]))
        request = self.request(target, wanted, advise=True)
        devices = show_count(target.num_devices, "device")
        _logger.info("%s: planning by %s for %s (%s)", self.traced.name, chosen.name, target.name, devices)
        with _jax.no_mesh(), busy("planning"):
            answer = planned_together(chosen, request, self.options.cache if cache is None else cache)
        plan = answer.plan
        if plan.idle_devices:
            # Explanations price the devices that the plan uses.
            request = replace(request, cluster=plan.cluster)
        plan = replace(plan, request=request, batch=self.batch)
        if plan.batch is not None and plan.batch.assumed:
            _logger.info("%s: batch: %s", self.traced.name, plan.batch)
        self._log(plan, answer)
        return PlannedFunction(function=self, last_plan=plan, cached=answer.cached)

    def _cluster_of(self, given: Cluster | str | PathLike[str] | None) -> Cluster:
        # The devices of this process are measured, if they never were.
        with self.options.progress.during("measure"):
            return cluster_of(given)

    def _log(self, plan: Plan, answer: Answer) -> None:
        """Log a plan in one line, where it is kept, and what its user may want to change."""
        name = self.traced.name
        _logger.info("%s: %s", name, view(View.PLAN_LINE, plan))
        if answer.cached:
            origin = f", {answer.path}" if answer.path is not None else ""
            _logger.info("%s: this plan is from the cache%s", name, origin)
        elif answer.path is not None:
            _logger.info("%s: the plan is kept in %s", name, answer.path)
        for sentence in view(View.PLAN_WARNINGS, plan).splitlines():
            _logger.warning("%s: %s", name, sentence)

    @property
    def batch(self) -> BatchDims | None:
        """The arguments that hold the batch, and whether they were assumed; None if the step has no batch."""
        traced = self.traced
        if traced.batch.size is None:
            return None
        dims = {name: dim for name, dim in zip(traced.inputs.names, traced.batch.dims, strict=True) if dim is not None}
        return BatchDims(size=traced.batch.size, dims=dims, assumed=traced.batch.assumed)

    def is_smaller_batch_of(self, other: Traced) -> bool:
        """Return whether the arguments equal the ones of another trace, apart from a batch of fewer samples."""
        mine = self.traced
        if mine.batch.size is None or other.batch.size is None or mine.batch.size >= other.batch.size:
            return False
        if mine.inputs.tree != other.inputs.tree or mine.batch.dims != other.batch.dims:
            return False

        def form(leaf: jax.ShapeDtypeStruct, batch_dim: int | None) -> tuple[object, ...]:
            return (leaf.dtype, *(size for dim, size in enumerate(leaf.shape) if dim != batch_dim))

        return all(
            form(leaf, dim) == form(same, dim)
            for leaf, same, dim in zip(mine.inputs.leaves, other.inputs.leaves, mine.batch.dims, strict=True)
        )

    def request(
        self,
        cluster: Cluster,
        num_microbatches: int | str = "auto",
        *,
        backend: Backend | None = None,
        advise: bool = False,
    ) -> PlanRequest:
        """Return what a planner needs to know to plan this step for a cluster.

        backend: how the compiler executes a stage; default: as XLA does today.
        advise: whether a planner that finds nothing looks for what would fit.
        """
        traced = self.traced
        return PlanRequest(
            signature=StepSignature(
                function=traced.name,
                num_arguments=len(traced.inputs.leaves),
                batch_size=traced.batch.size,
                arguments=traced.inputs.positional,
                results=traced.outputs.names,
                user_shardings=traced.user_shardings,
            ),
            steps=self.programs,
            cluster=cluster,
            # A partial and not a lambda: the plan cache compares the cost model by content (`plan_cache._content`).
            cost_model_for=partial(ComposedCostModel, backend=backend) if backend else ComposedCostModel,
            num_microbatches=num_microbatches,
            on_non_additive=self.options.on_non_additive,
            on_interrupt=self.options.on_interrupt,
            progress=self.options.progress,
            advise=advise,
            measure=self._measured_seconds,
        )

    def _measured_seconds(self, plan: Plan) -> float:
        """Run the step by a plan on the devices of this process and return the seconds that it takes."""
        compiled = PlannedFunction(function=self, last_plan=plan).lower().compile()
        return step_seconds(compiled.executor, self.traced.inputs.leaves, compiled.step.inputs)

    def __str__(self) -> str:
        batch = f"batch: {self.batch}" if self.batch is not None else "no batch found"
        inputs, outputs = self.traced.inputs.leaves, self.traced.outputs.leaves
        return f"{self.traced.name}: {len(inputs)} arrays in, {len(outputs)} out, {batch}"

    def __repr__(self) -> str:
        return one_line(self, str(self))


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
        step = self.function.step(plan.num_microbatches, loop_parts=plan.loop_parts, update_every=plan.update_every)
        with _jax.no_mesh(), busy("lowering"), self.function.options.progress.during("lower"):
            plan.verify(step.step)
            step = as_planned(step, plan)
            check_fits(plan, step.step)
            return LoweredFunction(planned=self, step=step, program=build_program(plan, step.step))

    def dump_passes(self, folder: str | PathLike[str]) -> Path:
        """Write the program after each pass on the way from the traced step to the one that the plan numbers.

        The folder gets one file of text per pass, numbered, and an index with their seconds and numbers of ops. The
        passes run again for this, whatever was made before.

        Returns:
            The path of the index.
        """
        files, plan = PassFiles(Path(folder)), self.last_plan
        driver = PassDriver(record=files.write)
        programs = self.function._programs(driver).updated_every(plan.update_every)
        step = programs.with_equations(plan.num_microbatches, plan.loop_parts)
        as_planned(step, plan, driver)
        return files.write_index(f"{plan.function}: {plan.name}")

    def __str__(self) -> str:
        return str(self.last_plan)

    def __repr__(self) -> str:
        return one_line(self, f"by {self.last_plan!r}")

    def _repr_html_(self) -> str:
        return self.last_plan._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the plan where IPython shows no HTML."""
        self.last_plan._repr_pretty_(printer, cycle)


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

        Raises `PlanError` for kernels that JAX lowers only where their devices are, such as those of cuDNN.
        """
        # Held in a list, since programs are told apart by identity.
        tasks = self._tasks(platform)
        return joined_texts((task.name, lowered) for task, lowered in tasks)

    def cost_analysis(self, *, platform: str | None = None) -> dict[str, float]:
        """Return XLA's estimates for the lowered tasks ("flops", "bytes accessed"), summed over the runs of a step."""
        runs = Counter(i.task for i in self.program.instructions if i.kind == "RUN")
        return summed_costs(
            (lowered.cost_analysis(), runs[number]) for number, (_, lowered) in enumerate(self._tasks(platform))
        )

    def _tasks(self, platform: str | None) -> list[tuple[TaskSpec, jax.stages.Lowered]]:
        target = platform or _jax.lowering_platform(jax.devices()[0])
        with _jax.no_mesh(), busy("lowering"):
            try:
                return lowered_tasks(self._lowered, target)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise PlanError(
                    f"{self.planned.function.traced.name} cannot be lowered for {target} on this machine: "
                    f"{str(error).rstrip('.')}. Kernels such as those of cuDNN are lowered where their devices are: "
                    "lower the step there, or use an implementation for every platform (implementation='xla' in "
                    "jax.nn.dot_product_attention)."
                ) from error

    @property
    def _lowered(self) -> LoweredStep:
        plan, traced = self.planned.last_plan, self.step
        return LoweredStep(program=self.program, plan=plan, step=traced.step, equations=traced.equations)

    def compile(self, *, devices: Sequence[Device] | None = None) -> CompiledFunction:
        """Compile executables for the devices of this process (default: `jax.devices()`)."""
        traced = self.planned.function.traced
        options = self.planned.function.options
        # Processes with different programs would wait for each other's collectives for ever.
        check_same_program(self.planned.last_plan, self.program, traced.inputs.donated)
        started = time.perf_counter()
        with _jax.no_mesh(), busy("compiling"), options.progress.during("compile"):
            executor = Executor(
                self._lowered,
                donated=traced.inputs.donated,
                devices=devices,
                progress=self._compiling(),
                hangs=HangOptions(watchdog_seconds=options.watchdog_seconds, on_hang=options.on_hang),
            )
            step = with_own_constants(self.step, executor, len(traced.inputs.leaves))
        _logger.info("%s: compiled in %s", traced.name, show_seconds(time.perf_counter() - started))
        for sentence in short_of_memory(self.planned.last_plan, executor.meshes):
            _logger.warning("%s: %s", traced.name, sentence)
        return CompiledFunction(traced=traced, plan=self.planned.last_plan, step=step, executor=executor)

    def _compiling(self) -> Callable[[str, int, int], None]:
        """Return a function that reports and logs how many programs are compiled: name, number, all."""
        traced = self.planned.function
        report, name = traced.options.progress.counting("compile"), traced.traced.name
        logged = -1

        def tell(what: str, done: int, total: int) -> None:
            nonlocal logged
            report(what, done, total)
            # Called when a program begins and when it ends; one line for each that has ended.
            if done > logged:
                logged = done
                counted = f"compiled {done} of" if done else "compiling"
                _logger.info("%s: %s %s", name, counted, show_count(total, "program"))

        return tell

    def __str__(self) -> str:
        return str(self.program)

    def __repr__(self) -> str:
        return one_line(self, f"{self.planned.function.traced.name}: {self.program!r}")

    def _repr_html_(self) -> str:
        return self.program._repr_html_()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the program where IPython shows no HTML."""
        self.program._repr_pretty_(printer, cycle)
