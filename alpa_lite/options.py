"""The options of a parallel step, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from alpa_lite.errors import PlanError
from alpa_lite.microbatch import OnNonAdditive
from alpa_lite.plan_cache import Cache
from alpa_lite.planners import Auto, Planner
from alpa_lite.progress import Progress
from alpa_lite.runtime.execute import WATCHDOG_SECONDS
from alpa_lite.runtime.local_cluster import local_cluster
from alpa_lite.trace import BatchArgnums
from cost_models.cluster import Cluster, load_cluster


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `parallelize`; see there."""

    cluster: Cluster | None = None
    planner: Planner = field(default_factory=Auto)
    num_microbatches: int | str = "auto"
    donate_argnums: int | tuple[int, ...] = ()
    static_argnums: int | tuple[int, ...] = ()
    batch_argnums: BatchArgnums = None
    on_non_additive: OnNonAdditive = "refuse"
    progress: Progress = field(default_factory=Progress)
    cache: Cache = True
    watchdog_seconds: float | None = WATCHDOG_SECONDS


def check_microbatches(value: int | str) -> int | str:
    """A positive number or "auto"."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PlanError(f'num_microbatches={value!r} was given; it must be a positive whole number or "auto".')


def checked_on_non_additive(value: OnNonAdditive) -> OnNonAdditive:
    """What to do about a step that is no sum over its samples. Raises `PlanError` for anything else."""
    if value not in get_args(OnNonAdditive):
        raise PlanError(f"on_non_additive={value!r} was given; it must be one of {', '.join(get_args(OnNonAdditive))}.")
    return value


def named_cluster(value: Cluster | str | None) -> Cluster | None:
    """The cluster, loaded where its name is given."""
    return load_cluster(value) if isinstance(value, str) else value


def found_cluster(value: Cluster | str | None) -> Cluster:
    """The cluster given, or that of this process."""
    named = named_cluster(value)
    return named if named is not None else local_cluster()


def as_numbers(value: int | Sequence[int]) -> tuple[int, ...]:
    """One number or several, as a tuple."""
    return (value,) if isinstance(value, int) else tuple(value)
