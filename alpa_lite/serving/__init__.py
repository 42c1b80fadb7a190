"""Serving plans: which models of an inference workflow run on which workers, from the edge to the cloud.

Input: a `ServingProblem`, made in Python or read from a JSON file. Output: a `ServingPlan`, or an `InfeasibleError`
that tells the best that can be had.
Read `workflow` first, then `serving_solvers`.

    workflow             the problem as data
    serving_file         its JSON form
    serving_plan         a plan, checked and priced
    model_selection      JellyBean's beam search for models
    worker_assignment    JellyBean's assignment of workers
    exact_assignment     the optimal workers as an integer program
    every_assignment     the optimal workers by trying all
    serving_solvers      the solvers and the baselines
    random_serving       problems drawn at random
    model_latency        models whose latencies are those of predicted plans
"""

from alpa_lite.serving.model_latency import variant_of_plans as variant_of_plans
from alpa_lite.serving.random_serving import ServingSizes as ServingSizes
from alpa_lite.serving.random_serving import random_serving_problem as random_serving_problem
from alpa_lite.serving.serving_file import known_serving_problems as known_serving_problems
from alpa_lite.serving.serving_file import read_serving_problem as read_serving_problem
from alpa_lite.serving.serving_file import write_serving_problem as write_serving_problem
from alpa_lite.serving.serving_plan import ServingPlan as ServingPlan
from alpa_lite.serving.serving_solvers import SERVING_SOLVERS as SERVING_SOLVERS
from alpa_lite.serving.serving_solvers import BestAccuracy as BestAccuracy
from alpa_lite.serving.serving_solvers import CloudOnly as CloudOnly
from alpa_lite.serving.serving_solvers import EdgeFirst as EdgeFirst
from alpa_lite.serving.serving_solvers import EveryAssignment as EveryAssignment
from alpa_lite.serving.serving_solvers import Exact as Exact
from alpa_lite.serving.serving_solvers import JellyBean as JellyBean
from alpa_lite.serving.serving_solvers import ServingComparison as ServingComparison
from alpa_lite.serving.serving_solvers import ServingSolver as ServingSolver
from alpa_lite.serving.serving_solvers import compare_solvers as compare_solvers
from alpa_lite.serving.worker_assignment import Allocation as Allocation
from alpa_lite.serving.worker_assignment import Strategy as Strategy
from alpa_lite.serving.workflow import AccuracySample as AccuracySample
from alpa_lite.serving.workflow import MessageSource as MessageSource
from alpa_lite.serving.workflow import ModelVariant as ModelVariant
from alpa_lite.serving.workflow import ServingOperator as ServingOperator
from alpa_lite.serving.workflow import ServingProblem as ServingProblem
from alpa_lite.serving.workflow import TieredWorker as TieredWorker
from alpa_lite.serving.workflow import WorkflowEdge as WorkflowEdge
