"""The order of kernels: parameters that are gathered ahead, and collectives that wait for their turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.intra_op.kernel_queue import Kernel, KernelQueue, KernelTask
from alpa_lite.program.ir import Graph

NUM_PRODUCTS, SIDE = 5, 16


def chain(x: Any, *weights: Any) -> Any:
    for w in weights:
        x = x @ w
    return x


def graph_of_chain() -> tuple[Graph, list[int]]:
    """A chain of products, and its products."""
    array = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    graph = al.parallelize(chain, batch_argnums=(0,)).trace(array, *[array] * NUM_PRODUCTS).step(1).step.graph
    return graph, [op.id for op in graph.ops if op.primitive == "dot_general"]


def queue_of(
    graph: Graph,
    waits: Mapping[int, int | None],
    named: frozenset[int] = frozenset(),
    delayed: Mapping[int, int] | None = None,
) -> KernelQueue:
    return KernelQueue(graph, range(len(graph.ops)), lambda _: True, waits=waits, named=named, delayed=delayed or {})


def test_what_an_op_reads_is_gathered_when_the_op_that_it_waits_for_has_run() -> None:
    graph, products = graph_of_chain()
    waits = {op: products[n - 2] if n > 1 else None for n, op in enumerate(products)}
    order = [*queue_of(graph, waits).kernels()]
    time = {kernel: number for number, kernel in enumerate(order)}
    assert sorted(kernel.op_id for kernel in order if kernel.task is KernelTask.RUN) == list(range(len(graph.ops)))
    for op, before in waits.items():
        steps = (
            [KernelTask.GATHER, KernelTask.MOVE, KernelTask.RUN]
            if before is None
            else [KernelTask.HOLD, KernelTask.GATHER, KernelTask.MOVE, KernelTask.RUN]
        )
        times = [time[Kernel(op, step)] for step in steps]
        assert times == sorted(times)
        # While one is read, no more than the next one is gathered.
        assert before is None or times[0] > time[Kernel(before, KernelTask.RUN)]


def test_without_gathers_only_ops_run() -> None:
    graph, products = graph_of_chain()
    assert [kernel.op_id for kernel in queue_of(graph, {}).kernels() if kernel.op_id in products] == products


def test_results_that_are_named_anew_are_completed_a_turn_later() -> None:
    def two(x: Any, u: Any) -> Any:
        return x @ u, jnp.sin(jnp.exp(jnp.tanh(x)))

    array = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    graph = al.parallelize(two, batch_argnums=(0,)).trace(array, array).step(1).step.graph
    number = {op.primitive: op.id for op in graph.ops}
    product = number["dot_general"]
    found: list[int] = []
    for named in (frozenset[int](), frozenset([product])):
        queue = queue_of(graph, {}, named)
        assert sum(1 for _ in queue.kernels()) == 4
        found.append(queue.behind[product].op_id)
    # What was in the queue when the product had run goes first in any case, and then what this lets run.
    assert found == [number["exp"], number["sin"]]


def test_what_is_delayed_runs_after_what_it_waits_for() -> None:
    def two(x: Any) -> Any:
        return jnp.sin(jnp.exp(jnp.tanh(x))), jnp.cos(x)

    graph = al.parallelize(two, batch_argnums=(0,)).trace(jax.ShapeDtypeStruct((SIDE,), jnp.float32)).step(1).step.graph
    number = {op.primitive: op.id for op in graph.ops}
    for delayed, expected in (({}, "tanh cos exp sin"), ({number["cos"]: number["exp"]}, "tanh exp sin cos")):
        order = [kernel.op_id for kernel in queue_of(graph, {}, delayed=delayed).kernels()]
        assert [graph.ops[op_id].primitive for op_id in order] == expected.split()
