"""The alternatives of a decision: the predicted step with each, and the cost that makes the difference.

Each row gives one decision another value and solves everything else in its stage again (`repricing`); the stages, their
devices and the micro-batches stay. The deciding cost is the one that grows the most: a collective on a source line (an
edge of the stage's problem), the compute, or the memory at the peak (a memory row of the integer program).

    parameters   the specs that the arrays can have                                       `of_parameters`
    ops          the placements of an op                                                  `of_op`
    stages       other logical meshes over its devices                                    `of_stage`
    layers       the neighbouring stage, for a layer at a border of its stage             `of_layer`
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from alpa_lite.inspection.text.groups import group_collectives
from alpa_lite.inspection.text.tables import Table
from alpa_lite.inspection.why.repricing import Repricing, placed_stage
from alpa_lite.inspection.why.stage_problem import Given, StageProblem
from alpa_lite.inter_op.space import meshes_of
from alpa_lite.intra_op.problem import Status
from alpa_lite.intra_op.shortage import shortage_of
from alpa_lite.intra_op.stage import Key, StageSolution
from alpa_lite.plan.plan import OpPlacement
from alpa_lite.plan.walk import placed_specs
from alpa_lite.sharding.meshes import LogicalMesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.text import short_sources, show_bytes, show_milliseconds, show_percent, show_seconds

MAX_PRICED = 12
"""The greatest number of values of a decision that are priced: those that cost least with all else unchanged."""

MAX_ROWS = 8

OUT_OF_TIME = "the solver ran out of time"
"""What is said of a value for which no choices were found in time, though there may be some."""

_PHASE = "alternatives"
"""The phase of the `Progress`; each value of a decision that is priced is a unit of work."""

_SAME = 1e-3
"""The share of the step below which a difference counts as none: stages are solved to a gap of half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One value of a decision.

    what            the value, in words
    chosen          whether the plan has this value
    step_seconds    the predicted step with everything else in the stage solved for it; None if it is not possible
    peak_bytes      the greatest peak memory per device of the stages concerned; None if it is not possible
    decides         the cost that decides for or against it, in words
    """

    what: str
    chosen: bool
    step_seconds: float | None
    peak_bytes: float | None
    decides: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The values of a decision, the chosen one first, the others by their cost; `sentences` draw the conclusion.

    `num_unpriced` further values were left when the time for pricing was over.
    """

    decision: str
    rows: tuple[Alternative, ...]
    sentences: tuple[str, ...]
    num_unpriced: int = 0

    def table(self) -> Table:
        """Return the values as a table, the cheapest `MAX_ROWS` of them."""
        chosen = self.rows[0].step_seconds or 0.0
        columns = (self.decision, "ms per step", "change", "peak memory", "what decides")
        shown = self.rows[:MAX_ROWS]
        rest = len(self.rows) - len(shown)
        return Table(
            title="Alternatives, with the rest of the stage chosen for each",
            columns=columns,
            rows=tuple(_row(each, chosen) for each in shown),
            numeric=frozenset(columns[1:4]),
            note="; ".join(
                filter(
                    None,
                    (
                        f"… and {rest} more, which cost more" if rest else "",
                        f"{self.num_unpriced} more were not priced, as the time was over" if self.num_unpriced else "",
                    ),
                )
            ),
        )

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        rows = [asdict(row) for row in self.rows]
        return {"decision": self.decision, "rows": rows, "num_unpriced": self.num_unpriced}


def _row(each: Alternative, chosen: float) -> tuple[str, ...]:
    what = f"{each.what} (chosen)" if each.chosen else each.what
    peak = "" if each.peak_bytes is None else show_bytes(each.peak_bytes)
    if each.step_seconds is None:
        return what, "–", "not priced" if each.decides == OUT_OF_TIME else "not possible", peak, each.decides
    change = (each.step_seconds - chosen) / chosen if chosen > 0 else 0.0
    sign = f"{'+' if change > 0 else '−'}{show_percent(abs(change))}" if abs(change) >= _SAME else "the same"
    sign = "" if each.chosen else sign
    return what, show_milliseconds(each.step_seconds), sign, peak, each.decides


@dataclass(frozen=True, slots=True, kw_only=True)
class _GivenStages:
    """A value of a decision as restrictions: for each stage number, its problem and the strategies allowed."""

    what: str
    chosen: bool
    stages: Mapping[int, tuple[StageProblem, Given]]


def of_parameters(repricing: Repricing, members: Mapping[int, Sequence[str]]) -> Alternatives | None:
    """Price the specs that arguments can have, the same for all of them; `members` are names by stage number.

    Returns None if there is no choice.
    """
    tables: list[tuple[int, dict[Spec, Given]]] = []
    chosen: Spec | None = None
    for number, names in members.items():
        # A stage may store several arrays of one path, as layers of a group do: all of them change together.
        stage, wanted = repricing.stages[number], frozenset(names)
        for v in stage.view.external:
            if stage.view.graph.values[v].name in wanted and stage.view.lives_here(v):
                tables.append((number, stage.strategies_of_input(v)))
                chosen = repricing.plan.stages[number].inputs[v]
    common = [spec for spec in (tables[0][1] if tables else ()) if all(spec in table for _, table in tables)]
    # One spec is no decision. Arrays that are priced together must all be able to have it.
    if chosen is None or len(common) < 2:
        return None
    changes = [
        _GivenStages(
            what=str(spec),
            chosen=spec == chosen,
            stages={
                number: (repricing.stages[number], _merged(table[spec] for n, table in tables if n == number))
                for number in members
            },
        )
        for spec in common
    ]
    return _priced(repricing, "spec", str(chosen), _cheapest_changes(repricing, changes))


def of_op(repricing: Repricing, keys: Mapping[int, Key]) -> Alternatives | None:
    """Price the placements of an op, or of equal ops of several stages, the same for all; `keys` are by stage number.

    Returns None if there is no choice.
    """
    tables = {number: repricing.stages[number].strategies_of_op(key) for number, key in keys.items()}
    # Equal ops of several stages have equal placements, so that one stage can describe them.
    first, *_ = keys
    common = [placement for placement in tables[first] if all(placement in table for table in tables.values())]
    if len(common) < 2:
        return None
    stage = repricing.stages[first]
    chosen = _chosen_placement(stage, tables[first])
    changes = [
        _GivenStages(
            what=_placement_text(stage, keys[first], placement),
            chosen=placement == chosen,
            stages={number: (repricing.stages[number], table[placement]) for number, table in tables.items()},
        )
        for placement in common
    ]
    text = _placement_text(stage, keys[first], chosen)
    return _priced(repricing, "reads → makes", text, _cheapest_changes(repricing, changes))


def _chosen_placement(stage: StageProblem, options: Mapping[OpPlacement, Given]) -> OpPlacement:
    # Every placement restricts the same node, which decides on the op.
    node = next(iter(next(iter(options.values()))))
    return next(p for p, given in options.items() if stage.choices[node] in given[node])


def _placement_text(stage: StageProblem, key: Key, placement: OpPlacement) -> str:
    graph, op = stage.op(key)
    specs = placed_specs(graph, op, placement)
    read = [str(s) for s, v in zip(specs.operands, graph.operands(op), strict=True) if v.rank]
    return f"{' × '.join(read) or 'scalars'} → {', '.join(map(str, placement.results))}"


def of_stage(repricing: Repricing, number: int) -> Alternatives | None:
    """Price the other logical meshes over the devices of a stage. Returns None if there are none."""
    stage, plan = repricing.stages[number], repricing.plan
    meshes = meshes_of(stage.submesh, plan.cluster)
    others = [mesh for mesh in meshes if not _equivalent(mesh, stage.mesh)]
    if not others:
        return None
    first, last = plan.stages[number].layers
    changes = [_GivenStages(what=str(stage.mesh), chosen=True, stages={number: (stage, {})})]
    for mesh in others:
        problem = repricing.problem(number, first=first, last=last, mesh=mesh)
        changes.append(_GivenStages(what=str(mesh), chosen=False, stages={number: (problem, {})}))
    return _priced(repricing, "logical mesh", str(stage.mesh), changes[:MAX_PRICED])


def _equivalent(a: LogicalMesh, b: LogicalMesh) -> bool:
    """Return True if two meshes are equivalent: the name of an axis does not matter if it is the only one."""
    return a == b or (len(a.shape) == len(b.shape) == 1)


def of_layer(repricing: Repricing, layer: int) -> Alternatives | None:
    """Price moving a layer at the border of its stage to the neighbouring stage. Returns None if it cannot move."""
    plan = repricing.plan
    home = plan.stage_of_layer(layer)
    first, last = plan.stages[home].layers
    # A stage must keep a layer.
    if first == last:
        return None
    changes = [_GivenStages(what=f"stage {home}", chosen=True, stages={})]
    # Stages are ranges of layers: only the first layer can go to the stage before, only the last to the one after.
    for other, at_border in ((home - 1, layer == first), (home + 1, layer == last)):
        if not at_border or not 0 <= other < len(plan.stages):
            continue
        mine = (first + 1, last) if other < home else (first, last - 1)
        theirs = plan.stages[other].layers
        grown = (theirs[0], layer) if other < home else (layer, theirs[1])
        stages = dict[int, tuple[StageProblem, Given]]()
        for number, (a, b) in ((home, mine), (other, grown)):
            stages[number] = repricing.problem(number, first=a, last=b, mesh=plan.stages[number].mesh_shape), {}
        changes.append(_GivenStages(what=f"stage {other}", chosen=False, stages=stages))
    return _priced(repricing, "stage of the layer", f"stage {home}", changes) if len(changes) > 1 else None


def _merged(given: Iterable[Given]) -> Given:
    found: dict[int, frozenset[int]] = {}
    for each in given:
        for node, allowed in each.items():
            # A node that several arrays restrict may take what all of them allow.
            found[node] = found.get(node, allowed) & allowed
    return found


def _cheapest_changes(repricing: Repricing, changes: Sequence[_GivenStages]) -> list[_GivenStages]:
    """Return at most `MAX_PRICED` changes, those that cost least with all else unchanged, including the chosen one.

    A single change costs a lookup in the problem's cost vectors, whereas pricing it with the rest free costs a solve.
    """
    # A solve takes seconds, and a large array may have dozens of specs.
    if len(changes) <= MAX_PRICED:
        return list(changes)

    def alone(change: _GivenStages) -> tuple[bool, float]:
        seconds = 0.0
        for stage, given in change.stages.values():
            for node, allowed in given.items():
                # An order alone, and no bound: neighbours that would adapt to the change stay as they are.
                costs = stage.single_change_seconds(node)
                seconds += min(float(costs[i]) for i in allowed)
        return not change.chosen, seconds

    return sorted(changes, key=alone)[:MAX_PRICED]


def _priced(repricing: Repricing, decision: str, chosen: str, changes: Sequence[_GivenStages]) -> Alternatives:
    """Price all changes; the row of the chosen value has the plan's own prediction."""
    plan = repricing.plan
    stages = sorted({number for change in changes for number in change.stages})
    rows: list[Alternative] = []
    anew: Alternative | None = None
    progress = repricing.request.progress
    progress.begin(_PHASE)
    with progress.during(_PHASE):
        progress.expect(_PHASE, len(changes))
        # The chosen value comes last: its row is known, and says only whether the rest could suit it better.
        for number, change in enumerate(sorted(changes, key=lambda change: change.chosen)):
            if rows and repricing.left_seconds <= 0:
                break
            progress(f"{decision} {number + 1} of {len(changes)}: {change.what}")
            row = _alternative(repricing, change)
            if change.chosen:
                anew = row
            else:
                rows.append(row)
            progress.did()
    # The chosen row is the plan's own prediction, and not the stage solved anew, which may be a little better.
    peaks = [plan.prediction.peak_bytes[number] for number in stages]
    first = Alternative(
        what=chosen,
        chosen=True,
        step_seconds=plan.prediction.step_seconds,
        peak_bytes=max(peaks, default=None),
        decides="",
    )
    # Impossible values come last.
    rows.sort(key=lambda row: (row.step_seconds is None, row.step_seconds or 0.0))
    others = sum(not change.chosen for change in changes)
    return Alternatives(
        decision=decision,
        rows=(first, *rows),
        sentences=_sentences(first, rows, anew),
        num_unpriced=others - len(rows),
    )


def _sentences(chosen: Alternative, rows: Sequence[Alternative], anew: Alternative | None) -> tuple[str, ...]:
    """Return the cost of the cheapest change, and whether the rest of the stage could suit the chosen value better."""
    found: list[str] = []
    step = chosen.step_seconds or 0.0
    possible = [row for row in rows if row.step_seconds is not None]
    if possible:
        seconds = (possible[0].step_seconds or 0.0) - step
        word = f"costs {show_seconds(seconds)} per step more" if seconds > _SAME * step else "costs the same"
        if seconds < -_SAME * step:
            word = f"takes {show_seconds(-seconds)} per step less"
        decides = f" ({possible[0].decides})" if possible[0].decides and abs(seconds) > _SAME * step else ""
        found.append(f"The cheapest change, to {possible[0].what}, {word}{decides}.")
    elif any(row.decides == OUT_OF_TIME for row in rows):
        found.append("Nothing else could be priced in time.")
    elif rows:
        found.append(f"Nothing else is possible: {rows[0].decides}.")
    # Only a clear difference: the solver's own gap may be behind a small one.
    if anew is not None and anew.step_seconds is not None and anew.step_seconds < step * (1 - 10 * _SAME):
        found.append(
            f"With {chosen.what} fixed and the rest of the stage free, a step would take "
            f"{show_seconds(anew.step_seconds)}: the planner of this plan does not search for this."
        )
    return tuple(found)


def _alternative(repricing: Repricing, change: _GivenStages) -> Alternative:
    solved = repricing.solve_all(change.stages)
    failed = [number for number, solution in solved.items() if solution.choice is None]
    if failed:
        # With most micro-batches in flight, it has the least memory left, which is the usual reason.
        worst = max(failed, key=lambda number: change.stages[number][0].in_flight)
        return Alternative(
            what=change.what,
            chosen=change.chosen,
            step_seconds=None,
            peak_bytes=None,
            decides=_reason_infeasible(*change.stages[worst], solved[worst]),
        )
    # The other stages stay as planned, but the step is priced whole: a slower stage may be hidden in a pipeline.
    changed = {number: placed_stage(change.stages[number][0], solution) for number, solution in solved.items()}
    before, after = repricing.as_planned, repricing.predicted(changed)
    # Only the difference of the two predictions counts, so that all rows are relative to the plan's own figure even
    # where predicting it again would give a slightly different one.
    step = repricing.plan.prediction.step_seconds + after.step_seconds - before.step_seconds
    planned = {number: repricing.stages[number].as_planned for number in solved}
    return Alternative(
        what=change.what,
        chosen=change.chosen,
        step_seconds=step,
        peak_bytes=max((after.peak_bytes[number] for number in solved), default=None),
        decides=_deciding_cost(
            planned,
            solved,
            stacks_seconds=repricing.stacks_seconds(changed) - repricing.stacks_seconds({}),
            slower=after.step_seconds >= before.step_seconds,
        ),
    )


def _reason_infeasible(stage: StageProblem, given: Given, solution: StageSolution) -> str:
    """Return the memory row that forbids a change, or that the solver ran out of time."""
    if solution.status is not Status.INFEASIBLE:
        return OUT_OF_TIME
    why = shortage_of(stage.builder, stage.problem(given), in_flight=stage.in_flight)
    if why.explained.impossible:
        return "no sharding of its neighbours goes with it"
    over = why.explained.over_bytes
    largest = f", {show_bytes(why.values[0].bytes)} of it {short_sources(why.values[0].name)}" if why.values else ""
    return f"memory: {show_bytes(over)} too much {short_sources(why.when)}{largest}"


def _deciding_cost(
    before: Mapping[int, StageSolution], after: Mapping[int, StageSolution], *, stacks_seconds: float, slower: bool
) -> str:
    """Return the cost that grows the most, or shrinks the most if the change is an improvement."""
    changes = {
        "stacked arrays are resharded, as stages no longer agree on the spec of their row blocks": stacks_seconds
    }
    for number, solution in after.items():
        # Differences by cause: what both have cancels.
        for sign, which in ((-1.0, before[number]), (1.0, solution)):
            changes["compute"] = changes.get("compute", 0.0) + sign * which.compute_seconds
            for group in group_collectives(which.collectives):
                name = f"{group.kind} over {group.axis}, {group.phase}, {group.source}"
                changes[name] = changes.get(name, 0.0) + sign * group.seconds
    # The cost that explains the sign of the change: others may have changed more in the other direction.
    pick = max if slower else min
    what, seconds = pick(changes.items(), key=lambda item: item[1], default=("", 0.0))
    # No single cost has the sign of the whole change: then none is named.
    if abs(seconds) < 1e-9 or (seconds > 0) != slower:
        return ""
    return f"{'+' if seconds > 0 else '−'}{show_milliseconds(abs(seconds))} ms {what}"


def without_memory_limit(repricing: Repricing, number: int) -> str:
    """Return a sentence on the seconds that the memory limit of a stage costs; "" if it costs none."""
    stage = repricing.stages[number]
    # Without the limit the stage takes what it likes; only if that is more, and faster, the limit decides.
    free, bound = stage.solve(limited=False, seconds=repricing.solve_seconds), repricing.as_planned.step_seconds
    if free.choice is None:
        return ""
    after = repricing.predicted({number: placed_stage(stage, free)})
    saved = bound - after.step_seconds
    if after.peak_bytes[number] <= stage.limit_bytes or saved < 10 * _SAME * bound:
        return ""
    return (
        f"Memory decides here: with {show_bytes(after.peak_bytes[number])} per device a step would take "
        f"{show_seconds(saved)} less."
    )
