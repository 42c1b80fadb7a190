"""Run loops and branches on the local blocks of a device, with JAX control flow around the bodies.

Every device takes the same branch and the same number of trips, because predicates are replicated; collectives inside
the bodies therefore match across devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jax import lax

from alpa_lite.program.ir import Op, Wiring

Body = Callable[[int, Mapping[int, Any]], tuple[Any, ...]]
"""A function that runs body `number`; the mapping replaces operands, by number, with their values in this trip."""


def run_control_flow(op: Op, wiring: Wiring, body: Body, operands: Sequence[Any]) -> list[Any]:
    """Return the results of a control-flow op (`scan`, `while` or `cond`).

    Args:
        op: the op, with its bodies.
        wiring: how its operands and results connect to its bodies.
        body: runs one of its bodies.
        operands: the values of all operands, in order.
    """
    if op.primitive == "scan":
        return _scan(op, wiring, body, operands)
    if op.primitive == "while":
        return _while(wiring, body, operands)
    branches = [partial(lambda number, *_: body(number, {}), number) for number in range(len(op.bodies))]
    return list(lax.switch(operands[0], branches))


def _scan(op: Op, wiring: Wiring, body: Body, operands: Sequence[Any]) -> list[Any]:
    """Run a scan with JAX's own, whose carry and rows are the carried and scanned operands."""
    carried, scanned = list(wiring.carried.values()), sorted(wiring.scanned)

    def trip(carry: tuple[Any, ...], slices: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = body(0, {**dict(zip(carried, carry, strict=True)), **dict(zip(scanned, slices, strict=True))})
        return outputs[: len(carried)], outputs[len(carried) :]

    last, stacks = lax.scan(
        trip,
        tuple(operands[i] for i in carried),
        tuple(operands[i] for i in scanned),
        length=op.params["length"],
        reverse=op.params["reverse"],
        unroll=op.params["unroll"],
    )
    return [*last, *stacks]


def _while(wiring: Wiring, body: Body, operands: Sequence[Any]) -> list[Any]:
    """Run a `while` loop; body 0 is its condition, body 1 its trip."""
    carried = list(wiring.carried.values())

    def goes_on(carry: tuple[Any, ...]) -> Any:
        return body(0, dict(zip(carried, carry, strict=True)))[0]

    def trip(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        return body(1, dict(zip(carried, carry, strict=True)))

    return list(lax.while_loop(goes_on, trip, tuple(operands[i] for i in carried)))
