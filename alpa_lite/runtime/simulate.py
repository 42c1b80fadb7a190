"""A program on a cost model instead of on devices: when each instruction runs, and what each submesh holds meanwhile.

    RUN    start = max(end of the RUN before it on its devices, arrival of what it reads, issued)        `_Clock.run`
    SEND   start = max(end of what makes it, end of the SEND before it on the same way)                  `_Clock.send`
    issued: a host starts one program after the other, each in launch_seconds                            `_Clock.issue`
    seconds of a SEND   its pieces, and the collectives of both meshes           `pricing.transfer_seconds`

    seconds of a RUN    its ops, one after the other as they are emitted, on the pricer of its stage     `price_task`
    exposed             seconds of a RUN beyond its kernels, and waiting for a SEND beyond for its maker `StageUse`
    bubble              waiting for anything else
    peak                state + max over time of buffers between their first writer and their last reader
                        + what the task at work needs besides                                            `_peaks`

The instructions are those that `execute` runs; PLACE, ZEROS and CONCAT take no time here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from alpa_lite.lower.instructions import Buffer, Instruction, Program, TaskTime
from alpa_lite.lower.slices import TaskSpec
from alpa_lite.lower.task_phases import run_parts
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.pricing import Estimator, Pricer, dispatch_seconds, local_bytes, transfer_seconds
from alpa_lite.plan.walk import Walk
from alpa_lite.program.phases import StepGraph
from alpa_lite.sharding.specs import Spec
from cost_models.cluster import Cluster
from cost_models.composed import ComposedCostModel
from cost_models.interface import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPrice:
    """Seconds of one run of a task, and what its kernels alone would take."""

    seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageUse:
    """What the devices of one submesh do in a step; `stages` run on them in turn.

    Attributes:
        busy_seconds: at work, collectives included.
        exposed_seconds: at work on nothing but collectives, and waiting for transfers.
        bubble_seconds: waiting for other stages.
        received_bytes: sent to them by other submeshes, in all.
        peak_bytes: that each device holds at most.
    """

    stages: tuple[int, ...]
    busy_seconds: float
    exposed_seconds: float
    bubble_seconds: float
    received_bytes: float
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One step on the cost model: a span for every instruction but FREE, in the order of the program, and each
    submesh's use."""

    times: tuple[TaskTime, ...]
    step_seconds: float
    submeshes: tuple[StageUse, ...]

    @property
    def bubble_fraction(self) -> float:
        """Part of the devices' time that they wait for other stages."""
        return sum(use.bubble_seconds for use in self.submeshes) / max(self._available, 1e-30)

    @property
    def exposed_fraction(self) -> float:
        """Part of the devices' time in which communication keeps them from work."""
        return sum(use.exposed_seconds for use in self.submeshes) / max(self._available, 1e-30)

    @property
    def _available(self) -> float:
        return self.step_seconds * len(self.submeshes)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        fractions = {"bubble_fraction": self.bubble_fraction, "exposed_fraction": self.exposed_fraction}
        return {**asdict(self), **fractions}

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
) -> SimulatedStep:
    """Run a program of a plan on the cost model of its cluster. `step` is the one that the program was built from.

    State that a step returns takes the place of what came in, as if it were donated. Stacked arguments that do not lie
    over the devices of their stages as they are (`runtime.leaves`) are put together outside of the program.
    """
    pricers = [_pricer(plan, stage, cost_model_for) for stage in range(len(plan.stages))]
    prices = [price_task(task, step, plan.stages[task.stage].ops, pricers[task.stage]) for task in program.tasks]
    clock = _StepSimulation(
        program=program, plan=plan, prices=prices, pricers=pricers, model=cost_model_for(plan.cluster)
    )
    for instruction in program.instructions:
        clock.step(instruction)
    rows, end = plan.stages_together, max((time.end_seconds for time in clock.times), default=0.0)
    available = end + plan.cluster.skew_seconds
    peaks = _peaks(program, plan, step, clock)
    uses = [
        StageUse(
            stages=stages,
            busy_seconds=clock.busy[row],
            exposed_seconds=clock.exposed[row],
            bubble_seconds=max(0.0, available - clock.busy[row] - clock.waited[row]),
            received_bytes=clock.received[row],
            peak_bytes=peaks[row],
        )
        for row, stages in enumerate(rows)
    ]
    listed = tuple(time for time in clock.times if time.kind != "FREE")
    return SimulatedStep(times=listed, step_seconds=available, submeshes=tuple(uses))


def price_task(task: TaskSpec, step: StepGraph, placements: Any, pricer: Pricer) -> TaskPrice:
    """One run of a task, with the ops, kernels and collectives that its executable has; one phase after the other."""

    def estimator() -> Estimator:
        return Estimator(pricer, stage=task.stage, phase=task.kind, runs=1)

    parts = [estimator()]
    walk: Walk[int] = Walk(step.graph, placements, pricer.sizes, parts[0])
    for port in task.inputs:
        walk.put(port.value, port.spec, Estimator.NOTHING)
    for _ in run_parts(walk, task, step):
        for known in walk.arrays.values():
            known.update(dict.fromkeys(known, Estimator.NOTHING))
        walk.machine = estimator()
        parts.append(walk.machine)
    for port in (*task.outputs, *task.sums):
        walk.get(port.value, port.spec)
    return TaskPrice(
        seconds=sum(part.seconds for part in parts), compute_seconds=sum(part.compute_seconds for part in parts)
    )


def _pricer(plan: Plan, stage: int, cost_model_for: Callable[[Cluster], CostModel]) -> Pricer:
    """The prices on the devices of a stage, which differ from others' in clusters of several kinds."""
    cluster, submesh = plan.cluster, plan.stages[stage].submesh
    here = cluster.at(submesh.first_device, submesh.num_devices) if cluster.groups else cluster
    return Pricer(cost_model=cost_model_for(here), submesh=submesh, mesh=plan.stages[stage].mesh_shape)


@dataclass(kw_only=True)
class _StepSimulation:
    """The state of a simulated step. Lists are by row: the number of a submesh in the plan."""

    program: Program
    plan: Plan
    prices: Sequence[TaskPrice]
    pricers: Sequence[Pricer]
    model: CostModel
    times: list[TaskTime] = field(default_factory=list[TaskTime])
    ready: dict[Buffer, float] = field(default_factory=dict[Buffer, float])
    made: dict[Buffer, float] = field(default_factory=dict[Buffer, float])
    taken: dict[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    issued: dict[int, float] = field(default_factory=dict[int, float])

    def __post_init__(self) -> None:
        rows = self.plan.stages_together
        self.row_of = {stage: row for row, stages in enumerate(rows) for stage in stages}
        self.free, self.busy, self.exposed, self.waited, self.received = ([0.0] * len(rows) for _ in range(5))
        self.dispatch = dispatch_seconds(self.plan.cluster)

    def step(self, instruction: Instruction) -> None:
        """Give an instruction its time."""
        if instruction.kind == "RUN":
            start, end = self.run(instruction)
        elif instruction.kind == "SEND":
            start, end = self.send(instruction)
        elif instruction.kind == "PLACE":  # while the task before the one that reads it is at work
            start = end = self.free[self.row_of[instruction.stage]]
        else:
            start = end = max((self.ready[b] for b in instruction.reads), default=0.0)
        if instruction.kind != "SEND":
            self.made.update(dict.fromkeys(instruction.writes, end))
        self.ready.update(dict.fromkeys(instruction.writes, end))
        self.times.append(TaskTime.of(self.program, instruction, start, end))

    def run(self, instruction: Instruction) -> tuple[float, float]:
        """A task, as soon as its devices are free and what it reads is there."""
        row, price = self.row_of[instruction.stage], self.prices[instruction.task]
        free = max(self.free) if self.plan.cluster.shared_processor else self.free[row]
        could = max([free, self.issue(instruction.stage), *(self.made[b] for b in instruction.reads)])
        start = max([could, *(self.ready[b] for b in instruction.reads)])
        seconds = price.seconds + self.dispatch
        self.free[row] = end = start + seconds
        self.busy[row] += seconds
        self.waited[row] += start - could
        self.exposed[row] += start - could + max(0.0, price.seconds - price.compute_seconds)
        return start, end

    def issue(self, stage: int) -> float:
        """When the host of a stage has started a program for it: the time at which its devices can begin."""
        host = self.plan.stages[stage].submesh.first_device // self.plan.cluster.devices_per_host
        begins = self.issued.get(host, 0.0)
        self.issued[host] = begins + (0.0 if self.dispatch else self.model.launch_seconds())
        return begins

    def send(self, instruction: Instruction) -> tuple[float, float]:
        """A transfer, one after the other on the same way; none where the array is there already."""
        a, b = instruction.source_stage, instruction.stage
        way, transfer, source = (self.row_of[a], self.row_of[b]), instruction.transfer, instruction.reads[0]
        self.made[instruction.writes[0]] = self.made[source]
        if transfer is None or transfer.is_trivial:
            return self.ready[source], self.ready[source]
        ends = {"source": self.pricers[a], "target": self.pricers[b]}
        seconds = self.dispatch + transfer_seconds(transfer, self.model, **ends)
        start = max(self.ready[source], self.taken.get(way, 0.0))
        self.taken[way] = start + seconds
        self.received[way[1]] += instruction.bytes
        return start, start + seconds


def _peaks(program: Program, plan: Plan, step: StepGraph, clock: _StepSimulation) -> list[float]:
    """By row: the most bytes that a device holds at one time."""
    resident = _resident(program, plan, step)
    sizes = _sizes(program, plan, step, resident)
    changes: list[list[tuple[float, float]]] = [[] for _ in plan.stages_together]
    last: dict[Buffer, float] = {}
    following = (*program.instructions[1:], None)  # one too many where there are none
    for instruction, after, time in zip(program.instructions, following, clock.times, strict=False):
        row = clock.row_of[instruction.stage]
        taken_over = _taken_over(program, step, instruction, after)
        for buffer in instruction.writes:
            if buffer not in last:
                start = time.end_seconds if buffer in taken_over else time.start_seconds
                changes[clock.row_of[buffer.stage]].append((start, sizes.get(buffer, 0.0)))
        for buffer in (*instruction.reads, *instruction.writes):
            last[buffer] = max(last.get(buffer, 0.0), time.end_seconds)
        if instruction.kind == "FREE":
            for buffer in instruction.reads:
                changes[clock.row_of[buffer.stage]].append((last[buffer], -sizes.get(buffer, 0.0)))
        if instruction.kind == "RUN":
            work = _work(plan, instruction, program.tasks[instruction.task], sizes)
            changes[row] += [(time.start_seconds, work), (time.end_seconds, -work)]
    state = [0.0] * len(changes)
    for buffer, size in resident.items():
        state[clock.row_of[buffer.stage]] += size
    # What ends when something else begins makes room for it.
    held = (max(accumulate(change for _, change in sorted(found)), default=0.0) for found in changes)
    return [kept + most for kept, most in zip(state, held, strict=True)]


def _taken_over(
    program: Program, step: StepGraph, instruction: Instruction, after: Instruction | None
) -> frozenset[Buffer]:
    """What a task writes into the memory of what it is the last to read, of the same form."""
    if instruction.kind != "RUN" or after is None or after.kind != "FREE":
        return frozenset()
    task, values, freed = program.tasks[instruction.task], step.graph.values, frozenset(after.reads)
    read = zip(instruction.reads, task.inputs, strict=False)
    dying = Counter((values[p.value].shape, values[p.value].dtype, p.spec) for b, p in read if b in freed)
    found = set[Buffer]()
    for buffer, port in zip(instruction.writes, task.outputs, strict=False):
        form = (values[port.value].shape, values[port.value].dtype, port.spec)
        if dying[form]:
            dying[form] -= 1
            found.add(buffer)
    return frozenset(found)


def _work(plan: Plan, instruction: Instruction, task: TaskSpec, sizes: Mapping[Buffer, float]) -> float:
    """Bytes that a task needs beside what it reads and writes: where it holds both passes also what is saved."""
    stage, saved = plan.stages[task.stage], 0.0
    if task.kind in ("forward+backward", "step"):
        handed_on = sum(sizes.get(buffer, 0.0) for buffer in instruction.writes[: len(task.outputs)])
        saved = max(0.0, stage.activation_bytes - handed_on)
    return stage.temporary_bytes + saved


def _resident(program: Program, plan: Plan, step: StepGraph) -> dict[Buffer, float]:
    """Bytes per device of state, which is there all the time."""
    return {
        Buffer(v, home): local_bytes(step.graph.values[v], spec, plan.stages[home].mesh_shape.axis_sizes)
        for v, (home, spec) in program.homes.items()
        if step.batch_dims[v] is None
    }


def _sizes(program: Program, plan: Plan, step: StepGraph, resident: Iterable[Buffer]) -> dict[Buffer, float]:
    """Bytes per device of each buffer; nothing for state, for what takes its place, and for what is there already."""
    nothing = set(resident)
    for buffer, spec in zip(program.outputs, program.output_specs, strict=True):
        target = step.aliases.get(buffer.value)
        if target is not None and program.homes[target] == (buffer.stage, spec):
            nothing.add(buffer)
    found: dict[Buffer, float] = {}
    for instruction in program.instructions:
        sizes = plan.stages[instruction.stage].mesh_shape.axis_sizes
        in_place = instruction.kind == "SEND" and _same_devices(plan, instruction)
        for buffer, spec in _written(program, instruction):
            if buffer not in nothing and not in_place:
                found.setdefault(buffer, local_bytes(step.graph.values[buffer.value], spec, sizes))
    return found


def _same_devices(plan: Plan, instruction: Instruction) -> bool:
    stages = (plan.stages[stage] for stage in (instruction.source_stage, instruction.stage))
    return len({stage.submesh for stage in stages}) == 1


def _written(program: Program, instruction: Instruction) -> Iterable[tuple[Buffer, Spec]]:
    """What an instruction writes, with the spec of each."""
    if instruction.kind in ("RUN", "ZEROS"):
        task = program.tasks[instruction.task]
        ports = task.sums if instruction.kind == "ZEROS" else (*task.outputs, *task.sums)
        return [(b, p.spec) for b, p in zip(instruction.writes, ports, strict=True)]
    return [(b, instruction.spec) for b in instruction.writes if instruction.spec is not None]
