"""A stage of a plan in the making."""

from __future__ import annotations

from dataclasses import dataclass

from alpa_lite.intra_op.solve import StageSolution
from alpa_lite.sharding.meshes import LogicalMesh, Submesh


@dataclass(frozen=True, kw_only=True)
class PlacedStage:
    """One stage of a plan in the making: layers, devices, logical mesh, and the solution on it."""

    first: int
    last: int
    submesh: Submesh
    mesh: LogicalMesh
    solution: StageSolution
