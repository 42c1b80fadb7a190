"""Counting messages, on programs whose messages are counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from benchmarks.messages import Messages, count_messages

RING = [(0, 1), (1, 2), (2, 0)]


def messages_of(function):
    """What a function of an array [4] of float32 on each of three devices sends: 16 bytes in a whole array."""
    spec = PartitionSpec("x")
    program = jax.shard_map(function, mesh=AbstractMesh((3,), ("x",)), in_specs=spec, out_specs=spec)
    return count_messages(jax.make_jaxpr(program)(jax.ShapeDtypeStruct((12,), jnp.float32)), 3)


def send(x, pairs=tuple(RING)):
    return lax.ppermute(x, "x", pairs)


def test_nothing_is_sent():
    assert messages_of(lambda x: x + 1) == Messages(sent_bytes=(0, 0, 0), sent_messages=(0, 0, 0), num_rounds=0)


def test_messages_that_wait_for_one_another_are_rounds():
    assert messages_of(lambda x: send(send(x) + 1)).num_rounds == 2
    assert messages_of(lambda x: send(x) + send(x + 1)).num_rounds == 1


def test_each_device_is_counted_by_its_pairs():
    found = messages_of(lambda x: send(x, [(0, 1)]) + send(x[:1], [(2, 1), (0, 0)]))
    assert found == Messages(sent_bytes=(16, 0, 4), sent_messages=(1, 0, 1), num_rounds=1)


def test_loops_count_their_trips():
    nested = messages_of(lambda x: lax.fori_loop(0, 5, lambda _, y: lax.fori_loop(0, 3, lambda _, z: send(z), y), x))
    assert nested == Messages(sent_bytes=(240, 240, 240), sent_messages=(15, 15, 15), num_rounds=15)
    independent = messages_of(lambda x: x + lax.scan(lambda c, _: (c, send(x)), 0, length=5)[1].sum(0))
    assert independent == Messages(sent_bytes=(80, 80, 80), sent_messages=(5, 5, 5), num_rounds=1)


def test_inner_programs_are_entered():
    found = messages_of(lambda x: jax.jit(send)(jax.checkpoint(send)(x)))
    assert found == Messages(sent_bytes=(32, 32, 32), sent_messages=(2, 2, 2), num_rounds=2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: lax.while_loop(lambda y: y.sum() < 9, send, x),
        lambda x: lax.cond(x.sum() < 9, send, lambda y: y, x),
    ],
)
def test_a_number_that_the_program_does_not_say_is_an_error(function):
    with pytest.raises(ValueError, match="does not say how often"):
        messages_of(function)
    assert messages_of(lambda x: lax.while_loop(lambda y: y.sum() < 9, jnp.sin, x)).num_rounds == 0
