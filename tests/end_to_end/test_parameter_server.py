"""Parameter servers: numbers against plain JAX, the traffic of servers, and the staleness under each consistency."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa_lite as al
from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.plan.instructions import InstructionKind
from alpa_lite.planners import Bounded, DataParallel, ParameterServer
from alpa_lite.planners.by_name import planner_by_name
from alpa_lite.runtime.execute.arrivals import Staleness
from alpa_lite.schedule import ServerSchedule

WIDTH, SAMPLES, WORKERS = 8, 4, 4


def loss_of(weights, batch):
    h = batch["x"]
    for w in weights:
        h = jnp.tanh(h @ w)
    return jnp.mean((h - batch["y"]) ** 2)


GRADIENT = jax.jit(jax.value_and_grad(loss_of))


def step(state, batch):
    """SGD with momentum, whose rate follows a counter."""
    loss, grads = jax.value_and_grad(loss_of)(state["w"], batch)
    momentum = [0.9 * v + g for v, g in zip(state["v"], grads, strict=True)]
    rate = 0.1 / (1.0 + 0.1 * state["count"])
    weights = [w - rate * v for w, v in zip(state["w"], momentum, strict=True)]
    return {"w": weights, "v": momentum, "count": state["count"] + 1}, {"loss": loss, "count": state["count"]}


def state_of():
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    return {"w": weights, "v": [jnp.zeros_like(w) for w in weights], "count": jnp.int32(0)}


def batch_of(num_microbatches: int):
    x, y = jax.random.normal(jax.random.key(1), (2, SAMPLES * num_microbatches, WIDTH))
    return {"x": x, "y": y}


def part_of(batch, number: int, rows: int):
    return jax.tree.map(lambda a: a[number * rows : (number + 1) * rows], batch)


def run(planner, num_microbatches: int, function=step, steps: int = 1):
    parallel = al.parallelize(function, planner=planner, num_microbatches=num_microbatches)
    state, batch = state_of(), batch_of(num_microbatches)
    for _ in range(steps):
        state, metrics = parallel(state, batch)
    return parallel, state, metrics


def compiled_of(planner, num_microbatches: int):
    state, batch = state_of(), batch_of(num_microbatches)
    traced = al.parallelize(step, planner=planner, num_microbatches=num_microbatches).trace(state, batch)
    return traced.plan().lower().compile(), state, batch


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


def equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ------------------------------------------------------------------------------------------------- one update per step


@pytest.mark.parametrize(
    ("planner", "num_microbatches"),
    [
        (ParameterServer(servers=4), 4),
        pytest.param(ParameterServer(servers=2), 12, marks=pytest.mark.slow),
        pytest.param(ParameterServer(servers=4, workers=2), 2, marks=pytest.mark.slow),
        (ParameterServer(servers=1, workers=1), 1),
    ],
    ids=["4+4", "2+6, twice", "4+2x2", "1+1x7"],
)
def test_synchronous_is_the_step_on_one_device(planner, num_microbatches):
    if planner.workers == 1:
        planner = replace(planner, servers=4)
    parallel, state, metrics = run(planner, num_microbatches, steps=2)
    want = state_of()
    for _ in range(2):
        want, expected = jax.jit(step)(want, batch_of(num_microbatches))
    close((state, metrics), (want, expected))
    assert parallel.last_plan.semantics == "synchronous"


def test_synchronous_equals_data_parallelism_in_the_order_of_the_workers_bit_by_bit():
    """In the order 0 + 1 + 2 + 3 of floats; and of as many devices in integers, which float32 adds exactly.

    Gradients of one worker are exact in float32, however a processor multiplies matrices; only their sum is rounded.
    """

    def sums(w, x):
        return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

    w = jnp.round(2 * jax.random.normal(jax.random.key(4), (WIDTH, WIDTH)))
    whole = jnp.round(4 * jax.random.normal(jax.random.key(3), (WORKERS * SAMPLES, WIDTH)))
    x = whole * jnp.repeat(jnp.array([1.0, 1024.0, 1024.0, 1.0]), SAMPLES)[:, None]
    served = al.parallelize(sums, planner=ParameterServer(servers=4), num_microbatches=WORKERS)(w, x)
    gradient = jax.jit(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)))
    first, second, third, last = (gradient(w, samples) for samples in jnp.split(x, WORKERS))
    equal(served, w - (first + second + third + last))
    assert np.any(np.asarray(served) != np.asarray(w - ((first + second) + (third + last))))
    data = al.parallelize(sums, planner=DataParallel(), cluster=al.local_cluster())(w, jnp.concatenate([whole, whole]))
    ours = al.parallelize(sums, planner=ParameterServer(servers=4), num_microbatches=WORKERS)
    equal(ours(w, jnp.concatenate([whole, whole])), data)


def test_bounded_delay_of_none_is_one_synchronous_step_per_round():
    rounds = 3
    _, state, metrics = run(ParameterServer(servers=4, consistency=Bounded(0)), rounds * WORKERS)
    synchronous = al.parallelize(step, planner=ParameterServer(servers=4), num_microbatches=WORKERS)
    want, losses = state_of(), []
    for number in range(rounds):
        want, found = synchronous(want, part_of(batch_of(rounds * WORKERS), number, WORKERS * SAMPLES))
        losses.append(found["loss"])
    close(state, want)
    equal(state["count"], want["count"])
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-6)
    equal(metrics["count"], rounds - 1)


@pytest.mark.slow
def test_state_that_the_loop_makes_or_leaves_alone_is_served():
    """Averages of the batch; a rate that stays; the weights before, and twice; outputs of each sample."""

    def many(state, x):
        def loss(w):
            out = jnp.tanh(x @ w)
            return jnp.mean(out**2), out

        (value, out), grad = jax.value_and_grad(loss, has_aux=True)(state["w"])
        mean = jnp.mean(x, 0)
        weights = state["w"] - state["rate"] * grad
        new = {"w": weights, "twin": weights, "mean": mean, "before": state["w"]}
        return {**new, "rate": state["rate"]}, (value, out)

    array = jax.random.normal(jax.random.key(2), (WIDTH,))
    state = {"w": jnp.eye(WIDTH), "mean": array, "rate": jnp.float32(0.1)}
    state |= {name: jnp.zeros((WIDTH, WIDTH)) for name in ("twin", "before")}
    x = jax.random.normal(jax.random.key(4), (2 * WORKERS * SAMPLES, WIDTH))
    for consistency in ("bsp", Bounded(0)):
        planner = ParameterServer(servers=4, consistency=consistency)
        got = al.parallelize(many, planner=planner, num_microbatches=2 * WORKERS)(state, x)
        if consistency == "bsp":
            close(got, jax.jit(many)(state, x))
            continue
        half, (first, ahead) = jax.jit(many)(state, x[: len(x) // 2])
        want, (second, behind) = jax.jit(many)(half, x[len(x) // 2 :])
        close(got, (want, ((first + second) / 2, jnp.concatenate([ahead, behind]))))


# ---------------------------------------------------------------------------------------------------------- traffic


def hosts(count: int):
    """A cluster of hosts with one device each."""
    return replace(al.cluster("p3.16xlarge"), num_hosts=count, devices_per_host=1)


def abstract(width: int, rows: int):
    array = jax.ShapeDtypeStruct
    state = {name: [array((width, width), jnp.float32)] * 3 for name in ("w", "v")}
    return {**state, "count": array((), jnp.int32)}, {name: array((rows, width), jnp.float32) for name in ("x", "y")}


@pytest.mark.parametrize("servers", [1, 2, 4])
@pytest.mark.parametrize("consistency", ["bsp", Bounded(1), "async"])
def test_link_of_a_server_carries_its_range_of_the_weights_for_each_worker_both_ways(servers, consistency):
    planner = ParameterServer(servers=servers, workers=4, consistency=consistency)
    traced = al.parallelize(step).trace(*abstract(WIDTH, 32))
    lowered = traced.plan(cluster=hosts(4 + servers), planner=planner, num_microbatches=8).lower()
    values, sent = lowered.step.step.graph.values, Counter()
    for instruction in lowered.program.instructions:
        if instruction.kind is InstructionKind.SEND and values[instruction.reads[0].value].shape == (WIDTH, WIDTH):
            sent.update(instruction.transfer.bytes_between)
    size, workers, own = 3 * WIDTH * WIDTH * 4, range(servers, 4 + servers), range(servers)
    # Two micro-batches of each worker: one pull and one push if there is one update, else two of each.
    rounds = 1 if consistency == "bsp" else 2
    out = [sum(sent[server, w] for w in workers) for server in own]
    back = [sum(sent[w, server] for w in workers) for server in own]
    assert out == back == [rounds * 4 * size / servers] * servers
    assert sum(sent.values()) == rounds * 2 * 4 * size
    # Nor do the servers exchange anything: gradients arrive in their ranges, transposed ones as well.
    assert not [use for use in lowered.planned.last_plan.prediction.collectives if use.stage == 0]


def test_price_has_the_bottleneck_at_the_servers():
    """A step takes at least the time of N M / S bytes each way on the link of a server, and little more."""
    width, workers = 3072, 6
    for servers in (1, 2, 3):
        cluster = hosts(workers + servers)
        planner = ParameterServer(servers=servers, workers=workers)
        plan = al.plan(step, *abstract(width, 48), planner=planner, num_microbatches=workers, cluster=cluster)
        least = 2 * workers * 3 * width**2 * 4 / servers / cluster.inter_host.bytes_per_second
        assert least < plan.prediction.step_seconds < 1.35 * least


# -------------------------------------------------------------------------------------------------------- staleness


class SlowToken:
    """A token that is ready after `looks` looks at it, when the launch has ended."""

    def __init__(self, token, looks: int) -> None:
        self.token, self.looks = token, looks

    def is_ready(self) -> bool:
        self.looks -= 1
        return self.looks < 0 and self.token.is_ready()


def with_slow_worker(compiled, worker: int, looks: int) -> None:
    """Let the passes of one worker seem to take long."""
    executor = compiled.executor

    def slow(run):
        def call(*arrays):
            *results, token = run(*arrays)
            return (*results, SlowToken(token, looks))

        return call

    for number, each in enumerate(executor.executables):
        if each.task.stage == 1 + worker:
            executor.executables[number] = replace(each, compiled=slow(each.compiled))
    executor.bind()


@pytest.mark.parametrize("delay", [*(pytest.param(delay, marks=pytest.mark.slow) for delay in (0, 1)), 2])
def test_bounded_delay_lets_fast_workers_be_ahead_by_exactly_the_delay(delay):
    compiled, state, batch = compiled_of(ParameterServer(servers=4, consistency=Bounded(delay)), 5 * WORKERS)
    with_slow_worker(compiled, 1, looks=150)
    compiled(state, batch)
    found = compiled.staleness()
    assert len(found) == 5 * WORKERS
    assert max(found) == delay
    # The slow worker itself starts a round when all others have ended the one before, so that it finds it applied.
    assert max(found[1::WORKERS]) == 0


def test_asynchronous_updates_follow_the_order_of_arrival():
    compiled, state, batch = compiled_of(ParameterServer(servers=4, consistency="async"), 4 * WORKERS)
    with_slow_worker(compiled, 1, looks=300)
    new, metrics = compiled(state, batch)
    found = compiled.staleness()
    # Three fast workers apply all of theirs while the slow one computes its first.
    assert found[1] == 3 * 4
    assert found[1 + WORKERS :: WORKERS] == (0, 0, 0)
    equal(new["count"], 4 * WORKERS)
    equal(metrics["count"], 4 * WORKERS - 1)


@pytest.mark.parametrize(
    ("consistency", "semantics"),
    [(Bounded(2), "asynchronous, staleness <= 2"), ("async", "asynchronous, staleness without limit")],
)
def test_asynchronous_run_equals_its_equations_for_the_order_that_it_took(consistency, semantics):
    """Each gradient at the version that its worker pulled; each update on the newest version."""
    rounds = 3
    compiled, state, batch = compiled_of(ParameterServer(servers=4, consistency=consistency), rounds * WORKERS)
    assert compiled.plan.semantics == semantics
    events, note = [], Staleness.note

    def noted(self, event):
        events.append(event)
        note(self, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staleness, "note", noted)
        got = compiled(state, batch)
    close(got[0], by_equations(events, compiled.plan.schedule, rounds)[0])
    np.testing.assert_allclose(got[1]["loss"], by_equations(events, compiled.plan.schedule, rounds)[1], rtol=1e-5)
    # Awaited one by one, they run in the order of the plan, as in a job of several processes.
    planned, _ = compiled.timed(state_of(), batch)
    events = [*compiled.plan.schedule.events(rounds * WORKERS)]
    close(planned[0], by_equations(events, compiled.plan.schedule, rounds)[0])


def by_equations(events, schedule, rounds, workers=WORKERS, state=None, applied=None):
    """The state and the mean loss after some events: each gradient at the version that its worker pulled.

    applied: the micro-batches whose gradients were applied; default: all. Then losses of updates are returned.
    """
    m = rounds * workers
    state, grads, losses = state_of() if state is None else state, {}, {}
    for event in events:
        if not event.is_update:
            losses[event.number], grads[event.number] = GRADIENT(
                state["w"], part_of(batch_of(m), event.number, SAMPLES)
            )
            continue
        of = schedule.contributions(event.number, m)
        there = [grads[b] for b in of if applied is None or b in applied]
        total = [sum(parts) / len(of) for parts in zip(*there, strict=True)]
        momentum = [0.9 * v + g for v, g in zip(state["v"], total, strict=True)]
        rate = 0.1 / (1.0 + 0.1 * state["count"])
        weights = [w - rate * v for w, v in zip(state["w"], momentum, strict=True)]
        state = {"w": weights, "v": momentum, "count": state["count"] + 1}
    if applied is None:
        return state, np.mean([*losses.values()])
    of_updates = [schedule.contributions(event.number, m) for event in events if event.is_update]
    return state, float(np.mean([sum(losses[b] for b in of if b in applied) / len(of) for of in of_updates]))


@pytest.mark.slow
def test_loss_falls_under_each_consistency():
    for consistency in (Bounded(1), "async"):
        parallel = al.parallelize(step, planner=ParameterServer(servers=4, consistency=consistency), num_microbatches=8)
        state, losses = state_of(), []
        for _ in range(6):
            state, metrics = parallel(state, batch_of(8))
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.9 * losses[0]


# ----------------------------------------------------------------------------------------------------------- refusals


def test_plan_is_saved_and_replayed(tmp_path):
    planner = ParameterServer(servers=4, consistency=Bounded(1))
    parallel, state, _ = run(planner, 8)
    parallel.last_plan.save(tmp_path / "plan.json")
    loaded = al.Plan.load(tmp_path / "plan.json")
    assert loaded == parallel.last_plan
    assert al.parallelize(step, planner=loaded)(state_of(), batch_of(8))[0]["count"] == state["count"]


def test_training_resumes_from_a_checkpoint_on_servers_and_without_them(tmp_path):
    """State on servers is saved as any other; another plan goes on with it."""
    compiled, state, batch = compiled_of(ParameterServer(servers=4), WORKERS)
    for _ in range(2):
        state, _ = compiled(state, batch)
    with al.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, plan=compiled.plan)
        checkpoints.wait()
        number, restored = checkpoints.restore(compiled)
        other = al.parallelize(step, planner=DataParallel()).trace(state, batch).plan().lower().compile()
        _, elsewhere = checkpoints.restore(other)
    assert number == 2
    want = compiled(state, batch)
    equal(compiled(restored, batch), want)
    close(other(elsewhere, batch), want)


def test_asynchronous_servers_are_not_compared_with_other_plans():
    planner = ParameterServer(servers=4, consistency="async")
    with pytest.raises(AlpaLiteError, match="updates the weights 8 times"):
        al.check(step, state_of(), batch_of(8), planner=planner, num_microbatches=8)
    searches = [
        al.planners.Auto(manual=(planner,)),
        al.planners.GridSearch(schedule=ServerSchedule(consistency="async")),
    ]
    for search in searches:
        with pytest.raises(PlanError, match="another optimiser"):
            al.plan(step, state_of(), batch_of(8), planner=search, num_microbatches=8)


@pytest.mark.parametrize(
    ("options", "num_microbatches", "message"),
    [
        ({"servers": 0}, 4, "servers=0 was given. Ask for at least 1"),
        ({"consistency": "asinc"}, 4, "consistency='asinc' was given.*async"),
        ({"consistency": "bounded"}, 4, r"consistency='bounded' was given.*Bounded\(delay\)"),
        ({"servers": 8}, 4, "leaves 0 for 0 workers"),
        ({"servers": 2, "workers": 4}, 4, "leaves 6 for 4 workers"),
        ({"servers": 4}, 6, "each of 4 workers as many micro-batches, which 6 cannot be. Use num_microbatches=4"),
        ({"servers": 2, "workers": 2}, 4, "splits each micro-batch over 3 devices"),
    ],
)
def test_options_that_cannot_be_are_refused(options, num_microbatches, message):
    with pytest.raises(PlanError, match=message):
        run(ParameterServer(**options), num_microbatches)


def test_micro_batches_have_samples_for_all_devices_of_a_worker():
    """24 samples on two workers of two devices: four micro-batches of each have 3 samples, two have 6."""
    planner = ParameterServer(servers=4, workers=2, consistency="async")
    plan = al.plan(step, *abstract(WIDTH, 24), cluster=al.cluster("p3.16xlarge"), planner=planner)
    assert plan.num_microbatches == 4


@pytest.mark.parametrize(
    ("options", "samples", "message"),
    [
        ({"servers": 3}, 24, r"each of 5 workers as many samples, but the batch has 24\. Use a multiple of 5 samples"),
        (
            {"servers": 1, "workers": 1},
            24,
            "1 server on the first devices and then 1 worker of 15 devices do not",
        ),
    ],
)
def test_workers_that_the_batch_or_the_hosts_do_not_allow_are_refused(options, samples, message):
    cluster = replace(al.cluster("p3.16xlarge"), num_hosts=2 if "workers" in options else 1)
    with pytest.raises(PlanError, match=message):
        al.plan(step, *abstract(WIDTH, samples), cluster=cluster, planner=ParameterServer(**options))


def test_delay_is_given_as_text_on_the_command_line():
    planner = planner_by_name("parameter_server:consistency=bounded:2", ["servers=4"])
    state, batch = abstract(WIDTH, 32)
    plan = al.plan(step, state, batch, planner=planner, num_microbatches=8, cluster="p3.16xlarge")
    assert plan.schedule == ServerSchedule(workers=4, consistency="bounded", delay=2)


def test_damaged_schedules_are_refused():
    message = r"Give at least 1 worker|no consistency 'none'|runs one stage of servers and 3"
    for options in ({"workers": 0}, {"delay": -1}, {"consistency": "none"}, {"workers": 3}):
        with pytest.raises(PlanError, match=message):
            ServerSchedule(**options).tasks(2, 4)


def test_schedule_of_servers_is_none_of_a_pipeline():
    planner = al.planners.Pipeline(pipeline=2, schedule=ServerSchedule())
    with pytest.raises(PlanError, match=r"workers with all layers each.*Ask for al\.planners\.ParameterServer"):
        al.plan(step, *abstract(WIDTH, 32), cluster="p3.16xlarge", planner=planner)


def test_delay_below_zero_is_refused():
    with pytest.raises(PlanError, match="A delay is 0 or more"):
        Bounded(-1)


def test_step_without_gradients_is_refused():
    with pytest.raises(PlanError, match="divides gradients among workers"):
        al.plan(lambda w, x: x @ w, jnp.ones((8, 8)), jnp.ones((8, 8)), planner=ParameterServer(servers=4))
