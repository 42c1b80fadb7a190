"""Searches against each other at equal budgets of seconds: `python -m benchmarks.searchers [--keep]`.

    quality of a plan at a budget      seconds of the best plan of all / seconds of the plan, by the cost model
                                       0 where there is no plan by then
    quality of a search                the mean over the models                                     (quality)

Each search plans each model in a process of its own, from a fresh trace; importing and tracing take no part of the
budget. When the budget is over the search is interrupted as by Ctrl-C: `Auto` then gives the best that it has so far,
and is run once for each budget until it ends in time. All others give nothing, so that one run with the largest budget
tells what they give within the others. All plans are priced by the same cost model, on the same cluster; planning
seconds are those of one core of a machine with other work.

Statements of the lecture that are checked on the way (`statements`):

    one weird trick is found     in the best plan of AlexNet kernels are whole and dense weights are split
    recurrent networks stay      placed without pipelining, several devices take longer than one: each op waits for
                                 the one before, so that distance adds transfers and no speed
    no pipelining costs          p stages idle (p - 1)/(m + p - 1) of the time with m micro-batches, (p - 1)/p with one,
                                 which takes m p / (m + p - 1) times as long, less what small micro-batches lose
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.cli.bench.entries import Contest, contest_of
from alpa_lite.cli.bench.request import BenchTarget, find_target
from alpa_lite.errors import AlpaLiteError
from alpa_lite.planners import Pipeline
from alpa_lite.planners.by_name import planner_by_name
from benchmarks.charts import Series, lines_svg

RESULTS = Path(__file__).parent / "results" / "searchers.json"
BUDGETS = (3.0, 10.0, 30.0)
"""Seconds of planning."""


class Search(NamedTuple):
    """A planner by its name on the command line, with options; `half` in an option is half of the devices.

    `anytime`: whether it gives the best plan so far when it is interrupted.
    """

    planner: str
    options: tuple[str, ...] = ()
    anytime: bool = False


SEARCHERS: Mapping[str, Search] = {
    "Auto": Search("auto", anytime=True),
    "grid search": Search("grid_search"),
    "AxoNN": Search("axonn"),
    "ColocRL": Search("coloc_rl"),
    "FlexFlow": Search("flexflow"),
    "PipeDream": Search("pipedream"),
    "Mesh-TensorFlow": Search("mesh_tensorflow", ("layout=auto", "mesh=rows:2;cols:{half}")),
    "TorchGPipe": Search("torchgpipe", ("pipeline=4",)),
}
"""The searches by the names in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and the cluster that it is planned for."""

    target: Callable[[], BenchTarget]
    cluster: str
    num_hosts: int = 1

    def contest(self) -> Contest:
        """Trace the model."""
        return contest_of(self.target(), al.cluster(self.cluster, num_hosts=self.num_hosts))


def inception(num_samples: int = 256, image_size: int = 64, channels: int = 64, num_blocks: int = 3) -> BenchTarget:
    """Return a step of a network of parallel branches as in Szegedy et al. (2015): 1 × 1, 3 × 3, 5 × 5, and pooling."""

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    def step(params: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            x = convolve(batch["images"], params["stem"])
            for block in params["blocks"]:
                pooled = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
                branches = [convolve(x, block["one"]), convolve(pooled, block["pool"])]
                branches += [convolve(convolve(x, block[f"in{size}"]), block[f"out{size}"]) for size in (3, 5)]
                x = jnp.concatenate(branches, axis=-1)
            scores = jax.nn.log_softmax(jnp.mean(x, axis=(1, 2)) @ params["dense"])
            return -jnp.mean(jnp.take_along_axis(scores, batch["labels"][:, None], axis=1))

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    def weights(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    c = channels
    block = {"one": weights(1, 1, 4 * c, c), "pool": weights(1, 1, 4 * c, c)}
    block |= {f"in{size}": weights(1, 1, 4 * c, c) for size in (3, 5)}
    block |= {f"out{size}": weights(size, size, c, c) for size in (3, 5)}
    params = {"stem": weights(3, 3, 3, 4 * c), "blocks": [block] * num_blocks, "dense": weights(4 * c, 1000)}
    images = jax.ShapeDtypeStruct((num_samples, image_size, image_size, 3), jnp.float32)
    arguments = params, {"images": images, "labels": jax.ShapeDtypeStruct((num_samples,), jnp.int32)}
    return BenchTarget(name="inception", step=step, arguments=arguments, values=lambda: ())


TASKS: Mapping[str, Task] = {
    "AlexNet": Task(target=lambda: find_target("alexnet"), cluster="p3.16xlarge"),
    "VGG-16": Task(target=lambda: find_target("vgg16"), cluster="p3.16xlarge", num_hosts=2),
    "Inception": Task(target=inception, cluster="g5.12xlarge"),
    "NMT": Task(target=lambda: find_target("nmt", 256), cluster="g5.12xlarge"),
    "GPT": Task(target=lambda: find_target("gpt-350M", 64), cluster="p3.16xlarge"),
    "experts": Task(target=lambda: find_target("moe-380M", 64), cluster="p3.16xlarge", num_hosts=2),
}
"""The models, on 4 to 16 devices."""


AGAIN_SECONDS = 1.0
"""Seconds after which a search that runs on is interrupted again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRow:
    """A search of a model within a budget.

    Attributes:
        model, searcher: their names.
        budget_seconds: the budget.
        planning_seconds: seconds until there was a plan, or no plan.
        step_seconds: seconds of a step of the plan; None where there is none.
        plan: name of the plan; a sentence where there is none.
    """

    model: str
    searcher: str
    budget_seconds: float
    planning_seconds: float
    step_seconds: float | None
    plan: str


def search(model: str, searcher: str, budget_seconds: float) -> SearchRow:
    """Plan a model within a budget, in this process."""
    task = TASKS[model]
    contest = task.contest()
    chosen, half = SEARCHERS[searcher], contest.cluster.num_devices // 2
    planner = planner_by_name(chosen.planner, [option.format(half=half) for option in chosen.options])
    request = replace(contest.traced.request(contest.cluster, "auto"), on_interrupt="best", advise=False)
    started = time.perf_counter()
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    # Python drops an exception that it raises inside a callback of C code; what ends without a plan is asked again.
    signal.setitimer(signal.ITIMER_REAL, budget_seconds, 0.0 if chosen.anytime else AGAIN_SECONDS)
    step_seconds, told = None, ""
    try:
        plan = planner.plan(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        step_seconds, told = plan.prediction.step_seconds, plan.name
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        told = "not within the budget"
    except AlpaLiteError as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        told = str(error)
    row = SearchRow(
        model=model,
        searcher=searcher,
        budget_seconds=budget_seconds,
        planning_seconds=time.perf_counter() - started,
        step_seconds=step_seconds,
        plan=told[:200],
    )
    return row if chosen.anytime else within(row, budget_seconds)


def rows_of(model: str, searcher: str, budgets: Sequence[float]) -> list[SearchRow]:
    """Return a row for each of ascending budgets, from processes of their own."""
    if not SEARCHERS[searcher].anytime:
        last = _alone(model, searcher, budgets[-1])
        return [within(last, budget) for budget in budgets]
    found = list[SearchRow]()
    for budget in budgets:
        ended = found and found[-1].planning_seconds < 0.95 * found[-1].budget_seconds
        found.append(replace(found[-1], budget_seconds=budget) if ended else _alone(model, searcher, budget))
    return found


def within(row: SearchRow, budget_seconds: float) -> SearchRow:
    """Return the row of a smaller budget, of a search that gives nothing before it ends."""
    if row.planning_seconds <= budget_seconds:
        return replace(row, budget_seconds=budget_seconds)
    return replace(
        row,
        budget_seconds=budget_seconds,
        planning_seconds=budget_seconds,
        step_seconds=None,
        plan="not within the budget",
    )


def _alone(model: str, searcher: str, budget: float) -> SearchRow:
    command = [sys.executable, "-m", "benchmarks.searchers", "--one", model, searcher, str(budget)]
    # One core for each search, whatever it could use.
    environment = {**os.environ, "ALPA_LITE_WORKERS": "0", "ALPA_LITE_CACHE": "off"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return SearchRow(**json.loads(done.stdout.splitlines()[-1]))


def quality(rows: Iterable[SearchRow]) -> dict[str, dict[float, float]]:
    """Return the quality of each search at each budget, by the module docstring."""
    rows = [*rows]
    best = {
        model: min(row.step_seconds for row in rows if row.model == model and row.step_seconds is not None)
        for model in {row.model for row in rows if row.step_seconds is not None}
    }

    def at(searcher: str, model: str, budget: float) -> float:
        # A search that is interrupted takes a while to end, and counts when it has.
        ready = (
            row.step_seconds
            for row in rows
            if (row.searcher, row.model) == (searcher, model) and row.planning_seconds <= budget
        )
        found = [seconds for seconds in ready if seconds is not None]
        return best[model] / min(found) if found else 0.0

    models, budgets = dict.fromkeys(row.model for row in rows), sorted({row.budget_seconds for row in rows})
    return {
        name: {budget: fmean(at(name, model, budget) for model in models) for budget in budgets}
        for name in dict.fromkeys(row.searcher for row in rows)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStatement:
    """A statement of the lecture with the two numbers that decide it, and whether it holds."""

    statement: str
    expected: float
    seen: float
    holds: bool


def trick(plan: al.Plan) -> CheckedStatement:
    """Return the share of the numbers in weights of a convolutional network that lie as one weird trick lays them.

    That is kernels, which have four dims, whole, and dense weights, which have two, split. Only few may lie otherwise.
    """
    sizes, as_told = list[int](), list[int]()
    for stage in plan.stages:
        for name, spec in stage.specs.items():
            dims = stage.shapes[name].dims
            if "/params/" in name and len(dims) in (2, 4):
                sizes.append(prod(dims))
                as_told.append(sizes[-1] * (bool(spec.axes) == (len(dims) == 2)))
    share = sum(as_told) / sum(sizes)
    return CheckedStatement(
        statement="AlexNet: share of the numbers in weights that lie as one weird trick lays them",
        expected=1.0,
        seen=share,
        holds=share > 0.95,
    )


def statements() -> list[CheckedStatement]:
    """Check the statements of the lecture on plans."""
    alexnet, nmt, gpt = (TASKS[name].contest() for name in ("AlexNet", "NMT", "GPT"))
    found = [trick(alexnet.plan(planner_by_name("auto", []), "auto"))]
    alone = replace(nmt, cluster=nmt.cluster.at(0, 1))
    one, placed = (
        contest.plan(Pipeline(pipeline=stages), 1).prediction.step_seconds
        for contest, stages in ((alone, 1), (nmt, nmt.cluster.num_devices))
    )
    found.append(
        CheckedStatement(
            statement="NMT in stages without pipelining, relative to one device",
            expected=1.0,
            seen=placed / one,
            holds=placed >= one,
        )
    )
    stages, count = 4, 16
    # One device per stage, so that only the pipeline differs.
    four = replace(gpt, cluster=gpt.cluster.at(0, stages))
    plans = {m: four.plan(Pipeline(pipeline=stages), m).prediction for m in (1, count)}
    for m, prediction in plans.items():
        idle = (stages - 1) / (m + stages - 1)
        found.append(
            CheckedStatement(
                statement=f"GPT in {stages} stages with {m} micro-batch{'es' * (m > 1)}: share of time that is idle",
                expected=idle,
                seen=prediction.bubble_fraction,
                # Updates keep all stages at work at the same time, which the formula leaves out.
                holds=abs(prediction.bubble_fraction - idle) < 0.1,
            )
        )
    slower, most = plans[1].step_seconds / plans[count].step_seconds, count * stages / (count + stages - 1)
    found.append(
        CheckedStatement(
            statement=f"GPT in {stages} stages: one micro-batch relative to {count}",
            expected=most,
            seen=slower,
            holds=1 < slower <= most,
        )
    )
    return found


def rendered(rows: Sequence[SearchRow]) -> Table:
    """Return the table: milliseconds of a step of the plan within the largest budget, and seconds of planning."""
    last = max(row.budget_seconds for row in rows)
    models = [*dict.fromkeys(row.model for row in rows)]
    table = Table("search", *models)
    for column in table.columns[1:]:
        column.justify = "right"
    for searcher in dict.fromkeys(row.searcher for row in rows):
        of = {row.model: row for row in rows if row.searcher == searcher and row.budget_seconds == last}
        table.add_row(searcher, *(_cell(of[model]) for model in models))
    return table


def _cell(row: SearchRow) -> str:
    if row.step_seconds is None:
        return f"– ({row.planning_seconds:.1f} s)"
    return f"{1e3 * row.step_seconds:.1f} ms ({row.planning_seconds:.1f} s)"


def chart() -> str:
    """Return a chart of the kept results: the quality of each search at each budget."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    found = quality(SearchRow(**row) for row in kept["rows"])
    budgets = sorted({budget for of in found.values() for budget in of})
    series = [Series(name=name, values=tuple(100 * of[budget] for budget in budgets)) for name, of in found.items()]
    return lines_svg(budgets, series, axis="seconds of planning", unit="% of the best plan's speed")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, plan, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.searchers", description="Searches at equal budgets.")
    parser.add_argument("--models", nargs="+", default=[*TASKS], choices=[*TASKS], help="models to plan")
    parser.add_argument("--searchers", nargs="+", default=[*SEARCHERS], choices=[*SEARCHERS], help="searches to run")
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS, help="seconds, ascending")
    parser.add_argument("--keep", action="store_true", help=f"write the results to {RESULTS.name}")
    parser.add_argument("--statements", action="store_true", help="check the statements of the lecture alone")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "SEARCHER", "SECONDS"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        model, searcher, budget = given.one
        print(json.dumps(asdict(search(model, searcher, float(budget)))))
        return 0
    console, rows = Console(width=None if sys.stdout.isatty() else 160), list[SearchRow]()
    if not given.statements:
        for model in given.models:
            for searcher in given.searchers:
                rows += rows_of(model, searcher, given.budgets)
                console.print(f"{model}, {searcher}: {_cell(rows[-1])}, {rows[-1].plan}", markup=False)
        console.print(rendered(rows))
        for name, of in quality(rows).items():
            console.print(f"{name:16} " + "  ".join(f"{budget:g} s: {100 * q:.0f} %" for budget, q in of.items()))
    checked = statements()
    for each in checked:
        answer = "holds" if each.holds else "DOES NOT HOLD"
        console.print(f"{each.statement}: {each.expected:.3g} expected, {each.seen:.3g} seen: {answer}")
    if given.keep and rows:
        kept = {"rows": [asdict(row) for row in rows], "statements": [asdict(each) for each in checked]}
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
