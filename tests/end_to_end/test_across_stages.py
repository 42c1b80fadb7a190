"""Values that several stages read: what an encoder gives to every layer of a decoder, and long skip connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import Auto
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.programs import train

NUM_SAMPLES, LENGTH, WIDTH = 16, 4, 8

_rng = np.random.default_rng(0)


def _array(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * _rng.normal(size=shape)).astype(np.float32)


def _stacked(num_layers: int, *names: str) -> dict[str, np.ndarray]:
    """Square weights of as many layers."""
    return {name: _array(num_layers, WIDTH, WIDTH, scale=0.3) for name in names}


def _block(h: Any, w: Any) -> Any:
    return h + jnp.tanh(h @ w["in"]) @ w["out"]


def _attend(x: Any, memory: Any, w: Any) -> Any:
    scores = jnp.einsum("bsd,btd->bst", x @ w["query"], memory @ w["key"])
    return jax.nn.softmax(scores / WIDTH**0.5) @ (memory @ w["value"])


def encoder_decoder(p: Any, source: Any, target: Any) -> Any:
    """Training of two loops over layers; each layer of the second attends to what the first gives."""

    def loss(p: Any) -> Any:
        memory, _ = jax.lax.scan(lambda h, w: (_block(h, w), None), source, p["encoder"])

        def decode(h: Any, w: Any) -> Any:
            return _block(h + _attend(h, memory, w), w), None

        h, _ = jax.lax.scan(decode, target[:, :-1], p["decoder"])
        return jnp.mean((h @ p["head"] - target[:, 1:]) ** 2)

    return train(loss, p)


def encoder_decoder_arguments(num_encoder_layers: int, num_decoder_layers: int) -> tuple[Any, ...]:
    """Weights, source and target."""
    weights = {
        "encoder": _stacked(num_encoder_layers, "in", "out"),
        "decoder": _stacked(num_decoder_layers, "query", "key", "value", "in", "out"),
        "head": _array(WIDTH, WIDTH),
    }
    return weights, _array(NUM_SAMPLES, LENGTH, WIDTH), _array(NUM_SAMPLES, LENGTH + 1, WIDTH)


def with_long_skips(p: Any, x: Any, y: Any) -> Any:
    """Training of blocks of which the last reads what the first gives, the one before it the second's, and so on."""

    def loss(p: Any) -> Any:
        h, kept = x, []
        for w in p["down"]:
            h = jnp.tanh(h @ w)
            kept.append(h)
        for w in p["up"]:
            h = jnp.tanh((h + kept.pop()) @ w)
        return jnp.mean((h - y) ** 2)

    return train(loss, p)


def _planned_and_run(step: Callable[..., Any], arguments: Any, num_stages: int) -> tuple[al.Plan, Any]:
    cluster = replace(eager_cluster(), devices_per_host=4)
    parallel = al.parallelize(step, cluster=cluster, planner=Auto(pipeline=num_stages), num_microbatches=4)
    got = parallel(*arguments)
    return parallel.last_plan, got


def _stage_of(plan: al.Plan, name: str) -> int:
    return next(i for i, stage in enumerate(plan.stages) if name in stage.specs)


@pytest.mark.parametrize("num_layers", [(4, 4), (2, 6)])
def test_an_encoder_and_a_decoder(num_layers: tuple[int, int], devices: Any) -> None:
    arguments = encoder_decoder_arguments(*num_layers)
    plan, got = _planned_and_run(encoder_decoder, arguments, 4)
    assert len(plan.stages) == 4
    sides = [{part for part in ("encoder", "decoder") if f"p/{part}/" in " ".join(s.specs)} for s in plan.stages]
    assert [len(side) for side in sides] == [1] * 4 and {"encoder"} in sides and sides[2:] == [{"decoder"}] * 2
    assert_same(got, jax.jit(encoder_decoder)(*arguments))


@pytest.mark.parametrize("num_stages", [3, 4])
def test_long_skip_connections(num_stages: int, devices: Any) -> None:
    weights = {side: [_array(WIDTH, WIDTH, scale=0.5) for _ in range(4)] for side in ("down", "up")}
    arguments = weights, _array(NUM_SAMPLES, WIDTH), _array(NUM_SAMPLES, WIDTH)
    plan, got = _planned_and_run(with_long_skips, arguments, num_stages)
    assert len(plan.stages) == num_stages
    # One skip passes by all stages between the first and the last, a shorter one ends before.
    assert (_stage_of(plan, "p/down/0"), _stage_of(plan, "p/up/3")) == (0, num_stages - 1)
    assert 0 <= _stage_of(plan, "p/down/1") < _stage_of(plan, "p/up/2")
    assert_same(got, jax.jit(with_long_skips)(*arguments))
