"""This machine's devices as a `Cluster`, measured in about three seconds.

A handful of small programs is timed: a matrix product, an element-wise pass, a chain of all_reduces at two sizes, a
program that does nothing. Rates are set so that the cost model reproduces those timings. Virtual CPU devices share one
processor and are described as such (`Cluster.shared_processor`): their work adds up in time instead of running side
by side.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cost_models.cluster import Cluster, Device, Link
from cost_models.compute import compute_seconds
from cost_models.work import Work

#: Sizes of the timed programs in float32 elements: side of a matrix, vector beyond the caches, ends of the link's line.
_MATRIX = 256
_VECTOR = 1 << 21
_SMALL, _LARGE = 1 << 8, 1 << 18
#: How often a program repeats what is timed.
_SMALL_PRODUCTS = 32
_PASSES = 4
_LINKED = 8
#: Arrays that a task of a plan usually takes, and FLOPs per element of `_transcendental_passes`.
_ARRAYS_PER_TASK = 32
_TRANSCENDENTAL_FLOPS = 18.0


def local_cluster(devices: Sequence[Any] | None = None) -> Cluster:
    """The devices of this process (default: `jax.devices()`) as a cluster; measured once per process."""
    return _measure(tuple(jax.devices() if devices is None else devices))


@functools.cache
def _measure(devices: tuple[Any, ...]) -> Cluster:
    count, first = len(devices), devices[0]
    shared = first.platform == "cpu" and count > 1
    device = _device(devices if shared else (first,))
    link = _link(devices, shared) if count > 1 else Link(bandwidth_bytes_per_second=10e9, latency_seconds=1e-5)
    hosts = len({d.process_index for d in devices})
    return Cluster(
        name=f"local ({count} × {first.device_kind})",
        device=replace(device, dispatch_seconds=_dispatch_seconds(devices)),
        num_hosts=hosts,
        devices_per_host=count // hosts,
        intra_host=link,
        inter_host=link,
        shared_processor=shared,
        device_share=_device_share(devices) if shared else 1.0,
    )


def _device(devices: tuple[Any, ...]) -> Device:
    """Rates of these devices together, each busy with its part: one device, or all that share a processor."""
    count = len(devices)
    guess = Device(
        name=devices[0].device_kind,
        memory_bytes=_memory_bytes(devices[0], count),
        memory_bandwidth=1e10,
        peak_flops={"float32": 1e11},
        launch_seconds=1e-6,
        dispatch_seconds=1e-4,
    )
    seconds = _sharded_seconds(_element_wise_passes, devices, (_VECTOR,)) / _PASSES
    moved = Work(flops=1.0, bytes=4.0 * _VECTOR, kind="elementwise")
    bandwidth = guess.memory_bandwidth * count * compute_seconds(moved, guess) / seconds
    seconds = _sharded_seconds(lambda x: x @ x, devices, (_MATRIX, _MATRIX))
    product = Work(flops=2.0 * _MATRIX**3, bytes=12.0 * _MATRIX**2, kind="matmul")
    fast_memory = replace(guess, memory_bandwidth=1e15)
    peak = 1e11 * count * compute_seconds(product, fast_memory) / seconds
    seconds = _sharded_seconds(_transcendental_passes, devices, (_VECTOR,)) / _PASSES
    arithmetic = Work(flops=_TRANSCENDENTAL_FLOPS * _VECTOR, kind="elementwise")
    vector_peak = 1e11 * count * compute_seconds(arithmetic, guess) / seconds
    small = _sharded_seconds(_many_small_products, devices, (8, 8)) / _SMALL_PRODUCTS / count
    # The cost model takes the rate of element-wise work from float32 and that of matrix products from tensorfloat32.
    rates = {"float32": vector_peak, "tensorfloat32": peak}
    return replace(guess, memory_bandwidth=bandwidth, peak_flops=rates, launch_seconds=small)


def _element_wise_passes(x: jax.Array) -> jax.Array:
    """Passes over an array in place, as inside a program that reuses its buffers."""
    return jax.lax.fori_loop(0, _PASSES, lambda _, y: jnp.maximum(y * 1.01 - 0.1, 0.5), x)


def _transcendental_passes(x: jax.Array) -> jax.Array:
    """Passes of arithmetic that memory does not limit; `_TRANSCENDENTAL_FLOPS` by the count of the rules."""
    return jax.lax.fori_loop(0, _PASSES, lambda _, y: jnp.exp(-jnp.tanh(y) * y), x)


def _many_small_products(x: jax.Array) -> jax.Array:
    """A chain of kernels that cannot be fused and do next to nothing."""
    for _ in range(_SMALL_PRODUCTS):
        x = jnp.sin(x) @ x
    return x


def _device_share(devices: tuple[Any, ...]) -> float:
    """What one device alone gets done, against all of them together, on products with softmax and norm between."""

    def block(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jax.nn.softmax(x @ x)
            x = jnp.tanh((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5))
        return x

    shape = (_MATRIX, _MATRIX)
    together = _sharded_seconds(block, devices, shape) / len(devices)
    alone = _sharded_seconds(block, devices[:1], shape)
    return min(1.0, max(1.0 / len(devices), together / alone))


def _sharded_seconds(function: Callable[[Any], Any], devices: tuple[Any, ...], shape: tuple[int, ...]) -> float:
    """Seconds until every device has applied a function to an array of its own."""
    mesh = Mesh(np.array(devices), ("x",))
    spec = PartitionSpec("x")
    run = jax.jit(jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec))
    arrays = jax.device_put(jnp.ones((len(devices), *shape), jnp.float32), NamedSharding(mesh, spec))
    return _median_seconds(run, arrays)


def _memory_bytes(device: Any, sharers: int) -> float:
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / sharers


def _link(devices: tuple[Any, ...], shared: bool) -> Link:
    """Bandwidth and latency that reproduce a small and a large all_reduce over all devices, between other work.

    With n devices a ring or halving-doubling all_reduce of b bytes takes r·α + 2(n-1)/n · b/β with r = 2 log2 n; on a
    shared processor it takes n·α and the bytes of all n devices add up.
    """
    n = len(devices)

    def reduced(x: jax.Array) -> jax.Array:
        for _ in range(_LINKED):
            x = jax.lax.psum(x, "x") * 0.1 + 0.5
        return x

    def alone(x: jax.Array) -> jax.Array:
        for _ in range(_LINKED):
            x = x * 0.1 + 0.5
        return x

    def seconds(elements: int) -> float:
        together = _sharded_seconds(reduced, devices, (elements,)) - _sharded_seconds(alone, devices, (elements,))
        return max(together, 1e-7) / _LINKED

    small, large = seconds(_SMALL), seconds(_LARGE)
    share = 2.0 * (n - 1) / n * (n if shared else 1)
    bandwidth = share * 4.0 * (_LARGE - _SMALL) / max(large - small, 1e-6)
    rounds = n if shared else 2.0 * np.log2(n)
    return Link(bandwidth_bytes_per_second=float(bandwidth), latency_seconds=float(max(1e-7, small / rounds)))


def _dispatch_seconds(devices: tuple[Any, ...]) -> float:
    """Host and device time of launching a program that does nothing much to a task's usual number of arrays."""
    mesh = Mesh(np.array(devices), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    arrays = [jax.device_put(jnp.ones((len(devices),), jnp.float32), sharding) for _ in range(_ARRAYS_PER_TASK)]
    return _median_seconds(jax.jit(lambda *xs: [x + 1.0 for x in xs], out_shardings=sharding), *arrays)


def _median_seconds(function: Callable[..., Any], *arrays: Any, repeats: int = 15) -> float:
    # The first runs pay for compilation and for fresh memory.
    for _ in range(4):
        jax.block_until_ready(function(*arrays))
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - start)
    return float(np.median(times))
