"""The lattice of the proof: what a value of a micro-batch is of the same value in the full-batch step.

A step runs in M micro-batches when the program at the micro-batch size, run M times, gives what the program at the
full batch gives once. Let V be a value in the full-batch step and V_m the same value in micro-batch m. Each element of
the lattice is an equation between the two:

    INVARIANT       V_m = V                        parameters, keys, counters, literals
    ZERO            V_m = V = 0                    an INVARIANT that is a SUM as well
    SAMPLES(d, k)   with dim d of V seen as [k, M, q] and that of V_m as [k, q]:
                    V_m[…, j, i, …] = V[…, j, m, i, …]
                                                   data, activations; k > 1 after [T, B] → [T·B], or a split by hand
    SUM             Σ_m V_m = V                    losses, gradients, counts
    MAX, MIN        max_m V_m = V, min_m V_m = V   extremes over samples; of truth values, `any` and `all`
    AFTER           V is known when the loop over micro-batches is done     what is computed from sums
    RUNNING         in a loop over samples: the carried total after this sample, and nothing else
    MIXED           nothing is known: statistics used again per sample, neighbours, pairs, order

k is None for a value that is the same for all samples (a broadcast): it is SAMPLES(d, k) for every k.

A SAMPLES value may be known more closely (`Relation.fact`). *Own numbers* of n rows are positions in the full batch of
which each micro-batch has its own, as those of `arange(B)` and all that is picked or repeated from it:

    Own(n)          m·n ≤ V_m < (m + 1)·n

They may be used as numbers; where they pick from an array of which each micro-batch has n rows, they pick rows that it
has, at V_m - m·n.

The order of the lattice, by `join` (which of two relations holds of both):

    ZERO ⊑ INVARIANT ⊑ MAX, MIN      ZERO ⊑ SUM      everything ⊑ MIXED
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RelationKind(Enum):
    """Which equation holds; see the module."""

    INVARIANT = "the same in every micro-batch"
    ZERO = "zero"
    SAMPLES = "per sample"
    SUM = "a sum over samples"
    MAX = "a maximum over samples"
    MIN = "a minimum over samples"
    AFTER = "known after the loop"
    RUNNING = "a running total"
    MIXED = "mixed"

    # Relations are compared and hashed for every op of a program; the default hash of an Enum is that of its name.
    __hash__ = object.__hash__


class Refusal(NamedTuple):
    """Why a value is MIXED.

    source       the line of the op that mixes
    primitive    its primitive
    shapes       the shapes of its operands in the full batch
    text         what it does, as the predicate of a sentence; a whole sentence if `primitive` is empty
    cut          into how many parts the op cuts the samples, where it would be exact if micro-batches took as many
                 rows of each part (1: it does not)
    """

    source: str
    primitive: str
    shapes: tuple[tuple[int, ...], ...]
    text: str
    cut: int = 1


class Own(NamedTuple):
    """Own numbers of so many rows; `columns`: those of the last dim that hold them, None for all elements."""

    rows: int
    columns: tuple[int, ...] | None = None


#: What is known of the numbers of SAMPLES beside their place: own numbers, or every element is that truth value.
Fact = Own | bool | None


class Relation(NamedTuple):
    """An element of the lattice.

    dim, blocks   d and k of SAMPLES; dim of SUM, MAX and MIN: a dim of samples along which all rows are alike, and each
                  is that
    fact          what more is known of SAMPLES
    total         of RUNNING: number of the carried operand, and "sum", "max", "min" or "" as long as nothing was added
    refusal       why it is MIXED
    """

    kind: RelationKind
    dim: int = -1
    blocks: int | None = None
    fact: Fact = None
    total: tuple[int, str] = (-1, "")
    refusal: Refusal | None = None

    @property
    def is_same(self) -> bool:
        """True when a micro-batch has the very value of the full batch."""
        return self.kind is RelationKind.INVARIANT or self.kind is RelationKind.ZERO

    @property
    def is_reduced(self) -> bool:
        """True when the micro-batches have parts that are combined."""
        return self.kind in _COMBINED


INVARIANT = Relation(RelationKind.INVARIANT)
ZERO = Relation(RelationKind.ZERO)
SUM = Relation(RelationKind.SUM)
MAX = Relation(RelationKind.MAX)
MIN = Relation(RelationKind.MIN)
AFTER = Relation(RelationKind.AFTER)

_COMBINED = frozenset((RelationKind.SUM, RelationKind.MAX, RelationKind.MIN))
_ABOVE = {
    RelationKind.ZERO: {RelationKind.INVARIANT, RelationKind.SUM, RelationKind.MAX, RelationKind.MIN},
    RelationKind.INVARIANT: {RelationKind.MAX, RelationKind.MIN},
}


def samples(dim: int, blocks: int | None, fact: Fact = None) -> Relation:
    """SAMPLES along a dim, which holds `blocks` runs of samples; None where every number of runs is true."""
    return Relation(RelationKind.SAMPLES, dim=dim, blocks=blocks, fact=fact)


def mixed(refusal: Refusal) -> Relation:
    """MIXED, and why."""
    return Relation(RelationKind.MIXED, refusal=refusal)


class Disagreement(Exception):
    """Samples are in different orders."""


def same_blocks(blocks: set[int | None]) -> int | None:
    """The number of runs that holds of all. Raises `Disagreement` where there is none."""
    known = blocks - {None}
    if len(known) > 1:
        raise Disagreement
    return next(iter(known), None)


def join(a: Relation, b: Relation, otherwise: Refusal) -> Relation:
    """The least relation that holds of a value that is one of two; MIXED for the reason `otherwise` at worst."""
    if a == b:
        return a
    if a.kind is RelationKind.MIXED or b.kind is RelationKind.MIXED:
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
        return a if a.total[1] else b
    return mixed(otherwise)
