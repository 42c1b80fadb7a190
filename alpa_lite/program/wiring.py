"""How the values outside an op of control flow meet the values inside its bodies.

    op       operands                     bodies              results
    scan     consts ‖ carry ‖ xs          (body,)             carry ‖ stacked ys
    while    consts ‖ consts ‖ carry      (condition, body)   carry
    cond     index ‖ arguments            one per branch      one each

A *carried* result is an operand that the body hands from trip to trip: it keeps one spec throughout. Everything that
looks into bodies (batch tracking, search, pricing, emission) goes through `wiring_of`, and knows no primitive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from alpa_lite.program.ir import Graph, Op

#: Additions, which may take partial sums and resolve them once.
ADDITIONS = ("add", "add_any")

#: Longer loops are never cut: they are loops over time or samples, not over layers.
MAX_TRIPS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Who feeds whom in one op of control flow.

    inputs    per body, for each of its inputs the number of the operand that feeds it
    scanned   operands of which each trip reads one slice of the leading dim
    outputs   per body, for each of its outputs the number of the result that it makes; None for a predicate
    stacked   results that stack one element per trip along a new leading dim
    carried   number of a result → number of the operand that it is the last state of
    trips     how often each body runs: the length of a scan, once for a while (nobody knows), and a branch as often
              as if all branches were equally likely
    """

    inputs: tuple[tuple[int, ...], ...]
    scanned: frozenset[int] = frozenset()
    outputs: tuple[tuple[int | None, ...], ...]
    stacked: frozenset[int] = frozenset()
    carried: Mapping[int, int]
    trips: float


def wiring_of(op: Op) -> Wiring | None:
    """The wiring of an op; None when it has no bodies."""
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
    """First and last + 1 of each part of a loop or a stack: `num_parts` of nearly equal size, if they have two or more
    each; else the next number of equal parts, at last single ones. Larger parts come earlier, as what follows the
    last layer (a product with the vocabulary, say) mostly takes longer than what comes before the first."""
    count = min(num_parts, length)
    if length < 2 * count:
        count = next(c for c in range(count, length + 1) if length % c == 0)
    ends = [-(-i * length // count) for i in range(count + 1)]
    return [*pairwise(ends)]


def accumulators(op: Op, wiring: Wiring) -> dict[int, int]:
    """Operands that a loop only adds to: number of the operand → the op of the last body that adds to it."""
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
    """Numbers of the results of a loop that are what came in and sums that its trips only added to."""
    wiring = wiring_of(op)
    if wiring is None or not wiring.carried:
        return ()
    added_to = accumulators(op, wiring)
    return tuple(r for r, i in wiring.carried.items() if i in added_to)


def _read(body: Graph, inputs: tuple[int, ...], operand: int) -> bool:
    return operand in inputs and bool(body.consumers[body.inputs[inputs.index(operand)]])
