"""JAX's own list of primitives, read at run time."""

from __future__ import annotations

from functools import cache
from typing import Any

from jax.extend.core import Primitive, primitives
from jax.interpreters import mlir


@cache
def jax_primitives() -> dict[str, Any]:
    """Every primitive that JAX names publicly or can lower, by name."""
    # All that can be lowered anywhere is kept in two tables, one of them by platform.
    tables = [mlir._lowerings, *mlir._platform_specific_lowerings.values()]
    found: dict[str, Any] = {p.name: p for table in tables for p in table}
    found |= {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}
    return found
