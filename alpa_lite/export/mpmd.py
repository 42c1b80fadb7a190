"""A plan as one module of the MPMD dialect: a function whose values lie on named meshes of devices.

The dialect is part of jaxlib (`jaxlib.mlir.dialects.mpmd`). Each instruction of the plan's program is one operation:

    PLACE                      an argument of the function, such as one micro-batch of an array of the batch
    RUN, ZEROS, CONCAT, ADD    a fragment, which calls the program that runs, on the mesh of its stage
    SEND                       a transfer to the mesh of another stage; a fragment for what is resharded on its own mesh
    FREE                       nothing: a value lives until its last use

An array in the memory of the host has a type that says so (`memory_kind`), as the program that makes it does.

What a step computes of the whole batch before its micro-batches, such as a number of tokens, is a fragment of each
stage that reads it (`_Ahead`); the arrays that it reads are arguments of the function once more, whole.

Equal programs are one function, which all of their fragments call. Stages on the same devices with the same axes share
one mesh.

The origin of a fragment is its stage with a number of transpositions, 0 for the forward and 1 for the backward pass, or
the name of what runs outside of both. `stage` and `call_counter` are the numbers of the stage and the micro-batch. The
parts of a split backward pass have the attributes that the dialect's own pass gives them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, PartitionSpec
from jax.stages import Lowered
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, mpmd, sdy, stablehlo

from alpa_lite import _jax
from alpa_lite._jax import Array
from alpa_lite.errors import PlanError
from alpa_lite.export.degrees import programs_of
from alpa_lite.export.stage_programs import comment_lines, for_platform, lowered_step, step_of
from alpa_lite.lower.emission import BoundaryArray, Emitted, boundary_shape, boundary_spec
from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind
from alpa_lite.plan.parts import StagePlan, TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.program.ir import Graph, Value
from alpa_lite.program.phases import LeafPart
from alpa_lite.runtime.execute.compile import (
    CompileUnit,
    LoweredStep,
    abstract_meshes,
    concat_units,
    emit_function,
    lowered_units,
    task_units,
    zeros_units,
)
from alpa_lite.runtime.execute.run_transfers import moves_on_source
from alpa_lite.sharding.transfer import PlannedTransfer
from alpa_lite.step.split import TracedStep
from alpa_lite.trace.passes.code_motion import Precomputed
from alpa_lite.trace.trace import Traced

_TRANSPOSITIONS: Mapping[TaskRole, tuple[int, ...]] = {
    TaskRole.FORWARD: (0,),
    TaskRole.FORWARD_BACKWARD: (0, 1),
    TaskRole.BACKWARD: (1,),
    TaskRole.INPUT_GRADIENT: (1,),
    TaskRole.WEIGHT_GRADIENT: (1,),
}

_PARTS_OF_BACKWARD: Mapping[TaskRole, str] = {
    TaskRole.INPUT_GRADIENT: "split_keep_transferred",
    TaskRole.WEIGHT_GRADIENT: "split_drop_transferred",
}


def mpmd_module(plan: Plan, platform: str | None = None) -> str:
    """Return the module of a plan; `platform` is "cpu", "cuda" or "tpu", by default this process's.

    `main` takes and returns the arrays of the step as the plan places them. `jax.arg_info` and `jax.result_info` are
    their names; `jax.buffer_donor` marks what the step may overwrite.

    Raises `PlanError` for a plan that a module cannot express: arrays sent from host to host, stages that share only
    some devices or share them with other axes, tasks whose order is decided as they run. Also for a plan from a file,
    and for kernels that JAX lowers only where their devices are.
    """
    traced, step = programs_of(plan).traced, step_of(plan)
    lowered = lowered_step(plan, step)
    _check(lowered)
    ahead = _ahead_of(lowered, step)
    with for_platform(plan, platform) as target:
        functions = _functions(lowered, ahead, target)
    with mlir.make_ir_context() as context, ir.Location.unknown():
        mpmd.register_dialect(context)
        module = _ModuleBuilder(lowered, functions, ahead, traced).build(step.runs)
        module.operation.verify()
        return "\n".join([*comment_lines(plan), module.operation.get_asm()])


def _check(lowered: LoweredStep) -> None:
    """Raise `PlanError` for a plan that the dialect cannot express."""
    if problem := _problem(lowered):
        raise PlanError(f"{lowered.plan.name} has no module of the MPMD dialect: {problem}.")


def _problem(lowered: LoweredStep) -> str:
    """Return a clause on what has no place in a module, and what to do; "" if all has one."""
    plan = lowered.plan
    values = lowered.step.graph.values
    if any(i.kind is InstructionKind.SEND and values[i.reads[0].value].on_host for i in lowered.program.instructions):
        return (
            "a stage reads an array from the memory of another stage's host, and transfers are between devices. Plan "
            "without host_optimizer"
        )
    if lowered.program.segments:
        return (
            f"{plan.schedule.name} decides the order of tasks as they run, and a module has one order. Choose another "
            "schedule"
        )
    owners: dict[int, StagePlan] = {}
    for stage in plan.stages:
        for device in stage.submesh.devices:
            other = owners.setdefault(device, stage)
            if _place(other) != _place(stage):
                return (
                    f"device {device} belongs to two meshes, {other.mesh_shape} on {other.submesh} and "
                    f"{stage.mesh_shape} on {stage.submesh}, and meshes of a topology share none. Choose another "
                    "planner"
                )
    return ""


def _place(stage: StagePlan) -> Hashable:
    return stage.submesh, stage.mesh_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ahead:
    """What a stage computes of the whole batch before its micro-batches.

    Attributes:
        precomputed: the program of the step that does so.
        places: the instructions that place its results on the stage.
        taken: for each of them the number of the result, the dim of its samples, if any, and their first one and their
            number: a micro-batch takes its own rows.
    """

    precomputed: Precomputed
    places: tuple[Instruction, ...]
    taken: tuple[tuple[int, int | None, int, int], ...]

    @property
    def arrays(self) -> list[tuple[int, Value]]:
        """The arrays that it reads: the numbers of leaves of the step, and what they are."""
        graph = self.precomputed.program.graph
        return [(leaf, graph.values[v]) for leaf, v in zip(self.precomputed.leaves, graph.inputs, strict=True)]

    def unit(self, stage: int, mesh: AbstractMesh) -> CompileUnit:
        """Return the program on the mesh of the stage, which has whole arrays on all devices."""
        ins = tuple(
            BoundaryArray(shape=value.shape, dtype=value.dtype, spec=PartitionSpec()) for _, value in self.arrays
        )
        outs = tuple(boundary_spec(place.spec) for place in self.places if place.spec is not None)
        emit = partial(emit_function, self._run, mesh, ins, outs)
        return CompileUnit(name=f"stage {stage} ahead", mesh=mesh, form=("ahead", self.taken, outs), emit=emit)

    def _run(self, *arrays: jax.Array) -> tuple[Array, ...]:
        results = self.precomputed.run(*arrays)
        return tuple(
            results[number]
            if dim is None
            else jax.lax.slice_in_dim(jax.numpy.asarray(results[number]), first, first + size, axis=dim)
            for number, dim, first, size in self.taken
        )


def _ahead_of(lowered: LoweredStep, step: TracedStep) -> Mapping[int, _Ahead]:
    """Return what stages compute of the whole batch, by stage."""
    graph, found = step.graph, dict[int, _Ahead]()
    if step.precomputed is None:
        return found
    # They are the last inputs of the step.
    results = graph.inputs[len(graph.inputs) - len(step.precomputed.program.graph.outputs) :]
    number_of = {value: number for number, value in enumerate(results)}
    places = [i for i in lowered.program.instructions if i.kind is InstructionKind.PLACE]
    for stage in range(len(lowered.plan.stages)):
        own = tuple(each for each in places if each.stage == stage and each.writes[0].value in number_of)
        taken: list[tuple[int, int | None, int, int]] = []
        for buffer in (each.writes[0] for each in own):
            dim = step.step.batch_dims[buffer.value] if buffer.microbatch is not None else None
            size = graph.values[buffer.value].shape[dim] if dim is not None else 0
            taken.append((number_of[buffer.value], dim, (buffer.microbatch or 0) * size, size))
        if own:
            found[stage] = _Ahead(precomputed=step.precomputed, places=own, taken=tuple(taken))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Function:
    """A program that fragments call: the name of its function, and the program as emitted and as lowered."""

    name: str
    emitted: Emitted
    lowered: Lowered

    @property
    def outs(self) -> Sequence[PartitionSpec]:
        """The specs of the results."""
        outs = self.emitted.outs
        return (outs,) if isinstance(outs, PartitionSpec) else outs


def _functions(lowered: LoweredStep, ahead: Mapping[int, _Ahead], platform: str) -> Mapping[Hashable, _Function]:
    """Return the programs of a step, lowered without devices, by what `_key` returns for their instructions.

    Those of `ahead` are called ("ahead", stage).
    """
    program, step, meshes = lowered.program, lowered.step, abstract_meshes(lowered.plan)
    units: dict[Hashable, CompileUnit] = {}
    units.update({(InstructionKind.RUN, n): u for n, u in enumerate(task_units(lowered, meshes, {}))})
    units.update({(InstructionKind.ZEROS, n): u for n, u in zeros_units(program, step, meshes).items()})
    units.update({(InstructionKind.CONCAT, b): u for b, u in concat_units(program, step, meshes).items()})
    units.update({("ahead", stage): each.unit(stage, meshes[stage]) for stage, each in ahead.items()})
    for each in program.instructions:
        if each.transfer is not None and each.transfer.resolve:
            unit = _moves_unit(each, each.transfer, step.graph, meshes[each.source_stage])
            units.setdefault(_key(each, step.graph), unit)
    made: dict[int, _Function] = {}
    # A fragment passes all inputs of its program by their positions.
    pairs = lowered_units(units.values(), platform, keep_unused=True)
    for unit, (emitted, each) in zip(units.values(), pairs, strict=True):
        made.setdefault(id(each), _Function(name=re.sub(r"\W+", "_", unit.name), emitted=emitted, lowered=each))
    return {key: made[id(each)] for key, (_, each) in zip(units, pairs, strict=True)}


def _key(instruction: Instruction, graph: Graph) -> Hashable:
    """Return what instructions of one program have in common."""
    planned = instruction.transfer
    if planned is not None:
        dtype = graph.values[instruction.reads[0].value].dtype
        return instruction.kind, dtype, planned.array, planned.source, planned.resolve
    if instruction.kind in (InstructionKind.RUN, InstructionKind.ZEROS):
        return instruction.kind, instruction.task
    return InstructionKind.CONCAT, instruction.writes[0]


def _moves_unit(send: Instruction, planned: PlannedTransfer, graph: Graph, mesh: AbstractMesh) -> CompileUnit:
    """Return the program of what a SEND reshards on the mesh that it sends from."""
    (buffer,), source = send.reads, planned.source.spec
    dtype = graph.values[buffer.value].dtype
    array = BoundaryArray(
        shape=boundary_shape(planned.array.shape, source, dict(mesh.shape)),
        # Typed keys are sent as their words.
        dtype="uint32" if dtype.startswith("key<") else dtype,
        spec=boundary_spec(source),
    )
    outs = boundary_spec(planned.sent_spec), PartitionSpec()
    emit = partial(emit_function, moves_on_source(planned, mesh), mesh, (array,), outs)
    return CompileUnit(name=f"moves of {buffer}", mesh=mesh, form=("moves", array, planned.resolve), emit=emit)


class _ModuleBuilder:
    """Builder of a module in the current MLIR context: the functions first, then `main`, instruction by instruction."""

    def __init__(
        self,
        lowered: LoweredStep,
        functions: Mapping[Hashable, _Function],
        ahead: Mapping[int, _Ahead],
        traced: Traced,
    ) -> None:
        self.lowered, self.functions, self.ahead, self.traced = lowered, functions, ahead, traced
        self.program, self.graph, self.stages = lowered.program, lowered.step.graph, lowered.plan.stages
        self.input_number = {value: number for number, value in enumerate(self.graph.inputs)}
        self.module = ir.Module.create()
        self.module.operation.attributes["sym_name"] = _string(re.sub(r"\W+", "_", lowered.plan.function))
        self.symbols: dict[str, str] = {}
        self.symbol_of = [self._symbol(_mesh(stage)) for stage in self.stages]
        numbers: dict[Hashable, list[int]] = {}
        for number, stage in enumerate(self.stages):
            numbers.setdefault(_place(stage), []).append(number)
        self.meshes = ["_".join(map(str, ["stage", *numbers[_place(stage)]])) for stage in self.stages]
        self.types = {each: self._add(each) for each in dict.fromkeys(functions.values())}
        self.values: dict[Buffer, Any] = {}

    def build(self, runs: Mapping[int, tuple[int, int]]) -> Any:
        """Return the module with `main`. `runs`: as in `TracedStep`."""
        made_ahead = {place.writes[0] for each in self.ahead.values() for place in each.places}
        places = [
            each
            for each in self.program.instructions
            if each.kind is InstructionKind.PLACE and each.writes[0] not in made_ahead
        ]
        places.sort(key=lambda each: (self.input_number[each.writes[0].value], each.microbatch or 0, each.stage))
        whole = [(stage, leaf, value) for stage, each in self.ahead.items() for leaf, value in each.arrays]
        arguments = [self._placed(each) for each in places]
        arguments += [self._array(stage, value.shape, value.dtype, PartitionSpec()) for stage, _, value in whole]
        with ir.InsertionPoint(self.module.body):
            main = func.FuncOp("main", (arguments, []), visibility="public")
        block = main.add_entry_block()
        given: list[Any] = list(block.arguments)
        self.values.update({each.writes[0]: value for each, value in zip(places, given, strict=False)})
        with ir.InsertionPoint(block):
            for stage in self.ahead:
                here = [value for value, (at, _, _) in zip(given[len(places) :], whole, strict=True) if at == stage]
                self._emit_ahead(stage, here)
            for instruction in self.program.instructions:
                self._emit(instruction)
            results = [self.values[buffer] for buffer in self.program.outputs]
            func.ReturnOp(results)
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(arguments, [r.type for r in results]))
        main.attributes["topology"] = self._topology()
        attributes = [self._argument(each, runs) for each in places]
        attributes += [self._leaf_attributes(leaf, self._leaf_name(leaf), {}) for _, leaf, _ in whole]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
        names = [_part_name(self.traced.outputs.names[part.leaf], part) for part in self.lowered.step.output_parts]
        infos = [
            ir.DictAttr.get({"jax.result_info": _string(name), **self._memory(buffer.value)})
            for name, buffer in zip(names, self.program.outputs, strict=True)
        ]
        main.attributes["res_attrs"] = ir.ArrayAttr.get(infos)
        return self.module

    def _add(self, function: _Function) -> Any:
        """Add the functions of a lowered program to the module and return the type of its main one."""
        lowered: Any = function.lowered.compiler_ir("stablehlo")
        # Each program was lowered in a context of its own.
        source = ir.Module.parse(lowered.operation.get_asm())
        found: list[Any] = list(source.body.operations)
        main: Any = None
        for each in found:
            symbol = ir.SymbolTable.get_symbol_name(each).value
            if isinstance(each, sdy.MeshOp):
                ir.SymbolTable.replace_all_symbol_uses(symbol, self._symbol(each.mesh), source.operation)
                continue
            name = function.name if symbol == "main" else f"{function.name}.{symbol}"
            ir.SymbolTable.replace_all_symbol_uses(symbol, name, source.operation)
            ir.SymbolTable.set_symbol_name(each, name)
            ir.SymbolTable.set_visibility(each, "private")
            if symbol == "main":
                main = each
        assert main is not None, "JAX names the entry of a module so"
        # Who calls it donates and names arguments.
        for attributes in ("arg_attrs", "res_attrs"):
            if attributes in main.attributes:
                main.attributes[attributes] = ir.ArrayAttr.get(list(map(_sharding_alone, main.attributes[attributes])))
        for each in found:
            if not isinstance(each, sdy.MeshOp):
                each.operation.detach_from_parent()
                self.module.body.append(each)
        return main.type

    def _symbol(self, mesh: Any) -> str:
        """Return the symbol of a logical mesh, which the module declares when it is first used."""
        if str(mesh) not in self.symbols:
            self.symbols[str(mesh)] = f"logical_mesh_{len(self.symbols)}"
            with ir.InsertionPoint.at_block_begin(self.module.body):
                sdy.MeshOp(self.symbols[str(mesh)], mesh)
        return self.symbols[str(mesh)]

    def _topology(self) -> Any:
        places = {name: _mesh(stage) for name, stage in zip(self.meshes, self.stages, strict=True)}
        # A topology has the meshes without the name of their kind of attribute.
        bare = {name: str(mesh).removeprefix("#sdy.mesh") for name, mesh in places.items()}
        listed = ", ".join(f'<"{name}" : {mesh}>' for name, mesh in bare.items())
        return ir.Attribute.parse(f"#mpmd.topology<{listed}>")

    def _on_mesh(self, stage: int, tensor: Any, spec: PartitionSpec, on_host: bool = False) -> Any:
        """Return the type of an array on the mesh of a stage, or in the memory of its host."""
        dims = [axes if isinstance(axes, tuple) else () if axes is None else (axes,) for axes in spec]
        # The words of a typed key are one more dim.
        dims += [()] * (tensor.rank - len(dims))
        shown = ", ".join("{" + ", ".join(f'"{axis}"' for axis in axes) + "}" for axes in dims)
        sharding = f"<@{self.symbol_of[stage]}, [{shown}]>"
        memory = f', memory_kind="{_jax.HOST_MEMORY}"' if on_host else ""
        return ir.Type.parse(f'!mpmd.mesh_tensor<"{self.meshes[stage]}", {tensor}, sharding={sharding}{memory}>')

    def _placed(self, place: Instruction) -> Any:
        """Return the type of an argument."""
        value, spec = self.graph.values[place.writes[0].value], place.spec
        assert spec is not None, "every PLACE has a spec"
        shape = boundary_shape(value.shape, spec, self.stages[place.stage].mesh_shape.axis_sizes)
        return self._array(place.stage, shape, value.dtype, boundary_spec(spec), value.on_host)

    def _array(self, stage: int, shape: Sequence[int], dtype: str, spec: PartitionSpec, on_host: bool = False) -> Any:
        """Return the type of an array of the step on the mesh of a stage."""
        array = _jax.struct(tuple(shape), dtype)
        # Typed keys are the words that store them.
        stored = jax.eval_shape(jax.random.key_data, array) if dtype.startswith("key<") else array
        tensor = ir.RankedTensorType.get(stored.shape, mlir.dtype_to_ir_type(np.dtype(stored.dtype)))
        return self._on_mesh(stage, tensor, spec, on_host)

    def _argument(self, place: Instruction, runs: Mapping[int, tuple[int, int]]) -> Any:
        """Return the attributes of an argument: its name, and whether the caller gives up its buffer."""
        (buffer,) = place.writes
        leaf = self.lowered.step.input_parts[self.input_number[buffer.value]].leaf
        # With the rows of a part.
        is_captured = leaf >= len(self.traced.inputs.names)
        info = self._leaf_name(leaf) if is_captured else self.graph.values[buffer.value].name
        if place.microbatch is not None:
            info += f", micro-batch {place.microbatch}"
            info += f" of each of {runs[leaf][1]} runs" if leaf in runs else ""
        return self._leaf_attributes(leaf, info, self._memory(buffer.value))

    def _memory(self, value: int) -> dict[str, Any]:
        """Return the attribute of an argument or result in the memory of the host: passes read no types of these."""
        return {"mhlo.memory_kind": _string(_jax.HOST_MEMORY)} if self.graph.values[value].on_host else {}

    def _leaf_name(self, leaf: int) -> str:
        """Return the name of an argument leaf, or of a captured array behind them."""
        names = self.traced.inputs.names
        return names[leaf] if leaf < len(names) else f"captured array {leaf - len(names)}"

    def _leaf_attributes(self, leaf: int, info: str, memory: Mapping[str, Any]) -> Any:
        donated = self.traced.inputs.donated
        attributes = {"jax.arg_info": _string(info), **memory}
        if leaf < len(donated) and donated[leaf]:
            attributes["jax.buffer_donor"] = ir.BoolAttr.get(True)
        return ir.DictAttr.get(attributes)

    def _emit_ahead(self, stage: int, arrays: Sequence[Any]) -> None:
        """Append the fragment of what a stage computes of the whole batch."""
        places, origin = self.ahead[stage].places, [_origin(f"stage {stage} ahead")]
        fragment = self._fragment(self.functions["ahead", stage], arrays, len(places), stage, origin)
        made = (place.writes[0] for place in places)
        self.values.update(zip(made, fragment.results, strict=True))

    def _emit(self, instruction: Instruction) -> None:
        """Append the operation of an instruction to `main`."""
        kind = instruction.kind
        if kind is InstructionKind.RUN:
            self._run(instruction)
        elif kind is InstructionKind.SEND:
            self._send(instruction)
        elif kind in (InstructionKind.ZEROS, InstructionKind.CONCAT, InstructionKind.ADD, InstructionKind.MEAN):
            origin = [_origin(f"stage {instruction.stage} {kind.lower()}")]
            fragment = self._calling(instruction, instruction.stage, origin)
            self.values.update(zip(instruction.writes, fragment.results, strict=True))
        else:
            assert kind in (InstructionKind.PLACE, InstructionKind.FREE), f"{kind} comes without a fixed order alone"

    def _run(self, run: Instruction) -> None:
        task, transposed = self.program.tasks[run.task], _TRANSPOSITIONS.get(self.program.tasks[run.task].kind)
        if transposed is None:
            origin = [_origin(task.name)]
        else:
            origin = [_origin(f"stage {task.stage}", count) for count in transposed]
        fragment = self._calling(run, run.stage, origin)
        if run.microbatch is not None:
            counter = ir.IntegerType.get_unsigned(32)
            fragment.attributes["call_counter"] = ir.IntegerAttr.get(counter, run.microbatch)
        if task.kind in _PARTS_OF_BACKWARD:
            fragment.attributes[_PARTS_OF_BACKWARD[task.kind]] = ir.UnitAttr.get()
        self.values.update(zip(run.writes, fragment.results, strict=True))

    def _send(self, send: Instruction) -> None:
        (source,), (target,), planned = send.reads, send.writes, send.transfer
        assert planned is not None and send.spec is not None, "every SEND has both"
        value = self.values[source]
        if planned.resolve:
            origin = [_origin(f"stage {send.source_stage} reshard")]
            value = self._calling(send, send.source_stage, origin).results[0]
        if not planned.in_place:
            landed = self._on_mesh(send.stage, _tensor(value.type), boundary_spec(send.spec))
            value = mpmd.TransferOp(landed, value).result
        self.values[target] = value

    def _calling(self, instruction: Instruction, stage: int, origin: Sequence[Any]) -> Any:
        """Append a fragment on the mesh of a stage that calls the program of an instruction."""
        function = self.functions[_key(instruction, self.graph)]
        operands = [self.values[buffer] for buffer in instruction.reads]
        return self._fragment(function, operands, len(instruction.writes), stage, origin, instruction.microbatch or 0)

    def _fragment(
        self,
        function: _Function,
        operands: Sequence[Any],
        num_results: int,
        stage: int,
        origin: Sequence[Any],
        microbatch: int = 0,
    ) -> Any:
        """Append a fragment on the mesh of a stage that calls a program."""
        callee, emitted = self.types[function], function.emitted
        takes_number = emitted.takes_microbatch
        # Without donations a program returns what its instruction writes before a token, in this order.
        place = {number: position for position, number in enumerate(emitted.order)}
        written = [place.get(number, number) for number in range(num_results)]
        types = [self._on_mesh(stage, callee.results[i], function.outs[i], i in emitted.hosted) for i in written]
        fragment = mpmd.FragmentOp(types, operands, ir.ArrayAttr.get(origin), self.meshes[stage], stage_id=stage)
        block = fragment.region.blocks.append(*callee.inputs[: len(callee.inputs) - takes_number])
        with ir.InsertionPoint(block):
            inputs: list[Any] = list(block.arguments)
            if takes_number:
                number: Any = np.array(microbatch, np.int32)
                inputs.append(stablehlo.constant(ir.DenseElementsAttr.get(number)))
            results = func.CallOp(callee.results, function.name, inputs).results
            mpmd.ReturnOp([results[i] for i in written])
        return fragment


def _mesh(stage: StagePlan) -> Any:
    return sdy.MeshAttr.get([sdy.MeshAxisAttr.get(name, size) for name, size in stage.mesh_shape.axis_sizes.items()])


def _part_name(name: str, part: LeafPart) -> str:
    """Return the name of a result, with the rows of the leaf that it holds."""
    return name if part.rows is None else f"{name}[{part.rows[0]}:{part.rows[1]}]"


def _tensor(on_mesh: Any) -> Any:
    """Return the type of an array without its mesh, which the bindings of the dialect do not offer."""
    shaped = ir.ShapedType(on_mesh)
    return ir.RankedTensorType.get(shaped.shape, shaped.element_type)


def _string(text: str) -> Any:
    return ir.StringAttr.get(text)


def _origin(name: str, transpositions: int = 0) -> Any:
    return mpmd.UserOriginAttr.get(name, transpositions)


def _sharding_alone(attributes: Any) -> Any:
    """Return the attributes of an argument or result of a function without all but its sharding."""
    return ir.DictAttr.get({each.name: each.attr for each in attributes if each.name == "sdy.sharding"})
