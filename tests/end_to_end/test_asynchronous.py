"""Asynchronous pipelines against a reference that keeps all versions of the weights."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.schedule import AsynchronousSchedule, OneFOneB, PipeDream, PipeDream2BW, Schedule

STAGES, WIDTH, SAMPLES = 4, 8, 8


def forward(weights, x):
    for w in weights:
        x = x @ w
    return x


def loss_and_out(weights, batch):
    out = forward(weights, batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), out


def loss_of(weights, batch):
    return loss_and_out(weights, batch)[0]


def step(state, batch):
    """SGD with momentum on a linear model; the rate follows a counter that all stages read."""
    (loss, out), grads = jax.value_and_grad(loss_and_out, has_aux=True)(state["w"], batch)
    momentum = [0.9 * v + g for v, g in zip(state["v"], grads, strict=True)]
    rate = state["rate"] / (1.0 + 0.1 * state["count"])
    weights = [w - rate * v for w, v in zip(state["w"], momentum, strict=True)]
    found = {"w": weights, "v": momentum, "count": state["count"] + 1, "rate": state["rate"]}
    return found, {"loss": loss, "count": state["count"], "out": out}


def state_of(stages: int = STAGES, rate: float = 0.05):
    keys = jax.random.split(jax.random.key(0), stages)
    weights = [jnp.eye(WIDTH) + 0.1 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    return {"w": weights, "v": [jnp.zeros_like(w) for w in weights], "count": jnp.int32(0), "rate": jnp.float32(rate)}


def batch_of(num_microbatches: int, seed: int = 1):
    x, y = jax.random.normal(jax.random.key(seed), (2, SAMPLES * num_microbatches, WIDTH))
    return {"x": x, "y": y}


def reference(schedule: AsynchronousSchedule, state, batch, stages: int, num_microbatches: int):
    """The equations: each part of the gradient at the version of its stage, each update on the newest version."""
    group, versions, losses = schedule.microbatches_per_update(stages), [state], []
    for update in range(num_microbatches // group):
        grads = []
        for b in range(update * group, (update + 1) * group):
            weights = [versions[schedule.version(s, stages, b)]["w"][s] for s in range(stages)]
            rows = jax.tree.map(lambda a, b=b: a[SAMPLES * b : SAMPLES * (b + 1)], batch)
            loss, found = jax.value_and_grad(loss_of)(weights, rows)
            grads.append(found)
            losses.append(loss)
        old = versions[-1]
        momentum = [0.9 * v + sum(g) / group for v, g in zip(old["v"], zip(*grads, strict=True), strict=True)]
        rate = old["rate"] / (1.0 + 0.1 * old["count"])
        weights = [w - rate * v for w, v in zip(old["w"], momentum, strict=True)]
        versions.append({"w": weights, "v": momentum, "count": old["count"] + 1, "rate": old["rate"]})
    return versions[-1], jnp.mean(jnp.stack(losses))


def pipelined(schedule: Schedule, num_microbatches: int, stages: int = STAGES, function=step, **options):
    planner = al.planners.Pipeline(pipeline=stages, schedule=schedule)
    return al.parallelize(function, planner=planner, num_microbatches=num_microbatches, **options)


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("schedule", "num_microbatches"),
    [(PipeDream(), 8), (PipeDream(vertical_sync=True), 8), (PipeDream2BW(), 12)],
    ids=["pipedream", "vertical-sync", "2bw"],
)
def test_every_call_follows_the_update_equations(schedule, num_microbatches):
    fast = pipelined(schedule, num_microbatches, donate_argnums=0)
    state = want = state_of()
    state = jax.tree.map(jnp.copy, state)
    for call in range(3):
        batch = batch_of(num_microbatches, seed=call)
        state, metrics = fast(state, batch)
        want, loss = reference(schedule, want, batch, STAGES, num_microbatches)
        close(state, want)
        close(metrics["loss"], loss)
    updates = num_microbatches // schedule.microbatches_per_update(STAGES)
    # What an update computes is returned as of the last one, and results per sample are those of all micro-batches.
    assert int(state["count"]) == 3 * updates and int(metrics["count"]) == 3 * updates - 1
    assert metrics["out"].shape == batch["x"].shape
    # Training with old weights is another optimiser: the numbers differ from those without delay.
    undelayed = want_without_delay(state_of(), num_microbatches, schedule)
    assert np.abs(np.asarray(state["w"][0]) - np.asarray(undelayed["w"][0])).max() > 1e-4


def want_without_delay(state, num_microbatches, schedule):
    group = schedule.microbatches_per_update(STAGES) * SAMPLES
    for call in range(3):
        batch = batch_of(num_microbatches, seed=call)
        for first in range(0, SAMPLES * num_microbatches, group):
            state, _ = step(state, jax.tree.map(lambda a, i=first: a[i : i + group], batch))
    return state


def test_one_stage_is_a_step_of_its_own_for_each_micro_batch():
    fast, single = pipelined(PipeDream(), 6, stages=1), jax.jit(step)
    state, batch = state_of(1), batch_of(6)
    got, metrics = fast(state, batch)
    losses = []
    for b in range(6):
        state, one = single(state, jax.tree.map(lambda a, b=b: a[SAMPLES * b : SAMPLES * (b + 1)], batch))
        losses.append(one["loss"])
    close(got, state)
    close(metrics["loss"], jnp.mean(jnp.stack(losses)))
    assert fast.last_plan.semantics == "asynchronous, staleness <= 0"


def test_with_a_rate_of_zero_all_versions_are_equal():
    batch = batch_of(8)
    state, metrics = pipelined(PipeDream(), 8)(state_of(rate=0.0), batch)
    close(state["w"], state_of()["w"])
    close(metrics["loss"], loss_of(state_of()["w"], batch))


def scanned(state, batch):
    """The same model with its layers in one array, and a row of it on each stage."""

    def loss_fn(weights):
        out, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], weights)
        return jnp.mean((out - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["w"])
    return {"w": state["w"] - 0.1 * grads}, {"loss": loss}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_scanned_layers_and_recomputation_see_one_version(remat):
    planner = al.planners.Hybrid(pipeline=STAGES, schedule=PipeDream(), remat=remat)
    fast = al.parallelize(scanned, planner=planner, num_microbatches=8)
    start, batch = jnp.stack(state_of()["w"]), batch_of(8)
    got, _ = fast({"w": start}, batch)
    assert len(fast.last_plan.stages) == STAGES
    versions = [list(start)]
    for b in range(8):
        seen = jnp.stack([versions[PipeDream().version(s, STAGES, b)][s] for s in range(STAGES)])
        rows = jax.tree.map(lambda a, b=b: a[SAMPLES * b : SAMPLES * (b + 1)], batch)
        change = scanned({"w": seen}, rows)[0]["w"] - seen
        versions.append([w + d for w, d in zip(versions[-1], change, strict=True)])
    close(got["w"], jnp.stack(versions[-1]))


def lowered(schedule: Schedule, num_microbatches: int, width: int = 512):
    """The program of two layers on each stage."""
    shape = jax.ShapeDtypeStruct
    weights = [shape((width, width), jnp.float32)] * (2 * STAGES)
    state = {"w": weights, "v": weights, "count": shape((), jnp.int32), "rate": shape((), jnp.float32)}
    batch = {name: shape((4 * num_microbatches, width), jnp.float32) for name in "xy"}
    fast = pipelined(schedule, num_microbatches, cluster="p3.16xlarge")
    return fast.trace(state, batch).plan().lower()


@pytest.mark.parametrize("schedule", [PipeDream(), PipeDream2BW(), OneFOneB()], ids=lambda s: s.name)
def test_old_weights_are_planned_and_freed(schedule):
    fast = lowered(schedule, 16)
    graph, plan = fast.step.step.graph, fast.planned.last_plan
    next_of = {old: new for new, old in fast.step.step.aliases.items()}
    weights = {v: graph.values[v].name for v in graph.inputs if graph.values[v].name.startswith("state/w/")}
    held = {name: most_versions(fast.program, v, next_of[v]) for v, name in weights.items()}
    expected = {"pipedream": [4, 3, 2, 1], "pipedream-2bw": [2] * 4, "1f1b": [1] * 4}[schedule.name]
    # The last matrix of each stage: nothing reads that of the first layer again in the backward pass.
    last = [max(name for name in stage.specs if name in held) for stage in plan.stages]
    assert [held[name] for name in last] == expected
    # The plan has room for what is held more than under 1F1B, up to the layer that every stage may hold less, and the
    # loss of each micro-batch, of which 1F1B keeps the sum.
    matrix, losses, flushed = 4 * 512 * 512, 4 * (16 + 1), lowered(OneFOneB(), 16).planned.last_plan
    for stage, peak, least in zip(plan.stages, plan.prediction.peak_bytes, flushed.prediction.peak_bytes, strict=True):
        more = sum(held[name] - 1 for name in stage.specs if name in held) * matrix
        assert abs(peak - least - more) <= matrix + losses


def test_the_memory_of_old_weights_is_what_is_allocated():
    def large(schedule):
        state = jax.tree.map(lambda x: jnp.zeros((256, 256)) if x.ndim else x, state_of(2 * STAGES))
        batch = {name: jnp.zeros((SAMPLES * 8, 256)) for name in "xy"}
        return pipelined(schedule, 8, donate_argnums=0).compiled(state, batch)

    compiled, flushed = large(PipeDream()), large(OneFOneB())
    allocated = [each.peak_bytes for each in compiled.allocated()]
    for stage, (peak, real) in enumerate(zip(compiled.plan.prediction.peak_bytes, allocated, strict=True)):
        assert 0.7 < peak / real < 1.4, f"stage {stage}"
    # The stages before the last one hold more than under 1F1B, in the prediction and for real.
    for stage, real in enumerate(allocated[:-1]):
        assert real > 1.1 * flushed.allocated()[stage].peak_bytes
        assert compiled.plan.prediction.peak_bytes[stage] > 1.1 * flushed.plan.prediction.peak_bytes[stage]


def most_versions(program, value: int, following: int) -> int:
    """The most versions of an argument that exist at one time, by going through all instructions."""
    alive, most = set(), 0
    for instruction in program.instructions:
        if instruction.kind is InstructionKind.FREE:
            alive -= set(instruction.reads)
            continue
        # Counted before the next instruction writes: what an update is the last to read makes room for its result.
        most = max(most, len(alive))
        alive |= {b for b in instruction.writes if b.value in (value, following)}
    return max(most, len(alive))


def test_momentum_has_one_version_and_updates_run_once_per_group():
    fast = lowered(PipeDream2BW(), 16)
    program = fast.program
    runs = Counter(program.tasks[i.task].name for i in program.instructions if i.kind is InstructionKind.RUN)
    assert {name: n for name, n in runs.items() if "update" in name} == {f"stage {s} update": 4 for s in range(STAGES)}
    assert runs["stage 0 forward"] == 16


@pytest.mark.parametrize("schedule", [PipeDream(), PipeDream2BW()], ids=lambda s: s.name)
def test_stages_wait_less_the_longer_a_call_is(schedule):
    bubbles = [lowered(schedule, m, width=4096).simulate().bubble_fraction for m in (8, 32, 96)]
    assert bubbles == sorted(bubbles, reverse=True)
    # 3 / (m + 3) and what unequal tasks add: the first stage needs no gradients of its inputs.
    assert bubbles[-1] < 0.16
    assert bubbles[-1] < 0.5 * bubbles[0]


def test_what_a_plan_says():
    plan = lowered(PipeDream(), 8).planned.last_plan
    assert plan.semantics == "asynchronous, staleness <= 3"
    text = str(plan)
    assert "asynchronous, staleness <= 3" in " ".join(text.split()) and "4-stage pipeline, asynchronous" in text
    assert al.Plan.from_json(plan.to_json()) == plan
    flushed = lowered(OneFOneB(), 8).planned.last_plan
    assert flushed.semantics == "synchronous" and "asynchronous" not in str(flushed)
    assert "semantics" in str(flushed.diff(plan))
    assert plan.fingerprint != flushed.fingerprint


def test_a_saved_plan_runs_again(tmp_path):
    fast = pipelined(PipeDream2BW(), 8)
    want, _ = fast(state_of(), batch_of(8))
    fast.last_plan.save(tmp_path / "plan.json")
    again = al.parallelize(step, planner=al.Plan.load(tmp_path / "plan.json"))
    got, _ = again(state_of(), batch_of(8))
    close(got, want)
    assert again.last_plan.num_updates == 2


def test_a_smaller_batch_runs_by_the_same_plan_with_fewer_updates():
    fast = pipelined(PipeDream(), 8)
    state, _ = fast(state_of(), batch_of(8))
    want, _ = reference(PipeDream(), jax.device_get(state), batch_of(4), STAGES, 4)
    got, _ = fast(state, batch_of(4))
    close(got, want)
    assert fast.last_plan.num_updates == 4


def test_steps_that_are_no_sum_need_no_permission():
    """Each micro-batch is a batch of its own, with the statistics of its own."""

    def normalised(state, batch):
        def loss_fn(weights):
            out = forward(weights, batch["x"])
            return jnp.mean(((out - out.mean(0)) / (1.0 + out.std(0)) - batch["y"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["w"])
        return {"w": [w - 0.1 * g for w, g in zip(state["w"], grads, strict=True)]}, loss

    fast, state, batch = pipelined(PipeDream(), 4, stages=1, function=normalised), {"w": state_of(1)["w"]}, batch_of(4)
    got, _ = fast(state, batch)
    for b in range(4):
        state, _ = normalised(state, jax.tree.map(lambda a, b=b: a[SAMPLES * b : SAMPLES * (b + 1)], batch))
    close(got, state)


def test_asynchronous_plans_are_not_compared_with_others():
    with pytest.raises(PlanError, match=r"asynchronous, staleness <= 3.*is another optimiser"):
        fast = pipelined(PipeDream(), 8)
        al.check(fast, state_of(), batch_of(8))
    inside = al.planners.Pipeline(pipeline=4, schedule=PipeDream())
    for planner in (
        al.planners.Auto(schedule=PipeDream()),
        al.planners.Auto(manual=(inside,)),
        al.planners.GridSearch(schedule=PipeDream2BW()),
    ):
        with pytest.raises(PlanError, match="compares plans that give the same results"):
            al.plan(step, state_of(), batch_of(8), planner=planner)


@pytest.mark.parametrize("schedule", [PipeDream(), PipeDream2BW()], ids=repr)
def test_each_update_makes_state_that_no_op_or_one_of_another_argument_makes(schedule):
    """The weights before the update; the weights twice; two counters that change places."""

    def remembering(state, batch):
        new, loss = step({k: state[k] for k in state_of()}, batch)
        return {**new, "before": state["w"], "twin": new["w"], "even": state["odd"], "odd": state["even"]}, loss

    start = state_of()
    more = {"before": start["w"], "twin": start["w"], "even": jnp.float32(0), "odd": jnp.float32(1)}
    after, group = [], schedule.microbatches_per_update(STAGES)
    for updates in (2, 3):
        count = updates * group
        batch = jax.tree.map(lambda a, count=count: a[: count * SAMPLES], batch_of(3 * group))
        after.append(pipelined(schedule, count, function=remembering)({**start, **more}, batch)[0])
    early, late = after
    close(late["before"], early["w"])
    for state in after:
        close(state["twin"], state["w"])
    assert [float(s["even"]) for s in after] == [0.0, 1.0] and [float(s["odd"]) for s in after] == [1.0, 0.0]
