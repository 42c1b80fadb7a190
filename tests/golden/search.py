"""The intra-op search over a whole step on one logical mesh, and what it found, by the names of the arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import alpa_lite as al
from alpa_lite.intra_op.catalogue import Catalogue
from alpa_lite.intra_op.solve import StageSolution, solve_stage
from alpa_lite.intra_op.stage import StageView
from alpa_lite.layers import make_layers
from alpa_lite.mesh import LogicalMesh, Submesh
from alpa_lite.plan import CollectiveUse
from alpa_lite.pricing import Pricer
from alpa_lite.sharding import Spec
from alpa_lite.strategies import FREE_CHOICE, Restriction
from tests.golden.alpha_beta import AlphaBeta


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best sharding of a step: seconds of communication, collectives on arrays, specs of the arguments."""

    communication: float
    solution: StageSolution
    specs: Mapping[str, Spec]
    ranks: Mapping[str, int]

    @property
    def collectives(self) -> tuple[CollectiveUse, ...]:
        return self.solution.collectives

    def count(self, *, least_bytes: float = 5) -> Counter[str]:
        """Collectives by kind, those on scalars left out."""
        return Counter(use.kind for use in self.collectives if use.bytes >= least_bytes)


AXES = ("0", "1")


def search(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    model: AlphaBeta,
    *,
    restriction: Restriction = FREE_CHOICE,
    batch_argnums: Any = None,
) -> Found:
    """Lay out a step on the mesh of a cost model, as one stage and without micro-batches or a memory limit."""
    traced = al.parallelize(step, batch_argnums=batch_argnums).trace(*args)
    graph_step = traced.step(1).step
    view = StageView(step=graph_step, layers=make_layers(graph_step, 1), first=0, last=0)
    dims = [d for d in (0, 1) if model.shape[d] > 1]
    mesh = LogicalMesh(axis_names=tuple(AXES[d] for d in dims), shape=tuple(model.shape[d] for d in dims))
    submesh = Submesh(first_device=0, num_hosts=model.shape[0], devices_per_host=model.shape[1])
    pricer = Pricer(cost_model=model, submesh=submesh, mesh=mesh)
    solution = solve_stage(view, Catalogue(pricer, restriction), limit_bytes=None)
    assert solution.choice is not None
    assert solution.status.value == "optimal", solution.status
    values = graph_step.graph.values
    specs = {values[v].name: spec for v, spec in solution.choice.inputs.items()}
    return Found(
        communication=solution.objective - solution.compute_seconds,
        solution=solution,
        specs=specs,
        ranks={values[v].name: values[v].rank for v in solution.choice.inputs},
    )
