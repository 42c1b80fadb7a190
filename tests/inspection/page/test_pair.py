"""Two plans on one page."""

from dataclasses import replace

import pytest

from alpa_lite.inspection.page.pair import key_numbers
from alpa_lite.text import show_seconds
from tests.inspection.markup import parse
from tests.inspection.page.test_html import HOSTILE, with_hostile_name


def test_page_is_whole_and_needs_no_network(pipeline_plan, tensor_plan, tmp_path):
    pipeline_plan.diff(tensor_plan).to_html(tmp_path / "diff.html")
    text = (tmp_path / "diff.html").read_text(encoding="utf-8")
    found = parse(text)
    assert found.addresses and all(address.startswith("#") for address in found.addresses)
    assert {address[1:] for address in found.addresses} <= set(found.ids)
    assert len(set(found.ids)) == len(found.ids)
    words = "".join(found.words)
    for plan in (pipeline_plan, tensor_plan):
        assert show_seconds(plan.prediction.step_seconds) in words and plan.name in words
    assert all(title in words for title in ("Decisions", "Specs", "Collectives per step", "micro-batches"))


def test_key_numbers(pipeline_plan):
    twice = replace(pipeline_plan, prediction=replace(pipeline_plan.prediction, step_seconds=2.0, transfer_seconds=0.0))
    once = replace(pipeline_plan, prediction=replace(pipeline_plan.prediction, step_seconds=1.0))
    rows = {name: rest for name, *rest in key_numbers(once, twice).rows}
    assert rows["step, predicted"] == ["1.00 s", "2.00 s", "2.00×"]
    assert rows["transfers between stages"][1:] == ["0 s", "0.00×"]
    # Nothing is a multiple of zero.
    assert {name: rest for name, *rest in key_numbers(twice, once).rows}["transfers between stages"][2] == ""


def test_equal_plans_have_no_table_of_differences(pipeline_plan):
    found = parse(pipeline_plan.diff(pipeline_plan)._repr_html_())
    assert "The plans decide the same." in "".join(found.words) and found.tags.count("table") == 1


@pytest.mark.parametrize("first", [True, False])
def test_names_are_text(tensor_plan, pipeline_plan, first, tmp_path):
    hostile, _ = with_hostile_name(tensor_plan)
    pair = hostile.diff(pipeline_plan) if first else pipeline_plan.diff(hostile)
    pair.to_html(tmp_path / "diff.html")
    found = parse((tmp_path / "diff.html").read_text(encoding="utf-8"))
    assert "img" not in found.tags and HOSTILE in "".join(found.words)


def test_it_prints_the_differences(pipeline_plan, tensor_plan):
    pair = pipeline_plan.diff(tensor_plan)
    assert "micro-batches" in str(pair) and "\n" not in repr(pair) and len(repr(pair)) < 400
