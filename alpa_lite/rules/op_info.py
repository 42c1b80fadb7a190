"""Properties of a whole graph that follow from rules: the rule and class of each op, opaque ops, and free values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from alpa_lite.program.identity import params_text, params_texts
from alpa_lite.program.ir import Graph, Op, wiring_of
from alpa_lite.program.memo import memoized
from alpa_lite.rules import OpView, Rule, opaque_rule, rule_of, rule_source, view_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpClass:
    """An equivalence class of ops that do the same to the same shapes, so that they share a rule and a price.

    Ops without bodies share one object per class across all graphs; classes compare by identity. `view` is the view of
    the first op of the class: its value ids and names, and the positions at which a slice reads, are not representative
    of the others. `price` is one object for classes that differ in literals alone (the seed of a random key) and have
    the same rule, and so the same shardings and prices.
    """

    rule: Rule
    layout: LayoutClass
    price: object
    view: OpView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayoutClass:
    """An equivalence class of op classes with the same possible shardings: the rule without its flops and work kind.

    There is one object per class, compared by identity.
    """

    rule: Rule


def rule_of_op(graph: Graph, op_id: int) -> Rule:
    """Return the rule of an op, computed once per class. An op with an effect has the opaque rule: it is not split."""
    return op_classes(graph)[op_id].rule


def op_class(graph: Graph, op_id: int) -> OpClass:
    """Return the class of an op."""
    return op_classes(graph)[op_id]


def flops_of(graph: Graph, op: Op) -> float:
    """Return the FLOPs of an op, with loop bodies multiplied by their trip count."""
    wiring = wiring_of(op)
    if wiring is not None:
        return wiring.trips * sum(flops_of(body, o) for body in op.bodies for o in body.ops)
    return rule_of_op(graph, op.id).flops


#: Parameters that only say at which positions an op reads an array: its rule depends on the shapes alone.
_WHERE: Mapping[str, tuple[str, ...]] = {"slice": ("start_indices", "limit_indices")}


@memoized
def op_classes(graph: Graph) -> tuple[OpClass, ...]:
    """Return the class of each op, indexed by op id."""
    kinds = [(v.shape, v.dtype, v.literal) for v in graph.values]
    # Zero alone is told from other literals: it may be added to a partial sum.
    priced = [(v.shape, v.dtype, v.literal if v.literal is None else v.literal == 0) for v in graph.values]
    known: dict[Hashable, OpClass] = {}
    found: list[OpClass] = []
    for op, params in zip(graph.ops, params_texts(graph), strict=True):
        if op.primitive in _WHERE:
            params = params_text({key: value for key, value in op.params.items() if key not in _WHERE[op.primitive]})
        same = (op.primitive, rule_source(op.primitive, op.params), params, op.effectful)
        key = (same, tuple([kinds[v] for v in op.operands]), tuple([kinds[v] for v in op.results]))
        if op.bodies or key not in known:
            price_key = (same, *(tuple([priced[v] for v in values]) for values in (op.operands, op.results)))
            look = _Look(effectful=op.effectful, key=key, price_key=price_key, view=view_of(graph, op))
            if op.bodies:
                # Not cached: the cache of `_class` would keep the graphs of bodies alive.
                found.append(_class_of(look))
                continue
            known[key] = _class(look)
        found.append(known[key])
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A view as a cache key: it equals all views that a rule cannot distinguish, whatever their value ids and names."""

    effectful: bool
    key: Hashable
    price_key: Hashable = field(compare=False)
    view: OpView = field(compare=False)


@memoized(entries=50_000)
def _class(look: _Look) -> OpClass:
    return _class_of(look)


def _class_of(look: _Look) -> OpClass:
    rule = (opaque_rule if look.effectful else rule_of)(look.view)
    # Flops and the kind of work set prices but limit no sharding: without them, more ops share a layout class.
    layout = _layout(replace(rule, flops=0.0, work_kind="elementwise"))
    return OpClass(rule=rule, layout=layout, price=_price(look.price_key, rule), view=look.view)


@memoized(entries=50_000)
def _price(key: Hashable, rule: Rule) -> object:
    return object()


@memoized(entries=50_000)
def _layout(rule: Rule) -> LayoutClass:
    return LayoutClass(rule=rule)


def opaque_ops(graph: Graph) -> tuple[tuple[Graph, Op], ...]:
    """Return the ops on arrays without a rule, at any depth, each with its graph; they are replicated."""
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
    """Return the ids of the values that are not scalars."""
    return frozenset([v.id for v in graph.values if v.shape])


@memoized
def free_values(graph: Graph) -> frozenset[int]:
    """Return the ids of the arrays that depend only on scalars, and can be recomputed in any spec at no cost.

    These are the results of elementwise ops whose operands are scalars or free themselves. Reductions are excluded,
    because a reduction over a micro-batch differs from one over the full batch.
    """
    # Scalars are the same on every device, so that whatever is computed from them alone can be.
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
    """Return the ids of the ops that compute free values."""
    free = free_values(graph)
    return frozenset(op.id for op in graph.ops if not free.isdisjoint(op.results))


def is_zero(graph: Graph, value: int) -> bool:
    """Return True if a value is zero everywhere by construction: a literal zero, broadcast, converted or reshaped."""
    while graph.values[value].literal is None:
        producer = graph.producer[value]
        if producer is None:
            return False
        op = graph.ops[producer]
        if op.primitive not in ("broadcast_in_dim", "convert_element_type", "copy", "reshape"):
            return False
        value = op.operands[0]
    return graph.values[value].literal == 0
