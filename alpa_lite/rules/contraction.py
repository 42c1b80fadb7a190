"""Factor rules of ops that sum over dims or need them whole: products, linear algebra, reductions, sorting, Fourier.

    dot_general       ([b,i,k], [b,k,j]) -> ([b,i,j])           reduction={k}
    ragged_dot        ([m,k], [g,k,n], [h]) -> ([m,n])          reduction={k,g}: rows m are sorted by group g
    its gradient      ([k,m], [k,n], [h]) -> ([g,m,n])          reduction={k}:   the contracted rows are sorted by group
    scaled_dot        ([b,i,ks], [b,ks,j], [b,i,k], [b,k,j]) -> ([b,i,j])    reduction={k}: one scale for s numbers
    scaled_matmul     the same for ([b,i,ks], [b,j,ks], [b,i,k], [b,j,k]): cuDNN's product of mxfp8 and nvfp4 numbers
    factorisations    ([b,i,j]) -> ([b,i,j])                    batch dims pass, matrix dims whole
    reduce_*          ([i,j]) -> ([i])                 reduction={j}, combined by sum, max, min, prod, and, or, xor
    argmax, argmin    ([i,j]) -> ([i])                 j whole: (value, index) pairs have no collective
    cumsum, sort, fft ([i,j]) -> ([i,j])               j whole
    top_k             ([i,j]) -> ([i,k])               j and k whole

FLOPs of a product: 2 · (elements of the result) · (elements contracted).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd, log2, prod

from alpa_lite.rules.registry import (
    Combiner,
    Dims,
    FactorKind,
    OpView,
    Rule,
    RuleBuilder,
    can_add,
    ints,
    linear_groups,
    opaque_rule,
    register_rule,
)

#: For each linear-algebra op the number of trailing dims of its first operand that are no batch dims.
_CORE_RANK = {
    **dict.fromkeys(("cholesky", "lu", "qr", "geqrf", "householder_product", "ormqr"), 2),
    **dict.fromkeys(("eigh", "geqp3", "eig", "svd", "schur", "hessenberg", "tridiagonal", "symmetric_product"), 2),
    **dict.fromkeys(("tridiagonal_solve", "lu_pivots_to_permutation"), 1),
}


@register_rule("dot_general")
def dot_general(view: OpView) -> Rule:
    """Return a rule in which batch and free dims pass and contracted dims are reductions.

    The dims of the result are the batch dims, then the free dims of the left and then of the right operand.
    """
    lhs, rhs = view.operands
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = _dot_dims(view.params["dimension_numbers"])
    b = RuleBuilder()
    # Products of booleans are combined by "or", for which partial sums have no collective.
    contracted = FactorKind.REDUCTION if can_add(view.results[0]) else FactorKind.REPLICATED
    batch = {d: b.factor(lhs.shape[d]) for d in lhs_batch}
    inner = {d: b.factor(lhs.shape[d], contracted) for d in lhs_contract}
    lhs_factors = [batch.get(d, inner.get(d, -1)) for d in range(lhs.rank)]
    # Free factors are numbered after batch and contracted ones, the left operand first.
    lhs_factors = [f if f >= 0 else b.factor(lhs.shape[d]) for d, f in enumerate(lhs_factors)]
    known = dict(zip((*rhs_batch, *rhs_contract), [*batch.values(), *inner.values()], strict=True))
    rhs_factors = [known[d] if d in known else b.factor(n) for d, n in enumerate(rhs.shape)]
    free = [f for d, f in enumerate(lhs_factors) if d not in batch and d not in inner]
    free += [f for d, f in enumerate(rhs_factors) if d not in known]
    return b.build(
        (_single(lhs_factors), _single(rhs_factors)),
        (_single([*batch.values(), *free]),),
        linear=linear_groups(view, (0,), (1,)),
        flops=2.0 * view.results[0].num_elements * prod(lhs.shape[d] for d in lhs_contract),
        work_kind="matmul",
    )


@register_rule("scaled_dot")
def scaled_dot(view: OpView) -> Rule:
    """Return the rule of a product whose operands have a scale per block of numbers along the contracted dim.

    A contracted dim has two factors: the blocks, and the numbers in a block, which stay together.
    """
    return _scaled_product(view, view.params["dimension_numbers"])


@register_rule("scaled_matmul_wrapper")
def scaled_matmul(view: OpView) -> Rule:
    """Return the rule of cuDNN's product of numbers with scales per block (`jax.nn.scaled_matmul`)."""
    return _scaled_product(view, (((2,), (2,)), ((0,), (0,))))


def _scaled_product(view: OpView, numbers: Iterable[Iterable[Iterable[int]]]) -> Rule:
    lhs, rhs, *scales = view.operands
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = _dot_dims(numbers)
    b = RuleBuilder()
    # Factors of batch and contracted dims by dim, for the left and for the right operand.
    known: tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]] = ({}, {})
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        known[0][left] = known[1][right] = (b.factor(lhs.shape[left]),)
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        whole = _numbers_per_block(lhs.shape[left], scales[0].shape[left], scales[1].shape[right])
        blocks = lhs.shape[left] // whole
        outer = b.factor(blocks, FactorKind.REDUCTION)
        known[0][left] = known[1][right] = (outer, b.factor(whole, FactorKind.REPLICATED)) if whole > 1 else (outer,)

    def free(shape: tuple[int, ...], side: dict[int, tuple[int, ...]]) -> Dims:
        return tuple(side[d] if d in side else (b.factor(n),) for d, n in enumerate(shape))

    def scaled(dims: Dims, shape: tuple[int, ...], scale: tuple[int, ...]) -> Dims:
        return tuple(_scale_factors(b, f, n, m) for f, n, m in zip(dims, shape, scale, strict=True))

    left, right = free(lhs.shape, known[0]), free(rhs.shape, known[1])
    result = [left[d] for d in lhs_batch]
    result += [f for side, dims in zip(known, (left, right), strict=True) for d, f in enumerate(dims) if d not in side]
    return b.build(
        (left, right, scaled(left, lhs.shape, scales[0].shape), scaled(right, rhs.shape, scales[1].shape)),
        (tuple(result),),
        flops=2.0 * view.results[0].num_elements * prod(lhs.shape[d] for d in lhs_contract),
        work_kind="matmul",
    )


def _numbers_per_block(size: int, left: int, right: int) -> int:
    """Return how many numbers of a contracted dim must stay together; a single scale holds for any of them."""
    blocks = [n for n in (left, right) if n > 1]
    # Both operands must be cut between blocks, whose borders coincide at multiples of the larger block.
    if blocks:
        return size // gcd(*blocks)
    # JAX requires at least two numbers per scale, so that blocks of one number could not run on a device.
    return 2 if size % 2 == 0 else size


def _scale_factors(b: RuleBuilder, factors: tuple[int, ...], size: int, scales: int) -> tuple[int, ...]:
    """Return the factors of a dim of scales; the operand's dim has this size and these `factors`."""
    if scales == size:
        return factors
    if scales == 1:
        return (b.factor(1),)
    rest = scales // b.sizes[factors[0]]
    return factors[:1] if rest == 1 else (factors[0], b.factor(rest, FactorKind.REPLICATED))


def _dot_dims(numbers: Iterable[Iterable[Iterable[int]]]) -> list[list[tuple[int, ...]]]:
    """Return ((lhs contracted, rhs contracted), (lhs batch, rhs batch)) as plain numbers."""
    return [[ints(dims) for dims in pair] for pair in numbers]


def _single(factors: list[int]) -> Dims:
    return tuple((f,) for f in factors)


@register_rule("ragged_dot_general")
def ragged_dot_general(view: OpView) -> Rule:
    """Return the rule of grouped products; `group_sizes` is whole: each device locates its rows and groups in it."""
    numbers = view.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, _) = _dot_dims(numbers["dot_dimension_numbers"])
    ragged, groups = ints(numbers["lhs_ragged_dimensions"]), ints(numbers["rhs_group_dimensions"])
    one_of_each = len(lhs_contract) == len(rhs_contract) == len(ragged) == 1
    if not one_of_each or lhs_batch or view.operands[2].rank != 1 or view.params.get("group_offset") is not None:
        return opaque_rule(view)
    # Where the groups are is what tells the product from its gradient with regard to the matrices.
    if ragged[0] in lhs_contract:
        return _ragged_contracted(view, lhs_contract[0], rhs_contract[0])
    return _ragged_free(view, ragged[0], lhs_contract[0], rhs_contract[0], groups)


def _ragged_free(view: OpView, ragged: int, lhs_contract: int, rhs_contract: int, group_dims: tuple[int, ...]) -> Rule:
    """Return the rule for grouped rows of the left operand, each of which is multiplied by the matrix of its group."""
    lhs, rhs, sizes = view.operands
    if lhs.rank != 2 or rhs.rank != 3 or len(group_dims) != 1:
        return opaque_rule(view)
    b = RuleBuilder()
    m, k = b.factor(lhs.shape[ragged]), b.factor(lhs.shape[lhs_contract], FactorKind.REDUCTION)
    # A device with some of the groups computes the rows of these and zeros for the others: the sum is the result.
    g = b.factor(rhs.shape[group_dims[0]], FactorKind.REDUCTION)
    n = b.factor(next(s for d, s in enumerate(rhs.shape) if d not in (group_dims[0], rhs_contract)))
    rhs_factors = [g if d == group_dims[0] else k if d == rhs_contract else n for d in range(3)]
    return b.build(
        (
            _single([m, k] if ragged == 0 else [k, m]),
            _single(rhs_factors),
            b.factors(sizes.shape, FactorKind.REPLICATED),
        ),
        (_single([m, n]),),
        linear=linear_groups(view, (0,), (1,)),
        flops=2.0 * view.results[0].num_elements * lhs.shape[lhs_contract],
        work_kind="matmul",
        positional=True,
    )


def _ragged_contracted(view: OpView, lhs_contract: int, rhs_contract: int) -> Rule:
    """Return the rule for grouped contracted rows, as in the gradient of the matrices: one result per group."""
    lhs, rhs, sizes = view.operands
    if lhs.rank != 2 or rhs.rank != 2:
        return opaque_rule(view)
    b = RuleBuilder()
    g, m, n = b.factors(view.results[0].shape)
    k = (b.factor(lhs.shape[lhs_contract], FactorKind.REDUCTION),)
    return b.build(
        (
            (k, m) if lhs_contract == 0 else (m, k),
            (k, n) if rhs_contract == 0 else (n, k),
            b.factors(sizes.shape, FactorKind.REPLICATED),
        ),
        ((g, m, n),),
        linear=linear_groups(view, (0,), (1,)),
        flops=2.0 * lhs.num_elements * rhs.shape[1 - rhs_contract],
        work_kind="matmul",
        positional=True,
    )


@register_rule(*_CORE_RANK)
def linear_algebra(view: OpView) -> Rule:
    """Return a rule in which leading batch dims pass and matrix dims are whole; the work per matrix is cubic."""
    batch_shape = view.operands[0].shape[: view.operands[0].rank - _CORE_RANK[view.primitive]]
    b = RuleBuilder()
    batch = b.factors(batch_shape)

    def dims(shape: tuple[int, ...]) -> Dims:
        # Some results (info codes, permutations) have the batch alone, or fewer matrix dims.
        head = batch if shape[: len(batch)] == batch_shape else ()
        return (*head, *b.factors(shape[len(head) :], FactorKind.REPLICATED))

    # Of an m × n matrix the work is about m · n · max(m, n).
    largest = max((*view.operands[0].shape[len(batch) :], 1))
    return b.build(
        tuple(dims(v.shape) for v in view.operands),
        tuple(dims(v.shape) for v in view.results),
        flops=float(view.operands[0].num_elements * largest),
    )


@register_rule("triangular_solve")
def triangular_solve(view: OpView) -> Rule:
    """Return a rule in which batch dims and right-hand sides pass: columns with the matrix on the left, else rows."""
    b = RuleBuilder()
    matrix, sides = view.operands
    batch = b.factors(sides.shape[:-2])
    whole = FactorKind.REPLICATED
    # Each right-hand side is solved by itself, but along the matrix every element depends on those before it.
    rows, columns = (whole, FactorKind.PASS) if view.params["left_side"] else (FactorKind.PASS, whole)
    solved = (*batch, (b.factor(sides.shape[-2], rows),), (b.factor(sides.shape[-1], columns),))
    dims = (*batch, *b.factors(matrix.shape[-2:], whole))
    flops = float(sides.num_elements * matrix.shape[-1])
    return b.build((dims, solved), (solved,), linear=linear_groups(view, (1,)), flops=flops)


_COMBINER: Mapping[str, Combiner] = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "prod",
    "reduce_and": "and",
    "reduce_or": "or",
    "reduce_xor": "xor",
}


def _reduced(view: OpView, axes: frozenset[int], kind: FactorKind) -> tuple[RuleBuilder, Dims, Dims]:
    b = RuleBuilder()
    dims = tuple((b.factor(n, kind if d in axes else FactorKind.PASS),) for d, n in enumerate(view.operands[0].shape))
    return b, dims, tuple(f for d, f in enumerate(dims) if d not in axes)


@register_rule(*_COMBINER)
def reduce_(view: OpView) -> Rule:
    """Return a rule in which reduced dims are reduction factors and the others pass; only a sum is linear."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["axes"])), FactorKind.REDUCTION)
    linear = linear_groups(view, (0,)) if view.primitive == "reduce_sum" else ()
    flops = float(view.operands[0].num_elements)
    return b.build((dims,), (kept,), reduction=_COMBINER[view.primitive], linear=linear, flops=flops)


@register_rule("argmax", "argmin")
def argmax(view: OpView) -> Rule:
    """Return a rule in which the searched dim is replicated."""
    # A pair of value and index would have to be reduced together, for which there is no collective.
    b, dims, kept = _reduced(view, frozenset(ints(view.params["axes"])), FactorKind.REPLICATED)
    return b.build((dims,), (kept,), flops=float(view.operands[0].num_elements))


@register_rule("reduce")
def reduce_generic(view: OpView) -> Rule:
    """Return a rule in which reduced dims are replicated: no collective combines by a user-defined function."""
    b, dims, kept = _reduced(view, frozenset(ints(view.params["dimensions"])), FactorKind.REPLICATED)
    # Operands come first, then one initial value for each.
    half = len(view.operands) // 2
    operands = (*(dims for _ in range(half)), *(() for _ in range(half)))
    flops = float(sum(v.num_elements for v in view.operands[:half]))
    return b.build(operands, tuple(kept for _ in view.results), flops=flops)


def _along(view: OpView, axes: frozenset[int], *, flops: float, linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    """Return a rule in which the dims in `axes` are replicated, and may change size, and all others pass."""
    b = RuleBuilder()
    shape = view.operands[0].shape
    dims = tuple((b.factor(n, FactorKind.REPLICATED if d in axes else FactorKind.PASS),) for d, n in enumerate(shape))

    def matching(other: tuple[int, ...]) -> Dims:
        return tuple(
            (b.factor(n, FactorKind.REPLICATED),) if d in axes and n != shape[d] else dims[d]
            for d, n in enumerate(other)
        )

    results = tuple(matching(v.shape) for v in view.results)
    return b.build(tuple(dims for _ in view.operands), results, flops=flops, linear=linear)


@register_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(view: OpView) -> Rule:
    """Return a rule in which the accumulated dim is replicated."""
    linear = linear_groups(view, (0,)) if view.primitive == "cumsum" else ()
    return _along(view, frozenset([view.params["axis"]]), flops=float(view.operands[0].num_elements), linear=linear)


@register_rule("sort")
def sort(view: OpView) -> Rule:
    """Return a rule in which the sorted dim is replicated; n log2 n comparisons."""
    axis = int(view.params["dimension"])
    length = view.operands[0].shape[axis]
    flops = view.operands[0].num_elements * max(1.0, log2(max(length, 1)))
    return _along(view, frozenset([axis]), flops=flops)


@register_rule("top_k", "approx_top_k")
def top_k(view: OpView) -> Rule:
    """Return a rule in which the searched dim and the dim of the k results are replicated."""
    # The exact and the approximate op name their parameter differently.
    axis = int(view.params.get("axis", view.params.get("reduction_dimension", -1)))
    length = view.operands[0].shape[axis]
    flops = view.operands[0].num_elements * max(1.0, log2(max(length, 1)))
    return _along(view, frozenset([axis % view.operands[0].rank]), flops=flops)


@register_rule("fft")
def fft(view: OpView) -> Rule:
    """Return a rule in which the transformed (trailing) dims are replicated; 5 n log2 n operations."""
    lengths = ints(view.params["fft_lengths"])
    rank = view.operands[0].rank
    flops = 5.0 * view.operands[0].num_elements * max(1.0, log2(max(prod(lengths), 1)))
    axes = frozenset(range(rank - len(lengths), rank))
    # Both the real and the complex transforms are linear over the reals.
    return _along(view, axes, flops=flops, linear=linear_groups(view, (0,)))
