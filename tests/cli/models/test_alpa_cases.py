"""The models of Alpa's evaluation: sizes, steps, and the count of FLOPs against measured pairs.

Pairs of seconds and TFLOPS per device are those of Zheng et al., OSDI 2022, figure 7 (alpa-projects/alpa, branch
osdi22_artifact).
"""

from __future__ import annotations

import pytest

import alpa_lite as al
from alpa_lite.cli.models.alpa_cases import CASES, FAMILIES, PUBLISHED, CountedConvolution
from benchmarks.alpa.fixed_plans import without_recomputation


def test_every_family_has_a_case_for_each_cluster():
    assert len(PUBLISHED) == 21
    for family in FAMILIES:
        assert [case.num_devices for case in PUBLISHED if case.family == family] == [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: case.id)
def test_parameters_are_those_of_the_paper(case):
    assert case.parameters == pytest.approx(case.published_parameters, rel=2.5e-3)
    assert case.cluster.num_devices == case.num_devices


def test_the_larger_models():
    assert CASES["gpt-76B"].parameters == pytest.approx(76e9, rel=0.01)
    assert CASES["gpt-175B"].parameters == pytest.approx(175e9, rel=0.01)
    assert CASES["gpt-175B"].cluster.num_hosts == 128


@pytest.mark.parametrize("name", ["gpt-350M", "moe-380M", "wrn-250M"])
def test_steps_trace_and_cut_into_microbatches(name):
    case = CASES[name]
    step = al.parallelize(case.train_step()).trace(*case.arguments()).step(8).step
    assert step.num_microbatches == 8
    assert step.batch.size is not None and case.global_batch % step.batch.size == 0


def test_tokens_that_are_routed_together_are_one_sample():
    _, batch = CASES["moe-380M"].arguments()
    assert batch["tokens"].shape == (512, 2, 1024)


#: Seconds of a step and TFLOPS per device: GPT and MoE with pipelines alone, Wide-ResNet with sharding alone.
PAIRS = {
    "gpt-350M": (74.3, 44.23),
    "gpt-760M": (58.9, 57.94),
    "gpt-1.3B": (53.9, 53.99),
    "gpt-2.6B": (51.6, 56.57),
    "gpt-6.7B": (60.3, 59.68),
    "gpt-15B": (83.2, 49.80),
    "gpt-39B": (102.8, 50.55),
    "moe-690M": (19.4, 40.75),
    "moe-1.3B": (20.0, 37.52),
    "moe-2.4B": (15.7, 39.80),
    "moe-10B": (21.0, 31.12),
    "wrn-250M": (44.0, 8.37),
    "wrn-500M": (42.5, 8.48),
    "wrn-1B": (45.1, 8.15),
    "wrn-2B": (46.6, 7.71),
    "wrn-4B": (77.8, 4.72),
    "wrn-6.8B": (154.2, 1.96),
}


@pytest.mark.parametrize("name", PAIRS)
def test_time_and_rate_give_the_count_back(name):
    seconds, tflops = PAIRS[name]
    case = without_recomputation(CASES[name])
    assert case.tflops_per_device(seconds) == pytest.approx(tflops, rel=5e-3)


def test_a_convolutional_network_that_is_computed_again_counts_a_forward_pass_more():
    case = CASES["wrn-1B"]
    assert case.flops_per_step == pytest.approx(4 / 3 * without_recomputation(case).flops_per_step)


def test_the_published_count():
    assert CASES["gpt-39B"].flops_per_step == pytest.approx(333.7e15, rel=1e-3)


def test_padding_is_not_counted():
    whole = CountedConvolution(kernel=3, inputs=1, outputs=1, side=4)
    assert whole.flops == 2 * (2 + 3 + 3 + 2) ** 2
    assert CountedConvolution(kernel=3, inputs=1, outputs=1, side=4, stride=2).flops == 2 * (2 + 3) ** 2
    assert CountedConvolution(kernel=1, inputs=2, outputs=3, side=4).flops == 2 * 6 * 16
