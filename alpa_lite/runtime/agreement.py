"""What the processes of a job agree upon: what the first one says. With one process, that is what it said itself.

All processes must call these functions in the same order.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def agreed_number(value: float) -> float:
    """The first process's number."""
    if jax.process_count() == 1:
        return value
    return float(np.frombuffer(_agreed_bytes(np.float64(value).tobytes()), np.float64)[0])


def agreed_data(value: Any) -> Any:
    """The first process's JSON value; those of the others are passed over."""
    if jax.process_count() == 1:
        return value
    text = json.dumps(value).encode()
    size = int(agreed_number(len(text)))
    return json.loads(_agreed_bytes(text[:size].ljust(size)))


def _agreed_bytes(text: bytes) -> bytes:
    """As bytes, since JAX would round 64-bit numbers."""
    return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))).astype(np.uint8).tobytes()
