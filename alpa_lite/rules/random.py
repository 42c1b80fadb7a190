"""Factor rules of random keys and random bits.

    random_bits      ([k]) -> ([k,i,j])         key dims pass; drawn dims are free: each device draws its block
    random_split     ([k]) -> ([k,i])           as above
    random_wrap      ([k,w]) -> ([k])           the words w of a key are whole
    threefry2x32     element-wise

Only threefry draws a number from its index alone; with any other generator a batch of keys must be whole, and each
device draws the full array and keeps its block.
"""

from __future__ import annotations

from alpa_lite.program.ir import Value
from alpa_lite.rules.elementwise import pointwise
from alpa_lite.rules.registry import FactorKind, OpView, Rule, RuleBuilder, opaque_rule, register_rule

#: Integer operations per number drawn: twenty rounds of add, rotate and xor.
THREEFRY_OPERATIONS = 100.0
#: Generators that fold a number into each key of a batch separately; others may read the first key of the batch only.
_FOLDED_ONE_BY_ONE = ("key<fry>", "key<rbg>")


def _key_kind(value: Value) -> FactorKind:
    return FactorKind.PASS if value.dtype == "key<fry>" else FactorKind.REPLICATED


@register_rule("random_bits", "random_split")
def random_bits(view: OpView) -> Rule:
    """Return a rule in which the drawn dims may be split; the dims of a batch of keys come first."""
    b = RuleBuilder()
    (keys,), (result,) = view.operands, view.results
    key_dims = b.factors(keys.shape, _key_kind(keys))
    drawn = b.factors(result.shape[keys.rank :])
    flops = THREEFRY_OPERATIONS * result.num_elements
    return b.build((key_dims,), ((*key_dims, *drawn),), flops=flops, positional=True)


@register_rule("rng_bit_generator")
def rng_bit_generator(view: OpView) -> Rule:
    """Return a rule in which the key is replicated and the dims of the bits may be split."""
    b = RuleBuilder()
    key, bits = view.results
    key_dims = b.factors(key.shape, FactorKind.REPLICATED)
    flops = THREEFRY_OPERATIONS * bits.num_elements
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
