"""A multi-layer perceptron for regression: ``x -> relu(x w + b) -> ... -> x w + b``, squared error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from alpa_lite.cli.models.losses import Reduction, reduce_losses

Params = list[dict[str, jax.Array]]
"""One ``{"w": [in, out], "b": [out]}`` per layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Sizes of the perceptron; `num_layers` counts the dense layers, the output layer included."""

    in_features: int = 64
    hidden: int = 128
    out_features: int = 16
    num_layers: int = 4
    use_bias: bool = True
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"An MLP needs num_layers >= 1; got {self.num_layers}.")

    @property
    def features(self) -> tuple[int, ...]:
        """Width of the input, of every hidden layer, and of the output."""
        return (self.in_features, *[self.hidden] * (self.num_layers - 1), self.out_features)

    def init(self, key: jax.Array) -> Params:
        """Draw the weights (He initialisation, zero biases)."""
        params: Params = []
        for layer_key, fan_in, fan_out in zip(
            jax.random.split(key, self.num_layers), self.features[:-1], self.features[1:], strict=True
        ):
            layer = {"w": jax.random.normal(layer_key, (fan_in, fan_out), self.dtype) * (2.0 / fan_in) ** 0.5}
            if self.use_bias:
                layer["b"] = jnp.zeros((fan_out,), self.dtype)
            params.append(layer)
        return params

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes.

        ``inputs`` ``[batch, in_features]``, ``targets`` ``[batch, out_features]``.
        """
        widths = {"inputs": self.in_features, "targets": self.out_features}
        return {name: jax.ShapeDtypeStruct((batch_size, width), jnp.float32) for name, width in widths.items()}

    @property
    def limits(self) -> dict[str, int]:
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        return {}

    def apply(self, params: Params, inputs: jax.Array) -> jax.Array:
        """``[batch, in_features] -> [batch, out_features]``."""
        x = inputs.astype(self.dtype)
        for i, layer in enumerate(params):
            x = x @ layer["w"]
            if self.use_bias:
                x = x + layer["b"]
            if i + 1 < len(params):
                x = jax.nn.relu(x)
        return x

    def loss_fn(
        self,
        params: Params,
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Squared error over every output of every example.

        Args:
            params: from `init`.
            batch: ``inputs`` ``[batch, in_features]`` and ``targets`` ``[batch, out_features]``.
            key: unused (the model draws nothing); all models have the same signature.
            reduction: over examples and outputs.

        Returns:
            A float32 scalar.
        """
        del key
        errors = (self.apply(params, batch["inputs"]) - batch["targets"]).astype(jnp.float32)
        return reduce_losses(jnp.square(errors), reduction)
