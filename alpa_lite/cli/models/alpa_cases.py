"""The models of Alpa's evaluation with their clusters and batches, and two larger ones, as train steps to plan.

Sizes: Zheng et al., OSDI 2022, and the suites of the benchmarks in alpa-projects/alpa, branch osdi22_artifact.
Hosts are AWS p3.16xlarge; cases of fewer than eight devices have a part of one. The training:

- GPT and MoE in float16 with an untied output projection, full recomputation, no dropout; GPT with Adam, MoE with
  Adafactor, both on float32 copies of the weights. Every second layer has experts; each token visits two.
- Wide-ResNet in float32 with SGD and momentum, with recomputation of the stem and all blocks. "13B" has depth 50 and
  factor 32, as its measurements report its parameters; the suites also have another network of about this size.

GPT-175B is the model of Brown et al. 2020 as Narayanan et al. 2021 train it, in bfloat16 and on A100s.

Floating-point operations of one step, counted as Alpa's evaluation counts them.

    GPT    96 T L H^2 (1 + S / 6H) + 6 T H V                                                       `transformer_flops`
           = 24 forward + 48 backward + 24 computed again, per token, layer and H^2; no embedding lookup
    MoE    4 L/2 (T H^2 (8 + 4 F) + 4 T S H)                              layers with one MLP      `moe_flops`
         + 4 L/2 (T H^2 (8 + 8 F) + 4 T S H + 2 T H E + 4 T G + 8 T H G)  layers with experts
         + 6 T H V
    WRN    sum over convolutions and the last product of 2 in out taps, × 4; 3 without recomputation  `resnet_flops`

T = tokens of the batch, S = tokens of a sequence, H = width, V = vocabulary, L = layers, E = experts, G = tokens of a
group, F = inner width / H; taps = pairs of a weight and a pixel that it meets, which padding has none of.

The first two are `compute_gpt_tflops` and `compute_moe_tflops` of alpa-projects/alpa (alpa/util.py) with
recomputation; 4 is one forward pass, two for the backward pass and one again. For GPT and MoE each measured time with
its TFLOPS gives the count back (`tests/cli/models/test_alpa_cases.py`). For Wide-ResNet the count was XLA's; the
measured pairs of sharding alone give the 3, and their memory is that of a step which computes nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import alpa_lite as al
from alpa_lite.cli.models.skip_networks import ResNet, block_starts
from alpa_lite.cli.models.train import (
    Adam,
    TrainState,
    TrainStep,
    Transformation,
    init_state,
    make_train_step,
    with_master_weights,
)
from alpa_lite.cli.models.transformer import Architecture, Computation, Transformer
from alpa_lite.cli.models.transformer_layers import Experts
from cost_models.cluster import Cluster

Family = Literal["gpt", "moe", "wrn"]
FAMILIES: tuple[Family, ...] = get_args(Family)


#: The hosts of the evaluation.
_HOST = "p3.16xlarge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to train on a cluster.

    Attributes:
        id: family and size, such as "gpt-39B".
        global_batch: samples per step.
        published_parameters: number of parameters as the evaluation counts them (the embedding once); None if unknown.
        num_microbatches: the result of Alpa's search, with which ours starts.
    """

    id: str
    family: Family
    model: Transformer | ResNet
    num_devices: int
    global_batch: int
    num_microbatches: int
    published_parameters: float | None = None
    host: str = _HOST

    @property
    def cluster(self) -> Cluster:
        """The cluster: whole hosts, or a part of one."""
        # Cases of fewer devices than a host has use a part of one host, with its links.
        host = al.cluster(self.host, num_hosts=1)
        per_host = min(self.num_devices, host.devices_per_host)
        return replace(host, devices_per_host=per_host, num_hosts=self.num_devices // per_host)

    @property
    def flops_per_step(self) -> float:
        """FLOPs per step as the evaluation counts them (`transformer_flops`, `resnet_flops`), with recomputation."""
        if isinstance(self.model, ResNet):
            return resnet_flops(self.model, self.global_batch)
        return transformer_flops(self.model, self.global_batch)

    @property
    def parameters(self) -> int:
        """Number of weights, counted as in `published_parameters`."""
        count = self.model.parameter_count()
        # Untied models have two matrices of this size, embedding and head, of which the evaluation counts one.
        return count if isinstance(self.model, ResNet) else count - self.model.vocab_size * self.model.hidden

    @property
    def num_samples(self) -> int:
        """The number that micro-batches must divide: sequences, images, or groups of sequences routed together."""
        return self.global_batch // self._sequences_per_group

    def tflops_per_device(self, seconds: float) -> float:
        """Return the TFLOPS per device of a step that takes `seconds`."""
        return self.flops_per_step / seconds / self.num_devices / 1e12

    def train_step(self) -> TrainStep:
        """Return a plain train step."""
        if self._sequences_per_group == 1:
            return make_train_step(self.model.loss_fn, self._optimizer())
        # Groups are independent of one another, so that the loss is their mean and the step additive over them.
        loss_of_groups = jax.vmap(self.model.loss_fn, in_axes=(None, 0, None))
        return make_train_step(lambda *arguments: jnp.mean(loss_of_groups(*arguments)), self._optimizer())

    def arguments(self) -> tuple[TrainState, Mapping[str, jax.ShapeDtypeStruct]]:
        """Return state and batch of the step as shapes; nothing is allocated.

        Tokens of several sequences that are routed together are one sample: [groups, sequences, ...].
        """
        state = jax.eval_shape(lambda: init_state(self.model.init(jax.random.key(0)), self._optimizer()))
        # A group of tokens that is routed together cannot be split over micro-batches: it is one sample.
        together = self._sequences_per_group
        batch = self.model.batch_shapes(together)
        if together == 1:
            return state, self.model.batch_shapes(self.global_batch)
        return state, {name: jax.ShapeDtypeStruct((self.num_samples, *x.shape), x.dtype) for name, x in batch.items()}

    @property
    def _sequences_per_group(self) -> int:
        """The number of sequences whose tokens compete for the same slots of experts."""
        if isinstance(self.model, ResNet) or self.model.experts is None:
            return 1
        return max(1, self.model.experts.group_size // self.model.seq_len)

    def _optimizer(self) -> Transformation:
        if self.family not in ("wrn", "moe"):
            return Adam(weight_decay=0.01, master_weights=True)
        import optax  # the project runs without it

        if self.family == "wrn":
            return optax.sgd(0.1, momentum=0.9, nesterov=True)
        return with_master_weights(optax.adafactor(1e-2))


def gpt(hidden: int, layers: int, heads: int, *, seq_len: int = 1024, dtype: DTypeLike = jnp.float16) -> Transformer:
    """Return a GPT of the evaluation."""
    return Transformer(
        vocab_size=51200,
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        inner=4 * hidden,
        seq_len=seq_len,
        architecture=Architecture(tied=False),
        computation=Computation(recompute="full", dtype=dtype, param_dtype=dtype),
    )


def moe(hidden: int, layers: int, experts: int) -> Transformer:
    """Return a mixture of experts of the evaluation."""
    like = gpt(hidden, layers, 16)
    routed = Experts(num_experts=experts, top_k=2, group_size=2048, every=2)
    return replace(like, vocab_size=32000, inner=8 * hidden, experts=routed)


def wide_resnet(channels: int, width_factor: int) -> ResNet:
    """Return a Wide-ResNet of 50 layers of the evaluation."""
    return ResNet(channels=channels, width_factor=width_factor, num_classes=1024, norm_batch=1, recompute=True)


#: Size: parameters in billions, devices, micro-batches of the published plan, model.
_GPT = {
    "350M": (0.355, 1, 512, gpt(1024, 24, 16)),
    "760M": (0.759, 2, 128, gpt(1536, 24, 16)),
    "1.3B": (1.313, 4, 128, gpt(2048, 24, 32)),
    "2.6B": (2.649, 8, 128, gpt(2560, 32, 32)),
    "6.7B": (6.654, 16, 64, gpt(4096, 32, 32)),
    "15B": (15.364, 32, 128, gpt(5120, 48, 40)),
    "39B": (39.079, 64, 1024, gpt(8192, 48, 64)),
}
_MOE = {
    "380M": (0.384, 1, 512, moe(768, 8, 8)),
    "690M": (0.686, 2, 32, moe(768, 8, 16)),
    "1.3B": (1.347, 4, 32, moe(768, 16, 16)),
    "2.4B": (2.383, 8, 32, moe(1024, 16, 16)),
    "10B": (10.170, 16, 16, moe(1536, 16, 32)),
    "27B": (26.648, 32, 128, moe(2048, 16, 48)),
    "70B": (70.415, 64, 64, moe(2048, 32, 64)),
}
_WRN = {
    "250M": (0.254, 1, 24, wide_resnet(160, 2)),
    "500M": (0.495, 2, 24, wide_resnet(224, 2)),
    "1B": (1.006, 4, 24, wide_resnet(320, 2)),
    "2B": (1.965, 8, 24, wide_resnet(448, 2)),
    "4B": (4.001, 16, 32, wide_resnet(640, 2)),
    "6.8B": (6.728, 32, 32, wide_resnet(320, 16)),
    "13B": (13.267, 64, 38, wide_resnet(320, 32)),
}


def _published() -> Iterator[Case]:
    tables: Mapping[Family, Mapping[str, tuple[float, int, int, Transformer | ResNet]]]
    tables = {"gpt": _GPT, "moe": _MOE, "wrn": _WRN}
    for family, sizes in tables.items():
        for size, (billions, devices, microbatches, model) in sizes.items():
            # 1520 is a multiple of the 38 micro-batches of 13B, 1536 is not.
            batch = 1024 if family != "wrn" else 1520 if size == "13B" else 1536
            yield Case(
                id=f"{family}-{size}",
                family=family,
                model=model,
                num_devices=devices,
                global_batch=batch,
                num_microbatches=microbatches,
                published_parameters=1e9 * billions,
            )


#: The 21 models of the evaluation.
PUBLISHED: tuple[Case, ...] = tuple(_published())
#: Larger than what was measured.
LARGER: tuple[Case, ...] = (
    Case(
        id="gpt-76B",
        family="gpt",
        model=gpt(10240, 60, 80),
        num_devices=128,
        global_batch=1024,
        num_microbatches=512,
    ),
    Case(
        id="gpt-175B",
        family="gpt",
        model=gpt(12288, 96, 96, seq_len=2048, dtype=jnp.bfloat16),
        num_devices=1024,
        global_batch=1536,
        num_microbatches=192,
        host="dgx-a100",
    ),
)
CASES: Mapping[str, Case] = {case.id: case for case in (*PUBLISHED, *LARGER)}


def transformer_flops(model: Transformer, batch_size: int) -> float:
    """Return the FLOPs of one step of a transformer with full recomputation, with experts or without."""
    tokens, hidden = batch_size * model.seq_len, model.hidden
    # The head is not computed again: three passes of 2 FLOPs per weight and token.
    head = 6.0 * tokens * hidden * model.vocab_size
    if model.experts is not None:
        return moe_flops(model, tokens) + head
    return 96.0 * tokens * model.num_layers * hidden**2 * (1 + model.seq_len / (6 * hidden)) + head


def moe_flops(model: Transformer, tokens: int) -> float:
    """Return the FLOPs of the layers of a transformer in which every second layer has experts."""
    assert model.experts is not None
    hidden, experts, inner = model.hidden, model.experts, model.inner / model.hidden
    attention = 4.0 * tokens * model.seq_len * hidden
    plain = tokens * hidden**2 * (8 + 4 * inner) + attention
    routed = tokens * hidden**2 * (8 + 8 * inner) + attention
    routed += 2.0 * tokens * hidden * experts.num_experts + 4.0 * tokens * experts.group_size
    routed += 8.0 * tokens * hidden * experts.group_size
    # Four passes: one forward, two backward, one again; every second layer has experts.
    return 4 * model.num_layers / 2 * (plain + routed)


def resnet_flops(model: ResNet, batch_size: int) -> float:
    """Return the FLOPs of one step of a residual network: forward, twice as much backward, and recomputation if any."""
    last = 2.0 * 4 * model.channels * 2 ** (len(model.stage_sizes) - 1) * model.num_classes
    passes = 4.0 if model.recompute else 3.0
    return passes * batch_size * (last + sum(convolution.flops for convolution in convolutions(model)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedConvolution:
    """A square convolution of a square image; `stride` 1 keeps the size of the image, 2 halves it."""

    kernel: int
    inputs: int
    outputs: int
    side: int
    stride: int = 1

    @property
    def flops(self) -> float:
        """FLOPs per image: a multiplication and an addition for each pair of a weight and a pixel."""
        half = self.kernel // 2
        # Per row or column of pixels: the taps of a square kernel are the square of their sum.
        met = (range(max(0, at - half), min(self.side, at + half + 1)) for at in range(0, self.side, self.stride))
        return 2.0 * self.inputs * self.outputs * sum(map(len, met)) ** 2


def convolutions(model: ResNet) -> Iterator[CountedConvolution]:
    """Yield all convolutions for one image, in order."""
    side, width, number = model.image_size, model.channels, 0
    yield CountedConvolution(kernel=7, inputs=3, outputs=width, side=side, stride=2)
    # The stem halves the image, and the pooling behind it once more.
    side //= 4
    for stage, size in enumerate(model.stage_sizes):
        inside, outside = model.channels * 2**stage, 4 * model.channels * 2**stage
        wide = inside * model.width_factor
        for _ in range(size):
            stride = 2 if number > 0 and block_starts(number, model.stage_sizes) else 1
            yield CountedConvolution(kernel=1, inputs=width, outputs=inside, side=side)
            yield CountedConvolution(kernel=3, inputs=inside, outputs=wide, side=side, stride=stride)
            if stride > 1 or width != outside:
                yield CountedConvolution(kernel=1, inputs=width, outputs=outside, side=side, stride=stride)
            side //= stride
            yield CountedConvolution(kernel=1, inputs=wide, outputs=outside, side=side)
            width, number = outside, number + 1
