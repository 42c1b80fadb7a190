import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import CostModelError, model_states_bytes


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_example_of_the_zero_paper(stage: int, gigabytes: float):
    """7.5 billion parameters, mixed-precision Adam, 64 devices (Rajbhandari et al., SC 2020, figure 1)."""
    assert round(model_states_bytes(7.5e9, stage, 64) / 1e9, 1) == gigabytes


def test_the_four_formulas():
    assert [model_states_bytes(100, stage, 4) for stage in range(4)] == [1600, 700, 550, 400]
    full_precision = model_states_bytes(100, 0, 4, 8, parameter_bytes=4, gradient_bytes=4)
    assert full_precision == 1600


@given(parameters=st.integers(0, 10**12), devices=st.integers(1, 4096))
def test_each_stage_saves_and_one_device_saves_nothing(parameters: int, devices: int):
    stages = [model_states_bytes(parameters, stage, devices) for stage in range(4)]
    assert stages == sorted(stages, reverse=True)
    assert {model_states_bytes(parameters, stage, 1) for stage in range(4)} == {16 * parameters}


def test_impossible_arguments_are_refused():
    with pytest.raises(CostModelError, match="ZeRO stage is 4, but only 0, 1, 2 and 3 exist"):
        model_states_bytes(1, 4, 1)
    with pytest.raises(CostModelError, match="num_data_parallel is 0"):
        model_states_bytes(1, 1, 0)
    with pytest.raises(CostModelError, match="num_parameters is -1"):
        model_states_bytes(-1, 1, 1)
