"""All figures of one plan, and the environment in which they were obtained: a line of JSON."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from os import cpu_count
from pathlib import Path
from typing import Any

PACKAGES = ("alpa_lite", "jax", "jaxlib", "numpy", "scipy", "highspy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The origin of a row. `git` is the commit of this repository, with "+" if files differ from it, or ""."""

    git: str
    versions: dict[str, str]
    machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One planner on one model and cluster; None: unknown. Seconds are per step, bytes per device.

    Attributes:
        searched: whether the planner searches, as opposed to a manual plan; `auto`: whether it is the full search.
        reason: the reason why there are no figures, a sentence; else "".
        plan: the logical meshes of its stages.
        same_as: an earlier planner with the same plan, whose measurement is used; else "".
        communication_seconds, idle_seconds: in the simulated program, averaged over devices: time blocked by
        communication,
            and waiting for other stages. The rest of `simulated_step_seconds` is computation.
        measured_step_seconds: median over the rounds, with `measured_quartiles`; `measured_samples` are the rounds.
        allocated_peak_bytes: XLA's allocation for the compiled program on the fullest device.
    """

    model: str
    cluster: str
    num_devices: int
    planner: str
    searched: bool
    auto: bool
    batch_size: int | None = None
    reason: str = ""
    plan: str = ""
    same_as: str = ""
    num_microbatches: int | None = None
    num_stages: int | None = None
    planning_seconds: float | None = None
    solver_status: str = ""
    solver_gap: float | None = None
    predicted_step_seconds: float | None = None
    predicted_peak_bytes: float | None = None
    predicted_tflops_per_device: float | None = None
    simulated_step_seconds: float | None = None
    communication_seconds: float | None = None
    idle_seconds: float | None = None
    compile_seconds: float | None = None
    allocated_peak_bytes: float | None = None
    measured_step_seconds: float | None = None
    measured_quartiles: tuple[float, float] | None = None
    measured_samples: tuple[float, ...] = field(default=())

    @property
    def step_seconds(self) -> float | None:
        """Measured seconds, or predicted ones if nothing was measured."""
        return self.predicted_step_seconds if self.measured_step_seconds is None else self.measured_step_seconds

    def measured(self, samples: Sequence[float], same_as: str = "") -> Row:
        """Return the row with measurements: seconds by round."""
        low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else list(samples) * 3
        return replace(
            self,
            same_as=same_as,
            measured_samples=tuple(samples),
            measured_quartiles=(low, high),
            measured_step_seconds=middle,
        )


def json_line(row: Row, environment: Environment) -> str:
    """Return one line of JSON, from which `row_of_line` restores the row."""
    return json.dumps({**asdict(row), **asdict(environment)})


def row_of_line(line: str) -> Row:
    """Return the row of a line of JSON."""
    data: dict[str, Any] = json.loads(line)
    for name in ("measured_quartiles", "measured_samples"):
        data[name] = tuple(data[name]) if data[name] is not None else None
    return Row(**{name: data[name] for name in Row.__dataclass_fields__})


def here(device: str = "") -> Environment:
    """Return this process's environment: versions, machine and, if it runs from a checkout, the commit."""
    versions = {"python": platform.python_version()}
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
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
