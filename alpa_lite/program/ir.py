"""Values, ops and graphs: a traced program as immutable data that does not depend on JAX.

A graph is a list of ops in execution order, in static single assignment form (`verify` checks the invariants). Values
and ops are numbered densely, so that every table about values or ops is a tuple indexed by id. The bodies of control
flow are nested graphs (`Op.bodies`); their *wiring* says how the operands and results of an op map to the inputs and
outputs of its bodies:

    op       operands                     bodies              results
    scan     consts ‖ carry ‖ xs          (body,)             carry ‖ stacked ys
    while    consts ‖ consts ‖ carry      (condition, body)   carry
    cond     index ‖ arguments            one per branch      one each

A *carried* result is the last state of an operand that the body passes from iteration to iteration; it has the same
spec in all of them. All code that looks into bodies (batch tracking, search, pricing, emission) uses `wiring_of` and
does not depend on the primitive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any

from alpa_lite.errors import VerificationError
from alpa_lite.program.memo import memoized
from alpa_lite.program.user_shardings import UserSharding
from alpa_lite.text import View, one_line, view

#: Bytes per element of the dtypes whose size does not follow from the digits of their name. JAX stores sub-byte
#: integers in one byte per element.
_ITEM_BYTES = {"bool": 1, "float0": 0, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1}

#: Bytes of one typed PRNG key by dtype name; the keys of all other implementations have eight bytes.
_KEY_BYTES = {"key<rbg>": 16, "key<urbg>": 16, "key<fry4>": 16, "key<phx2>": 4}


@memoized(entries=1_000)
def item_bytes(dtype: str) -> int:
    """Return the bytes per element of a dtype given by name; for typed PRNG keys (`key<...>`) the size of one key."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    if dtype.startswith("key<"):
        return _KEY_BYTES.get(dtype, 8)
    # The digits at the end of these names count bits of exponent and mantissa (float8_e4m3fn).
    if dtype.startswith("float8") or dtype.startswith("float4"):
        return 1
    digits = "".join(c if c.isdigit() else " " for c in dtype).split()
    return max(1, int(digits[-1]) // 8) if digits else 4


TO_HOST, TO_DEVICE = "to_host", "to_device"
MOVES = frozenset((TO_HOST, TO_DEVICE))
"""The primitives of ops that copy an array from the memory of devices to that of their host, and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One array of the program.

    id                its number
    shape, dtype      of the whole array
    literal           the Python number of a scalar constant
    name              path of an input
    user_shardings    the shardings that the user's code gives it; they change nothing that is computed
    on_host           whether it lies in the memory of the devices' host, where only `MOVES` read and write it
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    literal: bool | int | float | complex | None = None
    name: str = ""
    user_shardings: tuple[UserSharding, ...] = field(default=(), compare=False)
    on_host: bool = False

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
        """Whether the dtype carries gradients."""
        return self.dtype.startswith(("float", "bfloat", "complex")) and self.dtype != "float0"

    def numbered(self, number: int) -> Value:
        """Return the same array under another id."""
        if number == self.id:
            return self
        # Written out, since `dataclasses.replace` is slower and this runs for every value of a program.
        return Value(
            id=number,
            shape=self.shape,
            dtype=self.dtype,
            literal=self.literal,
            name=self.name,
            user_shardings=self.user_shardings,
            on_host=self.on_host,
        )

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
    bodies        nested graphs of control flow; `wiring_of` maps their inputs and outputs to operands and results
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
        # Not strict: `step.recomputed_trips` gives an operand to a barrier that is made without one.
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


OpPath = tuple[int, ...]
"""The place of an op: its number, then for each body around it the number of the body and of the op there.

`(7,)` is op 7 of a graph, `(7, 0, 2)` op 2 in the first body of op 7."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A program: `values` and `ops` are indexed by id; `inputs` and `outputs` are value ids in calling order.

    Graphs compare by identity, so that they are cheap keys of caches; `identity` compares their content.
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

    def __repr__(self) -> str:
        return one_line(self, f"of {len(self.ops)} ops, {len(self.inputs)} inputs, {len(self.outputs)} outputs")

    def _repr_html_(self) -> str:
        return view(View.GRAPH_HTML, self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the graph as text in IPython, where no HTML is shown."""
        printer.text(view(View.GRAPH_SUMMARY if cycle else View.GRAPH_TEXT, self))

    def op_at(self, path: OpPath) -> Op:
        """Return the op at a place in this graph or in bodies of its ops."""
        op = self.ops[path[0]]
        for body, number in zip(path[1::2], path[2::2], strict=True):
            op = op.bodies[body].ops[number]
        return op

    def walk(self) -> Iterator[tuple[Graph, Op]]:
        """Yield every op, at any depth, with the graph that contains it; an op comes before the ops of its bodies."""
        for op in self.ops:
            yield self, op
            for body in op.bodies:
                yield from body.walk()


#: Primitives that add. They are linear, so they can add partial sums and leave the reduction to the end of the loop.
ADDITIONS = ("add", "add_any")

#: The largest trip count of loops that are split into parts: longer loops run over time or samples, not over layers.
MAX_TRIPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The mapping between the operands and results of one op and the inputs and outputs of its bodies.

    Operands and results are given by their position in the op.

    inputs    per body, for each of its inputs the position of the operand that feeds it
    scanned   operands of which each iteration reads one slice of the leading dim
    outputs   per body, for each of its outputs the position of the result it becomes; None for a predicate
    stacked   results that stack one element per iteration along a new leading dim
    carried   position of a result → position of the operand that holds its initial state
    trips     expected number of runs of each body: the length of a scan, 1 for a while loop (its trip count is not
              static), and 1 / number of branches for a branch, as if all branches were equally likely
    """

    inputs: tuple[tuple[int, ...], ...]
    scanned: frozenset[int] = frozenset()
    outputs: tuple[tuple[int | None, ...], ...]
    stacked: frozenset[int] = frozenset()
    carried: Mapping[int, int]
    trips: float


def is_one_trip_loop(op: Op) -> bool:
    """Return True for loops that XLA replaces by their body."""
    return op.primitive == "scan" and op.params["length"] == 1


def wiring_of(op: Op) -> Wiring | None:
    """Return the wiring of an op, or None if it has no bodies."""
    if not op.bodies:
        return None
    names = {"scan": ("num_consts", "num_carry", "length"), "while": ("cond_nconsts", "body_nconsts")}
    numbers = [op.params[name] for name in names.get(op.primitive, ())] or [len(op.bodies)]
    return _wiring(op.primitive, len(op.operands), len(op.results), tuple(numbers))


# Ops of one form share a wiring: it is looked up for every op, over and over.
@memoized(entries=10_000)
def _wiring(primitive: str, num_operands: int, num_results: int, numbers: tuple[int, ...]) -> Wiring:
    if primitive == "scan":
        num_consts, num_carry, length = numbers
        return Wiring(
            inputs=(tuple(range(num_operands)),),
            scanned=frozenset(range(num_consts + num_carry, num_operands)),
            outputs=(tuple(range(num_results)),),
            stacked=frozenset(range(num_carry, num_results)),
            carried={i: num_consts + i for i in range(num_carry)},
            trips=length,
        )
    if primitive == "while":
        condition, body = numbers
        carry = tuple(range(condition + body, num_operands))
        return Wiring(
            inputs=((*range(condition), *carry), tuple(range(condition, num_operands))),
            outputs=((None,), tuple(range(num_results))),
            carried=dict(enumerate(carry)),
            trips=1.0,
        )
    (num_branches,) = numbers
    return Wiring(
        # Operand 0 is the index of the branch.
        inputs=(tuple(range(1, num_operands)),) * num_branches,
        outputs=(tuple(range(num_results)),) * num_branches,
        carried={},
        trips=1.0 / num_branches,
    )


def parts_of(length: int, num_parts: int) -> list[tuple[int, int]]:
    """Return the (start, stop) of each part when `length` iterations or rows are split into parts of nearly equal size.

    There are `num_parts` parts if each gets at least two; otherwise the next larger number of equal parts, in the
    limit parts of size one. Larger parts come first, because the ops after the last layer (the product with the
    vocabulary, for instance) usually take longer than those before the first layer.
    """
    count = min(num_parts, length)
    # Parts of one row next to parts of two would be uneven by a factor of two.
    if length < 2 * count:
        count = next(c for c in range(count, length + 1) if length % c == 0)
    # Rounded up, so that the larger parts come first.
    ends = [-(-i * length // count) for i in range(count + 1)]
    return [*pairwise(ends)]


def accumulators(op: Op, wiring: Wiring) -> dict[int, int]:
    """Return the operands that a loop uses only as accumulators: position of the operand → id of the adding op.

    The adding op is the one in the last body (the only one, except for the condition of a while loop). An operand is an
    accumulator if nothing else reads it and the new sum is read by nothing but the next iteration.
    """
    found: dict[int, int] = {}
    for r, i in wiring.carried.items():
        # A while loop has its condition first; that reads the carried values as well.
        # Only the last body makes the value that is carried on.
        *others, body = op.bodies
        if any(_read(other, inputs, i) for other, inputs in zip(others, wiring.inputs, strict=False)):
            continue
        start, end = body.inputs[wiring.inputs[-1].index(i)], body.outputs[wiring.outputs[-1].index(r)]
        producer = body.producer[end]
        if producer is None or body.ops[producer].primitive not in ADDITIONS:
            continue
        read_elsewhere = tuple(body.consumers[start]) != (producer,) or body.consumers[end]
        if not read_elsewhere and start not in body.outputs and body.outputs.count(end) == 1:
            found[i] = producer
    return found


def accumulated(op: Op) -> tuple[int, ...]:
    """Return the positions of the results of a loop that are accumulators: the initial value plus a sum."""
    wiring = wiring_of(op)
    if wiring is None or not wiring.carried:
        return ()
    added_to = accumulators(op, wiring)
    return tuple(r for r, i in wiring.carried.items() if i in added_to)


def _read(body: Graph, inputs: tuple[int, ...], operand: int) -> bool:
    return operand in inputs and bool(body.consumers[body.inputs[inputs.index(operand)]])


def verify(graph: Graph) -> Graph:
    """Return the graph unchanged, or raise `VerificationError` if it is not well formed.

    Ids must be dense and in order. Every value must have exactly one origin (an input, a literal or one op) and be
    defined before it is read. Each body of control flow must have as many inputs and outputs as its wiring.
    """
    for numbered, what in ((graph.values, "value"), (graph.ops, "op")):
        for position, item in enumerate(numbered):
            if item.id != position:
                raise VerificationError(f"The {what} at position {position} has the number {item.id}.")
    verified = set[Graph]()
    # Literals have no producer, and may be read from the start.
    known = set(graph.inputs) | {v.id for v in graph.values if v.literal is not None}
    for op in graph.ops:
        unmade = [str(graph.values[v]) for v in op.operands if v not in known]
        if unmade:
            raise VerificationError(f"op {op.id} ({op.primitive}, {op.source}) reads {unmade} before they are made.")
        twice = [str(graph.values[r]) for r in op.results if r in known]
        if twice:
            raise VerificationError(f"op {op.id} ({op.primitive}, {op.source}) makes {twice}, which exist already.")
        known.update(op.results)
        _verify_bodies(op, verified)
    missing = [str(graph.values[v]) for v in graph.outputs if v not in known]
    if missing:
        raise VerificationError(f"The outputs {missing} are never made.")
    return graph


def _verify_bodies(op: Op, verified: set[Graph]) -> None:
    """Verify the bodies of an op and add them to `verified`; bodies in `verified` are skipped.

    Ops may share one body object: without the set, nested shared bodies would be verified exponentially often.
    """
    wiring = wiring_of(op)
    for body, inputs, outputs in zip(op.bodies, wiring.inputs, wiring.outputs, strict=True) if wiring else ():
        if body not in verified:
            verified.add(verify(body))
        if (len(body.inputs), len(body.outputs)) != (len(inputs), len(outputs)):
            raise VerificationError(
                f"A body of the {op.primitive} op {op.id} takes {len(body.inputs)} values and makes "
                f"{len(body.outputs)}, where {len(inputs)} and {len(outputs)} are handed over."
            )
