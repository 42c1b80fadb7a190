"""Global layouts of named dims: the collectives of the strategies that they stand for, and what is illegal."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import DataParallel, MeshTensorFlow
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned
from tests.end_to_end.transformers import TINY, WIDE, Training, plan, with_architecture

TRAINING = Training(model=WIDE, batch_size=64)
MEGATRON = "heads:cols;d_ff:cols;vocab:cols"
#: Bytes of the activations of the whole batch, and of one number per token.
ACTIVATIONS, TOKENS = 4.0 * 64 * 128 * 256, 4.0 * 64 * 128


def _uses(found: al.Plan, axis: str, phase: str) -> Counter[tuple[str, float]]:
    uses = (u for u in found.prediction.collectives if u.axis == axis and u.phase == phase)
    counts = Counter[tuple[str, float]]()
    for use in uses:
        counts[use.kind, use.bytes] += round(use.count)
    return counts


def test_splitting_the_batch_is_data_parallelism() -> None:
    split = plan(TRAINING, MeshTensorFlow(layout="batch:all", mesh={"all": 8}))
    assert planned(split) == planned(plan(TRAINING, DataParallel()))


def test_splitting_heads_hidden_units_and_vocabulary_is_megatron() -> None:
    """Shoeybi et al. 2019, section 3: two all_reduces per layer and pass, embedding 1, cross entropy 3, no gather."""
    split = plan(TRAINING, MeshTensorFlow(layout=MEGATRON, mesh={"cols": 8}))
    layers = WIDE.num_layers
    assert _uses(split, "cols", "forward") == {("all_reduce", ACTIVATIONS): 2 * layers + 1, ("all_reduce", TOKENS): 3}
    # And once for what the projection onto the vocabulary read.
    assert _uses(split, "cols", "backward") == {("all_reduce", ACTIVATIONS): 2 * layers + 1}
    assert not _uses(split, "cols", "update")


def test_two_axes_are_both_at_once() -> None:
    both = plan(TRAINING, MeshTensorFlow(layout=f"batch:rows;{MEGATRON}", mesh={"rows": 2, "cols": 4}))
    tensor = plan(TRAINING, MeshTensorFlow(layout=MEGATRON, mesh={"cols": 8}))
    for phase in ("forward", "backward"):
        on_cols = {(kind, 2 * size): n for (kind, size), n in _uses(both, "cols", phase).items()}
        assert on_cols == _uses(tensor, "cols", phase)
        assert not _uses(both, "rows", phase)
    (stage,) = both.stages
    gradients = Counter[float]()
    for name, spec in stage.specs.items():
        if "params" in name:
            shape = next(v.shape for v in _graph().values if v.name == name)
            gradients[4.0 * np.prod(shape) / (4 if spec.axes else 1)] += 1
    assert _uses(both, "rows", "update") == {("all_reduce", n): c for n, c in gradients.items()} | {
        ("all_reduce", 4.0): 1
    }


def _graph() -> Any:
    from tests.end_to_end.transformers import traced

    return traced(TRAINING).step(1).step.graph


SMALL = Training(model=with_architecture(TINY, num_kv_heads=None), batch_size=16)


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [
        (f"batch:rows;{MEGATRON}", {"rows": 2, "cols": 4}),
        ("batch:rows;d_model:cols", {"rows": 2, "cols": 4}),
        ("batch:rows;heads:cols;d_ff:cols;d_model:deep", {"rows": 2, "cols": 2, "deep": 2}),
    ],
)
def test_layouts_run_as_planned(layout: str, mesh: dict[str, int], devices: Any) -> None:
    planner = MeshTensorFlow(layout=layout, mesh=mesh)
    step = al.parallelize(SMALL.step, cluster=eager_cluster(), planner=planner, num_microbatches=1)
    compiled = step.compiled(*SMALL.arguments())
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*SMALL.arguments()), jax.jit(SMALL.step)(*SMALL.arguments()))


def _mlp(params: Any, x: Any) -> Any:
    def loss(p: Any) -> Any:
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def _mlp_arguments() -> Any:
    rng = np.random.default_rng(0)
    shapes = {"a": (8, 16), "b": (16, 24), "c": (24, 8)}
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in shapes.items()}, jnp.ones((16, 8))


def test_names_of_ones_own_split_alternate_layers(devices: Any) -> None:
    """The example of the paper: hidden units of every other layer (Shazeer et al. 2018, section 3.3)."""
    planner = MeshTensorFlow(layout={"odd": "x"}, mesh={"x": 8}, dims={"odd": ("params/a", 1)})
    step = al.parallelize(_mlp, cluster=eager_cluster(), planner=planner, num_microbatches=1, batch_argnums=1)
    compiled = step.compiled(*_mlp_arguments())
    specs = compiled.plan.stages[0].specs
    assert specs["params/a"].dims == ((), ("x",)) and specs["params/b"].dims == (("x",), ())
    assert specs["params/c"].dims == ((), ())
    assert planned(compiled.plan) == {("all_reduce", 4 * 16 * 24, 8): 1}
    assert_same(compiled(*_mlp_arguments()), jax.jit(_mlp)(*_mlp_arguments()))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("batch:rows;sequence:cols", r"transformer\.py:.*scan.*dims 3 \(sequence\) and 5 \(sequence\) would both"),
        ("d_ff:cols;d_model:cols", r"argument state/params/layers.*would both be split over cols"),
        ("heads:rows;heads:cols;vocab:deep", r"on the axis 'deep', but the mesh has \['rows', 'cols'\]"),
        ("experts:cols", r"no dim 'experts'; it has batch, sequence, vocab, heads"),
        ("batch", r"has 'batch', which is no pair"),
    ],
)
def test_illegal_layouts_are_refused(layout: str, message: str) -> None:
    with pytest.raises(al.errors.PlanError, match=message):
        plan(TRAINING, MeshTensorFlow(layout=layout, mesh={"rows": 2, "cols": 4}))


def test_sizes_that_do_not_divide_are_refused() -> None:
    odd = Training(model=replace(WIDE, inner=1020), batch_size=64)
    with pytest.raises(al.errors.PlanError, match=r"dim \d \(d_ff\) is to be split in 8, which does not divide"):
        plan(odd, MeshTensorFlow(layout="d_ff:x", mesh={"x": 8}))


def _running_sum(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.cumsum(jnp.tanh(x @ w), axis=1) ** 2))(w)


def test_ops_that_cannot_be_split_so_are_named_with_their_line() -> None:
    planner = MeshTensorFlow(layout={"out": "x"}, mesh={"x": 8}, dims={"out": ("w", 1)})
    with pytest.raises(al.errors.PlanError, match=r"test_mesh_tensorflow\.py:\d+.*the cumsum cannot be run"):
        al.plan(_running_sum, jnp.ones((8, 16)), jnp.ones((16, 8)), planner=planner, cluster=eager_cluster())


@pytest.mark.parametrize("dims", [{"odd": ("params/z", 0)}, {"odd": ("params/a", 2)}])
def test_dims_of_no_argument_are_refused(dims: Any) -> None:
    planner = MeshTensorFlow(layout={"odd": "x"}, mesh={"x": 8}, dims=dims)
    with pytest.raises(al.errors.PlanError, match="dims names dim"):
        al.plan(_mlp, *_mlp_arguments(), planner=planner, cluster=eager_cluster(), batch_argnums=1)
