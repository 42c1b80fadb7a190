"""One train step by its plan on one device, beside predictions and `jax.jit` (`measured`).

predicted    seconds and peak bytes of the plan for a described device
measured     steps of the plan and of `jax.jit` (both donate the state), in turn, each side first every other time:
             medians of awaited steps; seconds of steps that are launched without waiting                   `timed`
bytes        XLA's account of the plan's programs (`compiled.memory_analysis()`), and `peak_bytes_in_use` of the device
             after the first steps of the plan, of a process that has run nothing before              `peak_bytes`
numbers      parameters, optimizer state and loss after three steps from one start, against `jax.jit`, and `jax.jit`
             against itself, as some kernels add in any order                                         `difference`
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import alpa_lite as al
from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.train import init_state, make_train_step
from alpa_lite.plan.progress import Progress
from benchmarks.accelerator_programs import Case
from cost_models.cluster import Cluster

NUM_COMPARED = 3
"""Steps after which the numbers are compared."""

ROUNDS = 10
"""Steps of each side that are measured, after two that are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program on the GPU; bytes are those of the plan, but for `jit_xla_bytes`.

    `run` tells the runs of kept figures apart.
    """

    name: str
    predicted_seconds: float
    calibrated_seconds: float | None
    plan_seconds: float
    jit_seconds: float
    ratio: float
    plan_streamed_seconds: float
    jit_streamed_seconds: float
    plan_launch_seconds: float | None
    jit_launch_seconds: float | None
    predicted_bytes: float
    peak_bytes: float
    init_peak_bytes: float
    xla_bytes: float
    jit_xla_bytes: float
    difference: float
    largest_difference: float
    moments_difference: float
    jit_difference: float
    loss_difference: float
    equal: bool
    opaque: bool
    planning_seconds: float
    compile_seconds: float
    jit_compile_seconds: float
    run: int = 1


def start(case: Case) -> Any:
    """Return the state before the first step."""
    return init_state(case.model.init(jax.random.key(0)), case.optimizer)


def arguments(case: Case) -> tuple[Any, Any]:
    """Return the shapes of state and batch."""
    return jax.eval_shape(partial(start, case)), case.model.batch_shapes(case.batch_size)


def parallel(case: Case, cluster: Cluster, **options: Any) -> Any:
    """Return the train step of a case for the plan of a cluster, which is made when it is first called."""
    step = make_train_step(case.model.loss_fn, case.optimizer)
    fixed = {"num_microbatches": case.num_microbatches, "donate_argnums": 0, "cache": False}
    return al.parallelize(step, cluster=cluster, **fixed, **options)


def price(case: Case, cluster: Cluster) -> float:
    """Return the seconds of a step as predicted for a cluster of one device, where all manual plans are the same."""
    traced = parallel(case, cluster, planner="data_parallel").trace(*arguments(case))
    return traced.plan().last_plan.prediction.step_seconds


def measured(case: Case, cluster: Cluster, wait: Callable[[], None]) -> Row:
    """Plan a case, wait for the turn before XLA compiles, and measure."""
    shapes = arguments(case)
    traced = jax.jit(make_train_step(case.model.loss_fn, case.optimizer), donate_argnums=0).trace(*shapes)
    began = [time.perf_counter()]

    def follow(progress: Progress) -> None:
        if progress.phase == "compile" and len(began) == 1:
            began.append(time.perf_counter())
            wait()
            began.append(time.perf_counter())

    function = parallel(case, cluster, progress=Progress(None, follow))
    compiled = function.compiled(*shapes)
    seconds = [b - a for a, b in zip(began, [*began[1:], time.perf_counter()], strict=True)]
    init = jax.jit(partial(start, case)).lower().compile()
    batch = jax.device_put(draw_batch(case.model, case.batch_size))
    state, placed = compiled.place(jax.block_until_ready(init()), batch)
    before = peak_bytes()
    state, losses = stepped(function, state, placed)
    peak, resumed = peak_bytes(), time.perf_counter()
    # Called as it was compiled, which takes as long as a call of `jax.jit` and does not compile again.
    jitted = traced.lower().compile()
    jit_compile_seconds = time.perf_counter() - resumed
    account: Any = jitted.memory_analysis()
    other, expected = stepped(jitted, init(), batch)
    found, largest = difference(state.params, other.params, case.atol / case.rtol)
    moments, _ = difference(state.opt_state, other.opt_state)
    noise, _ = difference(stepped(jitted, init(), batch)[0].params, other.params)
    plan = compiled.plan
    return Row(
        name=case.name,
        predicted_seconds=plan.prediction.step_seconds,
        calibrated_seconds=None,
        **timed((function, state, placed), (jitted, other, batch)),
        predicted_bytes=plan.prediction.peak_bytes[0],
        peak_bytes=peak,
        init_peak_bytes=before,
        xla_bytes=compiled.memory_analysis().peak_bytes,
        jit_xla_bytes=account.argument_size_in_bytes
        + account.output_size_in_bytes
        - account.alias_size_in_bytes
        + account.temp_size_in_bytes,
        difference=float(found),
        largest_difference=float(largest),
        moments_difference=float(moments),
        jit_difference=float(noise),
        loss_difference=max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        equal=float(largest) <= case.rtol,
        opaque=bool(plan.opaque),
        planning_seconds=seconds[0],
        compile_seconds=seconds[2],
        jit_compile_seconds=jit_compile_seconds,
    )


def stepped(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, list[float]]:
    """Return the state after the steps whose numbers are compared, and their losses."""
    losses: list[float] = []
    for _ in range(NUM_COMPARED):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return jax.block_until_ready(state), losses


@jax.jit
def difference(found: Any, expected: Any, floor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return |a - b| / |b| of all arrays as one vector, and the largest |a - b| / (|b| + floor) of an element."""
    pairs = [
        (a.astype(jnp.float32), b.astype(jnp.float32))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        if a.size
    ]
    if not pairs:
        return jnp.zeros(()), jnp.zeros(())
    squares = jnp.stack([jnp.stack([jnp.sum(jnp.square(a - b)), jnp.sum(jnp.square(b))]) for a, b in pairs]).sum(0)
    largest = jnp.stack([jnp.max(jnp.abs(a - b) / (jnp.abs(b) + floor)) for a, b in pairs]).max()
    return jnp.sqrt(squares[0] / squares[1]), largest


def peak_bytes() -> float:
    """Return the largest number of bytes that were allocated at once; 0 where the device does not count."""
    return float((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def timed(*sides: tuple[Callable[..., Any], Any, Any]) -> dict[str, Any]:
    """Return medians of steps of a plan and of `jax.jit` in turn, each a function, its first state, and its batch."""
    states = [state for _, state, _ in sides]

    def step(i: int) -> Any:
        states[i], metrics = sides[i][0](states[i], sides[i][2])
        return metrics

    awaited: list[list[float]] = [[], []]
    launches: list[list[float]] = [[], []]
    for number in range(2 + ROUNDS):
        for i in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            metrics = step(i)
            launches[i].append(time.perf_counter() - began)
            jax.block_until_ready((states[i], metrics))
            awaited[i].append(time.perf_counter() - began)
    streamed: list[list[float]] = [[], []]
    for _ in range(2):
        for i in (0, 1):
            began = time.perf_counter()
            for _ in range(ROUNDS):
                step(i)
            jax.block_until_ready(states[i])
            streamed[i].append((time.perf_counter() - began) / ROUNDS)
    found: dict[str, Any] = {
        "ratio": statistics.median(a / b for a, b in zip(awaited[0][2:], awaited[1][2:], strict=True))
    }
    for i, side in enumerate(("plan", "jit")):
        found[f"{side}_seconds"] = statistics.median(awaited[i][2:])
        found[f"{side}_launch_seconds"] = statistics.median(launches[i][2:])
        found[f"{side}_streamed_seconds"] = min(streamed[i])
    return found
