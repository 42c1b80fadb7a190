"""The partitioner and the compiler of the jaxlib wheel as judges of a module of the MPMD dialect.

Nothing here knows alpa_lite. `main_of` reads a module through jaxlib's bindings. `partitioned` runs the wheel's own
passes: propagation of shardings and export, as the MPMD package of Shardy calls them. `compiled` lowers what they make
of each fragment to a program as IFRT would run it, and lets XLA compile that for the devices of the fragment's mesh;
calling it carries out the calls and transfers of `main` one after the other.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import mpmd

# The extension imports jaxlib by a name that only Google's own builds have.
sys.modules.setdefault("jax.jaxlib", jaxlib)
sys.modules.setdefault("jax.jaxlib._jax", _jax)
from jaxlib import _sdy_mpmd as wheel  # noqa: E402

_TYPE = re.compile(
    r'!mpmd\.mesh_tensor<"([^"]+)", tensor<([^,]+)>(?:, sharding=<@\S+, \[(.*)\]>)?(?:, memory_kind="(\w+)")?>'
)


class OnMesh(NamedTuple):
    """The type of a value: the name of its mesh, its shape, the MLIR name of its dtype, its spec, and its memory.

    The memory is None for that of the devices.
    """

    mesh: str
    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec
    memory: str | None = None

    @staticmethod
    def of(written: Any) -> OnMesh:
        """Read a type of MLIR."""
        found = _TYPE.fullmatch(str(written))
        assert found is not None, written
        mesh, tensor, dims, memory = found.groups()
        *sizes, dtype = tensor.split("x", tensor.partition("complex")[0].count("x"))
        axes = [tuple(re.findall(r'"([^"]+)"', dim)) for dim in re.findall(r"\{([^}]*)\}", dims or "")]
        return OnMesh(mesh, tuple(map(int, sizes)), dtype, PartitionSpec(*axes), memory)


class Operation(NamedTuple):
    """A fragment, a call of a fragment, or a transfer. Values are numbered, arguments first.

    `origin` lists names with their numbers of transpositions; `of` are the types of what is written.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    of: tuple[OnMesh, ...]
    mesh: str
    origin: tuple[tuple[str, int], ...]
    stage: int | None
    call_counter: int | None
    callee: str


class Main(NamedTuple):
    """The function `main`: its meshes, its arguments and results with their names, and its operations in order."""

    meshes: dict[str, dict[str, int]]
    arguments: list[tuple[str, OnMesh]]
    results: list[str]
    operations: list[Operation]
    returned: tuple[int, ...]

    @property
    def fragments(self) -> list[Operation]:
        """The fragments that no pass has added."""
        return [op for op in self.operations if op.origin]

    @property
    def transfers(self) -> list[tuple[str, str, tuple[int, ...], str]]:
        """Source, target, shape and dtype of each transfer."""
        types = [kind for _, kind in self.arguments] + [kind for op in self.operations for kind in op.of]
        sent = [(types[op.reads[0]], op.of[0]) for op in self.operations if op.name == "mpmd.transfer"]
        return [(source.mesh, target.mesh, target.shape, target.dtype) for source, target in sent]


def parsed(text: str) -> Any:
    """Return the verified module of a text."""
    context = mlir.make_ir_context()
    mpmd.register_dialect(context)
    module = ir.Module.parse(text, context)
    assert module.operation.verify()
    return module


def main_of(module: Any) -> Main:
    """Return what `main` of a module says."""
    main = _symbol(module, "main")
    block, numbers, operations, returned = main.regions[0].blocks[0], dict[Any, int](), list[Operation](), ()
    numbers.update({value: number for number, value in enumerate(block.arguments)})
    for op in block.operations:
        reads = tuple(numbers[value] for value in op.operands)
        if op.operation.name == "func.return":
            returned = reads
            continue
        writes = tuple(len(numbers) + i for i in range(len(op.results)))
        numbers.update(zip(op.results, writes, strict=True))
        operations.append(_operation(op, reads, writes))
    topology = re.findall(r'<"([^"]+)" : <\[([^\]]*)\]>>', str(main.attributes["topology"]))
    return Main(
        meshes={n: {axis: int(size) for axis, size in re.findall(r'"([^"]+)"=(\d+)', axes)} for n, axes in topology},
        arguments=[
            (name, OnMesh.of(value.type))
            for name, value in zip(_names(main, "arg_attrs", "jax.arg_info"), block.arguments, strict=True)
        ],
        results=_names(main, "res_attrs", "jax.result_info"),
        operations=operations,
        returned=returned,
    )


def _operation(op: Any, reads: tuple[int, ...], writes: tuple[int, ...]) -> Operation:
    origin = [mpmd.UserOriginAttr(each) for each in op.attributes["origin"]] if "origin" in op.attributes else []

    def read(name: str, default: Any) -> Any:
        return op.attributes[name].value if name in op.attributes else default

    return Operation(
        name=op.operation.name,
        reads=reads,
        writes=writes,
        of=tuple(OnMesh.of(value.type) for value in op.results),
        mesh=read("mesh_name", ""),
        origin=tuple((each.user_name, each.transpose_count) for each in origin),
        stage=read("stage_id", None),
        call_counter=read("call_counter", None),
        callee=read("callee", "") or _called(op),
    )


def _called(op: Any) -> str:
    """Return the function that a fragment calls."""
    inside = [each for region in op.regions for each in region.blocks[0].operations]
    return next((each.attributes["callee"].value for each in inside if each.operation.name == "func.call"), "")


def _names(main: Any, attributes: str, key: str) -> list[str]:
    listed: Iterable[Any] = main.attributes[attributes] if attributes in main.attributes else ()
    return [each[key].value if key in each else "" for each in listed]


def _symbol(module: Any, name: str) -> Any:
    (found,) = [op for op in module.body.operations if _name(op) == name]
    return found


def _name(op: Any) -> str:
    return op.attributes["sym_name"].value if "sym_name" in op.attributes else ""


def partitioned(module: Any) -> Any:
    """Run the wheel's passes on a module, in place, and return it."""
    main, types = main_of(module), _symbol(module, "main").type
    wheel.apply_mpmd_partitioning(
        module,
        "main",
        [(name, list(axes.items())) for name, axes in main.meshes.items()],
        {},
        [OnMesh.of(each).mesh for each in types.inputs],
        [OnMesh.of(each).mesh for each in types.results],
        [],
        fragment_merge_rules=[],
        fragment_schedule_rules=[],
        phases=wheel.PartitioningPhase.PARTITION,
    )
    return module


def compiled(module: Any) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Compile a partitioned module for the devices of this process, which its meshes take in their order."""
    main, meshes, rest = main_of(module), dict[str, Mesh](), iter(jax.devices())
    for name, axes in main.meshes.items():
        sizes = list(axes.values())
        meshes[name] = Mesh(np.array([next(rest) for _ in range(int(np.prod(sizes)))]).reshape(sizes), list(axes))
    wheel.lower_to_ifrt(module)
    options, programs = wheel.get_compile_options(module, {}), dict[str, Any]()
    for name, mesh in {op.callee: op.mesh for op in main.operations if op.callee}.items():
        program, devices = ir.Module.parse(str(_symbol(module, name)), module.context), meshes[mesh].devices
        programs[name] = devices.flat[0].client.compile_and_load(
            program, _jax.DeviceList(tuple(devices.flat)), options[f"{name}_mesh_{mesh}"]
        )

    def placed(array: Any, kind: OnMesh) -> jax.Array:
        return jax.device_put(array, NamedSharding(meshes[kind.mesh], kind.spec, memory_kind=kind.memory))

    def run(arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        values = {i: placed(a, kind) for i, (a, (_, kind)) in enumerate(zip(arguments, main.arguments, strict=True))}
        for op in main.operations:
            if op.name == "mpmd.transfer":
                values[op.writes[0]] = placed(values[op.reads[0]], op.of[0])
                continue
            made = programs[op.callee].execute_sharded([values[v] for v in op.reads])
            for number, kind, blocks in zip(
                op.writes, op.of, made.disassemble_into_single_device_arrays(), strict=True
            ):
                sharding = NamedSharding(meshes[op.mesh], kind.spec, memory_kind=kind.memory)
                values[number] = jax.make_array_from_single_device_arrays(kind.shape, sharding, blocks)
        return [np.asarray(values[number]) for number in main.returned]

    return run
