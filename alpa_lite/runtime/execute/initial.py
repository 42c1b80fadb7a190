"""State that is built where it lives between steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite.errors import PlanError
from alpa_lite.runtime.execute.exchange import Blanks
from alpa_lite.runtime.execute.function import CompiledFunction
from alpa_lite.runtime.execute.placing import InJob
from alpa_lite.runtime.job.processes import all_here, any_here, devices_of, handle


def init_sharded(init_fn: Callable[..., Any], *args: Any, like: CompiledFunction, argument: int | str = 0) -> Any:
    """Build state directly in the placement that a compiled step wants: no device ever holds what it does not need.

    Args:
        init_fn: `init_fn(*args)` must return a pytree like the argument. Every stage computes only the arrays that live
            on it, and of these each device only its blocks; of stages of other processes there are handles.
        args: what `init_fn` is called with. Processes that share a stage must give equal ones.
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
    leaves = jax.tree.leaves(shapes)
    for mesh in dict.fromkeys(s.mesh for s in flat):
        mine = [i for i, s in enumerate(flat) if s.mesh == mesh]
        if not any_here(devices_of(mesh)):
            for i in mine:
                result[i] = handle(leaves[i].shape, leaves[i].dtype, flat[i])
            continue

        def part(*inputs: Any, mine: Sequence[int] = tuple(mine)) -> list[Any]:
            leaves = jax.tree.leaves(init_fn(*inputs))
            return [leaves[i] for i in mine]

        built = jax.jit(part, out_shardings=[flat[i] for i in mine])(*_on(mesh, args))
        for i, array in zip(mine, built, strict=True):
            result[i] = array
    return jax.tree.unflatten(structure, result)


def _on(mesh: Mesh, args: Sequence[Any]) -> Sequence[Any]:
    """The arrays among arguments on all devices of a mesh, where several processes have to give them."""
    if all_here(devices_of(mesh)):
        return args
    placing, whole = InJob(Blanks()), NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: placing.put(x, whole) if isinstance(x, jax.Array) else x, args)
