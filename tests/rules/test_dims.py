"""Which dims are one dimension: through reshapes, loops, products and from step to step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.dims import DimClasses


def _classes(fun: Any, *args: Any) -> tuple[StepGraph, DimClasses, dict[str, tuple[int, ...]]]:
    step = al.parallelize(fun).trace(*args).step(1).step
    classes = DimClasses(step)
    named = {step.graph.values[v].name: classes.of_value(step.graph, v) for v in step.graph.inputs}
    return step, classes, named


def test_products_join_what_they_sum_over_and_what_passes() -> None:
    step, classes, of = _classes(lambda w, x: (x @ w, x), jnp.ones((4, 6)), jnp.ones((8, 4)))
    assert of["w"][0] == of["x"][1] and len({*of["w"], *of["x"]}) == 3
    assert classes.of_value(step.graph, step.graph.outputs[0]) == (of["x"][0], of["w"][1])


def test_merged_dims_go_by_their_major_part() -> None:
    step, classes, of = _classes(lambda x: x.reshape(6, 8).reshape(12, 4), jnp.ones((2, 3, 8)))
    (out,) = step.graph.outputs
    a, b, c = of["x"]
    assert classes.of(step.graph, out, 0) == a and classes.of(step.graph, out, 1) not in (a, b, c)


def test_loops_join_what_goes_in_with_what_comes_out() -> None:
    def fun(ws: Any, h: Any) -> Any:
        return jax.lax.scan(lambda h, w: (h @ w[0] @ w[1], h.sum(0)), h, ws)

    step, classes, of = _classes(fun, (jnp.ones((3, 4, 6)), jnp.ones((3, 6, 4))), jnp.ones((8, 4)))
    first, second = of["ws/0"], of["ws/1"]
    assert first[1] == second[2] == of["h"][1] and first[2] == second[1] != first[1]
    carried, stacked = step.graph.outputs
    assert classes.of_value(step.graph, carried) == of["h"]
    assert classes.of(step.graph, stacked, 1) == of["h"][1]
    assert classes.of(step.graph, stacked, 0) not in (*of["h"], *first[1:])


def test_state_is_what_it_was_in_the_step_before() -> None:
    """The new state may be made of other dims: from then on they are the same."""
    _, _, of = _classes(
        lambda state, x: ({"w": x @ jnp.ones((5, 4))}, x.sum()), {"w": jnp.ones((8, 4))}, jnp.ones((8, 5))
    )
    assert of["state/w"][0] == of["x"][0]
