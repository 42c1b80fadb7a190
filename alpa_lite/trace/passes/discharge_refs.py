"""Replace mutable arrays (`jax.new_ref`) of a traced step by the values that they hold.

Comes in: a closed jaxpr. Goes out: one that computes the same without references. Reads and writes become uses and
results of values; loops and branches that write to a reference carry its value.
"""

from __future__ import annotations

from typing import Any

from alpa_lite import _jax
from alpa_lite.errors import TraceError

_KERNELS = frozenset({"pallas_call", "core_map", "run_state"})
"""Primitives whose bodies are about references by nature, and stay as they are."""


def without_refs(jaxpr: Any, name: str) -> Any:
    """Return a closed jaxpr without mutable arrays; `name` is that of the step, for messages.

    Raises:
        TraceError: the step reads or writes a mutable array that it did not make, or JAX cannot replace one.
    """
    if any(_jax.is_ref(v.aval) for v in _jax.open_jaxpr(jaxpr).constvars):
        raise TraceError(
            f"{name} reads or writes a jax.Ref from outside of it. A parallel step cannot change arrays that are not "
            "its own: pass the value as an argument, and return the new one."
        )
    if not _makes_refs(_jax.open_jaxpr(jaxpr)):
        return jaxpr
    try:
        return _discharged(jaxpr)
    except Exception as error:  # JAX raises various types for primitives that it cannot discharge
        raise TraceError(
            f"{name} makes a mutable array (jax.new_ref) that JAX cannot replace by values: {error}. Carry the value "
            "through the step instead."
        ) from error


def _discharged(jaxpr: Any) -> Any:
    opened = _jax.open_jaxpr(jaxpr)
    # A call whose body makes a reference for itself has none among its operands, and JAX leaves it alone.
    eqns = [eqn.replace(params=_params(eqn.params)) if _is_own(eqn) else eqn for eqn in opened.eqns]
    opened = opened.replace(eqns=eqns)
    whole = jaxpr.replace(jaxpr=opened) if opened is not jaxpr and hasattr(jaxpr, "consts") else opened
    return _jax.discharged(whole) if _has_own_refs(opened) else whole


def _params(params: dict[str, Any]) -> dict[str, Any]:
    return {name: _param(value) for name, value in params.items()}


def _param(value: Any) -> Any:
    if isinstance(value, tuple):
        return _jax.tuple_like(value, map(_param, value))
    return _discharged(value) if hasattr(value, "consts") and hasattr(value, "jaxpr") else value


def _is_own(eqn: Any) -> bool:
    """Return whether the bodies of an equation make references, and get none."""
    return eqn.primitive.name not in _KERNELS and not any(_jax.is_ref(v.aval) for v in eqn.invars)


def _has_own_refs(jaxpr: Any) -> bool:
    return any(_jax.is_ref(v.aval) for eqn in jaxpr.eqns for v in eqn.outvars)


def _makes_refs(jaxpr: Any) -> bool:
    """Return whether a jaxpr, or the body of one of its equations, makes a mutable array."""
    if _has_own_refs(jaxpr):
        return True
    bodies = (_jax.open_jaxpr(b) for eqn in jaxpr.eqns if _is_own(eqn) for b in _jax.inner_jaxprs(eqn))
    return any(map(_makes_refs, bodies))
