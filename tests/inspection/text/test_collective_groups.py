"""Collectives by mesh axis."""

import pytest

from alpa_lite.inspection.text.collective_groups import axis_uses, crosses_hosts


def test_every_byte_is_counted_once(tensor_plan, pipeline_plan):
    for plan in (tensor_plan, pipeline_plan):
        uses, listed = axis_uses(plan), plan.prediction.collectives
        assert sum(use.bytes for use in uses) == pytest.approx(sum(use.bytes * use.count for use in listed))
        assert sum(use.seconds for use in uses) == pytest.approx(plan.prediction.collective_seconds)
        assert len({(use.axis, use.kind) for use in uses}) == len(uses)


def test_axes(tensor_plan):
    uses = axis_uses(tensor_plan)
    assert {(use.axis, use.devices) for use in uses} >= {("data", "2"), ("model", "4")}
    assert all(use.links == "inside a host" for use in uses)


def test_links(tensor_plan):
    (stage,) = tensor_plan.stages  # data=2 × model=4 on eight devices
    assert not crosses_hosts(stage, "data", 8)
    assert crosses_hosts(stage, "data", 4) and not crosses_hosts(stage, "model", 4)
    assert crosses_hosts(stage, "model", 2)
    assert crosses_hosts(stage, "data·model", 4)
    assert not crosses_hosts(stage, "another", 1)
