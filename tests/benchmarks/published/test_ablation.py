"""Each ablation takes one thing out of the model and nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.published.ablation import ABLATIONS
from benchmarks.published.cluster_of import cluster_of
from benchmarks.published.predict import Predictor
from cost_models.composed import ComposedCostModel
from cost_models.hardware import Backend
from cost_models.work import Collective, Group, Product, Work
from tests.benchmarks.published.runs import row

CLUSTER = cluster_of(row(n_devices=16))


def changed(name: str) -> tuple[Backend, ComposedCostModel]:
    predictor = ABLATIONS[name](Predictor())
    backend = predictor.change_backend(Backend(fused_attention=True, overlap_gradients=True, overlap_products=True))
    return backend, ComposedCostModel(predictor.change_cluster(CLUSTER))


def test_nothing_changes_nothing() -> None:
    backend, model = changed("nothing")
    assert model.cluster == CLUSTER and backend.overlap and backend.fused_attention


def test_switches_of_the_backend() -> None:
    fusion, overlap = changed("fusion")[0], changed("overlap")[0]
    assert (fusion.fusion, fusion.fused_attention, fusion.overlap) == ("none", False, True)
    assert not (overlap.overlap or overlap.overlap_gradients or overlap.overlap_products)
    assert overlap.fused_attention and overlap.fusion == "all"


def test_products_of_any_shape_reach_what_the_largest_reach() -> None:
    small = Product(rows=130, columns=130, depth=64)
    work = Work(flops=small.flops, kind="matmul", dtype="bfloat16", product=small)
    device = CLUSTER.device
    model = changed("efficiency curve")[1]
    ideal = small.flops / (device.efficiencies["bfloat16"] * device.peaks["bfloat16"])
    assert model.compute_seconds(work) == pytest.approx(ideal + device.launch_seconds)
    assert ComposedCostModel(CLUSTER).compute_seconds(work) > 10 * ideal + device.launch_seconds


def test_without_latency_small_things_cost_what_their_bytes_do() -> None:
    model = changed("latency")[1]
    seconds = [
        model.collective_seconds(
            Collective(kind="all_reduce", bytes=size, group=Group(num_devices=16, devices_per_host=8))
        )
        for size in (1e3, 1e6)
    ]
    assert seconds[1] == pytest.approx(1e3 * seconds[0])
    assert model.compute_seconds(Work(bytes=1.0)) < 1e-9 and model.launch_seconds() == 0


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name != "nothing"])
def test_every_ablation_changes_something(name: str) -> None:
    backend, model = changed(name)
    plain = changed("nothing")[0]
    fields = [f.name for f in dataclasses.fields(Backend) if getattr(backend, f.name) != getattr(plain, f.name)]
    assert bool(fields) != (model.cluster != CLUSTER)
