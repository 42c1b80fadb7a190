"""The files of the passes: one per pass, in order, the last with the step that is lowered."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.program.show import show


def _step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)[0] ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return params - 0.1 * grads, value


def test_each_pass_has_a_file_and_the_last_holds_the_step_as_planned(tmp_path: Path) -> None:
    arguments = jax.ShapeDtypeStruct((4, 16, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    planner = al.planners.Hybrid(pipeline=2, remat="full")
    traced = al.parallelize(_step, batch_argnums=(1,), cache=False).trace(*arguments)
    made = traced.plan(cluster="p3.16xlarge", planner=planner, num_microbatches=2)
    index = made.dump_passes(tmp_path / "passes")
    files = sorted(path for path in index.parent.iterdir() if path != index)
    rows = [line.split() for line in index.read_text().splitlines()[3:]]
    assert [row[0] for row in rows] == [path.name for path in files]
    assert [int(path.name[:2]) for path in files] == list(range(len(files)))
    names = [path.stem[3:] for path in files]
    for earlier, later in pairwise(ORDER):
        assert names.index(earlier) < names.index(later)
    assert names[-1] == ORDER[-1]
    step = made.lower().step.step
    assert files[-1].read_text() == show(step.graph, step=step) + "\n"
    seconds, num_ops, with_bodies = rows[-1][1:]
    assert int(num_ops) == len(step.graph.ops) and int(with_bodies) == len([*step.graph.walk()]) and float(seconds) >= 0


ORDER = (
    "from-jaxpr",
    "sink-free-values",
    "split-stacked-arrays",
    "merge-sizes",
    "assign-phases",
    "read-within-layers",
    "rematerialise",
)
"""Passes in the order in which they first run."""
