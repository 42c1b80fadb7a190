"""PipeDream's planner: the published profiles, chains and branches against trying all, and several levels of machines.

`pipedream_profiles.json` holds three profiles of github.com/msr-fiddle/pipedream (MIT licence), without their inputs:
milliseconds of both passes, bytes, and edges. Costs of `SHIPPED` are from runs of its optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.replicated_stages import (
    LayerProfile,
    MachineLevel,
    PipeDreamCosts,
    PipeDreamFormula,
    ProfiledLayer,
    replicated_stages,
    states_of,
)

REPO, PAPER = PipeDreamFormula.REPO, PipeDreamFormula.PAPER


@cache
def _profile(name: str) -> LayerProfile:
    data = json.loads((Path(__file__).parent / "pipedream_profiles.json").read_text())[name]
    numbers = zip(data["milliseconds"], data["activation_bytes"], data["parameter_bytes"], strict=True)
    return LayerProfile(
        layers=tuple(
            ProfiledLayer(seconds=ms / 1000, activation_bytes=out, parameter_bytes=size) for ms, out, size in numbers
        ),
        edges=tuple((a, b) for a, b in data["edges"]),
    )


def test_vgg16_on_eight_devices_is_the_published_plan() -> None:
    found = replicated_stages(_profile("vgg16"), [MachineLevel(count=8, bytes_per_second=15e9)])
    assert [(stage.states, stage.replicas) for stage in found.stages] == [((0, 22), 7), ((22, 40), 1)]
    assert [stage.seconds for stage in found.stages] == pytest.approx([0.619014, 0.053521], abs=1e-9)
    assert found.seconds == pytest.approx(0.0894278304, abs=1e-10)
    assert found.one_machine_seconds / found.seconds == pytest.approx(7.520422, abs=1e-6)
    assert found.one_machine_seconds / found.data_parallel_seconds == pytest.approx(6.711351, abs=1e-6)
    assert found.data_parallel_seconds / found.seconds == pytest.approx(1.120553, abs=1e-6)


def test_gnmt_on_four_devices_is_the_published_plan() -> None:
    found = replicated_stages(_profile("gnmt_large"), [MachineLevel(count=4, bytes_per_second=1.25e9)])
    assert found.stages[-1].states[1] == 1495
    assert [stage.replicas for stage in found.stages] == [1, 1, 1, 1]
    seconds = [stage.seconds for stage in found.stages]
    assert seconds == pytest.approx([0.131570, 0.131783, 0.119971, 0.137129], abs=1e-6)
    assert found.seconds == pytest.approx(0.137129, abs=1e-6)
    assert found.one_machine_seconds / found.seconds == pytest.approx(3.795353, abs=1e-6)
    assert found.one_machine_seconds / found.data_parallel_seconds == pytest.approx(0.653314, abs=1e-6)


SHIPPED = [
    ("vgg16", ((4, 1e9),), 0.175732624, 0.583206382),
    ("vgg16", ((2, 1e10), (2, 1e9)), 0.185569564, 0.4725203468),
    ("vgg16", ((4, 1.25e9), (2, 1e9)), 0.093357134, 0.3884534718),
    ("resnet18", ((4, 1e9),), 0.065918, 0.100004036),
    ("resnet18", ((4, 1.25e9), (2, 1e9)), 0.033883, 0.0581846764),
]


@pytest.mark.parametrize(("name", "levels", "seconds", "data_parallel"), SHIPPED)
def test_several_levels_cost_what_the_published_optimizer_finds(
    name: str, levels: Sequence[tuple[int, float]], seconds: float, data_parallel: float
) -> None:
    machines = [MachineLevel(count=count, bytes_per_second=speed) for count, speed in levels]
    found = replicated_stages(_profile(name), machines)
    assert (found.seconds, found.data_parallel_seconds) == pytest.approx((seconds, data_parallel), rel=1e-9)


# --- against trying all --------------------------------------------------------------------------------------------

NUMBERS = st.integers(0, 50).map(lambda number: number / 10)
LAYERS = st.builds(ProfiledLayer, seconds=NUMBERS, activation_bytes=NUMBERS, parameter_bytes=NUMBERS)
COSTS = st.builds(
    PipeDreamCosts,
    formula=st.sampled_from(PipeDreamFormula),
    compression=st.sampled_from([None, 1.0, 2.0]),
    replicas=st.sampled_from([None, (1, 2, 4), (1,)]),
)


def _stage_seconds(seconds: float, size: float, replicas: int, speed: float, costs: PipeDreamCosts) -> float:
    if costs.formula is PAPER:
        return max(seconds, 2 * (replicas - 1) * size / speed) / replicas
    return (seconds + 4 * (replicas - 1) * size / (speed * replicas)) / replicas


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in _compositions(total - first))


def _tried(layers: Sequence[ProfiledLayer], machines: int, speed: float, costs: PipeDreamCosts) -> float:
    """The least seconds of all cuts of a chain and all numbers of replicas."""
    best = float("inf")
    for sizes in _compositions(len(layers)):
        for replicas in _compositions(machines):
            if len(sizes) != len(replicas) or (costs.replicas and not set(replicas) <= set(costs.replicas)):
                continue
            begin, slowest = 0, 0.0
            for number, (size, count) in enumerate(zip(sizes, replicas, strict=True)):
                own, end = layers[begin : begin + size], begin + size
                weights = sum(layer.parameter_bytes for layer in own)
                slowest = max(slowest, _stage_seconds(sum(x.seconds for x in own), weights, count, speed, costs))
                into = 2 * layers[begin - 1].activation_bytes / speed if begin else 0.0
                out = 2 * layers[end - 1].activation_bytes / speed if end < len(layers) else 0.0
                if number and costs.formula is PAPER:
                    slowest = max(slowest, into)
                elif number and costs.compression:
                    slowest = max(slowest, into / count / costs.compression, out / count / costs.compression)
                begin = end
            best = min(best, slowest)
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(LAYERS, min_size=1, max_size=8), st.integers(1, 4), st.sampled_from([0.5, 1.0, 8.0]), COSTS)
def test_chains_cost_what_trying_all_finds(
    layers: list[ProfiledLayer], machines: int, speed: float, costs: PipeDreamCosts
) -> None:
    wanted = _tried(layers, machines, speed, costs)
    levels = [MachineLevel(count=machines, bytes_per_second=speed)]
    if wanted == float("inf"):
        with pytest.raises(PlanError, match="Allow other numbers of replicas"):
            replicated_stages(LayerProfile.chain(layers), levels, costs)
        return
    found = replicated_stages(LayerProfile.chain(layers), levels, costs)
    assert found.seconds == pytest.approx(wanted)
    assert [layer for stage in found.stages for layer in stage.layers] == list(range(len(layers)))
    assert sum(stage.replicas for stage in found.stages) == machines


@settings(max_examples=40, deadline=None)
@given(st.lists(LAYERS, min_size=1, max_size=6), st.sampled_from([REPO, PAPER]), st.booleans())
def test_stages_of_two_levels_cost_what_their_own_numbers_say(
    layers: list[ProfiledLayer], formula: PipeDreamFormula, whole_groups: bool
) -> None:
    levels = [MachineLevel(count=2, bytes_per_second=4.0), MachineLevel(count=2, bytes_per_second=1.0)]
    costs = PipeDreamCosts(formula=formula, whole_groups=whole_groups)
    found = replicated_stages(LayerProfile.chain(layers), levels, costs)
    assert sum(stage.replicas for stage in found.stages) == 4
    assert [layer for stage in found.stages for layer in stage.layers] == list(range(len(layers)))
    # One level of four at the speed of the slower link is never faster.
    flat = replicated_stages(
        LayerProfile.chain(layers),
        [MachineLevel(count=4, bytes_per_second=4.0)],
        PipeDreamCosts(formula=formula, compression=None),
    )
    if formula is PAPER:
        assert found.seconds >= flat.seconds - 1e-9
    if whole_groups:
        free = replicated_stages(LayerProfile.chain(layers), levels, PipeDreamCosts(formula=formula))
        assert free.seconds <= found.seconds + 1e-9
        # Whatever lies on both groups has all machines of both.
        assert all(stage.replicas in (1, 2, 4) for stage in found.stages)


# --- branches ------------------------------------------------------------------------------------------------------

UNIT = ProfiledLayer(seconds=1.0, activation_bytes=1.0, parameter_bytes=1.0)
DIAMOND = LayerProfile(layers=(UNIT,) * 4, edges=((0, 1), (0, 2), (1, 3), (2, 3)))


def test_states_of_branches_are_all_closed_sets() -> None:
    states = states_of(DIAMOND)
    assert states.members == (0b1, 0b11, 0b101, 0b111, 0b1111)
    # The first layer's output is still to be read where one branch is missing.
    assert states.activation_bytes.tolist() == [1, 2, 2, 2, 1]
    assert [before.tolist() for before in states.before] == [[], [0], [0], [0, 1, 2], [0, 1, 2, 3]]


def test_a_second_input_joins_where_it_is_read() -> None:
    assert states_of(LayerProfile(layers=(UNIT,) * 3, edges=((0, 2), (1, 2)))).members == (0b1, 0b111)


def test_branches_may_lie_in_different_stages() -> None:
    found = replicated_stages(DIAMOND, [MachineLevel(count=4, bytes_per_second=1.0)])
    assert [stage.replicas for stage in found.stages] == [1, 1, 1, 1] and found.seconds == 1.0


def test_graphs_that_are_too_wide_or_out_of_order_are_refused() -> None:
    wide = LayerProfile(layers=(UNIT,) * 18, edges=tuple((0, i) for i in range(1, 18)))
    with pytest.raises(PlanError, match="Merge branches"):
        states_of(wide)
    with pytest.raises(PlanError, match="has to come after its inputs"):
        states_of(LayerProfile(layers=(UNIT,) * 2, edges=((1, 0),)))
