"""Shardings that the user's own code gives: `with_sharding_constraint`, `reshard`, `out_sharding=`, placed arguments,
`jax.jit(in_shardings=…, out_shardings=…)`.

A value of a program holds the shardings that the user's code gives it. Arguments are placed by the arrays that the step
is traced for, and by the `in_shardings` of a jitted step.

    "hint"      the plan is free, and lists which of them it follows
    "pin"       the plan obeys them, on the mesh that they name: the value is the result of an op of the primitive
                `USER_SHARDING`, which returns its operand, so that it may have one spec and its operand another
    "ignore"    they are dropped while the step is traced
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

USER_SHARDING = "user_sharding"
"""The primitive of ops that return their operand in the sharding that the user demands."""

Mode = Literal["pin", "hint", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UserSharding:
    """The layout of one array on a mesh of the user.

    Attributes:
        mesh: pairs of an axis of the mesh and its number of devices.
        dims: for each dim the axes that split it, major first; None where the user leaves the dim open.
        source: the line of the user's code that gives it.
    """

    mesh: tuple[tuple[str, int], ...]
    dims: tuple[tuple[str, ...] | None, ...]
    # The same layout demanded on two lines is one layout.
    source: str = field(default="", compare=False)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of devices of each axis of the mesh."""
        return dict(self.mesh)

    @property
    def ways(self) -> tuple[int | None, ...]:
        """The number of parts of each dim; None where the user leaves the dim open."""
        sizes = self.sizes
        return tuple(None if dim is None else prod(sizes[axis] for axis in dim) for dim in self.dims)

    def divides(self, shape: tuple[int, ...]) -> bool:
        """Return True if all parts of an array of a shape are equally large."""
        return all(ways is None or n % ways == 0 for n, ways in zip(shape, self.ways, strict=True))

    def __str__(self) -> str:
        """Return text like `[data, -, ?]`: `-` for a dim that is whole, `?` for one that is open."""
        return "[" + ", ".join("?" if dim is None else "·".join(dim) or "-" for dim in self.dims) + "]"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOnMesh:
    """A part of the user's shardings that is priced by itself.

    Attributes:
        mesh: the mesh of the plan, as in `UserSharding`, whether there are shardings on it or not.
        source: the line or argument whose shardings the plan obeys; "" for none.
    """

    mesh: tuple[tuple[str, int], ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class UserShardings:
    """All shardings that the user gives with a step, apart from those of its ops.

    Attributes:
        mode: whether a plan obeys them, lists them, or does not see them.
        arguments: the layouts of arguments that lie on several devices, by path.
        results: the layouts of results that `out_shardings` of a jitted step gives, by path; the values have them too.
        part: the part that a plan obeys; None for all.
        propagated: whether values in between have the shardings that XLA's propagation makes of these.
    """

    mode: Mode = "hint"
    arguments: Mapping[str, UserSharding] = field(default_factory=dict[str, UserSharding])
    results: Mapping[str, UserSharding] = field(default_factory=dict[str, UserSharding])
    part: SourceOnMesh | None = None
    propagated: bool = False

    def obeys(self, source: str) -> bool:
        """Return True if the shardings of a line or argument are among those that a plan obeys."""
        return self.mode == "pin" and (self.part is None or self.part.source == source)


NO_USER_SHARDINGS = UserShardings(mode="ignore")
