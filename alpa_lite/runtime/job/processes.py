"""The processes of a job: which devices belong to each, and in which order they launch programs.

Each process can describe all devices and arrays, but holds only the blocks on its own devices. An array without
a block on this process is a handle: shape, dtype and sharding (`handle`).

No order of launches may deadlock (`verify_order`), and the order must survive on the CPU client (`in_turn`):

    order(p) = the instructions that process p takes part in, in the order in which it launches them      `orders`
    an instruction is done when all participants have reached it and all its inputs are written     `verify_order`

Here a process reaches an instruction when those before it are done. Devices may run more at a time, since programs that
share a device are launched in this order; so if all get done here, they do there. Success is certain when every process
follows one list: all participants have reached the first of the remaining instructions.

XLA's CPU client does not keep the order of programs that span processes by itself (`in_turn`). Launches on one device
of this process stay in order among themselves, and so do launches on several. But a launch on one device does not wait
for one on several, or vice versa (docs/decisions/0005): it may overtake, and messages of two programs to the same
devices of other processes get mixed up. So before a launch of the other kind, all earlier launches are awaited. This
cannot deadlock: all processes launch in one order, and no launch needs a later one. Other platforms run programs that
share a device in the order of their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from alpa_lite._jax import Device
from alpa_lite.errors import VerificationError
from alpa_lite.plan.instructions import Buffer, Instruction, InstructionKind, Program
from alpa_lite.runtime.job.activity import Token
from alpa_lite.runtime.job.shutdown import is_recoverable


def is_here(device: Device) -> bool:
    """Return True if a device belongs to this process."""
    return device.process_index == jax.process_index()


def any_here(devices: Iterable[Device]) -> bool:
    """Return True if this process takes part in what runs on these devices."""
    return any(map(is_here, devices))


def all_here(devices: Iterable[Device]) -> bool:
    """Return True if no other process takes part."""
    return all(map(is_here, devices))


def devices_of(mesh: Mesh | AbstractMesh) -> tuple[Device, ...]:
    """Return the devices of a mesh, row-major."""
    assert isinstance(mesh, Mesh), "an array that exists lies on devices"
    return tuple(mesh.devices.flat)


def processes_of(devices: Iterable[Device]) -> tuple[int, ...]:
    """Return the numbers of the processes that devices belong to."""
    return tuple(sorted({device.process_index for device in devices}))


def host_rows(devices: Sequence[Device]) -> list[list[Device]]:
    """Return the devices of each host (process), hosts in the order of their first device."""
    rows: dict[int, list[Device]] = {}
    for device in devices:
        rows.setdefault(device.process_index, []).append(device)
    return list(rows.values())


def host_by_host(devices: Sequence[Device]) -> list[Device]:
    """Return the devices in the order in which plans number them."""
    return [device for row in host_rows(devices) for device in row]


def handle(shape: Sequence[int], dtype: DTypeLike, sharding: Sharding) -> jax.Array:
    """Return an array without blocks on this process, which lies on devices of other processes."""
    # The dtype has to be given, as there is no block to take it from.
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, [], dtype=dtype)


def batch_sharding() -> NamedSharding:
    """Return the sharding of a batch of which each process provides its rows, the first process the first ones.

    `jax.make_array_from_process_local_data(alpa_lite.batch_sharding(), rows)` makes the batch of the job, whatever the
    plan. Each process provides equally many rows. In a job of one process that is the whole batch on one device.
    """
    # One device per process, since each provides one part; sorted, so that all make the same mesh.
    first = [row[0] for row in host_rows(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))]
    return NamedSharding(Mesh(np.array(first), ("process",)), PartitionSpec("process"))


def participants(instruction: Instruction, processes: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the processes that take part. `processes`: of each stage. Any process may hold a part of an argument."""
    if instruction.kind == InstructionKind.PLACE:
        return frozenset(process for stage in processes for process in stage)
    # A transfer is launched by the processes at both of its ends.
    stages = {instruction.stage} | ({instruction.source_stage} if instruction.kind == InstructionKind.SEND else set())
    return frozenset(process for stage in stages for process in processes[stage])


def orders(program: Program, processes: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Return for each process the numbers of the instructions that it launches."""
    launched: dict[int, list[int]] = {process: [] for stage in processes for process in stage}
    for number, instruction in enumerate(program.instructions):
        # A FREE launches nothing, so that it has no place in the order.
        if instruction.kind != InstructionKind.FREE:
            for process in participants(instruction, processes):
                launched[process].append(number)
    return launched


def verify_order(
    program: Program, processes: Sequence[Sequence[int]], launched: Mapping[int, Sequence[int]] | None = None
) -> None:
    """Raise `VerificationError` unless all instructions get done. `launched`: default `orders`."""
    # Simulate all processes: repeatedly finish the instructions that all their participants have reached.
    queues = {process: list(order) for process, order in (launched or orders(program, processes)).items()}
    at, written = dict.fromkeys(queues, 0), set[Buffer]()
    waiting = {process for process, queue in queues.items() if queue}
    while waiting:
        # Only the heads of the queues: an instruction behind one of them has to wait for it anyway.
        ready = {number for process in waiting if _is_ready(number := queues[process][at[process]], program, written)}
        done = [number for number in ready if _all_there(number, program, processes, queues, at)]
        if not done:
            raise VerificationError(_circle(program, queues, at, waiting))
        for number in done:
            instruction = program.instructions[number]
            written.update(instruction.writes)
            for process in participants(instruction, processes):
                at[process] += 1
                if at[process] == len(queues[process]):
                    waiting.discard(process)


def _is_ready(number: int, program: Program, written: set[Buffer]) -> bool:
    return all(buffer in written for buffer in program.instructions[number].reads)


def _all_there(
    number: int,
    program: Program,
    processes: Sequence[Sequence[int]],
    queues: Mapping[int, Sequence[int]],
    at: Mapping[int, int],
) -> bool:
    taking = participants(program.instructions[number], processes)
    return all(at[p] < len(queues[p]) and queues[p][at[p]] == number for p in taking)


def _circle(program: Program, queues: Mapping[int, Sequence[int]], at: Mapping[int, int], waiting: set[int]) -> str:
    heads = ((process, queues[process][at[process]]) for process in sorted(waiting))
    told = "; ".join(f"process {p} at instruction {n} ({program.instructions[n]})" for p, n in heads)
    return f"The processes of this job would wait for each other for ever: {told}."


Launchable = Callable[..., Sequence[Any]]
"""A compiled program as a function of arrays. Its last result is its `Token`, whose methods JAX does not declare."""

_MOST_PENDING = 64


class Turns:
    """Allows launches of only one kind at a time."""

    def __init__(self) -> None:
        """Start without launches."""
        self._alone = False
        self._pending: list[Token] = []

    def take(self, *, alone: bool) -> None:
        """Prepare for a launch; `alone`: on one device of this process."""
        if alone != self._alone:
            for token in self._pending:
                _await(token)
            self._pending.clear()
            self._alone = alone

    def launched(self, token: Token) -> None:
        """Record the token of a launch."""
        self._pending.append(token)
        if len(self._pending) > _MOST_PENDING:
            # Tokens of finished launches are dropped now and then, so that the list stays short.
            self._pending = [each for each in self._pending if not each.is_ready()]


def _await(token: Token) -> None:
    """Wait for a launch. Where a job goes on after losses, a transfer with a process that died may have failed."""
    try:
        jax.block_until_ready(token)
    except (ValueError, jax.errors.JaxRuntimeError):
        if not is_recoverable():
            raise


_launches = Turns()
"""The launches of this process, shared by all its steps."""


def in_turn(program: Launchable, devices: Sequence[Device]) -> Launchable:
    """Return a compiled program, whose last result is its token, that respects the order; unchanged if it does."""
    if all_here(devices) or not any_here(devices) or devices[0].platform != "cpu":
        return program
    # The two kinds of launches that XLA's CPU client keeps in order only among themselves.
    alone = sum(map(is_here, devices)) == 1

    def run(*arrays: jax.Array) -> Sequence[Any]:
        _launches.take(alone=alone)
        results = program(*arrays)
        _launches.launched(results[-1])
        return results

    return run
