"""Pipelines whose stages differ in layers and devices compute what `jax.jit` computes, as it was planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa_lite as al
from alpa_lite.plan import program_builder
from alpa_lite.planners import Auto, Hybrid
from alpa_lite.runtime.execute.crossing import LaunchObserver, Message, Transfer
from cost_models.cluster import HostGroup
from tests.end_to_end.cases import MODELS, Training, assert_same, eager_cluster, make_batch, reference
from tests.end_to_end.collectives import handed_over, planned

UNEQUAL = Hybrid(pipeline=3, devices=(4, 2, 2), shares=(2, 1, 1))


@pytest.mark.parametrize("model", ["mlp", "gpt_scan"])
def test_unequal_stages_compute_what_one_device_does(model: str, devices: Any) -> None:
    training = Training(model=model, optimizer="momentum+clip")
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=UNEQUAL, num_microbatches=2)
    assert_same(training.run(step), reference(training))
    compiled = step.compiled(training.start(), make_batch(MODELS[model], 0), jax.random.key(0))
    assert [stage.submesh.num_devices for stage in compiled.plan.stages] == [4, 2, 2]
    assert handed_over(compiled) == planned(compiled.plan)


def test_rows_go_where_hosts_are_faster(devices: Any) -> None:
    """The search on a mixed cluster gives the faster host more trips of the loop over layers."""
    slow = replace(eager_cluster(), devices_per_host=4)
    fast = replace(slow.device, name="fast", peak_flops={"float32": 3e9}, memory_bandwidth=3e8)
    groups = tuple(HostGroup(num_hosts=1, device=device, intra_host=slow.intra_host) for device in (slow.device, fast))
    mixed = replace(slow, num_hosts=2, inter_host=slow.intra_host, groups=groups)
    weights = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (64, 64))

    def train_step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(weights)
        return weights - grads, value

    step = al.parallelize(train_step, cluster=mixed, planner=Auto(pipeline=2, manual=()), num_microbatches=4)
    found = expected = weights
    for _ in range(3):
        found, loss = step(found, x)
        expected, expected_loss = jax.jit(train_step)(expected, x)
        assert_same((found, loss), (expected, expected_loss))
    layers = {s.submesh.first_device: s.layers[1] + 1 - s.layers[0] for s in step.compiled(weights, x).plan.stages}
    assert layers[4] > layers[0]


class Counted(Transfer):
    """A transfer that says what it sent, and is refused any copy between host and devices."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self.sent: list[int] = []

    @property
    def num_programs(self) -> int:
        return self.inner.num_programs

    def __call__(self, array: Any, sent: list[Message] | None = None, launched: LaunchObserver | None = None) -> Any:
        messages: list[Message] = []
        to, back = jax.transfer_guard_host_to_device, jax.transfer_guard_device_to_host
        with to("disallow_explicit"), back("disallow_explicit"):
            result = self.inner(array, messages, launched)
        self.sent.append(sum(message.bytes for message in messages))
        return result


@pytest.mark.parametrize("spread", [False, True], ids=["as it is", "all spread"])
@pytest.mark.parametrize("planner", [UNEQUAL, Hybrid(pipeline=2, data=2, tensor=2)], ids=["unequal", "equal"])
def test_stages_send_what_the_program_says(
    planner: Hybrid, spread: bool, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spread, even small values cross once and are gathered by the stage that receives them."""
    if spread:
        monkeypatch.setattr(program_builder, "plan_transfer", partial(program_builder.plan_transfer, direct_bytes=-1))
    training = Training(model="mlp", optimizer="momentum+clip")
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=planner, num_microbatches=2)
    executor = step.compiled(training.start(), make_batch(MODELS["mlp"], 0), jax.random.key(0)).executor
    counted = {buffer: Counted(transfer) for buffer, transfer in executor.transfers.items()}
    executor.transfers = dict(counted)
    executor.bind()
    assert_same(training.run(step), reference(training))
    sends = [i for i in executor.program.instructions if i.kind == "SEND"]
    assert len(sends) == len(counted) and any(i.bytes for i in sends)
    for instruction in sends:
        assert instruction.transfer is not None
        assert set(counted[instruction.writes[0]].sent) == {instruction.bytes}
    gathering = any(i.transfer.gathers for i in sends if i.transfer)
    assert gathering == (spread and planner is not UNEQUAL)


def test_the_simulated_step_receives_what_is_sent(devices: Any) -> None:
    training = Training(model="mlp", optimizer="momentum+clip")
    step = al.parallelize(training.step(), cluster=eager_cluster(), planner=UNEQUAL, num_microbatches=2)
    lowered = step.trace(training.start(), make_batch(MODELS["mlp"], 0), jax.random.key(0)).plan().lower()
    simulated, sends = lowered.simulate(), [i for i in lowered.program.instructions if i.kind == "SEND"]
    assert sum(use.received_bytes for use in simulated.submeshes) == sum(i.bytes for i in sends) > 0
    times = [t for t in simulated.times if t.kind == "SEND"]
    pairs = zip(times, sends, strict=True)
    assert all(
        (t.end_seconds > t.start_seconds) == (i.transfer is not None and not i.transfer.is_trivial) for t, i in pairs
    )
