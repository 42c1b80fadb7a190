"""Factor rules of element-wise ops: every dim of every operand is the same dim of the result.

    unary, binary, …     ([i,j], [i,j]) -> ([i,j])                       (pointwise)
    selection            ([], [i,j], [i,j]) -> ([i,j])                   (select_n: a scalar predicate holds no factor)
    per-value identity   ([i], [j,k]) -> ([i], [j,k])                    (barrier; tie keeps the second)
    bit casts            ([i,j]) -> ([i,j,k]), k whole                   (bitcast)

Rank-0 operands and dims of size 1 broadcast implicitly: the first hold no factor, the second one of their own.
"""

from __future__ import annotations

from alpa_lite.program.user_shardings import USER_SHARDING
from alpa_lite.rules.registry import FactorKind, OpView, Rule, RuleBuilder, linear_groups, pointwise, register_rule

#: Floating-point operations that one transcendental function counts for.
TRANSCENDENTAL_FLOPS = 8.0
#: Operations per element of the special functions that are evaluated by long series or loops.
SERIES_FLOPS = 100.0

_FREE = (
    "conj",
    "real",
    "imag",
    "name",
    "sharding_constraint",
    "copy",
    "stop_gradient",
    "convert_element_type",
    "layout_constraint",
    "xla_metadata_value",
    USER_SHARDING,
)
_ARITHMETIC = (
    "abs ceil clz floor is_finite not one_minus_square population_count reduce_precision round sign square "
    "and eq eq_to ge gt le le_to lt lt_to max min mulhi ne nextafter or rem "
    "shift_left shift_right_arithmetic shift_right_logical xor clamp"
).split()
_TRANSCENDENTAL = (
    "acos acosh asin asinh atan atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic rsqrt sin "
    "sinh sqrt tan tanh atan2 pow"
).split()
_SERIES = (
    "bessel_i0e bessel_i1e digamma lgamma polygamma zeta igamma igammac igamma_grad_a random_gamma_grad "
    "regularized_incomplete_beta"
).split()


@register_rule(*_ARITHMETIC)
def arithmetic(view: OpView) -> Rule:
    """Return the rule of ops with one operation per element."""
    return pointwise(view)


@register_rule("integer_pow")
def integer_pow(view: OpView) -> Rule:
    """Return the rule of repeated squaring: at most two multiplications per binary digit of the exponent."""
    exponent = abs(int(view.params.get("y", 2)))
    return pointwise(view, flops=float(max(1, 2 * (exponent.bit_length() - 1))))


@register_rule("polynomial")
def polynomial(view: OpView) -> Rule:
    """Return the rule of Horner's method: a multiplication and an addition per coefficient after the first."""
    return pointwise(view, flops=2.0 * (len(view.operands) - 2))


@register_rule(*_TRANSCENDENTAL)
def transcendental(view: OpView) -> Rule:
    """Return the rule of transcendental functions, which take a few operations per element."""
    return pointwise(view, flops=TRANSCENDENTAL_FLOPS)


@register_rule(*_SERIES)
def series(view: OpView) -> Rule:
    """Return the rule of special functions, which take many operations per element."""
    return pointwise(view, flops=SERIES_FLOPS)


@register_rule(*_FREE)
def free(view: OpView) -> Rule:
    """Return the rule of ops without arithmetic, which are linear unless they convert between kinds of numbers."""
    same_kind = view.operands[0].dtype == view.results[0].dtype
    floats = view.operands[0].is_float and view.results[0].is_float
    return pointwise(view, flops=0.0, linear=linear_groups(view, (0,)) if same_kind or floats else ())


@register_rule("neg")
def neg(view: OpView) -> Rule:
    """Return a rule that is linear in the operand."""
    return pointwise(view, linear=linear_groups(view, (0,)))


@register_rule("add", "sub", "add_any", "complex")
def add(view: OpView) -> Rule:
    """Return a rule that is jointly linear in both operands: the sum of two partial sums is a partial sum."""
    return pointwise(view, linear=linear_groups(view, (0, 1)))


@register_rule("mul")
def mul(view: OpView) -> Rule:
    """Return a rule that is linear in either operand while the other is not a partial sum."""
    return pointwise(view, linear=linear_groups(view, (0,), (1,)))


@register_rule("div")
def div(view: OpView) -> Rule:
    """Return a rule that is linear in the numerator, except for integers, whose division rounds."""
    return pointwise(view, linear=linear_groups(view, (0,)) if view.results[0].is_float else ())


@register_rule("select_n")
def select_n(view: OpView) -> Rule:
    """Return a rule that is jointly linear in the cases, but not in the predicate."""
    return pointwise(view, linear=linear_groups(view, tuple(range(1, len(view.operands)))))


@register_rule("optimization_barrier", "device_put")
def barrier(view: OpView) -> Rule:
    """Return a jointly linear rule in which each operand shares its factors only with its own result."""
    b = RuleBuilder()
    dims = tuple(b.factors(v.shape) for v in view.operands)
    return b.build(dims, dims, linear=linear_groups(view, tuple(range(len(view.operands)))))


@register_rule("tie")
def tie(view: OpView) -> Rule:
    """Return the rule of an op that passes its second operand on, after the first is computed."""
    b = RuleBuilder()
    first, second = (b.factors(v.shape) for v in view.operands)
    return b.build((first, second), (second,), linear=linear_groups(view, (1,)))


@register_rule("bitcast_convert_type")
def bitcast(view: OpView) -> Rule:
    """Return an element-wise rule; if the widths differ, the narrower side has another minor dim, which is whole."""
    b = RuleBuilder()
    (operand,), (result,) = view.operands, view.results
    # The dims of the side with fewer are common; a further minor dim holds the parts of one element.
    shared = b.factors(operand.shape[: min(operand.rank, result.rank)])
    operand_rest = b.factors(operand.shape[len(shared) :], FactorKind.REPLICATED)
    result_rest = b.factors(result.shape[len(shared) :], FactorKind.REPLICATED)
    return b.build(((*shared, *operand_rest),), ((*shared, *result_rest),))
