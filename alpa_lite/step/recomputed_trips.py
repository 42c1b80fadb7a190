"""Recompute in loops over layers: each trip of the backward loop repeats the forward trip to which it belongs.

    forward   carry, ys, residuals = scan(f)(consts, carry, xs)        forward   carry, ys, carries = scan(f')
    backward  scan(b)(residuals, cotangents)                      →    backward  scan(b')(consts, xs, carries, …)

f' returns the inputs of each trip instead of residuals (`_storing_body`); b' is b preceded by the part of f that
computes them (`_repeating_body`). The backward pass then holds the residuals of one trip at a time, and the forward
pass none. A pair of loops is left unchanged where that would save nothing (`_trade`).

Graphs are rewritten with copies and barriers added: values retain their ids, ops are renumbered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from alpa_lite.program.editor import Origin, ProgramEditor
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.phases import BodyScope, Phase, StepGraph
from alpa_lite.step.recomputation import Remat, keeps_results


def closure(graph: Graph, roots: Iterable[int], is_made_again: Callable[[Value], bool]) -> dict[int, None]:
    """Return the ops that must run to recompute `roots` from values that are not recomputed, in no particular order.

    Args:
        graph: the graph.
        roots: value ids.
        is_made_again: whether a value is recomputed.
    """
    found, queue = dict[int, None](), list(roots)
    while queue:
        v = queue.pop()
        producer = graph.producer[v]
        if producer is None or producer in found or not is_made_again(graph.values[v]):
            continue
        found[producer] = None
        queue += graph.ops[producer].operands
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Looped:
    """A step with some pairs of loops rewritten; ops retain their ids.

    Attributes:
        step: the rewritten step.
        forward: forward loops that were handled: their trips are repeated, or repeating them would save nothing.
        origins: for each rewritten body, the op of a traced body that each of its ops is or repeats.
    """

    step: StepGraph
    forward: frozenset[int]
    origins: Mapping[Graph, tuple[Origin | None, ...]]


def repeat_trips(step: StepGraph, of_op: Sequence[int | None], remat: Sequence[Remat]) -> Looped:
    """Rewrite the pairs of loops of every layer whose policy is not to store everything.

    Args:
        step: the step as it was traced.
        of_op: layer of each op, or None.
        remat: the policy of each layer.
    """
    rewriter = _LoopRewriter(step)
    for op in step.graph.ops:
        layer = of_op[op.id]
        if layer is None or remat[layer] is Remat.NONE or step.phases[op.id] is not Phase.BACKWARD:
            continue
        for number in _forward_loops(step, of_op, op):
            rewriter.rewrite(number, op.id, remat[layer])
    return rewriter.finished()


def _forward_loops(step: StepGraph, of_op: Sequence[int | None], backward: Op) -> list[int]:
    """Return the forward loops of the same layer and trip count whose stacked results a backward loop scans."""
    graph, found = step.graph, dict[int, None]()
    if backward.primitive != "scan" or backward.effectful:
        return []
    for v in backward.operands[_first_scanned(backward) :]:
        producer = graph.producer[v]
        op = graph.ops[producer] if producer is not None else None
        # A trip with an effect must not run a second time.
        if op is None or op.primitive != "scan" or op.effectful or step.phases[op.id] is not Phase.FORWARD:
            continue
        if of_op[op.id] == of_op[backward.id] and op.params["length"] == backward.params["length"]:
            found[op.id] = None
    return list(found)


def _first_scanned(scan: Op) -> int:
    """Return the number of the first operand of a scan (and input of its body) that is read row by row."""
    return int(scan.params["num_consts"]) + int(scan.params["num_carry"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trade:
    """The values that a pair of loops passes on in place of residuals.

    Attributes:
        dropped: number of a scanned operand of the backward loop → the value of the forward body that it holds.
        ended: numbers of the forward loop's results that lose their last reader.
        read: numbers of the inputs of the forward body, carries excepted, from which dropped values are recomputed.
        stacked: the other values of the forward body from which they are recomputed → number of the result that stacks
            them already, None for a new result.
    """

    dropped: Mapping[int, int]
    ended: frozenset[int]
    read: tuple[int, ...]
    stacked: Mapping[int, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Feed:
    """The inputs of the backward body that hold what the forward trip read, as constants and as rows.

    Attributes:
        consts: value of the forward body → number of an existing operand of the backward loop, None for a new one.
        slices: the same for values that are read row by row.
    """

    consts: Mapping[int, int | None]
    slices: Mapping[int, int | None]


class _LoopRewriter:
    """Rewrite pairs of loops one after the other; equal pairs continue to share their bodies."""

    def __init__(self, step: StepGraph) -> None:
        self.step = step
        self.ops = list(step.graph.ops)
        self.editor = ProgramEditor(step.graph)
        self.full_shapes = list(step.full_shapes)
        self.batch_dims = list(step.batch_dims)
        self.scopes = dict(step.bodies)
        self.origins: dict[Graph, tuple[Origin | None, ...]] = {}
        self.forward: set[int] = set()
        self.bodies: dict[object, tuple[Graph, Graph]] = {}

    def finished(self) -> Looped:
        """Return the rewritten step."""
        forward = frozenset(self.forward)
        if not self.origins:
            # The step itself, with everything that is memoized on it.
            return Looped(step=self.step, forward=forward, origins={})
        for op in self.ops:
            self.editor.emit(op, op.operands, op.results)
        made = replace(
            self.step,
            graph=self.editor.graph(self.step.graph.inputs, self.step.graph.outputs),
            full_shapes=tuple(self.full_shapes),
            batch_dims=tuple(self.batch_dims),
            bodies=self.scopes,
        )
        return Looped(step=made, forward=forward, origins=self.origins)

    def rewrite(self, forward: int, backward: int, policy: Remat) -> None:
        """Rewrite a pair of loops if that saves memory."""
        f, b = self.ops[forward], self.ops[backward]
        # New stacks need the shapes that the values of the bodies have at the full batch.
        if forward in self.forward or not {f.bodies[0], b.bodies[0]} <= self.scopes.keys():
            return
        self.forward.add(forward)
        trade = self._trade(f, b, policy)
        if trade is None:
            return
        stacks = {v: f.results[r] for v, r in trade.stacked.items() if r is not None}
        stacks |= {v: self._new_stack(f, v) for v, r in trade.stacked.items() if r is None}
        operand_of = {f.bodies[0].inputs[n]: f.operands[n] for n in trade.read} | stacks
        feed = self._feed(f, b, trade, operand_of)
        key = (f.bodies[0], b.bodies[0], _frozen(trade.dropped), trade.ended, _frozen(trade.stacked))
        key = (*key, _frozen(feed.consts), _frozen(feed.slices))
        if key not in self.bodies:
            self.bodies[key] = (self._storing_body(f, trade), self._repeating_body(f, b, trade, feed, policy))
        first, second = self.bodies[key]
        self._replace_forward(f, trade, stacks, first)
        self._replace_backward(b, trade, feed, operand_of, second)

    # ------------------------------------------------------------------------------------------------ what to hand on

    def _trade(self, f: Op, b: Op, policy: Remat) -> _Trade | None:
        """Return the values to pass on in place of residuals; None if they are no smaller."""
        graph, body, num_carry = self.step.graph, f.bodies[0], int(f.params["num_carry"])
        outputs = set(graph.outputs)
        made: dict[int, int] = {}  # operand number of the backward loop → result number of the forward loop
        for i in range(_first_scanned(b), len(b.operands)):
            v = b.operands[i]
            # A residual that anything else reads has to be stacked in any case.
            if v in f.results[num_carry:] and graph.consumers[v] == (b.id,) and v not in outputs:
                made[i] = f.results.index(v)
        again = self._is_made_again(body, policy)
        dropped = {i: body.outputs[r] for i, r in made.items() if again(body.values[body.outputs[r]])}
        ended = frozenset(made[i] for i in dropped)
        frontier = self._frontier(body, list(dropped.values()), policy)
        inputs = {v: n for n, v in enumerate(body.inputs)}
        # The backward loop can read the constants and scanned arrays of the forward loop as they are. A carry changes
        # with every trip and has to be stacked.
        carries = range(int(f.params["num_consts"]), _first_scanned(f))
        read = tuple(sorted(inputs[v] for v in frontier if v in inputs and inputs[v] not in carries))
        there = {body.outputs[r]: r for r in range(num_carry, len(f.results)) if r not in ended}
        stacked = {v: there.get(v) for v in frontier if v not in inputs or inputs[v] in carries}
        # Bytes of one trip are compared, since both loops run equally many.
        gained = sum(body.values[body.outputs[r]].bytes for r in ended)
        if gained <= sum(body.values[v].bytes for v, r in stacked.items() if r is None):
            return None
        return _Trade(dropped=dropped, ended=ended, read=read, stacked=stacked)

    def _is_made_again(self, body: Graph, policy: Remat) -> Callable[[Value], bool]:
        """Return a predicate that tells whether a value of a forward body is recomputed."""
        batch = self.scopes[body].batch_dims

        def is_made_again(value: Value) -> bool:
            producer = body.producer[value.id]
            return producer is not None and not keeps_results(policy, body, body.ops[producer], batch)

        return is_made_again

    def _frontier(self, body: Graph, roots: Sequence[int], policy: Remat) -> list[int]:
        """Return the stored values from which the roots are recomputed, by ascending id."""
        again = closure(body, roots, self._is_made_again(body, policy))
        made = {r for o in again for r in body.ops[o].results}
        read = {v for o in again for v in body.ops[o].operands}
        return sorted(v for v in read - made if body.values[v].literal is None)

    def _feed(self, f: Op, b: Op, trade: _Trade, operand_of: Mapping[int, int]) -> _Feed:
        """Match the values that the backward body needs with operands that the backward loop has already."""
        num_consts, inputs = int(f.params["num_consts"]), f.bodies[0].inputs
        of_b = int(b.params["num_consts"])
        old_consts = {v: i for i, v in enumerate(b.operands[:of_b])}
        old_slices = {v: i for i, v in enumerate(b.operands) if i >= _first_scanned(b) and i not in trade.dropped}
        consts = {inputs[n] for n in trade.read if n < num_consts}
        return _Feed(
            consts={v: old_consts.get(operand_of[v]) for v in operand_of if v in consts},
            slices={v: old_slices.get(operand_of[v]) for v in operand_of if v not in consts},
        )

    def _new_stack(self, f: Op, value: int) -> int:
        """Append the stack of a body value over all trips to the step and return its id."""
        body, length = f.bodies[0], int(f.params["length"])
        like, scope = body.values[value], self.scopes[body]
        self.full_shapes.append((length, *scope.full_shapes[value]))
        dim = scope.batch_dims[value]
        # The trips are a new leading dim.
        self.batch_dims.append(None if dim is None else dim + 1)
        return self.editor.add(Value(id=-1, shape=(length, *like.shape), dtype=like.dtype))

    # ------------------------------------------------------------------------------------------------ new loops

    def _replace_forward(self, f: Op, trade: _Trade, stacks: Mapping[int, int], body: Graph) -> None:
        """Replace the forward loop by one that returns the new stacks instead of residuals."""
        results = [v for r, v in enumerate(f.results) if r not in trade.ended]
        results += [stacks[v] for v, r in trade.stacked.items() if r is None]
        self.ops[f.id] = replace(f, results=tuple(results), bodies=(body,))

    def _replace_backward(self, b: Op, trade: _Trade, feed: _Feed, operand_of: Mapping[int, int], body: Graph) -> None:
        """Replace the backward loop by one that reads the new operands instead of residuals."""
        of_b = int(b.params["num_consts"])
        consts = [operand_of[v] for v, i in feed.consts.items() if i is None]
        slices = [operand_of[v] for v, i in feed.slices.items() if i is None]
        rest = [v for i, v in enumerate(b.operands) if i >= of_b and i not in trade.dropped]
        # A scan takes its constants first, then what it carries, then the arrays that it reads row by row.
        operands = (*b.operands[:of_b], *consts, *rest, *slices)
        params = {**b.params, "num_consts": of_b + len(consts)}
        self.ops[b.id] = replace(b, operands=operands, params=params, bodies=(body,))

    def _storing_body(self, f: Op, trade: _Trade) -> Graph:
        """Return the forward body without ops that only dropped results need, and with the new results."""
        body, editor = f.bodies[0], ProgramEditor(f.bodies[0])
        outputs = [v for r, v in enumerate(body.outputs) if r not in trade.ended]
        outputs += [v for v, r in trade.stacked.items() if r is None]
        needed, alive = set(outputs), set[int]()
        for op in reversed(body.ops):
            if op.effectful or not needed.isdisjoint(op.results):
                needed.update(op.operands)
                alive.add(op.id)
        for op in body.ops:
            if op.id in alive:
                editor.emit(op, op.operands, op.results, origin=self._origin(body, op.id))
        return self._registered(editor, body.inputs, outputs)

    def _repeating_body(self, f: Op, b: Op, trade: _Trade, feed: _Feed, policy: Remat) -> Graph:
        """Return the backward body with copies of forward ops before the ops that read their results."""
        body, source = b.bodies[0], f.bodies[0]
        editor, again = ProgramEditor(body), self._is_made_again(source, policy)
        place = {
            v: editor.copy(source, v) if i is None else body.inputs[i]
            for v, i in (*feed.consts.items(), *feed.slices.items())
        }
        stands_for = {body.inputs[i]: v for i, v in trade.dropped.items()}

        def missing(value: Value) -> bool:
            return value.id not in place and again(value)

        def copied(reads: Sequence[int]) -> list[int]:
            """Return the operands to read, after appending the copies that compute them."""
            wanted = [stands_for[v] for v in reads if v in stands_for]
            for number in sorted(closure(source, wanted, missing)):
                # Literals of the forward body are not values of the backward body, which gets copies of them.
                editor.carry_over(source, source.ops[number], place, origin=self._origin(source, number))
            return [place[stands_for[v]] if v in stands_for else v for v in reads]

        for op in body.ops:
            editor.emit(op, copied(op.operands), op.results, origin=self._origin(body, op.id))
        outputs = copied(body.outputs)
        of_b = int(b.params["num_consts"])
        consts = [place[v] for v, i in feed.consts.items() if i is None]
        slices = [place[v] for v, i in feed.slices.items() if i is None]
        rest = [v for i, v in enumerate(body.inputs) if i >= of_b and i not in trade.dropped]
        return self._registered(editor, [*body.inputs[:of_b], *consts, *rest, *slices], outputs)

    def _origin(self, body: Graph, op: int) -> Origin | None:
        """Return the traced op that an op of a body is or repeats."""
        return self.origins[body][op] if body in self.origins else Origin(body, op)

    def _registered(self, editor: ProgramEditor, inputs: Sequence[int], outputs: Sequence[int]) -> Graph:
        """Return the finished body, with its origins and shape tables recorded."""
        body = editor.graph(inputs, outputs)
        self.origins[body] = tuple(editor.origins)
        self.scopes[body] = BodyScope(
            full_shapes=editor.table(lambda graph: self.scopes[graph].full_shapes),
            batch_dims=editor.table(lambda graph: self.scopes[graph].batch_dims),
        )
        return body


def _frozen(table: Mapping[int, int | None]) -> tuple[tuple[int, int | None], ...]:
    return tuple(table.items())
