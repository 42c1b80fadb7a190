"""Plan a step so that the arguments which it shares with another step stay where that step has them.

The last batch of an epoch may be smaller, and an evaluation step reads the parameters that a train step updates;
neither should move the state over the devices and back. The plan of such a step is one stage on the mesh of the other
plan, with the specs of shared arguments pinned; the integer program chooses the rest (`planners.OnMesh`).

An argument is shared if the other step has one of the same shape and path, or one whose path ends in the same way and
in no other's (`state/params/w` and `params/w`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alpa_lite.plan.plan import Plan
from alpa_lite.planners import OnMesh
from alpa_lite.sharding.specs import Spec
from alpa_lite.trace.trace import Traced


def planner_with_placement(plan: Plan, traced: Traced) -> OnMesh | None:
    """Return a planner that leaves shared arguments where a plan has them; None if its stages lie apart."""
    if len(plan.stages) != 1:
        return None
    (stage,) = plan.stages
    pins = {name: [axes or None for axes in spec.dims] for name, spec in _shared(plan, traced)}
    return OnMesh(axes=dict(stage.mesh_shape.axis_sizes), pins=pins)


def num_shared(plan: Plan, traced: Traced) -> int:
    """Return the number of arguments that a traced step shares with the step of a plan."""
    return sum(1 for _ in _shared(plan, traced))


def _shared(plan: Plan, traced: Traced) -> Iterator[tuple[str, Spec]]:
    """Yield the path of each shared argument with the spec that the plan gives it; batches are not shared."""
    known = {name: (spec, stage.shapes.get(name)) for stage in plan.stages for name, spec in stage.specs.items()}
    batch = plan.batch.dims if plan.batch is not None else {}
    for name, leaf, dim in zip(traced.names, traced.leaves, traced.batch_leaves, strict=True):
        if dim is not None:
            continue
        shapes = {other: shape.dims for other, (_, shape) in known.items() if shape is not None and other not in batch}
        fitting = [other for other, dims in shapes.items() if dims == leaf.shape]
        if (found := _same_name(name, fitting)) is not None:
            yield name, known[found][0].without_partial()


def _same_name(name: str, others: Sequence[str]) -> str | None:
    """Return the path that agrees with a path in the most components at its end; None if several do, or none."""
    if name in others:
        return name
    lengths = {other: _common_end(name, other) for other in others}
    most = max(lengths.values(), default=0)
    longest = [other for other, length in lengths.items() if length == most]
    return longest[0] if most > 0 and len(longest) == 1 else None


def _common_end(one: str, other: str) -> int:
    count = 0
    for a, b in zip(reversed(one.split("/")), reversed(other.split("/")), strict=False):
        if a != b:
            break
        count += 1
    return count


def fitting_microbatches(batch_size: int, largest_microbatch: float) -> int:
    """Return the least number of micro-batches that divides a batch into parts of no more than so many samples."""
    return next(m for m in range(1, batch_size + 1) if batch_size % m == 0 and batch_size / m <= largest_microbatch)
