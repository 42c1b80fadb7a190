"""A plan of several stages or micro-batches as a module of plain JAX: stage functions, and a loop that calls them.

    trace       the module traces the user's step at two sizes and inlines calls, which numbers its equations
    tasks       the numbers of the equations of each task of the plan                    `_Tables._fill_tasks`
    order       the order in which the plan launches tasks, of all stages and micro-batches
    shardings   of arguments, results, equations, what stages send each other, and sums  `_Tables.texts`

The module derives from the data flow what a task reads and returns. Each equation therefore runs where the plan wants
it or, if the plan has no such op, in a task that has its operands (`_complete`); values that depend on no sample are
made by every reader. On which stage an equation runs changes no result. That micro-batches add up to the full batch is
what `step.additivity` has proven of the same program (`step.merged_sizes`): a module whose loop would have other
equations than the plan's is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import programs_of
from alpa_lite.export.matched_equations import (
    Matches,
    equations_at_all_depths,
    known_inputs,
    matched,
    matched_constants,
    with_copies,
)
from alpa_lite.export.module_program import PIPELINE_TEMPLATE, module_of, traced_by_module
from alpa_lite.export.module_text import (
    check_arguments,
    filled_template,
    import_line,
    lines,
    not_said,
    partition,
    ranges,
    step_place,
    summary,
    tuple_text,
)
from alpa_lite.export.parted_loops import WITH_PARTS, WITHOUT_PARTS, parts_text
from alpa_lite.lower.plan_fits import as_planned
from alpa_lite.plan.instructions import InstructionKind, Program
from alpa_lite.plan.plan import OpPlacement, Plan
from alpa_lite.plan.program_builder import build_program
from alpa_lite.program.ir import Graph, Op
from alpa_lite.program.phases import LeafPart, Phase, StepGraph
from alpa_lite.rules.op_info import free_values
from alpa_lite.schedule import MessageDriven
from alpa_lite.step.planned_step import planned_step
from alpa_lite.step.split import StepPrograms, TracedStep
from alpa_lite.trace.trace import Traced


def pipeline_jax(plan: Plan, *, step: str | None = None) -> str:
    """Return a module of plain JAX that runs the step as a plan of several stages or micro-batches says.

    Raises `PlanError`, with the reason, for plans that it cannot say; see `plain_jax`.
    """
    programs = programs_of(plan)
    traced = programs.traced
    check_arguments(traced)
    made = _expressible(plan, programs)
    program = build_program(plan, made.step)
    arguments = _arguments(plan, made.step, program, traced)
    values = {
        "NUM_MICROBATCHES": str(plan.num_microbatches),
        "ARGUMENTS": lines(arguments),
        "IMPORT": import_line(traced, step),
        "DEFAULT": "" if step_place(traced, step) is None else " = _step",
        **WITHOUT_PARTS,
    }
    if made.step.loop_parts > 1:
        values |= WITH_PARTS
        values |= {"PARTS": parts_text(plan, programs, made, program, values)}
    flat = traced_by_module(module_of(values), plan, traced)
    tables = _Tables(plan, made, program, flat)
    values |= tables.texts()
    values |= {
        "SUMMARY": summary(plan),
        "NOT_SAID": not_said(plan, recomputes=tables.recomputes),
        "FINGERPRINT": flat.fingerprint(),
    }
    return filled_template(PIPELINE_TEMPLATE, values)


# ------------------------------------------------------------------------------------------------- what cannot be said


def _expressible(plan: Plan, programs: StepPrograms) -> TracedStep:
    """Return the step as planned. Raises `PlanError` for forms of plans that the module has no words for."""

    def refuse(what: str, instead: str) -> PlanError:
        return PlanError(f"{plan.name} cannot be exported as plain JAX: {what}. {instead}")

    if plan.update_every or plan.schedule.replicas(len(plan.stages)) or isinstance(plan.schedule, MessageDriven):
        raise refuse(
            f"under {plan.schedule} there are several updates in a step, or no fixed order of tasks",
            "Plan with a synchronous schedule, such as al.schedule.OneFOneB().",
        )
    made = as_planned(programs.with_equations(plan.num_microbatches, plan.loop_parts), plan)
    step = made.step
    if step.loop_results.averaged or made.runs or step.loop_results.runs:
        raise refuse(
            "its micro-batches are averaged, or take samples from several parts of the batch",
            'Plan with num_microbatches=1, or export to "stablehlo".',
        )
    if any(value.on_host for value in step.graph.values):
        raise refuse(
            "arrays wait in the memory of the host", "Plan with Auto(host_memory=False), or without offloading."
        )
    return made


# --------------------------------------------------------------------------------------------------------- the tables


def _arguments(plan: Plan, step: StepGraph, program: Program, traced: Traced) -> Iterator[str]:
    """Yield the entries of the table of arguments."""
    of_leaf = defaultdict[int, list[tuple[int, LeafPart]]](list)
    for v, part in zip(step.graph.inputs, step.input_parts, strict=True):
        of_leaf[part.leaf].append((v, part))
    for number, (name, leaf) in enumerate(zip(traced.inputs.names, traced.inputs.leaves, strict=True)):
        for v, part in of_leaf[number]:
            stage, spec = program.homes[v]
            dim = step.batch_dims[v] if plan.num_microbatches > 1 else None
            rows = "" if part.rows is None else f", {part.rows}"
            yield f"({name!r}, {tuple(leaf.shape)}, {dim}, {stage}, {partition(spec)}{rows}),"


@dataclass(slots=True, kw_only=True)
class _ListedTask:
    """A task with the numbers of its equations."""

    name: str
    stage: int
    in_loop: bool
    equations: set[int]


class _Tables:
    """The tables of a module but the arguments."""

    def __init__(self, plan: Plan, made: TracedStep, program: Program, flat: Any) -> None:
        self.plan, self.step, self.program, self.flat = plan, made.step, program, flat
        self.traced = programs_of(plan).traced
        num_leaves = len(self.traced.inputs.leaves)
        arguments = [n for n, part in enumerate(made.step.input_parts) if part.leaf < num_leaves]
        inputs = [*arguments, *matched_constants(made.constants, flat.constants)]
        further = _values_ahead(made, flat, inputs)
        self.ahead = _ancestors(flat, further)
        # The equations of loops that the plan has rewritten so that backward trips repeat forward trips.
        self.repeating: dict[Phase, set[int]] = defaultdict(set)
        self.found = self._matched([*inputs, *further])
        self.recomputes = True
        self.returned: dict[int, set[int]] = defaultdict(set)
        self.tasks: list[_ListedTask] = []
        self.order: list[tuple[int, int | None]] = []
        self._fill_tasks()

    def _matched(self, inputs: Sequence[int | None]) -> Matches:
        """Return the equations of the ops of the step as planned."""
        plan = self.plan
        traced = programs_of(plan).with_equations(plan.num_microbatches, plan.loop_parts).step
        planned = planned_step(traced, plan.layers_as_traced, plan.remat, host_optimizer=plan.host_optimizer)
        found = matched(traced.graph, self.flat, known_inputs(traced.graph, inputs))
        self.marked = dict(self._marked(traced.graph, found))
        found = with_copies(found, traced.graph, planned)
        written = {body for op in traced.graph.ops for body in op.bodies}
        for op in planned.graph.ops:
            if op.id in found.equations and not written.issuperset(op.bodies):
                self.repeating[planned.step.phases[op.id]].add(found.equations[op.id])
        return found

    def _marked(self, graph: Graph, found: Matches) -> Iterator[tuple[tuple[int, ...], Op]]:
        """Yield the ops that micro-batches run in another way than as they were traced, with their places."""
        for place, op in equations_at_all_depths(graph, found):
            if place is not None and (op.once or op.own_columns):
                yield place, op
            elif op.once or op.own_columns:
                raise PlanError(
                    f"{self.plan.name} cannot be exported as plain JAX: no equation of the jaxpr of "
                    f"{self.plan.function} is the {op.primitive} at {op.source}, which micro-batches run in another "
                    'way. Plan with num_microbatches=1, or export to "stablehlo".'
                )

    def texts(self) -> dict[str, str]:
        """Return the text of each table."""
        plan, stages = self.plan, range(len(self.plan.stages))
        meshes = (
            f"({dict(stage.mesh_shape.axis_sizes)!r}, {tuple(plan.first_device + d for d in stage.submesh.devices)!r}),"
            for stage in plan.stages
        )
        tasks = (
            f"Task({task.name!r}, {task.stage}, {task.in_loop}, {ranges(task.equations)!r})," for task in self.tasks
        )
        return {
            "MESHES": lines(meshes),
            "RESULTS": lines(self._results()),
            "DONATED": repr(tuple(self._donated())),
            "TASKS": lines(tasks),
            "RETURNED": repr({task: ranges(values) for task, values in self.returned.items()}),
            "ORDER": lines(_wrapped(f"({task}, {microbatch})," for task, microbatch in self.order)),
            "CONSTRAINTS": self._per_stage(self._constraints),
            "INSIDE": lines(f"{{{', '.join(self._inside(stage))}}}," for stage in stages),
            "RECEIVED": self._per_stage(self._received),
            "SUMS": self._per_stage(self._sums),
            "COMBINED": repr(self._combined()),
            "AHEAD": ranges(self.ahead),
            "ONCE": repr(self._marks("once")),
            "OWN_COLUMNS": repr(self._marks("own_columns")),
        }

    def _per_stage(self, table: Any) -> str:
        rows = []
        for stage in range(len(self.plan.stages)):
            grouped: dict[str, set[int]] = defaultdict(set)
            for number, text in table(stage).items():
                grouped[text].add(number)
            inner = "".join(f"\n        {key}: {ranges(numbers)!r}," for key, numbers in grouped.items())
            rows.append(f"{{{inner}\n    }}," if inner else "{},")
        return lines(rows)

    # -- tasks

    def _fill_tasks(self) -> None:
        """List the equations of each task, and the order in which tasks are launched."""
        equations, numbers, graph = self.found.equations, dict[int, int](), self.step.graph
        # What every task that reads it runs.
        free = free_values(graph).union(*(op.results for op in graph.ops if self.step.phases[op.id] is Phase.INVARIANT))
        for number, task in enumerate(self.program.tasks):
            listed = [equations[op] for op in task.ops if op in equations]
            listed += self._repeated(listed)
            known = [op for op in task.ops if op in equations or graph.ops[op].primitive == "optimization_barrier"]
            # An equation runs once in a task, and a loop as it was traced.
            self.recomputes &= len(set(listed)) == len(listed) and len(known) == len(task.ops)
            own = {equations[op] for op in task.ops if op in equations and free.isdisjoint(graph.ops[op].results)}
            own.update(self._repeated(own))
            if own:
                numbers[number] = len(self.tasks)
                self.tasks.append(
                    _ListedTask(name=task.name, stage=task.stage, in_loop=task.kind.in_loop, equations=own)
                )
        self.order = [
            (numbers[i.task], i.microbatch)
            for i in self.program.instructions
            if i.kind is InstructionKind.RUN and i.task in numbers
        ]
        self._complete()
        self._return_free()

    def _repeated(self, equations: Iterable[int]) -> list[int]:
        """Return the forward loops that run once more in a task with these equations.

        Backward loops of the plan repeat them trip by trip; here the whole loop is repeated before.
        """
        backward = self.repeating[Phase.BACKWARD].intersection(equations)
        read = {v for e in backward for v in self.flat.equations[e].operands if isinstance(v, int)}
        forward = sorted(self.repeating[Phase.FORWARD])
        return [e for e in forward if not read.isdisjoint(self.flat.equations[e].results)]

    def _complete(self) -> None:
        """Add equations without an op to the last task that makes an operand of theirs, of the loop or an update.

        Raises `PlanError` if micro-batches would run other equations than the plan has in its loop.
        """
        plan, flat, loop = self.plan, self.flat, _loop(self.flat, self.ahead)
        made_in = dict[int, int]()
        for number, task in enumerate(self.tasks):
            for e in task.equations:
                made_in |= dict.fromkeys((v for v in flat.equations[e].results if v not in made_in), number)
        listed = {e for task in self.tasks for e in task.equations} | self.ahead
        for e in sorted(_ancestors(flat, flat.outputs) - listed):
            operands = [v for v in flat.equations[e].operands if isinstance(v, int)]
            sources = [made_in[v] for v in operands if v in made_in]
            sources = [n for n in sources if self.tasks[n].in_loop == (e in loop) or plan.num_microbatches == 1]
            if sources:
                self.tasks[max(sources)].equations.add(e)
                made_in |= dict.fromkeys(flat.equations[e].results, max(sources))
        wrong = {e for t in self.tasks for e in t.equations - self.ahead if (e in loop) != t.in_loop}
        # Of these, what adds up samples is not known to be a sum over micro-batches.
        added = {e for t in self.tasks for e in t.equations & loop} - listed
        wrong |= {e for e in added if any(flat.batch_dim(v) is None for v in flat.equations[e].results)}
        if wrong and plan.num_microbatches > 1:
            raise PlanError(
                f"{plan.name} cannot be exported as plain JAX: {len(wrong)} equations of the jaxpr of {plan.function}, "
                f"such as {flat.equations[min(wrong)].primitive.name}, are no ops of the plan. Plan with "
                'num_microbatches=1, or export to "stablehlo".'
            )

    def _return_free(self) -> None:
        """Let an update of its stage return each result that depends on no sample, such as the next key."""
        listed = {e for task in self.tasks for e in task.equations}
        maker = {v: e for e, eqn in enumerate(self.flat.equations) for v in eqn.results}
        for value, buffer in zip(self.flat.outputs, self.program.outputs, strict=True):
            if value not in maker or maker[value] in listed:
                continue
            stage = buffer.stage
            updates = [n for n, task in enumerate(self.tasks) if task.stage == stage and not task.in_loop]
            if not updates:
                updates = [len(self.tasks)]
                name = f"stage {stage} update"
                self.tasks.append(_ListedTask(name=name, stage=stage, in_loop=False, equations=set()))
                self.order.append((updates[0], None))
            self.returned[updates[0]].add(value)

    def _donated(self) -> Iterator[int]:
        donated = self.traced.inputs.donated
        parts = enumerate(self.step.input_parts)
        return (n for n, part in parts if part.leaf < len(donated) and donated[part.leaf])

    # -- shardings

    def _results(self) -> Iterator[str]:
        names = self.traced.outputs.names
        for part, buffer, spec in zip(
            self.step.output_parts, self.program.outputs, self.program.output_specs, strict=True
        ):
            rows = "" if part.rows is None else f", {part.rows}"
            name = names[part.leaf]
            yield f"({buffer.stage}, {partition(spec)}{rows})," + (f"  # {name}" if name else "")

    def _constraints(self, stage: int) -> dict[int, str]:
        """Return equation → the shardings of its results."""
        found = dict[int, str]()
        for op, placement in self.plan.stages[stage].ops.items():
            e, results = self.found.equations.get(op), self.step.graph.ops[op].results
            if e is None:
                continue
            # By value, since a loop that repeats trips has other results than the one that was traced.
            pairs = zip(results, placement.results, strict=True)
            specs = {self.found.values.get(v): partition(spec) for v, spec in pairs if not spec.partial}
            written = [specs.get(v, "None") for v in self.flat.equations[e].results]
            if set(written) != {"None"}:
                found.setdefault(e, tuple_text(written))
        return dict(sorted(found.items()))

    def _inside(self, stage: int) -> Iterator[str]:
        """Yield the entries of the table of constraints in bodies, for kinds of ops that all lie alike."""
        graph, found = self.step.graph, defaultdict[Hashable, set[str]](set)
        for op, placement in self.plan.stages[stage].ops.items():
            for body, inside in zip(graph.ops[op].bodies, placement.bodies, strict=False):
                for kind, text in _placed_in(body, inside):
                    found[kind].add(text)
        yield from (f"{kind!r}: {texts.copy().pop()}" for kind, texts in found.items() if len(texts) == 1)

    def _received(self, stage: int) -> dict[int, str]:
        pairs = self.plan.stages[stage].inputs.items()
        found = {self.found.values[v]: partition(spec) for v, spec in pairs if v in self.found.values}
        return {v: text for v, text in sorted(found.items()) if text != "P()"}

    def _sums(self, stage: int) -> dict[int, str]:
        pairs = self.plan.stages[stage].accumulators.items()
        found = {
            self.found.values[v]: partition(each.resolved if each.stored.partial else each.stored)
            for v, each in pairs
            if v in self.found.values
        }
        return {v: text for v, text in sorted(found.items()) if text != "P()"}

    # -- micro-batches

    def _combined(self) -> dict[str, str]:
        grouped: dict[str, set[int]] = defaultdict(set)
        for v, how in self.step.loop_results.combined.items():
            if v in self.found.values:
                grouped[str(how.value)].add(self.found.values[v])
        return {how: ranges(values) for how, values in grouped.items()}

    def _marks(self, name: str) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Return the equations with marks of a kind → the positions or columns that have them."""
        found = dict[tuple[int, ...], tuple[int, ...]]()
        for place, op in self.marked.items():
            marks = getattr(op, name)
            if marks:
                found[place] = tuple(n for n, v in enumerate(op.operands) if v in marks) if name == "once" else marks
        return found


def _values_ahead(made: TracedStep, flat: Any, inputs: Sequence[int | None]) -> list[int | None]:
    """Return the values that are computed before the loop, in the order in which the step takes them."""
    if made.precomputed is None:
        return []
    graph = made.precomputed.program.graph
    places = {part.leaf: n for n, part in enumerate(made.step.input_parts)}
    found = matched(
        graph, flat.at_full_batch(), known_inputs(graph, [inputs[places[leaf]] for leaf in made.precomputed.leaves])
    )
    return [found.values.get(v) for v in graph.outputs]


def _ancestors(flat: Any, values: Iterable[int | None]) -> set[int]:
    """Return the equations that values depend on."""
    wanted, needed = {v for v in values if v is not None}, set[int]()
    for e in reversed(range(len(flat.equations))):
        if not wanted.isdisjoint(flat.equations[e].results):
            needed.add(e)
            wanted.update(v for v in flat.equations[e].operands if isinstance(v, int))
    return needed


def _loop(flat: Any, ahead: Set[int]) -> set[int]:
    """Return the equations of the loop over micro-batches: those that touch samples, and those between them."""
    touch, after = set[int](), set[int]()
    for e, eqn in enumerate(flat.equations):
        values = [v for v in (*eqn.operands, *eqn.results) if isinstance(v, int)]
        if e not in ahead and any(flat.batch_dim(v) is not None for v in values):
            touch.add(e)
        if e in touch or not after.isdisjoint(v for v in values):
            after.update(eqn.results)
    between, wanted = set(touch), set[int]()
    for e in reversed(range(len(flat.equations))):
        eqn = flat.equations[e]
        if e in touch or (not wanted.isdisjoint(eqn.results) and not after.isdisjoint(eqn.results)):
            between.add(e)
            wanted.update(v for v in eqn.operands if isinstance(v, int))
    return between


def _placed_in(body: Graph, placements: Mapping[int, OpPlacement]) -> Iterator[tuple[Hashable, str]]:
    """Yield the kind of each op of a body, at any depth, and the shardings of its results."""
    for op in body.ops:
        placement = placements.get(op.id)
        if placement is None:
            continue
        for inner, inside in zip(op.bodies, placement.bodies, strict=False):
            yield from _placed_in(inner, inside)
        written = tuple_text("None" if spec.partial else partition(spec) for spec in placement.results)
        yield (op.primitive, tuple(value.shape for value in body.results(op))), written


def _wrapped(items: Iterable[str]) -> Iterator[str]:
    """Yield items in lines of at most 110 characters."""
    line = ""
    for item in items:
        if line and len(line) + 1 + len(item) > 110:
            yield line
            line = ""
        line = f"{line} {item}" if line else item
    if line:
        yield line
