"""The types of arrays under a mesh that the user has set with explicit axis types: how they are split over its axes.

`jax.jit` traces a step with the types of its arguments and returns results of the types that it then finds. A step is
traced with them here too, since its code may read them: a `shard_map` without `in_specs` has those of its operands. A
plan lays out arrays by itself, and results get the types that `jax.jit` gives them. Micro-batches that the types do not
divide are traced without types.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from alpa_lite import _jax
from alpa_lite._jax import ClosedJaxpr, Tree

Types = Sequence[NamedSharding | None]
"""The type of each array; None for one without."""


def has_explicit_types(mesh: Mesh | None) -> bool:
    """Return whether a mesh makes the split of an array over some of its axes a part of the array's type."""
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def argument_types(leaves: Sequence[object], mesh: Mesh | None) -> tuple[NamedSharding | None, ...]:
    """Return the types of arguments: the shardings of arrays on that mesh, if its types are explicit."""
    if mesh is None or not has_explicit_types(mesh):
        return (None,) * len(leaves)
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    return tuple(s if isinstance(s, NamedSharding) and s.mesh == mesh else None for s in shardings)


def traced_with_types(flat: Callable[..., Tree], avals: Sequence[jax.ShapeDtypeStruct], types: Types) -> ClosedJaxpr:
    """Return the jaxpr of a flat function of arguments with these types."""
    pairs = zip(avals, types, strict=True)
    return jax.make_jaxpr(flat)(
        *[
            aval
            if sharding is None
            else jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
            for aval, sharding in pairs
        ]
    )


def result_types(jaxpr: ClosedJaxpr, mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Return the shardings on the user's mesh in which `jax.jit` would return the results of a jaxpr."""

    def of(aval: Any) -> NamedSharding:
        return NamedSharding(mesh, aval.sharding.spec)

    with _jax.no_mesh():
        return tuple(map(of, jaxpr.out_avals))
