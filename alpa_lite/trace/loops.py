"""The loops of a jaxpr: which go over layers, so that stages may have parts of them, and which over samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alpa_lite import _jax
from alpa_lite.program.wiring import MAX_TRIPS

_HEAVY = {"dot_general", "conv_general_dilated", "ragged_dot_general"}


def loops_over_samples(closed: Any, at_another_size: Any) -> frozenset[int]:
    """Numbers of the scans whose length follows the batch, from the jaxprs of one step at two batch sizes."""
    pairs = zip(*(scans(_jax.prune(_jax.open_jaxpr(c))) for c in (closed, at_another_size)), strict=False)
    return frozenset(i for i, (a, b) in enumerate(pairs) if a.params["length"] != b.params["length"])


def scans(jaxpr: Any) -> list[Any]:
    """The scan equations of an open jaxpr at any depth, outer ones first, each once."""
    found: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        inner = [e for body in _jax.inner_jaxprs(eqn) for e in scans(_jax.open_jaxpr(body))]
        found.update({id(e): e for e in ([eqn] if eqn.primitive.name == "scan" else []) + inner})
    return list(found.values())


def is_over_layers(params: Mapping[str, Any]) -> bool:
    """Whether a scan with these parameters goes over layers: it contracts, and has not too many trips."""
    return params["length"] <= MAX_TRIPS and _has_contraction(params["jaxpr"])


def _has_contraction(closed: Any) -> bool:
    jaxpr = _jax.open_jaxpr(closed)
    return any(
        eqn.primitive.name in _HEAVY or any(_has_contraction(inner) for inner in _jax.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )
