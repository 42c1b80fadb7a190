"""Which arguments hold the batch: named by the user, or assumed.

Where nothing is named, the first of these that answers is assumed:

    exclusion     arguments that come back among the outputs are state, keys are keys, and all other arrays agree on
                  their leading size (`by_exclusion`)
    function      of a function without state, the arguments that agree on a size with which outputs lead
                  (`without_state`)
    trial         arrays that share a size, along their leading dim or else along one other, such that the step can be
                  traced with twice that size of these alone, and state keeps its shapes (`by_trial`). Of several such
                  sizes the one that most operations follow: frozen weights and tables have sizes too, but little
                  follows them.

What is assumed is told: a plan prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import BatchError, TraceError

BatchArgnums = int | str | Sequence[int | str] | Mapping[int | str, int] | None
"""The arguments that hold the batch, by position, name or path (`"state/carry"`); a mapping also gives their dim."""

Dims = tuple[int | None, ...]
"""For each leaf the dim that holds the batch; None where none does."""

Retrace = Callable[[Sequence[jax.ShapeDtypeStruct]], Any]
"""The jaxpr of the step for other avals."""

_MAX_TRIALS = 8
"""So many sizes are tried at most, each of which traces the step again."""

_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class ArgumentLeaves:
    """The flattened arguments of a step.

    Attributes:
        avals: shape and dtype of each leaf.
        names: its path.
        owner: the position or keyword of the argument that it belongs to.
        num_args: how many positional arguments there are.
        state: owners whose whole tree comes back among the outputs.
    """

    avals: tuple[jax.ShapeDtypeStruct, ...]
    names: tuple[str, ...]
    owner: tuple[int | str, ...]
    num_args: int
    state: frozenset[int | str]

    def holds_data(self, leaf: int) -> bool:
        """Whether a leaf is an array that may hold a batch, whatever its argument is."""
        return len(self.avals[leaf].shape) > 0 and not is_key(self.avals[leaf])

    def may_be_batch(self, leaf: int) -> bool:
        """Whether a leaf is such an array, and not part of state."""
        return self.owner[leaf] not in self.state and self.holds_data(leaf)

    def resized(self, dims: Dims, size: int, new_size: int) -> list[jax.ShapeDtypeStruct]:
        """The avals with another number of samples along some dims."""
        return [
            aval if dim is None else resized(aval, dim, new_size, size)
            for aval, dim in zip(self.avals, dims, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.avals)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Where the batch is: its dim in each leaf, and its size; or the sentence that says why it is not known."""

    dims: Dims
    size: int | None
    problem: str = ""
    assumed: bool = True


def resized(leaf: jax.ShapeDtypeStruct, dim: int, size: int, batch_size: int | None) -> jax.ShapeDtypeStruct:
    """A leaf with another number of samples; it may hold several rows per sample."""
    rows = leaf.shape[dim] * size // (batch_size or leaf.shape[dim])
    shape = (*leaf.shape[:dim], rows, *leaf.shape[dim + 1 :])
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=leaf.weak_type)


def is_key(leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf holds random keys: typed ones, or a single one as a pair of words."""
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key) or (leaf.dtype == np.uint32 and leaf.shape == (2,))


def argument_number(index: int, count: int) -> int:
    """The number of a positional argument, of `count`, which may be counted from the end.

    Raises:
        TraceError: there is no such argument.
    """
    if not -count <= index < count:
        raise TraceError(
            f"Argument number {index} was named, but the function was called with {count} positional ones."
        )
    return index % count


# --- named ------------------------------------------------------------------------------------------------------------


def by_name(leaves: ArgumentLeaves, batch_argnums: Any) -> Batch:
    """The batch as the user named it: by position, by name, or by the start of a path.

    Raises:
        BatchError: there is no such argument, or no such dim.
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
    """What is neither state nor a key nor a scalar, if it agrees on its leading size."""
    return _agreed(leaves, tuple(0 if leaves.may_be_batch(i) else None for i in range(len(leaves))))


def without_state(leaves: ArgumentLeaves, out_leaves: Sequence[jax.ShapeDtypeStruct]) -> Batch | None:
    """The batch of a function whose arguments need not come back; None if it is not clear."""
    sizes: dict[int | str, set[int]] = {}
    for i, key in enumerate(leaves.owner):
        if leaves.holds_data(i):
            sizes.setdefault(key, set()).add(leaves.avals[i].shape[0])
    agreeing = {key: min(found) for key, found in sizes.items() if len(found) == 1}
    likely = set(agreeing.values())
    if len(likely) > 1:
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
    """Arrays that share a size and may be the batch; `followers`: operations whose results grow with it."""

    dims: Dims
    size: int
    followers: int = 0

    @property
    def is_leading(self) -> bool:
        """Whether it is the leading dim everywhere."""
        return set(self.dims) <= {0, None}

    @property
    def order(self) -> tuple[int, bool, int]:
        """The larger, the likelier."""
        return self.followers, self.is_leading, sum(dim is not None for dim in self.dims)


def by_trial(leaves: ArgumentLeaves, retrace: Retrace, aliases: Mapping[int, int]) -> Batch:
    """The arrays with another size of which alone the step can be traced; else why the batch is not known.

    `aliases`: which output leaf takes the place of which input leaf.
    """
    works = _working(leaves, retrace, aliases, _trials(leaves, leaves.may_be_batch))
    others = [t for t in _trials(leaves, leaves.holds_data) if _is_whole_beside_others(leaves, t.dims)]
    # More may follow what comes back, as with a cache: that is proposed, but not assumed.
    returned = _working(leaves, retrace, aliases, [t for t in others if any(_in_state(leaves, t.dims))])
    surpassed = bool(returned) and (not works or returned[0].followers > works[0].followers)
    if works and not surpassed and (len(works) == 1 or works[0].order != works[1].order):
        return Batch(dims=works[0].dims, size=works[0].size)
    proposed = returned[:1] if surpassed else works
    return Batch(dims=(None,) * len(leaves), size=None, problem=f"{_why(leaves)} {_advice(leaves, proposed)}")


def _in_state(leaves: ArgumentLeaves, dims: Dims) -> list[bool]:
    """Of each array that is in, whether it belongs to what comes back."""
    return [owner in leaves.state for owner, dim in zip(leaves.owner, dims, strict=True) if dim is not None]


def _working(
    leaves: ArgumentLeaves, retrace: Retrace, aliases: Mapping[int, int], trials: Sequence[_Trial]
) -> list[_Trial]:
    """Those trials with which the step works, likely ones first."""
    tried = [_tried(leaves, trial, retrace, aliases) for trial in trials[:_MAX_TRIALS]]
    return sorted([trial for trial in tried if trial.followers], key=lambda trial: trial.order, reverse=True)


def _trials(leaves: ArgumentLeaves, admits: Callable[[int], bool]) -> list[_Trial]:
    """For each size: the arrays that lead with it, those of them that are whole arguments (weights may be as wide as
    the batch is long), and whole arguments whose arrays have one dim of that size."""
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
    """The dims of those arguments that are in with all of their arrays."""
    partly = {owner for i, owner in enumerate(leaves.owner) if dims[i] is None and leaves.holds_data(i)}
    return tuple(None if owner in partly else dim for owner, dim in zip(leaves.owner, dims, strict=True))


def _tried(leaves: ArgumentLeaves, trial: _Trial, retrace: Retrace, aliases: Mapping[int, int]) -> _Trial:
    """A trial and how many operations follow it; none where the step does not work, or is another one then."""
    # With a single sample other dims are broadcast along it, so that the step has other operations.
    small, large = (trial.size, 2 * trial.size) if trial.size > 1 else (2, 3)
    wanted = leaves.resized(trial.dims, trial.size, large)
    try:
        after = retrace(wanted)
        if any(after.out_avals[out].shape != wanted[into].shape for out, into in aliases.items()):
            return trial
        before = retrace(leaves.resized(trial.dims, trial.size, small))
    except Exception:  # the user's function may raise anything at another size
        return trial
    return replace(trial, followers=_followers(before, after) or 0)


def _followers(before: Any, after: Any) -> int | None:
    """How many equations have results of another shape; None where the jaxprs do not have the same equations."""
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
    """Whether some arguments are batch with all of their arrays, and other arrays are not."""
    named = {owner for owner, dim in zip(leaves.owner, dims, strict=True) if dim is not None}
    others = any(leaves.holds_data(i) and owner not in named for i, owner in enumerate(leaves.owner))
    return _whole(leaves, dims) == dims and others


# --- sentences --------------------------------------------------------------------------------------------------------


def _why(leaves: ArgumentLeaves) -> str:
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
    if works:
        examples = " or ".join(f"batch_argnums={_named(leaves, trial.dims)}" for trial in works[:2])
        return f"Name the arguments or paths that hold it; the step works at other sizes of {examples}."
    return (
        "Name the arguments or paths that hold it with batch_argnums, or their dim too: a mapping from names to dims. "
        f"The step takes {', '.join(leaves.names[:_SHOWN])}{_more(len(leaves))}."
    )


def _named(leaves: ArgumentLeaves, dims: Dims) -> str:
    """What to write for `batch_argnums`: arguments by name where all of their arrays are in, else paths."""
    found: dict[str, int] = {}
    for i, dim in enumerate(dims):
        if dim is None:
            continue
        same = [j for j, owner in enumerate(leaves.owner) if owner == leaves.owner[i] and leaves.holds_data(j)]
        whole = all(dims[j] == dim for j in same)
        found[leaves.names[i].split("/")[0] if whole else leaves.names[i]] = dim
    return str(tuple(found)) if set(found.values()) == {0} else str(found)


def _listed(leaves: ArgumentLeaves, marked: Sequence[int | None]) -> str:
    shown = [
        f"{name} {list(leaf.shape)}"
        for name, leaf, dim in zip(leaves.names, leaves.avals, marked, strict=True)
        if dim is not None
    ]
    return ", ".join(shown[:_SHOWN]) + _more(len(shown))


def _more(number: int) -> str:
    return f" and {number - _SHOWN} more" if number > _SHOWN else ""


def _agreed(leaves: ArgumentLeaves, marked: Dims) -> Batch | None:
    """The batch along some dims, if they are of one size."""
    sizes = {leaf.shape[dim] for leaf, dim in zip(leaves.avals, marked, strict=True) if dim is not None}
    return Batch(dims=marked, size=sizes.pop()) if len(sizes) == 1 and 0 not in sizes else None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (int, str)) else tuple(value)
