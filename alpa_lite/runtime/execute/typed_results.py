"""Return results with the types that `jax.jit` gives them, under a mesh of the user with explicit axis types.

JAX refuses operations on arrays of another mesh than the one that is set. A result that lies as its type says is
returned as the same buffers under that type; others are moved after each step. State that the caller left where the
plan has it, as `place` and `init_sharded` do, stays there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from alpa_lite._jax import TreeLeaf
from alpa_lite.runtime.execute.placing import described
from alpa_lite.text import show_bytes
from alpa_lite.trace.explicit_types import Types, has_explicit_types
from alpa_lite.trace.trace import Traced

_logger = logging.getLogger("alpa_lite")


class TypedResults:
    """The types of the results of a step, for each mesh and types of arguments."""

    def __init__(self, traced: Traced) -> None:
        """Start without types."""
        self._traced = traced
        self._types: dict[object, Types | None] = {}

    def __call__(self, leaves: Sequence[TreeLeaf], outputs: list[jax.Array]) -> list[jax.Array]:
        """Return the results of a step on some arguments, with their types."""
        # This runs in every step, and takes 1 µs where no mesh is set.
        if jax.sharding.get_abstract_mesh().empty:
            return outputs
        mesh = jax.sharding.get_mesh()
        # `device_put` moves nothing to devices of other processes.
        if not has_explicit_types(mesh) or jax.process_count() > 1:
            return outputs
        key = (mesh, *(getattr(leaf, "sharding", None) for leaf in leaves))
        is_new = key not in self._types
        if is_new:
            self._types[key] = self._traced.result_types(mesh, leaves)
        types = self._types[key]
        if types is None:
            return outputs
        found, moved = [*outputs], list[int]()
        for i, (array, wanted) in enumerate(zip(outputs, types, strict=True)):
            # Results of float0 are arrays of NumPy's.
            if wanted is not None and isinstance(array, jax.Array):
                if array.sharding.is_equivalent_to(wanted, array.ndim):
                    found[i] = described(array, wanted)
                else:
                    moved.append(i)
        if is_new and moved:
            self._tell(mesh, [outputs[i] for i in moved])
        for i, array in zip(moved, jax.device_put([found[i] for i in moved], [types[i] for i in moved]), strict=True):
            found[i] = array
        return found

    def _tell(self, mesh: Mesh, moved: Sequence[jax.Array]) -> None:
        _logger.info(
            "%s: %d results (%s) lie elsewhere than their types on your mesh %s say, and move there after each step; "
            'user_shardings="pin" plans for the types of arguments',
            self._traced.name,
            len(moved),
            show_bytes(sum(array.nbytes for array in moved)),
            dict(mesh.shape),
        )
