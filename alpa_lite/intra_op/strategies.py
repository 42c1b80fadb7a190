"""The ways to run one op on a logical mesh: which factor each mesh axis splits, and how partial sums are resolved.

Each mesh axis is used for nothing, for one factor of the op's rule, or (in linear ops) to take operands as partial
sums. A split reduction leaves a partial sum; per axis it stays (keep), becomes whole by an all_reduce, or is scattered
onto a dim of the result by a reduce_scatter (resolutions).

Ops with one dominant operand *follow* it (follow): their placement is determined by the operand's spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from itertools import permutations, product
from typing import NamedTuple

from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.walk import PlacedSpecs, can_split, linear_group, raw_result_specs, specs_of_class
from alpa_lite.program.ir import Value
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import OpClass
from alpa_lite.sharding.specs import Move, Spec, divides


class AxisRole(Enum):
    """What a mesh axis may be used for.

    ANY       everything
    BATCH     splits the batch wherever there is one, and state as the restriction says
    REPLICA   splits the batch wherever there is one, and leaves state whole
    MODEL     never splits the batch
    TENSOR    MODEL as Megatron uses it: contractions split weights by the weights' own dims, and other contractions
              by dims that all their arrays share (heads), never by positions
    CONTEXT   splits other dims of what holds a batch (the positions of a sequence), and state as BATCH does where only
              the update reads it
    EXPERT    splits the batch, except in contractions whose weights share a dim with all their arrays (experts): there
              that dim; what leads to and from these may be split by any dim
    DENSE     splits the batch, except in products with weights that are no convolutions: there also their dims; what
              leads to and from these may be split by any dim
    """

    ANY = "any"
    BATCH = "batch"
    REPLICA = "replica"
    MODEL = "model"
    TENSOR = "tensor"
    CONTEXT = "context"
    EXPERT = "expert"
    DENSE = "dense"

    @property
    def splits_batch(self) -> bool:
        """True for the roles that split nothing but the batch in the loop."""
        return self in (AxisRole.BATCH, AxisRole.REPLICA)


class BatchSplit(Enum):
    """Whether values without a batch are split over BATCH axes."""

    NEVER = "never"
    MAY = "may"
    MUST = "must"


SCATTERED = 100.0
"""How many times dearer moves into parts seem where sums are to be whole."""

#: Roles whose axes `Restriction.scatter_sums` is about: contractions inside the loop leave sums over them.
_SUMMED_IN_LOOP = frozenset({AxisRole.TENSOR, AxisRole.MODEL, AxisRole.ANY})


@dataclass(frozen=True, kw_only=True)
class Restriction:
    """Limits on what the search may do: manual plans are restricted searches.

    roles               per mesh axis
    optimizer           whether values that only the update reads are split over BATCH axes (ZeRO 1, 2)
    parameters          whether values that the loop reads are stored split over BATCH axes (ZeRO 3, FSDP)
    scatter_sums        whether sums over TENSOR, MODEL and free axes may be left scattered over them: with TENSOR axes,
                        Megatron's sequence parallelism
    """

    roles: Mapping[str, AxisRole] = field(default_factory=dict[str, AxisRole])
    optimizer: BatchSplit = BatchSplit.NEVER
    parameters: BatchSplit = BatchSplit.NEVER
    scatter_sums: bool = True

    def role(self, axis: str) -> AxisRole:
        """The role of an axis; ANY when nothing was said."""
        return self.roles.get(axis, AxisRole.ANY)

    def orders(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Iterable[tuple[str, ...]]:
        """The orders in which axes may split one dim, major first: that of the mesh, or both of two free axes.

        With more axes the strategies would multiply. Axes with a role hardly ever meet on a dim.
        """
        if len(sizes) == 2 and all(self.role(axis) is AxisRole.ANY for axis in axes):
            return permutations(axes)
        return (tuple(axes),)

    def may_scatter(self, axis: str) -> bool:
        """Whether a sum over this axis may be left scattered over it."""
        role = self.role(axis)
        if role in (AxisRole.BATCH, AxisRole.CONTEXT):
            return self.optimizer is not BatchSplit.NEVER
        if role in _SUMMED_IN_LOOP:
            return self.scatter_sums
        return role is not AxisRole.REPLICA

    def dearer(self, step: Move) -> float:
        """How many times its price a move counts when ways to run a step are compared.

        Without scattered sums the arrays between products are whole over TENSOR axes wherever they can be, and over the
        others no partial sum is moved into parts.
        """
        if self.scatter_sums or step.kind == "all_reduce":
            return 1.0
        roles = {self.role(axis) for axis in step.axes}
        scattered = AxisRole.TENSOR in roles or (step.kind == "reduce_scatter" and roles & _SUMMED_IN_LOOP)
        return SCATTERED if scattered else 1.0

    def state_split(self, axis: str, split: BatchSplit) -> BatchSplit:
        """Whether a value without a batch is split over this axis, where `split` is what BATCH axes do."""
        role = self.role(axis)
        if role is AxisRole.REPLICA or (role is AxisRole.CONTEXT and split is BatchSplit.MUST):
            return BatchSplit.NEVER
        return split if role in (AxisRole.BATCH, AxisRole.CONTEXT) else BatchSplit.MAY

    def on(self, axes: Iterable[str]) -> Restriction:
        """The same without roles of other axes: an axis of one device takes no part in anything."""
        return replace(self, roles={axis: self.role(axis) for axis in axes})

    @property
    def state_axes(self) -> frozenset[str]:
        """The axes that split state as a whole, wherever it is split."""
        return frozenset(a for a, role in self.roles.items() if role in (AxisRole.BATCH, AxisRole.CONTEXT))

    def sums_at_once(self, specs: Sequence[Spec]) -> list[Spec]:
        """Of specs of values without a batch those that are partial sums over all state axes that they leave, or none.

        A gradient is a sum over what splits samples and over what splits their positions alike.
        """
        return [s for s in specs if not self.state_axes & set(s.partial) or self.state_axes <= s.axes | set(s.partial)]

    def on_one_dim(self, specs: Sequence[Spec]) -> list[Spec]:
        """Of specs of values without a batch those where all axes that split state as a whole split one dim.

        What they send is the same on any dims, so that other specs only multiply. All specs are kept where those could
        not use as many axes.
        """
        state = self.state_axes

        def used(spec: Spec) -> int:
            return len(spec.axes.intersection(state))

        kept = [spec for spec in specs if sum(not dim_axes.isdisjoint(state) for dim_axes in map(set, spec.dims)) <= 1]
        return kept if max(map(used, kept), default=0) == max(map(used, specs), default=0) else list(specs)


FREE_CHOICE = Restriction()


def axis_choices(
    rule: Rule,
    sizes: Mapping[str, int],
    batch_factors: frozenset[int],
    restriction: Restriction,
    *,
    in_loop: bool,
    takes_partial: bool,
) -> list[tuple[int | None, ...]]:
    """Per mesh axis the factor that it splits; None = unused, -1 = operands are partial sums over it.

    Over BATCH axes only what has no batch is added up in parts: gradients.
    """
    per_axis: list[list[int | None]] = []
    for axis in sizes:
        role = restriction.role(axis)
        fits = [f for f in rule.shardable if can_split(rule, f, (axis,), sizes)]
        split_state = restriction.state_split(axis, restriction.optimizer) is not BatchSplit.NEVER
        choices: list[int | None]
        if in_loop:
            choices = [*_loop_choices(rule, role, fits, batch_factors)]
        elif role in (AxisRole.MODEL, AxisRole.TENSOR):
            choices = [None, *(f for f in fits if f not in batch_factors)]
        else:
            choices = [None, *fits] if split_state else [None]
        if takes_partial and not (role in _SPLITS_ANY_BATCH and batch_factors):
            choices.append(-1)
        per_axis.append(choices)
    found: list[tuple[int | None, ...]] = []
    for combination in product(*per_axis):
        axes_of = factor_axes(rule, combination, sizes)
        if all(can_split(rule, f, axes, sizes) for f, axes in enumerate(axes_of) if axes):
            found.append(combination)
    return found


#: Roles that never leave a sum over a batch unfinished: what has a batch is split by it, or by experts.
_SPLITS_ANY_BATCH = (AxisRole.BATCH, AxisRole.REPLICA, AxisRole.EXPERT, AxisRole.DENSE)


def _loop_choices(
    rule: Rule, role: AxisRole, fits: Sequence[int], batch_factors: frozenset[int]
) -> Sequence[int | None]:
    """What an axis may split in an op inside the loop; it `fits` these factors."""
    batch = [f for f in fits if f in batch_factors]
    others = [f for f in fits if f not in batch_factors]
    contracts_batch = bool(batch_factors) and rule.work_kind != "elementwise"
    match role:
        case AxisRole.BATCH | AxisRole.REPLICA:
            return batch or [None]
        case AxisRole.TENSOR if contracts_batch and (tensor := _tensor_factors(rule, batch_factors)).intersection(fits):
            return [f for f in fits if f in tensor]
        case AxisRole.MODEL | AxisRole.TENSOR:
            return [None, *others]
        case AxisRole.CONTEXT:
            return [None, *others] if batch_factors else [None]
        case AxisRole.EXPERT if contracts_batch:
            experts = _expert_factors(rule, batch_factors)
            return [*batch, *(f for f in fits if f in experts)] or [None]
        case AxisRole.DENSE if contracts_batch:
            weights = frozenset[int]() if rule.work_kind == "convolution" else _tensor_factors(rule, batch_factors)
            return [*batch, *(f for f in fits if f in weights)] or [None]
        case _:
            return [None, *fits]


def _tensor_factors(rule: Rule, batch_factors: frozenset[int]) -> frozenset[int]:
    """The factors that TENSOR axes split in a contraction: of its weights, of the weight it is the gradient of, or
    those that all arrays share."""
    arrays = _factors_of_arrays(rule)
    weights = [factors for factors in arrays if not factors & batch_factors]
    if weights:
        return frozenset[int]().union(*weights)
    return arrays[0].intersection(*arrays[1:]) - batch_factors


def _expert_factors(rule: Rule, batch_factors: frozenset[int]) -> frozenset[int]:
    """The factors of a contraction that its weights, or the gradients of such, share with all its other arrays."""
    arrays = _factors_of_arrays(rule)
    with_weights = any(not factors & batch_factors for factors in arrays)
    return arrays[0].intersection(*arrays[1:]) if with_weights else frozenset()


def _factors_of_arrays(rule: Rule) -> list[frozenset[int]]:
    return [frozenset(f for factors in dims for f in factors) for dims in (*rule.operands, *rule.results)]


def factor_axes(rule: Rule, combination: Sequence[int | None], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Mesh axes per factor, in mesh order, of one combination of axis choices."""
    axes: list[list[str]] = [[] for _ in rule.sizes]
    for axis, choice in zip(sizes, combination, strict=True):
        if choice is not None and choice >= 0:
            axes[choice].append(axis)
    return tuple(map(tuple, axes))


def placements(
    rule: Rule,
    operands: Sequence[Value],
    results: Sequence[Value],
    sizes: Mapping[str, int],
    *,
    batch_factors: frozenset[int] = frozenset(),
    restriction: Restriction = FREE_CHOICE,
    in_loop: bool = True,
    takes_partial: bool = False,
    keep_partial: bool = False,
    scatter: bool = True,
) -> tuple[OpPlacement, ...]:
    """All placements of a leading op: axis choices × resolutions of its partial sums."""
    takes_partial = takes_partial and bool(linear_group(rule, operands))
    found: list[OpPlacement] = []
    choices = axis_choices(rule, sizes, batch_factors, restriction, in_loop=in_loop, takes_partial=takes_partial)
    for combination in choices:
        partial = tuple(a for a, c in zip(sizes, combination, strict=True) if c == -1)
        in_mesh_order = factor_axes(rule, combination, sizes)
        for factors in product(*(restriction.orders(axes, sizes) for axes in in_mesh_order)):
            bare = OpPlacement(factors=factors, partial=partial)
            raw = raw_result_specs(rule, bare)
            if len(results) > 1 or not raw[0].partial:
                found.append(replace(bare, results=tuple(s.without_partial() for s in raw)))
                continue
            shape, allowed = results[0].shape, restriction.may_scatter
            for target in resolutions(raw[0], shape, sizes, keep=keep_partial, scatter=scatter, allowed=allowed):
                found.append(replace(bare, results=(target,)))
    return tuple(found)


def resolutions(
    raw: Spec,
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    *,
    keep: bool,
    scatter: bool,
    allowed: Callable[[str], bool] = lambda axis: True,
) -> list[Spec]:
    """The specs that a partial sum may be resolved to; axis by axis keep, all_reduce or reduce_scatter onto a dim."""
    specs = [raw]
    for axis in raw.partial:
        extended: list[Spec] = []
        for spec in specs:
            rest = tuple(a for a in spec.partial if a != axis)
            if keep:
                extended.append(spec)
            extended.append(Spec(spec.dims, rest))
            for dim, size in enumerate(shape if scatter and allowed(axis) else ()):
                dims = spec.dims[:dim] + ((*spec.dims[dim], axis),) + spec.dims[dim + 1 :]
                if size > 0 and divides(Spec(dims, rest), shape, sizes):
                    extended.append(Spec(dims, rest))
        specs = list(dict.fromkeys(extended))
    return specs


def all_specs(
    shape: tuple[int, ...],
    sizes: Mapping[str, int],
    allowed: Callable[[str, int], bool],
    restriction: Restriction = FREE_CHOICE,
) -> list[Spec]:
    """Every spec of an array without partial sums; `allowed(axis, dim)` filters, `restriction` orders axes on a dim."""
    specs: list[Spec] = []
    for combination in product(range(-1, len(shape)), repeat=len(sizes)):
        dims: list[tuple[str, ...]] = [()] * len(shape)
        if not all(d < 0 or (shape[d] > 0 and allowed(axis, d)) for axis, d in zip(sizes, combination, strict=True)):
            continue
        for axis, dim in zip(sizes, combination, strict=True):
            if dim >= 0:
                dims[dim] = (*dims[dim], axis)
        if divides(Spec(tuple(dims)), shape, sizes):
            specs += [Spec(ordered) for ordered in product(*(restriction.orders(axes, sizes) for axes in dims))]
    return specs


class Followed(NamedTuple):
    """How an op follows an operand, and the specs that this demands and makes."""

    placement: OpPlacement
    specs: PlacedSpecs


def follow(kind: OpClass, main: int, spec: Spec, sizes: Mapping[str, int], *, keep_partial: bool) -> Followed:
    """The placement of ops of a class that follow their operand number `main`, given in `spec`.

    Axes on dims that the op needs whole are dropped (the operand is gathered first). A partial sum passes through ops
    that are linear in this operand alone; otherwise it is resolved first. A split reduction of the op itself is
    resolved by an all_reduce unless `keep_partial`.
    """
    rule = kind.rule
    factors: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for axes, dim_factors in zip(spec.dims, rule.operands[main], strict=True):
        major = next((f for f in dim_factors if rule.sizes[f] > 1), None) if axes else None
        if major is not None and can_split(rule, major, axes, sizes):
            factors[major] = axes
    return _followed(kind, tuple(factors), spec.partial if rule.linear == ((main,),) else (), keep_partial)


@lru_cache(maxsize=100_000)
def _followed(
    kind: OpClass, factors: tuple[tuple[str, ...], ...], partial: tuple[str, ...], keep_partial: bool
) -> Followed:
    """The same on all meshes that can be split so."""
    specs = specs_of_class(kind, factors, partial)
    results = specs.results
    if not keep_partial:
        results = tuple(Spec(s.dims, tuple(a for a in s.partial if a in partial)) for s in results)
    return Followed(OpPlacement(factors=factors, partial=partial, results=results), specs)
