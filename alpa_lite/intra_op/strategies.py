"""The placements of one op on a logical mesh: which factor each mesh axis splits, and how partial sums are resolved.

Each mesh axis is unused, splits one factor of the op's rule, or (in linear ops) has operands that are partial sums over
it. A split reduction leaves a partial sum. Per axis it remains one (keep), becomes whole by an all_reduce, or is
scattered onto a dim of the result by a reduce_scatter (resolutions).

Ops with one dominant operand *follow* it (follow): the operand's spec determines their placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import permutations, product
from typing import NamedTuple

from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.walk import PlacedSpecs, can_split, linear_group, raw_result_specs, specs_of_class
from alpa_lite.program.ir import Value
from alpa_lite.program.memo import memoized
from alpa_lite.rules import Rule
from alpa_lite.rules.op_info import OpClass
from alpa_lite.sharding.specs import Move, Spec, divides


class AxisRole(Enum):
    """The permitted uses of a mesh axis.

    ANY       everything
    BATCH     splits the batch wherever there is one, and state as the restriction says
    REPLICA   splits the batch wherever there is one, and leaves state whole
    MODEL     never splits the batch
    TENSOR    MODEL as Megatron uses it: contractions split weights by the weights' own dims, and other contractions
              by dims that all their arrays share (heads), never by positions
    CONTEXT   splits other dims of values with a batch (the positions of a sequence), and state as BATCH does
    EXPERT    splits the batch, except in contractions whose weights share a dim with all their arrays (experts), where
              it splits that dim; values between these contractions may be split by any dim
    DENSE     splits the batch, except in products with weights that are no convolutions, where it may also split
              the weights' dims; values between these products may be split by any dim
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
        """True for the roles that split nothing but the batch in the micro-batch loop."""
        return self in (AxisRole.BATCH, AxisRole.REPLICA)


class BatchSplit(Enum):
    """Whether values without a batch dim are split over BATCH axes."""

    NEVER = "never"
    MAY = "may"
    MUST = "must"


# Finite, since some steps leave no other way: such a move must be dear, but not impossible.
SCATTERED = 100.0
"""The factor on the price of moves that scatter partial sums where these are to be whole."""

#: The roles of the axes that `Restriction.scatter_sums` controls: contractions in the loop leave sums over them.
_SUMMED_IN_LOOP = frozenset({AxisRole.TENSOR, AxisRole.MODEL, AxisRole.ANY})


@dataclass(frozen=True, kw_only=True)
class Restriction:
    """Limits of the search space; manual plans are restricted searches.

    roles               the role of each mesh axis
    optimizer           whether values that only the update reads are split over BATCH and CONTEXT axes (ZeRO 1, 2)
    parameters          whether values that the loop reads are stored split over these axes (ZeRO 3, FSDP)
    scatter_sums        whether partial sums over TENSOR, MODEL and ANY axes may be left scattered over them: with
                        TENSOR axes, this is Megatron's sequence parallelism
    state_minor         whether BATCH and CONTEXT axes come last where several axes split one dim: an all_gather of
                        state over them then gives the blocks of the other axes, and a reduce_scatter divides these
    """

    roles: Mapping[str, AxisRole] = field(default_factory=dict[str, AxisRole])
    optimizer: BatchSplit = BatchSplit.NEVER
    parameters: BatchSplit = BatchSplit.NEVER
    scatter_sums: bool = True
    state_minor: bool = False

    def role(self, axis: str) -> AxisRole:
        """Return the role of an axis; ANY when none is given."""
        return self.roles.get(axis, AxisRole.ANY)

    def orders(self, axes: Sequence[str], sizes: Mapping[str, int]) -> Iterable[tuple[str, ...]]:
        """Return the orders in which axes may split one dim, major first: mesh order, or both orders of two ANY axes.

        With `state_minor` axes that split state follow the others.
        With more axes the number of strategies would explode, and axes with a role hardly ever split one dim together.
        """
        if len(sizes) == 2 and all(self.role(axis) is AxisRole.ANY for axis in axes):
            return permutations(axes)
        # A stable sort: all else stays in mesh order.
        return (tuple(sorted(axes, key=self.state_axes.__contains__) if self.state_minor else axes),)

    def may_scatter(self, axis: str) -> bool:
        """Return True if a partial sum over this axis may be left scattered over it."""
        role = self.role(axis)
        if role in (AxisRole.BATCH, AxisRole.CONTEXT):
            # Sums over these axes are gradients, and scattered ones would make the update work on split state.
            return self.optimizer is not BatchSplit.NEVER
        if role in _SUMMED_IN_LOOP:
            return self.scatter_sums
        return role is not AxisRole.REPLICA

    def dearer(self, step: Move) -> float:
        """Return the factor on the price of a move when placements are compared.

        With `scatter_sums` false, arrays between products should be whole over TENSOR axes wherever possible, and no
        partial sum over MODEL or ANY axes should be scattered.
        """
        # An all_reduce leaves nothing scattered, so that it is never penalised.
        if self.scatter_sums or step.kind == "all_reduce":
            return 1.0
        roles = {self.role(axis) for axis in step.axes}
        scattered = AxisRole.TENSOR in roles or (step.kind == "reduce_scatter" and roles & _SUMMED_IN_LOOP)
        return SCATTERED if scattered else 1.0

    def state_split(self, axis: str, split: BatchSplit) -> BatchSplit:
        """Return whether a value without a batch dim is split over this axis, where `split` holds for BATCH axes."""
        role = self.role(axis)
        if role is AxisRole.REPLICA:
            return BatchSplit.NEVER
        return split if role in (AxisRole.BATCH, AxisRole.CONTEXT) else BatchSplit.MAY

    def on(self, axes: Iterable[str]) -> Restriction:
        """Return the restriction without roles of other axes, such as axes of one device, which split nothing."""
        return replace(self, roles={axis: self.role(axis) for axis in axes})

    @property
    def state_axes(self) -> frozenset[str]:
        """The axes that split state together, wherever it is split."""
        return frozenset(a for a, role in self.roles.items() if role in (AxisRole.BATCH, AxisRole.CONTEXT))

    def sums_at_once(self, specs: Sequence[Spec]) -> list[Spec]:
        """Filter specs of values without a batch dim: partial sums over all state axes that they leave free, or none.

        A gradient is a sum over the axes that split samples and over those that split their positions alike.
        """
        return [s for s in specs if not self.state_axes & set(s.partial) or self.state_axes <= s.axes | set(s.partial)]

    def on_one_dim(self, specs: Sequence[Spec]) -> list[Spec]:
        """Filter specs of values without a batch dim: all state axes that are used split one dim.

        The communication is the same for any dims, so the other specs would only multiply the strategies. All specs are
        returned if the filtered ones could not use as many axes.
        """
        state = self.state_axes

        def used(spec: Spec) -> int:
            return len(spec.axes.intersection(state))

        kept = [spec for spec in specs if sum(not dim_axes.isdisjoint(state) for dim_axes in map(set, spec.dims)) <= 1]
        return kept if max(map(used, kept), default=0) == max(map(used, specs), default=0) else list(specs)


FREE_CHOICE = Restriction()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpUse:
    """The facts about the surroundings of an op that limit its placements.

    batch_factors   the factors of its rule that contain the batch dim
    in_loop         the op runs once per micro-batch
    keep_partial    its result may remain a partial sum
    scatter         a partial sum may be reduce-scattered where it is made
    """

    batch_factors: frozenset[int] = frozenset()
    in_loop: bool = True
    keep_partial: bool = False
    scatter: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadingOp:
    """An op that chooses its own placement; `takes_partial`: its operands may be partial sums if its rule is linear."""

    rule: Rule
    operands: Sequence[Value]
    results: Sequence[Value]
    use: OpUse
    takes_partial: bool = False


def axis_choices(op: LeadingOp, sizes: Mapping[str, int], restriction: Restriction) -> list[tuple[int | None, ...]]:
    """Return the combinations of one choice per mesh axis.

    A choice is the factor that the axis splits, None if it is unused, or -1 if operands are partial sums over it.
    Operands with a batch are never partial sums over axes with a role that splits the batch.
    """
    rule, batch_factors = op.rule, op.use.batch_factors
    takes_partial = op.takes_partial and bool(linear_group(rule, op.operands))
    per_axis: list[list[int | None]] = []
    for axis in sizes:
        role = restriction.role(axis)
        fits = [f for f in rule.shardable if can_split(rule, f, (axis,), sizes)]
        split_state = restriction.state_split(axis, restriction.optimizer) is not BatchSplit.NEVER
        choices: list[int | None]
        if op.use.in_loop:
            choices = [*_loop_choices(rule, role, fits, batch_factors)]
        elif role in (AxisRole.MODEL, AxisRole.TENSOR):
            choices = [None, *(f for f in fits if f not in batch_factors)]
        else:
            # The update works on state, which only some axes may split.
            choices = [None, *fits] if split_state else [None]
        if takes_partial and not (role in _SPLITS_ANY_BATCH and batch_factors):
            # A sum of partial sums is a partial sum again: one collective after the addition replaces one per addend.
            choices.append(-1)
        per_axis.append(choices)
    found: list[tuple[int | None, ...]] = []
    for combination in product(*per_axis):
        # Two axes may each divide a factor that they do not divide together.
        axes_of = factor_axes(rule, combination, sizes)
        if all(can_split(rule, f, axes, sizes) for f, axes in enumerate(axes_of) if axes):
            found.append(combination)
    return found


#: The roles whose axes never carry partial sums of a value with a batch: they split the batch, experts or weights.
_SPLITS_ANY_BATCH = (AxisRole.BATCH, AxisRole.REPLICA, AxisRole.EXPERT, AxisRole.DENSE)


def _loop_choices(
    rule: Rule, role: AxisRole, fits: Sequence[int], batch_factors: frozenset[int]
) -> Sequence[int | None]:
    """Return the choices of an axis for an op inside the loop; `fits` are the factors that the axis divides."""
    batch = [f for f in fits if f in batch_factors]
    others = [f for f in fits if f not in batch_factors]
    contracts_batch = bool(batch_factors) and rule.work_kind != "elementwise"
    match role:
        case AxisRole.BATCH | AxisRole.REPLICA:
            # An axis that divides no batch factor stays unused.
            return batch or [None]
        case AxisRole.TENSOR if contracts_batch and (tensor := _tensor_factors(rule, batch_factors)).intersection(fits):
            # Without None: as in Megatron-LM, a contraction that the axis can split must be split.
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
    """Return the factors that TENSOR axes split in a contraction.

    They are the factors of its weights (or of the weight whose gradient it computes), or those that all arrays share.
    """
    arrays = _factors_of_arrays(rule)
    weights = [factors for factors in arrays if not factors & batch_factors]
    if weights:
        return frozenset[int]().union(*weights)
    # Attention scores have no weights: their heads occur in all arrays, their positions in some only.
    return arrays[0].intersection(*arrays[1:]) - batch_factors


def _expert_factors(rule: Rule, batch_factors: frozenset[int]) -> frozenset[int]:
    """Return the factors that the weights of a contraction, or their gradients, share with all its other arrays."""
    arrays = _factors_of_arrays(rule)
    with_weights = any(not factors & batch_factors for factors in arrays)
    return arrays[0].intersection(*arrays[1:]) if with_weights else frozenset()


def _factors_of_arrays(rule: Rule) -> list[frozenset[int]]:
    return [frozenset(f for factors in dims for f in factors) for dims in (*rule.operands, *rule.results)]


def factor_axes(rule: Rule, combination: Sequence[int | None], sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...]:
    """Return the mesh axes that split each factor, in mesh order, for one combination of axis choices."""
    axes: list[list[str]] = [[] for _ in rule.sizes]
    for axis, choice in zip(sizes, combination, strict=True):
        if choice is not None and choice >= 0:
            axes[choice].append(axis)
    return tuple(map(tuple, axes))


def placements(
    op: LeadingOp, sizes: Mapping[str, int], restriction: Restriction = FREE_CHOICE
) -> tuple[OpPlacement, ...]:
    """Return all placements of a leading op: axis choices × resolutions of its partial sums."""
    rule, results = op.rule, op.results
    may_scatter = restriction.may_scatter if op.use.scatter else _nowhere
    found: list[OpPlacement] = []
    for combination in axis_choices(op, sizes, restriction):
        partial = tuple(a for a, c in zip(sizes, combination, strict=True) if c == -1)
        # Axes on one factor may be nested in any order that the restriction allows; each gives other blocks.
        in_mesh_order = factor_axes(rule, combination, sizes)
        for factors in product(*(restriction.orders(axes, sizes) for axes in in_mesh_order)):
            bare = OpPlacement(factors=factors, partial=partial)
            raw = raw_result_specs(rule, bare)
            # The partial sums of several results are completed at once.
            if len(results) > 1 or not raw[0].partial:
                found.append(replace(bare, results=tuple(s.without_partial() for s in raw)))
                continue
            keep, shape = op.use.keep_partial, results[0].shape
            for target in resolutions(raw[0], shape, sizes, keep=keep, may_scatter=may_scatter):
                found.append(replace(bare, results=(target,)))
    return tuple(found)


def _nowhere(axis: str) -> bool:
    del axis
    return False


def resolutions(
    raw: Spec, shape: tuple[int, ...], sizes: Mapping[str, int], *, keep: bool, may_scatter: Callable[[str], bool]
) -> list[Spec]:
    """Return the specs that a partial sum may be resolved to: per axis keep, all_reduce, or reduce_scatter onto a dim.

    `may_scatter` tells over which axes it may be scattered.
    """
    specs = [raw]
    for axis in raw.partial:
        extended: list[Spec] = []
        for spec in specs:
            rest = tuple(a for a in spec.partial if a != axis)
            if keep:
                extended.append(spec)
            extended.append(Spec(spec.dims, rest))
            for dim, size in enumerate(shape if may_scatter(axis) else ()):
                # Minor to the axes that split the dim already: a reduce_scatter divides the blocks of devices further.
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
    """Return every spec of an array without partial sums.

    `allowed(axis, dim)` filters the splits, and `restriction` orders the axes on a dim.
    """
    specs: list[Spec] = []
    # -1 leaves an axis unused.
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
    """The placement of an op that follows an operand, and the specs of its operands and results."""

    placement: OpPlacement
    specs: PlacedSpecs


def follow(kind: OpClass, main: int, spec: Spec, sizes: Mapping[str, int], *, keep_partial: bool) -> Followed:
    """Return the placement of ops of a class that follow their operand number `main`, given in `spec`.

    Axes on dims that the op needs whole are dropped (the operand is gathered first). A partial sum passes through ops
    that are linear in this operand alone; otherwise it is resolved first. A split reduction of the op itself is
    resolved by an all_reduce unless `keep_partial`.
    """
    rule = kind.rule
    factors: list[tuple[str, ...]] = [()] * len(rule.sizes)
    for axes, dim_factors in zip(spec.dims, rule.operands[main], strict=True):
        # Only the major factor of a dim can be split without interleaving; factors of size 1 do not count.
        major = next((f for f in dim_factors if rule.sizes[f] > 1), None) if axes else None
        if major is not None and can_split(rule, major, axes, sizes):
            factors[major] = axes
    return _followed(kind, tuple(factors), spec.partial if rule.linear == ((main,),) else (), keep_partial)


@memoized(entries=100_000)
def _followed(
    kind: OpClass, factors: tuple[tuple[str, ...], ...], partial: tuple[str, ...], keep_partial: bool
) -> Followed:
    """Return the placement by its factors, so that all meshes with this split share the cached result."""
    specs = specs_of_class(kind, factors, partial)
    results = specs.results
    if not keep_partial:
        results = tuple(Spec(s.dims, tuple(a for a in s.partial if a in partial)) for s in results)
    return Followed(OpPlacement(factors=factors, partial=partial, results=results), specs)
