"""What is planned is what runs: XLA gets the collectives of the plan, by kind, bytes, devices and number.

The program of every task is read twice, as it is handed to XLA and as XLA compiled it. A combined collective counts as
its parts, and each counts as often as its task runs per step.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from tests.end_to_end.cases import MODELS, PLANNERS, Training, assert_same, eager_cluster, make_batch
from tests.end_to_end.collectives import collectives_in, emitted, handed_over, planned


@cache
def _compile(
    model: str, planner: str, num_microbatches: int, optimizer: str, memory_bandwidth: float | None = None
) -> Any:
    cluster = eager_cluster()
    if memory_bandwidth:
        cluster = replace(cluster, device=replace(cluster.device, memory_bandwidth=memory_bandwidth))
    training = Training(model=model, optimizer=optimizer)
    step = al.parallelize(
        training.step(), cluster=cluster, planner=PLANNERS[planner], num_microbatches=num_microbatches
    )
    return step.compiled(training.start(), make_batch(MODELS[model], 0), jax.random.key(0))


CASES = [
    ("gpt_scan", "fsdp", 1),
    ("gpt_scan", "megatron", 1),
    *[("mlp", planner, 4) for planner in PLANNERS],
    *[("mlp", planner, 1) for planner in ("fsdp", "megatron", "hybrid")],
    ("gpt", "megatron", 1),
    ("gpt", "fsdp", 4),
]
SLOW = [("cnn", "auto", 4), ("gpt", "data_parallel", 4), ("gpt", "zero_2", 1), ("gpt", "hybrid", 4)]


@pytest.mark.parametrize(
    ("model", "planner", "num_microbatches"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in SLOW)]
)
def test_the_collectives_that_run_are_those_of_the_plan(
    model: str, planner: str, num_microbatches: int, devices: Any
) -> None:
    compiled = _compile(model, planner, num_microbatches, "momentum+clip")
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)


@pytest.mark.parametrize(("memory_bandwidth", "at_least", "at_most"), [(1e12, 8, 8), (1e8, 9, 4 * 8)])
def test_zero_reduces_gradients_by_reduce_scatter_once_per_step_unless_adding_takes_longer(
    memory_bandwidth: float, at_least: int, at_most: int, devices: Any
) -> None:
    compiled = _compile("mlp", "zero_2", 4, "momentum+clip", memory_bandwidth)
    found = emitted(compiled)
    # Of 8 parameters. Where memory is slow and links are fast, parts of gradients are added, and not whole ones.
    assert at_least <= sum(n for (kind, _, _), n in found.items() if kind == "reduce_scatter") <= at_most
    # The loss, and the square of all gradients' norm.
    assert {c: n for c, n in found.items() if c[0] == "all_reduce"} == {("all_reduce", 4, 8): 2}


def test_data_parallel_gradients_are_reduced_once_per_step_not_per_micro_batch(devices: Any) -> None:
    once, often = (emitted(_compile("mlp", "data_parallel", m, "momentum+clip")) for m in (1, 4))
    assert once == often and {kind for kind, _, _ in once} == {"all_reduce"}


def test_parameters_split_by_fsdp_are_gathered_in_both_passes(devices: Any) -> None:
    plan = planned(_compile("mlp", "fsdp", 4, "momentum+clip").plan)
    gathered = sum(number for (kind, _, _), number in plan.items() if kind == "all_gather")
    assert gathered > 4 * len(jax.tree.leaves(Training(model="mlp").start().params))


def test_the_text_of_hlo_is_read_right() -> None:
    text = """
HloModule m

%inner (p: f32[8]) -> f32[8] {
  %x = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}

%goes_on (p: f32[8]) -> pred[] {
  %limit = s32[] constant(6)
}

%side (p: f32[8]) -> f32[8] {
  %s = f32[8]{0} collective-permute(%p), channel_id=2, source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %a = f32[128,64]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %b = (f32[8]{0}, /*index=1*/bf16[4,4]{1,0}) all-reduce-start(%p, %q), replica_groups=[2,4]<=[8]T(1,0)
  %c = f32[16]{0} reduce-scatter(%p), replica_groups=[1,8]<=[8], dimensions={0}
  %d = f32[16]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
  %e = (s32[2]{0}, s32[2]{0}) all-to-all(%p, %q), replica_groups={{0,1}}
  %f = f32[8]{0} add(%all-reduce.1, %p)
  %g = f32[8]{0} while(%f), condition=%goes_on, body=%inner
  %h = f32[8]{0} while(%f), condition=%goes_on, body=%side, backend_config={"known_trip_count":{"n":"10"}}
  ROOT %i = f32[8]{0} conditional(%n, %g, %h), branch_computations={%inner, %side}
}
"""
    assert collectives_in(text) == {
        ("all_reduce", 128 * 64 * 4, 4): 1,
        ("all_reduce", 32, 4): 2,
        ("reduce_scatter", 16 * 4 * 8, 8): 1,
        ("all_gather", 64, 2): 1,
        ("all_to_all", 16, 2): 1,
        ("all_reduce", 32, 2): 6.5,
        ("permute", 32, 0): 10.5,
    }


def _of_every_reduction(x: Any) -> Any:
    """Each row is reduced over its columns in every way that has a combination of its own."""
    whole = (x * 8).astype(jnp.int32)
    return (
        x.max(1) + x.min(1) + x.prod(1),
        x.astype(jnp.bfloat16).max(1),
        (x > 0.9).any(1) & (x > 0).all(1),
        jnp.bitwise_or.reduce(whole, axis=1),
        whole.max(1),
    )


@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 2, "y": 4}], ids=str)
def test_parts_of_every_reduction_are_combined_as_planned(axes: dict[str, int], devices: Any) -> None:
    # Two rows cannot be split over eight devices, columns can.
    x = np.random.default_rng(0).normal(size=(1, 4096)).astype(np.float32)
    step = al.parallelize(
        _of_every_reduction, cluster=eager_cluster(), planner=al.planners.OnMesh(axes=axes), num_microbatches=1
    )
    compiled = step.compiled(x)
    plan = planned(compiled.plan)
    assert {"all_reduce", "all_gather"} <= {kind for kind, _, _ in plan}
    assert handed_over(compiled) == plan
    assert_same(step(x), jax.jit(_of_every_reduction)(x))


def test_tables_that_every_device_can_make_are_not_gathered_inside_a_loop(devices: Any) -> None:
    def step(weights: Any, x: Any) -> Any:
        angles = jnp.cos(jnp.arange(24.0)[:, None] * jnp.arange(40.0))

        def loss(w: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda h, layer: (jnp.tanh((h * angles) @ layer), None), x, w)[0] ** 2)

        return weights - jax.grad(loss)(weights)

    rng = np.random.default_rng(0)
    arguments = [rng.normal(size=shape).astype(np.float32) for shape in ((3, 40, 40), (16, 24, 40))]
    options = dict(cluster=eager_cluster(), planner=PLANNERS["fsdp"], num_microbatches=1)
    plan = al.plan(step, *arguments, **options)
    gathered = [use for use in plan.prediction.collectives if use.kind == "all_gather"]
    assert {use.bytes for use in gathered} == {4.0 * 40 * 40}, "weights alone, layer by layer"


def _accumulating(weights: Any, x: Any) -> Any:
    """Gradients and loss summed over four parts of each sample; then one step."""

    def add(total: Any, part: Any) -> Any:
        loss, grads = total
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(part @ w) ** 2))(weights)
        return (loss + value, grads + (jnp.zeros_like(grad) + grad)), value

    start = (0.0, jnp.zeros_like(weights))
    (loss, grads), each = jax.lax.scan(add, start, x.transpose(1, 0, 2))
    return weights - grads / 4, (loss / 4, each)


@pytest.mark.parametrize(("planner", "num_microbatches"), [("data_parallel", 1), ("data_parallel", 2), ("zero_2", 1)])
def test_what_a_loop_accumulates_is_reduced_once_after_it(planner: str, num_microbatches: int, devices: Any) -> None:
    rng = np.random.default_rng(0)
    arguments = [rng.normal(size=shape).astype(np.float32) for shape in ((24, 24), (16, 4, 24))]
    step = al.parallelize(
        _accumulating,
        cluster=eager_cluster(),
        planner=PLANNERS[planner],
        num_microbatches=num_microbatches,
        batch_argnums=1,
    )
    compiled = step.compiled(*arguments)
    plan = planned(compiled.plan)
    assert handed_over(compiled) == plan
    # Each part's loss is handed out as it is; the gradient of 24 × 24 numbers and the sum of losses wait.
    reduced = {c: n for c, n in plan.items() if c[0] in ("all_reduce", "reduce_scatter")}
    assert sum(n for (_, size, _), n in reduced.items() if size == 4 * 24 * 24) == 1
    assert sum(n for (_, size, _), n in reduced.items() if size == 4) <= 4 * num_microbatches + 1
    assert_same(step(*arguments), jax.jit(_accumulating)(*arguments))


def test_numbers_of_the_program_are_added_once_to_what_a_loop_accumulates(devices: Any) -> None:
    """Every device can make them: of a partial sum over the batch they are the addend of one device."""

    def step(start: Any, x: Any) -> Any:
        ones = jnp.ones((8, 8))

        def add(total: Any, row: Any) -> Any:
            sums = (total[0] + row.T @ row, total[1] + row.T @ jnp.sin(row))  # each sum of its own may wait
            return (*sums, total[2] + ones, total[3] + 1.0), None

        return start, jax.lax.scan(add, (start, ones, jnp.zeros((8, 8)), 0.0), x.transpose(1, 0, 2))[0]

    rng = np.random.default_rng(0)
    arguments = [rng.normal(size=shape).astype(np.float32) for shape in ((8, 8), (16, 3, 8))]
    options = dict(cluster=eager_cluster(), num_microbatches=1, batch_argnums=1)
    for planner in (PLANNERS["data_parallel"], al.planners.OnMesh(axes={"x": 8})):
        assert_same(al.parallelize(step, planner=planner, **options)(*arguments), jax.jit(step)(*arguments))


def test_a_weight_that_all_trips_of_a_loop_read_is_gathered_once_for_each_pass(devices: Any) -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, row: (jnp.tanh(row + h @ w), None), x[:, 0], x.transpose(1, 0, 2))
            return jnp.mean(h**2)

        return weights - jax.grad(loss)(weights)

    rng = np.random.default_rng(0)
    arguments = [rng.normal(size=shape).astype(np.float32) for shape in ((40, 40), (16, 7, 40))]
    options = dict(cluster=eager_cluster(), planner=PLANNERS["fsdp"], num_microbatches=1)
    compiled = al.parallelize(step, **options).compiled(*arguments)
    plan = planned(compiled.plan)
    assert plan["all_gather", 4 * 40 * 40, 8] <= 2
    assert handed_over(compiled) == emitted(compiled) == plan
    assert_same(al.parallelize(step, **options)(*arguments), jax.jit(step)(*arguments))


def _tied(weights: Any, tokens: Any, targets: Any) -> Any:
    """One table looks tokens up and scores them; its two gradients come transposed to each other."""

    def loss(w: Any) -> Any:
        scores = jnp.tanh(jax.nn.one_hot(tokens, w.shape[0]) @ w) @ w.T
        return -jnp.mean(jnp.sum(jax.nn.one_hot(targets, w.shape[0]) * jax.nn.log_softmax(scores), -1))

    return weights - jax.grad(loss)(weights)


@pytest.mark.parametrize(
    ("planner", "num_microbatches"), [("data_parallel", 1), ("data_parallel", 2), ("zero_2", 2), ("hybrid", 2)]
)
def test_gradients_of_both_uses_of_a_weight_are_reduced_together(
    planner: str, num_microbatches: int, devices: Any
) -> None:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(48, 8)).astype(np.float32)
    arguments = [weights, *(rng.integers(0, 48, (16, 5)) for _ in range(2))]
    options = dict(cluster=eager_cluster(), planner=PLANNERS[planner], num_microbatches=num_microbatches)
    step = al.parallelize(_tied, **options)
    compiled = step.compiled(*arguments)
    plan = planned(compiled.plan)
    assert handed_over(compiled) == plan
    if planner == "data_parallel":
        assert plan == {("all_reduce", 4 * 48 * 8, 8): 1}
    assert_same(step(*arguments), jax.jit(_tied)(*arguments))


def _experts(params: Any, x: Any) -> Any:
    """Each token goes to all experts in parts of its own; a dense layer before and after."""

    def loss(p: Any) -> Any:
        h = jnp.tanh(x @ p["before"])
        inside = jnp.einsum("gse,gsm->egm", jax.nn.softmax(h @ p["gate"]), h)
        outside = jnp.einsum("egh,ehm->gem", jax.nn.relu(jnp.einsum("egm,emh->egh", inside, p["wi"])), p["wo"])
        return jnp.mean((jnp.einsum("gse,gem->gsm", jax.nn.softmax(h @ p["gate"]), outside) @ p["after"]) ** 2)

    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


@pytest.mark.parametrize("axes", [{"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}], ids=str)
def test_tokens_travel_to_experts_on_any_mesh(axes: dict[str, int], devices: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = {"before": (16, 16), "gate": (16, 8), "wi": (8, 16, 256), "wo": (8, 256, 16), "after": (16, 16)}
    params = {name: rng.normal(size=shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}
    x = rng.normal(size=(16, 24, 16)).astype(np.float32)
    options = dict(cluster=eager_cluster(), planner=al.planners.OnMesh(axes=axes), num_microbatches=1)
    step = al.parallelize(_experts, **options)
    compiled = step.compiled(params, x)
    assert handed_over(compiled) == planned(compiled.plan)
    assert_same(step(params, x), jax.jit(_experts)(params, x))
    if len(axes) == 1:
        # Four contractions read what arrives; it is sent once per direction and pass.
        kinds = [use.kind for use in compiled.plan.prediction.collectives]
        assert kinds.count("all_to_all") == 4
