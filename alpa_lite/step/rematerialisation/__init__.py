"""Rematerialisation: layers whose backward pass computes again what it needs of their forward pass.

    policy      what a layer keeps from its forward to its backward pass
    copying     one graph written again, with copies of some ops
    trips       loops: each trip of the backward pass repeats the trip of the forward pass whose residuals it reads
    layers      ops outside of loops: copies of them, just before the backward ops that read them    (`rematerialise`)

What a layer receives (values of other layers, the batch, keys) goes to the copies through `optimization_barrier`s,
as it does in regions under `jax.checkpoint`; parameters go there directly. Nothing else of a step changes, so that
whoever reads it (the search, prices, memory, lowering) needs to know nothing of this.
"""

from alpa_lite.step.rematerialisation.policy import Remat as Remat
from alpa_lite.step.rematerialisation.recomputed_layers import Rematerialised as Rematerialised
from alpa_lite.step.rematerialisation.recomputed_layers import rematerialise as rematerialise
