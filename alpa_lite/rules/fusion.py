"""A model of fusion in a compiler: the arrays of a graph that pass through device memory, and the kernels that run.

    level(op)   = the most kernels that cannot be fused (products, sorts, loops, …) on a path from the inputs, or that
                  of its first reader if it reads no more than it writes (a moment that decays)                (_levels)
    group       = element-wise ops of one level that read each other's arrays: one kernel              (fusion_groups)
    traffic     = each array that enters a group is read once, each that leaves it is written once        (accesses)

A group may hold reductions of rows (a norm, a softmax): a kernel stores a row on chip, reads it once and reduces it.
Other reductions end their group. Two ops of one level that have a path between them have no kernel on it, so groups
can run as wholes. XLA's fusion passes follow the same lines on GPU and TPU; the difference is an error of the estimate,
a few per cent of the bytes.

Attention as one kernel (Dao et al., NeurIPS 2022, arXiv 2205.14135) never writes the scores to memory. `on_chip`
returns the arrays that such a kernel would not write: results of products that are larger than their operands, and
everything computed from them element by element or by row, until other products make it small again. Only a softmax,
or its derivative, between the products makes it attention: other batched products, as of experts, are no such kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from alpa_lite.program.ir import MOVES, Graph, Op, item_bytes
from alpa_lite.program.memo import memoized
from alpa_lite.rules.op_info import free_values, ranked_values, rule_of_op
from cost_models.hardware import Fusion

if TYPE_CHECKING:
    import networkx as nx

#: Ops that compilers always fold into their readers: they neither compute nor write anything of their own.
FOLDED = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims iota optimization_barrier copy stop_gradient empty name "
    "sharding_constraint user_sharding random_wrap random_unwrap bitcast_convert_type xla_metadata_value".split()
)
#: Ops that look up or update rows: they are fused with nothing, and move only the rows that they touch.
_INDEXED = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice")
#: Ops that combine neighbouring elements.
_WINDOWED = ("reduce_window", "select_and", "cum")
_UNFUSED = (
    *_WINDOWED,
    *("sort", "argsort", "top_k", "approx_top_k", "random_bits", "rng_"),
    *("pallas_call", "custom_partitioning"),
    *sorted(MOVES),
)
#: Instructions per element of element-wise ops of many; those of XLA:GPU lie between what it repeats and what it stores
#: (derivatives of SiLU, GELU and the like in float32 and bfloat16, compiled for A100 and H100).
_INSTRUCTIONS = {
    **dict.fromkeys("exp exp2 expm1 log log1p logistic rsqrt sqrt".split(), 16),
    **dict.fromkeys("tanh tan sin cos".split(), 60),
    **dict.fromkeys("atan2 erf erfc erf_inv pow cbrt lgamma".split(), 120),
}
#: The longest row that a kernel stores on chip, in elements.
LONGEST_ROW = 1 << 16


class OperandSlot(NamedTuple):
    """An operand or a result of an op, by its number; only `part` of its bytes are moved if it is a broadcast."""

    is_result: bool
    number: int
    part: float = 1.0


class Access(NamedTuple):
    """The operands and results that an op reads from and writes to memory, and its number of kernels (0 or 1)."""

    reads: tuple[OperandSlot, ...] = ()
    writes: tuple[OperandSlot, ...] = ()
    num_kernels: int = 0


_NOTHING = Access()
#: Copies to the host and back run on the link to it, beside kernels; they write the array, and no kernel.
_MOVED = Access(writes=(OperandSlot(True, 0),))


@dataclass(frozen=True, slots=True, kw_only=True)
class OnChip:
    """The effect of fused attention kernels on a graph.

    values        values that are never written to memory
    products      products inside the kernels
    half_masked   products of which the kernels skip half, because of a causal mask
    """

    values: frozenset[int]
    products: frozenset[int]
    half_masked: frozenset[int]


@memoized
def accesses(graph: Graph, *, fusion: Fusion = "all", fused_attention: bool = False) -> tuple[Access, ...]:
    """Return the memory traffic of each op of a graph, without its bodies. See `Backend` for kinds of `fusion`."""
    if fusion == "none":
        return tuple(_alone(graph, op) for op in graph.ops)
    groups, hidden = (
        fusion_groups(graph, within_calls=fusion == "calls"),
        on_chip(graph).values if fused_attention else frozenset[int](),
    )
    free = free_values(graph)
    unread = free | hidden
    outputs, seen = set(graph.outputs), set[tuple[int, int]]()
    shown, ranked, read_by = _shown(graph), ranked_values(graph), _read_by(graph, groups)
    # The kernel of a group is charged to its last op: the dict keeps the last of each group.
    last = {groups[op.id]: op.id for op in graph.ops if _runs(graph, op, free, outputs)}
    found: list[Access] = []
    for op in graph.ops:
        group = groups[op.id]
        if op.bodies or (is_folded(graph, op) and not _leaves(graph, op, outputs)):
            found.append(_NOTHING)
            continue
        if op.primitive.startswith(_INDEXED):
            found.append(_indexed(graph, op))
            continue
        if op.primitive in MOVES:
            found.append(_MOVED)
            continue
        reads: list[OperandSlot] = []
        for number, v in enumerate(op.operands):
            # Folded ops between the array and its reader move nothing; a group reads each array once.
            source = shown[v]
            producer = graph.producer[source]
            inside = producer is not None and groups[producer] == group
            if source in unread or inside or source not in ranked or (group, source) in seen:
                continue
            seen.add((group, source))
            reads.append(_read(graph, op, number))
        writes = tuple(
            OperandSlot(True, number)
            for number, v in enumerate(op.results)
            if v not in unread and v in ranked and read_by[v] not in (None, group)
        )
        found.append(Access(reads=tuple(reads), writes=writes, num_kernels=int(last.get(group) == op.id)))
    return tuple(found)


@memoized
def _outputs(graph: Graph) -> frozenset[int]:
    return frozenset(graph.outputs)


def _alone(graph: Graph, op: Op) -> Access:
    """Return the traffic of an op that is fused with nothing: all of its operands and results."""
    if op.bodies or not _runs(graph, op, free_values(graph), _outputs(graph)):
        return _NOTHING
    if op.primitive.startswith(_INDEXED):
        return _indexed(graph, op)
    if op.primitive in MOVES:
        return _MOVED
    reads = tuple(_read(graph, op, i) for i, v in enumerate(op.operands) if graph.values[_shown(graph)[v]].rank > 0)
    return Access(reads=reads, writes=tuple(OperandSlot(True, i) for i in range(len(op.results))), num_kernels=1)


@memoized
def fusion_groups(graph: Graph, *, within_calls: bool = False) -> tuple[int, ...]:
    """Return for each op the number of its group, which is its first op.

    `within_calls`: ops share a group only if a library has one call for both (`_one_call`).
    """
    levels, parent, free = _levels(graph), list(range(len(graph.ops))), free_values(graph)
    fusible, inner, ranked = _fusible(graph), _fused_with_readers(graph), ranked_values(graph)

    def root(op: int) -> int:
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    for op in graph.ops:
        if not fusible[op.id]:
            continue
        for v in op.operands:
            producer = graph.producer[v]
            if producer is None or v not in ranked or v in free or levels[producer] != levels[op.id]:
                continue
            made_by = graph.ops[producer]
            if within_calls and not (is_folded(graph, made_by) or is_folded(graph, op) or _one_call(made_by, op)):
                continue
            if inner[producer]:
                # The smaller number is the root, so that a group is named by its first op.
                first, second = sorted((root(producer), root(op.id)))
                parent[second] = first
    return tuple(root(op) for op in range(len(graph.ops)))


def _one_call(made_by: Op, op: Op) -> bool:
    """Return True for an op and its reader that a library runs in one call: both in one named scope, or on one line.

    Parts of arrays are views, and their gradients are assembled by the reader.
    """
    if made_by.primitive in ("slice", "pad"):
        return True
    scope = _scope(op)
    return scope == _scope(made_by) if scope else made_by.source == op.source


def _scope(op: Op) -> str:
    """Return the name stack of an op inside `jax.named_scope`; "" outside."""
    # Transformations add names of their own to the stack.
    names = re.sub(r"\b(jvp|transpose|vmap|checkpoint|rematted_computation)\b|[()/]", "", op.name_stack)
    return op.name_stack if names else ""


def is_fusible(graph: Graph, op: Op) -> bool:
    """Return True for ops that compute, element by element or by row, inside any kernel that reads their results."""
    return _fusible(graph)[op.id]


def is_repeatable(graph: Graph, op: Op, *, instructions_per_byte: float = 0.0) -> bool:
    """Return True for fusible ops that compilers rather repeat in each reading kernel than store.

    They take few instructions per element, or fewer than so many for each byte that is stored.
    """
    # A reduction would read all of its operand again.
    if reduces(graph, op) or op.primitive.startswith("arg"):
        return False
    bytes_stored = item_bytes(graph.values[op.results[0]].dtype)
    return is_fusible(graph, op) and _INSTRUCTIONS.get(op.primitive, 0) <= instructions_per_byte * bytes_stored


def reduces(graph: Graph, op: Op) -> bool:
    """Return True for reductions. Those over dims of size 1 only rename their operand."""
    # `reduce_precision` rounds each element, in spite of its name.
    if not op.primitive.startswith("reduce_") or op.primitive == "reduce_precision":
        return False
    return graph.values[op.results[0]].num_elements < graph.values[op.operands[0]].num_elements


def may_overwrite(graph: Graph, op: Op) -> bool:
    """Return True for ops whose kernel reads each element of an operand before it writes the same one of its result.

    Ops that search windows read neighbours of it later. Products read operands until they end.
    """
    if rule_of_op(graph, op.id).work_kind != "elementwise":
        return False
    return not op.primitive.startswith(_WINDOWED)


def reads_several(graph: Graph, op: Op) -> bool:
    """Return True for ops that read more than one array of at least the size of their result, broadcasts excepted."""
    shown, size = _shown(graph), graph.values[op.results[0]].num_elements
    return len({shown[v] for v in op.operands if graph.values[shown[v]].num_elements >= size}) > 1


def is_folded(graph: Graph, op: Op) -> bool:
    """Return True for ops that move nothing: those that only rename, and transpositions next to a product."""
    return _folded(graph)[op.id]


@memoized
def take_addends(graph: Graph) -> tuple[bool, ...]:
    """Return for each op whether the kernel that makes its result can add it to an array that is there.

    Products start from an addend, and an addition is fused with element-wise ops.
    """
    found: list[bool] = []
    for op in graph.ops:
        source = graph.producer[op.operands[0]] if op.operands and is_folded(graph, op) else None
        product = not op.bodies and rule_of_op(graph, op.id).work_kind == "matmul"
        found.append(found[source] if source is not None else product or is_fusible(graph, op))
    return tuple(found)


@memoized
def _folded(graph: Graph) -> tuple[bool, ...]:
    return tuple([_is_folded(graph, op) for op in graph.ops])


def _is_folded(graph: Graph, op: Op) -> bool:
    if op.primitive != "transpose":
        return op.primitive in FOLDED
    # Products read and write their operands in any order of dims.
    producer = graph.producer[op.operands[0]]
    if producer is not None and rule_of_op(graph, producer).work_kind != "elementwise":
        return True
    readers = graph.consumers[op.results[0]]
    return bool(readers) and all(rule_of_op(graph, reader).work_kind != "elementwise" for reader in readers)


def _levels(graph: Graph) -> list[int]:
    """Return the level of each op; see the module docstring."""
    after, inner = [0] * len(graph.values), _fused_with_readers(graph)
    levels: list[int] = []
    for op in graph.ops:
        level = max([after[v] for v in op.operands], default=0)
        levels.append(level)
        for v in op.results:
            after[v] = level if inner[op.id] else level + 1
    outputs, sizes = set(graph.outputs), [v.bytes for v in graph.values]
    # Ops that may run later join their first reader, in reverse order so that chains of them move together.
    for op in reversed(graph.ops):
        if inner[op.id] and _shrinks_late(graph, op, outputs, sizes):
            levels[op.id] = max(levels[op.id], min([levels[c] for r in op.results for c in graph.consumers[r]]))
    return levels


def _shrinks_late(graph: Graph, op: Op, outputs: Set[int], sizes: Sequence[int]) -> bool:
    """Return True for ops that should run where they are read: their operands are no larger than their results."""
    if not any([graph.consumers[r] for r in op.results]) or not outputs.isdisjoint(op.results):
        return False
    shown, ranked = _shown(graph), ranked_values(graph)
    read = {shown[v] for v in op.operands if v in ranked}
    return sum([sizes[v] for v in read]) <= sum([sizes[r] for r in op.results])


@memoized
def _fused_with_readers(graph: Graph) -> tuple[bool, ...]:
    """Return for each op whether the kernel that computes it may continue with its readers."""
    fusible = _fusible(graph)
    return tuple([fusible[op.id] and not _ends_group(graph, op) for op in graph.ops])


@memoized
def _fusible(graph: Graph) -> tuple[bool, ...]:
    return tuple([_is_fusible(graph, op) for op in graph.ops])


def _is_fusible(graph: Graph, op: Op) -> bool:
    if is_folded(graph, op):
        return True
    rule = rule_of_op(graph, op.id)
    if op.bodies or rule.opaque or rule.work_kind != "elementwise":
        return False
    return not op.primitive.startswith((*_INDEXED, *_UNFUSED))


def _ends_group(graph: Graph, op: Op) -> bool:
    """Return True for reductions whose result is known only after the kernel has read everything."""
    # `reduce_precision` rounds each element, in spite of its name.
    if not op.primitive.startswith(("reduce_", "arg")) or op.primitive == "reduce_precision":
        return False
    # Dims of size 1 do not separate the reduced dims from the end of a row.
    shape = graph.values[op.operands[0]].shape
    dims = [dim for dim, size in enumerate(shape) if size > 1]
    given = {int(axis) for axis in op.params.get("axes", op.params.get("dimensions", ()))}
    axes = [dim for dim in dims if dim in given]
    trailing = axes == dims[len(dims) - len(axes) :]
    row = prod(shape[axis] for axis in axes)
    return not trailing or row > LONGEST_ROW


def _runs(graph: Graph, op: Op, free: frozenset[int], outputs: Set[int]) -> bool:
    """Return True for ops that run a kernel: no folded ones, nor those on scalars and free values alone."""
    if is_folded(graph, op) and not _leaves(graph, op, outputs):
        return False
    ranked = ranked_values(graph)
    return any([v in ranked and v not in free for v in (*op.operands, *op.results)])


def _read(graph: Graph, op: Op, number: int) -> OperandSlot:
    """Return the slot of an operand, counted with the bytes of the array behind folded ops."""
    shown, source = graph.values[op.operands[number]], graph.values[_shown(graph)[op.operands[number]]]
    return OperandSlot(False, number, min(1.0, source.bytes / max(1, shown.bytes)))


@memoized
def _shown(graph: Graph) -> tuple[int, ...]:
    """Return for each value the one from which it comes by a chain of folded ops with one operand."""
    shown = list(range(len(graph.values)))
    for op in graph.ops:
        if len(op.operands) == 1 and is_folded(graph, op):
            for r in op.results:
                shown[r] = shown[op.operands[0]]
    return tuple(shown)


def _read_by(graph: Graph, groups: Sequence[int]) -> list[int | None]:
    """Return for each value the group that reads it, also through folded ops; None if none does.

    It is `_SEVERAL` for values that several groups read, and for outputs of the graph.
    """
    found: list[int | None] = [None] * len(graph.values)
    for v in graph.outputs:
        found[v] = _SEVERAL
    for op in reversed(graph.ops):
        # In reverse, a folded op is met after its readers, whose groups it passes on to its operands.
        readers = {found[r] for r in op.results} if is_folded(graph, op) else {groups[op.id]}
        for v in op.operands:
            others = readers | {found[v]}
            others.discard(None)
            if others:
                found[v] = others.pop() if len(others) == 1 else _SEVERAL
    return found


_SEVERAL = -1


def _leaves(graph: Graph, op: Op, outputs: Set[int]) -> bool:
    """Return True for a folded op that has to write after all: a broadcast that is an output of the graph."""
    if op.primitive != "broadcast_in_dim" or not any(r in outputs for r in op.results):
        return False
    (source,) = op.operands
    return graph.values[source].num_elements < graph.values[op.results[0]].num_elements


def _indexed(graph: Graph, op: Op) -> Access:
    """Return the traffic of look-ups, which read and write rows, and of updates, which read, combine and write rows."""
    if op.primitive.startswith("scatter"):
        update = OperandSlot(False, 2)
        # The rows that are updated are read as well: they have as many bytes as the update.
        return Access(reads=(update, update, OperandSlot(False, 1)), writes=(update,), num_kernels=1)
    if op.primitive == "dynamic_update_slice":
        return Access(reads=(OperandSlot(False, 1),), writes=(OperandSlot(False, 1),), num_kernels=1)
    indices = (OperandSlot(False, 1),) if op.primitive == "gather" else ()
    return Access(reads=(OperandSlot(True, 0), *indices), writes=(OperandSlot(True, 0),), num_kernels=1)


# ------------------------------------------------------------------------------------------------ fused attention


@memoized
def on_chip(graph: Graph) -> OnChip:
    """Return the effect of fused attention kernels on a graph."""
    scores = {op.results[0] for op in graph.ops if _makes_scores(graph, op)}
    # Ops are in execution order, so that one pass reaches everything that derives from the scores.
    region = set(scores)
    for op in graph.ops:
        if is_fusible(graph, op) and any(v in region for v in op.operands):
            region.update(op.results)
    # Small values of the region, such as the sums of rows, may be written: they cost little.
    least = min((graph.values[s].num_elements for s in scores), default=0)
    large = {v for v in region if graph.values[v].num_elements >= least}
    # A value that is needed outside of the kernel is written; then the values that it is computed from may no longer
    # stay on chip either.
    while escaping := {v for v in large if not _stays(graph, v, large)}:
        large -= escaping
    # Experts and other batched products make large results too; a softmax of the scores is what makes it attention.
    reducing = (op for op in graph.ops if op.operands and op.operands[0] in large)
    softmax = {op.operands[0] for op in reducing if _is_of_softmax(graph, op, large)}
    kernels = [kernel for kernel in _kernels(graph, large) if kernel & softmax]
    large = set[int]().union(*kernels)
    masked = _masked_by_pairs(graph, large, kernels)
    inside, halves = (
        frozenset(op.id for op in graph.ops if _is_product(graph, op) and values & {*op.operands, *op.results})
        for values in (large, masked)
    )
    return OnChip(values=frozenset(large), products=inside, half_masked=halves)


def _is_of_softmax(graph: Graph, op: Op, large: Set[int]) -> bool:
    """Return True for a reduction of a softmax or of its derivative.

    It sums exponentials, or what it reduces is computed with the result: less its maximum, or less its sum times a
    probability. Sums for the gradient of a bias are of neither kind.
    """
    if op.primitive not in ("reduce_sum", "reduce_max"):
        return False
    maker = graph.producer[op.operands[0]]
    if maker is not None and graph.ops[maker].primitive in ("exp", "exp2"):
        return True
    reached, ahead = set(op.results), list(op.results)
    while ahead:
        for reader in graph.consumers[ahead.pop()]:
            if not is_fusible(graph, graph.ops[reader]):
                continue
            results = set(graph.ops[reader].results)
            if results & large:
                return True
            ahead += results - reached
            reached |= results
    return False


def _kernels(graph: Graph, large: set[int]) -> list[set[int]]:
    """Return the values on chip by kernel: those that an op reads or makes together belong to one."""
    import networkx as nx

    kernels: nx.Graph[int] = nx.Graph()
    for op in graph.ops:
        held = [v for v in (*op.operands, *op.results) if v in large]
        kernels.add_nodes_from(held)
        kernels.add_edges_from(pairwise(held))
    return list(nx.connected_components(kernels))


def _masked_by_pairs(graph: Graph, large: set[int], kernels: Sequence[set[int]]) -> set[int]:
    """Return the values of the kernels in which a mask over pairs of positions hides half of the scores."""
    hidden = {
        op.results[0]
        for op in graph.ops
        if op.primitive == "select_n" and op.results[0] in large and _is_pair_mask(graph, op.operands[0])
    }
    return set[int]().union(*(kernel for kernel in kernels if kernel & hidden))


def _is_product(graph: Graph, op: Op) -> bool:
    return rule_of_op(graph, op.id).work_kind == "matmul"


def _makes_scores(graph: Graph, op: Op) -> bool:
    """Return True for a batched product whose result is larger than its operands together, as attention scores are."""
    if not _is_product(graph, op) or graph.values[op.results[0]].rank < 3:
        return False
    rule = rule_of_op(graph, op.id)
    batched = (
        set[int]().union(*rule.operands[0]) & set[int]().union(*rule.operands[1]) & set[int]().union(*rule.results[0])
    )
    return bool(batched) and graph.values[op.results[0]].num_elements > sum(v.num_elements for v in graph.operands(op))


def _stays(graph: Graph, value: int, large: set[int]) -> bool:
    """Return True if all readers of a value run in the kernel: they stay on chip, reduce it, or multiply it."""
    if value in graph.outputs:
        return False
    size = graph.values[value].num_elements
    for reader in graph.consumers[value]:
        op = graph.ops[reader]
        small = all(graph.values[r].num_elements < size for r in op.results)
        if not ((small and (_is_product(graph, op) or is_fusible(graph, op))) or set(op.results) <= large):
            return False
    return True


def _is_pair_mask(graph: Graph, value: int) -> bool:
    """Return True for a mask over pairs of positions that all samples share."""
    shape = graph.values[_shown(graph)[value]].shape
    return sum(n > 1 for n in shape) == 2 and graph.values[_shown(graph)[value]].num_elements > 1 << 10
