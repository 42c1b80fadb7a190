"""Compare `Auto` with all plans of a small space, one by one: `python -m benchmarks.exhaustive --seconds 600`.

Each case is a model of a few layers, a batch and a cluster of a few devices, drawn at random by its number. The space:

    cuts          into contiguous stages of layers, as the search makes them; of a loop over layers into equal ones
    submeshes     of every kind, in every order that fills the cluster                      `fillings`
    meshes        every logical mesh of each submesh whose batch axes divide a micro-batch
    micro-batches every number that divides the batch
    schedules     those of the search
    policies      of rematerialisation: one for all layers

Each stage is solved to `GAP` with the memory that its schedule leaves it. All plans are priced by the estimate of the
search; those within `NEAR` of the best are priced by the simulation of their programs, as the search's own plan is.
`Auto` runs on all devices, without manual plans. It may mix policies, put stages in chunks, or order tasks by their
times: it can be better than the space.

behind    step seconds of the search over those of the best plan of the space, less 1
over      lower bound over the best of both, less 1: never above 0

    python -m benchmarks.exhaustive --case 17
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise, product

import jax
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.errors import BatchError, InfeasibleError, NonAdditiveError, PlanError, TraceError
from alpa_lite.inter_op.assembly import StagedStep, assemble
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.refine import Found, fits
from alpa_lite.inter_op.solved_stages import PlacedStage, StagePlace
from alpa_lite.inter_op.space import Space, hosts_of_groups
from alpa_lite.inter_op.stage_cost_cache import Layering, StageCostCache
from alpa_lite.inter_op.stage_costs import SolveEffort, StageCosts
from alpa_lite.inter_op.surveyed_searches import only_equal
from alpa_lite.planners import Auto
from alpa_lite.planners.auto import SCHEDULES
from alpa_lite.planners.fewer_devices import AS_FAST
from alpa_lite.schedule import Schedule
from alpa_lite.sharding.meshes import SubmeshKind, place_in_groups
from alpa_lite.step.layers import Cut
from alpa_lite.step.recomputation import Remat
from benchmarks.never_behind import MODELS
from cost_models.cluster import with_memory_limit

GAP = 1e-3
"""Relative gap to which stages are solved."""

NEAR = 0.03
"""Plans whose estimate is this close to the best one are simulated."""

LAYERS, BATCHES, HOSTS = (2, 3, 4), (4, 6, 8, 16, 64), ("p3.16xlarge", "dgx-a100", "g5.12xlarge", "tpu-v4")
SHAPES = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2))


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The search and the best plan of the space on one case.

    Attributes:
        number: the number of the case.
        case: the model and its sizes, the batch and the cluster.
        num_plans: plans of the space that fit, by the estimate.
        best: the best of them.
        best_seconds: its step seconds; infinite if none fits.
        auto: the plan of the search; empty if it found none.
        auto_seconds: its step seconds; infinite if it found no plan.
        bound: the lower bound of the step.
    """

    number: int
    case: str
    num_plans: int
    best: str
    best_seconds: float
    auto: str
    auto_seconds: float
    bound: float

    @property
    def behind(self) -> float:
        """The relative excess of the search over the best of the space; 0 where both have no plan."""
        return 0.0 if self.auto_seconds == self.best_seconds else self.auto_seconds / self.best_seconds - 1

    @property
    def over(self) -> float:
        """The relative excess of the lower bound over the best plan, which is never above 0."""
        return self.bound / min(self.auto_seconds, self.best_seconds) - 1


def drawn(number: int) -> tuple[str, PlanRequest, int]:
    """Return the name of a case, its request, and its number of layers."""
    draw = random.Random(number)
    name, model = draw.choice(MODELS)(draw)
    size, num_layers, host = draw.choice(BATCHES), draw.choice(LAYERS), draw.choice(HOSTS)
    num_hosts, per_host = draw.choice(SHAPES)
    cluster = replace(al.cluster(host), devices_per_host=per_host, num_hosts=num_hosts)
    optimizer = make_optimizer()
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    step = make_train_step(model.loss_fn, optimizer)
    traced = al.parallelize(step, cache=False).trace(state, model.batch_shapes(size))
    limit = ""
    if draw.random() < 0.4:
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        bytes_ = min(held * draw.uniform(1.5 / cluster.num_devices, 1.5) + 64e6, cluster.device.usable_bytes)
        cluster, limit = with_memory_limit(cluster, bytes_), f", {bytes_ / 1e9:.3g} GB each"
    case = f"{name}, {num_layers} layers, batch {size}, {num_hosts} × {per_host} {cluster.device.name}{limit}"
    return case, replace(traced.request(cluster), advise=False), num_layers


def cuts(num_layers: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield all cuts of layers into contiguous stages, as (first, last) of each."""
    for count in range(num_layers):
        for borders in combinations(range(1, num_layers), count):
            ends = (0, *borders, num_layers)
            yield tuple((first, after - 1) for first, after in pairwise(ends))


def fillings(space: Space, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all sequences of `count` kinds of submesh that fill the cluster, by their numbers."""
    cluster = space.cluster
    for kinds in product(range(len(space.kinds)), repeat=count):
        chosen: list[SubmeshKind] = [space.kinds[kind] for kind in kinds]
        if sum(kind.num_devices for kind in chosen) == cluster.num_devices:
            with suppress(PlanError):
                place_in_groups(chosen, hosts_of_groups(cluster), cluster.devices_per_host)
                yield kinds


def stages_of(
    request: PlanRequest,
    costs: StageCosts,
    space: Space,
    cut: Sequence[tuple[int, int]],
    kinds: Sequence[int],
    schedule: Schedule,
) -> Iterator[list[PlacedStage]]:
    """Yield the stages of a cut on submeshes of some kinds, solved on every combination of logical meshes."""
    cluster, number = space.cluster, costs.step.num_microbatches
    submeshes = place_in_groups(
        [space.kinds[kind] for kind in kinds], hosts_of_groups(cluster), cluster.devices_per_host
    )
    possible = space.divides((request.batch_size or number) // number)
    meshes_of = [[mesh for shape, mesh in enumerate(space.meshes[kind]) if possible[kind, shape]] for kind in kinds]
    # Under a policy each layer is several.
    parts = costs.layers.num_layers // (cut[-1][1] + 1)
    for meshes in product(*meshes_of):
        stages = list[PlacedStage]()
        for which, ((first, last), submesh, mesh) in enumerate(zip(cut, submeshes, meshes, strict=True)):
            place = StagePlace(first * parts, (last + 1) * parts - 1, submesh, mesh)
            solution = costs.solution(place, in_flight=schedule.in_flight(which, len(cut), number))
            if solution.choice is None:
                break
            stages.append(place.with_solution(solution))
        else:
            if fits(costs, stages, schedule):
                yield stages


def ways_to_cut(
    steps: StageCostCache, number: int, policy: Remat
) -> Iterator[tuple[StageCosts, tuple[tuple[int, int], ...]]]:
    """Yield the cuts of a step into stages, each with the costs of the layers that it numbers."""
    natural = steps.of(number, steps.natural)
    if not only_equal(natural):
        costs, _ = steps.mixed(number, steps.natural, (policy,) * natural.layers.num_layers)
        for cut in cuts(natural.layers.num_layers):
            yield costs, cut
        return
    for count in divisors(natural.layers.num_layers):
        # A loop over layers is cut into as many parts as there are stages, which are all alike.
        costs, _ = steps.mixed(number, Cut.into(count), (policy,) * count)
        yield costs, tuple((layer, layer) for layer in range(count))


def plans(request: PlanRequest, num_layers: int) -> Iterator[Found]:
    """Yield all plans of the space, with their estimates."""
    space = Space.of(request.cluster)
    steps = StageCostCache(
        request=request,
        layering=Layering(num_layers=num_layers, stages=space.equal_stages, equal="flops"),
        pins={},
        effort=SolveEffort(relative_gap=GAP, peaks="none"),
    )
    for number, policy in product(divisors(request.batch_size or 1), Remat):
        try:
            ways = [*ways_to_cut(steps, number, policy)]
        # Steps that cannot be cut into so many micro-batches or layers have no plans there.
        except (NonAdditiveError, BatchError, TraceError, PlanError):
            continue
        for costs, cut in ways:
            for kinds, schedule in product(fillings(space, len(cut)), SCHEDULES if len(cut) > 1 else SCHEDULES[:1]):
                if only_equal(costs) and len(set(kinds)) > 1:
                    continue
                for stages in stages_of(request, costs, space, cut, kinds, schedule):
                    yield Found.of(request, costs, stages, schedule)


def compared(number: int) -> Compared:
    """Enumerate a case and plan it by the search."""
    case, request, num_layers = drawn(number)
    found = sorted(plans(request, num_layers), key=lambda each: each.seconds)
    best, best_seconds = "", math.inf
    for each in found:
        if each.seconds > (1 + NEAR) * found[0].seconds and best_seconds < math.inf:
            break
        staged = StagedStep(step=each.costs.step, layers=each.costs.layers, stages=each.stages, schedule=each.schedule)
        with suppress(InfeasibleError):
            plan = assemble("", request, staged, 0.0)
            if plan.prediction.step_seconds < best_seconds:
                best, best_seconds = _shown(each), plan.prediction.step_seconds
    auto, auto_seconds = "", math.inf
    with suppress(InfeasibleError):
        plan = Auto(num_layers=num_layers, idle_devices=False, manual=()).plan(request)
        meshes = ", ".join("×".join(map(str, stage.mesh_shape.shape)) for stage in plan.stages)
        auto = f"{plan.num_microbatches} micro-batches, {plan.schedule}, on {meshes}"
        auto_seconds = plan.prediction.step_seconds
    return Compared(
        number=number,
        case=case,
        num_plans=len(found),
        best=best,
        best_seconds=best_seconds,
        auto=auto,
        auto_seconds=auto_seconds,
        bound=request.floor_seconds,
    )


def _shown(found: Found) -> str:
    where = ", ".join(f"{stage.first}–{stage.last} on {'×'.join(map(str, stage.mesh.shape))}" for stage in found.stages)
    policy = found.policies[0].value if found.costs.recomputed.remat else "none"
    return f"{found.costs.step.num_microbatches} micro-batches, {found.schedule}, remat {policy}: {where}"


def report(rows: Sequence[Compared]) -> Table:
    """Return the table of all cases, the worst first."""
    table = Table("case", "plans", "best ms", "auto ms", "behind", "bound", "auto", "best of the space")
    for each in sorted(rows, key=lambda one: -one.behind):
        table.add_row(
            f"{each.number}: {each.case}",
            str(each.num_plans),
            f"{each.best_seconds * 1e3:.4g}",
            f"{each.auto_seconds * 1e3:.4g}",
            f"{each.behind:+.2%}",
            f"{each.over:+.1%}",
            each.auto,
            each.best,
        )
    return table


def main() -> None:
    """Run as many cases as the time allows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after so many seconds")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per case")
    arguments = parser.parse_args()
    console, rows, until = Console(width=220), list[Compared](), time.monotonic() + arguments.seconds
    number: int = arguments.first if arguments.case is None else arguments.case
    while time.monotonic() < until and (arguments.case is None or not rows):
        rows.append(row := compared(number))
        line = f"{number}: {row.num_plans} plans, {row.behind:+.2%}, bound {row.over:+.1%}"
        print(json.dumps({**asdict(row), "behind": row.behind}) if arguments.json else line, flush=True)
        number += 1
    console.print(report(rows))
    behind = [each for each in rows if each.behind > AS_FAST]
    console.print(f"{len(behind)} of {len(rows)} cases behind by more than {AS_FAST:.1%}.")


if __name__ == "__main__":
    main()
