"""Decorate a JAX train step; alpa_lite finds the best way to spread it over your devices, shows why, and runs it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from alpa_lite.export import register as _register_export
from alpa_lite.inspection import register as _register_views

if TYPE_CHECKING:  # type checkers and editors see the public names here; `__getattr__` imports them at run time
    from alpa_lite import errors, planners, schedule, serving
    from alpa_lite.api.advice import Advice, advise
    from alpa_lite.api.check import check
    from alpa_lite.api.comparison import PlannerComparison, compare
    from alpa_lite.api.parallelize import ParallelFunction, cluster, parallelize, plan
    from alpa_lite.api.stages import LoweredFunction, PlannedFunction, TracedFunction
    from alpa_lite.errors import AlpaLiteError
    from alpa_lite.inspection.page import figures
    from alpa_lite.plan.plan import Plan
    from alpa_lite.rules import register_rule
    from alpa_lite.runtime.calibrate.calibrate import Calibration, calibrate, local_cluster
    from alpa_lite.runtime.check_report import CheckReport
    from alpa_lite.runtime.checkpoint.checkpoints import Checkpoints
    from alpa_lite.runtime.execute.function import CompiledFunction, init_sharded
    from alpa_lite.runtime.job.processes import batch_sharding
    from alpa_lite.runtime.job.start import initialize

__version__ = "0.1.0"

__all__ = [
    "Advice",
    "AlpaLiteError",
    "Calibration",
    "CheckReport",
    "Checkpoints",
    "CompiledFunction",
    "LoweredFunction",
    "ParallelFunction",
    "Plan",
    "PlannedFunction",
    "PlannerComparison",
    "TracedFunction",
    "__version__",
    "advise",
    "batch_sharding",
    "calibrate",
    "check",
    "cluster",
    "compare",
    "errors",
    "figures",
    "init_sharded",
    "initialize",
    "local_cluster",
    "parallelize",
    "plan",
    "planners",
    "register_rule",
    "schedule",
    "serving",
]

_SOURCES = {
    "Advice": "api.advice",
    "AlpaLiteError": "errors",
    "Calibration": "runtime.calibrate.calibrate",
    "CheckReport": "runtime.check_report",
    "Checkpoints": "runtime.checkpoint.checkpoints",
    "CompiledFunction": "runtime.execute.function",
    "LoweredFunction": "api.stages",
    "ParallelFunction": "api.parallelize",
    "Plan": "plan.plan",
    "PlannedFunction": "api.stages",
    "PlannerComparison": "api.comparison",
    "TracedFunction": "api.stages",
    "advise": "api.advice",
    "batch_sharding": "runtime.job.processes",
    "calibrate": "runtime.calibrate.calibrate",
    "check": "api.check",
    "cluster": "api.parallelize",
    "compare": "api.comparison",
    "init_sharded": "runtime.execute.function",
    "initialize": "runtime.job.start",
    "local_cluster": "runtime.calibrate.calibrate",
    "parallelize": "api.parallelize",
    "plan": "api.parallelize",
    "register_rule": "rules",
}
"""The modules that define public names; the others are sub-packages."""

_MODULES = {
    "errors": "errors",
    "figures": "inspection.page.figures",
    "planners": "planners",
    "schedule": "schedule",
    "serving": "serving",
}
"""Public modules, and where they are."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import alpa_lite` alone, as `alpa-lite --version` does, is cheap."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        value = import_module(f"{__name__}.{_MODULES[name]}")
    else:
        value = getattr(import_module(f"{__name__}.{_SOURCES[name]}"), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def __dir__() -> list[str]:
    """Show what is public; the rooms of the package are modules like any other, but no part of its surface."""
    return __all__


class _Package(ModuleType):
    """The type of this module, in which `plan` is always the function."""

    def __setattr__(self, name: str, value: object) -> None:
        # The import system binds each sub-package to its parent once it is imported, and would thereby replace the
        # public function `plan` by the sub-package of that name, sooner or later depending on what is used first.
        if name == "plan" and isinstance(value, ModuleType):
            return
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
_register_views()
_register_export()
