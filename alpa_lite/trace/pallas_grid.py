"""Prove which axes of the grid of a `pallas_call` can be split over devices.

A kernel runs once per grid step and reads and writes one block of each array; an index map says which. Splitting grid
axis a gives a device the steps [s, s + n) as steps [0, n) of a smaller grid, on its part of the arrays. That computes
the same if nothing that a step does depends on s. The proof follows every integer of the index maps and of the kernel
through the program as a function of the step p along a, relative to the first step s (`_Number`):

    x(s + p) = x'(p) + s · shift        x' as computed by the device, which counts its steps from 0

    program_id(a)       shift 1             x · c     shift · c          x // c    shift / c   ┐ if s is a multiple of
    data, other axes    shift 0             x + y     sum of shifts      x % c     0           ┘ the granule c / shift
    x < y               0 if both have the same shift

Everything else with a shift is *mixed*. The axis may be split if

    - no branch, stored value or loop condition is mixed or shifted;
    - of each operand, the shifted index of at most one dim covers just the device's part of that dim; an operand that
      the kernel itself indexes (a prefetched table, for instance) stays whole and is rotated by s instead (`Rolled`);
    - each result that is read has such a dim, so that no two devices write the same block;
    - no step reads what a step of another granule left in scratch memory: either the kernel declares the axis as
      parallel, or the first step of each granule writes the scratch before it reads it (`_Scratch`).

The kernel of attention over batches and heads is split by this proof without being known by name, as are blocks of
queries where no mask counts positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from alpa_lite import _jax
from alpa_lite.errors import RuleError
from alpa_lite.program.equations import plain_params
from alpa_lite.program.ir import Value
from alpa_lite.rules import OpView, Rule, has_rule, opaque_rule, rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """An operand that stays whole and is rotated along `dim` by `rows` rows per granule of the first step."""

    operand: int
    dim: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GridAxis:
    """A grid axis that can be split.

    Attributes:
        axis: its number in the grid.
        granule: number of steps that stay together.
        size: number of granules.
        operands: per operand the dim that is split with the axis, or None.
        results: the same per result.
        rolled: operands that are rotated.
        proven: False if only the index maps are known to allow it.
    """

    axis: int
    granule: int
    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    rolled: tuple[Rolled, ...] = ()
    proven: bool = True


@dataclass(frozen=True, slots=True)
class _Number:
    """An integer or array of a program: its shift (None if mixed) and bounds within one granule, None if unknown."""

    shift: Fraction | None
    low: int | None = None
    high: int | None = None

    @property
    def same(self) -> bool:
        """Whether all devices compute this number from their own steps and data."""
        return self.shift == 0

    @property
    def only(self) -> int | None:
        """The only value, if there is just one."""
        return self.low if self.same and self.low == self.high else None


_ZERO = Fraction(0)
_DATA = _Number(_ZERO)
_MIXED = _Number(None)


@dataclass(frozen=True, slots=True)
class _Ref:
    """An array in memory that a kernel reads and writes, by its number among the kernel's arguments; -1 if local."""

    number: int


_Item = _Number | _Ref


class Dependent(Exception):
    """The steps of the axis are not known to be independent; the message says why."""


class _Coarser(Exception):
    """The proof needs a larger granule."""

    def __init__(self, granule: int) -> None:
        super().__init__(granule)
        self.granule = granule


@dataclass(frozen=True, slots=True)
class _Access:
    """A read or write of a dim of an array at a place that the kernel computes."""

    ref: int
    dim: int
    place: _Number
    extent: int


@dataclass(frozen=True, kw_only=True)
class _Call:
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
    def of(params: Mapping[str, Any]) -> _Call | None:
        """Return the call of an equation, None if its grid has names or a mesh of its own."""
        grid = params["grid_mapping"]
        named = grid.grid_names is not None or params.get("mesh") is not None
        if named or grid.get_grid_indices is not None or grid.local_grid_env is not None:
            return None
        vmapped = frozenset(grid.vmapped_dims)
        own = tuple(a for a in range(len(grid.grid)) if a not in vmapped)
        semantics = getattr(params.get("compiler_params"), "dimension_semantics", None) or ()
        declared = zip(own, semantics, strict=True) if len(semantics) == len(own) else ()
        return _Call(
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


def grid_axes(params: Mapping[str, Any], unread: frozenset[int]) -> tuple[GridAxis, ...]:
    """Return the axes of a `pallas_call` whose index maps allow a split; `GridAxis.proven` says if the kernel does.

    Args:
        params: parameters of the equation.
        unread: numbers of the results that nothing reads; kernels use such results as scratch memory.
    """
    call = _Call.of(params)
    if call is None:
        return ()
    found: list[GridAxis] = []
    for axis, size in enumerate(call.grid):
        if not isinstance(size, int):
            continue
        try:
            found.append(_split(call, axis, unread))
        except Dependent:
            continue
    return tuple(found)


def _split(call: _Call, axis: int, unread: frozenset[int]) -> GridAxis:
    """Return how an axis is split. Raises `Dependent`."""
    granule = 1
    while True:
        try:
            found = _Proof(call, axis, granule, unread).split()
            break
        except _Coarser as error:
            granule = error.granule
            if call.grid[axis] % granule:
                raise Dependent("the grid is no multiple of the granule") from error
    return found


class _Proof:
    """The proof for one axis and granule."""

    def __init__(self, call: _Call, axis: int, granule: int, unread: frozenset[int]) -> None:
        self.call, self.axis, self.granule, self.unread = call, axis, granule, unread

    def split(self) -> GridAxis:
        """Return how the axis is split; `proven` is False if only the index maps allow it."""
        call = self.call
        machine = _Machine(call, self.axis, self.granule)
        prefetched = [_Ref(i) for i in range(call.num_index)]
        steps = [machine.step(a) for a in range(len(call.grid))]
        dims = [
            self.split_dim(block, machine.run(_jax.open_jaxpr(block.index_map_jaxpr), [*steps, *prefetched]))
            for block in call.blocks
        ]
        none = (None,) * (call.num_leading + call.num_index)
        result = GridAxis(
            axis=self.axis,
            granule=self.granule,
            size=call.grid[self.axis] // self.granule,
            operands=(*none, *dims[: call.num_inputs]),
            results=tuple(dims[call.num_inputs :]),
        )
        try:
            self.kernel(machine, result)
            return replace(result, rolled=self.rolled(machine.accesses, dims))
        except Dependent:
            return replace(result, proven=False)

    def split_dim(self, block: Any, places: Sequence[_Item]) -> int | None:
        """Return the dim of an array that is split, from the numbers of the blocks that the index map returns."""
        found: int | None = None
        columns = zip(block.block_shape, block.array_aval.shape, places, strict=True)
        for dim, (kind, rows, place) in enumerate(columns):
            if not isinstance(place, _Number) or place.shift is None:
                raise Dependent("an index map mixes the steps of the axis")
            if place.same:
                continue
            size = block_rows(kind)
            if found is not None or size is None:
                raise Dependent("two dims of an array follow the axis, or its blocks overlap")
            per_granule = place.shift * self.granule
            whole = per_granule * (self.call.grid[self.axis] // self.granule) * size
            if not _within(place, 1, per_granule) or whole != rows:
                raise Dependent("the blocks of a granule are no contiguous part of the array")
            found = dim
        return found

    def kernel(self, machine: _Machine, split: GridAxis) -> None:
        """Follow the kernel. Raises `Dependent` if a step depends on its place along the axis."""
        call = self.call
        for operand, result in call.aliases:
            if split.operands[operand] != split.results[result]:
                raise Dependent("a result overwrites an operand that is not split in the same way")
        # A result that nothing reads may be scratch memory; any other would be written by several devices.
        shared = {n for n, dim in enumerate(split.results) if dim is None}
        if shared - self.unread:
            raise Dependent("several steps along the axis write the same block of a result")
        first = call.num_index + call.num_inputs
        arguments = [_Ref(i) for i in range(len(call.kernel.invars))]
        machine.run(call.kernel, arguments)
        scratch = {first + n for n in shared}
        scratch |= {n for n in range(call.first_scratch, len(arguments)) if not _is_semaphore(call.kernel.invars[n])}
        if scratch and self.axis not in call.parallel | call.vmapped:
            once = _Machine(call, self.axis, self.granule, _Scratch(frozenset(scratch)))
            once.run(call.kernel, arguments)

    def rolled(self, accesses: Iterable[_Access], dims: Sequence[int | None]) -> tuple[Rolled, ...]:
        """Return the operands that the kernel indexes by its steps. Raises `Dependent` if it cannot be rotated."""
        call, found = self.call, dict[tuple[int, int], Fraction]()
        of_dim: dict[tuple[int, int], list[_Access]] = {}
        for access in accesses:
            of_dim.setdefault((access.ref, access.dim), []).append(access)
        for (ref, kernel_dim), made in of_dim.items():
            shifts = {access.place.shift for access in made}
            if shifts == {_ZERO}:
                continue
            (shift, *others) = shifts
            if others or not shift or ref >= call.num_index + call.num_inputs:
                raise Dependent("the kernel itself addresses a result or scratch memory by its step")
            shape, dim = self.argument(ref, kernel_dim)
            in_granule = shift * self.granule
            if in_granule * (call.grid[self.axis] // self.granule) != shape[dim] or not all(
                _within(access.place, access.extent, in_granule) for access in made
            ):
                raise Dependent("the rows that a granule reads are no contiguous part of an operand")
            if ref >= call.num_index and dims[ref - call.num_index] is not None:
                raise Dependent("the kernel addresses a block by its step")
            found[call.num_leading + ref, dim] = in_granule
        return tuple(Rolled(operand=i, dim=d, rows=int(rows)) for (i, d), rows in sorted(found.items()))

    def argument(self, ref: int, kernel_dim: int) -> tuple[tuple[int, ...], int]:
        """Return the shape of the operand behind an argument of the kernel, and its dim behind the argument's."""
        call = self.call
        if ref < call.num_index:
            return tuple(call.kernel.invars[ref].aval.shape), kernel_dim
        block = call.blocks[ref - call.num_index]
        shape = tuple(block.array_aval.shape)
        kept = [d for d, kind in enumerate(block.block_shape) if type(kind).__name__ != "Squeezed"]
        if block.transforms or len(kept) <= kernel_dim or block_rows(block.block_shape[kept[kernel_dim]]) is None:
            raise Dependent("the block has another layout than the operand")
        dim = kept[kernel_dim]
        if block_rows(block.block_shape[dim]) != shape[dim]:
            raise Dependent("the kernel addresses a block by its step")
        return shape, dim


def block_rows(kind: Any) -> int | None:
    """Return the rows of a block along a dim, None for kinds of blocks that may overlap."""
    if type(kind).__name__ == "Squeezed":
        return 1
    return int(kind.block_size) if type(kind).__name__ == "Blocked" else None


def _within(place: _Number, extent: int, rows: Fraction) -> bool:
    """Return whether all places, each of `extent` rows, lie among the first `rows` rows."""
    if place.low is None or place.high is None or rows.denominator != 1:
        return False
    return place.low >= 0 and place.high + extent <= rows


def _is_semaphore(var: Any) -> bool:
    return "sem" in str(getattr(var.aval, "dtype", ""))


class _Scratch:
    """Which scratch arrays are written before they are read, in the first step of each granule of the axis."""

    def __init__(self, arrays: frozenset[int]) -> None:
        self.unwritten = set(arrays)

    def read(self, ref: _Ref) -> None:
        """Note a read. Raises `Dependent` if it may read what an earlier step has left."""
        if ref.number in self.unwritten:
            raise Dependent("a step reads what an earlier step left in scratch memory")

    def write(self, ref: _Ref) -> None:
        """Note that an array is written whole."""
        self.unwritten.discard(ref.number)


class _Machine:
    """Follow the numbers of a program for one axis; `accesses` collects the places that it addresses.

    With `scratch`, the machine follows the first step of a granule: the inner axes stand at their first step, too.
    """

    def __init__(self, call: _Call, axis: int, granule: int, scratch: _Scratch | None = None) -> None:
        self.call, self.axis, self.granule, self.scratch = call, axis, granule, scratch
        self.accesses: set[_Access] = set()

    def step(self, axis: int) -> _Number:
        """Return the step along an axis of the grid."""
        if axis == self.axis:
            return _Number(Fraction(1), 0, self.granule - 1 if self.scratch is None else 0)
        if self.scratch is not None and axis > self.axis:
            return _constant(0)
        size = self.call.grid[axis]
        return _Number(_ZERO, 0, size - 1 if isinstance(size, int) else None)

    def run(self, jaxpr: Any, arguments: Sequence[_Item], captured: Sequence[_Item] = ()) -> list[_Item]:
        """Return the outputs of a jaxpr; `captured` are its constants, arrays of unknown numbers by default."""
        jaxpr = _jax.open_jaxpr(jaxpr)
        known: dict[Any, _Item] = dict(zip(jaxpr.invars, arguments, strict=True))
        known.update(zip(jaxpr.constvars, captured or [_DATA] * len(jaxpr.constvars), strict=True))
        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self.equation(eqn, known, jaxpr), strict=True))
        return [_read(v, known) for v in jaxpr.outvars]

    def equation(self, eqn: Any, known: Mapping[Any, _Item], jaxpr: Any) -> list[_Item]:
        """Return the results of an equation."""
        name, items = eqn.primitive.name, [_read(v, known) for v in eqn.invars]
        if name in _MEMORY:
            return self.memory(eqn, known, jaxpr)
        control = {"cond": self.cond, "scan": self.scan, "while": self.while_loop, "run_scoped": self.run_scoped}
        if name in control:
            return control[name](eqn, items)
        inner = next((eqn.params[key] for key in _CALLED if key in eqn.params), None)
        if inner is not None and name in _CALLS:
            division = _DIVISIONS.get(eqn.params.get("name", ""))
            if division is not None and str(_jax.open_jaxpr(inner)) in division_texts():
                return [self.pure(division, eqn, _numbers(items))]
            return self.run(inner, items)
        refs = [item for item in items if isinstance(item, _Ref)]
        numbers = _numbers(items)
        if refs or eqn.effects or name.startswith("prng_"):
            self.unknown_effect(eqn, refs, numbers)
            return [_DATA for _ in eqn.outvars]
        return [self.pure(name, eqn, numbers) for _ in eqn.outvars]

    def pure(self, name: str, eqn: Any, numbers: Sequence[_Number]) -> _Number:
        """Return the result of an equation without effects."""
        if name == "program_id":
            return self.step(self.call.own_axes[eqn.params["axis"]])
        if name == "num_programs":
            axis = self.call.own_axes[eqn.params["axis"]]
            size = self.call.grid[axis]
            return _MIXED if axis == self.axis else _constant(size) if isinstance(size, int) else _DATA
        if name in ("div", "rem"):
            return self.divided(numbers[0], numbers[1], rest=name == "rem")
        function = _PURE.get(name)
        if name == "iota":
            return _Number(_ZERO, 0, int(eqn.params["shape"][eqn.params["dimension"]]) - 1)
        kind = getattr(eqn.outvars[0].aval.dtype, "kind", "")
        if function is not None and kind in ("i", "u", "b") and (kind == "b" or name != "or"):
            made = function(*numbers)
            # A number becomes True unless it is 0.
            return _comparison(_equal, _apart)(made, _constant(0)) if _becomes_bool(eqn) else made
        # A program inside that asks for its step may do anything with it.
        asks = any(_asks_for_step(_jax.open_jaxpr(inner)) for inner in _jax.inner_jaxprs(eqn))
        return _DATA if all(n.same for n in numbers) and not asks else _MIXED

    def divided(self, x: _Number, y: _Number, *, rest: bool) -> _Number:
        """Return x // y, or x % y, for x ≥ 0 and a constant y > 0."""
        by = y.only
        if by is None or by <= 0 or x.shift is None or x.low is None or x.low < 0:
            return _DATA if x.same and y.same else _MIXED
        # The first step is a multiple of the granule; its share of x must be a multiple of y.
        share = x.shift * self.granule / by
        if share.denominator != 1:
            raise _Coarser(self.granule * share.denominator)
        if not rest:
            return _Number(x.shift / by, x.low // by, None if x.high is None else x.high // by)
        fits = x.high is not None and x.high < by
        return _Number(_ZERO, x.low if fits else 0, x.high if fits else by - 1)

    def unknown_effect(self, eqn: Any, refs: Sequence[_Ref], numbers: Sequence[_Number]) -> None:
        """Follow an equation that does something unknown to memory: nothing of it may depend on the step."""
        asks = any(_asks_for_step(_jax.open_jaxpr(inner)) for inner in _jax.inner_jaxprs(eqn))
        # Random bits come from a state that all steps of a core share.
        if asks or not all(n.same for n in numbers) or eqn.primitive.name.startswith("prng_"):
            raise Dependent(f"{eqn.primitive.name} depends on the step")
        for ref in refs:
            self.touch(ref)

    def touch(self, ref: _Ref) -> None:
        """Note that an array is read, and perhaps written, at places that do not depend on the step."""
        if self.scratch is not None:
            self.scratch.read(ref)
        if ref.number >= 0:
            rank = len(self.call.kernel.invars[ref.number].aval.shape)
            self.accesses.update(_Access(ref.number, dim, _DATA, 1) for dim in range(rank))

    def memory(self, eqn: Any, known: Mapping[Any, _Item], jaxpr: Any) -> list[_Item]:
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
        ref = _read(var, known)
        if not isinstance(ref, _Ref) or not all(n.same for n in _numbers(_read(v, known) for v in others)):
            raise Dependent("the kernel stores a number that depends on the step")
        is_whole = self.place(ref, var.aval.shape, tuple(transforms), known)
        if self.scratch is not None:
            reads_old = name != "swap" or _is_read(eqn.outvars[0], jaxpr)
            if reads_old:
                self.scratch.read(ref)
            elif is_whole:
                self.scratch.write(ref)
        return [_DATA for _ in eqn.outvars]

    def place(self, ref: _Ref, shape: Sequence[int], transforms: Sequence[Any], known: Mapping[Any, _Item]) -> bool:
        """Note the place that an access addresses, and return whether it is the whole array."""
        is_whole = True
        for depth, transform in enumerate(transforms):
            indices = getattr(transform, "indices", None)
            leaves = [v for v in jax.tree.leaves(transform) if isinstance(v, _jax.Var)]
            first = depth == 0 and indices is not None
            if not first and not all(n.same for n in _numbers(known[v] for v in leaves)):
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
                    self.accesses.add(_Access(ref.number, dim, place, extent))
                elif not place.same:
                    raise Dependent("the kernel addresses scratch memory by its step")
        if not transforms and ref.number >= 0:
            self.accesses.update(_Access(ref.number, dim, _constant(0), n) for dim, n in enumerate(shape))
        return is_whole

    def cond(self, eqn: Any, items: Sequence[_Item]) -> list[_Item]:
        """Follow the branches that may be taken."""
        (index, *rest), branches = items, eqn.params["branches"]
        assert isinstance(index, _Number)
        if not index.same:
            raise Dependent("a branch depends on the step")
        if index.only is not None:
            return self.run(branches[min(max(index.only, 0), len(branches) - 1)], rest)
        results: list[list[_Item]] = []
        before = set(self.scratch.unwritten) if self.scratch is not None else set[int]()
        after = set[int]()
        for branch in branches:
            if self.scratch is not None:
                self.scratch.unwritten = set(before)
            results.append(self.run(branch, rest))
            after |= self.scratch.unwritten if self.scratch is not None else set()
        if self.scratch is not None:
            self.scratch.unwritten = after
        return [_joined(column) for column in zip(*results, strict=True)]

    def scan(self, eqn: Any, items: Sequence[_Item]) -> list[_Item]:
        """Follow a loop of a fixed length until its carry does not change."""
        params = _jax.params_of(eqn)
        first, count = params["num_consts"], params["num_carry"]
        consts, carry, rows = items[:first], items[first : first + count], items[first + count :]
        if params["length"] == 0:
            return [*carry, *[_DATA] * (len(eqn.outvars) - count)]

        def body(carry: Sequence[_Item]) -> tuple[list[_Item], list[_Item]]:
            made = self.run(params["jaxpr"], [*consts, *carry, *rows])
            return made[:count], made[count:]

        carry, stacked = self.until_stable(body, carry)
        return [*carry, *stacked]

    def while_loop(self, eqn: Any, items: Sequence[_Item]) -> list[_Item]:
        """Follow a loop that ends by a condition."""
        params, first = eqn.params, eqn.params["cond_nconsts"]
        second = first + params["body_nconsts"]

        def body(carry: Sequence[_Item]) -> tuple[list[_Item], list[_Item]]:
            (goes_on,) = self.run(params["cond_jaxpr"], [*items[:first], *carry])
            assert isinstance(goes_on, _Number)
            if not goes_on.same:
                raise Dependent("the length of a loop depends on the step")
            return self.run(params["body_jaxpr"], [*items[first:second], *carry]), []

        unwritten = set(self.scratch.unwritten) if self.scratch is not None else None
        carry, _ = self.until_stable(body, items[second:])
        if self.scratch is not None and unwritten is not None:
            self.scratch.unwritten = unwritten  # the body may not run at all
        return list(carry)

    def until_stable(
        self, body: Callable[[Sequence[_Item]], tuple[list[_Item], list[_Item]]], carry: Sequence[_Item]
    ) -> tuple[list[_Item], list[_Item]]:
        """Return the carry of a loop that holds for any number of trips, and the other results of its body."""
        state = list(carry)
        while True:
            made, others = body(state)
            wider = [_widened(a, b) for a, b in zip(state, made, strict=True)]
            if wider == state:
                return state, others
            state = wider

    def run_scoped(self, eqn: Any, items: Sequence[_Item]) -> list[_Item]:
        """Follow a program with memory of its own, which holds nothing before and after it."""
        inner = _jax.open_jaxpr(eqn.params["jaxpr"])
        own = [_Ref(-1) for _ in inner.invars]
        return self.run(inner, own, items)


def _place(index: Any, known: Mapping[Any, _Item]) -> tuple[_Number, int]:
    """Return the first row that an index along one dim addresses, and the number of rows."""
    if hasattr(index, "start"):
        start, size, stride = index.start, index.size, index.stride
        place = _read(start, known) if isinstance(start, (_jax.Var, _jax.Literal)) else _constant(int(start))
        if not isinstance(place, _Number) or not isinstance(size, int) or not isinstance(stride, int):
            return _MIXED, 1
        return place, (size - 1) * stride + 1
    place = _read(index, known) if isinstance(index, (_jax.Var, _jax.Literal)) else _of_literal(index)
    return (place, 1) if isinstance(place, _Number) else (_MIXED, 1)


def _read(atom: Any, known: Mapping[Any, _Item]) -> _Item:
    return _of_literal(atom.val) if isinstance(atom, _jax.Literal) else known[atom]


def _of_literal(value: Any) -> _Number:
    array = np.asarray(value)
    if array.dtype.kind not in "iub" or not array.size:
        return _DATA
    return _Number(_ZERO, int(array.min()), int(array.max()))


def _constant(value: int) -> _Number:
    return _Number(_ZERO, value, value)


def _numbers(items: Iterable[_Item]) -> list[_Number]:
    return [item for item in items if isinstance(item, _Number)]


def _is_read(var: Any, jaxpr: Any) -> bool:
    return any(v is var for eqn in jaxpr.eqns for v in eqn.invars) or any(v is var for v in jaxpr.outvars)


def _asks_for_step(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in ("program_id", "num_programs")
        or any(_asks_for_step(_jax.open_jaxpr(inner)) for inner in _jax.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _joined(items: Sequence[_Item]) -> _Item:
    """Return an item that covers all of these."""
    first = items[0]
    if all(item == first for item in items):
        return first
    numbers = _numbers(items)
    if len(numbers) < len(items) or len({n.shift for n in numbers}) > 1:
        return _MIXED
    lows, highs = [n.low for n in numbers], [n.high for n in numbers]
    low = None if None in lows else min(n for n in lows if n is not None)
    high = None if None in highs else max(n for n in highs if n is not None)
    return _Number(numbers[0].shift, low, high)


def _widened(before: _Item, after: _Item) -> _Item:
    """Return an item that covers both, with unknown bounds where they grow, so that loops end."""
    joined = _joined([before, after])
    if joined == before or not isinstance(joined, _Number) or not isinstance(before, _Number):
        return joined
    low = joined.low if joined.low == before.low else None
    return _Number(joined.shift, low, joined.high if joined.high == before.high else None)


def _combined(
    function: Callable[[int, int], int],
) -> Callable[[int | None, int | None], int | None]:
    return lambda a, b: None if a is None or b is None else function(a, b)


_plus, _minus = _combined(lambda a, b: a + b), _combined(lambda a, b: a - b)


def _add(x: _Number, y: _Number) -> _Number:
    if x.shift is None or y.shift is None:
        return _MIXED
    return _Number(x.shift + y.shift, _plus(x.low, y.low), _plus(x.high, y.high))


def _subtract(x: _Number, y: _Number) -> _Number:
    if x.shift is None or y.shift is None:
        return _MIXED
    return _Number(x.shift - y.shift, _minus(x.low, y.high), _minus(x.high, y.low))


def _multiply(x: _Number, y: _Number) -> _Number:
    x, y = (y, x) if x.only is not None else (x, y)
    by = y.only
    if x.shift is None or (by is None and not (x.same and y.same)):
        return _MIXED
    if by is None:
        ends = [_combined(lambda a, b: a * b)(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
        known = [e for e in ends if e is not None]
        return _Number(_ZERO, min(known), max(known)) if len(known) == len(ends) else _DATA
    ends = [None if e is None else e * by for e in (x.low, x.high)]
    low, high = ends if by >= 0 else ends[::-1]
    return _Number(x.shift * by, low, high)


def _extreme(largest: bool) -> Callable[[_Number, _Number], _Number]:
    choose = _combined(max if largest else min)

    def function(x: _Number, y: _Number) -> _Number:
        if x.shift is None or x.shift != y.shift:
            return _MIXED
        return _Number(x.shift, choose(x.low, y.low), choose(x.high, y.high))

    return function


def _comparison(never: Callable[[_Number, _Number], bool], always: Callable[[_Number, _Number], bool]) -> Any:
    """Return a comparison, from conditions on bounds under which it never (or always) holds."""

    def function(x: _Number, y: _Number) -> _Number:
        if x.shift is None or x.shift != y.shift:
            return _MIXED
        if never(x, y):
            return _constant(0)
        return _constant(1) if always(x, y) else _Number(_ZERO, 0, 1)

    return function


def _below(x: _Number, y: _Number) -> bool:
    return x.high is not None and y.low is not None and x.high < y.low


def _not_above(x: _Number, y: _Number) -> bool:
    return x.high is not None and y.low is not None and x.high <= y.low


def _apart(x: _Number, y: _Number) -> bool:
    return _below(x, y) or _below(y, x)


def _equal(x: _Number, y: _Number) -> bool:
    return x.low is not None and x.low == x.high == y.low == y.high


def _select(which: _Number, *cases: _Number) -> _Number:
    if which.only is not None and 0 <= which.only < len(cases):
        return cases[which.only]
    joined = _joined(cases) if which.same else _MIXED
    return joined if isinstance(joined, _Number) else _MIXED


def _logic(function: Callable[[int, int], int], stop: int) -> Callable[[_Number, _Number], _Number]:
    """Return `and` or `or` on bits; `stop` is the operand that decides the result alone, if the numbers are booleans."""

    def bits(x: _Number, y: _Number) -> _Number:
        if not (x.same and y.same):
            return _MIXED
        if x.only is not None and y.only is not None:
            return _constant(function(x.only, y.only))
        return _constant(stop) if stop in (x.only, y.only) else _DATA

    return bits


def _becomes_bool(eqn: Any) -> bool:
    return eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype != eqn.outvars[0].aval.dtype == bool


def _unchanged(x: _Number, *_: _Number) -> _Number:
    return x


def _negated(x: _Number) -> _Number:
    return _subtract(_constant(0), x)


_PURE: Mapping[str, Callable[..., _Number]] = {
    "add": _add,
    "sub": _subtract,
    "mul": _multiply,
    "neg": _negated,
    "max": _extreme(True),
    "min": _extreme(False),
    "lt": _comparison(lambda x, y: _not_above(y, x), _below),
    "le": _comparison(lambda x, y: _below(y, x), _not_above),
    "gt": _comparison(_not_above, lambda x, y: _below(y, x)),
    "ge": _comparison(_below, lambda x, y: _not_above(y, x)),
    "eq": _comparison(_apart, _equal),
    "ne": _comparison(_equal, _apart),
    "select_n": _select,
    "and": _logic(lambda a, b: a & b, 0),
    "or": _logic(lambda a, b: a | b, 1),
    **dict.fromkeys(
        "broadcast_in_dim reshape squeeze expand_dims transpose copy convert_element_type multiple_of "
        "max_contiguous stop_gradient tile".split(),
        _unchanged,
    ),
}
_MEMORY = frozenset("get swap addupdate masked_load masked_swap".split())
_CALLS = frozenset("jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat2 checkpoint".split())
_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_DIVISIONS = {"floor_divide": "div", "remainder": "rem"}


@lru_cache(maxsize=1)
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


class _Work(_Machine):
    """Count the floating-point operations of a grid step; of loops whose length varies, of the mean length."""

    def __init__(self, call: _Call) -> None:
        super().__init__(call, axis=-1, granule=1)
        self.flops, self.products, self.runs = 0.0, 0.0, 1.0

    def equation(self, eqn: Any, known: Mapping[Any, _Item], jaxpr: Any) -> list[_Item]:
        """Count an equation, and return its results."""
        if not _jax.inner_jaxprs(eqn) and eqn.primitive.name not in _MEMORY:
            work = _rule(eqn)
            self.flops += self.runs * work.flops
            self.products += self.runs * (work.flops if work.work_kind != "elementwise" else 0.0)
        return super().equation(eqn, known, jaxpr)

    def counted(self, runs: float, function: Callable[[], list[_Item]]) -> list[_Item]:
        """Return the results of a function, whose equations run `runs` times."""
        before, self.runs = self.runs, self.runs * runs
        made = function()
        self.runs = before
        return made

    def cond(self, eqn: Any, items: Sequence[_Item]) -> list[_Item]:
        """Count the branches as if all that may be taken were equally likely."""
        index, branches = items[0], eqn.params["branches"]
        alone = isinstance(index, _Number) and index.only is not None
        return self.counted(1 if alone else 1 / len(branches), lambda: super(_Work, self).cond(eqn, items))

    def scan(self, eqn: Any, items: Sequence[_Item]) -> list[_Item]:
        """Count the trips of a loop."""
        return self.counted(_jax.params_of(eqn)["length"], lambda: super(_Work, self).scan(eqn, items))

    def while_loop(self, eqn: Any, items: Sequence[_Item]) -> list[_Item]:
        """Count the mean number of trips of a loop that counts up to a bound, one trip of any other."""
        return self.counted(_mean_trips(eqn, items), lambda: super(_Work, self).while_loop(eqn, items))

    def until_stable(
        self, body: Callable[[Sequence[_Item]], tuple[list[_Item], list[_Item]]], carry: Sequence[_Item]
    ) -> tuple[list[_Item], list[_Item]]:
        """Count the last run of the body alone, which has the bounds of all trips."""
        before = self.flops, self.products

        def again(state: Sequence[_Item]) -> tuple[list[_Item], list[_Item]]:
            self.flops, self.products = before
            return body(state)

        return super().until_stable(again, carry)


def _rule(eqn: Any) -> Rule:
    """Return the rule of an equation on arrays, for its work."""
    values = [
        Value(id=i, shape=tuple(v.aval.shape), dtype=str(v.aval.dtype)) for i, v in enumerate((*eqn.invars, *eqn.outvars))
    ]
    count = len(eqn.invars)
    name, params = eqn.primitive.name, plain_params(eqn.params)
    view = OpView(primitive=name, operands=tuple(values[:count]), results=tuple(values[count:]), params=params)
    return rule_of(view) if has_rule(name) else opaque_rule(view)


def _mean_trips(eqn: Any, items: Sequence[_Item]) -> float:
    condition = _jax.open_jaxpr(eqn.params["cond_jaxpr"])
    num_consts = eqn.params["cond_nconsts"]
    carry = items[num_consts + eqn.params["body_nconsts"] :]
    known: dict[Any, _Item] = dict(zip(condition.invars, [*items[:num_consts], *carry], strict=True))
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return 1.0
    start, stop = (_read(v, known) for v in condition.eqns[0].invars)
    if not isinstance(start, _Number) or not isinstance(stop, _Number):
        return 1.0
    if start.low is None or start.high is None or stop.low is None or stop.high is None:
        return 1.0
    return max(0.0, (stop.low + stop.high - start.low - start.high) / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelWork:
    """The floating-point operations of a whole call, and whether they include products of matrices."""

    flops: float
    has_products: bool


def kernel_work(params: Mapping[str, Any]) -> KernelWork:
    """Return the work of a `pallas_call`: as the kernel estimates it, or counted in its program."""
    call = _Call.of(params)
    counted = products = 0.0
    if call is not None:
        work = _Work(call)
        try:
            work.run(call.kernel, [_Ref(i) for i in range(len(call.kernel.invars))])
            counted, products = work.flops, work.products
        except (Dependent, RuleError):
            pass
        steps = math.prod(n for n in call.grid if isinstance(n, int))
        counted, products = counted * steps, products * steps
    estimate = params.get("cost_estimate")
    told = float(estimate.flops) if estimate is not None and isinstance(estimate.flops, (int, float)) else None
    return KernelWork(flops=(products or counted) if told is None else told, has_products=products > 0)
