"""Models and planners by name: every model is a step, and every list of planners is understood."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.cli.bench.request import ALPA, PRESETS, ZOO, filled, find_target, named_contenders, named_models
from alpa_lite.cli.models.alpa_cases import PUBLISHED
from alpa_lite.errors import PlanError
from alpa_lite.planners import (
    FSDP,
    Auto,
    Compiled,
    ConvolutionParallel,
    DataParallel,
    Hybrid,
    Jitted,
    Megatron,
    MeshTensorFlow,
    OnMesh,
    Pipeline,
    Planner,
    TorchGPipe,
    TrainerConfiguration,
)
from alpa_lite.planners.by_name import PLANNERS

QUICK = [name for name in ZOO if name.endswith("-tiny")]

FILE = """
import jax, jax.numpy as jnp
from neighbour import WIDTH

def example():
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    step = lambda w, x: (w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.zeros(()))
    return step, (w, jax.ShapeDtypeStruct((16, WIDTH), jnp.float32))
"""


@pytest.mark.parametrize("name", ZOO)
def test_every_model_is_a_step_that_gives_its_state_back(name):
    target = find_target(name)
    state, metrics = jax.eval_shape(target.step, *target.arguments)
    assert jax.tree.structure(state) == jax.tree.structure(target.arguments[0])
    assert metrics["loss"].shape == ()
    sizes = {x.shape[0] for x in jax.tree.leaves(target.arguments[1])}
    assert sizes == {ZOO[name][1]}


def test_there_are_tiny_models_of_every_kind():
    kinds = {"mlp", "cnn", "gpt", "moe", "llama", "wrn", "bert", "alexnet", "vgg16", "unet", "nmt"}
    assert {f"{kind}-tiny" for kind in kinds} == set(QUICK)


def test_values_are_what_the_shapes_say():
    target = find_target("bert-tiny", 8)
    values = target.values()
    like = jax.tree.map(lambda x: (x.shape, str(x.dtype)), target.arguments)
    assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), values) == like
    assert values[1]["tokens"].shape[0] == 8 and len(np.unique(values[1]["tokens"])) > 8


@pytest.mark.parametrize("name", ["gpt-350M", "moe-380M", "wrn-250M"])
def test_models_of_alpas_evaluation_have_its_cluster(name):
    target = find_target(name)
    assert target.cluster is not None and target.cluster.num_devices == 1
    assert target.tflops_per_device is not None and target.tflops_per_device(1.0) == 2 * target.tflops_per_device(2.0)


def test_alpa_names_all_of_its_models():
    assert named_models(["alpa"]) == ALPA == tuple(case.id for case in PUBLISHED) and len(ALPA) == 21
    assert named_models(["mlp-tiny,gpt-tiny", "mlp-tiny"]) == ("mlp-tiny", "gpt-tiny")
    assert named_models(None) == PRESETS


def test_a_file_of_the_user(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "neighbour.py").write_text("WIDTH = 24\n")
    target = find_target(f"{tmp_path / 'mine.py'}:example")
    assert target.arguments[0].shape == (24, 24)
    assert target.values()[1].shape == (16, 24)


@pytest.mark.parametrize(
    ("name", "batch", "words"),
    [
        ("gpt-huge", None, "no model 'gpt-huge'.*bert-large.*gpt-350M.*MODULE:FUNCTION"),
        ("no_such_module:f", None, "no module"),
        ("nowhere/mine.py:f", None, "no file"),
        ("mine:", None, "does not name a function"),
        ("json:loads", 4, "in its arguments"),
    ],
)
def test_wrong_names_are_sentences(name, batch, words):
    with pytest.raises(PlanError, match=words):
        find_target(name, batch)


def test_shapes_are_filled_and_arrays_kept():
    kept = np.arange(3)
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = {"w": jax.ShapeDtypeStruct((4, 4), jnp.bfloat16), "n": jax.ShapeDtypeStruct((2,), jnp.int32)}
    found = filled({**shapes, "key": key, "kept": kept})
    assert found["kept"] is kept and found["w"].dtype == jnp.bfloat16 and float(jnp.std(found["w"])) > 0
    assert not found["n"].any() and found["key"].dtype == key.dtype


HOST = al.cluster("p3.16xlarge")
HOSTS = al.cluster("p3.16xlarge", num_hosts=2)


def test_a_list_is_taken_in_its_order():
    found = named_contenders(["pipeline:pipeline=4,auto,hybrid:pipeline=2:tensor=2,data-parallel"], HOST)
    wanted = [Pipeline(pipeline=4), Auto(), Hybrid(pipeline=2, tensor=2), DataParallel()]
    assert [each.planner for each in found] == wanted
    assert [each.is_auto for each in found] == [each.searches for each in found] == [False, True, False, False]


def test_all_has_every_planner_and_each_level_alone():
    found = named_contenders(["all"], HOST)
    planners = [each.planner for each in found if each.planner is not None]
    assert planners[:3] == [Auto(), Auto(intra_op_only=True), Auto(inter_op_only=True)]
    assert {each.name: "without options" in each.problem for each in found if each.planner is None} == {
        "mesh_tensorflow": True,  # layouts and meshes are the user's
        "on_mesh": True,
    }
    assert {type(planner) for planner in planners} == set(PLANNERS.values()) - {
        MeshTensorFlow,
        OnMesh,
        Jitted,
        Compiled,
    }
    assert all(Pipeline(pipeline=n) in planners and TorchGPipe(pipeline=n) in planners for n in (2, 4, 8))
    assert ConvolutionParallel(height=2) in planners and ConvolutionParallel(filter=2) in planners
    assert Hybrid(pipeline=2, tensor=2, data=2) in planners and Hybrid(pipeline=4, tensor=2, data=1) in planners
    assert all(planners.index(planner) == number for number, planner in enumerate(planners))


def test_degrees_follow_the_cluster():
    planners = [each.planner for each in named_contenders(["all"], HOSTS)]
    assert Pipeline(pipeline=16) in planners and Megatron(tensor=8) in planners
    assert Megatron(tensor=16) not in planners  # tensor parallelism stays within a host
    degrees = [p for p in planners if isinstance(p, Hybrid)]
    assert degrees and all(p.pipeline * p.tensor * (p.data or 0) == 16 for p in degrees)
    many = named_contenders(["all"], al.cluster("p3.16xlarge", num_hosts=4))
    assert max(each.planner.tensor for each in many if isinstance(each.planner, Hybrid)) == 8


def test_only_the_whole_search_is_auto():
    found = named_contenders(["all"], HOST)
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
    found = {each.name: each for each in named_contenders(["all"], HOST)}
    assert found["demanding 3"].planner == Simple()
    assert found["demanding"].planner is None and "without options" in found["demanding"].problem


def test_settings_of_trainers_run_to_the_end_of_a_list():
    settings = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}'
    found = named_contenders([f"fsdp,deepspeed:{settings}", "megatron:tensor=4,megatron:--micro-batch-size 2"], HOST)
    assert [each.planner for each in found] == [
        FSDP(),
        TrainerConfiguration(trainer="deepspeed", settings=settings),
        Megatron(tensor=4),
        TrainerConfiguration(trainer="megatron", settings="--micro-batch-size 2"),
    ]


@pytest.mark.parametrize(("text", "words"), [("magic", "no planner 'magic'"), ("pipeline:depth=4", "no option")])
def test_wrong_planners_are_sentences(text, words):
    with pytest.raises(PlanError, match=words):
        named_contenders([text], HOST)
