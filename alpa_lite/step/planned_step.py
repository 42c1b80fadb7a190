"""The step whose ops a plan numbers: as traced, with the recomputation of its layers.

    read within layers    recomputed values are read in their own layer only            `ReadWithinLayers`
    rematerialise         layers recompute values as their policies say                 `Rematerialise`
    offload               values and optimizer state wait on the host                   `Offload`

Planners, lowering and explanations all make it by `planned_step`, so that they agree on the number of each op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from alpa_lite.program.memo import memoized
from alpa_lite.program.passes import Pass, PassDriver
from alpa_lite.program.phases import StepGraph
from alpa_lite.step.layers import Layers, forward_loops
from alpa_lite.step.offloading import offload
from alpa_lite.step.recomputation import Remat, read_originals_across
from alpa_lite.step.rematerialisation import LayeredStep, rematerialise


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadWithinLayers:
    """The pass after which each layer reads the values that it recomputes itself (`read_originals_across`)."""

    name = "read within layers"

    def apply(self, program: LayeredStep) -> LayeredStep:
        """Return the step rewired; ops and values retain their ids."""
        return replace(program, step=read_originals_across(program.step, program.of_op))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialise:
    """The pass after which layers recompute values in their backward pass (`rematerialise`).

    Attributes:
        remat: policy of each layer.
    """

    remat: tuple[Remat, ...]
    name = "rematerialise"

    def apply(self, program: LayeredStep) -> LayeredStep:
        """Return the step with recomputation."""
        return rematerialise(program.step, program.of_op, self.remat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The pass after which arrays wait in the memory of the host (`offload`).

    Attributes:
        remat: policy of each layer.
        optimizer: whether the state of the optimizer waits there.
    """

    remat: tuple[Remat, ...]
    optimizer: bool
    name = "offload"

    def apply(self, program: LayeredStep) -> LayeredStep:
        """Return the step with copies to the host and back."""
        return offload(program, self.remat, optimizer=self.optimizer)


def planned_step(
    step: StepGraph,
    of_op: Sequence[int | None],
    remat: Sequence[Remat] = (),
    driver: PassDriver | None = None,
    *,
    host_optimizer: bool = False,
) -> LayeredStep:
    """Return the step as it is planned.

    Args:
        step: the step as it was traced.
        of_op: layer of each op of `step`, or None.
        remat: the policy of each layer; () if no layer recomputes anything beyond what the step does itself.
        driver: runs the passes.
        host_optimizer: whether the state of the optimizer waits in the memory of the host.

    Raises:
        PlanError: there are fewer policies than layers.
    """
    passes: tuple[Pass[LayeredStep], ...] = (ReadWithinLayers(),)
    if remat:
        passes = (*passes, Rematerialise(remat=tuple(remat)))
    if host_optimizer or Remat.OFFLOAD in remat:
        passes = (*passes, Offload(remat=tuple(remat), optimizer=host_optimizer))
    if driver is None and len(passes) == 1:
        return _as_written(step, tuple(of_op))
    return (driver or PassDriver()).run(LayeredStep.of(step, of_op), passes)


@memoized
def _as_written(step: StepGraph, of_op: tuple[int | None, ...]) -> LayeredStep:
    # One object, since a search is begun again with another effort, and what is derived from ops is stored with their
    # step. Not so for policies, of which there are many: steps would pile up.
    return PassDriver().run(LayeredStep.of(step, of_op), (ReadWithinLayers(),))


def policies_of(step: StepGraph, layers: Layers, wanted: Sequence[Remat]) -> tuple[Remat, ...]:
    """Return the policy of each layer, or () if no layer recomputes anything.

    The last layer stores everything unless it is a loop.
    """
    # The backward pass of the last layer follows at once: recomputing saves no memory there, but between the trips of
    # a loop it does.
    last = layers.num_layers - 1
    loops = any(layers.of_op[loop] == last for loop in forward_loops(step))
    remat = (*wanted[:last], wanted[last] if loops else Remat.NONE)
    return remat if any(policy is not Remat.NONE for policy in remat) else ()
