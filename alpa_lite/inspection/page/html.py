"""A plan as one self-contained HTML page, and as what a notebook shows of it. Light, dark and on paper; no network.

summary       what one sees first: numbers, devices and layers by stage                                `sections`
timeline      drawn by the page's script: it zooms, and memory over time with it                       `page_data`
tables        stages, parameters as blocks, communication by axis, plans considered                    `sections`

The script and the style of the page are the files of `page/`. In a notebook there is no script: the still drawings.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from alpa_lite.inspection.page.drawings import cluster_svg, layers_svg, timeline_svg
from alpa_lite.inspection.page.elements import STYLE as STYLE
from alpa_lite.inspection.page.elements import fragment_html
from alpa_lite.inspection.page.elements import page_html as page_html
from alpa_lite.inspection.page.elements import table_html as table_html
from alpa_lite.inspection.page.page_data import page_data, safe_json
from alpa_lite.inspection.page.parameter_table import parameter_table
from alpa_lite.inspection.page.sections import (
    KEYS,
    Section,
    alternatives_section,
    communication_section,
    memory_section,
    notes_sections,
    stages_section,
    summary_section,
    timeline_section,
)
from alpa_lite.inspection.text.tables import headline, plan_tables
from alpa_lite.plan.plan import Plan
from alpa_lite.schedule.tasks import SpanLike

_BAR = """<header class="bar">
<a class="skip" href="#summary">To the summary</a>
<nav aria-label="Sections">{links}</nav>
<label class="search"><span>Search</span> <input type="search" id="search" placeholder="parameter, line, stage 2 …"
  autocomplete="off" spellcheck="false" aria-describedby="found" aria-keyshortcuts="/"></label>
<span id="found" role="status" aria-live="polite"></span>
<button type="button" id="theme" aria-live="polite">colours: as the system</button>
</header>"""


def plan_html(
    plan: Plan,
    *,
    simulated: Sequence[SpanLike] | None = None,
    measured: Sequence[SpanLike] | None = None,
    allocated_bytes: Sequence[float] | None = None,
) -> str:
    """The page; for the arguments see `Plan.to_html`."""
    sections = [
        summary_section(plan),
        timeline_section(plan, simulated=simulated, measured=measured),
        memory_section(plan, allocated_bytes),
        stages_section(plan),
        Section(id="parameters", title="Parameters", body=parameter_table(plan)),
        communication_section(plan),
        alternatives_section(plan),
        *notes_sections(plan),
    ]
    shown = [section for section in sections if section.body]
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in shown)
    data = safe_json(page_data(plan, simulated=simulated, measured=measured))
    fragment = fragment_html(
        _BAR.format(links=links),
        "<main>",
        *map(str, shown),
        f"<p class='keys'>{KEYS}</p>",
        "</main>",
        f'<script type="application/json" id="data">{data}</script>',
        f"<script>\n{_file('page.js')}</script>",
        style=STYLE + _file("page.css"),
    )
    return page_html(f"{plan.function}: {plan.name}", fragment)


def plan_fragment(plan: Plan) -> str:
    """The plan as a notebook shows it."""
    return fragment_html(
        f"<h1>{escape(plan.function)}: {escape(plan.name)}</h1>",
        "".join(f"<p>{escape(line)}</p>" for line in headline(plan)),
        cluster_svg(plan),
        layers_svg(plan),
        "<h2>Predicted step</h2>",
        timeline_svg(plan),
        "<p>blue: forward, green: backward, orange: update; one row per stage, or per group of devices that runs "
        "several</p>",
        *(table_html(table) for table in plan_tables(plan)),
    )


def _file(name: str) -> str:
    return (files("alpa_lite.inspection") / "page" / name).read_text(encoding="utf-8")
