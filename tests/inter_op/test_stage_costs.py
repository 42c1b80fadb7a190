"""Stages that are alike are solved once, and what was best with more room is taken again where it still fits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.inter_op.solved_stages import StagePlace
from alpa_lite.inter_op.stage_costs import SolveEffort, StageCosts
from alpa_lite.intra_op.solvers.integer_program import IntegerProgram
from alpa_lite.plan.progress import Progress
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers
from cost_models.cluster import with_memory
from cost_models.composed import ComposedCostModel

SUBMESH = Submesh(first_device=0, num_hosts=1, devices_per_host=4)
MESH = LogicalMesh(axis_names=("x",), shape=(4,))


def chain_step(weights: Any, x: Any) -> Any:
    """A training step of equal layers, written out."""

    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def _costs(memory_bytes: float, solved: list[str]) -> StageCosts:
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    traced = al.parallelize(chain_step).trace(weights, jax.ShapeDtypeStruct((512, 256), jnp.float32))
    graph = traced.step(4).step
    cluster = al.cluster("p3.16xlarge")
    cluster = with_memory(cluster, memory_bytes)
    layers = make_layers(graph, 4)
    return StageCosts(
        step=graph, layers=layers, cost_model=ComposedCostModel(cluster), progress=Progress(solved.append)
    )


def test_a_stage_too_large_for_the_solver_asked_for_is_told() -> None:
    costs = _costs(1e9, []).solved_with(SolveEffort(solver=IntegerProgram(max_entries=10)))
    with pytest.raises(PlanError, match=r"A stage of layers 1 to 1 is too large .* The program has"):
        costs.solution(StagePlace(1, 1, SUBMESH, MESH))


@pytest.mark.parametrize("memory_bytes", [1e9, 1.2e6, 0.8e6, 0.5e6])
def test_a_solution_taken_again_is_as_good_as_a_fresh_one(memory_bytes: float) -> None:
    solved: list[str] = []
    costs = _costs(memory_bytes, solved)
    for in_flight in (1, 2, 4, 8):
        found = costs.solution(StagePlace(1, 1, SUBMESH, MESH), in_flight=in_flight)
        fresh = _costs(memory_bytes, []).solution(StagePlace(1, 1, SUBMESH, MESH), in_flight=in_flight)
        assert (found.choice is None) == (fresh.choice is None)
        if found.choice is not None:
            assert found.objective == pytest.approx(fresh.objective)
            assert found.cost.bytes_in_flight(in_flight) <= memory_bytes
    assert len(solved) == 1 or memory_bytes < 1e9


def test_equal_stages_are_solved_once_and_limits_apart() -> None:
    solved: list[str] = []
    costs = _costs(1e9, solved)
    first, second = (costs.solution(StagePlace(i, i, SUBMESH, MESH)) for i in (1, 2))
    assert len(solved) == 1 and first.objective == second.objective
    assert first.choice is not None and second.choice is not None and not first.choice.ops.keys() & second.choice.ops
    tight = costs.solution(StagePlace(1, 1, SUBMESH, MESH), limit_bytes=0.9 * first.peak_bytes)
    assert len(solved) == 2
    assert tight.choice is None or tight.peak_bytes <= 0.9 * first.peak_bytes
    # What the tight limit forbids is still known for all of the memory.
    assert costs.solution(StagePlace(2, 2, SUBMESH, MESH)).objective == first.objective and len(solved) == 2


def test_equal_stages_of_a_split_backward_pass_are_priced_once_and_others_apart() -> None:
    costs = _costs(1e9, [])
    places = [StagePlace(layer, layer, SUBMESH, MESH) for layer in range(costs.layers.num_layers)]
    solutions = [costs.solution(place) for place in places]
    other = StagePlace(1, 1, SUBMESH, LogicalMesh(axis_names=("data", "model"), shape=(2, 2)))
    asked = [*zip(places, solutions, strict=True), (other, costs.solution(other))]
    found = [costs.in_two_parts(place, solution) for place, solution in asked]
    assert found[1].cost is found[2].cost
    for (place, solution), each in zip(asked, found, strict=True):
        alone = _costs(1e9, [])
        fresh = alone.in_two_parts(place, alone.solution(place))
        assert each.cost == fresh.cost and each.choice == solution.choice
    assert len({each.cost for each in found}) > 2
