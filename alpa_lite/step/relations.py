"""The lattice of the proof: relations between a value of a micro-batch and the same value of the full-batch step.

A step can run in M micro-batches when the program at the micro-batch size, run M times, gives what the program at the
full batch gives once. Let V be a value in the full-batch step and V_m the same value in micro-batch m. Each element of
the lattice is an equation between the two:

    INVARIANT       V_m = V                        parameters, keys, counters, literals
    ZERO            V_m = V = 0                    an INVARIANT that is a SUM as well
    SAMPLES(d, k)   with dim d of V seen as [k, M, q] and dim d of V_m as [k, q]:
                    V_m[…, j, i, …] = V[…, j, m, i, …]
                                                   data, activations; k > 1 after [T, B] → [T·B], or a split by hand
    SUM             Σ_m V_m = V                    losses, gradients, counts
    MAX, MIN        max_m V_m = V, min_m V_m = V   extremes over samples; for booleans, `any` and `all`
    AFTER           V is complete only after the loop over micro-batches    values computed from sums
    RUNNING         in a loop over samples: the carried total after this sample, and nothing else
    MIXED           no equation holds: statistics used again per sample, neighbours, pairs, order

k is None for a value that is the same for all samples (a broadcast): it is SAMPLES(d, k) for every k.

A SAMPLES value may carry a fact (`Relation.fact`). *Own numbers* of n rows are positions in the full batch that lie in
the rows of the value's own micro-batch, like those of `arange(B)` and all that is gathered or repeated from it:

    Own(n)          m·n ≤ V_m < (m + 1)·n

They may be used as numbers; where they index an array of which each micro-batch has n rows, they address rows that it
holds, at V_m - m·n.

The order of the lattice, as used by `join` (the least relation that holds for either of two values):

    ZERO ⊑ INVARIANT ⊑ MAX, MIN      ZERO ⊑ SUM      everything ⊑ MIXED
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RelationKind(Enum):
    """The equation that holds for a value; see the module docstring."""

    INVARIANT = "the same in every micro-batch"
    ZERO = "zero"
    SAMPLES = "per sample"
    SUM = "a sum over samples"
    MAX = "a maximum over samples"
    MIN = "a minimum over samples"
    AFTER = "known after the loop"
    RUNNING = "a running total"
    MIXED = "mixed"

    # Relations are hashed for every op of a program, and the default hash of an Enum (of its name) runs in Python.
    __hash__ = object.__hash__


class Refusal(NamedTuple):
    """Why a value is MIXED.

    Attributes:
        source: source line of the op that mixes samples.
        primitive: primitive of that op.
        shapes: shapes of its operands in the full batch.
        text: what the op does, as the predicate of a sentence; a whole sentence if `primitive` is empty.
        cut: number of runs into which the op divides the samples, if the split would be exact with micro-batches that
            take as many rows of each run; 1 if it would not be.
    """

    source: str
    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    text: str
    cut: int = 1


class Own(NamedTuple):
    """The fact that elements are own numbers (see the module docstring).

    Attributes:
        rows: rows of a micro-batch in the array that the numbers index.
        columns: indices along the last dim that hold own numbers; None if all elements do.
    """

    rows: int
    columns: tuple[int, ...] | None = None


#: Facts about the elements of SAMPLES: own numbers, or the boolean that all elements equal; None for no fact.
Fact = Own | bool | None


class Relation(NamedTuple):
    """An element of the lattice.

    Attributes:
        kind: the equation that holds.
        dim: d of SAMPLES. For SUM, MAX and MIN, a dim along which the value is repeated once per sample, or -1.
        blocks: k of SAMPLES, the number of runs along the dim; None where every number is valid.
        fact: a fact about the elements of SAMPLES.
        total: for RUNNING, the number of the carried operand, and "sum", "max" or "min" ("" before anything was added).
        refusal: for MIXED, the reason.
    """

    kind: RelationKind
    dim: int = -1
    blocks: int | None = None
    fact: Fact = None
    total: tuple[int, str] = (-1, "")
    refusal: Refusal | None = None

    @property
    def is_same(self) -> bool:
        """Whether a micro-batch has exactly the value of the full batch."""
        return self.kind is RelationKind.INVARIANT or self.kind is RelationKind.ZERO

    @property
    def is_reduced(self) -> bool:
        """Whether each micro-batch has a part, and the parts are combined by a sum, maximum or minimum."""
        return self.kind in _COMBINED


INVARIANT = Relation(RelationKind.INVARIANT)
ZERO = Relation(RelationKind.ZERO)
SUM = Relation(RelationKind.SUM)
MAX = Relation(RelationKind.MAX)
MIN = Relation(RelationKind.MIN)
AFTER = Relation(RelationKind.AFTER)

_COMBINED = frozenset((RelationKind.SUM, RelationKind.MAX, RelationKind.MIN))
# A value that is the same everywhere is its own maximum and minimum, but no sum: the copies would add up.
_ABOVE = {
    RelationKind.ZERO: {RelationKind.INVARIANT, RelationKind.SUM, RelationKind.MAX, RelationKind.MIN},
    RelationKind.INVARIANT: {RelationKind.MAX, RelationKind.MIN},
}


def samples(dim: int, blocks: int | None, fact: Fact = None) -> Relation:
    """Return SAMPLES along a dim with `blocks` runs of samples; None where every number of runs is valid."""
    return Relation(RelationKind.SAMPLES, dim=dim, blocks=blocks, fact=fact)


def mixed(refusal: Refusal) -> Relation:
    """Return MIXED with its reason."""
    return Relation(RelationKind.MIXED, refusal=refusal)


class Disagreement(Exception):
    """The samples of several arrays are in different orders."""


def same_blocks(blocks: set[int | None]) -> int | None:
    """Return the number of runs that holds for all of several arrays; None where every number is valid.

    Raises:
        Disagreement: two arrays have different numbers of runs.
    """
    known = blocks - {None}
    if len(known) > 1:
        raise Disagreement
    return next(iter(known), None)


def join(a: Relation, b: Relation, otherwise: Refusal) -> Relation:
    """Return the least relation that holds for a value that is one of two; at worst MIXED with reason `otherwise`."""
    if a == b:
        return a
    if a.kind is RelationKind.MIXED or b.kind is RelationKind.MIXED:
        # A reason that is there already is nearer to the cause than `otherwise`.
        return a if a.kind is RelationKind.MIXED else b
    if b.kind in _ABOVE.get(a.kind, ()):
        return b
    if a.kind in _ABOVE.get(b.kind, ()):
        return a
    if a.kind is b.kind is RelationKind.SAMPLES and a.dim == b.dim:
        try:
            return samples(a.dim, same_blocks({a.blocks, b.blocks}), a.fact if a.fact == b.fact else None)
        except Disagreement:
            return mixed(otherwise)
    if a.kind is b.kind is RelationKind.RUNNING and a.total[0] == b.total[0] and "" in (a.total[1], b.total[1]):
        # A total to which nothing was added yet agrees with every reduction.
        return a if a.total[1] else b
    return mixed(otherwise)
