"""The text of a graph names values, ops, phases and loop bodies."""

import jax
import jax.numpy as jnp

from alpa_lite.program.show import show
from alpa_lite.trace.from_jaxpr import from_jaxpr


def test_text_of_a_small_graph():
    def double(x: jax.Array) -> jax.Array:
        return x * 2.0

    graph = from_jaxpr(jax.make_jaxpr(double)(jnp.ones((2, 3))), ["x"]).graph
    lines = show(graph).splitlines()
    assert lines[0] == "inputs %0:float32[2,3]"
    assert lines[1].startswith("%2:float32[2,3] = mul(%0, 2.0)  # ") and "test_show.py" in lines[1]
    assert lines[2] == "outputs %2"


def test_loop_bodies_are_indented():
    def loop(x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=5)
        return y

    text = show(from_jaxpr(jax.make_jaxpr(loop)(jnp.ones((2,))), ["x"]).graph)
    assert "scan × 5(%0)" in text
    assert "\n  %1:float32[2] = sin(%0)" in text
