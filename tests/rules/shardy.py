"""The factor rules of the Shardy pass in the jaxlib wheel, and why ours differ from them.

Compared are, for every factor larger than 1 that passes or is reduced, the dims that hold it (a split); all other dims
count as whole, however they are grouped there (need-replication, permutation, blocked: none is ever split here). A
split that one side has and the other has not must be explained by the rule's structure (reasons).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy, stablehlo

from alpa_lite.rules.convolution import windows_of
from tests.rules.row import Case, Row

PASSES = "builtin.module(func.func(chlo-legalize-to-stablehlo,sdy-populate-op-sharding-rules))"

MINOR = (
    "Shardy lets a minor factor pass beside the major one, and one that a single tensor holds; a spec here splits a "
    "dim in contiguous blocks, which is its major factor."
)
HALO = (
    "Halos are exchanged here where windows step over all inputs, so that equal blocks lie on equal blocks; Shardy "
    "plans uneven ones too, lets a strided kernel's taps be summed as well as its windows be split, and since JAX 0.12 "
    "splits the taps of all."
)
WINDOW = "Windows that neither overlap nor reach into padding need no halo: they pass here; Shardy plans one for all."
COMBINER = "No collective combines by a function of the user's, or pairs of value and index: such dims are whole here."
SUBTRACTED = "Subtracting updates is a sum as adding them is: a reduction here, whole in Shardy."
CROPPED = (
    "Shardy lets a dim pass that is cropped at one end and padded at the other, or spread under windows of one "
    "element, though its elements move."
)
WRITTEN = (
    "Each device writes here what of an update lies on its block, so that dims which the update does not fill pass; so "
    "they do in Shardy before JAX 0.11, which has them exchange."
)

_WITHOUT = {
    "functions that become several operations, or a loop": (
        "acos acosh asin asinh atan atanh bessel_i0e bessel_i1e conj cosh digamma eq_to erf erf_inv erfc exp2 igamma "
        "igamma_grad_a igammac le_to lgamma lt_to nextafter polygamma regularized_incomplete_beta sinh zeta"
    ),
    "the identity": (
        "copy device_put layout_constraint name sharding_constraint stop_gradient tie user_sharding xla_metadata_value"
    ),
    "values that only wait for each other": "optimization_barrier",
    "an operation that Shardy does not know": "mulhi",
    "several operations: a rule for the whole says more": (
        "approx_top_k cumlogsumexp cummax cummin cumprod cumsum ragged_dot_general scaled_dot select_and_gather_add "
        "split stack tile top_k unstack"
    ),
    "a library call for each matrix": (
        "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu lu_pivots_to_permutation ormqr qr schur svd "
        "symmetric_product triangular_solve tridiagonal tridiagonal_solve"
    ),
    "a kernel, of which Shardy knows what its author says": (
        "pallas_call custom_partitioning dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper "
        "scaled_matmul_wrapper"
    ),
    "arrays from nothing: any split is free": "empty iota",
    "many element-wise operations on counters and keys": (
        "random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap random_wrap "
        "threefry2x32"
    ),
}
NO_RULE = {name: reason for reason, names in _WITHOUT.items() for name in names.split()}
"""Primitives that are no single operation there, and what they are."""

_WINDOWED = (
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_scatter_add",
    "select_and_scatter",
)

Place = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A factor that may be split: its kind, the places (tensor, dim) that hold it, and whether it is minor in one."""

    kind: str
    places: frozenset[Place]

    def __str__(self) -> str:
        """Kind and places."""
        return f"{self.kind} {sorted(self.places)}"


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """What a rule says, apart from how factors are numbered: places are (tensor, dim); operands count from 0."""

    splits: frozenset[Split]
    minor: frozenset[Split]
    shared: frozenset[Place]


def grouping(sizes: Sequence[int], tensors: Any, kinds: Mapping[int, str], keep: Sequence[int]) -> Grouping:
    """Dims of every factor that passes or is reduced, among the tensors to keep."""
    places: dict[int, set[Place]] = {}
    minor: set[int] = set()
    shared: set[Place] = set()
    for tensor in keep:
        for dim, factors in enumerate(tensors[tensor]):
            large = [f for f in factors if sizes[f] > 1]
            minor.update(large[1:])
            shared.update({(tensor, dim)} if len(large) > 1 else ())
            for factor in factors:
                places.setdefault(factor, set()).add((tensor, dim))
    splits = {
        f: Split(kind=kinds[f], places=frozenset(at))
        for f, at in places.items()
        if sizes[f] > 1 and kinds.get(f) in ("pass", "reduction", "permutation")
    }
    return Grouping(
        splits=frozenset(splits.values()),
        minor=frozenset(split for f, split in splits.items() if f in minor),
        shared=frozenset(shared),
    )


def operations(op: Any) -> Iterator[Any]:
    """All operations inside one."""
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation
                yield from operations(inner.operation)


def shardy_rule(case: Case, name: str) -> tuple[list[int], list[Any], list[Any], dict[int, str]]:
    """Sizes, dims of operands, dims of results and kinds of the first operation of a name in the lowered case."""
    stablehlo.register_stablehlo_passes()
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands]
    original = jax.jit(case.bind).lower(*structs).compiler_ir("stablehlo")
    with original.context:
        # Passes change a module in place: work on a copy.
        module = ir.Module.parse(original.operation.get_asm())
    passmanager.PassManager.parse(PASSES, context=module.context).run(module.operation)
    for op in operations(module.operation):
        if op.name == f"stablehlo.{name}" and "sdy.sharding_rule" in op.attributes:
            rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
            dims = lambda maps: [  # noqa: E731
                [list(sdy.DimMappingAttr(d).factor_indices) for d in sdy.TensorMappingAttr(m).dim_mappings]
                for m in maps
            ]
            sizes = list(rule.factor_sizes)
            kinds = dict.fromkeys(range(len(sizes)), "pass")
            kinds.update(dict.fromkeys(rule.reduction_factors, "reduction"))
            kinds.update(dict.fromkeys(rule.need_replication_factors, "whole"))
            kinds.update(dict.fromkeys(rule.permutation_factors, "permutation"))
            return sizes, dims(rule.operand_mappings), dims(rule.result_mappings), kinds
    raise AssertionError(f"no stablehlo.{name} with a sharding rule in\n{module}")


def both(row: Row) -> tuple[Grouping, Grouping]:
    """Our grouping and Shardy's, over the tensors that both know."""
    case = row.case
    sizes, operands, results, kinds = shardy_rule(case, row.oracle)
    ours = [*case.rule.operands, *case.rule.results]
    # Numbers and scalars are broadcast first in the lowered program; what Shardy has beyond our operands are such too.
    operands = (operands + [[]] * len(ours))[: len(case.rule.operands)]
    theirs = [*operands, *results[: len(case.rule.results)]]
    keep = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a and len(a) == len(b)]
    our_kinds = {f: kind.value for f, kind in enumerate(case.rule.kinds) if f in case.rule.shardable}
    if not _slides(case):
        kinds = {f: kind for f, kind in kinds.items() if kind != "permutation"}
    return grouping(case.rule.sizes, ours, our_kinds, keep), grouping(sizes, theirs, kinds, keep)


def reasons(row: Row) -> set[str]:
    """Why our rule differs from Shardy's, for each split that one side alone has; fails when nothing explains it."""
    ours, theirs = both(row)
    found: set[str] = set()
    for split in ours.splits - theirs.splits:
        found.add(_why_ours_alone(row.case, split, theirs))
    for split in theirs.splits - ours.splits:
        found.add(_why_theirs_alone(row.case, split, ours, theirs))
    # A split of ours may be what Shardy calls by another kind or finds in fewer places: one reason is enough for both.
    named = found - {""}
    if "" in found and not named:
        lists = [", ".join(map(str, side.splits)) for side in (ours, theirs)]
        raise AssertionError(f"{row.case.rule} of {row.case.view.primitive}: {lists[0]} here, {lists[1]} in Shardy")
    return named


def _why_ours_alone(case: Case, split: Split, theirs: Grouping) -> str:
    name = case.view.primitive
    if name in _WINDOWED and split.kind == "pass" and all(_is_local_window(case, d) for _, d in split.places):
        return WINDOW
    if split.kind == "pass" and split.places <= _spatial_places(case):
        return WINDOW
    if name == "scatter-sub" and split.kind == "reduction":
        return SUBTRACTED
    if (
        name == "dynamic_update_slice"
        and split.kind == "pass"
        and all(_is_partly_filled(case, d) for _, d in split.places)
    ):
        return WRITTEN
    # The major factor alone, where Shardy has it in more dims.
    return MINOR if any(split.places < other.places for other in theirs.splits) else ""


def _why_theirs_alone(case: Case, split: Split, ours: Grouping, theirs: Grouping) -> str:
    name = case.view.primitive
    if _slides(case) and (split.kind == "permutation" or split.places <= _spatial_places(case)):
        passes_here = any(other.kind == "pass" and split.places <= other.places for other in ours.splits)
        return WINDOW if passes_here else HALO
    if name in ("argmax", "argmin", "reduce") and split.kind == "reduction":
        return COMBINER
    if name == "pad" and any(low + high + i * (n - 1) == 0 for n, (low, high, i) in _padding(case, split)):
        return CROPPED
    if name in _WINDOWED and all(windows_of(case.view.params)[d].size == 1 for _, d in split.places):
        return CROPPED
    tensors = {tensor for tensor, _ in split.places}
    if split in theirs.minor or split.places & (ours.shared | theirs.shared) or len(tensors) == 1:
        return MINOR
    return ""


def _slides(case: Case) -> bool:
    """True for ops with windows, whose permutations are exchanges of halos."""
    return case.view.primitive in (*_WINDOWED, "conv_general_dilated")


def _is_local_window(case: Case, dim: int) -> bool:
    """True when the windows along a dim of the larger array neither overlap nor reach into padding."""
    wide, narrow = (case.view.operands[0], case.view.results[0])
    if case.view.primitive.startswith("select_and_scatter"):
        wide, narrow = case.view.results[0], case.view.operands["add" not in case.view.primitive]
    return windows_of(case.view.params)[dim].halo(wide.shape[dim], narrow.shape[dim]) == (0, 0)


def _is_partly_filled(case: Case, dim: int) -> bool:
    """True where an update is smaller than what it is written into."""
    array, update = case.view.operands[:2]
    return update.shape[dim] < array.shape[dim]


def _spatial_places(case: Case) -> frozenset[Place]:
    """The spatial dims of a convolution's input, kernel and result."""
    if case.view.primitive != "conv_general_dilated":
        return frozenset()
    numbers = case.view.params["dimension_numbers"]
    specs = (numbers["lhs_spec"], numbers["rhs_spec"], numbers["out_spec"])
    return frozenset((tensor, dim) for tensor, spec in enumerate(specs) for dim in spec[2:])


def _padding(case: Case, split: Split) -> list[tuple[int, tuple[int, int, int]]]:
    """Size and padding of the dims that a split holds; those that are padded."""
    config = case.view.params["padding_config"]
    shape = case.view.operands[0].shape
    return [(shape[d], tuple(config[d])) for _, d in split.places if tuple(config[d]) != (0, 0, 0)]
