"""Walks between specs on devices: the collectives that are emitted bring every block where the spec says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from alpa_lite.lower.emission import boundary_spec
from alpa_lite.lower.local_machine import move
from alpa_lite.sharding.reshard import reshard
from alpa_lite.sharding.specs import Spec
from tests.sharding.test_specs import all_specs

MESHES = [{"x": 8}, {"x": 2, "y": 4}, {"x": 2, "y": 2, "z": 2}]
SHAPE = (8, 16)


def _drawn(sizes: dict[str, int], kind: str, count: int = 6) -> list[tuple[Spec, Spec]]:
    """Pairs of specs whose walk holds a move of a kind."""
    specs, rng, found = all_specs(SHAPE, sizes, partial=False), np.random.default_rng(0), list[tuple[Spec, Spec]]()
    for i, j in rng.integers(0, len(specs), (3000, 2)):
        steps = reshard(specs[i], specs[j], SHAPE, sizes) or ()
        if any(step.kind == kind for step in steps) and len(found) < count:
            found.append((specs[i], specs[j]))
    return found


@pytest.mark.parametrize("kind", ["permute", "all_to_all", "all_gather", "slice"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_every_kind_of_move_on_devices(sizes: dict[str, int], kind: str, devices: Any) -> None:
    mesh = Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))
    array, pairs = jnp.arange(128.0).reshape(SHAPE), _drawn(sizes, kind)
    assert pairs or (kind == "permute" and len(sizes) == 1)

    def walk(source: Spec, target: Spec) -> Any:
        def run(x: Any) -> Any:
            for step in reshard(source, target, SHAPE, sizes) or ():
                x = move(x, step, sizes)
            return x

        specs = dict(in_specs=boundary_spec(source), out_specs=boundary_spec(target))
        return jax.shard_map(run, mesh=mesh, check_vma=False, **specs)(array)

    for moved in jax.jit(lambda: [walk(source, target) for source, target in pairs])():
        np.testing.assert_array_equal(moved, array)
