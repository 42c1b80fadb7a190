"""Steps by name: every name gives a step whose arguments fit, and wrong names are sentences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa_lite.cli.bench.targets import ALPA, PRESETS, ZOO, filled, find_target, named_models
from alpa_lite.cli.models.alpa_cases import PUBLISHED
from alpa_lite.errors import PlanError

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
