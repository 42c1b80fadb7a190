"""Compare `Auto` with the plans that a user can write: `python -m benchmarks.never_behind --seconds 600`.

Each case is a model, a batch, a cluster and a limit of memory, drawn at random by its number. Its rivals are all manual
planners and a grid of `Hybrid` plans (pipeline × tensor × data × ZeRO), under every schedule and at every number of
micro-batches that divides the batch. All are priced by the same cost model, so that a faster rival is a plan that the
search did not find. A rival is given all devices, but may leave some of them without work: a pipeline with more stages
than the step has layers, say. So the search may leave devices idle too, as it does for a user.

behind      step seconds of the search over those of the fastest rival, less 1; a case counts above `TOLERANCE`
seconds     that planning by `Auto` took

    python -m benchmarks.never_behind --seconds 600 --first 0 --json
    python -m benchmarks.never_behind --case 17
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import alpa_lite as al
from alpa_lite.api.stages import TracedFunction
from alpa_lite.cli.models.decoders import GPT
from alpa_lite.cli.models.model_parts import Model, Reduction, reduce_losses
from alpa_lite.cli.models.sequential_networks import CNN, MLP
from alpa_lite.cli.models.train import init_state, make_optimizer, make_train_step
from alpa_lite.cli.models.transformer import Transformer
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.errors import AlpaLiteError, InfeasibleError
from alpa_lite.inter_op.microbatch_counts import divisors
from alpa_lite.plan.plan import Plan
from alpa_lite.planners import Auto, Hybrid, Planner
from alpa_lite.planners.auto import SCHEDULES as SEARCHED_SCHEDULES
from alpa_lite.planners.fewer_devices import AS_FAST
from alpa_lite.planners.grid_search import factorisations
from alpa_lite.planners.manual import MANUAL_PLANNERS
from alpa_lite.planners.pipeline import Pipeline
from alpa_lite.schedule import DualPipeV, Interleaved1F1B, Schedule, Wave, ZeroBubbleH2, ZeroBubbleV
from cost_models.cluster import Cluster, with_memory_limit

TOLERANCE = AS_FAST
"""The relative excess above which the search is behind: of plans as fast as the fastest it chooses the simplest."""

SCHEDULES: tuple[Schedule, ...] = (
    *SEARCHED_SCHEDULES, Interleaved1F1B(), ZeroBubbleH2(), ZeroBubbleV(), DualPipeV(), Wave(),
)  # fmt: skip
HOSTS = ("p3.16xlarge", "p4d.24xlarge", "dgx-h100", "g5.48xlarge", "tpu-v4")
BATCHES = (8, 12, 16, 20, 24, 32, 36, 48, 60, 64, 96, 128)
MOST_DEVICES = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step to plan for a cluster.

    Attributes:
        name: the model and its sizes, the batch and the cluster.
        traced: the traced step.
        cluster: the cluster, with the limit of memory.
    """

    name: str
    traced: TracedFunction
    cluster: Cluster

    def plan(self, planner: Planner, num_microbatches: int | str = "auto") -> Plan:
        """Return the plan of a planner. Raises `AlpaLiteError` if there is none."""
        request = self.traced.request(self.cluster, num_microbatches)
        return planner.plan(replace(request, advise=False))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The search and its fastest rival on one case.

    Attributes:
        number: the number of the case.
        case: its name.
        auto: the plan of the search; empty if it found none.
        auto_seconds: step seconds of the search; infinite if it found no plan.
        rival: the fastest rival, with its micro-batches and its schedule; empty if none has a plan.
        rival_seconds: its step seconds; infinite if there is none.
        num_rivals: the rivals that have a plan.
        planning_seconds: seconds that the search took.
        gap: the relative gap that the search proved.
    """

    number: int
    case: str
    auto: str
    auto_seconds: float
    rival: str
    rival_seconds: float
    num_rivals: int
    planning_seconds: float
    gap: float

    @property
    def behind(self) -> float:
        """The relative excess of the search over the fastest rival; 0 where both have no plan."""
        if self.auto_seconds == self.rival_seconds:
            return 0.0
        return self.auto_seconds / self.rival_seconds - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenMLP(Model):
    """A perceptron whose layers have different widths; inputs and targets have the first and the last."""

    widths: tuple[int, ...]

    def init(self, key: jax.Array) -> list[jax.Array]:
        """Draw the weights."""
        keys = jax.random.split(key, len(self.widths) - 1)
        return [
            jax.random.normal(k, pair) * pair[0] ** -0.5 for k, pair in zip(keys, pairwise(self.widths), strict=True)
        ]

    def batch_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the arrays of a batch as shapes."""
        names = {"inputs": self.widths[0], "targets": self.widths[-1]}
        return {name: jax.ShapeDtypeStruct((batch_size, width), jnp.float32) for name, width in names.items()}

    def loss_fn(
        self,
        params: list[jax.Array],
        batch: Mapping[str, jax.Array],
        key: jax.Array | None = None,
        *,
        reduction: Reduction = "mean",
    ) -> jax.Array:
        """Return the squared error."""
        x = batch["inputs"]
        for weights in params:
            x = jnp.tanh(x @ weights)
        return reduce_losses(jnp.square(x - batch["targets"]), reduction)


def mlp(draw: random.Random) -> tuple[str, Model]:
    """Draw a perceptron of equal layers."""
    layers, width = draw.choice((2, 4, 6, 8, 12)), draw.choice((512, 1024, 2048, 4096, 8192))
    model = MLP(in_features=width, hidden=width, out_features=width, num_layers=layers)
    return f"MLP {layers} × {width}", model


def uneven(draw: random.Random) -> tuple[str, Model]:
    """Draw a perceptron of unequal layers."""
    widths = tuple(draw.choice((256, 512, 1024, 3072, 4096, 12288)) for _ in range(draw.randint(3, 9)))
    return f"MLP {'-'.join(map(str, widths))}", UnevenMLP(widths=widths)


def gpt(draw: random.Random) -> tuple[str, Model]:
    """Draw a GPT, written out or as a loop."""
    layers, width, scan = draw.choice((2, 4, 6, 8)), draw.choice((512, 1024, 2048)), draw.random() < 0.5
    length, vocabulary = draw.choice((128, 512, 1024)), draw.choice((1024, 32768))
    model = GPT(
        vocab_size=vocabulary,
        num_layers=layers,
        num_heads=8,
        hidden=width,
        seq_len=length,
        scan_layers=scan,
        remat=draw.random() < 0.3,
        dtype=jnp.bfloat16,
    )
    return f"GPT {layers} × {width}, {length} tokens of {vocabulary}{', loop' if scan else ''}", model


def mixture(draw: random.Random) -> tuple[str, Model]:
    """Draw a mixture of experts."""
    width, number = draw.choice((512, 1024)), draw.choice((4, 8, 16))
    experts = Experts(num_experts=number, group_size=draw.choice((128, 256)), every=draw.choice((1, 2)))
    model = Transformer(
        vocab_size=8192, num_layers=4, hidden=width, num_heads=8, inner=4 * width, seq_len=256, experts=experts
    )
    return f"MoE 4 × {width}, {number} experts", model


def convolutions(draw: random.Random) -> tuple[str, Model]:
    """Draw a convolutional network."""
    size, channels, blocks = draw.choice((32, 64)), draw.choice((32, 64, 128)), draw.choice((2, 3, 4))
    return f"CNN {blocks} × {channels}, {size}²", CNN(image_size=size, channels=channels, num_blocks=blocks)


MODELS: tuple[Callable[[random.Random], tuple[str, Model]], ...] = (mlp, uneven, gpt, mixture, convolutions)


def hosts(draw: random.Random) -> Cluster:
    """Draw a cluster of at most `MOST_DEVICES` devices; some have hosts of two kinds."""
    kind, per_host = draw.choice(HOSTS), draw.choice((1, 2, 4, 6, 8))
    host = al.cluster(kind, num_hosts=1)
    per_host = min(per_host, host.devices_per_host)
    number = draw.randint(1, max(1, MOST_DEVICES // per_host))
    if number == 1 or draw.random() > 0.15:
        return replace(host, devices_per_host=per_host, num_hosts=number)
    older = draw.randint(1, number - 1)
    return Cluster.from_json(
        {
            "name": "mixed",
            "devices_per_host": per_host,
            "inter_host": {"link": "ethernet", "bandwidth_bytes_per_second": 12.5e9},
            "groups": [
                {"device": "a100-sxm-40gb", "num_hosts": number - older, "intra_host": "nvlink3"},
                {"device": "v100-sxm2-32gb", "num_hosts": older, "intra_host": "nvlink2"},
            ],
        }
    )


def drawn(number: int) -> Case:
    """Return the case with a number."""
    draw = random.Random(number)
    name, model = draw.choice(MODELS)(draw)
    size, cluster = draw.choice(BATCHES), hosts(draw)
    optimizer = make_optimizer()
    step = make_train_step(model.loss_fn, optimizer)
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    traced = al.parallelize(step, cache=False).trace(state, model.batch_shapes(size))
    limit = ""
    if draw.random() < 0.4:
        # Between what splitting all state needs at least, and what each device needs for a copy of its own.
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        share = draw.uniform(1.5 / cluster.num_devices, 1.5)
        bytes_ = min(held * share + 64e6, cluster.device.usable_bytes)
        cluster, limit = with_memory_limit(cluster, bytes_), f", {bytes_ / 1e9:.3g} GB each"
    where = f"{cluster.num_hosts} × {cluster.devices_per_host} {cluster.device.name}{limit}"
    return Case(name=f"{name}, batch {size}, {where}", traced=traced, cluster=cluster)


def rivals(cluster: Cluster) -> Iterator[Planner]:
    """Yield all manual planners and the grid of `Hybrid` plans, those with several stages under every schedule."""
    for planner in MANUAL_PLANNERS:
        if isinstance(planner, Pipeline):
            yield from (replace(planner, schedule=schedule) for schedule in SCHEDULES)
        else:
            yield planner
    for degrees in factorisations(cluster.num_devices, max_tensor=cluster.devices_per_host):
        for zero in (0, 1, 3) if degrees.data > 1 else (0,):
            for schedule in SCHEDULES if degrees.pipeline > 1 else SCHEDULES[:1]:
                yield Hybrid(**degrees._asdict(), zero=zero, schedule=schedule)


def fastest(case: Case, until: float) -> tuple[str, float, int]:
    """Return the fastest rival's name and step seconds, and the number of rivals with a plan.

    Each planner is tried at one number of micro-batches drawn at random; then at all others, those of the fastest
    planners first. Stops at `until` of `time.monotonic()`, so that the best are compared even where time is short.
    """
    batch, draw = case.traced.batch, random.Random(case.name)
    counts = divisors(batch.size) if batch is not None else [1]
    fastest_of = dict.fromkeys(rivals(case.cluster), math.inf)
    # A planner with all numbers of micro-batches that are left, in a random order.
    left = {planner: draw.sample(counts, len(counts)) for planner in fastest_of}
    order, name, seconds, number = [*left], "", math.inf, 0
    draw.shuffle(order)
    while order and time.monotonic() < until:
        planner = order.pop(0)
        count = left[planner].pop()
        with suppress(AlpaLiteError):
            plan = case.plan(planner, count)
            number += 1
            taken = plan.prediction.step_seconds
            fastest_of[planner] = min(fastest_of[planner], taken)
            if taken < seconds:
                schedule = f", {plan.schedule}" if len(plan.stages) > 1 else ""
                name, seconds = f"{plan.name}, {count} micro-batches{schedule}", taken
        if not order:
            order = sorted((other for other in left if left[other]), key=fastest_of.__getitem__)
    return name, seconds, number


def outcome(number: int, seconds_per_case: float) -> Outcome:
    """Plan a case by the search and by its rivals."""
    case = drawn(number)
    started = time.monotonic()
    try:
        plan = case.plan(Auto())
        auto, auto_seconds, gap = (
            f"{plan.name}, {len(plan.stages)} stages, {plan.num_microbatches} micro-batches",
            (plan.prediction.step_seconds),
            plan.solver.gap,
        )
    except InfeasibleError:
        auto, auto_seconds, gap = "", math.inf, 0.0
    planned = time.monotonic()
    rival, rival_seconds, num_rivals = fastest(case, planned + seconds_per_case)
    return Outcome(
        number=number,
        case=case.name,
        auto=auto,
        auto_seconds=auto_seconds,
        rival=rival,
        rival_seconds=rival_seconds,
        num_rivals=num_rivals,
        planning_seconds=planned - started,
        gap=gap,
    )


def report(outcomes: list[Outcome]) -> Table:
    """Return the table of all outcomes, the worst first."""
    table = Table("case", "auto ms", "rival ms", "behind", "gap", "planning s", "auto", "fastest rival", "rivals")
    for each in sorted(outcomes, key=lambda one: -one.behind):
        table.add_row(
            f"{each.number}: {each.case}",
            f"{each.auto_seconds * 1e3:.4g}",
            f"{each.rival_seconds * 1e3:.4g}",
            f"{each.behind:+.1%}",
            f"{each.gap:.1%}",
            f"{each.planning_seconds:.1f}",
            each.auto,
            each.rival,
            str(each.num_rivals),
        )
    return table


def main() -> None:
    """Run as many cases as the time allows, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="no case begins after so many seconds")
    parser.add_argument("--per-case", type=float, default=60.0, help="seconds for the rivals of a case")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--json", action="store_true", help="print one line of JSON per case")
    arguments = parser.parse_args()
    console, outcomes, until = Console(width=200), list[Outcome](), time.monotonic() + arguments.seconds
    number = arguments.first if arguments.case is None else arguments.case
    while time.monotonic() < until and (arguments.case is None or not outcomes):
        outcomes.append(found := outcome(number, arguments.per_case))
        line = (
            json.dumps({**asdict(found), "behind": found.behind})
            if arguments.json
            else f"{number}: {found.behind:+.2%}"
        )
        print(line, flush=True)
        number += 1
    console.print(report(outcomes))
    behind = [each for each in outcomes if each.behind > TOLERANCE]
    console.print(f"{len(behind)} of {len(outcomes)} cases behind by more than {TOLERANCE:.1%}.")


if __name__ == "__main__":
    main()
