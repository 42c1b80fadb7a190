"""Transfer functions: derive the relations of an op's results from the relations of its operands.

A transfer function reads one op at both sizes (`Site`) and proves an equation of `relations` for each result. Ops with
a proof of their own register it by primitive (`register_transfer`, in `transfer_indexing` and `transfer_layout`). All
others follow from their factor rule, which says that the op on blocks of a factor gives

    PASS        blocks of each result that holds the factor                                      SAMPLES → SAMPLES
    REDUCTION   parts of the result, combined by a sum, a maximum or a minimum                   SAMPLES → SUM, MAX, MIN

where the other operands are INVARIANT (`by_rule`). Everything else is MIXED. Parameters of the op must agree at both
sizes, except those that the shapes of its arrays imply (`SIZES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from alpa_lite.program.equations import Equation
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.user_shardings import USER_SHARDING
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.rules.registry import FactorKind, Rule
from alpa_lite.step.relations import (
    MAX,
    MIN,
    SUM,
    Disagreement,
    Refusal,
    Relation,
    RelationKind,
    mixed,
    same_blocks,
    samples,
)

#: Parameters that the shapes of an op's arrays imply, by primitive.
SIZES: Mapping[str, frozenset[str]] = {
    "broadcast_in_dim": frozenset(("shape",)),
    "empty": frozenset(("shape",)),
    "iota": frozenset(("shape",)),
    "random_bits": frozenset(("shape",)),
    "random_split": frozenset(("shape",)),
    "reshape": frozenset(("new_sizes",)),
    "gather": frozenset(("slice_sizes",)),
    "dynamic_slice": frozenset(("slice_sizes",)),
    "slice": frozenset(("start_indices", "limit_indices")),
    "pad": frozenset(("padding_config",)),
    "split": frozenset(("sizes",)),
    "tile": frozenset(("reps",)),
    "pallas_call": frozenset(("grid_mapping", "out_avals", "cost_estimate", "sizes", "flops")),
    # With one kernel per sample, `vmap` makes the batch a part of the groups.
    "conv_general_dilated": frozenset(("feature_group_count", "batch_group_count", "lhs_shape", "rhs_shape")),
}

ODD = -1
"""Marks the batch dim of a value that follows the batch in several dims, or not in proportion."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """One op at both sizes, with the relations of its operands.

    Attributes:
        full: the graph at the full batch.
        small: the graph at the size of a micro-batch.
        op: the op in `full`.
        other: the op in `small`.
        operands: relation of each operand.
        count: number of micro-batches.
        dims: for each value the dim that follows the batch, None, or `ODD`.
        equations: equation of the op in each program.
    """

    full: Graph
    small: Graph
    op: Op
    other: Op
    operands: Sequence[Relation]
    count: int
    dims: Sequence[int | None]
    equations: tuple[Equation, Equation] | None = field(default=None)

    def value(self, operand: int) -> Value:
        """Return an operand, by number, in the full batch."""
        return self.full.values[self.op.operands[operand]]

    def result(self, number: int = 0) -> Value:
        """Return a result, by number, in the full batch."""
        return self.full.values[self.op.results[number]]

    def small_value(self, operand: int) -> Value:
        """Return an operand, by number, in a micro-batch."""
        return self.small.values[self.other.operands[operand]]

    def small_result(self, number: int = 0) -> Value:
        """Return a result, by number, in a micro-batch."""
        return self.small.values[self.other.results[number]]

    def batch_dim(self, result: int = 0) -> int | None:
        """Return the dim of a result that follows the batch, None, or `ODD`."""
        return self.dims[self.op.results[result]]

    def refusal(self, text: str, cut: int = 1) -> Refusal:
        """Return the reason for which results of this op are MIXED; `text` is the predicate of a sentence."""
        shapes = tuple(v.shape for v in self.full.operands(self.op))
        if text == MIXES and any(map(self._pairs, range(len(self.op.results)))):
            text = PAIRS
        return Refusal(self.op.source, self.op.primitive, shapes, text, cut)

    def _pairs(self, number: int) -> bool:
        """Return whether several dims of a result follow the batch."""
        sizes = zip(self.result(number).shape, self.small_result(number).shape, strict=True)
        return sum(n == self.count * m for n, m in sizes) > 1

    def refused(self, text: str, cut: int = 1) -> Transferred:
        """Return MIXED for all results."""
        return Transferred(results=(mixed(self.refusal(text, cut)),) * len(self.op.results))

    def runs(self, operand: int) -> tuple[int | None, int]:
        """Return (number of runs, rows of a run in a micro-batch) along the dim of an operand that is SAMPLES.

        (None, size of the dim) where every number of runs is valid.
        """
        relation = self.operands[operand]
        size = self.small_value(operand).shape[relation.dim]
        return (None, size) if relation.blocks is None else (relation.blocks, size // relation.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transferred:
    """The result of a transfer function.

    Attributes:
        results: the relation of each result.
        once: numbers of operands that count in the first micro-batch only and are replaced by zeros in the others.
        own_columns: columns of the index vectors that count rows from the start of the micro-batch.
    """

    results: tuple[Relation, ...]
    once: tuple[int, ...] = ()
    own_columns: tuple[int, ...] = ()


Transfer = Callable[[Site], Transferred]
_TRANSFERS: dict[str, Transfer] = {}

OTHER_DTYPE = "has another dtype at another batch size"
OTHER_PARAMETER = "has a parameter that follows the batch size"
PART = "takes a part that follows the batch size"
FOLLOWING = frozenset((OTHER_DTYPE, OTHER_PARAMETER, PART))
"""Refusals of ops that differ between the two sizes in more than shapes."""
MIXES = "mixes the samples of the batch"
PAIRS = "makes an array over pairs of samples, as a contrastive loss or a mask between samples does"
UNEVEN = "makes an array whose size follows that of the batch, but is no multiple of it"
AGAIN = "uses a sum over the batch again per sample"
ORDERS = "combines arrays whose samples are in different orders"


def register_transfer(*primitives: str) -> Callable[[Transfer], Transfer]:
    """Return a decorator that registers the transfer function of these primitives, which replaces their rule."""

    def register(function: Transfer) -> Transfer:
        _TRANSFERS.update(dict.fromkeys(primitives, function))
        return function

    return register


def transfer(site: Site) -> Transferred:
    """Return the relations of the results of an op that touches the batch and has no bodies."""
    for relation in site.operands:
        if relation.kind is RelationKind.MIXED:
            # The first reason is passed on, since it names the line at which samples were mixed.
            return Transferred(results=(relation,) * len(site.op.results))
    if site.op.effectful:
        return site.refused("has an effect, once per micro-batch")
    if any(r.kind is RelationKind.RUNNING for r in site.operands):
        return site.refused("reads the running value of a loop over samples")
    if not _same_dtypes(site):
        return site.refused(OTHER_DTYPE)
    if not same_parameters(site):
        return site.refused(OTHER_PARAMETER)
    return _TRANSFERS.get(site.op.primitive, by_rule)(site)


def _same_dtypes(site: Site) -> bool:
    """Return whether all operands and results have the same dtypes at both sizes."""
    values = zip((*site.op.operands, *site.op.results), (*site.other.operands, *site.other.results), strict=True)
    return all(site.full.values[v].dtype == site.small.values[w].dtype for v, w in values)


def same_parameters(site: Site) -> bool:
    """Return whether the parameters at both sizes agree, except those that shapes imply."""
    implied = SIZES.get(site.op.primitive, frozenset())
    one, other = site.op.params, site.other.params
    if one is not other:
        if one.keys() != other.keys():
            return False
        if any(not _equal(x, other[name]) for name, x in one.items() if name not in implied):
            return False
    if site.equations is None:
        return True
    first, second = (e.params for e in site.equations)
    return first is second or all(
        # Parameters with a plain form were compared above.
        _alike(x, second.get(name))
        for name, x in first.items()
        if name not in one and name not in implied
    )


def _equal(a: Any, b: Any) -> bool:
    """Return whether plain data are equal and of equal types: `1` does not equal `True`; NaN equals NaN."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(x, b[key]) for key, x in a.items())
    return bool(a == b) or (a != a and b != b)


def _alike(a: Any, b: Any) -> bool:
    """Return whether two parameters without a plain form are equal; jaxprs are compared by their text."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    # Open and closed jaxprs compare by identity.
    if hasattr(a, "eqns") or hasattr(a, "jaxpr"):
        return str(a) == str(b)
    try:
        return bool(a == b)
    except ValueError:  # arrays
        return False


# --- ops that go by their rule ----------------------------------------------------------------------------------------


def by_rule(site: Site) -> Transferred:
    """Return the relations of an op that its factor rule determines: SAMPLES along a passed or reduced factor."""
    rule = rule_of_op(site.full, site.op.id)
    if rule.opaque:
        return site.refused("has no rule that tells what becomes of single samples")
    if rule.positional:
        return site.refused("counts places in whole arrays")
    return through_factor(site)


def through_factor(site: Site) -> Transferred:
    """Return the relations as `by_rule` does, for an op that may use positions along other dims."""
    rule = rule_of_op(site.full, site.op.id)
    factor = _batch_factor(site, rule)
    if factor is None:
        return site.refused(MIXES)
    # A sum over the batch is not complete while the loop runs.
    if any(not r.is_same for r in site.operands if r.kind is not RelationKind.SAMPLES):
        return site.refused(AGAIN)
    try:
        runs = same_blocks(set(_runs_in_factor(site, rule, factor)))
    except Disagreement:
        return site.refused(ORDERS)
    except _NotWhole:
        return site.refused(MIXES)
    kind = rule.kinds[factor]
    # A halo reads neighbouring samples, which may be in another micro-batch.
    if kind is FactorKind.PASS and not rule.has_halo(factor):
        return _passed(site, rule, factor, runs)
    combined = _COMBINED_BY.get(rule.reduction) if _orders(site) else None
    held = any(factor in factors for dims in rule.results for factors in dims)
    if kind is FactorKind.REDUCTION and combined is not None and not held and not rule.has_halo(factor):
        return Transferred(results=(combined,) * len(site.op.results))
    return site.refused(MIXES)


_COMBINED_BY = {"sum": SUM, "max": MAX, "or": MAX, "min": MIN, "and": MIN}


def _orders(site: Site) -> bool:
    """Return whether `or` and `and` are a maximum and a minimum: for booleans, but not bitwise for integers."""
    rule = rule_of_op(site.full, site.op.id)
    by_bits = site.op.primitive in ("or", "and") or rule.reduction in ("or", "and")
    return not by_bits or site.result().dtype == "bool"


class _NotWhole(Exception):
    """The runs of samples do not align with the factors that share a dim with the batch."""


def _batch_factor(site: Site, rule: Rule) -> int | None:
    """Return the factor of which a micro-batch has 1/count, if that gives all arrays the shapes of the micro-batch."""
    held = [dims[r.dim] for r, dims in zip(site.operands, rule.operands, strict=True) if r.kind is RelationKind.SAMPLES]
    # All arrays of samples must share the factor, so that those of the first are all candidates.
    for factor in held[0] if held else ():
        sizes = list(rule.sizes)
        # Only this factor may shrink: all shapes of the micro-batch must follow from it.
        sizes[factor], rest = divmod(sizes[factor], site.count)
        if not rest and _has_shapes(site, rule, sizes):
            return factor
    return None


def _has_shapes(site: Site, rule: Rule, sizes: Sequence[int]) -> bool:
    """Return whether factors of these sizes give all arrays the shapes of the micro-batch."""
    tensors = [*zip(site.other.operands, rule.operands, strict=True)]
    tensors += zip(site.other.results, rule.results, strict=True)
    return all(
        site.small.values[v].shape == tuple(prod(sizes[f] for f in factors) for factors in dims) for v, dims in tensors
    )


def _runs_in_factor(site: Site, rule: Rule, factor: int) -> list[int | None]:
    """Return for each operand that is SAMPLES the number of runs along the factor.

    Raises:
        _NotWhole: runs do not align with the other factors of the dim.
    """
    found: list[int | None] = []
    for i, (relation, dims) in enumerate(zip(site.operands, rule.operands, strict=True)):
        if relation.kind is not RelationKind.SAMPLES:
            continue
        factors = dims[relation.dim]
        if factor not in factors:
            raise _NotWhole
        if relation.blocks is None:
            found.append(None)
            continue
        before = _size(rule, factors[: factors.index(factor)])
        after = _size(rule, factors[factors.index(factor) + 1 :])
        _, rows = site.runs(i)
        if relation.blocks % before or rows % after:
            raise _NotWhole
        # The factors ahead of this one in the dim repeat its runs.
        found.append(relation.blocks // before)
    return found


def _passed(site: Site, rule: Rule, factor: int, runs: int | None) -> Transferred:
    """Return SAMPLES for the results that hold the factor as their batch dim, MIXED for others."""
    results: list[Relation] = []
    for number, dims in enumerate(rule.results):
        place = next((d for d, factors in enumerate(dims) if factor in factors), None)
        if place is None or site.batch_dim(number) != place:
            results.append(mixed(site.refusal(MIXES)))
            continue
        factors = dims[place]
        before = _size(rule, factors[: factors.index(factor)])
        results.append(samples(place, None if runs is None else runs * before))
    return Transferred(results=tuple(results))


def _size(rule: Rule, factors: Sequence[int]) -> int:
    """Return the product of factor sizes."""
    return prod(rule.sizes[f] for f in factors)


# --- ops that do not touch the batch, in a loop -----------------------------------------------------------------------

#: Monotone ops f, for which f(max(x, y)) = max(f(x), f(y)): they never change the order of elements.
_MONOTONE = frozenset(
    "reshape broadcast_in_dim squeeze expand_dims transpose copy stop_gradient concatenate stack max min reduce_max "
    "reduce_min or and reduce_or reduce_and slice".split()
)


def of_reduced(site: Site) -> Transferred:
    """Return the relations of an op without batch dims that reads sums, maxima or minima over samples."""
    kinds = {r.kind for r in site.operands if not r.is_same}
    if kinds == {RelationKind.SUM}:
        return _of_sums(site)
    for kind, found, forbidden in ((RelationKind.MAX, MAX, _LEAST), (RelationKind.MIN, MIN, _LARGEST)):
        if kinds == {kind} and site.op.primitive in _MONOTONE - forbidden and _orders(site):
            return Transferred(results=(found,) * len(site.op.results))
    what = "a sum" if kinds == {RelationKind.SUM} else "an extreme"
    return site.refused(f"is not known to preserve {what} over the batch")


# A minimum of maxima is not the maximum of the minima, so these do not preserve MAX, nor the others MIN.
_LEAST = frozenset(("min", "reduce_min", "and", "reduce_and"))
_LARGEST = frozenset(("max", "reduce_max", "or", "reduce_or"))


def _of_sums(site: Site) -> Transferred:
    """Return the relations of an op that reads sums: Σ_m f(V_m) = f(Σ_m V_m) where f is linear in the sums.

    The other operands of the same linear group must count once, since they are added in every micro-batch.
    """
    sums = {i for i, r in enumerate(site.operands) if r.kind is RelationKind.SUM}
    for group in rule_of_op(site.full, site.op.id).linear:
        if not sums <= set(group):
            continue
        rest = [i for i in group if i not in sums and site.operands[i].kind is not RelationKind.ZERO]
        if all(counts_once(site.op, i) for i in rest):
            return Transferred(results=(SUM,) * len(site.op.results), once=tuple(rest))
    return site.refused("is not linear in a sum over the batch")


def counts_once(op: Op, operand: int) -> bool:
    """Return whether an operand may be replaced by zeros in all micro-batches but the first: the op reads it once."""
    return op.operands.count(op.operands[operand]) == 1


def of_running(site: Site) -> Transferred:
    """Return the relations of an op that reads a running total: the total with one more term, or MIXED."""
    running = [r for r in site.operands if r.kind is RelationKind.RUNNING]
    others_same = all(r.is_same for r in site.operands if r.kind is not RelationKind.RUNNING)
    primitive = site.op.primitive
    if len(running) == 1 and others_same:
        if (
            primitive in _TERMS
            and _orders(site)
            # A total that is subtracted from something changes its sign with every sample.
            and (primitive != "sub" or site.operands[0].kind is RelationKind.RUNNING)
        ):
            total = (running[0].total[0], _TERMS[primitive])
            if running[0].total[1] in ("", total[1]) and site.value(0).dtype == site.result().dtype:
                return Transferred(results=(Relation(RelationKind.RUNNING, total=total),))
        if primitive in ("copy", "optimization_barrier", USER_SHARDING) and len(site.operands) == 1:
            return Transferred(results=(running[0],))
    chosen = primitive == "select_n" and site.operands[0].is_same and len(running) == len(site.operands) - 1
    # Either case is the same total, with or without one more term.
    if chosen and len({r.total[0] for r in running}) == 1 and len({r.total[1] for r in running} - {""}) <= 1:
        return Transferred(results=(max(running, key=lambda r: r.total[1]),))
    return site.refused("carries a value from sample to sample that is no plain sum, maximum or minimum")


_TERMS = {"add": "sum", "add_any": "sum", "sub": "sum", "max": "max", "min": "min", "or": "max", "and": "min"}


def untouched(site: Site) -> Transferred:
    """Return the relations of an op without batch dims, some of whose operands differ from those of the full batch.

    The op itself, and its other operands, are those of the full batch.
    """
    for relation in site.operands:
        if relation.kind is RelationKind.MIXED:
            return Transferred(results=(relation,) * len(site.op.results))
    if any(r.kind is RelationKind.RUNNING for r in site.operands):
        return of_running(site)
    return of_reduced(site)
