"""The table of a plan's arguments: one row per group of arrays, with shapes, a drawing of the blocks, and bytes.

Above it stand sentences on all of them: how much of the parameters, the optimizer state and the batch is split, and
into how many parts (`sharding_sentences`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from alpa_lite.inspection.page.drawings import block_svg, sharding_kind, sharding_words, stage_names
from alpa_lite.inspection.text.groups import (
    Argument,
    ArgumentGroup,
    Arguments,
    arguments_of,
    group_arguments,
    is_optimizer_state,
)
from alpa_lite.plan.plan import ArrayShape, Plan
from alpa_lite.text import show_bytes, show_count, show_percent

_COLUMNS = ("path", "whole", "each device", "bytes of a device", "blocks", "cut", "stages")
_MARKS = {
    "whole": " data-numeric",
    "each device": " data-numeric",
    "bytes of a device": " class=number",
}
"""The columns that are sorted by numbers, shapes by their bytes."""


def parameter_table(plan: Plan) -> str:
    """Return the table of arguments with its controls; "" if the plan names no arguments."""
    arguments = arguments_of(plan)
    # Optimizer state last: the page hides its rows until the reader asks for them.
    groups = [*group_arguments(arguments.plain), *group_arguments(arguments.optimizer)]
    # Only kinds of sharding that occur, so that no choice empties the table.
    kinds = "".join(f"<option>{kind}</option>" for kind in sorted({_kind(plan, group) for group in groups}))
    head = "".join(f"<th{_MARKS.get(column, '')}>{column}</th>" for column in _COLUMNS)
    rows = "\n".join(_row(plan, group) for group in groups)
    table = (
        f"{_paragraphs(sharding_sentences(plan, arguments))}"
        '<div class="tools"><label>cut <select id="kind">'
        f'<option value="">any sharding</option>{kinds}</select></label>'
        f'<label><input type="checkbox" id="open"> name every array</label>'
        f"{_optimizer_switch(len(arguments.optimizer), len(arguments.unlike_parameter))}</div>"
        f'<div class="scroll"><table id="arrays" data-search aria-label="Parameters and inputs">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
        "<p>A drawing is the whole array, its first dim downwards; the block of the stage's first device is filled. "
        "A spec names the mesh axes of each dim, - where it is whole. The bytes are those of all arrays of a row that "
        "one device holds, on the stage with the most of them.</p>"
    )
    # An empty body leaves the section out of the page.
    return table if groups else ""


def _optimizer_switch(count: int, unlike: int) -> str:
    if not count:
        return ""
    otherwise = f", {unlike} of them sharded differently from their parameter" if unlike else ""
    words = f"{show_count(count, 'array')} of optimizer state{otherwise}"
    return f'<label><input type="checkbox" id="optimizer"> {words}</label>'


def _row(plan: Plan, group: ArgumentGroup) -> str:
    optimizer = ' data-optimizer=""' if is_optimizer_state(group.members[0].name) else ""
    # Stages with equal meshes have equal drawings, of which one is enough.
    meshes = _meshes(plan, group)
    blocks = "".join(dict.fromkeys(block_svg(group.spec, sizes) for sizes in meshes))
    words = "<br>".join(dict.fromkeys(escape(sharding_words(group.spec, sizes)) for sizes in meshes))
    kind = _kind(plan, group)
    cells = (
        _shape_cell([member.shape for member in group.members], named=True),
        _shape_cell([member.block for member in group.members], named=False),
        _bytes_cell(group),
        f"<td>{blocks}</td><td><b>{kind}</b> <code>{escape(str(group.spec))}</code><br><small>{words}</small></td>",
        f"<td>{stage_names(group.stages)}</td>",
    )
    return (
        f'<tr data-kind="{kind}"{optimizer}><th scope="row"><code>{escape(group.pattern)}</code>{_members(group)}</th>'
        f"{''.join(cells)}</tr>"
    )


def _kind(plan: Plan, group: ArgumentGroup) -> str:
    """Return the kind of sharding of a group, on each of its meshes if it differs."""
    return " or ".join(dict.fromkeys(sharding_kind(group.spec, sizes) for sizes in _meshes(plan, group)))


def _meshes(plan: Plan, group: ArgumentGroup) -> list[Mapping[str, int]]:
    """Return the sizes of the axes of each different mesh that stores a group."""
    meshes = [plan.stages[stage].mesh_shape for stage in group.stages]
    return list({str(mesh): mesh.axis_sizes for mesh in meshes}.values())


def _shape_cell(shapes: Sequence[ArrayShape | None], *, named: bool) -> str:
    """Return the shape that all arrays share; of several shapes the largest, and the number of others."""
    known = sorted({shape for shape in shapes if shape is not None}, key=lambda shape: -shape.bytes)
    if not known:
        return "<td></td>"
    largest = known[0]
    notes = [largest.dtype] if named else []
    notes += [f"and {show_count(len(known) - 1, 'other')}"] if len(known) > 1 else []
    return f'<td data-value="{largest.bytes}">{_dims(largest)}<br><small>{escape(", ".join(notes))}</small></td>'


def _dims(shape: ArrayShape) -> str:
    return " × ".join(map(str, shape.dims)) or "scalar"


def _bytes_cell(group: ArgumentGroup) -> str:
    """Return the bytes of a group on one device, and the share of each array."""
    shares = sorted({member.num_shards for member in group.members})
    share = " or ".join("all" if number == 1 else f"1/{number}" for number in shares)
    held = {stage: sum(_held(member) for member in group.members if member.stage == stage) for stage in group.stages}
    # The fullest stage is what must fit; the sum over stages is nobody's memory.
    most = max(held.values())
    # Plans of earlier versions have no shapes: without all of them the sum would be too small.
    known = all(member.block is not None for member in group.members)
    size = f"{show_bytes(most)}<br>" if known else ""
    # The page sorts by this value, not by the text with its unit.
    return f'<td class="number" data-value="{most}">{size}<small>{share}</small></td>'


def _held(member: Argument) -> int:
    return 0 if member.block is None else member.block.bytes


def _members(group: ArgumentGroup) -> str:
    if len(group.members) == 1:
        return ""
    listed = "\n".join(
        f'<li data-stage="{each.stage}">{escape(each.name)} <small>stage {each.stage}{_shape(each)}</small></li>'
        for each in group.members
    )
    return f"<details><summary>{len(group.members)} arrays</summary><ul>{listed}</ul></details>"


def _shape(member: Argument) -> str:
    return "" if member.shape is None else f", {_dims(member.shape)}"


def sharding_sentences(plan: Plan, arguments: Arguments) -> tuple[str, ...]:
    """Return how parameters, optimizer state and batch are split, each in one sentence."""
    batch = () if plan.batch is None else plan.batch.dims
    parameters = [each for each in arguments.plain if each.name not in batch]
    samples = [each for each in arguments.plain if each.name in batch]
    unlike, owned = len(arguments.unlike_parameter), len(arguments.owners)
    optimizer = _sharding_sentence("Optimizer state", arguments.optimizer)
    if owned and not unlike:
        optimizer = "Optimizer state: like its parameters."
    sentences = (_sharding_sentence("Parameters", parameters), optimizer, _sharding_sentence("Batch", samples))
    return tuple(filter(None, sentences))


def _sharding_sentence(what: str, arguments: Sequence[Argument]) -> str:
    """Return the parts of some arrays by their bytes, such as `Parameters, 9.2 GiB: 98.0 % in 4 parts, the rest …`."""
    if not arguments:
        return ""
    sizes: dict[int, float] = {}
    # Plans of earlier versions have no shapes: their arrays are counted instead.
    known = all(each.shape is not None for each in arguments)
    for each in arguments:
        size = each.shape.bytes if known and each.shape is not None else 1
        sizes[each.num_shards] = sizes.get(each.num_shards, 0.0) + size
    whole = sum(sizes.values())
    total = f"{what}, {show_bytes(whole)}" if known else what
    if len(sizes) == 1:
        return f"{total}: all {_parts(next(iter(sizes)))}."
    ordered = sorted(sizes, key=lambda parts: -sizes[parts])
    rest = whole - sizes[ordered[0]]
    # A percentage would round to all, or to nothing.
    if known and rest < 0.001 * whole:
        return f"{total}: all but {show_bytes(rest)} {_parts(ordered[0])}."
    listed = [f"{show_percent(sizes[parts] / whole)} {_parts(parts)}" for parts in ordered if whole]
    return f"{total}: {', '.join(listed)}."


def _parts(number: int) -> str:
    return "replicated" if number == 1 else f"in {number} parts"


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f'<p class="said">{escape(sentence)}</p>' for sentence in sentences)
