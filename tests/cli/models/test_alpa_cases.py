"""The cases of Alpa's evaluation: sizes as published, steps that trace."""

from __future__ import annotations

import pytest

import alpa_lite as al
from alpa_lite.cli.models.alpa_cases import CASES, FAMILIES, PUBLISHED


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
    assert step.batch_size is not None and case.global_batch % step.batch_size == 0


def test_tokens_that_are_routed_together_are_one_sample():
    _, batch = CASES["moe-380M"].arguments()
    assert batch["tokens"].shape == (512, 2, 1024)
