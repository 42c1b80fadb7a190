"""Layout ops."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.rules.row import Row, floats, row


def _layout() -> list[Row]:
    x = floats(8, 4)
    reshape = lambda *shape: lambda v: lax.reshape(v, shape)  # noqa: E731
    zero, one = np.float32(0), np.float32(1)
    return [
        row("broadcast_in_dim", lambda v: lax.broadcast_in_dim(v, (2, 8, 4), (1, 2)), x, oracle="broadcast_in_dim"),
        row(
            "broadcast_in_dim expanding",
            lambda v: lax.broadcast_in_dim(v, (8, 4, 4), (0, 2)),
            floats(1, 4),
            oracle="broadcast_in_dim",
        ),
        row(
            "broadcast_in_dim scalar",
            lambda v: lax.broadcast_in_dim(v, (8, 4), ()),
            jnp.float32(3),
            oracle="broadcast_in_dim",
        ),
        row("transpose", lambda v: lax.transpose(v, (2, 0, 1)), floats(8, 4, 2), oracle="transpose"),
        row("squeeze", lambda v: lax.squeeze(v, (1,)), floats(8, 1, 4), oracle="reshape"),
        row("reshape merge", reshape(32, 2), floats(8, 4, 2), oracle="reshape"),
        row("reshape split", reshape(8, 4, 2), floats(32, 2), oracle="reshape"),
        row("reshape mixed", reshape(8, 12), floats(6, 16), oracle="reshape"),
        row("reshape without common major", reshape(3, 8), floats(4, 6), oracle="reshape"),
        row("reshape coprime", reshape(5, 3, 4), floats(3, 5, 4), oracle="reshape"),
        row("reshape ones", reshape(1, 8, 1, 4), floats(8, 1, 4), oracle="reshape"),
        row("reshape heads", reshape(4, 8, 2, 4), floats(4, 8, 8), oracle="reshape"),
        row("reshape permuted", lambda v: lax.reshape(v, (32, 2), dimensions=(1, 0, 2)), floats(4, 8, 2)),
        row("reshape to scalar", reshape(), floats(1, 1), oracle="reshape"),
        row("slice", lambda v: lax.slice(v, (0, 1), (8, 3)), x, oracle="slice"),
        row("slice strided", lambda v: lax.slice(v, (1, 0), (8, 4), (2, 1)), x, oracle="slice"),
        row("pad", lambda v: lax.pad(v, zero, ((0, 0, 0), (1, 2, 0))), x, oracle="pad"),
        row("pad interior", lambda v: lax.pad(v, one, ((0, 0, 1), (0, 0, 0))), x, oracle="pad"),
        row("pad negative", lambda v: lax.pad(v, zero, ((0, 0, 0), (-1, 1, 0))), x, oracle="pad"),
        row("pad value", lambda v, p: lax.pad(v, p, ((0, 0, 0), (1, 2, 0))), x, jnp.float32(2), oracle="pad"),
        row("rev", lambda v: lax.rev(v, (1,)), x, oracle="reverse"),
        row("concatenate", lambda v, w: lax.concatenate((v, w), 1), x, floats(8, 3), oracle="concatenate"),
        row("concatenate alike", lambda v, w: lax.concatenate((v, w), 0), x, x, oracle="concatenate"),
        row("split", lambda v: lax.split(v, (1, 3), 1), x),
        row("tile", lambda v: lax.tile(v, (1, 4)), x),
        row("tile new major", lambda v: lax.tile(v, (2, 1)), x),
        row("stack", lambda v, w: jnp.stack([v, w], 1), x, x, primitive="stack"),
        row("unstack", lambda v: jnp.unstack(v, axis=1), x, primitive="unstack"),
        row("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 4), 0)),
        row("iota bfloat16", lambda: lax.broadcasted_iota(jnp.bfloat16, (512, 4), 0)),
        row("empty", lambda: lax.empty((8, 4), jnp.float32)),
    ]


ROWS = (*_layout(),)
