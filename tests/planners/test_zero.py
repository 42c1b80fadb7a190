"""Sharded data parallelism: what is communicated, what devices hold, and how many gathered weights live at a time."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import FSDP, DataParallel, Hybrid, Zero
from cost_models.cluster import Cluster
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned

NUM_LAYERS, WIDTH = 6, 64
WEIGHT = 4 * WIDTH * WIDTH


def _layers(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        h = x
        for w in ws:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), value


def _scanned(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(ws)
    return ws - 0.1 * grads, value


def _arguments(step: Any) -> Any:
    rng = np.random.default_rng(0)
    ws = jnp.asarray(rng.normal(size=(NUM_LAYERS, WIDTH, WIDTH)) / 8, jnp.float32)
    return ws if step is _scanned else list(ws), jnp.asarray(rng.normal(size=(64, WIDTH)), jnp.float32)


def _compiled(step: Any, planner: Any, cluster: Cluster | None = None, **options: Any) -> Any:
    cluster = cluster or eager_cluster()
    return al.parallelize(step, cluster=cluster, planner=planner, **options).compiled(*_arguments(step))


def _two_hosts() -> Cluster:
    """The same eight devices, four on each of two hosts."""
    cluster = eager_cluster()
    return dataclasses.replace(cluster, num_hosts=2, devices_per_host=4, inter_host=cluster.intra_host)


def _gathered_at_once(text: str) -> dict[str, int]:
    """Of each computation of a scheduled program the most bytes of gathered arrays that live at a time.

    An array lives from its gather to the last line that reads it or a copy of it in another order.
    """
    found: dict[str, int] = {}
    for block in re.split(r"\n(?=\S)", text):
        lines = block.splitlines()
        sizes, ends, of = dict[str, int](), dict[str, int](), dict[str, str]()
        starts = dict[str, int]()
        for i, line in enumerate(lines[1:]):
            match = re.match(r"\s*(?:ROOT )?%(\S+) = (\S+?)(?:\{[\d,]*\})? ([\w\-]+)\((.*)", line)
            if match is None:
                continue
            name, shape, opcode, rest = match.groups()
            read = {of[o] for o in re.findall(r"%([\w.\-]+)", rest.split("), ")[0]) if o in of}
            ends.update(dict.fromkeys(read, i))
            if opcode == "all-gather":
                sizes[name] = 4 * prod(int(n) for n in re.findall(r"\d+", shape.split("[")[1]))
                starts[name], of[name] = i, name
            elif len(read) == 1 and (opcode in ("bitcast", "copy", "transpose") or "copy" in name):
                of[name] = read.pop()
        times = range(len(lines))
        live = [sum(n for name, n in sizes.items() if starts[name] <= t <= ends.get(name, 0)) for t in times]
        found[lines[0]] = max(live, default=0)
    return found


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("step", [_layers, _scanned])
def test_no_more_than_two_units_are_gathered_at_a_time(step: Any, num_microbatches: int, devices: Any) -> None:
    compiled = _compiled(step, FSDP(), num_microbatches=num_microbatches)
    texts = [executable.compiled.as_text() for executable in compiled.executor.executables]
    peak = max(size for text in texts for size in _gathered_at_once(text).values())
    assert WEIGHT <= peak <= 2 * WEIGHT
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*_arguments(step)), jax.jit(step)(*_arguments(step)))


@pytest.mark.parametrize(("step", "first"), [(_layers, 1), (_scanned, 0)])
def test_each_layer_is_gathered_in_both_passes_and_its_gradient_scattered(step: Any, first: int) -> None:
    """3 Ψ elements in all (Rajbhandari et al. 2020, section 7.2.2); whose input needs no gradient is gathered once."""
    plan = al.plan(step, *_arguments(step), cluster=eager_cluster(), planner=FSDP(), num_microbatches=1)
    assert planned(plan) == {
        ("all_gather", WEIGHT, 8): 2 * NUM_LAYERS - first,
        ("reduce_scatter", WEIGHT, 8): NUM_LAYERS,
        ("all_reduce", 4, 8): 1,
    }
    assert plan.stages[0].cost.state_bytes == NUM_LAYERS * WEIGHT / 8


def test_the_memory_model_counts_one_unit_beside_the_parts() -> None:
    """What a device holds beyond activations does not grow with the number of layers, but for its parts."""
    peaks = []
    for num_layers in (4, 8, 12):
        ws, x = _arguments(_layers)
        ws = [ws[0]] * num_layers
        plan = al.plan(_layers, ws, x, cluster=eager_cluster(), planner=FSDP(), num_microbatches=1)
        peaks.append(plan.prediction.peak_bytes[0])
    # Of a layer: its output, and the gradient of it, which waits until that of the weight is made after the backward
    # pass; its weight and gradient.
    activations, parts = 2 * 4 * 8 * WIDTH, 2 * WEIGHT / 8
    grown = np.diff(peaks) / 4
    assert all(grown <= activations + parts) and all(grown < WEIGHT)


@pytest.mark.parametrize("step", [_layers, _scanned])
def test_hybrid_sharding_gathers_within_hosts_and_sums_parts_across(step: Any, devices: Any) -> None:
    compiled = _compiled(step, FSDP(hybrid=True), cluster=_two_hosts(), num_microbatches=1)
    plan = compiled.plan
    assert plan.stages[0].mesh_shape.axis_sizes == {"replica": 2, "data": 4}
    # The devices of a replica are those of a host: groups of four neighbours gather.
    text = "".join(executable.compiled.as_text() for executable in compiled.executor.executables)
    found = re.findall(r" (all-gather|reduce-scatter)\(.*?replica_groups=(\{\S+|mesh\[.*?\}), ", text)
    listed, by_axes = "{{0,1,2,3},{4,5,6,7}}", "mesh['replica'=2,'data'=4] {'data'}"  # until JAX 0.11, and since
    assert {kind for kind, _ in found} == {"all-gather", "reduce-scatter"}
    assert {groups for _, groups in found} in ({listed}, {by_axes})
    uses = plan.prediction.collectives
    across = Counter((u.kind, u.bytes) for u in uses for _ in range(round(u.count)) if u.axis == "replica")
    inside = Counter((u.kind, u.bytes) for u in uses for _ in range(round(u.count)) if u.axis == "data")
    # What crosses hosts is a part: it was scattered inside before.
    assert across == {("all_reduce", WEIGHT / 4): NUM_LAYERS, ("all_reduce", 4): 1}
    assert inside["reduce_scatter", WEIGHT] == NUM_LAYERS
    assert plan.stages[0].cost.state_bytes == NUM_LAYERS * WEIGHT / 4
    assert handed_over(compiled) == emitted(compiled) == planned(plan)
    assert_same(compiled(*_arguments(step)), jax.jit(step)(*_arguments(step)))


@pytest.mark.parametrize(("step", "num_microbatches"), [(_layers, 1), (_layers, 2), (_scanned, 1), (_scanned, 2)])
@pytest.mark.parametrize("replicas", [None, 2])
def test_parameters_that_stay_gathered_are_gathered_once(
    step: Any, num_microbatches: int, replicas: int | None, devices: Any
) -> None:
    """2 Ψ elements in all; what a device holds grows by whole weights."""
    planner = FSDP(reshard_after_forward=False, replicas=replicas)
    compiled = _compiled(step, planner, num_microbatches=num_microbatches)
    plan, ways = compiled.plan, 8 // (replicas or 1)
    unit = NUM_LAYERS if step is _scanned else 1
    gathers = {use: n for use, n in planned(plan).items() if use[0] == "all_gather"}
    scatters = {use: n for use, n in planned(plan).items() if use[0] == "reduce_scatter"}
    assert gathers == {("all_gather", unit * WEIGHT, ways): num_microbatches * NUM_LAYERS // unit}
    assert sum(size * n for (_, size, _), n in scatters.items()) == num_microbatches * NUM_LAYERS * WEIGHT
    assert plan.stages[0].cost.state_bytes == NUM_LAYERS * WEIGHT / ways
    assert handed_over(compiled) == emitted(compiled) == planned(plan)
    texts = [executable.compiled.as_text() for executable in compiled.executor.executables]
    assert max(size for text in texts for size in _gathered_at_once(text).values()) >= (NUM_LAYERS - 1) * WEIGHT
    assert_same(compiled(*_arguments(step)), jax.jit(step)(*_arguments(step)))
    assert al.Plan.from_json(plan.to_json()) == plan and "kept gathered" in plan.name


def _convolutions(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        h = x.reshape(-1, 8, 8, 1) * jnp.ones(16)
        for w in ws:
            h = jnp.tanh(jax.lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


def _checkpointed(ws: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        h = x
        for w in ws:
            h = jax.checkpoint(lambda h, w: jnp.tanh(h @ w))(h, w)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))


@pytest.mark.parametrize(("step", "shape"), [(_convolutions, (3, 3, 16, 16)), (_checkpointed, (WIDTH, WIDTH))])
def test_what_the_backward_pass_makes_of_parameters_is_made_of_the_gathered_ones(
    step: Any, shape: tuple[int, ...], devices: Any
) -> None:
    """Turned kernels of convolutions; and what `jax.checkpoint` hands to what is computed again."""
    rng = np.random.default_rng(0)
    arguments = [jnp.asarray(rng.normal(size=shape) / 8, jnp.float32) for _ in range(3)], _arguments(_layers)[1]
    options = dict(cluster=eager_cluster(), num_microbatches=1)
    compiled = al.parallelize(step, planner=FSDP(reshard_after_forward=False), **options).compiled(*arguments)
    weight = ("all_gather", 4 * prod(shape), 8)
    assert planned(compiled.plan)[weight] == 3
    assert planned(al.plan(step, *arguments, planner=FSDP(), **options))[weight] > 3
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*arguments), jax.jit(step)(*arguments))


@pytest.mark.parametrize(("step", "waiting"), [(_layers, 4 * 8 * WIDTH), (_scanned, 0)])
def test_the_memory_of_parameters_that_stay_gathered(step: Any, waiting: int) -> None:
    """Per layer its whole weight, beside activations, its part and that of its gradient.

    Gradients of the outputs of written-out layers wait for those of the weights, when the whole weights are gone.
    """
    peaks = dict[bool, list[float]]()
    for again in (False, True):
        for num_layers in (4, 8, 12):
            ws, x = _arguments(step)
            ws = jnp.concatenate([ws, ws])[:num_layers] if step is _scanned else [ws[0]] * num_layers
            planner = FSDP(reshard_after_forward=again)
            plan = al.plan(step, ws, x, cluster=eager_cluster(), planner=planner, num_microbatches=1)
            peaks.setdefault(again, []).append(plan.prediction.peak_bytes[0])
    more = np.diff(peaks[False]) / 4 - np.diff(peaks[True]) / 4
    np.testing.assert_allclose(more, WEIGHT - waiting, rtol=0.01)


def test_what_is_not_split_cannot_stay_gathered() -> None:
    for planner in (
        Hybrid(zero=1, reshard_after_forward=False),
        Hybrid(zero=3, pipeline=2, reshard_after_forward=False),
    ):
        with pytest.raises(al.errors.PlanError, match="keeps parameters gathered that zero=3 splits, on one stage"):
            al.plan(_layers, *_arguments(_layers), cluster=eager_cluster(), planner=planner)


def test_five_steps_lose_as_data_parallelism_does(devices: Any) -> None:
    losses, kept = [], FSDP(reshard_after_forward=False)
    for planner in (DataParallel(), FSDP(), FSDP(replicas=2), kept, Zero(stage=1), Zero(stage=2)):
        step = al.parallelize(_layers, cluster=eager_cluster(), planner=planner, num_microbatches=1)
        ws, x = _arguments(_layers)
        losses.append([])
        for _ in range(5):
            ws, loss = step(ws, x)
            losses[-1].append(float(loss))
    assert np.diff(losses[0]).max() < 0
    np.testing.assert_allclose(losses, [losses[0]] * 6, rtol=1e-5)


def _adam(state: Any, x: Any) -> Any:
    """Ψ = 6 · 64² parameters with two moments each, as single precision keeps them: 12 Ψ bytes."""
    ws, mean, square = state

    def loss(ws: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    grads = jax.grad(loss)(ws)
    mean, square = 0.9 * mean + 0.1 * grads, 0.99 * square + 0.01 * grads**2
    return ws - 0.01 * mean / (jnp.sqrt(square) + 1e-4), mean, square


@pytest.mark.parametrize(
    ("planner", "held", "sent"),
    [
        (DataParallel(), 3, 2),
        (Zero(stage=1), 1 + 2 / 8, 2),
        (Zero(stage=2), 1 + 2 / 8, 2),
        (Zero(stage=3), 3 / 8, 3),
        (FSDP(replicas=2), 3 / 4, None),
        (FSDP(reshard_after_forward=False), 3 / 8, 2),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_what_devices_hold_and_send(planner: Any, held: float, sent: float | None, devices: Any) -> None:
    """Of Ψ elements (Rajbhandari et al. 2020, sections 5 and 7), and ten steps that are those of one device."""
    ws, x = _arguments(_scanned)
    state = ws, 0 * ws, 0 * ws
    compiled = al.parallelize(_adam, cluster=eager_cluster(), planner=planner, num_microbatches=1).compiled(state, x)
    elements = NUM_LAYERS * WIDTH**2
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    moved = sum(rounds[kind] * size * n for (kind, size, _), n in planned(compiled.plan).items() if size > 4)
    assert sent is None or moved == 4 * sent * elements
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert compiled.plan.stages[0].cost.state_bytes == 4 * held * elements
    alone, step = state, jax.jit(_adam)
    for _ in range(10):
        state, alone = compiled(state, x), step(alone, x)
    for device in devices:
        shards = [s for leaf in jax.tree.leaves(state) for s in leaf.addressable_shards if s.device == device]
        assert sum(shard.data.nbytes for shard in shards) == 4 * held * elements
    assert_same(state, alone)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FSDP(hybrid=True, replicas=2), "replicas=2 was given"),
        (lambda: Zero(stage=4), "stages 1, 2 and 3"),
    ],
)
def test_options_that_contradict_are_refused(make: Any, message: str) -> None:
    with pytest.raises(al.errors.PlanError, match=message):
        make()


def test_replicas_that_do_not_divide_are_refused() -> None:
    with pytest.raises(al.errors.PlanError, match="3 replicas"):
        al.plan(_layers, *_arguments(_layers), cluster=eager_cluster(), planner=FSDP(replicas=3), num_microbatches=1)
