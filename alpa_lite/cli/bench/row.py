"""All figures of one plan, the environment in which they were obtained, and the verdict over several plans.

    ratio          seconds of auto / seconds of the best manual plan, of the same model and cluster       `verdict`
    measured       the median over rounds of the ratio of the two steps of a round, with its quartiles    `Ratio.of`

The best manual plan is the one whose median is least: of many plans that are equally good this picks one that had
luck, so that the ratio of two equal plans lies a little above one.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from os import cpu_count
from pathlib import Path

from alpa_lite.cli.models.model_parts import Tree
from cost_models.uncertainty import LikelyRange

PACKAGES = ("alpa_lite", "jax", "jaxlib", "numpy", "scipy", "highspy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The origin of a row. `git` is the commit of this repository, with "+" if files differ from it, or ""."""

    git: str
    versions: dict[str, str]
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """A plan with its figures by the cost model.

    Attributes:
        meshes: the logical meshes of its stages, in words.
        solver_gap: upper bound of the relative distance to the cheapest plan.
        step_seconds: seconds per step.
        likely_seconds: their range (`Plan.likely_seconds`), None if there is none.
        peak_bytes: bytes on the fullest device.
        tflops_per_device: None if the FLOPs of the model have not been counted.
    """

    meshes: str
    num_microbatches: int
    num_stages: int
    solver_status: str
    solver_gap: float
    step_seconds: float
    peak_bytes: float
    tflops_per_device: float | None = None
    likely_seconds: LikelyRange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """The time of a device in the simulated program, averaged over devices; the rest of the step is computation.

    Attributes:
        step_seconds: seconds per step.
        communication_seconds: seconds in which communication blocks the device.
        idle_seconds: seconds in which it waits for other stages.
    """

    step_seconds: float
    communication_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """The measurements of a plan that was run.

    Attributes:
        samples: seconds of a step in each round.
        step_seconds: their median.
        quartiles: their first and third quartile.
        same_as: an earlier planner with the same plan, whose samples these are; else "".
        compile_seconds: None for a plan that was not compiled, as an earlier one is the same.
        allocated_peak_bytes: XLA's allocation for the compiled program on the fullest device; None if unknown.
    """

    samples: tuple[float, ...]
    step_seconds: float
    quartiles: tuple[float, float]
    same_as: str = ""
    compile_seconds: float | None = None
    allocated_peak_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One planner on one model and cluster; None: unknown.

    Attributes:
        searched: whether the planner searches, as opposed to a manual plan.
        auto: whether it is the full search.
        reason: the reason why there is no plan, or why it failed when it was run, a sentence; else "".
    """

    model: str
    cluster: str
    num_devices: int
    planner: str
    searched: bool
    auto: bool
    batch_size: int | None = None
    reason: str = ""
    planning_seconds: float | None = None
    price: PlanPrice | None = None
    simulation: DeviceTime | None = None
    run: MeasuredRun | None = None

    @property
    def predicted_seconds(self) -> float | None:
        """Predicted seconds per step; None without a plan."""
        return None if self.price is None else self.price.step_seconds

    @property
    def step_seconds(self) -> float | None:
        """Measured seconds per step, or predicted ones if nothing was measured."""
        return self.predicted_seconds if self.run is None else self.run.step_seconds

    def measured(
        self,
        samples: Sequence[float],
        *,
        same_as: str = "",
        compile_seconds: float | None = None,
        allocated_peak_bytes: float | None = None,
    ) -> Row:
        """Return the row with measurements: seconds by round."""
        # Quantiles need two samples; of a single one all three are equal.
        low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else list(samples) * 3
        run = MeasuredRun(
            samples=tuple(samples),
            step_seconds=middle,
            quartiles=(low, high),
            same_as=same_as,
            compile_seconds=compile_seconds,
            allocated_peak_bytes=allocated_peak_bytes,
        )
        return replace(self, run=run)


# The lines of JSON are flat, so that tools that read tables can read them. Strings are "" where others are null.
_PRICE = {
    "plan": "meshes",
    "num_microbatches": "num_microbatches",
    "num_stages": "num_stages",
    "solver_status": "solver_status",
    "solver_gap": "solver_gap",
    "predicted_step_seconds": "step_seconds",
    "predicted_likely_seconds": "likely_seconds",
    "predicted_peak_bytes": "peak_bytes",
    "predicted_tflops_per_device": "tflops_per_device",
}
_SIMULATION = {
    "simulated_step_seconds": "step_seconds",
    "communication_seconds": "communication_seconds",
    "idle_seconds": "idle_seconds",
}
_RUN = {
    "same_as": "same_as",
    "compile_seconds": "compile_seconds",
    "allocated_peak_bytes": "allocated_peak_bytes",
    "measured_step_seconds": "step_seconds",
    "measured_quartiles": "quartiles",
    "measured_samples": "samples",
}
_ABSENT = {"plan": "", "solver_status": "", "same_as": "", "measured_samples": ()}


def json_line(row: Row, environment: Environment) -> str:
    """Return one line of JSON, from which `row_of_line` restores the row."""
    data = {name: getattr(row, name) for name in Row.__dataclass_fields__ if name not in ("price", "simulation", "run")}
    for group, names in ((row.price, _PRICE), (row.simulation, _SIMULATION), (row.run, _RUN)):
        data |= {key: _ABSENT.get(key) if group is None else getattr(group, name) for key, name in names.items()}
    # Environment and row in one line, so that files of several runs can be concatenated.
    return json.dumps({**data, **asdict(environment)})


def row_of_line(line: str) -> Row:
    """Return the row of a line of JSON."""
    return row_of_data(json.loads(line))


def row_of_data(data: Mapping[str, Tree]) -> Row:
    """Return the row of the flat data of `json_line`; figures that are missing are unknown."""

    def group(names: Mapping[str, str]) -> Mapping[str, Tree]:
        values = {name: data[key] for key, name in names.items() if key in data}
        # JSON has lists alone.
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}

    def price() -> PlanPrice:
        values = dict(group(_PRICE))
        likely = values.pop("likely_seconds", None)
        return PlanPrice(**values, likely_seconds=None if likely is None else LikelyRange(*likely))

    # The flat keys of groups are never names of own fields.
    own = {name: data[name] for name in Row.__dataclass_fields__ if name in data}
    return Row(
        **own,
        price=None if data.get("predicted_step_seconds") is None else price(),
        simulation=None if data.get("simulated_step_seconds") is None else DeviceTime(**group(_SIMULATION)),
        run=None if data.get("measured_step_seconds") is None else MeasuredRun(**group(_RUN)),
    )


def here(device: str = "") -> Environment:
    """Return this process's environment: versions, machine and, if it runs from a checkout, the commit."""
    versions = {"python": platform.python_version()}
    # Prices depend on solvers and on what JAX traces, measurements also on the machine.
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    machine = f"{platform.system()} {platform.machine()}, {cpu_count()} processors" + (f", {device}" if device else "")
    return Environment(git=_commit(), versions=versions, machine=machine)


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an installed copy may lie in another repository
        # A plus marks changes that are in no commit.
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of seconds, auto over another, with the quartiles over the rounds where both were measured."""

    value: float
    quartiles: tuple[float, float] | None = None

    @staticmethod
    def of(one: Row, other: Row) -> Ratio | None:
        """Return the measured ratio if both were measured, else the predicted one; None where one has no plan."""
        if one.run is not None and other.run is not None:
            # Round by round: what disturbs the machine in a round slows both steps of it, and cancels in their ratio.
            ratios = [a / b for a, b in zip(one.run.samples, other.run.samples, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
            return Ratio(value=middle, quartiles=(low, high))
        if one.predicted_seconds is None or other.predicted_seconds is None:
            return None
        # Where one of them was not run, predictions are compared with each other alone.
        return Ratio(value=one.predicted_seconds / other.predicted_seconds)

    def __str__(self) -> str:
        spread = "" if self.quartiles is None else f" ({self.quartiles[0]:.3f}–{self.quartiles[1]:.3f})"
        return f"{self.value:.3f}{spread}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The comparison for one model on one cluster.

    Attributes:
        auto, manual: the best row of the search and the best manual one; None where none has a plan.
        ratio: of their seconds, measured if they were.
        predicted: the ratio of the smallest predicted seconds of either.
    """

    model: str
    cluster: str
    auto: Row | None
    manual: Row | None
    ratio: Ratio | None
    predicted: float | None

    def __str__(self) -> str:
        if self.auto is None:
            return f"{self.model}: the search has no plan."
        if self.manual is None or self.ratio is None:
            return f"{self.model}: no manual plan to compare with; the search has one."
        return f"{self.model}: auto takes {self.ratio} of the time of the best manual plan, {self.manual.planner}."


def verdict(rows: Sequence[Row]) -> Verdict:
    """Return the verdict on the rows of one model and cluster, of which there is at least one."""
    auto, manual = best([row for row in rows if row.auto]), best([row for row in rows if not row.searched])
    # Of all numbers of micro-batches, as the best plan by measurement may not be the best as predicted.
    least = [
        min((r.predicted_seconds for r in some if r.predicted_seconds is not None), default=None)
        for some in ([row for row in rows if row.auto], [row for row in rows if not row.searched])
    ]
    return Verdict(
        model=rows[0].model,
        cluster=rows[0].cluster,
        auto=auto,
        manual=manual,
        ratio=None if auto is None or manual is None else Ratio.of(auto, manual),
        predicted=None if least[0] is None or least[1] is None else least[0] / least[1],
    )


def best(rows: Sequence[Row]) -> Row | None:
    """Return the fastest row with a plan; measured seconds decide if there are any."""
    # Measured rows are never compared with predicted ones: which is faster would be decided by the model's error.
    with_plan = [row for row in rows if not row.reason and row.step_seconds is not None]
    measured = [row for row in with_plan if row.run is not None]
    return min(measured or with_plan, key=lambda row: row.step_seconds or 0.0, default=None)
