"""Prove which axes of the grid of a `pallas_call` can be split over devices.

A kernel runs once per grid step and reads and writes one block of each array; an index map says which. Splitting grid
axis a gives a device the steps [s, s + n) as steps [0, n) of a smaller grid, on its part of the arrays. That computes
the same if nothing that a step does depends on s. The proof follows every integer of the index maps and of the kernel
through the program as a function of the step p along a, relative to the first step s (`Number`):

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
      parallel, or the first step of each granule writes the scratch before it reads it (`ScratchUse`).

The kernel of attention over batches and heads is split by this proof without being known by name, as are blocks of
queries where no mask counts positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from alpa_lite import _jax
from alpa_lite.trace.kernels.kernel_machine import (
    Coarser,
    Dependent,
    KernelAccess,
    KernelCall,
    KernelMachine,
    ScratchUse,
)
from alpa_lite.trace.kernels.step_numbers import ZERO, Item, Number, Ref


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


def grid_axes(params: Mapping[str, Any], unread: frozenset[int]) -> tuple[GridAxis, ...]:
    """Return the axes of a `pallas_call` whose index maps allow a split; `GridAxis.proven` says if the kernel does.

    Nothing reads the results `unread`, which kernels use as scratch memory.
    """
    call = KernelCall.of(params)
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


def _split(call: KernelCall, axis: int, unread: frozenset[int]) -> GridAxis:
    """Return how an axis is split. Raises `Dependent`."""
    granule = 1
    while True:
        try:
            found = _Proof(call, axis, granule, unread).split()
            break
        except Coarser as error:
            granule = error.granule
            if call.grid[axis] % granule:
                raise Dependent("the grid is no multiple of the granule") from error
    return found


class _Proof:
    """The proof for one axis and granule."""

    def __init__(self, call: KernelCall, axis: int, granule: int, unread: frozenset[int]) -> None:
        self.call, self.axis, self.granule, self.unread = call, axis, granule, unread

    def split(self) -> GridAxis:
        """Return how the axis is split; `proven` is False if only the index maps allow it."""
        call = self.call
        machine = KernelMachine(call, self.axis, self.granule)
        prefetched = [Ref(i) for i in range(call.num_index)]
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

    def split_dim(self, block: Any, places: Sequence[Item]) -> int | None:
        """Return the dim of an array that is split, from the numbers of the blocks that the index map returns."""
        found: int | None = None
        columns = zip(block.block_shape, block.array_aval.shape, places, strict=True)
        for dim, (kind, rows, place) in enumerate(columns):
            if not isinstance(place, Number) or place.shift is None:
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

    def kernel(self, machine: KernelMachine, split: GridAxis) -> None:
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
        arguments = [Ref(i) for i in range(len(call.kernel.invars))]
        machine.run(call.kernel, arguments)
        scratch = {first + n for n in shared}
        scratch |= {n for n in range(call.first_scratch, len(arguments)) if not _is_semaphore(call.kernel.invars[n])}
        if scratch and self.axis not in call.parallel | call.vmapped:
            once = KernelMachine(call, self.axis, self.granule, ScratchUse(frozenset(scratch)))
            once.run(call.kernel, arguments)

    def rolled(self, accesses: Iterable[KernelAccess], dims: Sequence[int | None]) -> tuple[Rolled, ...]:
        """Return the operands that the kernel indexes by its steps. Raises `Dependent` if it cannot be rotated."""
        call, found = self.call, dict[tuple[int, int], Fraction]()
        of_dim: dict[tuple[int, int], list[KernelAccess]] = {}
        for access in accesses:
            of_dim.setdefault((access.ref, access.dim), []).append(access)
        for (ref, kernel_dim), made in of_dim.items():
            shifts = {access.place.shift for access in made}
            if shifts == {ZERO}:
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


def _within(place: Number, extent: int, rows: Fraction) -> bool:
    """Return whether all places, each of `extent` rows, lie among the first `rows` rows."""
    if place.low is None or place.high is None or rows.denominator != 1:
        return False
    return place.low >= 0 and place.high + extent <= rows


def _is_semaphore(var: Any) -> bool:
    return "sem" in str(getattr(var.aval, "dtype", ""))
