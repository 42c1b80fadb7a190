"""Factor rules of ops that move elements without computing: reshape, transpose, slice, gather, scatter and their like.

    transpose          ([i,j]) -> ([j,i])
    broadcast_in_dim   ([i]) -> ([j,i])               new dims are free
    reshape            ([i,j,k]) -> ([ij,k])          only what is major in both shapes can be split (reshape)
    slice, pad, rev    untouched dims pass; the others would move data across block borders
    concatenate, split, stack, unstack    the joined dim is whole
    tile               ([i]) -> ([ri])                the repetition r is major: it may be split, i not
    gather     ([v,d], [b,t,x]) -> ([b,t,d])                    reduction={v}: each device looks up the rows it holds
    scatter    ([v,d], [b,t,x], [b,t,d]) -> ([v,d])             v passes: each device updates the rows that it holds;
               b,t are a reduction for add, sub, mul, min and max, whole for a plain scatter
    dynamic_slice          dims of full size pass, the others are whole
    dynamic_update_slice   ([i,j], [i,u]) -> ([i,j])            i and j pass on operand and result; u is whole

Reshape factors (common_factors): walk both shapes from the major end; with what is left of the two current dims, a and
b, the next common factor is gcd(a, b); when it is 1, nothing more is shared until the products of both sides agree.

Indexing: window dims of full size pass, others must be whole; explicit batching dims (from vmap) pass; the dim of the
index vectors (the last dim of the indices) must be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, isnan

from alpa_lite.rules.registry import (
    Combiner,
    Dims,
    FactorKind,
    OpView,
    Params,
    Rule,
    RuleBuilder,
    ints,
    is_key,
    linear_groups,
    opaque_rule,
    register_rule,
)


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
    # A dim of size 1 that is expanded stays whole, however the result is split.
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
    # Negative dims count from the end.
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
    # `lax.reshape` may permute the dims of the operand first.
    order = ints(view.params.get("dimensions") or range(operand.rank))
    permuted, result_dims = common_factors(b, tuple(operand.shape[d] for d in order), result.shape)
    operand_dims: list[tuple[int, ...]] = [()] * operand.rank
    for place, dim in enumerate(order):
        operand_dims[dim] = permuted[place]
    for dims in (operand_dims, result_dims):
        for factors in dims:
            # A split of a minor factor would be strided in the dim: no device would hold a block of it.
            minor = [f for f in factors if b.sizes[f] > 1][1:]
            for factor in minor:
                b.kinds[factor] = FactorKind.REPLICATED
    linear = linear_groups(view, (0,))
    return b.build((tuple(operand_dims), *(() for _ in view.operands[1:])), (result_dims,), linear=linear)


def common_factors(b: RuleBuilder, left: tuple[int, ...], right: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Return the factors of two shapes of equal product, major first; factors of only one side are REPLICATED."""
    factors: tuple[list[list[int]], list[list[int]]] = ([[] for _ in left], [[] for _ in right])
    # Empty arrays have no common divisors, and nothing to split.
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
    # The remainders share nothing, so that a block border of one side lies inside an element of the other.
    for side in (0, 1):
        factors[side][place[side]].append(b.factor(remainders[side], FactorKind.REPLICATED))
    # Where the products agree, both sides have the same number of elements before them and can share factors again.
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
    # Blocks of the parts are no blocks of the whole: data would cross devices.
    b.kinds[shared[joined][0]] = FactorKind.PERMUTATION

    def dims(shape: tuple[int, ...]) -> Dims:
        if shape[joined] == view.operands[0].shape[joined]:
            return shared
        # Parts of other sizes have factors of their own: one factor has one size.
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
    # A part is one index of this dim, so that a split would leave each part to some devices only.
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
        # Blocks of the operand would be strided in the result: the repetition is the major factor.
        b.kinds[dims[d][0]] = FactorKind.REPLICATED
        result.append((b.factor(repetitions), dims[d][0]))
    return b.build((dims,), (tuple(result),), linear=linear_groups(view, (0,)))


#: Modes for indices out of bounds; lowering preserves each of them for split dims.
_MODES = ("CLIP", "FILL_OR_DROP", "PROMISE_IN_BOUNDS")
_SCATTERS: Mapping[str, Combiner] = {
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter-min": "min",
    "scatter-max": "max",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roles:
    """The roles of the dims of operand, indices and window; gather and scatter differ only in the names.

    window             dims of the result (or the updates) that come from the operand
    hidden             dims of the operand without a window dim
    addressed          dims of the operand at which index vectors point
    operand_batching   batching dims of the operand
    indices_batching   the same of the indices, in the same order
    """

    window: tuple[int, ...]
    hidden: frozenset[int]
    addressed: frozenset[int]
    operand_batching: tuple[int, ...]
    indices_batching: tuple[int, ...]

    def indices_dims(
        self, b: RuleBuilder, shape: tuple[int, ...], operand: Sequence[tuple[int, ...]], kind: FactorKind
    ) -> Dims:
        """Return the dims of the indices: batching dims have the operand's factors, other batch dims are of `kind`."""
        # Batching dims of both come in corresponding order, and are split alike: an index stays within its batch.
        batching = {d: operand[o] for d, o in zip(self.indices_batching, self.operand_batching, strict=True)}
        batch = tuple(batching[d] if d in batching else (b.factor(n, kind),) for d, n in enumerate(shape[:-1]))
        return (*batch, (b.factor(shape[-1], FactorKind.REPLICATED),))


def _roles(view: OpView) -> _Roles:
    numbers: Params = view.params["dimension_numbers"]
    gathers = view.primitive == "gather"
    operand_batching = ints(numbers["operand_batching_dims"])
    collapsed = ints(numbers["collapsed_slice_dims" if gathers else "inserted_window_dims"])
    return _Roles(
        window=tuple(sorted(ints(numbers["offset_dims" if gathers else "update_window_dims"]))),
        hidden=frozenset((*collapsed, *operand_batching)),
        addressed=frozenset(ints(numbers["start_index_map" if gathers else "scatter_dims_to_operand_dims"])),
        operand_batching=operand_batching,
        indices_batching=ints(numbers["start_indices_batching_dims" if gathers else "scatter_indices_batching_dims"]),
    )


@register_rule("gather")
def gather(view: OpView) -> Rule:
    """Return the rule of looking up rows by index: if the searched dim is split, masked look-ups are summed."""
    if view.params["mode"] not in _MODES:
        return opaque_rule(view)
    operand, indices = view.operands
    roles = _roles(view)
    b = RuleBuilder()
    searched = FactorKind.REPLICATED if is_key(operand) else FactorKind.REDUCTION
    # Window dims of the result correspond in order to the dims of the operand that are not hidden.
    window = iter(roles.window)
    operand_dims: list[tuple[int, ...]] = []
    result_dims: dict[int, tuple[int, ...]] = {}
    for d, (n, size) in enumerate(zip(operand.shape, ints(view.params["slice_sizes"]), strict=True)):
        passes = d in roles.operand_batching or (size == n and d not in roles.hidden)
        # A single element lies in one block, whose device finds it; longer slices may straddle two blocks.
        found = size == 1 and d in roles.addressed and not passes
        kind = FactorKind.PASS if passes else searched if found else FactorKind.REPLICATED
        operand_dims.append((b.factor(n, kind),))
        if d not in roles.hidden:
            own = operand_dims[d] if passes else (b.factor(size, FactorKind.REPLICATED),)
            result_dims[next(window)] = own
    indices_dims = roles.indices_dims(b, indices.shape, operand_dims, FactorKind.PASS)
    batch = iter(indices_dims[:-1])
    results = tuple(result_dims[d] if d in result_dims else next(batch) for d in range(view.results[0].rank))
    return b.build(
        (tuple(operand_dims), indices_dims),
        (results,),
        reduction="or" if operand.dtype == "bool" else "sum",
        linear=linear_groups(view, (0,)) if _fill_adds_up(view) else (),
        positional=True,
    )


def _fill_adds_up(view: OpView) -> bool:
    """Return True unless indices out of bounds give a number that a sum over partial sums would multiply."""
    if view.params["mode"] != "FILL_OR_DROP":
        return True
    # NaN stays NaN in a sum, and 0 stays 0. JAX's default is NaN for floats, and an extreme number for integers.
    fill = view.params.get("fill_value")
    if fill is None:
        return view.results[0].is_float
    return fill == 0 or (isinstance(fill, float) and isnan(fill))


@register_rule("scatter", *_SCATTERS)
def scatter(view: OpView) -> Rule:
    """Return the rule of updating rows by index; the operands are array, indices and updates."""
    if view.params["mode"] not in _MODES:
        return opaque_rule(view)
    operand, indices, updates = view.operands[:3]
    roles = _roles(view)
    b = RuleBuilder()
    window = iter(roles.window)
    operand_dims: list[tuple[int, ...]] = []
    update_dims: dict[int, tuple[int, ...]] = {}
    for d, n in enumerate(operand.shape):
        place = None if d in roles.hidden else next(window)
        # A hidden dim is a batching dim, or one whose rows are addressed one by one.
        passes = d in roles.operand_batching or d in roles.addressed if place is None else updates.shape[place] == n
        operand_dims.append((b.factor(n, FactorKind.PASS if passes else FactorKind.REPLICATED),))
        if place is not None:
            own = operand_dims[d] if passes else (b.factor(updates.shape[place], FactorKind.REPLICATED),)
            update_dims[place] = own
    # Booleans cannot be summed over devices, but have a minimum and a maximum.
    adds = view.primitive in _SCATTERS and (operand.dtype != "bool" or _SCATTERS[view.primitive] in ("min", "max"))
    batch_kind = FactorKind.REDUCTION if adds else FactorKind.REPLICATED
    indices_dims = roles.indices_dims(b, indices.shape, operand_dims, batch_kind)
    batch = iter(indices_dims[:-1])
    all_updates = tuple(update_dims[d] if d in update_dims else next(batch) for d in range(updates.rank))
    dims = tuple(operand_dims)
    # A plain scatter may carry a function that combines old and new elements, which need not be linear.
    sets = view.primitive == "scatter" and view.params.get("update_jaxpr", view) is None
    adds_up = sets or view.primitive in ("scatter-add", "scatter-sub")
    linear = linear_groups(view, (0, 2)) if adds_up else ()
    return b.build(
        (dims, indices_dims, all_updates),
        (dims,),
        reduction=_SCATTERS.get(view.primitive, "sum"),
        linear=linear,
        flops=float(updates.num_elements if adds else 0),
        positional=True,
    )


@register_rule("dynamic_slice")
def dynamic_slice(view: OpView) -> Rule:
    """Return a rule in which dims of full size pass; others are whole, since the start is known only at run time."""
    b = RuleBuilder()
    operand, result = view.operands[0], view.results[0]
    operand_dims: list[tuple[int, ...]] = []
    result_dims: list[tuple[int, ...]] = []
    for n, m in zip(operand.shape, result.shape, strict=True):
        operand_dims.append((b.factor(n, FactorKind.PASS if n == m else FactorKind.REPLICATED),))
        result_dims.append(operand_dims[-1] if n == m else (b.factor(m, FactorKind.REPLICATED),))
    starts = tuple(() for _ in view.operands[1:])
    linear = linear_groups(view, (0,))
    return b.build((tuple(operand_dims), *starts), (tuple(result_dims),), linear=linear, positional=True)


@register_rule("dynamic_update_slice")
def dynamic_update_slice(view: OpView) -> Rule:
    """Return a rule in which the dims of the operand pass; a dim of the update that is shorter must be whole.

    Each device overwrites the part of the update that lies in its block.
    """
    b = RuleBuilder()
    operand, update = view.operands[:2]
    dims = b.factors(operand.shape)
    update_dims = tuple(
        dims[d] if n == operand.shape[d] else (b.factor(n, FactorKind.REPLICATED),) for d, n in enumerate(update.shape)
    )
    # Starts are scalars, which have no dims.
    starts = tuple(() for _ in view.operands[2:])
    return b.build((dims, update_dims, *starts), (dims,), linear=linear_groups(view, (0, 1)), positional=True)
