"""Plans whose arrays wait on the host give the same numbers, and hold less on the devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import pytest

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.errors import InfeasibleError, PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.planners import Auto, Hybrid, Planner
from alpa_lite.planners.manual import HOPELESS, KARMA, NoPlan, least_seconds_on_host, plans_on_host
from alpa_lite.step.recomputation import Remat
from cost_models.cluster import with_memory
from tests.end_to_end.cases import MODELS, TOLERANCE, Training, assert_same, eager_cluster, make_batch, reference

PLANNERS: Mapping[str, Hybrid] = {
    "data_parallel": Hybrid(data=8),
    "zero_1": Hybrid(data=8, zero=1),
    "pipeline": Hybrid(pipeline=2),
    "hybrid": Hybrid(pipeline=2, data=2, tensor=2, zero=1),
    "fsdp": Hybrid(data=8, zero=3),
}
CASES = [
    ("mlp", "data_parallel", "none", True, 1),
    ("gpt", "pipeline", "offload", True, 4),
    ("gpt", "zero_1", "offload", False, 1),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            ("gpt_scan", "fsdp", "offload", True, 1),
            ("gpt", "hybrid", "offload", True, 4),
            ("cnn", "data_parallel", "offload", True, 2),
        ]
    ),
]


@pytest.mark.parametrize(("model", "planner", "remat", "host_optimizer", "num_microbatches"), CASES)
def test_five_steps_give_the_same_numbers(
    model: str, planner: str, remat: Any, host_optimizer: bool, num_microbatches: int, devices: Any
) -> None:
    """With clipping by the global norm, for which the update of each stage waits in a pipeline."""
    training = Training(model=model, optimizer="momentum+clip")
    chosen = replace(PLANNERS[planner], remat=remat, host_optimizer=host_optimizer)
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=chosen, num_microbatches=num_microbatches)
    assert_same(training.run(step), reference(training), TOLERANCE)
    assert step.last_plan.host_optimizer == host_optimizer
    assert al.Plan.from_json(step.last_plan.to_json()) == step.last_plan


def _arguments(training: Training) -> tuple[Any, ...]:
    return training.start(), make_batch(training.architecture, 0), jax.random.key(0)


def test_state_lies_on_the_host_between_steps(devices: Any) -> None:
    """The moments alone do, in as many bytes as the plan predicts, and no device has room for them."""
    training = Training(model="mlp", optimizer="adamw", num_steps=2)
    plain, hosted = (
        al.parallelize(training.step(), cluster=eager_cluster(), planner=Hybrid(data=8, host_optimizer=host))
        for host in (False, True)
    )
    arguments = _arguments(training)
    new = hosted(*arguments)[0]
    plain(*arguments)
    kinds = {
        jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in jax.tree_util.tree_leaves_with_path(new)
    }
    weights = {path for path, kind in kinds.items() if kind == "device" and "count" not in path and "step" not in path}
    moments = {path for path, kind in kinds.items() if kind == "pinned_host"}
    assert len(moments) == 2 * len(weights) > 0 and all("mu" in path or "nu" in path for path in moments)
    on_host = sum(leaf.nbytes for leaf in jax.tree.leaves(new) if leaf.sharding.memory_kind == "pinned_host")
    before, after = plain.last_plan, hosted.last_plan
    # Every device of a data-parallel plan has all of it.
    assert after.prediction.host_bytes == (on_host,)
    assert after.stages[0].cost.state_bytes == before.stages[0].cost.state_bytes - on_host
    assert after.prediction.peak_bytes[0] < before.prediction.peak_bytes[0]
    assert after.stages[0].cost.update_seconds > before.stages[0].cost.update_seconds
    assert "optimizer state on the host" in str(after) and "on the host" in str(before.diff(after))


def test_activations_wait_on_the_host(devices: Any) -> None:
    """A device then holds no more than under full recomputation, and does less work."""
    training = Training(model="gpt", optimizer="momentum")
    peaks, flops = dict[str, float](), dict[str, float]()
    arguments = _arguments(training)
    for remat in ("none", "selective", "full", "offload"):
        planner = Hybrid(pipeline=2, remat=remat)  # type: ignore[arg-type]
        plan = al.plan(training.step(), *arguments, cluster=eager_cluster(), planner=planner, num_microbatches=8)
        peaks[remat], flops[remat] = plan.stages[0].cost.activation_bytes, plan.prediction.flops_per_device
        assert (plan.prediction.host_bytes != ()) == (remat == "offload")
    assert peaks["offload"] <= peaks["full"] < peaks["selective"] < peaks["none"]
    assert flops["none"] <= flops["offload"] == flops["selective"] < flops["full"]


def test_more_than_the_host_has_is_refused(devices: Any) -> None:
    training = Training(model="mlp", optimizer="adamw")
    step, arguments, planner = training.step(), _arguments(training), Hybrid(host_optimizer=True)
    cluster = eager_cluster()
    assert cluster.host_memory is not None
    small = replace(cluster, host_memory=replace(cluster.host_memory, memory_bytes=1000.0))
    with pytest.raises(InfeasibleError, match=r"would wait in the memory of a host of .*, which has"):
        al.plan(step, *arguments, cluster=small, planner=planner)
    with pytest.raises(PlanError, match=r"states none\. Describe it in the cluster file"):
        al.plan(step, *arguments, cluster=replace(cluster, host_memory=None), planner=planner)


def _wide(monkeypatch: pytest.MonkeyPatch) -> tuple[Training, Any]:
    """A model whose state takes most of the memory, and its arguments: one sample per device."""
    wide = MLP(in_features=64, hidden=128, out_features=64, num_layers=20)
    monkeypatch.setitem(MODELS, "wide", wide)
    training = Training(model="wide", optimizer="adamw", num_steps=2)
    return training, (training.start(), make_batch(wide, 0, 8), jax.random.key(0))


def _names(plan: al.Plan) -> list[str]:
    """The names of a plan and of the plans that were compared with it, without their micro-batches."""
    return [plan.name, *(name.partition(",")[0] for name, _ in plan.alternatives)]


# On fewer devices there is less memory: nothing is to be found there.
AUTO = Auto(idle_devices=False)


@pytest.mark.slow
def test_auto_looks_at_the_host_where_memory_is_short_or_it_is_asked_to(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, arguments = _wide(monkeypatch)
    step, cluster = training.step(), eager_cluster()
    planners = [replace(AUTO, host_memory=host) for host in (None, True)]
    usual, asked = (al.plan(step, *arguments, cluster=cluster, planner=planner) for planner in planners)
    assert asked.prediction.step_seconds == usual.prediction.step_seconds and not asked.prediction.host_bytes
    assert any("host optimizer" in name for name in _names(asked))
    assert not any("host" in name or "karma" in name for name in _names(usual))


@pytest.mark.slow
def test_auto_takes_the_host_where_nothing_else_fits(devices: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without being asked."""
    training, arguments = _wide(monkeypatch)
    step, cluster = training.step(), eager_cluster()
    on_host = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(zero=3, remat="full", host_optimizer=True))
    memory = 1.2 * on_host.prediction.peak_bytes[0]
    short = replace(AUTO, max_memory_bytes=memory)
    for refused, planned_for in (
        (replace(short, host_memory=False), cluster),
        (short, replace(cluster, host_memory=None)),
    ):
        with pytest.raises(InfeasibleError):
            al.plan(step, *arguments, cluster=planned_for, planner=refused)
    parallel = al.parallelize(step, cluster=cluster, planner=short)
    assert_same(parallel(*arguments), jax.jit(step)(*arguments), TOLERANCE)
    assert parallel.last_plan.host_optimizer and parallel.last_plan.prediction.peak_bytes[0] <= memory
    # A policy that was asked for is obeyed there too.
    full = al.plan(step, *arguments, cluster=cluster, planner=replace(short, remat="full"))
    assert full.host_optimizer and set(full.remat) <= {Remat.FULL, Remat.NONE}


@pytest.mark.parametrize("number", [1, 2])
def test_no_plan_on_the_host_is_faster_than_with_memory_for_everything(number: int, devices: Any) -> None:
    """By which the search leaves them out; in much and in little memory, where some exist."""
    training = Training(model="gpt", optimizer="adamw")
    step, arguments, cluster = training.step(), _arguments(training), eager_cluster()
    ample, found, refused = list[float](), list[float](), list[NoPlan]()

    class Asked(Planner):
        """Notes the bounds, and the seconds of the plans, on a cluster."""

        @property
        def name(self) -> str:
            return "asked"

        def plan(self, request: PlanRequest) -> al.Plan:
            ample.append(least_seconds_on_host(request))
            plans = [plan for plan in plans_on_host(request, thorough=True) if isinstance(plan, al.Plan)]
            found.extend(plan.prediction.step_seconds for plan in plans)
            for plan in plans:
                if plan.name == KARMA.name:
                    same = replace(request, num_microbatches=plan.num_microbatches)
                    blocks = KARMA.blocks_of(same)
                    assert 0.0 < blocks.least_seconds() <= HOPELESS * plan.prediction.step_seconds
                    assert KARMA.plan(same, blocks).prediction == plan.prediction
            hopeless = plans_on_host(request, thorough=False, at_most=0.5 * ample[-1])
            refused.extend(plan for plan in hopeless if isinstance(plan, NoPlan))
            return plans[0]

    peak = al.plan(step, *arguments, cluster=cluster, planner=Hybrid(zero=3)).prediction.peak_bytes[0]
    choice: Any = "auto" if number == 1 else number
    for memory in (2.0 * peak, 0.9 * peak):
        al.plan(step, *arguments, cluster=with_memory(cluster, memory), planner=Asked(), num_microbatches=choice)
    assert len(found) >= 4 and ample[0] == ample[1] > 0.0
    assert min(found) >= ample[0]
    assert len(refused) == 2 and all("blocks alone take" in str(plan.error) for plan in refused)


def test_what_plans_on_the_host_would_not_obey_is_refused(devices: Any) -> None:
    training = Training(model="mlp", optimizer="adamw")
    step, arguments, cluster = training.step(), _arguments(training), eager_cluster()
    with pytest.raises(PlanError, match="host_memory=True cannot be asked for beside pins"):
        al.plan(step, *arguments, cluster=cluster, planner=Auto(host_memory=True, pipeline=2))
    with pytest.raises(PlanError, match=r"states none\. Describe it in the cluster file"):
        al.plan(step, *arguments, cluster=replace(cluster, host_memory=None), planner=Auto(host_memory=True))
