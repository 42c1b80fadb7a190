"""Loops over layers of an exported pipeline in parts, with the stacked arrays that hold the layers.

The module traces the step with its loops whole, and cuts it as the plan has it (`pipeline_jax_parts.py.txt`), by tables
whose numbers are those of the equations of the whole step:

    loops       those that the plan cuts, and the sums in them                             `_loops`
    in parts    the equations that `SplitAnalysis` lets run part by part                   `_in_parts`
    stacked     how an argument or result of several stages lies between steps             `_lying`

To number them, the module cuts the loops alone, which gives the program that was analysed, with all arrays whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from alpa_lite.export.matched_equations import known_inputs, matched, matched_constants
from alpa_lite.export.module_program import module_of, traced_by_module
from alpa_lite.export.module_text import filled_template, lines, partition, ranges
from alpa_lite.plan.instructions import Program
from alpa_lite.plan.plan import Plan
from alpa_lite.program.ir import Graph, accumulated, parts_of, wiring_of
from alpa_lite.program.phases import LeafPart
from alpa_lite.sharding.specs import Spec
from alpa_lite.sharding.stacked_rest import resting
from alpa_lite.step.split import StepPrograms, TracedStep
from alpa_lite.trace.from_jaxpr import is_over_layers
from alpa_lite.trace.passes.split_stacked import SplitAnalysis, Splittable, joins_rows, rows_read

_TEMPLATE = "pipeline_jax_parts.py.txt"

WITH_PARTS = {
    "LEAVES": "LEAVES",
    "FLAT": "_in_parts",
    "PIPELINE": "StackedPipeline",
    "OF_ROWS": (" An argument in parts\n# has an entry for each, with its first row and the row after its last one."),
}
"""Values of the template of pipelines whose loops are in parts."""

WITHOUT_PARTS = {"LEAVES": "ARGUMENTS", "FLAT": "_flat", "PIPELINE": "Pipeline", "OF_ROWS": "", "PARTS": ""}
"""The same for others."""

_STAGE_AXIS, _GROUP_AXIS = "stage", "group"


def parts_text(
    plan: Plan, programs: StepPrograms, made: TracedStep, program: Program, values: Mapping[str, str]
) -> str:
    """Return the part of a module that is about loops in parts.

    Args:
        plan: a plan whose step has loops in parts.
        programs: the step.
        made: the step as planned.
        program: the instructions of the plan.
        values: of the module's template, as far as the module traces by them.
    """
    num_parts = made.step.loop_parts
    empty = filled_template(_TEMPLATE, dict.fromkeys(("ROWS", "LOOPS", "IN_PARTS", "STACKED"), ""))
    names = module_of({**values, "PARTS": empty})
    cut, names["_in_parts"] = names["_Parts"], names["_flat"]
    whole = traced_by_module(names, plan, programs.traced)
    loops = _loops(programs, plan, whole)
    lengths = {whole.equations[e].params["length"] for e in loops}
    names["PARTS"] = {n: tuple(parts_of(n, num_parts)) for n in lengths}
    names["LOOPS"] = _grouped(loops)
    assert made.split is not None, "stacked arrays are split wherever loops are"
    origins = _origins(made.split, made, cut(whole.at_full_batch()))
    in_parts = _in_parts(made.split, {v: e for v, e in origins.items() if e not in loops})
    for parts in (made.step.input_parts, made.step.output_parts):
        # The last part of an array ends with its last row.
        lengths |= set({part.leaf: part.rows[1] for part in parts if part.rows is not None}.values())
    return filled_template(
        _TEMPLATE,
        {
            "ROWS": ", ".join(f"{n}: {tuple(parts_of(n, num_parts))}" for n in sorted(lengths)),
            "LOOPS": _entries(_grouped(loops)),
            "IN_PARTS": _entries({key: ranges(found) for key, found in in_parts.items()}),
            "STACKED": lines(_stacked(plan, made, program)),
        },
    )


def _entries(table: Mapping[Any, str]) -> str:
    return lines(f"{key!r}: {text!r}," for key, text in table.items()) if table else ""


def _grouped(loops: Mapping[int, tuple[int, ...]]) -> dict[tuple[int, ...], str]:
    return {sums: ranges(e for e in loops if loops[e] == sums) for sums in dict.fromkeys(loops.values())}


def _inputs(made: TracedStep, program: Any) -> list[int | None]:
    """Return the values of a program with all arrays whole that the arguments and captured arrays of a step are."""
    leaves = {part.leaf for part in made.step.input_parts}
    num_constants = len(made.constants)
    further = 0 if made.precomputed is None else len(made.precomputed.program.graph.outputs)
    return [*range(len(leaves) - num_constants - further), *matched_constants(made.constants, program.constants)]


def _loops(programs: StepPrograms, plan: Plan, whole: Any) -> dict[int, tuple[int, ...]]:
    """Return the equations of loops that are cut, with the positions of results that are sums over their trips."""
    made = programs.with_equations(plan.num_microbatches)
    graph, step = made.graph, made.step
    found = matched(graph, whole, known_inputs(graph, _inputs(made, whole)))
    loops = dict[int, tuple[int, ...]]()
    for op in graph.ops:
        wiring = wiring_of(op)
        if op.primitive != "scan" or wiring is None or op.id not in found.equations:
            continue
        eqn = whole.equations[found.equations[op.id]]
        rows = [op.operands[i] for i in wiring.scanned] + [op.results[i] for i in wiring.stacked]
        of_samples = eqn.whole["length"] != eqn.params["length"] or any(step.batch_dims[v] == 0 for v in rows)
        if is_over_layers(eqn.params) and eqn.params["length"] and not of_samples:
            loops[found.equations[op.id]] = accumulated(op)
    return dict(sorted(loops.items()))


def _origins(split: SplitAnalysis, made: TracedStep, cutter: Any) -> dict[int, int]:
    """Return value of the program that was analysed → the equation of the whole step that makes it.

    `cutter`: cuts the loops of the whole step at the full batch, at which the analysis was done.
    """
    graph, program = split.graph, cutter.program()
    found = matched(graph, program, known_inputs(graph, _inputs(made, program)))
    # Operands that a loop hands through may be literals.
    pairs = ((old, new) for old, new in cutter.whole.items() if isinstance(new, int))
    makers = {new: cutter.maker[old] for old, new in pairs if old in cutter.maker}
    return {v: makers[w] for v, w in found.values.items() if w in makers}


def _in_parts(split: SplitAnalysis, origins: Mapping[int, int]) -> dict[Hashable, set[int]]:
    """Return how equations run on parts → their numbers; `origins`: value → equation."""
    table: dict[Hashable, set[int]] = defaultdict(set)
    for op in split.graph.ops:
        e = origins.get(op.results[0]) if op.results else None
        how = _how(split, op.id)
        if e is not None and how is not None:
            table[how].add(e)
    return table


def _how(split: SplitAnalysis, number: int) -> Hashable | None:
    """Return how an op runs on parts, with the positions of operands in parts; None if it runs whole."""
    op = split.graph.ops[number]

    def with_positions(how: str, factor: int) -> Hashable:
        operands = enumerate(split.rule(op).operands)
        return how, *(n for n, dims in operands if dims and dims[0] == (factor,))

    if rows_read(split.graph, op) is not None and split.splittable(op.operands[0]) is Splittable.PARTED:
        return ("read",)
    if number in split.reduced:
        return with_positions(split.rule(op).reduction, split.reduced[number])
    if not op.results or not split.splittable(op.results[0]):
        return None
    if joins_rows(op):
        return ("join",)
    factor = split.row_factor(op, op.results[0])
    return None if factor is None else with_positions("each", factor)


# ------------------------------------------------------------------------------------------- arrays of several stages


def _stacked(plan: Plan, made: TracedStep, program: Program) -> Iterator[str]:
    """Yield the entries of the table of arrays in parts."""
    step, graph = made.step, made.graph
    homes = [(buffer.stage, spec) for buffer, spec in zip(program.outputs, program.output_specs, strict=True)]
    given = _layouts(plan, graph, step.input_parts, graph.inputs, [program.homes[v] for v in graph.inputs])
    found = _layouts(plan, graph, step.output_parts, graph.outputs, homes)
    for text in dict.fromkeys([*given.values(), *found.values()]):
        leaves = [ranges(leaf for leaf in table if table[leaf] == text) for table in (given, found)]
        yield f"({text}, {leaves[0]!r}, {leaves[1]!r}),"


def _layouts(
    plan: Plan, graph: Graph, parts: Sequence[LeafPart], values: Sequence[int], homes: Sequence[tuple[int, Spec]]
) -> dict[int, str]:
    """Return leaf → axes, devices and sharding between steps, for arguments or results in parts.

    Args:
        plan: the plan.
        graph: the graph of the step.
        parts: the origin of each value.
        values: values of the graph.
        homes: stage and spec of each value.
    """
    devices = [tuple(plan.first_device + d for d in stage.submesh.devices) for stage in plan.stages]
    sizes = [tuple(stage.mesh_shape.axis_sizes.items()) for stage in plan.stages]
    found = dict[int, list[_Run]]()
    for part, v, (stage, spec) in zip(parts, values, homes, strict=True):
        if part.rows is None:
            continue
        place, runs = (devices[stage], sizes[stage], spec.dims), found.setdefault(part.leaf, [])
        before = runs.pop().num_rows if runs and runs[-1].place == place else 0
        num_rows = before + part.rows[1] - part.rows[0]
        runs.append(_Run(place=place, num_rows=num_rows, row_shape=graph.values[v].shape[1:]))
    return {leaf: _layout(runs) for leaf, runs in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Consecutive parts of an array that lie alike.

    Attributes:
        place: numbers of devices, sizes of the axes of their mesh, and mesh axes of each dim.
        num_rows: rows of all of them.
        row_shape: shape of a row.
    """

    place: tuple[tuple[int, ...], tuple[tuple[str, int], ...], tuple[tuple[str, ...], ...]]
    num_rows: int
    row_shape: tuple[int, ...]


def _layout(runs: Sequence[_Run]) -> str:
    """Return how an array in parts lies between steps, as in the plan's own programs (`runtime.execute.stacked`)."""
    places = list(dict.fromkeys(run.place[0] for run in runs))
    forms = {(len(run.place[0]), *run.place[1:], run.num_rows) for run in runs}
    if len(forms) == 1 and len(places) == len(runs):
        _, sizes, (first, *rest) = runs[0].place
        return _layout_text({_STAGE_AXIS: len(runs), **dict(sizes)}, places, [(_STAGE_AXIS, *first), *rest])
    readers = tuple(places.index(run.place[0]) for run in runs for _ in range(run.num_rows))
    at = resting((len(readers), *runs[0].row_shape), readers, tuple(map(len, places)))
    groups = [places[h][first : first + at.group_size] for h, first in zip(at.holders, at.first_devices, strict=True)]
    inner = [] if at.split_dim is None else [*[()] * (at.split_dim - 1), (_GROUP_AXIS,)]
    return _layout_text({_STAGE_AXIS: len(groups), _GROUP_AXIS: at.group_size}, groups, [(_STAGE_AXIS,), *inner])


def _layout_text(axes: Mapping[str, int], groups: Sequence[Sequence[int]], dims: Sequence[tuple[str, ...]]) -> str:
    return f"{dict(axes)!r}, {tuple(chain(*groups))!r}, {partition(Spec(tuple(dims)))}"
