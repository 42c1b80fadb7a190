"""Explain a part of a plan: a parameter, a stage, a layer, an op, or a line of the user's code.

stage 1                          its layers, devices, times, memory and collectives
layer 3                          its stage, the arguments stored with it, the number of its ops
op 12                            its layer, the split of its factors, the specs of its results
layers/0/mlp/w, mlp/w            a parameter: spec, stage, share per device, collectives over the same mesh axes
model.py:31, (attention)         the collectives that arise on a source line, and the op that decides there

If the plan holds its request (`Plan.request`), and thus the step, each also lists the alternatives of the decision with
their cost (`alternatives`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from alpa_lite.errors import PlanError
from alpa_lite.inspection.text.groups import (
    Argument,
    ArgumentGroup,
    Arguments,
    CollectiveGroup,
    arguments_of,
    group_arguments,
    group_collectives,
)
from alpa_lite.inspection.text.tables import groups_table, render
from alpa_lite.inspection.why.alternatives import (
    Alternatives,
    of_layer,
    of_op,
    of_parameters,
    of_stage,
    without_memory_limit,
)
from alpa_lite.inspection.why.repricing import Repricing
from alpa_lite.intra_op.stage import Key, Placed
from alpa_lite.plan.plan import CollectiveUse, Plan, StageCost
from alpa_lite.program.ir import Graph, Op
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.step.recomputation import Remat
from alpa_lite.text import (
    short_source,
    show_bytes,
    show_count,
    show_first,
    show_layers,
    show_numbers,
    show_percent,
    show_seconds,
    show_usable,
)
from cost_models.checks import printable


def deciding_ops(repricing: Repricing, wanted: str) -> dict[int, Key]:
    """Return, by stage number, the op with the most work among those of a source line that have a choice.

    Only stages whose op is equal to the first stage's are returned, since their alternatives are priced together.
    """
    found: dict[int, Key] = {}
    for number, stage in enumerate(repricing.stages):
        choosing = (k for k, p in stage.builder.placed.items() if isinstance(p, Placed) and len(p.options) > 1)
        sources = {key: stage.op(key)[1].source for key in choosing}
        fitting = [key for key, source in sources.items() if wanted in source or wanted in short_source(source)]
        if fitting:
            # Elementwise ops on the line mostly follow its contraction, which has the most work.
            found[number] = max(fitting, key=lambda key: _work_of(*stage.op(key)))
    if not found:
        return {}
    # Alternatives are priced for all of these ops together, so they must have the same placements.
    kinds = {number: _kind_of(*repricing.stages[number].op(key)) for number, key in found.items()}
    return {number: key for number, key in found.items() if kinds[number] == kinds[min(kinds)]}


def _work_of(graph: Graph, op: Op) -> float:
    return rule_of_op(graph, op.id).flops


def _kind_of(graph: Graph, op: Op) -> object:
    return op.primitive, op.source, [(v.shape, v.dtype) for v in (*graph.operands(op), *graph.results(op))]


_NUMBERED = re.compile(r"^(?P<what>stage|layer|op)\s+(?P<number>\d+)$")
_MAX_COLLECTIVES = 12
_MAX_HINTS = 6

_NEARLY_FULL = 0.8
"""The share of a device's memory from which on the cost of the memory limit is computed."""

_NEEDS_THE_STEP = (
    "What else it could be, and at what cost, is priced with the step: replay the plan with"
    " al.plan(step, *args, planner=plan), or give alpa-lite explain the option --step."
)


PRICING_SECONDS = 3.0
"""The time in which alternatives are priced; those that are left then are counted, and not priced."""


class SubjectKind(StrEnum):
    """The kinds of parts of a plan that can be explained."""

    STAGE = "stage"
    LAYER = "layer"
    OP = "op"
    PARAMETER = "parameter"
    SOURCE = "source"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The explanation of a subject.

    subject         the part of the plan that is explained
    kind            the kind of this part
    sentences       the explanation
    collectives     the collectives related to it
    alternatives    the other values of the decision; None if there is no choice, or the plan has no request
    """

    subject: str
    kind: SubjectKind
    sentences: tuple[str, ...]
    collectives: tuple[CollectiveGroup, ...] = ()
    alternatives: Alternatives | None = None

    def __str__(self) -> str:
        table = groups_table("Collectives", self.collectives, _MAX_COLLECTIVES)
        more = () if self.alternatives is None else self.alternatives.sentences
        lines = (self.subject, *(f"  {sentence}" for sentence in (*self.sentences, *more)))
        tables = [] if self.alternatives is None else [self.alternatives.table()]
        tables += [table] if table.rows else []
        return render((*lines, ""), tables) if tables else render(lines)

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        fields = ("kind", "axis", "phase", "source", "stages", "count", "bytes", "seconds")
        return {
            "subject": self.subject,
            "kind": self.kind,
            "sentences": list(self.sentences),
            "collectives": [{name: getattr(group, name) for name in fields} for group in self.collectives],
            "alternatives": None if self.alternatives is None else self.alternatives.to_json(),
        }


def explain(plan: Plan, subject: str) -> str:
    """Return the explanation as text. Raises `PlanError`, with close matches, for an unknown subject."""
    return str(explanation(plan, subject))


def explanation(plan: Plan, subject: str) -> Explanation:
    """Return the explanation as data. Raises `PlanError`, with close matches, for an unknown subject."""
    wanted = printable(subject)  # as names in plans are
    if plan.request is None:
        return _explanation(plan, wanted)
    with plan.request.progress.during("explain", f"explaining {wanted}"):
        return _explanation(plan, wanted)


def _explanation(plan: Plan, wanted: str) -> Explanation:
    repricing = Repricing.of(plan, plan.request, seconds=PRICING_SECONDS) if plan.request is not None else None
    # Numbers first: a path or a line may contain any word, and `stage 1` should not be searched for in them.
    if (match := _NUMBERED.match(wanted.strip())) is not None:
        explained = {"stage": _explain_stage, "layer": _explain_layer, "op": _explain_op}[match["what"]]
        return _with_hint(plan, explained(plan, int(match["number"]), repricing))
    arguments = arguments_of(plan)
    if (group := _find_group(arguments, wanted)) is not None:
        return _with_hint(plan, _explain_parameter(plan, arguments, group, repricing))
    wanted = wanted.strip()
    uses = [
        use
        for use in plan.prediction.collectives
        if wanted and wanted in f"{use.kind} {use.source} {short_source(use.source)}"
    ]
    # An op without a collective may decide too, as one whose operands are moved elsewhere.
    keys = deciding_ops(repricing, wanted) if repricing is not None and wanted else {}
    if uses or keys:
        return _with_hint(plan, _explain_source(plan, wanted, uses, repricing, keys))
    raise PlanError(_unknown(plan, arguments, wanted))


def _with_hint(plan: Plan, found: Explanation) -> Explanation:
    """Add a sentence on how to get alternatives if the plan has no request."""
    return found if plan.request is not None else replace(found, sentences=(*found.sentences, _NEEDS_THE_STEP))


def _explain_stage(plan: Plan, number: int, repricing: Repricing | None) -> Explanation:
    if number >= len(plan.stages):
        raise PlanError(f"There is no stage {number}: this plan has {_stage_names(plan)}.")
    stage, cost = plan.stages[number], plan.stages[number].cost
    uses = [use for use in plan.prediction.collectives if use.stage == number]
    # Times of forward and backward are per run of the task.
    per = "per micro-batch" if plan.num_microbatches > 1 else "per step"
    count, seconds = sum(use.count for use in uses), sum(use.seconds * use.count for use in uses)
    return Explanation(
        subject=f"stage {number}",
        kind=SubjectKind.STAGE,
        sentences=(
            f"{show_layers(*stage.layers).capitalize()} of {plan.num_layers}, on {stage.submesh} of "
            f"{plan.cluster.name} as {stage.mesh_shape}.",
            f"Forward {show_seconds(cost.forward_seconds)} and backward {show_seconds(cost.backward_seconds)} {per}, "
            f"update {show_seconds(cost.update_seconds)} per step.",
            f"{show_count(count, 'collective')} per step, {show_seconds(seconds)} in all.",
            *_memory_sentences(plan, number, cost),
            *_limit_sentences(plan, number, repricing),
        ),
        collectives=group_collectives(uses),
        alternatives=None if repricing is None else of_stage(repricing, number),
    )


def _limit_sentences(plan: Plan, number: int, repricing: Repricing | None) -> list[str]:
    """Return a sentence on the cost of a stage's memory limit, computed only if the stage is nearly full."""
    # Far below its memory a stage would hardly gain from more, and the question costs a solve.
    nearly = _NEARLY_FULL * plan.capacity_bytes(number)
    if repricing is None or plan.prediction.peak_bytes[number] < nearly:
        return []
    return [*filter(None, [without_memory_limit(repricing, number)])]


def _explain_layer(plan: Plan, number: int, repricing: Repricing | None) -> Explanation:
    if number >= plan.num_layers:
        raise PlanError(f"There is no layer {number}: this plan has layer 0 to layer {plan.num_layers - 1}.")
    home = plan.stage_of_layer(number)
    stage, count = plan.stages[home], plan.op_layers.count(number)
    sentences = [
        f"{show_count(count, 'op')} on stage {home} ({stage.submesh}, {stage.mesh_shape}), which has "
        f"{show_layers(*stage.layers)}."
    ]
    policy = plan.remat[number] if plan.remat else None
    if policy is Remat.OFFLOAD:
        sentences.append("What its backward pass reads waits in the memory of the host, or is computed again.")
    elif policy is not None:
        sentences.append(f"In the backward pass it computes again: {policy}.")
    if repricing is not None:
        graph = repricing.step.graph
        # Only what is stored with the layer.
        mine = [graph.values[v] for v, h in zip(graph.inputs, plan.input_layers, strict=True) if h == number]
        named = [value for value in mine if value.name in stage.specs]
        listed = show_first([f"{value.name} {stage.specs[value.name]}" for value in named], _MAX_HINTS)
        sentences.append(f"{show_count(len(named), 'argument')} live in it{f': {listed}' if listed else ''}.")
    found = None if repricing is None else of_layer(repricing, number)
    if repricing is not None and found is None:
        sentences.append("It is not at a border of its stage with others in it: no single layer can move from here.")
    return Explanation(
        subject=f"layer {number}", kind=SubjectKind.LAYER, sentences=tuple(sentences), alternatives=found
    )


def _memory_sentences(plan: Plan, number: int, cost: StageCost) -> tuple[str, ...]:
    held = plan.schedule.in_flight(number, len(plan.stages), plan.num_microbatches)
    peak, capacity = plan.prediction.peak_bytes[number], plan.capacity_bytes(number)
    usable = show_usable(capacity, plan.reserved_bytes(number))
    return (
        f"Peak memory per device {show_bytes(peak)}, {show_percent(peak / capacity)} of {usable}:",
        f"{show_bytes(cost.state_bytes)} of arguments, {show_bytes(cost.accumulator_bytes)} of gradient sums, "
        f"{held} × {show_bytes(cost.activation_bytes)} of saved values ({show_count(held, 'micro-batch')} in flight), "
        f"{show_bytes(cost.temporary_bytes)} of temporaries.",
        *_others_on_its_devices(plan, number),
    )


def _others_on_its_devices(plan: Plan, number: int) -> list[str]:
    others = next(stages for stages in plan.stages_together if number in stages)
    listed = ", ".join(str(stage) for stage in others if stage != number)
    return [f"The peak counts what its devices hold of stage {listed} too."] if listed else []


def _explain_op(plan: Plan, number: int, repricing: Repricing | None) -> Explanation:
    # Invariant ops are repeated on every stage that reads their results.
    homes = [(i, stage) for i, stage in enumerate(plan.stages) if number in stage.ops]
    if not homes:
        there = show_numbers(op for stage in plan.stages for op in stage.ops)
        raise PlanError(f"There is no op {number} in this plan: {f'its ops are {there}' if there else 'it has none'}.")
    layer = plan.op_layers[number] if number < len(plan.op_layers) else None
    where = f"It belongs to layer {layer}." if layer is not None else "It is repeated wherever its result is read."
    sentences = [where]
    if repricing is not None:
        op = repricing.step.graph.ops[number]
        sentences.insert(0, f"{op.primitive}{f' at {short_source(op.source)}' if op.source else ''}.")
    for index, stage in homes:
        placement = stage.ops[number]
        split = [f"factor {i} over {' × '.join(axes)}" for i, axes in enumerate(placement.factors) if axes]
        splits = f"it splits {', '.join(split)}" if split else "it is not split"
        sums = f"its operands are partial sums over {', '.join(placement.partial)}; " if placement.partial else ""
        results = ", ".join(map(str, placement.results)) or "none"
        sentences.append(f"On stage {index} ({stage.mesh_shape}) {splits}; {sums}results {results}.")
    # Of a repeated op the first stage decides which alternatives are priced.
    found = None if repricing is None else of_op(repricing, {homes[0][0]: (0, number)})
    if repricing is not None and found is None:
        sentences.append("It has no choice of its own: loops are decided by what is in them, scalars by nothing.")
    return Explanation(subject=f"op {number}", kind=SubjectKind.OP, sentences=tuple(sentences), alternatives=found)


def _explain_parameter(
    plan: Plan, arguments: Arguments, group: ArgumentGroup, repricing: Repricing | None
) -> Explanation:
    first, spec = group.members[0], group.spec
    same = f"{show_count(len(group.members), 'array')} of this path" if len(group.members) > 1 else "The array"
    axes = sorted(spec.axes)
    sentences = [
        f"Spec {spec}: "
        + (f"split over {' and '.join(axes)}." if axes else "every device of its stage holds all of it.")
    ]
    sentences.extend(_share_sentences(plan, group))
    sentences.extend(_optimizer_sentences(arguments, first))
    uses = [use for use in plan.prediction.collectives if use.stage in group.stages]
    sentences.append(_axis_sentence(plan, group, uses))
    # Gradients are summed over the axes that do not split the array, so collectives of the update count as well.
    related = [use for use in uses if not axes or spec.axes & set(use.axis.split("·")) or use.phase == "update"]
    names = {number: [m.name for m in group.members if m.stage == number] for number in group.stages}
    return Explanation(
        subject=group.pattern if len(group.members) == 1 else f"{group.pattern} ({same})",
        kind=SubjectKind.PARAMETER,
        sentences=tuple(sentences),
        collectives=group_collectives(related),
        alternatives=None if repricing is None else of_parameters(repricing, names),
    )


def _share_sentences(plan: Plan, group: ArgumentGroup) -> list[str]:
    """Return what each device stores of an array, one sentence for all stages that store the same share."""
    # A model of many equal layers has many stages that store the same share: one sentence for them.
    alike: dict[tuple[str, str], list[int]] = {}
    for number in group.stages:
        member = next(m for m in group.members if m.stage == number)
        # Shapes are not in plans of earlier versions, while shares always are.
        share = f"1/{member.num_shards} of the bytes" if member.num_shards > 1 else "all bytes"
        if member.shape is not None and member.block is not None:
            share += f", {show_bytes(member.block.bytes)} of {member.shape}"
        alike.setdefault((str(plan.stages[number].mesh_shape), share), []).append(number)
    found: list[str] = []
    for (mesh, share), numbers in alike.items():
        where = f"Stages {show_numbers(numbers)} ({mesh} each)"
        if len(numbers) == 1:
            stage = plan.stages[numbers[0]]
            where = f"Stage {numbers[0]} ({show_layers(*stage.layers)}, {stage.submesh}, {mesh})"
        found.append(f"{where}: each device holds {share}.")
    return found


def _axis_sentence(plan: Plan, group: ArgumentGroup, uses: Sequence[CollectiveUse]) -> str:
    """Return the cost of collectives over the mesh axes that split the array, and over the others, on its stages."""
    seconds: dict[str, float] = {}
    for use in uses:
        # Per use and run: `count` is the number of runs per step.
        seconds[use.axis] = seconds.get(use.axis, 0.0) + use.seconds * use.count
    sizes = {axis: size for number in group.stages for axis, size in plan.stages[number].mesh_shape.axis_sizes.items()}
    does = {axis: "splits it" if axis in group.spec.axes else "copies it" for axis in sizes}
    parts = [
        f"{axis}={size} ({does[axis]}): {show_seconds(seconds.get(axis, 0.0))}"
        for axis, size in sizes.items()
        if size > 1
    ]
    if not parts:
        return "One device per stage: no collectives."
    return f"Collectives per step on its stages, by mesh axis: {', '.join(parts)}."


def _optimizer_sentences(arguments: Arguments, first: Argument) -> list[str]:
    owned = [arguments.by_name[name] for name, owner in arguments.owners.items() if owner == first.name]
    if not owned:
        return []
    listed = ", ".join(f"{a.name} {a.spec}" for a in owned)
    return [f"Optimizer state: {listed}."]


def _explain_source(
    plan: Plan,
    wanted: str,
    uses: Sequence[CollectiveUse],
    repricing: Repricing | None,
    keys: Mapping[int, Key],
) -> Explanation:
    groups = group_collectives(uses)
    # Over all stages, as their devices work at the same time; the share of the step can be above one.
    total = sum(group.seconds for group in groups)
    moved = sum(group.bytes for group in groups)
    lines = sorted({short_source(use.source) for use in uses if use.source})
    found, chosen = None, list[str]()
    if repricing is not None and keys:
        # In all of these stages together, as a change of the line would change all.
        found = of_op(repricing, keys)
        # The ops of all these stages are equal, so that the first describes all.
        number, key = next(iter(keys.items()))
        _, op = repricing.stages[number].op(key)
        name = f"op {op.id}" if key[0] == 0 else "in a loop"
        where = f"{name}, stage {show_numbers(keys)}"
        chosen = [f"What decides there is {op.primitive} at {short_source(op.source)} ({where})."]
    return Explanation(
        subject=wanted,
        kind=SubjectKind.SOURCE,
        sentences=(
            f"{show_count(sum(g.count for g in groups), 'collective')} per step, {show_bytes(moved)}, "
            f"{show_seconds(total)} of a step of {show_seconds(plan.prediction.step_seconds)}.",
            *([f"Arising on {show_count(len(lines), 'line')}: {', '.join(lines[:_MAX_HINTS])}."] if lines else []),
            *chosen,
        ),
        collectives=groups,
        alternatives=found,
    )


def _find_group(arguments: Arguments, wanted: str) -> ArgumentGroup | None:
    """Return the arguments that a path, a suffix or part of one, or a pattern with `*` names; None if there are none.

    Raises `PlanError` if it names several with different specs.
    """
    if wanted in arguments.by_name:
        return group_arguments([arguments.by_name[wanted]])[0]
    if not wanted:
        return None
    pattern = wanted.replace("[*]", "[[]*]")  # the parts of a stack, as they are printed
    tests = (
        # From the strictest test to the loosest; the first that any path passes decides.
        lambda name: fnmatchcase(name, pattern) or fnmatchcase(name, f"*/{pattern}"),
        lambda name: name.endswith(f"/{wanted}"),
        lambda name: f"/{wanted}/" in f"/{name}/",
        lambda name: wanted in name,
    )
    # Parameters first: a part of a path mostly means one of them, and its optimizer state ends alike.
    for candidates in (arguments.plain, arguments.optimizer):
        for test in tests:
            found = group_arguments(a for a in candidates if test(a.name))
            if len(found) == 1:
                return found[0]
            if found:
                listed = show_first([f"{group.pattern} {group.spec}" for group in found], _MAX_HINTS)
                raise PlanError(f"{wanted!r} names several arrays: {listed}. Give one path.")
    return None


def _unknown(plan: Plan, arguments: Arguments, wanted: str) -> str:
    names = [group.pattern for group in group_arguments(arguments.all)]
    # Reversed, so that of several paths with one part the first is named.
    parts = {part: name for name in reversed(names) for part in name.split("/")}
    lines = sorted({short_source(use.source) for use in plan.prediction.collectives if use.source})
    last = wanted.rsplit("/", 1)[-1]
    close = [
        *difflib.get_close_matches(wanted, names, n=3, cutoff=0.5),
        *(parts[part] for part in difflib.get_close_matches(last, list(parts), n=3, cutoff=0.6)),
        *difflib.get_close_matches(wanted, lines, n=3, cutoff=0.4),
    ]
    known = list(dict.fromkeys(close or names[:3]))[:_MAX_HINTS]
    label = "Close to it" if close else "For example"
    return (
        f"The plan of {plan.function!r} has no argument, stage, layer, op or line that {wanted!r} names. "
        f"{label}: {', '.join(known) or 'nothing'}. It also knows {_stage_names(plan)}, `layer N` and `op N`."
    )


def _stage_names(plan: Plan) -> str:
    last = len(plan.stages) - 1
    return "stage 0" if last == 0 else f"stage 0 to stage {last}"
