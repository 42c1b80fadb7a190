"""Running one op on blocks of its operands, next to the whole op: what the tests of local lowering share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.lower.run_local import LocalOp, bind_local
from alpa_lite.rules import FactorKind, Rule
from alpa_lite.sharding.specs import Spec
from tests.rules.row import Case

TOLERANCE = 1e-5
#: Primitives that XLA compiles in programs for one device only.
ONE_DEVICE = {"mulhi"}


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


def local_op(case: Case, placement: Placement, sizes: Mapping[str, int], **changes: Any) -> LocalOp:
    """The case under a placement, on a mesh with axes of these sizes."""
    operand_specs, result_specs = placement.specs(case.rule)
    values: dict[str, Any] = dict(
        primitive=case.primitive,
        params=case.params,
        rule=case.rule,
        operand_shapes=tuple(v.shape for v in case.view.operands),
        result_shapes=tuple(v.shape for v in case.view.results),
        operand_specs=operand_specs,
        result_specs=result_specs,
        axis_sizes=sizes,
        origins=(None,) * len(case.view.results),
        full_shapes=(None,) * len(case.view.results),
    )
    return LocalOp(**{**values, **changes})


def partition(spec: Spec) -> PartitionSpec:
    """The layout of a spec, partial sums aside."""
    return PartitionSpec(*(axes or None for axes in spec.dims))


def addends(value: jax.Array, count: int = 2) -> jax.Array:
    """Arrays whose sum is `value`, stacked; they differ a lot, so that a forgotten addend shows."""
    if jnp.issubdtype(value.dtype, jnp.integer):
        first = value * 3 + (jnp.iinfo(value.dtype).max // 2 + 1)  # so large that the sum wraps
    else:
        first = value * 2  # without rounding
    first = first.astype(value.dtype)
    rest = [value - first, *(jnp.zeros_like(value) for _ in range(count - 2))]
    return jnp.stack([first, *(r.astype(value.dtype) for r in rest)])


def run_sharded(mesh: Mesh, op: LocalOp, operands: Sequence[Any]) -> list[Any]:
    """The op on blocks, partial sums resolved."""
    in_specs, arrays = [], []
    for spec, operand in zip(op.operand_specs, operands, strict=True):
        # A partial operand comes in as a stack of addends, one per device along the axis.
        in_specs.append(PartitionSpec(spec.partial, *partition(spec)) if spec.partial else partition(spec))
        arrays.append(addends(operand, mesh.shape[spec.partial[0]]) if spec.partial else operand)

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


def assert_blocks_agree(case: Case, placements: Sequence[Placement], mesh: Mesh) -> None:
    """The case gives the same numbers on blocks, under each placement, as on whole arrays."""
    ops = [local_op(case, placement, dict(mesh.shape)) for placement in placements]

    apart = case.view.primitive in ONE_DEVICE

    def every(*operands: Any) -> Any:
        return () if apart else case.bind(*operands), [run_sharded(mesh, op, operands) for op in ops]

    whole = NamedSharding(mesh, PartitionSpec())
    # Compiled fast rather than well, since each program runs once.
    options = {"xla_backend_optimization_level": 0}
    expected, found = jax.jit(every, in_shardings=whole, compiler_options=options)(*case.operands)
    expected = case.bind(*case.operands) if apart else expected
    for placement, op, results in zip(placements, ops, found, strict=True):
        # An even split of a float into addends is itself not exact.
        exact = is_exact(case) and not placement.partial
        for actual, wanted, spec in zip(results, expected, op.result_specs, strict=True):
            what = f"{case.rule} {placement} {op.result_specs}"
            assert_same(actual, wanted, exact=exact, what=what)
            # A sum over devices starts at 0, and 0 + -0 is 0.
            if exact and not spec.partial:
                assert_same_zeros(actual, wanted, what=what)


def is_exact(case: Case) -> bool:
    """Integers and moved data must agree bit for bit; sums and products of floats may be associated otherwise."""
    return case.rule.flops == 0 or not any(v.is_float for v in case.view.results)


def assert_same(actual: Any, expected: Any, *, exact: bool, what: str) -> None:
    """Equal, or close relative to the largest number."""
    if jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        actual, expected = jax.random.key_data(actual), jax.random.key_data(expected)
    a, e = np.asarray(actual), np.asarray(expected)
    assert a.dtype == e.dtype, what
    narrow = a.dtype.itemsize < 4
    if narrow and jnp.issubdtype(a.dtype, jnp.floating):
        # NumPy knows neither the narrow floats nor their NaN.
        a, e = a.astype(np.float32), e.astype(np.float32)
    if exact or a.dtype.kind in "biu":
        np.testing.assert_array_equal(a, e, err_msg=what)
        return
    finite = np.abs(e[np.isfinite(e)])
    scale = max(1.0, float(finite.max(initial=0)))
    np.testing.assert_allclose(a, e, rtol=0, atol=(4e-2 if narrow else TOLERANCE) * scale, err_msg=what)


def assert_same_zeros(actual: Any, expected: Any, *, what: str) -> None:
    """Equal signs of the zeros of floats."""
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return
    a, e = (np.asarray(x).astype(np.float32) for x in (actual, expected))
    np.testing.assert_array_equal(np.signbit(a[a == 0]), np.signbit(e[e == 0]), err_msg=f"signs of zeros: {what}")
