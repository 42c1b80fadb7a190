"""Count the messages that a program sends by `ppermute`, on its jaxpr.

sent_bytes[d] = sum over the executed ppermutes with a pair (d, other) of the operand's bytes      (count_messages)
num_rounds    = ppermutes on the longest chain in which each reads what the previous one received

Each equation counts as often as it runs: the body of a loop once per trip. Messages that do not depend on one another
count as one round, however many there are, since a network may carry them at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from alpa_lite._jax import Literal, inner_jaxprs, open_jaxpr


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """The messages of one run of a program.

    Attributes:
        sent_bytes: bytes sent by each device of the axis.
        sent_messages: number of messages sent by each device.
        num_rounds: length of the longest chain of dependent messages.
    """

    sent_bytes: tuple[int, ...]
    sent_messages: tuple[int, ...]
    num_rounds: int


@dataclass
class _Tally:
    sent_bytes: list[int]
    sent_messages: list[int]
    num_rounds: int = 0
    rounds: dict[Any, int] = field(default_factory=dict[Any, int])


def count_messages(jaxpr: Any, num_devices: int) -> Messages:
    """Count the messages of one run of a jaxpr over an axis of `num_devices` devices.

    Raises:
        ValueError: the number of runs of a ppermute is not static (`while`, `cond`).
    """
    tally = _Tally([0] * num_devices, [0] * num_devices)
    program = open_jaxpr(jaxpr)
    _walk(program, [0] * len(program.invars), tally)
    return Messages(
        sent_bytes=tuple(tally.sent_bytes), sent_messages=tuple(tally.sent_messages), num_rounds=tally.num_rounds
    )


def _walk(jaxpr: Any, arrived: Sequence[int], tally: _Tally) -> list[int]:
    """Return the round after which each result is available, given the rounds of the arguments."""
    after: dict[Any, int] = dict(zip(jaxpr.invars, arrived, strict=True))

    def round_of(atom: Any) -> int:
        return 0 if isinstance(atom, Literal) else after.get(atom, 0)

    for eqn in jaxpr.eqns:
        results = _equation(eqn, [round_of(atom) for atom in eqn.invars], tally)
        after.update(zip(eqn.outvars, results, strict=True))
    return [round_of(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, arrived: list[int], tally: _Tally) -> list[int]:
    latest = max(arrived, default=0)
    if eqn.primitive.name == "ppermute":
        latest += 1
        size = sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
        for source, target in eqn.params["perm"]:
            if source != target:
                tally.sent_bytes[source] += size
                tally.sent_messages[source] += 1
        tally.num_rounds = max(tally.num_rounds, latest)
        return [latest] * len(eqn.outvars)
    if eqn.primitive.name == "scan":
        return _scan(eqn, arrived, tally)
    inner = [open_jaxpr(jaxpr) for jaxpr in inner_jaxprs(eqn)]
    if len(inner) == 1 and eqn.primitive.name != "while" and len(inner[0].invars) == len(arrived):
        return _walk(inner[0], arrived, tally)
    if any(_sends(jaxpr) for jaxpr in inner):
        raise ValueError(
            f"A ppermute runs inside `{eqn.primitive.name}`, which does not say how often: use loops with a static "
            "number of trips (jax.lax.scan, jax.lax.fori_loop with Python numbers)."
        )
    return [latest] * len(eqn.outvars)


def _scan(eqn: Any, arrived: list[int], tally: _Tally) -> list[int]:
    body = open_jaxpr(eqn.params["jaxpr"])
    num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    constants, rows = arrived[:num_consts], arrived[num_consts + num_carry :]
    carry = arrived[num_consts : num_consts + num_carry]
    stacked = [0] * (len(eqn.outvars) - num_carry)
    for _ in range(eqn.params["length"]):
        results = _walk(body, [*constants, *carry, *rows], tally)
        carry = results[:num_carry]
        stacked = [max(pair) for pair in zip(stacked, results[num_carry:], strict=True)]
    return [*carry, *stacked]


def _sends(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "ppermute" or any(_sends(open_jaxpr(inner)) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )
