"""The planners to compare, by name and options: `auto,pipeline:pipeline=4,hybrid:pipeline=2:tensor=2`, or `all`.

`all` is the search, the search with one level only, and every other planner of the command line: with its default
options or, where its degrees are options, with each that the cluster has room for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import alpa_lite as al
from alpa_lite.cli.plan_command import make_planner
from alpa_lite.errors import AlpaLiteError
from alpa_lite.planners import Auto, Planner
from alpa_lite.planners.by_name import PLANNERS
from alpa_lite.planners.planner import Replay
from cost_models.cluster import Cluster

SEARCHES = (Auto(), Auto(intra_op_only=True), Auto(inter_op_only=True))
"""The search with both levels, and with each alone."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A planner with its displayed name; without a planner, `problem` is the reason."""

    name: str
    planner: Planner | None = None
    problem: str = ""

    @property
    def searches(self) -> bool:
        """Whether it searches, as opposed to a manual plan."""
        return isinstance(self.planner, Auto)

    @property
    def is_auto(self) -> bool:
        """Whether it is the full search."""
        return isinstance(self.planner, Auto) and not (self.planner.intra_op_only or self.planner.inter_op_only)


def named_contenders(text: str, cluster: Cluster) -> tuple[Contender, ...]:
    """Return the planners of a list, or all, without duplicates. Raises `PlanError` for unknown names."""
    found = list(_all(cluster)) if text == "all" else [_named(part) for part in text.split(",")]
    planners = [each.planner for each in found]
    return tuple(each for i, each in enumerate(found) if each.planner is None or each.planner not in planners[:i])


def _named(text: str) -> Contender:
    name, *options = text.split(":")
    return _contender(make_planner(name, options))


def _all(cluster: Cluster) -> Iterator[Contender]:
    yield from map(_contender, SEARCHES)
    for name, kind in PLANNERS.items():
        if kind is Auto:
            continue
        for options in _degrees(name, cluster):
            shown = name + "".join(f":{key}={value}" for key, value in options.items())
            try:
                yield _contender(kind(**options))
            except (TypeError, AlpaLiteError) as error:  # an option without a default, or one that it refuses
                yield Contender(name=shown, problem=f"It cannot be made without options: {error}")


def _degrees(name: str, cluster: Cluster) -> Sequence[dict[str, Any]]:
    """Return the sets of options of a planner, each of which is one contender."""
    total = cluster.num_devices
    ways = [n for n in range(2, total + 1) if total % n == 0]
    if name in ("pipeline", "torchgpipe"):
        return [{"pipeline": n} for n in ways] or [{}]
    if name == "convolution_parallel":
        return [{}, *({dim: ways[0]} for dim in ("height", "width", "channel", "filter") if ways)]
    if name == "megatron":
        return [{"tensor": n} for n in ways if n <= cluster.devices_per_host] or [{}]
    if name == "zero":
        return [{"stage": 1}, {"stage": 2}]
    if name == "hybrid":
        both = [(p, t) for p in ways for t in ways if total % (p * t) == 0 and t <= cluster.devices_per_host]
        return [{"pipeline": p, "tensor": t, "data": total // (p * t)} for p, t in both]
    return [{}]


def _contender(planner: Planner | al.Plan) -> Contender:
    found = Replay(saved=planner) if isinstance(planner, al.Plan) else planner
    top = found.measure_top if isinstance(found, Auto) else 0
    return Contender(name=f"{found.name}, best of {top} measured" if top else found.name, planner=found)
