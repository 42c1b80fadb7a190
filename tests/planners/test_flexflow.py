"""FlexFlow: operators of a step, the meshes of strategies, and plans that run as on one device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.inter_op.soap import OpConfig, SoapKind, simulate
from alpa_lite.inter_op.soap_ops import soap_step
from alpa_lite.planners import FlexFlow
from alpa_lite.planners.flexflow import strategy_mesh
from tests.end_to_end.cases import eager_cluster

QUICK = FlexFlow(budget=80)


def _step(params, batch):
    """Two convolutions with few weights, and dense layers with many."""

    def loss_fn(params):
        x = batch["x"]
        for kernel in params["kernels"]:
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=_DIMS))
        x = x.mean((1, 2))
        for weights in params["dense"]:
            x = jnp.tanh(x @ weights)
        return jnp.mean((x - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


_DIMS = ("NHWC", "HWIO", "NHWC")


def _arguments(samples, size, channels, width, make):
    params = {
        "kernels": [make((3, 3, channels, channels)) for _ in range(2)],
        "dense": [make((channels, width)), make((width, width)), make((width, width))],
    }
    return params, {"x": make((samples, size, size, channels)), "y": make((samples, width))}


def _shape(dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def _four():
    return al.cluster("p3.16xlarge").part(0, 4)


def _request(arguments, cluster):
    return al.parallelize(_step).trace(*arguments).request(cluster)


def test_operators_have_the_dims_of_their_results():
    soap = soap_step(_request(_arguments(32, 16, 64, 512, _shape), _four()), 16)
    kinds = [tuple(dim.kind for dim in op.dims) for op in soap.problem.ops]
    sample, attribute, parameter = SoapKind.SAMPLE, SoapKind.ATTRIBUTE, SoapKind.PARAMETER
    assert kinds.count((sample, attribute, attribute, parameter)) == 2
    assert kinds.count((sample, parameter)) == 3
    sizes = Counter(size for op in soap.problem.ops for size, _ in op.weights)
    assert sizes == {4.0 * 9 * 64 * 64: 2, 4.0 * 64 * 512: 1, 4.0 * 512 * 512: 2}
    # Half of the samples take about half of the time, and never less than a share of it.
    for op in soap.problem.ops:
        whole = op.seconds((1,) * len(op.dims))
        for n, dim in enumerate(op.dims):
            part = op.seconds(tuple(2 if i == n else 1 for i in range(len(op.dims))))
            assert whole.forward / 2 * 0.99 <= part.forward <= whole.forward, (op.name, dim)
    one = simulate(soap.problem, tuple(OpConfig((1,) * len(op.dims), (0,)) for op in soap.problem.ops))
    plan = al.plan(_step, *_arguments(32, 16, 64, 512, _shape), cluster=_four().part(0, 1), planner="data_parallel")
    assert one.seconds == pytest.approx(plan.prediction.step_seconds, rel=0.1)


def test_meshes_of_strategies():
    soap = soap_step(_request(_arguments(32, 16, 64, 512, _shape), _four()), 16).problem
    rank = [len(op.dims) for op in soap.ops]

    def strategy(*of_rank_four):
        """Convolutions by these degrees, all else by samples."""
        degrees = [of_rank_four if n == 4 else (4, *(1,) * (n - 1)) if n else () for n in rank]
        return tuple(OpConfig(each, tuple(range(prod(each)))) for each in degrees)

    assert strategy_mesh(soap, strategy(4, 1, 1, 1)) == {"x0": 4}
    assert strategy_mesh(soap, strategy(2, 1, 1, 2)) == {"x0": 2, "x1": 2}
    # On two of the devices, or on other ones than the first.
    assert strategy_mesh(soap, strategy(2, 1, 1, 1)) is None
    some = list(strategy(4, 1, 1, 1))
    some[0] = OpConfig(some[0].degrees, tuple(reversed(some[0].devices)))
    assert strategy_mesh(soap, tuple(some)) is None


def test_dense_layers_are_split_by_parameters_and_the_plan_is_no_slower_than_data_parallelism():
    arguments = _arguments(64, 32, 64, 8192, _shape)
    plan = al.plan(_step, *arguments, cluster=_four(), planner=replace(QUICK, budget=400))
    plain = al.plan(_step, *arguments, cluster=_four(), planner="data_parallel")
    assert plan.prediction.step_seconds < 0.6 * plain.prediction.step_seconds
    (stage,) = plan.stages
    dense = [stage.specs[f"params/dense/{n}"] for n in (1, 2)]
    assert all(spec.axes for spec in dense)
    kernels = [stage.specs[f"params/kernels/{n}"] for n in (0, 1)]
    assert not any(spec.axes for spec in kernels)
    assert "moves of" in plan.notes[0] and "parameter" in plan.notes[0]


def test_strategies_that_cannot_run_are_priced_and_named():
    # So little work that one device is best, which no program of a stage on all devices can be.
    arguments = _arguments(4, 4, 8, 8, _shape)
    plan = al.plan(_step, *arguments, cluster=_four(), planner=replace(QUICK, budget=400))
    assert any("priced only" in note for note in plan.notes)
    assert any("cannot run" in name for name, _ in plan.alternatives)


def test_seeds_repeat_and_options_are_checked():
    arguments = _arguments(16, 8, 16, 64, _shape)
    for planner in (QUICK, replace(QUICK, variant="paper", starts="random")):
        first, second = (al.plan(_step, *arguments, cluster=_four(), planner=planner) for _ in range(2))
        assert first.stages == second.stages and first.notes == second.notes
    with pytest.raises(PlanError, match="at least 1 move"):
        al.plan(_step, *arguments, cluster=_four(), planner=replace(QUICK, budget=0))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_plans_run_as_on_one_device(devices, seed):
    keys = iter(jax.random.split(jax.random.key(0), 20))
    arguments = _arguments(16, 8, 16, 64, lambda dims: 0.3 * jax.random.normal(next(keys), dims))
    planner = replace(QUICK, seed=seed, starts="random")
    step = al.parallelize(_step, planner=planner, cluster=eager_cluster())
    found, wanted = step(*arguments), jax.jit(_step)(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
