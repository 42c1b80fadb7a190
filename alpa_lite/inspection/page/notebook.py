"""Graphs, programs and checks as a notebook shows them: a summary first, then line by line up to a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape
from itertools import islice

from alpa_lite.inspection.page.elements import fragment_html, table_html
from alpa_lite.inspection.text.tables import Table, render
from alpa_lite.plan.instructions import Program
from alpa_lite.program.ir import Graph
from alpa_lite.program.show import show
from alpa_lite.runtime.check_report import COLUMNS, NUMBERS, CheckReport
from alpa_lite.text import show_bytes, show_count, show_numbers

MAX_ROWS = 15
MAX_LINES = 1000


def graph_summary(graph: Graph) -> str:
    """Return the number of ops, values and loops of a graph in one line."""
    loops = sum(op.primitive == "scan" for _, op in graph.walk())
    return (
        f"Graph: {show_count(len(graph.ops), 'op')}, {show_count(len(graph.values), 'value')}, "
        f"{show_count(len(graph.inputs), 'input')} of {show_bytes(_bytes(graph, graph.inputs))}, "
        f"{show_count(len(graph.outputs), 'output')} of {show_bytes(_bytes(graph, graph.outputs))}"
        + (f", {show_count(loops, 'loop')}" if loops else "")
    )


def graph_table(graph: Graph) -> Table:
    """Return a row per primitive, those with the largest results first. Loop bodies count once."""
    numbers: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for inside, op in graph.walk():
        numbers[op.primitive] += 1
        sizes[op.primitive] += sum(value.bytes for value in inside.results(op))
    # By bytes: a few primitives with large results matter more than many with scalars.
    ordered = sorted(numbers, key=lambda name: (-sizes[name], name))
    rows = tuple((name, str(numbers[name]), show_bytes(sizes[name])) for name in ordered[:MAX_ROWS])
    rest = len(ordered) - len(rows)
    columns = ("primitive", "ops", "bytes of results")
    return Table(
        title="Ops",
        columns=columns,
        rows=rows,
        numeric=frozenset(columns[1:]),
        note=f"… and {show_count(rest, 'more primitive')}" if rest else "",
    )


def graph_text(graph: Graph) -> str:
    """Return the summary as text."""
    return render([graph_summary(graph), ""], [graph_table(graph)])


def graph_html(graph: Graph) -> str:
    """Return the summary, and the graph's lines in a collapsed box."""
    return _folded(graph_summary(graph), graph_table(graph), show(graph).splitlines())


def program_summary(program: Program) -> str:
    """Return the number of tasks, instructions and bytes sent of a program in one line."""
    moved = sum(instruction.bytes for instruction in program.instructions)
    return (
        f"Program: {show_count(len(program.instructions), 'instruction')}, {show_count(len(program.tasks), 'task')}, "
        f"{show_count(program.num_microbatches, 'micro-batch')}, {show_bytes(moved)} sent between stages"
    )


def program_table(program: Program) -> Table:
    """Return a row per task and per pair of stages with transfers, with the number of runs."""
    # A task runs once per micro-batch, but updates once per step.
    runs: Counter[int] = Counter(i.task for i in program.instructions if i.kind == "RUN")
    rows = [(task.name, str(runs[number]), str(len(task.ops)), "") for number, task in enumerate(program.tasks)]
    sends: dict[tuple[int, int], list[float]] = {}
    for instruction in program.instructions:
        if instruction.kind == "SEND":
            sends.setdefault((instruction.source_stage, instruction.stage), []).append(instruction.bytes)
    rows += [
        (f"stage {source} to stage {target}", str(len(sizes)), "", show_bytes(sum(sizes)))
        for (source, target), sizes in sorted(sends.items())
    ]
    others = Counter(i.kind for i in program.instructions if i.kind not in ("RUN", "SEND"))
    listed = ", ".join(f"{number} {kind}" for kind, number in sorted(others.items()))
    columns = ("task or transfer", "runs", "ops", "bytes")
    stages = show_numbers(task.stage for task in program.tasks)
    note = f"stages {stages}" + (f"; besides {listed}" if listed else "")
    return Table(title="Tasks", columns=columns, rows=tuple(rows), numeric=frozenset(columns[1:]), note=note)


def program_text(program: Program) -> str:
    """Return the summary as text."""
    return render([program_summary(program), ""], [program_table(program)])


def program_html(program: Program) -> str:
    """Return the summary, and the instructions in a collapsed box."""
    return _folded(program_summary(program), program_table(program), map(str, program.instructions))


def check_html(report: CheckReport) -> str:
    """Return the report of a check as a sentence and a table."""
    table = Table(title="Outputs", columns=COLUMNS, rows=report.rows, numeric=NUMBERS, note=report.note)
    return fragment_html(f"<p>{escape(report.verdict)}</p>", table_html(table))


def _bytes(graph: Graph, values: Iterable[int]) -> float:
    return sum(graph.values[value].bytes for value in values)


def _folded(summary: str, table: Table, lines: Iterable[str]) -> str:
    """Return a summary, a table and the first lines in a collapsed box, so that the notebook's output stays small."""
    # One more than is shown tells whether there are more, without making all lines.
    kept = list(islice(lines, MAX_LINES + 1))
    more = ["… (str() gives all)"] if len(kept) > MAX_LINES else []
    text = escape("\n".join([*kept[:MAX_LINES], *more]))
    listing = f"<details><summary>line by line</summary><pre>{text}</pre></details>"
    return fragment_html(f"<h1>{escape(summary)}</h1>", table_html(table), listing)
