"""Find out which kernels are one on XLA:GPU, which writes several results (multi-output fusion).

    siblings     go through as many elements as an array has that each of them reads, in the same program, and none
                 depends on another's result; they run when the last can, and what reads a result waits until then
    reductions   of what a kernel writes run in that kernel

All that such a kernel reads and writes is in memory at once: in the backward pass of a GELU, say, the gradient and the
GELU itself, which the gradient of a weight needs. It overwrites none of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import merge
from typing import TYPE_CHECKING

from alpa_lite.program.ir import Op
from alpa_lite.program.phases import Phase
from alpa_lite.rules.awaited import awaited_values
from alpa_lite.rules.fusion import is_fusible, reduces

if TYPE_CHECKING:
    from alpa_lite.intra_op.stored_values import StoredValues

MOST_OPS = 64
"""The most ops that are searched for what a kernel depends on or contains; beyond, two kernels count as dependent."""


class SiblingKernels:
    """The kernels of several results in one graph."""

    def __init__(
        self, stored: StoredValues, sources: Callable[[Op], Sequence[int]], spans: Mapping[int, tuple[int, int]]
    ) -> None:
        """`sources`: the values in memory that the kernel of an op reads; `spans`: when each op begins and ends."""
        self.stored, self.graph, self.spans = stored, stored.graph, spans
        self.awaited: Mapping[int, Sequence[int]] = (
            {} if stored.stage is None else awaited_values(stored.stage.step, stored.ops)
        )
        self.reads = {
            op_id: sources(self.graph.ops[op_id])
            for op_id in stored.ops
            if is_fusible(self.graph, self.graph.ops[op_id]) and stored.is_kernel(op_id)
        }

    def times(self) -> dict[int, int]:
        """Return when the kernels of several results run, by op."""
        found = dict[int, int]()
        for ops in self._kernels():
            if len(ops) > 1:
                time = max(min(self.spans[op_id][0] for op_id in ops), *map(self._ready, ops))
                found.update((op_id, time) for op_id in ops)
        return found

    def reduces(self, op_id: int) -> bool:
        """Return True if the kernel of an op reduces anything, be it what the op reads or what it writes."""
        return self._reduces_results(op_id) or self._reduces_operands(op_id)

    def _reduces_results(self, op_id: int) -> bool:
        """Return True if a kernel that reduces reads the result of an op in the same phase."""
        waiting, seen = [*self.graph.ops[op_id].results], set[int]()
        while waiting:
            for c in self.stored.readers(waiting.pop()):
                op = self.graph.ops[c]
                if c in seen or self.stored.phase(c) is not self.stored.phase(op_id) or not is_fusible(self.graph, op):
                    continue
                if reduces(self.graph, op):
                    return True
                seen.add(c)
                if not self.stored.is_kernel(c):
                    waiting += op.results
        return False

    def _reduces_operands(self, op_id: int) -> bool:
        """Return True if something is reduced inside the kernel of an op."""
        waiting, seen = [op_id], {op_id}
        while waiting and len(seen) <= MOST_OPS:
            for v in self.graph.ops[waiting.pop()].operands:
                producer = self.graph.producer[v]
                if producer is None or producer in seen or producer not in self.stored.here:
                    continue
                if self.stored.is_kernel(producer):
                    continue
                if reduces(self.graph, self.graph.ops[producer]):
                    return True
                seen.add(producer)
                waiting.append(producer)
        return False

    def _kernels(self) -> Sequence[list[int]]:
        """Return the ops of each kernel, in the order of their first ops."""
        kernel_of = dict[int, list[int]]()
        readers = dict[tuple[int, Phase | None], list[int]]()
        for op_id, reads in self.reads.items():
            size, program = self._size(op_id), self.stored.program(op_id)
            shared = [(v, program) for v in reads if self.graph.values[v].num_elements == size]
            latest_first = merge(*(reversed(readers.get(key, ())) for key in shared), reverse=True)
            sibling = next((c for c in latest_first if not self._follows(op_id, c)), None)
            kernel_of[op_id] = [] if sibling is None else kernel_of[sibling]
            kernel_of[op_id].append(op_id)
            for key in shared:
                readers.setdefault(key, []).append(op_id)
        return [ops for op_id, ops in kernel_of.items() if ops[0] == op_id]

    def _size(self, op_id: int) -> int:
        """Return the number of elements that the kernel of an op goes through."""
        op = self.graph.ops[op_id]
        values = op.operands if reduces(self.graph, op) else op.results
        return max(self.graph.values[v].num_elements for v in values)

    def _ready(self, op_id: int) -> int:
        """Return when all that the kernel of an op reads is in memory."""
        makers = (self.graph.producer[v] for v in self.reads[op_id])
        return max((self.spans[maker][1] for maker in makers if maker in self.stored.here), default=0)

    def _follows(self, op_id: int, earlier: int) -> bool:
        """Return True if an op depends on an earlier one, or may do so; recomputations depend on what they wait for."""
        waiting, seen = [op_id], set[int]()
        while waiting:
            reader = waiting.pop()
            for v in (*self.graph.ops[reader].operands, *self.awaited.get(reader, ())):
                producer = self.graph.producer[v]
                if producer == earlier or len(seen) > MOST_OPS:
                    return True
                if producer is None or producer < earlier or producer in seen or producer not in self.stored.here:
                    continue
                seen.add(producer)
                waiting.append(producer)
        return False
