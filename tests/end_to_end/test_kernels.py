"""Steps with hand-written kernels give the numbers of `jax.jit`, with the kernels split."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas.ops.gpu import attention_mgpu

import alpa_lite as al
import tests.rules.cudnn_reference  # noqa: F401  (a lowering of cuDNN's attention for CPUs)
from alpa_lite import _jax
from alpa_lite.errors import PlanError, RuleError
from alpa_lite.rules import registry, rule_from
from tests.end_to_end.cases import eager_cluster
from tests.rules.rows_kernels import attention

BATCH, LENGTH, HEADS, WIDTH = 16, 32, 8, 8

cudnn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")


def train(params: Any, x: Any, *, attend: Callable[..., Any]) -> Any:
    """A step of one layer of attention."""

    def loss(params: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, params[name]) for name in "qkv")
        made = jnp.einsum("bthk,hkd->btd", attend(q, k, v), params["o"])
        return jnp.mean(jnp.square((x + made).astype(jnp.float32)))

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, gradient), value


def arguments(dtype: Any = jnp.float32) -> Any:
    random, size = np.random.default_rng(0), HEADS * WIDTH
    params = {name: 0.1 * random.normal(size=(size, HEADS, WIDTH)) for name in "qkv"}
    params["o"] = 0.1 * random.normal(size=(HEADS, WIDTH, size))
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), (params, random.normal(size=(BATCH, LENGTH, size))))


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "planner",
    [al.planners.DataParallel(), al.planners.Megatron(sequence_parallel=False), al.planners.Pipeline()],
    ids=str,
)
def test_attention_of_pallas_is_split(planner, num_microbatches, devices):
    step = partial(train, attend=partial(attention, causal=True))
    parallel = al.parallelize(step, planner=planner, num_microbatches=num_microbatches)
    found, expected = parallel(*arguments()), jax.jit(step)(*arguments())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, expected)
    plan = parallel.last_plan
    assert plan is not None and not plan.opaque
    # Nothing is gathered for the kernels: gradients and sums of heads are all that is communicated.
    assert {c.kind for c in plan.prediction.collectives} <= {"all_reduce", "send"}


def test_attention_of_cudnn_is_split(devices):
    step = partial(train, attend=cudnn)
    parallel = al.parallelize(step, planner=al.planners.DataParallel(), num_microbatches=2)
    found = parallel(*arguments(jnp.bfloat16))
    with _jax.tracing_for_gpus():
        expected = jax.jit(step)(*arguments(jnp.bfloat16))
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-2), *jax.tree.map(np.float32, (found, expected))
    )
    assert parallel.last_plan is not None and not parallel.last_plan.opaque


def test_products_of_blocks_of_eight_bits_are_split(devices):
    def step(w: Any, x: Any) -> Any:
        narrow = [a[None].astype(jnp.float8_e4m3fn) for a in (x, w)]
        scales = [jnp.ones((1, len(a), a.shape[1] // 32), jnp.float8_e8m0fnu) for a in (x, w)]
        return w, jax.nn.scaled_matmul(*narrow, *scales, preferred_element_type=jnp.float32)[0]

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.normal(size=(rows, 256)), jnp.float32) for rows in (16, 32)]
    with _jax.tracing_for_gpus():
        expected = jax.jit(step)(*args)[1]
    for planner in (al.planners.DataParallel(), al.planners.OnMesh(axes={"x": 8}, pins={"w": (None, "x")})):
        parallel = al.parallelize(step, cluster=eager_cluster(), planner=planner, batch_argnums=1)
        np.testing.assert_allclose(parallel(*args)[1], expected, rtol=1e-5, atol=1e-4)
        plan = parallel.last_plan
        # Blocks of the contracted dim are summed over devices, whole samples are not.
        kinds = {c.kind for c in plan.prediction.collectives}
        assert not plan.opaque and kinds <= ({"all_reduce", "reduce_scatter"} if planner.name != "dp8" else set())


def test_kernels_for_gpus_are_planned_without_one():
    """The kernel of cuDNN holds no scores, those of XLA are [T, T] for each head."""
    size = jax.ShapeDtypeStruct((512, 8, 64), jnp.bfloat16)
    params = {name: size for name in "qkv"} | {"o": jax.ShapeDtypeStruct((8, 64, 512), jnp.bfloat16)}
    x = jax.ShapeDtypeStruct((16, 2048, 512), jnp.bfloat16)
    plans = [
        al.plan(partial(train, attend=attend), params, x, cluster="p4d.24xlarge", planner="data_parallel")
        for attend in (cudnn, partial(cudnn, implementation="xla"))
    ]
    assert not plans[0].opaque
    few, many = (plan.prediction.peak_bytes[0] for plan in plans)
    scores = 2 * 8 * 2048 * 2048 * 2  # of the samples of one device
    assert few + scores < many


def test_attention_of_mosaic_is_planned_without_a_gpu():
    """By itself each device runs it whole; a sharding rule around it splits it, forward and backward."""
    blocks = dict.fromkeys(("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq"), 64)
    config = attention_mgpu.TuningConfig(max_concurrent_steps=2, **blocks)

    def whole(q: Any, k: Any, v: Any) -> Any:
        return attention_mgpu.attention(q, k, v, config)

    def ruled(function: Callable[..., Any], text: str) -> Callable[..., Any]:
        made = custom_partitioning(function)
        made.def_partition(
            partition=lambda mesh, args, result: (mesh, function, result.sharding, tuple(a.sharding for a in args)),
            sharding_rule=text,
        )
        return made

    heads = "b {0} h d, b {1} h d, b {1} h d"
    forward = ruled(whole, f"{heads} -> b t h d".format("t", "s"))
    backward = ruled(
        lambda q, k, v, slope: jax.vjp(whole, q, k, v)[1](slope), f"{heads}, b t h d -> {heads}".format("t", "s")
    )
    attend = jax.custom_vjp(forward)
    attend.defvjp(lambda *qkv: (forward(*qkv), qkv), lambda qkv, slope: tuple(backward(*qkv, slope)))
    size = jax.ShapeDtypeStruct((512, 8, 64), jnp.float16)
    params = {name: size for name in "qkv"} | {"o": jax.ShapeDtypeStruct((8, 64, 512), jnp.float16)}
    x = jax.ShapeDtypeStruct((16, 2048, 512), jnp.float16)
    alone, split = (
        al.plan(partial(train, attend=attend), params, x, cluster="p5.48xlarge", planner="data_parallel", cache=False)
        for attend in (whole, attend)
    )
    assert {use.primitive for use in alone.opaque} == {"mpmd_map"}
    for function in (whole, attend):
        here = al.parallelize(partial(train, attend=function), planner="data_parallel").trace(params, x)
        with pytest.raises(PlanError, match=r"test_kernels.py:\d+.*the kernel .* cannot run on .*cpu"):
            here.plan()
    assert not split.opaque and {c.kind for c in split.prediction.collectives} == {"all_reduce"}


@pytest.mark.skipif(attention_mgpu.cuda_versions is not None, reason="CUDA is installed")
def test_steps_are_traced_where_the_kernels_of_mosaic_are_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, attention_mgpu.__name__)
    with _jax.tracing_for_gpus():
        assert attention_mgpu.cuda_versions is None
        # A step may be the first to import them.
        loaded = importlib.import_module(attention_mgpu.__name__)
        assert loaded is not attention_mgpu and loaded.cuda_versions is not None
        with _jax.tracing_for_gpus():
            pass
        assert loaded.cuda_versions is not None
    assert loaded.cuda_versions is None
    monkeypatch.undo()
    with _jax.tracing_for_gpus():
        assert attention_mgpu.cuda_versions is not None
    assert attention_mgpu.cuda_versions is None


def doubled(x: Any, *, name: str = "doubled_rows", **options: Any) -> Any:
    """Twice the rows, by a kernel that asks for its place and makes no use of it that could be proven."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        place = pl.program_id(0)
        o_ref[...] = 2 * x_ref[...] + (place - jnp.abs(place)).astype(jnp.float32)

    spec = pl.BlockSpec((2, 4), lambda i, j: (i, j))
    call = pl.pallas_call(kernel, grid=(8, 4), in_specs=[spec], out_specs=spec, out_shape=x, name=name, **options)
    return call(x)


def test_a_kernel_that_the_devices_cannot_run_is_refused_at_planning(devices):
    parallel = al.parallelize(lambda w, x: (w, doubled(x * w)), planner=al.planners.DataParallel())
    with pytest.raises(PlanError, match=r"test_kernels.py:\d+.*the kernel doubled_rows cannot run.*cpu"):
        parallel.trace(jnp.ones(()), jnp.ones((16, 16))).plan()


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget at the end of the test which rules it has registered."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))


@pytest.mark.usefixtures("own_rules")
def test_a_rule_of_one_line_splits_a_kernel(devices):
    def step(w: Any, x: Any) -> Any:
        return w, doubled(x * w, interpret=True)

    args = jnp.ones(()), jnp.arange(256.0).reshape(16, 16)
    before = al.plan(step, *args, planner="data_parallel", batch_argnums=1)
    assert before.prediction.collectives  # the rows are gathered for the kernel
    al.register_rule("pallas_call:doubled_rows")(rule_from("rows columns -> rows columns", whole="columns"))
    parallel = al.parallelize(step, planner=al.planners.DataParallel(), batch_argnums=1)
    np.testing.assert_array_equal(parallel(*args)[1], 2 * args[1])
    plan = parallel.last_plan
    assert plan is not None and not plan.opaque and not plan.prediction.collectives


def column_sums(x: Any) -> Any:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            o_ref[...] = jnp.zeros_like(o_ref)

        o_ref[...] += jnp.sum(x_ref[...], 0)

    rows, width = pl.BlockSpec((2, 4), lambda i: (i, 0)), pl.BlockSpec((4,), lambda i: (0,))
    made = jax.ShapeDtypeStruct((4,), x.dtype)
    return pl.pallas_call(
        kernel, grid=(8,), in_specs=[rows], out_specs=width, out_shape=made, name="column_sums", interpret=True
    )(x)


@pytest.mark.usefixtures("own_rules")
def test_an_axis_that_a_kernel_accumulates_over_is_split_where_a_rule_says_so(devices):
    """That the kernel adds, and begins with zeros, is not proven."""
    x = jax.random.normal(jax.random.key(0), (16, 4))
    for known in (False, True):
        if known:
            al.register_rule("pallas_call:column_sums")(rule_from("rows width -> width", summed="rows", whole="width"))
        step = al.parallelize(
            lambda w, x: w - column_sums(x * w), planner=al.planners.DataParallel(), batch_argnums=1, cache=False
        )
        np.testing.assert_allclose(step(jnp.ones(4), x), 1.0 - jnp.sum(x, 0), rtol=1e-5, atol=1e-5)
        assert step.last_plan is not None
        assert {use.primitive for use in step.last_plan.opaque} == (set() if known else {"pallas_call"})
        kinds = {c.kind for c in step.last_plan.prediction.collectives}
        assert kinds == ({"all_reduce"} if known else {"all_gather"})


@pytest.mark.usefixtures("own_rules")
def test_a_rule_of_a_kernel_must_fit_its_grid():
    al.register_rule("pallas_call:summed_rows")(rule_from("rows columns -> columns rows"))

    def step(w: Any, x: Any) -> Any:
        return w, doubled(x * w, name="summed_rows", interpret=True)

    with pytest.raises(RuleError, match="no axis of the kernel's grid walks over just the dims"):
        al.plan(step, jnp.ones(()), jnp.ones((16, 16)), planner="data_parallel", batch_argnums=1)


def test_a_custom_partitioning_without_a_rule_is_looked_into(devices):
    wrapped = custom_partitioning(lambda x: x * 2)
    wrapped.def_partition(partition=None)
    parallel = al.parallelize(lambda w, x: (w, wrapped(x @ w)), planner=al.planners.DataParallel())
    args = jnp.eye(16), jnp.ones((16, 16))
    np.testing.assert_array_equal(parallel(*args)[1], 2 * args[1])
    assert parallel.last_plan is not None and not parallel.last_plan.opaque
