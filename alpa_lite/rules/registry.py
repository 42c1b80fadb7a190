"""Factor rules: which dims of an op's operands and results are split together, and what splitting them requires.

A rule in Shardy's notation, `([b,i,k],[b,k,j])->([b,i,j]) reduction={k}`, gives every tensor dim a tuple of factors
(several = the dim is their product, major first). Each factor has a kind that says what happens when it is split over
mesh axes:

    PASS         every tensor that contains it is split in the same way; no communication
    REDUCTION    each device computes a partial result, combined by `Rule.reduction`
    REPLICATED   the factor must not be split
    PERMUTATION  data crosses block borders: may be split if the rule has halos for it (`Rule.halos`), else REPLICATED

`Rule.linear` lists the groups of operands in which the op is jointly linear with the others fixed; a group that holds
partial sums gives a partial result: add ((0, 1),), multiply ((0,), (1,)), divide ((0,),).

Rules are registered by a decorator, keyed on the name of the primitive; no other code depends on primitives. An op
without a rule is opaque: all its operands and results are replicated (`opaque_rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any, Literal, TypedDict, Unpack

from alpa_lite.errors import RuleError
from alpa_lite.program.ir import Graph, Op, Value
from cost_models.work import WorkKind

Dims = tuple[tuple[int, ...], ...]
"""The factors of each dim of one tensor, major first."""

Params = Mapping[str, Any]
"""The static parameters of an op by name, of any type: each primitive of JAX has its own."""

Combiner = Literal["sum", "max", "min", "prod", "and", "or", "xor"]
"""The reductions that combine partial results of devices."""


class FactorKind(Enum):
    """The effect on an op of splitting a factor; the module docstring defines the members."""

    PASS = "pass"
    REDUCTION = "reduction"
    REPLICATED = "replicated"
    PERMUTATION = "permutation"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpView:
    """The input of a rule function: shapes, dtypes, static parameters and bodies of one op."""

    primitive: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    params: Params
    bodies: tuple[Graph, ...] = ()


@dataclass(frozen=True, slots=True)
class Halo:
    """The rows along `dim` of an operand that a device reads from its neighbours' blocks when `factor` is split.

    `before` and `after` are the numbers of rows read from the previous and from the next block.
    """

    operand: int
    dim: int
    factor: int
    before: int
    after: int


# Without slots, which would leave no place for cached properties.
@dataclass(frozen=True, kw_only=True)
class Rule:
    """The factor rule of one op.

    operands     per operand and dim, the factors of the dim, major first
    results      the same for the results
    sizes        size of each factor
    kinds        kind of each factor
    reduction    the reduction that combines partial results
    linear       groups of operands in which the op is jointly linear with the others fixed
    flops        floating-point operations of the whole, unsharded op
    work_kind    the class of work by which cost models price the op
    opaque       the primitive has no rule
    positional   the op contains positions in whole arrays (indices, starts, an iota), so that it differs per block
    halos        the halo exchanges when their factors are split, in this order, so that corners are included
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[int, ...]
    kinds: tuple[FactorKind, ...]
    reduction: Combiner = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    flops: float = 0.0
    work_kind: WorkKind = "elementwise"
    opaque: bool = field(default=False)
    positional: bool = False
    halos: tuple[Halo, ...] = ()

    @cached_property
    def shardable(self) -> tuple[int, ...]:
        """The factors of size above 1 that may be split over mesh axes."""
        # A permuted factor can be split only if its halo says which rows of the neighbours a block needs.
        free = (FactorKind.PASS, FactorKind.REDUCTION)
        fits = (kind in free or self.has_halo(f) for f, kind in enumerate(self.kinds))
        return tuple(f for f, fit in enumerate(fits) if fit and self.sizes[f] > 1)

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """The reduction factors: when one is split, each device computes a partial result."""
        return tuple(f for f, kind in enumerate(self.kinds) if kind is FactorKind.REDUCTION)

    @cached_property
    def major(self) -> frozenset[int]:
        """The factors that are the major factor of every dim that contains them: only these have contiguous blocks."""
        dims = [factors for tensor in (*self.operands, *self.results) for factors in tensor if len(factors) > 1]
        # Factors of size 1 in front do not make a factor minor.
        after = (factors[i:] for factors in dims for i in range(1, len(factors)) if self.sizes[factors[i - 1]] > 1)
        return frozenset(range(len(self.sizes))).difference(*after)

    def has_halo(self, factor: int) -> bool:
        """Return True if splitting a factor requires a halo exchange between neighbouring blocks."""
        return any(halo.factor == factor for halo in self.halos)

    def splits_into(self, factor: int, count: int) -> bool:
        """Return True if a factor may be split into `count` blocks: equal ones, and none smaller than a halo."""
        if factor not in self.shardable or self.sizes[factor] % count:
            return False
        if not self.halos:
            return True
        # A block smaller than its halo would need rows of the neighbour after next, too.
        blocks = ((h, prod(self.sizes[f] for f in self.operands[h.operand][h.dim]) // count) for h in self.halos)
        return all(h.factor != factor or max(h.before, h.after) <= rows for h, rows in blocks)

    def __str__(self) -> str:
        """Return the rule in Shardy's notation."""
        names = [_factor_name(i) for i in range(len(self.sizes))]

        def tensor(dims: Dims) -> str:
            return "[" + ",".join("".join(names[f] for f in factors) for factors in dims) + "]"

        text = f"({','.join(map(tensor, self.operands))})->({','.join(map(tensor, self.results))})"
        for kind in (FactorKind.REDUCTION, FactorKind.REPLICATED, FactorKind.PERMUTATION):
            members = [names[f] for f, k in enumerate(self.kinds) if k is kind]
            text += f" {kind.value}={{{','.join(members)}}}" if members else ""
        return text


class RuleOptions(TypedDict, total=False):
    """The fields of a rule that have a default; see `Rule`."""

    reduction: Combiner
    linear: tuple[tuple[int, ...], ...]
    flops: float
    work_kind: WorkKind
    opaque: bool
    positional: bool
    halos: tuple[Halo, ...]


def _factor_name(index: int) -> str:
    # As Shardy does: i to z, then z_1, z_2, …
    last = ord("z") - ord("i")
    return chr(ord("i") + index) if index <= last else f"z_{index - last}"


class RuleBuilder:
    """A builder of rules that numbers their factors: `factor(size)` adds a factor, and `build` returns the rule."""

    def __init__(self) -> None:
        """Start without factors."""
        self.sizes: list[int] = []
        self.kinds: list[FactorKind] = []

    def factor(self, size: int, kind: FactorKind = FactorKind.PASS) -> int:
        """Add a factor and return its index."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def factors(self, shape: tuple[int, ...], kind: FactorKind = FactorKind.PASS) -> Dims:
        """Add one factor per dim of a shape, and return them as the dims of a tensor."""
        return tuple((self.factor(n, kind),) for n in shape)

    def build(self, operands: tuple[Dims, ...], results: tuple[Dims, ...], **rest: Unpack[RuleOptions]) -> Rule:
        """Return the rule; `rest` may set the fields of a rule that have a default."""
        return Rule(operands=operands, results=results, sizes=tuple(self.sizes), kinds=tuple(self.kinds), **rest)


def ints(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return dims or sizes from an untyped parameter of an op as a tuple of ints."""
    return tuple(int(n) for n in numbers)


def is_key(value: Value) -> bool:
    """Return True for arrays of typed PRNG keys, which can be moved but not added."""
    # JAX names these dtypes after their generator: "key<fry>", "key<rbg>".
    return value.dtype.startswith("key<")


def can_add(value: Value) -> bool:
    """Return True if partial results of this dtype can be summed over devices."""
    return value.dtype != "bool" and not is_key(value)


def linear_groups(view: OpView, *groups: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of operands that can be partial sums in this op.

    A literal is never a partial sum: a zero is removed from its group, and any other literal excludes the group.
    Integer sums wrap around, so integers that are converted to a wider type cannot be partial sums.
    """
    # Partial results would have to be summed over devices in the dtype of the result.
    if not all(can_add(value) for value in view.results):
        return ()
    dtype = view.results[0].dtype
    kept: list[tuple[int, ...]] = []
    for group in groups:
        literals = {i: view.operands[i].literal for i in group if view.operands[i].literal is not None}
        rest = tuple(i for i in group if i not in literals)
        wraps = any(not view.operands[i].is_float and view.operands[i].dtype != dtype for i in rest)
        # Adding a literal once per addend would count it as often as there are devices; only zero does no harm.
        if rest and not wraps and all(number == 0 for number in literals.values()):
            kept.append(rest)
    return tuple(kept)


def aligned(b: RuleBuilder, shape: tuple[int, ...], to: tuple[int, ...], dims: Dims) -> Dims:
    """Return the dims of an operand that broadcasts to the shape `to`, whose dims are `dims`."""
    if not shape:
        return ()
    # A dim of size 1 that broadcasts holds a factor of its own: it cannot be split where the result is.
    return tuple(f if n == m else (b.factor(n),) for n, m, f in zip(shape, to, dims, strict=True))


def pointwise(view: OpView, *, flops: float = 1.0, linear: tuple[tuple[int, ...], ...] = ()) -> Rule:
    """Return a rule in which dim d of all operands and results has the same factor; `flops` is per element."""
    b = RuleBuilder()
    shape = view.results[0].shape
    dims = b.factors(shape)
    return b.build(
        tuple(aligned(b, v.shape, shape, dims) for v in view.operands),
        tuple(dims for _ in view.results),
        linear=linear,
        flops=flops * view.results[0].num_elements,
    )


RuleFunction = Callable[[OpView], Rule]
_RULES: dict[str, RuleFunction] = {}


def register_rule(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """Return a decorator that registers a function from `OpView` to `Rule` for these primitives, given by name.

    `"pallas_call:my_kernel"` stands for the kernel that `pallas_call` calls by this name. `rule_from` makes a function
    of one line: `al.register_rule("pallas_call:my_kernel")(rule_from("b t d -> b t d", whole="t"))`. The decorator
    raises `RuleError` for a primitive that already has a rule.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for primitive in primitives:
            if primitive in _RULES:
                # A second rule would silently change the plans of other code that uses the primitive.
                known = _RULES[primitive]
                raise RuleError(
                    f"The primitive {primitive!r} has a rule already, {known.__module__}.{known.__qualname__}. "
                    "A second one cannot be registered; give your own primitive a name of its own."
                )
            _RULES[primitive] = function
        return function

    return register


def only_own_rules() -> bool:
    """Return True if all registered rules are part of alpa_lite, so that its source code determines them."""
    # Rules of the user are functions of other packages, which a new process or a cache key would not know.
    own = __name__.partition(".")[0]
    return all(function.__module__.partition(".")[0] == own for function in _RULES.values())


def has_rule(primitive: str) -> bool:
    """Return True if the primitive has a rule."""
    return primitive in _RULES


def known_primitives() -> tuple[str, ...]:
    """Return the names of all primitives with a rule, sorted."""
    return tuple(sorted(_RULES))


def rule_source(primitive: str, params: Mapping[str, Any]) -> RuleFunction:
    """Return the rule function of an op; `opaque_rule` if none is registered.

    A kernel may have a rule under its own name, such as `"pallas_call:my_kernel"`, instead of that of its primitive.
    """
    named = _RULES.get(f"{primitive}:{params.get('name')}")
    return _RULES.get(primitive, opaque_rule) if named is None else named


def opaque_rule(view: OpView) -> Rule:
    """Return the rule in which no dim of any operand or result may be split."""
    b = RuleBuilder()
    operands = tuple(b.factors(v.shape, FactorKind.REPLICATED) for v in view.operands)
    results = tuple(b.factors(v.shape, FactorKind.REPLICATED) for v in view.results)
    return b.build(operands, results, opaque=True, flops=float(sum(v.num_elements for v in view.results)))


def rule_of(view: OpView) -> Rule:
    """Return an op's rule, opaque if its primitive has none. Raises `RuleError` if it does not fit the op's shapes."""
    found = rule_source(view.primitive, view.params)(view)
    # The lengths are compared separately, so that a mismatch is reported and does not raise here.
    tensors = [*zip(view.operands, found.operands, strict=False), *zip(view.results, found.results, strict=False)]
    fits = len(found.operands) == len(view.operands) and len(found.results) == len(view.results)
    if not fits or any(_shape(dims, found.sizes) != value.shape for value, dims in tensors):
        shapes = [[list(v.shape) for v in values] for values in (view.operands, view.results)]
        raise RuleError(
            f"The rule of {view.primitive!r} says {found} with factors of sizes {list(found.sizes)}, but its operands "
            f"have the shapes {shapes[0]} and its results {shapes[1]}. The factors of each dim must multiply up to its "
            "size."
        )
    return found


def _shape(dims: Dims, sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(sizes[f] for f in factors) for factors in dims)


def view_of(graph: Graph, op: Op) -> OpView:
    """Return the view of an op in its graph."""
    return OpView(
        primitive=op.primitive,
        operands=graph.operands(op),
        results=graph.results(op),
        params=op.params,
        bodies=op.bodies,
    )
