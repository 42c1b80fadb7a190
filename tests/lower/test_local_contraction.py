"""Products on blocks: how many dims XLA is handed them with. `test_fuzz` tells whether they are right on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.lower.run_local import bind_local
from tests.lower.blocks import Placement, local_op
from tests.rules.row import Row


@pytest.mark.parametrize(
    ("subscripts", "left", "right", "contracted", "shared"),
    [
        ("ebci,ebch->eih", (2, 3, 4, 5), (2, 3, 4, 6), 1, 1),
        ("bci,bch->ih", (3, 4, 5), (3, 4, 6), 1, 0),
        ("abci,abcj->abij", (2, 3, 4, 5), (2, 3, 4, 6), 1, 1),
        ("bci,cbh->ih", (3, 4, 5), (4, 3, 6), 2, 0),  # in another order
        ("bic,bhc->ih", (3, 5, 4), (3, 6, 4), 2, 0),  # not neighbours
        ("abcdi,abhcd->hi", (2, 3, 4, 5, 6), (2, 3, 7, 4, 5), 2, 0),  # two runs
        ("bci,bcj->ij", (0, 4, 5), (0, 4, 3), 1, 0),  # nothing to sum
    ],
)
def test_neighbouring_dims_are_folded(
    subscripts: str, left: tuple[int, ...], right: tuple[int, ...], contracted: int, shared: int
) -> None:
    rng = np.random.default_rng(0)
    arrays = tuple(jnp.asarray(rng.integers(-4, 5, shape), jnp.float32) for shape in (left, right))
    einsum = lambda x, y: jnp.einsum(subscripts, x, y)  # noqa: E731
    case = Row(name=subscripts, primitive="dot_general", function=einsum, arguments=arrays, oracle="").case
    op = local_op(case, Placement(factors={}), {})
    traced = jax.make_jaxpr(lambda *operands: bind_local(op, operands))(*case.operands)
    (product,) = [e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"]
    ((over, _), (along, _)) = product.params["dimension_numbers"]
    assert (len(over), len(along)) == (contracted, shared)
    np.testing.assert_array_equal(bind_local(op, case.operands)[0], case.bind(*case.operands)[0])
