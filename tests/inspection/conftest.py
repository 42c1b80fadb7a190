"""Plans of a small perceptron on a described cluster, made once."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.sharding.specs import Spec

MODEL = MLP(in_features=1024, hidden=4096, out_features=1024, num_layers=4)
BATCH_SIZE = 2048


def make_planned(planner, cluster="p3.16xlarge"):
    """The perceptron's train step, planned for eight described GPUs."""
    optimizer = make_optimizer()
    train_step = make_train_step(MODEL.loss_fn, optimizer)
    state = jax.eval_shape(lambda key: init_state(MODEL.init(key), optimizer), jax.random.key(0))
    batch = {
        "inputs": jax.ShapeDtypeStruct((BATCH_SIZE, MODEL.in_features), jnp.float32),
        "targets": jax.ShapeDtypeStruct((BATCH_SIZE, MODEL.out_features), jnp.float32),
    }
    return al.parallelize(train_step, cluster=cluster, planner=planner).trace(state, batch).plan()


def make_plan(planner, cluster="p3.16xlarge"):
    """A plan of the perceptron's train step for eight described GPUs."""
    return make_planned(planner, cluster).last_plan


@pytest.fixture(scope="package")
def tensor_plan():
    """One stage, data=2 × model=4: some weights are split."""
    return make_plan(al.planners.Hybrid(data=2, tensor=4))


@pytest.fixture(scope="package")
def planned():
    """Two stages and several micro-batches, with the step."""
    return make_planned(al.planners.Pipeline(pipeline=2))


@pytest.fixture(scope="package")
def pipeline_plan(planned):
    """Two stages and several micro-batches."""
    return planned.last_plan


@pytest.fixture(scope="package")
def interleaved_plan():
    """Four stages on two halves of the devices, which run them in turn."""
    schedule = al.schedule.Interleaved1F1B(num_chunks=2)
    return make_plan(al.planners.Hybrid(pipeline=2, schedule=schedule))


@pytest.fixture(scope="package")
def zero_plan(pipeline_plan):
    """Optimizer state split, parameters whole: the specs of ZeRO-1, put into the plan by hand."""
    stages = []
    for stage in pipeline_plan.stages:
        specs = {
            name: Spec((("data",),) + spec.dims[1:]) if "/first/" in name or "/second/" in name else spec
            for name, spec in stage.specs.items()
        }
        stages.append(replace(stage, specs=specs))
    return replace(pipeline_plan, stages=tuple(stages))
