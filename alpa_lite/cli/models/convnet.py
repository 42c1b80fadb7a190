"""AlexNet and VGG: convolutions with max pooling, then dense layers that hold most of the weights; NHWC layout.

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
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.cli.models.losses import Reduction, cross_entropy, reduce_losses
from alpa_lite.cli.models.regularisation import drop

Params = dict[str, list[dict[str, jax.Array]]]
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
class ConvNet:
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
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> Params:
        """Draw the weights (He initialisation, zero biases)."""
        shapes = self._shapes()
        keys = iter(jax.random.split(key, sum(map(len, shapes.values()))))

        def layer(shape: tuple[int, ...]) -> dict[str, jax.Array]:
            weights = jax.random.normal(next(keys), shape, jnp.float32) * (2.0 / prod(shape[:-1])) ** 0.5
            return {"w": weights, "b": jnp.zeros(shape[-1:], jnp.float32)}

        return {name: [layer(shape) for shape in some] for name, some in shapes.items()}

    def parameter_count(self) -> int:
        """Return the number of weights."""
        return sum(prod(shape) + shape[-1] for some in self._shapes().values() for shape in some)

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        ``images`` ``[batch, image_size, image_size, 3]``, integer ``labels`` ``[batch]``.
        """
        return {
            "images": jax.ShapeDtypeStruct((batch_size, self.image_size, self.image_size, 3), jnp.float32),
            "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        }

    @property
    def limits(self) -> dict[str, int]:
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        return {"labels": self.num_classes}

    def loss_fn(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Cross entropy of the labels, a float32 scalar.

        Args:
            params: from `init`.
            batch: arrays of the names and shapes of `batch_shapes`.
            key: draws the dropout masks; None means no dropout.
            reduction: of the loss over the images.
        """
        return reduce_losses(cross_entropy(self.logits(params, batch["images"], key), batch["labels"]), reduction)

    def logits(self, params: Params, images: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """``[batch, image_size, image_size, 3] -> [batch, num_classes]``."""
        x, window = images.astype(self.dtype), (1, self.pool_window, self.pool_window, 1)
        for layer, weights in zip(self.convolutions, params["convolutions"], strict=True):
            x = lax.conv_general_dilated(
                x,
                weights["w"].astype(self.dtype),
                (layer.stride, layer.stride),
                [(layer.padding, layer.padding)] * 2,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jax.nn.relu(x + weights["b"].astype(self.dtype))
            if layer.pools:
                x = lax.reduce_window(x, -jnp.inf, lax.max, window, (1, 2, 2, 1), "VALID")
        x = x.reshape(x.shape[0], -1)
        keys = None if key is None else jax.random.split(key, len(self.dense))
        for number, weights in enumerate(params["dense"]):
            x = x @ weights["w"].astype(self.dtype) + weights["b"].astype(self.dtype)
            if number < len(self.dense):
                x = drop(jax.nn.relu(x), None if keys is None else keys[number], self.dropout)
        return x

    def _shapes(self) -> dict[str, list[tuple[int, ...]]]:
        """Return the shapes of the weights; biases are as long as the last dim."""
        width, size, convolutions = 3, self.image_size, list[tuple[int, ...]]()
        for layer in self.convolutions:
            convolutions.append((layer.size, layer.size, width, layer.channels))
            width, size = layer.channels, (size + 2 * layer.padding - layer.size) // layer.stride + 1
            if layer.pools:
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
    blocks = ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3))
    return ConvNet(
        convolutions=tuple(
            Convolution(channels=factor * width, pools=i + 1 == size) for factor, size in blocks for i in range(size)
        ),
        dense=(dense, dense),
        num_classes=num_classes,
        image_size=image_size,
    )
