"""A graph together with the JAX equations that lowering needs to run its ops on real arrays, indexed by op id."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from alpa_lite.program.ir import Graph

Params = Mapping[str, Any]
"""The parameters of an equation or op by name; their types depend on the primitive."""


@dataclass(frozen=True, kw_only=True)
class Equation:
    """The JAX primitive of one op, its parameters, and, for control flow, the equations of each body."""

    primitive: Any
    params: Params
    bodies: tuple[tuple[Equation, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class GraphWithEquations:
    """A graph, the equation of each op (by op id), and the captured arrays, which are the last inputs of the graph."""

    graph: Graph
    equations: tuple[Equation, ...]
    constants: tuple[Any, ...] = ()


def plain_params(params: Params) -> dict[str, object]:
    """Return the parameters of an equation as plain Python data; parameters without a plain form are omitted."""
    plain = {key: _plain(value) for key, value in params.items()}
    return {key: value for key, value in plain.items() if value is not _NO_PLAIN_FORM}


class PlainParams:
    """A cache of `plain_params` by the identity of the parameters: the iterations of an unrolled loop share them."""

    def __init__(self) -> None:
        """Start with an empty cache."""
        self.known: dict[int, tuple[Params, Params]] = {}

    def of(self, params: Params) -> Params:
        """Return the parameters as plain Python data."""
        if id(params) not in self.known:
            # The cache holds a reference to the parameters, so that their id cannot be reused for another object.
            self.known[id(params)] = params, plain_params(params)
        return self.known[id(params)][1]


_NO_PLAIN_FORM = object()


def _plain(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.generic):
        return value.item()
    # Named tuples (dimension numbers, for instance) come before tuples, so that the names of their fields remain.
    as_dict = getattr(value, "_asdict", None)
    if as_dict is not None:
        return plain_params(as_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Fields without a plain form are left out as parameters are: the text of an object that stood for them would
        # differ between processes, and with it the fingerprint of the step.
        return plain_params({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    # JAX takes any sequence of dims, and a range is one that programs compute.
    if isinstance(value, (tuple, list, range)):
        items = tuple(_plain(item) for item in value)
        return _NO_PLAIN_FORM if any(item is _NO_PLAIN_FORM for item in items) else items
    # JAX also gives dtypes as scalar types like `jnp.float32`.
    if isinstance(value, np.dtype) or (hasattr(value, "dtype") and isinstance(value, type)):
        return str(np.dtype(value))
    # Dtypes that JAX adds to those of NumPy have no `np.dtype`.
    if type(value).__module__.startswith("jax") and "DType" in type(value).__name__:
        return str(value)
    return _NO_PLAIN_FORM
