"""The table of a plan's arguments on its page: each group of arrays as the blocks that it is cut into.

A group is one row: its arrays with their shapes, a drawing, how it is cut, and what it takes of one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from alpa_lite.inspection.page.drawings import block_svg, sharding_kind, sharding_words, stage_names
from alpa_lite.inspection.text.parameter_groups import (
    Argument,
    ArgumentGroup,
    arguments_of,
    group_arguments,
    is_optimizer_state,
)
from alpa_lite.plan.plan import ArrayShape, Plan
from alpa_lite.text import show_bytes, show_count

_COLUMNS = ("path", "whole", "each device", "bytes of a device", "blocks", "cut", "stages")
_MARKS = {
    "whole": " data-numeric",
    "each device": " data-numeric",
    "bytes of a device": " class=number",
}
"""Columns that are put in order by numbers, those of shapes by their bytes."""


def parameter_table(plan: Plan) -> str:
    """The table with its controls; empty where a plan names no arguments."""
    arguments = arguments_of(plan)
    groups = [*group_arguments(arguments.plain), *group_arguments(arguments.optimizer)]
    kinds = "".join(f"<option>{kind}</option>" for kind in sorted({sharding_kind(group.spec) for group in groups}))
    head = "".join(f"<th{_MARKS.get(column, '')}>{column}</th>" for column in _COLUMNS)
    rows = "\n".join(_row(plan, group) for group in groups)
    table = (
        '<div class="tools"><label>cut <select id="kind">'
        f'<option value="">in any way</option>{kinds}</select></label>'
        f'<label><input type="checkbox" id="open"> name every array</label>'
        f"{_optimizer_switch(len(arguments.optimizer), len(arguments.unlike_parameter))}</div>"
        f'<div class="scroll"><table id="arrays" data-search aria-label="Parameters and inputs">'
        f"<thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>"
        "<p>A drawing is the whole array, its first dim downwards; filled is what the first device of the stage holds. "
        "A spec names the mesh axes of each dim, - where it is whole. The bytes are those of all arrays of a row that "
        "one device holds, on the stage with the most of them.</p>"
    )
    return table if groups else ""


def _optimizer_switch(count: int, unlike: int) -> str:
    if not count:
        return ""
    otherwise = f", {unlike} of them cut otherwise than their parameter" if unlike else ""
    words = f"{show_count(count, 'array')} of optimizer state{otherwise}"
    return f'<label><input type="checkbox" id="optimizer"> {words}</label>'


def _row(plan: Plan, group: ArgumentGroup) -> str:
    optimizer = ' data-optimizer=""' if is_optimizer_state(group.members[0].name) else ""
    meshes = {str(mesh): mesh.axis_sizes for stage in group.stages for mesh in [plan.stages[stage].mesh_shape]}
    blocks = "".join(dict.fromkeys(block_svg(group.spec, sizes) for sizes in meshes.values()))
    words = "<br>".join(dict.fromkeys(escape(sharding_words(group.spec, sizes)) for sizes in meshes.values()))
    kind = sharding_kind(group.spec)
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


def _shape_cell(shapes: Sequence[ArrayShape | None], *, named: bool) -> str:
    """The shape that all have; of several the largest, and how many others there are."""
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
    """What one device holds of a group, and which part that is of each array."""
    shares = sorted({member.num_shards for member in group.members})
    share = " or ".join("all" if number == 1 else f"1/{number}" for number in shares)
    held = {stage: sum(_held(member) for member in group.members if member.stage == stage) for stage in group.stages}
    most = max(held.values())
    known = all(member.block is not None for member in group.members)
    size = f"{show_bytes(most)}<br>" if known else ""
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
