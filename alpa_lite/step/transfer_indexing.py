"""Transfer functions of ops that read or write by index.

    gather     from an INVARIANT array, by indices of samples            looked up per sample
               from SAMPLES, along other dims, or dims that batch        by the rule
               from SAMPLES, by own numbers                              each sample reads its own row
    scatter    the same three; and SAMPLES into an array without them    SUM (add, sub), MAX, MIN

An own number counts from the start of the full batch, and a micro-batch holds only its own rows: the op is marked with
the columns of its index vectors that must count from the start of the micro-batch (`Transferred.own_columns`). The
array to which samples are added counts once, in the first micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.rules.registry import FactorKind, ints
from alpa_lite.step.relations import (
    MAX,
    MIN,
    SUM,
    Disagreement,
    Own,
    RelationKind,
    same_blocks,
    samples,
)
from alpa_lite.step.transfer_functions import (
    AGAIN,
    MIXES,
    ORDERS,
    PART,
    Site,
    Transferred,
    counts_once,
    register_transfer,
    through_factor,
)

_PICKS = "picks samples of the batch by computed numbers"
_WRITES = "writes to samples of the batch by their numbers"
_ADDING = {"scatter-add": SUM, "scatter-sub": SUM, "scatter-max": MAX, "scatter-min": MIN}


def _index_columns(site: Site, dim: int, name: str) -> tuple[int, ...]:
    """Return the columns of the index vectors that address a dim of the operand, according to parameter `name`."""
    addressed = ints(site.op.params["dimension_numbers"][name])
    return tuple(column for column, d in enumerate(addressed) if d == dim)


def _picks_own_rows(site: Site, columns: Sequence[int]) -> bool:
    """Return whether a column of the index vectors holds own numbers that match the operand's rows in a micro-batch."""
    (operand, indices), fact = site.operands[:2], site.operands[1].fact
    if indices.kind is not RelationKind.SAMPLES or len(columns) != 1 or not isinstance(fact, Own):
        return False
    # If all elements are own numbers, index vectors of one element hold them in column 0.
    held = (0,) if fact.columns is None and site.value(1).shape[-1] == 1 else fact.columns or ()
    # With several runs, the rows of a micro-batch are not consecutive in the full batch, and no shift gives their
    # place.
    own_rows = fact.rows == site.small_value(0).shape[operand.dim] and operand.blocks in (1, None)
    return own_rows and columns[0] in held


@register_transfer("gather")
def gather(site: Site) -> Transferred:
    """Return the relations of a look-up; see the module docstring."""
    operand, indices = site.operands
    if any(not (r.is_same or r.kind is RelationKind.SAMPLES) for r in site.operands):
        return site.refused(AGAIN)
    sizes = [ints(params["slice_sizes"]) for params in (site.op.params, site.other.params)]
    # A window that spans all samples follows the batch size along this dim, and along no other.
    whole = operand.dim if operand.kind is RelationKind.SAMPLES else -1
    if any(n != m for d, (n, m) in enumerate(zip(*sizes, strict=True)) if d != whole):
        return site.refused(PART)
    if operand.kind is not RelationKind.SAMPLES:
        return through_factor(site)
    columns = _index_columns(site, operand.dim, "start_index_map")
    rule = rule_of_op(site.full, site.op.id)
    # No index addresses the batch dim: each sample looks up in its own row.
    if all(rule.kinds[f] is FactorKind.PASS for f in rule.operands[0][operand.dim]):
        return through_factor(site)
    if sizes[0][operand.dim] != 1 or not _picks_own_rows(site, columns):
        return site.refused(_PICKS)
    dim = site.batch_dim()
    if dim is None or dim != _looked_up_dim(site):
        return site.refused(MIXES)
    return Transferred(results=(samples(dim, indices.blocks),), own_columns=columns)


def _looked_up_dim(site: Site) -> int:
    """Return the dim of the result that corresponds to the batch dim of the index vectors, or -1."""
    offsets = set(ints(site.op.params["dimension_numbers"]["offset_dims"]))
    batch = [d for d in range(site.result().rank) if d not in offsets]
    return batch[site.operands[1].dim] if site.operands[1].dim < len(batch) else -1


@register_transfer("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def scatter(site: Site) -> Transferred:
    """Return the relations of an indexed write; see the module docstring."""
    operand, indices, updates = site.operands
    if operand.kind is not RelationKind.SAMPLES:
        return _into_one(site)
    if any(not (r.is_same or r.kind is RelationKind.SAMPLES) for r in site.operands):
        return site.refused(AGAIN)
    columns = _index_columns(site, operand.dim, "scatter_dims_to_operand_dims")
    if not columns:
        return through_factor(site)
    if not _picks_own_rows(site, columns) or updates.kind is not RelationKind.SAMPLES:
        return site.refused(_WRITES)
    try:
        same_blocks({indices.blocks, updates.blocks})
    except Disagreement:
        return site.refused(ORDERS)
    hidden = ints(site.op.params["dimension_numbers"]["inserted_window_dims"])
    # Each sample must fill exactly its own row: the batch dim of the operand may not be part of the window.
    if operand.dim not in hidden or updates.dim != _written_dim(site):
        return site.refused(_WRITES)
    return Transferred(results=(samples(operand.dim, 1),), own_columns=columns)


def _written_dim(site: Site) -> int:
    """Return the dim of the updates that corresponds to the batch dim of the index vectors, or -1."""
    windows = set(ints(site.op.params["dimension_numbers"]["update_window_dims"]))
    batch = [d for d in range(site.value(2).rank) if d not in windows]
    return batch[site.operands[1].dim] if site.operands[1].dim < len(batch) else -1


def _into_one(site: Site) -> Transferred:
    """Return the relations of a write of samples into an array without batch dim."""
    operand, combined = site.operands[0], _ADDING.get(site.op.primitive)
    # Micro-batches write one after another, and the full batch in an order that XLA does not define.
    if combined is None:
        return site.refused("lets one sample overwrite what another wrote")
    # An array that holds a part of the same sum (or extreme) may be added to like any other.
    held = operand._replace(kind=RelationKind.INVARIANT) if operand.kind is combined.kind else operand
    if not held.is_same:
        return site.refused(AGAIN)
    found = through_factor(replace(site, operands=(held, *site.operands[1:])))
    expected = SUM if combined is SUM else MAX if rule_of_op(site.full, site.op.id).reduction == "max" else MIN
    if found.results[0] != expected:
        return found
    if operand.kind is RelationKind.INVARIANT and combined is SUM:
        if not counts_once(site.op, 0):
            return site.refused("adds samples to an array that it reads in another place too")
        return Transferred(results=(SUM,), once=(0,))
    return Transferred(results=(combined,))


@register_transfer("dynamic_slice")
def dynamic_slice(site: Site) -> Transferred:
    """Return SAMPLES for a window over all samples at a position that is equal in all micro-batches."""
    operand, *starts = site.operands
    if operand.kind is not RelationKind.SAMPLES or any(not r.is_same for r in starts):
        return site.refused(AGAIN)
    full, small = (ints(params["slice_sizes"]) for params in (site.op.params, site.other.params))
    if any(n != m for d, (n, m) in enumerate(zip(full, small, strict=True)) if d != operand.dim):
        return site.refused(PART)
    # A window over some samples only would lie in some of the micro-batches.
    if full[operand.dim] != site.value(0).shape[operand.dim] or site.batch_dim() != operand.dim:
        return site.refused(_PICKS)
    return through_factor(site)


@register_transfer("dynamic_update_slice")
def dynamic_update_slice(site: Site) -> Transferred:
    """Return SAMPLES for an update of all samples at a position that is equal in all micro-batches."""
    operand, update, *starts = site.operands
    if any(not r.is_same for r in starts):
        return site.refused(AGAIN)
    if any(r.kind is not RelationKind.SAMPLES for r in (operand, update)) or operand.dim != update.dim:
        return site.refused(_WRITES)
    if site.value(0).shape[operand.dim] != site.value(1).shape[update.dim]:
        return site.refused(_WRITES)
    return through_factor(site)
