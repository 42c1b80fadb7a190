"""Time the two dynamic programs of the search at the sizes of large models: `python -m benchmarks.search`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import numpy as np

from alpa_lite.inter_op.stage_dp import PipelineTerms, StageTable, solve
from alpa_lite.sharding.meshes import submesh_kinds
from alpa_lite.step.clustering import Flow, cluster_contiguous

REPEATS = 5


def random_flows(num_ops: int, num_flows: int) -> list[Flow]:
    """Return random values that pass between ops of the program."""
    rng = np.random.default_rng(0)
    pairs = [sorted(rng.choice(num_ops, 2, replace=False).tolist()) for _ in range(num_flows)]
    return [Flow(first, [second], float(rng.integers(1, 10**9))) for first, second in pairs]


def random_table(
    num_layers: int,
    *,
    kinds: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 40, 48, 64),
    num_configurations: int = 8,
    seed: int = 1,
) -> StageTable:
    """Return stage times proportional to the work and to the number of devices of each kind, with noise."""
    rng = np.random.default_rng(seed)
    ends = np.concatenate([[0.0], np.cumsum(rng.uniform(0.5, 1.5, num_layers))])
    work = np.abs(ends[None, 1:] - ends[:-1, None])[:, :, None, None]
    shape = (num_layers, num_layers, len(kinds), num_configurations)
    seconds = work / np.array(kinds)[:, None] ** 0.9 * rng.uniform(1.0, 1.3, shape)
    return StageTable(seconds=seconds, max_following_stages=rng.integers(-1, 12, shape), submesh_devices=kinds)


def timed(function: Callable[[], object]) -> float:
    """Return the median seconds of a few calls."""
    times: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def main() -> None:
    """Print one line per size."""
    for num_ops, num_layers in ((500, 8), (2000, 32), (8000, 32)):
        flops, flows = np.linspace(0.5, 1.5, num_ops), random_flows(num_ops, num_ops * 3 // 2)
        seconds = timed(lambda f=flops, w=flows, n=num_layers: cluster_contiguous(f, w, n))
        print(
            f"clustering   {num_ops:5} ops into {num_layers:2} layers                     {seconds:8.3f} s", flush=True
        )
    for num_layers, num_hosts in ((8, 8), (16, 8), (32, 8), (16, 128), (32, 512)):
        kinds, num_devices = tuple(hosts * devices for hosts, devices in submesh_kinds(num_hosts, 8)), num_hosts * 8
        table = random_table(num_layers, kinds=kinds)
        # By first layer, and faster over more links.
        links = np.minimum.outer(kinds, kinds)
        table = replace(table, inflow_seconds=np.linspace(0.0, 0.01, num_layers)[:, None, None] / links)
        seconds = timed(lambda t=table, d=num_devices: solve(t, PipelineTerms(num_devices=d, num_microbatches=64)))
        print(
            f"stage search {num_layers:5} layers on {num_devices:4} devices, {len(kinds):2} kinds         "
            f"     {seconds:8.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
