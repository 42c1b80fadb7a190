"""State that is built where it lives between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from alpa_lite.errors import PlanError
from alpa_lite.runtime.function import CompiledFunction


def init_sharded(init_fn: Callable[..., Any], *args: Any, like: CompiledFunction, argument: int | str = 0) -> Any:
    """Build state directly in the placement that a compiled step wants: no device ever holds what it does not need.

    Args:
        init_fn: `init_fn(*args)` must return a pytree like the argument. Every stage computes only the arrays that live
            on it.
        args: what `init_fn` is called with.
        like: the compiled step.
        argument: the argument of the step that is built, by position or name.

    Raises:
        PlanError: the step has no such argument, or what `init_fn` returns is not like it.
    """
    positional, keywords = like.input_shardings()
    known = {**positional, **keywords}
    if argument not in known:
        raise PlanError(
            f"argument={argument!r} was given, but the compiled step takes arrays in {', '.join(map(repr, known))}. "
            "Name one of these."
        )
    shardings = known[argument]
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
