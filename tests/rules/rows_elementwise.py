"""Element-wise ops, random keys and bits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata

from alpa_lite.trace.passes.plain_jaxpr import user_sharding_p
from tests.rules.jax_primitives import jax_primitives
from tests.rules.row import Row, floats, integers, positive, row, truths


def _constrained(x: Any) -> Any:
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    return lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x", "y")))


def _pinned(x: Any) -> Any:
    return user_sharding_p.bind(x, mesh=(("x", 2), ("y", 4)), dims=(("x",), ("y",)), pinned=True, propagated=False)


def _unary() -> list[Row]:
    table = {
        "abs": (lax.abs, "abs"),
        "ceil": (lax.ceil, "ceil"),
        "cos": (lax.cos, "cosine"),
        "exp": (lax.exp, "exponential"),
        "expm1": (lax.expm1, "exponential_minus_one"),
        "floor": (lax.floor, "floor"),
        "is_finite": (lax.is_finite, "is_finite"),
        "log": (lax.log, "log"),
        "log1p": (lax.log1p, "log_plus_one"),
        "logistic": (lax.logistic, "exponential"),
        "neg": (lax.neg, "negate"),
        "round": (lax.round, "round_nearest_afz"),
        "rsqrt": (lax.rsqrt, "rsqrt"),
        "sign": (lax.sign, "sign"),
        "sin": (lax.sin, "sine"),
        "sqrt": (lax.sqrt, "sqrt"),
        "tanh": (lax.tanh, "tanh"),
        "erf": (lax.erf, ""),
        "erf_inv": (lax.erf_inv, ""),
        "lgamma": (lax.lgamma, ""),
        "square": (lax.square, "multiply"),
        "cbrt": (lax.cbrt, "cbrt"),
    }
    rows = [row(name, fn, positive(8, 4), oracle=oracle) for name, (fn, oracle) in table.items()]
    rows += [
        row("integer_pow", lambda x: lax.integer_pow(x, 3), floats(8, 4), oracle="multiply"),
        row("reduce_precision", lambda x: lax.reduce_precision(x, 5, 10), floats(8, 4), oracle="reduce_precision"),
        row("not", lax.bitwise_not, truths(8, 4), oracle="not"),
        row("copy", lambda x: lax.copy_p.bind(x), floats(8, 4)),
        row("xla_metadata_value", lambda x: set_xla_metadata(x, here="1"), floats(8, 4)),
        row("stop_gradient", lax.stop_gradient, floats(8, 4)),
        row("name", lambda x: checkpoint_name(x, "here"), floats(8, 4)),
        row("device_put", jax.device_put, floats(8, 4)),
        row("sharding_constraint", _constrained, floats(8, 4)),
        row("user_sharding", _pinned, floats(8, 4)),
        row("layout_constraint", lambda x: with_layout_constraint(x, Layout(major_to_minor=(1, 0))), floats(8, 4)),
        row("tie", lambda x, y: jax_primitives()["tie"].bind(x, y), floats(4), floats(8, 4)),
        row("real", lax.real, lax.complex(floats(8, 4), floats(8, 4)), oracle="real"),
        row("imag", lax.imag, lax.complex(floats(8, 4), floats(8, 4)), oracle="imag"),
        row("conj", lambda x: lax.conj(x), lax.complex(floats(8, 4), floats(8, 4))),
        row("convert_element_type narrow", lambda x: x.astype(jnp.bfloat16), floats(8, 4), oracle="convert"),
        row("convert_element_type rounding", lambda x: x.astype(jnp.int32), floats(8, 4), oracle="convert"),
        row("convert_element_type of integers", lambda x: x.astype(jnp.float32), integers(9, 8, 4), oracle="convert"),
        row(
            "bitcast_convert_type",
            lambda x: lax.bitcast_convert_type(x, jnp.int32),
            floats(8, 4),
            oracle="bitcast_convert",
        ),
        row(
            "bitcast_convert_type narrower",
            lambda x: lax.bitcast_convert_type(x, jnp.int8),
            floats(8, 4),
            oracle="bitcast_convert",
        ),
        row(
            "bitcast_convert_type wider",
            lambda x: lax.bitcast_convert_type(x, jnp.int32),
            integers(9, 8, 4, 2).astype(jnp.int16),
            oracle="bitcast_convert",
        ),
    ]
    return rows


def _binary() -> list[Row]:
    x, y = positive(8, 4), positive(8, 4)
    table = {
        "add": (lax.add, "add"),
        "sub": (lax.sub, "subtract"),
        "mul": (lax.mul, "multiply"),
        "div": (lax.div, "divide"),
        "max": (lax.max, "maximum"),
        "min": (lax.min, "minimum"),
        "pow": (lax.pow, "power"),
        "atan2": (lax.atan2, "atan2"),
        "eq": (lax.eq, "compare"),
        "ne": (lax.ne, "compare"),
        "ge": (lax.ge, "compare"),
        "gt": (lax.gt, "compare"),
        "le": (lax.le, "compare"),
        "lt": (lax.lt, "compare"),
        "rem": (lax.rem, "remainder"),
        "nextafter": (lax.nextafter, ""),
        "complex": (lax.complex, "complex"),
        "igamma": (lax.igamma, ""),
    }
    rows = [row(name, fn, x, y, oracle=oracle) for name, (fn, oracle) in table.items()]
    i, j = integers(90, 8, 4, low=-90), integers(9, 8, 4)
    rows += [
        row(name, fn, i, j, oracle=oracle)
        for name, fn, oracle in (
            ("and", lax.bitwise_and, "and"),
            ("or", lax.bitwise_or, "or"),
            ("xor", lax.bitwise_xor, "xor"),
            ("shift_left", lax.shift_left, "shift_left"),
            ("shift_right_logical", lax.shift_right_logical, "shift_right_logical"),
            ("shift_right_arithmetic", lax.shift_right_arithmetic, "shift_right_arithmetic"),
            ("add integers", lax.add, "add"),
            ("mul integers", lax.mul, "multiply"),
        )
    ]
    rows += [
        row("div integers", lax.div, i, j + 1, oracle="divide"),
        row("add_any", lambda a, b: jax.vjp(lambda c: (c, c), a)[1]((a, b))[0], x, y, oracle="add"),
        row("add number", lambda a: lax.add(a, 1.0), x, oracle="add"),
        row("add zero", lambda a: lax.add(a, 0.0), x, oracle="add"),
        row("mul number", lambda a: lax.mul(2.0, a), x, oracle="multiply"),
        row("lt scalar", lambda a, s: lax.lt(a, s), x, jnp.float32(0.5), oracle="compare"),
        row("div by scalar", lax.div, x, jnp.float32(0.5), oracle="divide"),
        row("mul size one", lax.mul, x, positive(1, 4)),
        row("add size one", lax.add, positive(8, 1), x),
        row("clamp", lambda a: lax.clamp(0.3, a, 0.6), x, oracle="clamp"),
        row("clamp arrays", lax.clamp, x, y, x + 1, oracle="clamp"),
        row("select_n", lambda p, a, b: lax.select_n(p, a, b), truths(8, 4), x, y, oracle="select"),
        row("select_n scalar", lambda p, a, b: lax.select_n(p, a, b), truths(), x, y, oracle="select"),
        row("select_n of three", lambda p, *c: lax.select_n(p, *c), integers(3, 8, 4), x, y, x + y),
        row("optimization_barrier", lambda a, b: lax.optimization_barrier((a, b)), x, positive(4)),
        row(
            "threefry2x32",
            lambda *u: jax.extend.random.threefry2x32_p.bind(*u),
            *[integers(99, 8, 4).astype(jnp.uint32)] * 4,
        ),
    ]
    return rows


def _random_ops() -> list[Row]:
    key, keys = jax.random.key(7), jax.random.split(jax.random.key(7), 4)
    rbg = jax.random.key(7, impl="rbg")
    return [
        row("random_bits", lambda k: jax.random.bits(k, (8, 4)), key),
        row("random_bits keys", lambda k: jax.vmap(lambda one: jax.random.bits(one, (4, 2)))(k), keys),
        row("random_bits 8", lambda k: jax.random.bits(k, (8, 4), jnp.uint8), key),
        row("random_bits 16", lambda k: jax.random.bits(k, (8, 4), jnp.uint16), key),
        row("random_bits rbg", lambda k: jax.random.bits(k, (8, 4)), rbg),
        row("random_split", lambda k: jax.random.split(k, 8), key),
        row("random_fold_in", lambda k, d: jax.vmap(jax.random.fold_in)(k, d), keys, integers(9, 4)),
        row("random_fold_in one", lambda k: jax.random.fold_in(k, 3), key),
        row(
            "random_fold_in unsafe",
            lambda k, d: jax.vmap(jax.random.fold_in)(k, d),
            jax.random.split(jax.random.key(7, impl="unsafe_rbg"), 4),
            integers(9, 4),
        ),
        row("random_clone", jax.random.clone, keys),
        row("random_wrap", jax.random.wrap_key_data, integers(99, 4, 2).astype(jnp.uint32)),
        row("random_unwrap", jax.random.key_data, keys),
        row("random_seed", lambda s: jax.vmap(jax.random.key)(s), integers(99, 4)),
        row("random_gamma", lambda k, a: jax.vmap(jax.random.gamma)(k, a), keys, positive(4)),
        row(
            "rng_bit_generator",
            lambda k: lax.rng_bit_generator(k, (8, 4)),
            integers(99, 4).astype(jnp.uint32),
            oracle="rng_bit_generator",
        ),
    ]


ROWS = (*_unary(), *_binary(), *_random_ops())
