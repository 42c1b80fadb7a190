"""Compare a compiled step with `jax.jit` of the same function, leaf by leaf, in units of rounding.

    want      jax.jit(step)(arguments), on one device
    noise     how far jax.jit moves when each float input moves up or down by one unit in the last place: the most of
              `NUM_DRAWS` draws of signs, and of one draw that moves them by `allowed_steps` units
    step      max(noise, one unit in the last place of the leaf's largest number)
    fine      |got - want| <= allowed_steps · step in every element; integers, booleans and keys equal

A step that computes in lower precision than its inputs have (float32 weights cast to bfloat16) rounds more than the
last place of its inputs suggests: inputs are then moved by units of the lowest precision on the path to a leaf. That
would hide errors in an updated weight, which follows its old value: for leaves that replace an input, the change of
their difference from it counts, if that is less.

The caller's arrays are never changed. Where only shapes are given, arguments are random and depend on the seed alone
(`draw`):

    floats, complex   normal with deviation 0.1, like weights and normalised data (or absolute values)
    integers          0 or 1: indices and labels that are in range wherever there are two rows or classes
    booleans          either
    keys              proper keys, typed or as pairs of uint32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from alpa_lite import _jax
from alpa_lite._jax import AnyJaxpr, Device, Jaxpr, Literal, Tree, TreeLeaf, Var
from alpa_lite.errors import CheckError, ExecutionError, PlanError
from alpa_lite.runtime.check_report import MAX_LOW_STEPS, MAX_STEPS, CheckedLeaf, CheckReport
from alpa_lite.runtime.execute.function import CompiledFunction
from alpa_lite.trace.batch import is_key
from alpa_lite.trace.call import Call

NUM_DRAWS = 4
"""Number of random sign draws for changes of the inputs by one unit in the last place."""

_SEED = 0
_LOW = 1e-5
"""Relative units in the last place above this belong to float16, bfloat16 and below."""


def check_compiled(compiled: CompiledFunction, args: Sequence[Tree], kwargs: Mapping[str, Tree]) -> CheckReport:
    """Run a compiled step and `jax.jit` of its function on copies of these arguments, and compare.

    Arguments that are `jax.ShapeDtypeStruct`s are replaced by random ones. The step runs once, `jax.jit` once and then
    a few times on perturbed arguments.

    Raises:
        CheckError: they differ by more than rounding; it carries the report.
        PlanError: the plan is asynchronous, so that they differ by definition.
        ExecutionError: this process is one of several.
    """
    check_one_process()
    if compiled.plan.num_updates > 1:
        raise PlanError(
            f"{compiled.plan.name} is {compiled.plan.semantics}: it updates the weights {compiled.plan.num_updates} "
            "times per step, with old gradients, which is another optimiser than the step under jax.jit. Check the "
            "step under a synchronous schedule, such as al.schedule.OneFOneB()."
        )
    report = _StepComparison(compiled=compiled, args=tuple(args), kwargs=dict(kwargs)).report()
    if not report.ok:
        raise CheckError(f"{report.verdict} {_advice(compiled)}", report)
    return report


def check_one_process() -> None:
    """Raise `ExecutionError` in a job of several processes, none of which holds all of an output."""
    if jax.process_count() > 1:
        raise ExecutionError(
            f"A check compares on the devices of one process, but this is one of {jax.process_count()}. Check the step "
            "at small size in a single process, with virtual CPU devices if need be (alpa-lite check --devices 8)."
        )


def _advice(compiled: CompiledFunction) -> str:
    if compiled.plan.averaged:
        return (
            'on_non_additive="mean_of_means" takes the mean over micro-batches of a step that is no sum over its '
            "samples, which is another result: check it with num_microbatches=1."
        )
    return (
        "A step must depend on its arguments alone: what it reads from elsewhere while it is traced (a counter, a "
        "random number of the host) may differ each time. If yours does, please report this as a defect with the step."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Perturbed:
    """Arguments with their floats moved a little, and the results of `jax.jit` for them, on the host."""

    leaves: list[TreeLeaf]
    outputs: list[np.ndarray]


@dataclass(kw_only=True)
class _StepComparison:
    """One comparison; `seed` determines random arguments and the signs of perturbations."""

    compiled: CompiledFunction
    args: tuple[Tree, ...]
    kwargs: dict[str, Tree]
    seed: int = _SEED
    leaves: list[TreeLeaf] = field(default_factory=list[TreeLeaf])
    _noisy: dict[float, list[_Perturbed]] = field(default_factory=dict[float, "list[_Perturbed]"])

    @cached_property
    def reference(self) -> Callable[[Sequence[TreeLeaf]], Tree]:
        """The user's function under `jax.jit`, which takes its traced arguments as a list of leaves."""
        traced, call = self.compiled.traced, self._call

        def whole(leaves: Sequence[TreeLeaf]) -> Tree:
            arrays, _ = call.run(traced.fun, jax.tree.unflatten(traced.inputs.tree, leaves))
            return arrays

        return jax.jit(whole)

    @cached_property
    def _call(self) -> Call:
        traced = self.compiled.traced
        return Call.of(traced.fun, self.args, self.kwargs, traced.inputs.static)

    def report(self) -> CheckReport:
        traced = self.compiled.traced
        given = jax.tree.leaves(self._call.tree)
        want_tree = self._held(given)
        want = jax.tree.leaves(want_tree)
        # The step takes over the memory of donated arguments, which `jax.jit` still needs for the perturbed runs.
        got_tree = self.compiled.run_flat(
            [copied(leaf) if gone else leaf for leaf, gone in zip(self.leaves, traced.inputs.donated, strict=True)],
            None,
        )
        # The step was traced for the plan, and is traced again here: it may depend on something that has changed.
        if jax.tree.structure(got_tree) != jax.tree.structure(want_tree):
            raise CheckError(
                f"{traced.name} returned {jax.tree.structure(got_tree)} by the plan, but "
                f"{jax.tree.structure(want_tree)} under jax.jit: it does not return the same each time it is traced."
            )
        units = coarsest_units(_jax.open_jaxpr(traced.jaxpr))
        compared = [
            self._compared(number, got, wanted, units[number])
            for number, (got, wanted) in enumerate(zip(jax.tree.leaves(got_tree), want, strict=True))
        ]
        drawn = any(map(is_drawn, given))
        return CheckReport(function=traced.name, plan=self.compiled.plan, leaves=tuple(compared), drawn=drawn)

    def _held(self, given: Sequence[TreeLeaf]) -> Tree:
        """Fill `leaves`; return the results of `jax.jit` for them.

        If random arguments give numbers that are not finite, their absolute values are tried.
        """
        device = jax.devices()[0]
        self.leaves = held(given, device, self.seed)
        want = self.reference(self.leaves)
        if any(map(is_drawn, given)) and (lost := _num_lost(want)):
            # A root or a logarithm of a random argument is the usual reason.
            others = held(given, device, self.seed, positive=True)
            again = self.reference(others)
            if _num_lost(again) < lost:
                self.leaves, want = others, again
        return want

    def _perturbed(self, unit: float) -> list[_Perturbed]:
        """Return perturbed arguments with their results of `jax.jit`, by draw; the last moves by all allowed units."""
        if unit not in self._noisy:
            # Another seed than the arguments', so that signs do not depend on the values that they change.
            rng, runs = np.random.default_rng(self.seed + 1), list[_Perturbed]()
            for ulps in (*[1.0] * NUM_DRAWS, allowed_steps(unit)):
                # Signs are drawn at random: errors of one sign in all inputs would cancel in differences, and add up in
                # sums.
                leaves = [perturbed(leaf, unit, ulps, rng) for leaf in self.leaves]
                outputs = [*map(_on_host, jax.tree.leaves(self.reference(leaves)))]
                runs.append(_Perturbed(leaves=leaves, outputs=outputs))
            self._noisy[unit] = runs
        return self._noisy[unit]

    def _compared(self, number: int, got: jax.Array, want: jax.Array, unit: float) -> CheckedLeaf:
        """Return the comparison of one leaf."""
        name = self.compiled.traced.outputs.names[number]
        shape, dtype = tuple(jnp.shape(want)), str(want.dtype)
        if (tuple(jnp.shape(got)), str(got.dtype)) != (shape, dtype):
            note = f"{got.dtype}{list(jnp.shape(got))} by the plan"
            return CheckedLeaf(
                name=name,
                shape=shape,
                dtype=dtype,
                error=float("inf"),
                rounding_steps=float("inf"),
                allowed_steps=MAX_STEPS,
                limit=0.0,
                ok=False,
                note=note,
            )
        a, b = _on_host(got), _on_host(want)
        difference, scale = change(a, b), _scale(b)
        step = self._step(number, b, scale, unit) if difference or is_inexact(b) else 0.0
        steps = _quotient(difference, step)
        return CheckedLeaf(
            name=name,
            shape=shape,
            dtype=dtype,
            error=_quotient(difference, scale),
            rounding_steps=steps,
            allowed_steps=allowed_steps(unit),
            limit=0.0 if scale == 0 else allowed_steps(unit) * step / scale,
            ok=steps <= allowed_steps(unit),
            note=_note(got, want, b, step, difference),
        )

    def _step(self, number: int, want: np.ndarray, scale: float, unit: float) -> float:
        """Return one absolute rounding step of a leaf; for leaves without floats a share of elements."""
        # Rounding the result alone may change it by one unit, even where the inputs change nothing.
        own = float(jnp.finfo(self.compiled.traced.outputs.leaves[number].dtype).eps) if is_inexact(want) else 0.0
        return max(own * scale, self._noise(number, want, unit))

    def _noise(self, number: int, want: np.ndarray, unit: float) -> float:
        """Return how far `jax.jit` moves a leaf when its inputs move by one unit in the last place."""
        follows = self.compiled.traced.aliases.get(number)
        before = _on_host(jnp.asarray(self.leaves[follows])) if follows is not None and is_inexact(want) else None
        noise = 0.0
        for draw, run in enumerate(self._perturbed(unit)):
            moved = change(run.outputs[number], want)
            if follows is not None and before is not None:
                after = _on_host(jnp.asarray(run.leaves[follows]))
                # A weight moves with its perturbed old value, which would hide an error in its update.
                moved = min(moved, change(run.outputs[number] - after, want - before))
            # The last draw has moved the inputs by as many units as are allowed: the change per unit counts.
            noise = max(noise, moved / (1.0 if draw < NUM_DRAWS else allowed_steps(unit)))
        return noise


def allowed_steps(unit: float) -> float:
    """Return the number of rounding steps allowed for numbers with a relative unit in the last place."""
    return MAX_LOW_STEPS if unit > _LOW else MAX_STEPS


def _quotient(difference: float, unit: float) -> float:
    """Return the difference in units; 0 if the unit is infinite, as `jax.jit` itself is not always finite."""
    if difference == 0 or unit == np.inf:
        return 0.0
    return float(difference / unit) if unit else float("inf")


def coarsest_units(jaxpr: Jaxpr) -> list[float]:
    """Return the relative unit in the last place of the lowest precision on the path to each output; 0 for none."""
    coarsest: dict[Var, float] = {}

    def of(atom: Var | Literal) -> float:
        return _unit(atom) if isinstance(atom, Literal) else coarsest.get(atom, _unit(atom))

    # In the order of the equations, so that the precision on the path to each operand is known.
    for eqn in jaxpr.eqns:
        # A loop or a call may compute in lower precision inside, whatever its results have.
        inside = max(map(_coarsest_inside, _jax.inner_jaxprs(eqn)), default=0.0)
        before = max(map(of, eqn.invars), default=0.0)
        coarsest |= {var: max(before, inside, _unit(var)) for var in eqn.outvars}
    return [of(atom) for atom in jaxpr.outvars]


def _coarsest_inside(jaxpr: AnyJaxpr) -> float:
    inner = _jax.open_jaxpr(jaxpr)
    own = max((_unit(var) for eqn in inner.eqns for var in eqn.outvars), default=0.0)
    return max([own, *[_coarsest_inside(each) for eqn in inner.eqns for each in _jax.inner_jaxprs(eqn)]])


def _unit(atom: Var | Literal) -> float:
    dtype = getattr(atom.aval, "dtype", None)
    return float(jnp.finfo(dtype).eps) if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else 0.0


def change(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference between two host arrays; without floats the share of elements that differ."""
    if a.size == 0:
        return 0.0
    # Numbers that are not finite must be the same on both sides; NaN is the only one that differs from itself.
    same = (a == b) | ((a != a) & (b != b))
    if not is_inexact(b):
        return float(np.mean(~same))
    finite = np.isfinite(a) & np.isfinite(b)
    if not np.all(finite | same):
        return float("inf")
    # The others are replaced by zero first, as infinity minus infinity is not a number.
    return float(np.max(np.abs(np.where(finite & ~same, a, 0) - np.where(finite & ~same, b, 0)), initial=0.0))


def _scale(want: np.ndarray) -> float:
    if not is_inexact(want):
        return 1.0
    return float(np.max(np.abs(np.where(np.isfinite(want), want, 0)), initial=0.0))


def _on_host(leaf: jax.Array) -> np.ndarray:
    """Return a leaf as a NumPy array: floats in float64, keys as their words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    # Below, floats are widened: a difference of two 16-bit floats would itself be rounded.
    array = np.asarray(leaf)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(np.complex128)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _num_lost(outputs: Tree) -> int:
    """Return the count of numbers in some outputs that are not finite."""
    return sum(int(np.sum(~np.isfinite(_on_host(x)))) for x in jax.tree.leaves(outputs) if is_inexact(x))


def _note(got: jax.Array, want: jax.Array, host: np.ndarray, step: float, difference: float) -> str:
    notes: list[str] = []
    if is_inexact(host) and host.size and not np.any(np.isfinite(host)):
        notes.append("not finite anywhere: nothing was compared")
    if difference and not is_inexact(host) and step:
        notes.append("jax.jit itself changes it when its inputs change in the last place")
    if difference and step == np.inf:
        notes.append("jax.jit itself is not always finite there")
    # Reported, not refused: the numbers are the same, but later promotion of dtypes may differ.
    if getattr(want, "weak_type", False) != getattr(got, "weak_type", False):
        notes.append("weakly typed under jax.jit")
    return "; ".join(notes)


_WIDTH = 0.1


def is_inexact(leaf: TreeLeaf) -> bool:
    """Return True if a leaf holds floats or complex numbers."""
    return isinstance(leaf, (float, complex)) or (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact))


def is_drawn(leaf: TreeLeaf) -> bool:
    """Return True if a leaf is a shape alone, for which values have to be drawn."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def draw(shape: jax.ShapeDtypeStruct, rng: np.random.Generator, *, positive: bool) -> jax.Array:
    """Return a random array for a shape. `positive`: absolute values, for steps that take roots of arguments."""
    if jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        # From the same generator as all other leaves, so that keys depend on the seed as well.
        key = jax.random.key(int(rng.integers(2**31)), impl=_jax.key_implementation(str(shape.dtype)))
        return jax.random.split(key, shape.shape)
    if is_key(shape):
        return jnp.asarray(rng.integers(0, 2**32, shape.shape, dtype=np.uint32))
    if shape.dtype == np.bool_:
        return jnp.asarray(rng.integers(0, 2, shape.shape).astype(bool))
    if not jnp.issubdtype(shape.dtype, jnp.inexact):
        return jnp.asarray(rng.integers(0, 2, shape.shape), shape.dtype)
    # Small enough that exponentials and powers in most steps stay finite.
    values = _WIDTH * rng.normal(size=shape.shape)
    if jnp.issubdtype(shape.dtype, jnp.complexfloating):
        values = values + 1j * _WIDTH * rng.normal(size=shape.shape)
    values = np.abs(values) if positive else values
    return _weak(jnp.asarray(values, shape.dtype), shape)


def held(leaves: Sequence[TreeLeaf], device: Device, seed: int, *, positive: bool = False) -> list[TreeLeaf]:
    """Return the leaves with values, on one device: copies of arrays, random values for shapes."""
    rng = np.random.default_rng(seed)
    return [draw(leaf, rng, positive=positive) if is_drawn(leaf) else _on_one(leaf, device) for leaf in leaves]


def _on_one(leaf: TreeLeaf, device: Device) -> TreeLeaf:
    """Return a leaf on one device; a leaf that is no JAX array is returned as it is."""
    if not isinstance(leaf, jax.Array):
        return leaf
    if len(leaf.sharding.device_set) > 1:  # through the host: the array's type may name mesh axes
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = jnp.asarray(np.asarray(jax.random.key_data(leaf)))
            return jax.random.wrap_key_data(words, impl=_jax.key_implementation(str(leaf.dtype)))
        leaf = _weak(jnp.asarray(np.asarray(leaf)), leaf)
    return jax.device_put(leaf, device)


def copied(leaf: TreeLeaf) -> TreeLeaf:
    """Return a copy of a leaf, which may be donated."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def perturbed(leaf: TreeLeaf, unit: float, ulps: float, rng: np.random.Generator) -> TreeLeaf:
    """Return a leaf of floats with every number moved up or down by `ulps` units in the last place.

    The last place is that of numbers of relative precision `unit`, or of the leaf's own where that is coarser. Leaves
    without floats, zeros and numbers that are not finite stay as they are.
    """
    if not is_inexact(leaf):
        return leaf
    own = jnp.result_type(leaf)
    relative = ulps * max(unit, float(jnp.finfo(own).eps))
    wide = np.complex128 if jnp.issubdtype(own, jnp.complexfloating) else np.float64
    # In double precision, where one unit in the last place of the leaf can be added.
    values = np.asarray(leaf).astype(wide)
    if wide is np.complex128:
        moved = _moved(values.real, relative, rng) + 1j * _moved(values.imag, relative, rng)
    else:
        moved = _moved(values, relative, rng)
    if isinstance(leaf, (float, complex)):
        return type(leaf)(moved[()])
    with np.errstate(over="ignore"):
        narrow = moved.astype(own)
    # The largest numbers of a dtype would become infinite: they stay as they are.
    narrow = np.where(np.isfinite(narrow), narrow, values.astype(own))
    return _weak(jnp.asarray(narrow), leaf) if isinstance(leaf, jax.Array) else narrow


def _moved(values: np.ndarray, relative: float, rng: np.random.Generator) -> np.ndarray:
    """Return real numbers, each moved by a multiple of the last place: 2^exponent · relative precision."""
    values = np.asarray(values)
    with np.errstate(invalid="ignore"):
        # `frexp` gives mantissas in [1/2, 1): the unit in the last place is relative to 2^(exponent - 1).
        exponents = np.frexp(values)[1]
    places = np.where(np.isfinite(values) & (values != 0), np.ldexp(relative, exponents - 1), 0.0)
    return values + places * rng.choice((-1.0, 1.0), values.shape)


def _weak(array: jax.Array, like: TreeLeaf) -> jax.Array:
    if not getattr(like, "weak_type", False):
        return array
    return _jax.relabeled(array, array.aval.update(weak_type=True), array.sharding)
