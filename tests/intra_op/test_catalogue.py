"""What is remembered is remembered for all that it depends on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.graph.from_jaxpr import from_jaxpr
from alpa_lite.intra_op.catalogue import Catalogue
from alpa_lite.mesh import LogicalMesh, Submesh
from alpa_lite.pricing import Pricer
from alpa_lite.sharding import Spec
from alpa_lite.strategies import FREE_CHOICE, AxisRole, Restriction, Split
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
    roles = Restriction(roles={"x": AxisRole.BATCH, "y": AxisRole.ANY}, optimizer=Split.MAY)
    free, in_order = (Catalogue(PRICER, r).value_specs(VALUE, None, split=Split.MAY) for r in (FREE_CHOICE, roles))
    assert orders <= set(free)
    assert orders & set(in_order) == {Spec((("x", "y"), ()))}


def test_orders_of_axes_are_one_move_apart() -> None:
    one, other = Spec((("x", "y"), ())), Spec((("y", "x"), ()))
    table = Catalogue(PRICER, FREE_CHOICE).move_table(VALUE, (one, other), (one, other))
    assert (table == table.T).all()
    assert table[0, 0] == table[1, 1] == 0 < table[0, 1] < float("inf")
