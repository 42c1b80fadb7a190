"""Planners side by side on one step and cluster: is a configuration good, and what would be better?

A planner may be the settings of another trainer (`planners.trainer_configuration`), or a saved plan. All are priced by
the same cost model (`compare`); nothing runs. Two plans of which each is predicted within the likely range of the other
cannot be told apart (`PlanDiff.indistinguishable`), and the comparison says so. What plans decide is said in the words
of trainers where a plan has such a form (`export.degrees`), else by its meshes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from alpa_lite._jax import Tree
from alpa_lite.api.options import planner_of
from alpa_lite.api.parallelize import ParallelFunction, parallelize
from alpa_lite.api.plan_cache import Cache
from alpa_lite.errors import AlpaLiteError, InfeasibleError, PlanError
from alpa_lite.export.degrees import degrees_of, written_policy
from alpa_lite.inspection.text import diff
from alpa_lite.inspection.text.tables import Table, plan_summary, render
from alpa_lite.inter_op.plan_request import OnInterrupt
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.progress import Progress, Say
from alpa_lite.planners import Planner
from alpa_lite.program.user_shardings import Mode
from alpa_lite.step.recomputation import Remat
from alpa_lite.text import show_bytes, show_percent, show_ratio, show_seconds
from alpa_lite.trace.batch import BatchArgnums
from cost_models.cluster import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """A planner with its plan.

    Attributes:
        name: name of the plan, with its place in the list where a name comes twice; of the planner without a plan.
        plan: the plan; None if there is none.
        problem: why there is none, a sentence.
        does_not_fit: whether there is none for lack of memory.
    """

    name: str
    plan: Plan | None = None
    problem: str = ""
    does_not_fit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerComparison:
    """The plans of several planners for the same step on the same cluster, in the order given.

    Attributes:
        candidates: the plans, and the planners without one.
    """

    candidates: tuple[ComparedPlan, ...]

    @property
    def fastest(self) -> ComparedPlan | None:
        """The plan with the shortest predicted step; None if no planner has one."""
        planned = [(each.plan.prediction.step_seconds, each) for each in self.candidates if each.plan is not None]
        return min(planned, key=lambda pair: pair[0])[1] if planned else None

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence on every planner, the fastest first: how far it is behind, or why it has no plan."""
        best = self.fastest
        others = tuple(_verdict(each, best) for each in self.candidates if each is not best)
        return others if best is None else (f"{best.name} is the fastest.", *others)

    def __str__(self) -> str:
        planned = [(each, each.plan) for each in self.candidates if each.plan is not None]
        prices = Table(
            title="Plans",
            columns=("plan", "step", "likely between", "slower", "peak memory"),
            rows=tuple((each.name, *self._price(plan)) for each, plan in planned),
            numeric=frozenset({"step", "likely between", "slower", "peak memory"}),
            note="step: predicted; likely: in four of five cases; slower: against the fastest",
        )
        chosen = [decisions_of(plan) for _, plan in planned]
        # What all decide alike is no difference: it is said once.
        names = [name for name in _DECISIONS if len({each[name] for each in chosen}) > 1]
        same = [f"{name}: {chosen[0][name]}" for name in _DECISIONS if name not in names and chosen]
        differing = Table(
            title="What differs",
            columns=("plan", *names),
            rows=tuple(
                (each.name, *map(found.__getitem__, names)) for (each, _), found in zip(planned, chosen, strict=True)
            ),
        )
        tables = [prices] * bool(planned) + [differing] * bool(names)
        alike = [f"The same in all: {'; '.join(same)}."] if same and len(planned) > 1 else []
        return "\n\n".join(filter(None, (render([], tables), render(alike), render(self.verdicts))))

    def _price(self, plan: Plan) -> tuple[str, ...]:
        likely, best = plan.likely_seconds, self.fastest
        seconds, fullest = plan.prediction.step_seconds, plan.fullest_stage
        peak = plan.prediction.peak_bytes[fullest]
        return (
            show_seconds(seconds),
            "" if likely is None else f"{show_seconds(likely.low)} and {show_seconds(likely.high)}",
            "" if best is None or best.plan is None else show_ratio(seconds / best.plan.prediction.step_seconds),
            f"{show_bytes(peak)} ({show_percent(peak / plan.capacity_bytes(fullest))})",
        )

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        best = self.fastest
        return {
            "fastest": None if best is None else best.name,
            "verdicts": list(self.verdicts),
            "plans": [
                {
                    "name": each.name,
                    "problem": each.problem or None,
                    "decisions": None if each.plan is None else decisions_of(each.plan),
                    "slower": None if each.plan is None or best is None else _slower(each.plan, best),
                    "indistinguishable": None if each.plan is None or best is None else _alike(each.plan, best),
                    "plan": None if each.plan is None else plan_summary(each.plan),
                }
                for each in self.candidates
            ],
        }


_DECISIONS = ("degrees", "micro-batches", "schedule", "recomputed")


def decisions_of(plan: Plan) -> dict[str, str]:
    """Return what a plan decides in words: degrees, micro-batches, schedule, recomputation."""
    return {
        "degrees": _degrees(plan),
        "micro-batches": str(plan.num_microbatches),
        "schedule": str(plan.schedule) if len(plan.stages) > 1 else "none",
        "recomputed": _recomputed(plan),
    }


def _recomputed(plan: Plan) -> str:
    """Return what the plan recomputes, or what the step itself does; of a plan from a file the plan's own alone."""
    if plan.recomputed or plan.request is None:
        return plan.recomputed or "nothing"
    written = written_policy(plan)
    return "nothing" if written is Remat.NONE else f"{written}, by the step itself"


def _degrees(plan: Plan) -> str:
    try:
        return degrees_of(plan).words
    # Many plans of the search have no such form: their stages differ, or they split other dims.
    except AlpaLiteError:
        meshes = [f"{stage.submesh.num_devices} devices {stage.mesh_shape}" for stage in plan.stages]
        return "; ".join(f"{count} × {mesh}" if count > 1 else mesh for mesh, count in Counter(meshes).items())


def _verdict(each: ComparedPlan, best: ComparedPlan | None) -> str:
    if each.plan is None or best is None or best.plan is None:
        return f"{each.name} has no plan: {each.problem}"
    if each.plan.prediction.step_seconds == best.plan.prediction.step_seconds:
        return f"{each.name} is as fast as {best.name}."
    behind = f"{each.name} is {show_ratio(_slower(each.plan, best) or 1.0)} slower than {best.name}"
    if _alike(each.plan, best):
        return f"{behind}, by so little that the prediction cannot tell which is faster."
    return f"{behind}."


def _slower(plan: Plan, best: ComparedPlan) -> float | None:
    least = best.plan.prediction.step_seconds if best.plan is not None else 0.0
    return plan.prediction.step_seconds / least if least > 0 else None


def _alike(plan: Plan, best: ComparedPlan) -> bool:
    return best.plan is not None and diff.indistinguishable(plan, best.plan)


def compare(
    step: Callable[..., Tree],
    *args: Tree,
    planners: Sequence[Planner | type[Planner] | Plan | str],
    cluster: Cluster | str | PathLike[str] | None = None,
    num_microbatches: int | str = "auto",
    batch_argnums: BatchArgnums = None,
    static_argnums: int | Sequence[int] | None = None,
    on_interrupt: OnInterrupt = "raise",
    progress: Say | Progress | None = None,
    cache: Cache = True,
    user_shardings: Mode = "hint",
    **kwargs: Tree,
) -> PlannerComparison:
    """Plan `step(*args, **kwargs)` by each of several planners, and say which is faster and what differs.

    Nothing runs on a device, as in `plan`.

    Args:
        step: the function to plan; of a decorated one, the options given here apply.
        args: its arguments, which may be `jax.ShapeDtypeStruct`s.
        planners: each as for `parallelize`: a planner, the name of one, such as "auto" or "hybrid:pipeline=2", a saved
            plan, or the settings of a trainer, such as "megatron:--tensor-model-parallel-size 8".
        cluster: as for `parallelize`, like all that follow.
        num_microbatches: as for `parallelize`; "auto" leaves it to each planner.
        batch_argnums: as for `parallelize`.
        static_argnums: as for `parallelize`.
        on_interrupt: as for `parallelize`.
        progress: as for `parallelize`.
        cache: as for `parallelize`.
        user_shardings: as for `parallelize`.
        kwargs: keyword arguments of the step.

    Returns:
        The comparison, which prints as tables. A planner without a plan is a row with the reason.

    Raises:
        TraceError: the step cannot be traced.
        PlanError: a planner's name, options or settings are wrong, or there is no planner.
    """
    options = {
        "cluster": cluster,
        "num_microbatches": num_microbatches,
        "batch_argnums": batch_argnums,
        "static_argnums": static_argnums,
        "on_interrupt": on_interrupt,
        "progress": progress,
        "cache": cache,
        "user_shardings": user_shardings,
    }
    return compare_planners(step, args, kwargs, planners, options)


def compare_planners(
    step: Callable[..., Tree],
    args: Sequence[Tree],
    kwargs: Mapping[str, Tree],
    planners: Sequence[Planner | type[Planner] | Plan | str],
    options: Mapping[str, Any],
) -> PlannerComparison:
    """Run `compare` with the options as a mapping."""
    # All names first: a wrong one should not end a comparison that has taken minutes.
    chosen = [planner_of(each) for each in planners]
    if not chosen:
        raise PlanError("There is nothing to compare: name at least one planner.")
    function = parallelize(step.fun if isinstance(step, ParallelFunction) else step, **options)
    traced = function.trace(*args, **kwargs)
    found = list[ComparedPlan]()
    for planner in chosen:
        try:
            plan = traced.plan(planner=planner).last_plan
            found.append(ComparedPlan(name=plan.name, plan=plan))
        except AlpaLiteError as error:
            # One planner without a plan must not hide the others.
            lacking = isinstance(error, InfeasibleError)
            found.append(ComparedPlan(name=planner.name, problem=str(error), does_not_fit=lacking))
    return PlannerComparison(candidates=tuple(_told_apart(found)))


def _told_apart(found: Sequence[ComparedPlan]) -> Iterator[ComparedPlan]:
    """Yield the entries with their place in the list in each name that comes twice."""
    counts = Counter(each.name for each in found)
    for number, each in enumerate(found, 1):
        yield replace(each, name=f"{each.name} ({number})") if counts[each.name] > 1 else each
