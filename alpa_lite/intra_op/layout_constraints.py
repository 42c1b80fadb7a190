"""Restrict the strategies of a stage to the layout constraints that the user gave.

    constraint(v) = ((axis, dim), …)      dim None: the axis splits no dim of v       axes that are not named are free

An op keeps only the placements in which all its operands and results satisfy their constraints (`Keeping.options`), and
a sum over micro-batches only the accumulators that do (`Keeping.sums`). A follower must not demand its main operand in
a spec that violates the operand's constraint, nor split a result dim that must not be split (`Keeping.penalty`). A
constrained dim that the main operand lacks comes out unsplit; it is sliced where it is read, which needs no
communication. If nothing remains, the op cannot be sharded as requested, and PlanError is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from alpa_lite.errors import PlanError
from alpa_lite.intra_op.interning import frozen
from alpa_lite.intra_op.problem import FloatArray
from alpa_lite.intra_op.stage import GivenLayout, Wanted
from alpa_lite.intra_op.strategy_catalogue import PlacementOptions, SumOptions
from alpa_lite.program.ir import Graph, Op, Value
from alpa_lite.program.user_shardings import USER_SHARDING
from alpa_lite.sharding.specs import Spec


def agrees(spec: Spec, wanted: Wanted) -> bool:
    """Return True if every constrained axis splits exactly the dim that it must; partial sums are no splits."""
    return all(
        axis in axes if d == dim else axis not in axes for axis, dim in wanted for d, axes in enumerate(spec.dims)
    )


def _strays(spec: Spec, wanted: Wanted) -> bool:
    """Return True if a constrained axis splits a dim that it must not split."""
    return any(axis in axes and d != dim for axis, dim in wanted for d, axes in enumerate(spec.dims))


@dataclass(frozen=True, kw_only=True, eq=False)
class Keeping:
    """Filter of the strategies of a stage by layout constraints; results are cached by the options' identity."""

    layout: GivenLayout
    _options: dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, PlacementOptions]] = field(
        default_factory=dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, PlacementOptions]]
    )
    _penalties: dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, FloatArray]] = field(
        default_factory=dict[tuple[int, tuple[Wanted, ...]], tuple[PlacementOptions, FloatArray]]
    )

    def of(self, graph: Graph, v: int) -> Wanted:
        """Return the layout constraint of a value."""
        return self.layout.of(graph, v)

    def specs(self, graph: Graph, v: int, specs: Sequence[Spec]) -> tuple[Spec, ...]:
        """Return the specs of a value that satisfy its constraint. Raise PlanError if there are none."""
        wanted = self.of(graph, v)
        kept = tuple(spec for spec in specs if agrees(spec, wanted)) if wanted else tuple(specs)
        if not kept:
            raise PlanError(f"{_named(graph.values[v])} cannot lie {_show(wanted)}. Leave a name out of the layout.")
        return kept

    def options(self, graph: Graph, op: Op, options: PlacementOptions) -> PlacementOptions:
        """Return the placements of an op whose operand and result specs all satisfy their constraints.

        Raise PlanError if there are none.
        """
        wanted = self._around(graph, op)
        if not any(wanted) or op.id in self.layout.exempt.get(graph, ()):
            return options
        key = (id(options), wanted)
        if key not in self._options:
            # The entry holds the options, so that no other object can get their id.
            columns = (*options.demanded, *options.results)
            pairs = [(column, want) for column, want in zip(columns, wanted, strict=True) if want]
            fits = [all(agrees(c[i], w) for c, w in pairs) for i in range(len(options.placements))]
            if op.primitive == USER_SHARDING:  # what the user lays out is whole sums
                fits = [fit and not result.partial for fit, result in zip(fits, options.results[0], strict=True)]
            if not any(fits):
                raise PlanError(_refusal(graph, op, self))
            self._options[key] = options, options.only([i for i, fit in enumerate(fits) if fit])
        return self._options[key][1]

    def penalty(
        self, graph: Graph, op: Op, main: int, specs: Sequence[Spec], options: PlacementOptions
    ) -> FloatArray | None:
        """Return inf for each spec of operand `main` that a follower cannot follow within the constraints, else 0.

        The result is None if no spec is penalised. Raise PlanError if all of them are.
        """
        wanted = self._around(graph, op)
        if not any(wanted) or op.id in self.layout.exempt.get(graph, ()):
            return None
        key = (id(options), wanted)
        if key not in self._penalties:
            results = list(zip(options.results, wanted[len(op.operands) :], strict=True))
            needed, want = options.demanded[main], wanted[main]
            misses = [
                # If the offered spec violates the constraint already, the op that offers it answers for that.
                (agrees(spec, want) and not agrees(needed[i], want)) or any(_strays(c[i], w) for c, w in results)
                for i, spec in enumerate(specs)
            ]
            if all(misses):
                raise PlanError(_refusal(graph, op, self))
            self._penalties[key] = options, frozen(np.where(misses, np.inf, 0.0))
        penalty = self._penalties[key][1]
        # None spares the builder the sum of two arrays.
        return penalty if penalty.any() else None

    def sums(self, graph: Graph, v: int, options: SumOptions) -> SumOptions:
        """Return the accumulators of a sum whose stored and resolved specs both satisfy its constraint.

        Raise PlanError if there are none.
        """
        wanted = self.of(graph, v)
        fits = [agrees(s, wanted) and agrees(r, wanted) for s, r in zip(options.stored, options.resolved, strict=True)]
        if all(fits):
            return options
        kept = np.flatnonzero(fits)
        if not kept.size:
            raise PlanError(f"{_named(graph.values[v])} cannot be summed {_show(wanted)}. Leave a name out.")
        return SumOptions(
            accumulators=tuple(options.accumulators[i] for i in kept),
            seconds=frozen(options.seconds[kept]),
            stored=tuple(options.stored[i] for i in kept),
            resolved=tuple(options.resolved[i] for i in kept),
        )

    def _around(self, graph: Graph, op: Op) -> tuple[Wanted, ...]:
        # What a sharding of the user demands, it demands of the result: the operand comes from any spec.
        operands = (
            [()] * len(op.operands) if op.primitive == USER_SHARDING else [self.of(graph, v) for v in op.operands]
        )
        return (*operands, *(self.of(graph, v) for v in op.results))


def _refusal(graph: Graph, op: Op, keeping: Keeping) -> str:
    values = ", ".join(f"{_named(graph.values[v])} {_show(keeping.of(graph, v))}" for v in (*op.operands, *op.results))
    return (
        f"{op.source or 'An op'}: the {op.primitive} cannot be run with its operands and results split as the layout "
        f"says ({values}). Leave one of the names that split it out of the layout."
    )


def _named(value: Value) -> str:
    return f"{value.name or value.dtype}{list(value.shape)}"


def _show(wanted: Wanted) -> str:
    split = [f"{axis} on dim {dim}" for axis, dim in wanted if dim is not None]
    return f"with {' and '.join(split)}" if split else "whole"
