"""Determine which arguments hold the batch: those named by the user, or else an assumption.

If the user names none, the first of these methods that gives an answer is used:

    exclusion     arguments that are returned among the outputs are state, keys are keys, and all other arrays agree
                  on their leading size (`by_exclusion`)
    function      for a function without state: the arguments that agree on a size that is also a leading size of
                  outputs (`without_state`)
    trial         arrays that share a size, along their leading dim or else along one other dim, for which the step can
                  be traced with twice that size of these arrays alone while state keeps its shapes (`by_trial`). Of
                  several candidates, the size on which most equations depend: frozen weights and tables have sizes
                  too, but few equations depend on them.

An assumed batch is reported to the user: the plan prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite._jax import AnyJaxpr, ClosedJaxpr
from alpa_lite.errors import BatchError
from alpa_lite.text import show_first
from alpa_lite.trace.call import argument_number

BatchArgnums = int | str | Sequence[int | str] | Mapping[int | str, int] | None
"""The arguments that hold the batch, by position, name or path (`"state/carry"`); a mapping also gives their dims."""

Dims = tuple[int | None, ...]
"""For each leaf the dim that holds the batch, or None where no dim does."""

Retrace = Callable[[Sequence[jax.ShapeDtypeStruct]], ClosedJaxpr]
"""A function that returns the jaxpr of the step for other argument avals."""

_MAX_TRIALS = 8
"""The maximum number of candidate sizes; each candidate traces the step up to twice."""

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class ArgumentLeaves:
    """The flattened arguments of a step.

    Attributes:
        avals: shape and dtype of each leaf.
        names: path of each leaf, such as `"state/params/w"`.
        owner: position or keyword of the argument that each leaf belongs to.
        num_args: number of positional arguments.
        state: owners whose whole tree is returned among the outputs.
    """

    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    owner: tuple[int | str, ...]
    num_args: int
    state: frozenset[int | str]

    def holds_data(self, leaf: int) -> bool:
        """Return whether a leaf is an array with at least one dim and no random key, so that it could hold a batch."""
        return len(self.avals[leaf].shape) > 0 and not is_key(self.avals[leaf])

    def may_be_batch(self, leaf: int) -> bool:
        """Return whether a leaf could hold a batch and is not part of state."""
        return self.owner[leaf] not in self.state and self.holds_data(leaf)

    def resized(self, dims: Dims, size: int, new_size: int) -> list[jax.ShapeDtypeStruct]:
        """Return the avals with the batch size changed from `size` to `new_size` samples along `dims`."""
        return [
            aval if dim is None else resized(aval, dim, new_size, size)
            for aval, dim in zip(self.avals, dims, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.avals)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The dim of the batch in each leaf, and the batch size.

    Attributes:
        dims: for each leaf the dim that holds the batch, or None.
        size: batch size in samples; None if the batch could not be determined.
        problem: the reason why it could not be determined, as a sentence for the user.
        assumed: whether the batch was inferred and not named by the user.
    """

    dims: Dims
    size: int | None
    problem: str = ""
    assumed: bool = True


def resized(leaf: jax.ShapeDtypeStruct, dim: int, size: int, batch_size: int | None) -> jax.ShapeDtypeStruct:
    """Return a leaf with `size` samples instead of `batch_size` along `dim`; a sample may take several rows."""
    rows = leaf.shape[dim] * size // (batch_size or leaf.shape[dim])
    shape = (*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)


def is_key(leaf: jax.ShapeDtypeStruct) -> bool:
    """Return whether a leaf holds random keys: typed keys, or one legacy key (`uint32[2]`)."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) or (leaf.dtype == np.uint32 and leaf.shape == (2,))


# --- named ------------------------------------------------------------------------------------------------------------


def by_name(leaves: ArgumentLeaves, batch_argnums: BatchArgnums) -> Batch:
    """Return the batch that the user named by position, by name or by the first part of a path.

    If the named leaves disagree on the size, the result has no size and says why in `problem`.

    Raises:
        BatchError: there is no such argument or no such dim.
    """
    listed = batch_argnums if isinstance(batch_argnums, Mapping) else dict.fromkeys(_as_tuple(batch_argnums), 0)
    marked: list[int | None] = [None] * len(leaves)
    for key, dim in listed.items():
        place = argument_number(key, leaves.num_args) if isinstance(key, int) else key
        found = [
            i for i, name in enumerate(leaves.names) if place in (leaves.owner[i], name) or name.startswith(f"{place}/")
        ]
        if not found:
            raise BatchError(
                f"batch_argnums names {key!r}, but no argument of that name and no path that starts so was given: "
                f"{list(leaves.names)}."
            )
        for i in found:
            rank = len(leaves.avals[i].shape)
            if rank > dim >= 0:
                marked[i] = dim
            # Scalars in a named tree, such as a count of steps, hold no batch and are passed over.
            elif rank > 0:
                raise BatchError(
                    f"batch_argnums says dim {dim} of {leaves.names[i]}, which has {rank} dims, counted from 0."
                )
    found_batch = _agreed(leaves, tuple(marked))
    if found_batch is not None:
        return replace(found_batch, assumed=False)
    where = _listed(leaves, marked)
    problem = (
        f"The batch cannot be found: what batch_argnums names disagrees on its size ({where}). Name arguments or paths "
        "of one size, or their dim too: a mapping from names to dims."
        if where
        else "The batch cannot be found: batch_argnums names scalars alone."
    )
    return Batch(dims=(None,) * len(leaves), size=None, problem=problem, assumed=False)


# --- assumed ----------------------------------------------------------------------------------------------------------


def by_exclusion(leaves: ArgumentLeaves) -> Batch | None:
    """Return the batch of all arrays that are neither state nor keys nor scalars; None if leading sizes differ."""
    return _agreed(leaves, tuple(0 if leaves.may_be_batch(i) else None for i in range(len(leaves))))


def without_state(leaves: ArgumentLeaves, out_leaves: Sequence[jax.ShapeDtypeStruct]) -> Batch | None:
    """Return the batch of a function that returns no arguments, such as a forward pass; None if it is ambiguous."""
    sizes: dict[int | str, set[int]] = {}
    for i, key in enumerate(leaves.owner):
        if leaves.holds_data(i):
            sizes.setdefault(key, set()).add(leaves.avals[i].shape[0])
    # A tree whose arrays have several leading sizes is made of weights rather than of samples.
    agreeing = {key: min(found) for key, found in sizes.items() if len(found) == 1}
    likely = set(agreeing.values())
    if len(likely) > 1:
        # The outputs of a forward pass begin with the batch, and sizes of weights seldom come first there.
        likely &= {leaf.shape[0] for leaf in out_leaves if leaf.shape}
    if len(likely) != 1:
        return None
    holders = {key for key, size in agreeing.items() if size in likely}
    marked = tuple(
        0 if key in holders and len(aval.shape) > 0 else None
        for key, aval in zip(leaves.owner, leaves.avals, strict=True)
    )
    return _agreed(leaves, marked)


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """A candidate batch: arrays that share a size.

    Attributes:
        dims: for each leaf the dim of that size, or None where the leaf is not part of the candidate.
        size: the shared size in rows.
        followers: number of equations whose result shapes change with the size; 0 if the step fails at other sizes.
    """

    dims: Dims
    size: int
    followers: int = 0

    @property
    def is_leading(self) -> bool:
        """Whether the candidate uses the leading dim of every array."""
        return set(self.dims) <= {0, None}

    @property
    def order(self) -> tuple[int, bool, int]:
        """The sort key of a candidate; the most probable batch has the largest key."""
        return self.followers, self.is_leading, sum(dim is not None for dim in self.dims)


def by_trial(leaves: ArgumentLeaves, retrace: Retrace, aliases: Mapping[int, int]) -> Batch:
    """Return the most probable batch among the sizes at which the step can be traced, or the reason why there is none.

    Args:
        leaves: the flattened arguments.
        retrace: traces the step at other avals.
        aliases: output leaf → the input leaf that it replaces in the next step.
    """
    works = _working(leaves, retrace, aliases, _trials(leaves, leaves.may_be_batch))
    others = [t for t in _trials(leaves, leaves.holds_data) if _is_whole_beside_others(leaves, t.dims)]
    # With a cache as state, more equations depend on the returned arrays than on the rest. That is no proof that they
    # hold the batch, so the error message proposes them instead of the plan assuming them.
    returned = _working(leaves, retrace, aliases, [t for t in others if any(_in_state(leaves, t.dims))])
    surpassed = bool(returned) and (not works or returned[0].followers > works[0].followers)
    # A tie between the best two means that the step does not show which of them is the batch.
    if works and not surpassed and (len(works) == 1 or works[0].order != works[1].order):
        return Batch(dims=works[0].dims, size=works[0].size)
    proposed = returned[:1] if surpassed else works
    return Batch(dims=(None,) * len(leaves), size=None, problem=f"{_why(leaves)} {_advice(leaves, proposed)}")


def _in_state(leaves: ArgumentLeaves, dims: Dims) -> list[bool]:
    """Return for each array of a candidate whether its argument is state."""
    return [owner in leaves.state for owner, dim in zip(leaves.owner, dims, strict=True) if dim is not None]


def _working(
    leaves: ArgumentLeaves, retrace: Retrace, aliases: Mapping[int, int], trials: Sequence[_Trial]
) -> list[_Trial]:
    """Return the candidates at which the step can be traced, the most probable first."""
    tried = [_tried(leaves, trial, retrace, aliases) for trial in trials[:_MAX_TRIALS]]
    return sorted([trial for trial in tried if trial.followers], key=lambda trial: trial.order, reverse=True)


def _trials(leaves: ArgumentLeaves, admits: Callable[[int], bool]) -> list[_Trial]:
    """Return the candidates for each size, those with most leading dims first.

    A size gives up to three candidates: all arrays that lead with it; those that are whole arguments (weights may
    happen to be as wide as the batch is long); and whole arguments whose arrays have exactly one dim of that size.
    """
    shapes = [leaf.shape if admits(i) else () for i, leaf in enumerate(leaves.avals)]
    found: dict[Dims, _Trial] = {}
    for size in dict.fromkeys(size for shape in shapes for size in shape):
        leading = tuple(0 if shape[:1] == (size,) else None for shape in shapes)
        anywhere = tuple(
            0 if shape[:1] == (size,) else shape.index(size) if shape.count(size) == 1 else None for shape in shapes
        )
        for dims in (leading, _whole(leaves, leading), _whole(leaves, anywhere)):
            if size > 0 and any(dim == 0 for dim in dims):
                found.setdefault(dims, _Trial(dims=dims, size=size))
    return sorted(found.values(), key=lambda trial: (not trial.is_leading, -len([d for d in trial.dims if d == 0])))


def _whole(leaves: ArgumentLeaves, dims: Dims) -> Dims:
    """Return the dims restricted to arguments all of whose arrays are part of the candidate."""
    partly = {owner for i, owner in enumerate(leaves.owner) if dims[i] is None and leaves.holds_data(i)}
    return tuple(None if owner in partly else dim for owner, dim in zip(leaves.owner, dims, strict=True))


def _tried(leaves: ArgumentLeaves, trial: _Trial, retrace: Retrace, aliases: Mapping[int, int]) -> _Trial:
    """Return a candidate with its number of followers; 0 if the step fails or changes its equations at the new size."""
    # JAX writes other equations for a dim of size 1 (it broadcasts along it), so sizes 2 and 3 are compared instead.
    small, large = (trial.size, 2 * trial.size) if trial.size > 1 else (2, 3)
    wanted = leaves.resized(trial.dims, trial.size, large)
    try:
        after = retrace(wanted)
        # The state that comes out must fit as the argument of the next step.
        if any(after.out_avals[out].shape != wanted[into].shape for out, into in aliases.items()):
            return trial
        before = retrace(leaves.resized(trial.dims, trial.size, small))
    except Exception:  # the user's function may raise anything at another size
        return trial
    return replace(trial, followers=_followers(before, after) or 0)


def _followers(before: AnyJaxpr, after: AnyJaxpr) -> int | None:
    """Return the number of equations whose result avals differ; None if the two jaxprs have different equations."""
    first, second = _jax.open_jaxpr(before).eqns, _jax.open_jaxpr(after).eqns
    if [eqn.primitive for eqn in first] != [eqn.primitive for eqn in second]:
        return None
    total = 0
    for one, other in zip(first, second, strict=True):
        total += any(a.aval != b.aval for a, b in zip(one.outvars, other.outvars, strict=True))
        for a, b in zip(_jax.inner_jaxprs(one), _jax.inner_jaxprs(other), strict=False):
            inside = _followers(a, b)
            if inside is None:
                return None
            total += inside
    return total


def _is_whole_beside_others(leaves: ArgumentLeaves, dims: Dims) -> bool:
    """Return whether the candidate consists of whole arguments and leaves other arrays out."""
    named = {owner for owner, dim in zip(leaves.owner, dims, strict=True) if dim is not None}
    others = any(leaves.holds_data(i) and owner not in named for i, owner in enumerate(leaves.owner))
    return _whole(leaves, dims) == dims and others


# --- sentences --------------------------------------------------------------------------------------------------------


def _why(leaves: ArgumentLeaves) -> str:
    """Return the sentence that says why no batch could be inferred."""
    marked = [0 if leaves.may_be_batch(i) else None for i in range(len(leaves))]
    where = _listed(leaves, marked)
    if where:
        sizes = {leaf.shape[0] for leaf, dim in zip(leaves.avals, marked, strict=True) if dim is not None}
        what = (
            "the arguments that are not state hold no samples"
            if sizes == {0}
            else "the arguments that are not state disagree on its size"
        )
        return f"The batch cannot be found: {what} ({where})."
    if not len(leaves):
        return "The batch cannot be found: the function takes no arrays."
    called = {owner: name.split("/")[0] for owner, name in zip(leaves.owner, leaves.names, strict=True)}
    state = ", ".join(name for owner, name in called.items() if owner in leaves.state)
    rest = ", ".join(name for owner, name in called.items() if owner not in leaves.state)
    parts = (
        f"what comes back among the outputs counts as state ({state})" if state else "",
        f"scalars and random keys hold no samples ({rest})" if rest else "",
    )
    return f"The batch cannot be found: {', and '.join(filter(None, parts))}."


def _advice(leaves: ArgumentLeaves, works: Sequence[_Trial]) -> str:
    """Return the sentence that says what to name as the batch; `works` are candidates, the most probable first."""
    if works:
        examples = " or ".join(f"batch_argnums={_named(leaves, trial.dims)}" for trial in works[:2])
        return f"Name the arguments or paths that hold it; the step works at other sizes of {examples}."
    if not len(leaves):
        return "Pass the batch as an argument."
    return (
        "Name the arguments or paths that hold it with batch_argnums, or their dim too: a mapping from names to dims. "
        f"The step takes {show_first(leaves.names, _SHOWN)}."
    )


def _named(leaves: ArgumentLeaves, dims: Dims) -> str:
    """Return the value to write for `batch_argnums`: names of arguments that are included whole, else paths."""
    found: dict[str, int] = {}
    for i, dim in enumerate(dims):
        if dim is None:
            continue
        same = [j for j, owner in enumerate(leaves.owner) if owner == leaves.owner[i] and leaves.holds_data(j)]
        whole = all(dims[j] == dim for j in same)
        found[leaves.names[i].split("/")[0] if whole else leaves.names[i]] = dim
    return str(tuple(found)) if set(found.values()) == {0} else str(found)


def _listed(leaves: ArgumentLeaves, marked: Sequence[int | None]) -> str:
    rows = zip(leaves.names, leaves.avals, marked, strict=True)
    return show_first([f"{name} {list(leaf.shape)}" for name, leaf, dim in rows if dim is not None], _SHOWN)


def _agreed(leaves: ArgumentLeaves, marked: Dims) -> Batch | None:
    """Return the batch along `marked` dims if all of them have one non-zero size, else None."""
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves.avals, marked, strict=True) if dim is not None}
    return Batch(dims=marked, size=sizes.pop()) if len(sizes) == 1 and 0 not in sizes else None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (int, str)) else tuple(value)
