"""Compare a profile with the prediction, op by op: where measured and predicted time differ most.

    predicted  of an op    its share of its task, as the cost model lays its streams out      `op_spans.task_op_spans`
    measured   of an op    kernels of XLA that run it; a kernel that runs several ops is shared out by their
                           predicted times, and belongs to the first of them if none is predicted   `_OpShares`
    outside of kernels     the rest of the span of a task: its start, and what no kernel and no op accounts for
    other instructions     transfers, placing inputs, sums made or joined                           `_INSTRUCTIONS`
    between instructions   the step less the spans of all instructions, where these do not overlap

Ops of one primitive, source line and phase are one row, in all stages, layers and micro-batches. Collectives are rows
of their kind and phase: XLA joins those of several ops. Where several ops or kernels run at once, the time is split
equally among them, so that the rows of each side add up to its spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from alpa_lite.errors import MismatchError, PlanError
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.inspection.why.op_spans import OpSpan, task_op_spans
from alpa_lite.plan.instructions import InstructionKind, TaskTime
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.simulation import simulate_program
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.program.ir import Op, OpPath
from alpa_lite.program.phases import StepGraph
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.runtime.execute.step_profile import KernelTime, StepProfile, shared_seconds
from alpa_lite.sharding.specs import MoveKind
from alpa_lite.text import short_source, show_milliseconds, show_numbers, show_seconds

MAX_DIFFERENCES = 10
"""The number of rows of the text; the data have all."""

_COLLECTIVES = {
    "all-reduce": MoveKind.ALL_REDUCE,
    "reduce-scatter": MoveKind.REDUCE_SCATTER,
    "all-gather": MoveKind.ALL_GATHER,
    "all-to-all": MoveKind.ALL_TO_ALL,
    "collective-permute": MoveKind.PERMUTE,
}
"""XLA's opcodes of collectives; the two halves of an asynchronous one end in `-start` and `-done`."""

_OUTSIDE = "outside of kernels"
_BETWEEN = "between instructions"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpDifference:
    """The predicted and the measured time of one kind of op at one source line, in one step.

    what                 the primitive, the kind of collective, or what else takes time
    source               the user's source line; "" if it belongs to none
    phase                the phase of the step, or the kind of task
    stages               the stages that run it
    predicted_seconds    over all runs, in each on an average device
    measured_seconds     the same, of the kernels
    kernels              names of XLA's instructions in the measured programs, those with most time first
    """

    what: str
    source: str
    phase: str
    stages: tuple[int, ...]
    predicted_seconds: float
    measured_seconds: float
    kernels: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Measured minus predicted."""
        return self.measured_seconds - self.predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDifferences:
    """A profile beside the prediction: both timelines, and the rows by the size of their difference.

    predicted, measured    the span of each instruction
    """

    plan: str
    predicted_seconds: float
    measured_seconds: float
    rows: tuple[OpDifference, ...]
    predicted: tuple[TaskTime, ...] = field(repr=False)
    measured: tuple[TaskTime, ...] = field(repr=False)

    def __str__(self) -> str:
        ratio = self.measured_seconds / self.predicted_seconds if self.predicted_seconds > 0 else 0.0
        head = (
            f"{self.plan}: predicted {show_seconds(self.predicted_seconds)}, measured under the profiler"
            f" {show_seconds(self.measured_seconds)}, {ratio:.2f} times the prediction."
        )
        return render([head, ""], [differences_table(self.rows)])

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON: the rows, without the spans of instructions."""
        rows = [{**asdict(row), "seconds": row.seconds} for row in self.rows]
        return {
            "plan": self.plan,
            "predicted_seconds": self.predicted_seconds,
            "measured_seconds": self.measured_seconds,
            "differences": rows,
        }


def differences_table(rows: Sequence[OpDifference]) -> Table:
    """Return the rows with the largest differences as a table."""
    shown, rest = rows[:MAX_DIFFERENCES], rows[MAX_DIFFERENCES:]
    columns = ("", "difference", "predicted", "measured", "op", "where", "XLA's instructions")
    cells = tuple(
        (
            str(number),
            ("+" if row.seconds > 0 else "−" if row.seconds < 0 else "") + show_milliseconds(abs(row.seconds)),
            show_milliseconds(row.predicted_seconds),
            show_milliseconds(row.measured_seconds),
            f"{row.what}, {row.phase}" if row.phase else row.what,
            row.source.split(" ")[0] or f"stage {show_numbers(row.stages)}",
            _listed(row.kernels),
        )
        for number, row in enumerate(shown, 1)
    )
    note = f"… and {len(rest)} more, {_signed(sum(row.seconds for row in rest))} in all" if rest else ""
    return Table(
        title="Largest differences from the prediction, in ms of a step",
        columns=columns,
        rows=cells,
        numeric=frozenset(columns[:4]),
        note=note,
    )


def _signed(seconds: float) -> str:
    return ("−" if seconds < 0 else "+") + show_seconds(abs(seconds))


def _listed(names: Sequence[str]) -> str:
    return f"{names[0]}, … ({len(names)})" if len(names) > 1 else names[0] if names else ""


def profile_differences(plan: Plan, profile: StepProfile) -> ProfileDifferences:
    """Compare a profile with the prediction of the plan that has run.

    Raises:
        PlanError: the plan has no step, so that its ops cannot be priced.
        MismatchError: the profile is of another plan.
    """
    if plan.request is None:
        raise PlanError(
            "This plan has no step, so that its ops cannot be priced: it comes from a file. Make it with its step, "
            "al.plan(step, *args, planner=plan), or use the plan of what was profiled (compiled.plan)."
        )
    simulated = simulate_program(profile.program, plan, profile.step)
    ops = task_op_spans(plan, plan.request)
    if len(simulated.times) != len(profile.times) or len(ops) != len(profile.program.tasks):
        raise MismatchError(
            f"The profile has {len(profile.times)} instructions, and the program of this plan {len(simulated.times)}: "
            "it is of another plan. Give the plan of what was profiled (compiled.plan)."
        )
    table = _DifferenceTable()
    shares = [_OpShares(profile.step, task, spans) for task, spans in zip(profile.program.tasks, ops, strict=True)]
    for row in zip(profile.numbers, simulated.times, profile.times, profile.kernels, strict=True):
        number, predicted, measured, kernels = row
        instruction = profile.program.instructions[number]
        if instruction.kind is InstructionKind.RUN:
            shares[instruction.task].add(table, predicted, measured, kernels)
        else:
            key = _RowKey(what=_INSTRUCTIONS.get(instruction.kind, instruction.kind.value), source="", phase="")
            table.add(key, instruction.stage, _length(predicted), _length(measured))
    between, count = _RowKey(what=_BETWEEN, source="", phase=""), len(plan.stages)
    predicted_rest = _uncovered(simulated.times, simulated.step_seconds) / count
    measured_rest = _uncovered(profile.times, profile.step_seconds) / count
    for stage in range(count):
        table.add(between, stage, predicted_rest, measured_rest)
    return ProfileDifferences(
        plan=f"{plan.function} on {plan.cluster.name}, {plan.name}",
        predicted_seconds=simulated.step_seconds,
        measured_seconds=profile.step_seconds,
        rows=table.rows(),
        predicted=simulated.times,
        measured=profile.times,
    )


_INSTRUCTIONS = {
    InstructionKind.PLACE: "placing inputs",
    InstructionKind.SEND: "transfers between stages",
    InstructionKind.ZEROS: "making sums of zeros",
    InstructionKind.CONCAT: "joining micro-batches",
    InstructionKind.ADD: "adding up sums of workers",
    InstructionKind.MEAN: "averaging gradients of replicas",
    InstructionKind.RENEW: "renewing state",
}


def _length(time: TaskTime) -> float:
    return time.end_seconds - time.start_seconds


def _uncovered(times: Sequence[TaskTime], step_seconds: float) -> float:
    """Return the part of a step in which no instruction runs."""
    return max(0.0, step_seconds - sum(shared_seconds([(time.start_seconds, time.end_seconds) for time in times])))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowKey:
    """What ops have in common that are one row."""

    what: str
    source: str
    phase: str


@dataclass(slots=True)
class _Sums:
    """The times of a row so far; `kernels` has the measured seconds by name of the instruction."""

    predicted: float = 0.0
    measured: float = 0.0
    stages: set[int] = field(default_factory=set[int])
    kernels: dict[str, float] = field(default_factory=dict[str, float])


class _DifferenceTable:
    """Adds up times by row."""

    def __init__(self) -> None:
        self.sums: dict[_RowKey, _Sums] = {}

    def add(self, key: _RowKey, stage: int, predicted: float, measured: float, kernel: str = "") -> None:
        """Add times, the measured one of a kernel if it has a name."""
        sums = self.sums.setdefault(key, _Sums())
        sums.predicted += predicted
        sums.measured += measured
        sums.stages.add(stage)
        if kernel:
            sums.kernels[kernel] = sums.kernels.get(kernel, 0.0) + measured

    def rows(self) -> tuple[OpDifference, ...]:
        """Return the rows that take time, the largest difference first."""
        rows = (
            OpDifference(
                what=key.what,
                source=key.source,
                phase=key.phase,
                stages=tuple(sorted(sums.stages)),
                predicted_seconds=sums.predicted,
                measured_seconds=sums.measured,
                kernels=tuple(sorted(sums.kernels, key=lambda name: (-sums.kernels[name], name))),
            )
            for key, sums in self.sums.items()
            if sums.predicted or sums.measured
        )
        return tuple(sorted(rows, key=lambda row: -abs(row.seconds)))


class _OpShares:
    """The predicted shares of the time of a task, by row and by op, and the rows of its ops."""

    def __init__(self, step: StepGraph, task: TaskSpec, spans: Sequence[OpSpan]) -> None:
        self.step, self.task = step, task
        self.by_row: dict[_RowKey, float] = {}
        self.by_op: dict[OpPath, float] = {}
        shares = shared_seconds([(span.start, span.end) for span in spans])
        for span, share in zip(spans, shares, strict=True):
            key = self._collective(span.kind) if span.kind else self._row(span.path) if span.path else self._added()
            self.by_row[key] = self.by_row.get(key, 0.0) + share
            if span.path and not span.kind:
                self.by_op[span.path] = self.by_op.get(span.path, 0.0) + share

    def add(
        self, table: _DifferenceTable, predicted: TaskTime, measured: TaskTime, kernels: Iterable[KernelTime]
    ) -> None:
        """Add one run of the task."""
        stage, length, rest = measured.stage, _length(predicted), _length(measured)
        for key, share in self.by_row.items():
            table.add(key, stage, share * length, 0.0)
        for kernel in kernels:
            rest -= kernel.seconds
            for key, share in self._rows_of(kernel):
                table.add(key, stage, 0.0, share * kernel.seconds, kernel.name)
        key = _RowKey(what=_OUTSIDE, source="", phase=self.task.kind.value)
        # Rounding may make the predicted rest negative; a measured one says that kernels were counted twice.
        table.add(key, stage, length * max(0.0, 1.0 - sum(self.by_row.values())), rest)

    def _rows_of(self, kernel: KernelTime) -> Iterator[tuple[_RowKey, float]]:
        """Yield the rows to which a kernel belongs, with their shares of its time."""
        opcode = kernel.opcode.removesuffix("-start").removesuffix("-done")
        if opcode in _COLLECTIVES:
            yield self._collective(_COLLECTIVES[opcode]), 1.0
        elif not kernel.ops:
            copied = _RowKey(what=f"{kernel.opcode} that XLA adds", source="", phase=self.task.kind.value)
            yield self._added() if kernel.sums else copied, 1.0
        else:
            paths = [*map(self._product, kernel.ops)] if kernel.product else kernel.ops
            weights = [self.by_op.get(path, 0.0) for path in paths]
            total = sum(weights)
            weights = [weight / total for weight in weights] if total else [1.0, *[0.0] * (len(weights) - 1)]
            yield from ((self._row(path), share) for path, share in zip(paths, weights, strict=True) if share)

    def _product(self, path: OpPath) -> OpPath:
        """Return the place of the product whose kernel an op is part of, if it is one of those that have no kernel.

        XLA writes a product and the transpose of its result, or of an operand, as one product with one of their names.
        """
        graph = self.step.graph if len(path) == 1 else self.step.graph.op_at(path[:-2]).bodies[path[-2]]

        def producers(number: int) -> Iterable[int | None]:
            return (graph.producer[value] for value in graph.ops[number].operands)

        def consumers(number: int) -> Iterable[int | None]:
            return (op for value in graph.ops[number].results for op in graph.consumers[value])

        for neighbours in (producers, consumers):
            seen, waiting = set[int](), [path[-1]]
            while waiting:
                number = waiting.pop(0)
                if rule_of_op(graph, number).work_kind != "elementwise":
                    return (*path[:-1], number)
                # An op that is predicted to take time has a kernel of its own.
                if number not in seen and not self.by_op.get((*path[:-1], number)):
                    waiting += [other for other in neighbours(number) if other is not None]
                seen.add(number)
        return path

    def _collective(self, kind: str) -> _RowKey:
        return _RowKey(what=str(kind), source="", phase=self.task.kind.value)

    def _added(self) -> _RowKey:
        return _RowKey(what="adding to sums", source="", phase=self.task.kind.value)

    def _row(self, path: OpPath) -> _RowKey:
        """Return the row of an op; a loop's own work, its slices and copies, is a row of the loop."""
        op = self.step.graph.op_at(path)
        return _RowKey(what=_named(op), source=short_source(op.source), phase=self.step.phases[path[0]].value)


def _named(op: Op) -> str:
    return f"{op.primitive}: its slices and copies" if op.bodies else op.primitive
