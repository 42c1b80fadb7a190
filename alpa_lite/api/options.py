"""The options of `parallelize`, and the checks and conversions of the values that users give for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import TypeVar, get_args

from alpa_lite.api.plan_cache import Cache
from alpa_lite.errors import PlanError
from alpa_lite.inspection.text.progress_bar import default_progress
from alpa_lite.inter_op.plan_request import OnInterrupt
from alpa_lite.plan.plan import Plan
from alpa_lite.plan.progress import Progress, Say
from alpa_lite.planners import Auto, Planner
from alpa_lite.planners.by_name import planner_by_name
from alpa_lite.planners.planner import Replay
from alpa_lite.program.user_shardings import Mode
from alpa_lite.runtime.calibrate.calibrate import local_cluster
from alpa_lite.runtime.execute.execute import WATCHDOG_SECONDS, OnHang
from alpa_lite.schedule.tasks import MOST_MICROBATCHES
from alpa_lite.step.split import OnNonAdditive
from alpa_lite.trace.batch import BatchArgnums
from cost_models.checks import printable
from cost_models.cluster import Cluster, load_cluster

Chosen = TypeVar("Chosen", bound=str)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of `parallelize`, which documents them."""

    cluster: Cluster | None = None
    planner: Planner = field(default_factory=Auto)
    num_microbatches: int | str = "auto"
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    batch_argnums: BatchArgnums = None
    on_non_additive: OnNonAdditive = "refuse"
    progress: Progress = field(default_factory=Progress)
    cache: Cache = True
    watchdog_seconds: float | None = WATCHDOG_SECONDS
    on_hang: OnHang = "auto"
    on_interrupt: OnInterrupt = "raise"
    check: bool = False
    # Checked by attributes (`_checked_like`): its classes are in modules that import this one.
    like: object = None
    user_shardings: Mode = "hint"

    @staticmethod
    def of(
        *,
        cluster: Cluster | str | PathLike[str] | None = None,
        planner: Planner | type[Planner] | Plan | str | None = None,
        num_microbatches: int | str = "auto",
        donate_argnums: int | Sequence[int] | None = (),
        donate_argnames: str | Iterable[str] | None = (),
        static_argnums: int | Sequence[int] | None = (),
        static_argnames: str | Iterable[str] | None = (),
        batch_argnums: BatchArgnums = None,
        on_non_additive: OnNonAdditive = "refuse",
        progress: Say | Progress | None = None,
        cache: Cache = True,
        watchdog_seconds: float | None = WATCHDOG_SECONDS,
        on_hang: OnHang = "auto",
        on_interrupt: OnInterrupt = "raise",
        check: bool = False,
        like: object = None,
        user_shardings: Mode = "hint",
    ) -> Options:
        """Check and convert the options that a user gave. Raises `PlanError` for a value that is not allowed."""
        return Options(
            # None stays None: the devices of this process would start JAX while a function is being decorated.
            cluster=None if cluster is None else cluster_of(cluster),
            planner=planner_of(planner),
            num_microbatches=check_microbatches(num_microbatches),
            donate_argnums=_numbers(donate_argnums),
            donate_argnames=_names(donate_argnames),
            static_argnums=_numbers(static_argnums),
            static_argnames=_names(static_argnames),
            batch_argnums=batch_argnums,
            on_non_additive=_checked("on_non_additive", on_non_additive, OnNonAdditive),
            progress=default_progress() if progress is None else Progress.of(progress),
            cache=cache,
            watchdog_seconds=_patience(watchdog_seconds),
            on_hang=_checked("on_hang", on_hang, OnHang),
            on_interrupt=_checked("on_interrupt", on_interrupt, OnInterrupt),
            check=check,
            like=_checked_like(like),
            user_shardings=_checked("user_shardings", user_shardings, Mode),
        )


def planner_of(value: Planner | type[Planner] | Plan | str | None) -> Planner:
    """Return the given planner: `Auto` for None, and one that replays the plan for a saved plan.

    A planner may be given by its name on the command line (``"fsdp"``), or by its class if it needs no options.
    Raises `PlanError` for anything else.
    """
    if value is None:
        return Auto()
    if isinstance(value, Plan):
        return Replay(saved=value)
    if isinstance(value, str):
        return planner_by_name(value, ())
    if isinstance(value, type) and issubclass(value, Planner):
        try:
            # Planners are dataclasses: one with a field without a default raises `TypeError` here.
            return value()
        except TypeError as error:
            raise PlanError(f"{value.__name__} needs options; give an object of it, as {value.__name__}(…).") from error
    if isinstance(value, Planner):
        return value
    raise PlanError(
        f"planner={printable(repr(value))} was given; it must be a planner such as al.planners.FSDP(), the name of "
        "one, or a plan."
    )


def cluster_of(value: Cluster | str | PathLike[str] | None) -> Cluster:
    """Return the given cluster, or that of a name or file; None: this process's. Raises `PlanError` for all else."""
    if value is None:
        return local_cluster()
    if isinstance(value, (str, PathLike)):
        return load_cluster(fspath(value))
    if isinstance(value, Cluster):
        return value
    raise PlanError(
        f"cluster={printable(repr(value))} was given; it must be a cluster such as al.cluster('p3.16xlarge'), or the "
        "name or file of one."
    )


def check_microbatches(value: int | str) -> int | str:
    """Check a number of micro-batches: 1 to `MOST_MICROBATCHES`, or "auto". Raises `PlanError` for anything else."""
    if value == "auto":
        return value
    # True is an int in Python, but as a number of micro-batches it is a mistake.
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_MICROBATCHES:
        return value
    raise PlanError(
        f'num_microbatches={value!r} was given; it must be a whole number from 1 to {MOST_MICROBATCHES} or "auto".'
    )


def _checked(name: str, value: Chosen, values: object) -> Chosen:
    # `values` is a `Literal` type, so that the allowed words are written once, where type checkers read them.
    if value not in get_args(values):
        allowed = " or ".join(f'"{each}"' for each in get_args(values))
        raise PlanError(f"{name}={value!r} was given; it must be {allowed}.")
    return value


def _patience(seconds: float | None) -> float | None:
    # True would otherwise count as a limit of one second.
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is None or (is_number and seconds > 0):
        return seconds
    raise PlanError(f"watchdog_seconds={seconds!r} was given; it must be a positive number of seconds, or None.")


def _checked_like(value: object) -> object:
    """Check that a value is a plan or has one. Raises `PlanError` otherwise."""
    # A decorated or planned step has `last_plan`, a compiled one `plan`; a function may get its plan after this check.
    if value is None or isinstance(value, Plan) or hasattr(value, "last_plan") or hasattr(value, "plan"):
        return value
    raise PlanError(
        f"like={printable(repr(value))} was given; it must be a function that `parallelize` returned, what it "
        "compiled, or a plan."
    )


def plan_of(like: object) -> Plan:
    """Return the plan of the value of `like`. Raises `PlanError` for a function that was not called yet."""
    plan = like if isinstance(like, Plan) else getattr(like, "last_plan", getattr(like, "plan", None))
    if not isinstance(plan, Plan):
        raise PlanError(
            "like= names a step that has no plan yet. Call it first, or give what its `compiled(…)` returns for the "
            "same arguments."
        )
    return plan


def _numbers(value: int | Sequence[int] | None) -> tuple[int, ...]:
    # One number, several, or None for none, as `jax.jit` accepts them.
    return (value,) if isinstance(value, int) else tuple(value or ())


def _names(value: str | Iterable[str] | None) -> tuple[str, ...]:
    # A string is also a sequence of its letters, so it must become one name before `tuple` sees it.
    return (value,) if isinstance(value, str) else tuple(value or ())
