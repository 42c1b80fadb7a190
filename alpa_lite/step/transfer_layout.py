"""Transfer functions of ops that create, move, join and divide arrays.

With P runs of samples in front of the batch in row-major order (dims before it times its runs k), a reshape preserves
P:

    reshape        SAMPLES(d, k) → SAMPLES(e, P / prod(shape[:e]))           [B, T] → [B·T], [T, B] → [T·B] and back
    concatenate    runs of equal length add up:   k = Σ k_i                  [x; 2x] has two runs
    split, slice   whole runs:                    k of them remain
    of a sum       repeated for each sample: one of the repetitions is the sum again         psum under vmap
    slice by s     rows i·s + c of each run, where s divides a run
    pad            the transposes of both: runs of padding, or padding between rows

Ops without operands (iota, random bits) are lowered with the position of a micro-batch in the full batch; they are
SAMPLES(d, 1), and an iota along the batch holds own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from alpa_lite.program.ir import TO_DEVICE, TO_HOST
from alpa_lite.step.relations import Fact, Own, Relation, RelationKind, samples
from alpa_lite.step.transfer_functions import (
    AGAIN,
    MIXES,
    ODD,
    PART,
    UNEVEN,
    Site,
    Transferred,
    by_rule,
    register_transfer,
    through_factor,
)

#: Integer dtypes that can hold any position in a batch.
WIDE = frozenset(("int32", "int64", "uint32", "uint64"))


def one(relation: Relation) -> Transferred:
    """Return the result of a transfer function for an op with one result."""
    return Transferred(results=(relation,))


@register_transfer("iota")
def iota(site: Site) -> Transferred:
    """Return own numbers for an iota along the batch, and one row for all samples for an iota along another dim."""
    dim = site.batch_dim()
    if dim is None or dim == ODD:
        return site.refused(MIXES)
    # All samples then have the same row, so that every number of runs is valid.
    if site.op.params["dimension"] != dim:
        return one(samples(dim, None))
    rows = site.small_result().shape[dim]
    return one(samples(dim, 1, Own(rows) if site.result().dtype in WIDE else None))


@register_transfer("random_bits", "random_split")
def drawn(site: Site) -> Transferred:
    """Return SAMPLES for random bits: drawn per sample from its key, or by position from one key.

    A sample's bits from one key depend only on its position in the full batch, so micro-batches draw the same ones.
    """
    dim, (keys,) = site.batch_dim(), site.operands
    if keys.kind is RelationKind.SAMPLES:
        return through_factor(site)
    if not keys.is_same:
        return site.refused(AGAIN)
    return site.refused(MIXES) if dim is None or dim == ODD else one(samples(dim, 1))


@register_transfer("broadcast_in_dim", "empty")
def broadcast_in_dim(site: Site) -> Transferred:
    """Return SAMPLES where samples move with their dim, and one row for all where the operand has none."""
    dim = site.batch_dim()
    if dim is None or dim == ODD:
        return site.refused(UNEVEN if all(r.is_same for r in site.operands) else MIXES)
    source = site.operands[0] if site.operands else None
    if source is None or source.is_same:
        targets = site.op.params.get("broadcast_dimensions", ())
        # A dim of full size is copied, not broadcast: an INVARIANT array cannot have one that follows the batch.
        kept = [d for d, t in enumerate(targets) if t == dim and site.value(0).shape[d] != 1]
        return site.refused(MIXES) if kept else one(samples(dim, None))
    targets = site.op.params["broadcast_dimensions"]
    if source.is_reduced and source.dim < 0 and dim not in targets:
        return one(source._replace(dim=dim))
    if source.kind is not RelationKind.SAMPLES:
        return site.refused(AGAIN)
    if targets[source.dim] != dim:
        return site.refused(MIXES)
    return one(samples(dim, source.blocks, _moved_fact(site, source, last=targets[-1] == site.result().rank - 1)))


def _moved_fact(site: Site, source: Relation, *, last: bool) -> Fact:
    """Return the fact of an array after its elements moved along with their samples.

    Own numbers in columns survive only if `last`: the last dim is still the last one, and is not the batch.
    """
    if not isinstance(source.fact, Own) or source.fact.columns is None:
        return source.fact
    unchanged = site.value(0).shape[-1] == site.result().shape[-1]
    return source.fact if last and unchanged and source.dim != site.value(0).rank - 1 else None


@register_transfer("reshape")
def reshape(site: Site) -> Transferred:
    """Return SAMPLES with the number of runs in front of the batch preserved; see the module docstring."""
    source, dim = site.operands[0], site.batch_dim()
    if source.kind is not RelationKind.SAMPLES:
        return site.refused(AGAIN)
    if dim is None or dim == ODD:
        return site.refused(_merges(site))
    # With the parameter `dimensions`, the op transposes before it reshapes.
    order = tuple(site.op.params.get("dimensions") or range(site.value(0).rank))
    shape, place = [site.value(0).shape[d] for d in order], order.index(source.dim)
    before = prod(site.result().shape[:dim])
    if source.blocks is None:
        # Equal rows stay equal in a dim that holds a part of the batch and nothing else.
        parts, rest = divmod(before, prod(shape[:place]))
        if not rest and shape[place] % (parts * site.result().shape[dim]) == 0:
            return one(samples(dim, None))
    runs = prod(shape[:place]) * (source.blocks or 1)
    rows = site.small_result().shape[dim]
    if runs % before or rows % (runs // before or 1) or not runs // before:
        parts, rest = divmod(before, runs)
        return site.refused(_merges(site), 1 if rest else parts)
    last = order[-1] == len(order) - 1 and source.dim != order[-1] and dim != site.result().rank - 1
    return one(samples(dim, runs // before, _moved_fact(site, source, last=last)))


def _merges(site: Site) -> str:
    return f"to {list(site.result().shape)} puts the samples of the batch in other groups than micro-batches have"


@register_transfer("concatenate")
def concatenate(site: Site) -> Transferred:
    """Return SAMPLES for a concatenation.

    Along the batch, runs of equal length follow each other; along another dim, samples stay in place.
    """
    joined, dim = int(site.op.params["dimension"]), site.batch_dim()
    if dim is None or dim == ODD:
        return site.refused(MIXES)
    if joined != dim:
        found = by_rule(site)
        fact = _column_fact(site, joined)
        if fact and found.results[0].kind is RelationKind.SAMPLES:
            return one(found.results[0]._replace(fact=fact))
        return found
    if any(r.kind is not RelationKind.SAMPLES for r in site.operands):
        return site.refused(MIXES if all(r.is_same or r.kind is RelationKind.SAMPLES for r in site.operands) else AGAIN)
    if any(r.dim != dim for r in site.operands):
        return site.refused(MIXES)
    runs = _added_runs([site.runs(i) for i in range(len(site.operands))])
    return one(samples(dim, runs)) if runs != 0 else site.refused(MIXES)


def _added_runs(runs: Sequence[tuple[int | None, int]]) -> int | None:
    """Return the number of runs of arrays put one after the other; 0 where their runs differ in length."""
    lengths = {rows for count, rows in runs if count is not None}
    if not lengths:
        # Each array is uniform along the batch, but the arrays may differ, so each boundary ends a run.
        lengths = {min(rows for _, rows in runs)}
    if len(lengths) > 1:
        return 0
    length = lengths.pop()
    if any(rows % length for count, rows in runs if count is None):
        return 0
    return sum(rows // length if count is None else count for count, rows in runs)


def _column_fact(site: Site, joined: int) -> Fact:
    """Return the fact of index vectors that are concatenated from own numbers and other columns."""
    if joined != site.result().rank - 1:
        return None
    columns: list[int] = []
    rows = {r.fact.rows for r in site.operands if isinstance(r.fact, Own)}
    first = 0
    for i, relation in enumerate(site.operands):
        width = site.value(i).shape[joined]
        if isinstance(relation.fact, Own):
            own = range(width) if relation.fact.columns is None else relation.fact.columns
            columns += [first + c for c in own]
        first += width
    # Own numbers of arrays of different lengths shift by different amounts.
    return Own(rows.pop(), tuple(columns)) if len(rows) == 1 else None


@register_transfer("split")
def split(site: Site) -> Transferred:
    """Return SAMPLES for a split along the batch into whole runs; any other split follows its rule."""
    axis, source = int(site.op.params["axis"]), site.operands[0]
    if source.kind is not RelationKind.SAMPLES or source.dim != axis:
        return by_rule(site) if _same_sizes(site) else site.refused(MIXES)
    results: list[Relation] = []
    start = small_start = 0
    for number in range(len(site.op.results)):
        size, small = site.result(number).shape[axis], site.small_result(number).shape[axis]
        part = _whole_runs(site, (start, start + size), (small_start, small_start + small))
        if part is None:
            return site.refused(MIXES)
        results.append(part)
        start, small_start = start + size, small_start + small
    return Transferred(results=tuple(results))


def _same_sizes(site: Site) -> bool:
    """Return whether the parts have the same sizes in the full batch and in a micro-batch."""
    return site.op.params["sizes"] == site.other.params["sizes"]


def _whole_runs(site: Site, rows: tuple[int, int], small: tuple[int, int]) -> Relation | None:
    """Return SAMPLES for rows (first, last + 1) along the batch dim at both sizes, or None if they divide a run."""
    source = site.operands[0]
    count, length = site.runs(0)
    # Rows that are all alike may be cut anywhere: the part counts as one run.
    if source.blocks is None:
        length = small[1] - small[0]
    if (
        not length
        or any(n % length for n in small)
        or any(n != m * site.count for n, m in zip(rows, small, strict=True))
    ):
        return None
    return samples(source.dim, None if count is None else (small[1] - small[0]) // length, source.fact)


@register_transfer("slice")
def slice_(site: Site) -> Transferred:
    """Return SAMPLES for a slice along the batch of whole runs, or of every s-th row of each run.

    A slice along another dim leaves samples in place.
    """
    source = site.operands[0]
    dim, rank = source.dim, site.value(0).rank
    if source.is_reduced and dim >= 0 and site.result().shape[dim] == 1:
        return one(source._replace(dim=-1))  # any of the rows, which are all alike
    if source.kind is not RelationKind.SAMPLES:
        # Rows of a table by the numbers of the samples, for one.
        return site.refused(PART if source.is_same else AGAIN)
    (full, small) = site.op.params, site.other.params
    # None stands for strides of 1.
    strides = full.get("strides") or (1,) * rank
    ends = ("start_indices", "limit_indices")
    if any(full[name][d] != small[name][d] for name in ends for d in range(rank) if d != dim):
        return site.refused(PART)
    if site.batch_dim() != dim:
        return site.refused("picks samples of the batch by their numbers")
    start, limit = full["start_indices"][dim], full["limit_indices"][dim]
    if strides[dim] == 1:
        part = _whole_runs(site, (start, limit), (small["start_indices"][dim], small["limit_indices"][dim]))
    else:
        part = _every_row(site, strides[dim])
    if part is None:
        return site.refused("picks samples of the batch by their numbers")
    # A slice of the last dim renumbers the columns that hold own numbers.
    cut = isinstance(part.fact, Own) and part.fact.columns and site.value(0).shape[-1] != site.result().shape[-1]
    return one(part._replace(fact=None) if cut else part)


def _every_row(site: Site, stride: int) -> Relation | None:
    """Return SAMPLES for every `stride`-th row of each run, or None if the stride does not divide a run."""
    source, (count, length) = site.operands[0], site.runs(0)
    dim = source.dim
    starts = site.op.params["start_indices"][dim], site.other.params["start_indices"][dim]
    sizes = site.value(0).shape[dim], site.small_value(0).shape[dim]
    made = site.result().shape[dim], site.small_result().shape[dim]
    covered = all(n == m * stride for n, m in zip(sizes, made, strict=True))
    if length % stride or starts[0] != starts[1] or starts[0] >= stride or not covered:
        return None
    return samples(dim, count, source.fact)


@register_transfer("pad")
def pad(site: Site) -> Transferred:
    """Return SAMPLES for whole runs of padding along the batch, or padding around each row.

    Padding along another dim leaves samples in place.
    """
    source, padding = site.operands
    if source.kind is not RelationKind.SAMPLES or not padding.is_same:
        return site.refused(AGAIN)
    dim, both = source.dim, zip(site.op.params["padding_config"], site.other.params["padding_config"], strict=True)
    if any(config != small for d, (config, small) in enumerate(both) if d != dim):
        return site.refused("adds padding that follows the batch size")
    return site.refused("adds padding between samples") if site.batch_dim() != dim else _padded(site, source, dim)


def _padded(site: Site, source: Relation, dim: int) -> Transferred:
    """Return the relations of padding along the batch dim."""
    low, high, interior = site.op.params["padding_config"][dim]
    small = site.other.params["padding_config"][dim]
    count, length = site.runs(0)
    if (low, high, interior) == (0, 0, 0):
        return one(samples(dim, count))
    # Each row has `interior` rows of padding of its own, so that all samples are alike.
    if interior and low + high == interior and tuple(small) == (low, high, interior):
        return one(samples(dim, count))
    # The micro-batches together must have as much padding as the full batch.
    in_proportion = all(n == m * site.count for n, m in zip((low, high), small[:2], strict=True))
    if interior or not in_proportion or min(low, high) < 0 or any(n % length for n in small[:2]):
        return site.refused("adds padding between samples")
    # Padding counts as runs of the same length as the others.
    before, after = small[0] // length, small[1] // length
    return one(samples(dim, before + (1 if count is None else count) + after))


@register_transfer("tile")
def tile(site: Site) -> Transferred:
    """Return SAMPLES with more runs for repeated samples; an INVARIANT operand repeated per sample is uniform."""
    source, dim = site.operands[0], site.batch_dim()
    reps, small = (params["reps"] for params in (site.op.params, site.other.params))
    # Repetitions along any other dim must not depend on the batch size.
    if dim is None or dim == ODD or any(n != m for d, (n, m) in enumerate(zip(reps, small, strict=True)) if d != dim):
        return site.refused("repeats what follows the batch size")
    if source.is_same:
        # `reps` along the batch differ by the factor `count`, so every micro-batch starts with a repetition.
        return one(samples(dim, None if site.value(0).shape[dim] == 1 else 1))
    if source.kind is not RelationKind.SAMPLES:
        return site.refused(AGAIN)
    if dim != source.dim or reps[dim] != small[dim]:
        return site.refused(MIXES)
    return one(samples(dim, None if source.blocks is None else source.blocks * int(reps[dim])))


@register_transfer("optimization_barrier", "device_put", TO_HOST, TO_DEVICE)
def barrier(site: Site) -> Transferred:
    """Return the relations of the operands unchanged."""
    return Transferred(results=tuple(site.operands))


@register_transfer("convert_element_type", "copy", "stop_gradient", "transpose", "squeeze", "expand_dims")
def keeps_numbers(site: Site) -> Transferred:
    """Return the relation by the rule; own numbers stay own numbers."""
    found, (source, *_) = by_rule(site), site.operands
    (result,) = found.results
    in_place = site.op.primitive in ("convert_element_type", "copy", "stop_gradient")
    # Columns are counted along the last dim, which the other ops may move or remove.
    known = isinstance(source.fact, Own) and (source.fact.columns is None or in_place)
    if known and result.kind is RelationKind.SAMPLES and site.result().dtype in WIDE:
        return one(result._replace(fact=source.fact))
    return found


@register_transfer("lt", "ge")
def compared(site: Site) -> Transferred:
    """Return the relation by the rule; comparing own numbers with zero is decided, since none is negative."""
    found = by_rule(site)
    (result,) = found.results
    # JAX compares an index with 0 to count negative ones from the end; here the outcome is known.
    is_own = isinstance(site.operands[0].fact, Own) and site.operands[0].fact.columns is None
    if result.kind is RelationKind.SAMPLES and is_own and site.value(1).literal == 0:
        return one(result._replace(fact=site.op.primitive == "ge"))
    return found


@register_transfer("select_n")
def select_n(site: Site) -> Transferred:
    """Return the relation by the rule; with a decided predicate, the fact of the selected case holds."""
    found = by_rule(site)
    (result,) = found.results
    which = site.operands[0].fact
    if result.kind is RelationKind.SAMPLES and isinstance(which, bool):
        chosen = site.operands[1 + int(which)]
        return one(result._replace(fact=chosen.fact if chosen.kind is RelationKind.SAMPLES else None))
    return found
