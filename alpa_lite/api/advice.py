"""Which form of parallelism for a step on a cluster: the best plan of each family of trainers, and at other sizes.

    family        the forms of parallelism that some trainers have in common                       `FAMILIES`
    best plan     a search over the degrees of the family                              `planners.degree_search`
    sensitivity   the fastest of these plans at other sizes of the step and the cluster                 `_at_sizes`

Plans are priced as trainers run them (`TRAINERS`): attention is one kernel that never writes its scores, gradients are
reduced while the backward pass goes on. These are assumptions about the program that will run, which `plan` does not
make: it prices the program that XLA makes of the step as it is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike

from alpa_lite._jax import Tree
from alpa_lite.api.comparison import decisions_of
from alpa_lite.api.options import cluster_of
from alpa_lite.api.parallelize import ParallelFunction, parallelize
from alpa_lite.api.stages import TracedFunction
from alpa_lite.errors import PlanError
from alpa_lite.export.targets import exported
from alpa_lite.inspection.text.diff import indistinguishable
from alpa_lite.inspection.text.tables import Table, plan_summary, render
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.degree_search import DegreePoint, DegreeSearch, Family, FamilyPlan
from alpa_lite.rules.dims import dim_classes, dim_names
from alpa_lite.text import show_bytes, show_count, show_percent, show_ratio, show_seconds
from alpa_lite.trace.batch import BatchArgnums
from cost_models.cluster import Cluster, with_times_the_hosts
from cost_models.hardware import Backend

FAMILIES: tuple[Family, ...] = (
    Family(name="FSDP", varied=("replicas", "remat", "samples"), zero=3, target="torchtitan"),
    Family(
        name="MaxText-like",
        varied=("tensor", "context", "replicas", "expert", "remat", "samples"),
        zero=3,
        target="maxtext",
    ),
    Family(
        name="Megatron-like",
        varied=("pipeline", "chunks", "tensor", "context", "expert", "remat", "samples"),
        zero=1,
        target="megatron",
    ),
)
"""The families, each of which has a form of the plan for one of its trainers."""

ANYTHING = Family(
    name="anything",
    varied=("pipeline", "chunks", "tensor", "context", "expert", "replicas", "zero", "remat", "samples"),
    zero=1,
)
"""All degrees together, searched from the fastest plan of the others."""

TRAINERS = Backend(fused_attention=True, overlap_gradients=True, overlap_products=True)
"""What the trainers of these families do with a step (`benchmarks.published` predicts published runs in this way)."""

SECONDS = 14.0
"""About how long `advise` takes by default, after the step is traced."""

_SHARE_OF_SEARCH = 0.65
"""The part of this time for the search; other sizes take the rest."""


@dataclass(frozen=True, kw_only=True)
class SizedStep:
    """A step with its arguments as shapes, and the cluster to run it on.

    Attributes:
        name: what distinguishes it, such as "batch 2048".
    """

    name: str
    step: Callable[..., Tree]
    args: tuple[Tree, ...]
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSize:
    """The fastest plan at another size of the step or the cluster.

    Attributes:
        name: what is different.
        plan: a plan of the same degrees, with smaller micro-batches or more recomputation where it needs less memory;
            None if there is none.
        problem: why there is none, a sentence.
    """

    name: str
    plan: Plan | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The best plan of each family of trainers for a step on a cluster.

    Attributes:
        families: the plans, and the families without one.
        other_sizes: the fastest of them at other sizes.
        dollars_per_device_hour: the price of a device; None if it is not known.
    """

    cluster: Cluster
    families: tuple[FamilyPlan, ...]
    other_sizes: tuple[OtherSize, ...] = ()
    dollars_per_device_hour: float | None = None

    @property
    def fastest(self) -> FamilyPlan | None:
        """The family with the shortest predicted step, the first of several; None if no family has a plan."""
        planned = [(each.plan.prediction.step_seconds, each) for each in self.families if each.plan is not None]
        return min(planned, key=lambda pair: pair[0])[1] if planned else None

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A sentence on what to use, and one on each family without a plan or whose search had no time to end."""
        best, said = self.fastest, list[str]()
        if best is not None and best.plan is not None:
            planned = [(each, each.plan) for each in self.families if each.plan is not None]
            same = [each.family.name for each, _ in planned if each.point == best.point]
            said.append(f"The fastest is {_degrees(best.plan)}, the best plan of {' and of '.join(same)}.")
            alike = [
                each.family.name
                for each, plan in planned
                if each.point != best.point and indistinguishable(plan, best.plan)
            ]
            if alike:
                said.append(f"The prediction cannot tell it from the best plan of {' and of '.join(alike)}.")
        missing = [(each.family.name, each.problem) for each in self.families if each.plan is None]
        missing += [(each.name, each.problem) for each in self.other_sizes if each.plan is None]
        said += [f"{name}: no plan. {problem}" for name, problem in missing]
        if cut := [each.family.name for each in self.families if each.cut_short]:
            said.append(f"The time ended before the search of {' and of '.join(cut)}: more seconds may find more.")
        return tuple(said)

    def step_dollars(self, plan: Plan) -> float | None:
        """Return the price of a step on all devices of the cluster of a plan; None without a price per device."""
        if self.dollars_per_device_hour is None:
            return None
        return plan.cluster.num_devices * plan.prediction.step_seconds / 3600 * self.dollars_per_device_hour

    def __str__(self) -> str:
        best = self.fastest
        least = best.plan.prediction.step_seconds if best is not None and best.plan is not None else 0.0
        prices: dict[str, Callable[[Plan], str]] = {
            "step": lambda plan: show_seconds(plan.prediction.step_seconds),
            "likely between": _likely,
            "peak memory": _memory,
            "MFU": lambda plan: "" if plan.prediction.mfu is None else show_percent(plan.prediction.mfu),
            **({} if self.dollars_per_device_hour is None else {"a step costs": self._shown_dollars}),
        }
        families = {each.family.name: each.plan for each in self.families}
        slower = {"slower": lambda plan: show_ratio(plan.prediction.step_seconds / least)}
        decided: dict[str, Callable[[Plan], str]] = {
            "degrees": _degrees,
            "micro-batches": lambda plan: str(plan.num_microbatches),
            "recomputed": _recomputed,
        }
        sizes = {each.name: each.plan for each in self.other_sizes}
        note = "step: predicted; likely: in four of five cases; MFU: model FLOPs utilisation, without recomputation"
        tables = (
            replace(_table("The best plan of each family", "family", families, {**prices, **slower}), note=note),
            _table("What they are", "family", families, decided),
            _table("The fastest at other sizes", "instead", sizes, prices),
        )
        return "\n\n".join(filter(None, (render([], [t for t in tables if t.rows]), render(self.verdicts))))

    def _shown_dollars(self, plan: Plan) -> str:
        dollars = self.step_dollars(plan)
        return "" if dollars is None else f"${dollars:.3g}"

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        best = self.fastest

        def priced(plan: Plan | None) -> dict[str, object]:
            return {
                "plan": None if plan is None else plan_summary(plan),
                "step_dollars": None if plan is None else self.step_dollars(plan),
            }

        return {
            "fastest": None if best is None else best.family.name,
            "verdicts": list(self.verdicts),
            "families": [
                {
                    "name": each.family.name,
                    "problem": each.problem or None,
                    "decisions": None if each.plan is None else decisions_of(each.plan),
                    "num_plans": each.num_plans,
                    "cut_short": each.cut_short,
                    **priced(each.plan),
                }
                for each in self.families
            ],
            "other_sizes": [
                {"name": each.name, "problem": each.problem or None, **priced(each.plan)} for each in self.other_sizes
            ],
        }

    def exports(self) -> dict[str, str]:
        """Return the plan of each family in the form of its trainer, by target; families whose plan has none are left
        out."""
        found = dict[str, str]()
        for each in self.families:
            if each.plan is not None and each.family.target:
                try:
                    found[each.family.target] = exported(each.plan, each.family.target)
                # A refusal of one target must not hide the others.
                except PlanError:
                    continue
        return found


def advise(
    step: Callable[..., Tree],
    *args: Tree,
    cluster: Cluster | str | PathLike[str] | None = None,
    batch_argnums: BatchArgnums = None,
    seconds: float = SECONDS,
    dollars_per_device_hour: float | None = None,
) -> Advice:
    """Find the best plan of `step(*args)` in each family of trainers, and price the fastest on more and fewer hosts.

    Nothing runs on a device, as in `plan`. Every family keeps to its own forms of parallelism, as `planners.Hybrid`
    combines them; `planners.Auto` searches all plans that there are, and takes minutes for large steps.

    Args:
        step: the function to plan.
        args: its arguments, which may be `jax.ShapeDtypeStruct`s.
        cluster: as for `parallelize`.
        batch_argnums: as for `parallelize`.
        seconds: about how long to search and price, after the step is traced.
        dollars_per_device_hour: the price of a device, for the price of a step.

    Returns:
        The advice, which prints as tables. A family without a plan is a row, with the reason below.

    Raises:
        TraceError: the step cannot be traced.
    """
    fun = step.fun if isinstance(step, ParallelFunction) else step
    given = SizedStep(name="", step=fun, args=args, cluster=cluster_of(cluster))
    others = [replace(given, name=name, cluster=each) for name, each in other_clusters(given.cluster).items()]
    return advise_sized(
        given,
        others,
        batch_argnums=batch_argnums,
        seconds=seconds,
        dollars_per_device_hour=dollars_per_device_hour,
    )


def advise_sized(
    given: SizedStep,
    others: Sequence[SizedStep],
    *,
    batch_argnums: BatchArgnums = None,
    seconds: float = SECONDS,
    dollars_per_device_hour: float | None = None,
) -> Advice:
    """Run `advise` with the other sizes given."""
    traced = _traced(given, batch_argnums)
    search, started = _search(given, traced), time.perf_counter()
    searched = _searched(search, started + _SHARE_OF_SEARCH * seconds)
    advice = Advice(
        cluster=given.cluster,
        families=tuple(_as_planned(each, search, traced) for each in searched),
        dollars_per_device_hour=dollars_per_device_hour,
    )
    best = advice.fastest
    if best is None or best.point is None:
        return advice
    sizes, is_over = list[OtherSize](), _alarm(started + seconds - time.perf_counter())
    for other in others:
        if is_over():
            sizes.append(OtherSize(name=other.name, problem="The time was up. Give more seconds."))
            continue
        same = other.step is given.step and other.args is given.args
        sizes.append(_at_size(other, traced if same else _traced(other, batch_argnums), best.point))
    return replace(advice, other_sizes=tuple(sizes))


def other_clusters(cluster: Cluster) -> dict[str, Cluster]:
    """Return a cluster with half as many and with twice as many hosts, by what is different."""
    found = dict[str, Cluster]()
    # The groups of a mixed cluster cannot be halved alike.
    if cluster.num_hosts % 2 == 0 and not cluster.groups:
        found[show_count(cluster.num_hosts // 2, "host")] = cluster.part(0, cluster.num_devices // 2)
    found[show_count(2 * cluster.num_hosts, "host")] = with_times_the_hosts(cluster, 2)
    return found


def _traced(given: SizedStep, batch_argnums: BatchArgnums) -> TracedFunction:
    return parallelize(given.step, cluster=given.cluster, batch_argnums=batch_argnums).trace(*given.args)


def _search(given: SizedStep, traced: TracedFunction) -> DegreeSearch:
    cluster, step = given.cluster, traced.step().step
    return DegreeSearch(
        request=traced.request(cluster, backend=TRAINERS),
        most_tensor=min(cluster.num_devices, cluster.devices_per_host * cluster.hosts_per_domain),
        has_experts="experts" in dim_names(step, dim_classes(step)),
    )


def _searched(search: DegreeSearch, deadline: float) -> list[FamilyPlan]:
    """Return the best plan of each family; each gets an equal share of the time that those before it have left."""
    found = list[FamilyPlan]()
    for number, family in enumerate(FAMILIES):
        left = deadline - time.perf_counter()
        found.append(search.fastest(family, is_over=_alarm(left / (len(FAMILIES) + 1 - number))))
    points = [(each.plan.prediction.step_seconds, number) for number, each in enumerate(found) if each.plan is not None]
    starts = None
    if points and (best := found[min(points)[1]].point) is not None:
        starts = [best]
    found.append(search.fastest(ANYTHING, starts, is_over=_alarm(deadline - time.perf_counter())))
    return found


def _alarm(seconds: float) -> Callable[[], bool]:
    end = time.perf_counter() + seconds
    return lambda: time.perf_counter() > end


def _at_size(other: SizedStep, traced: TracedFunction, best: DegreePoint) -> OtherSize:
    """Return the plan of the best degrees at another size, with as much recomputation as it needs to fit."""
    search = _search(other, traced)
    same = search.fastest(ANYTHING, search.nearest(ANYTHING, best), is_over=lambda: True)
    return OtherSize(name=other.name, plan=same.plan, problem=same.problem)


def _as_planned(found: FamilyPlan, search: DegreeSearch, traced: TracedFunction) -> FamilyPlan:
    """Return a plan with what `TracedFunction.plan` adds: explanations and exports read it."""
    if found.plan is None:
        return found
    return replace(found, plan=replace(found.plan, request=search.request, batch=traced.batch))


def _table(
    title: str, heading: str, plans: Mapping[str, Plan | None], columns: Mapping[str, Callable[[Plan], str]]
) -> Table:
    """Return a table with a row for each plan; those that are missing are left out: a sentence says why."""
    rows = ((name, *(shown(plan) for shown in columns.values())) for name, plan in plans.items() if plan is not None)
    return Table(
        title=title,
        columns=(heading, *columns),
        rows=tuple(rows),
        numeric=frozenset(columns) - {"degrees", "recomputed"},
    )


def _degrees(plan: Plan) -> str:
    return decisions_of(plan)["degrees"]


def _recomputed(plan: Plan) -> str:
    return ", ".join(sorted({str(policy) for policy in plan.remat})) or "none"


def _likely(plan: Plan) -> str:
    likely = plan.likely_seconds
    return "" if likely is None else f"{show_seconds(likely.low)} and {show_seconds(likely.high)}"


def _memory(plan: Plan) -> str:
    fullest = plan.fullest_stage
    peak = plan.prediction.peak_bytes[fullest]
    return f"{show_bytes(peak)} ({show_percent(peak / plan.capacity_bytes(fullest))})"
