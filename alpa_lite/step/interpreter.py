"""Interpret the ops of a step, its loops and branches: derive the relations of results from operands.

loops over anything but samples    trips at both sizes correspond: iterate the relations of carried values to a fixed
                                   point                                                (`Interpreter.trip_by_trip`)
loops over samples                 trip i of the full batch is trip j of micro-batch m; a carried value must be a
                                   RUNNING total, which starts from zero or is counted once, and which nothing else
                                   reads                                                (`Interpreter.over_samples`)
loops until no sample continues    what `vmap` makes of a `while` with a predicate per sample: samples that are done
                                   retain their values, so that further trips change nothing     (`same_while_guard`)
branches                           the predicate is INVARIANT: join the relations of all branches
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from alpa_lite.program.equations import Equation
from alpa_lite.program.identity import FirstUses, value_numbers
from alpa_lite.program.ir import Graph, Op, Wiring, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.rules.op_info import is_zero, op_class
from alpa_lite.step import transfer_indexing, transfer_layout
from alpa_lite.step.relations import INVARIANT, ZERO, Refusal, Relation, RelationKind, join, mixed, samples
from alpa_lite.step.transfer_functions import AGAIN, ODD, Site, Transferred, counts_once, transfer, untouched

TRANSFER_MODULES = (transfer_indexing, transfer_layout)
"""The modules that register transfer functions, so that a reader finds them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """The differences between a traced op and the op that runs in micro-batches.

    Attributes:
        once: numbers of the operands that are replaced by zeros in all micro-batches but the first.
        own_columns: columns of its index vectors that count from the start of the micro-batch.
        looked_into: for an op with bodies: it runs in micro-batches, and is not simply the op of the full batch.
        bodies: for each of its bodies the marks of the body's ops.
    """

    once: tuple[int, ...] = ()
    own_columns: tuple[int, ...] = ()
    looked_into: bool = False
    bodies: tuple[BodyMarks, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.once or self.own_columns or self.looked_into)


BodyMarks = tuple[tuple[int, Marks], ...]
"""Pairs of op id and marks, for the ops of a body that have any."""
_UNMARKED = Marks()


def batch_dim_at(full: tuple[int, ...], small: tuple[int, ...], count: int) -> int | None:
    """Return the dim in which the shapes at the full batch and at 1/count of it differ.

    None if the shapes agree; `ODD` if several dims differ, or one differs by another ratio.
    """
    if full == small:
        return None
    if len(full) != len(small):
        return ODD
    differ = [d for d, (n, m) in enumerate(zip(full, small, strict=True)) if n != m]
    return differ[0] if len(differ) == 1 and full[differ[0]] == count * small[differ[0]] else ODD


@dataclass(slots=True)
class PairedGraph:
    """A graph or body at both batch sizes.

    Attributes:
        full: the graph at the full batch.
        small: the graph at the size of a micro-batch, with the same ids.
        equations: the equations of its ops at both sizes.
        dims: for each value the dim that follows the batch, None, or `ODD`.
        touching: for each op whether an operand or result has a batch dim.
    """

    full: Graph
    small: Graph
    equations: tuple[Sequence[Equation], Sequence[Equation]]
    dims: tuple[int | None, ...]
    touching: tuple[bool, ...]

    def inner(self, op: Op, number: int, count: int) -> PairedGraph:
        """Return body `number` of an op at both sizes."""
        bodies = op.bodies[number], self.small.ops[op.id].bodies[number]
        equations = tuple(e[op.id].bodies[number] for e in self.equations)
        return program_at(*bodies, (equations[0], equations[1]), count)


def program_at(
    full: Graph, small: Graph, equations: tuple[Sequence[Equation], Sequence[Equation]], count: int
) -> PairedGraph:
    """Return a graph at both sizes with its batch dims."""
    dims, touching = _batch_dims_at(full, small, count)
    return PairedGraph(full=full, small=small, equations=equations, dims=dims, touching=touching)


@memoized
def _batch_dims_at(full: Graph, small: Graph, count: int) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return the batch dim of each value, and for each op whether it reads or computes a value with one."""
    pairs = zip(full.values, small.values, strict=True)
    dims = tuple([batch_dim_at(v.shape, w.shape, count) for v, w in pairs])
    follow = {v for v, dim in enumerate(dims) if dim is not None}
    touching = tuple([not follow.isdisjoint(o.operands) or not follow.isdisjoint(o.results) for o in full.ops])
    return dims, touching


_BodyResult = tuple[tuple[Relation, ...], BodyMarks]


@dataclass(slots=True)
class Interpreter:
    """Interprets ops and bodies of a step; the results of equal ops and bodies are memoized.

    Attributes:
        count: number of micro-batches.
        transfers: memo of transfer functions by classes and operand relations of an op.
        bodies: memo of bodies by graphs and input relations.
    """

    count: int
    transfers: dict[object, Transferred] = field(default_factory=dict[object, Transferred])
    bodies: dict[object, _BodyResult] = field(default_factory=dict[object, _BodyResult])

    def op(self, program: PairedGraph, op: Op, relations: Sequence[Relation]) -> tuple[tuple[Relation, ...], Marks]:
        """Return the relations of the results of an op, and its marks."""
        touches = program.touching[op.id]
        if not touches and all([r.is_same for r in relations]):
            # Zeros are a sum over micro-batches too, so that a loop may start adding from them.
            zero = all([is_zero(program.full, r) for r in op.results])
            return (ZERO if zero else INVARIANT,) * len(op.results), _UNMARKED
        wiring = wiring_of(op)
        if wiring is not None:
            return self.control_flow(program, op, wiring, relations)
        found = self.touching(program, op, relations) if touches else untouched(self.site(program, op, relations))
        if not found.once and not found.own_columns:
            return found.results, _UNMARKED
        return found.results, Marks(once=found.once, own_columns=found.own_columns)

    def touching(self, program: PairedGraph, op: Op, relations: Sequence[Relation]) -> Transferred:
        """Return the result of the transfer function of an op that touches the batch, memoized by op class."""
        # A MIXED operand has the reason of its own op, which equal ops do not share.
        if op.primitive in _LOOKED_AT_CLOSELY or any(r.kind is RelationKind.MIXED for r in relations):
            return transfer(self.site(program, op, relations))
        other = program.small.ops[op.id]
        key = op_class(program.full, op.id), op_class(program.small, other.id), tuple(relations)
        if key not in self.transfers:
            self.transfers[key] = transfer(self.site(program, op, relations))
        found = self.transfers[key]
        if any(r.refusal is not None for r in found.results):
            # Equal ops share the verdict, but a refusal must name the line of this op.
            return transfer(self.site(program, op, relations))
        return found

    def site(self, program: PairedGraph, op: Op, relations: Sequence[Relation]) -> Site:
        """Return an op at both sizes with the relations of its operands."""
        full, small = program.equations
        return Site(
            full=program.full,
            small=program.small,
            op=op,
            other=program.small.ops[op.id],
            operands=tuple(relations),
            count=self.count,
            dims=program.dims,
            equations=(full[op.id], small[op.id]),
        )

    def body(self, program: PairedGraph, inputs: Sequence[Relation]) -> _BodyResult:
        """Return the relations of the outputs of a body, and the marks of its ops, memoized."""
        # Graphs compare by identity; layers that share a body and have equal inputs are interpreted once.
        key = program.full, program.small, tuple(inputs)
        if key not in self.bodies:
            table = starting(program.full, program.full.inputs, inputs)
            marks: list[tuple[int, Marks]] = []
            for op in program.full.ops:
                results, mark = self.op(program, op, [table[v] for v in op.operands])
                table.update(zip(op.results, results, strict=True))
                if mark:
                    marks.append((op.id, mark))
            self.bodies[key] = tuple(table[v] for v in program.full.outputs), tuple(marks)
        return self.bodies[key]

    # --- control flow -------------------------------------------------------------------------------------------------

    def control_flow(
        self, program: PairedGraph, op: Op, wiring: Wiring, relations: Sequence[Relation]
    ) -> tuple[tuple[Relation, ...], Marks]:
        """Return the relations of the results of a loop or a conditional, and its marks."""
        site = self.site(program, op, relations)
        # The reason is passed on, since it names the line at which samples were mixed.
        broken = next((r for r in relations if r.kind is RelationKind.MIXED), None)
        if broken is not None:
            return (broken,) * len(op.results), Marks()
        if op.effectful:
            return site.refused("has an effect, once per micro-batch").results, Marks()
        if any(r.kind is RelationKind.AFTER or (r.is_reduced and r.dim >= 0) for r in relations):
            return site.refused(AGAIN).results, Marks()
        if op.primitive == "scan":
            # Only a scan over samples may run fewer trips in a micro-batch.
            lengths = op.params["length"], site.other.params["length"]
            if lengths[0] != lengths[1]:
                return self.over_samples(program, site, wiring)
            if op.params["reverse"] != site.other.params["reverse"]:
                return site.refused("runs in the other direction at another batch size").results, Marks()
        # Operand 0 is the index of the branch.
        if op.primitive == "cond" and not relations[0].is_same:
            return site.refused("branches on a value that differs between micro-batches").results, Marks()
        return self.trip_by_trip(program, site, wiring)

    def trip_by_trip(self, program: PairedGraph, site: Site, wiring: Wiring) -> tuple[tuple[Relation, ...], Marks]:
        """Interpret a branch, or a loop whose trips correspond at both sizes, to a fixed point of what it carries.

        Each iteration only moves relations up the lattice (`carried`), which has finite height, so the loop terminates.
        """
        op = site.op
        inside = [_slice(r) if i in wiring.scanned else r for i, r in enumerate(site.operands)]
        for i in wiring.scanned:
            if site.operands[i].kind is RelationKind.SAMPLES and site.operands[i].dim == 0:
                return site.refused("goes over samples in as many trips as the full batch").results, Marks()
        once: dict[int, None] = {}
        while True:
            # Several branches make the same results, which are joined below; None stands for none so far.
            results: list[Relation | None] = [None] * len(op.results)
            marks: list[BodyMarks] = []
            for number in range(len(op.bodies)):
                inner = program.inner(op, number, self.count)
                outputs, inner_marks = self.body(inner, [inside[i] for i in wiring.inputs[number]])
                marks.append(inner_marks)
                for relation, r in zip(outputs, wiring.outputs[number], strict=True):
                    if r is None:
                        refusal = self.predicate(inner, op, relation, site)
                        if refusal is not None:
                            return (mixed(refusal),) * len(op.results), Marks()
                        continue
                    unlike = site.refusal("has branches whose results combine differently over micro-batches")
                    before = results[r]
                    results[r] = relation if before is None else join(before, relation, unlike)
            if not self.carried(site, wiring, inside, [r for r in results if r is not None], once):
                break
        stacked = [_stack(r, site) if n in wiring.stacked else r for n, r in enumerate(results) if r is not None]
        return tuple(stacked), Marks(once=tuple(once), looked_into=True, bodies=tuple(marks))

    def carried(
        self,
        site: Site,
        wiring: Wiring,
        inside: list[Relation],
        results: Sequence[Relation],
        once: dict[int, None],
    ) -> bool:
        """Join the relations that a trip carries on into those with which it began; return whether any changed."""
        changed = False
        for r, i in wiring.carried.items():
            if results[r] == inside[i]:
                continue
            begins, makes = inside[i], results[r]
            if begins.kind is RelationKind.INVARIANT and makes.kind is RelationKind.SUM and counts_once(site.op, i):
                # Where a sum starts from is added in the first micro-batch only, so that it counts once.
                once[i] = None
                begins = makes
            refusal = site.refusal("carries a value that combines differently over micro-batches after each trip")
            joined = join(begins, makes, refusal)
            # MIXED is the top of the lattice: another reason for it must not start another iteration.
            if joined != inside[i] and inside[i].kind is not RelationKind.MIXED:
                inside[i], changed = joined, True
        return changed

    def predicate(self, condition: PairedGraph, op: Op, relation: Relation, site: Site) -> Refusal | None:
        """Return the reason why the trips of a `while` differ from the full batch.

        None if they agree, or if additional trips have no effect (`same_while_guard`).
        """
        if relation.is_same:
            return None
        if relation.kind is RelationKind.MIXED:
            return relation.refusal
        # The full batch goes on while any micro-batch does; samples that are done keep their values.
        if relation.kind is RelationKind.MAX and same_while_guard(op) and same_while_guard(site.other):
            return None
        return site.refusal("continues depending on a value that differs between micro-batches")

    def over_samples(self, program: PairedGraph, site: Site, wiring: Wiring) -> tuple[tuple[Relation, ...], Marks]:
        """Return the relations of the results of a scan over the samples, and its marks."""
        op = site.op
        scanned = [site.operands[i] for i in sorted(wiring.scanned)]
        over = all(r.kind is RelationKind.SAMPLES and r.dim == 0 for r in scanned)
        in_proportion = op.params["length"] == self.count * site.other.params["length"]
        if not over or not in_proportion or op.params["reverse"] != site.other.params["reverse"]:
            return site.refused("runs as many trips as there are samples, but not over samples").results, Marks()
        (body,) = op.bodies
        constants = [i for i in range(len(op.operands)) if i not in wiring.scanned and i not in wiring.carried.values()]
        runs = {r.blocks for r in scanned} - {None}
        if len(runs) > 1:
            return site.refused("goes over arrays whose samples are in different orders").results, Marks()
        # A value that no trip changes is as good as a constant, even if the loop carries it.
        unchanged = {i for r, i in wiring.carried.items() if body.outputs[r] == body.inputs[i]}
        other_samples = mixed(site.refusal("goes over samples and reads other samples, or sums over them"))
        inside: list[Relation] = []
        for i, relation in enumerate(site.operands):
            if i in wiring.scanned:
                # The two trips that correspond read the same row.
                inside.append(INVARIANT)
            elif i in constants or i in unchanged:
                inside.append(relation if relation.is_same else other_samples)
            else:
                inside.append(Relation(RelationKind.RUNNING, total=(i, "")))
        outputs, marks = self.body(program.inner(op, 0, self.count), inside)
        results: list[Relation] = []
        once: list[int] = []
        for r, relation in enumerate(outputs):
            if r in wiring.stacked:
                results.append(self._stacked_samples(relation, runs, site))
            elif wiring.carried[r] in unchanged:
                results.append(site.operands[wiring.carried[r]])
            else:
                results.append(self._total(relation, wiring.carried[r], site, once))
        return tuple(results), Marks(once=tuple(once), looked_into=True, bodies=(marks,))

    def _stacked_samples(self, relation: Relation, runs: set[int | None], site: Site) -> Relation:
        """Derive the relation of a stacked result from the relation of its row: samples along the leading dim."""
        if relation.is_same:
            return samples(0, next(iter(runs), 1))
        return relation if relation.kind is RelationKind.MIXED else mixed(site.refusal(_RUNNING))

    def _total(self, relation: Relation, operand: int, site: Site, once: list[int]) -> Relation:
        """Return the relation of the final value of a running total, from its relation after one trip."""
        begins = site.operands[operand]
        if relation.kind is RelationKind.MIXED:
            return relation
        if relation.kind is not RelationKind.RUNNING or relation.total[0] != operand:
            return mixed(site.refusal("carries a value of one sample to the next"))
        if relation.total[1] in ("max", "min"):
            found = RelationKind.MAX if relation.total[1] == "max" else RelationKind.MIN
            return Relation(found) if begins.is_same else mixed(site.refusal(_RUNNING))
        if begins.kind is RelationKind.INVARIANT and counts_once(site.op, operand):
            once.append(operand)
        elif begins.kind not in (RelationKind.ZERO, RelationKind.SUM):
            return mixed(site.refusal("adds samples up from a value that it reads in another place too"))
        return Relation(RelationKind.SUM)


_RUNNING = "carries a value from sample to sample that is no plain sum, maximum or minimum"
#: Primitives whose transfer depends on more than their op class: on row positions, or on jaxprs among the parameters.
_LOOKED_AT_CLOSELY = frozenset(("slice", "pad", "reduce", "scatter", "select_and_scatter", "reduce_window"))


def _slice(relation: Relation) -> Relation:
    """Return the relation of one row along the leading dim."""
    if relation.kind is not RelationKind.SAMPLES:
        return relation
    return relation._replace(dim=relation.dim - 1)


def _stack(relation: Relation, site: Site) -> Relation:
    """Return the relation of the rows of all trips stacked along a new leading dim."""
    if relation.kind is RelationKind.RUNNING:
        return mixed(site.refusal(_RUNNING))
    return relation._replace(dim=relation.dim + 1) if relation.kind is RelationKind.SAMPLES else relation


def starting(graph: Graph, inputs: Sequence[int], relations: Sequence[Relation]) -> dict[int, Relation]:
    """Return the relations of literals and inputs, by value id."""
    table = {v.id: ZERO if v.literal == 0 else INVARIANT for v in graph.values if v.literal is not None}
    table.update(zip(inputs, relations, strict=True))
    return table


def same_while_guard(op: Op) -> bool:
    """Return whether further trips of a `while` change nothing for samples whose predicate is false.

    Its condition must be `any(p(carry))` with a predicate p per sample, and each value that the body carries on must be
    `select(p(carry), old, new)` with the same p: once p is false for a sample, its values stay as they are, and so does
    p. A trip more than a sample needs is then the identity on it.
    """
    wiring = wiring_of(op)
    if op.primitive != "while" or wiring is None:
        return False
    condition, body = op.bodies
    names = FirstUses[Hashable]()
    carried = set(wiring.carried.values())
    # Condition and body may receive the same outer value as separate constants, which must get one number.
    operands = [("carried", i) if i in carried else ("constant", v) for i, v in enumerate(op.operands)]
    numbers = [
        value_numbers(graph, [operands[i] for i in inputs], names)
        for graph, inputs in zip((condition, body), wiring.inputs, strict=True)
    ]
    any_of = condition.producer[condition.outputs[0]]
    if any_of is None or condition.ops[any_of].primitive != "reduce_or":
        return False
    guard = numbers[0][condition.ops[any_of].operands[0]]
    return all(_is_retained(body, numbers[1], v, r, guard) for r, v in enumerate(body.outputs))


def _is_retained(body: Graph, numbers: dict[int, int], output: int, result: int, guard: int) -> bool:
    """Return whether an output of the body equals the incoming value wherever the guard is false."""
    came_in = body.inputs[len(body.inputs) - len(body.outputs) + result]
    if output == came_in:
        return True
    producer = body.producer[output]
    if producer is None or body.ops[producer].primitive != "select_n":
        return False
    which, old, _ = body.ops[producer].operands
    return old == came_in and _guards(body, numbers, which, guard)


def _guards(body: Graph, numbers: dict[int, int], which: int, guard: int) -> bool:
    """Return whether a predicate is the guard, possibly broadcast along further dims."""
    while numbers[which] != guard:
        producer = body.producer[which]
        if producer is None or body.ops[producer].primitive not in ("broadcast_in_dim", "reshape"):
            return False
        which = body.ops[producer].operands[0]
    return True
