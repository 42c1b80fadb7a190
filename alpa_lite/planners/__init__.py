"""Planners: automatic search and the classic manual plans, each one class in one file.

Input: a `PlanRequest`. Output: a `Plan`, or a `PlanError` that says why there is none.
Read `planner` first, then `auto` (the search) and `hybrid`, of which most manual planners are special cases.
"""

from alpa_lite.inter_op.plan_request import PlanRequest as PlanRequest
from alpa_lite.planners.auto import Auto as Auto
from alpa_lite.planners.convolution_parallel import ConvolutionParallel as ConvolutionParallel
from alpa_lite.planners.custom import Custom as Custom
from alpa_lite.planners.data_parallel import DataParallel as DataParallel
from alpa_lite.planners.deepspeed import DeepSpeed3D as DeepSpeed3D
from alpa_lite.planners.grid_search import GridSearch as GridSearch
from alpa_lite.planners.gshard import GShard as GShard
from alpa_lite.planners.hybrid import Hybrid as Hybrid
from alpa_lite.planners.manual import MANUAL_PLANNERS as MANUAL_PLANNERS
from alpa_lite.planners.megatron import Megatron as Megatron
from alpa_lite.planners.mesh_tensorflow import MeshTensorFlow as MeshTensorFlow
from alpa_lite.planners.on_mesh import OnMesh as OnMesh
from alpa_lite.planners.one_weird_trick import OneWeirdTrick as OneWeirdTrick
from alpa_lite.planners.pipeline import Pipeline as Pipeline
from alpa_lite.planners.planner import Planner as Planner
from alpa_lite.planners.replay import Replay as Replay
from alpa_lite.planners.torchgpipe import TorchGPipe as TorchGPipe
from alpa_lite.planners.zero import FSDP as FSDP
from alpa_lite.planners.zero import Zero as Zero
