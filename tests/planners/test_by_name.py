"""Options of planners as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jax.sharding import PartitionSpec as P

import alpa_lite as al
from alpa_lite.planners import Planner
from alpa_lite.planners.by_name import PLANNERS, planner_by_name


@pytest.mark.parametrize(
    ("name", "options", "planner"),
    [
        ("megatron", ["tensor=4", "vocab_parallel=true"], al.planners.Megatron(tensor=4, vocab_parallel=True)),
        (
            "mesh-tensorflow",
            ["layout=batch:rows", "mesh=rows:8"],
            al.planners.MeshTensorFlow(layout="batch:rows", mesh={"rows": 8}),
        ),
        ("torchgpipe", ["balance=size", "checkpoint=false"], al.planners.TorchGPipe(balance="size", checkpoint=False)),
        ("hybrid", ["model=2", "remat=full"], al.planners.Hybrid(tensor=2, remat="full")),
        ("data_parallel", ["bucket_bytes=1000"], al.planners.DataParallel(bucket_bytes=1000)),
        ("auto", ["max_memory_bytes=8e9"], al.planners.Auto(max_memory_bytes=8e9)),
        ("auto", ["max_memory_bytes=1000000"], al.planners.Auto(max_memory_bytes=1e6)),
        ("auto", ["host_memory=none", "remat=none"], al.planners.Auto(host_memory=None, remat="none")),
        ("karma", ["host_optimizer=none", "memory_bytes=none"], al.planners.Karma()),
        ("on_mesh", ["axes=a:2;b:4"], al.planners.OnMesh(axes={"a": 2, "b": 4})),
    ],
)
def test_options_are_read_by_their_type(name: str, options: list[str], planner: object) -> None:
    assert planner_by_name(name, options) == planner


def test_options_may_follow_the_name() -> None:
    assert planner_by_name("hybrid:pipeline=2:remat=full", ["data=4"]) == al.planners.Hybrid(
        pipeline=2, remat="full", data=4
    )
    assert planner_by_name("on_mesh:axes=a:2;b:4", ()) == al.planners.OnMesh(axes={"a": 2, "b": 4})
    # A name of a planner and of a trainer: flags are no options.
    assert planner_by_name("megatron:tensor=4", ()) == al.planners.Megatron(tensor=4)
    with pytest.raises(al.errors.PlanError, match="pipeline takes a whole number"):
        planner_by_name("hybrid:pipeline", ())


@pytest.mark.parametrize(
    "make",
    [
        *(kind for name, kind in PLANNERS.items() if name not in ("mesh_tensorflow", "on_mesh", "compiled")),
        lambda: al.planners.Auto(pins={"w": P("data")}),
        lambda: al.planners.Hybrid(data=2, tensor=2, split={"heads": "model"}),
        lambda: al.planners.MeshTensorFlow(layout={"batch": "rows"}, mesh={"rows": 8}),
        lambda: al.planners.OnMesh(axes={"a": 2, "b": 4}, pins={"w": P("a")}),
        lambda: al.planners.Custom(mesh={"x": 8}, in_specs=({"w": P("x")},), rules=[(".*", P())]),
    ],
)
def test_planners_are_values(make: Callable[[], Planner]) -> None:
    assert make() == make() and len({make(), make()}) == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", [], "There is no planner 'nothing'. Choose one of auto, data_parallel"),
        ("megatron", ["tensor=two"], "'tensor=two' was given to 'megatron', but tensor takes a whole number"),
        ("megatron", ["tensor=-2"], "takes a whole number of at least 0"),
        ("auto", ["host_memory=maybe"], "host_memory takes true or false or the word none"),
        ("hybrid", ["pipeline=none"], "pipeline takes a whole number of at least 0"),
        ("torchgpipe", ["balance=luck"], "balance takes one of time, size"),
        ("auto", ["schedule=gpipe"], "schedule cannot be given on the command line"),
        ("megatron", ["tensors=2"], "Its options are data, pipeline, relaxed, schedule"),
        ("mesh_tensorflow", ["layout=batch:x"], "needs more options: .*mesh"),
    ],
)
def test_others_are_refused(name: str, options: list[str], message: str) -> None:
    with pytest.raises(al.errors.PlanError, match=message):
        planner_by_name(name, options)
