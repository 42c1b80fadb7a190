"""Plans that compute values again give the same numbers, and the executables hold less memory for it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.sequential_networks import MLP
from alpa_lite.errors import InfeasibleError
from alpa_lite.planners import Auto, Hybrid
from alpa_lite.schedule import GPipe
from alpa_lite.step.recomputation import Remat
from tests.end_to_end import cases
from tests.end_to_end.cases import TOLERANCE, Training, assert_same, eager_cluster, reference

PLANNERS: Mapping[str, Hybrid] = {
    "data_parallel": Hybrid(data=8),
    "pipeline": Hybrid(pipeline=2),
    "gpipe": Hybrid(pipeline=2, schedule=GPipe()),
    "hybrid": Hybrid(pipeline=2, data=2, tensor=2),
    "fsdp": Hybrid(data=8, zero=3),
}

CASES = [
    ("gpt", "data_parallel", "full", 1),
    ("gpt", "pipeline", "selective", 4),
    ("gpt_scan", "fsdp", "selective", 1),
    ("gpt_scan", "gpipe", "full", 4),
    ("gpt_remat", "pipeline", "full", 4),
    ("mlp", "gpipe", "full", 4),
    ("mlp", "hybrid", "selective", 1),
    *(
        pytest.param(*case, marks=pytest.mark.long)
        for case in [
            ("gpt", "hybrid", "full", 4),
            ("gpt_scan", "data_parallel", "full", 4),
            ("gpt_scan", "hybrid", "full", 1),
        ]
    ),
]
"""Models with dropout, unrolled and scanned, and with regions that the user recomputes; several kinds of plans."""


@pytest.mark.parametrize(("model", "planner", "remat", "num_microbatches"), CASES)
def test_five_steps_give_the_same_loss_gradients_and_state(
    model: str, planner: str, remat: Any, num_microbatches: int, devices: Any
) -> None:
    training = Training(model=model, optimizer="momentum+clip")
    chosen = replace(PLANNERS[planner], remat=remat)
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=chosen, num_microbatches=num_microbatches)
    assert_same(training.run(step), reference(training), TOLERANCE)
    assert remat in step.last_plan.remat


def test_the_search_computes_again_what_does_not_fit(devices: Any) -> None:
    training = Training(model="gpt_scan", optimizer="momentum+clip")
    free = Auto(manual=(), pipeline=2)
    arguments = training.start(), cases.make_batch(cases.MODELS["gpt_scan"], 0), jax.random.key(0)
    plan = functools.partial(al.plan, training.step(), *arguments, cluster=eager_cluster(), num_microbatches=4)
    roomy = plan(planner=free)
    assert not roomy.remat
    less = replace(free, max_memory_bytes=0.5 * max(roomy.prediction.peak_bytes))
    with pytest.raises(InfeasibleError):  # Schedules that hold fewer micro-batches aren't enough.
        plan(planner=replace(less, remat="none"))
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=less, num_microbatches=4)
    assert_same(training.run(step), reference(training), TOLERANCE)
    # The first stage holds more micro-batches than the last one.
    first, last = step.last_plan.remat[0], step.last_plan.remat[-1]
    assert first is not Remat.NONE and last is Remat.NONE


# --- memory -----------------------------------------------------------------------------------------------------------

NUM_LAYERS, SAMPLES = 8, 16
SMALL = GPT(vocab_size=64, num_layers=NUM_LAYERS, num_heads=4, hidden=64, seq_len=64)
MODELS: Mapping[str, Any] = {
    "mlp": MLP(in_features=64, hidden=256, out_features=64, num_layers=24),
    "gpt": SMALL,
    "gpt_scan": replace(SMALL, scan_layers=True),
    "gpt_long": replace(SMALL, num_heads=1, seq_len=512),
}


def shapes_of(model: Any) -> tuple[Any, Any]:
    if isinstance(model, MLP):
        size = 256 * SAMPLES
        batch: Any = {
            "inputs": jax.ShapeDtypeStruct((size, model.in_features), jnp.float32),
            "targets": jax.ShapeDtypeStruct((size, model.out_features), jnp.float32),
        }
    else:
        batch = {k: jax.ShapeDtypeStruct((SAMPLES, model.seq_len), jnp.int32) for k in ("tokens", "targets")}
    return jax.eval_shape(model.init, jax.random.key(0)), batch


@functools.cache
def compiled(model: str, planner: Hybrid, num_microbatches: int) -> Any:
    def step(params: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(MODELS[model].loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    cluster = replace(eager_cluster(), devices_per_host=planner.pipeline)
    made = al.parallelize(step, cluster=cluster, planner=planner, num_microbatches=num_microbatches, batch_argnums=(1,))
    return made.trace(*shapes_of(MODELS[model])).plan().lower().compile()


def temporary_bytes(found: Any) -> list[int]:
    return [e.compiled.memory_analysis().temp_size_in_bytes for e in found.executor.executables]


def compiled_flops(found: Any) -> float:
    return sum(e.compiled.cost_analysis()["flops"] for e in found.executor.executables)


@pytest.mark.parametrize(
    ("model", "remat", "share"),
    [
        ("mlp", "full", 0.45),
        ("gpt", "selective", 0.5),
        ("gpt", "full", 0.4),
        ("gpt_scan", "selective", 0.35),
        ("gpt_scan", "full", 0.2),
    ],
)
def test_one_executable_of_forward_and_backward_takes_less_memory(
    model: str, remat: Any, share: float, devices: Any
) -> None:
    """XLA neither merges copies with what they repeat nor runs them before their turn, not even on CPUs."""
    plain, again = (compiled(model, Hybrid(remat=r), 1) for r in ("none", remat))
    assert sum(temporary_bytes(again)) < share * sum(temporary_bytes(plain))
    assert again.plan.stages[0].cost.activation_bytes < 0.5 * plain.plan.stages[0].cost.activation_bytes


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_xla_runs_the_operations_that_the_plan_counts(remat: Any, devices: Any) -> None:
    """Of a step that is all products, for what XLA counts of element-wise work depends on what it fuses."""
    plain, again = (compiled("gpt_long", Hybrid(remat=r), 1) for r in ("none", remat))
    predicted = again.plan.prediction.flops_per_device - plain.plan.prediction.flops_per_device
    assert compiled_flops(again) - compiled_flops(plain) == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("model", ["gpt", "gpt_scan"])
def test_the_first_stage_of_a_pipeline_hands_its_input_to_its_backward_pass(model: str, devices: Any) -> None:
    plain, again = (compiled(model, Hybrid(pipeline=2, remat=r), 4) for r in ("none", "full"))

    def saved(found: Any) -> float:
        values = found.executor.step.graph.values
        (forward,) = (task for task in found.executor.program.tasks if task.name == "stage 0 forward")
        return sum(values[port.value].bytes for port in forward.outputs)

    # What goes to the next stage beside one value per layer: inputs of layers, or of the trips of a loop.
    boundary = SAMPLES // 4 * SMALL.seq_len * SMALL.hidden * 4
    num_layers = again.plan.num_layers // 2
    assert saved(again) <= (NUM_LAYERS / 2 if model == "gpt_scan" else num_layers) * 2 * boundary
    assert saved(again) < 0.2 * saved(plain)
