"""Devices are left idle where a step on fewer takes no longer, and of equally fast plans the simplest is chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inspection.page.html import plan_html
from alpa_lite.inspection.text.tables import plan_summary
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.work_floor import least_seconds
from alpa_lite.plan.plan import Plan
from alpa_lite.planners import Auto, Hybrid, Pipeline
from alpa_lite.planners.fewer_devices import AS_FAST, ClusterPart, next_smaller
from alpa_lite.planners.planner import Planner
from cost_models.cluster import Cluster, ClusterError, HostGroup, with_memory_limit

WIDTH = 256


def _step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def _shapes(width: int, batch: int) -> Any:
    return [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4, jax.ShapeDtypeStruct((batch, width), jnp.float32)


def _plan(planner: Planner, cluster: Cluster | str, *, width: int = WIDTH, batch: int = 64, **options: Any) -> Plan:
    return al.plan(_step, *_shapes(width, batch), cluster=cluster, planner=planner, **options)


def _mixed(first: str, second: str) -> Cluster:
    hosts = [al.cluster(name) for name in (first, second)]
    groups = tuple(HostGroup(num_hosts=1, device=host.device, intra_host=host.intra_host) for host in hosts)
    return replace(hosts[0], name="mixed", num_hosts=2, groups=groups)


@pytest.mark.parametrize("cluster", ["p3.16xlarge", "p3.16xlarge:2", _mixed("p3.16xlarge", "p4d.24xlarge")])
def test_no_part_of_the_cluster_is_faster(cluster: Cluster | str) -> None:
    """Brute force: every range of devices that is a part, planned by itself."""
    free = _plan(Auto(manual=()), cluster)
    whole = al.cluster(cluster) if isinstance(cluster, str) else cluster
    every, parts = Auto(manual=(), idle_devices=False), [ClusterPart(first_device=0, cluster=whole)]
    for part in parts:
        parts += next_smaller(part)
    seconds = [_plan(every, part.cluster).prediction.step_seconds for part in parts]
    assert free.idle_devices > 0 and free.prediction.step_seconds <= (1 + AS_FAST) * min(seconds)
    used = next(part for part in parts if part.cluster.num_devices == free.cluster.num_devices)
    assert free.cluster == used.cluster or whole.groups
    assert free.solver.bound <= free.prediction.step_seconds


def test_an_idle_group_of_hosts_may_come_first() -> None:
    """The slow host has the devices 0 to 7."""
    found = _plan(Auto(manual=()), _mixed("p3.16xlarge", "p4d.24xlarge"), width=4096, batch=4096)
    assert (found.first_device, found.idle_devices) == (8, 8)
    assert found.cluster == _mixed("p3.16xlarge", "p4d.24xlarge").part(8, 8)
    assert "A100" in found.cluster.device.name


def test_every_view_says_which_devices_are_idle() -> None:
    found = _plan(Auto(manual=()), "p3.16xlarge:2")
    count, total = found.cluster.num_devices, found.cluster.num_devices + found.idle_devices
    assert total == 16 and count < 16
    text, page = " ".join(str(found).split()), plan_html(found)
    assert f"({count} of 16 devices)" in text and f"note: uses {count} of 16 devices" in text
    assert f"{count} of 16 devices" in page and "on all 16 devices" in page
    summary = plan_summary(found)
    assert (summary["num_devices"], summary["idle_devices"], summary["notes"]) == (count, 16 - count, [*found.notes])
    assert Plan.from_json(found.to_json()) == replace(found, request=None)
    assert found.explain_time()  # prices the devices that are used
    whole = dict(found.alternatives)["auto on all 16 devices"]
    assert whole > found.prediction.step_seconds


def test_all_devices_may_be_asked_for_and_are_used_where_they_pay() -> None:
    assert _plan(Auto(manual=(), idle_devices=False), "p3.16xlarge:2").idle_devices == 0
    assert _plan(Auto(manual=(), pipeline=2), "p3.16xlarge").idle_devices == 0
    assert _plan(Auto(manual=()), "p3.16xlarge", width=8192, batch=8192).idle_devices == 0


def test_parts_that_cannot_be_as_fast_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose work alone takes longer on half of the devices costs no further search."""
    sizes: list[int] = []
    searched = Auto._planned

    def planned(self: Auto, request: PlanRequest) -> Plan:
        sizes.append(request.cluster.num_devices)
        return searched(self, request)

    monkeypatch.setattr(Auto, "_planned", planned)
    traced = al.parallelize(_step).trace(*_shapes(8192, 8192))
    request = traced.request(al.cluster("p3.16xlarge"))
    found = Auto(manual=()).plan(request)
    half = least_seconds(request.step_at(1, 0), request.cluster.part(0, 4), request.cost_model_for)
    assert half > found.prediction.step_seconds and sizes == [8]


def test_fewer_devices_are_used_where_nothing_fits_on_all() -> None:
    """Three devices split neither the batch nor the only matrix, two do."""
    shapes = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)], jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    one = replace(al.cluster("p4d.24xlarge"), devices_per_host=1)
    # Less than the matrix and its gradient take.
    limited = with_memory_limit(one, 1.9 * 4 * WIDTH**2)

    def planned(num_hosts: int, **options: Any) -> Plan:
        auto = Auto(host_memory=False, **options)
        return al.plan(_step, *shapes, cluster=replace(limited, num_hosts=num_hosts), planner=auto)

    with pytest.raises(al.errors.InfeasibleError, match="fits into memory"):
        planned(3, idle_devices=False)
    found = planned(3)
    assert (found.cluster.num_devices, found.idle_devices, found.first_device) == (2, 1, 0)
    assert "uses 2 of 3 devices (0–1): no plan for all of them was found to fit into memory" in found.notes
    assert dict(found.refusals)["auto on all 3 devices"].startswith("No plan fits into memory")
    with pytest.raises(al.errors.InfeasibleError, match="fits into memory"):
        planned(1)


def test_parts_of_clusters_are_whole_hosts_or_within_one() -> None:
    cluster = al.cluster("p3.16xlarge", num_hosts=3)
    assert (cluster.part(8, 16).num_hosts, cluster.part(8, 4).devices_per_host) == (2, 4)
    for first, count in ((4, 8), (6, 4), (0, 12)):
        with pytest.raises(ClusterError, match="no part of the cluster"):
            cluster.part(first, count)
    sizes = [cluster.num_devices]
    part = ClusterPart(first_device=0, cluster=cluster)
    while smaller := [*next_smaller(part)]:
        (part,) = smaller
        sizes.append(part.cluster.num_devices)
    assert sizes == [24, 16, 8, 4, 2, 1]
    assert all(a > b for a, b in pairwise(sizes))


@dataclass(frozen=True, kw_only=True)
class Claimed(Planner):
    """A plan of so many stages that is said to take so many times as long as `of`."""

    of: float
    num_stages: int
    num_microbatches: int = 1

    @property
    def name(self) -> str:
        return f"{self.num_stages} stages of {self.of}"

    def plan(self, request: PlanRequest) -> Plan:
        plan = Hybrid(pipeline=self.num_stages).plan(replace(request, num_microbatches=self.num_microbatches))
        return replace(plan, name=self.name, prediction=replace(plan.prediction, step_seconds=1e-9 * self.of))


@pytest.mark.parametrize(
    ("claims", "wanted", "why"),
    [
        ([(1.0, 2), (1.004, 1)], 1, "1 stage instead of 2"),
        ([(1.0, 2), (1.006, 1)], 2, ""),
        ([(1.0, 1), (1.004, 2)], 1, ""),
    ],
)
def test_of_equally_fast_plans_the_simplest_is_chosen(claims: list[tuple[float, int]], wanted: int, why: str) -> None:
    manual = tuple(Claimed(of=of, num_stages=count) for of, count in claims)
    found = _plan(Auto(manual=manual, idle_devices=False), "p3.16xlarge", num_microbatches=1)
    assert len(found.stages) == wanted
    assert bool(why) == bool(found.notes) and all(why in note and "but simpler" in note for note in found.notes)


def test_a_plan_with_idle_devices_runs_on_the_others() -> None:
    """The second half of the devices of this process, as if the first half were slower hosts."""
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.normal(size=(32, 32)) / 6, jnp.float32) for _ in range(4)]
    x = jnp.asarray(rng.normal(size=(16, 32)), jnp.float32)
    cluster = al.local_cluster()
    assert cluster.num_devices == 8
    plan = al.plan(_step, weights, x, cluster=cluster.part(4, 4), planner=Pipeline(pipeline=2), num_microbatches=2)
    plan = replace(plan, first_device=4, idle_devices=4)
    step = al.parallelize(_step, planner=plan)
    found = step(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), found, _step(weights, x))
    assert {d.id for w in found for d in w.sharding.device_set} <= {4, 5, 6, 7}
    assert step.last_plan is not None and step.last_plan.idle_devices == 4
    again = step(found, x)
    assert {d.id for w in again for d in w.sharding.device_set} <= {4, 5, 6, 7}
    with pytest.raises(al.errors.PlanError, match="devices idle"):
        Plan.from_json({**plan.to_json(), "first_device": 5})
    with pytest.raises(al.errors.MismatchError, match="for 8 devices"):
        _ = al.parallelize(_step, planner=plan, cluster=al.cluster("p3.16xlarge:2")).trace(weights, x).plan()
