"""The table of rows covers the rules, and every rule is well formed."""

import jax
import pytest

from alpa_lite.rules import FactorKind, has_rule, known_primitives
from tests.rules.row import names, row
from tests.rules.rows import ROWS

#: Rules without a row: further members of families whose other members have one.
WITHOUT_ROW = {
    "element-wise": (
        "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e clz cosh digamma eq_to erfc exp2 igamma_grad_a igammac "
        "le_to lt_to mulhi polygamma population_count random_gamma_grad regularized_incomplete_beta sinh tan zeta"
    ),
    "element-wise, of JAX 0.11": "log2 one_minus_square",
    "element-wise, of JAX 0.12": "polynomial",
    "linear algebra": "eig geqp3 geqrf hessenberg ormqr schur symmetric_product tridiagonal",
    "as device_put; plans insert them": "to_device to_host",
    "as squeeze and select_and_scatter_add": "expand_dims select_and_scatter",
}


def test_every_rule_has_a_row():
    met = {row.primitive for row in ROWS}
    unmet = {name for family in WITHOUT_ROW.values() for name in family.split()}
    assert set(known_primitives()) - met == unmet


@pytest.mark.parametrize("primitive", ["scan", "while", "cond", "pure_callback", "jit"])
def test_control_flow_and_calls_have_no_rule(primitive):
    assert not has_rule(primitive)


@pytest.mark.parametrize("row", ROWS, ids=names(ROWS))
def test_rule_is_well_formed(row):
    view, rule = row.case.view, row.case.rule
    tensors = [*zip(view.operands, rule.operands, strict=True), *zip(view.results, rule.results, strict=True)]
    for value, dims in tensors:
        # Rank-0 operands broadcast and hold no factor; all others have factors for every dim, whose sizes multiply up.
        assert len(dims) == value.rank
        for size, factors in zip(value.shape, dims, strict=True):
            product = 1
            for factor in factors:
                product *= rule.sizes[factor]
            assert product == size
            # A spec splits a dim in contiguous blocks: only the major factor of every dim that holds it may be split.
            large = [f for f in factors if rule.sizes[f] > 1]
            assert not set(large[1:]) & set(rule.shardable)
    in_results = {f for dims in rule.results for factors in dims for f in factors}
    for factor, kind in enumerate(rule.kinds):
        assert kind is not FactorKind.REDUCTION or factor not in in_results


@pytest.mark.parametrize(("generator", "operations"), [("threefry2x32", 100), ("rbg", 25), ("unsafe_rbg", 25)])
def test_random_bits_cost_the_operations_of_their_generator(generator, operations):
    key = jax.random.key(7, impl=generator)
    found = row("random_bits", lambda k: jax.random.bits(k, (8, 4)), key)
    assert found.case.rule.flops == 32 * operations
