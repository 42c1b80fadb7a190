"""Serve a ResNet on cameras' own accelerators and in the cloud, with latencies from the cost model.

    python docs/examples/serve_edge_and_cloud.py

Nothing is compiled: each latency is that of a plan for one described accelerator. The accuracies are those of the
published VQA instance (top 5, in percent); prices are made up.
"""

import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.cli.models.skip_networks import ResNet
from alpa_lite.serving import (
    AccuracySample,
    Exact,
    JellyBean,
    MessageSource,
    ServingOperator,
    ServingProblem,
    TieredWorker,
    WorkflowEdge,
    compare_solvers,
    variant_of_plans,
)

WORKERS = {
    "edge-l4-1": TieredWorker(name="edge-l4-1", dollars_per_hour=0.2, tier=0),
    "edge-l4-2": TieredWorker(name="edge-l4-2", dollars_per_hour=0.2, tier=0),
    "cloud-h100": TieredWorker(name="cloud-h100", dollars_per_hour=6.0, tier=1),
}
CLUSTERS = {"edge": al.cluster("g2-standard-96").part(0, 1), "cloud": al.cluster("dgx-h100").part(0, 1)}
MODELS = {
    "resnet50": ((3, 4, 6, 3), 92.866),
    "resnet101": ((3, 4, 23, 3), 93.548),
    "resnet152": ((3, 8, 36, 3), 94.05),
}
"""Blocks of each stage, and the accuracy."""

FRAMES_PER_STEP = 8


def model_variant(name):
    """A ResNet of one depth with its predicted latency on each worker."""
    blocks, accuracy = MODELS[name]
    model = ResNet(stage_sizes=blocks)
    params = jax.eval_shape(model.init, jax.random.key(0))
    images = jax.ShapeDtypeStruct((FRAMES_PER_STEP, 224, 224, 3), jnp.float32)
    plans = {
        tier: al.plan(model.logits, params, images, cluster=cluster, planner="data_parallel")
        for tier, cluster in CLUSTERS.items()
    }
    on_workers = {worker: plans[worker.split("-")[0]] for worker in WORKERS}
    samples = [AccuracySample(output=accuracy)]
    return variant_of_plans(name, on_workers, samples, messages_per_step=FRAMES_PER_STEP)


def main():
    """Predict latencies, then serve at several accuracies."""
    variants = tuple(map(model_variant, MODELS))
    for variant in variants:
        times = {worker: f"{ms:.2f} ms" for worker, ms in variant.latency_ms.items() if not worker.endswith("2")}
        print(f"{variant.name:9} {times}")
    problem = ServingProblem(
        name="cameras",
        sources=(MessageSource(name="camera", messages_per_second=800.0),),
        operators=(ServingOperator(name="classify", variants=variants),),
        edges=(WorkflowEdge(sender="camera", receiver="classify", kib={("default", "default"): 60.0}),),
        workers=tuple(WORKERS.values()),
        link_dollars_per_gib={(sender, "cloud-h100"): 0.09 for sender in ("camera", "edge-l4-1", "edge-l4-2")},
    )
    for accuracy in (92, 93, 94):
        print(JellyBean().plan(problem, accuracy))
    found = compare_solvers(problem, 94, solver=Exact())
    path = Path(tempfile.mkdtemp()) / "serving.html"
    found.to_html(path)
    print(f"edge and cloud: {found.plan!r}, drawn in {path.name}")


if __name__ == "__main__":
    main()
