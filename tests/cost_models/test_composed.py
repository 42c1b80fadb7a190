import math
from dataclasses import FrozenInstanceError, replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models import (
    Backend,
    Cluster,
    ClusterError,
    Collective,
    ComposedCostModel,
    CostModel,
    CostModelError,
    Device,
    Group,
    Product,
    Work,
    WorkKind,
    load_cluster,
)
from cost_models.communication import collective_seconds, transfer_seconds
from cost_models.composed import achieved_fraction, compute_seconds, estimate, least_seconds, sustained_flops
from cost_models.work import WORK_KINDS

amounts = st.floats(0, 1e18)
sizes = st.integers(1, 5000)
kinds = st.sampled_from(WORK_KINDS)
UNITS = Device(
    name="four units",
    memory_bytes=1e9,
    memory_bandwidth=1e12,
    peak_flops={"float32": 1e12, "float16": 8e12},
    launch_seconds=0.0,
    dispatch_seconds=0.0,
    num_units=4,
    tiles=((128, 128),),
    matrix_efficiency={"float32": 0.5, "float16": 1.0},
    memory_efficiency=0.5,
)


def product_seconds(rows: int, columns: int, depth: int, count: int = 1, device: Device = UNITS) -> float:
    product = Product(rows=rows, columns=columns, depth=depth, count=count)
    return compute_seconds(Work(flops=product.flops, kind="matmul", dtype="float16", product=product), device)


def test_a_compute_bound_matmul(cluster: Cluster):
    work = Work(flops=1e12, bytes=1e6, kind="matmul", dtype="float16")
    assert compute_seconds(work, cluster.device) == pytest.approx(5e-6 + 1e12 / (0.8 * 100e12))


def test_a_memory_bound_matmul(cluster: Cluster):
    work = Work(flops=1e6, bytes=1e9, kind="matmul", dtype="float16")
    assert compute_seconds(work, cluster.device) == pytest.approx(5e-6 + 1e9 / (0.8 * 1e12))


def test_elementwise_work_runs_on_vector_units_and_is_fused(cluster: Cluster):
    work = Work(flops=1e12, bytes=1e6, dtype="float16", num_kernels=0)
    assert compute_seconds(work, cluster.device) == pytest.approx(1e12 / (0.8 * 10e12))
    assert compute_seconds(Work(bytes=1e9, num_kernels=0), cluster.device) == pytest.approx(1e9 / (0.8 * 1e12))


@pytest.mark.parametrize("kind", WORK_KINDS)
def test_a_kernel_without_work_costs_its_launch(cluster: Cluster, kind: WorkKind):
    assert compute_seconds(Work(kind=kind), cluster.device) == cluster.device.launch_seconds
    assert compute_seconds(Work(kind=kind, num_kernels=0), cluster.device) == 0
    assert achieved_fraction(Work(kind=kind, num_kernels=0), cluster.device) == 0


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
    assert 0 < small < large < 0.8
    formula = 0.8 * flops / (flops + 0.8 * 100e12 * 5e-6)
    assert small == pytest.approx(formula)


def test_heads_are_padded_to_whole_registers():
    def seconds(width: float, lanes: int) -> float:
        shape = Product(rows=1 << 10, columns=1 << 10, depth=width, count=1)
        work = Work(flops=shape.flops, kind="attention", dtype="float16", product=shape)
        return estimate(work, replace(UNITS, lanes=lanes)).arithmetic_seconds

    assert seconds(64, 128) == pytest.approx(seconds(128, 128))
    assert seconds(128, 128) == seconds(128, 1)
    assert seconds(128 + 1e-12, 128) == pytest.approx(seconds(128, 128))  # a rounded quotient
    assert seconds(129, 128) == pytest.approx(seconds(256, 128))
    assert seconds(64, 1) == pytest.approx(seconds(128, 1) * (64 + 32) / (128 + 32))
    with pytest.raises(ClusterError, match="lanes is 0, but a whole number"):
        replace(UNITS, lanes=0)


def test_each_type_sustains_its_own_part_of_its_peak():
    assert sustained_flops(Work(kind="matmul", dtype="float16"), UNITS) == 8e12
    assert sustained_flops(Work(kind="matmul", dtype="float32"), UNITS) == 0.5e12
    assert sustained_flops(Work(kind="convolution", dtype="float16"), UNITS) == 0.75 * 8e12
    assert sustained_flops(Work(kind="elementwise", dtype="float16"), UNITS) == 0.5 * 1e12


def test_blocks_are_padded_and_the_last_wave_waits():
    full = product_seconds(256, 256, 4096)
    assert full == pytest.approx(2 * 256 * 256 * 4096 / 8e12)
    assert product_seconds(129, 129, 4096) == pytest.approx(full)  # the same four blocks
    assert product_seconds(256, 257, 4096) == pytest.approx(2 * full)  # six blocks on four units: two waves
    assert product_seconds(256, 512, 4096) == pytest.approx(2 * full)  # eight: two waves, both full


def test_idle_units_share_the_depth_of_few_blocks():
    one_block = product_seconds(128, 128, 8192)
    assert one_block == pytest.approx(2 * 128 * 128 * 8192 / 8e12)  # four units, a quarter of the depth each
    assert product_seconds(128, 128, 256) == pytest.approx(2 * 128 * 128 * 256 / 2e12)  # too short to be shared


def test_units_lose_the_depth_that_fills_them():
    filling = replace(UNITS, fill_depth=64)
    assert product_seconds(256, 256, 64, device=filling) == pytest.approx(2 * product_seconds(256, 256, 64))


def test_small_products_take_small_tiles():
    both = replace(UNITS, tiles=((128, 128), (32, 32)))
    small = Product(rows=32, columns=32, depth=4096, count=4)
    work = Work(flops=small.flops, kind="matmul", dtype="float16", product=small)
    assert estimate(work, both).tile == (32, 32)
    assert compute_seconds(work, both) < compute_seconds(work, UNITS) / 8
    assert product_seconds(4096, 4096, 4096, device=both) == pytest.approx(product_seconds(4096, 4096, 4096))


@given(sizes, sizes, sizes, st.integers(1, 64), st.sampled_from(("rows", "columns", "depth", "count")), sizes)
def test_larger_products_never_take_less(rows: int, columns: int, depth: int, count: int, grown: str, by: int):
    device = replace(UNITS, tiles=((256, 128), (128, 128), (64, 64)), num_units=7, fill_depth=30)
    shape = {"rows": rows, "columns": columns, "depth": depth, "count": count}
    larger = shape | {grown: shape[grown] + by}
    assert product_seconds(**larger, device=device) >= product_seconds(**shape, device=device) * (1 - 1e-12)


@given(sizes, sizes, sizes, st.integers(1, 64))
def test_a_tile_takes_as_long_as_its_waves(rows: int, columns: int, depth: int, count: int):
    blocks = count * ceil(rows / 128) * ceil(columns / 128)
    waves = -(-blocks // 4)
    if blocks >= 4:
        assert product_seconds(rows, columns, depth, count) == pytest.approx(waves * 4 * 2 * 128 * 128 * depth / 8e12)


@given(amounts, amounts, kinds)
def test_the_parts_of_an_estimate_make_it_up(flops: float, bytes: float, kind: WorkKind):
    found = estimate(Work(flops=flops, bytes=bytes, kind=kind), UNITS)
    assert found.seconds == found.launch_seconds + max(found.arithmetic_seconds, found.traffic_seconds)
    assert found.limited_by in ("launch", "arithmetic", "memory") and "us: launch" in str(found)


WORK = Work(flops=1e12, bytes=1e9, kind="matmul")


@settings(max_examples=300, deadline=None)
@given(
    blocks=st.lists(st.integers(1, 700), min_size=4, max_size=4),
    cuts=st.lists(st.integers(1, 16), min_size=4, max_size=4),
    kind=st.sampled_from(["matmul", "convolution", "attention"]),
    traffic=st.floats(0, 1e12),
    name=st.sampled_from(["p3.16xlarge", "dgx-a100", "dgx-h100", "tpu-v4"]),
)
def test_the_parts_of_a_product_never_take_less_than_its_bound(
    blocks: list[int], cuts: list[int], kind: WorkKind, traffic: float, name: str
):
    """Rows, columns, depth and count are each cut into equal parts; at best a part has no traffic of another part."""
    model, parts = ComposedCostModel(load_cluster(name)), math.prod(cuts)

    def work(rows: int, columns: int, depth: int, count: int, bytes: float, num_kernels: int) -> Work:
        product = Product(rows=rows, columns=columns, depth=depth, count=count)
        return Work(
            flops=product.flops,
            bytes=bytes,
            kind=kind,
            dtype="bfloat16",
            num_kernels=num_kernels,
            product=product,
        )

    whole = work(*(block * cut for block, cut in zip(blocks, cuts, strict=True)), traffic, 1)
    part = work(*blocks, traffic / parts, 1)
    least = model.least_compute_seconds(whole)
    assert parts * model.compute_seconds(part) >= least * (1 - 1e-12)
    assert model.compute_seconds(whole) >= least * (1 - 1e-12)
    # The bound is of use: large products, of which units waste little, are near it.
    if kind != "attention" and min(block * cut for block, cut in zip(blocks[:3], cuts[:3], strict=True)) > 4096:
        assert least > 0.75 * model.compute_seconds(whole)


@pytest.mark.parametrize("kind", WORK_KINDS)
def test_work_of_unknown_shape_takes_at_least_what_it_takes(cluster: Cluster, kind: WorkKind):
    work = Work(flops=1e12, bytes=1e9, kind=kind, dtype="float16", num_kernels=3)
    assert least_seconds(work, cluster.device) == compute_seconds(work, cluster.device)


def test_it_composes_the_formulas(cluster: Cluster):
    model: CostModel = ComposedCostModel(cluster)
    collective = Collective(kind="all_reduce", bytes=1e6, group=Group(num_devices=16, devices_per_host=8))
    assert model.cluster is cluster
    assert model.compute_seconds(WORK) == compute_seconds(WORK, cluster.device)
    assert model.collective_seconds(collective) == collective_seconds(collective, cluster)
    expected = transfer_seconds(1e6, cluster, crosses_hosts=True, num_links=2)
    assert model.transfer_seconds(1e6, crosses_hosts=True, num_links=2) == expected
    assert model.launch_seconds() == 1e-4


def test_attention_kernels_of_an_earlier_generation(cluster: Cluster):
    """Only they change, and only on devices that say how fast these are."""
    device = replace(cluster.device, attention_efficiency=0.8, ported_attention_efficiency=0.4)
    stated = replace(cluster, device=device)
    attention = replace(WORK, kind="attention", product=Product(rows=1 << 20, columns=1 << 10, depth=512, count=1))
    ported = Backend(ported_attention=True)
    usual, slow = (
        ComposedCostModel(stated, b).compute_seconds(attention) - device.launch_seconds for b in (Backend(), ported)
    )
    assert slow == pytest.approx(2 * usual)
    assert ComposedCostModel(stated, ported).compute_seconds(WORK) == ComposedCostModel(stated).compute_seconds(WORK)
    unstated = ComposedCostModel(cluster, ported).compute_seconds(attention)
    assert unstated == ComposedCostModel(cluster).compute_seconds(attention)
    with pytest.raises(ClusterError, match=r"ported_attention_efficiency is 1\.5, but it is a fraction of at most 1"):
        replace(device, ported_attention_efficiency=1.5)


@pytest.mark.parametrize("num_devices", [1, 3, 8])
def test_devices_overlap_unless_they_share_a_processor(cluster: Cluster, shared_cluster: Cluster, num_devices: int):
    alone = compute_seconds(WORK, cluster.device)
    assert ComposedCostModel(cluster).compute_seconds(WORK, num_active_devices=num_devices) == alone
    shared = ComposedCostModel(shared_cluster).compute_seconds(WORK, num_active_devices=num_devices)
    assert shared == pytest.approx(num_devices * alone)


def test_no_active_device_is_refused_and_models_do_not_change(cluster: Cluster):
    model = ComposedCostModel(cluster)
    with pytest.raises(CostModelError, match="num_active_devices is 0"):
        model.compute_seconds(WORK, num_active_devices=0)
    with pytest.raises(FrozenInstanceError):
        model.cluster = cluster  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(model) == hash(ComposedCostModel(cluster))
