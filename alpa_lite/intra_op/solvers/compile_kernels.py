"""Compile all numba kernels ahead of their first use (about 10 s, once).

Run it as `python -m alpa_lite.intra_op.solvers.compile_kernels`.
"""

from __future__ import annotations

import numpy as np

from alpa_lite.intra_op.problem import Edge, Problem, Usage
from alpa_lite.intra_op.reductions import Kept, Workspace, drop_dominated
from alpa_lite.intra_op.solvers.dual import Dual
from alpa_lite.intra_op.solvers.elimination import cheapest_choices, elimination_plan
from alpa_lite.intra_op.solvers.flat_problem import flat_problem
from alpa_lite.intra_op.solvers.improvements import recombine
from alpa_lite.intra_op.solvers.neighbourhood import Neighbourhood
from alpa_lite.sharding.reshard import SpecGraph
from alpa_lite.sharding.specs import Spec


def compile_kernels() -> None:
    """Run every kernel on a spec graph or a problem of two nodes, so that numba caches the compiled code on disk."""
    SpecGraph((2,), {"x": 2}).walks(Spec(((),)), 8).seconds(lambda step: step.bytes_factor)
    problem = Problem.of(
        node_costs=[np.array([0.0, 1.0])] * 2,
        edges=[Edge(source=0, target=1, costs=np.array([[0.0, 1.0], [2.0, 0.0]]))],
        usages=[Usage(node=node, bytes=np.array([2.0, 1.0]), start=0, end=1) for node in range(2)],
        limit_bytes=3.0,
    )
    drop_dominated(Workspace.load(problem), 0, Kept())
    cheapest_choices(elimination_plan(problem), problem.node_costs.values, problem.edge_costs.values)
    flat = flat_problem(problem)
    dual = Dual(flat=flat)
    dual.run(40, upper=2.0)  # memory gets prices only after the warm-up passes
    dual.strategies_left(2.0)
    # `recombine` begins with choices within the limit: strategies 1 keep 2 of 3 bytes alive.
    first, second = np.array([1, 1]), np.array([0, 0])
    Neighbourhood(flat=flat, seed=0).run(first, dual.best_prices, num_blocks=1, first_heat=1.0, last_heat=0.5)
    recombine(problem, flat, first, second)


if __name__ == "__main__":
    compile_kernels()
