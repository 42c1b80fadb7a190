"""Graphs and programs in notebooks."""

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from tests.inspection.markup import parse


@pytest.fixture(scope="module")
def lowered():
    def step(weights, batch):
        def loss(weights):
            return jnp.mean(jnp.tanh(batch @ weights["</pre><b>"]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    shapes = {"</pre><b>": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    planner = al.planners.DataParallel()
    function = al.parallelize(step, cluster=al.cluster("p3.16xlarge"), planner=planner, cache=False)
    return function.trace(shapes, batch).plan().lower()


class Printer:
    """Like the one of IPython."""

    def __init__(self):
        self.said = ""

    def text(self, words):
        self.said += words


def shown(value):
    printer = Printer()
    value._repr_pretty_(printer, False)
    return printer.said


def test_graph(lowered):
    graph = lowered.step.step.graph
    found = parse(graph._repr_html_())
    words = "".join(found.words)
    assert f"Graph: {len(graph.ops)} ops" in words and "dot_general" in words
    assert found.tags.count("table") == 1 and "script" not in found.tags
    assert f"{len(graph.ops)} ops" in shown(graph) and "dot_general" in shown(graph)
    assert len(graph._repr_html_()) < 100_000


def test_program(lowered):
    program = lowered.program
    found = parse(program._repr_html_())
    words = "".join(found.words)
    assert f"Program: {len(program.instructions)} instructions" in words
    assert "RUN" in words and program.tasks[0].name in words
    assert program.tasks[0].name in shown(program)


def test_transfers_of_a_program(lowered):
    planned = al.planners.Pipeline(pipeline=2)
    plan = lowered.planned.function.plan(planner=planned, num_microbatches=4)
    program = plan.lower().program
    text = shown(program)
    assert "stage 0 to stage 1" in text and "4 micro-batches" in text
    parse(program._repr_html_())
