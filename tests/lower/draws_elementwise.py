"""Drawn calls of element-wise primitives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import primitives

from alpa_lite.trace.passes.plain_jaxpr import user_sharding_p
from tests.lower.pick import ANY, COMPLEX, FLOATS, INTEGERS, MOVED, NUMBERS, ORDERED, Pick, call, drawn
from tests.rules.jax_primitives import jax_primitives
from tests.rules.row import Row

_ROUNDED = (*FLOATS,)
_ANALYTIC = (*FLOATS, *COMPLEX)

#: Functions of one array: the dtypes that they take, their domain, and what Shardy sees.
_UNARY: dict[str, tuple[Any, Sequence[str], tuple[float, float], str]] = {
    "abs": (lax.abs, (*FLOATS, "int32", *COMPLEX), (-2, 2), "abs"),
    "acos": (lax.acos, _ANALYTIC, (-1, 1), ""),
    "acosh": (lax.acosh, _ANALYTIC, (1, 3), ""),
    "asin": (lax.asin, _ANALYTIC, (-1, 1), ""),
    "asinh": (lax.asinh, _ANALYTIC, (-2, 2), ""),
    "atan": (lax.atan, _ANALYTIC, (-2, 2), ""),
    "atanh": (lax.atanh, _ANALYTIC, (-1, 1), ""),
    "bessel_i0e": (lax.bessel_i0e, FLOATS, (-9, 9), ""),
    "bessel_i1e": (lax.bessel_i1e, FLOATS, (-9, 9), ""),
    "cbrt": (lax.cbrt, FLOATS, (-2, 2), "cbrt"),
    "ceil": (lax.ceil, FLOATS, (-9, 9), "ceil"),
    "clz": (lax.clz, INTEGERS, (0, 99), "count_leading_zeros"),
    "conj": (lax.conj, COMPLEX, (-2, 2), ""),
    "copy": (lambda x: lax.copy_p.bind(x), MOVED, (-2, 2), ""),
    "cos": (lax.cos, _ANALYTIC, (-4, 4), "cosine"),
    "cosh": (lax.cosh, _ANALYTIC, (-2, 2), ""),
    "device_put": (jax.device_put, MOVED, (-2, 2), ""),
    "digamma": (lax.digamma, FLOATS, (0.5, 9), ""),
    "erf": (lax.erf, FLOATS, (-2, 2), ""),
    "erf_inv": (lax.erf_inv, FLOATS, (-1, 1), ""),
    "erfc": (lax.erfc, FLOATS, (-2, 2), ""),
    "exp": (lax.exp, _ANALYTIC, (-4, 4), "exponential"),
    "exp2": (lax.exp2, _ANALYTIC, (-4, 4), ""),
    "expm1": (lax.expm1, _ANALYTIC, (-2, 2), "exponential_minus_one"),
    "floor": (lax.floor, FLOATS, (-9, 9), "floor"),
    "imag": (lax.imag, COMPLEX, (-2, 2), "imag"),
    "is_finite": (lax.is_finite, FLOATS, (-2, 2), "is_finite"),
    "lgamma": (lax.lgamma, FLOATS, (0.5, 9), ""),
    "log": (lax.log, _ANALYTIC, (0.1, 3), "log"),
    "log1p": (lax.log1p, _ANALYTIC, (-0.9, 3), "log_plus_one"),
    "logistic": (lax.logistic, _ANALYTIC, (-4, 4), "exponential"),
    "name": (lambda x: checkpoint_name(x, "here"), MOVED, (-2, 2), ""),
    "neg": (lax.neg, NUMBERS, (-2, 2), "negate"),
    "not": (lax.bitwise_not, (*INTEGERS, "bool"), (0, 99), "not"),
    "population_count": (lax.population_count, INTEGERS, (0, 99), "popcnt"),
    "real": (lax.real, COMPLEX, (-2, 2), "real"),
    "xla_metadata_value": (lambda x: set_xla_metadata(x, here="1"), MOVED, (-2, 2), ""),
    "rsqrt": (lax.rsqrt, _ANALYTIC, (0.1, 3), "rsqrt"),
    "sign": (lax.sign, NUMBERS, (-2, 2), "sign"),
    "sin": (lax.sin, _ANALYTIC, (-4, 4), "sine"),
    "sinh": (lax.sinh, _ANALYTIC, (-2, 2), ""),
    "sqrt": (lax.sqrt, _ANALYTIC, (0, 3), "sqrt"),
    "square": (lax.square, NUMBERS, (-2, 2), "multiply"),
    "stop_gradient": (lax.stop_gradient, FLOATS, (-2, 2), ""),
    "tan": (lax.tan, _ANALYTIC, (-1, 1), "tan"),
    "tanh": (lax.tanh, _ANALYTIC, (-2, 2), "tanh"),
}


@drawn(*_UNARY)
def unary(pick: Pick, name: str) -> Row:
    """One array."""
    function, dtypes, (low, high), oracle = _UNARY[name]
    dtype = pick.one_of(dtypes)
    # The sign of what has none is a comparison.
    oracle = "" if (name, dtype) == ("sign", "uint8") else oracle
    return call(name, function, pick.array(pick.shape(), dtype, low, high), oracle=oracle)


@drawn("round")
def rounding(pick: Pick, name: str) -> Row:
    """Halves go away from zero or to even numbers."""
    method = pick.one_of([lax.RoundingMethod.AWAY_FROM_ZERO, lax.RoundingMethod.TO_NEAREST_EVEN])
    oracle = "round_nearest_afz" if method == lax.RoundingMethod.AWAY_FROM_ZERO else "round_nearest_even"
    x = jnp.round(2 * pick.array(pick.shape(), pick.one_of(FLOATS), -9, 9)) / 2
    return call(name, lambda v: lax.round(v, method), x, oracle=oracle)


@drawn("integer_pow")
def integer_pow(pick: Pick, name: str) -> Row:
    """Positive and negative exponents; XLA sees multiplications."""
    dtype = pick.one_of(NUMBERS)
    exponent = pick.one_of((2, 3, 4, 7, *(() if dtype in INTEGERS else (-1, -2, -3))))
    x = pick.array(pick.shape(), dtype, 0.5, 2)
    return call(name, lambda v: lax.integer_pow_p.bind(v, y=exponent), x, oracle="multiply" if exponent != -1 else "")


@drawn("reduce_precision")
def reduce_precision(pick: Pick, name: str) -> Row:
    """Any smaller format."""
    exponent, mantissa = pick.integer(2, 8), pick.integer(1, 12)
    x = pick.array(pick.shape(), pick.one_of(FLOATS))
    return call(name, lambda v: lax.reduce_precision(v, exponent, mantissa), x, oracle="reduce_precision")


@drawn("convert_element_type")
def convert(pick: Pick, name: str) -> Row:
    """Between any two dtypes."""
    source, target = pick.one_of(ANY), pick.one_of((*ANY, "float16", "int8"))
    if source == target or (source in COMPLEX and target not in COMPLEX):
        source, target = "float32", "bfloat16"
    x = pick.array(pick.shape(), source, 0, 9)
    if pick.special and target in (*INTEGERS, "int8"):
        x = jnp.nan_to_num(x, posinf=1, neginf=0)
    oracle = "compare" if target == "bool" else "convert"
    return call(name, lambda v: lax.convert_element_type_p.bind(v, **_conversion(target)), x, oracle=oracle)


def _conversion(target: str) -> dict[str, Any]:
    return dict(new_dtype=np.dtype(jnp.dtype(target)), weak_type=False, sharding=None)


@drawn("bitcast_convert_type")
def bitcast(pick: Pick, name: str) -> Row:
    """To the same width, to narrower and to wider numbers."""
    source, target = pick.one_of([("float32", "int32"), ("float32", "uint8"), ("int8", "int32"), ("uint8", "int8")])
    shape = pick.shape()
    x = pick.array((*shape, 4) if (source, target) == ("int8", "int32") else shape, source)
    return call(name, lambda v: lax.bitcast_convert_type(v, jnp.dtype(target)), x, oracle="bitcast_convert")


@drawn("sharding_constraint")
def sharding_constraint(pick: Pick, name: str) -> Row:
    """Asks for a place."""
    devices = np.array(jax.devices())
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, ("d",)), jax.sharding.PartitionSpec())
    return call(name, lambda v: lax.with_sharding_constraint(v, sharding), pick.array(pick.shape()))


@drawn("user_sharding")
def user_sharding(pick: Pick, name: str) -> Row:
    """Demands a sharding; the machine under test takes any."""
    shape = pick.shape()
    params = {"mesh": (("d", 8),), "dims": ((),) * len(shape), "pinned": True, "propagated": False}
    return call(name, lambda v: user_sharding_p.bind(v, **params), pick.array(shape))


#: Functions of two arrays: as above.
_BINARY: dict[str, tuple[Any, Sequence[str], tuple[float, float], str]] = {
    "add": (lax.add, NUMBERS, (-2, 2), "add"),
    "and": (lax.bitwise_and, (*INTEGERS, "bool"), (0, 99), "and"),
    "atan2": (lax.atan2, FLOATS, (-2, 2), "atan2"),
    "complex": (lax.complex, ("float32",), (-2, 2), "complex"),
    "div": (lax.div, NUMBERS, (0.5, 3), "divide"),
    "eq": (lax.eq, ANY, (0, 3), "compare"),
    "ge": (lax.ge, ORDERED, (0, 3), "compare"),
    "gt": (lax.gt, ORDERED, (0, 3), "compare"),
    "le": (lax.le, ORDERED, (0, 3), "compare"),
    "lt": (lax.lt, ORDERED, (0, 3), "compare"),
    "igamma": (lax.igamma, ("float32",), (0.5, 3), ""),
    "igammac": (lax.igammac, ("float32",), (0.5, 3), ""),
    "igamma_grad_a": (lax.igamma_grad_a, ("float32",), (0.5, 3), ""),
    "max": (lax.max, (*ORDERED, *COMPLEX), (-2, 2), "maximum"),
    "min": (lax.min, (*ORDERED, *COMPLEX), (-2, 2), "minimum"),
    "mul": (lax.mul, NUMBERS, (-2, 2), "multiply"),
    "mulhi": (lambda x, y: lax.mulhi_p.bind(x, y), ("int32", "uint32"), (0, 2**31 - 1), ""),
    "ne": (lax.ne, ANY, (0, 3), "compare"),
    "nextafter": (lax.nextafter, ("float32",), (-2, 2), ""),
    "or": (lax.bitwise_or, (*INTEGERS, "bool"), (0, 99), "or"),
    "polygamma": (lax.polygamma, ("float32",), (1, 3), ""),
    "rem": (lax.rem, (*FLOATS, *INTEGERS), (0.5, 9), "remainder"),
    "shift_left": (lax.shift_left, INTEGERS, (0, 9), "shift_left"),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, INTEGERS, (0, 9), "shift_right_arithmetic"),
    "shift_right_logical": (lax.shift_right_logical, INTEGERS, (0, 9), "shift_right_logical"),
    "sub": (lax.sub, NUMBERS, (-2, 2), "subtract"),
    "xor": (lax.bitwise_xor, (*INTEGERS, "bool"), (0, 99), "xor"),
    "zeta": (lax.zeta, ("float32",), (1.1, 5), ""),
}


def _operand(pick: Pick, shape: tuple[int, ...], dtype: str, low: float, high: float) -> Any:
    """A whole array, a scalar, or an array with some dims of size 1."""
    form = pick.one_of(["array", "array", "scalar", "ones"])
    if form == "scalar":
        shape = ()
    if form == "ones":
        shape = tuple(1 if pick.flag() else n for n in shape)
    return pick.array(shape, dtype, low, high)


@drawn(*_BINARY)
def binary(pick: Pick, name: str) -> Row:
    """Two arrays, of which one may be smaller, or a number."""
    function, dtypes, (low, high), oracle = _BINARY[name]
    dtype, shape = pick.one_of(dtypes), pick.shape()
    x, y = pick.array(shape, dtype, low, high), _operand(pick, shape, dtype, low, high)
    if dtype in INTEGERS and name in ("div", "rem"):
        y = y | 1
    if pick.integer(0, 5) == 5 and name not in ("complex", "mulhi"):
        number = np.asarray(y).flat[0] if pick.flag() else np.zeros((), y.dtype)[()]
        # Division by the number zero is left out for integers.
        number = np.ones((), y.dtype)[()] if dtype in INTEGERS and name in ("div", "rem") else number
        constant = np.asarray(number, y.dtype)
        is_one_op = not (dtype in COMPLEX and name in ("max", "min"))
        return call(name, lambda v: function(v, constant), x, oracle=oracle if is_one_op else "")
    operands = (x, y) if pick.flag() or (dtype in INTEGERS and name in ("div", "rem")) else (y, x)
    # XLA has no order of complex numbers, and broadcasts smaller operands first.
    is_one_op = x.shape == y.shape and not (dtype in COMPLEX and name in ("max", "min"))
    return call(name, function, *operands, oracle=oracle if is_one_op else "")


@drawn("pow")
def power(pick: Pick, name: str) -> Row:
    """Bases of floats, exponents of floats or integers."""
    shape, dtype = pick.shape(), pick.one_of(FLOATS)
    exponent = pick.one_of((dtype, "int32"))
    operands = pick.array(shape, dtype, 0.5, 2), pick.array(shape, exponent, -2, 2)
    return call(name, lax.pow, *operands, oracle="power")


@drawn("eq_to", "le_to", "lt_to")
def total_order(pick: Pick, name: str) -> Row:
    """Comparisons in the total order of floats."""
    shape, primitive = pick.shape(), getattr(lax, name + "_p")
    dtype = pick.one_of(FLOATS)
    return call(name, lambda x, y: primitive.bind(x, y), pick.array(shape, dtype, 0, 2), pick.array(shape, dtype, 0, 2))


@drawn("add_any")
def add_any(pick: Pick, name: str) -> Row:
    """Sums of cotangents."""
    shape, dtype = pick.shape(), pick.one_of(NUMBERS)
    operands = pick.array(shape, dtype), pick.array(shape, dtype)
    return call(name, lambda x, y: primitives.add_jaxvals_p.bind(x, y), *operands, oracle="add")


@drawn("regularized_incomplete_beta")
def incomplete_beta(pick: Pick, name: str) -> Row:
    """Three arrays."""
    shape = pick.shape()
    operands = [pick.array(shape, "float32", 0.5, 2) for _ in range(2)]
    return call(name, lax.betainc, *operands, pick.array(shape, "float32", 0.1, 0.9))


@drawn("clamp")
def clamp(pick: Pick, name: str) -> Row:
    """Bounds: arrays, scalars, numbers."""
    shape, dtype = pick.shape(), pick.one_of((*FLOATS, *INTEGERS))
    x = pick.array(shape, dtype, -9, 9)
    low, high = (pick.array(() if scalar else shape, dtype, 0, 4) for scalar in (pick.flag(), pick.flag()))
    if pick.integer(0, 3) == 3:
        return call(name, lambda v: lax.clamp(np.asarray(1, x.dtype), v, np.asarray(3, x.dtype)), x, oracle="clamp")
    return call(name, lax.clamp, low, x, low + high, oracle="clamp" if low.shape == high.shape else "")


@drawn("select_n")
def select_n(pick: Pick, name: str) -> Row:
    """Scalar and full predicates, truth values and numbers."""
    shape, dtype, count = pick.shape(), pick.one_of(MOVED), pick.one_of((2, 2, 3))
    which_shape = () if pick.flag() else shape
    which = pick.integers(which_shape, 0, count, "int32" if count > 2 else "bool")
    cases = [pick.array(shape, dtype) for _ in range(count)]
    return call(name, lax.select_n, which, *cases, oracle="select" if count == 2 else "")


@drawn("optimization_barrier")
def barrier(pick: Pick, name: str) -> Row:
    """Values of different shapes."""
    values = [pick.array(pick.shape(0), pick.one_of(MOVED)) for _ in range(pick.integer(1, 3))]
    return call(name, lambda *v: lax.optimization_barrier(v), *values)


@drawn("tie")
def tie(pick: Pick, name: str) -> Row:
    """Two values of any shapes."""
    first, second = (pick.array(pick.shape(0), pick.one_of(ANY)) for _ in range(2))
    return call(name, lambda x, y: jax_primitives()[name].bind(x, y), first, second)


@drawn("layout_constraint")
def layout_constraint(pick: Pick, name: str) -> Row:
    """Asks for an order of dims in memory."""
    shape = pick.shape()
    order = Layout(major_to_minor=tuple(range(len(shape))))
    return call(name, lambda v: with_layout_constraint(v, order), pick.array(shape, pick.one_of(ANY)))


@drawn("threefry2x32")
def threefry2x32(pick: Pick, name: str) -> Row:
    """Keys and counters."""
    shape = pick.shape()
    words = [pick.integers(shape, 0, 2**32 - 1, "uint32") for _ in range(4)]
    return call(name, lambda *w: jax.extend.random.threefry2x32_p.bind(*w), *words)
