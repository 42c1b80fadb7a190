"""The search solves few stages, and finds what solving all of them finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inter_op.stage_costs import StageCosts
from alpa_lite.inter_op.stage_dp import StageChoice, StageTable, solve
from alpa_lite.inter_op.stage_search import StageSearch
from alpa_lite.layers import make_layers
from alpa_lite.schedule import OneFOneB
from cost_models.composed import ComposedCostModel
from tests.inter_op.test_stage_costs import chain_step

WIDTH, BATCH = 1024, 4096


def _search(memory_bytes: float, solved: list[str]) -> StageSearch:
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    step = al.parallelize(chain_step).trace(weights, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)).step(8).step
    cluster = replace(al.cluster("p3.16xlarge"), devices_per_host=4)
    cluster = replace(cluster, device=replace(cluster.device, memory_bytes=memory_bytes))
    costs = StageCosts(
        step=step, layers=make_layers(step, 4), cost_model=ComposedCostModel(cluster), progress=solved.append
    )
    return StageSearch(costs, OneFOneB(), np.full(4, 1e-5))


def _best_of_all(search: StageSearch, memory_bytes: float) -> StageChoice:
    """What the stage DP finds when every stage that can occur is solved in every configuration."""
    seconds, following = np.full(search.seconds.shape, np.inf), np.full(search.seconds.shape, -1)
    for first, last, kind, shape in zip(*np.nonzero(np.isfinite(search.seconds)), strict=True):
        for number in (shape, shape + len(search.shapes[kind])):
            solution = search.solution(first, last, kind, number)
            if solution.choice is not None:
                loop = solution.forward_seconds + solution.backward_seconds + 2 * 1e-5
                seconds[first, last, kind, number] = loop + solution.update_seconds / 8
                fits = [
                    n
                    for n in range(4)
                    if solution.bytes_in_flight(n + 1) <= search.costs.cost_model.cluster.device.memory_bytes
                ]
                following[first, last, kind, number] = max(fits, default=-1)
    devices = tuple(hosts * per_host for hosts, per_host in search.kinds)
    table = StageTable(seconds=seconds, max_following_stages=following, submesh_devices=devices)
    return solve(table, num_devices=4, num_microbatches=8)


@pytest.mark.parametrize("memory_bytes", [1e9, 28e6, 26e6, 20e6, 16e6, 12e6])
def test_what_is_found_is_as_good_as_if_all_stages_were_solved(memory_bytes: float) -> None:
    few: list[str] = []
    search = _search(memory_bytes, few)
    found = search.run()
    best = _best_of_all(_search(memory_bytes, []), memory_bytes)
    assert found.status is best.status
    if best.stages:
        assert found.seconds == pytest.approx(best.seconds, rel=0.01)
        entries = [(s.first_layer, s.last_layer, s.submesh, s.configuration) for s in found.stages]
        assert all(search.solved[entry] for entry in entries)
        assert all(search.solution(*entry).choice is not None for entry in entries)


def test_few_whole_stages_are_solved() -> None:
    solved: list[str] = []
    search = _search(1e9, solved)
    estimated = len(solved)
    search.run()
    possible = int((search.following >= 0).sum())
    assert len(solved) - estimated <= possible / 4
    assert all(text.startswith(("layers 0..0", "layers 1..1", "layers 3..3")) for text in solved[:estimated])


def test_what_does_not_fit_rules_out_what_holds_more() -> None:
    search = _search(9e6, [])
    tried = [e for e in product(*map(range, search.seconds.shape)) if np.isfinite(search.seconds[e])]
    for entry in tried:
        if not search.solved[entry]:
            search._solve(*entry)
            if search.following[entry] < 0 and entry[:2] == (1, 2):
                first, last, kind, number = entry
                assert (
                    search.solved[0, 3, kind, number]
                    and np.isinf(search.seconds[: first + 1, last:, kind, number]).all()
                )
                return
    pytest.fail("a stage of two layers was to be too large")
