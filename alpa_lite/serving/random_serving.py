"""Draw serving problems at random, for tests and comparisons of solvers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from alpa_lite.serving.workflow import (
    DEFAULT_VARIANT,
    AccuracySample,
    MessageSource,
    ModelVariant,
    ServingOperator,
    ServingProblem,
    TieredWorker,
    WorkflowEdge,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSizes:
    """What to draw.

    Attributes:
        operators: number of operators, each of which reads one or two of those before it, or a source.
        variants: greatest number of models of each.
        workers: number of workers.
        tiers: number of tiers. Prices of links add up from tier to tier.
    """

    operators: int = 3
    variants: int = 2
    workers: int = 6
    tiers: int = 2


def random_serving_problem(seed: int, sizes: ServingSizes | None = None) -> ServingProblem:
    """Return the problem of a seed. More accurate models are slower, and higher tiers faster and dearer.

    The workers may be too few to serve it.
    """
    sizes, draw = sizes or ServingSizes(), random.Random(seed)
    hops = [round(draw.uniform(0.05, 0.5), 3) for _ in range(sizes.tiers)]
    workers = tuple(
        TieredWorker(
            name=f"worker-{number}", tier=tier, dollars_per_hour=round((1 + 2 * tier) * draw.uniform(0.1, 1), 3)
        )
        # Every tier has a worker where there are enough.
        for number, tier in enumerate(sorted(each % sizes.tiers for each in range(sizes.workers)))
    )
    inputs = {
        number: sorted(draw.sample(range(number), min(number, draw.choice((0, 1, 1, 2)))))
        for number in range(sizes.operators)
    }
    read = {each for given in inputs.values() for each in given}
    last = sizes.operators - 1
    # Operators that nothing reads are read by the last one, the sink.
    inputs[last] = sorted({*inputs[last], *(each for each in range(last) if each not in read)})
    sources = tuple(
        MessageSource(name=f"source-{number}", messages_per_second=float(draw.randint(5, 40)))
        for number, given in inputs.items()
        if not given
    )
    edges = [
        WorkflowEdge(
            sender=f"operator-{each}",
            receiver=f"operator-{number}",
            kib={(DEFAULT_VARIANT, DEFAULT_VARIANT): round(draw.uniform(1, 500), 2)},
            ratio=draw.choice((1.0, 1.0, 0.5)),
        )
        for number, given in inputs.items()
        for each in given
    ] + [
        WorkflowEdge(
            sender=source.name,
            receiver=source.name.replace("source", "operator"),
            kib={(DEFAULT_VARIANT, DEFAULT_VARIANT): round(draw.uniform(50, 1000), 2)},
        )
        for source in sources
    ]
    tiers = {source.name: 0 for source in sources} | {worker.name: worker.tier for worker in workers}
    return ServingProblem(
        name=f"random-{seed}",
        sources=sources,
        operators=tuple(_operator(draw, number, len(given), sizes, workers) for number, given in inputs.items()),
        edges=tuple(edges),
        workers=workers,
        link_dollars_per_gib={
            (sender, worker.name): round(sum(hops[tier : worker.tier]), 3)
            for sender, tier in tiers.items()
            for worker in workers
            if worker.tier > tier
        },
    )


def _operator(
    draw: random.Random, number: int, num_inputs: int, sizes: ServingSizes, workers: tuple[TieredWorker, ...]
) -> ServingOperator:
    variants: list[ModelVariant] = []
    accuracy, milliseconds = draw.uniform(50, 60), draw.uniform(20, 60)
    for place in range(draw.randint(1, sizes.variants)):
        accuracy, milliseconds = accuracy + draw.uniform(1, 10), milliseconds * draw.uniform(1.2, 2)
        # The second sample asks for better inputs and gives a better output.
        samples = tuple(
            AccuracySample(inputs=(50.0 + 8 * step,) * num_inputs, output=round(accuracy + 3 * step, 2))
            for step in range(2 if num_inputs else 1)
        )
        latency = {
            worker.name: round(milliseconds / (1 + 2 * worker.tier) * draw.uniform(0.7, 1.4), 2)
            for worker in workers
            # Some workers cannot run some models.
            if draw.random() < 0.9
        }
        variants.append(
            ModelVariant(name=f"model-{place}", cost=round(milliseconds, 2), samples=samples, latency_ms=latency)
        )
    return ServingOperator(name=f"operator-{number}", variants=tuple(variants))
