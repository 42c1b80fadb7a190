"""U-Net: a contracting path of convolutions, an expanding one of up-convolutions, and connections across; NHWC layout.

    down    x_{l+1} = max_pool2x2(y_l),   y_l = two(x_l)                               (`UNet.logits`)
    up      x_l     = two(concat(crop(y_l), up(x_{l+1})))                              (`UNet.logits`)
    two(x)  = relu(conv3x3(relu(conv3x3(x) + b)) + b)                                  (`_two`)
    up(x)   = transposed convolution 2x2, stride 2, half as many channels              (`_up`)
    loss    = mean(weights cross_entropy(conv1x1(x_0)))                                (`UNet.loss_fn`)

Ronneberger et al. 2015, figure 1 and section 3: unpadded convolutions, so that 572 × 572 pixels give 388 × 388 labels
with a weight each. The defaults are that network: 31,030,658 weights (31.03M) for one channel and two classes. With
``padding="SAME"`` images and labels have one size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.cli.models.losses import Reduction, cross_entropy, reduce_losses

Params = dict[str, Any]
"""``down`` (the bottom included) and ``up``: lists of ``{"first", "second"}`` and in ``up`` ``"widen"``, each a
convolution ``{"w": [h, w, in, out], "b": [out]}``, as is ``head``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet:
    """Sizes of the network; `depth` counts the poolings, `channels` is the width of the uppermost level."""

    image_size: int = 572
    in_channels: int = 1
    channels: int = 64
    depth: int = 4
    num_classes: int = 2
    padding: Literal["VALID", "SAME"] = "VALID"
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        self._sizes()

    def init(self, key: jax.Array) -> Params:
        """Draw the weights (He initialisation, zero biases)."""
        shapes = self._shapes()
        leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
        convolutions = [
            {
                "w": jax.random.normal(k, shape, jnp.float32) * (2.0 / prod(shape[:-1])) ** 0.5,
                "b": jnp.zeros(shape[-1:], jnp.float32),
            }
            for k, shape in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, convolutions)

    def parameter_count(self) -> int:
        """Return the number of weights."""
        shapes = jax.tree.leaves(self._shapes(), is_leaf=lambda node: isinstance(node, tuple))
        return sum(prod(shape) + shape[-1] for shape in shapes)

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
        """Weighted cross entropy of the pixels, a float32 scalar.

        Args:
            params: from `init`.
            batch: arrays of the names and shapes of `batch_shapes`.
            key: unused (nothing is drawn); all models have the same signature.
            reduction: over all pixels of the batch.
        """
        del key
        losses = cross_entropy(self.logits(params, batch["images"]), batch["labels"])
        return reduce_losses(batch["weights"] * losses, reduction)

    def logits(self, params: Params, images: jax.Array) -> jax.Array:
        """``[batch, image_size, image_size, in_channels] -> [batch, label_size, label_size, num_classes]``."""
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

    def _two(self, x: jax.Array, block: Params) -> jax.Array:
        """Apply two convolutions with relu."""
        for name in ("first", "second"):
            x = jax.nn.relu(_convolve(x, block[name], self.padding))
        return x

    def _sizes(self) -> list[int]:
        """Return pixels per side before each pooling, at the bottom, and after each level on the way up."""
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

    def _shapes(self) -> Params:
        """Return the shapes of the convolutions; biases are as long as the last dim."""
        widths = [self.channels * 2**level for level in range(self.depth + 1)]
        inputs = [self.in_channels, *widths[:-1]]
        down = [{"first": (3, 3, i, o), "second": (3, 3, o, o)} for i, o in zip(inputs, widths, strict=True)]
        up = [{"widen": (2, 2, 2 * o, o), "first": (3, 3, 2 * o, o), "second": (3, 3, o, o)} for o in widths[-2::-1]]
        return {"down": down, "up": up, "head": (1, 1, self.channels, self.num_classes)}


def _convolve(x: jax.Array, weights: Params, padding: str) -> jax.Array:
    """Apply a convolution and a bias."""
    w = weights["w"].astype(x.dtype)
    return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")) + weights["b"]


def _up(x: jax.Array, weights: Params) -> jax.Array:
    """Apply a transposed convolution: ``[batch, h, w, in] -> [batch, 2 h, 2 w, out]``."""
    w = weights["w"].astype(x.dtype)
    return lax.conv_transpose(x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + weights["b"]


def _middle(x: jax.Array, size: int) -> jax.Array:
    """Return the middle ``size × size`` pixels."""
    edge = (x.shape[1] - size) // 2
    return x[:, edge : edge + size, edge : edge + size]
