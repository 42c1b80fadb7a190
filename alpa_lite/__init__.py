"""Decorate a JAX train step; alpa_lite finds the best way to spread it over your devices, shows why, and runs it."""

from alpa_lite import errors, planners, schedule
from alpa_lite.api.check import check
from alpa_lite.api.parallelize import (
    Calibration,
    Checkpoints,
    CheckReport,
    CompiledFunction,
    LoweredFunction,
    ParallelFunction,
    PlannedFunction,
    TracedFunction,
    calibrate,
    cluster,
    init_sharded,
    local_cluster,
    parallelize,
    plan,
)
from alpa_lite.errors import AlpaLiteError
from alpa_lite.inspection import views
from alpa_lite.plan.plan import Plan
from alpa_lite.rules import register_rule
from alpa_lite.runtime.job.processes import batch_sharding
from alpa_lite.runtime.job.start import initialize

__version__ = "0.1.0"

__all__ = [
    "AlpaLiteError",
    "Calibration",
    "CheckReport",
    "Checkpoints",
    "CompiledFunction",
    "LoweredFunction",
    "ParallelFunction",
    "Plan",
    "PlannedFunction",
    "TracedFunction",
    "__version__",
    "batch_sharding",
    "calibrate",
    "check",
    "cluster",
    "errors",
    "init_sharded",
    "initialize",
    "local_cluster",
    "parallelize",
    "plan",
    "planners",
    "register_rule",
    "schedule",
]


def __dir__() -> list[str]:
    """Show what is public; the rooms of the package are modules like any other, but no part of its surface."""
    return __all__


views.register()
