"""A plan as one self-contained HTML page, and its view in a notebook. Light, dark and printed; no network access.

summary       the key numbers                                                                          `sections`
timeline      drawn by `timeline.js`, which zooms it together with the memory over time                `page_data`
tables        devices, stages, parameters as blocks, communication by axis, plans considered           `sections`
foot          version, date, hardware, fingerprint, and how to repeat it                               `provenance`

`page.js`, `timeline.js` and `page.css` are the scripts and the style of the page. Notebooks remove scripts, so they
get the static drawings.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from alpa_lite.inspection.page.argument_table import parameter_table
from alpa_lite.inspection.page.drawings import cluster_svg, layers_svg, timeline_svg
from alpa_lite.inspection.page.elements import STYLE, fragment_html, page_html, table_html
from alpa_lite.inspection.page.page_data import page_data, safe_json
from alpa_lite.inspection.page.provenance import provenance_html
from alpa_lite.inspection.page.sections import (
    KEYS,
    Section,
    alternatives_section,
    communication_section,
    devices_section,
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
    """Return the page; `Plan.to_html` describes the arguments."""
    sections = [
        summary_section(plan),
        timeline_section(plan, simulated=simulated, measured=measured),
        memory_section(plan, allocated_bytes),
        devices_section(plan),
        stages_section(plan),
        Section(id="parameters", title="Parameters", body=parameter_table(plan)),
        communication_section(plan),
        alternatives_section(plan),
        *notes_sections(plan),
    ]
    data = page_data(plan, simulated=simulated, measured=measured)
    return framed(f"{plan.function}: {plan.name}", sections, data, provenance_html(plan))


def framed(title: str, sections: Sequence[Section], data: dict[str, object], foot: str) -> str:
    """Return the page of some sections, with the scripts that draw its timeline from `data`."""
    shown = [section for section in sections if section.body]
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in shown)
    fragment = fragment_html(
        _BAR.format(links=links),
        "<main>",
        *map(str, shown),
        foot,
        f"<p class='keys'>{KEYS}</p>",
        "</main>",
        f'<script type="application/json" id="data">{safe_json(data)}</script>',
        f"<script>\n{_file('page.js')}\n{_file('timeline.js')}</script>",
        style=STYLE + _file("page.css"),
    )
    return page_html(title, fragment)


def plan_fragment(plan: Plan) -> str:
    """Return the plan as a notebook shows it."""
    return fragment_html(
        f"<h1>{escape(plan.function)}: {escape(plan.name)}</h1>",
        "".join(f"<p>{escape(line)}</p>" for line in headline(plan)),
        cluster_svg(plan),
        layers_svg(plan),
        "<h2>Predicted step</h2>",
        timeline_svg(plan),
        "<p>light: forward, dark: backward, brown: update; one row per stage, or per group of devices that runs several"
        "</p>",
        *(table_html(table) for table in plan_tables(plan)),
    )


def _file(name: str) -> str:
    return (files("alpa_lite.inspection") / "page" / name).read_text(encoding="utf-8")
