from dataclasses import replace

import pytest

from cost_models import Cluster, ClusterError, Device


def make_device(**peaks: float) -> Device:
    return Device(name="d", memory_bytes=1, memory_bandwidth=1, peak_flops=peaks, launch_seconds=0, dispatch_seconds=0)


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        ("float32", 4),  # as TF32
        ("bfloat16", 8),  # as float16
        ("float16", 8),
        ("float8_e4m3fn", 8),
        ("int32", 1),
        ("float64", 1),
    ],
)
def test_matrix_units_fall_back_to_the_nearest_type(dtype: str, rate: float):
    device = make_device(float32=1, tensorfloat32=4, float16=8)
    assert device.peak(dtype) == rate
    assert device.peak(dtype, matrix=False) == 1


def test_stated_rates_are_used():
    device = make_device(float32=1, bfloat16=2, float16=3, float8=5, float64=0.5, int8=7)
    names = ("float32", "bfloat16", "float16", "float8_e5m2", "float64", "int8")
    assert [device.peak(name) for name in names] == [1, 2, 3, 5, 0.5, 7]
    assert device.peak("float64", matrix=False) == 0.5


def test_devices_hash_and_do_not_depend_on_the_order_of_rates():
    first, second = make_device(float32=1, float16=2), make_device(float16=2, float32=1)
    assert first == second and hash(first) == hash(second)
    assert replace(first, name="e").peaks == {"float16": 2, "float32": 1}


def test_a_device_without_float32_is_refused():
    with pytest.raises(ClusterError, match=r"rates for \['bfloat16'\], but 'float32' is needed"):
        make_device(bfloat16=1)


@pytest.mark.parametrize("field", ["memory_bytes", "memory_bandwidth"])
def test_rates_of_a_device_are_above_zero(cluster: Cluster, field: str):
    with pytest.raises(ClusterError, match=f"The device 'toy': {field} is 0, but a finite number above 0 is needed"):
        replace(cluster.device, **{field: 0})
    with pytest.raises(ClusterError, match=r"peak_flops\['float32'\] is 0"):
        make_device(float32=0)
    with pytest.raises(ClusterError, match="launch_seconds is -1"):
        replace(cluster.device, launch_seconds=-1)
