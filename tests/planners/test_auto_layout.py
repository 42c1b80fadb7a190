"""The layout of the least memory: as good as planning all layouts that are legal."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.planners import MeshTensorFlow
from alpa_lite.planners.mesh_tensorflow import NamedDims, _Memory, least_memory
from alpa_lite.rules.dims import DimClasses, dim_names
from cost_models.cluster import with_memory
from cost_models.composed import ComposedCostModel
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned
from tests.end_to_end.transformers import TINY, Training, with_architecture

SMALL = Training(model=replace(with_architecture(TINY, num_kv_heads=None), num_layers=1), batch_size=8)


def _mlp(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def _mlp_arguments(samples: int, width: int) -> Any:
    shape = jax.ShapeDtypeStruct
    sizes = {"a": (8, width), "b": (width, 24), "c": (24, 8)}
    return {n: shape(s, jnp.float32) for n, s in sizes.items()}, shape((samples, 8), jnp.float32)


def _attention(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        q, k = (jnp.einsum("bsm,mhd->bshd", x, p[name]) for name in "qk")
        return jnp.mean(jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k)) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def _attention_arguments() -> Any:
    shape = jax.ShapeDtypeStruct
    return {n: shape((12, 4, 6), jnp.float32) for n in "qk"}, shape((8, 16, 12), jnp.float32)


OWN = {"one": ("params/a", 1), "two": ("params/b", 1), "in": ("params/a", 0)}
CASES = [
    (_mlp, _mlp_arguments(64, 16), {"x": 2, "y": 4}, OWN),
    (_mlp, _mlp_arguments(8, 512), {"x": 2, "y": 4}, OWN),
    (_mlp, _mlp_arguments(8, 512), {"x": 8}, OWN),
    (_mlp, _mlp_arguments(24, 48), {"x": 4, "y": 2}, OWN),
    (_attention, _attention_arguments(), {"x": 2, "y": 4}, {}),
]


def _legal_plans(step: Any, arguments: Any, mesh: Any, dims: Any, names: Any) -> list[al.Plan]:
    """Of every map from names to axes that is not refused."""
    found = list[al.Plan]()
    for axes in product((None, *mesh), repeat=len(names)):
        layout = {name: axis for name, axis in zip(names, axes, strict=True) if axis}
        try:
            planner = MeshTensorFlow(layout=layout, mesh=mesh, dims=dims)
            found.append(al.plan(step, *arguments, cluster=eager_cluster(), planner=planner, num_microbatches=1))
        except al.errors.PlanError:
            continue
    return found


@pytest.mark.parametrize(("step", "arguments", "mesh", "dims"), CASES)
def test_no_legal_layout_holds_less(step: Any, arguments: Any, mesh: Any, dims: Any) -> None:
    names = [*dims, "batch"] if dims else ["batch", "heads", "head_dim", "d_model"]
    plans = _legal_plans(step, arguments, mesh, dims, names)
    assert len(plans) > 3
    planner = MeshTensorFlow(layout="auto", mesh=mesh, dims=dims)
    found = al.plan(step, *arguments, cluster=eager_cluster(), planner=planner, num_microbatches=1)
    peaks = [plan.prediction.peak_bytes[0] for plan in plans]
    assert found.prediction.peak_bytes[0] == pytest.approx(min(peaks))
    assert found.prediction.peak_bytes[0] < max(peaks) and "layout " in found.name


def _request(training: Training) -> Any:
    traced = al.parallelize(training.step).trace(*training.arguments())
    return traced.request(eager_cluster(), num_microbatches=1)


def test_what_is_planned_holds_at_least_as_much_as_was_bounded() -> None:
    """Every legal layout of a transformer is planned once where the search may not stop before."""
    request = _request(SMALL)
    step = request.step_at(1, 0)
    classes = DimClasses(step)
    dims, axes = NamedDims.of(step, classes, dim_names(step, classes)), {"rows": 8}
    plans = dict[str, al.Plan]()

    def planned_layout(layout: Any) -> al.Plan:
        plan = MeshTensorFlow(layout=layout, mesh=axes).plan(request)
        plans[str(dict(layout))] = plan
        return plan

    best = least_memory(dims, axes, ComposedCostModel(eager_cluster()), planned_layout)
    few = len(plans)
    for layout in dims.layouts(axes):
        try:
            planned_layout(layout)
        except al.errors.PlanError:
            continue
    memory = _Memory(dims, ComposedCostModel(eager_cluster()))
    assert len(plans) > few
    for layout in dims.layouts(axes):
        if str(dict(layout)) in plans:
            assert memory.least(layout, axes) <= plans[str(dict(layout))].prediction.peak_bytes[0] * (1 + 1e-9)
    assert min(plan.prediction.peak_bytes[0] for plan in plans.values()) == best.prediction.peak_bytes[0]


def test_bounds_do_not_decide() -> None:
    """Plans whose copies make them larger than others whose values alone would need more."""
    request, axes = _request(SMALL), {"rows": 8}
    step = request.step_at(1, 0)
    classes, some = DimClasses(step), MeshTensorFlow(layout="batch:rows", mesh=axes).plan(request)
    dims = NamedDims.of(step, classes, dim_names(step, classes))
    memory = _Memory(dims, ComposedCostModel(eager_cluster()))
    order = sorted(memory.least(layout, axes) for layout in dims.layouts(axes))
    tried = list[float]()

    def planned_layout(layout: Any) -> al.Plan:
        least = memory.least(layout, axes)
        tried.append(least * (1 if least > order[0] else 10))
        return replace(some, name=str(layout), prediction=replace(some.prediction, peak_bytes=(tried[-1],)))

    best = least_memory(dims, axes, ComposedCostModel(eager_cluster()), planned_layout)
    wanted = min(least * (1 if least > order[0] else 10) for least in order)
    assert best.prediction.peak_bytes[0] == wanted < 10 * order[0]
    assert 1 < len(tried) < len(order) and len(best.alternatives) == len(tried) - 1


def test_it_runs_as_planned(devices: Any) -> None:
    planner = MeshTensorFlow(layout="auto", mesh={"rows": 2, "cols": 4}, dims=OWN)
    arguments = jax.tree.map(lambda s: 0.1 * jnp.ones(s.shape, s.dtype), _mlp_arguments(8, 64))
    options = dict(cluster=eager_cluster(), planner=planner, num_microbatches=1, batch_argnums=1)
    compiled = al.parallelize(_mlp, **options).compiled(*arguments)
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*arguments), jax.jit(_mlp)(*arguments))


def test_layouts_are_all_that_are_legal() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    arguments = jnp.ones((6, 12)), jnp.ones((8, 6))
    traced = al.parallelize(step, batch_argnums=1).trace(*arguments)
    graph = traced.request(eager_cluster(), num_microbatches=1).step_at(1, 0)
    classes = DimClasses(graph)
    of = {n: [classes.of(graph.graph, v, d)] for n, v, d in (("in", 0, 0), ("out", 0, 1), ("batch", 1, 0))}
    found = {tuple(sorted(each.items())) for each in NamedDims.of(graph, classes, of).layouts({"a": 4, "b": 2})}
    sizes, dims, pairs = {"a": 4, "b": 2}, {"in": 6, "out": 12, "batch": 8}, list[Any]()
    for axes in product((None, "a", "b"), repeat=3):
        layout = {n: a for n, a in zip(dims, axes, strict=True) if a}
        if all(dims[n] % sizes[a] == 0 for n, a in layout.items()) and len(set(layout.values())) == len(layout):
            pairs.append(tuple(sorted(layout.items())))
    assert found == set(pairs)


def test_too_many_layouts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alpa_lite.planners.mesh_tensorflow.MOST_LAYOUTS", 5)
    planner = MeshTensorFlow(layout="auto", mesh={"rows": 2, "cols": 4})
    with pytest.raises(al.errors.PlanError, match="more than 5 layouts"):
        al.plan(_mlp, *_mlp_arguments(8, 16), cluster=eager_cluster(), planner=planner, num_microbatches=1)


def test_where_nothing_fits_the_problem_is_told() -> None:
    cluster = eager_cluster()
    small = with_memory(cluster, 100.0)
    with pytest.raises(al.errors.InfeasibleError, match="does not fit"):
        planner = MeshTensorFlow(layout="auto", mesh={"x": 8})
        al.plan(_mlp, *_mlp_arguments(8, 16), cluster=small, planner=planner, num_microbatches=1)
