"""Placements that users already have: arguments lie as told, and the step is the same as under `jax.jit`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.planners import Custom, DataParallel, Hybrid
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch
from tests.end_to_end.collectives import emitted, handed_over, planned

MESH = {"data": 2, "model": 4}
TRAINING = Training(model="mlp")


def _step(params: Any, batch: Any) -> Any:
    def loss(p: Any) -> Any:
        h = batch["x"]
        for layer in p:
            h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.mean((h - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value


def _arguments() -> Any:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.2, jnp.float32)  # noqa: E731
    return [{"up": draw(16, 32), "down": draw(32, 16)} for _ in range(2)], {"x": draw(64, 16), "y": draw(64, 16)}


MEGATRON = [{"up": P(None, "model"), "down": P("model", None)}] * 2


def _compiled(planner: Custom) -> Any:
    return al.parallelize(_step, cluster=eager_cluster(), planner=planner, num_microbatches=1).compiled(*_arguments())


def test_specs_of_jit_give_the_collectives_that_they_stand_for(devices: Any) -> None:
    compiled = _compiled(Custom(mesh=MESH, in_specs=(MEGATRON, P("data"))))
    want = {
        **{f"params/{i}/up": ((), ("model",)) for i in range(2)},
        **{f"params/{i}/down": (("model",), ()) for i in range(2)},
        **{f"batch/{name}": (("data",), ()) for name in "xy"},
    }
    assert {name: spec.dims for name, spec in compiled.plan.stages[0].specs.items()} == want
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    restricted = al.plan(_step, *_arguments(), cluster=eager_cluster(), planner=Hybrid(data=2, model=4))
    assert restricted.stages[0].specs == compiled.plan.stages[0].specs
    assert compiled.plan.prediction.step_seconds <= 1.001 * restricted.prediction.step_seconds


def test_replicated_parameters_are_data_parallel() -> None:
    options = dict(cluster=eager_cluster(), num_microbatches=1)
    planner = Custom(mesh={"data": 8}, in_specs=(P(), P("data")), batch=("data",))
    custom, known = (al.plan(_step, *_arguments(), planner=p, **options) for p in (planner, DataParallel()))
    assert planned(known) == {("all_reduce", 4 * 16 * 32, 8): 4, ("all_reduce", 4, 8): 1}
    # An all_reduce, or a reduce_scatter and an all_gather around an update in parts: the same bytes.
    halves = {(kind, 4 * 16 * 32, 8): 4 for kind in ("reduce_scatter", "all_gather")} | {("all_reduce", 4, 8): 1}
    assert planned(custom) in (planned(known), halves)
    assert custom.prediction.step_seconds <= 1.001 * known.prediction.step_seconds


def test_arguments_lie_where_jit_would_put_them(devices: Any) -> None:
    compiled = _compiled(Custom(mesh=MESH, in_specs=(MEGATRON, P("data"))))
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    is_spec = lambda s: isinstance(s, P)  # noqa: E731
    put = jax.tree.map(lambda s: NamedSharding(mesh, s), (MEGATRON, {"x": P("data"), "y": P("data")}), is_leaf=is_spec)
    shardings, _ = compiled.input_shardings()
    for got, want, x in zip(
        jax.tree.leaves(shardings), jax.tree.leaves(put), jax.tree.leaves(_arguments()), strict=True
    ):
        assert got.is_equivalent_to(want, x.ndim)
    jitted = jax.jit(_step, in_shardings=put)
    assert_same(compiled(*_arguments()), jitted(*_arguments()))


@pytest.mark.parametrize(
    "planner",
    [
        Custom(mesh=MESH, rules=[(r"up$", P(None, "model")), (r"down$", P("model")), ("batch", P("data"))]),
        Custom(mesh=MESH, in_specs={"batch": P("data")}, rules=[(r"up$", P(None, "model")), ("down", P("model"))]),
        Custom(mesh={**MESH, "one": 1}, in_specs=(MEGATRON, P(("data", "one")))),
    ],
    ids=["rules", "both", "an axis of one device"],
)
def test_rules_say_the_same(planner: Custom) -> None:
    found, tree = (
        al.plan(_step, *_arguments(), cluster=eager_cluster(), planner=p, num_microbatches=1)
        for p in (planner, Custom(mesh=MESH, in_specs=(MEGATRON, P("data"))))
    )
    assert found.stages[0].specs == tree.stages[0].specs
    assert found.prediction == tree.prediction


def test_the_first_rule_that_fits_counts_and_scalars_stay_whole() -> None:
    training = Training(model="mlp", optimizer="adamw")
    arguments = (training.start(), make_batch(MODELS["mlp"], 0), jax.random.key(0))
    planner = Custom(mesh={"x": 8}, rules=[(r"opt_state.*/w$", P("x")), ("state", P())], in_specs=(None, P("x"), None))
    plan = al.plan(training.step(), *arguments, cluster=eager_cluster(), planner=planner, num_microbatches=1)
    specs = plan.stages[0].specs
    moments = [spec.dims for name, spec in specs.items() if "opt_state" in name and name.endswith("/w")]
    assert moments and set(moments) == {(("x",), ())}
    assert {axes for name, spec in specs.items() if "/params/" in name and "opt" not in name for axes in spec.dims} == {
        ()
    }


def test_shardings_bring_their_mesh(devices: Any) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    shardings = [{name: NamedSharding(mesh, s) for name, s in layer.items()} for layer in MEGATRON]
    compiled = _compiled(Custom(in_specs=(shardings, NamedSharding(mesh, P("data")))))
    assert compiled.plan.stages[0].mesh_shape.axis_sizes == MESH
    assert_same(compiled(*_arguments()), jax.jit(_step)(*_arguments()))


def test_what_is_left_open_is_chosen_and_never_worse(devices: Any) -> None:
    def seconds(*in_specs: Any) -> float:
        planner = Custom(mesh=MESH, in_specs=in_specs)
        options = dict(cluster=eager_cluster(), planner=planner, num_microbatches=1)
        return al.plan(_step, *_arguments(), **options).prediction.step_seconds

    assert seconds(None, None) <= 1.001 * seconds(None, P("data")) <= 1.002 * seconds(MEGATRON, P("data"))


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (Custom(mesh=MESH, in_specs=(P(),)), r"1 entries, but the step takes 2 positional arguments \(params, batch\)"),
        (
            Custom(mesh=MESH, in_specs=([{"upp": P()}], None)),
            r"'params/0/upp', but there is no .* Did you mean params/0/",
        ),
        (Custom(mesh=MESH, in_specs={"params/0/up": P("tensor")}), r"names the axes \['tensor'\], but the mesh has"),
        (Custom(mesh=MESH, in_specs={"batch": P(("data", "data"))}), "names an axis twice"),
        (Custom(mesh={"a": 8}, in_specs=(None, {"x": P(None, None, "a")})), "has 3 dims, but batch/x has shape"),
        (Custom(mesh={"a": 8, "b": 1}, rules=[("nowhere", P("a"))]), "'nowhere' fits no array"),
        (Custom(mesh=MESH, in_specs=(None, P(P.UNCONSTRAINED))), "give a PartitionSpec or a NamedSharding"),
        (Custom(mesh=MESH, in_specs=(None, ("data", None))), r"batch/0.*PartitionSpec\(\.\.\.\): a tuple is a tree"),
        (Custom(mesh=MESH, in_specs=P("data")), "give a tuple with one entry per argument"),
        (Custom(in_specs=(None, P("data"))), "Specs need a mesh"),
        (Custom(mesh={"data": 4}, in_specs=(None, P("data"))), "have 4 devices, but slow devices, fast link has 8"),
    ],
)
def test_specs_that_fit_nothing_are_refused(planner: Custom, message: str) -> None:
    with pytest.raises(al.errors.PlanError, match=message):
        al.plan(_step, *_arguments(), cluster=eager_cluster(), planner=planner, num_microbatches=1)


def test_dims_that_do_not_divide_and_keys_are_refused() -> None:
    def step(w: Any, key: Any, x: Any) -> Any:
        return w + jnp.mean(x * jax.random.normal(key, x.shape)), x

    arguments = jnp.ones((6, 8)), jax.random.split(jax.random.key(0), 8)[0], jnp.ones((16, 3))
    options = dict(cluster=eager_cluster(), num_microbatches=1)
    with pytest.raises(al.errors.PlanError, match=r"needs dims that its axes divide .* the shape is \[6, 8\]"):
        al.plan(step, *arguments, planner=Custom(mesh={"x": 8}, in_specs=(P("x"), None, None)), **options)
