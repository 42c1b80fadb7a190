"""State that is built where it lives between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from alpa_lite.errors import PlanError


def built_in_place(init_fn: Callable[..., Any], args: Sequence[Any], shardings: Any, argument: int | str) -> Any:
    """`init_fn(*args)` with each array in its place of `shardings`, a pytree of `NamedSharding`s.

    Every stage computes only the arrays that live on it. `argument`: of the step, which this will be, for messages.
    """
    flat, structure = jax.tree.flatten(shardings)
    shapes = jax.eval_shape(init_fn, *args)
    if jax.tree.structure(shapes) != structure:
        raise PlanError(
            f"init_fn returns {jax.tree.structure(shapes)}, but argument {argument!r} of the compiled step is "
            f"{structure}. Give an init_fn that returns that argument."
        )
    result: list[Any] = [None] * len(flat)
    for mesh in dict.fromkeys(s.mesh for s in flat):
        mine = [i for i, s in enumerate(flat) if s.mesh == mesh]

        def part(*inputs: Any, mine: Sequence[int] = tuple(mine)) -> list[Any]:
            leaves = jax.tree.leaves(init_fn(*inputs))
            return [leaves[i] for i in mine]

        built = jax.jit(part, out_shardings=[flat[i] for i in mine])(*args)
        for i, array in zip(mine, built, strict=True):
            result[i] = array
    return jax.tree.unflatten(structure, result)
