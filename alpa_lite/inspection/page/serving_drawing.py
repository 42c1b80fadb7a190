"""A serving plan as a static SVG drawing: a column per tier, workers in the colours of their operators, and messages.

Lines are as wide as their traffic; those that cross to a higher tier, which cost money, have the colour of
communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from alpa_lite.inspection.page.elements import fragment_html, page_html, stage_class, table_html
from alpa_lite.inspection.text.serving_tables import (
    operators_table,
    serving_headline,
    show_dollars,
    solvers_table,
)
from alpa_lite.serving import ServingComparison, ServingPlan
from alpa_lite.serving.workflow import gib_per_hour
from alpa_lite.text import show_percent

_WIDTH, _HEIGHT, _ROW, _COLUMN = 168.0, 36.0, 46.0, 300.0
_TOP = 26.0
_WIDEST = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flow:
    """Messages between two boxes: GiB per hour and dollars per hour."""

    sender: str
    worker: str
    edge: str
    traffic: float
    price: float


def serving_svg(plan: ServingPlan) -> str:
    """Return the drawing of a plan."""
    problem = plan.problem
    columns = [[source.name for source in problem.sources]]
    columns += [[each.name for each in problem.workers if each.tier == tier] for tier in range(problem.num_tiers)]
    most = max(map(len, columns))
    corners = {
        name: (number * _COLUMN, _TOP + (row + (most - len(names)) / 2) * _ROW)
        for number, names in enumerate(columns)
        for row, name in enumerate(names)
    }
    width = (len(columns) - 1) * _COLUMN + _WIDTH + 60
    height = _TOP + most * _ROW + 24
    names = ["sources", *(f"tier {tier}" for tier in range(problem.num_tiers))]
    heads = "".join(
        f'<text class="small" x="{number * _COLUMN:.4g}" y="14">{name}</text>' for number, name in enumerate(names)
    )
    label = escape(serving_headline(plan))
    return (
        f'<svg class="serving" viewBox="-2 0 {width:.5g} {height:.5g}" role="img" aria-label="{label}">\n{heads}\n'
        + "\n".join((*_lines(plan, corners), *_boxes(plan, corners), _legend(plan, height - 8)))
        + "\n</svg>"
    )


def _flows(plan: ServingPlan) -> Iterator[_Flow]:
    problem = plan.problem
    for edge in problem.edges:
        kib = edge.message_kib(plan.variants.get(edge.sender, ""), plan.variants[edge.receiver])
        traffic = gib_per_hour(problem.rate(edge.receiver), kib)
        senders = [edge.sender] if problem.is_source(edge.sender) else list(plan.loads[edge.sender])
        for sender in senders:
            sent = 1.0 if sender == edge.sender else plan.share(edge.sender, sender)
            for worker in plan.loads[edge.receiver]:
                part = traffic * sent * plan.share(edge.receiver, worker)
                price = problem.link_price(sender, worker) * part
                name = f"{edge.sender} to {edge.receiver}"
                yield _Flow(sender=sender, worker=worker, edge=name, traffic=part, price=price)


def _lines(plan: ServingPlan, corners: dict[str, tuple[float, float]]) -> Iterator[str]:
    flows = list(_flows(plan))
    largest = max(flow.traffic for flow in flows)
    for flow in flows:
        (x, y), (to_x, to_y) = corners[flow.sender], corners[flow.worker]
        x, y, to_y = x + _WIDTH, y + _HEIGHT / 2, to_y + _HEIGHT / 2
        # Within a column a line leaves and arrives on the right.
        bend = x + 40 if to_x + _WIDTH == x else (x + to_x) / 2
        end = x if to_x + _WIDTH == x else to_x
        # Thin lines stay visible.
        wide = max(0.8, _WIDEST * (flow.traffic / largest) ** 0.5) if largest else 0.8
        colour = "var(--collective)" if flow.price > 0 else "var(--line)"
        title = escape(f"{flow.edge}: {flow.traffic:.4g} GiB per hour, {show_dollars(flow.price)}")
        yield (
            f'<path d="M{x:.5g} {y:.5g}C{bend:.5g} {y:.5g} {bend:.5g} {to_y:.5g} {end:.5g} {to_y:.5g}" '
            f'style="fill:none; stroke:{colour}; stroke-width:{wide:.3g}; opacity:.7"><title>{title}</title></path>'
        )


def _boxes(plan: ServingPlan, corners: dict[str, tuple[float, float]]) -> Iterator[str]:
    problem = plan.problem
    served = {worker: name for name, load in plan.loads.items() for worker in load}
    sources = {source.name: source.messages_per_second for source in problem.sources}
    for name, (x, y) in corners.items():
        lines, kind = [name, ""], "host"
        if name in sources:
            lines[1] = f"{sources[name]:.4g} messages/s"
        elif name in served:
            operator, kind = served[name], f"device {stage_class(problem.order.index(served[name]))}"
            lines[1] = f"{plan.loads[operator][name]:.4g} messages/s, {show_percent(plan.share(operator, name))}"
        else:
            lines[1] = "not used"
        ink = ' style="fill:#ffffff"' if name in served else ""
        price = "" if name in sources else f" {show_dollars(problem.worker(name).dollars_per_hour)} per hour"
        # The outline of a box that is not filled is none of its letters.
        group = f'<g class="{kind}">' if name in served else "<g>"
        yield (
            f"{group}<title>{escape(name + price)}</title>"
            f'<rect class="{kind}" x="{x:.5g}" y="{y:.5g}" width="{_WIDTH:g}" height="{_HEIGHT:g}" rx="4"/>'
            f'<text x="{x + 8:.5g}" y="{y + 15:.5g}"{ink}>{escape(lines[0])}</text>'
            f'<text class="small" x="{x + 8:.5g}" y="{y + 28:.5g}"{ink}>{escape(lines[1])}</text></g>'
        )


def _legend(plan: ServingPlan, y: float) -> str:
    marks: list[str] = []
    x = 0.0
    for number, name in enumerate(plan.problem.order):
        words = f"{name}: {plan.variants[name]}"
        marks.append(
            f'<g class="device {stage_class(number)}"><rect class="device {stage_class(number)}" '
            f'x="{x:g}" y="{y - 9:.5g}" width="10" height="10"/></g>'
            f'<text class="small" x="{x + 15:g}" y="{y:.5g}">{escape(words)}</text>'
        )
        # About 5 units per letter of this size, the mark, and a gap.
        x += 5 * len(words) + 45
    return "".join(marks)


def serving_fragment(plan: ServingPlan) -> str:
    """Return a plan as a notebook shows it."""
    head = f"<p>{escape(serving_headline(plan))}</p>"
    return fragment_html(head, serving_svg(plan), table_html(operators_table(plan)))


def serving_page(comparison: ServingComparison) -> str:
    """Return a plan and the costs of other solvers as a page."""
    plan = comparison.plan
    fragment = fragment_html(
        f"<h1>{escape(plan.problem.name)}</h1><p>{escape(serving_headline(plan))}</p>",
        serving_svg(plan),
        table_html(operators_table(plan)),
        table_html(solvers_table(comparison)),
        *(f"<p>{escape(f'{solver}: {reason}')}</p>" for solver, reason in comparison.refusals.items()),
    )
    return page_html(f"{plan.problem.name}: {plan.solver}", fragment)
