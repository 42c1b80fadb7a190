"""`alpa-lite plan`: plan a train step for a cluster, compare clusters, and show the cost of pins.

Pins are read from a YAML file, which gives the sharding of some arguments in the form of `inter_op.plan_request`:

# an axis, a list of axes, or null for each dim
state/params/head: [null, model]
layers/0/w: [[replica, data], null]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

import alpa_lite as al
from alpa_lite.api.stages import PlannedFunction
from alpa_lite.cli.command import Command, answer, check_writable, suggests, writing
from alpa_lite.cli.exit_codes import Exit
from alpa_lite.cli.user_step import load_example
from alpa_lite.errors import AlpaLiteError, InfeasibleError, PlanError
from alpa_lite.inspection.text.progress_bar import planning_progress
from alpa_lite.inspection.text.tables import plan_summary
from alpa_lite.inspection.why.what_if import Candidate, ClusterComparison, PinsCost, varied
from alpa_lite.inter_op.plan_request import pinned_axes, pinned_specs
from alpa_lite.planners.by_name import PLANNERS, options_of, planner_by_name
from alpa_lite.program.phases import StepGraph
from alpa_lite.text import read_bytes
from cost_models.cluster import Cluster, known_clusters

if TYPE_CHECKING:
    import yaml

_MAX_BYTES = 256 * 2**10  # thousands of pins, which take a second to read
_TAG = "tag:yaml.org,2002:"

_FORM = "write PATH: [AXIS, ...], with an axis, a list of axes or null for each dim, as `params/w: [null, model]`"


@dataclass(frozen=True, kw_only=True)
class PinFile:
    """The pins of a file.

    path     the file
    pins     for each argument's path, one entry per dim: an axis, a tuple of axes, or None
    lines    the line of the file on which each pin stands, from 1
    """

    path: Path
    pins: Mapping[str, tuple[Any, ...]]
    lines: Mapping[str, int]

    def check(self, step: StepGraph, *, axes_of_search: bool) -> None:
        """Raise `PlanError`, with the line, for a pin that fits no argument of a step or has an unknown axis.

        axes_of_search: whether the axes are those of the search, not of a mesh that the user gave.
        """
        for name, dims in self.pins.items():
            try:
                pinned_specs(step, {name: dims})
                if axes_of_search:
                    pinned_axes({name: dims})
            except PlanError as error:
                raise PlanError(f"{self.path}, line {self.lines[name]}: {error}") from error


def read_pins(path: str | Path) -> PinFile:
    """Read the pins of a file. Raises `PlanError`, with the line, if it is not YAML or holds no pins."""
    import yaml

    path = Path(path)
    try:
        with path.open("rb") as file:
            # One byte more than allowed shows that there is more, without reading all of it.
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES >> 10} KiB")
        # Nodes instead of values: they know their lines, and a repeated key is seen.
        root = yaml.compose(text.decode("utf-8"), Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise PlanError(f"{path}: this nests too deeply. For each pin {_FORM}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        raise PlanError(f"{path}{where}: this is not YAML ({problem}). For each pin {_FORM}.") from error
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read: {error}. Give a YAML file with pins: {_FORM}.") from error
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise PlanError(f"{path}, line 1: a file of pins holds a mapping, but this is {_kind(root)}. {_FORM}.")
    pins: dict[str, tuple[Any, ...]] = {}
    lines: dict[str, int] = {}
    for key, value in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise PlanError(f"{path}, line {line}: this is {_kind(key)} where a path is needed; {_FORM}.")
        name = str(key.value)
        if name in pins:
            raise PlanError(f"{path}, line {line}: {name!r} is pinned on line {lines[name]} already. Keep one of them.")
        if not _is_list(value):
            raise PlanError(f"{path}, line {line}: the pin of {name!r} is not a list; {_FORM}.")
        pins[name], lines[name] = tuple(_entry(each, f"{path}, line {line}", name) for each in value.value), line
    return PinFile(path=path, pins=pins, lines=lines)


def _entry(node: yaml.Node, where: str, name: str) -> str | tuple[str, ...] | None:
    """Return the axes that split one dim: None, an axis or several."""

    if node.tag == _TAG + "null":
        return None
    nodes: Sequence[yaml.Node] = node.value if _is_list(node) else [node]
    # Unquoted, a number, a date or "yes" is no string in YAML, and so no name of an axis.
    odd = [each for each in nodes if each.tag != _TAG + "str"]
    if odd:
        raise PlanError(f"{where}: the pin of {name!r} has the entry {_kind(odd[0])}; {_FORM}.")
    axes = tuple(str(each.value) for each in nodes)
    return axes if _is_list(node) else axes[0]


def _is_list(node: yaml.Node) -> bool:
    import yaml

    return isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq"


def _kind(node: yaml.Node | None) -> str:
    """Describe a node in words; a scalar is quoted as written."""
    import yaml

    if node is None or not node.value:
        return "empty"
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)[:40]
    return "a mapping" if isinstance(node, yaml.MappingNode) else "a list"


@dataclass(frozen=True, kw_only=True)
class _PlanArguments:
    """The planning that a command line asks for: the step with its arguments, the options, and the progress console."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    planner: al.planners.Planner | al.Plan
    num_microbatches: int | str
    cache: bool
    console: Console

    def planned(self, cluster: Cluster | None, planner: al.planners.Planner | al.Plan | None = None) -> PlannedFunction:
        """Plan for a cluster (None: this machine's devices), by the named planner unless another one is given."""
        with planning_progress(self.console) as progress:
            function = al.parallelize(
                self.step,
                cluster=cluster,
                planner=planner or self.planner,
                num_microbatches=self.num_microbatches,
                progress=progress,
                on_interrupt="best",
                cache=self.cache,
            )
            return function.trace(*self.args, **self.kwargs).plan()


def run_plan(given: argparse.Namespace) -> int:
    """Run `alpa_lite.plan` and return the exit code. Ctrl-C ends the search with the best plan so far, if any."""
    # Before the search, which may take minutes.
    check_writable(given.output)
    step, args, kwargs = load_example(given.step)
    clusters = _clusters(given)
    asked = _PlanArguments(
        step=step,
        args=args,
        kwargs=kwargs,
        planner=make_planner(given.planner, given.option),
        num_microbatches=given.num_microbatches,
        cache=not given.no_cache,
        console=Console(stderr=True, quiet=given.json),
    )
    if isinstance(asked.planner, al.Plan) and (len(clusters) > 1 or given.memory or given.bandwidth_scale):
        raise PlanError(
            "A saved plan keeps its own predictions: --memory, --bandwidth-scale and several clusters need a planner. "
            f"Name one of {', '.join(PLANNERS)} as --planner."
        )
    if len(clusters) > 1:
        return _compare(given, asked, clusters)
    cluster = clusters[0] if clusters else None
    return _plan(given, asked, cluster) if given.pins is None else _plan_with_pins(given, asked, cluster)


def _plan(given: argparse.Namespace, asked: _PlanArguments, cluster: Cluster | None) -> int:
    found = asked.planned(cluster)
    plan = found.last_plan
    _save(given, plan)
    note = "\nThis plan is from the cache; --no-cache plans anew." if found.cached else ""
    text = "" if given.json else f"{plan}{note}"
    answer(given, text, lambda: {"kind": "plan", **plan_summary(plan), "cached": found.cached})
    return Exit.DONE


def _plan_with_pins(given: argparse.Namespace, asked: _PlanArguments, cluster: Cluster | None) -> int:
    file = read_pins(given.pins)
    pinned_planner = _with_pins(asked.planner, file, given.planner)
    # The free plan first: its traced step is needed to check the pins, and its cost to compare with.
    free = asked.planned(cluster)
    file.check(free.function.step(1).step, axes_of_search=isinstance(asked.planner, al.planners.Auto))
    plan = asked.planned(free.last_plan.cluster, pinned_planner).last_plan
    _save(given, plan)
    found = PinsCost(pins=tuple(file.pins), free=free.last_plan, pinned=plan)
    text = "" if given.json else str(found)
    answer(given, text, lambda: {"kind": "pins", **plan_summary(plan), **found.to_json()})
    return Exit.DONE


def _with_pins(planner: al.planners.Planner | al.Plan, file: PinFile, name: str) -> al.planners.Planner:
    """Return the planner with the pins of a file. Raises `PlanError` for a planner that takes no pins."""
    if isinstance(planner, (al.planners.Auto, al.planners.OnMesh)):
        return replace(planner, pins=file.pins)
    taking = [known for known, kind in PLANNERS.items() if "pins" in options_of(kind)]
    raise PlanError(f"--pins was given, but the planner {name!r} takes none: use {' or '.join(taking)}.")


def _compare(given: argparse.Namespace, asked: _PlanArguments, clusters: Sequence[Cluster]) -> int:
    for option in ("output", "pins"):
        if getattr(given, option) is not None:
            raise PlanError(
                f"--{option} is for one plan, but --cluster was given {len(clusters)} times. Leave one out."
            )
    candidates, infeasible = list[Candidate](), False
    for cluster in clusters:
        try:
            candidates.append(Candidate(cluster=cluster, plan=asked.planned(cluster).last_plan))
        except AlpaLiteError as error:
            # One cluster without a plan must not hide the results of the others.
            candidates.append(Candidate(cluster=cluster, plan=None, problem=str(error)))
            infeasible |= isinstance(error, InfeasibleError)
    found = ClusterComparison(candidates=tuple(candidates))
    answer(given, found, lambda: {"kind": "clusters", **found.to_json()})
    return Exit.DONE if found.fastest is not None else Exit.INFEASIBLE if infeasible else Exit.ERROR


def _clusters(given: argparse.Namespace) -> list[Cluster]:
    """Return the named clusters with the changes that were asked for; an empty list means this machine unchanged."""
    changes = {"memory_bytes": given.memory, "bandwidth_scale": given.bandwidth_scale}
    if given.cluster:
        return [varied(al.cluster(name, num_hosts=given.num_hosts), **changes) for name in given.cluster]
    if given.num_hosts is not None:
        raise PlanError("--num-hosts says how many hosts a described cluster has: give --cluster as well.")
    return [varied(al.local_cluster(), **changes)] if any(value is not None for value in changes.values()) else []


def _save(given: argparse.Namespace, plan: al.Plan) -> None:
    if given.output is not None:
        with writing(given.output):
            plan.save(given.output)


def make_planner(name: str, options: Sequence[str]) -> al.planners.Planner | al.Plan:
    """Return the planner of that name with `name=value` options, or the plan of a `.json` file, which is replayed.

    Raises `PlanError` for an unknown name or option.
    """
    if name.endswith(".json"):
        return al.Plan.load(name)
    return planner_by_name(name, options)


def _count_or_auto(text: str) -> int | str:
    # A negative number passes here: planning refuses it, in the words of its own error.
    if text != "auto" and not text.lstrip("-").isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} was given; it must be a whole number or "auto"')
    return text if text == "auto" else int(text)


def _memory(text: str) -> float:
    try:
        return read_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no amount of memory: write 40GB, 40GiB or a number") from error


def add_planner(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--planner` and `--option`."""
    planner = parser.add_argument(
        "--planner",
        default=default,
        metavar="NAME",
        help=f"{', '.join(PLANNERS)}, or a saved plan (default: {default or 'as decorated, else auto'})",
    )
    suggests(planner, tuple(PLANNERS))
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="option of the planner, e.g. pipeline=4"
    )


def add_microbatches(parser: argparse.ArgumentParser, default: str | None) -> None:
    """Add `--num-microbatches`."""
    count = parser.add_argument(
        "--num-microbatches", type=_count_or_auto, default=default, metavar="N", help='a number, or "auto"'
    )
    suggests(count, ("auto",))


STEP_HELP = "or FILE.py:FUNCTION: returns (train_step, args) or (train_step, args, kwargs)"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "step",
        metavar="MODULE:FUNCTION",
        help=STEP_HELP,
    )
    cluster = parser.add_argument(
        "--cluster",
        action="append",
        default=[],
        metavar="NAME[:HOSTS]",
        help="a known cluster or a .json file, with its number of hosts (default: this machine's devices); several are "
        "compared",
    )
    suggests(cluster, known_clusters())
    parser.add_argument("--num-hosts", type=int, metavar="N", help="hosts of each cluster (default: as described)")
    parser.add_argument(
        "--memory", type=_memory, metavar="SIZE", help="what if each device had this much memory, as 40GB"
    )
    parser.add_argument(
        "--bandwidth-scale", type=float, metavar="X", help="what if all links had X times their bandwidth, as 0.5"
    )
    add_planner(parser, "auto")
    parser.add_argument(
        "--pins", type=Path, metavar="FILE.yaml", help="the sharding of some arguments; prints its cost as well"
    )
    add_microbatches(parser, "auto")
    parser.add_argument("--no-cache", action="store_true", help="plan anew even if this plan was made before")
    parser.add_argument("--output", type=Path, metavar="PLAN.json", help="save the plan")


PLAN = Command(
    name="plan",
    about="plan a train step for a cluster, or compare clusters",
    example="train.py:example --cluster p3.16xlarge --output plan.json",
    run=run_plan,
    add_arguments=_arguments,
)
