"""Layers: the unit of the stage search. Forward ops are clustered, and all other ops follow the data.

number      number of layers, and of parts of each loop over layers                     (`natural_cut`)
forward     contiguous clusters of forward ops, cut where little data flows, balanced by FLOPs   (`make_layers`)
following   the backward pass, gradients, the update and inputs                         (`followed`)
"""

from alpa_lite.step.layers.following import Layers as Layers
from alpa_lite.step.layers.forward import make_layers as make_layers
from alpa_lite.step.layers.forward import subdivided as subdivided
from alpa_lite.step.layers.number import Cut as Cut
from alpa_lite.step.layers.number import LayerBalance as LayerBalance
from alpa_lite.step.layers.number import default_num_layers as default_num_layers
from alpa_lite.step.layers.number import forward_loops as forward_loops
from alpa_lite.step.layers.number import natural_cut as natural_cut
from alpa_lite.step.layers.number import op_flops as op_flops
