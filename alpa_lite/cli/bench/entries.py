"""The plans of all contenders: priced, simulated, and run in turn.

A contender without a plan has a row with the reason. Plans run one step each, round after round, so that disturbances
of the machine affect all of them alike.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from alpa_lite.api.stages import LoweredFunction, PlannedFunction, TracedFunction
from alpa_lite.cli.bench.request import BenchTarget, Contender
from alpa_lite.cli.bench.row import DeviceTime, PlanPrice, Row
from alpa_lite.cli.models.model_parts import Tree
from alpa_lite.errors import AlpaLiteError, InfeasibleError, NonAdditiveError, without_frames
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.plan.progress import Progress
from alpa_lite.plan.simulation import SimulatedStep
from alpa_lite.planners.planner import Planner
from alpa_lite.runtime.execute.function import CompiledFunction
from alpa_lite.text import show_about, show_count, show_seconds
from alpa_lite.trace.call import Call, NamedArguments
from cost_models.cluster import Cluster

Say = Callable[[str], None]

Count = int | str
"""A number of micro-batches; "auto" means that a search chooses, and that a manual plan gets its best number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedEntry:
    """A row and its lowered plan; None if there is no plan."""

    row: Row
    lowered: LoweredFunction | None = None

    @property
    def plan(self) -> al.Plan | None:
        """The plan; None if there is none."""
        return None if self.lowered is None else self.lowered.planned.last_plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Contest:
    """The same task for all contenders: a step, traced once, on one cluster."""

    target: BenchTarget
    traced: TracedFunction
    cluster: Cluster

    def plan(self, planner: Planner, count: Count) -> al.Plan:
        """Return the plan of a planner at a number of micro-batches. Raises `AlpaLiteError`."""
        return planner.plan(self.traced.request(self.cluster, count))


def contest_of(target: BenchTarget, cluster: Cluster) -> Contest:
    """Trace the step of a target; its state arguments are donated."""
    function = al.parallelize(target.step, cache=False, progress=Progress()).trace(*target.arguments, **target.keywords)
    # A training loop never reads the state it passed in. Donated, it does not count twice at the peak of memory.
    traced, replaced = function.traced, set(function.traced.aliases.values())
    donated = tuple(leaf in replaced for leaf in range(len(traced.inputs.leaves)))
    traced = replace(traced, inputs=replace(traced.inputs, donated=donated))
    return Contest(target=target, traced=replace(function, traced=traced), cluster=cluster)


def planned_entries(
    contest: Contest, contenders: Sequence[Contender], counts: Sequence[Count], say: Say
) -> Iterator[PlannedEntry]:
    """Yield one entry per contender and number of micro-batches."""
    for contender in contenders:
        for count in counts:
            at = "" if isinstance(count, str) else f", {show_count(count, 'micro-batch')}"
            name = contender.name + at
            say(f"{contest.target.name}: {name}")
            row = Row(
                model=contest.target.name,
                cluster=contest.cluster.name,
                num_devices=contest.cluster.num_devices,
                planner=name,
                searched=contender.searches,
                auto=contender.is_auto,
                batch_size=contest.traced.traced.batch.size,
                reason=contender.problem,
            )
            planner = contender.planner
            yield PlannedEntry(row=row) if planner is None else _planned(row, contest, planner, count)


def _planned(row: Row, contest: Contest, planner: Planner, count: Count) -> PlannedEntry:
    began = time.perf_counter()
    try:
        plan = _plan_of(row, contest, planner, count)
        row = replace(row, planning_seconds=time.perf_counter() - began, price=priced(plan, contest.target))
        lowered = PlannedFunction(function=contest.traced, last_plan=plan).lower()
    except AlpaLiteError as error:
        return PlannedEntry(row=replace(row, reason=str(error), planning_seconds=time.perf_counter() - began))
    return PlannedEntry(row=replace(row, simulation=device_time(plan, lowered.simulate())), lowered=lowered)


def _plan_of(row: Row, contest: Contest, planner: Planner, count: Count) -> al.Plan:
    if row.searched:
        # Through the public interface, in which a search may also run plans (`Auto(measure_top=k)`).
        planned = contest.traced.plan(cluster=contest.cluster, planner=planner, num_microbatches=count, cache=False)
        return planned.last_plan
    return best_of_counts(contest, planner) if count == "auto" else contest.plan(planner, count)


def best_of_counts(contest: Contest, planner: Planner) -> al.Plan:
    """Return a manual plan at its best number of micro-batches, which its author would choose.

    Numbers grow from the planner's own one while the plan does not fit or improves, and shrink while it improves.
    Raises the `AlpaLiteError` of the planner's own number if none works.
    """
    best, problem = None, None
    try:
        best = contest.plan(planner, "auto")
    except InfeasibleError as error:
        problem = error
    start = 1 if best is None else best.num_microbatches
    counts = divisors(contest.traced.traced.batch.size or 1)
    # Time over the number of micro-batches falls and then rises (bubbles against efficiency), so that each direction
    # ends at the first number that is no better.
    for some in ([c for c in counts if c > start], [c for c in reversed(counts) if c < start]):
        for count in some:
            other = _plan_or_problem(contest, planner, count)
            # Once there is a plan, further numbers in the same direction need more memory.
            if isinstance(other, NonAdditiveError if best is None else (NonAdditiveError, InfeasibleError)):
                break
            # Degrees that do not divide these micro-batches may divide others.
            if isinstance(other, AlpaLiteError):
                continue
            if best is not None and other.prediction.step_seconds >= best.prediction.step_seconds:
                break
            best = other
    if best is None:
        raise problem or InfeasibleError(f"{planner.name} has no plan.")
    return best


def _plan_or_problem(contest: Contest, planner: Planner, count: int) -> al.Plan | AlpaLiteError:
    """Return the plan with so many micro-batches, or the error that says why there is none."""
    try:
        return contest.plan(planner, count)
    except AlpaLiteError as error:
        return without_frames(error)


def priced(plan: al.Plan, target: BenchTarget) -> PlanPrice:
    """Return the figures of a plan by the cost model."""
    seconds, tflops = plan.prediction.step_seconds, target.tflops_per_device
    return PlanPrice(
        meshes=described(plan),
        num_microbatches=plan.num_microbatches,
        num_stages=len(plan.stages),
        solver_status=plan.solver.status,
        solver_gap=plan.solver.gap,
        step_seconds=seconds,
        likely_seconds=plan.likely_seconds,
        peak_bytes=max(plan.prediction.peak_bytes),
        tflops_per_device=None if tflops is None else tflops(seconds),
    )


def device_time(plan: al.Plan, step: SimulatedStep) -> DeviceTime:
    """Return the use of devices in a simulated step, averaged over them."""
    # Submeshes may differ in size, and each counts as often as it has devices.
    devices = [plan.stages[use.stages[0]].submesh.num_devices for use in step.submeshes]
    uses = list(zip(step.submeshes, devices, strict=True))
    return DeviceTime(
        step_seconds=step.step_seconds,
        communication_seconds=sum(use.exposed_seconds * n for use, n in uses) / sum(devices),
        idle_seconds=sum(use.bubble_seconds * n for use, n in uses) / sum(devices),
    )


def same_plan(one: al.Plan, other: al.Plan) -> bool:
    """Return True if two plans run the same program; names, prices and solver data may differ."""
    apart = {"name": "", "alternatives": (), "solver": one.solver, "prediction": one.prediction}
    return replace(one, **apart) == replace(other, **apart)


def described(plan: al.Plan) -> str:
    """Describe the stages of a plan by logical mesh, such as "2 stages (2,1), 1 stage (4,1)"."""
    meshes = ["(" + ",".join(map(str, stage.mesh_shape.shape)) + ")" for stage in plan.stages]
    runs = [(mesh, len(list(members))) for mesh, members in groupby(meshes)]
    return ", ".join(f"{show_count(count, 'stage')} {mesh}" for mesh, count in runs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Running:
    """A compiled step with its arguments; each call runs one step on the state of the previous call."""

    compiled: CompiledFunction
    leaves: list[Tree]
    compile_seconds: float

    @staticmethod
    def of(lowered: LoweredFunction, leaves: Sequence[Tree]) -> Running:
        """Compile a step and put the arguments on their devices."""
        began = time.perf_counter()
        compiled = lowered.compile()
        placed = jax.block_until_ready(compiled.executor.place_inputs(list(leaves)))
        return Running(compiled=compiled, leaves=placed, compile_seconds=time.perf_counter() - began)

    @property
    def allocated_peak_bytes(self) -> float:
        """The bytes that XLA allocates on the fullest device."""
        return max(each.peak_bytes for each in self.compiled.allocated())

    def __call__(self) -> None:
        """Run one step and wait until all of it is done."""
        outputs = jax.tree.leaves(jax.block_until_ready(self.compiled.run_flat(self.leaves, None)))
        # The step has consumed the donated arguments: its outputs take their places.
        for out, into in self.compiled.traced.aliases.items():
            self.leaves[into] = outputs[out]


def in_turn(
    steps: Mapping[str, Callable[[], None]],
    rounds: int,
    progress: Progress,
    *,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return the seconds of each step in each round that counts; every other round runs in reverse order.

    Rounds are units of the current phase of `progress`.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    for number in range(warm_up + rounds):
        progress.expect(progress.phase, warm_up + rounds - number)
        progress(f"round {number + 1} of {warm_up + rounds}")
        # In reverse every other round: a drift of the machine during a round then favours no plan.
        for name in list(steps)[:: -1 if number % 2 else 1]:
            began = clock()
            steps[name]()
            seconds[name].append(clock() - began)
        progress.did()
    return {name: samples[warm_up:] for name, samples in seconds.items()}


LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_SECONDS = 3, 9, 20.0
"""The rounds that are measured where no number is given: as many as take about these seconds, within limits."""


def rounds_within(seconds: float) -> int:
    """Return the number of rounds for steps that take so many seconds one after the other."""
    return max(LEAST_ROUNDS, min(MOST_ROUNDS, int(ROUNDS_SECONDS / max(seconds, 1e-9))))


def measured_rows(
    target: BenchTarget,
    entries: Sequence[PlannedEntry],
    rounds: int | None,
    progress: Progress,
    tell: Say = lambda text: None,
) -> list[Row]:
    """Return the rows with measurements. A plan that fails on the devices becomes a row with the reason.

    Without a number of rounds, `rounds_within` chooses it. `tell` is called with a line of text for each plan that was
    compiled, for the rounds to come, and for each plan that was measured.
    """
    rows = [entry.row for entry in entries]
    # Equal plans run the same program: timing it twice would only show the noise of the machine.
    same = _equal_plans(entries)
    progress.begin("compile", "run")
    progress.expect("run", (rounds or MOST_ROUNDS) + 1)
    running, once = dict[int, Running](), 0.0
    for number, started in _started(target, entries, same, progress):
        name = f"{target.name}, {rows[number].planner}"
        if isinstance(started, str):
            rows[number] = replace(rows[number], reason=started)
            tell(f"{name}: {started}")
            continue
        running[number], seconds = started
        once += seconds
        tell(
            f"{name}: compiled in {show_seconds(running[number].compile_seconds)}, a step took {show_seconds(seconds)}"
        )
    rounds, count = rounds or rounds_within(once), show_count(len(running), "plan")
    if running:
        tell(f"{target.name}: {show_count(rounds, 'round')} of {count}, about {show_about((rounds + 1) * once)}")
    with progress.during("run"):
        times = in_turn({str(number): step for number, step in running.items()}, rounds, progress)
    for number, row in enumerate(rows):
        first = same.get(number, number)
        if first in running:
            rows[number] = row.measured(
                times[str(first)],
                same_as="" if first == number else rows[first].planner,
                compile_seconds=running[first].compile_seconds if first == number else None,
                allocated_peak_bytes=running[first].allocated_peak_bytes,
            )
            tell(f"{target.name}, {row.planner}: {show_seconds(rows[number].step_seconds or 0.0)} per step measured")
        elif number in same:
            rows[number] = replace(row, reason=rows[first].reason)
    return rows


def _equal_plans(entries: Sequence[PlannedEntry]) -> dict[int, int]:
    """Return for each entry with an equal plan before it the number of the first of these."""
    plans = [(number, entry.plan) for number, entry in enumerate(entries) if entry.plan is not None]
    first = [(number, next(other for other, plan in plans if same_plan(plan, own))) for number, own in plans]
    return {number: other for number, other in first if other != number}


def _started(
    target: BenchTarget, entries: Sequence[PlannedEntry], same: Mapping[int, int], progress: Progress
) -> Iterator[tuple[int, tuple[Running, float] | str]]:
    """Yield for each different plan its compiled step with the seconds of one step, or the reason why it failed."""
    # Copies on the host: what is on a device already may be given away only once.
    call = Call.of(target.step, target.values(), target.keywords, NamedArguments())
    leaves = [_on_host(leaf) for leaf in jax.tree.leaves(call.tree)]
    apart = [number for number, entry in enumerate(entries) if entry.lowered is not None and number not in same]
    for done, number in enumerate(apart):
        lowered = entries[number].lowered
        assert lowered is not None, "as chosen"
        # Outside of the phase nothing is drawn where a line is told.
        with progress.during("compile", f"{target.name}: compiling {entries[number].row.planner}"):
            progress.expect("compile", len(apart) - done)
            found = _warm(lowered, leaves)
            progress.did()
        yield number, found


def _warm(lowered: LoweredFunction, leaves: Sequence[Tree]) -> tuple[Running, float] | str:
    """Return a compiled step with the seconds of its second run, or the reason why it failed."""
    try:
        step = Running.of(lowered, leaves)
        # What fails, mostly fails in the first step; in a round it would end the comparison of all plans. It also
        # compiles the rest, and the second step settles the memory allocator.
        step()
        began = time.perf_counter()
        step()
    # XLA raises it too, for example when memory runs out.
    except RuntimeError as error:
        return f"It failed when it was run: {_first_line(error)}"
    return step, time.perf_counter() - began


def _on_host(leaf: Tree) -> Tree:
    # NumPy has no arrays of typed keys.
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return leaf if is_key else np.array(leaf)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
