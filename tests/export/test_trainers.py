"""Plans as options of trainers with fixed forms of parallelism, against options written by hand."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import _Splits, degrees_of, programs_of
from alpa_lite.export.product_axes import ProductAxes
from alpa_lite.lower.plan_fits import as_planned
from alpa_lite.planners import FSDP, DataParallel, Hybrid, Megatron, OnMesh, Zero
from alpa_lite.rules.op_info import rule_of_op
from alpa_lite.schedule import EagerOneFOneB, Interleaved1F1B, ZeroBubbleV

WIDTH, LAYERS, SAMPLES = 32, 4, 32


def step(state: Any, batch: Any) -> Any:
    """Layers in a loop, with momentum."""
    params, momentum = state

    def loss(params):
        def layer(x, weights):
            return x + jax.nn.relu(x @ weights["up"]) @ weights["down"], None

        x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
        return jnp.mean((x - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum), value


def _shaped(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PARAMS = {
    "in": _shaped(WIDTH, WIDTH),
    "layers": {"up": _shaped(LAYERS, WIDTH, 4 * WIDTH), "down": _shaped(LAYERS, 4 * WIDTH, WIDTH)},
}
BATCH = {name: _shaped(SAMPLES, WIDTH) for name in "xy"}


def _plan(planner: Any, num_microbatches: int, fun: Callable[..., Any] = step, *args: Any) -> al.Plan:
    given = args or ((PARAMS, PARAMS), BATCH)
    return al.plan(fun, *given, cluster="dgx-1", planner=planner, num_microbatches=num_microbatches)


def _flags(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (line.removeprefix("--").partition(" ") for line in text.splitlines())}


@pytest.mark.parametrize(
    ("planner", "num_microbatches", "tensor", "pipeline", "samples", "others"),
    [
        (DataParallel(), 1, 1, 1, 4, {}),
        (DataParallel(), 2, 1, 1, 2, {}),
        (Zero(stage=1), 2, 1, 1, 2, {"use-distributed-optimizer": ""}),
        (Megatron(tensor=4, data=2, sequence_parallel=False), 2, 4, 1, 8, {}),
        (Hybrid(pipeline=2, tensor=2, data=2, sequence_parallel=False), 4, 2, 2, 4, {}),
        (
            Hybrid(pipeline=2, data=4, schedule=Interleaved1F1B(num_chunks=2)),
            4,
            1,
            2,
            2,
            {"num-virtual-stages-per-pipeline-rank": "2"},
        ),
        (
            Hybrid(data=8, remat="full"),
            1,
            1,
            1,
            4,
            {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": "1"},
        ),
    ],
)
def test_flags_of_megatron(
    planner: Any, num_microbatches: int, tensor: int, pipeline: int, samples: int, others: dict[str, str]
) -> None:
    found = _flags(_plan(planner, num_microbatches).export("megatron"))
    assert found == {
        "tensor-model-parallel-size": str(tensor),
        "pipeline-model-parallel-size": str(pipeline),
        "context-parallel-size": "1",
        "expert-model-parallel-size": "1",
        "micro-batch-size": str(samples),
        "global-batch-size": str(SAMPLES),
        **others,
    }


NEMO = {
    # Arguments of `MegatronStrategy` (NVIDIA/NeMo, nemo/lightning/pytorch/strategies/megatron_strategy.py).
    "trainer.strategy": {
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "sequence_parallel", "expert_model_parallel_size",
    },
    # Of its data modules, Megatron Core's `TransformerConfig` and `OptimizerConfig`.
    "data": {"micro_batch_size", "global_batch_size"},
    "model.config": {"recompute_granularity", "recompute_method", "recompute_num_layers"},
    "optim.config": {"use_distributed_optimizer"},
}  # fmt: skip


def test_overrides_of_nemo_are_those_of_megatron() -> None:
    planner = Hybrid(
        pipeline=2, tensor=2, data=2, zero=1, remat="full", sequence_parallel=False,
        schedule=Interleaved1F1B(num_chunks=2),
    )  # fmt: skip
    plan = _plan(planner, 4)
    found = dict(line.split("=") for line in plan.export("nemo").splitlines())
    assert {name for name in found if name.rpartition(".")[2] not in NEMO[name.rpartition(".")[0]]} == set()
    assert found == {
        "trainer.strategy.tensor_model_parallel_size": "2",
        "trainer.strategy.pipeline_model_parallel_size": "2",
        "trainer.strategy.virtual_pipeline_model_parallel_size": "2",
        "trainer.strategy.context_parallel_size": "1",
        "trainer.strategy.expert_model_parallel_size": "1",
        "trainer.strategy.sequence_parallel": "False",
        "data.micro_batch_size": "4",
        "data.global_batch_size": str(SAMPLES),
        "optim.config.use_distributed_optimizer": "True",
        "model.config.recompute_granularity": "full",
        "model.config.recompute_method": "uniform",
        "model.config.recompute_num_layers": "1",
    }
    with pytest.raises(PlanError, match=r"NeMo does not have parameters split .* \(ZeRO-3\)"):
        _plan(FSDP(), 1).export("nemo")


def test_sections_of_torchtitan() -> None:
    found = tomllib.loads(_plan(Hybrid(replicas=2, zero=3), 2).export("torchtitan"))
    assert found["parallelism"] == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 4,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 1,
    }
    # Two steps of gradient accumulation.
    assert found["training"] == {"local_batch_size": 2, "global_batch_size": SAMPLES}
    assert found["activation_checkpoint"] == {"mode": "none"}
    piped = tomllib.loads(_plan(Hybrid(pipeline=2, data=4, schedule=ZeroBubbleV()), 4).export("torchtitan"))
    assert piped["parallelism"]["pipeline_parallel_schedule"] == "ZBVZeroBubble"
    assert piped["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert piped["training"]["local_batch_size"] == 8


def test_configuration_of_deepspeed() -> None:
    assert json.loads(_plan(FSDP(), 2).export("deepspeed")) == {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3},
    }
    piped = json.loads(_plan(Hybrid(pipeline=2, tensor=2, data=2, zero=1), 4).export("deepspeed"))
    assert (piped["pipeline"], piped["tensor_parallel"]) == ({"stages": 2}, {"autotp_size": 2})
    assert piped["zero_optimization"] == {"stage": 1}


EXPERTS, INNER, ROWS = 8, 2048, 256


def mixture(params: Any, batch: Any) -> Any:
    """Tokens to the experts by a soft mask, with a capacity for each sample."""

    def loss(params):
        x = batch["x"] @ params["in"]
        mask = jax.nn.softmax(jnp.einsum("gsd,de->gse", x, params["gate"]))
        inside = jnp.einsum("gsec,gsd->egcd", mask[..., None] * jnp.ones(ROWS // EXPERTS * 2), x)
        hidden = jax.nn.relu(jnp.einsum("egcd,edh->egch", inside, params["up"]))
        outside = jnp.einsum("egch,ehd->egcd", hidden, params["down"])
        return jnp.mean((jnp.einsum("gse,egcd->gsd", mask, outside) - x) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def ragged(params: Any, batch: Any) -> Any:
    """Each token to one expert; tokens are sorted by expert."""

    def loss(params):
        rows = (batch["x"] @ params["in"]).reshape(-1, 256)
        chosen = jnp.argmax(rows @ params["gate"], -1)
        order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
        hidden = jax.nn.relu(jax.lax.ragged_dot(rows[order], params["up"], sizes))
        return jnp.mean(jax.lax.ragged_dot(hidden, params["down"], sizes) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


MIXTURE = (
    {"in": _shaped(256, 256), "gate": _shaped(256, EXPERTS), "up": _shaped(EXPERTS, 256, INNER),
     "down": _shaped(EXPERTS, INNER, 256)},
    {"x": _shaped(32, ROWS, 256)},
)  # fmt: skip


def _renamed(plan: al.Plan, before: str, after: str) -> al.Plan:
    """The plan with another name for an axis, made for the step again."""
    text = json.dumps(plan.to_json())
    return al.Plan.from_json(json.loads(re.sub(rf"(?<![a-z]){before}(?![a-z])", after, text)))


def test_experts_and_positions_have_degrees_of_their_own() -> None:
    plan = _plan(Hybrid(expert=4), 1, mixture, *MIXTURE)
    experts = _flags(plan.export("megatron"))
    assert (experts["expert-model-parallel-size"], experts["micro-batch-size"]) == ("4", "4")
    positions = _flags(_plan(Hybrid(context=4, data=2), 1, mixture, *MIXTURE).export("megatron"))
    assert (positions["context-parallel-size"], positions["micro-batch-size"]) == ("4", "16")
    # The axis is recognised by what it splits, whoever named it.
    other = _plan(_renamed(plan, "expert", "model"), 1, mixture, *MIXTURE)
    assert dict(other.stages[0].mesh_shape.axis_sizes) == {"data": 2, "model": 4}
    assert other.export("megatron") == plan.export("megatron")


@pytest.mark.parametrize(
    ("planner", "words"),
    [
        (OnMesh(axes={"x": 8}), "8 expert"),
        # Stored in parts along the experts, and gathered for the products.
        (FSDP(), "8 data, ZeRO-3"),
        (Megatron(tensor=4, data=2, sequence_parallel=False), "4 tensor × 2 data"),
        (Hybrid(expert=4, zero=3), "4 expert × 2 data, ZeRO-3"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_axes_stand_for_what_they_split_in_products(planner: Any, words: str) -> None:
    assert degrees_of(_plan(planner, 1, mixture, *MIXTURE)).words == words


def test_groups_of_ragged_products_are_experts() -> None:
    plan = _plan(DataParallel(), 1, ragged, *MIXTURE)
    step, (stage,) = as_planned(programs_of(plan).with_equations(1, plan.loop_parts), plan).step, plan.stages

    def split(primitives: Collection[str]) -> ProductAxes:
        """The axes of the plan if products are split along the first dim of their weights."""
        ops = {}
        for number, placement in stage.ops.items():
            op = step.graph.ops[number]
            first = rule_of_op(step.graph, number).operands[1][0][0] if op.primitive in primitives else None
            factors = [("x",) if factor == first else () for factor in range(len(placement.factors))]
            ops[number] = replace(placement, factors=tuple(factors))
        return ProductAxes.of([replace(stage, ops=ops)], step)

    # No plan splits groups for its price, as all rows would be summed.
    alone = split(["ragged_dot_general"])
    assert (alone.experts, alone.weights) == ({"x"}, frozenset())
    # An axis that splits other dims of weights too is a tensor axis.
    both = split(["ragged_dot_general", "dot_general"])
    assert (both.experts, both.weights) == (frozenset(), {"x"})


def test_what_a_trainer_does_not_have_is_refused() -> None:
    refused = {
        ("megatron", FSDP(), 1): r"parameters split over data-parallel devices \(ZeRO-3\)",
        ("megatron", Hybrid(pipeline=2, data=4, schedule=EagerOneFOneB()), 4): "schedule eager-1f1b",
        ("torchtitan", Zero(stage=1), 1): "ZeRO-1",
        ("torchtitan", Hybrid(pipeline=2, data=4, schedule=Interleaved1F1B(num_chunks=4)), 4): "4 stages of each group",
        ("deepspeed", Hybrid(replicas=2, zero=3), 1): "replica",
        ("megatron", Hybrid(pipeline=2, devices=(2, 6)), 4): "lie on different meshes: data=2, data=6",
    }
    batch = {name: _shaped(48, WIDTH) for name in "xy"}
    for (target, planner, number), why in refused.items():
        plan = _plan(planner, number, step, (PARAMS, PARAMS), batch)
        with pytest.raises(PlanError, match=why):
            plan.export(target)
    with pytest.raises(PlanError, match="has no option 'step'; it has none"):
        _plan(DataParallel(), 1).export("megatron", step="train:step")


def test_what_the_step_recomputes_itself_is_said() -> None:
    """Of a plan without recomputation of its own: Megatron-LM and torchtitan would otherwise store everything."""

    def checkpointed(params: Any, batch: Any) -> Any:
        @jax.checkpoint
        def layer(x, weights):
            return x + jax.nn.relu(x @ weights["up"]) @ weights["down"], None

        def loss(params):
            x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
            return jnp.mean((x - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    plan = _plan(Hybrid(data=8, zero=3), 1, checkpointed, PARAMS, BATCH)
    assert not plan.recomputed
    assert tomllib.loads(plan.export("torchtitan"))["activation_checkpoint"] == {"mode": "full"}
    assert 'remat_policy: "full"' in plan.export("maxtext") and "recomputes nothing" not in plan.export("maxtext")
    flags = _flags(_plan(DataParallel(), 1, checkpointed, PARAMS, BATCH).export("megatron"))
    assert flags["recompute-granularity"] == "full"
    found = al.compare(checkpointed, PARAMS, BATCH, planners=[DataParallel(), FSDP()], cluster="dgx-1")
    assert "recomputed: full, by the step itself" in " ".join(str(found).split())


def test_positions_scattered_over_tensor_devices_are_no_context() -> None:
    """Sequence parallelism may scatter the batch itself; its axis splits the weights, which a context axis does not."""
    plan = _plan(Megatron(tensor=4, data=2), 1)
    found = programs_of(plan)
    products = ProductAxes.of(plan.stages, as_planned(found.with_equations(1, plan.loop_parts), plan).step)
    assert products.weights == {"model"}
    splits = _Splits(
        samples=frozenset({"data"}), positions=frozenset({"model", "context"}), stored=(), products=products
    )
    assert [splits.role(axis) for axis in ("data", "model", "context")] == ["data", "tensor", "context"]
