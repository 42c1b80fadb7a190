"""PipeDream's planner: the stages and their replicas with which a pipeline takes the least time per micro-batch.

Narayanan et al., PipeDream (SOSP 2019). Layers have compute seconds c (both passes), bytes of parameters w and bytes of
activations a. A state is a set of layers that is closed under predecessors (`states_of`); a stage is what one state has
and a smaller one lacks. Machines are grouped in levels, each with a number of members M and a bandwidth B in bytes per
second: the devices of a host, then hosts. C, W and a are those of a stage and of the state that it ends at.

Of a stage on m of the members of a level                                                           `_replicated`

    published code    T(m) = (C + 4 (m - 1) W / (B m)) / m             an unsplit range pays its last term divided by
                                                                       the members of the level below
    paper             T(m) = max(C, 2 (m - 1) W / B) / m

and of the layers up to state j on m members, the last stage being what state k lacks               `_level_plan`

    A(j, m)  =  min of  T(m)  and, over k < j and m' < m,  max(A(k, m - m'), T(m') of the stage, s)

with the transfer s = 2 a / (B m') at the stage's input and output in the published code if an activation compression
ratio is given (divided by it), and s = 2 a / B at its input in the paper. Above the lowest level C is the optimum of
the level below for the stage on all of its members. Of equal plans the first stays: unsplit, then small k, small m'.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from alpa_lite.errors import PlanError

MOST_STATES = 20_000
"""The number of states from which on a graph is refused: wide graphs have exponentially many."""


class PipeDreamFormula(Enum):
    """The two forms of the planner."""

    REPO = "repo"
    """The published code: gradients are exchanged after the computation."""
    PAPER = "paper"
    """The paper: gradients are exchanged during the computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledLayer:
    """What a layer takes for one micro-batch.

    Attributes:
        seconds: compute seconds of its forward and backward pass on one device.
        activation_bytes: bytes of its output.
        parameter_bytes: bytes of its parameters.
    """

    seconds: float
    activation_bytes: float = 0.0
    parameter_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """A graph of layers.

    Attributes:
        layers: the layers, each after its predecessors.
        edges: pairs of a layer and one that reads its output.
    """

    layers: tuple[ProfiledLayer, ...]
    edges: tuple[tuple[int, int], ...]

    @classmethod
    def chain(cls, layers: Sequence[ProfiledLayer]) -> LayerProfile:
        """Return layers each of which reads the one before."""
        return cls(layers=tuple(layers), edges=tuple((i, i + 1) for i in range(len(layers) - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLevel:
    """Machines that are connected alike.

    Attributes:
        count: number of members; above the lowest level each is a group of machines.
        bytes_per_second: bandwidth between members.
    """

    count: int
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedStage:
    """A stage of the pipeline.

    Attributes:
        layers: its layers.
        states: the states that it begins after and ends at, as `[first, end)`; in a chain the layers themselves.
        replicas: machines that run it.
        seconds: compute seconds of one micro-batch on one machine.
    """

    layers: tuple[int, ...]
    states: tuple[int, int]
    replicas: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedStages:
    """The planner's answer.

    Attributes:
        stages: stages from the input on.
        seconds: seconds per micro-batch of the slowest stage or transfer.
        one_machine_seconds: the same of one machine.
        data_parallel_seconds: the same of data parallelism on all machines.
    """

    stages: tuple[ReplicatedStage, ...]
    seconds: float
    one_machine_seconds: float
    data_parallel_seconds: float


Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class States:
    """The states of a profile, each after all of its subsets.

    Attributes:
        members: the layers of each state, as bits.
        seconds: compute seconds of all layers of each state; `parameter_bytes` likewise.
        activation_bytes: bytes that each state hands on: outputs of its layers that others read, and of its last ones.
        before: for each state, the states that are subsets of it.
    """

    members: tuple[int, ...]
    seconds: Array
    parameter_bytes: Array
    activation_bytes: Array
    before: tuple[NDArray[np.intp], ...]


def states_of(profile: LayerProfile) -> States:
    """Return the states of a profile that begin at its first layer. Raises `PlanError` if there are too many."""
    count = len(profile.layers)
    predecessors, readers = [0] * count, [0] * count
    for a, b in profile.edges:
        if a >= b:
            raise PlanError(f"Layer {b} of a profile reads layer {a}, but each layer has to come after its inputs.")
        predecessors[b] |= 1 << a
        readers[a] |= 1 << b
    closed = [1 << layer for layer in range(count)]
    for layer in range(count):
        for other in _bits(predecessors[layer]):
            closed[layer] |= closed[other]
    # Other inputs join where they are read: a state without the first layer would begin a pipeline twice.
    found, waiting = {closed[0]}, [closed[0]]
    while waiting:
        state = waiting.pop()
        for layer in range(count):
            grown = state | closed[layer]
            if grown not in found and predecessors[layer] & state:
                found.add(grown)
                waiting.append(grown)
        if len(found) > MOST_STATES:
            raise PlanError(
                f"A graph of {count} layers has more than {MOST_STATES} ways to be cut in two. Merge branches into "
                "single layers."
            )
    members = tuple(sorted(found, key=lambda state: (state.bit_count(), state)))
    return States(
        members=members,
        seconds=np.array([sum(profile.layers[i].seconds for i in _bits(state)) for state in members]),
        parameter_bytes=np.array([sum(profile.layers[i].parameter_bytes for i in _bits(state)) for state in members]),
        activation_bytes=np.array(
            [
                sum(profile.layers[i].activation_bytes for i in _bits(state) if readers[i] & ~state or not readers[i])
                for state in members
            ]
        ),
        before=tuple(
            np.array([k for k in range(j) if members[k] & members[j] == members[k]], dtype=np.intp)
            for j in range(len(members))
        ),
    )


def _bits(state: int) -> list[int]:
    found: list[int] = []
    while state:
        low = state & -state
        found.append(low.bit_length() - 1)
        state ^= low
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamCosts:
    """How the planner prices stages.

    Attributes:
        formula: the paper's or the published code's.
        compression: with `PipeDreamFormula.REPO`, the activation compression ratio; None: transfers are not priced.
        replicas: members on which a stage may run at each level; None: any number.
        whole_groups: whether a stage on several groups of machines takes all machines of each, so that all its replicas
            lie beside one another; otherwise it may be a pipeline in each group.
    """

    formula: PipeDreamFormula = PipeDreamFormula.REPO
    compression: float | None = None
    replicas: Collection[int] | None = None
    whole_groups: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _LevelPlan:
    """The optima of a level, by the state after which a range begins (-1: at the start), its end, and members - 1.

    Attributes:
        seconds: seconds of the slowest stage; infinite where there is no plan.
        split: the state before the last stage; -1 where the range is not split.
        last: members of the last stage.
    """

    seconds: Array
    split: NDArray[np.intp]
    last: NDArray[np.intp]


def replicated_stages(
    profile: LayerProfile, levels: Sequence[MachineLevel], costs: PipeDreamCosts | None = None
) -> ReplicatedStages:
    """Return the stages with the least seconds per micro-batch.

    Args:
        profile: layers as measured or predicted.
        levels: levels of machines, the lowest first.
        costs: how stages are priced.

    Raises:
        PlanError: there are too many states, or no plan has the allowed numbers of replicas.
    """
    costs, states = costs or PipeDreamCosts(), states_of(profile)
    num_states = len(states.members)
    # Row i holds ranges that begin after state i - 1; only the whole has to be known at the highest level.
    compute = alone = _ranges(states, states.seconds)
    parameters = _ranges(states, states.parameter_bytes)
    plans: list[_LevelPlan] = []
    below = 1
    for number, level in enumerate(levels):
        rows = 1 if number == len(levels) - 1 else num_states
        sizes = _Sizes(alone=compute, shared=alone if costs.whole_groups else compute, parameters=parameters)
        plan = _level_plan(states, sizes, level, costs, (rows, below))
        plans.append(plan)
        alone = _replicated(sizes.shared, sizes.shared, parameters, (level, below), costs.formula)[..., -1]
        compute, below = plan.seconds[:, :, -1], level.count
    seconds = float(plans[-1].seconds[0, -1, -1])
    if math.isinf(seconds):
        machines = " × ".join(str(each.count) for each in levels)
        raise PlanError(
            f"No stages of {sorted(costs.replicas or ())} replicas use {machines} "
            "machines. Allow other numbers of replicas, or other numbers of machines."
        )
    return ReplicatedStages(
        stages=tuple(_Reader(states, plans, costs.whole_groups).stages(len(levels) - 1, (-1, num_states - 1), 1)),
        seconds=seconds,
        one_machine_seconds=float(states.seconds[-1]),
        data_parallel_seconds=_data_parallel(states, levels, costs.formula),
    )


def _ranges(states: States, totals: Array) -> Array:
    """[states, states]: what a range from after state i - 1 to state j has; infinite where that is no range."""
    found = np.full((len(totals) + 1, len(totals)), math.inf)
    found[0] = totals
    for j, before in enumerate(states.before):
        found[before + 1, j] = totals[j] - totals[before]
    return found[: len(totals)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sizes:
    """What ranges of states have: seconds on one member of a level, and as one of several, and bytes of parameters."""

    alone: Array
    shared: Array
    parameters: Array


def _replicated(
    alone: Array, shared: Array, parameters: Array, place: tuple[MachineLevel, int], formula: PipeDreamFormula
) -> Array:
    """[..., members]: seconds of stages on one to all members of a level; `place`: it, and the members below."""
    level, below = place
    members, speed = np.arange(1, level.count + 1), level.bytes_per_second
    compute = np.where(members == 1, alone[..., None], shared[..., None])
    parameters = np.where(np.isinf(parameters), 0.0, parameters)[..., None]
    if formula is PipeDreamFormula.PAPER:
        return np.maximum(compute, 2 * (members - 1) * parameters / speed) / members
    return (compute + 4 * (members - 1) * parameters / (speed * members) / below) / members


def _level_plan(
    states: States,
    sizes: _Sizes,
    level: MachineLevel,
    costs: PipeDreamCosts,
    shape: tuple[int, int],
) -> _LevelPlan:
    """Return the optima of a level; `shape` is the number of rows, and the members of the level below."""
    rows, below = shape
    allowed = [m for m in range(1, level.count + 1) if costs.replicas is None or m in costs.replicas]
    seconds = np.full((rows, len(states.members), level.count), math.inf)
    alone, shared, parameters = sizes.alone, sizes.shared, sizes.parameters
    whole = _replicated(alone[:rows], shared[:rows], parameters[:rows], (level, below), costs.formula)
    seconds[:, :, [m - 1 for m in allowed]] = whole[:, :, [m - 1 for m in allowed]]
    split, last = np.full(seconds.shape, -1, dtype=np.intp), np.empty(seconds.shape, dtype=np.intp)
    last[:] = np.arange(1, level.count + 1)
    stages = _replicated(alone, shared, parameters, (level, 1), costs.formula)
    for j, before in enumerate(states.before):
        if not len(before):
            continue
        # [k, m']: what the last stage takes, its transfers included.
        tail = np.maximum(stages[before + 1, j, :], _transfers(states, before, j, level, costs))
        for members in range(2, level.count + 1):
            shares = [m for m in allowed if m < members]
            if not shares:
                continue
            own = tail[:, [m - 1 for m in shares]]
            for i in range(rows):
                found = np.maximum(seconds[i][before][:, [members - m - 1 for m in shares]], own)
                best = int(np.argmin(found))  # the first of equal ones
                if found.flat[best] < seconds[i, j, members - 1]:
                    k, share = divmod(best, len(shares))
                    seconds[i, j, members - 1] = found.flat[best]
                    split[i, j, members - 1], last[i, j, members - 1] = before[k], shares[share]
    return _LevelPlan(seconds=seconds, split=split, last=last)


def _transfers(states: States, before: NDArray[np.intp], end: int, level: MachineLevel, costs: PipeDreamCosts) -> Array:
    """[k, members]: seconds of the transfers of a stage after state k that ends at a state."""
    members, speed = np.arange(1, level.count + 1), level.bytes_per_second
    into = states.activation_bytes[before][:, None]
    if costs.formula is PipeDreamFormula.PAPER:
        return np.broadcast_to(2 * into / speed, (len(before), level.count))
    if costs.compression is None:
        return np.zeros((len(before), level.count))
    out = states.activation_bytes[end] if end < len(states.members) - 1 else 0.0
    return 2 * np.maximum(into, out) / (speed * members) / costs.compression


class _Reader:
    """Reads the stages off the optima of all levels."""

    def __init__(self, states: States, plans: Sequence[_LevelPlan], whole_groups: bool) -> None:
        self._states, self._plans, self._whole_groups = states, plans, whole_groups

    def stages(self, number: int, span: tuple[int, int], copies: int) -> list[ReplicatedStage]:
        """Return the stages of a range, from after state `span[0]` to state `span[1]`, on all members of a level."""
        begin, end = span
        # A stage on several groups takes all of each, at all levels below.
        if number >= 0 and self._whole_groups and copies > 1:
            return self.stages(
                -1, span, copies * math.prod(plan.seconds.shape[2] for plan in self._plans[: number + 1])
            )
        if number < 0:
            return [self._stage(begin, end, copies)]
        plan, members, found = self._plans[number], self._plans[number].seconds.shape[2], list[ReplicatedStage]()
        while True:
            place = (begin + 1, end, members - 1)
            cut, share = int(plan.split[place]), int(plan.last[place])
            # A range that is not split begins where the whole began.
            first = cut if cut >= 0 else begin
            found = [*self.stages(number - 1, (first, end), copies * share), *found]
            if cut < 0:
                return found
            end, members = cut, members - share

    def _stage(self, begin: int, end: int, replicas: int) -> ReplicatedStage:
        states = self._states
        kept = states.members[end] & ~(states.members[begin] if begin >= 0 else 0)
        before = states.seconds[begin] if begin >= 0 else 0.0
        return ReplicatedStage(
            layers=tuple(_bits(kept)),
            states=(begin + 1, end + 1),
            replicas=replicas,
            seconds=float(states.seconds[end] - before),
        )


def _data_parallel(states: States, levels: Sequence[MachineLevel], formula: PipeDreamFormula) -> float:
    """Return the seconds per micro-batch of data parallelism at all levels."""
    seconds, below = states.seconds[-1:], 1
    for level in levels:
        seconds = _replicated(seconds, seconds, states.parameter_bytes[-1:], (level, below), formula)[:, -1]
        below = level.count
    return float(seconds[0])
