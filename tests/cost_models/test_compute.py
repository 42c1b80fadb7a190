import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Cluster, Work, WorkKind
from cost_models.compute import FLOPS_EFFICIENCY, MEMORY_EFFICIENCY, achieved_fraction, compute_seconds
from cost_models.work import WORK_KINDS

amounts = st.floats(0, 1e18)
kinds = st.sampled_from(WORK_KINDS)


def test_a_compute_bound_matmul(cluster: Cluster):
    work = Work(flops=1e12, bytes=1e6, kind="matmul", dtype="float16")
    assert compute_seconds(work, cluster.device) == pytest.approx(5e-6 + 1e12 / (0.8 * 100e12))


def test_a_memory_bound_matmul(cluster: Cluster):
    work = Work(flops=1e6, bytes=1e9, kind="matmul", dtype="float16")
    assert compute_seconds(work, cluster.device) == pytest.approx(5e-6 + 1e9 / (0.8 * 1e12))


def test_elementwise_work_runs_on_vector_units_and_is_fused(cluster: Cluster):
    work = Work(flops=1e12, bytes=1e6, dtype="float16")
    assert compute_seconds(work, cluster.device) == pytest.approx(1e12 / (0.8 * 10e12))
    assert compute_seconds(Work(bytes=1e9), cluster.device) == pytest.approx(1e9 / (MEMORY_EFFICIENCY * 1e12))


@pytest.mark.parametrize("kind", WORK_KINDS)
def test_no_work_takes_no_time(cluster: Cluster, kind: WorkKind):
    assert compute_seconds(Work(kind=kind), cluster.device) == 0
    assert achieved_fraction(Work(kind=kind), cluster.device) == 0


@given(flops=amounts, bytes=amounts, count=st.integers(1, 1000), kind=kinds)
def test_a_loop_costs_its_trip_count(cluster: Cluster, flops: float, bytes: float, count: int, kind: WorkKind):
    work = Work(flops=flops, bytes=bytes, kind=kind)
    assert compute_seconds(work * count, cluster.device) == pytest.approx(count * compute_seconds(work, cluster.device))


@given(flops=amounts, bytes=amounts, more=st.floats(1, 10), kind=kinds)
def test_more_work_never_takes_less(cluster: Cluster, flops: float, bytes: float, more: float, kind: WorkKind):
    seconds = compute_seconds(Work(flops=flops, bytes=bytes, kind=kind), cluster.device)
    assert compute_seconds(Work(flops=flops * more, bytes=bytes, kind=kind), cluster.device) >= seconds
    assert compute_seconds(Work(flops=flops, bytes=bytes * more, kind=kind), cluster.device) >= seconds


@given(flops=st.floats(1, 1e17), more=st.floats(1.01, 100))
def test_small_matmuls_lose(cluster: Cluster, flops: float, more: float):
    small, large = (
        achieved_fraction(Work(flops=amount, kind="matmul", dtype="float16"), cluster.device)
        for amount in (flops, flops * more)
    )
    assert 0 < small < large < FLOPS_EFFICIENCY["matmul"]
    formula = 0.8 * flops / (flops + 0.8 * 100e12 * 5e-6)
    assert small == pytest.approx(formula)
