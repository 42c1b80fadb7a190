"""Run plans on one GPU, against predictions and `jax.jit`: `python -m benchmarks.on_gpu [--out FILE] [--only NAME…]`.

predicted    seconds and peak bytes of the plan for this GPU as the shipped cluster describes it, and seconds for the
             cluster that `alpa_lite.calibrate` measures here                                     `measured`, `repriced`
measured     steps of the plan and of `jax.jit` (both donate the state), in turn, each side first every other time:
             medians of awaited steps; seconds of steps that are launched without waiting         `timed`
peak         `peak_bytes_in_use` of the device after the first steps of the plan, of a fresh process without
             preallocation                                                                        `measured`
numbers      parameters, optimizer state and loss after three steps from one start, against `jax.jit`, and `jax.jit`
             against itself, as some kernels add in any order                                     `difference`
kernels      attention of XLA, cuDNN and Pallas, in a train step and alone, with gradients     `gpu_programs`

Each program has a process of its own. Processes trace and plan at the same time; one after the other compiles and
measures, so that nothing else is on the GPU while XLA chooses kernels or steps are timed. Without a GPU, `--tiny` runs
small programs on a CPU, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.cli.machine_commands import calibration_data
from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.train import init_state, make_train_step
from alpa_lite.plan.progress import Progress
from alpa_lite.text import show_bytes
from benchmarks.gpu_programs import Case, cases
from benchmarks.published.cluster_of import device_name
from cost_models.catalogue import known_clusters
from cost_models.cluster import Cluster, load_cluster

NUM_COMPARED = 3
"""Steps after which the numbers are compared."""

ROUNDS = 10
"""Steps of each side that are measured, after two that are not."""

CALIBRATION_SECONDS = 20.0


def cluster_with(kind: str) -> str:
    """Return the name of a shipped cluster of devices of a kind, the vendor's own machine if there is one."""
    wanted = device_name(kind)
    for name in sorted(known_clusters(), key=lambda name: not name.startswith("dgx")):
        if device_name(load_cluster(name).device.name) == wanted:
            return name
    raise SystemExit(f"No shipped cluster has devices like {kind}: give one with --cluster.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program on the GPU; bytes are those of the plan, but for `jit_xla_bytes`.

    `run` tells the runs of kept figures apart.
    """

    name: str
    predicted_seconds: float
    calibrated_seconds: float | None
    plan_seconds: float
    jit_seconds: float
    ratio: float
    plan_streamed_seconds: float
    jit_streamed_seconds: float
    plan_launch_seconds: float | None
    jit_launch_seconds: float | None
    predicted_bytes: float
    peak_bytes: float
    init_peak_bytes: float
    xla_bytes: float
    jit_xla_bytes: float
    difference: float
    largest_difference: float
    moments_difference: float
    jit_difference: float
    loss_difference: float
    equal: bool
    opaque: bool
    planning_seconds: float
    compile_seconds: float
    jit_compile_seconds: float
    run: int = 1


def start(case: Case) -> Any:
    """Return the state before the first step."""
    return init_state(case.model.init(jax.random.key(0)), case.optimizer)


def arguments(case: Case) -> tuple[Any, Any]:
    """Return the shapes of state and batch."""
    return jax.eval_shape(partial(start, case)), case.model.batch_shapes(case.batch_size)


def parallel(case: Case, cluster: Cluster, **options: Any) -> Any:
    """Return the train step of a case for the plan of a cluster, which is made when it is first called."""
    step = make_train_step(case.model.loss_fn, case.optimizer)
    fixed = {"num_microbatches": case.num_microbatches, "donate_argnums": 0, "cache": False}
    return al.parallelize(step, cluster=cluster, **fixed, **options)


def price(case: Case, cluster: Cluster) -> float:
    """Return the seconds of a step as predicted for a cluster of one device, where all manual plans are the same."""
    traced = parallel(case, cluster, planner="data_parallel").trace(*arguments(case))
    return traced.plan().last_plan.prediction.step_seconds


def measured(case: Case, cluster: Cluster, wait: Callable[[], None]) -> Row:
    """Plan a case, wait for the turn before XLA compiles, and measure."""
    shapes = arguments(case)
    traced = jax.jit(make_train_step(case.model.loss_fn, case.optimizer), donate_argnums=0).trace(*shapes)
    began = [time.perf_counter()]

    def follow(progress: Progress) -> None:
        if progress.phase == "compile" and len(began) == 1:
            began.append(time.perf_counter())
            wait()
            began.append(time.perf_counter())

    function = parallel(case, cluster, progress=Progress(None, follow))
    compiled = function.compiled(*shapes)
    seconds = [b - a for a, b in zip(began, [*began[1:], time.perf_counter()], strict=True)]
    init = jax.jit(partial(start, case)).lower().compile()
    batch = jax.device_put(draw_batch(case.model, case.batch_size))
    state, placed = compiled.place(jax.block_until_ready(init()), batch)
    before = peak_bytes()
    state, losses = stepped(function, state, placed)
    peak, resumed = peak_bytes(), time.perf_counter()
    # Called as it was compiled, which takes as long as a call of `jax.jit` and does not compile again.
    jitted = traced.lower().compile()
    jit_compile_seconds = time.perf_counter() - resumed
    account: Any = jitted.memory_analysis()
    other, expected = stepped(jitted, init(), batch)
    found, largest = difference(state.params, other.params, case.atol / case.rtol)
    moments, _ = difference(state.opt_state, other.opt_state)
    noise, _ = difference(stepped(jitted, init(), batch)[0].params, other.params)
    plan = compiled.plan
    return Row(
        name=case.name,
        predicted_seconds=plan.prediction.step_seconds,
        calibrated_seconds=None,
        **timed((function, state, placed), (jitted, other, batch)),
        predicted_bytes=plan.prediction.peak_bytes[0],
        peak_bytes=peak,
        init_peak_bytes=before,
        xla_bytes=compiled.memory_analysis().peak_bytes,
        jit_xla_bytes=account.argument_size_in_bytes
        + account.output_size_in_bytes
        - account.alias_size_in_bytes
        + account.temp_size_in_bytes,
        difference=float(found),
        largest_difference=float(largest),
        moments_difference=float(moments),
        jit_difference=float(noise),
        loss_difference=max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)),
        equal=float(largest) <= case.rtol,
        opaque=bool(plan.opaque),
        planning_seconds=seconds[0],
        compile_seconds=seconds[2],
        jit_compile_seconds=jit_compile_seconds,
    )


def stepped(step: Callable[..., Any], state: Any, batch: Any) -> tuple[Any, list[float]]:
    """Return the state after the steps whose numbers are compared, and their losses."""
    losses: list[float] = []
    for _ in range(NUM_COMPARED):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return jax.block_until_ready(state), losses


@jax.jit
def difference(found: Any, expected: Any, floor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Return |a - b| / |b| of all arrays as one vector, and the largest |a - b| / (|b| + floor) of an element."""
    pairs = [
        (a.astype(jnp.float32), b.astype(jnp.float32))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        if a.size
    ]
    if not pairs:
        return jnp.zeros(()), jnp.zeros(())
    squares = jnp.stack([jnp.stack([jnp.sum(jnp.square(a - b)), jnp.sum(jnp.square(b))]) for a, b in pairs]).sum(0)
    largest = jnp.stack([jnp.max(jnp.abs(a - b) / (jnp.abs(b) + floor)) for a, b in pairs]).max()
    return jnp.sqrt(squares[0] / squares[1]), largest


def peak_bytes() -> float:
    """Return the largest number of bytes that were allocated at once; 0 where the device does not count."""
    return float((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def timed(*sides: tuple[Callable[..., Any], Any, Any]) -> dict[str, Any]:
    """Return medians of steps of a plan and of `jax.jit` in turn, each a function, its first state, and its batch."""
    states = [state for _, state, _ in sides]

    def step(i: int) -> Any:
        states[i], metrics = sides[i][0](states[i], sides[i][2])
        return metrics

    awaited: list[list[float]] = [[], []]
    launches: list[list[float]] = [[], []]
    for number in range(2 + ROUNDS):
        for i in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            metrics = step(i)
            launches[i].append(time.perf_counter() - began)
            jax.block_until_ready((states[i], metrics))
            awaited[i].append(time.perf_counter() - began)
    streamed: list[list[float]] = [[], []]
    for _ in range(2):
        for i in (0, 1):
            began = time.perf_counter()
            for _ in range(ROUNDS):
                step(i)
            jax.block_until_ready(states[i])
            streamed[i].append((time.perf_counter() - began) / ROUNDS)
    found: dict[str, Any] = {
        "ratio": statistics.median(a / b for a, b in zip(awaited[0][2:], awaited[1][2:], strict=True))
    }
    for i, side in enumerate(("plan", "jit")):
        found[f"{side}_seconds"] = statistics.median(awaited[i][2:])
        found[f"{side}_launch_seconds"] = statistics.median(launches[i][2:])
        found[f"{side}_streamed_seconds"] = min(streamed[i])
    return found


def calibrated() -> dict[str, Any]:
    """Measure this process's devices."""
    began = time.perf_counter()
    found = al.calibrate(limit_seconds=CALIBRATION_SECONDS)
    return {**calibration_data(found), "seconds": time.perf_counter() - began}


class Worker:
    """A process that measures one case, or calibrates: it says "ready", waits for "go", and prints a line of JSON."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        """Start the process; its error stream goes to a file."""
        self.log = log
        command = [sys.executable, "-m", "benchmarks.on_gpu", *words]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
        with log.open("w", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def run(self, deadline: float) -> dict[str, Any]:
        """Give the process its turn and return its result; or the end of its errors, as `error`."""
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self.process.kill)
        timer.start()
        try:
            out = self.process.stdout
            assert out is not None and self.process.stdin is not None
            if any(line == "ready\n" for line in iter(out.readline, "")):
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            lines = out.read().splitlines()
            if self.process.wait() == 0 and lines:
                return json.loads(lines[-1])
        finally:
            timer.cancel()
        errors = self.log.read_text(encoding="utf-8")[-3000:]
        return {"error": f"ended with {self.process.returncode}: {errors}"}

    def end(self) -> None:
        """End the process if it still runs."""
        self.process.kill()
        self.process.communicate()


def turn() -> None:
    """Wait for this process's turn on the GPU."""
    print("ready", flush=True)
    sys.stdin.readline()


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What to run: options that every process gets, how many processes plan ahead, and seconds for all."""

    words: tuple[str, ...]
    names: tuple[str, ...]
    num_ahead: int
    seconds: float
    calibrates: bool


def run(session: Session, keep: Callable[[dict[str, Any]], None], say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all cases in new processes; `keep` is called with the results after each."""
    deadline = time.monotonic() + session.seconds
    found: dict[str, Any] = {"rows": []}
    tasks = [*(["--calibrate"] if session.calibrates else []), *session.names]
    with tempfile.TemporaryDirectory() as folder:
        workers = list[Worker]()
        try:
            for number, task in enumerate(tasks):
                while len(workers) < min(number + session.num_ahead, len(tasks)):
                    name = tasks[len(workers)]
                    words = [name] if name == "--calibrate" else ["--case", name]
                    workers.append(Worker([*words, *session.words], Path(folder) / f"{len(workers)}.txt"))
                row = workers[number].run(deadline)
                if task == "--calibrate":
                    found["calibration"] = row
                else:
                    found["rows"].append({"name": task, **row})
                say(f"{session.seconds + time.monotonic() - deadline:.0f} s {task}: {row.get('error', 'done')}")
                keep(found)
        finally:
            for worker in workers:
                worker.end()
    return found


def repriced(found: dict[str, Any], some: Mapping[str, Case]) -> dict[str, Any]:
    """Return results with the seconds that the calibrated cluster predicts."""
    cluster = found.get("calibration", {}).get("cluster")
    if cluster is None:
        return found
    rows: list[dict[str, Any]] = []
    for row in found["rows"]:
        try:
            seconds = None if "error" in row else price(some[row["name"]], Cluster.from_json(cluster))
        except Exception as error:  # kernels of a GPU alone cannot be traced anywhere else
            print(f"{row['name']}: {error}", file=sys.stderr)
            seconds = None
        rows.append({**row, "calibrated_seconds": seconds})
    return {**found, "rows": rows}


def rendered(found: Mapping[str, Any]) -> list[Table]:
    """Return the tables: times, and memory with the differences of numbers."""
    times = Table("program", "predicted", "calibrated", "plan", "predicted / plan", "jax.jit", "plan / jit", "streamed")
    numbers = ("weights", "element", "moments", "jit again", "loss", "equal")
    memory = Table("program", "predicted", "peak", "ratio", "XLA", "jax.jit", *numbers)
    for data in found["rows"]:
        if "error" in data:
            times.add_row(data["name"], data["error"].strip().splitlines()[-1][:100])
            continue
        row = Row(**data)
        seconds = (row.predicted_seconds, row.calibrated_seconds, row.plan_seconds, row.jit_seconds)
        predicted, fitted, plan, jit = ("" if s is None else f"{1e3 * s:.1f} ms" for s in seconds)
        streamed = row.plan_streamed_seconds / row.jit_streamed_seconds
        ratios = f"{row.predicted_seconds / row.plan_seconds:.2f}", f"{row.ratio:.3f}", f"{streamed:.3f}"
        times.add_row(row.name, predicted, fitted, plan, ratios[0], jit, *ratios[1:])
        sizes = (row.predicted_bytes, row.peak_bytes, row.xla_bytes, row.jit_xla_bytes)
        shown = [show_bytes(size) for size in sizes]
        shown.insert(2, f"{row.predicted_bytes / max(row.peak_bytes, 1):.2f}")
        found_apart = (row.difference, row.largest_difference, row.moments_difference)
        apart = (f"{x:.1e}" for x in (*found_apart, row.jit_difference, row.loss_difference))
        memory.add_row(row.name, *shown, *apart, "yes" if row.equal else "NO")
    return [times, memory]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs, by the beginning of the name")
    parser.add_argument("--cluster", help="default: the shipped one with this GPU")
    parser.add_argument("--out", type=Path, metavar="JSON", help="keep the figures")
    parser.add_argument("--seconds", type=float, default=1800.0, help="limit for all (default: 1800)")
    parser.add_argument("--ahead", type=int, default=5, help="processes that plan at the same time (default: 5)")
    parser.add_argument("--no-calibration", action="store_true", help="only what the shipped cluster predicts")
    parser.add_argument("--price", type=Path, metavar="JSON", help="only price figures for their calibrated cluster")
    parser.add_argument("--tiny", action="store_true", help="small programs, without a GPU")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    some = {case.name: case for case in cases(tiny=given.tiny)}
    if given.calibrate:
        turn()
        print(json.dumps(calibrated()))
        return 0
    if given.case is not None:
        cluster = dataclasses.replace(load_cluster(given.cluster), num_hosts=1, devices_per_host=1)
        print(json.dumps(asdict(measured(some[given.case], cluster, turn))))
        return 0
    console = Console(width=None if sys.stdout.isatty() else 160)

    def keep(found: Mapping[str, Any]) -> None:
        if given.out is not None:
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    if given.price is not None:
        found = json.loads(given.price.read_text(encoding="utf-8"))
    else:
        about = described(given.cluster)
        words = ("--cluster", about["cluster"], *(["--tiny"] if given.tiny else []))
        names = tuple(name for name in some if given.only is None or name.startswith(tuple(given.only)))
        session = Session(
            words=words,
            names=names,
            num_ahead=given.ahead,
            seconds=given.seconds,
            calibrates=not given.no_calibration,
        )
        found = run(session, lambda found: keep({**about, **found}), lambda line: print(line, flush=True))
        found = {**about, **found}
    found = repriced(found, some)
    keep(found)
    for table in rendered(found):
        console.print(table)
    return 0


def described(cluster: str | None) -> dict[str, Any]:
    """Return the device, the versions, the date and the name of the cluster, read in a process of its own.

    The device is touched there: this process keeps no memory of it.
    """
    code = "import jax, json; d = jax.devices()[0]; print(json.dumps([d.device_kind, d.client.platform_version]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    kind, platform = json.loads(done.stdout.splitlines()[-1])
    versions = {"jax": jax.__version__, "python": sys.version.split()[0], "platform": platform}
    date = datetime.date.today().isoformat()
    return {"device": kind, "date": date, "versions": versions, "cluster": cluster or cluster_with(kind)}


if __name__ == "__main__":
    raise SystemExit(main())
