"""What the shardings that the user's code gives would cost: the integer program with each of them, and without.

Both plans have every stage on the user's mesh, so that the difference is due to the sharding alone. A mesh of fewer
devices than the plan uses is that of a stage: as many equal stages share the devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from math import prod

from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.inspection.text.tables import Table, render, short_source
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.sharding_demands import wanted_shardings
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.hybrid import Hybrid
from alpa_lite.planners.on_mesh import OnMesh
from alpa_lite.program.user_shardings import SourceOnMesh, UserSharding
from alpa_lite.text import show_milliseconds

Mesh = tuple[tuple[str, int], ...]
"""Pairs of an axis and its number of devices."""

MOST_ROWS = 12
"""The most places in the user's code that are priced; each takes as long as planning one stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingCost:
    """The price of the user's shardings of one line or argument.

    Attributes:
        source: the line, or `argument` and a path.
        mesh: the user's mesh.
        wanted: the shardings, as text.
        free: the best plan whose stages are on this mesh, or why there is none.
        given: the best of those that have the shardings, or why there is none.
    """

    source: str
    mesh: Mesh
    wanted: str
    free: Plan | str
    given: Plan | str

    @property
    def seconds(self) -> float | None:
        """The seconds by which a step takes longer with the shardings; None where a plan is missing."""
        if isinstance(self.free, str) or isinstance(self.given, str):
            return None
        return self.given.prediction.step_seconds - self.free.prediction.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingCosts:
    """The prices of the user's shardings of a step, with the plan of the step."""

    plan: Plan
    rows: tuple[ShardingCost, ...]
    num_left_out: int

    def __str__(self) -> str:
        if not self.rows:
            return 'The step and its arguments name no shardings, or user_shardings="ignore" was given.'
        note = f"ms: per step, predicted, with every stage on the mesh; the plan takes {_milliseconds(self.plan)}"
        columns = ("where", "yours", "mesh", "ms without", "ms with", "costs ms")
        table = Table(
            title="Shardings that your code gives, each by itself on its mesh",
            columns=columns,
            rows=tuple(map(_row, self.rows)),
            numeric=frozenset(columns[3:]),
            note=note + (f"; {self.num_left_out} more were not priced" if self.num_left_out else ""),
        )
        problems = {f"{short_source(row.source)}: {row.given}" for row in self.rows if isinstance(row.given, str)}
        return "\n\n".join([render([], [table]), *([render(sorted(problems))] if problems else [])])


def _row(cost: ShardingCost) -> tuple[str, ...]:
    mesh = " × ".join(f"{axis}={size}" for axis, size in cost.mesh)
    more = "" if cost.seconds is None else show_milliseconds(cost.seconds)
    return (short_source(cost.source), cost.wanted, mesh, _milliseconds(cost.free), _milliseconds(cost.given), more)


def _milliseconds(plan: Plan | str) -> str:
    return "no plan" if isinstance(plan, str) else show_milliseconds(plan.prediction.step_seconds)


def sharding_costs(plan: Plan) -> ShardingCosts:
    """Return the price of the user's shardings, by line and argument. Raises `PlanError` for a plan without a step."""
    if plan.request is None:
        raise PlanError(
            "A plan from a file has no step to price shardings with. Replay it: al.plan(step, *args, planner=plan)."
        )
    request: PlanRequest = plan.request
    if request.signature.user_shardings.mode == "ignore":
        return ShardingCosts(plan=plan, rows=(), num_left_out=0)
    # Both plans take the micro-batches of this one, so that only the sharding differs.
    request = replace(request, steps=request.steps.pinned(), num_microbatches=plan.num_microbatches, advise=False)
    step = request.best_step((1,), loop_parts=0)
    sources = dict[str, list[UserSharding]]()
    for _, sharding in wanted_shardings(step, request.signature.user_shardings):
        sources.setdefault(sharding.source, []).append(sharding)
    free: dict[Mesh, Plan | str] = {}
    rows: list[ShardingCost] = []
    for source, shardings in islice(sources.items(), MOST_ROWS):
        mesh = shardings[0].mesh
        # The plan without shardings depends on the mesh alone, and serves all of its lines.
        if mesh not in free:
            free[mesh] = _planned(plan, request, SourceOnMesh(mesh=mesh, source=""))
        given = _planned(plan, request, SourceOnMesh(mesh=mesh, source=source))
        wanted = ", ".join(dict.fromkeys(map(str, shardings)))
        rows.append(ShardingCost(source=source, mesh=mesh, wanted=wanted, free=free[mesh], given=given))
    return ShardingCosts(plan=plan, rows=tuple(rows), num_left_out=len(sources) - len(rows))


def _planned(plan: Plan, request: PlanRequest, part: SourceOnMesh) -> Plan | str:
    """Return the plan with stages on the mesh that obeys a part of the user's shardings, or why there is none."""
    given = replace(request.signature.user_shardings, mode="pin", part=part)
    request = replace(request, signature=replace(request.signature, user_shardings=given))
    devices = prod(size for _, size in part.mesh)
    # The plan may leave devices idle, which the mesh may have: then it is one of all devices.
    if plan.cluster.num_devices % devices == 0:
        request = replace(request, cluster=plan.cluster)
    num_stages, rest = divmod(request.cluster.num_devices, devices)
    planner = Hybrid(pipeline=num_stages) if num_stages > 1 and not rest else OnMesh(axes=dict(part.mesh))
    try:
        return planner.plan(request)
    except AlpaLiteError as error:
        # A sharding that fits no plan is a result as well: its row shows the reason.
        return str(error)
