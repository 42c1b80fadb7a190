"""Build the program of a plan: its list of instructions, in an order that respects every dependency.

The order of the list is the dispatch order; it comes from the linearised schedule.

In an asynchronous pipeline (`schedule.asynchronous`) the update of a stage runs once for each group of micro-batches,
in the loop. Its results are then named by the number of the update: version v of a state that `out` replaces is the
buffer of the argument for v = 0, and else that of `out` by update v - 1. A version lives until its last reader has run.

Equal stages that take micro-batches in turn (replicas) each have a copy of the tasks and of the state, which the first
of them sends to the others when they first read it. After each round they send each other the gradients of their
micro-batches, and each of them averages all (MEAN) and updates its copy. Update u of the r-th of n replicas has the
number u n + r, as the micro-batch whose gradient it contributes.

A message-driven pipeline (`schedule.messages`) has no fixed order: the instructions of each task are a `Segment`.

The workers of a parameter server (`schedule.servers`) are equal stages, which run the tasks of the first of them on
their micro-batches. What each sums is sent to where it is read, and added there in the order of the workers (ADD). If
there are several updates, the buffer of an argument holds its newest version, which each update replaces (RENEW), and
the instructions of each micro-batch and of each update are a `Segment`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import prod

from alpa_lite.errors import MismatchError, PlanError, VerificationError
from alpa_lite.plan.instructions import SUM, Buffer, Instruction, InstructionKind, Program, Segment
from alpa_lite.plan.own_updates import check_own_updates
from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.slices import SlicedStages
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.program.ir import Value, item_bytes
from alpa_lite.program.phases import StepGraph
from alpa_lite.schedule import AsynchronousSchedule, MessageDriven, ServerSchedule, validate
from alpa_lite.sharding.specs import Spec
from alpa_lite.sharding.transfer import ArrayForm, Placement, PlannedTransfer, plan_transfer


def build_program(plan: Plan, step: StepGraph) -> Program:
    """Return the program of a plan. Raises `MismatchError` if the plan contradicts the order of the step."""
    return _ProgramBuilder(plan, SlicedStages.of_plan(plan, step)).build()


def tasks_of(plan: Plan, step: StepGraph) -> tuple[TaskSpec, ...]:
    """Return the tasks of a plan's program without its instructions, of which a long schedule has very many."""
    return _tasks(plan, SlicedStages.of_plan(plan, step))


def _tasks(plan: Plan, sliced: SlicedStages) -> tuple[TaskSpec, ...]:
    tasks = (sliced.task(outline, plan.buckets) for outline in sliced.slicer.outlines())
    # A copy of each task of the first of equal stages for each other one; the updates of all workers come before those
    # of the servers.
    return tuple(
        replace(task, stage=stage)
        for task in tasks
        for stage in plan.schedule.replicas_of(task.stage, len(plan.stages))
    )


def planned_transfer(plan: Plan, value: Value, source: tuple[int, Spec], target: tuple[int, Spec]) -> PlannedTransfer:
    """Return the transfer of a value from one (stage, spec) to another.

    Typed PRNG keys are transferred as the four-byte words that store them, along one more dim. A partial sum that is
    wanted as it is, by an equal stage, is transferred as its terms, along one more dim in front.
    """

    def layout(number: int, spec: Spec) -> Placement:
        stage = plan.stages[number]
        # The dim of words is whole: a key is one element.
        dims = (*spec.dims, ()) if is_key else spec.dims
        spec = Spec((spec.partial, *dims)) if terms else Spec(dims, spec.partial)
        return Placement(submesh=stage.submesh, mesh=stage.mesh_shape, spec=spec)

    sizes = [plan.stages[number].mesh_shape.axis_sizes for number, _ in (source, target)]
    as_terms = source[1].partial and source[1] == target[1] and sizes[0] == sizes[1] and source[0] != target[0]
    terms = (prod(sizes[0][axis] for axis in source[1].partial),) if as_terms else ()
    is_key, size = value.dtype.startswith("key<"), item_bytes(value.dtype)
    shape = (*terms, *value.shape)
    return plan_transfer(
        ArrayForm((*shape, size // 4), 4) if is_key else ArrayForm(shape, size),
        layout(*source),
        layout(*target),
        devices_per_host=plan.cluster.devices_per_host,
    )


class _ProgramBuilder:
    """Builder that appends instructions in dispatch order and checks that every buffer is written before it is read."""

    def __init__(self, plan: Plan, sliced: SlicedStages) -> None:
        self.plan, self.sliced, self.slicer = plan, sliced, sliced.slicer
        self.step, self.graph = sliced.slicer.step, sliced.slicer.graph
        self.tasks = _tasks(plan, sliced)
        self.instructions: list[Instruction] = []
        self.written: dict[Buffer, Spec] = {}
        self.batched = self.step.num_microbatches > 1
        self.often = self.step.num_updates > 1
        self.next_of = {old: new for new, old in self.step.aliases.items()}
        count = len(plan.stages)
        self.replicas = [plan.schedule.replicas_of(stage, count) for stage in range(count)]
        self.workers = self.replicas[-1] if isinstance(plan.schedule, ServerSchedule) else range(0)
        # By the first of several replicas and the update: how many of them have run all tasks of its round.
        self.rounds = Counter[tuple[int, int]]()
        # By value, sender and receiver with their specs.
        self.transfers: dict[tuple[int, tuple[tuple[int, Spec], tuple[int, Spec]]], PlannedTransfer] = {}
        # Of what has no fixed order, where its instructions begin and end.
        self.events: list[Segment] = []

    def build(self) -> Program:
        loop = [t for t in self.tasks if t.kind.in_loop]
        if self.often:
            check_own_updates(self.slicer, self.plan)
        # With one micro-batch there is nothing to add up: tasks return their sums as outputs.
        elif self.step.accumulates:
            for number, task in enumerate(self.tasks):
                self._zeros(number, task, 0)
        if isinstance(self.plan.schedule, ServerSchedule):
            self._serve(self.plan.schedule)
        elif loop:
            self._loop()
        if not self.often and not self.workers:
            for number, task in enumerate(self.tasks):
                if not task.kind.in_loop:
                    self._run(number, task, None)
        outputs = tuple(self._output(v) for v in self.graph.outputs)
        specs = tuple(self._output_spec(v) for v in self.graph.outputs)
        segments = self._free(outputs)
        return Program(
            tasks=self.tasks,
            instructions=tuple(self.instructions),
            outputs=outputs,
            output_specs=specs,
            homes={v: (self.slicer.homes[v], self._home_input_spec(v)) for v in self.graph.inputs},
            num_microbatches=self.step.num_microbatches,
            segments=segments,
        )

    def _serve(self, schedule: ServerSchedule) -> None:
        """Run the events of a parameter server, each as a segment if there are several updates."""
        if self.often:
            for v in (v for v in self.graph.inputs if self.step.batch_dims[v] is None):
                # Any segment may be the first to read it.
                self._fetch_input(v, self._home_input_spec(v), self.slicer.homes[v], None)
        for event in schedule.events(self.step.num_microbatches):
            first = len(self.instructions)
            if event.is_update:
                update = event.number if self.often else None
                self._run_where(update, lambda task: task.stage not in self.workers and not task.kind.in_loop)
                for v in filter(self._is_pushed, self.graph.outputs):
                    self._total(v, self._output_spec(v), self._output_stage(v), update)
                self._renew(event.number)
            else:
                self._serve_microbatch(schedule, event.number)
            if self.often:
                self.events.append(Segment(event, first, len(self.instructions)))

    def _serve_microbatch(self, schedule: ServerSchedule, microbatch: int) -> None:
        stage, update = self._runs_on(1, microbatch), microbatch // self.step.microbatches_per_update
        mine = [b for b in schedule.contributions(update, self.step.num_microbatches) if self._runs_on(1, b) == stage]
        if self.often and self.step.accumulates and microbatch == mine[0]:
            for number, task in enumerate(self.tasks):
                if task.stage == stage:
                    self._zeros(number, task, update)
        self._run_where(microbatch, lambda task: task.stage == stage and task.kind.in_loop)
        if microbatch == mine[-1]:
            self._run_where(update if self.often else None, lambda t: t.stage == stage and not t.kind.in_loop)

    def _run_where(self, number: int | None, is_chosen: Callable[[TaskSpec], bool]) -> None:
        for i, task in enumerate(self.tasks):
            if is_chosen(task):
                self._run(i, task, number)

    def _runs_on(self, stage: int, microbatch: int | None) -> int:
        """Return the stage that runs a micro-batch: of equal stages the one whose turn it is, else the one given."""
        replicas = self.replicas[stage]
        return replicas[(microbatch or 0) % len(replicas)]

    def _renew(self, update: int) -> None:
        """Let the buffers of state on the servers hold what an update has made, if there are several."""
        if not self.often:
            return
        olds = [Buffer(old, self.slicer.homes[old]) for old in self.next_of]
        made = [(self._made_of(old, update), old) for old in olds]
        for new, old in made:
            self._check_stays(old.value, old.stage, self.written[new], self.written[old])
        # What the step returns as the last update found it is set aside first.
        returned = {*self.graph.outputs}.difference(self.step.aliases)
        kept = [(old, self._as_found(old.value)) for old in olds if old.value in returned]
        sources, targets = zip(*kept, *made, strict=True)
        self._emit(Instruction(kind=InstructionKind.RENEW, stage=made[0][1].stage, reads=sources, writes=targets))

    def _made_of(self, old: Buffer, update: int) -> Buffer:
        """Return the buffer of what an update on the servers has made of an argument."""
        new, stage = self.next_of[old.value], old.stage
        place = self.slicer.place_of_value(new)
        if place is not None and place.stage in self.workers:
            # The loop makes it, as averages of a batch norm.
            return self._total(new, self.written[old], stage, update)
        return Buffer(new, stage, update)

    def _as_found(self, value: int) -> Buffer:
        """Return the buffer of an argument as the last update on the servers found it."""
        return Buffer(value, self.slicer.homes[value], SUM)

    def _loop(self) -> None:
        # A stage has at most one task of each kind in the loop.
        numbers = {(t.stage, t.kind): i for i, t in enumerate(self.tasks)}
        schedule, count, m = self.plan.schedule, len(self.plan.stages), self.step.num_microbatches
        lists = schedule.tasks(count, m)
        # The schedule may be the user's own.
        order = validate(
            lists,
            count,
            m,
            processors=[schedule.processor_of(stage, count) for stage in range(count)],
            in_flight=[schedule.in_flight(stage, count, m) for stage in range(count)],
            replicas=schedule.replicas(count),
        )
        for slot in order:
            first = len(self.instructions)
            number = numbers.get((slot.stage, TaskRole(slot.kind.value)))
            # Where the two passes are one task, it runs at the place of the backward pass, and the forward place stays
            # empty.
            if number is None and slot.kind.sends_back:
                number = numbers.get((slot.stage, TaskRole.FORWARD_BACKWARD))
            update, left = divmod(slot.microbatch, self.step.microbatches_per_update)
            if number is not None:
                if self.often and self.step.accumulates and left == 0:
                    self._zeros(number, self.tasks[number], update)
                self._run(number, self.tasks[number], slot.microbatch)
            if self.often and slot.kind.is_last and left == self.step.microbatches_per_update - 1:
                self._update(slot.stage, update)
            if isinstance(schedule, MessageDriven):
                self.events.append(Segment(slot, first, len(self.instructions)))

    def _update(self, stage: int, number: int) -> None:
        """Run an update of a stage, and of its replicas, once all of them have run the micro-batches of its round."""
        replicas = self.replicas[stage]
        start = number - number % len(replicas)
        self.rounds[replicas.start, start] += 1
        if self.rounds[replicas.start, start] < len(replicas):
            return
        updates = [
            (i, task, start + task.stage - replicas.start)
            for i, task in enumerate(self.tasks)
            if task.stage in replicas and not task.kind.in_loop
        ]
        # All replicas first get what the update reads: it may pass on the mean under the name of what the loop made.
        for _, task, update in updates if len(replicas) > 1 else ():
            for port in task.inputs:
                self._fetch(port.value, port.spec, task, update)
        for i, task, update in updates:
            self._run(i, task, update)

    def _zeros(self, number: int, task: TaskSpec, update: int) -> None:
        """Make the accumulators of a task for an update."""
        if task.sums:
            sums = tuple(Buffer(p.value, task.stage, SUM - update) for p in task.sums)
            self._emit(Instruction(kind=InstructionKind.ZEROS, stage=task.stage, task=number, writes=sums))

    def _emit(self, instruction: Instruction) -> None:
        for buffer in instruction.reads:
            if buffer not in self.written:
                raise VerificationError(f"{instruction} reads {buffer}, which nothing has written.")
        # Checked while the list is built: a read before the write would be an undefined buffer on devices.
        self.instructions.append(instruction)
        self.written.update(zip(instruction.writes, self._specs_written(instruction), strict=True))

    def _specs_written(self, instruction: Instruction) -> list[Spec]:
        if instruction.kind is InstructionKind.RENEW:
            return [self.written[buffer] for buffer in instruction.reads]
        if instruction.spec is not None:
            return [instruction.spec]
        task = self.tasks[instruction.task]
        outputs = task.outputs if instruction.kind is InstructionKind.RUN else ()
        return [port.spec for port in (*outputs, *task.sums)]

    def _run(self, number: int, task: TaskSpec, microbatch: int | None) -> None:
        """Run a task, of the loop on a micro-batch, or the update of this number if there are several."""
        reads = tuple(self._fetch(p.value, p.spec, task, microbatch) for p in task.inputs)
        # Accumulators are updated in place: the task reads and writes them under one name.
        sums = tuple(self._sum(p.value, task, microbatch) for p in task.sums)
        outputs = tuple(Buffer(p.value, task.stage, self._index(p.value, microbatch)) for p in task.outputs)
        self._emit(
            Instruction(
                kind=InstructionKind.RUN,
                stage=task.stage,
                task=number,
                microbatch=microbatch,
                reads=reads + (sums if self.step.accumulates else ()),
                writes=outputs + sums,
            )
        )

    def _index(self, value: int, microbatch: int | None) -> int | None:
        """Return the micro-batch in a buffer's name: only values that differ between micro-batches have one."""
        return microbatch if self._varies(value) or (self.often and self._is_updated(value)) else None

    def _is_updated(self, value: int) -> bool:
        """Return True for what an update computes."""
        producer = self.graph.producer[value]
        return producer is not None and not self.step.phases[producer].in_loop

    def _sum(self, value: int, task: TaskSpec, number: int | None) -> Buffer:
        """Return the buffer of a sum, for a task of the loop on a micro-batch or for an update."""
        if not self.step.accumulates:
            return Buffer(value, task.stage, number if self.batched else None)
        update = (number or 0) // (self.step.microbatches_per_update if task.kind.in_loop else 1)
        return Buffer(value, task.stage, SUM - update)

    def _varies(self, value: int) -> bool:
        """Return True for values that differ between micro-batches."""
        if not self.batched:
            return False
        producer = self.graph.producer[value]
        if producer is None:
            return self.step.batch_dims[value] is not None
        return self.step.phases[producer].in_loop

    def _fetch(self, value: int, spec: Spec, task: TaskSpec, microbatch: int | None) -> Buffer:
        """Return the buffer from which a task reads a value, sent or placed on the task's stage first if needed."""
        graph, stage = self.graph, task.stage
        producer = graph.producer[value]
        if producer is None:
            return self._fetch_argument(value, spec, task, microbatch)
        is_update = task.kind is TaskRole.UPDATE
        place = self.slicer.place_of_value(value)
        origin = place.stage if place else stage
        if origin in self.workers:
            if stage not in self.workers:
                return self._total(value, spec, stage, microbatch)
            # Each worker has made its own.
            origin = stage
        else:
            origin = self._runs_on(origin, microbatch)
        # The update reads a value of the loop as its sum: resolved by an earlier update (None), or still an accumulator
        # (SUM).
        if is_update and self.often and self._varies(value):
            return self._mean(value, spec, task, microbatch)
        if is_update and self.batched and self._varies(value):
            local = Buffer(value, stage, None)
            if local in self.written:
                return local
            if origin == stage:
                return Buffer(value, stage, SUM)
            return self._send(Buffer(value, origin, None), local, spec)
        target = Buffer(value, stage, self._index(value, microbatch))
        if target in self.written:
            return target
        # One copy per stage serves all of its tasks: the plan gives one spec for each value that comes in.
        return self._send(Buffer(value, origin, target.microbatch), target, spec)

    def _fetch_argument(self, value: int, spec: Spec, task: TaskSpec, microbatch: int | None) -> Buffer:
        """Return the buffer of an argument, in the version that a task reads if there are several."""
        stage = task.stage
        if stage in self.workers and self.often and value in self.next_of:
            # A worker pulls the newest version for each of its micro-batches.
            source, target = Buffer(value, self.slicer.homes[value]), Buffer(value, stage, microbatch)
            return target if target in self.written else self._send(source, target, spec)
        made_by = self._last_update(task, microbatch) if value in self.next_of else None
        if made_by is not None:
            return self._state(value, spec, stage, made_by)
        return self._fetch_input(value, spec, stage, microbatch)

    def _mean(self, value: int, spec: Spec, task: TaskSpec, number: int | None) -> Buffer:
        """Return the buffer from which an update reads a sum: the mean over a round of several micro-batches."""
        stage, replicas = task.stage, self.replicas[task.stage]
        if number is None or self._rounds_by(stage) == 1:
            return self._sum(value, task, number)
        start = number - number % len(replicas)
        made = [Buffer(value, each, self._index(value, start + i)) for i, each in enumerate(replicas)]
        return self._combined(InstructionKind.MEAN, made, (stage, spec), number)

    def _combined(self, kind: InstructionKind, made: Sequence[Buffer], wanted: tuple[int, Spec], number: int) -> Buffer:
        """Return the buffer, on a stage and in a spec, of what equal stages have made for an update, in their order."""
        (stage, spec), m = wanted, self.step.num_microbatches
        # Behind the numbers of micro-batches: a stage that reads the whole has a part of its own, too.
        whole = Buffer(made[0].value, stage, m + number)
        if whole in self.written:
            return whole
        parts = [self._pushed(each, Buffer(each.value, stage, m * (2 + each.stage) + number), spec) for each in made]
        if len(parts) == 1:
            return parts[0]
        self._emit(Instruction(kind=kind, stage=stage, reads=tuple(parts), writes=(whole,), spec=spec))
        return whole

    def _total(self, value: int, spec: Spec, stage: int, update: int | None) -> Buffer:
        """Return the buffer, on a stage, of what all workers have summed for an update, added in their order."""
        number = update or 0
        assert isinstance(self.plan.schedule, ServerSchedule), "it alone has workers"
        microbatches = self.plan.schedule.contributions(number, self.step.num_microbatches)
        made_on = dict.fromkeys(self._runs_on(1, b) for b in microbatches)
        made = [Buffer(value, worker, self._index(value, update)) for worker in made_on]
        return self._combined(InstructionKind.ADD, made, (stage, spec), number)

    def _pushed(self, made: Buffer, target: Buffer, spec: Spec) -> Buffer:
        """Return the buffer of what a worker has made, sent to another stage if it is not there yet."""
        if made.stage == target.stage:
            return made
        return target if target in self.written else self._send(made, target, spec)

    def _is_pushed(self, value: int) -> bool:
        """Return True for a result that workers sum, as a loss: they push it to the servers, as gradients."""
        return bool(self.workers) and self.slicer.is_sum(value) and value not in self.step.aliases

    def _output_stage(self, value: int) -> int:
        return 0 if self._is_pushed(value) else self.slicer.output_stage(value)

    def _last_update(self, task: TaskSpec, number: int | None) -> int | None:
        """Return the number of the update that made the state which a task reads; None for that of the step.

        The task runs on the micro-batch, or is the update, of a number.
        """
        schedule, replicas = self.plan.schedule, self.replicas[task.stage]
        if not self.often or number is None or not isinstance(schedule, AsynchronousSchedule):
            return None
        if task.kind.in_loop:
            version = schedule.version(task.stage, len(self.plan.stages), number)
            made_by = (version - 1) * len(replicas) + task.stage - replicas.start
        else:
            # An update changes the newest version, whichever one the gradients are of.
            made_by = number - len(replicas)
        return made_by if made_by >= 0 else None

    def _state(self, value: int, spec: Spec, stage: int, made_by: int) -> Buffer:
        """Return the buffer of an argument that the update of a number has written on this stage."""
        buffer = Buffer(self.next_of[value], stage, made_by)
        self._check_stays(value, stage, self.written.get(buffer), spec)
        return buffer

    def _check_stays(self, value: int, stage: int, left: Spec | None, wanted: Spec) -> None:
        """Raise `PlanError` if an update leaves an argument in another spec than the next one reads."""
        if left != wanted:
            raise PlanError(
                f"An update of stage {stage} leaves {self.graph.values[value].name} in the spec {left}, but it is read "
                f"in {wanted}. Leave out the pins of results, or use a synchronous schedule."
            )

    def _fetch_input(self, value: int, spec: Spec, stage: int, microbatch: int | None) -> Buffer:
        home, index = self.slicer.homes[value], self._index(value, microbatch)
        target = Buffer(value, stage, index)
        if target in self.written:
            return target
        # A batch is placed on every stage that reads it. Any other input exists on its home stage alone and is sent
        # from there.
        if self.step.batch_dims[value] is not None or stage == home:
            self._emit(
                Instruction(kind=InstructionKind.PLACE, stage=stage, microbatch=index, writes=(target,), spec=spec)
            )
            return target
        source = Buffer(value, home, None)
        if source not in self.written:
            spec_there = self._home_input_spec(value)
            self._emit(Instruction(kind=InstructionKind.PLACE, stage=home, writes=(source,), spec=spec_there))
        return self._send(source, target, spec)

    def _send(self, source: Buffer, target: Buffer, spec: Spec) -> Buffer:
        if source not in self.written:
            raise MismatchError(
                f"This plan of {self.plan.function!r} contradicts the order of its step: {target} needs {source}, "
                "which is made later. It was edited or damaged; make a new plan with al.plan."
            )
        # The same for each micro-batch: to ask `plan_transfer` again would take longer than the rest.
        ends = (source.stage, self.written[source]), (target.stage, spec)
        if (transfer := self.transfers.get((source.value, ends))) is None:
            transfer = planned_transfer(self.plan, self.graph.values[source.value], *ends)
            self.transfers[source.value, ends] = transfer
        self._emit(
            Instruction(
                kind=InstructionKind.SEND,
                stage=target.stage,
                source_stage=source.stage,
                microbatch=target.microbatch,
                reads=(source,),
                writes=(target,),
                spec=spec,
                bytes=float(transfer.sent_bytes),
                transfer=transfer,
            )
        )
        return target

    def _home_input_spec(self, value: int) -> Spec:
        stage = self.plan.stages[self.slicer.homes[value]]
        default = Spec(((),) * self.graph.values[value].rank)
        return stage.inputs.get(value, default)

    def _output_spec(self, value: int) -> Spec:
        if self._is_pushed(value):
            # The axes of the workers are others than those of the servers.
            return Spec(((),) * self.graph.values[value].rank)
        producer = self.graph.producer[value]
        return self._home_input_spec(value) if producer is None else self.sliced.output_spec(value)

    def _output(self, value: int) -> Buffer:
        """Return the buffer of a graph output at the end of the step, sent to its home stage if made elsewhere."""
        graph = self.graph
        if self.often and (value in self.next_of or (self.workers and value in self.step.aliases)):
            return self._output_of_state(value)
        if graph.producer[value] is None:
            return self._output_of_argument(value)
        place = self.slicer.place_of_value(value)
        stage = place.stage if place and not self._is_pushed(value) else 0
        if self.batched and self._varies(value) and self.step.batch_dims[value] is not None:
            return self._join(
                value, stage, (Buffer(value, self._runs_on(stage, b), b) for b in range(self.step.num_microbatches))
            )
        source, target = self._of_update(value, stage, None), Buffer(value, self._output_stage(value))
        if self.often and self.slicer.is_sum(value) and value not in self.step.aliases:
            # A loss: each update has its own, of its micro-batches.
            numbers = range(0, self.step.num_updates, self._rounds_by(stage))
            source = self._join(value, stage, [self._of_update(value, stage, u) for u in numbers])
        elif self.often:
            return self._output_of_update(value, 1)
        if source.stage == target.stage:
            return source
        if target not in self.written:
            self._send(source, target, self.sliced.output_spec(value))
        return target

    def _rounds_by(self, stage: int) -> int:
        """Return by how much the numbers of a stage's updates rise: by the number of its replicas."""
        return 1 if stage in self.workers else len(self.replicas[stage])

    def _of_update(self, value: int, stage: int, update: int | None) -> Buffer:
        """Return the buffer of what the micro-batches of an update, or of the step, have summed."""
        if (stage in self.workers or self._is_pushed(value)) and (update is not None or not self.often):
            return self._total(value, self._output_spec(value), stage, update)
        return Buffer(value, stage, update)

    def _output_of_state(self, value: int) -> Buffer:
        """Return the buffer of state after several updates; of an argument, as the last of them finds it."""
        if not self.workers:
            new = self.next_of[value]
            several = self.step.num_updates > self._rounds_by(self.slicer.stage_of_value(new))
            return self._output_of_update(new, 2) if several else self._output_of_argument(value)
        old = self.step.aliases.get(value)
        return self._as_found(value) if old is None else Buffer(old, self.slicer.homes[old])

    def _output_of_argument(self, value: int) -> Buffer:
        """Return the buffer of an argument that is returned as it is."""
        buffer = Buffer(value, self.slicer.homes[value])
        if buffer not in self.written:
            spec = self._home_input_spec(value)
            self._emit(Instruction(kind=InstructionKind.PLACE, stage=buffer.stage, writes=(buffer,), spec=spec))
        return buffer

    def _output_of_update(self, value: int, from_end: int) -> Buffer:
        """Return the buffer of what the last update has computed (`from_end` 1) or one before it, on its home stage."""
        place = self.slicer.place_of_value(value)
        stage = place.stage if place else 0
        # The first replica computes it, whose last update comes as many numbers before the end as there are replicas.
        update = self.step.num_updates - from_end * self._rounds_by(stage)
        source = Buffer(value, stage, update)
        target = Buffer(value, self.slicer.output_stage(value), update)
        return target if target in self.written else self._send(source, target, self.sliced.output_spec(value))

    def _join(self, value: int, stage: int, made: Iterable[Buffer]) -> Buffer:
        """Join the buffers of an output of several micro-batches or updates into one on a stage."""
        joined, spec = Buffer(value, stage), self._output_spec(value)
        parts = tuple(
            each if each.stage == stage else self._send(each, Buffer(value, stage, each.microbatch), spec)
            for each in made
        )
        self._emit(Instruction(kind=InstructionKind.CONCAT, stage=stage, reads=parts, writes=(joined,), spec=spec))
        return joined

    def _free(self, outputs: Iterable[Buffer]) -> tuple[Segment, ...]:
        """Insert a FREE after the last use of every buffer that is not returned; return the segments with these."""
        kept = set(outputs)
        if self.events:
            # The order of segments is not fixed: the last one in the list that reads an argument may run first.
            kept.update(Buffer(v, stage) for v, stage in self.slicer.homes.items())
            kept.update(b for b in self.written if b.microbatch is None and self.graph.producer[b.value] is None)
        last: dict[Buffer, int] = {}
        for i, instruction in enumerate(self.instructions):
            # Writes count as uses, so that a buffer without readers is freed right after it was written.
            for buffer in (*instruction.reads, *instruction.writes):
                last[buffer] = i
        dying: dict[int, list[Buffer]] = {}
        for buffer, i in last.items():
            if buffer not in kept:
                dying.setdefault(i, []).append(buffer)
        listed, place = list[Instruction](), list[int]()
        for i, instruction in enumerate(self.instructions):
            place.append(len(listed))
            listed.append(instruction)
            if i in dying:
                # Sorted by text, since a micro-batch is None or a number, which do not compare.
                freed = sorted(dying[i], key=str) if len(dying[i]) > 1 else dying[i]
                listed.append(Instruction(kind=InstructionKind.FREE, stage=instruction.stage, reads=tuple(freed)))
        self.instructions = listed
        place.append(len(listed))
        return tuple(Segment(event, place[first], place[end]) for event, first, end in self.events)
