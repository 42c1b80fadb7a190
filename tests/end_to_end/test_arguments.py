"""Whatever `jax.jit` takes as arguments and gives back, `parallelize` takes and gives back."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa_lite as al
from tests.end_to_end.cases import PLANNERS, assert_same, eager_cluster, run_both
from tests.end_to_end.programs import LABELS, PARAMS, X, Y, descend, forward, squared

QUICK = ["hybrid", "fsdp"]


def _parallel(fun: Any, **options: Any) -> Any:
    return al.parallelize(
        fun, **{"cluster": eager_cluster(), "planner": PLANNERS["hybrid"], "num_microbatches": 4, **options}
    )


# --- how arguments are passed -----------------------------------------------------------------------------------------


def _keyword_step(p: Any, *, batch: Any, rate: float = 0.1) -> Any:
    loss, grads = jax.value_and_grad(squared)(p, batch["x"], batch["y"])
    return descend(p, grads, rate), loss


def test_the_batch_may_be_a_keyword(devices: Any) -> None:
    batch = {"x": X, "y": Y}
    got = _parallel(_keyword_step)(PARAMS, batch=batch)
    assert_same(got, jax.jit(_keyword_step)(PARAMS, batch=batch))


def test_keywords_may_come_in_any_order_and_change(devices: Any) -> None:
    step, want = _parallel(_keyword_step, batch_argnums="batch"), jax.jit(_keyword_step)
    for rate in (0.1, 0.3):
        got = step(PARAMS, rate=rate, batch={"y": Y, "x": X})
        assert_same(got, want(PARAMS, batch={"x": X, "y": Y}, rate=rate))
    assert len(step._compiled) == 1


@pytest.mark.parametrize("planner", QUICK)
def test_python_scalars_are_traced_and_weakly_typed(planner: str, devices: Any) -> None:
    def step(p: Any, x: Any, y: Any, rate: float, count: int, flip: bool) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        half = descend(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), grads, 1.0)["w1"] * rate
        return descend(p, grads, rate), loss, count + 1, jnp.where(flip, -loss, loss), half

    args = (PARAMS, X, Y, 0.25, 7, True)
    got, want = run_both(step, args, planner=PLANNERS[planner])
    assert_same(got, want)


def test_static_arguments_are_left_alone_and_compile_anew(devices: Any) -> None:
    def step(p: Any, kind: str, x: Any, y: Any, depth: int) -> Any:
        act = {"tanh": jnp.tanh, "sin": jnp.sin}[kind]

        def loss(p: Any) -> Any:
            h = x @ p["w1"]
            for _ in range(depth):
                h = act(h @ p["w2"])
            return jnp.mean((h @ p["w3"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(p)
        return descend(p, grads), value

    parallel, want = _parallel(step, static_argnums=(1, -1)), jax.jit(step, static_argnums=(1, 4))
    for kind, depth in (("tanh", 1), ("sin", 1), ("sin", 2), ("sin", 1)):
        assert_same(parallel(PARAMS, kind, X, Y, depth), want(PARAMS, kind, X, Y, depth))
    assert len(parallel._compiled) == 3


def test_a_second_batch_size_compiles_anew(devices: Any) -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        return descend(p, grads), loss

    parallel = _parallel(step)
    for size in (16, 8, 16):
        assert_same(parallel(PARAMS, X[:size], Y[:size]), jax.jit(step)(PARAMS, X[:size], Y[:size]))
    assert len(parallel._compiled) == 2


def test_none_leaves_stay_none(devices: Any) -> None:
    def step(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(state["params"], batch["x"], batch["y"])
        return {"params": descend(state["params"], grads), "ema": None}, {"loss": loss, "mask": batch["mask"]}

    args = {"params": PARAMS, "ema": None}, {"x": X, "y": Y, "mask": None}
    got, want = run_both(step, args, num_microbatches=4)
    assert_same(got, want)
    assert got[0]["ema"] is None and got[1]["mask"] is None


def test_numpy_arrays_and_sharded_arrays_are_equally_good(devices: Any) -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        return descend(p, grads), loss

    parallel = _parallel(step)
    want = jax.jit(step)(PARAMS, X, Y)
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    sharded = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d")))
    assert_same(parallel(PARAMS, X, Y), want)
    assert_same(parallel(jax.tree.map(jnp.asarray, PARAMS), sharded, jnp.asarray(Y)), want)


def test_metrics_of_has_aux_come_back_whole(devices: Any) -> None:
    def step(p: Any, x: Any, labels: Any) -> Any:
        def loss(p: Any) -> Any:
            logits = forward(p, x)
            losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]
            hits = jnp.argmax(logits, 1) == labels
            return losses.mean(), {"accuracy": hits.mean(), "hits": hits.sum(), "losses": losses, "hit": hits}

        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return descend(p, grads), {"loss": value, **metrics}

    got, want = run_both(step, (PARAMS, X, LABELS), num_microbatches=4)
    assert_same(got, want)


# --- pytrees ----------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
    params: Any
    count: Any
    name: str = dataclasses.field(default="net", metadata={"static": True})


@jax.tree_util.register_pytree_node_class
class _Box:
    def __init__(self, inner: Any, label: str) -> None:
        self.inner, self.label = inner, label

    def tree_flatten(self) -> Any:
        return (self.inner,), self.label

    @classmethod
    def tree_unflatten(cls, label: str, children: Any) -> _Box:
        return cls(children[0], label)


@pytest.mark.parametrize("planner", QUICK)
def test_dataclasses_named_tuples_and_own_pytrees(planner: str, devices: Any) -> None:
    def step(state: _State, box: _Box) -> Any:
        loss, grads = jax.value_and_grad(squared)(state.params, box.inner.x, box.inner.y)
        new = dataclasses.replace(state, params=descend(state.params, grads), count=state.count + 1)
        return new, _Box(_Pair(loss, loss * 2), "out")

    args = _State(params=PARAMS, count=np.int32(0)), _Box(_Pair(X, Y), "in")
    got, want = run_both(step, args, planner=PLANNERS[planner])
    assert_same(got, want)
    assert isinstance(got[0], _State) and got[0].name == "net"
    assert isinstance(got[1].inner, _Pair) and got[1].label == "out"


# --- keys and dropout -------------------------------------------------------------------------------------------------

KEYS = {"typed": jax.random.key(7), "raw": jax.random.PRNGKey(7), "rbg": jax.random.key(7, impl="rbg")}


@pytest.mark.parametrize(
    ("kind", "planner", "num_microbatches"),
    [
        *[("typed", planner, 1) for planner in ("hybrid", "fsdp", "megatron", "pipeline_4", "auto")],
        *[("typed", planner, 4) for planner in ("hybrid", "megatron", "pipeline_4", "auto")],
        *[(kind, "hybrid", m) for kind in ("raw", "rbg") for m in (1, 4)],
    ],
)
def test_dropout_masks_are_those_of_one_device_bit_by_bit(
    kind: str, planner: str, num_microbatches: int, devices: Any
) -> None:
    def step(p: Any, x: Any, y: Any, key: Any) -> Any:
        first, second, after = jax.random.split(key, 3)

        def loss(p: Any) -> Any:
            masks = [jax.random.bernoulli(first, 0.7, (x.shape[0], 16)), jax.random.bernoulli(second, 0.5, (16,))]
            h = jnp.tanh(jnp.tanh(x @ p["w1"]) * masks[0] @ p["w2"]) * masks[1]
            noise = jax.random.normal(first, (x.shape[0], 4), jnp.float32)
            return jnp.mean((h @ p["w3"] + 0.1 * noise - y) ** 2), (masks, noise)

        (value, drawn), grads = jax.value_and_grad(loss, has_aux=True)(p)
        return descend(p, grads), value, drawn, after

    got, want = run_both(step, (PARAMS, X, Y, KEYS[kind]), planner=PLANNERS[planner], num_microbatches=num_microbatches)
    assert_same(got, want)
    for a, b in zip(jax.tree.leaves(got[2][0]), jax.tree.leaves(want[2][0]), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    # The normal draws are a function of the bits; they agree to the last place of that function.
    assert np.allclose(got[2][1], want[2][1], rtol=0, atol=1e-6)


def test_keys_inside_the_state_go_from_step_to_step(devices: Any) -> None:
    def step(state: Any, x: Any, y: Any) -> Any:
        key, now = jax.random.split(state["key"])
        loss, grads = jax.value_and_grad(squared)(state["p"], x + jax.random.normal(now, x.shape), y)
        return {"p": descend(state["p"], grads), "key": key}, loss

    parallel, single = _parallel(step), jax.jit(step)
    got = want = {"p": PARAMS, "key": jax.random.key(0)}
    for _ in range(3):
        (got, a), (want, b) = parallel(got, X, Y), single(want, X, Y)
        assert_same((got, a), (want, b))


# --- donation ---------------------------------------------------------------------------------------------------------


def _sgd_step(p: Any, x: Any, y: Any) -> Any:
    loss, grads = jax.value_and_grad(squared)(p, x, y)
    return descend(p, grads), loss


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("planner", ["hybrid", "megatron", "pipeline_2"])
def test_donated_state_is_given_away_once_it_lives_in_its_place(
    planner: str, num_microbatches: int, devices: Any
) -> None:
    step = _parallel(_sgd_step, planner=PLANNERS[planner], num_microbatches=num_microbatches, donate_argnums=0)
    single = jax.jit(_sgd_step)
    placed, _ = step(jax.tree.map(jnp.asarray, PARAMS), X, Y)
    moved, _ = step(placed, X, Y)
    want = single(single(PARAMS, X, Y)[0], X, Y)[0]
    assert_same(moved, want)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(placed))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(moved))


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("planner", ["hybrid", "fsdp", "pipeline_4", "auto"])
def test_what_is_not_donated_survives(planner: str, num_microbatches: int, devices: Any) -> None:
    if planner == "fsdp":
        num_microbatches = 1
    step = _parallel(_sgd_step, planner=PLANNERS[planner], num_microbatches=num_microbatches)
    start = step.compiled(PARAMS, X, Y).place(PARAMS, X, Y)
    before = jax.tree.map(np.array, start)
    first, again = step(*start), step(*start)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(start))
    for a, b in zip(jax.tree.leaves(start), jax.tree.leaves(before), strict=True):
        assert np.array_equal(np.asarray(a), b)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


def test_only_the_donated_argument_is_given_away(devices: Any) -> None:
    def step(p: Any, other: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        return descend(p, grads), descend(other, grads), loss

    parallel = _parallel(step, donate_argnums=(1,), batch_argnums=(2, 3))
    p, other, _ = parallel(PARAMS, jax.tree.map(np.copy, PARAMS), X, Y)
    kept = jax.tree.map(np.array, p)
    parallel(p, other, X, Y)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(other))
    for a, b in zip(jax.tree.leaves(p), jax.tree.leaves(kept), strict=True):
        assert np.array_equal(np.asarray(a), b)


def test_a_donated_array_that_is_returned_unchanged_stays_valid(devices: Any) -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(squared)(p, x, y)
        return {**descend(p, grads), "w1": p["w1"]}, loss

    parallel, want = _parallel(step, donate_argnums=0), PARAMS
    got = jax.tree.map(jnp.asarray, PARAMS)
    for _ in range(3):
        got, _ = parallel(got, X, Y)
        want, _ = jax.jit(step)(want, X, Y)
    assert_same(got, want)


# --- placement --------------------------------------------------------------------------------------------------------


def test_outputs_are_ordinary_arrays_on_the_devices_of_their_stage(devices: Any) -> None:
    step = _parallel(_sgd_step, planner=PLANNERS["pipeline_2"])
    new, loss = step(PARAMS, X, Y)
    stages = step.last_plan.stages
    for leaf in jax.tree.leaves((new, loss)):
        assert isinstance(leaf, jax.Array) and isinstance(leaf.sharding, jax.sharding.NamedSharding)
        assert leaf.devices() in [{devices[d] for d in stage.submesh.devices} for stage in stages]
    homes = [next(i for i, stage in enumerate(stages) if f"p/{name}" in stage.specs) for name in PARAMS]
    assert set(homes) == {0, 1}
    for name, home in zip(PARAMS, homes, strict=True):
        assert new[name].devices() == {devices[d] for d in stages[home].submesh.devices}


def test_state_comes_back_in_the_placement_that_the_next_step_wants(devices: Any) -> None:
    compiled = _parallel(_sgd_step).compiled(PARAMS, X, Y)
    new, _ = compiled(PARAMS, X, Y)
    wanted, _ = compiled.input_shardings()
    for leaf, sharding in zip(jax.tree.leaves(new), jax.tree.leaves(wanted[0]), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def test_state_can_be_built_in_its_place(devices: Any) -> None:
    def init(scale: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), len(PARAMS))
        return {k: scale * jax.random.normal(key, w.shape) for key, (k, w) in zip(keys, PARAMS.items(), strict=True)}

    compiled = _parallel(_sgd_step, planner=PLANNERS["pipeline_2"]).compiled(PARAMS, X, Y)
    state = al.init_sharded(init, 0.3, like=compiled)
    assert_same(state, jax.jit(init)(0.3), 1e-6)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(compiled.input_shardings()[0][0]), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    assert_same(compiled(state, X, Y), jax.jit(_sgd_step)(init(0.3), X, Y))


# --- models of other libraries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_an_equinox_model(num_microbatches: int, devices: Any) -> None:
    model = eqx.nn.MLP(8, 4, 16, 3, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, opt_state: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jax.vmap(eqx.combine(params, static))(x) - y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return eqx.apply_updates(params, updates), opt_state, value

    args = params, optimizer.init(params), X, Y
    got, want = run_both(step, args, num_microbatches=num_microbatches)
    assert_same(got, want)


class _Linen(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool) -> Any:
        x = nn.gelu(nn.Dense(16)(x))
        x = nn.LayerNorm()(nn.Dropout(0.3, deterministic=not train)(x))
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_flax_linen_model_with_dropout(num_microbatches: int, devices: Any) -> None:
    model, optimizer = _Linen(), optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1, momentum=0.9))
    params = model.init(jax.random.key(0), X, train=False)

    def step(state: Any, batch: Any, key: Any) -> Any:
        params, opt_state = state

        def loss(params: Any) -> Any:
            out = model.apply(params, batch["x"], train=True, rngs={"dropout": key})
            return jnp.mean((out - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    args = (params, optimizer.init(params)), {"x": X, "y": Y}, jax.random.key(1)
    got, want = run_both(step, args, num_microbatches=num_microbatches)
    assert_same(got, want)


def test_a_flax_nnx_model(devices: Any) -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.inner = nnx.Linear(8, 16, rngs=rngs)
            self.outer = nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.outer(nnx.relu(self.inner(x)))

    graph, params = nnx.split(Net(nnx.Rngs(0)), nnx.Param)

    def step(params: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.mean((nnx.merge(graph, p)(x) - y) ** 2))(params)
        return descend(params, grads), value

    got, want = run_both(step, (params, X, Y), num_microbatches=4)
    assert_same(got, want)


@pytest.mark.parametrize("planner", ["data_parallel", "hybrid"])
def test_batches_in_other_dims_and_inside_of_state(planner: str, devices: Any) -> None:
    """A carried hidden state is part of the state; the steps of a sequence come before the batch."""
    rng = np.random.default_rng(0)
    weights = {"w": jnp.asarray(rng.normal(size=(8, 8)) * 0.3, jnp.float32)}
    state = {"weights": weights, "carry": jnp.zeros((16, 8))}
    steps = jnp.asarray(rng.normal(size=(5, 16, 8)), jnp.float32)

    def step(state: Any, steps: Any) -> Any:
        def loss(weights: Any) -> Any:
            carry, hs = jax.lax.scan(lambda h, x: (jnp.tanh(h @ weights["w"] + x),) * 2, state["carry"], steps)
            return jnp.mean(hs**2), carry

        (value, carry), grads = jax.value_and_grad(loss, has_aux=True)(state["weights"])
        return {"weights": jax.tree.map(lambda a, g: a - g, state["weights"], grads), "carry": carry}, value

    named = {"state/carry": 0, "steps": 1}
    for num_microbatches in (1, 2):
        got, want = run_both(
            step,
            (state, steps),
            planner=PLANNERS[planner],
            num_microbatches=num_microbatches,
            batch_argnums=named,
        )
        assert_same(got, want)
    with pytest.raises(al.errors.BatchError, match="dim 3 of steps"):
        al.plan(step, state, steps, batch_argnums={"steps": 3})


@pytest.mark.parametrize("planner", [al.planners.DataParallel(), al.planners.Megatron(), al.planners.Auto()], ids=str)
def test_parts_of_the_batch_that_the_step_cuts_out_itself(planner: Any, devices: Any) -> None:
    """A part without the dim of the batch lies between ops of the loop, and runs in it."""

    def step(weights: Any, batch: Any) -> Any:
        first, second = batch.reshape(2, 8, 4)

        def loss(weights: Any) -> Any:
            return jnp.mean((first @ weights) ** 2) + jnp.mean((second @ weights) ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    weights, batch = jnp.ones((4, 4)), jnp.arange(64.0).reshape(16, 4) / 64
    parallel = al.parallelize(step, planner=planner, cluster="p3.16xlarge", cache=False)
    np.testing.assert_allclose(parallel(weights, batch), jax.jit(step)(weights, batch), rtol=1e-5)
