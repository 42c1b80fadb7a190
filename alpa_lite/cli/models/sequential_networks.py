"""Networks of one layer after another: a perceptron, a small convolutional network, AlexNet, VGG; NHWC layout.

`MLP`, a perceptron for regression with a squared error: ``x -> relu(x w + b) -> ... -> x w + b``.

`CNN`, for images: ``conv3x3 + bias + relu -> maxpool2x2`` (the stem), then per block ``conv3x3 stride 2 + bias + relu``
that doubles the channels, then global average pool and a dense layer.

`ConvNet`, as published: convolutions with max pooling, then dense layers that hold most of the weights.

    x       = relu(conv(x) + b), where it says so max_pool(x)              (`ConvNet.logits`)
    x       = dropout(relu(x w + b)), but for the last, which gives logits  (`ConvNet.logits`)

- `alexnet`: the form in one column, whose convolutions are not cut in two for two GPUs (Krizhevsky 2014, "One weird
  trick for parallelizing convolutional neural networks"; torchvision's `alexnet`): 61,100,840 weights. The form in two
  columns (Krizhevsky et al. 2012) has wider convolutions in two groups and local response norms.
- `vgg16`: configuration D of Simonyan and Zisserman 2015: 138,357,544 weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from alpa_lite.cli.models.model_parts import ImageClassifier, Model, Reduction, Tree, draw_layers, drop, reduce_losses

MLPParams = list[dict[str, jax.Array]]
"""One ``{"w": [in, out], "b": [out]}`` per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP(Model):
    """Sizes of the perceptron; `num_layers` counts the dense layers, the output layer included."""

    in_features: int = 64
    hidden: int = 128
    out_features: int = 16
    num_layers: int = 4
    use_bias: bool = True
    dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"An MLP needs num_layers >= 1; got {self.num_layers}.")

    @property
    def features(self) -> tuple[int, ...]:
        """Width of the input, of every hidden layer, and of the output."""
        return (self.in_features, *[self.hidden] * (self.num_layers - 1), self.out_features)

    def init(self, key: jax.Array) -> MLPParams:
        """Draw the weights (He initialisation, zero biases)."""
        params: MLPParams = draw_layers(key, list(pairwise(self.features)), self.dtype)
        return params if self.use_bias else [{"w": layer["w"]} for layer in params]

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return ``inputs`` ``[batch, in_features]`` and ``targets`` ``[batch, out_features]`` as shapes."""
        widths = {"inputs": self.in_features, "targets": self.out_features}
        return {name: jax.ShapeDtypeStruct((batch_size, width), jnp.float32) for name, width in widths.items()}

    def apply(self, params: MLPParams, inputs: jax.Array) -> jax.Array:
        """Return the outputs, ``[batch, in_features] -> [batch, out_features]``."""
        x = inputs.astype(self.dtype)
        for i, layer in enumerate(params):
            x = x @ layer["w"]
            if self.use_bias:
                x = x + layer["b"]
            # The outputs of a regression have no bounds, so that no relu follows the last layer.
            if i + 1 < len(params):
                x = jax.nn.relu(x)
        return x

    def loss_fn(
        self,
        params: MLPParams,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the squared error over every output of every example, a float32 scalar."""
        # In float32, since squares of small differences underflow in half precision.
        errors = (self.apply(params, batch["inputs"]) - batch["targets"]).astype(jnp.float32)
        return reduce_losses(jnp.square(errors), reduction)


CNNParams = dict[str, Tree]
"""``{"stem": conv, "blocks": [conv, ...], "dense": {"w", "b"}}``; a conv is ``{"w": [3, 3, in, out], "b": [out]}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CNN(ImageClassifier):
    """Sizes of the network; `num_blocks` counts the strided convolutions after the stem."""

    image_size: int = 32
    channels: int = 16
    num_blocks: int = 2
    num_classes: int = 10
    dtype: DTypeLike = jnp.float32

    def init(self, key: jax.Array) -> CNNParams:
        """Draw the weights (He initialisation, zero biases)."""
        stem_key, dense_key, *block_keys = jax.random.split(key, 2 + self.num_blocks)
        widths = [self.channels * 2**i for i in range(self.num_blocks + 1)]
        return {
            "stem": self._init_conv(stem_key, 3, widths[0]),
            "blocks": [self._init_conv(k, i, o) for k, i, o in zip(block_keys, widths[:-1], widths[1:], strict=True)],
            "dense": {
                # Without the factor of 2 of He initialisation, which makes up for a relu that does not follow here.
                "w": jax.random.normal(dense_key, (widths[-1], self.num_classes), self.dtype) * widths[-1] ** -0.5,
                "b": jnp.zeros((self.num_classes,), self.dtype),
            },
        }

    def logits(self, params: CNNParams, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the logits, ``[batch, image_size, image_size, 3] -> [batch, num_classes]``; no key is used."""
        x = _conv(inputs.astype(self.dtype), params["stem"], stride=1)
        # JAX recognises max pooling by this pair of start value and function, and has a gradient for it.
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        for block in params["blocks"]:
            x = _conv(x, block, stride=2)
        # Pooled over all pixels, the classifier is independent of the size of images.
        x = jnp.mean(x, axis=(1, 2))
        return x @ params["dense"]["w"] + params["dense"]["b"]

    def _init_conv(self, key: jax.Array, fan_in: int, fan_out: int) -> dict[str, jax.Array]:
        # Every output sums over 3 × 3 pixels of all input channels.
        scale = (2.0 / (9 * fan_in)) ** 0.5
        return {
            "w": jax.random.normal(key, (3, 3, fan_in, fan_out), self.dtype) * scale,
            "b": jnp.zeros((fan_out,), self.dtype),
        }


def _conv(x: jax.Array, params: Mapping[str, jax.Array], *, stride: int) -> jax.Array:
    """3x3 convolution, bias and relu: ``[batch, h, w, in] -> [batch, h / stride, w / stride, out]``."""
    y = lax.conv_general_dilated(x, params["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    # Without a norm, so that the images of a batch stay independent and micro-batches exact.
    return jax.nn.relu(y + params["b"])


ConvNetParams = dict[str, list[dict[str, jax.Array]]]
"""``convolutions`` and ``dense``, lists of ``{"w", "b"}``; ``w`` is ``[h, w, in, out]`` or ``[in, out]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of ``size × size`` with relu; `pools`: max pooling follows."""

    channels: int
    size: int = 3
    stride: int = 1
    padding: int = 1
    pools: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvNet(ImageClassifier):
    """Sizes of the network.

    Attributes:
        pool_window: of max pooling, whose stride is 2.
        dense: widths of the dense layers in front of the last one.
        dropout: rate behind each of them; masks are drawn only when `loss_fn` is given a key.
    """

    convolutions: tuple[Convolution, ...]
    pool_window: int = 2
    dense: tuple[int, ...] = (4096, 4096)
    num_classes: int = 1000
    image_size: int = 224
    dropout: float = 0.5
    dtype: DTypeLike = jnp.float32

    def init(self, key: jax.Array) -> ConvNetParams:
        """Draw the weights (He initialisation, zero biases)."""
        return draw_layers(key, self._shapes())

    def logits(self, params: ConvNetParams, inputs: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Return the logits, ``[batch, image_size, image_size, 3] -> [batch, num_classes]``."""
        x, window = inputs.astype(self.dtype), (1, self.pool_window, self.pool_window, 1)
        for layer, weights in zip(self.convolutions, params["convolutions"], strict=True):
            x = lax.conv_general_dilated(
                x,
                # Weights are float32 for the optimizer, and narrower only where they are used.
                weights["w"].astype(self.dtype),
                (layer.stride, layer.stride),
                [(layer.padding, layer.padding)] * 2,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x + weights["b"].astype(self.dtype))
            if layer.pools:
                x = lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 2, 2, 1), "VALID")
        # The dense layers hold most weights, the convolutions most work: the reason for Krizhevsky's "one weird trick".
        x = x.reshape(x.shape[0], -1)
        keys = None if key is None else jax.random.split(key, len(self.dense))
        for number, weights in enumerate(params["dense"]):
            x = x @ weights["w"].astype(self.dtype) + weights["b"].astype(self.dtype)
            # Logits pass neither relu nor dropout.
            if number < len(self.dense):
                x = drop(jax.nn.relu(x), None if keys is None else keys[number], self.dropout)
        return x

    def _shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the shapes of the weights; biases are as long as the last dim."""
        # Sizes are followed through the convolutions, since the first dense layer has a row per pixel and channel left.
        width, size, convolutions = 3, self.image_size, list[tuple[int, ...]]()
        for layer in self.convolutions:
            convolutions.append((layer.size, layer.size, width, layer.channels))
            width, size = layer.channels, (size + 2 * layer.padding - layer.size) // layer.stride + 1
            if layer.pools:
                # Pooling has no padding, so that a remainder of the image is dropped.
                size = (size - self.pool_window) // 2 + 1
        widths = (width * size**2, *self.dense, self.num_classes)
        return {"convolutions": convolutions, "dense": list(pairwise(widths))}


def alexnet(*, image_size: int = 224, width: int = 64, dense: int = 4096, num_classes: int = 1000) -> ConvNet:
    """Return AlexNet in one column; the other widths are in proportion to `width`, the first convolution's."""
    return ConvNet(
        convolutions=(
            Convolution(channels=width, size=11, stride=4, padding=2, pools=True),
            Convolution(channels=3 * width, size=5, padding=2, pools=True),
            Convolution(channels=6 * width),
            Convolution(channels=4 * width),
            Convolution(channels=4 * width, pools=True),
        ),
        pool_window=3,
        dense=(dense, dense),
        num_classes=num_classes,
        image_size=image_size,
    )


def vgg16(*, image_size: int = 224, width: int = 64, dense: int = 4096, num_classes: int = 1000) -> ConvNet:
    """Return VGG-16; the other widths are in proportion to `width`, the first two convolutions'."""
    # Width, in units of the first one, and number of convolutions of each block (configuration D).
    blocks = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
    return ConvNet(
        convolutions=tuple(
            Convolution(channels=factor * width, pools=i + 1 == size) for factor, size in blocks for i in range(size)
        ),
        dense=(dense, dense),
        num_classes=num_classes,
        image_size=image_size,
    )
