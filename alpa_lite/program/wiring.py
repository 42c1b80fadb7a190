"""The wiring of control flow: how the operands and results of an op map to the inputs and outputs of its bodies.

    op       operands                     bodies              results
    scan     consts ‖ carry ‖ xs          (body,)             carry ‖ stacked ys
    while    consts ‖ consts ‖ carry      (condition, body)   carry
    cond     index ‖ arguments            one per branch      one each

A *carried* result is the last state of an operand that the body passes from iteration to iteration; it has the same
spec in all of them. All code that looks into bodies (batch tracking, search, pricing, emission) uses `wiring_of` and
does not depend on the primitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from alpa_lite.program.ir import Graph, Op

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


def wiring_of(op: Op) -> Wiring | None:
    """Return the wiring of an op, or None if it has no bodies."""
    if not op.bodies:
        return None
    names = {"scan": ("num_consts", "num_carry", "length"), "while": ("cond_nconsts", "body_nconsts")}
    numbers = [op.params[name] for name in names.get(op.primitive, ())] or [len(op.bodies)]
    return _wiring(op.primitive, len(op.operands), len(op.results), tuple(numbers))


@lru_cache(maxsize=10_000)
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
    if length < 2 * count:
        count = next(c for c in range(count, length + 1) if length % c == 0)
    ends = [-(-i * length // count) for i in range(count + 1)]
    return [*pairwise(ends)]


def accumulators(op: Op, wiring: Wiring) -> dict[int, int]:
    """Return the operands that a loop uses only as accumulators: position of the operand → id of the adding op.

    The adding op is the one in the last body (the only one, except for the condition of a while loop). An operand is an
    accumulator if nothing else reads it and the new sum is read by nothing but the next iteration.
    """
    found: dict[int, int] = {}
    for r, i in wiring.carried.items():
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
