"""The order in which kernels run: XLA's own schedule for the CPU backend, and that of the ops elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.intra_op.stored_values import KernelModel, StoredValues, early_operands

CPU = KernelModel(fuses_siblings=False, breadth_first=True)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def products(function: Callable[..., Any], kernels: KernelModel, *args: Any) -> list[str]:
    """The products of a function in the order in which a backend runs them, by the scope that each was written in."""
    graph = al.parallelize(function, batch_argnums=(0,)).trace(*args).step(1).step.graph
    stored = StoredValues(graph, kernels)
    order = [kernel.op_id for kernel in stored.run_order()]
    assert sorted(order) == list(range(len(graph.ops)))
    done: set[int] = set()
    for op_id in order:
        makers = {graph.producer[v] for v in graph.ops[op_id].operands} - {None}
        assert makers <= done
        done.add(op_id)
    return [graph.ops[o].name_stack for o in order if graph.ops[o].primitive == "dot_general"]


def scheduled(function: Callable[..., Any], *args: Any) -> list[str]:
    """The products in the order of the program that XLA compiles for one CPU device."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None and "is_scheduled=true" in text
    # The products of a kernel are in the computation that it calls, or it is one itself.
    computations = dict(re.findall(r"^%([\w.]+) \(.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    found: list[str] = []
    for line in text[text.index("ENTRY") :].splitlines():
        called = re.search(r"calls=%([\w.]+)", line)
        found += re.findall(r"/(\w+)/dot_general", line if called is None else computations[called[1]])
    return list(dict.fromkeys(found))


def product(name: str, a: Any, b: Any) -> Any:
    with jax.named_scope(name):
        return a @ b


def two_chains(x: Any, w: Any, u: Any) -> Any:
    """Three products one after the other, then two that wait for none of them."""
    a = product("a", x, w)
    b = product("b", jnp.tanh(a), u)
    c = product("c", jnp.tanh(b), w)
    d = product("d", jnp.sin(x), w)
    e = product("e", jnp.exp(d), u)
    return a, b, c, d, e


def late_reader(x: Any, w: Any, u: Any) -> Any:
    """A product that is written last, and waits only for the first one."""
    a = product("a", x, w)
    b = product("b", jnp.tanh(a), u)
    c = product("c", jnp.tanh(b), w)
    return a, b, c, product("d", jnp.cos(a), u)


ARGUMENTS = (f32(64, 64), f32(64, 64), f32(64, 64))


@pytest.mark.parametrize("function", [two_chains, late_reader])
def test_kernels_run_in_the_order_of_the_cpu_backend(function: Callable[..., Any]) -> None:
    found = products(function, CPU, *ARGUMENTS)
    assert found == scheduled(function, *ARGUMENTS)
    in_order = products(function, KernelModel(), *ARGUMENTS)
    assert in_order == sorted(in_order) != found


def test_operands_of_a_convolution_are_transposed_unless_their_dims_are_in_order() -> None:
    def step(x: Any, w: Any, g: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        made = jax.vjp(lambda w: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers), w)[1](g)
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers), made

    args = (f32(8, 6, 6, 4), f32(3, 3, 4, 5), f32(8, 6, 6, 5))
    graph = al.parallelize(step, batch_argnums=(0, 2)).trace(*args).step(1).step.graph
    found = {tuple(early_operands(op)) for op in graph.ops if op.primitive == "conv_general_dilated"}
    # The gradient of the kernel is a convolution whose features are the samples.
    assert found == {(), (0, 1)}
