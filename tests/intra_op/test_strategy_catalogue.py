"""What is remembered is remembered for all that it depends on."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.intra_op.strategies import FREE_CHOICE, AxisRole, BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.plan.walk import placed_specs
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.trace.from_jaxpr import from_jaxpr
from cost_models.composed import ComposedCostModel

GRAPH = from_jaxpr(jax.make_jaxpr(jnp.sin)(jax.ShapeDtypeStruct((8, 16), jnp.float32)), ["x"]).graph
VALUE = GRAPH.values[GRAPH.inputs[0]]
PRICER = Pricer(
    cost_model=ComposedCostModel(al.cluster("p3.16xlarge")),
    submesh=Submesh(first_device=0, num_hosts=1, devices_per_host=8),
    mesh=LogicalMesh(axis_names=("x", "y"), shape=(2, 4)),
)


def test_sums_stay_partial_only_where_an_addition_waits_for_them() -> None:
    catalogue, offered = Catalogue(PRICER, FREE_CHOICE), (Spec(((), ("y",)), ("x",)),)
    resolved, waiting = (catalogue.sums(VALUE, offered, keep_partial=keep) for keep in (False, True))
    assert not any(spec.partial for spec in resolved.resolved)
    assert offered[0] in waiting.resolved and set(resolved.resolved) < set(waiting.resolved)
    assert catalogue.sums(VALUE, offered, keep_partial=False) is resolved


def test_free_axes_split_a_dim_in_either_order() -> None:
    orders = {Spec((("x", "y"), ())), Spec((("y", "x"), ()))}
    roles = Restriction(roles={"x": AxisRole.BATCH, "y": AxisRole.ANY}, optimizer=BatchSplit.MAY)
    free, in_order = (Catalogue(PRICER, r).value_specs(VALUE, None, split=BatchSplit.MAY) for r in (FREE_CHOICE, roles))
    assert orders <= set(free)
    assert orders & set(in_order) == {Spec((("x", "y"), ()))}


def test_orders_of_axes_are_one_move_apart() -> None:
    one, other = Spec((("x", "y"), ())), Spec((("y", "x"), ()))
    table = Catalogue(PRICER, FREE_CHOICE).move_table(VALUE, (one, other), (one, other))
    assert (table == table.T).all()
    assert table[0, 0] == table[1, 1] == 0 < table[0, 1] < float("inf")


@pytest.mark.parametrize(
    "function", [jnp.tanh, lambda x: x * 2.0, lambda x: x.T, lambda x: jnp.sum(x, axis=1), jnp.max]
)
def test_ops_that_follow_cost_what_each_placement_costs_by_itself(function: Callable[..., jax.Array]) -> None:
    graph = from_jaxpr(jax.make_jaxpr(function)(jax.ShapeDtypeStruct((8, 16), jnp.float32)), ["x"]).graph
    catalogue, other = Catalogue(PRICER, FREE_CHOICE), PRICER.elsewhere(PRICER.submesh, PRICER.mesh)
    op = next(op for op in graph.ops if graph.inputs[0] in op.operands)
    main = op.operands.index(graph.inputs[0])
    given = catalogue.value_specs(VALUE, None, split=BatchSplit.MAY)
    specs = (*given, Spec(((), ()), ("x",)), *given[:3])
    options = catalogue.following(graph, op, main, specs, keep_partial=False)
    assert len(options.placements) == len(specs)
    for n, (spec, placement) in enumerate(zip(specs, options.placements, strict=True)):
        placed = placed_specs(graph, op, placement)
        assert (options.demanded[main][n], options.made[0][n]) == (placed.operands[main], placed.results[0])
        assert options.results[0][n] == placement.results[0]
        moved = catalogue.move_seconds(VALUE, spec, placed.operands[main])
        moved += catalogue.move_seconds(graph.values[op.results[0]], placed.results[0], placement.results[0])
        assert options.seconds[n] == pytest.approx(other.op_seconds(graph, op, placement) + moved, rel=1e-12)
