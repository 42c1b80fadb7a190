"""Floating-point operations of one step, counted as Alpa's evaluation counts them.

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
its TFLOPS gives the count back (`tests/cli/models/test_model_flops.py`). For Wide-ResNet the count was XLA's; the
measured pairs of sharding alone give the 3, and their memory is that of a step which computes nothing again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alpa_lite.cli.models.resnet import ResNet, block_starts
from alpa_lite.cli.models.transformer import Transformer


def transformer_flops(model: Transformer, batch_size: int) -> float:
    """Return the FLOPs of one step of a transformer with full recomputation, with experts or without."""
    tokens, hidden = batch_size * model.seq_len, model.hidden
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
        met = (range(max(0, at - half), min(self.side, at + half + 1)) for at in range(0, self.side, self.stride))
        return 2.0 * self.inputs * self.outputs * sum(map(len, met)) ** 2


def convolutions(model: ResNet) -> Iterator[CountedConvolution]:
    """Yield all convolutions for one image, in order."""
    side, width, number = model.image_size, model.channels, 0
    yield CountedConvolution(kernel=7, inputs=3, outputs=width, side=side, stride=2)
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
