"""Factor rules of element-wise ops, and of random keys and bits, whose elements are functions of their positions.

    unary, binary, …     ([i,j], [i,j]) -> ([i,j])                       (pointwise)
    selection            ([], [i,j], [i,j]) -> ([i,j])                   (select_n: a scalar predicate holds no factor)
    per-value identity   ([i], [j,k]) -> ([i], [j,k])                    (barrier; tie keeps the second)
    bit casts            ([i,j]) -> ([i,j,k]), k whole                   (bitcast)
    random_bits          ([k]) -> ([k,i,j])         key dims pass; drawn dims are free: each device draws its block
    random_split         ([k]) -> ([k,i])           as above
    random_wrap          ([k,w]) -> ([k])           the words w of a key are whole

Rank-0 operands and dims of size 1 broadcast implicitly: the first hold no factor, the second one of their own.

Only threefry draws a number from its index alone; with any other generator a batch of keys must be whole, and each
device draws the full array and keeps its block.
"""

from __future__ import annotations

from alpa_lite.program.ir import TO_DEVICE, TO_HOST, Value
from alpa_lite.program.user_shardings import USER_SHARDING
from alpa_lite.rules.registry import (
    FactorKind,
    OpView,
    Rule,
    RuleBuilder,
    linear_groups,
    opaque_rule,
    pointwise,
    register_rule,
)

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
    # Conversions to integers round, and conversions to booleans compare: neither commutes with a sum.
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
    # The predicate is whole on all devices, so that all select the same addends.
    return pointwise(view, linear=linear_groups(view, tuple(range(1, len(view.operands)))))


@register_rule("optimization_barrier", "device_put", TO_HOST, TO_DEVICE)
def barrier(view: OpView) -> Rule:
    """Return a jointly linear rule in which each operand shares its factors only with its own result."""
    b = RuleBuilder()
    # A barrier computes nothing: its operands only wait for each other, and are laid out independently.
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


#: Integer operations per number drawn: twenty rounds of add, rotate and xor.
THREEFRY_OPERATIONS = 100.0
#: The same of Philox 4x32-10, XLA's own generator: ten rounds of two wide products, four xors and two additions make
#: four numbers (Salmon et al., SC 2011, section 3.3).
PHILOX_OPERATIONS = 25.0
#: Generators that fold a number into each key of a batch separately; others may read the first key of the batch only.
_FOLDED_ONE_BY_ONE = ("key<fry>", "key<rbg>")


def _operations(keys: Value) -> float:
    """Return the integer operations per number drawn from keys of this kind."""
    return PHILOX_OPERATIONS if keys.dtype in ("key<rbg>", "key<urbg>") else THREEFRY_OPERATIONS


def _key_kind(value: Value) -> FactorKind:
    # Other generators draw for a whole batch of keys at once, so that a part of the batch would give other numbers.
    return FactorKind.PASS if value.dtype == "key<fry>" else FactorKind.REPLICATED


@register_rule("random_bits", "random_split")
def random_bits(view: OpView) -> Rule:
    """Return a rule in which the drawn dims may be split; the dims of a batch of keys come first."""
    b = RuleBuilder()
    (keys,), (result,) = view.operands, view.results
    key_dims = b.factors(keys.shape, _key_kind(keys))
    drawn = b.factors(result.shape[keys.rank :])
    # Keys are split by Threefry whatever draws from them.
    each = _operations(keys) if view.primitive == "random_bits" else THREEFRY_OPERATIONS
    return b.build((key_dims,), ((*key_dims, *drawn),), flops=each * result.num_elements, positional=True)


@register_rule("rng_bit_generator")
def rng_bit_generator(view: OpView) -> Rule:
    """Return a rule in which the key is replicated and the dims of the bits may be split."""
    b = RuleBuilder()
    key, bits = view.results
    key_dims = b.factors(key.shape, FactorKind.REPLICATED)
    flops = PHILOX_OPERATIONS * bits.num_elements
    return b.build((key_dims,), (key_dims, b.factors(bits.shape)), flops=flops, positional=True)


@register_rule("random_wrap", "random_unwrap")
def random_wrap(view: OpView) -> Rule:
    """Return the rule of conversions between typed keys and their words."""
    b = RuleBuilder()
    (operand,), (result,) = view.operands, view.results
    keys, words = (result, operand) if view.primitive == "random_wrap" else (operand, result)
    key_dims = b.factors(keys.shape)
    word_dims = (*key_dims, *b.factors(words.shape[keys.rank :], FactorKind.REPLICATED))
    return b.build(*(((word_dims,), (key_dims,)) if view.primitive == "random_wrap" else ((key_dims,), (word_dims,))))


@register_rule("random_seed", "random_clone", "random_fold_in")
def per_key(view: OpView) -> Rule:
    """Return the element-wise rule of ops that make each key from one key (and one number)."""
    if any(v.shape != view.results[0].shape and v.rank for v in view.operands):
        return opaque_rule(view)
    if view.primitive == "random_fold_in" and view.results[0].dtype not in _FOLDED_ONE_BY_ONE:
        return opaque_rule(view)
    return pointwise(view, flops=THREEFRY_OPERATIONS)


@register_rule("threefry2x32")
def threefry2x32(view: OpView) -> Rule:
    """Return the rule of the generator, which is element-wise in the words of the key and of the counter."""
    return pointwise(view, flops=THREEFRY_OPERATIONS)


@register_rule("random_gamma")
def random_gamma(view: OpView) -> Rule:
    """Return a rule in which dims shared by keys and shape parameter pass; dims drawn from one key are whole."""
    b = RuleBuilder()
    keys, alpha = view.operands
    key_dims = b.factors(keys.shape, _key_kind(keys))
    dims = (*key_dims, *b.factors(alpha.shape[keys.rank :], FactorKind.REPLICATED))
    return b.build((key_dims, dims), (dims,), flops=10 * THREEFRY_OPERATIONS * alpha.num_elements)
