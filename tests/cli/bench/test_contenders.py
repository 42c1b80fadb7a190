"""Planners by name and options; all of the command line's are among all."""

from dataclasses import dataclass

import pytest

import alpa_lite as al
from alpa_lite.cli.bench.contenders import named_contenders
from alpa_lite.errors import PlanError
from alpa_lite.planners import (
    Auto,
    ConvolutionParallel,
    DataParallel,
    Hybrid,
    Megatron,
    MeshTensorFlow,
    OnMesh,
    Pipeline,
    Planner,
    TorchGPipe,
)
from alpa_lite.planners.by_name import PLANNERS

HOST = al.cluster("p3.16xlarge")
HOSTS = al.cluster("p3.16xlarge", num_hosts=2)


def test_a_list_is_taken_in_its_order():
    found = named_contenders("pipeline:pipeline=4,auto,hybrid:pipeline=2:tensor=2,data-parallel", HOST)
    wanted = [Pipeline(pipeline=4), Auto(), Hybrid(pipeline=2, tensor=2), DataParallel()]
    assert [each.planner for each in found] == wanted
    assert [each.is_auto for each in found] == [each.searches for each in found] == [False, True, False, False]


def test_all_has_every_planner_and_each_level_alone():
    found = named_contenders("all", HOST)
    planners = [each.planner for each in found if each.planner is not None]
    assert planners[:3] == [Auto(), Auto(intra_op_only=True), Auto(inter_op_only=True)]
    assert {each.name: "without options" in each.problem for each in found if each.planner is None} == {
        "mesh_tensorflow": True,  # layouts and meshes are the user's
        "on_mesh": True,
    }
    assert {type(planner) for planner in planners} == set(PLANNERS.values()) - {MeshTensorFlow, OnMesh}
    assert all(Pipeline(pipeline=n) in planners and TorchGPipe(pipeline=n) in planners for n in (2, 4, 8))
    assert ConvolutionParallel(height=2) in planners and ConvolutionParallel(filter=2) in planners
    assert Hybrid(pipeline=2, tensor=2, data=2) in planners and Hybrid(pipeline=4, tensor=2, data=1) in planners
    assert all(planners.index(planner) == number for number, planner in enumerate(planners))


def test_degrees_follow_the_cluster():
    planners = [each.planner for each in named_contenders("all", HOSTS)]
    assert Pipeline(pipeline=16) in planners and Megatron(tensor=8) in planners
    assert Megatron(tensor=16) not in planners  # tensor parallelism stays within a host
    degrees = [p for p in planners if isinstance(p, Hybrid)]
    assert degrees and all(p.pipeline * p.tensor * (p.data or 0) == 16 for p in degrees)
    many = named_contenders("all", al.cluster("p3.16xlarge", num_hosts=4))
    assert max(each.planner.tensor for each in many if isinstance(each.planner, Hybrid)) == 8


def test_only_the_whole_search_is_auto():
    found = named_contenders("all", HOST)
    assert [each.name for each in found if each.is_auto] == ["auto"]
    assert [each.name for each in found if each.searches] == ["auto", "auto, intra-op only", "auto, inter-op only"]


@dataclass(frozen=True, kw_only=True)
class Demanding(Planner):
    """A planner that comes with the next version, and has an option without a default."""

    size: int

    @property
    def name(self):
        return f"demanding {self.size}"

    def plan(self, request):
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Simple(Demanding):
    """Another, without."""

    size: int = 3


def test_new_planners_of_the_command_line_are_among_all(monkeypatch):
    monkeypatch.setitem(PLANNERS, "demanding", Demanding)
    monkeypatch.setitem(PLANNERS, "simple", Simple)
    found = {each.name: each for each in named_contenders("all", HOST)}
    assert found["demanding 3"].planner == Simple()
    assert found["demanding"].planner is None and "without options" in found["demanding"].problem


@pytest.mark.parametrize(("text", "words"), [("magic", "no planner 'magic'"), ("pipeline:depth=4", "no option")])
def test_wrong_names_are_sentences(text, words):
    with pytest.raises(PlanError, match=words):
        named_contenders(text, HOST)
