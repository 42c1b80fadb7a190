"""A small convolutional network for image classification, in NHWC layout.

``conv3x3 + bias + relu -> maxpool2x2`` (the stem), then per block ``conv3x3 stride 2 + bias + relu`` that doubles the
channels, then global average pool and a dense layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from alpa_lite.cli.models.losses import Reduction, cross_entropy, reduce_losses

Params = dict[str, Any]
"""``{"stem": conv, "blocks": [conv, ...], "dense": {"w", "b"}}``; a conv is ``{"w": [3, 3, in, out], "b": [out]}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CNN:
    """Sizes of the network; `num_blocks` counts the strided convolutions after the stem."""

    image_size: int = 32
    in_channels: int = 3
    channels: int = 16
    num_blocks: int = 2
    num_classes: int = 10
    dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> Params:
        """Draw the weights (He initialisation, zero biases)."""
        stem_key, dense_key, *block_keys = jax.random.split(key, 2 + self.num_blocks)
        widths = [self.channels * 2**i for i in range(self.num_blocks + 1)]
        return {
            "stem": self._init_conv(stem_key, self.in_channels, widths[0]),
            "blocks": [self._init_conv(k, i, o) for k, i, o in zip(block_keys, widths[:-1], widths[1:], strict=True)],
            "dense": {
                "w": jax.random.normal(dense_key, (widths[-1], self.num_classes), self.dtype) * widths[-1] ** -0.5,
                "b": jnp.zeros((self.num_classes,), self.dtype),
            },
        }

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        ``images`` ``[batch, image_size, image_size, in_channels]``, integer ``labels``.
        """
        shape = (batch_size, self.image_size, self.image_size, self.in_channels)
        return {
            "images": jax.ShapeDtypeStruct(shape, self.dtype),
            "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        }

    @property
    def limits(self) -> dict[str, int]:
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        return {"labels": self.num_classes}

    def apply(self, params: Params, images: jax.Array) -> jax.Array:
        """``[batch, image_size, image_size, in_channels] -> logits [batch, num_classes]``."""
        x = _conv(images.astype(self.dtype), params["stem"], stride=1)
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        for block in params["blocks"]:
            x = _conv(x, block, stride=2)
        x = jnp.mean(x, axis=(1, 2))
        return x @ params["dense"]["w"] + params["dense"]["b"]

    def loss_fn(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Cross entropy of the labels, a float32 scalar; see `loss_and_metrics`."""
        return self.loss_and_metrics(params, batch, key, reduction=reduction)[0]

    def loss_and_metrics(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cross entropy, and the accuracy as an auxiliary output.

        Args:
            params: from `init`.
            batch: ``images`` ``[batch, image_size, image_size, in_channels]`` and ``labels`` ``[batch]`` integers.
            key: unused (the model draws nothing); all models have the same signature.
            reduction: of the loss over the examples.

        Returns:
            The loss, and ``{"accuracy": float32 scalar}``.
        """
        del key
        logits = self.apply(params, batch["images"])
        losses = cross_entropy(logits, batch["labels"])
        accuracy = jnp.mean((jnp.argmax(logits, axis=-1) == batch["labels"]).astype(jnp.float32))
        return reduce_losses(losses, reduction), {"accuracy": accuracy}

    def _init_conv(self, key: jax.Array, fan_in: int, fan_out: int) -> dict[str, jax.Array]:
        scale = (2.0 / (9 * fan_in)) ** 0.5
        return {
            "w": jax.random.normal(key, (3, 3, fan_in, fan_out), self.dtype) * scale,
            "b": jnp.zeros((fan_out,), self.dtype),
        }


def _conv(x: jax.Array, params: Mapping[str, jax.Array], *, stride: int) -> jax.Array:
    """3x3 convolution, bias and relu: ``[batch, h, w, in] -> [batch, h / stride, w / stride, out]``."""
    y = lax.conv_general_dilated(x, params["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jax.nn.relu(y + params["b"])
