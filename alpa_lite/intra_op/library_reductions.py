"""Find out which arrays XLA's CPU backend writes for the library that runs its reductions.

    kernel       a reduction with the ops before it of which nothing else reads the results
    goes on      a kernel whose reduction leaves `LIBRARY_ELEMENTS` or more goes on until the next array that is
                 written, with all ops that this one alone needs
    operands     lie in memory as they are read: elements of stacked arrays are copied out, what is spread over more
                 dims for others too is spread once for all, and what others compute for themselves is written

Arrays of fewer elements than that are left to the backend's own kernels, which compute what they read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING, NamedTuple

from alpa_lite.rules.fusion import is_fusible, reduces
from alpa_lite.rules.op_info import free_values

if TYPE_CHECKING:
    from alpa_lite.intra_op.stored_values import StoredValues

LIBRARY_ELEMENTS = 4096
"""The elements of an array on a device from which on the library computes with it."""


class LibraryArray(NamedTuple):
    """An array as large as the result of an op, which is written for a kernel of the library.

    Attributes:
        op: the op.
        source: the value that it is a copy of; None for the result of the op.
        readers: the kernels that read it.
        kept: the part of the array's elements that the reduction leaves.
        goes_on: True if it is written only where the kernel goes on after the reduction, False if only where it does
            not; None: in any case.
    """

    op: int
    source: int | None
    readers: Sequence[int]
    kept: float
    goes_on: bool | None


class LibraryReductions:
    """The kernels of the library in one graph. `elements`: its inputs that are elements of stacked arrays."""

    def __init__(self, stored: StoredValues, elements: Set[int]) -> None:
        """Find the kernels."""
        self.stored, self.elements = stored, elements
        self.graph = stored.graph
        self.fusible = [op_id for op_id in stored.ops if self._computes(op_id)]
        self.kernel_of: dict[int, int] = {}  # by op: the one kernel that runs it, named by its last op
        self.goes_on: dict[int, int] = {}  # by reduction: the kernel that is the same if it goes on
        self.reduction_of: dict[int, int] = {}  # by such a kernel: its reduction
        for op_id in reversed(self.fusible):
            kernels = self._readers(op_id)
            only = kernels.pop() if len(kernels) == 1 else None
            if stored.is_kernel(op_id):
                self.kernel_of[op_id] = op_id
                if self._reduces(op_id) and only is not None and not self._reduces(only):
                    self.goes_on[op_id] = only
                    self.reduction_of[only] = op_id
            elif only is not None:
                self.kernel_of[op_id] = only

    def arrays(self) -> Iterator[LibraryArray]:
        """Yield the arrays that are written for the library, in the order of the ops."""
        spread = {op_id: self._spread(op_id) for op_id in self.fusible}
        readers = Counter(self.form(v, op_id) for op_id, values in spread.items() for v in values)
        for op_id in self.fusible:
            kernel = self.kernel_of.get(op_id)
            if kernel is None:
                yield from self._shared(op_id)
            elif (self._reduces(kernel) and op_id != kernel) or kernel in self.reduction_of:
                copied = [v for v in spread[op_id] if readers[self.form(v, op_id)] > 1]
                goes_on = None if self._reduces(kernel) else True
                for v in dict.fromkeys((*copied, *self._elements(op_id))):
                    yield LibraryArray(op_id, v, (kernel,), self._kept(kernel), goes_on)

    def form(self, value: int, op_id: int) -> tuple[int, tuple[int, ...]]:
        """Return what an operand is copied from, and its shape: of equal form, it is one array."""
        return self.stored.origin(value), self.graph.values[self.graph.ops[op_id].results[0]].shape

    def _readers(self, op_id: int) -> set[int | None]:
        """Return the kernels that read the results of an op; None for products, loops and ops that several run."""
        results = self.graph.ops[op_id].results
        return {self.kernel_of.get(c) for r in results for c in self.stored.readers(r)}

    def _shared(self, op_id: int) -> Iterator[LibraryArray]:
        """Yield the result of an op that several kernels run, if one of them is of the library."""
        kernels = self._readers(op_id)
        of_library = [k for k in kernels if k is not None and (self._reduces(k) or k in self.reduction_of)]
        reductions = [k for k in of_library if self._reduces(k)]
        if not of_library or self._is_reduced_at_once(op_id):
            return
        goes_on = None if reductions else True
        # Where kernels go on they may all be one, which needs nothing written.
        if reductions and len({self.goes_on.get(k, k) if k is not None else None for k in kernels}) == 1:
            goes_on = False
        # Kernels that do not go on after a reduction compute it again for themselves.
        readers = reductions or of_library
        yield LibraryArray(op_id, None, readers, self._kept(readers[0]), goes_on)

    def _is_reduced_at_once(self, op_id: int) -> bool:
        """Return True for an op that alone needs an operand, but for reductions of this: one kernel makes both."""
        op, values = self.graph.ops[op_id], self.graph.values
        size = values[op.results[0]].num_elements
        readers = [
            set(self.stored.readers(self.stored.origin(v))) - {op_id}
            for v in op.operands
            if values[v].num_elements == size
        ]
        return any(others and all(map(self._reduces, others)) for others in readers)

    def _kept(self, kernel: int) -> float:
        """Return the part of the elements that a reduction leaves; 1 if they are only read spread again."""
        number = self.reduction_of.get(kernel, kernel)
        reduction, values = self.graph.ops[number], self.graph.values
        (left, *_), (reduced, *_) = reduction.results, reduction.operands
        sizes = [values[r].num_elements for c in self.stored.readers(left) for r in self.graph.ops[c].results]
        if min(sizes, default=0) > values[left].num_elements:
            return 1.0
        return values[left].num_elements / max(1, values[reduced].num_elements)

    def _computes(self, op_id: int) -> bool:
        """Return True for an op that kernels can take in, and that does more than to rename an operand."""
        op = self.graph.ops[op_id]
        return is_fusible(self.graph, op) and not any(self.stored.renamed(op_id, v) for v in op.operands)

    def _reduces(self, op_id: int) -> bool:
        return reduces(self.graph, self.graph.ops[op_id])

    def _elements(self, op_id: int) -> list[int]:
        """Return the operands that are elements of stacked arrays, as large as the result."""
        op, values = self.graph.ops[op_id], self.graph.values
        size = values[op.results[0]].num_elements
        return [v for v in op.operands if values[v].num_elements == size and self.stored.origin(v) in self.elements]

    def _spread(self, op_id: int) -> list[int]:
        """Return the operands that an op spreads over more dims."""
        op, values = self.graph.ops[op_id], self.graph.values
        free, size = free_values(self.graph), values[op.results[0]].num_elements
        return [v for v in dict.fromkeys(op.operands) if 1 < values[v].num_elements < size and v not in free]
