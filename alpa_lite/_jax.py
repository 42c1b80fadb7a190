"""The only place that knows where JAX keeps its half-public parts, and what differs between its releases.

Works on JAX 0.10 (Python 3.11) and 0.11 (Python 3.12+).
"""

from __future__ import annotations

import atexit
import contextlib
import io
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.extend.source_info_util as source_info_util
import numpy as np
from jax.experimental import serialize_executable
from jax.extend import core as jex_core
from jax.interpreters import partial_eval
from jax.sharding import Sharding

from cost_models.untrusted_text import printable

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

_OWN_FOLDER = str(Path(__file__).parent)
_NUMBERS_OF_FRAMES = (8, 100)
"""Of a traceback: most calls of libraries are no deeper than the first."""

_STANDARD_LIBRARY = os.path.dirname(threading.__file__)
_COMPILING = tuple(os.path.join("jax", "_src", *name) for name in (("compiler.py",), ("interpreters", "mlir.py")))
"""Files of JAX whose functions run while it lowers and compiles."""

_COUNTS = ("num_consts", "num_carry")

Literal = jex_core.Literal
Var = jex_core.Var


def open_jaxpr(jaxpr: Any) -> Any:
    """The equations of a jaxpr, closed or open (0.11 has one class for both)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def params_of(eqn: Any) -> dict[str, Any]:
    """The parameters of an equation. Since 0.11.2 a scan tells by trees which operands are constants and which it
    carries; the numbers of 0.10 are added."""
    params = dict(eqn.params)
    if "ft_in" in params:
        consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
        params |= dict(zip(_COUNTS, (consts, carry), strict=True))
    return params


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Constants attached to a closed jaxpr."""
    return tuple(getattr(jaxpr, "consts", ()))


def inner_jaxprs(eqn: Any) -> Sequence[Any]:
    """The jaxprs inside an equation's parameters."""
    return tuple(jex_core.jaxprs_in_params(eqn.params))


def prune(jaxpr: Any) -> Any:
    """The jaxpr without equations whose results nobody reads; inputs and outputs stay."""
    pruned, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return pruned


def source_line(eqn: Any) -> str:
    """`file:line (function)` of the user code that made an equation; empty when unknown, or when none did.

    Of code that calls a library of layers or optimizers it is the line of the call, not one of the library.
    """
    line = printable(source_info_util.summarize(eqn.source_info))
    if line.startswith(_OWN_FOLDER):
        return ""
    if not in_a_library(line):
        return line
    # Innermost last; what lies outside of this package called it, and has no part in the step.
    for num_frames in _NUMBERS_OF_FRAMES:
        frames = reversed(source_info_util.summarize(eqn.source_info, num_frames=num_frames).split("\n"))
        inner = itertools.takewhile(lambda frame: not frame.startswith(_OWN_FOLDER), frames)
        caller = next((frame for frame in inner if not in_a_library(frame)), None)
        if caller is not None:
            return printable(caller)
    return line


def traceback(eqn: Any) -> Any:
    """What the source line of an equation follows from: equal ones have the same."""
    return eqn.source_info.traceback


def is_compiling(frame: FrameType | None) -> bool:
    """Whether a thread with this frame is inside JAX's compilation of a function."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILING):
            return True
        frame = frame.f_back
    return False


def is_in_a_library(file: str) -> bool:
    """Whether a file of code is of an installed package, of this one, or of Python."""
    return in_a_library(file) or file.startswith((_OWN_FOLDER, _STANDARD_LIBRARY, "<frozen"))


def in_a_library(line: str) -> bool:
    """Whether a `file:line` is of an installed package, as far as its folder tells."""
    return "site-packages" in line or "dist-packages" in line


def name_stack(eqn: Any) -> str:
    """Name stack of an equation, relative to the equation that encloses it."""
    return printable(str(eqn.source_info.name_stack))


_extended: dict[str, Any] = {}
"""Extended dtypes (those of typed random keys) by name, as far as they were met."""


@lru_cache(maxsize=1_000)
def name_of(dtype: Any) -> str:
    """The name of a dtype, from which `struct` makes it again."""
    if dtype == jax.dtypes.float0:
        return "float0"
    name = str(dtype)
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        _extended[name] = dtype
    return name


def struct(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    """The abstract array of a shape and a dtype by its name, typed random keys (`key<...>`) included."""
    if dtype == "float0":
        return jax.ShapeDtypeStruct(tuple(shape), jax.dtypes.float0)
    found = _key_dtype(dtype) if dtype.startswith("key<") else jax.numpy.dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(shape), found)


def _key_dtype(name: str) -> Any:
    if name not in _extended:  # of a file, for example; all that JAX has registered are met now
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
def key_implementation(dtype: str) -> Any:
    """What JAX takes as `impl` for keys of a dtype `key<...>`: a name, or the specification of one not registered."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), struct((), dtype))
    return found[0]


def bind(primitive: Any, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """Apply a primitive to arrays with an equation's parameters."""
    if "ft_in" in params:
        params = {name: value for name, value in params.items() if name not in _COUNTS}
    # Until 0.9 the functions among the parameters came apart from the rest.
    bound = primitive.get_bind_params(params)
    subfuns, bind_params = bound if isinstance(bound, tuple) else ((), bound)
    results = primitive.bind(*subfuns, *operands, **bind_params)
    return list(results) if primitive.multiple_results else [results]


def lowering_platform(device: Any) -> str:
    """What JAX lowers for a device: "cuda" or "rocm" where the device says "gpu"."""
    return getattr(device.client, "_raw_platform", device.client.platform)


_OTHERS = ("jax_default_prng_impl", "jax_debug_nans", "jax_debug_infs")
"""Names in the configuration that a compiled step depends on and that JAX's own list leaves out."""

_WITHOUT_EFFECT = frozenset({"jax_default_device", "jax_enable_pgle", "jax_pgle_profiling_runs"})
"""Names of JAX's list that change nothing here: a plan says which devices a step runs on."""

_NAMES = (
    "jax_enable_x64 jax_default_matmul_precision jax_threefry_partitionable jax_numpy_dtype_promotion "
    "jax_numpy_rank_promotion jax_disable_jit jax_debug_key_reuse jax_softmax_custom_jvp"
).split()
"""Names that stand in for JAX's list where that has moved."""

_read_others, _read_names = attrgetter(*_OTHERS), attrgetter(*_NAMES)


def configuration() -> tuple[Any, ...]:
    """All in JAX's configuration that a traced and compiled function depends on, for comparison; takes 1 µs."""
    if _trace_context is None:
        return _read_names(jax.config), jax.sharding.get_abstract_mesh(), _read_others(jax.config)
    return _trace_context(), None, _read_others(jax.config)


def by_name(configuration: tuple[Any, ...]) -> dict[str, Any]:
    """A configuration by names, without what has no effect on a parallel step."""
    values, mesh, others = configuration
    names: Sequence[str] = _NAMES
    if _trace_context is not None:
        try:
            names = _trace_context_names()
        except (TypeError, NotImplementedError):  # with an older jaxlib
            names = [f"part {i}" for i in range(len(values))]
    found = dict(zip(names, values, strict=False)) | dict(zip(_OTHERS, others, strict=True)) | {"mesh": mesh}
    return {name: value for name, value in found.items() if name not in _WITHOUT_EFFECT}


_NO_MESH = contextlib.nullcontext()


def context_mesh() -> Any:
    """Return the mesh that the user has set (`jax.set_mesh`), or None."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no mesh is set, for programs on meshes of a plan; takes 1 µs where none is set."""
    return _NO_MESH if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None)


def under_mesh(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a mesh of `context_mesh` is set, or none if it is None."""
    return no_mesh() if mesh is None else jax.set_mesh(mesh)


def context_without_mesh(context: Any) -> Any:
    """Return what JAX sets while it runs an equation, without the mesh."""
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
    """Whether JAX is tracing or transforming a function in this thread now."""
    return _is_top_level is not None and not _is_top_level()


def weak(array: jax.Array, aval: Any) -> jax.Array:
    """The array with the aval given, whose type is weak; it takes over the buffers."""
    try:
        from jax._src.array import ArrayImpl

        sharding, held = array.sharding, array._arrays  # pyright: ignore[reportAttributeAccessIssue]
        return ArrayImpl(aval, sharding, held, committed=True, _skip_checks=True)
    except (ImportError, AttributeError, TypeError):  # private: it may move
        return array


def addresses(array: jax.Array) -> list[tuple[Any, Any]]:
    """The device and the address of each of an array's buffers in this process; nothing is awaited."""
    held = blocks(getattr(array, "_base_array", array))  # keys are arrays around arrays
    return [(*block.devices(), block.unsafe_buffer_pointer()) for block in held]


def compiled(lowered: Any, **options: Any) -> Any:
    """What a lowered function is compiled to; it can be called with arrays of less than a byte per element.

    Executables say how these are packed, arrays do not, and JAX refuses what it takes for another layout.
    """
    made = lowered.compile(**options)
    _accept_packed(made)
    return made


def _accept_packed(compiled: Any) -> None:
    executable: Any = getattr(compiled, "_executable", None)  # private: it may move
    layouts: Sequence[Any] = getattr(executable, "_xla_in_layouts", None) or ()
    if any(getattr(layout, "sub_byte_element_size_in_bits", 0) for layout in layouts):
        known = [None if getattr(layout, "sub_byte_element_size_in_bits", 0) else layout for layout in layouts]
        executable._xla_in_layouts = known


def blocks(array: jax.Array) -> list[Any]:
    """What each device of this process holds of an array, in the order of its sharding's devices."""
    found = getattr(array, "_arrays", None)  # `addressable_shards` looks for the place of each in the whole as well
    return [shard.data for shard in array.addressable_shards] if found is None else list(found)


def copying_to(shardings: Sequence[Sharding]) -> Callable[[Sequence[Any]], list[Any]]:
    """What copies arrays to other devices, one per sharding, each block from a device to the one of the same number.

    That is `jax.device_put` of arrays that are cut as the shardings say. It looks at this each time, which takes as
    long as five copies (measured: 50 µs against 10); here the caller knows it.
    """
    wanted = list(shardings)
    try:
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

        copy = xla_client.batched_copy_array_to_devices_with_sharding
        devices = [sharding._internal_device_list.addressable_device_list for sharding in wanted]
        semantics = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(wanted)
    except (ImportError, AttributeError):  # private: it may move
        return lambda arrays: jax.device_put(list(arrays), wanted)
    return lambda arrays: copy(list(arrays), devices, wanted, semantics)


def own_memory(array: np.ndarray[Any, Any], sharding: Sharding) -> np.ndarray[Any, Any]:
    """A NumPy array for JAX to put on devices: a copy where these may read the host's memory."""
    return np.array(array) if any(device.platform == "cpu" for device in sharding.device_set) else array


def put_numpy(array: np.ndarray[Any, Any], sharding: Sharding) -> Any:
    """`jax.device_put` of a NumPy array, which takes a quarter of the time where nothing need be found out about it.

    It shares no memory with the array: on CPU JAX would, and what is written there later would change the result.
    """
    array = own_memory(array, sharding)
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
    """What JAX knows of the processes before it knows their devices; `client` of the service that coordinates them."""

    client: Any
    process: int
    num_processes: int


def job() -> JobInfo | None:
    """The job that this process has joined, if it has."""
    try:
        from jax._src.distributed import global_state

        if global_state.client is None:
            return None
        return JobInfo(
            client=global_state.client, process=global_state.process_id, num_processes=global_state.num_processes
        )
    except (ImportError, AttributeError):  # private: it may move
        return None


@contextmanager
def preemption_service(on: bool) -> Iterator[None]:
    """Within, `jax.distributed.initialize` starts JAX's preemption service, which takes SIGTERM, or does not."""
    name = "jax_enable_preemption_service"
    before = getattr(jax.config, name, None)
    if before is None:  # it has another name, or none
        yield
        return
    jax.config.update(name, on)
    try:
        yield
    finally:
        jax.config.update(name, before)


def collectives_at(host: str) -> None:
    """Let CPU collectives of this process listen at the interface of a host: JAX takes that of the machine's name."""
    try:
        from jax._src import xla_bridge
        from jax._src.lib import _jax as lib  # pyright: ignore[reportPrivateImportUsage]

        if jax.config.jax_cpu_collectives_implementation != "gloo":  # pyright: ignore[reportAttributeAccessIssue]
            return

        def client() -> Any:
            joined = job()
            made = lib.make_gloo_tcp_collectives(distributed_client=joined.client, hostname=host) if joined else None
            return xla_bridge.make_cpu_client(collectives=made)

        xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)
    except (ImportError, AttributeError, TypeError):  # private: it may move
        return


def forget_job() -> None:
    """At exit, do not wait until all processes of the job end. A process that fails would wait for those it keeps."""
    from jax._src import api

    atexit.unregister(api.clean_up)


def compilation_cache_folder() -> str:
    """Where JAX keeps compiled executables for the next start; empty where it does not."""
    is_on = getattr(jax.config, "jax_enable_compilation_cache", True)
    return (getattr(jax.config, "jax_compilation_cache_dir", None) or "") if is_on else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A compiled executable as bytes, and the devices that it was compiled for."""

    data: bytes
    in_tree: Any
    out_tree: Any
    devices: tuple[Any, ...]


def packed(compiled: Any, devices: Sequence[Any]) -> Packed | None:
    """A compiled executable, for `unpacked`; None where it has no such form (it calls back into Python).

    Nor where JAX's compilation cache is on: what that cache has loaded on CPU can be written once more, but is broken
    then, and nothing tells it from what was compiled now.
    """
    if compilation_cache_folder():
        return None
    try:
        data, in_tree, out_tree = serialize_executable.serialize(compiled)
    except Exception:  # each backend has its own way to say that it cannot
        return None
    return Packed(data=data, in_tree=in_tree, out_tree=out_tree, devices=tuple(devices))


def unpacked(packed: Packed, devices: Sequence[Any]) -> Any | None:
    """The executable on as many other devices of this process, not compiled again; None where that cannot be done.

    JAX's `deserialize_and_load` loads for the devices of before only. Here each device stands for another one, and
    XLA is told so. An executable that is not on the devices asked for would end the process when it is called, so
    that is looked at first.
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
        found = jax.stages.Compiled(
            unloaded.load(), [], packed.in_tree.unflatten(args_info), packed.out_tree, no_kwargs=no_kwargs
        )
        _accept_packed(found)
        loaded = found.runtime_executable()
        return found if loaded is not None and loaded.local_devices() == list(devices) else None
    except Exception:  # all of it is private to JAX; what it cannot do is compiled
        return None


@lru_cache(maxsize=1)
def _unpickler_class() -> Any:
    """What reads an executable for other devices than it was written for; made when it is wanted, as it is private."""

    class Unpickler(serialize_executable._JaxPjrtUnpickler):
        options: Any = None

        def persistent_load(self, pid: Any) -> Any:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(pid[1], self.execution_devices, self.options)
            return super().persistent_load(pid)

    return Unpickler
