"""Models of a few thousand weights are compiled for seconds and run for milliseconds: here XLA optimises nothing."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def without_optimisations() -> Iterator[None]:
    """Compile as fast as can be; what programs compute is the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
