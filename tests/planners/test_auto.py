"""The joint search: restrictions hold, pins are kept, an interruption keeps what was found, bounds are carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import alpa_lite as al
from alpa_lite.cli.bench.request import find_target
from alpa_lite.errors import PlanError
from alpa_lite.inter_op.microbatch_counts import MAX_SEARCHED, divisors
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.intra_op.solvers.integer_program import available_backends
from alpa_lite.plan.progress import Progress, TimeIsUp
from alpa_lite.planners import MANUAL_PLANNERS, Auto, Hybrid, Pipeline
from alpa_lite.planners.fewer_devices import AS_FAST
from alpa_lite.planners.planner import Planner
from alpa_lite.program.phases import Phase
from alpa_lite.schedule import (
    EagerOneFOneB,
    GPipe,
    Interleaved1F1B,
    OneFOneB,
    Synthesised,
    ZeroBubbleH1,
    ZeroBubbleV,
)
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.layers import natural_cut
from alpa_lite.step.recomputation import Remat
from alpa_lite.text import show_percent, show_seconds
from cost_models.cluster import Cluster, HostGroup, with_memory_limit
from tests.end_to_end.transformers import WIDE, Training, traced
from tests.inter_op.test_stage_costs import chain_step

DEPTH, WIDTH, BATCH = 8, 2048, 2048


def _step(weights: Any, x: Any) -> Any:
    """Training of a deep network whose layers are one loop."""

    def loss(weights: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["in"]) @ w["out"] + h, None), x, weights)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def _shapes(dtype: Any = jnp.float32) -> tuple[Any, Any]:
    weights = {
        "in": jax.ShapeDtypeStruct((DEPTH, WIDTH, 4 * WIDTH), dtype),
        "out": jax.ShapeDtypeStruct((DEPTH, 4 * WIDTH, WIDTH), dtype),
    }
    return weights, jax.ShapeDtypeStruct((BATCH, WIDTH), dtype)


def _plan(planner: al.planners.Planner, **options: Any) -> al.Plan:
    cluster = options.pop("cluster", al.cluster("p3.16xlarge", num_hosts=2))
    return al.plan(_step, *_shapes(), cluster=cluster, planner=planner, **options)


@pytest.mark.parametrize("step", [lambda p: p, lambda p: (p, jnp.int32(1)), lambda p: jnp.int32(1)])
def test_a_step_that_computes_nothing_is_planned(step: Any) -> None:
    assert al.plan(step, jnp.ones((8, 4)), cluster="p3.16xlarge").num_microbatches == 1


def test_numbers_of_microbatches_are_all_that_divide_the_batch() -> None:
    for size in (1, 7, 36, 1024, 1520):
        assert divisors(size) == tuple(n for n in range(1, size + 1) if size % n == 0)


def test_the_plan_carries_a_bound_and_prints_it() -> None:
    plan = _plan(Auto())
    solver, seconds = plan.solver, plan.prediction.step_seconds
    assert 0 < solver.bound <= seconds and solver.gap == pytest.approx(1 - solver.bound / seconds)
    assert f"no plan below {show_seconds(solver.bound)}, gap {show_percent(solver.gap)}" in str(plan)


def test_restrictions_hold() -> None:
    free = _plan(Auto(manual=()))
    intra, inter = _plan(Auto(intra_op_only=True)), _plan(Auto(inter_op_only=True), cluster=_four_devices())
    assert len(intra.stages) == 1 and intra.name == "auto, intra-op only"
    assert all(stage.submesh.num_devices == 1 for stage in inter.stages) and len(inter.stages) == 4
    assert free.prediction.step_seconds <= intra.prediction.step_seconds * (1 + 1e-9)
    for count in (1, 2, 4):
        assert len(_plan(Auto(pipeline=count)).stages) == count
    with pytest.raises(al.errors.PlanError, match="Ask for one of them"):
        _plan(Auto(intra_op_only=True, pipeline=2))


@dataclass(frozen=True, kw_only=True)
class Claimed(Planner):
    """Plans of so many stages that say that they take so long."""

    num_stages: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.num_stages} stages"

    def plan(self, request: PlanRequest) -> al.Plan:
        plan = Hybrid(pipeline=self.num_stages).plan(request)
        return replace(plan, name=self.name, prediction=replace(plan.prediction, step_seconds=self.seconds))


def test_one_stage_is_no_worse_than_manual_plans_that_have_one() -> None:
    alone = _plan(Auto(manual=(), intra_op_only=True)).prediction.step_seconds
    manual = Claimed(num_stages=1, seconds=0.9 * alone), Claimed(num_stages=2, seconds=0.8 * alone)
    for planner in (Auto(manual=manual, intra_op_only=True), Auto(manual=manual, pipeline=1)):
        found = _plan(planner)
        assert len(found.stages) == 1 and found.prediction.step_seconds == 0.9 * alone


def _four_devices() -> Cluster:
    return replace(al.cluster("p3.16xlarge"), devices_per_host=4)


def test_less_memory_may_be_asked_for() -> None:
    roomy = _plan(Auto(manual=()), num_microbatches=4)
    limit = 0.97 * max(roomy.prediction.peak_bytes)
    tight = _plan(Auto(manual=(), max_memory_bytes=limit), num_microbatches=4)
    assert max(tight.prediction.peak_bytes) <= limit
    assert tight.prediction.step_seconds >= roomy.prediction.step_seconds
    assert tight.cluster == roomy.cluster
    with pytest.raises(al.errors.PlanError, match="max_memory_bytes"):
        _plan(Auto(max_memory_bytes=-1))


@pytest.mark.parametrize(
    ("dims", "wanted"),
    [
        (PartitionSpec(None, None, "model"), ((), (), ("model",))),
        (PartitionSpec(None, "model"), ((), ("model",), ())),
        ((), ((), (), ())),
    ],
)
def test_pins_are_kept(dims: Any, wanted: tuple[tuple[str, ...], ...]) -> None:
    plan = _plan(Auto(pins={"in": dims}))
    pinned = [
        spec for stage in plan.stages for name, spec in stage.specs.items() if "in" in name.split("[")[0].split("/")
    ]
    assert pinned and all(spec == Spec(wanted) for spec in pinned)
    free = _plan(Auto(manual=()))
    assert plan.prediction.step_seconds >= free.prediction.step_seconds * 0.99


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"inn": (None,)}, r"no argument 'inn' to pin. Did you mean .*weights/in"),
        ({"in": ("tensor",)}, r"mesh axes \['tensor'\]"),
        ({"in": ("x", "model")}, r"either the axis x alone"),
        ({"in": (None, None, None, "model")}, r"has 4 dims"),
        ({"in": "model"}, r"give a PartitionSpec"),
    ],
)
def test_impossible_pins_are_refused(pins: Any, message: str) -> None:
    with pytest.raises(al.errors.PlanError, match=message):
        _plan(Auto(pins=pins))


def test_an_interruption_keeps_the_best_so_far() -> None:
    said: list[str] = []

    def interrupt(text: str) -> None:
        said.append(text)
        if text == "refine":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _plan(Auto(), progress=interrupt)
    plan = _plan(Auto(), progress=interrupt, on_interrupt="best")
    assert "interrupted" in said[-1]
    assert 0 < plan.solver.bound <= plan.prediction.step_seconds and plan.solver.status == "interrupted"

    def early(text: str) -> None:
        if text.startswith("survey"):
            raise KeyboardInterrupt

    assert _plan(Auto(), progress=early, on_interrupt="best").name in {
        f"auto ({planner.name})" for planner in MANUAL_PLANNERS
    }

    def at_once(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _plan(Auto(), progress=at_once, on_interrupt="best")


def test_a_search_ends_at_the_gap_asked_for() -> None:
    """Its first plan is close enough; by itself the search tries further numbers, and refines."""
    told = {gap: list[str]() for gap in (None, 0.9)}
    plans = {
        gap: _plan(Auto(gap=gap, manual=(), idle_devices=False), progress=said.append) for gap, said in told.items()
    }
    searched = {gap: _searched(said) for gap, said in told.items()}
    assert len(searched[0.9]) == 1 < len(searched[None])
    assert "refine" in told[None] and "refine" not in told[0.9]
    assert plans[0.9].solver.gap <= 0.9 and plans[0.9].solver.bound == plans[None].solver.bound


@pytest.mark.slow
def test_a_search_for_a_gap_leaves_out_no_number_by_a_guess() -> None:
    """Only numbers at which the work alone takes as long as the plan, which no plan of them can be better than."""
    said, gap = list[str](), 1e-3
    plan = _plan(Auto(gap=gap, manual=(), idle_devices=False), progress=said.append)
    request = al.parallelize(_step).trace(*_shapes()).request(plan.cluster)
    left = set(divisors(BATCH)) - _searched(said)
    assert plan.solver.gap > gap, "the search ended before"
    assert len(_searched(said)) > MAX_SEARCHED and left
    assert all(request.floor_at(number) >= (1 - gap) * plan.prediction.step_seconds for number in left)


def _searched(said: Sequence[str]) -> set[int]:
    """Return the numbers of micro-batches whose stages were searched, by the lines of progress."""
    begins = "stages at "
    return {int(text[len(begins) :].split()[0]) for text in said if text.startswith(begins)}


def test_a_search_ends_in_time_with_the_best_so_far() -> None:
    said = list[str]()
    plan = _plan(Auto(time_limit_seconds=1e-6), progress=said.append)
    assert plan.solver.status == "interrupted" and plan.name in {f"auto ({each.name})" for each in MANUAL_PLANNERS}
    assert "the time is up: the best plan so far is taken" in said and not _searched(said)
    assert 0 < plan.solver.bound <= plan.prediction.step_seconds
    # Enough time changes nothing.
    assert _plan(Auto(time_limit_seconds=1e4)).solver.status == _plan(Auto()).solver.status


def test_without_time_and_without_memory_for_manual_plans_layers_are_recomputed() -> None:
    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w) @ w.T, None), x, weights)[0])

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        return weights - 0.1 * jax.grad(loss)(weights, x)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 256, 256), (16, 128, 256))]
    cluster = with_memory_limit(al.cluster("p3.16xlarge"), 1.3e7)
    plan = al.plan(step, *shapes, cluster=cluster, planner=Auto(time_limit_seconds=1e-6))
    assert plan.solver.status == "interrupted" and max(plan.prediction.peak_bytes) <= 1.3e7
    assert set(plan.remat) == {Remat.FULL} and plan.alternatives == ()
    with pytest.raises(PlanError, match="no manual plan fits"):
        al.plan(step, *shapes, cluster=cluster, planner=Auto(time_limit_seconds=1e-6, remat="none"))
    # Neither without the plan, nor with less memory than what recomputation leaves.
    with pytest.raises(PlanError, match="no manual plan fits"):
        al.plan(step, *shapes, cluster=cluster, planner=Auto(time_limit_seconds=1e-6, max_memory_bytes=3e6))


def test_with_a_time_limit_an_interruption_raises_as_without() -> None:
    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _plan(Auto(time_limit_seconds=1e4), progress=interrupt)


def test_a_plan_says_if_the_time_was_up_before_fewer_devices_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not be what the search gives, so that it is not kept as that."""

    def late(*_: object) -> al.Plan:
        raise TimeIsUp

    whole = _plan(Auto(time_limit_seconds=1e4, idle_devices=False))
    monkeypatch.setattr("alpa_lite.planners.auto.on_fewer_devices", late)
    plan = _plan(Auto(time_limit_seconds=1e4))
    assert plan.solver.status == "interrupted" and plan.prediction == whole.prediction


@pytest.mark.parametrize("options", [{"gap": 0.0}, {"gap": 1.0}, {"gap": float("nan")}, {"time_limit_seconds": -1}])
def test_a_gap_and_a_time_that_mean_nothing_are_refused(options: Any) -> None:
    (name,) = options
    with pytest.raises(PlanError, match=f"{name}=.* was given; it must be a number above 0"):
        _plan(Auto(**options))


SMALL_MODELS = [
    "mlp-tiny",
    "cnn-tiny",
    "llama-tiny",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert-tiny", "wrn-tiny", "unet-tiny", "alexnet-tiny")),
]


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_integer_program_of_the_paper_gives_the_same_objectives(name: str) -> None:
    target = find_target(name)
    step = al.parallelize(target.step, cluster="p3.16xlarge", num_microbatches=1, cache=False)

    def seconds(solver: str) -> float:
        planner = Auto(solver=solver, manual=(), pipeline=1)
        return step.trace(*target.arguments).plan(planner=planner).last_plan.prediction.step_seconds

    searched = seconds("search")
    # Without a name it is HiGHS.
    for solver in ("pulp", *(f"pulp:{backend}" for backend in available_backends() if backend != "HiGHS")):
        assert seconds(solver) == pytest.approx(searched, rel=2e-3)  # the search stops within a tenth of a percent


def test_other_solvers_are_told_which_there_are() -> None:
    for solver in ("gurobi", "pulp:GUROBI_XYZ", "search:HiGHS"):
        with pytest.raises(PlanError, match=rf"solver='{solver}' was given; it must be .*pulp:HiGHS"):
            _plan(Auto(solver=solver))


def test_the_search_says_how_far_it_is() -> None:
    seen: dict[str, int] = {}
    known: list[float] = []

    def follow(progress: Progress) -> None:
        seen[progress.phase] = seen.get(progress.phase, 0) + 1
        if progress.left and None not in progress.left.values():
            known.append(sum(units or 0.0 for units in progress.left.values()))

    progress = Progress(None, follow)
    _plan(Auto(), progress=progress)
    assert {"trace", "split", "manual", "layers", "survey", "stages", "refine", "simulate"} <= set(seen)
    assert progress.phases == () and progress.left["survey"] == progress.left["stages"] == 0
    assert known and known[-1] <= 0.5 * max(known)
    assert sum(progress.done.values()) > 10


def test_equal_stages_agree_on_stacked_weights() -> None:
    """Where they do not, rows are brought together after each step, which takes longer than the step."""
    plan = _plan(Auto(pipeline=2), num_microbatches=8)
    first, second = plan.stages
    assert first.mesh_shape == second.mesh_shape
    rows = [{n.split("[")[0]: s for n, s in stage.specs.items() if n != "x"} for stage in plan.stages]
    assert rows[0] == rows[1] and len(rows[0]) == 2


def test_the_search_is_no_worse_than_hybrid_plans_of_any_degrees() -> None:
    auto = _plan(Auto(manual=()))
    for pipeline, model, number in [(1, 1, 1), (1, 8, 1), (2, 1, 8), (2, 2, 8), (4, 1, 16)]:
        manual = _plan(Hybrid(pipeline=pipeline, tensor=model, zero=1), num_microbatches=number)
        assert auto.prediction.step_seconds <= manual.prediction.step_seconds * 1.02


def _chain_of_rows(weights: Any, x: Any) -> Any:
    """`chain_step` whose weights are rows of one array."""

    def loss(weights: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return weights - 0.1 * grads, value


@pytest.mark.parametrize("rows", [False, True], ids=["arrays", "rows of one array"])
def test_faster_hosts_of_a_mixed_cluster_get_more_layers(rows: bool) -> None:
    slow = al.cluster("p3.16xlarge")
    fast = replace(slow.device, name="fast", peak_flops={k: 3 * v for k, v in slow.device.peaks.items()})
    groups = tuple(HostGroup(num_hosts=1, device=device, intra_host=slow.intra_host) for device in (slow.device, fast))
    # A network on which a transfer takes no longer than a stage: else it matters little which of them are slow.
    slow = replace(slow, inter_host=replace(slow.inter_host, bandwidth_bytes_per_second=1e11))
    mixed = replace(slow, num_hosts=2, groups=groups)
    weight = jax.ShapeDtypeStruct((4096, 4096), jnp.float16)
    weights: Any = jax.ShapeDtypeStruct((12, *weight.shape), weight.dtype) if rows else [weight] * 12
    batch = jax.ShapeDtypeStruct((131072, 4096), jnp.float16)

    def plan(cluster: Cluster) -> al.Plan:
        planner, step = Auto(pipeline=2, num_layers=12, manual=()), _chain_of_rows if rows else chain_step
        return al.plan(step, weights, batch, cluster=cluster, planner=planner, num_microbatches=16)

    found, usual = plan(mixed), plan(replace(slow, num_hosts=2))
    layers = {stage.submesh.first_device: stage.layers[1] - stage.layers[0] + 1 for stage in found.stages}
    assert layers[8] >= 2 * layers[0]
    assert found.prediction.step_seconds < 0.7 * usual.prediction.step_seconds
    assert found.solver.bound < found.prediction.step_seconds


def test_stages_over_slow_networks_are_charged_for_their_rows_of_stacked_weights() -> None:
    """Else a few layers on two hosts look best, whose rows take longer to move than the step."""
    slow = al.cluster("p3.16xlarge")
    fast = replace(slow.device, name="fast", peak_flops={k: 3 * v for k, v in slow.device.peaks.items()})
    groups = (
        HostGroup(num_hosts=2, device=slow.device, intra_host=slow.intra_host),
        HostGroup(num_hosts=1, device=fast, intra_host=slow.intra_host),
    )
    cluster = replace(slow, num_hosts=3, groups=groups)
    weights, batch = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((18, 4096, 4096), (65536, 4096)))
    free, *restricted = (
        al.plan(_chain_of_rows, weights, batch, cluster=cluster, planner=planner, num_microbatches=16)
        for planner in (Auto(), Auto(pipeline=2), Auto(pipeline=3), Auto(equal=("devices",)))
    )
    for plan in restricted:
        assert free.prediction.step_seconds <= 1.03 * plan.prediction.step_seconds


def _rows_of_two_products(weights: tuple[Any, Any], batch: Any) -> tuple[Any, Any]:
    def loss(weights: tuple[Any, Any]) -> Any:
        def layer(h: Any, w: tuple[Any, Any]) -> tuple[Any, None]:
            return jnp.tanh(jnp.tanh(h @ w[0]) @ w[1]), None

        return jnp.mean(jax.lax.scan(layer, batch, weights)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


@pytest.mark.slow
@pytest.mark.parametrize("samples", [48, 480])
def test_no_number_of_equal_stages_is_better_than_the_search(samples: int) -> None:
    """Eight trips on ten hosts: two, five or ten stages hold unequal parts of the loop, some no row at all."""
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=10, devices_per_host=1)
    weights = (jax.ShapeDtypeStruct((8, 4096, 4096), jnp.float32),) * 2
    batch = jax.ShapeDtypeStruct((samples, 4096), jnp.float32)

    def seconds(stages: int | None) -> float:
        planner = Auto(pipeline=stages, manual=(), idle_devices=False)
        return al.plan(_rows_of_two_products, weights, batch, cluster=cluster, planner=planner).prediction.step_seconds

    free = seconds(None)
    for stages in (1, 2, 5, 10):
        assert free <= (1 + AS_FAST) * seconds(stages)


@pytest.mark.parametrize("devices", [3, 6, 12, 20])
def test_any_number_of_devices_is_used(devices: int) -> None:
    weights = [jax.ShapeDtypeStruct((960, 960), jnp.float32)] * 6
    batch = jax.ShapeDtypeStruct((960, 960), jnp.float32)
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=max(1, devices // 10), devices_per_host=min(devices, 10))
    if devices == 12:
        cluster = replace(cluster, num_hosts=2, devices_per_host=6)
    plan = al.plan(chain_step, weights, batch, cluster=cluster, planner=Auto(manual=(), idle_devices=False))
    assert sum(submesh.num_devices for submesh in {stage.submesh for stage in plan.stages}) == devices


def _deep_plan(planner: Auto, num_microbatches: Any = "auto", bandwidth: float = 5e9) -> al.Plan:
    """Of layers that make more than they receive, on slow links: what does not fit is better not split."""
    cluster = _four_devices()
    cluster = replace(cluster, intra_host=replace(cluster.intra_host, bandwidth_bytes_per_second=bandwidth))
    weights, _ = _shapes()
    batch = jax.ShapeDtypeStruct((8 * BATCH, WIDTH), jnp.float32)
    return al.plan(_step, weights, batch, cluster=cluster, planner=planner, num_microbatches=num_microbatches)


def test_stages_are_searched_for_schedules_that_hide_transfers_where_they_take_long() -> None:
    """Under 1F1B every task here would wait for a transfer."""
    free, four = (_deep_plan(planner, bandwidth=1e9) for planner in (Auto(manual=()), Auto(manual=(), pipeline=4)))
    assert free.prediction.step_seconds <= four.prediction.step_seconds * (1 + 1e-9)
    # An order that is made for these stages hides them at least as well.
    eager = _deep_plan(Auto(manual=(), schedule=EagerOneFOneB()), bandwidth=1e9)
    assert free.prediction.step_seconds <= eager.prediction.step_seconds * 1.005
    plain = _deep_plan(Auto(manual=(), schedule=OneFOneB()), bandwidth=1e9)
    assert free.prediction.step_seconds < 0.95 * plain.prediction.step_seconds


@pytest.mark.parametrize("batch_size", [256, 1024])
def test_stages_that_wait_are_run_by_the_schedule_that_lets_them_wait_least(batch_size: int) -> None:
    """In equal parts, in as many chunks as are faster, or with backward passes in two parts."""
    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 32
    batch = jax.ShapeDtypeStruct((batch_size, 2048), jnp.float32)
    traced = al.parallelize(chain_step).trace(weights, batch)

    def plan(planner: al.planners.Planner, number: Any) -> al.Plan:
        return traced.plan(cluster=_four_devices(), planner=planner, num_microbatches=number).last_plan

    auto = Auto(inter_op_only=True, manual=())
    found = plan(auto, "auto")
    assert isinstance(found.schedule, Interleaved1F1B | ZeroBubbleH1 | ZeroBubbleV | Synthesised)
    fixed = plan(auto, found.num_microbatches)
    for schedule in (*(Interleaved1F1B(num_chunks=chunks) for chunks in (1, 2, 4, 8)), ZeroBubbleH1()):
        manual = Hybrid(pipeline=4, schedule=schedule)
        assert fixed.prediction.step_seconds <= plan(manual, found.num_microbatches).prediction.step_seconds * 1.001
    # What waits longer, with fewer micro-batches, gains more by chunks.
    assert found.prediction.step_seconds <= fixed.prediction.step_seconds * (1 + 1e-9)
    assert found.prediction.step_seconds <= plan(auto, 8).prediction.step_seconds * (1 + 1e-9)


def test_larger_microbatches_than_were_surveyed_are_found() -> None:
    weights = {
        "in": jax.ShapeDtypeStruct((12, 4096, 16384), jnp.bfloat16),
        "out": jax.ShapeDtypeStruct((12, 16384, 4096), jnp.bfloat16),
    }
    traced = al.parallelize(_step).trace(weights, jax.ShapeDtypeStruct((65536, 4096), jnp.bfloat16))
    cluster = al.cluster("dgx-a100", num_hosts=4)
    found = {
        number: traced.plan(cluster=cluster, planner=Auto(manual=()), num_microbatches=number).last_plan.prediction
        for number in ("auto", 1)
    }
    assert found["auto"].step_seconds <= found[1].step_seconds * 1.02


@pytest.mark.parametrize(("hosts", "devices", "batch_size"), [(1, 6, 192), (3, 5, 60), (8, 6, 192)])
def test_the_search_is_no_worse_than_it_is_where_it_is_restricted(hosts: int, devices: int, batch_size: int) -> None:
    """Few layers and large values at the end, on slow networks: pipelines look better than they are, and as few samples
    as were surveyed cannot be split over all devices."""
    training = Training(model=replace(WIDE, vocab_size=32000, num_layers=2), batch_size=batch_size)
    cluster = replace(al.cluster("p3.16xlarge", num_hosts=hosts), devices_per_host=devices)

    def seconds(planner: Auto, number: Any = "auto") -> float:
        plan = traced(training).plan(cluster=cluster, planner=planner, num_microbatches=number).last_plan
        return plan.prediction.step_seconds

    found = seconds(Auto(manual=()))
    assert found <= 1.02 * seconds(Auto(manual=(), intra_op_only=True))
    for number in (1, 12):
        assert found <= 1.02 * seconds(Auto(manual=()), number)


def test_a_stage_that_would_update_long_after_the_others_is_not_made() -> None:
    """A wide layer at the end, few micro-batches and a slow network: two even stages look best to the stage DP."""
    widths = (256, 256, 512, 512, 512, 256, 512, 8192)
    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for n in widths for shape in ((256, n), (n, 256))]
    traced = al.parallelize(chain_step).trace(weights, jax.ShapeDtypeStruct((8192, 256), jnp.float32))
    cluster = replace(al.cluster("p3.16xlarge", num_hosts=4), devices_per_host=2)
    found, *asked = (
        traced.plan(cluster=cluster, planner=Auto(manual=(), pipeline=count), num_microbatches=4).last_plan.prediction
        for count in (None, 1, 2, 3, 4)
    )
    assert found.step_seconds <= 1.01 * min(each.step_seconds for each in asked)


def test_layers_compute_again_what_does_not_fit() -> None:
    free = _deep_plan(Auto(manual=()), num_microbatches=8)
    assert not free.remat
    tight = Auto(manual=(), max_memory_bytes=0.5 * max(free.prediction.peak_bytes))
    found, written, full = (
        _deep_plan(replace(tight, remat=remat), num_microbatches=8) for remat in ("auto", "none", "full")
    )
    assert not written.remat and Remat.FULL in full.remat
    for plan in (found, written, full):
        assert max(plan.prediction.peak_bytes) <= tight.max_memory_bytes
        assert found.prediction.step_seconds <= plan.prediction.step_seconds * 1.005
    assert {*found.remat} == {Remat.FULL, Remat.NONE}


@pytest.mark.parametrize("part", [0.4, 0.35])
def test_what_lack_of_memory_makes_slow_hides_no_plan_that_saves_less(part: float) -> None:
    """In little memory a stage that saves everything is split in a way that takes long."""
    most = max(_deep_plan(Auto(manual=()), num_microbatches=8).prediction.peak_bytes)
    tight = Auto(manual=(), max_memory_bytes=part * most)
    found, *others = (_deep_plan(replace(tight, remat=remat), num_microbatches=8) for remat in ("auto", "none", "full"))
    for plan in others:
        assert found.prediction.step_seconds <= plan.prediction.step_seconds * 1.005


def test_manual_plans_are_priced_only_where_they_keep_the_restrictions() -> None:
    """A pipeline under 1F1B, which keeps what its backward pass reads, is faster than what the search may make here."""
    manual = (Pipeline(pipeline=4),)
    again, other = _deep_plan(Auto(remat="selective", manual=manual)), _deep_plan(Auto(schedule=GPipe(), manual=manual))
    assert Remat.SELECTIVE in again.remat and other.schedule == GPipe()
    for plan in (again, other):
        assert all(name.startswith("auto") for name, _ in plan.alternatives)
    assert any("pipeline" in name for name, _ in _plan(Auto(remat="none", manual=manual)).alternatives)


@pytest.mark.parametrize(("part", "wanted"), [(1.0, 0), (0.9, 1), (0.8, 2), (0.7, 3)])
def test_stages_that_hold_more_microbatches_compute_more_again(part: float, wanted: int) -> None:
    """Under 1F1B the first of four stages holds four micro-batches, the last one."""
    planner = Auto(manual=(), pipeline=4, schedule=OneFOneB())
    most = max(_deep_plan(planner, num_microbatches=8).prediction.peak_bytes)
    plan = _deep_plan(replace(planner, max_memory_bytes=part * most), num_microbatches=8)
    again = [Remat.FULL in plan.remat[stage.layers[0] : stage.layers[1] + 1] for stage in plan.stages]
    assert again == [stage < wanted for stage in range(4)]


def test_a_number_of_stages_has_layers_enough() -> None:
    few = [jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 4
    batch = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    plan = al.plan(chain_step, few, batch, cluster=_four_devices(), planner=Auto(pipeline=4, manual=()))
    assert len(plan.stages) == 4


@pytest.mark.parametrize(("trips", "stages", "wanted"), [(48, (1, 2, 3, 6), 12), (40, (1, 2, 4, 5, 10, 20), 10)])
def test_layers_of_a_loop_allow_for_stages_of_the_cluster(trips: int, stages: Any, wanted: int) -> None:
    weights = {
        "in": jax.ShapeDtypeStruct((trips, 8, 32), jnp.float32),
        "out": jax.ShapeDtypeStruct((trips, 32, 8), jnp.float32),
    }
    step = al.parallelize(_step).trace(weights, jax.ShapeDtypeStruct((8, 8), jnp.float32)).step(1).step
    assert natural_cut(step, stages).num_layers == wanted
    assert natural_cut(step, [7]).num_layers % 7 == 0


_UNEVEN = (
    [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in pairwise([512, 512, 512, 512, 512, 512, 512, 4096, 4096])],
    jax.ShapeDtypeStruct((65536, 512), jnp.float32),
)


def _uneven_plan(*, num_layers: int = 8, **options: Any) -> al.Plan:
    """Of layers of which the last two have most of the work, on four devices with slow links."""
    cluster = _four_devices()
    cluster = replace(cluster, intra_host=replace(cluster.intra_host, bandwidth_bytes_per_second=1e9))
    planner = Auto(manual=(), num_layers=num_layers, **options)
    return al.plan(chain_step, *_UNEVEN, cluster=cluster, planner=planner, num_microbatches=16)


def test_stages_may_be_asked_to_be_equal() -> None:
    def sizes(plan: al.Plan) -> tuple[set[int], set[int]]:
        stages = plan.stages
        return {s.layers[1] - s.layers[0] for s in stages}, {s.submesh.num_devices for s in stages}

    free = _uneven_plan(pipeline=2)
    layers, devices = _uneven_plan(pipeline=2, equal=("layers",)), _uneven_plan(pipeline=2, equal=("devices",))
    both = _uneven_plan(pipeline=2, equal=("layers", "devices"))
    assert len(sizes(layers)[0]) == len(sizes(devices)[1]) == len(sizes(both)[0]) == len(sizes(both)[1]) == 1
    assert len(sizes(free)[0]) == 2
    order = [plan.prediction.step_seconds for plan in (free, devices, both)]
    assert order == sorted(order) and free.prediction.step_seconds <= layers.prediction.step_seconds


def test_layers_may_have_equally_many_operators() -> None:
    phases = al.parallelize(chain_step).trace(*_UNEVEN).step(16).step.phases

    def excess(plan: al.Plan) -> int:
        """Return how many forward ops the largest layer has more than the smallest one."""
        forward = [layer for layer, phase in zip(plan.op_layers, phases, strict=True) if phase is Phase.FORWARD]
        counts = [forward.count(layer) for layer in range(plan.num_layers)]
        return max(counts) - min(counts)

    by_flops, by_ops = (_uneven_plan(num_layers=4, pipeline=2, layers=layers) for layers in ("flops", "operators"))
    assert excess(by_ops) <= 1 < excess(by_flops)


@pytest.mark.parametrize("asked", [{"pipeline": 4}, {"pipeline": 4, "layers": "operators"}, {"inter_op_only": True}])
def test_stages_that_are_asked_for_are_made_where_some_have_little_to_do(asked: dict[str, Any]) -> None:
    weights = [jax.ShapeDtypeStruct(pair, jnp.float32) for pair in pairwise([4, 4, 4, 4, 4096, 4096, 4])]
    batch = jax.ShapeDtypeStruct((4096, 4), jnp.float32)
    planner = Auto(num_layers=4, **asked)
    plan = al.plan(chain_step, weights, batch, cluster=_four_devices(), planner=planner, num_microbatches=4)
    # Where their number is not asked for, stages may be in chunks under schedules that go back and forth.
    chunks = plan.schedule.stages_per_processor
    assert chunks == 1 or "pipeline" not in asked
    assert len(plan.stages) == 4 * chunks and len({stage.submesh for stage in plan.stages}) == 4


def test_where_each_layer_fits_by_itself_it_is_said_what_all_need() -> None:
    """Of 8 layers with 128 MiB of weights each, and as much of sums of gradients."""
    tight = Auto(manual=(), max_memory_bytes=0.25e9)
    with pytest.raises(al.errors.InfeasibleError, match=r"each layer does by itself: together the 8 layers") as error:
        _plan(tight, cluster=_four_devices(), num_microbatches=8)
    assert "2.00 GiB of parameters" in str(error.value)
    assert "the 4 devices of p3.16xlarge have 953.67 MiB. What would fit" in str(error.value)
