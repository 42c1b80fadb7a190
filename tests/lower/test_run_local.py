"""Every op gives the same numbers on blocks as on whole arrays, for every factor that its rule says may be split."""

from __future__ import annotations

import itertools
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from alpa_lite.errors import VerificationError
from alpa_lite.lower.run_local import LocalOp, bind_local, lowering_of
from alpa_lite.rules import Rule
from alpa_lite.sharding.specs import replicated
from tests.lower.blocks import Placement, assert_blocks_agree, local_op, run_sharded
from tests.rules.row import names
from tests.rules.rows import ROWS

SIZES = {"x": 2, "y": 4}


def placements(rule: Rule, *, has_offsets: bool) -> list[Placement]:
    """Every factor on as many axes as fit, every pair of factors on two axes, every linear group as partial sums.

    Where the lowering asks where its block lies, the axes of one dim also come in the other order.
    """
    fits = lambda f, axes: rule.splits_into(f, prod(SIZES[a] for a in axes))  # noqa: E731
    choices: list[dict[int, tuple[str, ...]]] = []
    for f in rule.shardable:
        choices += [{f: axes} for axes in (("x", "y"), ("y",), ("x",)) if fits(f, axes)][:1]
        choices += [{f: ("y", "x")}] if has_offsets and fits(f, ("y", "x")) else []
    for f, g in itertools.combinations(rule.shardable, 2):
        both = [{f: ("x",), g: ("y",)}, {g: ("x",), f: ("y",)}]
        choices += [pair for pair in both if all(fits(h, axes) for h, axes in pair.items())][:1]
    found = [Placement(factors=factors) for factors in choices]
    for group in rule.linear:
        beside = next(({f: ("y",)} for f in rule.shardable if fits(f, ("y",))), {})
        found.append(Placement(factors=beside, group=group, partial=("x",)))
    return found


@pytest.fixture(scope="module")
def mesh(devices: list[Any]) -> Mesh:
    """Axes x of 2 and y of 4 devices."""
    return Mesh(np.array(devices).reshape(2, 4), ("x", "y"))


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_blocks_give_what_whole_arrays_give(row, mesh):
    case = row.case
    has_offsets = lowering_of(case.view.primitive) != LocalOp.bind
    found = placements(case.rule, has_offsets=has_offsets)
    if not found:
        pytest.skip("no factor of this row may be split")
    assert_blocks_agree(case, found, mesh)


def test_specs_that_no_assignment_demands_are_refused():
    case = next(row for row in ROWS if row.name == "dot_general").case
    good = local_op(case, Placement(factors={0: ("x",)}), SIZES)
    bad = local_op(case, Placement(factors={}), SIZES, operand_specs=(good.operand_specs[0], replicated(2)))
    with pytest.raises(VerificationError, match="do not come from one assignment"):
        bind_local(bad, case.operands)


@pytest.mark.parametrize("axes", [(), ("x", "y"), ("y",)])
def test_iota_counts_from_its_place_in_the_full_batch(mesh, axes):
    case = next(row for row in ROWS if row.name == "iota").case
    placed = Placement(factors={case.rule.results[0][0][0]: axes})
    op = local_op(case, placed, SIZES, origins=((16, 0),), full_shapes=((64, 4),))
    (found,) = jax.jit(lambda: run_sharded(mesh, op, ()))()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(case.bind()[0]) + 16)
