"""The operands that a rule calls jointly linear really are: f(a + b) = f(a) + f(b) with the others fixed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.program.ir import Value
from alpa_lite.rules import OpView, rule_of
from tests.rules.row import names
from tests.rules.rows import ROWS

LINEAR = tuple(row for row in ROWS if row.case.rule.linear)


def halves(value: Any) -> tuple[Any, Any]:
    """Two addends of different size; exact for integers."""
    first = value // 3 if jnp.issubdtype(value.dtype, jnp.integer) else value * 3
    first = first.astype(value.dtype)
    return first, value - first


@pytest.mark.parametrize("row", LINEAR, ids=names(LINEAR))
def test_a_sum_of_operands_gives_the_sum_of_results(row):
    case = row.case
    for group in case.rule.linear:
        split = {i: halves(case.operands[i]) for i in group}
        one, two = (case.bind(*(split[i][k] if i in split else x for i, x in enumerate(case.operands))) for k in (0, 1))
        for whole, a, b in zip(case.bind(*case.operands), one, two, strict=True):
            narrow = whole.dtype.itemsize < 4
            kind = np.complex128 if jnp.issubdtype(whole.dtype, jnp.complexfloating) else np.float64
            expected, found = np.asarray(whole).astype(kind), np.asarray(a + b).astype(kind)
            scale = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0))
            np.testing.assert_allclose(found, expected, rtol=0, atol=(4e-2 if narrow else 1e-5) * scale)


def view(primitive: str, dtypes: str, literals: dict[int, Any] | None = None, **params: Any) -> OpView:
    """An op on vectors; operands of the given dtypes, the last being the result's; some are numbers."""
    found = literals or {}
    values = [
        Value(id=i, shape=() if i in found else (4,), dtype=dtype, literal=found.get(i))
        for i, dtype in enumerate(dtypes.split())
    ]
    return OpView(primitive=primitive, operands=tuple(values[:-1]), results=(values[-1],), params=params)


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (view("add", "float32 float32 float32"), ((0, 1),)),
        (view("add", "float32 float32 float32", {1: 0.0}), ((0,),)),
        (view("add", "float32 float32 float32", {1: 1.0}), ()),
        (view("mul", "float32 float32 float32", {0: 2.0}), ((1,),)),
        (view("div", "int32 int32 int32"), ()),
        (view("mul", "int8 int8 int32"), ()),
        (view("mul", "bfloat16 bfloat16 float32"), ((0,), (1,))),
        (view("convert_element_type", "float32 bfloat16", new_dtype="bfloat16"), ((0,),)),
        (view("convert_element_type", "float32 int32", new_dtype="int32"), ()),
        (view("convert_element_type", "int32 float32", new_dtype="float32"), ()),
        (view("copy", "bool bool"), ()),
        (view("copy", "key<fry> key<fry>"), ()),
        (view("exp", "float32 float32"), ()),
        (view("pad", "float32 float32 float32", {1: 0.0}, padding_config=((0, 1, 0),)), ((0,),)),
        (view("pad", "float32 float32 float32", {1: 2.0}, padding_config=((0, 1, 0),)), ()),
    ],
    ids=lambda value: getattr(value, "primitive", None),
)
def test_numbers_and_dtypes_decide_what_can_hold_partial_sums(op, expected):
    assert rule_of(op).linear == expected


@pytest.mark.parametrize(("name", "expected"), [("scatter", ((0, 2),)), ("scatter of a function", ())])
def test_a_scatter_that_applies_a_function_is_not_linear(name, expected):
    assert next(row for row in ROWS if row.name == name).case.rule.linear == expected
