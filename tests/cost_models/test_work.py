import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import CostModelError, Work


def test_a_trip_count_multiplies_the_totals_and_the_kernels():
    work = Work(flops=10, bytes=4, kind="matmul", dtype="bfloat16")
    loop = Work(flops=30, bytes=12, kind="matmul", dtype="bfloat16", num_kernels=3)
    assert work * 3 == 3 * work == loop
    assert work * 0 == Work(kind="matmul", dtype="bfloat16", num_kernels=0)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_nested_loops_multiply(outer: int, inner: int):
    work = Work(flops=7, bytes=3, kind="convolution")
    assert (work * inner) * outer == work * (inner * outer)


def test_numbers_of_numpy_are_numbers():
    flops, bytes = np.int64(6), np.float32(2)
    assert Work(flops=flops, bytes=bytes) == Work(flops=6, bytes=2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("flops", [-1, float("nan"), float("inf"), True, "many"])
def test_an_impossible_amount_is_refused_with_a_sentence(flops: float):
    with pytest.raises(CostModelError, match=r"^Work\.flops is .*, but a finite number of at least 0 is needed: count"):
        Work(flops=flops)


def test_an_unknown_kind_and_a_negative_count_are_refused():
    with pytest.raises(
        CostModelError, match=r"'gemm', but only these are priced: matmul, convolution, attention, elementwise\."
    ):
        Work(kind="gemm")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CostModelError, match=r"multiplies a Work is -1"):
        _ = Work() * -1
