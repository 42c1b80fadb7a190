"""Follow the numbers of a kernel or index map through its program (see `grid_split`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.program.memo import memoized
from alpa_lite.trace.kernels.step_numbers import (
    DATA,
    MIXED,
    PURE,
    ZERO,
    Item,
    Number,
    Ref,
    apart,
    comparison,
    constant,
    equal,
    join_items,
    numbers_of,
    of_literal,
    read_item,
    widened,
)


class Dependent(Exception):
    """The steps of the axis are not known to be independent; the message says why."""


class Coarser(Exception):
    """The proof needs a larger granule."""

    def __init__(self, granule: int) -> None:
        super().__init__(granule)
        self.granule = granule


@dataclass(frozen=True, slots=True)
class KernelAccess:
    """A read or write of a dim of an array at a place that the kernel computes."""

    ref: int
    dim: int
    place: Number
    extent: int


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """The parts of a `pallas_call` that matter here."""

    kernel: Any
    grid: tuple[Any, ...]
    own_axes: tuple[int, ...]
    num_leading: int
    num_index: int
    blocks: tuple[Any, ...]
    num_inputs: int
    aliases: tuple[tuple[int, int], ...]
    parallel: frozenset[int]
    vmapped: frozenset[int]

    @staticmethod
    def of(params: Mapping[str, Any]) -> KernelCall | None:
        """Return the call of an equation, None if its grid has names or a mesh of its own."""
        grid = params["grid_mapping"]
        named = grid.grid_names is not None or params.get("mesh") is not None
        if named or grid.get_grid_indices is not None or grid.local_grid_env is not None:
            return None
        vmapped = frozenset(grid.vmapped_dims)
        own = tuple(a for a in range(len(grid.grid)) if a not in vmapped)
        semantics = getattr(params.get("compiler_params"), "dimension_semantics", None) or ()
        declared = zip(own, semantics, strict=True) if len(semantics) == len(own) else ()
        return KernelCall(
            kernel=_jax.open_jaxpr(params["jaxpr"]),
            grid=tuple(grid.grid),
            own_axes=own,
            num_leading=grid.num_dynamic_grid_bounds,
            num_index=grid.num_index_operands,
            blocks=tuple(grid.block_mappings),
            num_inputs=grid.num_inputs,
            aliases=tuple((int(i), int(o)) for i, o in params["input_output_aliases"]),
            parallel=frozenset(a for a, how in declared if str(getattr(how, "name", how)).lower() == "parallel"),
            vmapped=vmapped,
        )

    @property
    def first_scratch(self) -> int:
        """The number of the first scratch array among the kernel's arguments."""
        return self.num_index + len(self.blocks)


class ScratchUse:
    """Which scratch arrays are written before they are read, in the first step of each granule of the axis."""

    def __init__(self, arrays: frozenset[int]) -> None:
        self.unwritten = set(arrays)

    def read(self, ref: Ref) -> None:
        """Note a read. Raises `Dependent` if it may read what an earlier step has left."""
        if ref.number in self.unwritten:
            raise Dependent("a step reads what an earlier step left in scratch memory")

    def write(self, ref: Ref) -> None:
        """Note that an array is written whole."""
        self.unwritten.discard(ref.number)


class KernelMachine:
    """Follow the numbers of a program for one axis; `accesses` collects the places that it addresses.

    With `scratch`, the machine follows the first step of a granule: the inner axes stand at their first step, too.
    """

    def __init__(self, call: KernelCall, axis: int, granule: int, scratch: ScratchUse | None = None) -> None:
        self.call, self.axis, self.granule, self.scratch = call, axis, granule, scratch
        self.accesses: set[KernelAccess] = set()

    def step(self, axis: int) -> Number:
        """Return the step along an axis of the grid."""
        if axis == self.axis:
            return Number(Fraction(1), 0, self.granule - 1 if self.scratch is None else 0)
        if self.scratch is not None and axis > self.axis:
            return constant(0)
        size = self.call.grid[axis]
        return Number(ZERO, 0, size - 1 if isinstance(size, int) else None)

    def run(self, jaxpr: Any, arguments: Sequence[Item], captured: Sequence[Item] = ()) -> list[Item]:
        """Return the outputs of a jaxpr; `captured` are its constants, arrays of unknown numbers by default."""
        jaxpr = _jax.open_jaxpr(jaxpr)
        known: dict[Any, Item] = dict(zip(jaxpr.invars, arguments, strict=True))
        known.update(zip(jaxpr.constvars, captured or [DATA] * len(jaxpr.constvars), strict=True))
        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self.equation(eqn, known, jaxpr), strict=True))
        return [read_item(v, known) for v in jaxpr.outvars]

    def equation(self, eqn: Any, known: Mapping[Any, Item], jaxpr: Any) -> list[Item]:
        """Return the results of an equation."""
        name, items = eqn.primitive.name, [read_item(v, known) for v in eqn.invars]
        if name in MEMORY:
            return self.memory(eqn, known, jaxpr)
        control = {"cond": self.cond, "scan": self.scan, "while": self.while_loop, "run_scoped": self.run_scoped}
        if name in control:
            return control[name](eqn, items)
        inner = next((eqn.params[key] for key in _CALLED if key in eqn.params), None)
        if inner is not None and name in _CALLS:
            division = _DIVISIONS.get(eqn.params.get("name", ""))
            if division is not None and str(_jax.open_jaxpr(inner)) in division_texts():
                return [self.pure(division, eqn, numbers_of(items))]
            return self.run(inner, items)
        refs = [item for item in items if isinstance(item, Ref)]
        numbers = numbers_of(items)
        if refs or eqn.effects or name.startswith("prng_"):
            self.unknown_effect(eqn, refs, numbers)
            return [DATA for _ in eqn.outvars]
        return [self.pure(name, eqn, numbers) for _ in eqn.outvars]

    def pure(self, name: str, eqn: Any, numbers: Sequence[Number]) -> Number:
        """Return the result of an equation without effects."""
        if name == "program_id":
            return self.step(self.call.own_axes[eqn.params["axis"]])
        if name == "num_programs":
            axis = self.call.own_axes[eqn.params["axis"]]
            size = self.call.grid[axis]
            return MIXED if axis == self.axis else constant(size) if isinstance(size, int) else DATA
        if name in ("div", "rem"):
            return self.divided(numbers[0], numbers[1], rest=name == "rem")
        function = PURE.get(name)
        if name == "iota":
            return Number(ZERO, 0, int(eqn.params["shape"][eqn.params["dimension"]]) - 1)
        kind = getattr(eqn.outvars[0].aval.dtype, "kind", "")
        if function is not None and kind in ("i", "u", "b") and (kind == "b" or name != "or"):
            made = function(*numbers)
            # A number becomes True unless it is 0.
            return comparison(equal, apart)(made, constant(0)) if _becomes_bool(eqn) else made
        # A program inside that asks for its step may do anything with it.
        asks = any(_asks_for_step(_jax.open_jaxpr(inner)) for inner in _jax.inner_jaxprs(eqn))
        return DATA if all(n.same for n in numbers) and not asks else MIXED

    def divided(self, x: Number, y: Number, *, rest: bool) -> Number:
        """Return x // y, or x % y, for x ≥ 0 and a constant y > 0."""
        by = y.only
        if by is None or by <= 0 or x.shift is None or x.low is None or x.low < 0:
            return DATA if x.same and y.same else MIXED
        # The first step is a multiple of the granule; its share of x must be a multiple of y.
        share = x.shift * self.granule / by
        if share.denominator != 1:
            raise Coarser(self.granule * share.denominator)
        if not rest:
            return Number(x.shift / by, x.low // by, None if x.high is None else x.high // by)
        fits = x.high is not None and x.high < by
        return Number(ZERO, x.low if fits else 0, x.high if fits else by - 1)

    def unknown_effect(self, eqn: Any, refs: Sequence[Ref], numbers: Sequence[Number]) -> None:
        """Follow an equation that does something unknown to memory: nothing of it may depend on the step."""
        asks = any(_asks_for_step(_jax.open_jaxpr(inner)) for inner in _jax.inner_jaxprs(eqn))
        # Random bits come from a state that all steps of a core share.
        if asks or not all(n.same for n in numbers) or eqn.primitive.name.startswith("prng_"):
            raise Dependent(f"{eqn.primitive.name} depends on the step")
        for ref in refs:
            self.touch(ref)

    def touch(self, ref: Ref) -> None:
        """Note that an array is read, and perhaps written, at places that do not depend on the step."""
        if self.scratch is not None:
            self.scratch.read(ref)
        if ref.number >= 0:
            rank = len(self.call.kernel.invars[ref.number].aval.shape)
            self.accesses.update(KernelAccess(ref.number, dim, DATA, 1) for dim in range(rank))

    def memory(self, eqn: Any, known: Mapping[Any, Item], jaxpr: Any) -> list[Item]:
        """Follow a read or write of a part of an array."""
        name = eqn.primitive.name
        tree = eqn.params["args_tree"] if "args_tree" in eqn.params else eqn.params["tree"]
        others: list[Any] = []
        if name in ("masked_load", "masked_swap"):
            var, transforms, *others = jax.tree.unflatten(tree, eqn.invars)
            others = [v for v in others if v is not None]
        elif name == "get":
            var, *rest = eqn.invars
            transforms = jax.tree.unflatten(tree, rest)
        else:
            var, value, *rest = eqn.invars
            transforms, others = jax.tree.unflatten(tree, rest), [value]
        ref = read_item(var, known)
        if not isinstance(ref, Ref) or not all(n.same for n in numbers_of(read_item(v, known) for v in others)):
            raise Dependent("the kernel stores a number that depends on the step")
        is_whole = self.place(ref, var.aval.shape, tuple(transforms), known)
        if self.scratch is not None:
            reads_old = name != "swap" or _is_read(eqn.outvars[0], jaxpr)
            if reads_old:
                self.scratch.read(ref)
            elif is_whole:
                self.scratch.write(ref)
        return [DATA for _ in eqn.outvars]

    def place(self, ref: Ref, shape: Sequence[int], transforms: Sequence[Any], known: Mapping[Any, Item]) -> bool:
        """Note the place that an access addresses, and return whether it is the whole array."""
        is_whole = True
        for depth, transform in enumerate(transforms):
            indices = getattr(transform, "indices", None)
            leaves = [v for v in jax.tree.leaves(transform) if isinstance(v, _jax.Var)]
            first = depth == 0 and indices is not None
            if not first and not all(n.same for n in numbers_of(known[v] for v in leaves)):
                raise Dependent("the kernel addresses a part of a part by its step")
            if not first or indices is None:
                is_whole = False
                continue
            for dim, index in enumerate(indices):
                place, extent = _place(index, known)
                is_whole &= place.only == 0 and extent == shape[dim]
                if place.shift is None:
                    raise Dependent("the kernel reads at a place that mixes its step with others")
                if ref.number >= 0:
                    self.accesses.add(KernelAccess(ref.number, dim, place, extent))
                elif not place.same:
                    raise Dependent("the kernel addresses scratch memory by its step")
        if not transforms and ref.number >= 0:
            self.accesses.update(KernelAccess(ref.number, dim, constant(0), n) for dim, n in enumerate(shape))
        return is_whole

    def cond(self, eqn: Any, items: Sequence[Item]) -> list[Item]:
        """Follow the branches that may be taken."""
        (index, *rest), branches = items, eqn.params["branches"]
        assert isinstance(index, Number)
        if not index.same:
            raise Dependent("a branch depends on the step")
        if index.only is not None:
            return self.run(branches[min(max(index.only, 0), len(branches) - 1)], rest)
        results: list[list[Item]] = []
        before = set(self.scratch.unwritten) if self.scratch is not None else set[int]()
        after = set[int]()
        for branch in branches:
            if self.scratch is not None:
                self.scratch.unwritten = set(before)
            results.append(self.run(branch, rest))
            after |= self.scratch.unwritten if self.scratch is not None else set()
        if self.scratch is not None:
            self.scratch.unwritten = after
        return [join_items(column) for column in zip(*results, strict=True)]

    def scan(self, eqn: Any, items: Sequence[Item]) -> list[Item]:
        """Follow a loop of a fixed length until its carry does not change."""
        params = _jax.params_of(eqn)
        first, count = params["num_consts"], params["num_carry"]
        consts, carry, rows = items[:first], items[first : first + count], items[first + count :]
        if params["length"] == 0:
            return [*carry, *[DATA] * (len(eqn.outvars) - count)]

        def body(carry: Sequence[Item]) -> tuple[list[Item], list[Item]]:
            made = self.run(params["jaxpr"], [*consts, *carry, *rows])
            return made[:count], made[count:]

        carry, stacked = self.until_stable(body, carry)
        return [*carry, *stacked]

    def while_loop(self, eqn: Any, items: Sequence[Item]) -> list[Item]:
        """Follow a loop that ends by a condition."""
        params, first = eqn.params, eqn.params["cond_nconsts"]
        second = first + params["body_nconsts"]

        def body(carry: Sequence[Item]) -> tuple[list[Item], list[Item]]:
            (goes_on,) = self.run(params["cond_jaxpr"], [*items[:first], *carry])
            assert isinstance(goes_on, Number)
            if not goes_on.same:
                raise Dependent("the length of a loop depends on the step")
            return self.run(params["body_jaxpr"], [*items[first:second], *carry]), []

        unwritten = set(self.scratch.unwritten) if self.scratch is not None else None
        carry, _ = self.until_stable(body, items[second:])
        if self.scratch is not None and unwritten is not None:
            self.scratch.unwritten = unwritten  # the body may not run at all
        return list(carry)

    def until_stable(
        self, body: Callable[[Sequence[Item]], tuple[list[Item], list[Item]]], carry: Sequence[Item]
    ) -> tuple[list[Item], list[Item]]:
        """Return the carry of a loop that holds for any number of trips, and the other results of its body."""
        state = list(carry)
        while True:
            made, others = body(state)
            wider = [widened(a, b) for a, b in zip(state, made, strict=True)]
            if wider == state:
                return state, others
            state = wider

    def run_scoped(self, eqn: Any, items: Sequence[Item]) -> list[Item]:
        """Follow a program with memory of its own, which holds nothing before and after it."""
        inner = _jax.open_jaxpr(eqn.params["jaxpr"])
        own = [Ref(-1) for _ in inner.invars]
        return self.run(inner, own, items)


def _place(index: Any, known: Mapping[Any, Item]) -> tuple[Number, int]:
    """Return the first row that an index along one dim addresses, and the number of rows."""
    if hasattr(index, "start"):
        start, size, stride = index.start, index.size, index.stride
        place = read_item(start, known) if isinstance(start, (_jax.Var, _jax.Literal)) else constant(int(start))
        if not isinstance(place, Number) or not isinstance(size, int) or not isinstance(stride, int):
            return MIXED, 1
        return place, (size - 1) * stride + 1
    place = read_item(index, known) if isinstance(index, (_jax.Var, _jax.Literal)) else of_literal(index)
    return (place, 1) if isinstance(place, Number) else (MIXED, 1)


def _is_read(var: Any, jaxpr: Any) -> bool:
    return any(v is var for eqn in jaxpr.eqns for v in eqn.invars) or any(v is var for v in jaxpr.outvars)


def _asks_for_step(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in ("program_id", "num_programs")
        or any(_asks_for_step(_jax.open_jaxpr(inner)) for inner in _jax.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _becomes_bool(eqn: Any) -> bool:
    return (
        eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype == bool
    )


MEMORY = frozenset("get swap addupdate masked_load masked_swap".split())
_CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 checkpoint".split())
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_DIVISIONS = {"floor_divide": "div", "remainder": "rem"}


@memoized(entries=1)
def division_texts() -> frozenset[str]:
    """Return the text of the programs that JAX writes for `x // y` and `x % y` of 32-bit integers.

    For x ≥ 0 and y > 0 these equal `div` and `rem`. A function of the user may have the same name, hence the texts.
    """
    x = jax.ShapeDtypeStruct((), np.int32)
    found: list[str] = []
    for function in (jax.numpy.floor_divide, jax.numpy.remainder):
        for strong in (x, 2):
            (eqn,) = _jax.open_jaxpr(jax.make_jaxpr(function)(x, strong)).eqns[-1:]
            found += [str(_jax.open_jaxpr(inner)) for inner in _jax.inner_jaxprs(eqn)]
    return frozenset(found)
