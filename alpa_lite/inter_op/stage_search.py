"""The search for stages: the stage DP on guesses that become costs where they matter.

    guess       of a layer on a logical mesh, per micro-batch                                    (`survey.Survey`)
    of a stage  the sum of the guesses of its layers, and what it receives and dispatches        `_taking`
    bound       of a stage, from a rough sharding within the memory of a device                  `_solve`
    cost        of a stage, from one that is close to the best                                   `_solve`
    search      the best stages by what is known; guesses among them become bounds, and bounds
                costs; again, until the best stages are known by their costs                     `run`

Solving a whole stage takes most of the time, and few of the possible stages are ever near the best. A solved stage
takes its memory into account, and what its layers hand to each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from alpa_lite.inter_op.best_stages import BestStages, PipelinedBatch, StageCounts
from alpa_lite.inter_op.boundaries import Inflows, least_seconds_of_rows, seconds_of_rows, uneven_arrays
from alpa_lite.inter_op.solved_stages import Question, StagePlace
from alpa_lite.inter_op.space import Configurations, Space, StageEquality, equal_parts, ways
from alpa_lite.inter_op.stage_costs import StageCosts, expect
from alpa_lite.inter_op.stage_dp import StageChoice, StageTable
from alpa_lite.inter_op.survey import summed
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.solve import RELATIVE_GAP
from alpa_lite.intra_op.stage import StageSolution
from alpa_lite.plan.pricing import dispatch_seconds
from alpa_lite.sharding.meshes import LogicalMesh
from alpa_lite.step.recomputation import Remat

MANY = 3
"""The number of stages on a logical mesh that must exceed their guess before higher guesses are made for others."""

SOLVES, LEAST_SOLVES = 2, 6
"""The usual number of solves for each stage that is guessed, and the least in all, at a number of micro-batches."""

SPARED = 1 / 3
"""The number of these that a solve at an earlier number of micro-batches makes unnecessary on average."""

STILL = 1 / 4
"""The estimate of the solves left, as a part of those done, where the search takes more than usual."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageGuesses:
    """Arrays about all possible stages, from which a search starts; seconds are per micro-batch.

    layer_seconds    [policies, layers, kinds, shapes]: guess for each layer; infinite where it cannot run
    layer_updates    the same for its update, once per step
    inflows          for a layer range to receive what it reads from earlier layers
    slower_seconds   [layers, kinds, kinds]: how much longer that takes a stage from a layer on, by the kind of submesh
                     before it and its own
    following        [policies, layers, layers, kinds]: how many stages may follow one given its memory, at best; -1 for
                     none
    roomy            [policies, layers, layers, kinds, shapes]: how many may follow where the guess allows for the
                     memory that the stage takes; -1 for none
    worthwhile       [layers, layers, kinds]: which stages make sense; see `Space.worthwhile`
    """

    layer_seconds: NDArray[np.float64]
    layer_updates: NDArray[np.float64]
    inflows: Inflows
    slower_seconds: NDArray[np.float64]
    following: NDArray[np.int64]
    roomy: NDArray[np.int64]
    worthwhile: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """Restrictions of the stages of a plan.

    num_stages   number of stages; None for the best number
    all_equal    only equal stages, in one logical mesh: each is solved as one of so many equal layers
    equal        the quantities that stages have equally much of, in addition to that
    """

    num_stages: int | None = None
    all_equal: bool = False
    equal: Collection[StageEquality] = ()


@dataclass(frozen=True, kw_only=True)
class PolicyCosts:
    """The stage costs of a step under several policies of rematerialisation.

    Attributes:
        any_number: costs at some number of micro-batches and without a policy, for values that depend on neither.
        policies: the policies of the search.
        under: `under(policy, count)` are the costs of all layers, or of `count` equal ones; None: `any_number`.
    """

    any_number: StageCosts
    policies: tuple[Remat, ...] = (Remat.NONE,)
    under: Callable[[Remat, int | None], StageCosts] | None = None

    def of(self, policy: Remat, count: int | None) -> StageCosts:
        """Return the costs of all layers, or of `count` equal ones, under a policy."""
        return self.any_number if self.under is None else self.under(policy, count)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageStates:
    """The costs, bounds and guesses so far: arrays [layers, layers, kinds, configurations], changed by the search.

    Attributes:
        seconds: per micro-batch; infinite where a stage is impossible.
        updates: per step, with the time to move rows.
        following: how many stages may follow one given its memory; -1 for none.
        solved: whether `seconds` is a cost.
        bounded: whether a rough sharding has been solved.
        least, least_updates: lower bounds of the seconds and the updates, where `bounded`.
    """

    seconds: NDArray[np.float64]
    updates: NDArray[np.float64]
    following: NDArray[np.int64]
    solved: NDArray[np.bool_]
    bounded: NDArray[np.bool_]
    least: NDArray[np.float64]
    least_updates: NDArray[np.float64]

    @staticmethod
    def unknown(shape: tuple[int, ...]) -> StageStates:
        """Return arrays without any information."""
        return StageStates(
            seconds=np.full(shape, np.inf),
            updates=np.zeros(shape),
            following=np.full(shape, -1, dtype=np.int64),
            solved=np.zeros(shape, dtype=np.bool_),
            bounded=np.zeros(shape, dtype=np.bool_),
            least=np.zeros(shape),
            least_updates=np.zeros(shape),
        )


class StageSearch:
    """The stage DP on one step: guesses become costs where its answer depends on them; see the module."""

    def __init__(
        self,
        costs: PolicyCosts,
        batch: PipelinedBatch,
        space: Space,
        guesses: StageGuesses,
        limits: StageLimits = StageLimits(),
    ) -> None:
        """Set up the arrays of the search; nothing is solved yet. `guesses` are for the policies of `costs`."""
        self.costs, self.batch, self.space = costs, batch, space
        self.inflows = guesses.inflows
        known = costs.any_number
        self.num_layers, self.all_equal = known.layers.num_layers, limits.all_equal
        self.num_stages = limits.num_stages
        self.configurations = Configurations(space.most_shapes, costs.policies, self._levels())
        self._possible = guesses.worthwhile
        if self.all_equal:
            self._possible = self._possible & equal_parts(space, self.num_layers, limits.num_stages)
        repeats = len(self.configurations) // space.most_shapes
        self._equal = tuple(limits.equal)
        self._at_best = np.repeat(np.moveaxis(guesses.following, 0, -1), space.most_shapes, axis=-1)
        work, updates = (
            np.concatenate([summed(of_layers, self._possible) for of_layers in guessed], axis=-1)
            for guessed in (guesses.layer_seconds, guesses.layer_updates)
        )
        moved = costs.any_number.has_rows and not self.all_equal
        self._least_for_rows = (
            least_seconds_of_rows(costs.any_number, space) if moved else np.zeros(self._possible.shape)
        )
        guessed = self._taking(work, self.inflows.slowest[..., None])
        self._guessed = np.where(self._at_best >= 0, guessed, np.inf)
        self._guessed_updates = updates + self._least_for_rows[..., None]
        self._roomy = np.moveaxis(guesses.roomy, 0, 3).reshape(self._guessed.shape)
        self._slower = self._waiting_longer(guesses.slower_seconds)
        self._best_of = BestStages(
            space=space,
            cost_model=costs.any_number.cost_model,
            batch=batch,
            ways=[*ways(space, self.num_layers, limits.equal, one_mesh=self.all_equal, repeats=repeats)],
            num_stages=limits.num_stages,
            update_tasks=known.most_update_tasks,
        )
        self._progress = costs.any_number.progress
        self._before, self._usual = self._progress.done.get("stages", 0), float(LEAST_SOLVES)

    @cached_property
    def states(self) -> StageStates:
        """The costs, bounds and guesses so far."""
        # Most searches are only asked for their best guess, for which the much smaller arrays of guesses do.
        states = StageStates.unknown((*self._guessed.shape[:3], len(self.configurations)))
        states.seconds[:] = self.configurations.repeated(self._guessed)
        states.updates[:] = self.configurations.repeated(self._guessed_updates)
        for level in range(len(self.configurations.in_flight)):
            states.following[self.configurations.block(level)] = self._following(self._guessed, level)
        return states

    def _following(self, seconds: NDArray[np.float64], level: int) -> NDArray[np.int64]:
        """Return [..., shapes and policies]: how many stages may follow unsolved ones of these seconds, at best."""
        # A sharding with the least room may turn out to have room for all.
        in_flight = self.configurations.in_flight[level]
        most = np.minimum(self._at_best, self._most_following(in_flight) if level else self.num_layers - 1)
        return np.where(np.isfinite(seconds), most, -1)

    def run(self, at_most: float = math.inf, *, further: float = 0.0, counts: StageCounts | None = None) -> StageChoice:
        """Return the best stages, all of them solved; or guessed ones, once none can take less than `at_most` seconds.

        `further`: the work of the searches that are still to follow, relative to this one. `counts`: the
        numbers of stages to choose from, where these are fewer than the search allows.
        """
        solved, likely = self._best_solved(counts), _entries(self.best_likely())
        while True:
            # Guesses and bounds are mostly too low, so that the best of all stages tends to hold unsolved ones.
            found = self.best_known(counts)
            if found.seconds >= solved.seconds * (1 - RELATIVE_GAP):
                return solved
            if found.seconds >= at_most:
                return found
            # Apart from the stages that likely are the best, most of the others turn out to be worse before long.
            open_ = counts is None and any(not self.states.solved[entry] for entry in likely)
            entries = likely if open_ else _entries(found)
            pending = sorted((e for e in entries if not self.states.solved[e]), key=lambda e: -self._in_all[e])
            if not pending:
                return found
            self._expect(len(entries), len(pending), further, known=min(solved.seconds, at_most) < math.inf)
            # The slowest decides about most plans; what is like something solved comes with it for nothing.
            self._expect_from_workers(pending[1:])
            self._solve(*pending[0])
            for entry in pending:
                if not self.states.solved[entry] and self._knows(*entry):
                    self._solve(*entry)
            self._refresh()
            solved = self._best_solved(counts)

    def _expect_from_workers(self, entries: Sequence[tuple[int, int, int, int]]) -> None:
        """Let workers start on stages that are likely to be solved next: first on bounds, then on costs."""
        if self.costs.any_number.workers.at_work:
            bounds = [self._question(*entry, quick=True) for entry in entries if not self.states.bounded[entry]]
            expect([*bounds, *(self._question(*entry, quick=False) for entry in entries)])

    def _expect(self, stages: int, pending: int, further: float, *, known: bool) -> None:
        """Report the estimated amount of work left; it is unknown until some stages are `known` by their costs."""
        progress = self._progress
        # Solves of this search alone: the count goes on over all numbers of micro-batches.
        done = progress.done.get("stages", 0) - self._before
        self._usual = max(self._usual, SOLVES * stages - self._before * SPARED)
        left = max(pending, self._usual - done, done * STILL)
        progress.expect("stages", left + further * max(self._usual, done) if known else None)

    def best_known(self, counts: StageCounts | None = None) -> StageChoice:
        """Return the best stages by the costs, bounds and guesses so far."""
        if counts is None and "states" not in vars(self):
            return self._best_guessed
        return self._best_of(self._table(self.states.seconds, self.states.updates, self.states.following), counts)

    @cached_property
    def _best_guessed(self) -> StageChoice:
        """The best stages by guesses alone."""
        # Guesses are the same for any number of micro-batches in flight, and after the fewest most stages may follow.
        return self._best_of(self._table(self._guessed, self._guessed_updates, self._following(self._guessed, 0)))

    @property
    def tried_questions(self) -> list[tuple[StageCosts, Question]]:
        """The questions that `tried` asks first: stages that do not fit are solved otherwise, too."""
        return [self._question(*entry, quick=True) for entry in _entries(self._best_guessed)]

    def tried(self) -> float:
        """Return the seconds of a step with the best guessed stages, solved roughly; infinite if they do not fit."""
        seconds, updates = np.full(self._guessed.shape, np.inf), np.zeros(self._guessed.shape)
        following = np.full(self._guessed.shape, -1)
        for entry in _entries(self._best_guessed):
            solution = self.solution(*entry, quick=True)
            if solution.choice is not None:
                kind = entry[2]
                seconds[entry] = self._taking(solution.cost.loop_seconds, self.inflows.slowest[entry[:3]])
                updates[entry] = solution.cost.update_seconds + self._least_for_rows[entry[:3]]
                following[entry] = self._stages_that_may_follow(solution, self.space.room_bytes[kind])
        return self._best_of(self._table(seconds, updates, following)).seconds

    def best_likely(self) -> StageChoice:
        """Return the best stages by guesses alone, of stages that have the memory that their guess assumes."""
        return self._best_of(self._table(self._guessed, self._guessed_updates, self._roomy))

    def _table(
        self, seconds: NDArray[np.float64], updates: NDArray[np.float64], following: NDArray[np.int64]
    ) -> StageTable:
        return StageTable(
            seconds=seconds,
            max_following_stages=following,
            submesh_devices=self.space.devices,
            submesh_groups=self.space.groups,
            inflow_seconds=self._slower,
            update_seconds=updates,
            filling_seconds=self._filling(seconds),
        )

    def why_impossible(self) -> str:
        """Return a sentence that says why there are no such stages even with unlimited memory; empty if there are."""
        count, devices = self._best_of.num_stages, self.space.cluster.num_devices
        if self.all_equal and count is not None and devices % count:
            return (
                f"{count} stages have to be alike, since loops read rows of stacked arguments, but {devices} devices "
                f"are no multiple of {count}. Ask for a number of stages that divides them."
            )
        # With stages that cost nothing and always fit, only their number and submeshes can be the obstacle.
        free = np.broadcast_to(np.where(self._possible, 0.0, np.inf)[..., None], self.states.seconds.shape)
        most = np.full(self.states.seconds.shape, self.num_layers)
        reason = self._best_of.why_impossible(self._table(free, np.zeros(free.shape), most))
        if not reason:
            return ""
        asked = f" Stages are to have equally many {' and '.join(self._equal)}." if self._equal else ""
        rows = " They have to be alike, since loops read rows of stacked arguments." if self.all_equal else ""
        return f"{reason}{asked}{rows}"

    def _best_solved(self, counts: StageCounts | None) -> StageChoice:
        solved = np.where(self.states.solved, self.states.seconds, np.inf)
        return self._best_of(self._table(solved, self.states.updates, self.states.following), counts)

    def mesh(self, kind: int, configuration: int) -> LogicalMesh:
        """Return the logical mesh of a configuration of a kind of submesh."""
        return self.space.mesh(kind, self.configurations[configuration].shape)

    def solution(self, first: int, last: int, kind: int, configuration: int, *, quick: bool = False) -> StageSolution:
        """Return the best sharding of a stage in a configuration, or (`quick`) one with a bound for the best."""
        costs, asked = self._question(first, last, kind, configuration, quick=quick)
        costs, asked = costs.fitting(asked)
        return costs.answer(asked)

    def _knows(self, first: int, last: int, kind: int, configuration: int) -> bool:
        """Return True if `_solve` would only look up an answer."""
        quick = not self.states.bounded[first, last, kind, configuration]
        costs, asked = self._question(first, last, kind, configuration, quick=quick)
        return costs.knows(asked)

    def _question(
        self, first: int, last: int, kind: int, configuration: int, *, quick: bool
    ) -> tuple[StageCosts, Question]:
        """Return the stage costs for a stage of the search, and the question to ask them."""
        costs, first, last = self._asked(first, last, kind, configuration)
        place = StagePlace(first, last, self.space.submesh(kind), self.mesh(kind, configuration))
        return costs, costs.question(place, in_flight=self.configurations[configuration].in_flight, quick=quick)

    def _asked(self, first: int, last: int, kind: int, configuration: int) -> tuple[StageCosts, int, int]:
        """Return the stage costs for a stage of the search, and its first and last layer in their step."""
        count = self.space.cluster.num_devices // self.space.devices[kind] if self.all_equal else None
        # Equal stages are solved in a step that is cut into as many equal layers, so that each stage is one layer.
        if count is not None:
            first = last = first * count // self.num_layers
        return self.costs.of(self.configurations[configuration].policy, count), first, last

    def _levels(self) -> tuple[int, ...]:
        """Return the numbers of micro-batches in flight to solve shardings for: of the last stage, then doubled."""
        # A sharding for more micro-batches in flight is slower. Doubling keeps the number of solves logarithmic.
        least, most = (self.batch.in_flight(n) for n in (0, self.num_layers - 1))
        levels = [least]
        while levels[-1] < most:
            levels.append(min(2 * levels[-1], most))
        return tuple(levels)

    def _refresh(self) -> None:
        """Update the seconds of all stages that are not solved: their bounds, or guesses corrected by solved stages."""
        # If several stages took longer on a mesh than guessed, the others are guessed to take as much longer.
        longer = np.maximum(self._longer_than_guessed(MANY), self._longer_under_other_policies())
        states = self.states
        for level in range(len(self.configurations.in_flight)):
            part = self.configurations.block(level)
            open_, bounded = ~states.solved[part], states.bounded[part]
            # Leaving memory for more micro-batches is never faster. Before it is solved it is taken to cost nothing.
            lower, updates = (
                np.where(bounded, np.maximum(guessed, least[part]), guessed * longer)
                for guessed, least in (
                    (self._guessed, states.least),
                    (self._guessed_updates, states.least_updates),
                )
            )
            lower = lower if level == 0 else np.maximum(lower, self._solved_with_less_room(level))
            states.seconds[part] = np.where(open_, lower, states.seconds[part])
            states.updates[part] = np.where(open_, updates, states.updates[part])
            states.following[part] = np.where(open_, self._following(lower, level), states.following[part])

    def _solved_with_less_room(self, level: int) -> NDArray[np.float64]:
        """Return […, shapes and policies]: the most seconds of a stage solved for fewer in flight; 0 where unknown."""
        found = np.zeros(self._guessed.shape)
        for lower in range(level):
            part = self.configurations.block(lower)
            found = np.maximum(found, np.where(self.states.solved[part], self.states.seconds[part], 0.0))
        return found

    def _most_following(self, in_flight: int) -> int:
        """Return the most stages that may follow a stage with memory for so many micro-batches."""
        return max(n for n in range(self.num_layers) if self.batch.in_flight(n) <= in_flight)

    def _taking(self, work: NDArray[np.float64] | float, inflow: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return the seconds per micro-batch of stages from their work, dispatches, and transfers in both directions.

        As in a deep pipeline: with one more micro-batch in flight for each stage that follows they wait for all of
        their transfers, with two more only for the part that exceeds half of their work.
        """
        # A forward and a backward task per micro-batch, and one update per step.
        dispatched = (2 + 1 / self.batch.num_microbatches) * dispatch_seconds(self.space.cluster)
        waits = np.maximum(0, inflow - 0.5 * work) if self.batch.schedule.overlaps_transfers else 2 * inflow
        return np.asarray(dispatched + work + waits)

    def _filling(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what the first micro-batch waits in stages of these seconds beyond what these allow for.

        It waits for all transfers, also for those that work on other micro-batches hides later, but most of them are
        not the slowest. What is postponed to the end is done during transfers back.
        """
        slowest, mean = (inflow[..., None] for inflow in self.inflows)
        share = self.batch.waiting_share()
        # See `_taking`: nothing is waited for in stages that work for as long as their transfers take.
        waits = np.maximum(0.0, 2 * slowest - seconds) if self.batch.schedule.overlaps_transfers else 2 * slowest
        return np.broadcast_to((1 + share) * mean - share * waits, seconds.shape)

    def _waiting_longer(self, slower: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [layers, kinds, kinds]: how much longer stages wait for slower transfers; see `_taking`."""
        if not self.batch.schedule.overlaps_transfers:
            return 2 * slower
        # The table has inflow by first layer and kinds alone: the median stage stands for the work that hides it.
        best = self._guessed.min(axis=-1)
        usual = [np.median(found) if (found := of_kind[np.isfinite(of_kind)]).size else 0.0 for of_kind in best.T]
        hidden, inflow = 0.5 * np.array(usual), np.moveaxis(self.inflows.slowest.diagonal(), -1, 0)[:, None]
        return np.maximum(0.0, inflow + slower - hidden) - np.maximum(0.0, inflow - hidden)

    def excess(self) -> NDArray[np.float64]:
        """Return [policies, kinds, shapes]: the least known ratio of seconds and guess.

        It is taken over the stages that lack the memory that their guess assumes.
        """
        tight = self.configurations.repeated(self._roomy < 0)
        ratio = self._longer_than_guessed(1, among=tight).reshape(len(self.space.kinds), len(self.costs.policies), -1)
        return np.moveaxis(ratio, 1, 0)

    def _spread(self, seconds: NDArray[np.float64], updates: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of stages with their updates spread over the micro-batches, to compare stages alone."""
        return seconds + updates / self.batch.num_microbatches

    @property
    def _in_all(self) -> NDArray[np.float64]:
        return self._spread(self.states.seconds, self.states.updates)

    @property
    def _guessed_in_all(self) -> NDArray[np.float64]:
        return self._spread(self._guessed, self._guessed_updates)

    def _longer_than_guessed(self, many: int, among: NDArray[np.bool_] | bool = True) -> NDArray[np.float64]:
        """Return [kinds, shapes and policies]: the least ratio of seconds and guesses `among` some stages.

        It is 1 where fewer than `many` are known.
        """
        # Guesses do not depend on the micro-batches in flight that a sharding leaves memory for.
        guessed, num_blocks = self.configurations.repeated(self._guessed_in_all), len(self.configurations.in_flight)
        seconds, known = self._in_all, self.states.solved | self.states.bounded
        looked_at = known & np.isfinite(seconds) & _has_work(guessed) & among
        ratio = np.divide(seconds, guessed, out=np.full(guessed.shape, np.inf), where=looked_at).min(axis=(0, 1))
        count = looked_at.sum(axis=(0, 1))
        least, known = (part.reshape(len(self.space.kinds), num_blocks, -1) for part in (ratio, count))
        enough = (known.sum(axis=1) >= many) & np.isfinite(least.min(axis=1))
        return np.where(enough, np.maximum(least.min(axis=1), 1.0), 1.0)

    def _longer_under_other_policies(self) -> NDArray[np.float64]:
        """Return [layers, layers, kinds, shapes and policies]: the known ratio of seconds and guess, under a policy and
        those that save no more.

        Only policies under which the stage has memory count, with the fewest micro-batches in flight. The ratio is
        expected under the policies that save more too, which differ only in what they recompute. Those that save less
        may have memory for a faster sharding.
        """
        part = self.configurations.block(0)
        states, guessed = self.states, self._guessed_in_all
        least = self._spread(states.least[part], states.least_updates[part])
        known = np.where(states.solved[part], self._in_all[part], least)
        # Lack of memory may be the reason elsewhere.
        looked_at = np.isfinite(known) & _has_work(guessed) & (self._roomy >= 0)
        ratio = np.divide(known, guessed, out=np.ones(known.shape), where=looked_at)
        of_policies = ratio.reshape(*known.shape[:3], -1, self.space.most_shapes).clip(min=1.0)
        saved = [[*Remat].index(policy) for policy in self.costs.policies]
        found = [of_policies[..., [other >= own for other in saved], :].max(axis=3) for own in saved]
        return np.concatenate(found, axis=-1)

    def _solve(self, first: int, last: int, kind: int, configuration: int) -> None:
        """Replace the guess of a stage by a bound on its cost, or the bound by the cost."""
        entry = (first, last, kind, configuration)
        # A rough solution is much cheaper to find, and its bound rules out most stages.
        quick = not self.states.bounded[entry]
        solution = self.solution(*entry, quick=quick)
        states, inflow = self.states, self.inflows.slowest[first, last, kind]
        loop, update = solution.cost.loop_seconds, solution.cost.update_seconds
        if quick and solution.choice is not None and solution.gap > self.costs.any_number.effort.relative_gap:
            states.least[entry] = self._taking(loop * (1 - solution.gap), inflow)
            states.least_updates[entry] = update * (1 - solution.gap) + self._least_for_rows[entry[:3]]
            # Marked apart from the bound, which is 0 where the solver ran out of time before it had one.
            states.bounded[entry] = True
            return
        states.solved[entry] = True
        states.seconds[entry], states.following[entry] = np.inf, -1
        if solution.status is Status.INFEASIBLE:
            # Stages with more layers or more micro-batches in flight do not fit either.
            around = np.s_[: first + 1, last:, kind, self.configurations.alike(configuration)]
            states.seconds[around], states.following[around], states.solved[around] = np.inf, -1, True
        if solution.choice is not None:
            states.seconds[entry] = self._taking(loop, inflow)
            states.updates[entry] = update + self._for_rows(*entry, solution)
            states.following[entry] = self._stages_that_may_follow(solution, self.space.room_bytes[kind])

    def _for_rows(self, first: int, last: int, kind: int, configuration: int, solution: StageSolution) -> float:
        """Return the seconds per step to move rows of stacked arguments, if any move; see `boundaries`."""
        if not self.all_equal and not self._least_for_rows[first, last, kind]:
            return 0.0
        costs, first, last = self._asked(first, last, kind, configuration)
        # Loops are cut by their work and not by their trips: stages of equally much may hold unequal numbers of rows.
        arrays = uneven_arrays(costs) if self.all_equal else None
        place = StagePlace(first, last, self.space.submesh(kind), self.mesh(kind, configuration))
        return seconds_of_rows(costs, place, solution, arrays=arrays)

    def _stages_that_may_follow(self, solution: StageSolution, room_bytes: float) -> int:
        """Return the most stages that may follow, so that the micro-batches in flight fit here; -1 if none fit."""
        counts = reversed(range(self.num_layers))
        return next((n for n in counts if solution.cost.bytes_in_flight(self.batch.in_flight(n)) <= room_bytes), -1)


def _entries(found: StageChoice) -> list[tuple[int, int, int, int]]:
    return [(s.first_layer, s.last_layer, s.submesh, s.configuration) for s in found.stages]


def _has_work(guessed: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where a ratio to the guess is defined: where stages can run and have something to do."""
    return np.isfinite(guessed) & (guessed > 0)
