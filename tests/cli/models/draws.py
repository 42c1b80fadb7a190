"""Weights without the programs that draw them, which take longer to compile than models to run."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def drawn(init: Callable[..., Any], deviation: float = 0.02) -> Any:
    """Weights of the shapes of `init`: norms start at one, vectors at zero, anything else normal, as it draws them."""
    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> Any:
        if getattr(path[-1], "key", "").endswith(("scale", "norm")):
            return np.ones(leaf.shape, np.float32)
        if getattr(path[-1], "key", "").startswith("b"):
            return np.zeros(leaf.shape, np.float32)
        return rng.normal(0.0, deviation, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(init, jax.random.key(0)))
