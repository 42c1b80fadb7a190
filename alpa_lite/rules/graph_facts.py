"""What the rules say of a whole graph: the rule of each op, which ops are alike, which values cost nothing to move."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from alpa_lite.graph.ir import Graph, Op
from alpa_lite.graph.kept import kept
from alpa_lite.rules import OpView, Rule, opaque_rule, rule_of, rule_source, view_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpClass:
    """What ops have in common that do the same to the same shapes; a class is one object, in all graphs.

    `view` is that of the op that was seen first: the numbers and names of its values, and where it reads in an array,
    are not those of the others.
    """

    rule: Rule
    layout: Layout
    view: OpView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """What classes have in common whose ops are laid out alike: the rule without its price. It is one object, too."""

    rule: Rule


def rule_of_op(graph: Graph, op_id: int) -> Rule:
    """The rule of an op, found once per class. What has an effect runs whole, on one device: its rule is not asked."""
    return op_class(graph, op_id).rule


#: Parameters that say where in an array an op reads: the shapes say all that its rule goes by.
_WHERE: Mapping[str, tuple[str, ...]] = {"slice": ("start_indices", "limit_indices")}


@kept
def op_class(graph: Graph, op_id: int) -> OpClass:
    """The class of an op; the same for ops that do the same to the same shapes."""
    op = graph.ops[op_id]
    operands = tuple((v.shape, v.dtype, v.literal) for v in graph.operands(op))
    results = tuple((v.shape, v.dtype) for v in graph.results(op))
    where = _WHERE.get(op.primitive, ())
    params = repr(sorted((item for item in op.params.items() if item[0] not in where), key=lambda p: p[0]))
    key = (op.primitive, rule_source(op.primitive), operands, results, params, op.bodies)
    look = _Look(effectful=op.effectful, key=key, view=view_of(graph, op))
    # A table of all classes would keep bodies alive.
    return _class_of(look) if op.bodies else _class(look)


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
def _layout(rule: Rule) -> Layout:
    return Layout(rule=rule)


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


@kept
def free_values(graph: Graph) -> frozenset[int]:
    """Values that depend on scalars alone: literals of any op whose operands are scalars or free themselves."""
    free: set[int] = set()
    for op in graph.ops:
        ranked = (v for v in op.operands if graph.values[v].rank > 0)
        if op.bodies or any(v not in free for v in ranked) or any(graph.values[r].rank == 0 for r in op.results):
            continue
        rule = rule_of_op(graph, op.id)
        if not rule.opaque and rule.work_kind == "elementwise":
            free.update(op.results)
    return frozenset(free)


def is_zero(graph: Graph, value: int) -> bool:
    """True when a value is known to be all zeros."""
    v = graph.values[value]
    if v.literal is not None:
        return v.literal == 0
    producer = graph.producer[value]
    if producer is None:
        return False
    op = graph.ops[producer]
    return op.primitive in ("broadcast_in_dim", "convert_element_type", "copy", "reshape") and is_zero(
        graph, op.operands[0]
    )
