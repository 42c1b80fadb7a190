"""What every public value shows of itself: one short line as its `repr`, and something to see in a notebook."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from cost_models.cluster import HostGroup
from tests.inspection.markup import parse

LONGEST = 300


@pytest.fixture(scope="module")
def values():
    """A step on its way, and what it is made of."""

    def train_step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    function = al.parallelize(train_step, planner=al.planners.DataParallel(), num_microbatches=2)
    arguments = jnp.ones((8, 8)), jnp.ones((16, 8))
    traced = function.trace(*arguments)
    planned = traced.plan()
    lowered = planned.lower()
    plan = planned.last_plan
    return {
        "function": function,
        "traced": traced,
        "planned": planned,
        "lowered": lowered,
        "compiled": lowered.compile(),
        "plan": plan,
        "stage": plan.stages[0],
        "prediction": plan.prediction,
        "tasks": plan.prediction.tasks,
        "transfers": plan.prediction.transfers,
        "program": lowered.program,
        "graph": lowered.step.step.graph,
        "simulated": lowered.simulate(),
        "check": al.check(function, *arguments),
        "cluster": al.cluster("p3.16xlarge", num_hosts=8),
    }


NAMES = (
    *("function", "traced", "planned", "lowered", "compiled", "check", "cluster"),
    *("plan", "stage", "prediction", "tasks", "transfers", "program", "graph", "simulated"),
)


@pytest.mark.parametrize("name", NAMES)
def test_one_line(values, name):
    text = repr(values[name])
    assert text.startswith("<") and text.endswith(">") and "\n" not in text and len(text) <= LONGEST
    assert type(values[name]).__name__ in text


def test_a_long_name_does_not_make_it_long(values):
    assert len(repr(replace(values["plan"], function="f" * 10_000, name="n\n" * 500))) <= LONGEST
    assert "\n" not in repr(replace(values["plan"], name="n\n" * 5))


@pytest.mark.parametrize("name", ["planned", "lowered", "compiled", "plan", "program", "graph", "check", "cluster"])
def test_a_notebook_shows_it(values, name):
    found = parse(values[name]._repr_html_())
    assert "table" in found.tags and "script" not in found.tags


def test_a_check_tells_its_verdict(values):
    words = "".join(parse(values["check"]._repr_html_()).words)
    assert values["check"].verdict in words and "rounding steps" in words and "float32" in words


def test_a_cluster_tells_its_links():
    cluster = al.cluster("p3.16xlarge", num_hosts=2)
    words = "".join(parse(cluster._repr_html_()).words)
    assert cluster.device.name in words and "between hosts" in words and "GB/s" in words
    group = HostGroup(num_hosts=1, device=cluster.device, intra_host=cluster.intra_host)
    mixed = replace(cluster, groups=(group, group), name="<b>")
    assert "2 kinds of hosts" in repr(mixed) and "<b>" not in mixed._repr_html_()
    assert "host 1" in "".join(parse(mixed._repr_html_()).words)


def test_the_same_text_without_html(values):
    class Printer:
        said = ""

        def text(self, words):
            self.said += words

    for name in ("planned", "lowered", "compiled"):
        printer = Printer()
        values[name]._repr_pretty_(printer, False)
        assert len(printer.said) > 50
    assert sys.getsizeof(repr(values["plan"])) < 1000
