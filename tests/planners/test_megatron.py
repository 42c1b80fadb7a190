"""Megatron's plans: how many sums, of how much, and where pipelines and replicas come in."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.planners import Megatron
from tests.end_to_end.cases import assert_same, eager_cluster
from tests.end_to_end.collectives import emitted, handed_over, planned
from tests.end_to_end.transformers import TINY, WIDE, Training, plan, with_architecture

TRAINING = Training(model=WIDE, batch_size=64)
ACTIVATIONS, TOKENS = 4.0 * 64 * 128 * 256, 4.0 * 64 * 128


def _over_model(found: al.Plan, phase: str) -> Counter[tuple[str, float]]:
    counts = Counter[tuple[str, float]]()
    for use in found.prediction.collectives:
        if use.axis == "model" and use.phase == phase:
            counts[use.kind, use.bytes] += round(use.count)
    return counts


def test_rows_of_tables_are_split_and_logits_never_gathered() -> None:
    """Embedding 1 sum, cross entropy 3 numbers per token, the projection's input 1 in the backward pass."""
    found = plan(TRAINING, Megatron(vocab_parallel=True, sequence_parallel=False))
    assert found.stages[0].specs["state/params/token_embedding"].dims == (("model",), ())
    once = 2 * WIDE.num_layers + 1
    assert _over_model(found, "forward") == {("all_reduce", ACTIVATIONS): once, ("all_reduce", TOKENS): 3}
    assert _over_model(found, "backward") == {("all_reduce", ACTIVATIONS): once}


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_devices_send_per_layer(tensor: int, sequence_parallel: bool) -> None:
    """8 b s h (t - 1) / t elements (Narayanan et al. 2021, section 3.2), scattered or not."""
    planner = Megatron(tensor=tensor, sequence_parallel=sequence_parallel)
    sent = Counter[int]()
    for num_layers in (2, 4):
        found = plan(replace(TRAINING, model=replace(WIDE, num_layers=num_layers)), planner)
        for u in found.prediction.collectives:
            if u.axis == "model" and u.phase != "update":
                rounds = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}[u.kind]
                sent[num_layers] += round(u.count * rounds * (tensor - 1) / tensor * u.bytes)
    samples = 64 * tensor // 8
    per_layer = (sent[4] - sent[2]) / 2
    assert per_layer == pytest.approx(4 * 8 * samples * 128 * 256 * (tensor - 1) / tensor, rel=0.01)


@pytest.mark.parametrize("sizes", [{}, {"seq_len": 1024}, {"hidden": 1024, "inner": 4096, "seq_len": 1024}], ids=str)
def test_without_sequence_parallelism_sums_are_whole(sizes: dict[str, int]) -> None:
    """2 all_reduces per layer and pass (Shoeybi et al. 2019, figure 4), however large the arrays are."""
    model = replace(WIDE, **sizes)
    found = plan(replace(TRAINING, model=model), Megatron(sequence_parallel=False))
    activations = 4.0 * 64 * model.seq_len * model.hidden
    for phase in ("forward", "backward"):
        large = {use: n for use, n in _over_model(found, phase).items() if use[1] > 0.1 * activations}
        # And one for what tokens look up, or the projection onto them reads.
        assert large == {("all_reduce", activations): 2 * model.num_layers + 1}


def test_with_sequence_parallelism_sums_are_scattered() -> None:
    """A gather and a scatter per block and pass instead (Korthikanti et al. 2022, figure 5), where that is faster."""
    model = replace(WIDE, hidden=1024, inner=4096, seq_len=1024, dropout=0.1)
    found = plan(replace(TRAINING, model=model), Megatron())
    activations, once = 4.0 * 64 * 1024 * 1024, 2 * model.num_layers
    for phase in ("forward", "backward"):
        inside = _over_model(found, phase)
        assert inside["all_gather", activations] == inside["reduce_scatter", activations] == once
        assert not inside["all_reduce", activations]


def _chain(weights: Any, x: Any, of: Any) -> Any:
    def loss(weights: Any, x: Any) -> Any:
        for up, down in weights:
            x = x + jnp.tanh(x @ up) @ down
        return jnp.mean(x**2)

    return jax.grad(loss, of)(weights, x)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(("of", "more"), [(0, -1), ((0, 1), 0)], ids=["weights", "weights and input"])
def test_a_chain_of_blocks_has_two_sums_each_less_the_one_that_nobody_reads(
    num_layers: int, of: Any, more: int, devices: Any
) -> None:
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) * 0.2, jnp.float32)  # noqa: E731
    arguments = [(draw(16, 64), draw(64, 16)) for _ in range(num_layers)], draw(32, 16)
    step = partial(_chain, of=of)
    options = dict(cluster=eager_cluster(), num_microbatches=1, batch_argnums=1)
    compiled = al.parallelize(step, planner=Megatron(sequence_parallel=False), **options).compiled(*arguments)
    assert planned(compiled.plan) == {("all_reduce", 4 * 32 * 16, 8): 2 * num_layers + more}
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*arguments), jax.jit(step)(*arguments))


SMALL = Training(model=with_architecture(TINY, num_kv_heads=None), batch_size=16)


@pytest.mark.parametrize(
    ("planner", "num_microbatches"),
    [
        (Megatron(tensor=4, vocab_parallel=True), 1),
        (Megatron(tensor=2, pipeline=2, data=2, vocab_parallel=True, sequence_parallel=False), 2),
        (Megatron(pipeline=2, data=1), 2),
    ],
    ids=lambda value: value.name if isinstance(value, Megatron) else "",
)
def test_combinations_run_as_planned(planner: Megatron, num_microbatches: int, devices: Any) -> None:
    step = al.parallelize(SMALL.step, cluster=eager_cluster(), planner=planner, num_microbatches=num_microbatches)
    compiled = step.compiled(*SMALL.arguments())
    sizes = compiled.plan.stages[0].mesh_shape.axis_sizes
    assert len(compiled.plan.stages) == planner.pipeline
    assert sizes["model"] == (planner.tensor or 4)
    assert handed_over(compiled) == emitted(compiled) == planned(compiled.plan)
    assert_same(compiled(*SMALL.arguments()), jax.jit(SMALL.step)(*SMALL.arguments()))


@pytest.mark.parametrize("width", [256, 1024])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_projections_are_split_by_heads_and_hidden_units(width: int, sequence_parallel: bool) -> None:
    """Columns into the block, rows out of it (Shoeybi et al. 2019, figure 3), whatever is the fastest."""
    model = replace(WIDE, hidden=width)
    found = plan(replace(TRAINING, model=model), Megatron(sequence_parallel=sequence_parallel))
    (stage,) = found.stages
    split = {}
    for name, spec in stage.specs.items():
        if "/params/" in name and "embedding" not in name and stage.shapes[name].bytes > 4 * width * 64:
            sizes = stage.shapes[name].dims
            (split[name.rpartition("/")[2]],) = ([sizes[dim] for dim, axes in enumerate(spec.dims) if axes],)
    assert len(split) >= 5 and not found.notes
    assert all(sizes in ([8], [model.inner]) for sizes in split.values()), split


def _fused(params: Any, x: Any, *, num_heads: int, outermost: bool) -> Any:
    """Attention whose queries, keys and values come from one product."""

    def loss(params: Any) -> Any:
        batch, length, width = x.shape
        parts = (num_heads, 3) if outermost else (3, num_heads)
        of_heads = (x @ params["qkv"]).reshape(batch, length, *parts, width // num_heads)
        q, k, v = jnp.moveaxis(of_heads, 3 if outermost else 2, 0)
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        h = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(batch, length, width)
        y = x + h @ params["out"]
        return jnp.mean((y + jax.nn.gelu(y @ params["up"]) @ params["down"]) ** 2)

    return jax.grad(loss)(params)


@pytest.mark.parametrize(
    ("num_heads", "outermost", "unsplit"),
    [
        (8, True, []),
        (8, False, ["[256, 768]", "768 columns or rows that are read as 3 × 256, with no heads first"]),
        (4, True, ["[256, 768]", "[256, 256]", "have 4 heads, which the devices do not divide"]),
    ],
)
def test_what_cannot_be_split_so_is_said(num_heads: int, outermost: bool, unsplit: list[str]) -> None:
    shape = jax.ShapeDtypeStruct
    shapes = {"qkv": (256, 768), "out": (256, 256), "up": (256, 1024), "down": (1024, 256)}
    params = {name: shape(dims, jnp.float32) for name, dims in shapes.items()}
    step = partial(_fused, num_heads=num_heads, outermost=outermost)
    options: Any = dict(cluster="p3.16xlarge", num_microbatches=1)
    traced = al.parallelize(step, batch_argnums=1).trace(params, shape((16, 128, 256), jnp.float32))
    found = traced.plan(planner=Megatron(tensor=8), **options).last_plan
    assert " ".join(found.notes).count("those of shape") == sum("[" in word for word in unsplit)
    assert all(word in found.notes[0] and word in " ".join(str(found).split()) for word in unsplit)
    specs = {name.rpartition("/")[2]: spec.dims for name, spec in found.stages[0].specs.items()}
    assert specs["up"] == ((), ("model",)) and specs["down"] == (("model",), ())
    if num_heads == 8:
        assert specs["out"] == (("model",), ())
    assert (specs["qkv"] == ((), ("model",))) or unsplit
    relaxed = traced.plan(planner=Megatron(tensor=8, relaxed=True), **options).last_plan
    assert relaxed.prediction.step_seconds <= found.prediction.step_seconds * 1.001 and not relaxed.notes


def test_degrees_are_named() -> None:
    assert Megatron(relaxed=True).name == "Megatron tensor parallel, relaxed"
    assert Megatron(tensor=2, pipeline=2, data=2).name == "Megatron tensor parallel (tp2 × pp2 × dp2)"
    with pytest.raises(al.errors.PlanError, match="devices were asked for"):
        plan(TRAINING, Megatron(tensor=2, data=2))


def test_tables_whose_rows_do_not_divide_are_refused() -> None:
    odd = replace(TRAINING, model=replace(WIDE, vocab_size=510))
    with pytest.raises(
        al.errors.PlanError, match=r"token_embedding.*\[510, 256\].*\(vocab\), which they do not divide"
    ):
        plan(odd, Megatron(vocab_parallel=True))


def test_an_op_that_cannot_read_a_split_weight_reads_it_otherwise(devices: Any) -> None:
    """As of L-BFGS: columns of a matrix are no run of the vector that it becomes."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        grads = jax.grad(loss)(params)
        slope = sum(jnp.vdot(p, g) for p, g in zip(params, grads, strict=True))
        return [p - g / slope for p, g in zip(params, grads, strict=True)]

    params = [jax.random.normal(key, (64, 64)) * 0.1 for key in jax.random.split(jax.random.key(0), 4)]
    x = jax.random.normal(jax.random.key(1), (16, 64))
    parallel = al.parallelize(
        step, cluster=eager_cluster(), planner=Megatron(tensor=4), batch_argnums=1, num_microbatches=1
    )
    for got, want in zip(parallel(params, x), jax.jit(step)(params, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert parallel.last_plan is not None
    # The weights stay split.
    specs = parallel.last_plan.stages[0].specs
    assert sum("model" in spec.axes for name, spec in specs.items() if name.startswith("params")) == len(params)
