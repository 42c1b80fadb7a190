"""Train steps of the configurable transformer, whose layers are one loop, for tests of plans and of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa_lite as al
from alpa_lite.cli.models.train import TrainStep, init_state, make_train_step
from alpa_lite.cli.models.transformer import Architecture, Computation, Transformer
from alpa_lite.planners import Planner

#: Large enough that splitting pays on a host of the time, small enough to be planned in a second.
WIDE = Transformer(
    vocab_size=512,
    num_layers=4,
    hidden=256,
    num_heads=8,
    inner=1024,
    seq_len=128,
    computation=Computation(fused=False, dtype=jnp.float32),
)
#: Small enough to be compiled and run.
TINY = replace(
    WIDE,
    vocab_size=32,
    num_layers=2,
    hidden=16,
    num_heads=4,
    inner=32,
    seq_len=8,
    architecture=Architecture(num_kv_heads=2, bias=False),
)


def with_architecture(model: Transformer, **changes: Any) -> Transformer:
    """The model with some options of its architecture changed."""
    return replace(model, architecture=replace(model.architecture, **changes))


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model and the size of its batch; with dropout the step takes a key."""

    model: Transformer
    batch_size: int

    @property
    def step(self) -> TrainStep:
        """Gradient descent."""
        return make_train_step(self.model.loss_fn, optax.sgd(0.1))

    def shapes(self) -> tuple[Any, ...]:
        """State, batch and, with dropout, a key, as shapes alone."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(lambda: init_state(self.model.init(jax.random.key(0)), optax.sgd(0.1)))
        return state, self.model.batch_shapes(self.batch_size), *([key] if self.model.dropout else [])

    def arguments(self) -> tuple[Any, ...]:
        """The same filled; by NumPy, since `init` takes long to compile."""
        rng = np.random.default_rng(0)
        state, batch, *_ = self.shapes()
        params = jax.tree.map(lambda s: jnp.asarray(rng.normal(0.0, 0.2, s.shape), s.dtype), state.params)
        batch = {n: jnp.asarray(rng.integers(0, self.model.vocab_size, s.shape)) for n, s in batch.items()}
        return init_state(params, optax.sgd(0.1)), batch, *([jax.random.key(1)] if self.model.dropout else [])


@cache
def traced(training: Training) -> Any:
    """The step, traced for abstract arguments."""
    return al.parallelize(training.step).trace(*training.shapes())


def plan(training: Training, planner: Planner, *, cluster: str = "dgx-a100", num_microbatches: int = 1) -> al.Plan:
    """A plan for eight devices."""
    return traced(training).plan(cluster=cluster, planner=planner, num_microbatches=num_microbatches).last_plan
