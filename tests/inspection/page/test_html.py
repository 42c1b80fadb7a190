"""The page and the fragment: whole, self-contained, small, and safe whatever names a plan holds."""

import json
from dataclasses import replace

import pytest

from alpa_lite.inspection.page.html import plan_fragment, plan_html
from alpa_lite.inspection.text.groups import arguments_of
from tests.inspection.markup import parse

HOSTILE = "params/</script><img src=x onerror=alert(1)><!--/w"


def with_hostile_name(plan):
    first = plan.stages[0]
    name, spec = next(iter(first.specs.items()))
    specs = {HOSTILE if key == name else key: found for key, found in first.specs.items()}
    return replace(plan, stages=(replace(first, specs=specs), *plan.stages[1:])), spec


def test_page_is_whole_and_needs_no_network(pipeline_plan, tmp_path):
    path = tmp_path / "plan.html"
    pipeline_plan.to_html(path)
    text = path.read_text(encoding="utf-8")
    assert text == plan_html(pipeline_plan)
    found = parse(text)
    assert found.addresses and all(address.startswith("#") for address in found.addresses)
    assert {address[1:] for address in found.addresses} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    assert "url(" not in text and "@import" not in text and "http" not in text.replace("https://ui.perfetto.dev", "")
    assert "@media print" in text and "light-dark(" in text
    assert len(text) < 200_000


def test_data_are_json_that_no_name_ends(tensor_plan):
    hostile, _ = with_hostile_name(tensor_plan)
    hostile = replace(hostile, function="</script><b>", name="<!-- <script>")
    text = plan_html(hostile)
    found = parse(text)
    assert len(found.scripts) == 2 and "img" not in found.tags
    assert json.loads(found.scripts[0])["lanes"][0]["title"] == "predicted"
    assert HOSTILE in "".join(found.words)
    assert "</script><b>" in "".join(found.words)


def test_every_argument_is_named(pipeline_plan):
    words = "".join(parse(plan_html(pipeline_plan)).words)
    names = [argument.name for argument in arguments_of(pipeline_plan).all]
    assert len(names) > 20
    assert all(name in words for name in names)


def test_notebook_shows_the_fragment(tensor_plan):
    found = parse(tensor_plan._repr_html_())
    assert tensor_plan._repr_html_() == plan_fragment(tensor_plan)
    assert "script" not in found.tags and not found.addresses and found.tags.count("table") == 3
    assert len(plan_fragment(tensor_plan)) < 60_000


def test_text_where_a_notebook_shows_no_html(tensor_plan):
    class Printer:
        said = ""

        def text(self, words):
            self.said += words

    printer = Printer()
    tensor_plan._repr_pretty_(printer, False)
    assert printer.said == str(tensor_plan)


@pytest.mark.parametrize(
    "words", ["One step", "Memory", "Stages", "Parameters", "Communication", "step, predicted", "peak memory"]
)
def test_sections(tensor_plan, words):
    assert words in "".join(parse(plan_html(tensor_plan)).words)


def test_a_search_shows_what_else_was_priced(searched_plan):
    found = parse(plan_html(searched_plan))
    words = "".join(found.words)
    assert "alternatives" in found.ids and "best other plan" in words
    # In order of time, what does not work last.
    assert words.index("auto (chosen)") < words.index("slow plan") < words.index("Does not work")
    assert "alternatives" not in parse(plan_html(replace(searched_plan, alternatives=()))).ids


@pytest.fixture
def searched_plan(tensor_plan):
    step = tensor_plan.prediction.step_seconds
    others = (("no plan", float("inf")), ("slow plan", 3 * step), ("second", 1.5 * step))
    return replace(tensor_plan, name="auto", alternatives=others)
