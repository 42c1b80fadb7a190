"""The demo: plan, train and compare, in about two minutes.

    1. a plain train step of a byte-level GPT is planned for eight GPUs on two hosts, which are described and not there;
    2. the same step, with a smaller model, is planned for the devices at hand;
    3. it trains on the source text of Python's standard library;
    4. the chosen plan and the classic manual plans run the same steps in turn: predicted and measured time, losses.

`alpa-lite demo` starts this module in a process of its own with eight virtual CPU devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import alpa_lite as al
from alpa_lite.api.doctor import virtual_environment
from alpa_lite.cli.bench.entries import in_turn
from alpa_lite.cli.command import Screen, SuggestingParser, count, ended, json_alone, positive, run_module
from alpa_lite.cli.models.batches import load_text, text_batches
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.model_parts import Tree
from alpa_lite.cli.models.train import TrainState, init_state, make_optimizer, make_train_step
from alpa_lite.errors import PlanError
from alpa_lite.inspection.text.progress_bar import shown_progress
from alpa_lite.inspection.text.tables import Table, rich_table
from alpa_lite.planners import DataParallel, Megatron, Pipeline, Planner
from alpa_lite.text import show_seconds

NEXT = (
    ("alpa-lite clusters", "described clusters, for which plans need no devices"),
    ("alpa-lite bench --model gpt-tiny --cluster p3.16xlarge", "planners against each other on eight described GPUs"),
    ("alpa-lite plan my_model.py:example --cluster p3.16xlarge", "your own step: example() returns (train_step, args)"),
)
"""Commands to try after the demo, and what each shows."""

Batch = Mapping[str, np.ndarray]
Step = Callable[[Tree, Tree], Tree]


# Small enough to plan, compile and train in two minutes on two cores, large enough for its loss to fall visibly.
GPT_SMALL = GPT(num_layers=4, hidden=128, num_heads=4, seq_len=64)
# Large enough for a pipeline between two hosts, small enough to be planned in some seconds.
GPT_DESCRIBED = GPT(num_layers=8, hidden=1024, num_heads=16, seq_len=512)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Sizes of the demo; `manual` are the plans with which the automatic one is compared.

    `described` is planned with `described_batch_size` samples for GPUs that are not there; None leaves that out.
    """

    described: GPT | None = GPT_DESCRIBED
    described_batch_size: int = 64
    model: GPT = GPT_SMALL
    batch_size: int = 32
    num_steps: int = 60
    num_rounds: int = 9
    learning_rate: float = 1e-3
    seed: int = 0
    manual: tuple[Planner, ...] = (DataParallel(), Megatron(), Pipeline(pipeline=2), Pipeline(pipeline=4))


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """The result of training: every loss, the median seconds of a step, and the seconds of planning and compiling."""

    losses: tuple[float, ...]
    step_seconds: float
    planning_seconds: float
    preparing_seconds: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row of the comparison: predicted (None for the reference) and measured seconds per step, and the losses."""

    name: str
    predicted_seconds: float | None
    measured_seconds: float
    compile_seconds: float
    losses: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """All measurements of the demo. `max_loss_difference` is relative, over all plans and rounds.

    `described`: the plan for GPUs that are not there, if any.
    """

    described: al.Plan | None
    plan: al.Plan
    training: TrainingResult
    comparison: tuple[Comparison, ...]
    max_loss_difference: float
    seconds: float

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "described": self.described and _in_short(self.described),
            "plan": _in_short(self.plan),
            "training": asdict(self.training),
            "comparison": [asdict(row) for row in self.comparison],
            "max_loss_difference": self.max_loss_difference,
            "seconds": self.seconds,
        }


def _in_short(plan: al.Plan) -> dict[str, object]:
    return {"name": plan.name, "step_seconds": plan.prediction.step_seconds}


def run(config: DemoConfig, console: Console) -> DemoResult:
    """Run all parts and print them."""
    began = time.perf_counter()
    described = None if config.described is None else plan_described(config.described, config, console)
    model, data = config.model, load_text()
    # From here to the train step everything is what a user without this package would write.
    optimizer = make_optimizer(config.learning_rate)
    train_step = make_train_step(model.loss_fn, optimizer)
    state = init_state(jax.jit(model.init)(jax.random.key(config.seed)), optimizer)
    batches = list(text_batches(config.num_steps, config.batch_size, model.seq_len, config.seed, text=data))

    console.rule("2. The same step on this machine: planning", align="left")
    _introduce(config, state, len(data), console)
    with shown_progress("demo") as progress:
        # Measured once, if there is no calibration of this machine yet.
        cluster = al.local_cluster()
        parallel_step = al.parallelize(train_step, donate_argnums=0, cluster=cluster, progress=progress)
        start = time.perf_counter()
        compiled = parallel_step.compiled(state, batches[0])
        preparing = time.perf_counter() - start
    console.print(str(compiled.plan), markup=False, highlight=False)
    console.print()

    console.rule("3. Training", align="left")
    # Copied to the host before training: the step donates the state that it is given.
    start_state = jax.device_get(state)
    state, training = train(parallel_step, compiled.place(start_state, batches[0])[0], batches, console)
    # The solver's own time: `preparing` also includes tracing and compilation.
    planning = compiled.plan.solver.seconds
    training = replace(training, planning_seconds=planning, preparing_seconds=preparing)
    _print_training(training, config, console)

    console.rule("4. The same steps under other plans", align="left")
    rounds = list(text_batches(config.num_rounds, config.batch_size, model.seq_len, config.seed + 1, text=data))
    # On the host, as every plan places its own copy, which its first step then gives away.
    same = Training(step=train_step, state=jax.device_get(state), batches=rounds)
    rows = compare(config, same, compiled, console)
    difference = max_loss_difference(rows)
    result = DemoResult(
        described=described,
        plan=compiled.plan,
        training=training,
        comparison=rows,
        max_loss_difference=difference,
        seconds=time.perf_counter() - began,
    )
    _print_comparison(result, console)
    return result


def plan_described(model: GPT, config: DemoConfig, console: Console) -> al.Plan:
    """Plan a model for eight GPUs on two hosts from shapes alone, and print the plan."""
    console.rule("1. A plan for eight GPUs, without GPUs", align="left")
    cluster = al.cluster("g5.12xlarge", num_hosts=2)
    optimizer = make_optimizer(config.learning_rate)
    state = jax.eval_shape(lambda key: init_state(model.init(key), optimizer), jax.random.key(config.seed))
    tokens = jax.ShapeDtypeStruct((config.described_batch_size, model.seq_len), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    millions = sum(x.size for x in jax.tree.leaves(state.params)) / 1e6
    console.print(
        f"A GPT of {model.num_layers} layers, hidden size {model.hidden}, {millions:.0f} million parameters, on two "
        f"hosts of four {cluster.device.name} each, with {8e-9 * cluster.inter_host.bandwidth_bytes_per_second:.0f} "
        "Gb/s between them. The train step is plain JAX: it knows nothing of devices.\n",
        highlight=False,
    )
    with shown_progress("demo") as progress:
        step = make_train_step(model.loss_fn, optimizer)
        plan = al.plan(step, state, batch, cluster=cluster, progress=progress)
    console.print(str(plan), markup=False, highlight=False)
    console.print()
    return plan


def train(step: Step, state: Tree, batches: Sequence[Batch], console: Console) -> tuple[Tree, TrainingResult]:
    """Train with a progress bar that shows the loss and the time per step."""
    losses: list[float] = []
    times: list[float] = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("{task.fields[milliseconds]:.0f} ms/step"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=len(batches), loss=float("nan"), milliseconds=float("nan"))
        for number, batch in enumerate(batches):
            start = time.perf_counter()
            state, metrics = step(state, batch)
            # Reading the loss waits for the step, so that the time below covers the whole step.
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - start)
            bar.update(task, advance=1, loss=losses[-1], milliseconds=1e3 * statistics.median(times))
            # A bar cannot be redrawn in a log file, where some lines are enough.
            if not console.is_terminal and (number % 10 == 0 or number + 1 == len(batches)):
                console.print(f"  step {number + 1:3}  loss {losses[-1]:.3f}  {1e3 * times[-1]:.0f} ms")
    jax.block_until_ready(state)
    # The median: the first step may compile, and other programs disturb some.
    seconds = statistics.median(times)
    result = TrainingResult(losses=tuple(losses), step_seconds=seconds, planning_seconds=0.0, preparing_seconds=0.0)
    return state, result


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A training run: its step, the state before the first batch, and the batches."""

    step: Step
    state: TrainState
    batches: Sequence[Batch]


def compare(
    config: DemoConfig, training: Training, chosen: al.CompiledFunction, console: Console
) -> tuple[Comparison, ...]:
    """Run the same steps from the same state by every plan, one step of each in turn, and time them."""
    state, batches = training.state, training.batches
    # The chosen plan comes first and plain jax.jit last: rows are compared with one or the other.
    steps: dict[str, Step] = {chosen.plan.name: chosen}
    predicted: dict[str, float | None] = {chosen.plan.name: chosen.plan.prediction.step_seconds}
    states: dict[str, Tree] = {chosen.plan.name: chosen.place(state, batches[0])[0]}
    # The chosen plan has been compiled for training already.
    compiling: dict[str, float] = {chosen.plan.name: 0.0}
    with shown_progress("compare") as progress:
        for planner in config.manual:
            start = time.perf_counter()
            # On the same cluster, so that the predictions of all plans have the same calibration.
            function = al.parallelize(
                training.step,
                donate_argnums=0,
                cluster=chosen.plan.cluster,
                planner=planner,
                progress=lambda line, name=planner.name: progress(f"{name}: {line}"),
            )
            try:
                compiled = function.compiled(state, batches[0])
            except al.AlpaLiteError as error:
                console.print(f"{planner.name}: {error}", markup=False)
                continue
            name = planner.name
            steps[name], predicted[name] = compiled, compiled.plan.prediction.step_seconds
            states[name] = compiled.place(state, batches[0])[0]
            compiling[name] = time.perf_counter() - start
        progress("plain jax.jit")
        start = time.perf_counter()
        name = "jax.jit on one device"
        reference = jax.jit(training.step, donate_argnums=0)
        # Compiled ahead of the rounds, as the plans are, so that no round includes compilation.
        on_one = jax.device_put(state, jax.devices()[0])
        steps[name], predicted[name], states[name] = reference.lower(on_one, batches[0]).compile(), None, on_one
        compiling[name] = time.perf_counter() - start
        losses: dict[str, list[float]] = {name: [] for name in steps}

        def run(name: str) -> None:
            states[name], metrics = steps[name](states[name], batches[len(losses[name])])
            # JAX dispatches asynchronously: without waiting, only the time of dispatch would be measured.
            jax.block_until_ready((states[name], metrics))
            losses[name].append(float(metrics["loss"]))

        # The first round is a warm-up; of a single round it is all there is.
        warm_up = min(1, len(batches) - 1)
        each = {name: partial(run, name) for name in steps}
        measured = in_turn(each, len(batches) - warm_up, progress, warm_up=warm_up)
    return tuple(
        Comparison(
            name=name,
            predicted_seconds=predicted[name],
            measured_seconds=statistics.median(measured[name]),
            compile_seconds=compiling[name],
            losses=tuple(losses[name]),
        )
        for name in steps
    )


def max_loss_difference(rows: Sequence[Comparison]) -> float:
    """Return the largest relative difference of any loss from plain `jax.jit` (the last row) in the same round."""
    # Relative, since losses fall by an order of magnitude during training.
    reference = np.array(rows[-1].losses)
    return max(float(np.max(np.abs(np.array(row.losses) - reference) / np.abs(reference))) for row in rows)


def _introduce(config: DemoConfig, state: TrainState, text_bytes: int, console: Console) -> None:
    model, devices = config.model, jax.devices()
    millions = sum(x.size for x in jax.tree.leaves(state.params)) / 1e6
    console.print(
        f"A GPT of {model.num_layers} layers, hidden size {model.hidden}, {millions:.2f} million parameters, AdamW, on "
        f"{len(devices)} devices ({devices[0].device_kind}). It reads the source of the Python standard library "
        f"({text_bytes / 2**20:.0f} MiB), {config.batch_size} × {model.seq_len} bytes per step.\n",
        highlight=False,
    )


def _print_training(training: TrainingResult, config: DemoConfig, console: Console) -> None:
    console.print(
        f"Loss {training.losses[0]:.3f} at the first step, {training.losses[-1]:.3f} at step {config.num_steps}; "
        f"{show_seconds(training.step_seconds)} per step. Planning took {show_seconds(training.planning_seconds)}, "
        f"compiling {show_seconds(max(0.0, training.preparing_seconds - training.planning_seconds))}.\n",
        highlight=False,
    )


def _print_comparison(result: DemoResult, console: Console) -> None:
    chosen = result.comparison[0]
    columns = ("plan", "predicted ms", "measured ms", "predicted / measured", "measured / chosen", "last loss")
    rows = tuple(
        (
            f"{row.name} (chosen)" if row is chosen else row.name,
            "–" if row.predicted_seconds is None else f"{1e3 * row.predicted_seconds:.0f}",
            f"{1e3 * row.measured_seconds:.0f}",
            "–" if row.predicted_seconds is None else f"{row.predicted_seconds / row.measured_seconds:.2f}",
            f"{row.measured_seconds / chosen.measured_seconds:.2f}×",
            f"{row.losses[-1]:.5f}",
        )
        for row in result.comparison
    )
    console.print(rich_table(Table(title="", columns=columns, rows=rows, numeric=frozenset(columns[1:]))))
    rounds = len(chosen.losses)
    console.print(
        f"Every plan ran the same {rounds} steps from the same state, in turn; times are medians. All losses agree "
        f"with plain jax.jit to within {result.max_loss_difference:.1e} (relative).",
        highlight=False,
    )
    if jax.devices()[0].platform == "cpu":
        console.print(
            "These CPU devices are virtual: they share this machine's cores, so speed-ups are not to be expected here. "
            "What to look at: every plan computes the same thing, and how well its time is predicted.",
            highlight=False,
        )
    console.print(f"Done in {result.seconds:.0f} s. What to try next:", highlight=False)
    for command, about in NEXT:
        console.print(f"  {command:{max(len(words) for words, _ in NEXT)}}  # {about}", markup=False, highlight=False)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options except `--json`, which every command has."""
    default = DemoConfig()

    def add(flag: str, value: int, about: str, kind: Callable[[str], int] = positive) -> None:
        parser.add_argument(flag, type=kind, default=value, metavar="N", help=f"{about} (default: {value})")

    add("--steps", default.num_steps, "training steps")
    add("--rounds", default.num_rounds, "steps of each plan in the comparison")
    add("--layers", default.model.num_layers, "transformer layers")
    add("--hidden", default.model.hidden, f"hidden size, a multiple of {default.model.num_heads}")
    add("--seq-len", default.model.seq_len, "bytes per sample")
    add("--batch-size", default.batch_size, "samples per step")
    add("--devices", 8, "virtual CPU devices; 0: those at hand", count)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and print. The exit code is 1 if alpa_lite raises an error, which is printed."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = SuggestingParser(prog="alpa-lite demo", description="Plan, train and compare on this machine.")
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and everything else to stderr")
    given = parser.parse_args(words)
    # The number of devices is fixed when JAX starts, which it has in this process; `--devices 0` ends the recursion.
    if given.devices:
        return run_module("alpa_lite.cli.demo", [*words, "--devices", "0"], virtual_environment(given.devices))
    return ended("demo", json_alone(given)(lambda: _run(given)))


def _run(given: argparse.Namespace) -> int:
    # Output that is not a terminal gets a fixed width, so that tables in files do not depend on the caller.
    console = Screen(stderr=given.json, width=None if sys.stdout.isatty() else 120)
    result = run(_config(given), console)
    if given.json:
        print(json.dumps(result.to_json()), file=given.stdout, flush=True)
    return 0


def _config(given: argparse.Namespace) -> DemoConfig:
    """Return the requested sizes. Raises `PlanError` for sizes that no model can have."""
    try:
        model = replace(GPT_SMALL, num_layers=given.layers, hidden=given.hidden, seq_len=given.seq_len)
    except ValueError as error:
        raise PlanError(str(error)) from error
    return DemoConfig(model=model, batch_size=given.batch_size, num_steps=given.steps, num_rounds=given.rounds)


if __name__ == "__main__":
    raise SystemExit(main())
