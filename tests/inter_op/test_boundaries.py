"""What stages receive: a value that is read far above comes straight from where it is made."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.inter_op.boundaries import inflow_seconds, inflows, received_values, slower_inflows
from alpa_lite.inter_op.space import Space
from alpa_lite.program.phases import StepGraph
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.layers import Layers
from cost_models.composed import ComposedCostModel

WIDTH, BATCH = 8, 16


def _with_a_skip(weights: Any, x: Any) -> Any:
    """Training of four blocks of which the last also reads what the first gives."""

    def loss(weights: Any) -> Any:
        first, *between, last = weights
        h = kept = jnp.tanh(x @ first)
        for w in between:
            h = jnp.tanh(h @ w)
        return jnp.mean(jnp.tanh(h @ last + kept) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def _parts() -> tuple[StepGraph, Layers, int]:
    """The step in four layers, and the bytes of what each gives."""
    weights = [np.ones((WIDTH, WIDTH), np.float32)] * 4
    step = al.parallelize(_with_a_skip).trace(weights, np.ones((BATCH, WIDTH), np.float32)).step(2).step
    layers = make_layers(step, 4)
    assert layers.of_input == (0, 1, 2, 3, 0)
    return step, layers, BATCH // 2 * WIDTH * 4


@pytest.mark.parametrize(
    ("first", "last", "wanted"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (1, 3, 1), (2, 3, 2), (1, 2, 1), (0, 3, 0)]
)
def test_a_skip_is_received_by_those_that_read_it_alone(first: int, last: int, wanted: int) -> None:
    step, layers, one = _parts()
    assert [value.bytes for value in received_values(step, layers, [(first, last)])[0]] == [one] * wanted


def test_all_ranges_of_layers_receive_what_each_does() -> None:
    step, layers, _ = _parts()
    cluster = replace(al.cluster("p3.16xlarge", num_hosts=2), devices_per_host=2)
    model, space = ComposedCostModel(cluster), Space.of(cluster)
    found = inflows(model, step, layers, space)
    for k, kind in enumerate(space.kinds):
        for first, last in combinations_with_replacement(range(4), 2):
            values = received_values(step, layers, [(first, last)])[0]
            within, between = (
                inflow_seconds(model, values, crosses_hosts=crosses, num_links=kind.num_devices) if values else 0.0
                for crosses in (False, True)
            )
            assert found.slowest[first, last, k] == pytest.approx(between)
            # Of two stages in a host one receives from the other one.
            wanted = (within + between) / 2 if kind.num_devices == 1 else between
            assert found.mean[first, last, k] == pytest.approx(wanted)


@pytest.mark.parametrize("num_hosts", [1, 4])
def test_a_stage_receives_by_no_more_links_than_the_one_before_it_has(num_hosts: int) -> None:
    step, layers, _ = _parts()
    cluster = replace(al.cluster("p3.16xlarge", num_hosts=num_hosts), devices_per_host=4)
    model, space = ComposedCostModel(cluster), Space.of(cluster)
    found, slower = inflows(model, step, layers, space).slowest, slower_inflows(model, step, layers, space)
    for first in range(1, 4):
        values = received_values(step, layers, [(first, first)])[0]
        for (n, sending), (m, receiving) in product(enumerate(space.devices), repeat=2):
            links = min(sending, receiving)
            wanted = inflow_seconds(model, values, crosses_hosts=num_hosts > 1, num_links=links)
            assert found[first, first, m] + slower[first, n, m] == pytest.approx(wanted)
    assert slower[1].max() > 0 and not slower[0].any()
