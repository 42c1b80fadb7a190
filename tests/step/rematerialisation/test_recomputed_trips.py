"""Loops whose trips are repeated: what each hands on, and that loops that are alike stay so."""

from __future__ import annotations

import pytest

from alpa_lite.program.ir import Op
from alpa_lite.program.phases import Phase
from alpa_lite.step.clustering import make_layers
from alpa_lite.step.recomputation import Remat
from alpa_lite.step.recomputed_trips import Looped, repeat_trips
from tests.step.rematerialisation.steps import COLUMNS, ROWS, WIDE, again, blocks, traced_model
from tests.step.splitting import split_step

NUM_LAYERS = 6


def _loops(looped: Looped, phase: Phase) -> list[Op]:
    ops = looped.step.graph.ops
    return [op for op in ops if op.primitive == "scan" and looped.step.phases[op.id] is phase]


def _repeated(policy: Remat, *, own: bool = False, loop_parts: int = 0) -> Looped:
    step = split_step(blocks(NUM_LAYERS, scan=True, own=own), 1, loop_parts=loop_parts).step
    layers = make_layers(step, max(1, loop_parts))
    return repeat_trips(step, layers.of_op, (policy,) * layers.num_layers)


@pytest.mark.parametrize(
    ("policy", "stacks"),
    [(Remat.FULL, [(ROWS, COLUMNS)]), (Remat.SELECTIVE, [(ROWS, COLUMNS), (ROWS, WIDE)])],
)
def test_the_forward_loop_hands_on_what_came_into_each_trip(policy: Remat, stacks: list[tuple[int, ...]]) -> None:
    looped = _repeated(policy)
    (forward,), (backward,) = (_loops(looped, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    values = looped.step.graph.values
    handed = [v for v in forward.results if v in backward.operands]
    assert sorted(values[v].shape for v in handed) == sorted((NUM_LAYERS, *shape) for shape in stacks)
    assert looped.forward == {forward.id}
    contractions = [op.primitive for op in backward.bodies[0].ops].count("dot_general")
    assert contractions == 4 + (policy is Remat.FULL)


def test_parts_of_a_loop_stay_one_body() -> None:
    looped = _repeated(Remat.FULL, loop_parts=3)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        loops = _loops(looped, phase)
        assert len(loops) == 3 and len({loop.bodies[0] for loop in loops}) == 1
        assert loops[0].bodies[0] in looped.origins


def test_a_loop_that_hands_on_no_residuals_is_left_alone_and_never_repeated_whole() -> None:
    looped = _repeated(Remat.FULL, own=True)
    assert not looped.origins and len(looped.forward) == 1
    step = split_step(blocks(NUM_LAYERS, scan=True, own=True), 1)
    assert sum(op.primitive == "scan" for op in again(step, (Remat.FULL,)).step.graph.ops) == 2


def test_results_that_others_read_stay() -> None:
    made = traced_model("gpt_scan")
    changed = again(made, (Remat.FULL,))
    graph = changed.step.graph
    read = {v for op in graph.ops for v in op.operands} | set(graph.outputs)
    made_by = {r for op in graph.ops for r in op.results} | set(graph.inputs)
    assert all(v in made_by or graph.values[v].literal is not None for v in read)
