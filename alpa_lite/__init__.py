"""Decorate a JAX train step; alpa_lite finds the best way to spread it over your devices, shows why, and runs it."""

from alpa_lite import errors as errors
from alpa_lite import planners as planners
from alpa_lite import schedule as schedule
from alpa_lite.api import Calibration as Calibration
from alpa_lite.api import Checkpoints as Checkpoints
from alpa_lite.api import CheckReport as CheckReport
from alpa_lite.api import CompiledFunction as CompiledFunction
from alpa_lite.api import LoweredFunction as LoweredFunction
from alpa_lite.api import ParallelFunction as ParallelFunction
from alpa_lite.api import PlannedFunction as PlannedFunction
from alpa_lite.api import TracedFunction as TracedFunction
from alpa_lite.api import calibrate as calibrate
from alpa_lite.api import cluster as cluster
from alpa_lite.api import init_sharded as init_sharded
from alpa_lite.api import local_cluster as local_cluster
from alpa_lite.api import parallelize as parallelize
from alpa_lite.api import plan as plan
from alpa_lite.checking import check as check
from alpa_lite.errors import AlpaLiteError as AlpaLiteError
from alpa_lite.plan import Plan as Plan
from alpa_lite.rules import register_rule as register_rule
from alpa_lite.runtime.job.processes import batch_sharding as batch_sharding
from alpa_lite.runtime.job.start import initialize as initialize

__version__ = "0.1.0"
