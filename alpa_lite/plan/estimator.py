"""Price a task of a plan by walking it: a machine that appends a stream task for each kernel and collective.

It is driven by the walk that also emits the task (`alpa_lite.plan.walk.Walk`), so that a task is priced exactly as it
will run. The streams are simulated in `cost_models.overlap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

from alpa_lite.plan.plan import CollectiveUse
from alpa_lite.plan.pricing import OpPrice, Pricer, cuts_of
from alpa_lite.plan.walk import Application, Walk, body_walk
from alpa_lite.program.ir import MOVES, TO_DEVICE, TO_HOST, Graph, Op, Value, Wiring
from alpa_lite.sharding.specs import Move, Spec
from cost_models.overlap import Stream, StreamTask, loop_seconds, serial_seconds, simulate
from cost_models.work import Work


class Estimator:
    """A machine whose arrays are the numbers of the stream tasks that make them; it prices a task of a plan.

    Kernels and collectives become `overlap.StreamTask`s, which run concurrently unless one needs the other. Loops are
    priced from their first trips. NOTHING stands for arrays that exist from the start.
    """

    NOTHING = -1

    def __init__(
        self,
        pricer: Pricer,
        *,
        stage: int,
        phase: str,
        runs: int,
        batch_dims: Callable[[Graph], Sequence[int | None]] = lambda graph: (),
    ) -> None:
        """Create an estimator for one task of a stage and phase.

        `runs` is its number of executions per step. `batch_dims` returns the dim of the samples of each value of a
        graph; without it, no product counts as those of several experts.
        """
        self.pricer = pricer
        self.batch_dims = batch_dims
        self.stage = stage
        self.phase = phase
        self.runs = runs
        self.trips: float = 1
        self.compute_seconds = 0.0
        self.flops = 0.0
        self.calls = 0.0
        self.collectives: list[CollectiveUse] = []
        # The bytes of the message that a trip of a loop sends, where the backend makes one of all arrays.
        self.sent: dict[tuple[str, tuple[str, ...]], float] | None = None
        self.tasks: list[StreamTask] = []

    @property
    def seconds(self) -> float:
        """The seconds of one execution of the task."""
        # The host launches kernels while others run: the slower of the two counts.
        return max(self.simulated(self.tasks), self.host_seconds)

    @property
    def host_seconds(self) -> float:
        """The seconds that the host needs to launch one execution of the task, if it launches kernels one by one."""
        return self.calls * self.pricer.cost_model.backend.call_seconds

    def literal(self, value: Value) -> int:
        """Return NOTHING, since scalars are free."""
        return self.NOTHING

    def reshard(self, array: int, value: Value, steps: tuple[Move, ...], op: Op | None) -> int:
        """Price the moves and return the last one."""
        for step in steps:
            # A local move takes a part of what each device holds already.
            if not step.is_local:
                array = self._use(step.kind, step.bytes_factor * value.bytes, step.axes, op, (array,))
        return array

    def _use(self, kind: str, buffer: float, axes: tuple[str, ...], op: Op | None, needs: Sequence[int]) -> int:
        """Append a collective that waits for the tasks `needs` and return its number."""
        # Listed once per place in the code, and counted with the trips of all loops around it.
        seconds = self.pricer.collective_seconds(kind, buffer, axes)
        if self.sent is not None:
            # What one message carries makes it longer; the first part pays for its start.
            before = self.sent.get((kind, axes), 0.0)
            longer = self.pricer.collective_seconds(kind, before + buffer, axes)
            seconds = longer - self.pricer.collective_seconds(kind, before, axes) if before else seconds
            self.sent[kind, axes] = before + buffer
        self.collectives.append(
            CollectiveUse(
                kind=kind,
                bytes=buffer,
                axis="·".join(axes),
                num_devices=prod(self.pricer.sizes[a] for a in axes),
                count=self.runs * self.trips,
                seconds=seconds,
                stage=self.stage,
                phase=self.phase,
                source=op.source if op else "",
            )
        )
        # The host launches a collective as it launches a kernel.
        self.calls += self.trips
        # A product makes the parts of its sum one after the other.
        streams = kind == "reduce_scatter" and self.pricer.cost_model.backend.overlap_products
        return self._add(seconds, "communication", needs, streams=streams)

    def _add(self, seconds: float, stream: Stream, needs: Sequence[int], *, streams: bool = False) -> int:
        """Append a stream task that waits for the tasks `needs` and return its number."""
        # An op may read the same result twice.
        needed = tuple(dict.fromkeys(n for n in needs if n != self.NOTHING))
        self.tasks.append(StreamTask(seconds=seconds, stream=stream, needs=needed, streams=streams))
        return len(self.tasks) - 1

    def apply(self, application: Application, operands: list[int]) -> list[int]:
        """Price one op with its own collectives, which follow its kernel."""
        op, graph = application.op, application.graph
        price = self.pricer.price(graph, op, application.placement)
        self.compute_seconds += price.seconds * self.trips
        self.flops += price.flops * self.trips
        # Backends that launch kernels one by one need host time for each, whatever runs on the device.
        self.calls += price.num_kernels * self._num_weights(application) * self.trips
        streams = self.pricer.cost_model.backend.overlap_products and application.rule.work_kind == "matmul"
        if op.primitive in MOVES:
            return [self._moved(op, price, operands)]
        made = self._add(price.seconds, "compute", operands, streams=streams)
        for kind, axes, buffer in price.collectives:
            made = self._use(kind, buffer, axes, op, (made,))
        return [made] * len(op.results)

    def add_to_sum(self, graph: Graph, value: int, stored: Spec, made: int) -> Work:
        """Price the addition of a micro-batch's part of a value, the result of task `made`, to its sum."""
        part, fused = graph.values[value], self.pricer.fuses_additions(graph, value)
        work = self.pricer.addition_work(part, stored, fused=fused)
        if work.bytes:
            seconds = self.pricer.addition_seconds(part, stored, fused=fused)
            self.compute_seconds += seconds
            self.flops += work.flops
            self.calls += work.num_kernels
            # No kernel waits for the sum: a collective that brings the part may go on beside the next task.
            while made != self.NOTHING and self.tasks[made].stream == "communication":
                made = max(self.tasks[made].needs, default=self.NOTHING)
            self._add(seconds, "compute", (made,))
        return work

    def _num_weights(self, application: Application) -> int:
        """Return the kernels as which the host issues a product: libraries have one for each weight, as of experts.

        1 where nothing is issued by itself. Weights, and their gradients, are the arrays of a product without samples.
        """
        rule, op = application.rule, application.op
        if not self.pricer.cost_model.backend.call_seconds or rule.work_kind != "matmul" or len(op.operands) != 2:
            return 1
        batch, dims = self.batch_dims(application.graph), (*rule.operands, *rule.results)
        if not batch or sum(batch[v] is None for v in (*op.operands, *op.results)) != 1:
            return 1
        shared = set[int].intersection(*({f for factors in each for f in factors} for each in dims))
        cuts = cuts_of(application.placement, self.pricer.sizes)
        return prod(rule.sizes[f] // cuts[f] for f in shared)

    def _moved(self, op: Op, price: OpPrice, operands: Sequence[int]) -> int:
        """Append a copy to the host or from there. What comes back starts where it stands in the program."""
        # Memory is counted from there on, and the link has no reason to wait longer.
        before = [len(self.tasks) - 1] if op.primitive == TO_DEVICE and self.tasks else []
        stream = "to_host" if op.primitive == TO_HOST else "to_device"
        return self._add(price.host_seconds, stream, [*operands, *before])

    def control_flow(self, application: Application, operands: list[int], wiring: Wiring, walk: Walk[int]) -> list[int]:
        """Price each body from its first trips."""
        op, trips, tasks, sent, seconds = application.op, self.trips, self.tasks, self.sent, 0.0
        self.trips *= wiring.trips
        for number in range(len(op.bodies)):
            self.sent = {} if self.pricer.cost_model.backend.flat_parameters else None
            # Operands stand at the beginning as tasks without duration, so that body tasks can wait for carried values.
            self.tasks = [StreamTask(seconds=0.0) for _ in operands]
            outputs = body_walk(application, wiring, number, walk, list(range(len(operands))))
            pairs = zip(outputs, wiring.outputs[number], strict=True)
            handed_on = [(task, r) for task, r in pairs if r is not None and task != self.NOTHING]
            # The next trip waits for these tasks at the operands that they replace.
            carried = [(task, wiring.carried[r]) for task, r in handed_on if r in wiring.carried]
            seconds += self._looped(self.tasks, carried, wiring.trips)
        self.trips, self.tasks, self.sent = trips, tasks, sent
        # Work and collectives overlap inside the loop, but not with what is outside: it occupies both streams.
        return [self._add(seconds, "both", operands)] * len(op.results)

    def simulated(self, tasks: Sequence[StreamTask]) -> float:
        """Return the seconds of some stream tasks that run concurrently where they can."""
        return self._looped(tasks, (), 1.0)

    def laid_out(self, tasks: Sequence[StreamTask]) -> list[tuple[float, float]]:
        """Return start and end in seconds of each of some stream tasks, as `simulated` runs them."""
        if self.pricer.runs_in_turn:
            ends = list(accumulate(task.seconds for task in tasks))
            return [(end - task.seconds, end) for task, end in zip(tasks, ends, strict=True)]
        run = simulate(tasks, contention=self.pricer.cost_model.cluster.device.contention)
        return list(zip(run.starts, run.ends, strict=True))

    def _looped(self, tasks: Sequence[StreamTask], carried: Sequence[tuple[int, int]], trips: float) -> float:
        if self.pricer.runs_in_turn:
            return trips * serial_seconds(tasks)
        return loop_seconds(tasks, carried, trips, contention=self.pricer.cost_model.cluster.device.contention)
