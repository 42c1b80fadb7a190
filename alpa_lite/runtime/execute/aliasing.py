"""Decide which buffers of a step are donated, and copy arrays that must not share a donated buffer.

    arguments   XLA must not be passed a buffer twice if it is donated: on several devices it ends the process. The
                repeated ones are copied                                                              `Apart`
    results     an array that a program passes through, from an argument that is not donated or to two results, is
                copied, as `jax.jit` does                                                             `shared_results`

Arrays that the previous step returned share no buffers, and are recognised by identity. The buffers of other arrays are
compared.

Inputs of a task are donated to it, so that results reuse their memory (`donations`):

    arguments      that the caller donates, to the update that is the last to read them
    intermediates  of a micro-batch, to the task that is the last to read them, in every micro-batch

An argument that the caller keeps is never donated, under any buffer name: placing or sending an array that is already
in place returns the array itself. So only arrays that a task made, or that were sent to other devices, count as
intermediates.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence, Set

import jax
from jax.sharding import Sharding

from alpa_lite import _jax
from alpa_lite._jax import TreeLeaf
from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind, Program
from alpa_lite.plan.parts import TaskRole
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.task_specs import Port, TaskSpec
from alpa_lite.program.phases import StepGraph


def copies(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return copies of arrays in the same shardings. Only devices of this process take part."""
    # `device_put` takes only arrays whose devices all belong to this process; of the others each block is copied.
    if all(array.is_fully_addressable for array in arrays):
        # A buffer of its own is the point: without this JAX returns an array that is in place as it is.
        return jax.device_put(list(arrays), [array.sharding for array in arrays], may_alias=False)
    return [_copy_of_blocks(array) for array in arrays]


def _copy_of_blocks(array: jax.Array) -> jax.Array:
    held = [jax.device_put(block, block.sharding, may_alias=False) for block in _jax.blocks(array)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, held, dtype=array.dtype)


class Apart:
    """Copies the arguments of a step that share a buffer with another one, where one of the two is donated."""

    def __init__(
        self,
        leaves: Sequence[jax.ShapeDtypeStruct],
        shardings: Sequence[Sharding],
        donated: Sequence[bool],
        next_of: Mapping[int, int],
    ) -> None:
        """Prepare for arguments with the given shapes, shardings and donation flags.

        `next_of`: for an argument, the number of the result that replaces it in the next step.
        """
        self._donated = donated
        self._groups = [group for group in _alike(leaves, shardings) if any(donated[i] for i in group)]
        watched = [i for group in self._groups for i in group]
        # First the arguments that results replace, then those that the caller keeps, which may be returned too.
        self._replaced = [i for i in watched if donated[i] and i in next_of]
        self._kept = [i for i in watched if not donated[i]]
        self._watched = [*self._replaced, *self._kept, *(i for i in watched if donated[i] and i not in next_of)]
        self._results = [next_of[i] for i in self._replaced]
        self._more_results = [(i, next_of[i]) for i in self._kept if i in next_of]
        self._expected: list[Callable[[], object]] = [_nothing] * len(watched)
        self._returned: list[tuple[int, Callable[[], object]]] = []

    def __call__(self, leaves: Sequence[TreeLeaf]) -> Sequence[TreeLeaf]:
        """Return the arguments, with copies where needed."""
        fresh = [i for i, expected in zip(self._watched, self._expected, strict=True) if expected() is not leaves[i]]
        if not fresh:
            return leaves
        # An argument that the caller keeps may also be the result that replaces it, which shares no buffer either.
        returned = [i for i, result in self._returned if result() is leaves[i]]
        arrays = {i for i in fresh if isinstance(leaves[i], jax.Array)}.difference(returned)
        return self._with_copies(leaves, arrays) if arrays else leaves

    def note(self, leaves: Sequence[TreeLeaf], outputs: Sequence[jax.Array]) -> None:
        """Remember, after a step, arrays that share no buffers: its results, and arguments that were not donated."""
        if self._watched:
            # By weak references: watching an array must not keep it alive.
            self._expected = [
                *[weakref.ref(outputs[i]) for i in self._results],
                *[_reference(leaves[i]) for i in self._kept],
                *[_nothing] * (len(self._watched) - len(self._results) - len(self._kept)),
            ]
            self._returned = [(i, weakref.ref(outputs[number])) for i, number in self._more_results]

    def _with_copies(self, leaves: Sequence[TreeLeaf], fresh: Set[int]) -> Sequence[TreeLeaf]:
        repeated = [i for group in self._groups if not fresh.isdisjoint(group) for i in self._repeated(group, leaves)]
        if not repeated:
            return leaves
        arguments = list(leaves)
        for i, copy in zip(repeated, copies([leaves[i] for i in repeated]), strict=True):
            arguments[i] = copy
        return arguments

    def _repeated(self, group: Sequence[int], leaves: Sequence[TreeLeaf]) -> list[int]:
        """Return the members of a group to copy: never arguments that the caller keeps."""
        taken, repeated = set[Hashable](), list[int]()
        # Those that the caller keeps come first, so that of two arrays with one buffer the donated one is copied.
        for i in sorted(group, key=lambda i: self._donated[i]):
            if isinstance(leaves[i], jax.Array):
                own = {id(leaves[i]), *_jax.addresses(leaves[i])}
                if self._donated[i] and not taken.isdisjoint(own):
                    repeated.append(i)
                taken |= own
        return repeated


def _nothing() -> None:
    """Return None, in place of a weak reference to an array that no longer exists."""


def _reference(value: TreeLeaf) -> Callable[[], object]:
    return weakref.ref(value) if isinstance(value, jax.Array) else _nothing


def _alike(leaves: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Sharding]) -> list[list[int]]:
    """Return the arguments in groups, so that arrays of two groups cannot share a buffer of one shape and dtype."""
    groups: list[tuple[set[Hashable], list[int]]] = []
    for i, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        # The data of one shard is an array of its own, as large as the block, over the same buffer as the whole array.
        forms: set[Hashable] = {(leaf.shape, leaf.dtype), (sharding.shard_shape(leaf.shape), leaf.dtype)}
        members = [i]
        for group in [group for group in groups if not group[0].isdisjoint(forms)]:
            groups.remove(group)
            forms, members = forms | group[0], group[1] + members
        groups.append((forms, members))
    return [members for _, members in groups if len(members) > 1]


def shared_results(program: Program, plan: Plan, step: StepGraph, donated: Sequence[bool]) -> tuple[int, ...]:
    """Return the numbers of outputs that are the same array as another output or as an argument that is not donated."""
    same = sent_in_place(program, plan)
    placed = {b: b.value for i in program.instructions if i.kind == InstructionKind.PLACE for b in i.writes}
    leaf = {v: part.leaf for v, part in zip(step.graph.inputs, step.input_parts, strict=True)}
    taken, shared = set[Buffer | int](), list[int]()
    for number, buffer in enumerate(program.outputs):
        made = same.get(buffer, buffer)
        origin = placed.get(made, made)
        is_retained = made in placed and not (leaf[made.value] < len(donated) and donated[leaf[made.value]])
        if is_retained or origin in taken:
            shared.append(number)
        taken.add(origin)
    return tuple(shared)


def with_copies(results: list[TreeLeaf], numbers: Sequence[int]) -> list[TreeLeaf]:
    """Return the outputs of a program with those at `numbers` copied; outputs on other processes are None."""
    here = [number for number in numbers if results[number] is not None]
    if not here:
        return results
    copied = list(results)
    for number, copy in zip(here, copies([results[number] for number in here]), strict=True):
        copied[number] = copy
    return copied


def donations(program: Program, plan: Plan, step: StepGraph, donated: Sequence[bool]) -> dict[int, tuple[int, ...]]:
    """Return the numbers of the inputs that each task may overwrite. `donated[i]`: the caller donates argument i."""
    facts = _Facts(program, plan, step, donated)
    free_in: dict[int, set[int]] = {}
    for number, instruction in enumerate(program.instructions):
        if instruction.kind == InstructionKind.RUN:
            inputs = range(len(program.tasks[instruction.task].inputs))
            free = {i for i in inputs if facts.is_free(number, instruction, i)}
            # One executable runs all micro-batches: it may overwrite only what is free in each of them.
            free_in[instruction.task] = free_in.get(instruction.task, free) & free
    # JAX warns about a donated buffer that no output can reuse.
    return {task: _reusable(program.tasks[task], sorted(free), step) for task, free in free_in.items() if free}


class _Facts:
    def __init__(self, program: Program, plan: Plan, step: StepGraph, donated: Sequence[bool]) -> None:
        self.program, self.plan, self.donated = program, plan, donated
        self.leaf = dict(zip(step.graph.inputs, (part.leaf for part in step.input_parts), strict=True))
        self.same = sent_in_place(program, plan)
        self.shared = {*self.same, *self.same.values()}
        self.made = self._made()
        self.returned = {self.same.get(buffer, buffer) for buffer in program.outputs}
        self.last: dict[Buffer, tuple[int, int]] = {}
        self.times: Counter[tuple[int, Buffer]] = Counter()
        for number, instruction in enumerate(program.instructions):
            if instruction.kind != InstructionKind.FREE:
                for position, buffer in enumerate(instruction.reads):
                    self.last[self.same.get(buffer, buffer)] = number, position
                    self.times[number, self.same.get(buffer, buffer)] += 1

    def is_free(self, number: int, instruction: Instruction, position: int) -> bool:
        """Return True if nothing reads an input of this instruction later, and the runtime owns its buffer."""
        buffer = instruction.reads[position]
        # An instruction that reads a buffer twice would pass XLA a donated buffer twice.
        if buffer in self.returned or self.last.get(buffer) != (number, position) or self.times[number, buffer] > 1:
            return False
        leaf = self.leaf.get(buffer.value)
        if leaf is None:
            return buffer in self.made and buffer not in self.shared
        given = leaf < len(self.donated) and self.donated[leaf]
        at_home = self.program.homes[buffer.value][0] == buffer.stage
        # Without a task that returns the argument's next value, no result would reuse its buffer.
        return given and at_home and self.program.tasks[instruction.task].kind in (TaskRole.UPDATE, TaskRole.STEP)

    def _made(self) -> set[Buffer]:
        """Return the buffers that the program made itself, or copied to devices on which the source has no block."""
        made: set[Buffer] = set()
        for instruction in self.program.instructions:
            if instruction.kind == InstructionKind.RUN:
                made.update(instruction.writes)
            elif instruction.kind == InstructionKind.SEND:
                source, target = (
                    set(self.plan.stages[s].submesh.devices) for s in (instruction.source_stage, instruction.stage)
                )
                # On a device that both stages share, the transfer may return the very block that the source holds.
                if source.isdisjoint(target):
                    made.update(instruction.writes)
        return made


def sent_in_place(program: Program, plan: Plan) -> dict[Buffer, Buffer]:
    """Return the transfers between stages that share devices, as copy → original.

    The copy may be the very same array, as JAX does not move an array that is in place.
    """
    # A copy of a copy is traced back to the first original.
    same: dict[Buffer, Buffer] = {}
    for instruction in program.instructions:
        if instruction.kind == InstructionKind.SEND:
            stages = (plan.stages[s] for s in (instruction.source_stage, instruction.stage))
            if set.intersection(*(set(stage.submesh.devices) for stage in stages)):
                source = instruction.reads[0]
                same[instruction.writes[0]] = same.get(source, source)
    return same


def _reusable(task: TaskSpec, positions: Sequence[int], step: StepGraph) -> tuple[int, ...]:
    """Return those inputs of a task whose buffer an output can reuse: same shape, dtype, spec and memory.

    Those whose next value is an output come first, and of others of their shape and dtype only those behind them: in
    this order JAX hands out the buffers (`emission.result_order`).
    """

    def layout(port: Port) -> tuple[object, ...]:
        value = step.graph.values[port.value]
        return value.shape, value.dtype, value.on_host, port.spec

    free, next_of = Counter(map(layout, task.outputs)), {old: new for new, old in step.aliases.items()}
    ports = {(port.value, port.spec) for port in task.outputs}
    own = [i for i in positions if (next_of.get(task.inputs[i].value, -1), task.inputs[i].spec) in ports]
    free.subtract(layout(task.inputs[i]) for i in own)
    last = {layout(task.inputs[i])[:2]: i for i in own}
    taken = list(own)
    for position in positions:
        kind = layout(task.inputs[position])
        if free[kind] > 0 and position > last.get(kind[:2], -1):
            free[kind] -= 1
            taken.append(position)
    return tuple(sorted(taken))
