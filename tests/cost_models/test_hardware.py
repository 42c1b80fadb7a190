import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import Cluster, ClusterError, Device, Link
from cost_models.catalogue import link_from_json
from cost_models.hardware import moving_seconds


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


def test_a_reserve_is_a_part_of_the_memory(cluster: Cluster):
    device = replace(cluster.device, memory_bytes=8e9, memory_reserve=0.25)
    assert (device.usable_bytes, device.reserved_bytes) == (6e9, 2e9)
    for share in (1.0, -0.1, float("nan")):
        with pytest.raises(ClusterError, match="memory_reserve is"):
            replace(device, memory_reserve=share)


def test_the_memory_that_is_given_by_default_is_a_part_of_it(cluster: Cluster):
    device = replace(cluster.device, memory_bytes=8e9, memory_reserve=0.1, default_memory_fraction=0.75)
    assert (device.usable_bytes, device.default_bytes) == (7.2e9, 6e9)
    for share in (1.1, 0.0, float("nan")):
        with pytest.raises(ClusterError, match="default_memory_fraction is"):
            replace(device, default_memory_fraction=share)


amounts = st.floats(1e-3, 1e15)
rates = st.floats(1e3, 1e13)
ramps = st.floats(0, 1)


def make_link(**changes: object) -> Link:
    return Link(**{"bandwidth_bytes_per_second": 100.0, "latency_seconds": 3.0, **changes})  # pyright: ignore[reportArgumentType]


def test_a_link_prices_a_message():
    assert make_link(efficiency=0.5).seconds(200) == 3 + 200 / 50
    # Half way up the ramp: bytes = ramp * rate / 3.
    assert make_link(ramp_seconds=6.0).seconds(200) == 3 + 200 / 100 + 6 / 2


def test_short_messages_move_at_a_quarter_of_the_rate_and_long_ones_lose_the_ramp():
    assert moving_seconds(1e-3, 1e9, 1e-3) == pytest.approx(4 * 1e-3 / 1e9)
    assert moving_seconds(1e15, 1e9, 1e-3) == pytest.approx(1e6 + 1e-3, rel=1e-12)
    assert moving_seconds(0, 1e9, 1e-3) == 0


@given(bytes=amounts, rate=rates, ramp=ramps, factor=st.floats(1, 1e3))
def test_time_rises_with_bytes_and_ramp_and_falls_with_the_rate(bytes: float, rate: float, ramp: float, factor: float):
    seconds = moving_seconds(bytes, rate, ramp)
    rounded = seconds * (1 + 1e-12)
    assert seconds <= moving_seconds(bytes * factor, rate, ramp) * (1 + 1e-12)
    assert seconds <= moving_seconds(bytes, rate, ramp * factor) * (1 + 1e-12)
    assert moving_seconds(bytes, rate * factor, ramp) <= rounded
    assert bytes / rate <= rounded and seconds <= 4 * bytes / rate * (1 + 1e-12)


@given(bytes=amounts, rate=rates, ramp=ramps, factor=st.floats(1, 1e3))
def test_many_bytes_take_no_longer_than_as_many_parts(bytes: float, rate: float, ramp: float, factor: float):
    assert moving_seconds(bytes * factor, rate, ramp) <= factor * moving_seconds(bytes, rate, ramp) * (1 + 1e-12)


def test_groups_of_some_sizes_have_efficiencies_of_their_own():
    mesh = make_link(efficiency=0.9, efficiency_by_members={2: 0.15, 4: 0.6})
    assert [mesh.rate(n) for n in (2, 3, 4, 8)] == pytest.approx([15, 90, 60, 90])
    assert mesh.bytes_per_second == 90
    assert hash(mesh) == hash(make_link(efficiency=0.9, efficiency_by_members={4: 0.6, 2: 0.15}))


def test_members_that_are_no_neighbours_may_be_joined_by_other_links():
    mesh = make_link(efficiency=0.9, efficiency_by_members={"4": 0.6, "4/2": 0.3})
    assert [mesh.rate(4), mesh.rate(4, 2), mesh.rate(4, 4), mesh.rate(2, 2)] == pytest.approx([60, 30, 60, 90])
    assert mesh.to_json()["efficiency_by_members"] == {"4": 0.6, "4/2": 0.3}
    assert replace(mesh, latency_seconds=1.0).efficiency_by_members == mesh.efficiency_by_members


def test_pairs_may_have_a_rate_of_their_own():
    """Where it is not given they have that of the ring."""
    mesh = make_link(
        efficiency=0.9, efficiency_by_members={"4": 0.6, "4/2": 0.3}, all_to_all_efficiency_by_members={4: 0.4, 8: 0.2}
    )
    lies = [(4, 1), (4, 2), (8, 1), (2, 1)]
    assert [mesh.rate(*lie) for lie in lies] == pytest.approx([60, 30, 90, 90])
    assert [mesh.rate(*lie, all_to_all=True) for lie in lies] == pytest.approx([40, 30, 20, 90])


@pytest.mark.parametrize(
    ("torus", "members", "share", "rounds"),
    [
        ((16, 16), 256, 1, 16),
        ((16, 16), 16, 1 / 2, 8),
        ((16, 16), 32, 3 / 4, 9),
        ((16, 16), 8, 2 / 4, 7),
        ((16, 16), 2, 1 / 4, 1),
        ((4, 4, 4), 64, 1, 6),
        ((4, 4, 4), 4, 1 / 3, 2),
        ((4, 4, 4), 3, 1 / 6, 2),
        ((4, 4, 4), 1024, 1, 21),
        ((), 8, 1, 7),
    ],
)
def test_shares_and_rounds_of_a_torus(torus: tuple[int, ...], members: int, share: float, rounds: int):
    link = make_link(torus=torus)
    assert link.torus_share(members) == pytest.approx(share)
    assert link.torus_rounds(members) == rounds


def test_a_link_survives_json():
    link = make_link(
        efficiency=0.7,
        ramp_seconds=1e-4,
        skew_seconds=1e-3,
        num_cards=4,
        efficiency_by_members={2: 0.5, "4/2": 0.25},
        all_to_all_efficiency_by_members={8: 0.3, "4/2": 0.2},
        torus=(4, 4),
        in_network_reduction=True,
    )
    assert link_from_json({**link.to_json(), "bandwidth_bytes_per_second": 1e9, "latency_seconds": 0.1}, "x") == Link(
        bandwidth_bytes_per_second=1e9,
        latency_seconds=0.1,
        efficiency=0.7,
        ramp_seconds=1e-4,
        skew_seconds=1e-3,
        num_cards=4,
        efficiency_by_members={2: 0.5, "4/2": 0.25},
        all_to_all_efficiency_by_members={8: 0.3, "4/2": 0.2},
        torus=(4, 4),
        in_network_reduction=True,
    )
    assert set(make_link().to_json()) == {"bandwidth_bytes_per_second", "latency_seconds", "efficiency"}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"bandwidth_bytes_per_second": 0}, "bandwidth_bytes_per_second is 0, .* give it in bytes"),
        ({"latency_seconds": -1}, "latency_seconds is -1"),
        ({"ramp_seconds": math.inf}, "ramp_seconds is inf"),
        ({"skew_seconds": -1}, "skew_seconds is -1"),
        ({"efficiency": 0}, "efficiency is 0"),
        ({"efficiency": 1.5}, "efficiency is 1.5, but it is a fraction of at most 1"),
        ({"efficiency_by_members": {2: 2.0}}, r"efficiency_by_members\[2\] is 2.0, but it is a fraction"),
        ({"efficiency_by_members": {"four": 0.5}}, "'four', but .* number of members"),
        ({"all_to_all_efficiency_by_members": {8: 0}}, r"all_to_all_efficiency_by_members\[8\] is 0"),
        ({"all_to_all_efficiency_by_members": {"x": 0.5}}, r"Link.all_to_all_efficiency_by_members has the key 'x'"),
        ({"num_cards": 0}, "num_cards is 0, .* count the cards of a host"),
        ({"torus": (4, 0)}, "torus is 0, .* count the devices along each ring"),
        ({"in_network_reduction": "yes"}, "in_network_reduction is 'yes', but true or false is needed"),
    ],
)
def test_impossible_links_are_refused(values: dict[str, object], sentence: str):
    with pytest.raises(ClusterError, match=sentence):
        make_link(**values)
