"""Convolutional networks with connections across layers, as they were published: U-Net, ResNets; NHWC layout.

`UNet`: a contracting path of convolutions, an expanding one of up-convolutions, and connections across.

    down    x_{l+1} = max_pool2x2(y_l),   y_l = two(x_l)                               (`UNet.logits`)
    up      x_l     = two(concat(crop(y_l), up(x_{l+1})))                              (`UNet.logits`)
    two(x)  = relu(conv3x3(relu(conv3x3(x) + b)) + b)                                  (`UNet._two`)
    up(x)   = transposed convolution 2x2, stride 2, half as many channels              (`_up`)
    loss    = mean(weights cross_entropy(conv1x1(x_0)))                                (`UNet.loss_fn`)

Ronneberger et al. 2015, figure 1 and section 3: unpadded convolutions, so that 572 × 572 pixels give 388 × 388 labels
with a weight each. The defaults are that network: 31,030,658 weights (31.03M) for one channel and two classes. With
``padding="SAME"`` images and labels have one size.

`ResNet`: residual networks of bottleneck blocks, ResNet-50 and the Wide-ResNets of its shape.

    x_0     = max_pool(relu(batch_norm(conv7x7(images, stride 2))), 3x3, stride 2)     (`ResNet.logits`)
    y       = batch_norm(conv1x1(relu(batch_norm(conv3x3(relu(batch_norm(conv1x1(x))))))))  (`ResNet._bottleneck`)
    x_{l+1} = relu(y + x), with x projected by batch_norm(conv1x1(x)) where shapes differ   (`ResNet._bottleneck`)
    logits  = mean(x_L) w + b                                                          (`ResNet.logits`)

Widths in stage ``i`` are ``channels 2^i`` inside, ``width_factor`` times as many for the 3x3 convolution, four times as
many outside; a stage begins with stride 2 in its 3x3 convolution (He et al. 2016 in the form "v1.5"; Zagoruyko and
Komodakis 2016, "Wide residual networks"). The defaults are ResNet-50. Alpa's Wide-ResNets have ``width_factor=2``,
``channels`` 160 to 448, ``num_classes=1024`` and float32 (alpa/model/wide_resnet.py of alpa-projects/alpa).

Batch norm normalises over `norm_batch` images at a time. Frameworks whose workers each normalise over the images they
hold are described by that number. With the whole batch (None) every image bears on every other, so that a step is no
sum over micro-batches and workers must exchange statistics. Running averages are not kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from alpa_lite.cli.models.model_parts import (
    ImageClassifier,
    Model,
    Reduction,
    Tree,
    cross_entropy,
    draw_layers,
    reduce_losses,
)

UNetParams = dict[str, Tree]
"""``down`` (the bottom included) and ``up``: lists of ``{"first", "second"}`` and in ``up`` ``"widen"``, each a
convolution ``{"w": [h, w, in, out], "b": [out]}``, as is ``head``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet(Model):
    """Sizes of the network; `depth` counts the poolings, `channels` is the width of the uppermost level."""

    image_size: int = 572
    in_channels: int = 1
    channels: int = 64
    depth: int = 4
    num_classes: int = 2
    padding: Literal["VALID", "SAME"] = "VALID"
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        # Raises for images that cannot be halved often enough, at construction rather than while tracing.
        self._sizes()

    def init(self, key: jax.Array) -> UNetParams:
        """Draw the weights (He initialisation, zero biases)."""
        return draw_layers(key, self._shapes())

    @property
    def label_size(self) -> int:
        """The number of labelled pixels per side."""
        return self._sizes()[-1]

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        ``images`` ``[batch, image_size, image_size, in_channels]``; integer ``labels`` and
        float ``weights`` ``[batch, label_size, label_size]``.
        """
        labels = (batch_size, self.label_size, self.label_size)
        images = (batch_size, self.image_size, self.image_size, self.in_channels)
        return {
            "images": jax.ShapeDtypeStruct(images, jnp.float32),
            "labels": jax.ShapeDtypeStruct(labels, jnp.int32),
            "weights": jax.ShapeDtypeStruct(labels, jnp.float32),
        }

    @property
    def limits(self) -> dict[str, int]:
        """The exclusive upper bound of the labels."""
        return {"labels": self.num_classes}

    def loss_fn(
        self,
        params: UNetParams,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the weighted cross entropy of the pixels, a float32 scalar."""
        losses = cross_entropy(self.logits(params, batch["images"]), batch["labels"])
        return reduce_losses(batch["weights"] * losses, reduction)

    def logits(self, params: UNetParams, images: jax.Array) -> jax.Array:
        """Return the logits of the labelled pixels.

        ``[batch, image_size, image_size, in_channels] -> [batch, label_size, label_size, num_classes]``
        """
        x, across = images.astype(self.dtype), list[jax.Array]()
        for level, block in enumerate(params["down"]):
            if level:
                across.append(x)
                x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            x = self._two(x, block)
        for block, skipped in zip(params["up"], reversed(across), strict=True):
            x = _up(x, block["widen"])
            x = self._two(jnp.concatenate([_middle(skipped, x.shape[1]), x], axis=-1), block)
        return _convolve(x, params["head"], "VALID")

    def _two(self, x: jax.Array, block: UNetParams) -> jax.Array:
        """Apply two convolutions with relu."""
        for name in ("first", "second"):
            x = jax.nn.relu(_convolve(x, block[name], self.padding))
        return x

    def _sizes(self) -> list[int]:
        """Return pixels per side before each pooling, at the bottom, and after each level on the way up."""
        # Two unpadded convolutions of 3x3 take two pixels each off height and width.
        lost, sizes = 4 if self.padding == "VALID" else 0, [self.image_size]
        for level in range(self.depth + 1):
            size = sizes[-1] - lost if not level else sizes[-1] // 2 - lost
            if level < self.depth and (size % 2 or size <= 0):
                raise ValueError(
                    f"Each pooling halves the image, but at level {level} it has {size} pixels a side. Choose another "
                    f"image_size than {self.image_size}, for {self.depth} levels and {self.padding} padding."
                )
            sizes.append(size)
        for _ in range(self.depth):
            sizes.append(2 * sizes[-1] - lost)
        if min(sizes) <= 0:
            raise ValueError(f"Nothing is left of {self.image_size} pixels a side after {self.depth} levels.")
        return sizes

    def _shapes(self) -> UNetParams:
        """Return the shapes of the convolutions; biases are as long as the last dim."""
        widths = [self.channels * 2**level for level in range(self.depth + 1)]
        inputs = [self.in_channels, *widths[:-1]]
        down = [{"first": (3, 3, i, o), "second": (3, 3, o, o)} for i, o in zip(inputs, widths, strict=True)]
        # On the way up a level reads as many channels from across as from below, together twice its own.
        up = [{"widen": (2, 2, 2 * o, o), "first": (3, 3, 2 * o, o), "second": (3, 3, o, o)} for o in widths[-2::-1]]
        return {"down": down, "up": up, "head": (1, 1, self.channels, self.num_classes)}


def _convolve(x: jax.Array, weights: UNetParams, padding: str) -> jax.Array:
    """Apply a convolution and a bias."""
    w = weights["w"].astype(x.dtype)
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")) + weights["b"]


def _up(x: jax.Array, weights: UNetParams) -> jax.Array:
    """Apply a transposed convolution: ``[batch, h, w, in] -> [batch, 2 h, 2 w, out]``."""
    w = weights["w"].astype(x.dtype)
    # Stride and window are equal, so that each pixel becomes its own four and none overlap.
    return lax.conv_transpose(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + weights["b"]


def _middle(x: jax.Array, size: int) -> jax.Array:
    """Return the middle ``size × size`` pixels."""
    # Unpadded convolutions have lost the pixels at the edges on the way down and up again.
    edge = (x.shape[1] - size) // 2
    return x[:, edge : edge + size, edge : edge + size]


ResNetParams = dict[str, Tree]
"""``stem`` and the convolutions of ``blocks`` are ``{"w": [h, w, in, out], "scale": [out], "bias": [out]}``; a block
has ``reduce``, ``conv``, ``expand`` and, where shapes differ, ``project``. ``dense`` is ``{"w", "b"}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNet(ImageClassifier):
    """Sizes of the network.

    Attributes:
        channels: width of the stem and inside the blocks of the first stage.
        width_factor: of the 3x3 convolutions.
        stage_sizes: blocks per stage.
        norm_batch: images that batch norm normalises over together; None for the whole batch.
        recompute: the backward pass computes the stem and each block again from its input.
        dtype: of activations and of weights where they are used; statistics and loss are computed in float32.
        param_dtype: of the weights.
    """

    image_size: int = 224
    channels: int = 64
    width_factor: int = 1
    num_classes: int = 1000
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    norm_batch: int | None = None
    recompute: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def init(self, key: jax.Array) -> ResNetParams:
        """Draw the weights (He initialisation); norms start at one and zero, those that end a branch at zero."""
        # At most four convolutions per block, the stem and the dense layer; keys that are left over do no harm.
        keys = iter(jax.random.split(key, 2 + 4 * sum(self.stage_sizes)))

        def conv(shape: Sequence[int], scale: float = 1.0) -> ResNetParams:
            weights = jax.random.normal(next(keys), shape, self.param_dtype) * (2.0 / prod(shape[:-1])) ** 0.5
            out = shape[-1]
            return {
                "w": weights,
                "scale": jnp.full((out,), scale, self.param_dtype),
                "bias": jnp.zeros((out,), self.param_dtype),
            }

        blocks: list[ResNetParams] = []
        width = self.channels
        stem = conv((7, 7, 3, width))
        for stage, size in enumerate(self.stage_sizes):
            inside, outside = self.channels * 2**stage, 4 * self.channels * 2**stage
            wide = inside * self.width_factor
            for _ in range(size):
                block = {"reduce": conv((1, 1, width, inside)), "conv": conv((3, 3, inside, wide))}
                # A scale of zero makes each block the identity at first, which trains more stably (Goyal et al. 2017).
                block["expand"] = conv((1, 1, wide, outside), scale=0.0)
                # A block whose input and output differ, in width or in size, cannot add them as they are.
                if width != outside or (stage > 0 and block_starts(len(blocks), self.stage_sizes)):
                    block["project"] = conv((1, 1, width, outside))
                blocks.append(block)
                width = outside
        # No relu follows the last layer, so that its variance is 1 / inputs.
        dense = jax.random.normal(next(keys), (width, self.num_classes), self.param_dtype) * width**-0.5
        bias = jnp.zeros((self.num_classes,), self.param_dtype)
        return {"stem": stem, "blocks": blocks, "dense": {"w": dense, "b": bias}}

    def logits(self, params: ResNetParams, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the logits, ``[batch, image_size, image_size, 3] -> [batch, num_classes]``; no key is used."""
        # Before the stem, so that every use of a weight reads the same narrow copy.
        weights = jax.tree.map(lambda w: w.astype(self.dtype), params)
        # Traced once per shape: the network has many convolutions of few shapes.
        unit = jax.jit(self._convolve, static_argnames=("stride", "active"))
        stem, bottleneck = partial(self._stem, unit), partial(self._bottleneck, unit)
        if self.recompute:
            stem, bottleneck = jax.checkpoint(stem), jax.checkpoint(bottleneck, static_argnums=2)
        x = stem(inputs.astype(self.dtype), weights["stem"])
        for i, block in enumerate(weights["blocks"]):
            x = bottleneck(x, block, 2 if i > 0 and block_starts(i, self.stage_sizes) else 1)
        return jnp.mean(x, axis=(1, 2)) @ weights["dense"]["w"] + weights["dense"]["b"]

    def _stem(self, unit: Callable[..., jax.Array], images: jax.Array, weights: ResNetParams) -> jax.Array:
        """Apply convolution and max pooling, stride 2 each: ``[batch, h, w, 3] -> [batch, h/4, w/4, channels]``."""
        x = unit(images, weights, stride=2, active=True)
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    def _bottleneck(self, unit: Callable[..., jax.Array], x: jax.Array, block: ResNetParams, stride: int) -> jax.Array:
        """One block, the 3x3 convolution with the stride: ``[batch, h, w, in] -> [batch, h/stride, w/stride, out]``."""
        y = unit(x, block["reduce"], stride=1, active=True)
        y = unit(y, block["conv"], stride=stride, active=True)
        y = unit(y, block["expand"], stride=1, active=False)
        if "project" in block:
            x = unit(x, block["project"], stride=stride, active=False)
        return jax.nn.relu(x + y)

    def _convolve(self, x: jax.Array, weights: ResNetParams, *, stride: int, active: bool) -> jax.Array:
        """Convolution, batch norm and, if `active`, relu: ``[batch, h, w, in] -> [batch, h/stride, w/stride, out]``."""
        half = weights["w"].shape[0] // 2
        x = lax.conv_general_dilated(
            x, weights["w"], (stride, stride), [(half, half)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = self._normalise(x) * weights["scale"] + weights["bias"]
        return jax.nn.relu(x) if active else x

    def _normalise(self, x: jax.Array) -> jax.Array:
        """Normalise each channel over `norm_batch` images, to mean 0 and variance 1 in float32."""
        shape = x.shape
        x32 = x.astype(jnp.float32)
        # The whole batch unless `norm_batch` says otherwise; a group of one image needs no dim of its own.
        axes = (0, 1, 2)
        if self.norm_batch == 1:
            axes = (1, 2)
        elif self.norm_batch is not None:
            x32 = x32.reshape(-1, self.norm_batch, *shape[1:])
            axes = (1, 2, 3)
        mean = jnp.mean(x32, axis=axes, keepdims=True)
        # In this form both means read x alone, so that one pass over the images gives both.
        variance = jnp.mean(jnp.square(x32), axis=axes, keepdims=True) - jnp.square(mean)
        return ((x32 - mean) * lax.rsqrt(variance + 1e-5)).reshape(shape).astype(x.dtype)


def block_starts(block: int, stage_sizes: Sequence[int]) -> bool:
    """Return whether block number `block` is the first of a stage."""
    return block in {sum(stage_sizes[:i]) for i in range(len(stage_sizes))}
