from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import CostModelError, layer_activation_bytes, microbatches_in_flight, model_states_bytes


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


@pytest.mark.parametrize(("devices", "bytes_each"), [(1, 20.0), (4, 6.5), (64, 2.28125)])
def test_the_zero_2_estimator_of_deepspeed(devices: int, bytes_each: float):
    """2 P + 18 P / N: its optimizer keeps float32 gradients too (deepspeed/runtime/zero/stage_1_and_2.py)."""
    assert model_states_bytes(10**9, 2, devices, 16) == bytes_each * 10**9


#: Sequence length, width, heads of GPT-3 175B and MT-NLG 530B (Korthikanti et al., table 3).
LARGE = {"175B": (2048, 12288, 96), "530B": (2048, 20480, 128)}


@pytest.mark.parametrize(("model", "core", "saved"), [("175B", 80, 0.70), ("530B", 64, 0.65)])
def test_what_selective_recomputation_saves(model: str, core: int, saved: float):
    """5 a s / h is 80 and 64 for these models, against 34 for the rest: 70 % and 65 % less (section 5)."""
    seq_len, hidden, heads = LARGE[model]
    layer = partial(layer_activation_bytes, seq_len=seq_len, batch=1, hidden=hidden, num_heads=heads)
    whole, rest = layer(), layer(recompute="selective")
    assert whole == seq_len * hidden * (34 + core)
    assert rest == seq_len * hidden * 34
    assert round(1 - rest / whole, 2) == saved


def test_the_table_of_activations():
    """s = 8, b = 2, h = 16, a = 4, t = 2: s b h = 256 and 5 a s / h = 10."""

    layer = partial(layer_activation_bytes, seq_len=8, batch=2, hidden=16, num_heads=4)

    assert layer() == 256 * 44
    assert layer(num_tensor_parallel=2) == 256 * (10 + 12 + 5)
    assert layer(num_tensor_parallel=2, sequence_parallel=True) == 256 * 22
    assert layer(num_tensor_parallel=2, recompute="selective") == 256 * 22
    assert layer(num_tensor_parallel=2, sequence_parallel=True, recompute="selective") == 256 * 17
    assert layer(num_tensor_parallel=2, recompute="full") == 256 * 2


@given(tensor=st.integers(1, 64), batch=st.integers(1, 8))
def test_more_sharing_and_more_recomputation_save_memory(tensor: int, batch: int):
    def layer(recompute: str, *, shared: bool) -> float:
        return layer_activation_bytes(
            seq_len=1024, batch=batch, hidden=2048, num_heads=16, num_tensor_parallel=tensor,
            sequence_parallel=shared, recompute=recompute,  # pyright: ignore[reportArgumentType]
        )  # fmt: skip

    for shared in (False, True):
        assert layer("none", shared=shared) > layer("selective", shared=shared)
    for recompute in ("none", "selective"):
        assert layer(recompute, shared=True) <= layer(recompute, shared=False)


@pytest.mark.parametrize(
    ("schedule", "chunks", "held"),
    [
        ("gpipe", 1, [8, 8, 8, 8]),
        ("1f1b", 1, [4, 3, 2, 1]),
        ("interleaved", 1, [4, 3, 2, 1]),
        ("interleaved", 2, [11 / 2, 9 / 2, 7 / 2, 5 / 2]),
        ("interleaved", 4, [19 / 4, 17 / 4, 15 / 4, 13 / 4]),
    ],
)
def test_micro_batches_in_flight(schedule: str, chunks: int, held: list[float]):
    """Four stages, eight micro-batches. The first stage holds p (1 + (p - 1) / (p v)) when interleaved."""
    found = [
        microbatches_in_flight(schedule, stage=i, num_stages=4, num_microbatches=8, num_chunks=chunks)  # pyright: ignore[reportArgumentType]
        for i in range(4)
    ]
    assert found == held
    if schedule == "interleaved":
        assert chunks == 1 or found[0] == 4 * (1 + 3 / (4 * chunks))


@given(stage=st.integers(0, 7), m=st.integers(1, 20), chunks=st.integers(1, 4))
def test_no_schedule_holds_more_than_all_micro_batches(stage: int, m: int, chunks: int):
    pipeline = {"stage": stage, "num_stages": 8, "num_microbatches": m}
    one = microbatches_in_flight("1f1b", **pipeline)
    interleaved = microbatches_in_flight("interleaved", **pipeline, num_chunks=chunks)
    assert 0 < one <= m and 0 < interleaved <= m
    assert one <= interleaved or chunks == 1


def test_pipelines_and_layers_that_do_not_exist_are_refused():
    with pytest.raises(CostModelError, match="The stage is 4, but a number from 0 to 3"):
        microbatches_in_flight("1f1b", stage=4, num_stages=4, num_microbatches=8)
    with pytest.raises(CostModelError, match="The schedule is 'dapple', but only gpipe, 1f1b, interleaved exist"):
        microbatches_in_flight("dapple", stage=0, num_stages=4, num_microbatches=8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CostModelError, match="num_microbatches is 0"):
        microbatches_in_flight("gpipe", stage=0, num_stages=4, num_microbatches=0)
    with pytest.raises(CostModelError, match="recompute is 'all', but only none, selective, full exist"):
        layer_activation_bytes(seq_len=1, batch=1, hidden=1, num_heads=1, recompute="all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CostModelError, match="num_heads is 0"):
        layer_activation_bytes(seq_len=1, batch=1, hidden=1, num_heads=0)
