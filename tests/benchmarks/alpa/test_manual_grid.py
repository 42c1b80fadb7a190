"""What the grids of manual plans hold."""

from __future__ import annotations

from alpa_lite.cli.models.alpa_cases import CASES
from benchmarks.alpa.manual_grid import degrees, numbers_of_microbatches


def test_megatron_splits_tensors_within_a_host():
    found = [(d.planner.pipeline, d.planner.tensor, d.data) for d in degrees(CASES["gpt-39B"])]
    assert (16, 4, 1) in found
    assert all(pipeline * model * data == 64 and model <= 8 for pipeline, model, data in found)
    assert all(pipeline * model >= 64 * 39e9 * 14 / 64 / 16e9 for pipeline, model, _ in found)


def test_experts_lie_on_devices_that_divide_them():
    assert [d.planner.expert for d in degrees(CASES["moe-27B"])] == [1, 2, 4, 8, 16]


def test_convolutional_networks_have_no_more_stages_than_blocks():
    assert [d.planner.pipeline for d in degrees(CASES["wrn-13B"])] == [1, 2, 4, 8, 16]


def test_microbatches_grow():
    assert [*numbers_of_microbatches(CASES["gpt-2.6B"], 8)] == [128, 64, 32, 16, 8, 4, 2]
    assert [*numbers_of_microbatches(CASES["moe-70B"], 1024)] == []
    assert all(1520 % count == 0 for count in numbers_of_microbatches(CASES["wrn-13B"], 8))
