"""Every op gives the same numbers on blocks as on whole arrays, for every factor that its rule says may be split."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.errors import VerificationError
from alpa_lite.lower.block import lowering_of
from alpa_lite.lower.local import LocalOp, bind_local
from alpa_lite.rules import FactorKind, Rule
from alpa_lite.sharding import Spec, replicated
from tests.rules.row import Case, names
from tests.rules.rows import ROWS

SIZES = {"x": 2, "y": 4}
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Mesh axes per factor, and the axis over which a linear group of operands comes as partial sums."""

    factors: Mapping[int, tuple[str, ...]]
    group: tuple[int, ...] = ()
    partial: tuple[str, ...] = ()

    def specs(self, rule: Rule) -> tuple[tuple[Spec, ...], tuple[Spec, ...]]:
        """What the placement demands of operands and makes of results."""
        axes = lambda dims: tuple(sum((self.factors.get(f, ()) for f in factors), ()) for factors in dims)  # noqa: E731
        operands = [Spec(axes(dims), self.partial if i in self.group else ()) for i, dims in enumerate(rule.operands)]
        partial = set(self.partial)
        if rule.reduction == "sum":
            partial |= {a for f, on in self.factors.items() if rule.kinds[f] is FactorKind.REDUCTION for a in on}
        results = [Spec(axes(dims), tuple(sorted(partial))) for dims in rule.results]
        return tuple(operands), tuple(results)


def placements(rule: Rule, *, has_offsets: bool) -> list[Placement]:
    """Every factor on as many axes as fit, every pair of factors on two axes, every linear group as partial sums.

    Where the lowering asks where its block lies, the axes of one dim also come in the other order.
    """
    fits = lambda f, axes: rule.sizes[f] % prod(SIZES[a] for a in axes) == 0  # noqa: E731
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


def local_op(case: Case, placement: Placement, **changes: Any) -> LocalOp:
    """The case under a placement."""
    operand_specs, result_specs = placement.specs(case.rule)
    values: dict[str, Any] = dict(
        primitive=case.primitive,
        params=case.params,
        rule=case.rule,
        operand_shapes=tuple(v.shape for v in case.view.operands),
        result_shapes=tuple(v.shape for v in case.view.results),
        operand_specs=operand_specs,
        result_specs=result_specs,
        axis_sizes=SIZES,
        origins=(None,) * len(case.view.results),
        full_shapes=(None,) * len(case.view.results),
    )
    return LocalOp(**{**values, **changes})


def partition(spec: Spec) -> PartitionSpec:
    """The layout of a spec, partial sums aside."""
    return PartitionSpec(*(axes or None for axes in spec.dims))


def addends(value: jax.Array) -> jax.Array:
    """Two arrays whose sum is `value`, stacked; they differ a lot, so that a forgotten addend shows."""
    first = value // 3 if jnp.issubdtype(value.dtype, jnp.integer) else value * 3
    return jnp.stack([first.astype(value.dtype), value - first.astype(value.dtype)])


def run_sharded(mesh: Mesh, op: LocalOp, operands: tuple[Any, ...]) -> list[Any]:
    """The op on blocks, partial sums resolved."""
    in_specs, arrays = [], []
    for spec, operand in zip(op.operand_specs, operands, strict=True):
        # A partial operand comes in as a stack of addends, one per device along the axis.
        in_specs.append(PartitionSpec(spec.partial, *partition(spec)) if spec.partial else partition(spec))
        arrays.append(addends(operand) if spec.partial else operand)

    def body(*blocks: Any) -> list[Any]:
        local = [b[0] if s.partial else b for s, b in zip(op.operand_specs, blocks, strict=True)]
        results = bind_local(op, local)
        return [
            jax.lax.psum(r, spec.partial) if spec.partial else r
            for r, spec in zip(results, op.result_specs, strict=True)
        ]

    out_specs = [partition(spec) for spec in op.result_specs]
    run = jax.shard_map(body, mesh=mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
    return run(*arrays)


def is_exact(case: Case) -> bool:
    """Integers and moved data must agree bit for bit; sums and products of floats may be associated otherwise."""
    return case.rule.flops == 0 or not any(v.is_float for v in case.view.results)


def assert_same(actual: Any, expected: Any, *, exact: bool, what: str) -> None:
    """Equal, or close relative to the largest number."""
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    a, e = np.asarray(actual), np.asarray(expected)
    assert a.dtype == e.dtype, what
    if exact or a.dtype.kind in "biu":
        np.testing.assert_array_equal(a, e, err_msg=what)
        return
    narrow = a.dtype.itemsize < 4
    a, e = (v.astype(np.complex64 if v.dtype.kind == "c" else np.float32) for v in (a, e))
    finite = np.abs(e[np.isfinite(e)])
    scale = max(1.0, float(finite.max(initial=0)))
    np.testing.assert_allclose(a, e, rtol=0, atol=(4e-2 if narrow else TOLERANCE) * scale, err_msg=what)


@pytest.fixture(scope="module")
def mesh(devices: list[Any]) -> Mesh:
    """Axes x of 2 and y of 4 devices."""
    return Mesh(np.array(devices).reshape(2, 4), ("x", "y"))


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_blocks_give_what_whole_arrays_give(row, mesh):
    case = row.case
    has_offsets = lowering_of(case.view.primitive) != LocalOp.bind
    ops = [(p, local_op(case, p)) for p in placements(case.rule, has_offsets=has_offsets)]
    if not ops:
        pytest.skip("no factor of this row may be split")

    def every(*operands: Any) -> Any:
        return case.bind(*operands), [run_sharded(mesh, op, operands) for _, op in ops]

    whole = NamedSharding(mesh, PartitionSpec())
    # Compiled fast rather than well, since each program runs once.
    options = {"xla_backend_optimization_level": 0}
    expected, found = jax.jit(every, in_shardings=whole, compiler_options=options)(*case.operands)
    for (placement, op), results in zip(ops, found, strict=True):
        # An even split of a float into addends is itself not exact.
        exact = is_exact(case) and not placement.partial
        for actual, wanted in zip(results, expected, strict=True):
            assert_same(actual, wanted, exact=exact, what=f"{case.rule} {placement} {op.result_specs}")


def test_specs_that_no_assignment_demands_are_refused():
    case = next(row for row in ROWS if row.name == "dot_general").case
    good = local_op(case, Placement(factors={0: ("x",)}))
    bad = local_op(case, Placement(factors={}), operand_specs=(good.operand_specs[0], replicated(2)))
    with pytest.raises(VerificationError, match="do not come from one assignment"):
        bind_local(bad, case.operands)


@pytest.mark.parametrize("axes", [(), ("x", "y"), ("y",)])
def test_iota_counts_from_its_place_in_the_full_batch(mesh, axes):
    case = next(row for row in ROWS if row.name == "iota").case
    placed = Placement(factors={case.rule.results[0][0][0]: axes})
    op = local_op(case, placed, origins=((16, 0),), full_shapes=((64, 4),))
    (found,) = jax.jit(lambda: run_sharded(mesh, op, ()))()
    np.testing.assert_array_equal(np.asarray(found), np.asarray(case.bind()[0]) + 16)
