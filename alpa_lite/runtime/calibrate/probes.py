"""Build the programs that are timed to describe devices, each with its price in the cost model.

Every program repeats one operation, mostly in a loop whose number of trips is an argument, on all devices at the same
time unless stated otherwise. Passes use arrays larger than any cache, since in a train step most operands come from
memory.

    product            y @ w, square, by dtype and side                              Work "matmul"
    convolution        3 × 3 with its gradients, by stride and channels              Work "convolution"
    tiny product       8 × 8, dominated by the launch                                Work "matmul"
    pass               an element-wise pass, by size                                 Work "elementwise", bytes
    arithmetic         exp and tanh, which memory does not limit                     Work "elementwise", flops
    all_reduce, all_gather after reduce_scatter, all_to_all, permute,
                       by group size and bytes                                       Collective

Groups lie inside a host; with several hosts there are also groups of one device per host, and one of all devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite._jax import Device
from alpa_lite.runtime.calibrate.measurements import TimedProgram
from alpa_lite.runtime.job.processes import host_rows
from cost_models.work import Collective, CollectiveKind, Group, Product, Work

#: Functions in a row in `_arithmetic`, so many that the memory of a GPU does not limit them.
_CHAIN = 8
#: FLOPs per element of each by the count of the rules, and of `_pass`.
_ARITHMETIC_FLOPS, _PASS_FLOPS = 18.0, 3.0
#: Images of a convolution, and their height and width.
_IMAGES, _SIDE = 8, 32
#: Of the part of a block that one device of several does: samples, and the width of its weights.
_ROWS, _WIDTH = 256, 256
#: Arrays that a task of a plan usually takes.
_ARRAYS_PER_TASK = 32
_ITEM_BYTES = 4
#: Times that a trip repeats a program on an accelerator: before each trip of a loop whose length the compiler does not
#: know, the host waits for the trip before and reads on the device whether the loop ends, some 30 µs on a GPU.
_REPEATS = 32

_Step = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A program, and the parts whose prices add up to one trip of it; the other fields are those of `Measurement`."""

    program: TimedProgram
    series: str
    size: float
    parts: tuple[Work | Collective, ...]
    num_active_devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSizes:
    """The sizes to time.

    Attributes:
        sides: of square products, per dtype name.
        elements: of float32 arrays for element-wise passes.
        channels: in and out of 3 × 3 convolutions.
        link_elements: of float32 arrays for collectives.
        every_group: time every kind of collective in every group size, instead of all_reduce over all devices.
    """

    sides: dict[str, tuple[int, ...]]
    elements: tuple[int, ...]
    channels: tuple[int, ...]
    link_elements: tuple[int, ...]
    every_group: bool


QUICK = ProbeSizes(
    sides={"float32": (64, 256)},
    elements=(1 << 17, 1 << 20),
    channels=(32,),
    link_elements=(1 << 8, 1 << 18),
    every_group=False,
)


def thorough_sizes(memory_bytes: float, matrix_flops: float) -> ProbeSizes:
    """Return sizes for devices with this memory and about this rate of products: none runs for more than 0.05 s."""
    sides = tuple(n for n in (64, 128, 256, 512, 1024, 2048, 4096, 8192) if 2.0 * n**3 <= 0.05 * matrix_flops)
    return ProbeSizes(
        sides={"float32": sides, "bfloat16": sides[:-1], "float16": sides[:-1]},
        # The largest two: an H100 keeps 50 MB on the chip, three arrays of the third size.
        elements=tuple(1 << k for k in (20, 22, 24, 26) if _ITEM_BYTES << k <= memory_bytes / 64)[-2:],
        channels=(16, 64, 256) if sides[-1] >= 1024 else (16, 64),
        link_elements=tuple(1 << k for k in (8, 12, 16, 20, 24) if _ITEM_BYTES << k <= memory_bytes / 512),
        every_group=True,
    )


def device_probes(devices: Sequence[Device], sizes: ProbeSizes) -> list[Probe]:
    """Return products and passes, on all devices at the same time."""
    probes: list[Probe] = []

    def add(series: str, function: _Step, shape: tuple[int, ...], work: Work) -> None:
        probes.append(
            Probe(
                program=_everywhere(f"{series}, {shape[-1]}", function, devices, shape, work.dtype),
                series=series,
                size=shape[-1],
                parts=(work,),
                num_active_devices=len(devices),
            )
        )

    for dtype, sides in sizes.sides.items():
        for n in sides:
            add(f"product {dtype}", _product, (n, n), _product_work(n, dtype))
    add("tiny product", _product, (8, 8), _product_work(8, "float32"))
    for n in sizes.elements:
        add("pass", _pass, (n,), Work(flops=_PASS_FLOPS * n, bytes=3.0 * _ITEM_BYTES * n))
    probes += [_convolution_probe(devices, stride, n) for stride in (1, 2) for n in sizes.channels]
    middle = sizes.elements[len(sizes.elements) // 2]
    count = middle // _CHAIN
    work = Work(flops=_CHAIN * _ARITHMETIC_FLOPS * count, bytes=2.0 * _ITEM_BYTES * count)
    add("arithmetic", _arithmetic, (count,), work)
    return probes


def _convolution_probe(devices: Sequence[Device], stride: int, channels: int) -> Probe:
    """Return a convolution; on CPU it is called repeatedly from outside, as XLA compiles those in loops differently."""
    series = f"convolution, stride {stride}"
    name, function, shape = f"{series}, {channels}", partial(_convolution, stride), (_IMAGES, _SIDE, _SIDE, channels)
    on_cpu = devices[0].platform == "cpu"
    return Probe(
        program=(_alone if on_cpu else _everywhere)(name, function, devices, shape),
        series=series,
        size=channels,
        parts=(_convolution_work(stride, channels),),
        num_active_devices=len(devices),
    )


def _alone(name: str, function: _Step, devices: Sequence[Device], shape: tuple[int, ...]) -> TimedProgram:
    """Return a program whose trip is one awaited call, on separate arrays of each device."""
    mesh, spec = Mesh(np.array(devices), ("device",)), PartitionSpec("device")
    mapped = jax.shard_map(lambda y, w: function(y[0], w[0])[None], mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    full = (len(devices), *shape)
    images, weights = (_filled(full, "float32", NamedSharding(mesh, spec), fill) for fill in (0.0, 1.0))
    return _called(name, jax.jit(mapped).lower(images, weights).compile(), images, weights)


def share_programs(devices: Sequence[Device]) -> list[TimedProgram]:
    """Return products, softmax and norm in a chain on the first device of each host, and the same divided over all."""
    rows = host_rows(devices)
    return [
        _everywhere("block on one device", _block, [row[0] for row in rows], (_ROWS * len(rows[0]), _WIDTH)),
        _everywhere("block on all devices", _block, devices, (_ROWS, _WIDTH)),
    ]


def dispatch_program(devices: Sequence[Device]) -> TimedProgram:
    """Return a nearly empty program on a task's usual number of arrays."""
    mesh = Mesh(np.array(devices), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    # JAX checks and passes each array, so a launch takes longer the more there are.
    arrays = [_filled((len(devices),), "float32", sharding) for _ in range(_ARRAYS_PER_TASK)]
    compiled = jax.jit(lambda *xs: [x + 1.0 for x in xs], out_shardings=sharding).lower(*arrays).compile()
    return _called("dispatch", compiled, *arrays)


def link_probes(devices: Sequence[Device], sizes: ProbeSizes) -> list[Probe]:
    """Return collectives in groups inside a host, and across hosts."""
    rows = host_rows(devices)
    if len(devices) == 1:
        return []
    kinds = _COLLECTIVES if sizes.every_group else _COLLECTIVES[:1]
    return [
        _collective_probe(kind, grid, group, elements)
        for grid, group in probe_groups(rows, every=sizes.every_group)
        for kind in kinds
        for elements in sizes.link_elements
    ]


def probe_groups(rows: list[list[Device]], *, every: bool) -> list[tuple[np.ndarray, Group]]:
    """Return arrays of devices [siblings, members], each with the cost model's group for one row."""
    hosts, per_host = len(rows), len(rows[0])
    # Axes of logical meshes mostly have powers of two as sizes.
    inside = [g for g in range(2, per_host + 1) if per_host % g == 0 and g & (g - 1) == 0]
    inside = sorted({*inside, per_host} - {1}) if every else [per_host][: per_host > 1]
    grid = np.array(rows)
    groups = [
        (grid.reshape(-1, g), Group(num_devices=g, devices_per_host=g, num_concurrent=per_host // g)) for g in inside
    ]
    if hosts > 1:
        # The columns of the grid: one device of each host.
        groups.append((grid.T, Group(num_devices=hosts, devices_per_host=1, num_concurrent=per_host)))
        groups.append((grid.reshape(1, -1), Group(num_devices=hosts * per_host, devices_per_host=per_host)))
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A collective as a function of an array [elements] and the group size, and the kinds that it consists of."""

    name: str
    run: Callable[[jax.Array, int], jax.Array]
    kinds: tuple[CollectiveKind, ...]


_COLLECTIVES = (
    _Kind(name="all_reduce", run=lambda x, size: lax.psum(x, "member"), kinds=("all_reduce",)),
    _Kind(
        name="reduce_scatter + all_gather",
        run=lambda x, size: lax.all_gather(lax.psum_scatter(x, "member", tiled=True), "member", tiled=True),
        kinds=("reduce_scatter", "all_gather"),
    ),
    _Kind(
        name="all_to_all",
        run=lambda x, size: lax.all_to_all(x.reshape(size, -1), "member", 0, 0, tiled=True).reshape(x.shape),
        kinds=("all_to_all",),
    ),
    _Kind(
        name="permute",
        run=lambda x, size: lax.ppermute(x, "member", [(i, (i + 1) % size) for i in range(size)]),
        kinds=("permute",),
    ),
)


def _collective_probe(kind: _Kind, grid: np.ndarray, group: Group, elements: int) -> Probe:
    size = group.num_devices
    # Rounded up, so that scattering divides it evenly.
    width = -(-elements // size) * size
    where = f"{size} devices, {group.num_hosts} hosts" if group.num_hosts > 1 else f"{size} devices"
    series = f"{kind.name} over {where}"

    def collective(y: jax.Array, _: jax.Array) -> jax.Array:
        return kind.run(y, size)

    mesh = Mesh(grid, ("sibling", "member"))
    # The kinds run one after the other, so that their prices add up.
    collectives = [Collective(kind=k, bytes=float(_ITEM_BYTES * width), group=group) for k in kind.kinds]
    return Probe(
        program=_on_mesh(f"{series}, {width}", collective, mesh, (width,), "float32"),
        series=series,
        size=width,
        parts=tuple(collectives),
        num_active_devices=grid.size,
    )


def _product(y: jax.Array, w: jax.Array) -> jax.Array:
    return (y @ w).astype(y.dtype)


def _pass(y: jax.Array, z: jax.Array) -> jax.Array:
    """Return an element-wise function of two arrays, as most chains of element-wise ops are."""
    return jnp.maximum(y * 0.9 + z, 0.5)


def _product_work(side: int, dtype: str) -> Work:
    item = jnp.dtype(dtype).itemsize
    product = Product(rows=side, columns=side, depth=side)
    return Work(flops=product.flops, bytes=3.0 * side**2 * item, kind="matmul", dtype=dtype, product=product)


def _convolution(stride: int, y: jax.Array, w: jax.Array) -> jax.Array:
    """Run a convolution and its two gradients, as a train step does."""
    channels = y.shape[-1]

    def convolve(images: jax.Array, kernel: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(images, kernel, (stride, stride), "SAME", dimension_numbers=layout)

    # The weights are a part of an array as large as the images: a step takes two arrays of one shape.
    result, pull = jax.vjp(convolve, y, w.ravel()[: 9 * channels**2].reshape(3, 3, channels, channels))
    of_images, of_kernel = pull(result)
    return of_images + of_kernel.mean()


def _convolution_work(stride: int, channels: int) -> Work:
    """Return the work of a convolution and its two gradients."""
    rows = _IMAGES * (_SIDE // stride) ** 2
    product = Product(rows=rows, columns=channels, depth=9 * channels)
    moved = _ITEM_BYTES * (rows * channels + _IMAGES * _SIDE**2 * channels + 9.0 * channels**2)
    # Each gradient of a convolution has as many FLOPs as the convolution.
    return Work(flops=product.flops, bytes=moved, kind="convolution", product=product) * 3


def _arithmetic(y: jax.Array, _: jax.Array) -> jax.Array:
    for _number in range(_CHAIN):
        y = jnp.exp(-jnp.tanh(y) * y)
    return y


def _block(y: jax.Array, w: jax.Array) -> jax.Array:
    # As above: a square part of an array as large as the samples.
    y = jax.nn.softmax(y @ w[: w.shape[1]])
    return jnp.tanh((y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-5))


def _everywhere(
    name: str, function: _Step, devices: Sequence[Device], shape: tuple[int, ...], dtype: str = "float32"
) -> TimedProgram:
    return _on_mesh(name, function, Mesh(np.array(devices), ("device",)), shape, dtype)


def _on_mesh(name: str, function: _Step, mesh: Mesh, shape: tuple[int, ...], dtype: str) -> TimedProgram:
    """Return a program that repeats y = function(y, w) in place, on separate arrays of each device."""
    spec = PartitionSpec(mesh.axis_names)
    repeats = 1 if mesh.devices.flat[0].platform == "cpu" else _REPEATS

    def loop(trips: jax.Array, rows: jax.Array, constants: jax.Array) -> jax.Array:
        def trip(_: Any, y: jax.Array) -> jax.Array:
            return repeated(function, repeats, y, constants[0])

        return lax.fori_loop(0, trips, trip, rows[0])[None]

    # check_vma=False: the loop carries values that are replicated in a group as if they varied.
    mapped = jax.shard_map(loop, mesh=mesh, in_specs=(PartitionSpec(), spec, spec), out_specs=spec, check_vma=False)
    sharding, full = NamedSharding(mesh, spec), (mesh.devices.size, *shape)
    # Zeros stay finite (and never denormal) under repeated ops and sums; y @ w with all entries of w 1/n keeps ones.
    fill = 1.0 if len(shape) == 2 else 0.0
    rows, constants = _filled(full, dtype, sharding, fill), _filled(full, dtype, sharding, 1.0 / shape[-1])
    everywhere = NamedSharding(mesh, PartitionSpec())
    length = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
    compiled = jax.jit(mapped).lower(length, rows, constants).compile()

    def run(trips: int) -> None:
        count = jax.make_array_from_callback((), everywhere, lambda _: np.asarray(trips, np.int32))
        jax.block_until_ready(compiled(count, rows, constants))

    return TimedProgram(name=name, run=run, repeats=repeats)


def repeated(function: _Step, repeats: int, y: jax.Array, w: jax.Array) -> jax.Array:
    """Return y = function(y, w) so many times, in a loop whose length the compiler knows."""
    return function(y, w) if repeats == 1 else lax.fori_loop(0, repeats, lambda _, x: function(x, w), y)


def _called(name: str, compiled: jax.stages.Compiled, *arrays: jax.Array) -> TimedProgram:
    """Return a program whose trip is one awaited call."""

    def run(trips: int) -> None:
        for _ in range(trips):
            jax.block_until_ready(compiled(*arrays))

    return TimedProgram(name=name, run=run)


def _filled(shape: tuple[int, ...], dtype: str, sharding: NamedSharding, value: float = 1.0) -> jax.Array:
    """Return an array of one value, each process making its own part."""

    def part(index: Any) -> np.ndarray:
        extent = [len(range(*s.indices(n))) for s, n in zip(index, shape, strict=True)]
        return np.full(extent, value, jnp.dtype(dtype))

    return jax.make_array_from_callback(shape, sharding, part)
