"""A start of one training step, as a program: `python -m tests.end_to_end.second_start FOLDER` tells what it did."""

from __future__ import annotations

import json
import sys

import jax

from tests.runtime.pipelines import arguments, step_with


def main(folder: str) -> None:
    """Plans are kept in a folder, executables in another below it."""
    jax.config.update("jax_compilation_cache_dir", f"{folder}/executables")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    import alpa_lite as al
    from alpa_lite.planners import Pipeline
    from tests.end_to_end.cases import eager_cluster

    scales = [0.5] * 8
    weights, x = arguments(8)
    step = al.parallelize(
        step_with(scales),
        cluster=eager_cluster(),
        planner=Pipeline(pipeline=4),
        num_microbatches=4,
        cache=f"{folder}/plans",
    )
    planned = step.trace(weights, x).plan()
    jax.clear_caches()
    events.clear()
    compiled = planned.lower().compile()
    found = {
        "cached": planned.cached,
        "requests": events.count("/jax/compilation_cache/compile_requests_use_cache"),
        "hits": events.count("/jax/compilation_cache/cache_hits"),
        "counts": str(compiled.executor.counts),
        "value": float(compiled(weights, x)[1]),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
