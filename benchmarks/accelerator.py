"""Try plans on one accelerator, unattended: `python -m benchmarks.accelerator --out DIR [--platform cpu]`.

checks       small models of every kind by plans of one device, and by pipelines whose stages share it, against
             `jax.jit`                                                                              `zoo_on_device`
calibration  what `alpa_lite.calibrate` measures here                                               `calibrated`
programs     train steps predicted for the shipped cluster that has such devices, that is from the data sheet, and for
             the calibrated one; then run in turn with `jax.jit`: times, bytes, numbers         `program_on_device`
skipped      what did not run, and why: no time left, kernels that the device lacks, ...            `Session`

`DIR/<name of the card>.json` has the results after each of them. Processes trace and plan at the same time; one after
the other compiles and measures, so that nothing else is on the device while XLA chooses kernels or steps are timed.
Checks are not timed, and run beside each other. A device that no shipped cluster has is calibrated first, and its
predictions are for what was measured. On CPUs programs are tiny, and their times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.cli.machine_commands import calibration_data
from alpa_lite.text import show_bytes, show_count
from benchmarks.accelerator_programs import NUM_PREDICTED, cases
from benchmarks.program_on_device import Row, measured, price
from benchmarks.published.cluster_of import device_name
from benchmarks.published.row import RowError
from benchmarks.zoo_on_device import PLANS, SMALL, checked
from cost_models.catalogue import known_clusters
from cost_models.cluster import Cluster, load_cluster

RESULTS = Path(__file__).parent / "results" / "accelerator"

CALIBRATION_SECONDS = 20.0

_AHEAD = min(5, os.cpu_count() or 1)

CHECKS = 0.3
"""The part of all seconds after which no check runs."""

LONGEST = 0.3
"""The part of all seconds that one process may take: one that hangs leaves time for the others."""


def cluster_with(kind: str) -> str | None:
    """Return the name of a shipped cluster of devices of a kind, the vendor's own machine if there is one."""
    try:
        wanted = device_name(kind)
    except RowError:
        return None
    for name in sorted(known_clusters(), key=lambda name: not name.startswith("dgx")):
        if device_name(load_cluster(name).device.name) == wanted:
            return name
    return None


def one_device(cluster: str) -> Cluster:
    """Return one device of a cluster, which is given by name or as a file."""
    return dataclasses.replace(load_cluster(cluster), num_hosts=1, devices_per_host=1)


def file_name(kind: str) -> str:
    """Return the name of the file that has the results of a kind of device."""
    return re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-") + ".json"


def calibrated() -> dict[str, Any]:
    """Measure the first device of this process."""
    began = time.perf_counter()
    found = al.calibrate(jax.devices()[:1], limit_seconds=CALIBRATION_SECONDS)
    return {**calibration_data(found), "seconds": time.perf_counter() - began}


class Task(NamedTuple):
    """What one process does: the part of the results that it makes, its arguments, and the names of its results."""

    part: str
    words: tuple[str, ...]
    names: tuple[str, ...]


class Worker:
    """A process that does a task; where it measures, it says "ready" and waits for "go". It prints lines of JSON."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str] = os.environ) -> None:
        """Start the process; its error stream goes to a file."""
        self.log = log
        command = [sys.executable, "-m", "benchmarks.accelerator", *words]
        # Processes share the device, and a peak of bytes counts what was asked for.
        settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command,
                env={**environment, **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Give the process its turn and yield its results; if it fails, the last is the end of its errors (`error`)."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.process.kill)
        timer.start()
        try:
            out = self.process.stdout
            assert out is not None and self.process.stdin is not None
            for line in iter(out.readline, ""):
                if line == "ready\n":
                    self.process.stdin.write("go\n")
                    self.process.stdin.flush()
                elif line.startswith("{"):
                    yield json.loads(line)
            if self.process.wait() == 0:
                return
        finally:
            timer.cancel()
        if time.monotonic() >= deadline:
            yield {"error": "it was ended: its time was over"}
        else:
            errors = self.log.read_text(encoding="utf-8").strip()[-3000:]
            yield {"error": f"ended with {self.process.returncode}: {errors}"}

    def end(self) -> None:
        """End the process if it still runs."""
        self.process.kill()
        self.process.communicate()


def turn() -> None:
    """Wait for this process's turn on the device."""
    print("ready", flush=True)
    sys.stdin.readline()


@dataclass(slots=True, kw_only=True)
class Session:
    """A run of tasks within a limit.

    Attributes:
        seconds: for all tasks.
        num_ahead: processes at a time, of which one is measured.
        environment: of all processes.
        keep: called with the results after each of them.
        found: results by part; `skipped` has what did not run, with the reason.
    """

    seconds: float
    num_ahead: int
    environment: Mapping[str, str]
    keep: Callable[[Mapping[str, Any]], None]
    found: dict[str, Any] = field(default_factory=lambda: {"checks": [], "rows": [], "skipped": []})
    began: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def run(self, tasks: Sequence[Task], folder: Path, share: float = 1.0) -> None:
        """Run tasks in new processes, in order; those without time left of this share of the seconds are skipped."""
        seconds = share * self.seconds
        workers = list[Worker]()
        try:
            for number, task in enumerate(tasks):
                if self.spent >= seconds:
                    self.skip(task.names, f"no time was left of the {seconds:.0f} s")
                    continue
                while len(workers) < min(number + self.num_ahead, len(tasks)):
                    log = folder / f"{task.part}-{len(workers)}.txt"
                    workers.append(Worker(tasks[len(workers)].words, log, self.environment))
                self._follow(task, workers[number], min(seconds, self.spent + LONGEST * self.seconds))
        finally:
            for worker in workers:
                worker.end()

    def _follow(self, task: Task, worker: Worker, until: float) -> None:
        missing = list(task.names)
        for result in worker.run(self.began + until):
            if "error" in result:
                self.skip(missing, result["error"])
                continue
            self.say(f"{missing.pop(0)}: done")
            if task.part == "calibration":
                self.found["calibration"] = result
            else:
                self.found[task.part].append(result)
            self.keep(self.found)

    def skip(self, names: Sequence[str], why: str) -> None:
        """Say and keep why some results are missing."""
        for name in names:
            self.say(f"{name}: skipped, {why.splitlines()[-1][:200]}")
        self.found["skipped"] += [{"name": name, "why": why} for name in names]
        self.keep(self.found)

    def say(self, line: str) -> None:
        """Print a line of progress."""
        print(f"{self.spent:4.0f} s  {line}", flush=True)


def check_tasks(cluster: str, models: Sequence[str], num_processes: int) -> list[Task]:
    """Return the checks of some models, dealt out to processes."""
    shares = [tuple(models[i::num_processes]) for i in range(min(num_processes, len(models)))]
    names = [tuple(f"check of {model}, {plan}" for model in share for plan in PLANS) for share in shares]
    return [
        Task("checks", ("--check", ",".join(share), "--cluster", cluster), some)
        for share, some in zip(shares, names, strict=True)
    ]


def rendered(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables: times, memory with the differences of numbers, checks, and what was skipped."""
    times = Table("program", "predicted", "calibrated", "plan", "predicted / plan", "jax.jit", "plan / jit", "streamed")
    numbers = ("weights", "element", "moments", "jit again", "loss", "equal")
    memory = Table("program", "predicted", "XLA", "ratio", "peak", "jax.jit", *numbers)
    for row in (Row(**data) for data in found["rows"]):
        seconds = (row.predicted_seconds, row.calibrated_seconds, row.plan_seconds, row.jit_seconds)
        predicted, fitted, plan, jit = ("" if s is None else f"{1e3 * s:.1f} ms" for s in seconds)
        streamed = row.plan_streamed_seconds / row.jit_streamed_seconds
        ratios = f"{row.predicted_seconds / row.plan_seconds:.2f}", f"{row.ratio:.3f}", f"{streamed:.3f}"
        times.add_row(row.name, predicted, fitted, plan, ratios[0], jit, *ratios[1:])
        sizes = (row.predicted_bytes, row.xla_bytes, row.peak_bytes, row.jit_xla_bytes)
        # Not every backend counts what is in use.
        shown = [show_bytes(size) if size else "" for size in sizes]
        shown.insert(2, f"{row.predicted_bytes / row.xla_bytes:.2f}")
        found_apart = (row.difference, row.largest_difference, row.moments_difference)
        apart = (f"{x:.1e}" for x in (*found_apart, row.jit_difference, row.loss_difference))
        memory.add_row(row.name, *shown, *apart, "yes" if row.equal else "NO")
    checks = Table("model", "plan", "stages", "of what is allowed", "equal")
    for check in found["checks"]:
        equal = "yes" if check["equal"] else f"NO: {check['worst']}"
        checks.add_row(check["model"], check["plan"], str(check["num_stages"]), f"{check['share']:.2f}", equal)
    skipped = Table("skipped", "why")
    for each in found["skipped"]:
        skipped.add_row(each["name"], each["why"].strip().splitlines()[-1][:200])
    return [table for table in (times, memory, checks, skipped) if table.row_count]


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the medians over the first `NUM_PREDICTED` programs and the numbers of checks; None without results."""
    judged = {case.name for case in cases(tiny=True)[:NUM_PREDICTED]}
    rows = [Row(**data) for data in found["rows"] if data["name"] in judged]

    def middle(values: Sequence[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "num_programs": len(rows),
        "num_equal": sum(row.equal for row in rows),
        "median_time_error": middle([abs(row.predicted_seconds / row.plan_seconds - 1) for row in rows]),
        "median_bytes_error": middle([abs(row.predicted_bytes / row.xla_bytes - 1) for row in rows]),
        "median_overhead": middle([row.ratio - 1 for row in rows]),
        "num_checks": len(found["checks"]),
        "num_checks_equal": sum(check["equal"] for check in found["checks"]),
        "num_skipped": len(found["skipped"]),
    }


def verdict(found: Mapping[str, Any]) -> str:
    """Return the summary as a few sentences."""
    s = found["summary"]
    ran = (
        f"{found['device']}: {s['num_checks_equal']} of {show_count(s['num_checks'], 'check')} and {s['num_equal']} of "
        f"{show_count(s['num_programs'], 'program')} are equal to jax.jit; {s['num_skipped']} skipped."
    )
    if not s["num_programs"]:
        return ran
    source = "the data sheet" if found["data_sheet"] else "the calibration: no shipped cluster has this device"
    shown = {name: f"{value:.1%}" for name, value in s.items() if name.startswith("median")}
    return (
        f"{ran}\nMedians: times are off by {shown['median_time_error']} (predicted from {source}), bytes by "
        f"{shown['median_bytes_error']} of XLA's account; plans take {shown['median_overhead']} longer than jax.jit."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, measure, and print; 1 if a result differs from that of `jax.jit`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where to keep the figures")
    parser.add_argument("--platform", choices=("cpu", "gpu", "tpu"), help="default: what JAX prefers")
    parser.add_argument("--seconds", type=float, default=450.0, help="limit for all (default: 450)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs and models, by the beginning of the name")
    parser.add_argument("--all", action="store_true", help="also kernels of attention and further variants")
    parser.add_argument("--cluster", help="default: the shipped one with this device")
    parser.add_argument("--ahead", type=int, default=_AHEAD, help=f"processes at a time (default: {_AHEAD})")
    for hidden in ("--case", "--check", "--calibrated"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    for hidden in ("--calibrate", "--tiny"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.calibrate or given.check or given.case:
        _work(given)
        return 0
    environment = {**os.environ, **({"JAX_PLATFORMS": given.platform} if given.platform else {})}
    about = described(environment, given.cluster)
    path = given.out / file_name(about["device"])
    given.out.mkdir(parents=True, exist_ok=True)
    found = _measure(given, about, environment, path)
    _keep(path, found)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in rendered(found):
        console.print(table)
    print(verdict(found))
    print(f"Written to {path}.")
    return int(any(not each["equal"] for each in (*found["rows"], *found["checks"])))


def _work(given: argparse.Namespace) -> None:
    """Do one task in this process."""
    if given.calibrate:
        turn()
        print(json.dumps(calibrated()), flush=True)
    elif given.check:
        # Products in full precision: XLA may round the operands of two programs of one step at different places.
        jax.config.update("jax_default_matmul_precision", "highest")
        for model in given.check.split(","):
            for plan in PLANS:
                print(json.dumps(asdict(checked(model, plan, one_device(given.cluster)))), flush=True)
    else:
        case = {case.name: case for case in cases(tiny=given.tiny)}[given.case]
        # Before its turn, since planning needs no device.
        fitted = None if given.calibrated is None else price(case, load_cluster(given.calibrated))
        row = measured(case, one_device(given.cluster), turn)
        print(json.dumps({**asdict(row), "calibrated_seconds": fitted}), flush=True)


def _measure(given: argparse.Namespace, about: dict[str, Any], environment: Mapping[str, str], out: Path) -> Any:
    """Run all tasks, and return the results with their summary."""

    def wanted(names: Sequence[str]) -> list[str]:
        return [name for name in names if given.only is None or name.startswith(tuple(given.only))]

    def keep(found: Mapping[str, Any]) -> None:
        _keep(out, {**about, **found, "summary": summary(found)})

    session = Session(seconds=given.seconds, num_ahead=given.ahead, environment=environment, keep=keep)
    every = [case.name for case in cases(tiny=about["tiny"])]
    names = wanted(every if given.all else every[:NUM_PREDICTED])
    with tempfile.TemporaryDirectory() as folder:
        calibration = Task("calibration", ("--calibrate",), ("calibration",))
        # A plan is checked, not priced: any description of one device will do.
        checks = check_tasks(about["cluster"] or "dgx-h100", wanted(SMALL), given.ahead)
        session.run(checks, Path(folder), CHECKS)
        session.run([calibration], Path(folder))
        words = [] if about["cluster"] is None else ["--cluster", about["cluster"]]
        if "calibration" in session.found:
            path = Path(folder) / "calibrated.json"
            path.write_text(json.dumps(session.found["calibration"]["cluster"]), encoding="utf-8")
            words = ["--cluster", str(path), *words, "--calibrated", str(path)]
        words += ["--tiny"] if about["tiny"] else []
        if "--cluster" in words:
            session.run([Task("rows", ("--case", name, *words), (name,)) for name in names], Path(folder))
        else:
            session.skip(names, "no shipped cluster has this device, and it was not calibrated")
    session.found["skipped"] += _not_counted(session.found["rows"])
    return {**about, **session.found, "summary": summary(session.found)}


def _not_counted(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    if rows and not any(row["peak_bytes"] for row in rows):
        return [{"name": "peak bytes of the device", "why": "the backend does not count them; XLA's account is kept"}]
    return []


def _keep(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def described(environment: Mapping[str, str], cluster: str | None) -> dict[str, Any]:
    """Return the device, the versions, the date and the name of the cluster, read in a process of its own.

    The device is touched there: this process keeps no memory of it.
    """
    code = (
        "import jax, json; d = jax.devices()[0]; print(json.dumps([d.platform, d.device_kind, "
        "d.client.platform_version]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, env=dict(environment)
    )
    platform, kind, version = json.loads(done.stdout.splitlines()[-1])
    versions = {"jax": jax.__version__, "python": sys.version.split()[0], "platform": version}
    chosen = cluster or (None if platform == "cpu" else cluster_with(kind))
    return {
        "device": kind,
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "tiny": platform == "cpu",
        "cluster": chosen,
        "data_sheet": chosen is not None,
    }


if __name__ == "__main__":
    raise SystemExit(main())
