"""Groups: arguments whose paths differ in numbers alone, and collectives of one kind and place."""

import pytest

from alpa_lite.inspection.text.groups import (
    Argument,
    Arguments,
    arguments_of,
    axis_uses,
    crosses_hosts,
    group_arguments,
    is_optimizer_state,
)
from alpa_lite.sharding.specs import Spec

WHOLE, SPLIT = Spec(((), ())), Spec(((), ("model",)))


def arguments(**specs):
    return [Argument(name=name, stage=0, spec=spec, num_shards=1) for name, spec in specs.items()]


def test_layers_of_one_spec_become_one_group():
    found = group_arguments(arguments(**{f"layers/{i}/w": SPLIT for i in range(3)}, head=WHOLE))
    assert [(group.pattern, len(group.members)) for group in found] == [("layers/*/w", 3), ("head", 1)]


def test_layers_of_two_specs_become_two_groups_side_by_side():
    specs = {"layers/0/w": SPLIT, "layers/1/w": WHOLE, "layers/2/w": SPLIT, "z": WHOLE}
    assert [group.pattern for group in group_arguments(arguments(**specs))] == ["layers/{0, 2}/w", "layers/1/w", "z"]


def test_the_parts_of_a_stack_are_one_group():
    parts = {f"layers/w[{i}:{i + 6}]": SPLIT for i in (0, 6, 12, 18)}
    (group,) = group_arguments(arguments(**parts))
    assert group.pattern == "layers/w[*]" and len(group.members) == 4
    found = group_arguments(arguments(**{**parts, "layers/w[6:12]": WHOLE}))
    assert [group.pattern for group in found] == ["layers/w[0:6, 12:18, 18:24]", "layers/w[6:12]"]


def test_numbers_that_do_not_vary_stay():
    found = group_arguments(arguments(**{"opt/0/mu/layer_0/w": SPLIT, "opt/0/mu/layer_1/w": SPLIT}))
    assert [group.pattern for group in found] == ["opt/0/mu/layer_*/w"]


def test_rows_of_stacked_layers_become_one_group():
    names = [f"layers/w[{i}:{i + 6}]" for i in range(0, 24, 6)]
    (found,) = group_arguments(arguments(**dict.fromkeys(names, SPLIT)))
    assert found.pattern == "layers/w[*]" and [member.name for member in found.members] == names
    specs = dict(zip(names, (WHOLE, SPLIT, SPLIT, WHOLE), strict=True))
    assert [group.pattern for group in group_arguments(arguments(**specs))] == [
        "layers/w[0:6, 18:24]",
        "layers/w[6:12, 12:18]",
    ]
    numbered = {f"layer_{i}[{2 * j}:{2 * j + 2}]": SPLIT for i in range(2) for j in range(2)}
    assert [group.pattern for group in group_arguments(arguments(**numbered))] == ["layer_*[*]"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("state/opt_state/0/mu/w", True), ("mu/w", True), ("state/params/mu", False), ("params/w", False)],
)
def test_optimizer_state_is_known_by_its_path(name, expected):
    assert is_optimizer_state(name) == expected


def test_owner_is_the_parameter_with_the_longest_common_tail():
    names = ["params/w", "params/layers/0/w", "params/layers/1/w", "opt_state/0/mu/w", "opt_state/0/nu/layers/1/w"]
    found = Arguments(tuple(arguments(**dict.fromkeys([*names, "opt_state/0/count"], WHOLE))))
    assert found.owners == {"opt_state/0/mu/w": "params/w", "opt_state/0/nu/layers/1/w": "params/layers/1/w"}


def test_every_optimizer_array_of_a_plan_has_its_parameter(tensor_plan):
    found = arguments_of(tensor_plan)
    assert len(found.owners) == 2 * len([a for a in found.plain if "/params/" in a.name])
    assert not found.unlike_parameter


def test_zero_splits_optimizer_state_alone(zero_plan):
    found = arguments_of(zero_plan)
    assert found.unlike_parameter
    assert all(a.num_shards == 4 for a in found.unlike_parameter)


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
