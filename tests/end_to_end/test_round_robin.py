"""Replicas of PipeDream's stages that take micro-batches in turn, against float64 equations written out by hand."""

from collections import Counter
from functools import cache
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import PlanError
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.plan.simulation import simulate_program
from alpa_lite.schedule import PipeDream, TaskKind, simulate

WIDTH, SAMPLES, RATE = 8, 4, 0.05

SHAPES = ((2, 1), (3, 1), (1, 2), (2, 1, 1), (2, 2))
every_shape = pytest.mark.parametrize("replicated", SHAPES, ids=lambda counts: "-".join(map(str, counts)))


def loss_and_out(weights, batch):
    out = batch["x"]
    for w in weights:
        out = out @ w
    return jnp.mean((out - batch["y"]) ** 2), (out, jnp.sum(out > 0))


def step(weights, batch):
    (loss, (out, positive)), grads = jax.value_and_grad(loss_and_out, has_aux=True)(weights, batch)
    new = [w - RATE * g for w, g in zip(weights, grads, strict=True)]
    return new, {"loss": loss, "out": out, "positive": positive, "before": weights}


def weights_of(count: int):
    return [jnp.eye(WIDTH) + 0.1 * jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) for i in range(count)]


def batch_of(num_microbatches: int, seed: int = 1):
    x, y = jax.random.normal(jax.random.key(seed), (2, SAMPLES * num_microbatches, WIDTH))
    return {"x": x, "y": y}


def reference(replicated, weights, batch, num_microbatches):
    """One weight per stage: micro-batch b at version max(0, b // r - w), an update by the mean of each round of r."""
    warmups = [(sum(replicated[s:]) - 1) // r for s, r in enumerate(replicated)]
    versions, outs, rounds = [[np.asarray(w, np.float64)] for w in weights], [], {}
    for b in range(num_microbatches):
        rows = slice(SAMPLES * b, SAMPLES * (b + 1))
        x, y = (np.asarray(batch[name], np.float64)[rows] for name in "xy")
        seen = [versions[s][max(0, b // r - warmups[s])] for s, r in enumerate(replicated)]
        saved = [x]
        for w in seen:
            saved.append(saved[-1] @ w)
        outs.append(saved.pop())
        cotangent = 2 * (outs[-1] - y) / y.size
        for s in reversed(range(len(seen))):
            rounds.setdefault((s, b // replicated[s]), []).append(saved[s].T @ cotangent)
            cotangent = cotangent @ seen[s].T
        for s, r in enumerate(replicated):
            if (b + 1) % r == 0:
                versions[s].append(versions[s][-1] - RATE * sum(rounds[s, b // r]) / r)
    return versions, np.concatenate(outs)


def planner_of(replicated, **options):
    return al.planners.Hybrid(pipeline=len(replicated), schedule=PipeDream(replicated=replicated), **options)


def replicated_step(replicated, num_microbatches, function=step, each: int = 1, **options):
    return al.parallelize(
        function,
        planner=planner_of(replicated, **options),
        num_microbatches=num_microbatches,
        cluster=al.cluster("p3.16xlarge").part(0, each * sum(replicated)),
        donate_argnums=(),
    )


@cache
def compiled(replicated):
    """A step of three rounds of all stages, compiled once for several tests."""
    m = 3 * lcm(*replicated) if len({*replicated}) > 1 else 8
    planned = replicated_step(replicated, m).trace(weights_of(len(replicated)), batch_of(m)).plan()
    return planned.lower().compile(), m


def close(got, want):
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=2e-6)


@every_shape
def test_every_micro_batch_and_every_update_follow_the_equations(replicated):
    fast, m = compiled(replicated)
    weights = weights_of(len(replicated))
    want = weights
    for call in range(3):
        batch = batch_of(m, seed=call)
        weights, metrics = fast(weights, batch)
        versions, outs = reference(replicated, want, batch, m)
        # Each row was computed with the versions of its micro-batch on all stages.
        close(metrics["out"], outs)
        close(metrics["loss"], np.mean((outs - np.asarray(batch["y"])) ** 2))
        assert int(metrics["positive"]) == (outs > 0).sum()
        for new, before, of_stage in zip(weights, metrics["before"], versions, strict=True):
            close(new, of_stage[-1])
            close(before, of_stage[-2])
        want = [of_stage[-1] for of_stage in versions]
    assert [len(of_stage) - 1 for of_stage in versions] == [m // r for r in replicated]


def test_turns_are_another_optimiser_than_sharing_if_replicas_are_unequal():
    """Under sharing both stages would update once per micro-batch."""
    weights, batch = weights_of(2), batch_of(6)
    versions, _ = reference((2, 1), weights, batch, 6)
    shared, _ = reference((1, 1), weights, batch, 6)
    assert np.abs(versions[0][-1] - shared[0][-1]).max() > 1e-3


@pytest.mark.parametrize("options", [{"devices": (4, 2)}, {"tensor": 2}], ids=["data", "tensor"])
def test_a_replica_may_have_several_devices(options):
    fast, weights, batch = replicated_step((2, 1), 4, each=2, **options), weights_of(2), batch_of(4)
    got, metrics = fast(weights, batch)
    versions, outs = reference((2, 1), weights, batch, 4)
    close(metrics["out"], outs)
    for new, of_stage in zip(got, versions, strict=True):
        close(new, of_stage[-1])
    assert [stage.submesh.num_devices for stage in fast.last_plan.stages] == [2, 2, 2]


@pytest.mark.slow
def test_seven_replicas_and_one():
    fast, weights, batch = replicated_step((7, 1), 14), weights_of(2), batch_of(14)
    got, metrics = fast(weights, batch)
    versions, outs = reference((7, 1), weights, batch, 14)
    close(metrics["out"], outs)
    for new, of_stage in zip(got, versions, strict=True):
        close(new, of_stage[-1])


def test_one_round_of_equal_replicas_is_the_step_on_one_device():
    fast, weights, batch = replicated_step((2, 2), 2), weights_of(2), batch_of(2)
    got, _ = fast(weights, batch)
    want, _ = jax.jit(step)(weights, batch)
    for new, other in zip(got, want, strict=True):
        close(new, other)
    assert fast.last_plan.semantics == "synchronous"


def drawn(state, batch):
    """Dropout with a key, momentum, a counter, and statistics of what the last stage computes."""

    def loss_fn(weights):
        out = loss_and_out(weights, batch)[1][0]
        out = out * jax.random.bernoulli(state["key"], 0.7, (WIDTH,))
        return jnp.mean((out - batch["y"]) ** 2), out.mean(0)

    (loss, mean), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["w"])
    momentum = [0.9 * v + g for v, g in zip(state["v"], grads, strict=True)]
    rate = RATE / (1.0 + 0.1 * state["count"])
    return {
        "w": [w - rate * v for w, v in zip(state["w"], momentum, strict=True)],
        "v": momentum,
        "key": jax.random.fold_in(state["key"], 1),
        "count": state["count"] + 1,
        "mean": 0.9 * state["mean"] + 0.1 * mean,
    }, loss


def drawn_state():
    weights = weights_of(2)
    zeros = [jnp.zeros_like(w) for w in weights]
    return {"w": weights, "v": zeros, "key": jax.random.key(3), "count": jnp.int32(0), "mean": jnp.zeros(WIDTH)}


def test_state_of_all_kinds_is_that_of_larger_mini_batches_if_replicas_are_equal():
    """r micro-batches in turn, averaged, are one of r times the size on each stage of a pipeline without replicas."""
    fast = replicated_step((2, 2), 6, drawn)
    got, loss = fast(drawn_state(), batch_of(6))
    plain = al.planners.Pipeline(pipeline=2, schedule=PipeDream())
    large = al.parallelize(drawn, planner=plain, num_microbatches=3, cluster=al.cluster("p3.16xlarge").part(0, 2))
    want, other = large(drawn_state(), batch_of(6))
    assert int(got["count"]) == 3
    close(loss, other)
    for name in ("w", "v", "mean"):
        for a, b in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
            close(a, b)
    assert np.array_equal(*(np.asarray(jax.random.key_data(state["key"])) for state in (got, want)))


# ------------------------------------------------------------------------------------------------ versions and memory


def simulated_times(fast):
    return simulate_program(fast.executor.program, fast.plan, fast.step.step).times


def versions_seen(spans):
    """The version of each micro-batch on each stage: how many updates it had when the forward pass ran."""
    newest, found = Counter(), {}
    for span in spans:
        if "update" in span.name:
            newest[span.stage] += 1
        elif "forward" in span.name:
            found[span.stage, span.microbatch] = newest[span.stage]
    return found


@every_shape
def test_executed_and_simulated_versions_are_those_of_the_schedule(replicated):
    fast, m = compiled(replicated)
    schedule, count = PipeDream(replicated=replicated), sum(replicated)
    runs = [s for s in fast.measure(awaited=True) if s.kind is InstructionKind.RUN]
    simulated = [s for s in simulated_times(fast) if s.kind is InstructionKind.RUN]
    expected = {
        (stage, b): schedule.version(stage, count, b)
        for group in schedule.replicas(count)
        for b in range(m)
        for stage in [group[b % len(group)]]
    }
    assert versions_seen(runs) == versions_seen(simulated) == expected
    lacking = {
        stage: max(
            b // len(schedule.replicas_of(stage, count)) - seen for (at, b), seen in expected.items() if at == stage
        )
        for stage in range(count)
    }
    warmups = [(sum(replicated[s:]) - 1) // r for s, r in enumerate(replicated) for _ in range(r)]
    assert list(lacking.values()) == warmups and fast.plan.semantics.endswith(f"staleness <= {max(warmups)}")


@every_shape
def test_stages_run_what_was_planned_in_its_order(replicated):
    fast, m = compiled(replicated)
    names = {TaskKind.FORWARD: ["forward"], TaskKind.BACKWARD: ["backward"]}
    planned = PipeDream(replicated=replicated).tasks(sum(replicated), m)
    for number, tasks in enumerate(planned):
        executed = [
            (part, span.microbatch)
            for span in fast.measure(awaited=True)
            if span.kind is InstructionKind.RUN and span.stage == number
            for part in span.name.removeprefix(f"stage {number} ").split("+")
            if part != "update"
        ]
        # The first stage has no gradients of inputs, but of its weights; no task is left out.
        assert executed == [(name, task.microbatch) for task in tasks for name in names[task.kind]]


@every_shape
def test_both_passes_of_a_micro_batch_read_one_version(replicated):
    fast, _ = compiled(replicated)
    program, step_graph = fast.executor.program, fast.step.step
    state = {*step_graph.aliases, *step_graph.aliases.values()}
    read: dict[tuple[int, int], set] = {}
    for each in program.instructions:
        if each.kind is InstructionKind.RUN and program.tasks[each.task].kind.in_loop:
            read.setdefault((each.stage, each.microbatch), set()).update(b for b in each.reads if b.value in state)
    assert all(len(buffers) == 1 for buffers in read.values())


def plain(weights, batch):
    grads = jax.grad(lambda w: loss_and_out(w, batch)[0])(weights)
    return [w - RATE * g for w, g in zip(weights, grads, strict=True)]


@cache
def lowered(replicated, num_microbatches: int, width: int = 256, rows: int = 16):
    """The program of two layers for each replica of a stage, so that all work equally long."""
    shape = jax.ShapeDtypeStruct
    weights = [shape((width, width), jnp.float32)] * (2 * sum(replicated))
    batch = {name: shape((rows * num_microbatches, width), jnp.float32) for name in "xy"}
    shares = tuple(map(float, replicated))
    return replicated_step(replicated, num_microbatches, plain, shares=shares).trace(weights, batch).plan().lower()


@pytest.mark.parametrize("replicated", [(2, 1), (1, 2), (2, 1, 1)], ids=str)
def test_each_replica_keeps_as_many_versions_as_it_has_micro_batches_under_way(replicated):
    fast = lowered(replicated, 8)
    graph, aliases, plan = fast.step.step.graph, fast.step.step.aliases, fast.planned.last_plan
    new_of = {graph.values[old].name: (old, new) for new, old in aliases.items()}
    # The last matrix of each stage: nothing reads that of the first layer again in the backward pass.
    last = [max(name for name in stage.specs if name in new_of) for stage in plan.stages]
    found = [most_versions(fast.program, number, new_of[name]) for number, name in enumerate(last)]
    assert found == [(sum(replicated[s:]) - 1) // r + 1 for s, r in enumerate(replicated) for _ in range(r)]


def most_versions(program, stage: int, values) -> int:
    """The most versions of an argument that exist on a stage at one time, by going through all instructions."""
    alive, most = set(), 0
    for each in program.instructions:
        if each.kind is InstructionKind.FREE:
            alive -= set(each.reads)
            continue
        # Counted before the next instruction writes: what an update is the last to read makes room for its result.
        most = max(most, len(alive))
        alive |= {b for b in each.writes if b.value in values and b.stage == stage}
    return max(most, len(alive))


def test_planned_memory_is_what_is_allocated():
    weights = [jnp.zeros((256, 256))] * 6
    batch = {name: jnp.zeros((SAMPLES * 8, 256)) for name in "xy"}
    fast = replicated_step((2, 1), 8, plain, shares=(2.0, 1.0)).compiled(weights, batch)
    for stage, (peak, real) in enumerate(zip(fast.plan.prediction.peak_bytes, fast.allocated(), strict=True)):
        assert 0.7 < peak / real.peak_bytes < 1.4, f"stage {stage}"


def test_stages_wait_less_the_longer_a_call_is():
    bubbles = [lowered((2, 1), m, width=4096, rows=512).simulate().bubble_fraction for m in (4, 16, 64)]
    # What remains is the exchange of gradients, and that the first stage needs no gradients of its inputs.
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[-1] < 0.75 * bubbles[0]


def test_gradients_are_exchanged_once_per_round():
    program = lowered((3, 1), 6).program
    runs = Counter(program.tasks[i.task].name for i in program.instructions if i.kind is InstructionKind.RUN)
    assert [runs[f"stage {stage} update"] for stage in range(4)] == [2, 2, 2, 6]
    means = Counter(i.stage for i in program.instructions if i.kind is InstructionKind.MEAN)
    weights_of_stage = 6
    assert means == {stage: 2 * weights_of_stage for stage in range(3)}


# ---------------------------------------------------------------------------------------------------- the orders alone


@pytest.mark.parametrize(
    ("replicated", "limit"),
    [((2, 1), 1.0), ((3, 1), 1.0), ((7, 1), 1.0), ((2, 2), 1.0), ((1, 2), 0.8), ((2, 1, 1), 2 / 3)],
)
def test_utilisation_in_the_steady_state(replicated, limit):
    """1 where later stages have no replicas to wait for; bursts of a round outrun PipeDream's warm-up elsewhere."""
    schedule, count = PipeDream(replicated=replicated), sum(replicated)
    times = [float(len(group)) for group in schedule.replicas(count) for _ in group]
    for m in (84, 840):
        tasks = schedule.tasks(count, m)
        timeline = simulate(tasks, times, [2 * t for t in times], replicas=schedule.replicas(count))
        assert limit * (1 - 8 / m) <= 1 - timeline.bubble_fraction <= limit


def test_plan_is_saved_and_says_what_it_is():
    plan = lowered((2, 1), 8).planned.last_plan
    assert al.Plan.from_json(plan.to_json()) == plan
    text = " ".join(str(plan).split())
    assert "pp2 (2-1), asynchronous" in text and "with 4 to 8 updates (asynchronous, staleness <= 1)" in text


def test_planner_lets_its_replicas_take_turns():
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    batch = {name: jax.ShapeDtypeStruct((48, WIDTH), jnp.float32) for name in "xy"}
    planner = al.planners.PipeDream(schedule=PipeDream())
    plan = al.plan(step, weights, batch, planner=planner, cluster=al.cluster("p3.16xlarge").part(0, 4))
    counts = plan.schedule.replicated
    assert sum(counts) == len(plan.stages) == 4 and plan.num_microbatches % lcm(*counts) == 0
    assert plan.name == f"PipeDream, asynchronous ({'-'.join(map(str, counts))})"
    given = al.planners.PipeDream(schedule=PipeDream(replicated=(2, 1)))
    with pytest.raises(PlanError, match=r"finds numbers of replicas, but its schedule has replicated=\(2, 1\)"):
        al.plan(step, weights, batch, planner=given, cluster="p3.16xlarge")


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (PipeDream(replicated=(2, 1)), r"lets 2-1 replicas take .* of which 3 are no multiple. Use num_microbatches=2"),
        (PipeDream(replicated=(3,)), r"the model is cut into 2 parts. Give as many whole numbers"),
        (PipeDream(replicated=(2, 0)), r"each at least 1"),
        (PipeDream(replicated=(2, 1), vertical_sync=True), r"stages update differently often"),
    ],
    ids=["micro-batches", "parts", "none", "vertical-sync"],
)
def test_what_cannot_run_is_refused(schedule, message):
    planner = al.planners.Hybrid(pipeline=2, schedule=schedule)
    with pytest.raises(PlanError, match=message):
        cluster = al.cluster("p3.16xlarge").part(0, 3)
        al.plan(step, weights_of(2), batch_of(3), planner=planner, num_microbatches=3, cluster=cluster)


def test_a_counter_of_all_stages_is_refused_where_they_update_differently_often():
    with pytest.raises(PlanError, match=r"for itself in its updates.*stage 0 2 times, stage 2 4 times"):
        replicated_step((2, 1), 4, drawn)(drawn_state(), batch_of(4))


def test_replicas_share_micro_batches_where_they_would_disagree_on_a_counter():
    """Adam's counter is one array, which stages with unequal replicas would advance differently often."""

    def counted(state, batch):
        *weights, count = state
        new, loss = step(weights, batch)
        # All updates read the counter, as they do for Adam's correction of its bias.
        return [*(w + (n - w) / (count + 1) for w, n in zip(weights, new, strict=True)), count + 1], loss

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
    batch = {name: jax.ShapeDtypeStruct((64, 2048), jnp.float32) for name in "xy"}
    planner, cluster = al.planners.PipeDream(schedule=PipeDream()), al.cluster("p3.16xlarge").part(0, 4)
    by_turns = al.plan(step, weights, batch, planner=planner, cluster=cluster)
    assert len({*by_turns.schedule.replicated}) > 1
    state = [*weights, jax.ShapeDtypeStruct((), jnp.int32)]
    plan = al.plan(counted, state, batch, planner=planner, cluster=cluster)
    assert plan.schedule.replicated == ()
    assert any("share each micro-batch" in note for note in plan.notes)
