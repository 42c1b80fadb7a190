"""Simulate a program on a cost model: when each instruction runs, and how much memory each submesh uses meanwhile.

    RUN    start = max(end of the RUN before it on its devices, arrival of its inputs, issued)           `run`
    SEND   start = max(end of the instruction that makes its input, end of the SEND before it
                       between the same two submeshes), of workers and servers on the same links          `send`
    ADD    as a RUN of one kernel that reads all inputs and writes their sum; MEAN likewise              `add`
    issued: a host starts one program after the other, each in launch_seconds                            `issue`
    seconds of a SEND   its pieces, and the collectives of both meshes           `pricing.transfer_seconds`

    seconds of a RUN    its ops, one after the other as they are emitted, on the pricer of its stage     `prices_of`
    exposed             seconds of a RUN beyond its kernels, and the wait for a SEND beyond the wait for
                        the instruction that made its input                                              `StageUse`
    bubble              waiting for anything else
    peak                the most that is in use at an instruction                                 `memory_in_use`

The instructions are those that `execute` runs; PLACE, ZEROS, CONCAT and RENEW take no time here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto

from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind, Program, TaskTime
from alpa_lite.plan.memory_in_use import memory_changes, most_between
from alpa_lite.plan.parts import StageCost, TaskRole, TaskRuns, TransferRuns
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import Pricer, dispatch_seconds, link_seconds, local_bytes, transfer_seconds
from alpa_lite.plan.stacked_cost import at_rest
from alpa_lite.plan.task_prices import estimate, part_seconds
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.program.ir import item_bytes
from alpa_lite.program.phases import StepGraph
from alpa_lite.sharding.specs import replicated
from alpa_lite.sharding.transfer import PlannedTransfer
from alpa_lite.text import one_line
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel, CostModel
from cost_models.work import Work


class Prices(Enum):
    """The prices of tasks in a simulation. The seconds are the same."""

    OF_TASKS = auto()
    """Priced anew, which tells kernels from exposed collectives."""
    OF_PLAN = auto()
    """The costs of the plan's stages, as a search has just found them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrice:
    """Seconds of one run of a task, and the seconds that its kernels alone would take."""

    seconds: float
    compute_seconds: float

    @staticmethod
    def alike(seconds: float) -> TaskPrice:
        """Return a price of which kernels take all seconds."""
        return TaskPrice(seconds=seconds, compute_seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """How the devices of one submesh spend a step; `stages` run on them in turn.

    Attributes:
        busy_seconds: running tasks, collectives included.
        exposed_seconds: running nothing but collectives, and waiting for transfers.
        bubble_seconds: waiting for other stages.
        received_bytes: total bytes received from other submeshes.
        peak_bytes: peak memory of each device, in bytes.
    """

    stages: tuple[int, ...]
    busy_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    received_bytes: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step on the cost model.

    Attributes:
        times: a span for every instruction but FREE, in the order of the program.
        step_seconds: time from the start of one step to the start of the next.
        transfer_seconds: total time of all transfers between stages, and of moving stacked arguments.
        submeshes: the use of each submesh.
        tasks: the runs of tasks, with the memory that is in use meanwhile.
        transfers: the transfers between stages.
    """

    times: tuple[TaskTime, ...]
    step_seconds: float
    transfer_seconds: float
    submeshes: tuple[StageUse, ...]
    tasks: TaskRuns = field(repr=False)
    transfers: TransferRuns = field(repr=False)

    def use_of(self, stage: int) -> StageUse:
        """Return the use of the submesh of a stage."""
        return next(use for use in self.submeshes if stage in use.stages)

    @property
    def bubble_fraction(self) -> float:
        """Fraction of the devices' time spent waiting for other stages."""
        # A program without cost has no time to share.
        return sum(use.bubble_seconds for use in self.submeshes) / max(self._available, 1e-30)

    @property
    def exposed_fraction(self) -> float:
        """Fraction of the devices' time in which communication blocks computation."""
        return sum(use.exposed_seconds for use in self.submeshes) / max(self._available, 1e-30)

    @property
    def _available(self) -> float:
        return self.step_seconds * len(self.submeshes)

    def to_json(self) -> dict[str, object]:
        """Return the step as JSON-compatible data."""
        fractions = {"bubble_fraction": self.bubble_fraction, "exposed_fraction": self.exposed_fraction}
        own = {name: value for name, value in asdict(self).items() if name not in ("tasks", "transfers")}
        return {**own, **fractions}

    def __repr__(self) -> str:
        return one_line(self, str(self).partition("\n")[0])

    def __str__(self) -> str:
        head = (
            f"simulated step {1e3 * self.step_seconds:.4g} ms, bubble {self.bubble_fraction:.1%}, exposed"
            f" communication {self.exposed_fraction:.1%}"
        )
        rows = [
            f"  stage {', '.join(map(str, use.stages))}: busy {1e3 * use.busy_seconds:.4g} ms, exposed"
            f" {1e3 * use.exposed_seconds:.4g} ms, bubble {1e3 * use.bubble_seconds:.4g} ms, receives"
            f" {use.received_bytes / 2**20:.4g} MiB, peak {use.peak_bytes / 2**20:,.0f} MiB"
            for use in self.submeshes
        ]
        return "\n".join([head, *rows])


def simulate_program(
    program: Program,
    plan: Plan,
    step: StepGraph,
    *,
    cost_model_for: Callable[[Cluster], CostModel] = ComposedCostModel,
    prices: Prices = Prices.OF_TASKS,
) -> SimulatedStep:
    """Simulate a plan's program on the cost model of its cluster. `step` is the one that the program was built from.

    State that a step returns replaces the state that was passed in, as if it were donated. Stacked arguments that do
    not lie on the devices of their stages are brought there before the program, and back after it (`stacked_cost`).
    """
    pricers, model = [pricer_of(plan, n, cost_model_for) for n in range(len(plan.stages))], cost_model_for(plan.cluster)
    given = prices_of_plan if prices is Prices.OF_PLAN else prices_of
    clock = _StepSimulation(
        program=program,
        plan=plan,
        step_graph=step,
        prices=given(program.tasks, step, plan, pricers),
        pricers=pricers,
        model=model,
    )
    for instruction in program.instructions:
        clock.step(instruction)
    # The next step begins when this one has ended, and no host is still launching its programs.
    end = max([*(time.end_seconds for time in clock.times), *clock.issued.values()], default=0.0)
    # All hosts wait for the last one to start the step.
    available = end + plan.cluster.skew_seconds
    rows, tasks = plan.stages_together, _task_runs(program, plan, step, clock)
    resting = at_rest(model, step, [home for home, _ in map(program.homes.__getitem__, step.graph.inputs)], plan.stages)
    uses = [
        StageUse(
            stages=stages,
            busy_seconds=clock.busy[row],
            exposed_seconds=clock.exposed[row],
            bubble_seconds=max(0.0, available - clock.busy[row] - clock.waited[row]),
            received_bytes=clock.received[row],
            peak_bytes=max([resting.state_bytes[plan.stages[stages[0]].submesh], *tasks.held_on(stages)]),
        )
        for row, stages in enumerate(rows)
    ]
    listed = tuple(time for time in clock.times if time.kind != InstructionKind.FREE)
    return SimulatedStep(
        times=listed,
        step_seconds=available + resting.seconds,
        transfer_seconds=clock.sending + resting.seconds,
        submeshes=tuple(uses),
        tasks=tasks,
        transfers=_transfer_runs(program, clock),
    )


def prices_of(
    tasks: Sequence[TaskSpec], step: StepGraph, plan: Plan, pricers: Sequence[Pricer]
) -> tuple[TaskPrice, ...]:
    """Return the price of one run of each task, with the ops, kernels and collectives of its executable."""
    found: dict[int, TaskPrice] = {}
    for stage, pricer in enumerate(pricers):
        mine = [number for number, task in enumerate(tasks) if task.stage == stage]
        parts = {number: estimate(tasks[number], step, plan.stages[stage].ops, pricer) for number in mine}
        # Together, since collectives of one task may run during another one.
        seconds = iter(part_seconds(pricer, [part for each in parts.values() for part in each]))
        for number, each in parts.items():
            found[number] = TaskPrice(
                seconds=sum(next(seconds) for _ in each), compute_seconds=sum(part.compute_seconds for part in each)
            )
    return tuple(found[number] for number in range(len(tasks)))


def prices_of_plan(
    tasks: Sequence[TaskSpec], step: StepGraph, plan: Plan, pricers: Sequence[Pricer]
) -> tuple[TaskPrice, ...]:
    """Return the prices of tasks by the costs of their stages, without the part of their kernels."""
    found = dict[int, TaskPrice]()
    for stage, placed in enumerate(plan.stages):
        mine = [number for number, task in enumerate(tasks) if task.stage == stage]
        updates = sum(tasks[number].kind is TaskRole.UPDATE for number in mine)
        if updates > 1:
            # The costs do not tell the parts of an update apart.
            found.update(zip(mine, prices_of([tasks[n] for n in mine], step, plan, pricers), strict=True))
        else:
            found.update((n, TaskPrice.alike(_seconds_of(tasks[n].kind, placed.cost))) for n in mine)
    return tuple(found[number] for number in range(len(tasks)))


def _seconds_of(kind: TaskRole, cost: StageCost) -> float:
    """Return the seconds of one run of a task, by the cost of its stage."""
    match kind:
        case TaskRole.FORWARD:
            return cost.forward_seconds
        case TaskRole.BACKWARD:
            return cost.backward_seconds
        case TaskRole.FORWARD_BACKWARD:
            # The gradients of weights are a task of their own where their seconds are told apart.
            return cost.loop_seconds - cost.weight_seconds
        case TaskRole.INPUT_GRADIENT:
            return cost.backward_seconds - cost.weight_seconds
        case TaskRole.WEIGHT_GRADIENT:
            return cost.weight_seconds
        case TaskRole.UPDATE:
            return cost.update_seconds
        case TaskRole.STEP:
            return cost.step_seconds(1)


def pricer_of(plan: Plan, stage: int, cost_model_for: Callable[[Cluster], CostModel]) -> Pricer:
    """Return the pricer for the devices of a stage, which differ between stages in heterogeneous clusters."""
    cluster, submesh = plan.cluster, plan.stages[stage].submesh
    # A stage of a heterogeneous cluster is priced on the devices that it runs on.
    here = cluster.at(submesh.first_device, submesh.num_devices) if cluster.groups else cluster
    return Pricer(cost_model=cost_model_for(here), submesh=submesh, mesh=plan.stages[stage].mesh_shape)


@dataclass(kw_only=True)
class _StepSimulation:
    """The state of a simulated step. Lists are by row: the number of a submesh in the plan."""

    program: Program
    plan: Plan
    step_graph: StepGraph
    prices: Sequence[TaskPrice]
    pricers: Sequence[Pricer]
    model: CostModel
    times: list[TaskTime] = field(default_factory=list[TaskTime])
    ready: dict[Buffer, float] = field(default_factory=dict[Buffer, float])
    made: dict[Buffer, float] = field(default_factory=dict[Buffer, float])
    taken: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    links: dict[tuple[str, str, int], float] = field(default_factory=dict[tuple[str, str, int], float])
    issued: dict[int, float] = field(default_factory=dict[int, float])
    sent: dict[tuple[int, int, int], float] = field(default_factory=dict[tuple[int, int, int], float])

    def __post_init__(self) -> None:
        rows = self.plan.stages_together
        self.row_of = {stage: row for row, stages in enumerate(rows) for stage in stages}
        self.free, self.busy, self.exposed, self.waited, self.received = ([0.0] * len(rows) for _ in range(5))
        self.dispatch, self.sending = dispatch_seconds(self.plan.cluster), 0.0

    def step(self, instruction: Instruction) -> None:
        """Compute and record the time span of an instruction."""
        if instruction.kind == InstructionKind.RUN:
            start, end = self.run(instruction)
        elif instruction.kind == InstructionKind.SEND:
            start, end = self.send(instruction)
        elif instruction.kind in (InstructionKind.ADD, InstructionKind.MEAN):
            start, end = self.add(instruction)
        elif instruction.kind in (InstructionKind.PLACE, InstructionKind.ZEROS):
            # It overlaps with the task before the one that reads it.
            start = end = self.free[self.row_of[instruction.stage]]
        else:
            start = end = max((self.ready[b] for b in instruction.reads), default=0.0)
        if instruction.kind != InstructionKind.SEND:
            self.made.update(dict.fromkeys(instruction.writes, end))
        self.ready.update(dict.fromkeys(instruction.writes, end))
        self.times.append(TaskTime.of(self.program, instruction, start, end))

    def run(self, instruction: Instruction) -> tuple[float, float]:
        """Return the span of a task, which starts when its devices are free and its inputs have arrived."""
        row, price = self.row_of[instruction.stage], self.prices[instruction.task]
        # Virtual devices take turns on one processor.
        free = max(self.free) if self.plan.cluster.shared_processor else self.free[row]
        # When it could start if transfers took no time: a later start is exposed communication.
        reads = instruction.reads
        could = max(free, self.issue(instruction.stage), max(map(self.made.__getitem__, reads), default=0.0))
        start = max(could, max(map(self.ready.__getitem__, reads), default=0.0))
        seconds = price.seconds + self.dispatch
        self.free[row] = end = start + seconds
        self.busy[row] += seconds
        self.waited[row] += start - could
        # Waiting for a transfer, and collectives beyond the time of the kernels.
        self.exposed[row] += start - could + max(0.0, price.seconds - price.compute_seconds)
        return start, end

    def add(self, instruction: Instruction) -> tuple[float, float]:
        """Return the span of adding up what equal stages have sent, which reads each array and writes the sum."""
        row, pricer, parts = self.row_of[instruction.stage], self.pricers[instruction.stage], len(instruction.reads)
        value = self.step_graph.graph.values[instruction.writes[0].value]
        size = local_bytes(value, instruction.spec or replicated(value.rank), pricer.sizes)
        work = Work(
            flops=(parts - 1) * size / item_bytes(value.dtype),
            bytes=(parts + 1) * size,
            kind="elementwise",
            dtype=value.dtype,
            num_kernels=1,
        )
        seconds = self.dispatch + pricer.cost_model.compute_seconds(work, num_active_devices=pricer.mesh.num_devices)
        free = max(self.free) if self.plan.cluster.shared_processor else self.free[row]
        start = max([free, *(self.ready[b] for b in instruction.reads)])
        self.free[row] = start + seconds
        self.busy[row] += seconds
        return start, start + seconds

    def issue(self, stage: int) -> float:
        """Return the time at which the host of a stage has launched its next program."""
        host = self.plan.stages[stage].submesh.first_device // self.plan.cluster.devices_per_host
        begins = self.issued.get(host, 0.0)
        # A cluster with a dispatch time pays it within each task, so the host pays nothing in addition.
        self.issued[host] = begins + (0.0 if self.dispatch else self.model.launch_seconds())
        return begins

    def send(self, instruction: Instruction) -> tuple[float, float]:
        """Return the span of a transfer: one after the other between the same submeshes, no time for local ones."""
        a, b = instruction.source_stage, instruction.stage
        link, transfer, source = (self.row_of[a], self.row_of[b]), instruction.transfer, instruction.reads[0]
        # As if the transfer took no time; `run` compares with this.
        self.made[instruction.writes[0]] = self.made[source]
        if transfer is None or transfer.is_trivial:
            return self.ready[source], self.ready[source]
        # Each micro-batch sends the same arrays, whose transfers `plan_transfer` returns anew as the same objects.
        known = a, b, id(transfer)
        if known not in self.sent:
            ends = {"source": self.pricers[a], "target": self.pricers[b]}
            self.sent[known] = transfer_seconds(transfer, self.model, **ends)
        seconds = self.dispatch + self.sent[known]
        if self.plan.schedule.replicas(len(self.plan.stages)):
            # The links of servers carry what goes to and comes from all workers, as do those of replicas.
            start = self.queued(transfer, self.ready[source], seconds)
        else:
            # The link between two submeshes carries one transfer at a time in each direction.
            start = max(self.ready[source], self.taken.get(link, 0.0))
            self.taken[link] = start + seconds
        self.sending += seconds
        self.received[link[1]] += instruction.bytes
        return start, start + seconds

    def queued(self, transfer: PlannedTransfer, ready: float, seconds: float) -> float:
        """Return the start of a transfer of which each link of a device or host serves its part in turn.

        It ends when the last of them has done so.
        """
        end = ready + seconds
        for link, part in link_seconds(transfer, self.model).items():
            busy_until = max(ready, self.links.get(link, 0.0)) + self.dispatch + part
            self.links[link] = busy_until
            end = max(end, busy_until)
        return end - seconds


def _transfer_runs(program: Program, clock: _StepSimulation) -> TransferRuns:
    """Return the transfers that take time, in the order of their start; those that follow each other are joined."""
    found: list[tuple[int, int, int | None, float, float, float]] = []
    last: dict[tuple[int, int, int | None], int] = {}
    sends = [
        (time, instruction)
        for instruction, time in zip(program.instructions, clock.times, strict=True)
        if instruction.kind is InstructionKind.SEND and time.end_seconds > time.start_seconds
    ]
    for time, instruction in sorted(sends, key=lambda send: send[0].start_seconds):
        start, end, size = time.start_seconds, time.end_seconds, instruction.bytes
        key = instruction.source_stage, instruction.stage, instruction.microbatch
        before = last.get(key)
        if before is not None and found[before][4] == start:
            found[before] = (*key, found[before][3], end, found[before][5] + size)
            continue
        last[key] = len(found)
        found.append((*key, start, end, size))
    sources, stages, microbatches, starts, ends, sizes = zip(*found, strict=True) if found else ((),) * 6
    return TransferRuns(
        sources=sources,
        stages=stages,
        microbatches=microbatches,
        start_seconds=starts,
        end_seconds=ends,
        bytes=sizes,
    )


def _task_runs(program: Program, plan: Plan, step: StepGraph, clock: _StepSimulation) -> TaskRuns:
    """Return the runs of tasks, by submesh in order, with the memory that is in use meanwhile."""
    runs: list[list[tuple[int, TaskTime]]] = [[] for _ in plan.stages_together]
    for number, (instruction, time) in enumerate(zip(program.instructions, clock.times, strict=True)):
        if instruction.kind is InstructionKind.RUN:
            runs[clock.row_of[instruction.stage]].append((number, time))
    listed, held = list[tuple[int, TaskTime]](), list[float]()
    for mine, changes in zip(runs, memory_changes(program, plan, step, clock.row_of), strict=True):
        listed += mine
        held += most_between([number for number, _ in mine], changes)
    return TaskRuns(
        stages=tuple(time.stage for _, time in listed),
        roles=tuple(program.tasks[program.instructions[number].task].kind for number, _ in listed),
        microbatches=tuple(time.microbatch for _, time in listed),
        start_seconds=tuple(time.start_seconds for _, time in listed),
        end_seconds=tuple(time.end_seconds for _, time in listed),
        held_bytes=tuple(held),
    )
