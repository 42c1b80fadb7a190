"""The intra-op search over a whole step on one logical mesh, and what it found, by the names of the arguments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
import pytest

import alpa_lite as al
from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.solve import solve_stage
from alpa_lite.intra_op.stage import StageSolution, StageView
from alpa_lite.intra_op.strategies import FREE_CHOICE, AxisRole, BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.program.ir import Graph
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.step.clustering import make_layers
from tests.golden.alpha_beta import AlphaBeta
from tests.golden.models import Program

#: The mesh axes are named by the dim of the mesh that they are.
AXES = ("0", "1")

#: Dim 0 splits the batch and dim 1 all else, as a data parallel group of tensor parallel groups does.
DATA_AND_MODEL = Restriction(roles={"0": AxisRole.BATCH, "1": AxisRole.MODEL})


def data_parallel(
    *, optimizer: BatchSplit = BatchSplit.NEVER, parameters: BatchSplit = BatchSplit.NEVER
) -> Restriction:
    """Both dims split the batch; with or without the state."""
    return Restriction(roles=dict.fromkeys(AXES, AxisRole.BATCH), optimizer=optimizer, parameters=parameters)


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best layout of a program.

    objective   seconds of communication, each reader of a value paying for its own resharding
    specs       of the arguments that are arrays of rank 1 or more
    """

    objective: float
    solution: StageSolution
    specs: Mapping[str, Spec]

    @property
    def count(self) -> dict[str, int]:
        """How many collectives there are of each kind, those on scalars left out."""
        return dict(Counter(use.kind for use in self.solution.collectives if use.bytes > 4))

    def specs_of(self, prefix: str, suffix: str = "") -> list[str]:
        """The specs of the arguments with such names, as text, in order."""
        found = (name for name in self.specs if name.startswith(prefix) and name.endswith(suffix))
        return [str(self.specs[name]) for name in sorted(found)]


def search(
    program: Program,
    model: AlphaBeta,
    *,
    restriction: Restriction = FREE_CHOICE,
    limit_bytes: float | None = None,
) -> Found:
    """Lay out a program on the mesh of a cost model, as one stage and without micro-batches.

    Checks that the solution is optimal and that all contractions are split over all devices.
    """
    step = al.parallelize(program.run, batch_argnums=program.batch).trace(*program.args).step(1).step
    view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
    dims = [dim for dim in (0, 1) if model.shape[dim] > 1]
    mesh = LogicalMesh(axis_names=tuple(AXES[d] for d in dims), shape=tuple(model.shape[d] for d in dims))
    submesh = Submesh(first_device=0, num_hosts=model.shape[0], devices_per_host=model.shape[1])
    pricer = Pricer(cost_model=model, submesh=submesh, mesh=mesh)
    solution = solve_stage(Builder(view, Catalogue(pricer, restriction)), limit_bytes=limit_bytes)
    assert solution.choice is not None and solution.status is Status.OPTIMAL, solution.status
    least = model.seconds_per_flop * contraction_flops(step.graph) / mesh.num_devices
    assert solution.compute_seconds == pytest.approx(least), "some contraction is not split over all devices"
    values = step.graph.values
    return Found(
        objective=solution.objective - solution.compute_seconds,
        solution=solution,
        specs={values[v].name: spec for v, spec in solution.choice.inputs.items() if values[v].rank},
    )


def contraction_flops(graph: Graph) -> float:
    """Floating-point operations of the products and convolutions of a graph without loops."""
    rules = (rule_of_op(graph, op.id) for op in graph.ops)
    return sum(rule.flops for rule in rules if rule.work_kind != "elementwise")


def gradients(program: Program, model: AlphaBeta, dim: int, *, parts: int = 1) -> float:
    """Seconds to all_reduce the gradient of each parameter by itself, or one of so many parts of each."""
    return sum(model.all_reduce(4 * prod(leaf.shape) / parts, dim) for leaf in jax.tree.leaves(program.args[0]))
