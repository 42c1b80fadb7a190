"""Rematerialisation: layers whose backward pass recomputes the values of their forward pass that it reads.

    policy                 what a layer stores from its forward to its backward pass
    copying                a graph rewritten with copies of some ops
    recomputed_trips       loops: each trip of the backward pass repeats the forward trip whose residuals it reads
    recomputed_layers      ops outside of loops: copies just before the backward ops that read them   (`rematerialise`)

Values that a layer receives (from other layers, the batch, keys) reach the copies through `optimization_barrier`s, as
under `jax.checkpoint`, which keeps XLA from merging copies with their originals; parameters reach them directly. The
result is an ordinary step, so that the search, prices, memory and lowering need no special cases.
"""

from alpa_lite.step.rematerialisation.policy import Remat as Remat
from alpa_lite.step.rematerialisation.recomputed_layers import Rematerialised as Rematerialised
from alpa_lite.step.rematerialisation.recomputed_layers import rematerialise as rematerialise
