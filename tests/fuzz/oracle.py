"""The oracle: `jax.jit` on all leaves, with tolerances that come from float64.

Where a result in micro-batches differs from that of `jax.jit` by more than a small tolerance, the step runs once more
under `jax.jit` in float64. Rounding explains an error that is of the size of the one that `jax.jit` itself makes in
float32; a result is wrong only where its error is `ROUNDINGS` times that, and `RELATIVE` of the leaf's largest element
besides.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al

CLUSTER = al.cluster("p3.16xlarge")
SMALL = 2e-5
"""Relative differences that are not asked about any further."""
RELATIVE = 1e-4
ROUNDINGS = 20.0
NUDGE = 2.5
"""Of the rounding of a dtype: how far arguments are moved to see what rounding does to results."""
COMPARABLE = 1e-2
"""Where `jax.jit` in float32 is farther than this from float64, the two do not compute the same: draws differ with the
dtype. There results are compared directly."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a step is run: a planner, and the number of devices that it plans for."""

    planner: al.planners.Planner
    num_devices: int

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.planner.name} on {self.num_devices}"


def setups(microbatch_size: int) -> list[Setup]:
    """Cheap setups whose data parallelism fits micro-batches of a size."""
    replicas = min(microbatch_size, 2)
    return [
        Setup(planner=al.planners.DataParallel(), num_devices=replicas),
        Setup(planner=al.planners.Megatron(tensor=2), num_devices=2),
        Setup(planner=al.planners.Pipeline(pipeline=2), num_devices=2 * replicas),
    ]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a step in micro-batches.

    Attributes:
        kind: "equal", "wrong", or one of these:
            "refused": a `TraceError`, which is about the step.
            "unplanned": the planner says that it cannot.
            "crashed": any other error, one that blames the plan, the devices or alpa_lite, too.
            "unstable": not farther from `jax.jit` than that is from itself, with arguments that differ by a rounding.
            "unusable": `jax.jit` itself fails, or gives no finite numbers.
            "died": the process has ended (see `pool`).
        detail: the sentence of a refusal or an error, or where the results differ.
        error: largest relative difference of any leaf.
    """

    kind: str
    detail: str = ""
    error: float = 0.0


def compare(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    setup: Setup,
    num_microbatches: int,
    batch_argnums: Any = None,
    donate_argnums: tuple[int, ...] = (),
    calls: int = 2,
    tolerance: float = 0.0,
) -> Outcome:
    """Run a step in micro-batches and by `jax.jit`, and compare all leaves of all calls.

    Args:
        calls: how often the step runs; its first result takes the place of the first argument.
        tolerance: relative difference that is allowed in any case, as that of parts in bfloat16.
    """
    parallel = al.parallelize(
        step,
        cluster=replace(CLUSTER, devices_per_host=setup.num_devices),
        planner=setup.planner,
        num_microbatches=num_microbatches,
        batch_argnums=batch_argnums,
        donate_argnums=donate_argnums,
    )
    given = [jax.tree.map(jnp.copy, a) if i in donate_argnums else a for i, a in enumerate(args)]
    failure, got = None, list[Any]()
    try:
        got = run(parallel, given, calls, donate_argnums)
    except al.AlpaLiteError as error:
        kind = "refused" if isinstance(error, al.errors.TraceError) else "crashed"
        kind = "unplanned" if type(error) in (al.errors.PlanError, al.errors.InfeasibleError) else kind
        try:
            jax.jit(step).lower(*args)
        except Exception:
            kind = "unusable"
        return Outcome(kind=kind, detail=f"{type(error).__name__}: {error}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        detail = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        failure = Outcome(kind="crashed", detail=detail)
    try:
        want = run(jax.jit(step), args, calls)
    except Exception as error:
        return Outcome(kind="unusable", detail=f"{type(error).__name__}: {error}")
    if failure is not None:
        return failure
    if not all(np.isfinite(a).all() for a in want if a.dtype.kind == "f"):
        return Outcome(kind="unusable", detail="jax.jit gives numbers that are not finite")
    verdict = judge(got, want, lambda: run_in_float64(step, args, calls), tolerance)
    if verdict.kind == "wrong" and _is_unstable(step, args, calls, got, want):
        return replace(verdict, kind="unstable")
    return verdict


def _is_unstable(step: Callable[..., Any], args: Sequence[Any], calls: int, got: list[Any], want: list[Any]) -> bool:
    """Whether `jax.jit` itself changes as much when its arguments change by a rounding or two: an argmax flips."""
    compiled, rng = jax.jit(step), np.random.default_rng(0)

    def nudged(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        move = NUDGE * jnp.finfo(leaf.dtype).eps * rng.normal(size=leaf.shape)
        return leaf * jnp.asarray(1 + move, leaf.dtype)

    errors = [difference(a, b) for a, b in zip(got, want, strict=True)]
    moved = [0.0] * len(want)
    for _ in range(3):
        other = run(compiled, jax.tree.map(nudged, list(args)), calls)
        moved = [max(m, difference(a, b)) for m, a, b in zip(moved, other, want, strict=True)]
    return all(error <= max(SMALL, ROUNDINGS * move) for error, move in zip(errors, moved, strict=True))


def run(step: Callable[..., Any], args: Sequence[Any], calls: int, donated: tuple[int, ...] = ()) -> list[Any]:
    """The leaves of some calls in a row, each of which gets the first result of the one before as its state."""
    args, leaves = list(args), []
    for _ in range(calls):
        result = step(*args)
        leaves += [np.asarray(numbers(leaf)) for leaf in jax.tree.leaves(result)]
        if isinstance(result, tuple) and jax.tree.structure(result[0]) == jax.tree.structure(args[0]):
            args[0] = result[0]
        elif donated:
            break
    return leaves


def run_in_float64(step: Callable[..., Any], args: Sequence[Any], calls: int) -> list[Any] | None:
    """The same in float64; None where the step does not run there (it fixes its own dtypes)."""
    with jax.enable_x64(True):
        wide = [jax.tree.map(_wide, a) for a in args]
        try:
            return run(jax.jit(step), wide, calls)
        except Exception:
            return None


def _wide(leaf: Any) -> Any:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or leaf.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return leaf
    return jnp.asarray(np.asarray(leaf, np.float64))


def numbers(leaf: Any) -> np.ndarray:
    """A leaf as numbers: the data of a key, floats in at least 32 bits."""
    if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) and array.itemsize < 4 else array


def judge(
    got: list[Any], want: list[Any], in_float64: Callable[[], list[Any] | None], tolerance: float = 0.0
) -> Outcome:
    """Compare the leaves of a run with those of `jax.jit`."""
    if len(got) != len(want):
        return Outcome(kind="wrong", detail=f"{len(got)} leaves instead of {len(want)}", error=float("inf"))
    errors = [difference(a, b) for a, b in zip(got, want, strict=True)]
    suspects = [i for i, error in enumerate(errors) if not error <= max(SMALL, tolerance)]
    if not suspects:
        return Outcome(kind="equal", error=max(errors, default=0.0))
    exact = in_float64()
    comparable = exact is not None and len(exact) == len(want)
    for i in suspects:
        rounding = difference(want[i], exact[i]) if comparable and want[i].dtype.kind == "f" else float("inf")
        if rounding > COMPARABLE:
            wrong = not errors[i] <= 10 * RELATIVE
        else:
            wrong = not difference(got[i], exact[i]) <= ROUNDINGS * rounding + RELATIVE
        if wrong:
            return Outcome(
                kind="wrong", detail=f"leaf {i}: {_shown(got[i])}, jax.jit {_shown(want[i])}", error=errors[i]
            )
    return Outcome(kind="equal", error=max(errors))


def difference(a: Any, b: Any) -> float:
    """Largest difference relative to the largest element of `b`; infinite for different shapes or integers."""
    if a.shape != b.shape or a.dtype.kind != b.dtype.kind:
        return float("inf")
    if b.size == 0:
        return 0.0
    if b.dtype.kind != "f":
        return 0.0 if np.array_equal(a, b) else float("inf")
    largest = float(np.max(np.abs(b)))
    return float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64)))) / max(largest, 1e-6)


def _shown(leaf: Any) -> str:
    flat = np.asarray(leaf).reshape(-1)
    return f"{leaf.dtype.name}{list(leaf.shape)} " + np.array2string(flat[:4], precision=5, separator=", ")
