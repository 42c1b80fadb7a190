"""What the rules say of a whole graph: the rule of each op, which ops are alike, which values cost nothing to move."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.memo import memoized
from alpa_lite.rules import OpView, Rule, opaque_rule, rule_of, rule_source, view_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpClass:
    """What ops have in common that do the same to the same shapes; a class is one object, in all graphs.

    `view` is that of the op that was seen first: the numbers and names of its values, and where it reads in an array,
    are not those of the others.
    """

    rule: Rule
    layout: LayoutClass
    view: OpView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutClass:
    """What classes have in common whose ops are laid out alike: the rule without its price. It is one object, too."""

    rule: Rule


def rule_of_op(graph: Graph, op_id: int) -> Rule:
    """The rule of an op, found once per class. What has an effect runs whole, on one device: its rule is not asked."""
    return op_classes(graph)[op_id].rule


def op_class(graph: Graph, op_id: int) -> OpClass:
    """The class of an op; the same for ops that do the same to the same shapes."""
    return op_classes(graph)[op_id]


#: Parameters that say where in an array an op reads: the shapes say all that its rule goes by.
_WHERE: Mapping[str, tuple[str, ...]] = {"slice": ("start_indices", "limit_indices")}


@memoized
def op_classes(graph: Graph) -> tuple[OpClass, ...]:
    """The class of each op."""
    kinds = [(v.shape, v.dtype, v.literal) for v in graph.values]
    texts: dict[tuple[str, int], str] = {}  # of parameters, by their id: ops that do the same often share them
    known: dict[Hashable, OpClass] = {}
    found: list[OpClass] = []
    for op in graph.ops:
        params = texts.get((op.primitive, id(op.params)))
        if params is None:
            params = texts[op.primitive, id(op.params)] = _text_of_params(op)
        operands, results = tuple([kinds[v] for v in op.operands]), tuple([kinds[v] for v in op.results])
        key = (op.primitive, rule_source(op.primitive), operands, results, params, op.effectful)
        if op.bodies:
            # A table of all classes would keep bodies alive.
            found.append(_class_of(_Look(effectful=op.effectful, key=key, view=view_of(graph, op))))
            continue
        if key not in known:
            known[key] = _class(_Look(effectful=op.effectful, key=key, view=view_of(graph, op)))
        found.append(known[key])
    return tuple(found)


def _text_of_params(op: Op) -> str:
    where = _WHERE.get(op.primitive, ())
    return repr(sorted((item for item in op.params.items() if item[0] not in where), key=lambda p: p[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A view that equals all those which a rule cannot tell from it: numbers and names of values do not count."""

    effectful: bool
    key: Hashable
    view: OpView = field(compare=False)


@lru_cache(maxsize=50_000)
def _class(look: _Look) -> OpClass:
    return _class_of(look)


def _class_of(look: _Look) -> OpClass:
    rule = (opaque_rule if look.effectful else rule_of)(look.view)
    return OpClass(rule=rule, layout=_layout(replace(rule, flops=0.0, work_kind="elementwise")), view=look.view)


@lru_cache(maxsize=50_000)
def _layout(rule: Rule) -> LayoutClass:
    return LayoutClass(rule=rule)


def opaque_ops(graph: Graph) -> tuple[tuple[Graph, Op], ...]:
    """Ops on arrays that have no rule, each with its graph: whole on every device. Bodies are looked into."""
    found: list[tuple[Graph, Op]] = []
    for op in graph.ops:
        for body in op.bodies:
            found += opaque_ops(body)
        if op.bodies or not rule_of_op(graph, op.id).opaque:
            continue
        if any(v.rank > 0 for v in (*graph.operands(op), *graph.results(op))):
            found.append((graph, op))
    return tuple(found)


@memoized
def ranked_values(graph: Graph) -> frozenset[int]:
    """Values that are no scalars."""
    return frozenset([v.id for v in graph.values if v.shape])


@memoized
def free_values(graph: Graph) -> frozenset[int]:
    """Values that depend on scalars alone: literals of any op whose operands are scalars or free themselves.

    No reductions: over the samples of a micro-batch they are not what they are over the batch.
    """
    ranked, free = ranked_values(graph), set[int]()
    for op in graph.ops:
        if op.bodies or any(v in ranked and v not in free for v in op.operands) or not ranked.issuperset(op.results):
            continue
        rule = rule_of_op(graph, op.id)
        if not rule.opaque and rule.work_kind == "elementwise" and not rule.reduced:
            free.update(op.results)
    return frozenset(free)


@memoized
def free_ops(graph: Graph) -> frozenset[int]:
    """The ops that make free values."""
    free = free_values(graph)
    return frozenset(op.id for op in graph.ops if not free.isdisjoint(op.results))


def is_zero(graph: Graph, value: int) -> bool:
    """True when a value is known to be all zeros."""
    while graph.values[value].literal is None:
        producer = graph.producer[value]
        if producer is None:
            return False
        op = graph.ops[producer]
        if op.primitive not in ("broadcast_in_dim", "convert_element_type", "copy", "reshape"):
            return False
        value = op.operands[0]
    return graph.values[value].literal == 0
