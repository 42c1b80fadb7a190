"""When two pieces of a program are the same: three questions, each answered by equal keys.

    params_texts     are two ops of one kind: the same primitive with the same parameters?
    structure        are two graphs the same ops on the same shapes, value by value?
    value_numbers    are two values of one graph computed in the same way from the same inputs?

Parameters and literals are compared by text, since 1 == True and 0.0 == -0.0 but nan != nan, and JAX computes with
each in its own way. Names and source lines do not count. Texts are the same in every process, so that digests of them
can be stored (`alpa_lite.plan.plan.fingerprint`); a change of them would invalidate the plans that users have saved.

Pieces that stand in different places of a graph are compared with their values numbered in the order of first use
(`FirstUses`). `content` compares objects of any type, by identity where a type has no content to compare.

Two traces of a step at different batch sizes are not equal in this sense; `alpa_lite.trace.alignment` matches these.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized

K = TypeVar("K", bound=Hashable)


class FirstUses(dict[K, int]):
    """A number for each key, in the order in which the keys are first looked up."""

    def __missing__(self, key: K) -> int:
        """Number a new key."""
        self[key] = number = len(self)
        return number


@memoized
def params_texts(graph: Graph) -> tuple[str, ...]:
    """Return the parameters of each op as text, by op id."""
    # By id, since the trips of an unrolled loop share their parameters; the graph holds them meanwhile.
    texts: dict[int, str] = {}
    for op in graph.ops:
        if id(op.params) not in texts:
            texts[id(op.params)] = params_text(op.params)
    return tuple([texts[id(op.params)] for op in graph.ops])


def params_text(params: Mapping[str, object]) -> str:
    """Return parameters as text, by name."""
    # By name alone, since values of different types have no order.
    return repr(sorted(params.items(), key=lambda item: item[0]))


@memoized
def structure(graph: Graph) -> bytes:
    """Return text that is equal for graphs of equal ops on equal values, with the same ids, bodies included."""
    parts = [repr([(v.shape, v.dtype, v.literal) for v in graph.values]), repr((graph.inputs, graph.outputs))]
    found = [part.encode() for part in parts]
    for op, params in zip(graph.ops, params_texts(graph), strict=True):
        found.append(f"({op.primitive!r}, {op.operands!r}, {op.results!r}, {params})".encode())
        found += map(structure, op.bodies)
    return b"".join(found)


#: Primitives with functions among their parameters, which have no text.
_OF_FUNCTIONS = frozenset(("pure_callback", "reduce", "reduce_window", "select_and_scatter"))


def value_numbers(graph: Graph, inputs: Sequence[Hashable], names: FirstUses[Hashable]) -> dict[int, int]:
    """Return a number for each value, equal for values that are computed in the same way; a barrier computes nothing.

    `inputs` are keys, equal for equal inputs; graphs that share `names` have equal numbers for equal values.
    """
    numbers = {v: names["input", key] for v, key in zip(graph.inputs, inputs, strict=True)}
    literals = (v for v in graph.values if v.literal is not None)
    numbers |= {v.id: names["literal", repr(v.literal), v.dtype] for v in literals}
    for op, params in zip(graph.ops, params_texts(graph), strict=True):
        operands = tuple([numbers[v] for v in op.operands])
        if op.primitive == "optimization_barrier":
            numbers.update(zip(op.results, operands, strict=True))
            continue
        # Keys name operands by number: nested keys would grow exponentially with depth.
        made = names[op.primitive, params, operands, len(op.results), *_apart(graph, op)]
        numbers.update({r: names["result", made, i] for i, r in enumerate(op.results)})
    return numbers


def _apart(graph: Graph, op: Op) -> tuple[Hashable, ...]:
    """Return what else distinguishes an op: its bodies, or itself if equal parameters do not mean equal results."""
    if op.effectful or op.primitive in _OF_FUNCTIONS:
        return (graph, op.id)
    return tuple(map(structure, op.bodies))


@dataclass(frozen=True, slots=True, eq=False)
class SameObject:
    """An object compared by identity. It holds a reference, so that no later object can get the same address."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def by_identity(value: object) -> Hashable:
    """Return the key of an object whose type has no known content: itself if it can be hashed, else its identity."""
    try:
        hash(value)
    except TypeError:
        return SameObject(value)
    return type(value), value


def content(value: object, other: Callable[[object], Hashable] = by_identity) -> Hashable:
    """Return a key that is equal for equal content alone; numbers of different types are not equal.

    `other` returns the key of an object of a type that is neither a number, a string, an array nor a container.
    """
    # repr and not ==: 0.0 == -0.0 and 1 == True, but they compile to different programs; nan is equal to nan here.
    if isinstance(value, (bool, int, float, complex, np.generic)) and not isinstance(value, enum.Enum):
        return type(value), repr(value)
    if isinstance(value, (tuple, list)):
        return type(value), tuple([content(item, other) for item in value])
    if isinstance(value, Mapping):
        # By text, since keys may be of types that do not compare.
        items = [(content(key, other), content(value[key], other)) for key in sorted(value, key=str)]
        return "mapping", tuple(items)
    if isinstance(value, np.ndarray):
        return "array", value.shape, str(value.dtype), value.tobytes()
    if value is None or isinstance(value, (str, bytes)):
        return value
    return other(value)
