"""The ops and collectives inside each task of a plan, on the clock of the task.

A task is run once on estimators, as for its price, and their streams are laid out as the cost model simulates them
(`cost_models.overlap`). Loops are drawn trip by trip, unless there are very many. Times are fractions of the task: a
run of it may take longer, where collectives of other tasks slow it down.

Only a plan that still has its step (`Plan.request`) has ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.plan.estimator import Estimator
from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.program_builder import tasks_of
from alpa_lite.plan.simulation import pricer_of
from alpa_lite.plan.task_prices import estimate
from alpa_lite.plan.task_specs import TaskSpec
from alpa_lite.plan.walk import Application, Walk
from alpa_lite.program.ir import Graph, Op, OpPath, Value, Wiring
from alpa_lite.sharding.specs import Move, Spec
from alpa_lite.text import short_source, show_count
from cost_models.overlap import StreamTask
from cost_models.work import Work

MAX_TRIPS = 32
"""The greatest number of trips of a loop that are drawn one by one; longer loops are one op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLabel:
    """What there is to say about an op or a collective, apart from its time.

    what          the primitive, the kind of collective with its axes, or the loop with its trips
    source        the user's source line, shortened
    array         shape and spec of the first result; of a collective, of the array that it moves
    collective    whether it runs on the communication stream
    """

    what: str
    source: str
    array: str
    collective: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpan:
    """One op in a task.

    start, end    fractions of the task
    path          the place of the op; of a collective, of the op that reads what it moves; () of a collective at the
                  end of a task, and of an addition to a sum over micro-batches
    kind          the kind of a collective; "" for other ops
    """

    label: OpLabel
    start: float
    end: float
    path: OpPath
    kind: str = ""


OpTracks = Mapping[tuple[int, str], tuple[tuple[OpSpan, ...], ...]]
"""For each stage and kind of bar (`text.timeline.Bar.kind`) the ops of each of its tasks, in order."""


def op_spans(plan: Plan) -> OpTracks:
    """Return the ops of all tasks of a plan; nothing for a plan without its step."""
    if plan.request is None:
        return {}
    found: dict[tuple[int, str], list[tuple[OpSpan, ...]]] = {}
    for task, recorders in _recorded(plan, plan.request):
        by_kind: dict[str, list[_Recorder]] = {}
        for recorder in recorders:
            # A task of several passes has a bar for each of them.
            several = task.kind in (TaskRole.STEP, TaskRole.FORWARD_BACKWARD)
            kind = recorder.estimator.phase if several else task.kind.value
            by_kind.setdefault(kind, []).append(recorder)
        for kind, members in by_kind.items():
            found.setdefault((task.stage, kind), []).append(tuple(_task_spans(members, MAX_TRIPS)))
    return {key: tuple(tracks) for key, tracks in found.items()}


def task_op_spans(plan: Plan, request: PlanRequest) -> tuple[tuple[OpSpan, ...], ...]:
    """Return the ops of each task of the plan's program, in its order; an op in a loop has one span for all trips."""
    return tuple(tuple(_task_spans(recorders, 1)) for _, recorders in _recorded(plan, request))


def _recorded(plan: Plan, request: PlanRequest) -> Iterator[tuple[TaskSpec, list[_Recorder]]]:
    """Yield each task with the recorders of its parts."""
    repricing = Repricing.of(plan, request)
    pricers = [pricer_of(plan, stage, repricing.request.cost_model_for) for stage in range(len(plan.stages))]
    for task in tasks_of(plan, repricing.step):
        recorders: list[_Recorder] = []
        machine_of = _collect(recorders)
        estimate(task, repricing.step, plan.stages[task.stage].ops, pricers[task.stage], machine_of)
        yield task, recorders


def _collect(recorders: list[_Recorder]) -> Callable[[Estimator], _Recorder]:
    def machine_of(estimator: Estimator) -> _Recorder:
        recorders.append(_Recorder(estimator))
        return recorders[-1]

    return machine_of


def _task_spans(parts: Sequence[_Recorder], max_trips: int) -> Iterator[OpSpan]:
    """Yield the spans of parts that run one after the other, scaled to the whole of them; see `_Recorder.spans`."""
    ends = [part.seconds(part.top) for part in parts]
    total, begin = sum(ends), 0.0
    for part, seconds in zip(parts, ends, strict=True):
        if total > 0:
            yield from part.spans(part.top, begin / total, (begin + seconds) / total, max_trips)
        begin += seconds


class _Mark(NamedTuple):
    """What a stream task is: its label, and the path and the kind of collective of its span."""

    label: OpLabel
    path: OpPath
    kind: str = ""


@dataclass(kw_only=True)
class _Labelled:
    """The marks of a list of stream tasks, by their number there; loops have those of their bodies too."""

    tasks: Sequence[StreamTask]
    marks: dict[int, _Mark] = field(default_factory=dict[int, _Mark])
    bodies: dict[int, tuple[float, tuple[int, ...]]] = field(default_factory=dict[int, "tuple[float, tuple[int, ...]]"])


class _Recorder:
    """A machine that prices ops as its estimator does, and labels the stream tasks that this appends."""

    def __init__(self, estimator: Estimator) -> None:
        self.estimator = estimator
        # By the identity of the estimator's list, which is another one inside of each body. Held, so that no other
        # list gets its address.
        self.lists: dict[int, _Labelled] = {}
        self.top = self._current()
        # The bodies that the walk is in, and the place of the op that they belong to.
        self.around: tuple[Sequence[Graph], OpPath] = (), ()

    def _current(self) -> int:
        tasks = self.estimator.tasks
        self.lists.setdefault(id(tasks), _Labelled(tasks=tasks))
        return id(tasks)

    def literal(self, value: Value) -> int:
        """Price a scalar, which is free."""
        return self.estimator.literal(value)

    def reshard(self, array: int, value: Value, steps: tuple[Move, ...], op: Op | None) -> int:
        """Price the moves and label their collectives."""
        here = self.lists[self._current()]
        before = len(here.tasks)
        made = self.estimator.reshard(array, value, steps, op)
        moves = [step for step in steps if not step.is_local]
        for number, step in zip(range(before, len(here.tasks)), moves, strict=True):
            label = _collective(f"{step.kind} over {'·'.join(step.axes)}", op, _shape(value))
            here.marks[number] = _Mark(label=label, path=(), kind=step.kind)
        return made

    def apply(self, application: Application, operands: list[int]) -> list[int]:
        """Price one op and label its kernel and its own collectives."""
        here, op = self.lists[self._current()], application.op
        before = len(here.tasks)
        made = self.estimator.apply(application, operands)
        array, path = _result(application), self._path(application)
        label = OpLabel(what=op.primitive, source=short_source(op.source), array=array, collective=False)
        here.marks[before] = _Mark(label=label, path=path)
        own = range(before + 1, len(here.tasks))
        # The estimator lists collectives in the order of their tasks.
        uses = self.estimator.collectives[len(self.estimator.collectives) - len(own) :]
        for number, use in zip(own, uses, strict=True):
            label = _collective(f"communication of {op.primitive}", op, array)
            here.marks[number] = _Mark(label=label, path=path, kind=use.kind)
        return made

    def add_to_sum(self, graph: Graph, value: int, stored: Spec, made: int) -> Work:
        """Price an addition to a sum over micro-batches and label its kernel."""
        here, producer = self.lists[self._current()], graph.producer[value]
        number = len(here.tasks)
        work = self.estimator.add_to_sum(graph, value, stored, made)
        if len(here.tasks) > number and producer is not None:
            source, part = short_source(graph.ops[producer].source), graph.values[value]
            label = OpLabel(
                what="add to the sum over micro-batches",
                source=source,
                array=f"{_shape(part)} as {stored}",
                collective=False,
            )
            here.marks[number] = _Mark(label=label, path=())
        return work

    def _path(self, application: Application) -> OpPath:
        """Return the place of an op. Nothing tells two bodies apart that are one graph: both count as the first."""
        bodies, outer = self.around
        number = next((i for i, body in enumerate(bodies) if body is application.graph), None)
        return (application.op.id,) if number is None else (*outer, number, application.op.id)

    def control_flow(self, application: Application, operands: list[int], wiring: Wiring, walk: Walk[int]) -> list[int]:
        """Price a loop or branch, whose body runs on this machine, and keep the labels of the body with it."""
        here, op = self.lists[self._current()], application.op
        known, around, path = set(self.lists), self.around, self._path(application)
        self.around = op.bodies, path
        made = self.estimator.control_flow(application, operands, wiring, walk)
        self.around = around
        number = len(here.tasks) - 1
        inside = {body for each in self.lists.values() for _, bodies in each.bodies.values() for body in bodies}
        bodies = tuple(key for key in self.lists if key not in known and key not in inside)
        trips = f", {show_count(wiring.trips, 'trip')}" if op.primitive == "scan" else ""
        label = OpLabel(
            what=f"{op.primitive}{trips}", source=short_source(op.source), array=_result(application), collective=False
        )
        here.marks[number] = _Mark(label=label, path=path)
        here.bodies[number] = (wiring.trips, bodies)
        return made

    def seconds(self, key: int) -> float:
        """Return the seconds of a list of stream tasks."""
        return max((end for _, end in self._laid_out(key)), default=0.0)

    def _laid_out(self, key: int) -> Sequence[tuple[float, float]]:
        return self.estimator.laid_out(self.lists[key].tasks)

    def spans(self, key: int, begin: float, end: float, max_trips: int) -> Iterator[OpSpan]:
        """Yield the spans of a list of stream tasks, scaled to the given range.

        Loops of more than `max_trips` trips are one span; with `max_trips` of 1, the ops of one trip stand for all.
        """
        here, total = self.lists[key], self.seconds(key)
        if total <= 0:
            return
        scale = (end - begin) / total
        for number, (start, stop) in enumerate(self._laid_out(key)):
            mark = here.marks.get(number)
            if mark is None or stop <= start:
                continue
            first, last = begin + start * scale, begin + stop * scale
            trips, bodies = here.bodies.get(number, (0.0, ()))
            if bodies and (max_trips == 1 or trips <= max_trips):
                drawn = 1 if max_trips == 1 else max(1, round(trips))
                yield from self._trips(bodies, drawn, (first, last), max_trips)
            else:
                yield OpSpan(label=mark.label, start=first, end=last, path=mark.path, kind=mark.kind)

    def _trips(
        self, bodies: Sequence[int], trips: int, range_: tuple[float, float], max_trips: int
    ) -> Iterator[OpSpan]:
        """Yield the spans of each trip of a loop; of branches, one after the other."""
        each, (first, last) = [self.seconds(body) for body in bodies], range_
        if not sum(each):
            return
        for trip in range(trips):
            at = first + (last - first) * trip / trips
            for body, seconds in zip(bodies, each, strict=True):
                then = at + (last - first) / trips * seconds / sum(each)
                yield from self.spans(body, at, then, max_trips)
                at = then


def _collective(what: str, op: Op | None, array: str) -> OpLabel:
    return OpLabel(what=what, source=short_source(op.source) if op else "", array=array, collective=True)


def _shape(value: Value) -> str:
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"


def _result(application: Application) -> str:
    """Return shape and spec of the first result of an op."""
    if not application.op.results:
        return ""
    value, specs = application.graph.values[application.op.results[0]], application.placement.results
    return f"{_shape(value)} as {specs[0]}" if specs else _shape(value)
