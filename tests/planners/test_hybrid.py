"""Fixed degrees, as the papers describe them: which collectives they need, on which axes, and what does not divide."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.inter_op.plan_request import PlanRequest, SentSteps
from alpa_lite.planners import FSDP, Hybrid, Megatron, Planner
from alpa_lite.planners.hybrid import submeshes_of
from alpa_lite.schedule import OneFOneB, ZeroBubbleH1
from cost_models.cluster import with_memory
from tests.end_to_end.transformers import WIDE, Training, plan, traced, with_architecture

TRAINING = Training(model=WIDE, batch_size=64)
FOUR = replace(al.cluster("p3.16xlarge"), devices_per_host=4)
#: Bytes of the activations of the whole batch.
ACTIVATIONS = 4.0 * 64 * 128 * 256
#: Long sequences, with a quarter of the heads for keys and values.
LONG = Training(
    model=with_architecture(replace(WIDE, hidden=4096, num_heads=32, inner=16384, seq_len=4096), num_kv_heads=8),
    batch_size=8,
)


def uses(found: al.Plan, *axes: str, phase: str = "") -> list[Any]:
    """Collectives over exactly one of these axes."""
    return [u for u in found.prediction.collectives if u.axis in axes and (not phase or u.phase == phase)]


def per_layer(found: al.Plan, phase: str) -> Counter[tuple[str, float]]:
    """Kind and bytes of what each layer exchanges over "model"."""
    inside = [u for u in uses(found, "model", phase=phase) if u.count >= WIDE.num_layers]
    return Counter((u.kind, u.bytes) for u in inside for _ in range(round(u.count / WIDE.num_layers)))


# --- tensor parallelism -----------------------------------------------------------------------------------------------


def test_megatron_reduces_twice_per_layer_and_pass() -> None:
    """Behind attention and behind the MLP; in the backward pass before them (Shoeybi et al. 2019, figure 4)."""
    found = plan(TRAINING, Hybrid(tensor=8, sequence_parallel=False))
    for phase in ("forward", "backward"):
        assert per_layer(found, phase) == {("all_reduce", ACTIVATIONS): 2}, phase


def test_whatever_megatron_scatters_it_sends_no_more() -> None:
    found = plan(TRAINING, Megatron())
    sent = {phase: sum(map(_ring_bytes, uses(found, "model", phase=phase))) for phase in ("forward", "backward")}
    once = 2 * 7 / 8 * ACTIVATIONS
    assert sent["forward"] == pytest.approx(2 * WIDE.num_layers * once, rel=0.02)
    # And once for what the projection onto the vocabulary read.
    assert sent["backward"] == pytest.approx((2 * WIDE.num_layers + 1) * once, rel=0.02)


def _ring_bytes(use: Any) -> float:
    """What each device sends: an all_reduce is a reduce_scatter and an all_gather."""
    rounds = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}[use.kind]
    return use.count * rounds * (use.num_devices - 1) / use.num_devices * use.bytes


def test_sequence_parallelism_scatters_what_it_reduces() -> None:
    """Sums stay in parts between products, where norms then work on parts (Korthikanti et al. 2022, section 4.2.2)."""
    scattered, whole = (plan(LONG, Hybrid(tensor=8, sequence_parallel=flag)) for flag in (True, False))
    large = {u.kind for u in uses(scattered, "model", phase="forward") if u.count > 1 and u.bytes > 1e8}
    assert large == {"reduce_scatter", "all_gather"}
    assert scattered.prediction.step_seconds < whole.prediction.step_seconds


def test_heads_are_split_and_positions_never() -> None:
    (stage,) = plan(TRAINING, Hybrid(tensor=8, sequence_parallel=False)).stages
    for name in ("w_q", "w_k", "w_v"):
        assert stage.specs[f"state/params/layers/0/0/attention/{name}"].dims[2] == ("model",), name
    assert stage.specs["state/params/layers/0/0/attention/w_out"].dims[1] == ("model",)
    assert stage.specs["state/params/layers/0/0/mlp/w_up"].dims[-1] == ("model",)
    assert stage.specs["state/params/layers/0/0/mlp/w_down"].dims[1] == ("model",)


# --- replicas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 3])
def test_hybrid_sharding_reduces_in_parts_inside_and_sums_parts_across(zero: int) -> None:
    """Each group of four holds one copy: only a quarter of each gradient passes between the groups."""
    found = plan(TRAINING, Hybrid(data=8, zero=zero, replicas=2))
    (stage,) = found.stages
    assert stage.mesh_shape.axis_sizes == {"replica": 2, "data": 4}
    across = [u for u in uses(found, "replica") if u.bytes > 4]
    assert {u.kind for u in across} == {"all_reduce"}
    inside = [u for u in uses(found, "data") if u.kind == "reduce_scatter"]
    weights = [leaf for name, leaf in stage.specs.items() if name.startswith("state/")]
    assert all("replica" not in spec.axes for spec in weights)
    large = sum(u.bytes * u.count for u in across)
    assert large == pytest.approx(sum(u.bytes * u.count for u in inside) / 4, rel=0.02)


def test_one_replica_is_fsdp() -> None:
    plain, hybrid = (plan(TRAINING, planner) for planner in (FSDP(), Hybrid(data=8, zero=3, replicas=1)))
    assert plain.stages == hybrid.stages and plain.prediction == hybrid.prediction
    assert (
        hybrid.stages[0].cost.state_bytes
        < plan(TRAINING, Hybrid(data=8, zero=3, replicas=2)).stages[0].cost.state_bytes
    )


# --- context ----------------------------------------------------------------------------------------------------------


def test_context_parallelism_gathers_keys_and_values_alone() -> None:
    """Queries stay with their positions; per layer keys and values are gathered, and their gradients added up."""
    found = plan(LONG, Hybrid(data=4, context=2))
    (stage,) = found.stages
    assert stage.mesh_shape.axis_sizes == {"data": 4, "context": 2}
    assert stage.specs["batch/tokens"].dims == (("data",), ("context",))
    heads = 4.0 * (8 / 4) * 4096 * 8 * 128  # keys of the samples of a device, at all positions
    exchanged = {
        phase: [u for u in uses(found, "context", phase=phase) if u.count > 1] for phase in ("forward", "backward")
    }
    assert [(u.kind, u.bytes, u.count) for u in exchanged["forward"]] == [("all_gather", heads, WIDE.num_layers)] * 2
    assert [(u.bytes, u.count) for u in exchanged["backward"]] == [(heads, WIDE.num_layers)] * 2
    assert {u.kind for u in exchanged["backward"]} <= {"all_reduce", "reduce_scatter"}
    assert not [u for u in uses(found, "data") if u.count > 1]


@pytest.mark.parametrize("zero", range(4))
def test_zero_splits_state_over_context_as_over_data(zero: int) -> None:
    def step(state: Any, x: Any) -> Any:
        slope = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(state["w"])
        momentum = 0.9 * state["m"] + slope
        return {"w": state["w"] - 0.1 * momentum, "m": momentum}

    w, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((8, 32, 64), jnp.float32)
    planner = Hybrid(data=4, context=2, zero=zero)
    (stage,) = al.plan(step, {"w": w, "m": w}, x, planner=planner, cluster="p3.16xlarge", cache=False).stages
    both = {"data", "context"}
    assert stage.specs["state/m"].axes == (both if zero else set())
    assert stage.specs["state/w"].axes == (both if zero == 3 else set())


# --- experts, names, refusals -----------------------------------------------------------------------------------------


def test_names_say_the_degrees() -> None:
    planner = Hybrid(pipeline=2, tensor=4, context=2, expert=2, data=8, zero=1)
    assert planner.name == "pp2 × tp4 × cp2 × ep2 × dp8 × zero1"


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (Hybrid(data=2, tensor=2), r"1 stages × 2 data × 2 tensor = 4 devices were asked for, but .* has 8\. Choose"),
        (Hybrid(data=2, context=3), r"2 data × 3 context × 1 tensor = 6 devices"),
        (Hybrid(context=3), r"2 data × 3 context × 1 tensor = 6 devices"),
        (Hybrid(data=8, replicas=3), r"3 replicas × 1 expert devices lie within the 8 data-parallel devices"),
        (Hybrid(data=8, expert=4, replicas=4), r"4 replicas × 4 expert devices .* does not divide that number"),
        (Hybrid(pipeline=2, devices=(4, 2)), r"devices = \(4, 2\) .* whose sum is 8, and leave out data"),
        (Hybrid(pipeline=3, devices=(4, 4)), r"as many numbers as the pipeline has parts"),
        (Hybrid(pipeline=2, devices=(4, 4), data=4), r"and data = 4 .* leave out data"),
        (
            Hybrid(pipeline=2, devices=(3, 5), tensor=2),
            r"1 context × 2 tensor-parallel devices\. Give multiples of 2",
        ),
        (Megatron(tensor=3), r"2 data × 3 tensor = 6 devices"),
        (Hybrid(data=1, context=8), r"8 devices are to split the 12 positions of batch/t\w+, which they do not divide"),
    ],
    ids=lambda value: value.name if isinstance(value, Planner) else "",
)
def test_degrees_that_do_not_divide_are_refused(planner: Planner, message: str) -> None:
    training = replace(TRAINING, model=replace(WIDE, seq_len=12)) if "positions" in message else TRAINING
    with pytest.raises(al.errors.PlanError, match=message):
        plan(training, planner)


def test_context_parallelism_without_positions_is_refused() -> None:
    weights, x = jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    step = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    with pytest.raises(al.errors.PlanError, match="no argument has positions"):
        al.plan(step, weights, x, cluster="p3.16xlarge", planner=Hybrid(context=4))


@pytest.mark.parametrize(
    "planner",
    [
        Hybrid(data=8),
        Hybrid(tensor=8),
        Hybrid(pipeline=2, tensor=2),
        Hybrid(zero=1),
        FSDP(),
        Hybrid(zero=3, replicas=2),
        Hybrid(context=4, tensor=2),
        Hybrid(pipeline=2, devices=(6, 2)),
    ],
    ids=lambda planner: planner.name,
)
def test_state_that_is_too_large_alone_is_refused_before_the_step_is_cut(planner: Planner) -> None:
    """What fits is never refused so, with no byte to spare."""
    training = Training(model=replace(WIDE, num_layers=2), batch_size=48)
    cluster = al.cluster("dgx-a100")

    def within(memory_bytes: float) -> PlanRequest:
        limited = with_memory(cluster, memory_bytes)
        return traced(training).request(limited, num_microbatches=1)

    least = max(planner.plan(within(1e12)).prediction.peak_bytes)
    assert max(planner.plan(within(least)).prediction.peak_bytes) <= least

    whole = SentSteps(known={(1, 0): traced(training).step(1).step})  # what is known anyway
    with pytest.raises(al.errors.InfeasibleError, match=r"does not fit: state alone needs at least .* per device, but"):
        planner.plan(replace(within(1e5), steps=whole))


def test_parts_of_a_pipeline_may_have_unequal_numbers_of_devices() -> None:
    planner = Hybrid(pipeline=3, devices=(4, 2, 2), shares=(2, 1, 1), tensor=2)
    found = plan(Training(model=replace(WIDE, num_layers=4), batch_size=64), planner, num_microbatches=8)
    assert [list(stage.submesh.devices) for stage in found.stages] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    meshes = [dict(stage.mesh_shape.axis_sizes) for stage in found.stages]
    assert meshes == [{"data": 2, "model": 2}, {"model": 2}, {"model": 2}]
    rows = [sum("w_up[" in name and "params" in name for name in stage.specs) for stage in found.stages]
    assert rows == [2, 1, 1], "twice the layers on twice the devices"


@pytest.mark.parametrize(
    ("sizes", "fits"), [((8, 16), True), ((4, 4, 8, 8), True), ((6, 2, 16), True), ((4, 8, 12), False)]
)
def test_parts_lie_within_hosts_or_have_whole_ones(sizes: tuple[int, ...], fits: bool) -> None:
    cluster = al.cluster("p3.16xlarge", num_hosts=3)
    if fits:
        parts = submeshes_of(cluster, sizes)
        assert [device for part in parts for device in part.devices] == list(range(24))
        return
    with pytest.raises(al.errors.PlanError, match=r"Stages of 4, 8, 12 devices do not tile 3 hosts of 8 devices"):
        submeshes_of(cluster, sizes)


def test_replicas_count_among_what_splits_the_batch() -> None:
    with pytest.raises(al.errors.PlanError, match=r"splits each micro-batch over 8 devices, but it has 4 samples"):
        plan(Training(model=WIDE, batch_size=4), Hybrid(data=8, replicas=2))


# --- zero-bubble pipelines --------------------------------------------------------------------------------------------


def test_weight_gradients_of_layers_in_a_loop_can_be_put_off() -> None:
    """As they can of layers that are written one by one."""

    def found(schedule: OneFOneB | ZeroBubbleH1, *, in_a_loop: bool) -> al.Plan:
        def step(weights: Any, x: Any) -> Any:
            def layer(h: Any, w: Any) -> tuple[Any, None]:
                return jnp.tanh(h @ w), None

            def loss(weights: Any) -> Any:
                if in_a_loop:
                    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)
                h = x
                for w in weights:
                    h, _ = layer(h, w)
                return jnp.mean(h**2)

            return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

        matrix = jax.ShapeDtypeStruct((8, 4096, 4096) if in_a_loop else (4096, 4096), jnp.float32)
        weights, x = matrix if in_a_loop else [matrix] * 8, jax.ShapeDtypeStruct((2048, 4096), jnp.float32)
        planner = Hybrid(pipeline=4, schedule=schedule)
        return al.plan(step, weights, x, cluster=FOUR, planner=planner, num_microbatches=8)

    usual, looped, written = (
        found(OneFOneB(), in_a_loop=True),
        found(ZeroBubbleH1(), in_a_loop=True),
        found(ZeroBubbleH1(), in_a_loop=False),
    )
    for stage, alike in zip(looped.stages, written.stages, strict=True):
        assert 0.4 < stage.cost.weight_seconds / stage.cost.backward_seconds <= 1.0
        assert stage.cost.weight_seconds == pytest.approx(alike.cost.weight_seconds, rel=0.05)
    assert looped.prediction.step_seconds < 0.92 * usual.prediction.step_seconds
