"""The plan that a jitted step is: the placement that `jax.jit` was given for it, and what XLA makes of it inside.

    jax.jit(step, in_shardings=…, out_shardings=…)             specs of arguments and results
    arguments with a `NamedSharding`                           specs of arguments
    with_sharding_constraint, reshard, inner jax.jit           specs of values in between
    Shardy's propagation, which XLA runs first                 specs of all other values   (`trace.passes.propagated`)

It is `OnMesh` on the mesh that these name, with `user_shardings="pin"`. Where values lie is XLA's choice so; how they
get there, and which device computes an op whose operands lie otherwise, is that of the integer program.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.sharding_demands import user_mesh
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.on_mesh import OnMesh
from alpa_lite.planners.planner import Planner
from alpa_lite.program.user_shardings import UserShardings

Inside = Literal["propagated", "cheapest"]
"""Who chooses the specs of values in between that nothing says: XLA's propagation, or the integer program."""


@dataclass(frozen=True, kw_only=True)
class Jitted(Planner):
    """A plan of one stage with the shardings that the step and its arguments name, on the mesh that they name.

    The step may be what `jax.jit` returned, with shardings on a mesh of devices or on a `jax.sharding.AbstractMesh`. It
    runs its batch at once, as it is written; with `num_microbatches` given, it is what this many micro-batches would
    make of it, each with these shardings.

    Attributes:
        inside: who chooses the shardings of all other values: "propagated", XLA as it would compile the step, or
            "cheapest", the planner.
    """

    obeys_user_shardings = True

    inside: Inside = "propagated"

    @property
    def name(self) -> str:
        """Name for tables."""
        return _named("as jitted", self.inside)

    def demands(self, request: PlanRequest) -> UserShardings:
        """Return the shardings of the step and its arguments. Raises `PlanError` if they name no mesh, or several."""
        given = request.signature.user_shardings
        found = replace(given, mode="pin", propagated=self.inside == "propagated")
        if given.mode == "ignore" or user_mesh(request.step_at(1, 0), found) is None:
            raise PlanError(
                f"{request.signature.function} and its arguments name no shardings to plan by. Pass what jax.jit(step, "
                "in_shardings=…) returns, or arguments (jax.ShapeDtypeStructs will do) whose sharding is a "
                'NamedSharding; and leave user_shardings at "hint".'
            )
        return found

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if the mesh has another number of devices than the cluster."""
        return plan_under_demands(self.name, request)


def _named(what: str, inside: Inside) -> str:
    return what if inside == "propagated" else f"{what}, cheapest inside"


def plan_under_demands(name: str, request: PlanRequest) -> Plan:
    """Return the plan of one stage on the mesh of the demands on a step. Raises `PlanError` for one of another size."""
    axes, cluster = user_mesh(request.step_at(1, 0), request.signature.user_shardings), request.cluster
    if axes is None:
        raise PlanError(
            f"A plan {name} follows the shardings of a program, which this planner gets where it plans alone. Name it "
            "as the planner of al.plan or al.compare."
        )
    if prod(axes.values()) != cluster.num_devices:
        raise PlanError(
            f"{request.signature.function} names shardings on the mesh {axes}, which has {prod(axes.values())} "
            f"devices, but {cluster.name} has {cluster.num_devices}. Plan for a cluster of that size, or name a mesh "
            "of this one."
        )
    if request.num_microbatches != "auto":
        _check_microbatch(request, int(request.num_microbatches))
    return replace(OnMesh(axes=axes).plan(request), name=name)


def _check_microbatch(request: PlanRequest, count: int) -> None:
    """Raise `PlanError` if a micro-batch is too small for the sharding of an argument, which `jax.jit` would refuse."""
    given, whole, step = request.signature.user_shardings.arguments, request.step_at(1, 0), request.step_at(count, 0)
    for v, w in zip(step.graph.inputs, whole.graph.inputs, strict=False):
        value, at_full_batch = step.graph.values[v], whole.graph.values[w]
        sharding = given.get(value.name)
        if sharding is None or not sharding.divides(at_full_batch.shape) or sharding.divides(value.shape):
            continue
        raise PlanError(
            f"num_microbatches={count} was given, but {value.name} of a micro-batch has the shape {value.shape}, which "
            f"its sharding {sharding} on the mesh {sharding.sizes} does not divide. Use fewer micro-batches."
        )
