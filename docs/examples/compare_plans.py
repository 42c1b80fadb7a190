"""Price the classic manual plans beside the automatic one, on one cluster and by one cost model.

    python docs/examples/compare_plans.py

The step is that of `plan_without_devices.py`; no device is needed.
"""

from plan_without_devices import arguments, train_step

import alpa_lite as al
from alpa_lite.planners import FSDP, Auto, DataParallel, Hybrid, Megatron, Pipeline, Zero

PLANNERS = (
    Auto(),
    DataParallel(),
    Zero(stage=2),
    FSDP(),
    Megatron(),
    Megatron(tensor=2),
    Pipeline(pipeline=4),
    Hybrid(pipeline=2, data=2, tensor=2),
)


def main():
    """One line per planner, then what changes from data parallelism to the automatic plan."""
    cluster = al.cluster("p3.16xlarge")
    plans = {}
    print(f"{'planner':28} {'ms per step':>12} {'GiB per device':>15} {'bubble':>7}")
    for planner in PLANNERS:
        try:
            plan = al.plan(train_step, *arguments(), cluster=cluster, planner=planner)
        except al.AlpaLiteError as error:
            print(f"{planner.name:28} {error}")
            continue
        plans[planner.name] = plan
        seen = plan.prediction
        memory = max(seen.peak_bytes) / 2**30
        print(f"{planner.name:28} {1e3 * seen.step_seconds:12.1f} {memory:15.2f} {seen.bubble_fraction:7.0%}")

    best = plans["auto"]
    assert all(best.prediction.step_seconds <= plan.prediction.step_seconds for plan in plans.values())
    if "data parallel" in plans:
        print()
        print(plans["data parallel"].diff(best))


if __name__ == "__main__":
    main()
