"""A plan depends on the request alone: not on plans before it, in another thread, or given up midway."""

from __future__ import annotations

import inspect
import json
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.intra_op.solvers.portfolio import Portfolio
from alpa_lite.program.memo import clear_caches

CLUSTER = al.cluster("p3.16xlarge")
PLANNERS: dict[str, al.planners.Planner] = {
    "auto": al.planners.Auto(),
    "remat": al.planners.Auto(remat="full", pipeline=2),
    "megatron": al.planners.Megatron(tensor=4),
}


def _step(weights: Any, x: Any) -> Any:
    """Training of a network of two loops over layers and a head."""

    def loss(weights: Any) -> Any:
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights["body"])
        return jnp.mean((h @ weights["head"]) ** 2)

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), value


def _traced() -> Any:
    weights = {"body": jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)}
    weights["head"] = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    return al.parallelize(_step, cache=False).trace(weights, jax.ShapeDtypeStruct((64, 256), jnp.float32))


def _planned(traced: Any, name: str) -> str:
    """Return the plan of a traced step as text, without the seconds that solvers took."""
    plan = traced.plan(cluster=CLUSTER, planner=PLANNERS[name], cache=False).last_plan
    data = plan.to_json()
    data["solver"].pop("seconds", None)
    return json.dumps(data, sort_keys=True)


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    """The plan of each planner, made in a process that remembers nothing."""
    found: dict[str, str] = {}
    for name in PLANNERS:
        clear_caches()
        found[name] = _planned(_traced(), name)
    return found


def test_a_step_planned_twice_has_one_plan(wanted: dict[str, str]) -> None:
    traced = _traced()
    # Each planner follows others that asked for other numbers of micro-batches.
    for name in (*PLANNERS, *reversed(PLANNERS)):
        assert _planned(traced, name) == wanted[name], name


def test_threads_plan_alike(wanted: dict[str, str]) -> None:
    traced, found = _traced(), list[tuple[str, str]]()
    clear_caches()
    together = threading.Barrier(3)

    def plan(name: str, step: Any) -> None:
        together.wait(timeout=60)
        found.append((name, _planned(step, name)))

    # Two plans of one traced step, and one of another.
    threads = [
        threading.Thread(target=plan, args=of) for of in (("auto", traced), ("remat", traced), ("auto", _traced()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(plan == wanted[name] for name, plan in found)


@contextmanager
def _interrupted_at(call: int) -> Iterator[None]:
    """Raise `KeyboardInterrupt` at a call of a function of the package; nothing if there are fewer."""
    left = [call]

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "alpa_lite" in frame.f_code.co_filename:
            left[0] -= 1
            # Python closes generators by calling them, and drops what is raised then.
            if left[0] <= 0 and not frame.f_code.co_flags & inspect.CO_GENERATOR:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@contextmanager
def _failing_at(call: int) -> Iterator[None]:
    """Raise an error in a call of the solver."""
    solve: Callable[..., Any] = Portfolio.solve
    left = [call]

    def failing(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("the solver broke")
        return solve(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Portfolio, "solve", failing)
        yield


@pytest.mark.parametrize(
    "seed", [0, 1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_a_search_that_was_given_up_leaves_nothing_behind(seed: int, wanted: dict[str, str]) -> None:
    draw, traced = random.Random(seed), _traced()
    clear_caches()
    given_up = 0
    for _ in range(4):
        number = round(10 ** draw.uniform(2, 5.5))
        for giving_up in (_interrupted_at(number), _failing_at(draw.randint(1, 20))):
            try:
                with giving_up:
                    _planned(traced, "auto")
            except (KeyboardInterrupt, RuntimeError):
                given_up += 1
    assert given_up >= 4
    assert _planned(traced, "auto") == wanted["auto"]
