"""The plan that a jitted step is: the placement that `jax.jit` was given for it.

    jax.jit(step, in_shardings=…, out_shardings=…)             specs of arguments and results
    arguments with a `NamedSharding`                           specs of arguments
    with_sharding_constraint, reshard, inner jax.jit           specs of values in between

It is `OnMesh` on the mesh that these name, with `user_shardings="pin"`. The integer program chooses what they leave
open, where XLA's partitioner would propagate them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from alpa_lite.errors import PlanError
from alpa_lite.inter_op.plan_request import PlanRequest
from alpa_lite.inter_op.sharding_demands import user_mesh
from alpa_lite.plan.plan import Plan
from alpa_lite.planners.on_mesh import OnMesh
from alpa_lite.planners.planner import Planner


@dataclass(frozen=True, kw_only=True)
class Jitted(Planner):
    """A plan of one stage with the shardings that the step and its arguments name, on the mesh that they name.

    The step may be what `jax.jit` returned, with shardings on a mesh of devices or on a `jax.sharding.AbstractMesh`.
    """

    obeys_user_shardings = True
    needs_user_shardings = True

    @property
    def name(self) -> str:
        """Name for tables."""
        return "as jitted"

    def plan(self, request: PlanRequest) -> Plan:
        """Return the plan. Raises `PlanError` if no mesh is named, several are, or one of another size."""
        function, cluster = request.signature.function, request.cluster
        axes = user_mesh(request.step_at(1, 0), request.signature.user_shardings)
        if axes is None:
            raise PlanError(
                f"{function} and its arguments name no shardings to plan by. Pass what jax.jit(step, in_shardings=…) "
                "returns, or arguments (jax.ShapeDtypeStructs will do) whose sharding is a NamedSharding; and leave "
                'user_shardings at "hint".'
            )
        if prod(axes.values()) != cluster.num_devices:
            raise PlanError(
                f"{function} names shardings on the mesh {axes}, which has {prod(axes.values())} devices, but "
                f"{cluster.name} has {cluster.num_devices}. Plan for a cluster of that size, or name a mesh of this one."
            )
        return replace(OnMesh(axes=axes).plan(request), name=self.name)
