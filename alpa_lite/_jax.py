"""Adapters to the private and release-dependent parts of JAX; no other module may import `jax._src`.

Supported are JAX 0.10 (Python 3.11) and 0.11 (Python 3.12+). Private names may move in any release; most uses of one
therefore have a fallback, which may be slower or less precise.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
from jax import core as jax_core
from jax.experimental import serialize_executable
from jax.extend import core as jex_core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from cost_models.checks import printable

try:
    from jax._src.lax.parallel import psum_p
except ImportError:  # private: it may move
    psum_p: Any = None

try:
    from jax._src.api_util import InternalFloatingPointError as InvalidNumbersError
    from jax._src.config import trace_context as _trace_context
    from jax._src.config import trace_context_names as _trace_context_names
    from jax._src.core import trace_state_clean as _is_top_level
except ImportError:  # private: it may move
    InvalidNumbersError: Any = FloatingPointError
    _trace_context: Any = None
    _trace_context_names: Any = None
    _is_top_level: Any = None

_COUNTS = ("num_consts", "num_carry")
_assuming = threading.RLock()

# --- types for annotations --------------------------------------------------------------------------------------------

# One assignment each: a type checker takes only such names as types.
Var = jex_core.Var
Literal = jex_core.Literal
ShapedArray = jax_core.ShapedArray
Jaxpr = jex_core.Jaxpr
ClosedJaxpr = jex_core.ClosedJaxpr
JaxprEqn = jex_core.JaxprEqn
AnyJaxpr = Jaxpr | ClosedJaxpr
"""A closed or open jaxpr; JAX 0.11 has one class for both."""

Array = jax.Array | np.ndarray[Any, Any]
"""An array on devices or on the host; code that reads `sharding` or `addressable_shards` takes a `jax.Array`."""

Device = Any
"""A device of JAX. `jax.Device` is compiled code without stubs, which a type checker does not accept as a class."""

Tree = Any
"""A pytree: nested containers whose leaves are mostly arrays."""

TreeLeaf = Any
"""A leaf of a pytree as a user passes it: an array of JAX or NumPy, a number, or the shape of an array."""

TreeDef = Any
"""The structure of a pytree: `jax.tree_util.PyTreeDef`, which is compiled code without stubs like `jax.Device`."""

DType = Any
"""A dtype of NumPy, or an extended dtype of JAX, such as the dtype of typed PRNG keys."""

Aval = Any
"""The shape and dtype of a value: JAX's classes of avals have no typed base class with these attributes."""

Configuration = tuple[Any, ...]
"""JAX's settings as `configuration` reads them: parts that are hashable and comparable, of private types."""


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """Return the open jaxpr of a closed or open one (JAX 0.11 has one class for both)."""
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr))


def with_open_jaxpr(jaxpr: ClosedJaxpr, opened: Jaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr with another open jaxpr and the same constants."""
    # Where one class serves for both, an open jaxpr loses its constants when its variables are replaced.
    return ClosedJaxpr(opened, consts_of(jaxpr))


def aval_of(atom: Var | Literal) -> Aval:
    """Return the aval of a variable or literal of an array, which JAX's annotations take for an abstract value."""
    return atom.aval


def params_of(eqn: JaxprEqn) -> dict[str, Any]:
    """Return the parameters of an equation, with `num_consts` and `num_carry` for a scan in every release.

    Since JAX 0.11.2 a scan describes its constants and carried operands by pytrees (`ft_in`) instead of these numbers.
    """
    params = dict(eqn.params)
    if "ft_in" in params:
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
        params |= dict(zip(_COUNTS, (consts, carry), strict=True))
    return params


def consts_of(jaxpr: AnyJaxpr) -> Sequence[Array]:
    """Return the constants of a closed jaxpr; an open one has none."""
    return tuple(getattr(jaxpr, "consts", ()))


def inner_jaxprs(eqn: JaxprEqn) -> Sequence[AnyJaxpr]:
    """Return the jaxprs in the parameters of an equation."""
    return tuple(jex_core.jaxprs_in_params(eqn.params))


def tuple_like(given: tuple[Any, ...], items: Iterable[Any]) -> tuple[Any, ...]:
    """Return a tuple of items that is named where the given one is, as those in parameters of equations may be."""
    make = getattr(given, "_make", None)
    return tuple(items) if make is None else make(items)


def prune(jaxpr: Jaxpr) -> Jaxpr:
    """Return the jaxpr without dead equations; its inputs and outputs do not change."""
    pruned, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return pruned


def traceback(eqn: JaxprEqn) -> Hashable:
    """Return the traceback object of an equation, a cache key: equal tracebacks have the same source line."""
    return eqn.source_info.traceback


def name_stack(eqn: JaxprEqn) -> str:
    """Return the name stack of an equation, relative to the enclosing equation."""
    return printable(str(eqn.source_info.name_stack))


_extended: dict[str, DType] = {}
"""Extended dtypes (of typed PRNG keys) by name. A name cannot be parsed back, so `name_of` records each dtype."""


@lru_cache(maxsize=1_000)
def name_of(dtype: DType) -> str:
    """Return the name of a dtype, which `struct` can convert back to the dtype."""
    if dtype == jax.dtypes.float0:
        return "float0"
    name = str(dtype)
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        _extended[name] = dtype
    return name


def struct(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    """Return the abstract array of a shape and a dtype given by name, including typed PRNG keys (`key<...>`)."""
    if dtype == "float0":
        return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.float0)
    parsed = _key_dtype(dtype) if dtype.startswith("key<") else jax.numpy.dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), parsed)


def _key_dtype(name: str) -> DType:
    # The name may come from a plan file, before any key of this dtype was traced: record all registered dtypes then.
    if name not in _extended:
        for implementation in _registered_implementations():
            name_of(jax.eval_shape(lambda impl=implementation: jax.random.key(0, impl=impl)).dtype)
    return _extended[name]


def _registered_implementations() -> Sequence[str]:
    try:
        from jax._src.random.prng import prngs

        return tuple(prngs)
    except ImportError:  # private: it may move
        return "threefry2x32", "rbg", "unsafe_rbg"


@lru_cache(maxsize=100)
def key_implementation(dtype: str) -> str | object:
    """Return the `impl` argument of `jax.random.key` for a dtype `key<...>`.

    This is a name, or the specification of an implementation that is not registered.
    """
    implementations: list[object] = []
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), struct((), dtype))
    return implementations[0]


def is_ref(aval: Aval) -> bool:
    """Return whether an aval belongs to a mutable array (`jax.Ref`)."""
    return type(aval).__name__ == "AbstractRef"


def discharged(jaxpr: AnyJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr with the values of mutable arrays in place of those that it makes."""
    from jax._src.state.discharge import discharge_state

    return discharge_state(cast(ClosedJaxpr, jaxpr))


def bind(primitive: jex_core.Primitive, params: dict[str, Any], operands: Sequence[Array]) -> list[jax.Array]:
    """Apply a primitive to arrays with the parameters of an equation, and return the list of its results."""
    if "ft_in" in params:
        params = {name: value for name, value in params.items() if name not in _COUNTS}
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(results) if primitive.multiple_results else [results]


_THAT_ASK_FOR_VERSIONS = (
    "jax._src.lib",  # where the others take them from, when they are imported
    "jax._src.cudnn.fused_attention_stablehlo",
    "jax.experimental.pallas.ops.gpu.attention_mgpu",
)
"""Modules of JAX that look up the versions of CUDA while they trace."""

# The oldest versions that have all kernels that these modules ask for.
_OLDEST_VERSIONS = SimpleNamespace(cudnn_get_version=lambda: 91100, cuda_runtime_get_version=lambda: 12091)


@contextmanager
def tracing_for_gpus() -> Iterator[None]:
    """Let kernels for GPUs be traced inside the `with` block where CUDA is not installed: cuDNN's and Mosaic's."""
    with _assuming:
        # Loaded, not installed, and not moved. Inside another such block all have the versions already.
        if not _replaced_versions(None, _OLDEST_VERSIONS):
            yield
            return
        try:
            yield
        finally:
            # Those too that the traced code has imported meanwhile.
            _replaced_versions(_OLDEST_VERSIONS, None)


def _replaced_versions(old: object, new: object) -> bool:
    """Set the versions of CUDA in all loaded modules that have `old` ones; return whether there were any."""
    modules: list[Any] = [sys.modules.get(name) for name in _THAT_ASK_FOR_VERSIONS]
    found = [module for module in modules if getattr(module, "cuda_versions", "") is old]
    for module in found:
        module.cuda_versions = new
    return bool(found)


def lowering_platform(device: Device) -> str:
    """Return the platform that JAX lowers to for a device: "cuda" or "rocm" for a device of platform "gpu"."""
    return getattr(device.client, "_raw_platform", device.client.platform)


_OTHERS = ("jax_default_prng_impl", "jax_debug_nans", "jax_debug_infs")
"""Configuration names that a compiled step depends on but that JAX's own trace context does not contain."""

_WITHOUT_EFFECT = frozenset({"jax_default_device", "jax_enable_pgle", "jax_pgle_profiling_runs"})
"""Names in JAX's trace context that do not affect a parallel step, whose devices are given by the plan."""

_NAMES = (
    "jax_enable_x64 jax_default_matmul_precision jax_threefry_partitionable jax_numpy_dtype_promotion "
    "jax_numpy_rank_promotion jax_disable_jit jax_debug_key_reuse jax_softmax_custom_jvp"
).split()
"""Fallback for the names in JAX's trace context, if that private function has moved."""

_read_others, _read_names = attrgetter(*_OTHERS), attrgetter(*_NAMES)


def allocatable_bytes(device: Device) -> float | None:
    """Return the bytes that the allocator of a device may give to programs; None where it states no limit."""
    # The CPU's states what one process has used so far.
    stats = device.memory_stats() if device.platform != "cpu" else None
    return float(stats["bytes_limit"]) if stats and "bytes_limit" in stats else None


def configuration() -> Configuration:
    """Return the parts of JAX's configuration on which a traced and compiled function depends, for comparison.

    This runs at every call of a parallel function and takes 1 µs; names are therefore added only by `by_name`.
    """
    if _trace_context is None:
        return _read_names(jax.config), jax.sharding.get_abstract_mesh(), _read_others(jax.config)
    return _trace_context(), None, _read_others(jax.config)


def by_name(configuration: Configuration) -> dict[str, object]:
    """Return a configuration as a dictionary by name, without entries that do not affect a parallel step."""
    values, mesh, others = configuration
    names: Sequence[str] = _NAMES
    if _trace_context is not None:
        try:
            names = _trace_context_names()
        except (TypeError, NotImplementedError):  # with an older jaxlib
            names = [f"part {i}" for i in range(len(values))]
    settings = dict(zip(names, values, strict=False)) | dict(zip(_OTHERS, others, strict=True)) | {"mesh": mesh}
    return {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT}


_NO_MESH = contextlib.nullcontext()


def context_mesh() -> Mesh | None:
    """Return the mesh that the user has set (`jax.set_mesh`), or None."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def no_mesh() -> contextlib.AbstractContextManager[object]:
    """Return a context in which no mesh is set, for programs on meshes of a plan; takes 1 µs where none is set."""
    return _NO_MESH if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None)


def context_without_mesh(eqn: JaxprEqn) -> Any:
    """Return the context that JAX sets while it evaluates an equation, without its mesh."""
    context = eqn.ctx
    mesh = getattr(context, "cur_abstract_mesh", None)
    if mesh is None or mesh.empty:
        return context
    metadata = None if context.xla_metadata is None else tuple(sorted(context.xla_metadata.items()))
    return type(context)._create(
        context.compute_type,
        context.threefry_partitionable,
        jax.sharding.get_abstract_mesh(),
        context.remove_size_one_mesh_axis,
        metadata,
    )


def is_tracing() -> bool:
    """Return whether JAX is tracing or transforming a function in this thread."""
    return _is_top_level is not None and not _is_top_level()


def relabeled(array: jax.Array, aval: Aval, sharding: Sharding) -> jax.Array:
    """Return an array of another aval and sharding that shares the buffers of `array`, without a copy."""
    try:
        from jax._src.array import ArrayImpl

        buffers: Any = blocks(array)
        return ArrayImpl(aval, sharding, buffers, committed=True, _skip_checks=True)
    except (ImportError, AttributeError, TypeError):  # private: it may move
        return array


def addresses(array: jax.Array) -> list[tuple[Device, int]]:
    """Return the (device, address) of each buffer of an array in this process, without waiting for its computation."""
    buffers = blocks(getattr(array, "_base_array", array))  # keys are arrays around arrays
    return [(*block.devices(), block.unsafe_buffer_pointer()) for block in buffers]


def compiled(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
    """Compile a lowered function so that it accepts arrays of sub-byte dtypes.

    The input layouts of an executable contain the element size in bits of packed dtypes, and those of arrays do not.
    JAX takes this for a layout mismatch and refuses the call; the layouts of such inputs are therefore removed.
    """
    executable = lowered.compile(**options)
    _accept_packed(executable)
    return executable


def _accept_packed(compiled: jax.stages.Compiled) -> None:
    executable: Any = getattr(compiled, "_executable", None)  # private: it may move
    layouts: Sequence[Any] = getattr(executable, "_xla_in_layouts", None) or ()
    if any(getattr(layout, "sub_byte_element_size_in_bits", 0) for layout in layouts):
        plain = [None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout for layout in layouts]
        executable._xla_in_layouts = plain


def blocks(array: jax.Array) -> list[jax.Array]:
    """Return the single-device array of each device of this process, in the device order of the sharding."""
    private = getattr(array, "_arrays", None)  # `addressable_shards` computes the index of each in the whole as well
    return [shard.data for shard in array.addressable_shards] if private is None else list(private)


def copying_to(shardings: Sequence[Sharding]) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Return a function that copies arrays to other devices: array i gets `shardings[i]`, block by block.

    The arrays must be split in the same way before; each block is copied to the device at the same position.
    `jax.device_put` does the same, but checks this at every call, which takes 50 µs where the copy takes 10 µs.
    """
    targets = list(shardings)
    try:
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        copy = xla_client.batched_copy_array_to_devices_with_sharding
        devices = [sharding._internal_device_list.addressable_device_list for sharding in targets]
        semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(targets)  # blocks in place already are shared
    except (ImportError, AttributeError):  # private: it may move
        return lambda arrays: jax.device_put(list(arrays), targets)
    return lambda arrays: copy(list(arrays), devices, targets, semantics)


HOST_MEMORY = "pinned_host"
"""The kind of memory, of backends with devices and of the CPU backend, that is the host's and that devices reach."""


def in_memory(x: jax.Array, *, on_host: bool) -> jax.Array:
    """Return a copy of an array in the memory of the host, or of its devices; within a program alone."""
    return jax.device_put(x, jax.memory.Space.Host if on_host else jax.memory.Space.Device)


def named_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec, *, on_host: bool = False) -> NamedSharding:
    """Return the sharding of arrays in the memory of the devices, or of their host."""
    return NamedSharding(mesh, spec, memory_kind=HOST_MEMORY) if on_host else NamedSharding(mesh, spec)


def own_memory(array: np.ndarray[Any, Any], sharding: Sharding) -> np.ndarray[Any, Any]:
    """Return a NumPy array that JAX may alias: a copy if the sharding contains CPU devices, else the array itself."""
    return np.array(array) if any(device.platform == "cpu" for device in sharding.device_set) else array


def put_numpy(array: np.ndarray[Any, Any], sharding: Sharding) -> jax.Array:
    """Put a NumPy array on devices, in a quarter of the time of `jax.device_put` if the dtype needs no conversion.

    The result never shares memory with the array. On CPU JAX would alias it, and writing to the NumPy array later
    would change the result.
    """
    array = own_memory(array, sharding)  # first, since REUSE_INPUT lets JAX alias what it is given
    try:
        from jax._src.interpreters import pxla
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype:
            return pxla.shard_args([sharding], [None], [xla_client.ArrayCopySemantics.REUSE_INPUT], [array])[0]
    except (ImportError, AttributeError, TypeError):  # private: it may move
        pass
    return jax.device_put(array, sharding)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """The processes of a job as known before its devices are initialized.

    client          the client of JAX's distributed coordination service
    process         the index of this process
    num_processes   the number of processes
    host            the host of the first process, as the others reach it
    """

    client: Any
    process: int
    num_processes: int
    host: str = "127.0.0.1"


def job() -> JobInfo | None:
    """Return the job that this process has joined by `jax.distributed.initialize`, or None."""
    try:
        from jax._src.distributed import global_state

        if global_state.client is None:
            return None
        host = (global_state.coordinator_address or "").rpartition(":")[0].strip("[]")
        return JobInfo(
            client=global_state.client,
            process=global_state.process_id,
            num_processes=global_state.num_processes,
            host=host or "127.0.0.1",
        )
    except (ImportError, AttributeError):  # private: it may move
        return None


@contextmanager
def joining(*, preemption_service: bool, recoverable: bool) -> Iterator[None]:
    """Set inside the `with` block how `jax.distributed.initialize` joins a job.

    preemption_service: whether it starts the service that handles SIGTERM.
    recoverable: whether JAX leaves the other processes alone when one of them has died.
    """
    wanted = {"jax_enable_preemption_service": preemption_service}
    if recoverable:  # else the user's own setting counts
        wanted["jax_enable_recoverability"] = True
    # Where an option has another name, or none, JAX does as it does.
    before = {name: getattr(jax.config, name) for name in wanted if hasattr(jax.config, name)}
    for name in before:
        jax.config.update(name, wanted[name])
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def collectives_at(host: str) -> None:
    """Make CPU collectives of this process listen on the network interface of `host`.

    By default JAX uses the interface that the machine's name resolves to, which other machines may not reach.
    """
    try:
        from jax._src import xla_bridge
        from jax._src.lib import _jax as lib  # pyright: ignore[reportPrivateImportUsage]

        if jax.config.jax_cpu_collectives_implementation != "gloo":  # pyright: ignore[reportAttributeAccessIssue]
            return

        def client() -> object:
            joined = job()
            made = lib.make_gloo_tcp_collectives(distributed_client=joined.client, hostname=host) if joined else None
            return xla_bridge.make_cpu_client(collectives=made)

        xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)
    except (ImportError, AttributeError, TypeError):  # private: it may move
        return


def forget_job() -> None:
    """Do not wait at exit until all processes of the job end.

    A process that fails would otherwise wait for processes that are themselves waiting for it.
    """
    from jax._src import api

    atexit.unregister(api.clean_up)


def compilation_cache_folder() -> str:
    """Return the folder of JAX's persistent compilation cache, or an empty string if the cache is off."""
    is_on = getattr(jax.config, "jax_enable_compilation_cache", True)
    return (getattr(jax.config, "jax_compilation_cache_dir", None) or "") if is_on else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A serialized executable: its bytes, its input and output trees, and the devices that it was compiled for."""

    data: bytes
    in_tree: TreeDef
    out_tree: TreeDef
    devices: tuple[Device, ...]


def packed(compiled: jax.stages.Compiled, devices: Sequence[Device]) -> Packed | None:
    """Serialize a compiled executable for `unpacked`; return None if that is not possible.

    An executable that calls back into Python cannot be serialized. Neither is one serialized while JAX's compilation
    cache is on: serializing an executable that the cache has loaded on CPU succeeds but gives a broken one, and such
    executables cannot be told from newly compiled ones.
    """
    if compilation_cache_folder():
        return None
    try:
        data, in_tree, out_tree = serialize_executable.serialize(compiled)
    except Exception:  # every backend raises a different exception type
        return None
    return Packed(data=data, in_tree=in_tree, out_tree=out_tree, devices=tuple(devices))


def unpacked(packed: Packed, devices: Sequence[Device]) -> jax.stages.Compiled | None:
    """Load a serialized executable onto other devices of this process without compiling it again.

    Return None if that is not possible. JAX's `deserialize_and_load` loads an executable only onto its original
    devices. Here every original device is replaced by the device at the same position, and XLA gets the new device
    assignment. Calling an executable on wrong devices would crash the process, so the devices are checked after
    loading.
    """
    try:
        from jax._src import compiler

        client = devices[0].client
        numbers = np.array([[device.id for device in devices]])
        options = compiler.get_compile_options(
            num_replicas=1, num_partitions=len(devices), device_assignment=numbers, backend=client
        )
        unpickler = _unpickler_class()(io.BytesIO(packed.data), client, tuple(devices))
        unpickler.options = options
        unpickler.devices_by_id = {old.id: new for old, new in zip(packed.devices, devices, strict=True)}
        unloaded, args_info, no_kwargs = unpickler.load()
        loaded = jax.stages.Compiled(
            unloaded.load(), [], packed.in_tree.unflatten(args_info), packed.out_tree, no_kwargs=no_kwargs
        )
        _accept_packed(loaded)
        executable = loaded.runtime_executable()
        return loaded if executable is not None and executable.local_devices() == list(devices) else None
    except Exception:  # all names here are private to JAX; the caller compiles instead
        return None


@lru_cache(maxsize=1)
def _unpickler_class() -> Any:
    """Return an unpickler that loads an executable for other devices than its own.

    The class is created at first use, because its base class is private and may be missing.
    """

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        options: Any = None

        def persistent_load(self, pid: Any) -> Any:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], self.execution_devices, self.options)
            return super().persistent_load(pid)

    return Unpickler
