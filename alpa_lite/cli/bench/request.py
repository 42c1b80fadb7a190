"""The request of a comparison: models and planners by name, and the options of `alpa-lite bench` that name them.

- Models are those of this repository (`ZOO`), those of Alpa's evaluation (`ALPA`), or a function of the user.
- Planners are named with options: `auto,pipeline:pipeline=4,hybrid:pipeline=2:tensor=2`, or `all`. The last of a list
  may be the settings of a trainer: `auto,megatron:--tensor-model-parallel-size 8`. `all` is the search, the search with
  one level only, and every other planner of the command line: with its default options or, where its degrees are
  options, with each that the cluster has room for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import alpa_lite as al
from alpa_lite.cli.command import count, positive, suggests
from alpa_lite.cli.models.alpa_cases import CASES, PUBLISHED, Case
from alpa_lite.cli.models.batches import draw_batch
from alpa_lite.cli.models.decoders import Llama
from alpa_lite.cli.models.encoders import BERT, Translator
from alpa_lite.cli.models.model_parts import Model, Tree
from alpa_lite.cli.models.sequential_networks import CNN, MLP, alexnet, vgg16
from alpa_lite.cli.models.skip_networks import ResNet, UNet
from alpa_lite.cli.models.train import Adam, init_state, make_train_step
from alpa_lite.cli.models.transformer import Computation, Transformer
from alpa_lite.cli.models.transformer_layers import Experts
from alpa_lite.cli.user_files import load_example, make_planner
from alpa_lite.errors import AlpaLiteError, PlanError
from alpa_lite.planners import Auto, Compiled, Jitted, Planner
from alpa_lite.planners.by_name import FROM_TEXT, PLANNERS, is_settings
from alpa_lite.planners.planner import Replay
from alpa_lite.text import did_you_mean
from cost_models.cluster import Cluster, known_clusters

SMALL = Transformer(
    vocab_size=64,
    num_layers=4,
    hidden=32,
    num_heads=4,
    inner=128,
    seq_len=16,
    computation=Computation(num_segments=4, dtype=jnp.float32),
)
STEADY = replace(SMALL, vocab_size=256, hidden=128, num_heads=8, inner=512, seq_len=128)
"""A model with a step of some tenths of a second on the virtual devices of two cores."""

IN_TWO = replace(SMALL.computation, num_segments=2)
"""Only every second layer has experts, so that there are half as many repetitions to cut between."""

ROUTED = Experts(num_experts=8, top_k=2, group_size=16, every=2)

ZOO: Mapping[str, tuple[Model, int]] = {
    "mlp-tiny": (MLP(in_features=32, hidden=64, out_features=32), 64),
    "cnn-tiny": (CNN(image_size=16, channels=8), 32),
    "gpt-tiny": (SMALL, 32),
    "gpt-steady": (STEADY, 32),
    "moe-tiny": (replace(SMALL, experts=ROUTED, computation=IN_TWO), 32),
    "moe-steady": (replace(STEADY, experts=replace(ROUTED, group_size=128), computation=IN_TWO), 32),
    "llama-tiny": (
        Llama(
            vocab_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            hidden=32,
            inner=96,
            seq_len=16,
            remat=False,
            dtype=jnp.float32,
        ),
        32,
    ),
    "llama-8b": (Llama(scan_layers=True), 256),
    "wrn-tiny": (ResNet(image_size=32, channels=8, width_factor=2, num_classes=16, norm_batch=1), 32),
    "wrn-steady": (ResNet(image_size=64, channels=16, width_factor=2, num_classes=64, norm_batch=1), 32),
    "resnet50": (ResNet(norm_batch=32), 2048),
    "bert-tiny": (BERT(vocab_size=64, num_layers=2, hidden=32, num_heads=2, inner=64, seq_len=16, num_masked=4), 32),
    "bert-large": (BERT(), 1024),
    "alexnet-tiny": (alexnet(image_size=64, width=8, dense=64, num_classes=16), 32),
    "alexnet": (alexnet(), 1024),
    "vgg16-tiny": (vgg16(image_size=32, width=4, dense=64, num_classes=16), 32),
    "vgg16": (vgg16(), 512),
    "unet-tiny": (UNet(image_size=44, channels=4, depth=2), 32),
    "unet": (UNet(), 64),
    "nmt-tiny": (
        Translator(source_vocab=64, target_vocab=64, num_layers=2, hidden=32, source_len=6, target_len=6),
        32,
    ),
    "nmt": (Translator(), 1024),
}
"""Models by name, each with a batch size; the steps use Adam. "steady" ones are large enough to be timed."""

PRESETS = ("gpt-steady", "moe-steady", "wrn-steady")
"""The models that are compared by default."""

ALPA = tuple(case.id for case in PUBLISHED)


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchTarget:
    """A step with its arguments as shapes.

    Attributes:
        values: makes arguments to run it on, in host memory.
        cluster: the cluster that it was published with; None if there is none.
        tflops_per_device: the TFLOPS per device for the seconds of a step; None if its FLOPs have not been counted.
    """

    name: str
    step: Callable[..., Tree]
    arguments: tuple[Tree, ...]
    values: Callable[[], tuple[Tree, ...]]
    keywords: Mapping[str, Tree] = field(default_factory=dict[str, Tree])
    cluster: Cluster | None = None
    tflops_per_device: Callable[[float], float] | None = None


def find_target(name: str, batch_size: int | None = None) -> BenchTarget:
    """Return the step of that name. Raises `PlanError` if there is none, or if its batch cannot be chosen."""
    # A colon is in no name of a model, and always between module and function.
    if ":" in name:
        return _of_user(name, batch_size)
    if name in CASES:
        case = CASES[name]
        return _of_case(case if batch_size is None else replace(case, global_batch=batch_size))
    if name in ZOO:
        model, usual = ZOO[name]
        return _of_model(name, model, batch_size or usual)
    raise PlanError(
        f"There is no model {name!r}.{did_you_mean(name, (*ZOO, *ALPA))} Choose one of {', '.join(ZOO)}; "
        f"one of Alpa's evaluation, {', '.join(ALPA)}; or name a function as MODULE:FUNCTION or FILE.py:FUNCTION that "
        "returns (train_step, args)."
    )


def named_models(names: list[str] | None) -> tuple[str, ...]:
    """Expand names of models: "alpa" to all models of its evaluation, none to the presets."""
    given = [part for name in names or () for part in name.split(",")]
    # A name may be given twice, by itself and as part of "alpa".
    found = [each for name in given for each in (ALPA if name == "alpa" else (name,))]
    return tuple(dict.fromkeys(found)) or PRESETS


def _of_model(name: str, model: Model, batch_size: int) -> BenchTarget:
    optimizer = Adam()

    def values() -> tuple[Tree, ...]:
        state = jax.jit(lambda key: init_state(model.init(key), optimizer))(jax.random.key(0))
        # On the host: a plan places its own copy, and may donate it.
        return jax.device_get(state), draw_batch(model, batch_size)

    # Shapes alone: models of hundreds of billions of weights are planned on a laptop.
    state = jax.eval_shape(lambda: init_state(model.init(jax.random.key(0)), optimizer))
    return BenchTarget(
        name=name,
        step=make_train_step(model.loss_fn, optimizer),
        arguments=(state, dict(model.batch_shapes(batch_size))),
        values=values,
    )


def _of_case(case: Case) -> BenchTarget:
    try:
        arguments, step = case.arguments(), case.train_step()
    # optax is an extra, which only some models of the evaluation need.
    except ImportError as error:
        raise PlanError(
            f"{case.id} trains with an optimizer of optax ({error}). Install it: pip install optax."
        ) from error
    return BenchTarget(
        name=case.id,
        step=step,
        arguments=arguments,
        values=lambda: filled(arguments),
        cluster=case.cluster,
        tflops_per_device=case.tflops_per_device,
    )


def _of_user(name: str, batch_size: int | None) -> BenchTarget:
    if batch_size is not None:
        raise PlanError(f"--batch chooses the batch of a model of the zoo; that of {name!r} is in its arguments.")
    step, arguments, keywords = load_example(name)
    return BenchTarget(name=name, step=step, arguments=arguments, keywords=keywords, values=lambda: filled(arguments))


def filled(tree: Tree) -> Tree:
    """Replace shapes by arrays: small random floats, integers and keys of zero; keep arrays."""
    # Small values, so that losses stay finite whatever the step does with them.
    rng = np.random.default_rng(0)

    def fill(leaf: Tree) -> Tree:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.broadcast_to(jax.random.key(0), leaf.shape)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return (0.02 * rng.standard_normal(leaf.shape, np.float32)).astype(leaf.dtype)
        # Zero is a valid index of every table and a valid label of every classifier.
        return np.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(fill, tree)


SEARCHES = (Auto(), Auto(intra_op_only=True), Auto(inter_op_only=True))
"""The search with both levels, and with each alone."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A planner with its displayed name; without a planner, `problem` is the reason."""

    name: str
    planner: Planner | None = None
    problem: str = ""

    @property
    def searches(self) -> bool:
        """True if it searches, as opposed to a manual plan."""
        return isinstance(self.planner, Auto)

    @property
    def is_auto(self) -> bool:
        """True for the full search."""
        return isinstance(self.planner, Auto) and not (self.planner.intra_op_only or self.planner.inter_op_only)


def check_planners(lists: Sequence[str]) -> None:
    """Raise `PlanError` for unknown names in lists of planners, before anything is measured."""
    for name in (name for text in lists for name in _names(text)):
        if name != "all":
            _named(name)


def named_contenders(lists: Sequence[str], cluster: Cluster) -> tuple[Contender, ...]:
    """Return the planners of lists, "all" among them, without duplicates. Raises `PlanError` for unknown names."""
    names = [name for text in lists for name in _names(text)]
    found = [each for name in names for each in (_all(cluster) if name == "all" else (_named(name),))]
    # Planners are frozen values: equal options make equal planners, whatever the order in which they were given.
    planners = [each.planner for each in found]
    return tuple(each for i, each in enumerate(found) if each.planner is None or each.planner not in planners[:i])


def _names(text: str) -> Iterator[str]:
    """Yield the names of a list. Settings of a trainer have commas of their own: they run to the end of the list."""
    first, comma, rest = text.partition(",")
    name, colon, settings = first.partition(":")
    if colon and name in FROM_TEXT and is_settings(name, settings):
        yield text
        return
    yield first
    if comma:
        yield from _names(rest)


def _named(text: str) -> Contender:
    return _contender(make_planner(text, ()))


def _all(cluster: Cluster) -> Iterator[Contender]:
    # First, so that a long comparison has the search's plans early.
    yield from map(_contender, SEARCHES)
    for name, kind in PLANNERS.items():
        # The variants of the search are in `SEARCHES`; models of this command name no shardings.
        if kind in (Auto, Jitted, Compiled):
            continue
        for options in _degrees(name, cluster):
            shown = name + "".join(f":{key}={value}" for key, value in options.items())
            try:
                yield _contender(kind(**options))
            except (TypeError, AlpaLiteError) as error:  # an option without a default, or one that it refuses
                yield Contender(name=shown, problem=f"It cannot be made without options: {error}")


def _degrees(name: str, cluster: Cluster) -> Sequence[Mapping[str, int | float]]:
    """Return the sets of options of a planner, each of which is one contender."""
    # Degrees that divide the devices: others leave devices idle or are refused.
    total = cluster.num_devices
    ways = [n for n in range(2, total + 1) if total % n == 0]
    if name in ("pipeline", "torchgpipe"):
        return [{"pipeline": n} for n in ways] or [{}]
    if name == "convolution_parallel":
        # One degree for each dim: the combinations of several are too many to compare.
        return [{}, *({dim: ways[0]} for dim in ("height", "width", "channel", "filter") if ways)]
    # Tensor parallelism sends at every layer, which seldom pays between hosts.
    if name == "megatron":
        return [{"tensor": n} for n in ways if n <= cluster.devices_per_host] or [{}]
    if name == "zero":
        return [{"stage": 1}, {"stage": 2}]
    if name == "hybrid":
        # All degrees that fill the cluster; tensor parallelism stays inside of a host, as in Megatron-LM.
        both = [(p, t) for p in ways for t in ways if total % (p * t) == 0 and t <= cluster.devices_per_host]
        return [{"pipeline": p, "tensor": t, "data": total // (p * t)} for p, t in both]
    return [{}]


def _contender(planner: Planner | al.Plan) -> Contender:
    found = Replay(saved=planner) if isinstance(planner, al.Plan) else planner
    # A search that may run plans says so in its name: its time of planning cannot be compared with the others.
    top = found.measure_top if isinstance(found, Auto) else 0
    return Contender(name=f"{found.name}, best of {top} measured" if top else found.name, planner=found)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add all options except `--json`, which every command has."""
    model = parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"{', '.join(ZOO)}; a model of Alpa's evaluation such as gpt-2.6B, or alpa for all; or MODULE:FUNCTION or "
        "FILE.py:FUNCTION. Several are allowed (default: GPT, mixture of experts and Wide-ResNet of laptop size)",
    )
    suggests(model, (*ZOO, *ALPA, "alpa"))
    cluster = parser.add_argument(
        "--cluster", metavar="NAME[:HOSTS]", help="local (default), a known cluster, or a .json file"
    )
    suggests(cluster, ("local", *known_clusters()))
    planners = parser.add_argument(
        "--planners",
        action="append",
        metavar="LIST",
        help=f"all (default), or some of {', '.join(PLANNERS)} with options, as auto,pipeline:pipeline=4; last in a "
        f"list, what another program has written ({', '.join(FROM_TEXT)}), as megatron:FLAGS. Several lists are joined",
    )
    suggests(planners, ("all", *PLANNERS))
    parser.add_argument("--batch", type=positive, metavar="N", help="samples per step (default: as the model says)")
    counts = parser.add_argument(
        "--num-microbatches", default="auto", metavar="LIST", help='numbers, or "auto" (default: auto)'
    )
    suggests(counts, ("auto",))
    parser.add_argument(
        "--steps", type=count, metavar="N", help="steps of each plan to measure (default: 3 to 9, for about 20 s)"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--measure", action="store_true", help="run the plans in turn (default on this machine)")
    how.add_argument("--simulate", action="store_true", help="price the plans only")
    parser.add_argument(
        "--devices", type=count, default=8, metavar="N", help="virtual CPU devices; 0: those at hand (default: 8)"
    )
    parser.add_argument(
        "--calibrate",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds to measure the devices; 0: as known (default: 10)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="keep rows.jsonl, report.html and a chart per model")
    parser.add_argument(
        "--fail-above", type=float, metavar="R", help="exit with 1 where auto / best manual plan is above this"
    )
