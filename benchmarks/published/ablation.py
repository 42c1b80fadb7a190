"""The cost model without one of its terms, to measure what the term contributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from benchmarks.published.predict import Predictor
from cost_models.cluster import Cluster
from cost_models.hardware import Backend, Link


def _without_fusion(backend: Backend) -> Backend:
    return replace(backend, fusion="none", fused_attention=False)


def _without_overlap(backend: Backend) -> Backend:
    return replace(backend, overlap=False, overlap_gradients=False, overlap_products=False)


def _without_efficiency_curve(cluster: Cluster) -> Cluster:
    """Return the cluster with the efficiency of the largest product for all products."""
    return replace(cluster, device=replace(cluster.device, num_units=1, tiles=((1, 1),), fill_depth=0.0))


def _without_latency(cluster: Cluster) -> Cluster:
    """Return the cluster without start-up times of kernels and messages, whose hosts end their steps together."""

    def prompt(link: Link) -> Link:
        return replace(link, latency_seconds=0.0, ramp_seconds=0.0, skew_seconds=0.0)

    return replace(
        cluster,
        device=replace(cluster.device, launch_seconds=0.0, dispatch_seconds=0.0),
        intra_host=prompt(cluster.intra_host),
        inter_host=prompt(cluster.inter_host),
    )


ABLATIONS: Mapping[str, Callable[[Predictor], Predictor]] = {
    "nothing": lambda predictor: predictor,
    "fusion": lambda predictor: replace(predictor, change_backend=_without_fusion),
    "overlap": lambda predictor: replace(predictor, change_backend=_without_overlap),
    "efficiency curve": lambda predictor: replace(predictor, change_cluster=_without_efficiency_curve),
    "latency": lambda predictor: replace(predictor, change_cluster=_without_latency),
}
