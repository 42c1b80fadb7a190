"""The page."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest

from alpa_lite.inspection.html import plan_fragment, plan_html, timeline_svg
from alpa_lite.inspection.timeline import predicted_timeline

VOID = {"meta", "br", "link"}


class Checker(HTMLParser):
    """Checks that tags are closed in order, and collects tags and addresses."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.addresses = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(text):
    checker = Checker()
    checker.feed(text)
    assert not checker.open
    return checker


def test_page_is_whole_and_needs_no_network(pipeline_plan, tmp_path):
    path = tmp_path / "plan.html"
    pipeline_plan.to_html(path)
    text = path.read_text()
    assert text == plan_html(pipeline_plan)
    found = parse(text)
    assert not found.addresses and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert found.tags.count("table") == 3
    assert "script" not in found.tags


def test_notebook_shows_the_fragment(tensor_plan):
    assert tensor_plan._repr_html_() == plan_fragment(tensor_plan)
    parse(plan_fragment(tensor_plan))


def test_a_bar_per_task(pipeline_plan):
    found = parse(timeline_svg(pipeline_plan))
    assert found.tags.count("rect") == len(predicted_timeline(pipeline_plan).bars)


def test_names_are_escaped(tensor_plan):
    text = plan_html(replace(tensor_plan, function="<script>alert(1)</script>"))
    assert "<script>" not in text
    parse(text)


@pytest.mark.parametrize("words", ["Stages", "Parameters", "Collectives", "Predicted step"])
def test_sections(tensor_plan, words):
    assert words in plan_html(tensor_plan)


def test_stages_on_the_same_devices_share_a_row(interleaved_plan, pipeline_plan):
    parse(plan_html(interleaved_plan))
    svg = timeline_svg(interleaved_plan)
    assert ">stage 0, 2</text>" in svg and ">stage 1, 3</text>" in svg
    heights = [svg.split("viewBox=")[1].split('"')[1] for svg in (svg, timeline_svg(pipeline_plan))]
    assert heights[0] == heights[1]
    bars = svg.count("<rect")
    assert bars == 4 * (2 * interleaved_plan.num_microbatches + 1)
