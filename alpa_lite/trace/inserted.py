"""Small jaxprs and equations that the conversion of a jaxpr to a graph inserts."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend import core as jex_core

from alpa_lite._jax import ClosedJaxpr, DType, JaxprEqn, aval_of, open_jaxpr, struct
from alpa_lite.program.ir import MOVES
from alpa_lite.program.memo import memoized


@memoized(entries=10_000)
def barrier_equation(aval: jax.ShapeDtypeStruct) -> JaxprEqn:
    """Return an `optimization_barrier` equation for one value."""
    return open_jaxpr(jax.make_jaxpr(jax.lax.optimization_barrier)(aval)).eqns[0]


#: The primitives of `alpa_lite.program.ir.MOVES`, which `lower.local_indexing` emits as `jax.device_put`.
MOVE_PRIMITIVES = {name: jex_core.Primitive(name) for name in sorted(MOVES)}


@memoized(entries=1_000)
def zeros_jaxpr(shape: tuple[int, ...], dtype: DType) -> ClosedJaxpr:
    """Return a jaxpr that makes an array of zeros."""
    return jax.make_jaxpr(lambda: jax.numpy.zeros(shape, dtype))()


@memoized(entries=1_000)
def sum_jaxpr(shape: tuple[int, ...], dtype: DType) -> ClosedJaxpr:
    """Return a jaxpr that adds two arrays of this shape and dtype."""
    return jax.make_jaxpr(lambda a, b: a + b)(*[struct(shape, dtype)] * 2)


@memoized(entries=1_000)
def join_jaxpr(shapes: tuple[tuple[int, ...], ...], dtype: str, stacked: bool) -> ClosedJaxpr:
    """Return a jaxpr that concatenates arrays along their leading dim, or stacks them along a new one if `stacked`."""
    join = jax.numpy.stack if stacked else jax.numpy.concatenate
    return jax.make_jaxpr(lambda *parts: join(parts))(*[struct(shape, dtype) for shape in shapes])


#: Collectives over named axes, and the equivalent reductions over dims of an array.
REDUCTIONS_OVER_NAMES = {
    "psum": jax.numpy.sum,
    "psum_invariant": jax.numpy.sum,
    "pmax": jax.numpy.max,
    "pmin": jax.numpy.min,
}


@memoized(entries=1_000)
def reduction_jaxpr(collective: str, shape: tuple[int, ...], dtype: str, axes: tuple[int, ...]) -> ClosedJaxpr:
    """Return a jaxpr that reduces an array over the dims `axes` as this collective reduces over named axes."""
    reduce = REDUCTIONS_OVER_NAMES[collective]
    # `jax.numpy.sum` widens small integers, and collectives do not.
    return jax.make_jaxpr(lambda x: reduce(x, axis=axes).astype(x.dtype))(struct(shape, dtype))


def while_any_goes_on(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return a jaxpr with a scalar predicate for a `while` equation with one predicate per element, as `vmap` makes it.

    The loop continues while any element continues; elements that are done retain their values.
    """
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    condition, body = (jex_core.jaxpr_as_fun(eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))

    def run(*operands: jax.Array) -> list[jax.Array]:
        of_cond, of_body = operands[:num_cond], operands[num_cond : num_cond + num_body]

        def trip(carry: Sequence[jax.Array]) -> list[jax.Array]:
            (goes_on,) = condition(*of_cond, *carry)
            new = body(*of_body, *carry)
            # Batch dims lead, so dims of size 1 are appended for `where` to broadcast over the rest of each element.
            wide = [goes_on.reshape(goes_on.shape + (1,) * (x.ndim - goes_on.ndim)) for x in new]
            return [jax.numpy.where(w, x, old) for w, x, old in zip(wide, new, carry, strict=True)]

        carry = list(operands[num_cond + num_body :])
        return jax.lax.while_loop(lambda c: jax.numpy.any(condition(*of_cond, *c)[0]), trip, carry)

    return jax.make_jaxpr(run)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(aval_of, eqn.invars)])
