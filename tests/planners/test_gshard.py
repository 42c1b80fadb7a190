"""Experts on different devices: tokens travel twice per layer and pass, weights of experts never."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.models.transformer_layers import Experts, auxiliary_loss, route
from alpa_lite.planners import GShard
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned
from tests.end_to_end.transformers import WIDE, Training, plan

MIXTURE = Training(model=replace(WIDE, experts=Experts(num_experts=8, top_k=2, group_size=128)), batch_size=64)
EXPERTS, WIDTH, INNER = 8, 16, 32


def _step(params: Any, x: Any) -> Any:
    """Two layers of experts (Lepikhin et al. 2021, algorithm 2), each token to all of them in parts."""

    def loss(p: Any) -> Any:
        h = jnp.tanh(x @ p["before"])
        for i in range(2):
            gates = jax.nn.softmax(h @ p[f"gate{i}"])
            inside = jnp.einsum("gse,gsm->egm", gates, h)
            outside = jnp.einsum(
                "egh,ehm->gem", jax.nn.relu(jnp.einsum("egm,emh->egh", inside, p[f"wi{i}"])), p[f"wo{i}"]
            )
            h = h + jnp.einsum("gse,gem->gsm", gates, outside)
        return jnp.mean(h**2)

    return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))


def _arguments() -> Any:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"before": (WIDTH, WIDTH)}
    for i in range(2):
        shapes |= {f"gate{i}": (WIDTH, EXPERTS), f"wi{i}": (EXPERTS, WIDTH, INNER), f"wo{i}": (EXPERTS, INNER, WIDTH)}
    params = {name: jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32) for name, shape in shapes.items()}
    return params, jnp.asarray(rng.normal(size=(16, 24, WIDTH)), jnp.float32)


@pytest.mark.parametrize("expert", [8, 4])
def test_two_all_to_alls_per_layer_and_pass_and_no_gathered_expert(expert: int, devices: Any) -> None:
    step = al.parallelize(_step, cluster=eager_cluster(), planner=GShard(expert=expert), num_microbatches=1)
    compiled = step.compiled(*_arguments())
    found = compiled.plan
    travelling = [u for u in found.prediction.collectives if u.kind == "all_to_all"]
    assert [u.phase for u in travelling].count("forward") == 2 * 2
    assert [u.phase for u in travelling].count("backward") == 2 * 2
    assert {u.num_devices for u in travelling} == {expert}
    assert {u.bytes for u in travelling} == {4.0 * 16 / 8 * EXPERTS * WIDTH}
    specs = found.stages[0].specs
    assert all(specs[f"params/w{n}{i}"].dims == (("expert",), (), ()) for n in "io" for i in range(2))
    # Dense weights may be updated in parts, and are gathered then.
    gathered = [u for u in found.prediction.collectives if u.kind == "all_gather"]
    assert all(u.phase == "update" and u.bytes < 4 * WIDTH * INNER for u in gathered)
    assert handed_over(compiled) == emitted(compiled) == planned(found)
    assert_same(compiled(*_arguments()), jax.jit(_step)(*_arguments()))


def _with_auxiliary_loss(capacity: int) -> Any:
    """Each token to its two best experts, which take so many of a group of 24 (algorithm 1 of the paper)."""

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            gates = jax.nn.softmax(x @ p["gate0"])
            combine = route(gates, 2, capacity)
            inside = jnp.einsum("gsec,gsm->egcm", (combine > 0).astype(x.dtype), x)
            hidden = jax.nn.relu(jnp.einsum("egcm,emh->egch", inside, p["wi0"]))
            made = jnp.einsum("gsec,egcm->gsm", combine, jnp.einsum("egch,ehm->egcm", hidden, p["wo0"]))
            auxiliary = jnp.mean(auxiliary_loss(gates))
            return jnp.mean((x + made) ** 2) + 0.1 * auxiliary, (auxiliary, (combine > 0).any(3).sum(1))

        grads, (auxiliary, taken) = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads), auxiliary, taken

    return step


@pytest.mark.parametrize("capacity", [3, 24])
def test_dropped_tokens_and_the_auxiliary_loss_are_those_of_one_device(capacity: int, devices: Any) -> None:
    params, x = _arguments()
    arguments = {name: params[name] for name in ("gate0", "wi0", "wo0")}, x
    step = _with_auxiliary_loss(capacity)
    compiled = al.parallelize(step, cluster=eager_cluster(), planner=GShard(), num_microbatches=1).compiled(*arguments)
    found = [u for u in compiled.plan.prediction.collectives if u.kind == "all_to_all"]
    assert Counter(u.phase for u in found) == {"forward": 2, "backward": 2}
    assert {u.bytes for u in found} == {4.0 * 16 / 8 * EXPERTS * capacity * WIDTH}
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    results = compiled(*arguments)
    assert_same(results, jax.jit(step)(*arguments))
    assert int(jnp.max(results[2])) <= capacity


def test_the_mixture_of_the_benchmarks_travels_once_each_way() -> None:
    found = plan(MIXTURE, GShard())
    forward = [u for u in found.prediction.collectives if u.kind == "all_to_all" and u.phase == "forward"]
    assert sum(u.count for u in forward) == 2 * WIDE.num_layers
    weights = {name: spec for name, spec in found.stages[0].specs.items() if "experts/w_up" in name}
    assert weights and all(spec.dims[1] == ("expert",) for spec in weights.values())
    inside = [u for u in found.prediction.collectives if u.phase != "update" and u.kind == "all_gather"]
    assert not inside


@pytest.mark.parametrize(
    ("training", "planner", "message"),
    [
        (Training(model=WIDE, batch_size=64), GShard(), "by experts, but the step has none"),
        (
            replace(MIXTURE, model=replace(MIXTURE.model, experts=Experts(num_experts=4, group_size=128))),
            GShard(),
            r"transformer_layers\.py:.* over 8 devices along dim 0 \(experts\), which they do not divide",
        ),
        (MIXTURE, GShard(expert=3), "3 expert devices lie within"),
    ],
    ids=["no experts", "too few", "no degree"],
)
def test_what_has_no_such_experts_is_refused(training: Training, planner: GShard, message: str) -> None:
    with pytest.raises(al.errors.PlanError, match=message):
        plan(training, planner)


def test_the_search_prices_it_where_there_are_experts() -> None:
    traced = al.parallelize(_step, cluster=eager_cluster(), num_microbatches=1, cache=False).trace(*_arguments())
    found = traced.plan().last_plan
    priced = dict([(found.name, found.prediction.step_seconds), *found.alternatives])
    (name,) = (name for name in priced if "GShard" in name)
    assert found.prediction.step_seconds <= priced[name]
