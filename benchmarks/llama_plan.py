"""Seconds of planning one step of Llama 3 8B on 8 hosts of 8 devices, part by part: `python -m benchmarks.llama_plan`.

trace      JAX traces the step at two batch sizes, and the traces become a graph with phases
layers     the layers of the graph, and the values that their one stage reads, makes and keeps alive
build      strategies, resharding matrices, usages: the intra-op problem
solve      the solver, to a gap of 1 %; simplify, its exact reductions, is also timed alone and without the limit
price      decoding the solution, and pricing the program that it emits

The mesh is 8 × 8. As in the search, its first axis splits the batch and may split state, and its second everything
else; with --free-axes both axes are unrestricted.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.cli.models.decoders import Llama
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.inter_op.stage_costs import free_restriction
from alpa_lite.intra_op.formulate import Builder
from alpa_lite.intra_op.problem import Problem, Solution
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solve import price_choice
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.intra_op.stage import StageView
from alpa_lite.intra_op.strategies import BatchSplit, Restriction
from alpa_lite.intra_op.strategy_catalogue import Catalogue
from alpa_lite.plan.pricing import Pricer
from alpa_lite.program.phases import StepGraph
from alpa_lite.sharding.meshes import LogicalMesh, Submesh
from alpa_lite.step.clustering import make_layers
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel

RELATIVE_GAP = 0.01
MESH = LogicalMesh(axis_names=("data", "model"), shape=(8, 8))


@dataclass(kw_only=True)
class Clock:
    """A clock that adds up seconds by name."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the block under a name."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        return "  ".join(f"{name} {seconds:6.2f} s" for name, seconds in self.seconds.items())


def traced_step(model: Llama, batch_size: int) -> StepGraph:
    """Trace one step of AdamW with clipping, without arrays."""
    optimizer = make_optimizer(max_grad_norm=1.0)
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    tokens = jax.ShapeDtypeStruct((batch_size, model.seq_len), jnp.int32)
    step = make_train_step(model.loss_fn, optimizer)
    return al.parallelize(step).trace(state, {"tokens": tokens, "targets": tokens}).step().step


def new_builder(view: StageView, cluster: Cluster, *, free_axes: bool) -> Builder:
    """Return a builder for a stage on the whole cluster, with empty memos."""
    submesh = Submesh(first_device=0, num_hosts=cluster.num_hosts, devices_per_host=cluster.devices_per_host)
    pricer = Pricer(cost_model=ComposedCostModel(cluster), submesh=submesh, mesh=MESH)
    free = Restriction(optimizer=BatchSplit.MAY, parameters=BatchSplit.MAY)
    return Builder(view, Catalogue(pricer, free if free_axes else free_restriction(MESH)))


def size_of(problem: Problem) -> str:
    """Describe a problem by its nodes, strategies, edges, matrix entries and usages."""
    entries = problem.edge_costs.values.size
    return (
        f"{problem.num_nodes} nodes, {problem.node_costs.values.size} strategies, {len(problem.edge_costs)} edges, "
        f"{entries} entries, {problem.usage_nodes.size} usages"
    )


def answer(solution: Solution, step_seconds: float) -> str:
    """Describe a solution in one line."""
    gap = "unknown" if math.isinf(solution.gap) else f"{100 * solution.gap:.3f} %"
    return (
        f"{solution.status.value}, objective {solution.cost:.6f} s, gap {gap}, "
        f"peak {solution.peak_bytes / 1e9:.1f} GB, step {step_seconds:.6f} s"
    )


def measure(model: Llama, options: argparse.Namespace) -> None:
    """Trace once, then plan under each memory limit; only the trace and the view are shared between plans."""
    cluster = al.cluster(options.cluster, num_hosts=8)
    clock = Clock()
    with clock.part("trace"):
        step = traced_step(model, options.batch_size)
    with clock.part("layers"):
        view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
        print(f"{'scan' if model.scan_layers else 'loop'}: {len(view.ops)} ops", end=", ", flush=True)
    print(f"batch {options.batch_size} × {model.seq_len}, {clock}", flush=True)
    for limit in (gigabytes * 1e9 or None for gigabytes in options.limits):
        clock = Clock()
        with clock.part("build"):
            builder = new_builder(view, cluster, free_axes=options.free_axes)
            problem = builder.problem(limit_bytes=limit, in_flight=1)
        with clock.part("simplify"):
            simplify(replace(problem, limit_bytes=None))
        with clock.part("solve"):
            solver = Portfolio(relative_gap=RELATIVE_GAP)
            solution = solver.solve(problem, time_limit_seconds=options.time_limit)
        seconds = math.inf
        if solution.choices is not None:
            with clock.part("price"):
                priced = price_choice(builder, builder.choice(solution.choices), solution, 1)
            seconds = priced.cost.step_seconds(1)
        total = sum(s for name, s in clock.seconds.items() if name != "simplify")
        name = "no limit" if limit is None else f"{limit / 1e9:.0f} GB"
        print(f"  {name:>8}: {clock}  total {total:6.2f} s\n            {size_of(problem)}", flush=True)
        print(f"            {answer(solution, seconds)}", flush=True)


def main() -> None:
    """Print a few lines per form of the model and memory limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="p4de.24xlarge")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--forms", nargs="+", choices=("loop", "scan"), default=["loop", "scan"])
    parser.add_argument("--limits", nargs="+", type=float, default=[0, 80, 20], help="GB per device; 0 for none")
    parser.add_argument("--no-remat", action="store_true", help="save all activations")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver")
    parser.add_argument("--free-axes", action="store_true", help="both axes of the mesh may split anything")
    options = parser.parse_args()
    for form in options.forms:
        model = Llama(num_layers=options.layers, scan_layers=form == "scan", remat=not options.no_remat)
        measure(model, options)


if __name__ == "__main__":
    main()
