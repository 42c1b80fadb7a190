"""Kernels of several results on XLA:GPU: what reads one array runs at once, and overwrites nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import alpa_lite as al
from alpa_lite.intra_op.liveness import Life, lives_of
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.stored_values import KernelModel
from alpa_lite.program.phases import Phase
from alpa_lite.rules.fusion import is_repeatable
from alpa_lite.step.clustering import make_layers
from cost_models.composed import ComposedCostModel
from cost_models.hardware import Backend

ROWS, COLUMNS = 16, 8
GPU = KernelModel()
ALONE = replace(GPU, runs_siblings_at_once=False)


def lives(function: Callable[..., Any], num_arrays: int, kernels: KernelModel = GPU) -> dict[str, Life]:
    """The lives of the results of a function of equal arrays, by primitive and number of the op."""
    arrays = [jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)]
    arrays += [jax.ShapeDtypeStruct((COLUMNS, COLUMNS), jnp.float32)] * (num_arrays - 1)
    step = al.parallelize(function, batch_argnums=(0,)).trace(*arrays).step(1).step
    view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
    made = {view.graph.producer[life.value]: life for life in lives_of(view, kernels).lives}
    return {f"{view.graph.ops[op_id].primitive} {op_id}": life for op_id, life in made.items() if op_id is not None}


def alive(found: dict[str, Life], time: int) -> set[str]:
    return {name for name, life in found.items() if life.start <= time < life.end}


def two_kernels(x: Any, w: Any, u: Any, v: Any) -> tuple[Any, Any]:
    """Two kernels that read one product; the second reads another one, too, which is made after the first is read."""
    h = x @ w
    first = jnp.sin(h) @ u
    return first, ((x @ v) * jnp.cos(h)) @ u


def test_kernels_that_read_one_array_run_when_the_last_of_them_can():
    found = lives(two_kernels, 4)
    both = {"dot_general 0", "sin 1", "dot_general 3", "mul 5"}
    assert set(found) == both | {"dot_general 2", "dot_general 6"}
    (time,) = (t for t in range(8) if both <= alive(found, t))
    # The first product is read no longer then.
    assert found["dot_general 0"].end == found["dot_general 3"].end == time + 1


def test_kernels_of_one_result_each_run_one_after_the_other():
    found = lives(two_kernels, 4, ALONE)
    assert found["sin 1"].end < found["mul 5"].start


def test_a_kernel_that_depends_on_another_one_runs_after_it():
    def step(x: Any, w: Any, u: Any) -> Any:
        h = x @ w
        return (((jnp.sin(h) @ u) @ u) * jnp.cos(h)) @ u

    found = lives(step, 3)
    assert found["sin 1"].end < found["mul 5"].start


def test_what_is_computed_again_is_no_kernel_of_the_forward_pass():
    """Both read the saved product, but the second of them waits for the backward pass."""

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.checkpoint_dots)
    def layer(h: Any, w: Any, v: Any) -> Any:
        return jnp.tanh(h @ w) @ v

    def step(x: Any, w: Any, v: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> Any:
            return jnp.mean(layer(layer(layer(x, *params), *params), *params) ** 2)

        gradients = jax.grad(loss)((w, v))
        return w - gradients[0], v - gradients[1]

    found = lives(step, 3)
    made = sorted((life.start, life.end) for name, life in found.items() if name.startswith("tanh"))
    products = sorted((life.start, life.end) for name, life in found.items() if name.startswith("dot_general"))
    # Each is gone when the next one is made, and the product that it is made of is not.
    assert len(made) >= 3 and all(first[1] <= second[0] for first, second in pairwise(made[:3]))
    assert products[0][1] > made[2][1]


@pytest.mark.parametrize("reduced", [False, True])
def test_what_is_also_reduced_does_not_overwrite_what_it_is_made_of(reduced: bool):
    def step(x: Any, w: Any, u: Any) -> Any:
        doubled = (x @ w) * 2.0
        return doubled @ u + (doubled.sum(axis=0) if reduced else 0.0)

    found = lives(step, 3)
    assert (found["mul 1"].start < found["dot_general 0"].end) is reduced


@pytest.mark.parametrize("kernels", [GPU, ALONE])
def test_a_kernel_that_reduces_inside_does_not_overwrite_what_it_reads_again(kernels: KernelModel):
    found = lives(lambda x, w, u: jax.nn.softmax(x @ w) @ u, 3, kernels)
    (weights,) = (life for name, life in found.items() if name.startswith("div"))
    assert (weights.start < found["dot_general 0"].end) is (kernels is GPU)


@pytest.mark.parametrize("kernels", [GPU, ALONE])
def test_zeros_for_the_gradients_of_all_loops_are_written_before_the_first_one(kernels: KernelModel):
    def layer(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ w), None

    def step(x: Any, w: Any, u: Any) -> Any:
        def loss(w: Any, u: Any) -> Any:
            x1, _ = lax.scan(layer, x, jnp.stack([w, w + 1.0, w + 2.0]))
            x2, _ = lax.scan(layer, jnp.sin(x1), jnp.stack([u, u + 1.0, u + 2.0]))
            return jnp.sum(x2**2)

        return jax.grad(loss, (0, 1))(w, u)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, COLUMNS), *[(COLUMNS, COLUMNS)] * 2)]
    train = al.parallelize(step, batch_argnums=(0,)).trace(*arrays).step(1).step
    view = StageView(step=train, layers=make_layers(train, 1), first=0, last=0)
    stacks = [
        life.start
        for life in lives_of(view, kernels).lives
        if not life.path
        and view.graph.values[life.value].shape == (3, COLUMNS, COLUMNS)
        and (maker := view.graph.producer[life.value]) is not None
        and train.phases[maker] is Phase.BACKWARD
    ]
    assert len(stacks) == 2 and (len(set(stacks)) == 1) is (kernels is GPU)


MEASURED = [
    # What XLA compiles for the gradient of two products with the function between them: stored are the operand and the
    # result of the function alone, or its inner value, too.
    ("dgx-h100", jnp.float32, "tanh", True),
    ("dgx-h100", jnp.bfloat16, "tanh", False),
    ("dgx-a100", jnp.float32, "tanh", False),
    ("dgx-a100", jnp.bfloat16, "tanh", False),
    ("dgx-h100", jnp.float32, "erf", False),
    ("dgx-h100", jnp.float32, "logistic", True),
    ("dgx-h100", jnp.bfloat16, "logistic", True),
    ("dgx-a100", jnp.float32, "logistic", True),
    ("dgx-a100", jnp.bfloat16, "logistic", True),
    ("tpu-v4", jnp.float32, "logistic", False),
]


@pytest.mark.parametrize(("cluster", "dtype", "primitive", "repeated"), MEASURED)
def test_costly_ops_are_repeated_where_that_takes_less_time_than_memory(cluster, dtype, primitive, repeated):
    function = {"tanh": jnp.tanh, "erf": jax.lax.erf, "logistic": jax.nn.sigmoid}[primitive]
    graph = al.parallelize(function, batch_argnums=(0,)).trace(jax.ShapeDtypeStruct((8, 8), dtype)).step(1).step.graph
    (op,) = (op for op in graph.ops if op.primitive == primitive)
    found = is_repeatable(graph, op, instructions_per_byte=al.cluster(cluster).instructions_per_byte)
    assert found is repeated


def test_only_compilers_make_one_kernel_of_several():
    models = [ComposedCostModel(al.cluster("dgx-h100"), Backend(fusion=fusion)) for fusion in ("all", "calls", "none")]
    compiled, *libraries = (KernelModel.of(model, 8) for model in models)
    assert compiled.runs_siblings_at_once and compiled.instructions_per_byte > 10
    assert not any(each.runs_siblings_at_once or each.instructions_per_byte for each in libraries)
