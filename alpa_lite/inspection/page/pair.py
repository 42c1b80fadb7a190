"""Two plans on one page: key numbers side by side, both steps on one clock, devices, and all differences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape

from alpa_lite.inspection.page.drawings import cluster_svg, layers_svg
from alpa_lite.inspection.page.elements import fragment_html, table_html
from alpa_lite.inspection.page.html import framed
from alpa_lite.inspection.page.page_data import pair_data
from alpa_lite.inspection.page.provenance import provenance_html
from alpa_lite.inspection.page.sections import Section, chart_html, memory_chart_html
from alpa_lite.inspection.text.diff import PlanDiff, compare
from alpa_lite.inspection.text.tables import Table, headline
from alpa_lite.plan.plan import Plan
from alpa_lite.text import show_bytes, show_percent, show_ratio, show_seconds


def pair_html(before: Plan, after: Plan) -> str:
    """Return the page of two plans; `PlanPair.to_html` writes it."""
    found = compare(before, after)
    sections = [
        Section(id="summary", title="Summary", body=_summary(found, before, after)),
        Section(id="step", title="One step", body=chart_html("before and after")),
        Section(id="memory-over-time", title="Memory", body=memory_chart_html("")),
        Section(id="devices", title="Devices", body=_devices(before, after)),
        *(
            Section(id=f"differences-{number}", title=table.title, body=table_html(table, heading="", search=True))
            for number, table in enumerate(found.tables())
        ),
    ]
    foot = "".join(f"<h3>{when}</h3>{provenance_html(p)}" for when, p in (("Before", before), ("After", after)))
    return framed(f"{before.function}: {before.name} and {after.name}", sections, pair_data(before, after), foot)


def pair_fragment(before: Plan, after: Plan) -> str:
    """Return two plans as a notebook shows them."""
    found = compare(before, after)
    tables = (key_numbers(before, after), *found.tables())
    return fragment_html(_sentences(found), *(table_html(table) for table in tables))


def key_numbers(before: Plan, after: Plan) -> Table:
    """Return the key numbers of two plans, and the second as a multiple of the first where that tells something."""
    return Table(
        title="Key numbers",
        columns=("", "before", "after", "after / before"),
        rows=tuple(_rows(before, after)),
        numeric=frozenset(("before", "after", "after / before")),
    )


def _rows(before: Plan, after: Plan) -> Iterator[tuple[str, ...]]:
    def row(name: str, value: Callable[[Plan], float], show: Callable[[float], str]) -> tuple[str, ...]:
        a, b = value(before), value(after)
        return name, show(a), show(b), show_ratio(b / a) if a > 0 else ""

    yield row("step, predicted", lambda plan: plan.prediction.step_seconds, show_seconds)
    yield row("no plan below", lambda plan: plan.solver.bound, show_seconds)
    yield row("MFU", lambda plan: plan.prediction.mfu, show_percent)
    yield row("HFU", lambda plan: plan.prediction.hfu, show_percent)
    yield row("bubble", lambda plan: plan.prediction.bubble_fraction, show_percent)
    yield row("peak memory of a device", lambda plan: max(plan.prediction.peak_bytes), show_bytes)
    yield row("collectives, all stages", lambda plan: plan.prediction.collective_seconds, show_seconds)
    yield row("transfers between stages", lambda plan: plan.prediction.transfer_seconds, show_seconds)


def _sentences(found: PlanDiff) -> str:
    return "".join(f'<p class="said">{escape(line.strip())}</p>' for line in found.summary())


def _summary(found: PlanDiff, before: Plan, after: Plan) -> str:
    names = f"{escape(before.name)} → {escape(after.name)}"
    heads = "".join(f"<p>{escape(headline(plan)[0])}</p>" for plan in (before, after))
    numbers = table_html(key_numbers(before, after), heading="")
    return f"<h1>{escape(before.function)}: {names}</h1>{heads}{_sentences(found)}{numbers}"


def _devices(before: Plan, after: Plan) -> str:
    return "".join(
        f"<h3>{when}: {escape(plan.name)}</h3><figure>{cluster_svg(plan)}</figure><figure>{layers_svg(plan)}</figure>"
        for when, plan in (("Before", before), ("After", after))
    )
