"""Values, ops and graphs: a traced program as immutable data that does not depend on JAX.

A graph is a list of ops in execution order, in static single assignment form. Values and ops are numbered densely, so
that every table about values or ops is a tuple indexed by id. The bodies of control flow are nested graphs
(`Op.bodies`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

from alpa_lite.program.view_registry import View, view

#: Bytes per element of the dtypes whose size does not follow from the digits of their name. JAX stores sub-byte
#: integers in one byte per element.
_ITEM_BYTES = {"bool": 1, "float0": 0, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1}

#: Bytes of one typed PRNG key by dtype name; the keys of all other implementations have eight bytes.
_KEY_BYTES = {"key<rbg>": 16, "key<urbg>": 16, "key<fry4>": 16, "key<phx2>": 4}


@cache
def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype given by name; for typed PRNG keys (`key<...>`) the size of one key."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype, 8)
    if dtype.startswith("float8") or dtype.startswith("float4"):
        return 1
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    return max(1, int(digits[-1]) // 8) if digits else 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One array of the program: its id, full shape and dtype; `literal` is the Python number of a scalar constant."""

    id: int
    shape: tuple[int, ...]
    dtype: str
    literal: bool | int | float | complex | None = None
    name: str = ""

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size of the whole array in bytes."""
        return self.num_elements * item_bytes(self.dtype)

    @property
    def is_float(self) -> bool:
        """True for the dtypes that carry gradients."""
        return self.dtype.startswith(("float", "bfloat", "complex")) and self.dtype != "float0"

    def numbered(self, number: int) -> Value:
        """Return the same array under another id."""
        if number == self.id:
            return self
        return Value(id=number, shape=self.shape, dtype=self.dtype, literal=self.literal, name=self.name)

    def __str__(self) -> str:
        """Return text like `%3:float32[8,16]`, or `1.0:float32` for a literal."""
        if self.literal is not None:
            return f"{self.literal}:{self.dtype}"
        return f"%{self.id}:{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: its primitive, the ids of its operands and results, its static parameters and its source line.

    source        file and line of the user's code, for messages
    name_stack    the name stack of JAX, which marks transformations like `jvp(...)` and `transpose(...)`
    bodies        nested graphs of control flow; `program.wiring` maps their inputs and outputs to operands and results
    effectful     the op has a side effect (a print, a callback), so that it is never eliminated as dead
    once          ids of operands that are replaced by zeros in all micro-batches but the first
    own_columns   columns of the op's index vectors that hold positions in the full batch; in a micro-batch these must
                  be shifted to count from its first sample
    """

    id: int
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    source: str = ""
    name_stack: str = ""
    bodies: tuple[Graph, ...] = ()
    effectful: bool = False
    once: frozenset[int] = frozenset()
    own_columns: tuple[int, ...] = ()

    def numbered(self, number: int, operands: tuple[int, ...], results: tuple[int, ...]) -> Op:
        """Return the same op under another id, with other operands and results."""
        if (number, operands, results) == (self.id, self.operands, self.results):
            return self
        once = frozenset(v for v, old in zip(operands, self.operands, strict=False) if old in self.once)
        return Op(
            id=number,
            primitive=self.primitive,
            operands=operands,
            results=results,
            params=self.params,
            source=self.source,
            name_stack=self.name_stack,
            bodies=self.bodies,
            effectful=self.effectful,
            once=once if self.once else self.once,
            own_columns=self.own_columns,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A program: `values` and `ops` are indexed by id; `inputs` and `outputs` are value ids in calling order.

    Graphs compare by identity, so that they are cheap keys of caches; `plan.fingerprint` compares their content.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @cached_property
    def producer(self) -> tuple[int | None, ...]:
        """The id of the op that computes each value, indexed by value id; None for inputs and literals."""
        table: list[int | None] = [None] * len(self.values)
        for op in self.ops:
            for result in op.results:
                table[result] = op.id
        return tuple(table)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """The ids of the ops that read each value, indexed by value id: in execution order, without duplicates."""
        table: list[list[int]] = [[] for _ in self.values]
        for op in self.ops:
            for operand in dict.fromkeys(op.operands):
                table[operand].append(op.id)
        return tuple(tuple(ops) for ops in table)

    def operands(self, op: Op) -> tuple[Value, ...]:
        """Return the operands of an op as values."""
        return tuple(self.values[i] for i in op.operands)

    def results(self, op: Op) -> tuple[Value, ...]:
        """Return the results of an op as values."""
        return tuple(self.values[i] for i in op.results)

    def _repr_html_(self) -> str:
        return view(View.GRAPH_HTML, self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the graph as text in IPython, where no HTML is shown."""
        printer.text(view(View.GRAPH_SUMMARY if cycle else View.GRAPH_TEXT, self))

    def walk(self) -> Iterator[tuple[Graph, Op]]:
        """Yield every op, at any depth, with the graph that contains it; an op comes before the ops of its bodies."""
        for op in self.ops:
            yield self, op
            for body in op.bodies:
                yield from body.walk()
