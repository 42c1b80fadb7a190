"""Replace primitives of other libraries by what they compute.

Comes in: an equation. Goes out: a call, if its primitive has no factor rule and a library other than JAX defines it by
a function of JAX operations; else the equation.

Libraries define primitives to forbid or to notice a transformation (Equinox's ``nonbatchable``), and most of these
compute nothing. When a step is traced all transformations are done, so that nothing is lost. A primitive whose function
cannot be traced stays, and runs whole; one with a rule of the user's (`al.register_rule`) stays as well.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import jax

from alpa_lite import _jax
from alpa_lite.rules import has_rule


def expanded(eqn: Any) -> Any:
    """Return a call in the place of an equation of another library's primitive, else the equation."""
    # JAX's own primitives compile themselves: their `impl` is no plain function.
    function = eqn.primitive.impl
    if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] in ("jax", "jaxlib"):
        return eqn
    # A primitive of the user's own may stand for a kernel that its function only describes.
    if has_rule(eqn.primitive.name) or not _jax.in_a_library(function.__code__.co_filename):
        return eqn

    def run(*operands: Any) -> Any:
        return function(*operands, **eqn.params)

    try:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type) for v in eqn.invars]
        traced = _jax.open_jaxpr(jax.make_jaxpr(jax.jit(run))(*shapes))
    except Exception:  # the function of a library may do anything: look at values, take what is no array
        return eqn
    # Arrays that the function captures may be further operands of the call, depending on JAX's settings.
    takes_operands_alone = len(traced.eqns) == 1 and traced.eqns[0].invars == traced.invars
    if not takes_operands_alone or [v.aval for v in traced.outvars] != [v.aval for v in eqn.outvars]:
        return eqn
    return traced.eqns[0].replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)
