"""Automatic search: Alpa's two levels for every number of micro-batches that makes sense, and the classic manual plans.

    search       micro-batches, stages, submeshes, logical meshes and shardings together     `joint_search.JointSearch`
    manual       the classic plans, tuned to the best so far, priced alike                   `manual.ManualPlans`
    best         the simplest of the fastest by their predictions; it carries a lower bound  `_simplest`
    fewer        the same on parts of the cluster, where these may be as fast                `fewer_devices`

The result is never priced worse than any of these manual plans by more than `AS_FAST`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from numbers import Integral, Real
from typing import Literal

from alpa_lite.errors import AlpaLiteError, ExecutionError, InfeasibleError, PlanError, without_frames
from alpa_lite.inter_op.assembly import relative_gap, schedule_for, with_microbatches
from alpa_lite.inter_op.joint_search import SEARCH_GAP, SEARCH_SECONDS, JointSearch, Unplanned
from alpa_lite.inter_op.microbatch_counts import numbers_to_search
from alpa_lite.inter_op.plan_request import Pin, Pins, PlanRequest, pinned_axes
from alpa_lite.inter_op.sharding_demands import user_mesh
from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_cost_cache import Layering, StageCostCache
from alpa_lite.inter_op.stage_costs import SolveEffort
from alpa_lite.inter_op.what_would_fit import cheapest_fit, more_hosts, more_microbatches
from alpa_lite.inter_op.workers import Workers, num_workers
from alpa_lite.intra_op.solvers.integer_program import IntegerProgram, available_backends
from alpa_lite.plan.plan import INTERRUPTED, Plan, SolverReport
from alpa_lite.plan.progress import TimeIsUp
from alpa_lite.planners.fewer_devices import AS_FAST, on_fewer_devices
from alpa_lite.planners.hybrid import Hybrid, check_host_memory
from alpa_lite.planners.manual import (
    MANUAL_PLANNERS,
    ON_HOST,
    ManualPlans,
    NoPlan,
    least_seconds_on_host,
    plans_on_host,
    plans_that_fit,
    sparing_planners,
)
from alpa_lite.planners.on_mesh import OnMesh
from alpa_lite.planners.planner import Planner, check_synchronous, renamed_options
from alpa_lite.program.collector import rare_collection
from alpa_lite.schedule import EagerOneFOneB, GPipe, OneFOneB, Schedule, ZeroBubbleH1
from alpa_lite.step.recomputation import RECOMPUTING, Remat
from alpa_lite.text import show_bytes, show_count, show_percent
from cost_models.cluster import Cluster, with_memory_limit

SCHEDULES: tuple[Schedule, ...] = (OneFOneB(), EagerOneFOneB(), ZeroBubbleH1(), GPipe())
"""Schedules of pipelines to try; the first of them needs the least memory."""

PROVEN_GAP = 0.005
"""A plan this close to its lower bound is called optimal: prices are not better than that."""


@renamed_options(num_stages="pipeline")
@dataclass(frozen=True, kw_only=True)
class Auto(Planner):
    """The automatic search, and restrictions of it.

    Attributes:
        num_layers: number of layers, of which stages consist; None: by the model.
        layers: the quantity that layers share equally: "flops", "operators", or the "loops" as they are written.
        pipeline: number of stages; None: the best number.
        equal: the quantities that stages have equally many of: "layers", "devices", both or neither.
        intra_op_only: one stage on all devices.
        inter_op_only: every stage on one device.
        pins: given shardings of arguments: the path of each, or the end of it if that is unique, with an axis, several
            axes or None per dim. The search names its axes: "x" on meshes with one axis; "replica", "data" and
            "model" on meshes with several.
        max_memory_bytes: bytes of each device that a plan may use, if less than what is usable without.
        remat: policy of recomputation in the backward pass: "none" beyond that of the step itself, "selective", "full"
            (see `Remat`), or "auto", the best one for each stage.
        schedule: schedule of pipelines; None: the best of `SCHEDULES` and interleaved ones.
        measure_top: number of the best plans to run for a few steps on the devices of this process, to take the fastest
            of them; plans that fail there are left out. 0: take the plan that is predicted to be the fastest.
        solver: the solver of the shardings of stages: "search" (the project's own), or "pulp", which hands the integer
            program of Alpa's paper to HiGHS through PuLP, for small models; "pulp:NAME" takes another of PuLP's solvers
            (`pulp.listSolvers(onlyAvailable=True)`).
        idle_devices: whether devices may be left idle, where a step on fewer of them takes no longer; not where stages,
            pins, remat or the schedule are restricted, or plans are measured.
        gap: distance of the plan from its lower bound, relative to the plan, that is good enough: the search ends at
            the first plan that close. Before, no number of micro-batches is left out for what it is guessed to take,
            but only where the work of a step with so many is above that. None: the search ends after few numbers.
        time_limit_seconds: the time after which the search ends, once the stage at hand is solved, with the best plan
            so far; a step for which nothing was found by then gets a manual plan. None: no limit.
        host_memory: whether arrays may wait in the memory of hosts: plans whose layers keep, recompute or swap
            what their backward pass reads, with the state of the optimizer there (`manual.plans_on_host`), are priced
            too, and taken if they are faster than all others by more than half a percent. None: with few numbers of
            micro-batches, and only where the cluster states this memory and such a plan may be faster, since others
            lack memory on the devices (`manual.least_seconds_on_host`). Not where stages, pins or the schedule are
            restricted, which these plans would not obey.
        manual: manual plans that are priced too, unless stages, pins, remat or the schedule are restricted, which these
            plans would not obey. If one stage is requested, only plans with one stage are.
    """

    obeys_user_shardings = True

    num_layers: int | None = None
    layers: Literal["flops", "operators", "loops"] = "flops"
    pipeline: int | None = None
    equal: tuple[Literal["layers", "devices"], ...] = ()
    intra_op_only: bool = False
    inter_op_only: bool = False
    max_memory_bytes: float | None = None
    pins: Pins = field(default_factory=dict[str, Pin], hash=False)
    remat: Literal["auto", "none", "selective", "full"] = "auto"
    schedule: Schedule | None = None
    measure_top: int = 0
    solver: str = "search"
    idle_devices: bool = True
    gap: float | None = None
    time_limit_seconds: float | None = None
    host_memory: bool | None = None
    manual: tuple[Planner, ...] = field(default=MANUAL_PLANNERS)

    @property
    def name(self) -> str:
        """Name for tables."""
        restricted = {"intra-op only": self.intra_op_only, "inter-op only": self.inter_op_only}
        words = [word for word, holds in restricted.items() if holds]
        return f"auto, {' and '.join(words)}" if words else "auto"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the fastest plan. Raises `InfeasibleError` if none fits into memory, and says which came closest.

        Ctrl-C stops the search and its workers: with `on_interrupt="best"` the best plan so far is returned, if there
        is one; otherwise `KeyboardInterrupt` is raised.
        """
        started = time.perf_counter()
        self._check()
        if self.host_memory:
            check_host_memory(self.name, request.cluster)
        if (mesh := user_mesh(request.step_at(1, 0), request.signature.user_shardings)) is not None:
            return self._as_sharded_by_the_user(request, mesh)
        with request.progress.within(self.time_limit_seconds):
            if not self._may_leave_idle(request.cluster):
                return self._planned(request)
            whole: Plan | InfeasibleError
            try:
                whole = self._planned(request)
            except InfeasibleError as error:
                whole = without_frames(error)
            if isinstance(whole, Plan) and whole.solver.status == INTERRUPTED:
                return whole
            late = False
            try:
                found = on_fewer_devices(whole, request, replace(self, manual=(), host_memory=False)._planned_on)
            except TimeIsUp:
                if not isinstance(whole, Plan):
                    raise whole from None
                found, late = whole, True
        taken = time.perf_counter() - started
        return replace(found, solver=_certificate(found, found.solver.bound, taken, interrupted=late))

    def _may_leave_idle(self, cluster: Cluster) -> bool:
        """Return True if a plan may leave devices idle: not where the options fix what runs on all of them."""
        fixed = self._restricted or self.intra_op_only or self.pipeline or self.measure_top
        # On one processor virtual devices stand for others: they would all be left idle but one.
        return self.idle_devices and not (fixed or cluster.shared_processor)

    def _planned_on(self, request: PlanRequest, at_most: float) -> Plan | None:
        """Return the best plan on all devices; None if there is none that takes at most so many seconds."""
        try:
            return self._planned(replace(request, advise=False), at_most)
        except AlpaLiteError:
            return None
        except KeyboardInterrupt as stop:
            if request.on_interrupt != "best" or isinstance(stop, TimeIsUp):
                raise
            return None

    def _planned(self, request: PlanRequest, at_most: float = math.inf) -> Plan:
        """Return the best plan on all devices, of those that take at most so many seconds.

        Raises `InfeasibleError` if none fits into memory.
        """
        started = time.perf_counter()
        # The number is read here, so that a wrong environment variable is reported before any work.
        workers = Workers(num_workers())
        limited = replace(request, cluster=self._limited(request.cluster), workers=workers)
        manual = ManualPlans(() if self._restricted else self.manual, limited)
        plans, refused, missing = list[Plan](), list[Unplanned](), list[NoPlan]()
        interrupted = False
        try:
            request.progress.begin("survey", "stages", "refine")
            with rare_collection(), workers, request.progress.interrupts():
                for plan in self._search(limited, at_most).plans():
                    if isinstance(plan, Unplanned):
                        refused.append(plan)
                        continue
                    plans.append(plan)
                    if self._is_close(plan, request):
                        break
                    # Workers prepare manual plans with as many micro-batches as the best plan so far has.
                    manual.expect(min(plans, key=_step_seconds))
                found = min(plans, key=_step_seconds, default=None)
                too_large = [refusal.num_microbatches for refusal in refused if refusal.is_too_large]
                # Those on the host are asked for when all others are known.
                on_host = self._on_host(limited, plans)
                for plan in chain(manual.plans(found, too_large=too_large), on_host):
                    if isinstance(plan, NoPlan):
                        missing.append(plan)
                    elif self._allows(plan):
                        plans.append(plan)
                    else:
                        why = PlanError("It has several stages, and one was asked for.")
                        missing.append(NoPlan(plan.name, why))
            if not plans:
                raise self._advised(limited, _most_telling(refused, missing))
        except KeyboardInterrupt as stop:
            # A part of the cluster is planned for a plan that is better than the one on all devices.
            if at_most < math.inf:
                raise
            interrupted = True
            plans += self._made_up_for(stop, limited, manual, found_some=bool(plans))
        plans.sort(key=lambda plan: plan.name != self.name)  # of equally fast plans the one of the search is taken
        best = self._best(limited, plans)
        return replace(
            best,
            name=self.name if best.name == self.name else f"{self.name} ({best.name})",
            cluster=request.cluster,
            alternatives=(*_others(best, plans), *((name, math.inf) for name, _ in missing)),
            refusals=tuple((name, str(error)) for name, error in missing),
            solver=_certificate(best, request.floor_seconds, time.perf_counter() - started, interrupted=interrupted),
        )

    def _on_host(self, request: PlanRequest, others: Collection[Plan]) -> Iterator[Plan | NoPlan]:
        """Yield the plans whose arrays wait on the host, if they are asked for or may be faster than all others."""
        if self.host_memory is False or request.cluster.host_memory is None or self._fixes_stages:
            return
        fastest = min(map(_step_seconds, others), default=math.inf)
        # A plan on the host is taken only if it is faster than counts as equal (`_simplest`).
        if self.host_memory or (1 + AS_FAST) * least_seconds_on_host(request) < fastest:
            if self.remat == "auto":
                at_most = math.inf if self.host_memory else fastest
                yield from plans_on_host(request, thorough=bool(self.host_memory), at_most=at_most)
            else:
                yield from plans_that_fit((replace(ON_HOST, remat=self.remat),), request)

    def _made_up_for(
        self, stop: KeyboardInterrupt, request: PlanRequest, manual: ManualPlans, *, found_some: bool
    ) -> list[Plan]:
        """Return the plans for a search that was stopped: a manual one if it had found none.

        Raises `stop` again if that is to end planning, and `PlanError` if the time was too short for any plan.
        """
        late = isinstance(stop, TimeIsUp)
        if request.on_interrupt != "best" and not late:
            raise stop
        request.progress(f"{'the time is up' if late else 'interrupted'}: the best plan so far is taken")
        if found_some:
            return []
        # It takes little time, so that there is a plan to return however early the search is stopped.
        last = () if self._restricted or self.remat == "none" else sparing_planners(request.cluster)
        offered = chain(manual.plans(None), plans_that_fit(last, request))
        made = [*islice((plan for plan in offered if isinstance(plan, Plan) and self._allows(plan)), 1)]
        if late and not made:
            raise PlanError(
                f"No plan was found within time_limit_seconds={self.time_limit_seconds:g}, and no manual plan fits. "
                "Allow more time."
            ) from None
        if not made:
            raise stop
        return made

    def _as_sharded_by_the_user(self, request: PlanRequest, mesh: Mapping[str, int]) -> Plan:
        """Return the best plan on the user's mesh that has all shardings of the user."""
        if self.host_memory or replace(self, pipeline=None)._restricted:
            raise PlanError(
                f'user_shardings="pin" gives stages on the mesh {dict(mesh)}; pins, a schedule, recomputation, memory '
                "of hosts and stages of one device or of equal layers cannot be asked for beside it. Leave them out."
            )
        num_stages = self.pipeline or 1
        on_mesh = Hybrid(pipeline=num_stages) if num_stages > 1 else OnMesh(axes=mesh)
        plan = on_mesh.plan(replace(request, cluster=self._limited(request.cluster)))
        return replace(plan, name=f"{self.name} (shardings of the user)", cluster=request.cluster)

    def _check(self) -> None:
        check_synchronous(self.name, self, *self.manual)
        if self.schedule is not None and self.schedule.stages_per_processor > 1:
            raise PlanError(
                f"The search gives each stage devices of its own, but {self.schedule} runs"
                f" {self.schedule.stages_per_processor} stages on each. Use it in al.planners.Hybrid."
            )
        for name in ("num_layers", "pipeline"):
            number = getattr(self, name)
            if number is not None and not (isinstance(number, Integral) and int(number) >= 1):
                raise PlanError(f"{name}={number!r} was given; it must be an integer of at least 1, or None.")
        if self.host_memory and self._fixes_stages:
            raise PlanError(
                "host_memory=True cannot be asked for beside pins, a schedule, several stages and stages of one device "
                "or of equal layers, which plans on the host might not obey. Leave them out, or use al.planners.Hybrid."
            )
        self._integer_program()
        for name, most in (("gap", 1.0), ("time_limit_seconds", math.inf)):
            number = getattr(self, name)
            # Written so that NaN is refused too.
            if number is not None and not (isinstance(number, (int, float)) and 0 < number < most):
                below = " and below 1" if most == 1.0 else ""
                raise PlanError(f"{name}={number!r} was given; it must be a number above 0{below}, or None.")
        if self.measure_top < 0:
            raise PlanError(f"measure_top={self.measure_top} was given; it is a number of plans, or 0.")
        if self.intra_op_only and (self.inter_op_only or (self.pipeline or 1) > 1):
            raise PlanError(
                "intra_op_only=True means one stage, but several were asked for (inter_op_only or pipeline). Ask for "
                "one of them."
            )

    def _integer_program(self) -> IntegerProgram | None:
        """Return the solver that the user chose; None for the project's own. Raises `PlanError` for an unknown one."""
        kind, _, backend = self.solver.partition(":")
        if self.solver == "search":
            return None
        if kind == "pulp" and (not backend or backend in available_backends()):
            return IntegerProgram(backend=backend) if backend else IntegerProgram()
        raise PlanError(
            f'solver={self.solver!r} was given; it must be "search", "pulp" or one of '
            f"{', '.join(f'pulp:{name}' for name in available_backends())}."
        )

    @property
    def _fixes_stages(self) -> bool:
        """Whether the options say of stages what manual plans might not obey."""
        stages = self.inter_op_only or (self.pipeline or 1) > 1 or self.equal
        return bool(stages or self.pins or self.schedule)

    @property
    def _restricted(self) -> bool:
        """Whether manual plans might not obey the options. They recompute nothing, so that they obey `remat="none"`."""
        return self._fixes_stages or self.remat not in ("auto", "none")

    def _is_close(self, plan: Plan, request: PlanRequest) -> bool:
        """Return True if a plan is as close to its lower bound as was asked for."""
        return self.gap is not None and relative_gap(_step_seconds(plan), request.floor_seconds) <= self.gap

    def _allows(self, plan: Plan) -> bool:
        """Return True unless one stage is requested and a manual plan has several."""
        return len(plan.stages) == 1 or not (self.intra_op_only or self.pipeline == 1)

    def _best(self, request: PlanRequest, plans: Sequence[Plan]) -> Plan:
        """Return the simplest of the plans that are predicted to be as fast as the fastest, or the fastest when run."""
        by_prediction = sorted(plans, key=_step_seconds)
        if not self.measure_top:
            return _simplest(by_prediction)
        distinct: dict[str, Plan] = {}  # the search gives the stages of one number both unrefined and refined
        for plan in by_prediction:
            distinct.setdefault(with_microbatches(plan), plan)
        return _fastest(request, list(distinct.values())[: self.measure_top])

    def _limited(self, cluster: Cluster) -> Cluster:
        """Return the cluster with as much memory as may be used."""
        limit = self.max_memory_bytes
        if limit is None:
            return cluster
        if not (isinstance(limit, Real) and limit > 0):
            raise PlanError(f"max_memory_bytes={limit!r} was given; it must be a number of bytes above 0, or None.")
        return with_memory_limit(cluster, limit)

    def _advised(self, request: PlanRequest, problem: AlpaLiteError) -> AlpaLiteError:
        """Return the error, with the cheapest change that would help if memory is the problem."""
        if not request.advise or not isinstance(problem, InfeasibleError):
            return problem
        # Manual plans would take their time again for every change that is tried.
        alone = replace(self, manual=(), host_memory=False)
        changes = [*more_microbatches(alone, request, tried=numbers_to_search(request)[-1])]
        return InfeasibleError(f"{problem} {cheapest_fit(changes, more_hosts(alone, request))}")

    def _with_pinned_axes(self, space: Space) -> Space:
        axes = pinned_axes(self.pins)
        found = space.with_axes(axes)
        if not found.kinds:
            known = {", ".join(mesh.axis_names): None for of_kind in space.meshes for mesh in of_kind}
            raise PlanError(
                f"Pins ask for one logical mesh with the axes {', '.join(sorted(axes))}, but those of "
                f"{space.cluster.name} have ({'), ('.join(known)}): pin to axes that one of them has."
            )
        return found

    def _search(self, request: PlanRequest, at_most: float = math.inf) -> JointSearch:
        space = Space.of(request.cluster)
        if self.intra_op_only or self.inter_op_only:
            # One stage takes all devices; stages without intra-op parallelism take one device each.
            space = space.only(request.cluster.num_devices if self.intra_op_only else 1)
        # If the number, devices or layers of stages are given, some stages may have little to do in every plan.
        given = self.inter_op_only or self.pipeline or self.layers != "flops" or "layers" in self.equal
        space = replace(self._with_pinned_axes(space), fair=not given)
        schedules = (self.schedule,) if self.schedule else SCHEDULES
        return JointSearch(
            request=request,
            schedules=tuple(dict.fromkeys(schedule_for(request.step_at(1, 0), schedule) for schedule in schedules)),
            space=space,
            name=self.name,
            steps=StageCostCache(
                request=request,
                layering=Layering(
                    num_layers=self.num_layers,
                    stages=[self.pipeline] if self.pipeline else space.equal_stages,
                    equal=self.layers,
                ),
                pins=self.pins,
                effort=SolveEffort(
                    relative_gap=SEARCH_GAP,
                    time_limit_seconds=SEARCH_SECONDS,
                    # What does not fit is left out; how far it is from fitting is asked for one stage at the end.
                    peaks="none",
                    solver=self._integer_program(),
                ),
            ),
            policies=RECOMPUTING if self.remat == "auto" else (Remat(self.remat),),
            num_stages=1 if self.intra_op_only else self.pipeline,
            equal=self.equal,
            at_most=at_most,
            gap=self.gap,
        )


def _simplest(plans: Sequence[Plan]) -> Plan:
    """Return the simplest of the plans that are as fast as the first of them, the fastest; a note says why."""
    fastest = plans[0]
    near = [plan for plan in plans if _step_seconds(plan) <= (1 + AS_FAST) * _step_seconds(fastest)]
    found = min(near, key=_complexity)
    if _complexity(found) == _complexity(fastest):
        return fastest
    (hosts, *mine), (hosts_of_fastest, *others) = _complexity(found), _complexity(fastest)
    counts = zip(("stage", "micro-batch"), mine, others, strict=False)
    simpler = ["nothing waits on the host"] if hosts < hosts_of_fastest else []
    simpler += [f"{show_count(mine, what)} instead of {other}" for what, mine, other in counts if mine < other]
    mine, other = (show_bytes(plan.prediction.peak_bytes[plan.fullest_stage]) for plan in (found, fastest))
    why = ", ".join(simpler) or f"{mine} instead of {other}"
    excess = show_percent(_step_seconds(found) / _step_seconds(fastest) - 1)
    note = f"{excess} above the fastest plan, {with_microbatches(fastest)}, but simpler: {why}"
    return replace(found, notes=(*found.notes, note))


def _complexity(plan: Plan) -> tuple[bool, int, int, int]:
    """Return whether anything waits on the host, the stages, the micro-batches, and the eighths of the memory that a
    plan needs.
    """
    peak = plan.prediction.peak_bytes[plan.fullest_stage] / plan.capacity_bytes(plan.fullest_stage)
    return bool(plan.prediction.host_bytes), len(plan.stages), plan.num_microbatches, math.ceil(8 * peak)


def _fastest(request: PlanRequest, plans: Sequence[Plan]) -> Plan:
    """Return the plan that takes the least time when it is run. Raises `ExecutionError` if none can be run."""
    if request.measure is None:
        raise PlanError("measure_top runs plans on devices, but there are none here. Leave it out to only plan.")
    measured, failures = list[tuple[float, Plan]](), list[str]()
    for plan in plans:
        name = with_microbatches(plan)
        try:
            seconds = request.measure(plan)
        except RuntimeError as error:  # XLA's errors too, such as for a lack of memory
            # Only the text is stored: the exception would keep the arrays of this run alive.
            failures.append(f"{name} failed when it was run: {_first_line(error).rstrip('.')}")
            request.progress(failures[-1])
        else:
            request.progress(f"{name}: measured {seconds * 1e3:.3g} ms per step")
            measured.append((seconds, plan))
    if not measured:
        raise ExecutionError(
            f"No plan can be run on the devices of this process ({len(plans)} tried). The first: {failures[0]}. Leave "
            "measure_top out to take the plan that is predicted to be the fastest."
        )
    # Plans do not compare, so equal times must not lead to comparing them.
    return min(measured, key=lambda each: each[0])[1]


def _step_seconds(plan: Plan) -> float:
    return plan.prediction.step_seconds


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _certificate(best: Plan, bound: float, seconds: float, *, interrupted: bool = False) -> SolverReport:
    """Return the report with the largest possible distance of the plan from the best one."""
    gap = relative_gap(best.prediction.step_seconds, bound)
    status = INTERRUPTED if interrupted else "optimal" if gap <= PROVEN_GAP else "feasible"
    return SolverReport(status=status, bound=bound, gap=gap, seconds=seconds)


def _others(best: Plan, plans: Sequence[Plan]) -> tuple[tuple[str, float], ...]:
    """Return the names and seconds of the other plans, of each name the fastest."""
    found: dict[str, float] = {}
    for plan in plans:
        name, seconds = with_microbatches(plan), plan.prediction.step_seconds
        found[name] = min(seconds, found.get(name, seconds))
    # The chosen plan is not one of its own alternatives.
    found.pop(with_microbatches(best))
    return tuple(sorted(found.items(), key=lambda other: other[1]))


def _most_telling(refused: Sequence[Unplanned], missing: Sequence[NoPlan]) -> AlpaLiteError:
    """Return the error of a search without a plan that tells the user most."""
    errors = [*(refusal.error for refusal in refused), *(plan.error for plan in missing)]
    # The user can act on a lack of memory, which the search explains last; other errors often concern one manual plan.
    of_memory = [refusal.error for refusal in reversed(refused) if refusal.is_too_large]
    of_memory += [error for error in errors if isinstance(error, InfeasibleError)]
    return (of_memory or errors or [PlanError("No plan was found and no reason was given.")])[0]
