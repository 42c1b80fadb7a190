"""Seconds of planning one step of Llama 3 8B on 8 hosts of 8 devices, part by part: `python -m benchmarks.llama_plan`.

trace      JAX traces the step twice and the traces become a graph
graph      layers, phases and what the stage keeps alive
build      strategies, resharding matrices, usages: the intra-op problem
simplify   the exact reductions alone, once, without the limit (part of solve)
solve      the solver, reductions included, to the gap asked for
price      decoding the solution and pricing it as it will be emitted
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
from alpa_lite.graph.phases import StepGraph
from alpa_lite.inter_op.stage_costs import free_restriction
from alpa_lite.intra_op.build import Builder
from alpa_lite.intra_op.catalogue import Catalogue
from alpa_lite.intra_op.problem import Problem, Solution
from alpa_lite.intra_op.simplify import simplify
from alpa_lite.intra_op.solve import price_choice
from alpa_lite.intra_op.solvers.auto import AutoSolver
from alpa_lite.intra_op.stage import StageView
from alpa_lite.layers import make_layers
from alpa_lite.mesh import LogicalMesh, Submesh
from alpa_lite.pricing import Pricer
from benchmarks.models.llama import Llama
from benchmarks.models.train import init_state, make_optimizer, make_train_step
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel

RELATIVE_GAP = 0.01
MESH = LogicalMesh(axis_names=("data", "model"), shape=(8, 8))


@dataclass(kw_only=True)
class Clock:
    """Adds up seconds by name."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure what runs inside."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def __str__(self) -> str:
        return "  ".join(f"{name} {seconds:6.2f} s" for name, seconds in self.seconds.items())


def traced_step(model: Llama, batch_size: int) -> StepGraph:
    """One step of AdamW with clipping, traced without arrays."""
    optimizer = make_optimizer(max_grad_norm=1.0)
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    tokens = jax.ShapeDtypeStruct((batch_size, model.seq_len), jnp.int32)
    step = make_train_step(model.loss_fn, optimizer)
    return al.parallelize(step).trace(state, {"tokens": tokens, "targets": tokens}).step().step


def built(step: StepGraph, cluster: Cluster, mesh: LogicalMesh, limit_bytes: float | None) -> tuple[Builder, Problem]:
    """The problem of the whole step as one stage, and what decodes its solutions."""
    view = StageView(step=step, layers=make_layers(step, 1), first=0, last=0)
    submesh = Submesh(first_device=0, num_hosts=cluster.num_hosts, devices_per_host=cluster.devices_per_host)
    pricer = Pricer(cost_model=ComposedCostModel(cluster), submesh=submesh, mesh=mesh)
    builder = Builder(view, Catalogue(pricer, free_restriction(mesh)))
    return builder, builder.problem(limit_bytes=limit_bytes, in_flight=1)


def size_of(problem: Problem) -> str:
    """Nodes, strategies, edges, entries of the matrices, usages."""
    entries = sum(edge.costs.size for edge in problem.edges)
    return (
        f"{len(problem.node_costs)} nodes, {sum(problem.num_strategies)} strategies, {len(problem.edges)} edges, "
        f"{entries} entries, {len(problem.usages)} usages"
    )


def answer(solution: Solution, step_seconds: float) -> str:
    """What came out."""
    gap = "unknown" if math.isinf(solution.gap) else f"{100 * solution.gap:.3f} %"
    return (
        f"{solution.status.value}, objective {solution.cost:.6f} s, gap {gap}, "
        f"peak {solution.peak_bytes / 1e9:.1f} GB, step {step_seconds:.6f} s"
    )


def measure(model: Llama, *, batch_size: int, cluster: Cluster, limits: list[float | None], time_limit: float) -> None:
    """Trace once, then plan under each limit; every plan starts with nothing remembered but the trace."""
    clock = Clock()
    with clock.part("trace"):
        step = traced_step(model, batch_size)
    form = "scan" if model.scan_layers else "loop"
    print(f"{form}: {len(step.graph.ops)} ops, batch {batch_size} × {model.seq_len}, {clock}", flush=True)
    for limit in limits:
        clock = Clock()
        with clock.part("build"):
            builder, problem = built(step, cluster, MESH, limit)
        with clock.part("simplify"):
            simplify(replace(problem, limit_bytes=None))
        with clock.part("solve"):
            solver = AutoSolver(relative_gap=RELATIVE_GAP)
            solution = solver.solve(problem, time_limit_seconds=time_limit)
        seconds = math.inf
        if solution.choices is not None:
            with clock.part("price"):
                view, pricer = builder.view, builder.catalogue.pricer
                priced = price_choice(
                    view,
                    pricer,
                    builder.choice(solution.choices),
                    solution.status,
                    solution.cost,
                    solution.bound,
                    1,
                    solution.peak_bytes,
                )
            seconds = priced.forward_seconds + priced.backward_seconds + priced.update_seconds
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
    options = parser.parse_args()
    cluster = al.cluster(options.cluster, num_hosts=8)
    for form in options.forms:
        model = Llama(num_layers=options.layers, scan_layers=form == "scan", remat=not options.no_remat)
        limits = [limit * 1e9 or None for limit in options.limits]
        measure(model, batch_size=options.batch_size, cluster=cluster, limits=limits, time_limit=options.time_limit)


if __name__ == "__main__":
    main()
