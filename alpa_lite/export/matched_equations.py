"""The equations of an exported pipeline that the ops of a plan are: the same primitives on the same operands.

The module traces the step and inlines its calls (`trace` in `pipeline_jax.py.txt`), as alpa_lite does, but runs no
passes. Arguments have the same order in both. From these on, an op is the equation

    with its primitive, whose operands are the equations (or arguments, or literals) that its operands are

and where several are, as two sums of one array along different dims, the one with its parameters that comes next. Equal
equations on equal operands make equal values, whichever of them an op was matched with. Ops with operands that the
program does not have, such as loops and branches, into whose bodies constants move, are matched in their order, by the
shapes of their results; and then the ops of their bodies, from the inputs on that the program has, too (`_fed`). What a
plan computes again is the equation of what it repeats (`with_copies`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite._jax import Array
from alpa_lite.program.equations import Params, PlainParams
from alpa_lite.program.identity import params_text
from alpa_lite.program.ir import Graph, Op, wiring_of
from alpa_lite.step.rematerialisation import LayeredStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """What the ops and values of a graph are in an exported program.

    Attributes:
        equations: op → number of its equation.
        values: value of the graph → number of the value; values that the program does not have are missing.
        bodies: op with bodies → what the ops and values of each body are in the program of that body.
    """

    equations: Mapping[int, int]
    values: Mapping[int, int]
    bodies: Mapping[int, Sequence[Matches]] = field(default_factory=dict[int, "Sequence[Matches]"])


def matched(graph: Graph, program: Any, inputs: Mapping[int, int]) -> Matches:
    """Match a graph with a program that the module's `trace` returned; `inputs`: value of the graph → value there."""
    return _Matcher(graph, program, dict(inputs)).run()


def with_copies(found: Matches, traced: Graph, planned: LayeredStep) -> Matches:
    """Return the matches of a step as planned, from those of the step as it was traced."""
    origins = planned.origins.get(planned.graph)
    if origins is None:
        return found
    equations, values = dict[int, int](), dict(found.values)
    for op, origin in zip(planned.graph.ops, origins, strict=True):
        if origin is None:  # a barrier before what is computed again, or a copy to the host and back
            same = op.operands
        else:
            same = traced.ops[origin.op].results
            if origin.op in found.equations:
                equations[op.id] = found.equations[origin.op]
        if origin is None or op.bodies == traced.ops[origin.op].bodies:
            for result, v in zip(op.results, same, strict=True):
                if v in values:
                    values.setdefault(result, values[v])
    return Matches(equations=equations, values=values)


def equations_at_all_depths(
    graph: Graph, found: Matches, place: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[int, ...] | None, Op]]:
    """Yield each op, at any depth, with its place in the program; None if the program does not have it.

    A place is the number of an equation, after those of the loop or branch and of its body that it is in.
    """
    for op in graph.ops:
        e = found.equations.get(op.id)
        yield (None if e is None else (*place, e)), op
        inner = found.bodies.get(op.id, [Matches(equations={}, values={})] * len(op.bodies))
        for number, pair in enumerate(zip(op.bodies, inner, strict=True)):
            yield from equations_at_all_depths(*pair, (*place, e or 0, number))


def known_inputs(graph: Graph, values: Sequence[int | None]) -> dict[int, int]:
    """Return input of a graph → value of a program, from these values in the order of the inputs, None if unknown."""
    # What is computed before the loop follows the arguments and the captured arrays.
    return {v: w for v, w in zip(graph.inputs, values, strict=False) if w is not None}


def matched_constants(ours: Sequence[Array], theirs: Mapping[int, Array]) -> list[int | None]:
    """Return for each captured array the value of the program that has the same elements; None if there is none."""
    by_content = {_content(array): value for value, array in theirs.items()}
    return [by_content.get(_content(array)) for array in ours]


def _content(array: Array) -> Hashable:
    is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
    elements = np.asarray(jax.random.key_data(array) if is_key else array)
    return str(array.dtype), elements.shape, elements.tobytes()


@dataclass(slots=True)
class _Matcher:
    graph: Graph
    program: Any
    values: dict[int, int]
    equations: dict[int, int] = field(default_factory=dict[int, int])
    # Value of the program → the first value that an equal equation makes.
    first: dict[int, int] = field(default_factory=dict[int, int])
    taken: set[int] = field(default_factory=set[int])
    bodies: dict[int, Sequence[Matches]] = field(default_factory=dict[int, "Sequence[Matches]"])
    plain: PlainParams = field(default_factory=PlainParams)

    def run(self) -> Matches:
        graph, program = self.graph, self.program
        alike: dict[Hashable, list[int]] = defaultdict(list)
        shaped: dict[Hashable, list[int]] = defaultdict(list)
        given, made = set(self.values.values()), dict[Hashable, list[int]]()
        for number, eqn in enumerate(program.equations):
            operands, shapes = tuple(map(self._operand, eqn.operands)), self._shapes(eqn.results)
            equal = eqn.primitive.name, operands, shapes, _text(self.plain.of(eqn.params))
            self.first.update(zip(eqn.results, made.setdefault(equal, eqn.results), strict=True))
            if not given.isdisjoint(eqn.results):
                continue  # what is an input of the graph, no op of it makes
            alike[eqn.primitive.name, operands, shapes].append(number)
            shaped[eqn.primitive.name, shapes].append(number)
        for op in graph.ops:
            operands, shapes = tuple(map(self._value, op.operands)), tuple(value.shape for value in graph.results(op))
            found = alike[op.primitive, operands, shapes]
            if not found:
                rest = [n for n in shaped[op.primitive, shapes] if n not in self.taken]
                found = [n for n in rest if op.bodies or self._may_have(n, operands)]
            if found:
                self._match(op, found)
        return Matches(equations=self.equations, values=self.values, bodies=self.bodies)

    def _may_have(self, number: int, operands: Sequence[Hashable]) -> bool:
        """Return whether an equation has these operands where they are known."""
        own = self.program.equations[number].operands
        return len(own) == len(operands) and all(
            v is None or v == self._operand(w) for v, w in zip(operands, own, strict=True)
        )

    def _match(self, op: Op, found: Sequence[int]) -> None:
        if len(found) > 1 and not op.bodies:
            # Loops and branches keep their bodies among the parameters of an equation.
            wanted = _text(op.params)
            same = [n for n in found if _text(self.plain.of(self.program.equations[n].params)) == wanted]
            found = [*(n for n in same if n not in self.taken), *same, *found]
        self.equations[op.id] = number = found[0]
        self.taken.add(number)
        eqn = self.program.equations[number]
        self.values.update(zip(op.results, eqn.results, strict=True))
        if op.bodies:
            pairs = zip(op.bodies, eqn.bodies, self._fed(op, eqn), strict=True)
            self.bodies[op.id] = [_Matcher(body, inner, inputs).run() for body, inner, inputs in pairs]

    def _fed(self, op: Op, eqn: Any) -> list[dict[int, int]]:
        """Return, for each body of an op, which inputs of the program of that body its inputs are.

        Inputs are fed by operands. Of these, the constants of an op may be others than those of the equation: the op
        has captured arrays, too, and its body makes free values itself.
        """
        operands = tuple(range(len(eqn.operands)))
        other = replace(op, operands=operands, params=_jax.params_of(eqn), bodies=eqn.bodies)
        (ours, our_state), (theirs, their_state) = _constants(op), _constants(other)
        same = dict(zip(our_state, their_state, strict=True))
        for own, places in zip(ours, map(list, theirs), strict=True):
            # From the end, since a body makes the first one itself of two operands that are one value.
            for i in reversed(own):
                value = self._value(op.operands[i])
                found = [n for n, j in enumerate(places) if self._operand(eqn.operands[j]) == value]
                if value is not None and found:
                    same[i] = places[found[-1]]
                    del places[found[-1] :]
        wirings = (each for each in map(wiring_of, (op, other)) if each is not None)
        fed = zip(op.bodies, *(wiring.inputs for wiring in wirings), strict=True)
        return [
            {v: theirs.index(same[i]) for v, i in zip(body.inputs, ours, strict=True) if i in same}
            for body, ours, theirs in fed
        ]

    def _shapes(self, values: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(getattr(self.program.avals[v], "shape", ())) for v in values)

    def _operand(self, atom: Any) -> Hashable:
        """Return what an operand of an equation is: a value of the program, or a literal."""
        if isinstance(atom, int):
            return self.first.get(atom, atom)
        aval = _jax.aval_of(atom)
        return repr(np.asarray(atom.val, aval.dtype).item()) if np.ndim(atom.val) == 0 else repr(atom)

    def _value(self, value: int) -> Hashable:
        """Return what a value of the graph is; None if the program does not have it."""
        literal = self.graph.values[value].literal
        found = self.values.get(value)
        return (None if found is None else self.first.get(found, found)) if literal is None else repr(literal)


def _constants(op: Op) -> tuple[list[range], range]:
    """Return the positions of operands that are constants of each body of control flow, and those of its state.

    The arguments of branches are constants of them.
    """
    names = {"scan": ("num_consts",), "while": ("cond_nconsts", "body_nconsts")}.get(op.primitive)
    if names is None:
        return [range(1, len(op.operands))], range(1)
    ends = [0, *accumulate(op.params[name] for name in names)]
    return [range(*bounds) for bounds in pairwise(ends)], range(ends[-1], len(op.operands))


def _text(params: Params) -> str:
    """Return the text of parameters, of which strides of 1 are none."""
    strides = params.get("strides")
    return params_text({**params, "strides": None} if isinstance(strides, tuple) and set(strides) <= {1} else params)
