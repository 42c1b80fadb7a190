"""Placements that users already have: arguments lie as told, and the step is the same as under `jax.jit`."""

from __future__ import annotations

from collections import Counter
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
    restricted = al.plan(_step, *_arguments(), cluster=eager_cluster(), planner=Hybrid(data=2, tensor=4))
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
            Custom(mesh=MESH, in_specs=([{"upp": P()}] * 2, None)),
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


# --- results ----------------------------------------------------------------------------------------------------------


def _parts(params: Any, batch: Any) -> Any:
    """Gradients, samples, a scalar, an argument as it came, and zeros."""

    def loss(p: Any) -> Any:
        h = batch["x"]
        for layer in p:
            h = h + jnp.tanh(h @ layer["up"]) @ layer["down"]
        return jnp.sum((h - batch["y"]) ** 2), h

    (value, hidden), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return {"grads": grads, "hidden": hidden, "loss": value, "same": params[0]["up"], "zeros": jnp.zeros((8, 4))}


GRADIENTS = [{"up": P("data", "model"), "down": P("model")}, {"up": P(None, ("data", "model")), "down": P()}]
RETURNED = [
    (_step, (MEGATRON, P("data")), (MEGATRON, P())),
    (_step, (None, P("data")), (MEGATRON, P())),
    (_step, (P(), P("data")), (MEGATRON, P())),
    (_step, (MEGATRON, P("data")), P()),
    (_parts, (MEGATRON, P("data")), {"grads": GRADIENTS, "hidden": P("data", "model"), "zeros": P("data")}),
    (_parts, (None, P("data")), {"grads": P(), "hidden": P("model"), "same": P(None, "model"), "loss": P()}),
    (_parts, None, {"hidden": P(None, "model"), "same": P(), "zeros": P(("data", "model"))}),
]


def _like_jit(specs: Any, tree: Any, mesh: Mesh) -> Any:
    """A sharding for each leaf that a tree of specs has one for, else None."""
    keys = {"grads", "hidden", "loss", "same", "zeros"}
    if isinstance(specs, dict) and keys & set(specs):
        specs = {key: None for key in tree} | specs
    is_spec = lambda s: s is None or isinstance(s, P)  # noqa: E731
    spread = lambda s, part: jax.tree.map(lambda _: None if s is None else NamedSharding(mesh, s), part)  # noqa: E731
    return jax.tree.map(spread, specs, tree, is_leaf=is_spec)


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(("step", "in_specs", "out_specs"), RETURNED)
def test_results_come_as_from_jit(
    step: Any, in_specs: Any, out_specs: Any, num_microbatches: int, devices: Any
) -> None:
    planner = Custom(mesh=MESH, in_specs=in_specs or (), out_specs=out_specs)
    options = dict(cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches)
    compiled = al.parallelize(step, **options).compiled(*_arguments())
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "model"))
    wanted = _like_jit(out_specs, jax.eval_shape(step, *_arguments()), mesh)
    placed = jax.tree.leaves(wanted, is_leaf=lambda s: s is None)
    jitted = jax.jit(step, out_shardings=wanted)(*_arguments())
    results = compiled(*_arguments())
    assert len(placed) == len(jax.tree.leaves(results))
    for got, want, sharding in zip(jax.tree.leaves(results), jax.tree.leaves(jitted), placed, strict=True):
        assert sharding is None or got.sharding.is_equivalent_to(want.sharding, got.ndim)
    assert_same(results, jitted)
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert al.Plan.from_json(compiled.plan.to_json()) == compiled.plan
    assert compiled.plan.prediction.step_seconds > 0


def test_results_that_are_moved_are_priced() -> None:
    """What `P()` asks for is gathered, once each, and takes its time."""

    def plan(out_specs: Any) -> al.Plan:
        planner = Custom(mesh=MESH, in_specs=(MEGATRON, P("data")), out_specs=out_specs)
        return al.plan(_step, *_arguments(), cluster=eager_cluster(), planner=planner, num_microbatches=1)

    kept, whole = plan(None), plan((P(), None))
    assert plan((MEGATRON, None)).stages == kept.stages
    more = Counter(planned(whole)) - Counter(planned(kept))
    assert sum(count for (kind, size, _), count in more.items() if (kind, size) == ("all_gather", 4 * 16 * 32)) == 4
    assert whole.prediction.step_seconds > kept.prediction.step_seconds


def test_state_without_a_spec_goes_in_as_it_comes_out() -> None:
    planner = Custom(mesh=MESH, in_specs=(None, P("data")), out_specs=(MEGATRON, None))
    plan = al.plan(_step, *_arguments(), cluster=eager_cluster(), planner=planner, num_microbatches=1)
    assert plan.stages[0].specs["params/1/up"].dims == ((), ("model",))
    assert not plan.stages[0].outputs


@pytest.mark.parametrize(
    ("out_specs", "message"),
    [
        ((P(), P("tensor")), r"The pin of result '1' has 1 dims, but its shape is \[\]"),
        (([{"up": P("tensor")}] * 2, None), r"result '0/0/up' names the axes \['tensor'\], but the mesh has"),
        (([{"upp": P()}] * 2, None), r"out_specs has an entry for '0/0/upp', .* Did you mean 0/0/up"),
        ((P(),), "out_specs has 1 entries, but there are arrays in 2"),
        (([MEGATRON[0]], None), "out_specs has 1 entries at '0', but there are arrays in 2"),
        ((P("data"), P(), P()), "out_specs has an entry for '2'"),
        ((P("data", "data"), None), "result '0/0/down' names an axis twice"),
        ((None, "data"), "The spec of result 1 is 'data'; give a PartitionSpec"),
    ],
)
def test_specs_of_no_result_are_refused(out_specs: Any, message: str) -> None:
    planner = Custom(mesh=MESH, out_specs=out_specs)
    with pytest.raises(al.errors.PlanError, match=message):
        al.plan(_step, *_arguments(), cluster=eager_cluster(), planner=planner, num_microbatches=1)


def test_results_that_cannot_lie_so_are_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        y = x @ w
        return y[:, :3], y, y, w

    def plan(**options: Any) -> Any:
        planner = Custom(mesh={"x": 8}, **options)
        arguments = jnp.ones((8, 8)), jnp.ones((16, 8))
        return al.plan(step, *arguments, planner=planner, cluster=eager_cluster(), batch_argnums=1, num_microbatches=1)

    with pytest.raises(al.errors.PlanError, match=r"result '0' needs dims that its axes divide .* is \[16, 3\]"):
        plan(out_specs=(P(None, "x"), None, None, None))
    with pytest.raises(al.errors.PlanError, match=r"Result '2' is returned twice"):
        plan(out_specs=(None, P("x"), P(), None))
    with pytest.raises(al.errors.PlanError, match=r"Result '3' is an argument that is handed on as it came"):
        plan(in_specs=(P("x"), None), out_specs=(None, None, None, P()))
    assert plan(out_specs=(None, None, None, P("x"))).stages[0].specs["w"].dims == (("x",), ())


def test_a_lone_result_has_one_spec(devices: Any) -> None:
    def forward(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    def compiled(out_specs: Any) -> Any:
        planner = Custom(mesh=MESH, out_specs=out_specs)
        step = al.parallelize(forward, cluster=eager_cluster(), planner=planner, batch_argnums=1, num_microbatches=1)
        return step.compiled(jnp.ones((8, 8)), jnp.ones((16, 8)))

    result = compiled(P("data", "model"))(jnp.ones((8, 8)), jnp.ones((16, 8)))
    assert result.sharding.shard_shape(result.shape) == (8, 2)
    with pytest.raises(al.errors.PlanError, match="There is one array, and no container"):
        compiled((P("data"),))


@pytest.mark.parametrize("out_specs", [P("x"), P(None, "x")])
def test_what_is_asked_of_results_decides_how_they_are_computed(out_specs: Any) -> None:
    """A product can be made by rows or by columns: neither sends anything if it is what was asked for."""

    def forward(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2048, 4096), (4096, 2048))]
    planner = Custom(mesh={"x": 8}, out_specs=out_specs)
    plan = al.plan(forward, *arrays, cluster="p3.16xlarge", planner=planner, batch_argnums=1, num_microbatches=1)
    assert not planned(plan)
