"""Price the time and memory of parallel programs in four terms: Work, Collective, Cluster and seconds.

The package depends on no framework and needs no device. The usual entry point is
`ComposedCostModel(load_cluster("p3.16xlarge"))`.
"""

from cost_models.catalogue import known_devices as known_devices
from cost_models.catalogue import known_links as known_links
from cost_models.catalogue import load_device as load_device
from cost_models.checks import ClusterError as ClusterError
from cost_models.checks import CostModelError as CostModelError
from cost_models.cluster import Cluster as Cluster
from cost_models.cluster import HostGroup as HostGroup
from cost_models.cluster import cluster_sources as cluster_sources
from cost_models.cluster import known_clusters as known_clusters
from cost_models.cluster import load_cluster as load_cluster
from cost_models.communication import CollectiveCost as CollectiveCost
from cost_models.communication import all_reduce_seconds as all_reduce_seconds
from cost_models.communication import explain_collective as explain_collective
from cost_models.composed import ComposedCostModel as ComposedCostModel
from cost_models.composed import CostModel as CostModel
from cost_models.hardware import Backend as Backend
from cost_models.hardware import Device as Device
from cost_models.hardware import HostMemory as HostMemory
from cost_models.hardware import Link as Link
from cost_models.memory import layer_activation_bytes as layer_activation_bytes
from cost_models.memory import microbatches_in_flight as microbatches_in_flight
from cost_models.memory import model_states_bytes as model_states_bytes
from cost_models.traffic import Traffic as Traffic
from cost_models.work import Collective as Collective
from cost_models.work import CollectiveKind as CollectiveKind
from cost_models.work import Group as Group
from cost_models.work import Product as Product
from cost_models.work import Work as Work
from cost_models.work import WorkKind as WorkKind
