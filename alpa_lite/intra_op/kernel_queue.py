"""Run the kernels of a program in the order of XLA's CPU backend: first come, first served.

ready       a kernel joins the queue when its last operand is there; what runs inside of kernels runs with them
gathers     a parameter that lies in parts is held back until an earlier op has read its own, then gathered, then laid
            out anew, by a kernel each that waits for its turn; the op that reads the parameter waits for the last one
delayed     what is recomputed waits for an op of the backward pass
completed   a collective that completes partial sums joins the queue when these are there. Gradients in a program that
            runs both passes wait for one turn more: they get a leading dim of size 1 first (`LocalMachine.reshard`),
            so that XLA does not merge the collective with one of the forward pass
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from enum import IntEnum
from typing import NamedTuple

from alpa_lite.program.ir import Graph


class KernelTask(IntEnum):
    """What a kernel does for an op: bring the parameters that it reads into place, run it, complete its results."""

    HOLD = 0
    GATHER = 1
    MOVE = 2
    RUN = 3
    NAME = 4
    COMPLETE = 5


class Kernel(NamedTuple):
    """A kernel that runs for an op."""

    op_id: int
    task: KernelTask


class _Waiting(NamedTuple):
    """What waits for its turn: a kernel, or None for values that the program is given; and the values that it makes."""

    kernel: Kernel | None
    made: Sequence[int]


class KernelQueue:
    """The kernels of one program.

    behind    by op, the kernel behind which a collective runs that completes its results
    """

    def __init__(
        self,
        graph: Graph,
        ops: Sequence[int],
        is_kernel: Callable[[int], bool],
        *,
        waits: Mapping[int, int | None],
        named: Set[int],
        delayed: Mapping[int, int],
    ) -> None:
        """Find out what is there from the start.

        `waits`: see `StoredValues.waits_for`; `named`: the ops whose results are named anew before a collective;
        `delayed`: see `StoredValues.delayed`.
        """
        self.graph, self.inside, self.is_kernel, self.named = graph, frozenset(ops), is_kernel, named
        operands = {o: set(graph.ops[o].operands) for o in ops}
        self.missing = {o: len(read) + (o in waits) + (o in delayed) for o, read in operands.items()}
        self.delayed: dict[int, list[int]] = {}
        for op_id, before in delayed.items():
            self.delayed.setdefault(before, []).append(op_id)
        self.held: dict[int, list[int]] = {}
        for op_id, before in waits.items():
            if before is not None:
                self.held.setdefault(before, []).append(op_id)
        given = sorted({v for read in operands.values() for v in read if graph.producer[v] not in self.inside})
        self.queue = deque(self._run(o) for o in ops if not self.missing[o])
        self.queue.extend(_Waiting(None, (v,)) for v in given)
        self.queue.extend(_Waiting(Kernel(o, KernelTask.GATHER), ()) for o, before in waits.items() if before is None)
        self.behind: dict[int, Kernel] = {}

    def kernels(self) -> Iterator[Kernel]:
        """Yield the kernels in the order in which they run; ops that run inside of one come before it."""
        latest: Kernel | None = None
        while self.queue:
            kernel, made = self.queue.popleft()
            if kernel is None:
                yield from self._made(made)
            elif kernel.task is KernelTask.COMPLETE:
                # Whether there is one depends on the strategy: it takes no time here.
                assert latest is not None
                self.behind[kernel.op_id] = latest
            elif kernel.task is KernelTask.NAME:
                self._queue(kernel.op_id, KernelTask.COMPLETE)
            elif kernel.task is KernelTask.RUN:
                yield (latest := kernel)
                self._queue(kernel.op_id, KernelTask.NAME if kernel.op_id in self.named else KernelTask.COMPLETE)
                yield from self._done(kernel.op_id)
            else:
                yield (latest := kernel)
                yield from self._placed(kernel)

    def _queue(self, op_id: int, task: KernelTask) -> None:
        self.queue.append(_Waiting(Kernel(op_id, task), ()))

    def _run(self, op_id: int) -> _Waiting:
        return _Waiting(Kernel(op_id, KernelTask.RUN), self.graph.ops[op_id].results)

    def _read(self, op_id: int) -> None:
        """Let parameters be gathered that wait for an op to have read its own."""
        for reader in self.held.get(op_id, ()):
            self._queue(reader, KernelTask.HOLD)

    def _placed(self, kernel: Kernel) -> Iterator[Kernel]:
        """Go on with the parameters of an op."""
        op_id, task = kernel
        if task is not KernelTask.MOVE:
            self._queue(op_id, KernelTask(task + 1))
        elif self._runs_now(op_id):
            yield Kernel(op_id, KernelTask.RUN)
            yield from self._done(op_id)

    def _done(self, op_id: int) -> Iterator[Kernel]:
        """Let what waits for an op that has run join the queue, and yield what runs inside of kernels."""
        yield from self._made(self.graph.ops[op_id].results, [op_id])

    def _made(self, values: Sequence[int], ops: Sequence[int] = ()) -> Iterator[Kernel]:
        """Let the readers of values join the queue, and yield those that run inside of kernels. `ops`: their makers."""
        waiting, ran = deque(values), deque(ops)
        while waiting or ran:
            if waiting:
                ready = [c for c in dict.fromkeys(self.graph.consumers[waiting.popleft()]) if c in self.inside]
            else:
                self._read(op_id := ran.popleft())
                ready = self.delayed.get(op_id, [])
            for c in ready:
                if self._runs_now(c):
                    yield Kernel(c, KernelTask.RUN)
                    ran.append(c)
                    waiting.extend(self.graph.ops[c].results)

    def _runs_now(self, op_id: int) -> bool:
        """Count one more of what an op waits for as there; return True if all is, and no kernel writes its results."""
        self.missing[op_id] -= 1
        if self.missing[op_id]:
            return False
        if not self.is_kernel(op_id):
            return True
        self.queue.append(self._run(op_id))
        return False
