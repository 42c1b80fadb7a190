"""Decorate a JAX train step; alpa_lite finds the best way to spread it over your devices, shows why, and runs it."""

from alpa_lite import errors as errors
from alpa_lite import planners as planners
from alpa_lite import schedule as schedule
from alpa_lite.api.check import check as check
from alpa_lite.api.parallelize import Calibration as Calibration
from alpa_lite.api.parallelize import Checkpoints as Checkpoints
from alpa_lite.api.parallelize import CheckReport as CheckReport
from alpa_lite.api.parallelize import CompiledFunction as CompiledFunction
from alpa_lite.api.parallelize import LoweredFunction as LoweredFunction
from alpa_lite.api.parallelize import ParallelFunction as ParallelFunction
from alpa_lite.api.parallelize import PlannedFunction as PlannedFunction
from alpa_lite.api.parallelize import TracedFunction as TracedFunction
from alpa_lite.api.parallelize import calibrate as calibrate
from alpa_lite.api.parallelize import cluster as cluster
from alpa_lite.api.parallelize import init_sharded as init_sharded
from alpa_lite.api.parallelize import local_cluster as local_cluster
from alpa_lite.api.parallelize import parallelize as parallelize
from alpa_lite.api.parallelize import plan as plan
from alpa_lite.errors import AlpaLiteError as AlpaLiteError
from alpa_lite.plan.plan import Plan as Plan
from alpa_lite.rules import register_rule as register_rule
from alpa_lite.runtime.job.processes import batch_sharding as batch_sharding
from alpa_lite.runtime.job.start import initialize as initialize

__version__ = "0.1.0"
