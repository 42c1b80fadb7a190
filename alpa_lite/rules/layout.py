"""Factor rules of ops that move elements without computing: reshape, transpose, broadcast, slice, pad, concatenate.

    transpose          ([i,j]) -> ([j,i])
    broadcast_in_dim   ([i]) -> ([j,i])               new dims are free
    reshape            ([i,j,k]) -> ([ij,k])          only what is major in both shapes can be split (reshape)
    slice, pad, rev    untouched dims pass; the others would move data across block borders
    concatenate, split, stack, unstack    the joined dim is whole
    tile               ([i]) -> ([ri])                the repetition r is major: it may be split, i not

Reshape factors (common_factors): walk both shapes from the major end; with what is left of the two current dims, a and
b, the next common factor is gcd(a, b); when it is 1, nothing more is shared until the products of both sides agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

from alpa_lite.rules.elementwise import ints, linear_groups
from alpa_lite.rules.registry import Dims, FactorKind, OpView, Rule, RuleBuilder, register_rule


@register_rule("iota", "empty")
def source(view: OpView) -> Rule:
    """Return the rule of ops that create an array without operands: every dim may be split."""
    b = RuleBuilder()
    return b.build((), (b.factors(view.results[0].shape),), positional=view.primitive == "iota")


@register_rule("broadcast_in_dim")
def broadcast_in_dim(view: OpView) -> Rule:
    """Return a rule in which mapped dims pass; new and expanded dims have factors of their own."""
    b = RuleBuilder()
    operand, shape = view.operands[0], view.results[0].shape
    result = b.factors(shape)
    target = ints(view.params["broadcast_dimensions"])
    dims = tuple(result[t] if n == shape[t] else (b.factor(n),) for n, t in zip(operand.shape, target, strict=True))
    return b.build((dims, *(() for _ in view.operands[1:])), (result,), linear=linear_groups(view, (0,)))


@register_rule("transpose")
def transpose(view: OpView) -> Rule:
    """Return a rule that permutes the factors of the dims."""
    b = RuleBuilder()
    dims = b.factors(view.operands[0].shape)
    return b.build(
        (dims,), (tuple(dims[d] for d in ints(view.params["permutation"])),), linear=linear_groups(view, (0,))
    )


@register_rule("squeeze")
def squeeze(view: OpView) -> Rule:
    """Return a rule that removes dims of size 1."""
    b = RuleBuilder()
    dims = b.factors(view.operands[0].shape)
    gone = {d % len(dims) for d in ints(view.params["dimensions"])}
    kept = tuple(f for d, f in enumerate(dims) if d not in gone)
    return b.build((dims,), (kept,), linear=linear_groups(view, (0,)))


@register_rule("expand_dims")
def expand_dims(view: OpView) -> Rule:
    """Return a rule that adds dims of size 1."""
    b = RuleBuilder()
    result = b.factors(view.results[0].shape)
    new = {d % len(result) for d in ints(view.params["dimensions"])}
    kept = tuple(f for d, f in enumerate(result) if d not in new)
    return b.build((kept,), (result,), linear=linear_groups(view, (0,)))


@register_rule("reshape")
def reshape(view: OpView) -> Rule:
    """Return a rule with factors by greatest common divisors; those that are major in all their dims may be split."""
    b = RuleBuilder()
    operand, result = view.operands[0], view.results[0]
    order = ints(view.params.get("dimensions") or range(operand.rank))
    permuted, result_dims = common_factors(b, tuple(operand.shape[d] for d in order), result.shape)
    operand_dims: list[tuple[int, ...]] = [()] * operand.rank
    for place, dim in enumerate(order):
        operand_dims[dim] = permuted[place]
    for dims in (operand_dims, result_dims):
        for factors in dims:
            minor = [f for f in factors if b.sizes[f] > 1][1:]
            for factor in minor:
                b.kinds[factor] = FactorKind.REPLICATED
    linear = linear_groups(view, (0,))
    return b.build((tuple(operand_dims), *(() for _ in view.operands[1:])), (result_dims,), linear=linear)


def common_factors(b: RuleBuilder, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Return the factors of two shapes of equal product, major first; factors of only one side are REPLICATED."""
    factors: tuple[list[list[int]], list[list[int]]] = ([[] for _ in left], [[] for _ in right])
    if 0 in left:
        return b.factors(left, FactorKind.REPLICATED), b.factors(right, FactorKind.REPLICATED)
    i, j, a, c = -1, -1, 1, 1
    while True:
        # Size 1 is skipped here and filled in below: it splits nothing and shares nothing.
        while a == 1 and i + 1 < len(left):
            i, a = i + 1, left[i + 1]
        while c == 1 and j + 1 < len(right):
            j, c = j + 1, right[j + 1]
        if a == 1 or c == 1:
            break
        common = gcd(a, c)
        if common == 1:
            i, j = _skip_to_agreement(b, factors, (left, right), (i, j), (a, c))
            a = c = 1
            continue
        factor = b.factor(common)
        factors[0][i].append(factor)
        factors[1][j].append(factor)
        a, c = a // common, c // common
    sides = [tuple(tuple(f) or (b.factor(1),) for f in side) for side in factors]
    return sides[0], sides[1]


def _skip_to_agreement(
    b: RuleBuilder,
    factors: tuple[list[list[int]], list[list[int]]],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    places: tuple[int, int],
    remainders: tuple[int, int],
) -> tuple[int, int]:
    """Give both sides factors of their own until their products agree, and return the last dim used on each side."""
    place, product = list(places), list(remainders)
    for side in (0, 1):
        factors[side][place[side]].append(b.factor(remainders[side], FactorKind.REPLICATED))
    while product[0] != product[1]:
        side = 0 if product[0] < product[1] else 1
        place[side] += 1
        size = shapes[side][place[side]]
        product[side] *= size
        factors[side][place[side]].append(b.factor(size, FactorKind.REPLICATED))
    return place[0], place[1]


def _partly(view: OpView, touched: Callable[[int], bool], linear: Sequence[tuple[int, ...]]) -> Rule:
    """Return a rule for one operand of the result's rank: `touched` dims move data across blocks, the others pass."""
    b = RuleBuilder()
    operand_dims: list[tuple[int, ...]] = []
    result_dims: list[tuple[int, ...]] = []
    for d, (n, m) in enumerate(zip(view.operands[0].shape, view.results[0].shape, strict=True)):
        if touched(d):
            operand_dims.append((b.factor(n, FactorKind.PERMUTATION),))
            # Equal sizes share the factor, so that a lowering with halos can split both alike.
            result_dims.append(operand_dims[-1] if n == m else (b.factor(m, FactorKind.PERMUTATION),))
        else:
            operand_dims.append((b.factor(n),))
            result_dims.append(operand_dims[-1])
    rest = tuple(() for _ in view.operands[1:])
    return b.build((tuple(operand_dims), *rest), (tuple(result_dims),), linear=linear_groups(view, *linear))


@register_rule("slice")
def slice_(view: OpView) -> Rule:
    """Return a rule in which dims of full size pass."""
    operand, result = view.operands[0].shape, view.results[0].shape
    return _partly(view, lambda d: operand[d] != result[d], [(0,)])


@register_rule("pad")
def pad(view: OpView) -> Rule:
    """Return a rule in which dims without padding pass; with the literal 0 as padding it is linear in the operand."""
    config = view.params["padding_config"]
    return _partly(view, lambda d: tuple(config[d]) != (0, 0, 0), [(0, 1)])


@register_rule("rev")
def rev(view: OpView) -> Rule:
    """Return a linear rule in which reversed dims move data across block borders and the others pass."""
    return _partly(view, lambda d: d in view.params["dimensions"], [(0,)])


@register_rule("concatenate", "split")
def concatenate(view: OpView) -> Rule:
    """Return a jointly linear rule in which the joined dim is whole in every part and the others pass."""
    joined: int = view.params["dimension" if view.primitive == "concatenate" else "axis"]
    b = RuleBuilder()
    shared = b.factors(view.operands[0].shape)
    b.kinds[shared[joined][0]] = FactorKind.PERMUTATION

    def dims(shape: tuple[int, ...]) -> Dims:
        if shape[joined] == view.operands[0].shape[joined]:
            return shared
        own = (b.factor(shape[joined], FactorKind.PERMUTATION),)
        return (*shared[:joined], own, *shared[joined + 1 :])

    return b.build(
        tuple(dims(v.shape) for v in view.operands),
        tuple(dims(v.shape) for v in view.results),
        linear=linear_groups(view, tuple(range(len(view.operands)))),
    )


@register_rule("stack", "unstack")
def stack(view: OpView) -> Rule:
    """Return a jointly linear rule in which the new (or removed) dim is replicated and the others pass."""
    whole, part = (
        (view.results[0], view.operands[0]) if view.primitive == "stack" else (view.operands[0], view.results[0])
    )
    axis = int(view.params["axis"]) % whole.rank
    b = RuleBuilder()
    part_dims = b.factors(part.shape)
    new = (b.factor(whole.shape[axis], FactorKind.REPLICATED),)
    whole_dims = (*part_dims[:axis], new, *part_dims[axis:])
    parts_in, parts_out = (part_dims, whole_dims) if view.primitive == "stack" else (whole_dims, part_dims)
    return b.build(
        tuple(parts_in for _ in view.operands),
        tuple(parts_out for _ in view.results),
        linear=linear_groups(view, tuple(range(len(view.operands)))),
    )


@register_rule("tile")
def tile(view: OpView) -> Rule:
    """Return a rule in which the repetition, the major factor of a tiled dim, may be split; the dim itself is whole."""
    b = RuleBuilder()
    operand = view.operands[0]
    reps = ints(view.params["reps"])
    dims = b.factors(operand.shape)
    result: list[tuple[int, ...]] = []
    for d, repetitions in enumerate(reps):
        if repetitions == 1:
            result.append(dims[d])
            continue
        b.kinds[dims[d][0]] = FactorKind.REPLICATED
        result.append((b.factor(repetitions), dims[d][0]))
    return b.build((dims,), (tuple(result),), linear=linear_groups(view, (0,)))
