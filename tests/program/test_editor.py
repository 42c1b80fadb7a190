"""Programs that are written anew: ids are places, and what belongs to values and ops goes along."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from alpa_lite.program.editor import Origin, ProgramEditor
from alpa_lite.program.equations import GraphWithEquations
from alpa_lite.program.ir import verify
from alpa_lite.trace.evaluate import evaluate
from alpa_lite.trace.from_jaxpr import from_jaxpr

X = jnp.asarray([0.1, 0.2, 0.3])


def _program() -> GraphWithEquations:
    return from_jaxpr(jax.make_jaxpr(lambda x: 2.0 * jnp.sin(jnp.cos(x)))(X), ["x"])


def test_ops_of_another_graph_are_carried_over_in_front_of_those_of_the_start() -> None:
    """g(f(x)) by the ops of both, where the input of g is what f returns."""
    f = _program()
    g = from_jaxpr(jax.make_jaxpr(lambda y: y * y)(X), ["y"])
    editor = ProgramEditor(g.graph)
    x = editor.copy(f.graph, f.graph.inputs[0])
    places = {f.graph.inputs[0]: x, f.graph.outputs[0]: g.graph.inputs[0]}
    for op in f.graph.ops:
        editor.carry_over(f.graph, op, places, f.equations[op.id], Origin(f.graph, op.id))
    for op in g.graph.ops:
        editor.emit(op, op.operands, op.results, g.equations[op.id])
    made = editor.program((x,), g.graph.outputs)
    verify(made.graph)
    (got,) = evaluate(made.graph, made.equations, (X,))
    assert jnp.allclose(got, (2.0 * jnp.sin(jnp.cos(X))) ** 2)
    assert editor.origins == [*(Origin(f.graph, op.id) for op in f.graph.ops), None]
    assert all(not value.name for value in made.graph.values[len(g.graph.values) :])


def test_a_table_of_values_has_the_rows_of_originals_for_copies_and_barriers() -> None:
    graph = _program().graph
    editor = ProgramEditor(graph)
    copy = editor.copy(graph, graph.outputs[0])
    held = editor.barrier(copy, "here")
    rows = editor.table(lambda of: [f"{of is graph} {v.id}" for v in of.values])
    assert rows[copy] == rows[held] == f"True {graph.outputs[0]}" and rows[0] == "True 0"
    assert editor.ops[-1].operands == (copy,) and editor.ops[-1].results == (held,)
