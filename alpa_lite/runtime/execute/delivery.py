"""Deliver small results of a step to every process of a job: `float(loss)` works on all of them.

    which     results of at most `MAX_BYTES` that some process could not read, except arrays of the state   `wanted`
    gather    on the stage that has a result, if it is split there
    deliver   one program over one device of each process, for all results of a step

Scalars of the state (a step counter) are delivered too; the next step takes them from the process's own device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa_lite import _jax
from alpa_lite.runtime.execute.exchange import AXIS, Blanks, joined, together, token
from alpa_lite.runtime.job.launch_order import in_turn
from alpa_lite.runtime.job.processes import any_here, devices_of, is_here, processes_of

MAX_BYTES = 1 << 16
"""Largest result, in bytes, that is delivered; larger ones stay on the devices that computed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A result of the step, by its number, in its original sharding; `is_state`: it is an argument of the next step."""

    number: int
    array: jax.ShapeDtypeStruct
    is_state: bool

    @property
    def sharding(self) -> NamedSharding:
        """The sharding in which the result is computed."""
        sharding = self.array.sharding
        assert isinstance(sharding, NamedSharding)
        return sharding


def wanted(result: Result) -> bool:
    """Return True if the result is to be delivered."""
    shape, dtype = result.array.shape, result.array.dtype
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return False
    small = prod(shape) * dtype.itemsize <= MAX_BYTES
    readable = result.sharding.is_fully_replicated and _count(result) == jax.process_count()
    return small and not readable and (not result.is_state or not shape)


def _count(result: Result) -> int:
    return len(processes_of(devices_of(result.sharding.mesh)))


class Delivery:
    """The delivery of a step's results, compiled on all processes of the job; `devices`: of the job."""

    def __init__(self, results: Sequence[Result], devices: Sequence[Any], blanks: Blanks) -> None:
        """Compile the delivery. Collective: all processes must call this. `results`: the results to deliver."""
        self.results = tuple(results)
        if not self.results:
            return
        first = {device.process_index: device for device in reversed(devices)}
        processes = sorted(first)
        mesh = Mesh(np.array([first[p] for p in processes]), (AXIS,))
        self.mine = first[jax.process_index()]
        self.owners = [devices_of(result.sharding.mesh)[0] for result in self.results]
        places = [processes.index(owner.process_index) for owner in self.owners]
        whole = NamedSharding(mesh, PartitionSpec())
        self._avals = [jax.ShapeDtypeStruct(r.array.shape, r.array.dtype, sharding=whole) for r in self.results]
        self._blanks = [blanks.get(aval.shape, aval.dtype, self.mine) for aval in self._avals]
        self._gather = [_gathering(result) for result in self.results]

        def deliver(*blocks: Any) -> Any:
            return (*(lax.all_gather(x, AXIS)[at] for x, at in zip(blocks, places, strict=True)), token())

        # Each process contributes a different block of an array declared replicated; the program makes them equal.
        specs = (PartitionSpec(),) * len(self.results)
        program = jax.shard_map(
            deliver, mesh=mesh, in_specs=specs, out_specs=(*specs, PartitionSpec()), check_vma=False
        )
        self._deliver = in_turn(_jax.compiled(jax.jit(program).lower(*self._avals)), devices_of(mesh))
        together(devices_of(mesh), lambda: self._deliver(*map(self._shown, self._avals, self._blanks)))

    def __call__(self, leaves: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return all results of a step, the small ones delivered, and the program's token."""
        found, shown = list(leaves), list[Any]()
        for result, gather, owner, aval, blank in zip(
            self.results, self._gather, self.owners, self._avals, self._blanks, strict=True
        ):
            array = leaves[result.number]
            if gather is not None:
                array, _ = gather(array)
            shown.append(self._shown(aval, self._block(array, owner) if is_here(owner) else blank))
        *delivered, done = self._deliver(*shown)
        for result, array in zip(self.results, delivered, strict=True):
            found[result.number] = array
        return found, done

    def _block(self, array: Any, owner: Any) -> Any:
        """Return the block of one device of this process, on the device that it is delivered from."""
        (block,) = (block for block in _jax.blocks(array) if owner in block.devices())
        return block if owner == self.mine else jax.device_put(block, self.mine)

    @staticmethod
    def _shown(aval: jax.ShapeDtypeStruct, block: Any) -> Any:
        return joined(aval, [block])


def _gathering(result: Result) -> Callable[[Any], Any] | None:
    """Return a function that replicates a result on its stage; None if it is replicated or not on this process."""
    sharding = result.sharding
    if sharding.is_fully_replicated or not any_here(devices_of(sharding.mesh)):
        return None
    whole = NamedSharding(sharding.mesh, PartitionSpec())
    gather = _jax.compiled(jax.jit(lambda x: (x, token()), out_shardings=(whole, whole)).lower(result.array))
    return in_turn(gather, devices_of(sharding.mesh))
