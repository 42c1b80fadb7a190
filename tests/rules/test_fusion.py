"""What is fused: groups that can run as wholes, arrays that pass through memory once, attention in one kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from alpa_lite.cli.models.transformer_layers import Projected, attention_core
from alpa_lite.program.ir import Graph, Op
from alpa_lite.rules.fusion import Access, accesses, fusion_groups, is_folded, on_chip
from alpa_lite.rules.op_info import free_values
from alpa_lite.trace.from_jaxpr import from_jaxpr

N = 4


def graph_of(function: Callable[..., Any], *shapes: tuple[int, ...], dtype: Any = jnp.float32) -> Graph:
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return from_jaxpr(jax.make_jaxpr(function)(*avals), [""] * len(shapes)).graph


def bytes_of(graph: Graph, op: Op, access: Access) -> float:
    slots = (*access.reads, *access.writes)
    return sum(
        slot.part * (graph.results(op) if slot.is_result else graph.operands(op))[slot.number].bytes for slot in slots
    )


def moved(graph: Graph, **options: Any) -> float:
    """Bytes of all ops of a graph."""
    found = accesses(graph, **options)
    return sum(bytes_of(graph, op, access) for op, access in zip(graph.ops, found, strict=True))


def kernels(graph: Graph, **options: Any) -> int:
    return sum(access.num_kernels for access in accesses(graph, **options))


# --- random programs --------------------------------------------------------------------------------------------------

Step = Callable[[Any, Any, Any, Any], Any]
"""(matrix, matrix, vector, scalar) -> matrix, vector or scalar."""
STEPS: dict[str, Step] = {
    "sin": lambda a, b, v, s: jnp.sin(a),
    "add": lambda a, b, v, s: a + b,
    "rows": lambda a, b, v, s: a * v,
    "columns": lambda a, b, v, s: a - v[:, None],
    "scaled": lambda a, b, v, s: a * s,
    "product": lambda a, b, v, s: a @ b,
    "turned": lambda a, b, v, s: a.T,
    "over rows": lambda a, b, v, s: a.sum(0),
    "over columns": lambda a, b, v, s: a.max(1),
    "over all": lambda a, b, v, s: a.sum(),
    "spread": lambda a, b, v, s: jnp.broadcast_to(v, (N, N)),
    "softmax": lambda a, b, v, s: jax.nn.softmax(a),
    "sort": lambda a, b, v, s: jnp.sort(a, axis=0),
    "running": lambda a, b, v, s: jnp.cumsum(a, axis=1),
    "masked": lambda a, b, v, s: jnp.where(jnp.tril(jnp.ones((N, N), bool)), a, 0.0),
    "vector": lambda a, b, v, s: jnp.exp(v) * v,
    "scalar": lambda a, b, v, s: jnp.sqrt(s),
    "times vector": lambda a, b, v, s: a @ v,
}


@st.composite
def programs(draw: Any) -> Graph:
    """A program of some steps on what earlier ones made; the outputs are drawn too."""
    steps = draw(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), *[st.integers(0, 30)] * 4), min_size=1, max_size=9))
    returned = draw(st.sets(st.integers(0, len(steps) - 1), max_size=2)) | {len(steps) - 1}

    def run(a: Any, b: Any, v: Any, s: Any) -> Any:
        known: dict[int, list[Any]] = {2: [a, b], 1: [v], 0: [s]}
        made: list[Any] = []
        for name, *chosen in steps:
            operands = [known[rank][-1 - i % len(known[rank])] for rank, i in zip((2, 2, 1, 0), chosen, strict=True)]
            made.append(STEPS[name](*operands))
            known[made[-1].ndim].append(made[-1])
        return [made[i] for i in returned]

    return graph_of(run, (N, N), (N, N), (N,), ())


def source_of(graph: Graph, value: int) -> int:
    """The array that a value shows, through ops that only rename."""
    producer = graph.producer[value]
    while producer is not None and is_folded(graph, graph.ops[producer]) and graph.ops[producer].operands:
        (value,) = graph.ops[producer].operands
        producer = graph.producer[value]
    return value


@given(programs())
def test_random_programs(graph: Graph) -> None:
    check_groups_run_as_wholes(graph)
    check_crossing_arrays(graph)
    check_kernels(graph)
    assert moved(graph) <= moved(graph, fusion="calls") <= moved(graph, fusion="none")
    assert kernels(graph) <= kernels(graph, fusion="calls") <= kernels(graph, fusion="none")


def check_groups_run_as_wholes(graph: Graph) -> None:
    """No group needs an array of another that needs one of its own: contracted, the graph has no cycle.

    Scalars travel with the launch of a kernel, and free values are made where they are read.
    """
    groups, free = fusion_groups(graph), free_values(graph)
    contracted: Any = nx.DiGraph()
    for op in graph.ops:
        for v in op.operands:
            producer = graph.producer[v]
            if producer is not None and graph.values[v].rank and v not in free and groups[producer] != groups[op.id]:
                contracted.add_edge(groups[producer], groups[op.id])
    assert nx.is_directed_acyclic_graph(contracted)


def check_crossing_arrays(graph: Graph) -> None:
    """Each array that crosses groups is written once, and read once by each group that reads it."""
    groups, free, found = fusion_groups(graph), free_values(graph), accesses(graph)
    spread = {
        op.id
        for op in graph.ops
        if op.primitive == "broadcast_in_dim"
        and set(op.results) & set(graph.outputs)
        and graph.values[op.operands[0]].num_elements < graph.values[op.results[0]].num_elements
    }
    written = Counter(op.results[w.number] for op, access in zip(graph.ops, found, strict=True) for w in access.writes)
    read = Counter(
        (groups[op.id], source_of(graph, op.operands[r.number]))
        for op, access in zip(graph.ops, found, strict=True)
        for r in access.reads
    )
    expected: set[tuple[int, int]] = set()
    for op in graph.ops:
        if is_folded(graph, op) and op.id not in spread:
            continue
        for source in (source_of(graph, v) for v in op.operands):
            producer = graph.producer[source]
            if graph.values[source].rank and source not in free:
                expected |= (
                    {(groups[op.id], source)} if producer is None or groups[producer] != groups[op.id] else set()
                )
    assert set(read) == expected and set(read.values()) <= {1}
    shown = {source_of(graph, v) for v in graph.outputs}
    for op in graph.ops:
        for v in op.results:
            crosses = any(source == v for _, source in expected) or v in shown or op.id in spread
            is_array = graph.values[v].rank > 0 and v not in free
            assert written[v] == int(is_array and crosses and (not is_folded(graph, op) or op.id in spread))


def check_kernels(graph: Graph) -> None:
    """Each group that moves something is one kernel."""
    groups, found = fusion_groups(graph), accesses(graph)
    busy = {groups[op.id] for op, access in zip(graph.ops, found, strict=True) if access.reads or access.writes}
    launched = [groups[op.id] for op, access in zip(graph.ops, found, strict=True) if access.num_kernels]
    assert len(launched) == len(set(launched)) and set(launched) >= busy


# --- known programs ---------------------------------------------------------------------------------------------------

ROWS, WIDTH = 64, 128
ARRAY = 4.0 * ROWS * WIDTH


def layer_norm(x: Any, scale: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


@pytest.mark.parametrize("function", [layer_norm, lambda x, scale: jax.nn.softmax(jnp.tanh(x * scale))])
def test_rows_are_normalised_in_one_kernel(function: Callable[..., Any]) -> None:
    graph = graph_of(function, (ROWS, WIDTH), (WIDTH,))
    assert kernels(graph) == 1 and moved(graph) == 2 * ARRAY + 4 * WIDTH
    assert kernels(graph, fusion="none") > 5 and moved(graph, fusion="none") > 6 * ARRAY


def test_columns_are_normalised_in_two_passes() -> None:
    """Sums over the batch are known only when all of it was read: what they normalise is written and read again."""

    def batch_norm(x: Any) -> Any:
        x = jnp.tanh(x)
        mean, square = x.mean(0), (x**2).mean(0)
        return (x - mean) * lax.rsqrt(square - mean**2 + 1e-5)

    graph = graph_of(batch_norm, (ROWS, WIDTH))
    assert kernels(graph) == 2
    assert moved(graph) == 4 * ARRAY + 2 * 2 * 4 * WIDTH  # both sums are written and read


def test_transposes_are_free_next_to_products_and_nowhere_else() -> None:
    product = graph_of(lambda x, w: x @ w.T, (ROWS, WIDTH), (32, WIDTH))
    plain = graph_of(lambda x, w: x @ w, (ROWS, WIDTH), (WIDTH, 32))
    assert moved(product) == moved(plain) and kernels(product) == kernels(plain) == 1
    after = graph_of(lambda x, w: (x @ w).T, (ROWS, WIDTH), (WIDTH, 32))
    assert moved(after) == moved(plain)
    alone = graph_of(lambda x: jnp.sin(x).T, (ROWS, WIDTH))
    assert kernels(alone) == 1 and moved(alone) == 2 * ARRAY


def test_what_scalars_make_costs_nothing() -> None:
    def masked(x: Any) -> Any:
        positions = jnp.arange(ROWS)[:, None] - lax.broadcasted_iota(jnp.int32, (ROWS, WIDTH), 1)
        return jnp.where(positions > 0, x, jnp.full((ROWS, WIDTH), -1.0))

    graph = graph_of(masked, (ROWS, WIDTH))
    assert moved(graph) == 2 * ARRAY and kernels(graph) == 1
    nothing = graph_of(lambda x: jnp.broadcast_to(x[:, None], (ROWS, WIDTH)).sum(1) * x, (ROWS,))
    assert moved(nothing) == 2 * 4 * ROWS


def test_what_is_spread_out_is_read_as_small_as_it_is() -> None:
    graph = graph_of(lambda x: x * jnp.broadcast_to(x.sum(0), x.shape), (ROWS, WIDTH))
    assert moved(graph) == 3 * ARRAY + 2 * 4 * WIDTH


def test_a_broadcast_that_is_returned_is_written() -> None:
    graph = graph_of(lambda x: jnp.broadcast_to(x, (ROWS, WIDTH)), (WIDTH,))
    for fusion in ("all", "calls", "none"):
        assert moved(graph, fusion=fusion) == ARRAY + 4 * WIDTH and kernels(graph, fusion=fusion) == 1


def test_long_rows_do_not_fit_into_a_kernel() -> None:
    short, long = (graph_of(jax.nn.softmax, (2, width)) for width in (1 << 16, 1 << 17))
    assert kernels(short) == 1 < kernels(long)


def test_lookups_move_the_rows_that_they_touch() -> None:
    table, rows = (10_000, WIDTH), (ROWS,)

    def graph(function: Callable[..., Any], *more: tuple[int, ...]) -> Graph:
        avals = [jax.ShapeDtypeStruct(table, jnp.float32), jax.ShapeDtypeStruct(rows, jnp.int32)]
        avals += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in more]
        return from_jaxpr(jax.make_jaxpr(function)(*avals), [""] * len(avals)).graph

    clip = "promise_in_bounds"
    looked_up = graph(lambda t, i: t.at[i].get(mode=clip))
    added = graph(lambda t, i, u: t.at[i].add(u, mode=clip), (ROWS, WIDTH))
    updated = graph(lambda t, i, u: lax.dynamic_update_slice(t, u, (i[0], 0)), (ROWS, WIDTH))
    for found, times in ((looked_up, 2), (added, 3), (updated, 2)):
        moving = [
            bytes_of(found, op, access)
            for op, access in zip(found.ops, accesses(found), strict=True)
            if op.primitive.startswith(("gather", "scatter", "dynamic"))
        ]
        assert sum(moving) == pytest.approx(times * ARRAY, abs=4 * ROWS * 2)


def test_without_a_compiler_only_what_one_call_computes_is_fused() -> None:
    def line_by_line(x: Any) -> Any:
        x = jnp.sin(x)
        x = x * 2.0
        return jnp.tanh(x)

    one, three = graph_of(jax.nn.gelu, (ROWS, WIDTH)), graph_of(line_by_line, (ROWS, WIDTH))
    assert kernels(one, fusion="calls") == kernels(three) == 1 < kernels(one, fusion="none")
    assert kernels(three, fusion="calls") == 3 and moved(three, fusion="calls") == 6 * ARRAY


def test_what_reads_no_more_than_it_writes_runs_where_it_is_read() -> None:
    """A moment that decays is read by the kernel that adds the gradient, which comes later."""

    def update(moment: Any, x: Any, w: Any) -> Any:
        decayed = moment * 0.9
        return decayed + x @ w

    graph = graph_of(update, (ROWS, ROWS), (ROWS, ROWS), (ROWS, ROWS))
    square = 4 * ROWS * ROWS
    assert kernels(graph) == 2 and moved(graph) == 3 * square + 3 * square
    # A sum of two arrays is better made at once: its result is what both together would have to be read for.
    both = graph_of(lambda a, b, x, w: (a + b) * (x @ w), *[(ROWS, ROWS)] * 4)
    assert kernels(both) == 3 and moved(both) == 3 * square + 3 * square + 3 * square


def test_a_named_scope_is_one_call() -> None:
    @jax.named_scope("both")
    def scoped(x: Any) -> Any:
        x = jnp.sin(x)
        return x * 2.0

    def followed(x: Any) -> Any:
        return jnp.tanh(scoped(x))

    assert kernels(graph_of(scoped, (ROWS, WIDTH)), fusion="calls") == 1
    graph = graph_of(followed, (ROWS, WIDTH))
    assert kernels(graph, fusion="calls") == 2 and moved(graph, fusion="calls") == 4 * ARRAY


def test_parts_are_read_in_place() -> None:
    def halves(x: Any) -> Any:
        first, second = x[:, : WIDTH // 2], x[:, WIDTH // 2 :]
        return first * second

    graph = graph_of(halves, (ROWS, WIDTH))
    assert kernels(graph, fusion="calls") == 1 and moved(graph, fusion="calls") == 1.5 * ARRAY


# --- attention --------------------------------------------------------------------------------------------------------

BATCH, SEQ, GROUP, RATIO, DIM = 2, 64, 3, 2, 8
SCORES = BATCH * GROUP * SEQ * RATIO * SEQ


def attention(*, causal: bool, rate: float = 0.0, **options: Any) -> Callable[..., Any]:
    """The core, computed again in the backward pass, between two element-wise ops."""
    core = jax.checkpoint(attention_core, static_argnums=(2, 4))

    def run(query: Any, key: Any, value: Any) -> Any:
        drawn = jax.random.key(0) if rate else None
        return jnp.sum(core(Projected(jnp.sin(query), key, value), None, causal, drawn, rate) ** 2)

    return run


def attention_graph(function: Callable[..., Any]) -> Graph:
    """Forward and backward."""
    return graph_of(
        jax.grad(function, argnums=(0, 1, 2)), (BATCH, SEQ, GROUP, RATIO, DIM), *[(BATCH, SEQ, GROUP, DIM)] * 2
    )


def products(graph: Graph) -> list[int]:
    return [op.id for op in graph.ops if op.primitive == "dot_general"]


def stored(graph: Graph, **options: Any) -> set[int]:
    """Values that are read or written."""
    found: set[int] = set()
    for op, access in zip(graph.ops, accesses(graph, **options), strict=True):
        found |= {(op.results if s.is_result else op.operands)[s.number] for s in (*access.reads, *access.writes)}
    return found


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_scores_stay_out_of_memory_in_both_passes(causal: bool, rate: float) -> None:
    graph = attention_graph(attention(causal=causal, rate=rate))
    scores = {v.id for v in graph.values if v.num_elements >= SCORES}
    assert stored(graph) & scores, "without the kernel they pass through memory"
    assert not stored(graph, fused_attention=True) & scores
    assert moved(graph, fused_attention=True) < 0.5 * moved(graph)
    # Scores, weighted sum; scores again; gradients of shares, values, queries and keys.
    assert len(products(graph)) == 7 and on_chip(graph).products == set(products(graph))


def test_products_are_half_masked_where_positions_are() -> None:
    causal, every = (attention_graph(attention(causal=flag)) for flag in (True, False))
    assert on_chip(causal).half_masked == set(products(causal))
    assert on_chip(every).half_masked == frozenset()


def test_a_mask_of_single_samples_halves_nothing() -> None:
    """Which keys are padding differs from sample to sample, and says nothing of how many there are."""

    def run(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqd,bkd->bqk", query, key)
        shares = jax.nn.softmax(jnp.where(key[:, None, :, 0] > 0, scores, -1e9))
        return jnp.einsum("bqk,bkd->bqd", shares, value)

    graph = graph_of(run, *[(BATCH, 4 * SEQ, DIM)] * 3)
    assert len(on_chip(graph).products) == 2 and not on_chip(graph).half_masked


def test_only_the_attention_that_is_masked_is_halved() -> None:
    """A decoder attends to what came before, and to all of its encoder."""

    def run(query: Any, key: Any, value: Any) -> Any:
        before = attention_core(Projected(query, key, value), None, True).transpose(0, 2, 1, 3, 4)
        return attention_core(Projected(before, key, value), None, False)

    graph = graph_of(run, (BATCH, SEQ, GROUP, RATIO, DIM), *[(BATCH, SEQ, GROUP, DIM)] * 2)
    first, second = products(graph)[:2], products(graph)[2:]
    assert on_chip(graph).products == {*first, *second} and on_chip(graph).half_masked == set(first)


@pytest.mark.parametrize("through", ["output", "loop"])
def test_scores_that_somebody_else_reads_are_written(through: str) -> None:
    def run(query: Any, key: Any, value: Any) -> Any:
        scores = jnp.einsum("bqd,bkd->bqk", query, key)
        mixed = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), value)
        return mixed, scores if through == "output" else jnp.sort(scores)[..., -4:]

    graph = graph_of(run, *[(BATCH, SEQ, DIM)] * 3)
    (made,) = (op.results[0] for op in graph.ops if op.primitive == "dot_general" and not op.id)
    assert made in stored(graph, fused_attention=True) and made not in on_chip(graph).values


def test_scores_that_are_kept_for_the_backward_pass_are_written_by_the_forward_pass() -> None:
    """What the body of a loop hands out is an output: no kernel is assumed that would have to write its shares."""

    def layer(x: Any, _: Any) -> Any:
        shares = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x, x))
        return jnp.einsum("bqk,bkd->bqd", shares, x), shares

    (loop,) = graph_of(lambda x: lax.scan(layer, x, None, length=3), (BATCH, SEQ, DIM)).ops
    (body,) = loop.bodies
    assert body.outputs[1] in stored(body, fused_attention=True)
    assert moved(body, fused_attention=True) == moved(body)


def test_plain_layers_have_no_attention() -> None:
    wide = graph_of(lambda x, w: jax.nn.gelu(x @ w) @ w.T, (BATCH, SEQ, DIM), (DIM, 4 * DIM))
    assert on_chip(wide).values == frozenset() == on_chip(wide).products


def test_experts_are_no_attention() -> None:
    """Their products are batched and make large results too, but no softmax stands between them."""

    def experts(x: Any, up: Any, down: Any) -> Any:
        inner = jax.nn.silu(jnp.einsum("egch,ehi->egci", x, up))
        return jnp.einsum("egci,eih->egch", inner, down).sum()

    graph = graph_of(jax.grad(experts, (1, 2)), (2, 4, 16, 8), (2, 8, 32), (2, 32, 8))
    found = on_chip(graph)
    assert not found.products and not found.values


@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.softplus, jax.nn.silu])
def test_experts_with_biases_are_no_attention(activation: Any) -> None:
    """The gradients of biases sum large values, but nothing is computed with these sums and the values."""

    def experts(x: Any, up: Any, down: Any, shift: Any, offset: Any) -> Any:
        inner = activation(jnp.einsum("egch,ehi->egci", x, up) + shift[:, None, None])
        return ((jnp.einsum("egci,eih->egch", inner, down) + offset[:, None, None]) ** 2).sum()

    shapes = (2, 4, 16, 8), (2, 8, 32), (2, 32, 8), (2, 32), (2, 8)
    found = on_chip(graph_of(jax.grad(experts, (1, 2, 3, 4)), *shapes))
    assert not found.products and not found.values


def test_attention_that_divides_after_its_second_product_is_attention() -> None:
    def mixed(query: Any, key: Any, value: Any) -> Any:
        shares = jnp.exp(jnp.einsum("bqd,bkd->bqk", query, key))
        return jnp.einsum("bqk,bkd->bqd", shares, value) / shares.sum(-1, keepdims=True)

    assert len(on_chip(graph_of(mixed, (2, 64, 8), (2, 64, 8), (2, 64, 8))).products) == 2
