"""One row of the table behind the tests of rules and of local lowering: a small call of one primitive.

Every row's function holds one equation of the named primitive whose operands are the row's arguments or numbers (other
equations are ignored). Dims that may be split are multiples of 4 or 8, so that a 2 × 4 mesh can split them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite.rules import OpView, Rule, rule_of
from alpa_lite.trace.from_jaxpr import from_jaxpr


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call, and the operation that Shardy sees in it ("" = it has no rule there)."""

    name: str
    primitive: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    oracle: str

    @cached_property
    def case(self) -> Case:
        """The equation of the row's primitive."""
        closed = jax.make_jaxpr(self.function)(*self.arguments)
        traced = from_jaxpr(closed, [f"argument {i}" for i in range(len(self.arguments))])
        graph = traced.graph
        op = next((op for op in graph.ops if op.primitive == self.primitive), None)
        assert op is not None, f"no {self.primitive} in {closed}"
        view = OpView(
            primitive=op.primitive,
            operands=graph.operands(op),
            results=graph.results(op),
            params=op.params,
            bodies=op.bodies,
        )
        arrays = dict(zip(graph.inputs, (*self.arguments, *traced.constants), strict=True))
        for earlier in graph.ops[: op.id]:
            operands = [_array(graph.values[i], arrays) for i in earlier.operands]
            equation = traced.equations[earlier.id]
            arrays.update(zip(earlier.results, _jax.bind(equation.primitive, equation.params, operands), strict=True))
        equation = traced.equations[op.id]
        return Case(
            view=view,
            rule=rule_of(view),
            primitive=equation.primitive,
            params=equation.params,
            operands=tuple(_array(graph.values[i], arrays) for i in op.operands),
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One equation with arrays for its operands."""

    view: OpView
    rule: Rule
    primitive: Any
    params: Any
    operands: tuple[Any, ...]

    def bind(self, *operands: Any) -> list[Any]:
        """The whole, unsharded op."""
        return _jax.bind(self.primitive, self.params, operands)


def _array(value: Any, arrays: dict[int, Any]) -> Any:
    return arrays[value.id] if value.literal is None else jnp.asarray(value.literal, value.dtype)


_random = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    """Numbers around 0."""
    return jnp.asarray(_random.normal(size=shape), jnp.float32)


def positive(*shape: int) -> Any:
    """Numbers in (0.1, 0.9)."""
    return jnp.asarray(_random.uniform(0.1, 0.9, size=shape), jnp.float32)


def integers(high: int, *shape: int, low: int = 0) -> Any:
    """Whole numbers in [low, high)."""
    return jnp.asarray(_random.integers(low, high, size=shape), jnp.int32)


def truths(*shape: int) -> Any:
    """Truth values."""
    return jnp.asarray(_random.integers(0, 2, size=shape), bool)


def row(name: str, function: Callable[..., Any], *arguments: Any, oracle: str = "", primitive: str = "") -> Row:
    """A row; the primitive is the first word of the name unless given."""
    primitive = primitive or name.split(" ")[0]
    return Row(name=name, primitive=primitive, function=function, arguments=arguments, oracle=oracle)


def of(primitive: Any, **params: Any) -> Callable[..., Any]:
    return lambda *operands: primitive.bind(*operands, **params)


def names(rows: tuple[Row, ...]) -> list[str]:
    """Test ids."""
    return [r.name.replace(" ", "-") for r in rows]
