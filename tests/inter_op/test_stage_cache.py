"""What is known of a stage with some room answers for it with other room, and is as good there as was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa_lite.inter_op.solved_stages import Question, SolvedStage, SolvedStages, answer_among
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.stage import StageSolution
from alpa_lite.plan.parts import NO_COST, Choice
from alpa_lite.sharding.meshes import LogicalMesh, Submesh

SUBMESH = Submesh(first_device=0, num_hosts=1, devices_per_host=4)
MESH = LogicalMesh(axis_names=("x",), shape=(4,))

Option = tuple[int, int, int]
"""Cost, bytes of state, bytes of activations of each micro-batch."""

OPTIONS = st.lists(st.tuples(st.integers(10, 30), st.integers(0, 10), st.integers(0, 4)), min_size=1, max_size=6)
ROOM = st.tuples(st.integers(1, 6), st.integers(0, 30))


def _fitting(options: list[Option], in_flight: int, limit: int) -> list[Option]:
    return [option for option in options if option[1] + in_flight * option[2] <= limit]


def _question(in_flight: int, limit: float, gap: float, seconds: float = 1.0) -> Question:
    room = {"in_flight": in_flight, "limit_bytes": limit}
    return Question(first=0, last=0, submesh=SUBMESH, mesh=MESH, gap=gap, seconds=seconds, **cast(Any, room))


def _solved(option: Option | None, bound: float, in_flight: int, limit: float) -> SolvedStage:
    cost, state, saved = option or (float("inf"), 0, 0)
    solution = StageSolution(
        choice=Choice(inputs={}, ops={}, accumulators={}) if option else None,
        status=Status.FEASIBLE if option else Status.INFEASIBLE,
        objective=float(cost),
        bound=bound,
        peak_bytes=float(state + in_flight * saved),
        cost=replace(NO_COST, state_bytes=float(state), activation_bytes=float(saved)),
    )
    view = cast(Any, None)
    return SolvedStage(view=view, asked=_question(in_flight, limit, gap=0.0), gap=solution.gap, solution=solution)


@given(
    options=OPTIONS,
    rooms=st.lists(st.tuples(ROOM, st.integers(0, 5), st.floats(0.5, 1.0)), max_size=5),
    asked=ROOM,
    gap=st.sampled_from([0.0, 0.05, 0.3]),
)
def test_an_answer_is_as_close_to_the_best_as_was_asked_for(
    options: list[Option], rooms: list[tuple[tuple[int, int], int, float]], asked: tuple[int, int], gap: float
) -> None:
    solved: list[SolvedStage] = []
    for room, pick, tightness in rooms:
        fitting = _fitting(options, *room)
        best = min((cost for cost, _, _ in fitting), default=float("inf"))
        solved.append(_solved(fitting[pick % len(fitting)] if fitting else None, tightness * best, *room))
    found = answer_among(solved, _question(*asked, gap))
    if found is None:
        return
    fitting = _fitting(options, *asked)
    assert (found.solution.choice is None) == (not fitting)
    if fitting:
        best = min(cost for cost, _, _ in fitting)
        assert found.solution.cost.bytes_in_flight(asked[0]) <= asked[1]
        assert found.solution.objective * (1 - gap) <= best * (1 + 1e-12)
        assert found.solution.bound <= best


@pytest.mark.parametrize(("gap", "answer"), [(0.3, (20.0, 16.0)), (0.05, None)])
def test_a_choice_for_less_room_is_close_enough_to_a_bound_for_more(
    gap: float, answer: tuple[float, float] | None
) -> None:
    """With 8 GB somebody found 18 seconds and nothing below 16 can be; with 4 GB, 20 seconds and nothing below 19."""
    solved = [_solved((18, 5, 1), 16.0, 1, 8.0), _solved((20, 2, 1), 19.0, 1, 4.0)]
    found = answer_among(solved, _question(2, 6.0, gap))
    assert (found and (found.solution.objective, found.solution.bound)) == answer


@pytest.mark.parametrize("status", [Status.INFEASIBLE, Status.TIME_LIMIT])
def test_what_was_not_found_in_time_is_sought_again_in_more(status: Status) -> None:
    nothing = _solved(None, 0.0, 1, 8.0)
    solved = [replace(nothing, solution=replace(nothing.solution, status=status))]
    assert answer_among(solved, _question(1, 8.0, 0.05, seconds=0.5)) is solved[0]
    patient = answer_among(solved, _question(1, 8.0, 0.05, seconds=60.0))
    assert patient is (solved[0] if status is Status.INFEASIBLE else None)


@dataclass(eq=False)
class _View:
    """A stand-in for a view that records whether its signature was asked for."""

    made_of: int
    asked: bool = field(default=False)

    @property
    def key(self) -> object:
        return self

    @property
    def size(self) -> int:
        return self.made_of % 3

    @property
    def signature(self) -> int:
        self.asked = True
        return self.made_of


@given(contents=st.lists(st.integers(0, 8), max_size=10))
def test_views_have_one_structure_where_their_signatures_are_equal(contents: list[int]) -> None:
    solved, views = SolvedStages(), [_View(content) for content in contents]
    structures = [solved.structure(cast(Any, view)) for view in views]
    for view, its in zip(views, structures, strict=True):
        for other, others in zip(views, structures, strict=True):
            assert (its is others) == (view.made_of == other.made_of)
        # A signature takes long to make: alone of its size, a view does without.
        assert view.asked == (sum(other.size == view.size for other in views) > 1)
    assert structures == [solved.structure(cast(Any, view)) for view in views]
