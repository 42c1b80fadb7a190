"""`check`: compare a step that runs by its plan with `jax.jit`, on the devices of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import jax

from alpa_lite._jax import Tree
from alpa_lite.api.options import Options
from alpa_lite.api.parallelize import ParallelFunction
from alpa_lite.api.plan_cache import Cache
from alpa_lite.errors import ExecutionError
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.progress import Progress, Say
from alpa_lite.planners import Planner
from alpa_lite.runtime.check_report import CheckReport
from alpa_lite.runtime.compare import check_compiled, check_one_process
from alpa_lite.step.split import OnNonAdditive
from alpa_lite.trace.batch import BatchArgnums
from cost_models.cluster import Cluster


def check(
    step: Callable[..., Tree],
    *args: Tree,
    planner: Planner | type[Planner] | Plan | str | None = None,
    num_microbatches: int | str | None = None,
    cluster: Cluster | str | PathLike[str] | None = None,
    batch_argnums: BatchArgnums = None,
    static_argnums: int | Sequence[int] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    on_non_additive: OnNonAdditive | None = None,
    progress: Say | Progress | None = None,
    cache: Cache | None = None,
    **kwargs: Tree,
) -> CheckReport:
    """Run `step(*args, **kwargs)` by a plan and under `jax.jit`, and compare every output.

    An output agrees if it differs by no more than 32 rounding steps (8 in float16, bfloat16 or below). A rounding step
    is the change of the output under `jax.jit` when each float input moves up or down by one unit in the last place,
    but at least one unit in the last place of the output's largest number. Integers, booleans and keys must be equal,
    unless `jax.jit` itself changes them under that perturbation. Dtypes, shapes and the structure of the outputs must
    agree; NaN equals NaN.

    The step runs once by the plan and about six times under `jax.jit`, on one device, on copies of the arguments: the
    caller's arrays are left alone, donated arguments included. Use small sizes.

    Args:
        step: a function, or one that `parallelize` decorated, whose options then apply where none is given here.
        args: the arguments of the step. A `jax.ShapeDtypeStruct` is replaced by reproducible random values: normal
            floats of standard deviation 0.1, integers 0 and 1, booleans, and random keys.
        planner: as for `parallelize`; a `Plan` is replayed.
        num_microbatches: a number that divides the batch, or "auto".
        cluster: the cluster to plan for, with as many devices as this process. Default: the devices of this process.
        batch_argnums: as for `parallelize`.
        static_argnums: as for `parallelize`.
        donate_argnums: as for `parallelize`.
        on_non_additive: as for `parallelize`.
        progress: as for `parallelize`.
        cache: as for `parallelize`.
        kwargs: keyword arguments of the step.

    Returns:
        The report, which prints as a table.

    Raises:
        CheckError: an output differs; the message names the worst ones, and `error.report` is the report.
        ExecutionError: the cluster has another number of devices, or this process is one of several.
        AlpaLiteError: the step cannot be traced or planned.
    """
    given = {
        "planner": planner,
        "num_microbatches": num_microbatches,
        "cluster": cluster,
        "batch_argnums": batch_argnums,
        "static_argnums": static_argnums,
        "donate_argnums": donate_argnums,
        "on_non_additive": on_non_additive,
        "progress": progress,
        "cache": cache,
    }
    return check_step(step, args, kwargs, given)


def check_step(
    step: Callable[..., Tree], args: Sequence[Tree], kwargs: Mapping[str, Tree], given: Mapping[str, Any]
) -> CheckReport:
    """Run `check` with the options as a mapping; None means that an option is not given."""
    # Both refusals come before tracing and planning, which may take minutes.
    check_one_process()
    decorated = isinstance(step, ParallelFunction)
    # None stands for an option that was left out, so that a decorated step keeps its own value of it.
    named = {name: value for name, value in given.items() if value is not None}
    # The values pass the same checks as those of `parallelize`; only those given replace the step's own.
    chosen = Options.of(**named)
    own = step.options if decorated else Options()
    options = replace(own, check=False, **{name: getattr(chosen, name) for name in named})
    _check_runs_here(options.cluster)
    # A new wrapper leaves the compiled steps and `last_plan` of the caller's step alone.
    function = ParallelFunction(step.fun if decorated else step, options)
    return check_compiled(function.trace(*args, **kwargs).plan().lower().compile(), args, kwargs)


def _check_runs_here(cluster: Cluster | None) -> None:
    """Raise `ExecutionError` if the cluster has another number of devices than this process."""
    here = len(jax.devices())
    if cluster is not None and cluster.num_devices != here:
        raise ExecutionError(
            f"A check runs the step, but {cluster.name} has {cluster.num_devices} devices and this process {here}. "
            "Leave cluster out or give al.local_cluster(), or check with as many virtual CPU devices (`alpa-lite "
            f"check --devices {cluster.num_devices}`, or the variables that `alpa-lite doctor` prints)."
        )
