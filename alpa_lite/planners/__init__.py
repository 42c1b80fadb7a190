"""Planners: automatic search and the classic manual plans, one class for each method.

Input: a `PlanRequest`. Output: a `Plan`, or a `PlanError` that says why there is none.
Read `planner` first, then `auto` (the search) and `hybrid`, of which most manual planners are special cases.
"""

from alpa_lite.inter_op.plan_request import PlanRequest as PlanRequest
from alpa_lite.planners.auto import Auto as Auto
from alpa_lite.planners.axonn import AxoNN as AxoNN
from alpa_lite.planners.coloc_rl import ColocRL as ColocRL
from alpa_lite.planners.compiled import Compiled as Compiled
from alpa_lite.planners.convolution_parallel import ConvolutionParallel as ConvolutionParallel
from alpa_lite.planners.convolution_parallel import OneWeirdTrick as OneWeirdTrick
from alpa_lite.planners.data_parallel import FSDP as FSDP
from alpa_lite.planners.data_parallel import DataParallel as DataParallel
from alpa_lite.planners.data_parallel import GShard as GShard
from alpa_lite.planners.data_parallel import Zero as Zero
from alpa_lite.planners.flexflow import FlexFlow as FlexFlow
from alpa_lite.planners.grid_search import GridSearch as GridSearch
from alpa_lite.planners.hybrid import Hybrid as Hybrid
from alpa_lite.planners.jitted import Jitted as Jitted
from alpa_lite.planners.karma import Karma as Karma
from alpa_lite.planners.manual import MANUAL_PLANNERS as MANUAL_PLANNERS
from alpa_lite.planners.megatron import DeepSpeed3D as DeepSpeed3D
from alpa_lite.planners.megatron import Megatron as Megatron
from alpa_lite.planners.mesh_tensorflow import MeshTensorFlow as MeshTensorFlow
from alpa_lite.planners.on_mesh import Custom as Custom
from alpa_lite.planners.on_mesh import OnMesh as OnMesh
from alpa_lite.planners.parameter_server import Bounded as Bounded
from alpa_lite.planners.parameter_server import ParameterServer as ParameterServer
from alpa_lite.planners.pipedream import PipeDream as PipeDream
from alpa_lite.planners.pipedream import PipeDream2BW as PipeDream2BW
from alpa_lite.planners.pipeline import Pipeline as Pipeline
from alpa_lite.planners.pipeline import TorchGPipe as TorchGPipe
from alpa_lite.planners.planner import Planner as Planner
from alpa_lite.planners.planner import Replay as Replay
from alpa_lite.planners.trainer_configuration import TrainerConfiguration as TrainerConfiguration
