"""What stages of rows of stacked arguments take to move them, against what is counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inter_op.boundaries import equally_many_rows, least_seconds_of_rows, seconds_of_rows
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.space import Space
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.planners import Auto
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.clustering import make_layers
from cost_models.composed import ComposedCostModel

ROWS, WIDTH = 6, 1024


def _step(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)

    return weights - jax.grad(loss)(weights)


def _costs() -> StageCosts:
    weights = jax.ShapeDtypeStruct((ROWS, WIDTH, WIDTH), jnp.float32)
    traced = al.parallelize(_step).trace(weights, jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32))
    step = traced.step(8, loop_parts=ROWS).step
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=2)
    return StageCosts(step=step, layers=make_layers(step, ROWS), cost_model=ComposedCostModel(cluster))


@pytest.mark.parametrize(("num_hosts", "per_host"), [(1, 4), (2, 8)])
@pytest.mark.parametrize(("form", "copies"), [(((), (), ()), "all"), (((), ("x",), ()), 1)], ids=["whole", "split"])
def test_each_device_gets_its_share_and_one_copy_comes_back(
    num_hosts: int, per_host: int, form: Any, copies: Any
) -> None:
    costs = _costs()
    submesh = Submesh(first_device=0, num_hosts=num_hosts, devices_per_host=per_host)
    mesh = LogicalMesh(axis_names=("x",), shape=(submesh.num_devices,))
    rows = [v for v, p in zip(costs.step.graph.inputs, costs.step.input_parts, strict=True) if p.rows is not None]
    costs = costs.with_pins(dict.fromkeys(rows, Spec(form)))
    place = StagePlace(1, 2, submesh, mesh)
    found = seconds_of_rows(costs, place, costs.solution(place))
    size = 2 * WIDTH * WIDTH * 4
    across, links = num_hosts > 1, num_hosts * per_host
    there, back = (
        costs.cost_model.transfer_seconds(size * n, crosses_hosts=across, num_links=links)
        for n in (links if copies == "all" else 1, 1)
    )
    assert found == pytest.approx(there + back)


def test_no_stage_takes_less_than_the_least_and_all_layers_take_nothing() -> None:
    costs = _costs()
    space = Space.of(costs.cost_model.cluster)
    least = least_seconds_of_rows(costs, space)
    for kind, meshes in enumerate(space.meshes):
        for first, last in ((0, 0), (0, 3), (2, 4), (0, ROWS - 1)):
            place = StagePlace(first, last, space.submesh(kind), meshes[0])
            taken = seconds_of_rows(costs, place, costs.solution(place))
            assert taken >= least[first, last, kind] * (1 - 1e-9)
            is_part = last - first + 1 < ROWS
            assert (taken > 0) == (least[first, last, kind] > 0) == is_part
    assert np.allclose(least[0, 1], least[3, 4])


def test_rows_stay_where_layers_hold_equally_many() -> None:
    step = _costs().step
    for count, equal in ((2, True), (3, True), (4, False), (6, True)):
        layers = make_layers(step, count)
        costs = StageCosts(step=step, layers=layers, cost_model=ComposedCostModel(al.cluster("p3.16xlarge")))
        assert equally_many_rows(costs) is equal


def test_stages_of_unequal_numbers_of_rows_are_no_better_than_one() -> None:
    """The loop is cut into 5 and 3 trips, as the head is much work too: rows move between hosts in each step."""

    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights["layers"])[0]
            return jnp.mean(jax.nn.logsumexp(h @ weights["head"], axis=-1))

        return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

    shapes = {"layers": (8, 2048, 2048), "head": (2048, 4096)}
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    cluster = replace(al.cluster("p3.16xlarge"), devices_per_host=1, num_hosts=2)
    traced = al.parallelize(step).trace(weights, jax.ShapeDtypeStruct((160, 2048), jnp.float32))
    free, one = (
        planner.plan(traced.request(cluster, num_microbatches=8)).prediction.step_seconds
        for planner in (Auto(manual=(), remat="none"), Auto(manual=(), remat="none", pipeline=1))
    )
    assert free <= 1.005 * one
