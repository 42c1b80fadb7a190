"""Measure the overhead of running a plan over the computation: `python -m benchmarks.overhead [--json] [--repeats N]`.

plan / jit     a step by a plan of one stage against `jax.jit` of the same function with the plan's shardings of
               arguments and results and the same donation, on all devices and on one               `against_jit`
dispatch       seconds of the driver per instruction, FREE not counted, on a pipeline of one-device stages with
               almost nothing to compute: wall-clock time without waits for credits, and the CPU time of its
               thread                                                                               `driver`
first call     seconds by phase, in a new process without caches and in another with them           `first_call`

Steps of both sides run in turn, each side first every other time, on states of their own; medians are reported. The
placement of memory and threads makes one side a few percent faster for the whole life of a process. Therefore each of
several processes takes the median ratio of its pairs of steps, and the median of these is reported with the quartiles.
The steps are those of a Transformer with Adam, whose hundreds of arguments are part of the measurement. Virtual CPU
devices share one processor, so only the ratio of their steps is meaningful, not the time. On them the driver's time
includes the computation that XLA does in the calling thread, as it does for tiny programs, and its wall-clock time also
the cores' time that the devices' threads take.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.doctor import virtual_environment
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.plan.progress import PhaseTimes, Progress
from alpa_lite.planners import DataParallel, Hybrid
from cost_models.cluster import Cluster

PLANNING = ("split", "manual", "layers", "survey", "stages", "refine", "simulate")
"""The phases of a `Progress` that belong to planning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the steps; small sizes are for tests, whose times mean nothing."""

    num_devices: int = 8
    num_layers: int = 8
    hidden: int = 128
    batch_size: int = 32
    num_stages: int = 8
    num_microbatches: int = 32
    repeats: int = 30
    num_processes: int = 5

    def model(self) -> GPT:
        """The Transformer of the step."""
        return GPT(num_layers=self.num_layers, hidden=self.hidden, num_heads=4, seq_len=32, dropout=0.0)

    def cluster(self, num_devices: int) -> Cluster:
        """Return a described cluster of `num_devices` devices."""
        return dataclasses.replace(al.cluster("p3.16xlarge"), num_hosts=1, devices_per_host=num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A plan against `jax.jit`: medians in seconds, and the ratio of the pairs with its quartiles."""

    num_devices: int
    num_arguments: int
    plan_seconds: float
    jit_seconds: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    plan_launch_seconds: float
    jit_launch_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The driver's time of one step of a program with `num_instructions` instructions.

    seconds          wall-clock seconds, without `waited_seconds`
    thread_seconds   CPU seconds of the driver's thread
    waited_seconds   seconds of waiting for credits
    """

    num_instructions: int
    num_stages: int
    seconds: float
    thread_seconds: float
    waited_seconds: float


def case(sizes: Sizes) -> tuple[Callable[..., Any], Any, Any]:
    """Return the step, the state before it, and a batch."""
    model, optimizer = sizes.model(), make_optimizer()
    state = init_state(model.init(jax.random.key(0)), optimizer)
    rng = np.random.default_rng(0)
    shape = (sizes.batch_size, model.seq_len)
    batch = {name: rng.integers(0, model.vocab_size, shape, np.int32) for name in ("tokens", "targets")}
    return make_train_step(model.loss_fn, optimizer), state, batch


def against_jit(sizes: Sizes, num_devices: int) -> Pair:
    """Run steps by a plan of one stage and by `jax.jit` in turn."""
    step, state, batch = case(sizes)
    parallel = al.parallelize(
        step, cluster=sizes.cluster(num_devices), planner=DataParallel(), num_microbatches=1, donate_argnums=0
    )
    compiled = parallel.compiled(state, batch)
    start = jax.device_get(state)
    ins, _ = compiled.input_shardings()
    state, batch = compiled.place(start, batch)
    placed = compiled.place(start, batch)[0]
    state, metrics = parallel(state, batch)
    outs = jax.tree.map(lambda x: x.sharding, (state, metrics))
    jitted = jax.jit(step, in_shardings=(ins[0], ins[1]), out_shardings=outs, donate_argnums=0)
    other, _ = jitted(placed, batch)
    sides: list[tuple[Callable[..., Any], Any, list[float], list[float]]] = [
        (parallel, state, [], []),
        (jitted, other, [], []),
    ]
    states = [side[1] for side in sides]
    for number in range(2 + sizes.repeats):
        for i in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            states[i], metrics = sides[i][0](states[i], batch)
            launched = time.perf_counter()
            jax.block_until_ready((states[i], metrics))
            if number >= 2:
                sides[i][2].append(time.perf_counter() - began)
                sides[i][3].append(launched - began)
    plan, jit = sides[0][2], sides[1][2]
    ratios = [a / b for a, b in zip(plan, jit, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Pair(
        num_devices=num_devices,
        num_arguments=len(jax.tree.leaves((state, batch))),
        plan_seconds=statistics.median(plan),
        jit_seconds=statistics.median(jit),
        ratio=middle,
        ratio_quartiles=(low, high),
        plan_launch_seconds=statistics.median(sides[0][3]),
        jit_launch_seconds=statistics.median(sides[1][3]),
    )


def combined(pairs: Sequence[Pair]) -> Pair:
    """Combine the pairs that several processes measured: medians, and the quartiles of their ratios."""
    ratios = [pair.ratio for pair in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3

    def median(name: str) -> float:
        return statistics.median(getattr(pair, name) for pair in pairs)

    return dataclasses.replace(
        pairs[0],
        ratio=middle,
        ratio_quartiles=(low, high),
        **{field.name: median(field.name) for field in dataclasses.fields(Pair) if field.name.endswith("_seconds")},
    )


def tiny_step(weights: list[Any], x: Any) -> Any:
    """Run a training step that computes almost nothing."""

    def loss(weights: list[Any]) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def driver(sizes: Sizes) -> Driver:
    """Measure the driver's time on a pipeline of one-device stages."""
    weights = [np.eye(8, dtype=np.float32) for _ in range(sizes.num_stages)]
    x = np.ones((2 * sizes.num_microbatches, 8), np.float32)
    compiled = al.parallelize(
        tiny_step,
        cluster=sizes.cluster(sizes.num_stages),
        planner=Hybrid(pipeline=sizes.num_stages),
        num_microbatches=sizes.num_microbatches,
        donate_argnums=0,
    ).compiled(weights, x)
    weights, _ = compiled.place(weights, x)
    flight, seconds, ran, waited = compiled.executor.flight, list[float](), list[float](), list[float]()
    for _ in range(3 + sizes.repeats):
        before, began, thread_began = flight.waited_seconds, time.perf_counter(), time.thread_time()
        weights, value = compiled(weights, x)
        ran.append(time.thread_time() - thread_began)
        seconds.append(time.perf_counter() - began)
        waited.append(flight.waited_seconds - before)
        jax.block_until_ready((weights, value))
    net = [a - b for a, b in zip(seconds, waited, strict=True)]
    instructions = [i for i in compiled.executor.program.instructions if i.kind != "FREE"]
    return Driver(
        num_instructions=len(instructions),
        num_stages=sizes.num_stages,
        seconds=statistics.median(net[3:]),
        thread_seconds=statistics.median(ran[3:]),
        waited_seconds=statistics.median(waited[3:]),
    )


def first_call(sizes: Sizes, folder: str) -> dict[str, float]:
    """Return the seconds of the first step by phase; plans and executables are cached in the folder."""
    jax.config.update("jax_compilation_cache_dir", os.path.join(folder, "executables"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    step, state, batch = case(sizes)
    times, progress = PhaseTimes(), Progress()
    progress.follow(times)
    parallel = al.parallelize(
        step, cluster=sizes.cluster(sizes.num_devices), donate_argnums=0, progress=progress, cache=folder
    )
    jax.block_until_ready((state, batch))
    began = time.perf_counter()
    compiled = parallel.compiled(state, batch)
    ready = time.perf_counter()
    jax.block_until_ready(compiled(state, batch))
    found = {name: times.seconds.get(name, 0.0) for name in ("trace", "lower", "compile")}
    return {
        "trace": found["trace"],
        "plan": ready - began - sum(found.values()),
        "lower": found["lower"],
        "compile": found["compile"],
        "first step": time.perf_counter() - ready,
    }


def in_new_process(sizes: Sizes, folder: str) -> dict[str, float]:
    """Run `first_call` in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.overhead",
        "--first-call",
        folder,
        "--sizes",
        json.dumps(asdict(sizes)),
    ]
    done = subprocess.run(command, env=_environment(sizes), check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(sizes: Sizes) -> dict[str, Any]:
    """Measure all but the first call in this process, on the devices that `_environment` makes."""
    counts = dict.fromkeys((sizes.num_devices, 1))
    return {
        "pairs": [asdict(against_jit(sizes, count)) for count in counts],
        "driver": asdict(driver(sizes)),
    }


def run(sizes: Sizes) -> dict[str, Any]:
    """Measure everything in new processes."""
    command = [sys.executable, "-m", "benchmarks.overhead", "--here", "--sizes", json.dumps(asdict(sizes))]
    rounds = list[dict[str, Any]]()
    for _ in range(sizes.num_processes):
        done = subprocess.run(command, env=_environment(sizes), check=True, stdout=subprocess.PIPE, text=True)
        rounds.append(json.loads(done.stdout.splitlines()[-1]))
    pairs = zip(*([Pair(**row) for row in each["pairs"]] for each in rounds), strict=True)
    drivers = sorted((each["driver"] for each in rounds), key=lambda row: row["seconds"])
    found: dict[str, Any] = {
        "pairs": [asdict(combined(rows)) for rows in pairs],
        "driver": drivers[len(drivers) // 2],
    }
    with tempfile.TemporaryDirectory() as folder:
        found["first_call"] = {name: in_new_process(sizes, folder) for name in ("without caches", "with caches")}
    return found


def _environment(sizes: Sizes) -> dict[str, str]:
    count = max(sizes.num_devices, sizes.num_stages)
    return virtual_environment(count)


def rendered(found: dict[str, Any]) -> list[Table]:
    """Return the tables."""
    pairs = Table("devices", "arguments", "plan", "jax.jit", "ratio", "quartiles", "launch", "jax.jit's")
    for row in found["pairs"]:
        pair = Pair(**row)
        low, high = pair.ratio_quartiles
        seconds = (pair.plan_seconds, pair.jit_seconds, pair.plan_launch_seconds, pair.jit_launch_seconds)
        plan, jit, launch, jit_launch = (f"{1e3 * s:.2f} ms" for s in seconds)
        counts = str(pair.num_devices), str(pair.num_arguments)
        pairs.add_row(*counts, plan, jit, f"{pair.ratio:.3f}", f"{low:.3f}..{high:.3f}", launch, jit_launch)
    row = Driver(**found["driver"])
    dispatch = Table("stages", "instructions", "driver's", "per step", "per instruction", "of a 1 s step", "waited")
    waited = f"{1e3 * row.waited_seconds:.2f} ms"
    for kind, seconds, rest in (("clock", row.seconds, waited), ("thread", row.thread_seconds, "")):
        each = f"{1e6 * seconds / row.num_instructions:.1f} µs"
        share = f"{100 * seconds:.2f} %"
        dispatch.add_row(
            str(row.num_stages), str(row.num_instructions), kind, f"{1e3 * seconds:.2f} ms", each, share, rest
        )
    names = [*next(iter(found["first_call"].values()))]
    calls = Table("first call", *names, "together")
    for name, seconds in found["first_call"].items():
        calls.add_row(name, *(f"{seconds[n]:.2f} s" for n in names), f"{sum(seconds.values()):.2f} s")
    return [pairs, dispatch, calls]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="steps of each side")
    parser.add_argument("--sizes", type=json.loads, default={}, metavar="JSON", help="fields of Sizes")
    parser.add_argument("--here", action="store_true", help="in this process and on its devices, without first calls")
    parser.add_argument("--first-call", metavar="FOLDER", help="only this, in this process, with caches in a folder")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    given = parser.parse_args(argv)
    sizes = Sizes(**{"repeats": given.repeats, **given.sizes})
    if given.here:
        print(json.dumps(measured(sizes)))
        return 0
    if given.first_call is not None:
        print(json.dumps(first_call(sizes, str(given.first_call))))
        return 0
    found = run(sizes)
    console = Console(width=None if sys.stdout.isatty() else 140)
    for table in rendered(found):
        console.print(table)
    if given.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
