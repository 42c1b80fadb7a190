"""Attacks on the border between steps that are sums over their samples and steps that are not.

Each attack is a tiny train step together with its expectation in micro-batches:

    EXACT             accepted, and equal to `jax.jit`
    REFUSED           refused with an `AlpaLiteError`: the step is no sum over its samples
    EXACT_OR_REFUSED  never wrong; a refusal is legitimate
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fuzz.oracle import Outcome, Setup, compare

B, T, D, V = 8, 4, 6, 6
"""Samples, tokens of a sample, features, and classes."""


class Expectation(enum.Enum):
    """What micro-batches must do with a step."""

    EXACT = "exact"
    REFUSED = "refused"
    EXACT_OR_REFUSED = "exact or refused"

    def allows(self, outcome: Outcome) -> bool:
        """Whether an outcome is as expected."""
        return {
            Expectation.EXACT: outcome.kind == "equal",
            Expectation.REFUSED: outcome.kind == "refused",
            Expectation.EXACT_OR_REFUSED: outcome.kind in ("equal", "refused"),
        }[self]


@dataclass(frozen=True, kw_only=True)
class Attack:
    """A step, its arguments, and what is expected of it.

    Attributes:
        exact_at: the numbers of micro-batches at which an exact step must be accepted; at others it may be refused.
        tolerance: relative difference that rounding may make, where it is more than usual.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    batch_argnums: Any
    expectation: Expectation
    exact_at: tuple[int, ...]
    tolerance: float = 0.0

    def expected(self, num_microbatches: int) -> Expectation:
        """What is expected at a number of micro-batches."""
        if self.expectation is Expectation.EXACT and num_microbatches not in self.exact_at:
            return Expectation.EXACT_OR_REFUSED
        return self.expectation

    def run(self, setup: Setup, num_microbatches: int) -> Outcome:
        """Run the step in micro-batches and compare it with `jax.jit`."""
        return compare(
            self.step,
            self.args,
            setup=setup,
            num_microbatches=num_microbatches,
            batch_argnums=self.batch_argnums,
            calls=1,
            tolerance=self.tolerance,
        )


ATTACKS: dict[str, Attack] = {}
MICROBATCHES = (2, 4, B)
_rng = np.random.default_rng(0)


def floats(*shape: int, scale: float = 1.0) -> jax.Array:
    """Normal numbers."""
    return jnp.asarray(_rng.normal(size=shape) * scale, jnp.float32)


def integers(high: int, *shape: int) -> jax.Array:
    """Numbers from 0 to `high` - 1."""
    return jnp.asarray(_rng.integers(0, high, shape), jnp.int32)


PARAMS = {
    "w": floats(D, D, scale=0.5),
    "v": floats(D, D, scale=0.5),
    "s": floats(2, D, D, scale=0.5),
    "e": floats(V, D, scale=0.5),
    "b": floats(D, scale=0.5),
}
X, Z, LABELS, KEY = floats(B, D), floats(B, D), integers(V, B), jax.random.key(0)
SEQUENCES, TOKENS, IMAGES = floats(B, T, D), integers(V, B, T), floats(B, 4, 4, 2)
SQUARE = floats(B, B)


def net(p: Any, x: Any) -> Any:
    """One layer: ``[..., D] -> [..., D]``."""
    return jnp.tanh(x @ p["w"])


def logp(p: Any, x: Any) -> Any:
    """Log probabilities of the classes of each sample: ``[..., D] -> [..., V]``."""
    return jax.nn.log_softmax(net(p, x) @ p["v"])


def losses(p: Any, x: Any, y: Any) -> Any:
    """Cross-entropy of each sample: ``[B, D], [B] -> [B]``."""
    return -jnp.take_along_axis(logp(p, x), y[:, None], axis=1)[:, 0]


def descend(p: Any, grads: Any) -> Any:
    """One step of gradient descent."""
    return jax.tree.map(lambda w, g: w - 0.5 * g, p, grads)


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step that trains by a loss, and returns it."""

    def step(p: Any, *rest: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(p, *rest)
        return descend(p, grads), value

    return step


def attack(
    expectation: Expectation,
    *data: Any,
    key: bool = False,
    step: bool = False,
    batch_argnums: Any = None,
    exact_at: Sequence[int] = MICROBATCHES,
    params: Any = None,
    tolerance: float = 0.0,
) -> Callable[..., Any]:
    """Register a loss, or a whole step, of parameters and data (default: `X` and `LABELS`).

    Args:
        expectation: what micro-batches must do with it.
        data: what the step takes after the parameters.
        key: whether a random key comes last.
        step: whether it is a whole step instead of a loss.
        batch_argnums: where the batch is; default: all `data`, leading.
        exact_at, tolerance: see `Attack`.
        params: the first argument; default: `PARAMS`.
    """
    data = data or (X, LABELS)

    def register(fun: Callable[..., Any]) -> Callable[..., Any]:
        args = (PARAMS if params is None else params, *data, *([KEY] if key else []))
        assert fun.__name__ not in ATTACKS, fun.__name__
        ATTACKS[fun.__name__] = Attack(
            step=fun if step else trained(fun),
            args=args,
            batch_argnums=tuple(range(1, 1 + len(data))) if batch_argnums is None else batch_argnums,
            expectation=expectation,
            exact_at=tuple(exact_at),
            tolerance=tolerance,
        )
        return fun

    return register
