"""One small call per primitive and variant: the table behind the tests of rules and of local lowering.

Every row's function holds one equation of the named primitive whose operands are the row's arguments or numbers (other
equations are ignored). Dims that may be split are multiples of 4 or 8, so that a 2 × 4 mesh can split them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from alpa_lite import _jax
from alpa_lite.graph.from_jaxpr import from_jaxpr
from alpa_lite.rules import OpView, Rule, rule_of


@dataclass(frozen=True, kw_only=True)
class Row:
    """A call, and the operation that Shardy sees in it ("" = it has no rule there)."""

    name: str
    primitive: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    oracle: str

    @cached_property
    def case(self) -> Case:
        """The equation of the row's primitive."""
        closed = jax.make_jaxpr(self.function)(*self.arguments)
        traced = from_jaxpr(closed, [f"argument {i}" for i in range(len(self.arguments))])
        graph = traced.graph
        op = next(op for op in graph.ops if op.primitive == self.primitive)
        view = OpView(
            primitive=op.primitive,
            operands=graph.operands(op),
            results=graph.results(op),
            params=op.params,
            bodies=op.bodies,
        )
        arrays = dict(zip(graph.inputs, (*self.arguments, *traced.constants), strict=True))
        for earlier in graph.ops[: op.id]:
            operands = [_array(graph.values[i], arrays) for i in earlier.operands]
            equation = traced.equations[earlier.id]
            arrays.update(zip(earlier.results, _jax.bind(equation.primitive, equation.params, operands), strict=True))
        equation = traced.equations[op.id]
        return Case(
            view=view,
            rule=rule_of(view),
            primitive=equation.primitive,
            params=equation.params,
            operands=tuple(_array(graph.values[i], arrays) for i in op.operands),
        )


@dataclass(frozen=True, kw_only=True)
class Case:
    """One equation with arrays for its operands."""

    view: OpView
    rule: Rule
    primitive: Any
    params: Any
    operands: tuple[Any, ...]

    def bind(self, *operands: Any) -> list[Any]:
        """The whole, unsharded op."""
        return _jax.bind(self.primitive, self.params, operands)


def _array(value: Any, arrays: dict[int, Any]) -> Any:
    return arrays[value.id] if value.literal is None else jnp.asarray(value.literal, value.dtype)


_random = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    """Numbers around 0."""
    return jnp.asarray(_random.normal(size=shape), jnp.float32)


def positive(*shape: int) -> Any:
    """Numbers in (0.1, 0.9)."""
    return jnp.asarray(_random.uniform(0.1, 0.9, size=shape), jnp.float32)


def integers(high: int, *shape: int, low: int = 0) -> Any:
    """Whole numbers in [low, high)."""
    return jnp.asarray(_random.integers(low, high, size=shape), jnp.int32)


def truths(*shape: int) -> Any:
    """Truth values."""
    return jnp.asarray(_random.integers(0, 2, size=shape), bool)


def row(name: str, function: Callable[..., Any], *arguments: Any, oracle: str = "", primitive: str = "") -> Row:
    """A row; the primitive is the first word of the name unless given."""
    primitive = primitive or name.split(" ")[0]
    return Row(name=name, primitive=primitive, function=function, arguments=arguments, oracle=oracle)


def _of(primitive: Any, **params: Any) -> Callable[..., Any]:
    return lambda *operands: primitive.bind(*operands, **params)


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
        "logistic": (lax.logistic, "logistic"),
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
        row("stop_gradient", lax.stop_gradient, floats(8, 4)),
        row("name", lambda x: checkpoint_name(x, "here"), floats(8, 4)),
        row("real", lax.real, lax.complex(floats(8, 4), floats(8, 4)), oracle="real"),
        row("imag", lax.imag, lax.complex(floats(8, 4), floats(8, 4)), oracle="imag"),
        row("conj", lambda x: lax.conj(x), lax.complex(floats(8, 4), floats(8, 4))),
        row("convert_element_type narrow", lambda x: x.astype(jnp.bfloat16), floats(8, 4), oracle="convert"),
        row("convert_element_type rounding", lambda x: x.astype(jnp.int32), floats(8, 4), oracle="convert"),
        row("convert_element_type of integers", lambda x: x.astype(jnp.float32), integers(9, 8, 4), oracle="convert"),
        row("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, jnp.int32), floats(8, 4), oracle="bitcast_convert"),
        row("bitcast_convert_type narrower", lambda x: lax.bitcast_convert_type(x, jnp.int8), floats(8, 4), oracle="bitcast_convert"),
        row("bitcast_convert_type wider", lambda x: lax.bitcast_convert_type(x, jnp.int32), integers(9, 8, 4, 2).astype(jnp.int16), oracle="bitcast_convert"),
    ]  # fmt: skip
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
        row("threefry2x32", lambda *u: jax.extend.random.threefry2x32_p.bind(*u), *[integers(99, 8, 4).astype(jnp.uint32)] * 4),
    ]  # fmt: skip
    return rows


def _dot(lhs: Any, rhs: Any, *, contract: Any, batch: Any = ((), ())) -> Callable[..., Any]:
    return lambda a, b: lax.dot_general(a, b, (contract, batch))


def _contraction() -> list[Row]:
    a, b = floats(4, 8), floats(8, 16)
    attention = floats(4, 8, 2, 4), floats(4, 16, 2, 4)
    sizes = jnp.asarray([3, 1, 0, 7], jnp.int32)
    ragged = floats(16, 4), floats(4, 4, 8), sizes
    rows = [
        row("dot_general", _dot(a, b, contract=((1,), (0,))), a, b, oracle="dot_general"),
        row("dot_general integers", _dot(a, b, contract=((1,), (0,))), integers(9, 4, 8), integers(9, 8, 4), oracle="dot_general"),
        row("dot_general batched", _dot(*attention, contract=((3,), (3,)), batch=((0, 2), (0, 2))), *attention, oracle="dot_general"),
        row("dot_general two contracted", _dot(a, b, contract=((0, 1), (1, 0))), floats(4, 8, 2), floats(8, 4, 4), oracle="dot_general"),
        row("dot_general vector", _dot(a, b, contract=((0,), (0,))), floats(8), b, oracle="dot_general"),
        row("ragged_dot_general", lax.ragged_dot, *ragged),
        row("ragged_dot_general full", lax.ragged_dot, *ragged[:2], sizes.at[3].add(5)),
        row("ragged_dot_general to rows", lambda w, c, s: jax.linear_transpose(lambda x: lax.ragged_dot(x, w, s), ragged[0])(c)[0], ragged[1], floats(16, 8), sizes),
        row("ragged_dot_general to weights", lambda x, c, s: jax.linear_transpose(lambda w: lax.ragged_dot(x, w, s), ragged[1])(c)[0], ragged[0], floats(16, 8), sizes),
    ]  # fmt: skip
    # Eigenvalues well apart: their order and the signs of the factors are then settled.
    matrix = floats(4, 3, 3)
    definite = matrix @ matrix.mT + 3 * jnp.eye(3)
    rows += [
        row("cholesky", lambda x: lax.linalg.cholesky(x, symmetrize_input=False), definite),
        row("triangular_solve", lambda x, y: lax.linalg.triangular_solve(x, y, left_side=True, lower=True), definite, floats(4, 3, 8)),
        row("lu", lax.linalg.lu, definite),
        row("qr", lambda x: lax.linalg.qr(x), definite),
        row("eigh", lambda x: lax.linalg.eigh(x, symmetrize_input=False), definite),
        row("svd", lambda x: lax.linalg.svd(x, compute_uv=False), definite),
        row("tridiagonal_solve", lax.linalg.tridiagonal_solve, positive(4, 3), 4 + positive(4, 3), positive(4, 3), floats(4, 3, 2)),
    ]  # fmt: skip
    return rows


def _reductions() -> list[Row]:
    x = positive(8, 4, 3)
    table = {
        "reduce_sum": lambda v: lax.reduce_sum_p.bind(v, axes=(0, 2), out_sharding=None),
        "reduce_max": _of(lax.reduce_max_p, axes=(0, 2), out_sharding=None),
        "reduce_min": _of(lax.reduce_min_p, axes=(1,), out_sharding=None),
        "reduce_prod": _of(lax.reduce_prod_p, axes=(0,)),
    }
    rows = [row(name, fn, x, oracle="reduce") for name, fn in table.items()]
    rows += [
        row("reduce_max not a number", table["reduce_max"], x.at[3, 1, 2].set(jnp.nan), oracle="reduce"),
        row("reduce_min not a number", table["reduce_min"], x.at[3, 1, 2].set(jnp.nan), oracle="reduce"),
        row("reduce_max signed", table["reduce_max"], floats(8, 4, 3), oracle="reduce"),
        row("reduce_max bfloat16", table["reduce_max"], floats(8, 4, 3).astype(jnp.bfloat16), oracle="reduce"),
        row("reduce_max integers", table["reduce_max"], integers(99, 8, 4, 3, low=-99), oracle="reduce"),
        row("reduce_sum integers", table["reduce_sum"], integers(99, 8, 4, 3), oracle="reduce"),
        row("reduce_and", _of(lax.reduce_and_p, axes=(0,)), truths(8, 4), oracle="reduce"),
        row("reduce_or", _of(lax.reduce_or_p, axes=(0, 1)), truths(8, 4), oracle="reduce"),
        row("reduce_xor", _of(lax.reduce_xor_p, axes=(0,)), truths(8, 4), oracle="reduce"),
        row("reduce_and integers", _of(lax.reduce_and_p, axes=(0,)), integers(99, 8, 4), oracle="reduce"),
        row("argmax", lambda v: lax.argmax(v, 1, jnp.int32), floats(8, 4), oracle="reduce"),
        row("argmin", lambda v: lax.argmin(v, 0, jnp.int32), floats(8, 4), oracle="reduce"),
        row("reduce", lambda v: lax.reduce(v, jnp.float32(0), lambda p, q: lax.max(p, q * 2), (0,)), positive(8, 4), oracle="reduce"),
        row("cumsum", lambda v: lax.cumsum(v, 1), floats(8, 4)),
        row("cumsum integers", lambda v: lax.cumsum(v, 1, reverse=True), integers(9, 8, 4)),
        row("cumprod", lambda v: lax.cumprod(v, 0), floats(4, 8)),
        row("cummax", lambda v: lax.cummax(v, 0), floats(4, 8)),
        row("cumlogsumexp", lambda v: lax.cumlogsumexp(v, 0), floats(4, 8)),
        row("sort", lambda v, w: lax.sort((v, w), dimension=1), floats(8, 4), floats(8, 4), oracle="sort"),
        row("top_k", lambda v: lax.top_k(v, 2), floats(8, 4)),
        row("approx_top_k", lambda v: lax.approx_max_k(v, 2), floats(8, 4)),
        row("fft", lambda v: lax.fft(v, "FFT", (4,)), lax.complex(floats(8, 4), floats(8, 4)), oracle="fft"),
        row("fft real", lambda v: lax.fft(v, "RFFT", (4,)), floats(8, 4), oracle="fft"),
    ]  # fmt: skip
    return rows + _windows()


def _windows() -> list[Row]:
    image = floats(2, 8, 8, 4)
    pool = dict(window_dimensions=(1, 2, 2, 1), window_strides=(1, 2, 2, 1))
    overlapping = dict(window_dimensions=(1, 3, 3, 1), window_strides=(1, 1, 1, 1))
    total = lambda **kw: lambda v: lax.reduce_window(v, 0.0, lax.add, padding="VALID", **kw)  # noqa: E731
    largest = lambda **kw: lambda v: lax.reduce_window(v, -jnp.inf, lax.max, padding="SAME", **kw)  # noqa: E731
    transposed = lambda v, c: jax.vjp(largest(**pool), v)[1](c)[0]  # noqa: E731
    overlapped = lambda v, c: jax.vjp(largest(**overlapping), v)[1](c)[0]  # noqa: E731
    tangent = lambda v, t: jax.jvp(largest(**pool), (v,), (t,))[1]  # noqa: E731
    return [
        row("reduce_window_sum", total(**pool), image, oracle="reduce_window"),
        row("reduce_window_sum overlapping", total(**overlapping), image, oracle="reduce_window"),
        row("reduce_window_max", largest(**pool), image, oracle="reduce_window"),
        row("reduce_window_max overlapping", largest(**overlapping), image, oracle="reduce_window"),
        row("reduce_window", lambda v: lax.reduce_window(v, 1.0, lax.mul, padding="VALID", **pool), image, oracle="reduce_window"),
        row("select_and_scatter_add", transposed, image, floats(2, 4, 4, 4), oracle="select_and_scatter"),
        row("select_and_scatter_add overlapping", overlapped, image, floats(2, 8, 8, 4)),
        row("select_and_gather_add", tangent, image, floats(2, 8, 8, 4)),
    ]  # fmt: skip


def _layout() -> list[Row]:
    x = floats(8, 4)
    reshape = lambda *shape: lambda v: lax.reshape(v, shape)  # noqa: E731
    zero, one = np.float32(0), np.float32(1)
    return [
        row("broadcast_in_dim", lambda v: lax.broadcast_in_dim(v, (2, 8, 4), (1, 2)), x, oracle="broadcast_in_dim"),
        row("broadcast_in_dim expanding", lambda v: lax.broadcast_in_dim(v, (8, 4, 4), (0, 2)), floats(1, 4), oracle="broadcast_in_dim"),
        row("broadcast_in_dim scalar", lambda v: lax.broadcast_in_dim(v, (8, 4), ()), jnp.float32(3), oracle="broadcast_in_dim"),
        row("transpose", lambda v: lax.transpose(v, (2, 0, 1)), floats(8, 4, 2), oracle="transpose"),
        row("squeeze", lambda v: lax.squeeze(v, (1,)), floats(8, 1, 4), oracle="reshape"),
        row("reshape merge", reshape(32, 2), floats(8, 4, 2), oracle="reshape"),
        row("reshape split", reshape(8, 4, 2), floats(32, 2), oracle="reshape"),
        row("reshape mixed", reshape(8, 12), floats(6, 16), oracle="reshape"),
        row("reshape without common major", reshape(3, 8), floats(4, 6), oracle="reshape"),
        row("reshape coprime", reshape(5, 3, 4), floats(3, 5, 4), oracle="reshape"),
        row("reshape ones", reshape(1, 8, 1, 4), floats(8, 1, 4), oracle="reshape"),
        row("reshape heads", reshape(4, 8, 2, 4), floats(4, 8, 8), oracle="reshape"),
        row("reshape permuted", lambda v: lax.reshape(v, (32, 2), dimensions=(1, 0, 2)), floats(4, 8, 2)),
        row("reshape to scalar", reshape(), floats(1, 1), oracle="reshape"),
        row("slice", lambda v: lax.slice(v, (0, 1), (8, 3)), x, oracle="slice"),
        row("slice strided", lambda v: lax.slice(v, (1, 0), (8, 4), (2, 1)), x, oracle="slice"),
        row("pad", lambda v: lax.pad(v, zero, ((0, 0, 0), (1, 2, 0))), x, oracle="pad"),
        row("pad interior", lambda v: lax.pad(v, one, ((0, 0, 1), (0, 0, 0))), x, oracle="pad"),
        row("pad negative", lambda v: lax.pad(v, zero, ((0, 0, 0), (-1, 1, 0))), x, oracle="pad"),
        row("pad value", lambda v, p: lax.pad(v, p, ((0, 0, 0), (1, 2, 0))), x, jnp.float32(2), oracle="pad"),
        row("rev", lambda v: lax.rev(v, (1,)), x, oracle="reverse"),
        row("concatenate", lambda v, w: lax.concatenate((v, w), 1), x, floats(8, 3), oracle="concatenate"),
        row("concatenate alike", lambda v, w: lax.concatenate((v, w), 0), x, x, oracle="concatenate"),
        row("split", lambda v: lax.split(v, (1, 3), 1), x),
        row("tile", lambda v: lax.tile(v, (1, 4)), x),
        row("tile new major", lambda v: lax.tile(v, (2, 1)), x),
        row("stack", lambda v, w: jnp.stack([v, w], 1), x, x, primitive="stack"),
        row("unstack", lambda v: jnp.unstack(v, axis=1), x, primitive="unstack"),
        row("iota", lambda: lax.broadcasted_iota(jnp.int32, (8, 4), 0)),
        row("iota bfloat16", lambda: lax.broadcasted_iota(jnp.bfloat16, (512, 4), 0)),
        row("empty", lambda: lax.empty((8, 4), jnp.float32)),
    ]  # fmt: skip


def _indexing() -> list[Row]:
    table = floats(8, 4)
    ids = jnp.asarray([[3, 0, 7, 2], [-1, 5, 8, 1], [0, 0, 99, 6], [7, 7, -9, 4]], jnp.int32)
    modes = ("fill", "clip", "promise_in_bounds")
    take = lambda mode: lambda v, i: _gathered(v, i, mode=mode)  # noqa: E731
    safe = {mode: jnp.clip(ids, 0, 7) if mode == "promise_in_bounds" else ids for mode in modes}
    rows = [row(f"gather {mode}", take(mode), table, safe[mode][..., None], oracle="gather") for mode in modes]
    pairs = jnp.stack([ids, ids[::-1]], -1)
    rows += [
        row("gather fill value", lambda v, i: _gathered(v, i, mode="fill", fill_value=-3), table, ids[..., None], oracle="gather"),
        row("gather unsigned", take("fill"), table, ids.astype(jnp.uint32)[..., None], oracle="gather"),
        row("gather integers", take("fill"), integers(99, 8, 4), ids[..., None], oracle="gather"),
        row("gather truths", take("fill"), truths(8, 4), ids[..., None], oracle="gather"),
        row("gather window of one", lambda v, i: _gathered(v, i, mode="fill", collapsed=(), offset=(2, 3)), table, ids[..., None], oracle="gather"),
        row("gather along axis", lambda v, i: jnp.take_along_axis(v, i, 1), table, jnp.abs(ids[:, :2] % 4).repeat(2, 0), primitive="gather", oracle="gather"),
        row("gather two dims", lambda v, i: _gathered(v, i, mode="fill", collapsed=(0, 1), offset=(2,), window=(1, 1, 4), dims=(0, 1)), floats(8, 8, 4), pairs, oracle="gather"),
        row("gather part", lambda v, i: _gathered(v, i, mode="clip", collapsed=(), offset=(2, 3), window=(2, 4)), table, ids[..., None], oracle="gather"),
        row("dynamic_slice", lambda v, i: lax.dynamic_slice(v, (i, 0), (3, 4)), table, jnp.int32(6), oracle="dynamic_slice"),
        row("dynamic_update_slice", lambda v, u, i: lax.dynamic_update_slice(v, u, (i, 1)), table, floats(3, 2), jnp.int32(2), oracle="dynamic_update_slice"),
        row("dynamic_update_slice clamped", lambda v, u, i: lax.dynamic_update_slice(v, u, (i, 0)), table, floats(5, 4), jnp.int32(7), oracle="dynamic_update_slice"),
        row("dynamic_update_slice whole", lambda v, u, i: lax.dynamic_update_slice(v, u, (i, 3)), table, floats(8, 4), jnp.int32(7), oracle="dynamic_update_slice"),
    ]  # fmt: skip
    return rows + _scatters(table, ids)


def _gathered(v: Any, indices: Any, *, mode: str, collapsed: Any = (0,), offset: Any = (2,), window: Any = (1, 4), dims: Any = (0,), fill_value: Any = None) -> Any:  # fmt: skip
    numbers = lax.GatherDimensionNumbers(offset_dims=offset, collapsed_slice_dims=collapsed, start_index_map=dims)
    return lax.gather(v, indices, numbers, window, mode=mode, fill_value=fill_value)


def _scatters(table: Any, ids: Any) -> list[Row]:
    numbers = lax.ScatterDimensionNumbers((2,), (0,), (0,))
    scatters = {
        "scatter-add": lax.scatter_add,
        "scatter-mul": lax.scatter_mul,
        "scatter-min": lax.scatter_min,
        "scatter-max": lax.scatter_max,
        "scatter-sub": lax.scatter_sub,
    }
    index, updates = ids[..., None], floats(4, 4, 4)
    once = jnp.asarray([[3, 0, 7, 2], [-1, 5, 8, 1]], jnp.int32)[..., None]
    rows = [
        row(name, lambda v, i, u, f=f: f(v, i, u, numbers, mode="fill"), table, index, updates, oracle="scatter")
        for name, f in scatters.items()
    ]
    batched = lax.ScatterDimensionNumbers((), (1,), (1,), operand_batching_dims=(0,), scatter_indices_batching_dims=(0,))
    kept = lax.ScatterDimensionNumbers((2, 3), (), (0,))
    rows += [
        row("scatter-add clip", lambda v, i, u: lax.scatter_add(v, i, u, numbers, mode="clip"), table, index, updates, oracle="scatter"),
        row("scatter-add integers", lambda v, i, u: lax.scatter_add(v, i, u, numbers, mode="drop"), integers(9, 8, 4), index, integers(9, 4, 4, 4), oracle="scatter"),
        row("scatter-add batched", lambda v, i, u: lax.scatter_add(v, i, u, batched), table, jnp.abs(ids[:, :2, None] % 4).repeat(2, 0), floats(8, 2), oracle="scatter"),
        row("scatter-add part", lambda v, i, u: lax.scatter_add(v, i, u, kept, mode="clip"), table, index, floats(4, 4, 2, 4), oracle="scatter"),
        row("scatter", lambda v, i, u: lax.scatter(v, i, u, numbers, mode="fill"), table, once, floats(2, 4, 4), oracle="scatter"),
        row("scatter unsigned", lambda v, i, u: lax.scatter(v, i, u, numbers, mode="fill"), table, once.astype(jnp.uint32), floats(2, 4, 4), oracle="scatter"),
        row("scatter promised", lambda v, i, u: lax.scatter(v, i, u, numbers, mode="promise_in_bounds", unique_indices=True), table, once[:1], floats(1, 4, 4), oracle="scatter"),
    ]  # fmt: skip
    return rows


def _convolutions() -> list[Row]:
    image, kernel = floats(4, 4, 8, 8), floats(8, 4, 3, 3)
    point, patch = floats(8, 4, 1, 1), floats(8, 4, 2, 2)

    def conv(stride: int = 1, padding: Any = "SAME", **kw: Any) -> Callable[..., Any]:
        return lambda a, b: lax.conv_general_dilated(a, b, (stride, stride), padding, **kw)

    def to_input(f: Callable[..., Any], x: Any, w: Any) -> Callable[..., Any]:
        return lambda weight, ct: jax.linear_transpose(lambda a: f(a, weight), x)(ct)[0]

    def to_kernel(f: Callable[..., Any], x: Any, w: Any) -> Callable[..., Any]:
        return lambda image, ct: jax.linear_transpose(lambda b: f(image, b), w)(ct)[0]

    variants = {
        "": (conv(), image, kernel),
        "strided": (conv(2), image, kernel),
        "valid": (conv(1, "VALID"), image, kernel),
        "point": (conv(), image, point),
        "point strided": (conv(2, "VALID"), image, point),
        "patches": (conv(2, "VALID"), image, patch),
        "depthwise": (conv(feature_group_count=4), image, floats(4, 1, 3, 3)),
        "grouped": (conv(feature_group_count=4), floats(4, 8, 4, 4), floats(8, 2, 3, 3)),
        "batch groups": (conv(batch_group_count=4), floats(8, 4, 4, 4), floats(8, 4, 3, 3)),
        "channels last": (conv(dimension_numbers=("NHWC", "HWIO", "NHWC")), floats(4, 8, 8, 4), floats(3, 3, 4, 8)),
    }
    rows: list[Row] = []
    for name, (f, x, w) in variants.items():
        out = floats(*jax.eval_shape(f, x, w).shape)
        label = f"conv_general_dilated {name}".strip()
        rows.append(row(label, f, x, w, oracle="convolution"))
        rows.append(row(f"{label} to input", to_input(f, x, w), w, out, oracle="convolution"))
        rows.append(row(f"{label} to kernel", to_kernel(f, x, w), x, out, oracle="convolution"))
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
        row("random_wrap", jax.random.wrap_key_data, integers(99, 4, 2).astype(jnp.uint32)),
        row("random_unwrap", jax.random.key_data, keys),
        row("random_seed", lambda s: jax.vmap(jax.random.key)(s), integers(99, 4)),
        row("random_gamma", lambda k, a: jax.vmap(jax.random.gamma)(k, a), keys, positive(4)),
        row("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (8, 4)), integers(99, 4).astype(jnp.uint32), oracle="rng_bit_generator"),
    ]  # fmt: skip


ROWS = (
    *_unary(),
    *_binary(),
    *_contraction(),
    *_reductions(),
    *_layout(),
    *_indexing(),
    *_convolutions(),
    *_random_ops(),
)


def names(rows: tuple[Row, ...]) -> list[str]:
    """Test ids."""
    return [r.name.replace(" ", "-") for r in rows]
