"""Our factor rules against those of the Shardy pass in the jaxlib wheel, op by op.

Compared are, for every factor larger than 1 that passes or is reduced, the dims that hold it; all other dims count as
whole, however they are grouped there (need-replication, permutation, blocked: none of them is ever split here).
Intended differences are listed with their reason; a listed row that agrees after all is an error too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import pytest

from tests.rules.row import Case, Row, names
from tests.rules.rows import ROWS

ir = pytest.importorskip("jaxlib.mlir.ir")
sdy = pytest.importorskip("jaxlib.mlir.dialects.sdy")
stablehlo = pytest.importorskip("jaxlib.mlir.dialects.stablehlo")
passmanager = pytest.importorskip("jaxlib.mlir.passmanager")

PASSES = "builtin.module(func.func(chlo-legalize-to-stablehlo,sdy-populate-op-sharding-rules))"
ORACLE_ROWS = tuple(row for row in ROWS if row.oracle)

#: Why rows differ on purpose, and which.
REASONS = {
    "Shardy lets a minor factor pass beside the major one, and one that a single tensor holds; a spec here splits a "
    "dim in contiguous blocks, which is its major factor.": [
        "reshape merge",
        "reshape split",
        "reshape heads",
        "reshape mixed",
        "reshape without common major",
        "reshape coprime",
        "conv_general_dilated grouped",
        "conv_general_dilated grouped to input",
        "conv_general_dilated grouped to kernel",
        "conv_general_dilated batch groups",
        "conv_general_dilated batch groups to input",
        "conv_general_dilated batch groups to kernel",
        "conv_general_dilated strided",
    ],
    "Shardy reduces over a spatial dim of the weight gradient and exchanges halos; no lowering does so here.": [
        "conv_general_dilated to kernel",
        "conv_general_dilated strided to kernel",
        "conv_general_dilated valid to kernel",
        "conv_general_dilated depthwise to kernel",
        "conv_general_dilated channels last to kernel",
    ],
    "Windows that neither overlap nor reach into padding need no halo: they pass here; Shardy plans one for all.": [
        "reduce_window_sum",
        "reduce_window_max",
        "reduce_window",
        "select_and_scatter_add",
        "conv_general_dilated point",
        "conv_general_dilated point to input",
        "conv_general_dilated point strided",
        "conv_general_dilated point strided to input",
        "conv_general_dilated patches",
        "conv_general_dilated patches to input",
    ],
    "No collective combines by a function of the user's, or pairs of value and index: such dims are whole here.": [
        "argmax",
        "argmin",
        "reduce",
    ],
    "Subtracting updates is a sum as adding them is: a reduction here, whole in Shardy.": ["scatter-sub"],
    "Shardy lets a dim pass that is cropped at one end and padded at the other, though all its elements move.": [
        "pad negative"
    ],
}
DIFFERENCES = {name: reason for reason, rows in REASONS.items() for name in rows}


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """What a rule says, apart from how factors are numbered: places are (tensor, dim); operands count from 0."""

    splits: frozenset[tuple[str, frozenset[tuple[int, int]]]]


def grouping(sizes: Any, tensors: Any, kinds: Any, keep: list[int]) -> Grouping:
    """Dims of every factor that passes or is reduced, among the tensors to keep."""
    places: dict[int, set[tuple[int, int]]] = {}
    for tensor in keep:
        for dim, factors in enumerate(tensors[tensor]):
            for factor in factors:
                places.setdefault(factor, set()).add((tensor, dim))
    splits = {
        (kinds[f], frozenset(at)) for f, at in places.items() if sizes[f] > 1 and kinds[f] in ("pass", "reduction")
    }
    return Grouping(splits=frozenset(splits))


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
            kinds.update(dict.fromkeys([*rule.need_replication_factors, *rule.permutation_factors], "whole"))
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
    our_kinds = {f: kind.value for f, kind in enumerate(case.rule.kinds)}
    return grouping(case.rule.sizes, ours, our_kinds, keep), grouping(sizes, theirs, kinds, keep)


@pytest.mark.parametrize("row", ORACLE_ROWS, ids=names(ORACLE_ROWS))
def test_rule_agrees_with_shardy(row):
    ours, theirs = both(row)
    if row.name in DIFFERENCES:
        assert ours != theirs, f"{row.case.rule} agrees with Shardy: take it off the list of differences."
    else:
        assert ours == theirs, str(row.case.rule)


def test_differences_name_rows():
    assert set(DIFFERENCES) <= {row.name for row in ORACLE_ROWS}
