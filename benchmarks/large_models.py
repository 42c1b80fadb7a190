"""Cases of `planning_time` from the models by name: large clusters, and one stage on one mesh.

    llama-8b-one-mesh      Llama 3 8B in one stage on 64 A100
    experts-one-mesh       a mixture of 256 experts in the sizes of DeepSeek-V3 in one stage on 256 H100
    llama-405b             Llama 3 405B on 8,192 H100 (Grattafiori et al. 2024, table 4)
    experts                that mixture on 2,048 H100

Of DeepSeek-V3 (DeepSeek-AI 2024, section 4.2) the mixture has the layers, widths, experts, vocabulary and the largest
batch; its attention is an ordinary one, and a token visits two experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

import alpa_lite as al
from alpa_lite.cli.models.named_models import model_named
from alpa_lite.planners import Auto
from cost_models.cluster import Cluster

_EXPERTS = (
    "mixtral-8x7b:num_layers=61:hidden=7168:num_heads=128:num_kv_heads=128:inner=2048:num_experts=256:vocab_size=129280"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeModel:
    """A model by name to train on a cluster.

    Attributes:
        id: name of the case.
        model: name of the model, with options (`named_models.model_named`).
        bar_seconds: longest time that planning may take on two cores with empty caches.
        planner: the search, with what the case restricts.
    """

    id: str
    model: str
    host: str
    num_hosts: int
    global_batch: int
    seq_len: int
    bar_seconds: float
    planner: Auto = field(default_factory=Auto)

    @property
    def cluster(self) -> Cluster:
        """The cluster of the case."""
        return al.cluster(self.host, num_hosts=self.num_hosts)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(x.size for x in jax.tree.leaves(self.arguments()[0].params))

    def train_step(self) -> Callable[..., Any]:
        """Return a plain train step."""
        return model_named(self.model).training(self.global_batch, self.seq_len)[0]

    def arguments(self) -> tuple[Any, ...]:
        """Return the state and the batch of the step as shapes; nothing is allocated."""
        return model_named(self.model).training(self.global_batch, self.seq_len)[1]


CASES: Mapping[str, LargeModel] = {
    case.id: case
    for case in (
        LargeModel(
            id="llama-8b-one-mesh",
            model="llama-8b",
            host="dgx-a100",
            num_hosts=8,
            global_batch=128,
            seq_len=8192,
            bar_seconds=4.0,
            planner=Auto(intra_op_only=True),
        ),
        LargeModel(
            id="experts-one-mesh",
            model=_EXPERTS,
            host="dgx-h100",
            num_hosts=32,
            global_batch=512,
            seq_len=4096,
            bar_seconds=8.0,
            planner=Auto(intra_op_only=True),
        ),
        LargeModel(
            id="llama-405b",
            model="llama-405b",
            host="dgx-h100",
            num_hosts=1024,
            global_batch=2048,
            seq_len=8192,
            bar_seconds=30.0,
        ),
        LargeModel(
            id="experts",
            model=_EXPERTS,
            host="dgx-h100",
            num_hosts=256,
            global_batch=15360,
            seq_len=4096,
            bar_seconds=30.0,
        ),
    )
}
