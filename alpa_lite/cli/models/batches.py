"""Random batches with the shapes and the limits that a model defines: `draw_batch`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np


class Model(Protocol):
    """The interface of all models."""

    @property
    def init(self) -> Callable[[jax.Array], Any]:
        """Draw the weights."""
        ...

    @property
    def loss_fn(self) -> Callable[..., Any]:
        """The loss function, ``(params, batch, key=None) -> loss``."""
        ...

    @property
    def limits(self) -> Mapping[str, int]:
        """Return the exclusive upper bound of the integers of each array of a batch, by name."""
        ...

    def batch_shapes(self, batch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch of `batch_size` samples as shapes."""
        ...


def draw_batch(model: Model, batch_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw a batch: integers below their limits, loss weights in [0.5, 1.5), other numbers normal."""
    rng, limits = np.random.default_rng(seed), model.limits

    def draw(name: str, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        if name in limits:
            return rng.integers(0, limits[name], shape.shape).astype(shape.dtype)
        if name.endswith("weights"):
            return rng.uniform(0.5, 1.5, shape.shape).astype(shape.dtype)
        return rng.normal(size=shape.shape).astype(shape.dtype)

    return {name: draw(name, shape) for name, shape in model.batch_shapes(batch_size).items()}
